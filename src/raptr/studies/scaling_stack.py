"""The stack of layers in the paper's theorem on square-root scaling, and how one layer changes norms.

Shapes: N tokens of one sequence, D width, F width of the MLP.

The paper writes its initial weights as N(0, 1/√d·I) and N(0, √2/√m·I). Read as standard deviations, these give the
norms of the lemmas: an MLP with m hidden units computes C·ReLU(W·x), where on average ReLU halves the squared norm of
W·x, 2‖x‖², and C keeps the norm. Read as variances, the MLP multiplies norms by (m·d/2)^¼. One case shows this; all
others use standard deviations. The paper does not divide attention scores by √d, as real models do; one case does. The
MLP is 4d wide; the paper names no width.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from raptr.hashing import bits, unit
from raptr.methods.contract import random_part
from raptr.models.init import normal, paper
from raptr.studies.contract import mean_and_deviation
from raptr.subnetworks.scaling import square_root

LONG = 10  # norm of a long input, in units of d
DRAWS = 100  # draws of an MLP's weights, in `mlp_spread`
QUANTITIES = ("norm", "mlp", "attention", "layer")


@dataclass(frozen=True)
class Case:
    """A variant of the theorem's stack of layers."""

    scalars: Literal["one", "random", "sqrt"] = "one"
    inputs: Literal["independent", "equal", "long"] = "independent"
    divided: bool = False  # whether attention scores are divided by √d
    reading: Literal["deviation", "variance"] = "deviation"  # how to read the second argument of the paper's N(0, ·)


CASES = {
    "all one": Case(),
    "random scalars": Case(scalars="random"),
    "square root": Case(scalars="sqrt"),
    "divided scores": Case(divided=True),
    "equal tokens": Case(inputs="equal"),
    "long inputs": Case(inputs="long"),
    "read as variances": Case(reading="variance"),
}


class Weights(NamedTuple):
    """The matrices of one layer of the theorem."""

    query_DD: Tensor
    key_DD: Tensor
    value_DD: Tensor
    out_DD: Tensor
    mlp_in_FD: Tensor
    mlp_out_DF: Tensor


def normals(seed: int, width: int, layer: int, device: str) -> Weights:
    """Return a layer's matrices of standard normal numbers, still to be multiplied by their deviations."""
    shapes = [(width, width)] * 4 + [(4 * width, width), (width, 4 * width)]
    names = [f"scaling.{width}.{layer}.{name}" for name in Weights._fields]
    drawn = [normal(seed, name, math.prod(shape)) for name, shape in zip(names, shapes, strict=True)]
    return Weights(
        *(torch.from_numpy(numbers).view(shape).to(device) for numbers, shape in zip(drawn, shapes, strict=True))
    )


def initial(drawn: Weights, reading: str) -> Weights:
    """Return a layer's weights as the paper initializes them."""
    width = len(drawn.query_DD)
    deviations = [
        paper(width, len(matrix) if name == "mlp_in_FD" else None) for name, matrix in drawn._asdict().items()
    ]
    return Weights(
        *(
            matrix * (value if reading == "deviation" else value**0.5)
            for matrix, value in zip(drawn, deviations, strict=True)
        )
    )


def normalised(x_ND: Tensor) -> Tensor:
    """Apply layer normalization with gain 1 and bias 0."""
    return F.layer_norm(x_ND, x_ND.shape[-1:], eps=0.0)


def branches(x_ND: Tensor, weights: Weights, *, divided: bool) -> tuple[Tensor, Tensor]:
    """Return what attention and the MLP add to x."""
    normed_ND = normalised(x_ND)
    scores_NN = (normed_ND @ weights.query_DD.T) @ (normed_ND @ weights.key_DD.T).T
    shares_NN = torch.softmax(scores_NN / math.sqrt(x_ND.shape[1]) if divided else scores_NN, dim=-1)
    attention_ND = shares_NN @ (normed_ND @ weights.value_DD.T) @ weights.out_DD.T
    hidden_NF = torch.relu(normalised(x_ND + attention_ND) @ weights.mlp_in_FD.T)
    return attention_ND, hidden_NF @ weights.mlp_out_DF.T


def squared(x: Tensor) -> Tensor:
    """Return squared norms in float64, precise enough for differences between large ones."""
    return x.double().square().sum(dim=-1)


def one_layer(x_ND: Tensor, attention_ND: Tensor, mlp_ND: Tensor) -> dict[str, Tensor]:
    """Return, for each token, the quantities of the lemmas.

    These are two norms relative to what the lemmas claim, and two increases of the squared norm in units of d.
    """
    middle_ND, width = x_ND + attention_ND, x_ND.shape[1]
    normed_N = squared(normalised(middle_ND))
    return {
        "norm": (normed_N / width).sqrt(),
        "mlp": (squared(mlp_ND) / normed_N).sqrt(),
        "attention": (squared(middle_ND) - squared(x_ND)) / width,
        "layer": (squared(middle_ND + mlp_ND) - squared(x_ND)) / width,
    }


def scalars(case: Case, depth: int, seed: int) -> tuple[float, ...]:
    """Return the scalar of each layer: 1, or drawn from 0 to 2, or square-root scales of a random subnetwork.

    The subnetwork has half of the layers, the first and the last among them.
    """
    if case.scalars == "sqrt":
        return square_root(random_part(depth, depth // 2, seed)[0])
    drawn = [2 * unit(bits(seed, "init", layer)) for layer in range(depth)]
    return tuple(drawn) if case.scalars == "random" else (1.0,) * depth


def sequence(case: Case, width: int, tokens: int, seed: int, device: str) -> Tensor:
    """Return tokens with norm √d in random directions; or all in one direction; or with norm LONG·d."""
    drawn = torch.from_numpy(normal(seed, f"scaling.{width}.inputs", tokens * width)).view(tokens, width).to(device)
    x_ND = F.normalize(drawn, dim=-1) * (LONG * width if case.inputs == "long" else math.sqrt(width))
    return x_ND[:1].repeat(tokens, 1) if case.inputs == "equal" else x_ND


def stacks(width: int, depth: int, tokens: int, seed: int, device: str) -> dict[str, Any]:
    """Run every case through layers of the same numbers; return the theorem's sums and each layer's quantities."""
    alphas = {name: scalars(case, depth, seed) for name, case in CASES.items()}
    starts = {name: sequence(case, width, tokens, seed, device) for name, case in CASES.items()}
    states, sums = dict(starts), dict.fromkeys(CASES, 0.0)
    measured: dict[str, dict[str, Any]] = {name: {"added": [], "alike": [], "layers": []} for name in CASES}
    for layer in range(depth):
        drawn = normals(seed, width, layer, device)
        weights = {reading: initial(drawn, reading) for reading in ("deviation", "variance")}
        for name, case in CASES.items():
            if alpha := alphas[name][layer]:
                attention_ND, mlp_ND = branches(states[name], weights[case.reading], divided=case.divided)
                alone = one_layer(states[name], attention_ND, mlp_ND)
                measured[name]["layers"].append({key: _range(values) for key, values in alone.items()})
                measured[name]["layers"][-1]["falls"] = (alone["attention"] < 0).double().mean().item()
                states[name] = states[name] + alpha * (attention_ND + mlp_ND)
                sums[name] += alpha**2
            added_N = (squared(states[name]) - squared(starts[name])) / (width * sums[name])
            measured[name]["added"].append(_range(added_N))
            measured[name]["alike"].append(alike(states[name]))
    return measured


def mlp_spread(width: int, hidden: int, seed: int, device: str) -> float:
    """Return the deviation, over draws of the weights, of an MLP's ratio of output norm to input norm."""
    ratios = []
    for draw in range(DRAWS):
        first_FD, last_DF = (
            torch.from_numpy(normal(seed, f"scaling.mlp.{hidden}.{draw}.{name}", hidden * width)).to(device)
            for name in ("in", "out")
        )
        weights_FD = first_FD.view(hidden, width) * paper(width, hidden)
        hidden_F = torch.relu(
            weights_FD.sum(dim=1)
        )  # the input is all ones, with norm √d: its direction does not matter
        output_D = last_DF.view(width, hidden) @ hidden_F * paper(width)
        ratios.append(output_D.norm().item() / math.sqrt(width))
    return mean_and_deviation(ratios)[1]


def alike(x_ND: Tensor) -> float:
    """Return the mean cosine between two different tokens."""
    tokens = len(x_ND)
    total = squared(F.normalize(x_ND, dim=-1).sum(dim=0)).item()
    return (total - tokens) / (tokens * (tokens - 1))


def _range(values: Tensor) -> list[float]:
    """Return the mean, the minimum and the maximum."""
    return [values.mean().item(), values.min().item(), values.max().item()]
