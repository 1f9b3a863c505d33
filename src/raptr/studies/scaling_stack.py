"""The stack of layers of the paper's theorem on square-root scaling, and what one layer does to norms.

Shapes: N tokens of one sequence, D width, F width of the MLP.

The paper writes its initial weights as N(0, 1/√d·I) and N(0, √2/√m·I). Read as deviations, these give the lemmas'
norms: of the m entries of W·x half survive ReLU, with ‖x‖²/m each on average, and C keeps the norm. Read as variances,
the MLP multiplies norms by (m·d/2)^¼. One case shows it; all others have deviations. The scores of attention are not
divided by √d in the paper, those of real models are; a case divides them. The MLP is 4d wide; the paper names no width.
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

LONG = 10  # a long input has this norm times d
DRAWS = 100  # of the weights of an MLP alone
QUANTITIES = ("norm", "mlp", "attention", "layer")


@dataclass(frozen=True)
class Case:
    """A stack of layers of the theorem."""

    scalars: Literal["one", "random", "sqrt"] = "one"
    inputs: Literal["independent", "equal", "long"] = "independent"
    divided: bool = False  # the scores of attention, by √d
    reading: Literal["deviation", "variance"] = "deviation"  # of what the paper writes into N(0, ·)


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
    """Standard normal matrices, to be multiplied by their deviations."""
    shapes = [(width, width)] * 4 + [(4 * width, width), (width, 4 * width)]
    names = [f"scaling.{width}.{layer}.{name}" for name in Weights._fields]
    drawn = [normal(seed, name, math.prod(shape)) for name, shape in zip(names, shapes, strict=True)]
    return Weights(*(torch.from_numpy(one).view(shape).to(device) for one, shape in zip(drawn, shapes, strict=True)))


def initial(drawn: Weights, reading: str) -> Weights:
    """The layer's weights as the paper initializes them."""
    width = len(drawn.query_DD)
    own = [paper(width, len(one) if name == "mlp_in_FD" else None) for name, one in drawn._asdict().items()]
    return Weights(
        *(one * (value if reading == "deviation" else value**0.5) for one, value in zip(drawn, own, strict=True))
    )


def normalised(x_ND: Tensor) -> Tensor:
    """Layer normalization with gain 1 and shift 0."""
    return F.layer_norm(x_ND, x_ND.shape[-1:], eps=0.0)


def branches(x_ND: Tensor, weights: Weights, *, divided: bool) -> tuple[Tensor, Tensor]:
    """What attention and the MLP add to x."""
    normed_ND = normalised(x_ND)
    scores_NN = (normed_ND @ weights.query_DD.T) @ (normed_ND @ weights.key_DD.T).T
    shares_NN = torch.softmax(scores_NN / math.sqrt(x_ND.shape[1]) if divided else scores_NN, dim=-1)
    attention_ND = shares_NN @ (normed_ND @ weights.value_DD.T) @ weights.out_DD.T
    hidden_NF = torch.relu(normalised(x_ND + attention_ND) @ weights.mlp_in_FD.T)
    return attention_ND, hidden_NF @ weights.mlp_out_DF.T


def squared(x: Tensor) -> Tensor:
    """Squared norms, exact enough for differences of large ones."""
    return x.double().square().sum(dim=-1)


def one_layer(x_ND: Tensor, attention_ND: Tensor, mlp_ND: Tensor) -> dict[str, Tensor]:
    """For each token, what the lemmas speak of: two norms as ratios to what they claim, two additions in units of d."""
    middle_ND, width = x_ND + attention_ND, x_ND.shape[1]
    normed_N = squared(normalised(middle_ND))
    return {
        "norm": (normed_N / width).sqrt(),
        "mlp": (squared(mlp_ND) / normed_N).sqrt(),
        "attention": (squared(middle_ND) - squared(x_ND)) / width,
        "layer": (squared(middle_ND + mlp_ND) - squared(x_ND)) / width,
    }


def scalars(case: Case, depth: int, seed: int) -> tuple[float, ...]:
    """All one, drawn from 0 to 2, or of a random half of the layers, the first and the last among them."""
    if case.scalars == "sqrt":
        return square_root(random_part(depth, depth // 2, seed)[0])
    drawn = [2 * unit(bits(seed, "init", layer)) for layer in range(depth)]
    return tuple(drawn) if case.scalars == "random" else (1.0,) * depth


def sequence(case: Case, width: int, tokens: int, seed: int, device: str) -> Tensor:
    """Random directions of norm √d, one for each token; or all the same one; or of a norm far above d."""
    drawn = torch.from_numpy(normal(seed, f"scaling.{width}.inputs", tokens * width)).view(tokens, width).to(device)
    x_ND = F.normalize(drawn, dim=-1) * (LONG * width if case.inputs == "long" else math.sqrt(width))
    return x_ND[:1].repeat(tokens, 1) if case.inputs == "equal" else x_ND


def stacks(width: int, depth: int, tokens: int, seed: int, device: str) -> dict[str, Any]:
    """Every case through the same layers of normal numbers: the theorem's sums, and each layer by itself."""
    alphas = {name: scalars(case, depth, seed) for name, case in CASES.items()}
    starts = {name: sequence(case, width, tokens, seed, device) for name, case in CASES.items()}
    states, sums = dict(starts), dict.fromkeys(CASES, 0.0)
    found: dict[str, dict[str, Any]] = {name: {"added": [], "alike": [], "layers": []} for name in CASES}
    for layer in range(depth):
        drawn = normals(seed, width, layer, device)
        read = {reading: initial(drawn, reading) for reading in ("deviation", "variance")}
        for name, case in CASES.items():
            if alpha := alphas[name][layer]:
                attention_ND, mlp_ND = branches(states[name], read[case.reading], divided=case.divided)
                alone = one_layer(states[name], attention_ND, mlp_ND)
                found[name]["layers"].append({key: _range(values) for key, values in alone.items()})
                found[name]["layers"][-1]["falls"] = (alone["attention"] < 0).double().mean().item()
                states[name] = states[name] + alpha * (attention_ND + mlp_ND)
                sums[name] += alpha**2
            added_N = (squared(states[name]) - squared(starts[name])) / (width * sums[name])
            found[name]["added"].append(_range(added_N))
            found[name]["alike"].append(alike(states[name]))
    return found


def mlp_spread(width: int, hidden: int, seed: int, device: str) -> float:
    """The standard deviation of the ratio of norms of an MLP of m hidden units, over draws of its weights."""
    ratios = []
    for draw in range(DRAWS):
        first_FD, last_DF = (
            torch.from_numpy(normal(seed, f"scaling.mlp.{hidden}.{draw}.{name}", hidden * width)).to(device)
            for name in ("in", "out")
        )
        weights_FD = first_FD.view(hidden, width) * paper(width, hidden)
        hidden_F = torch.relu(
            weights_FD.sum(dim=1)
        )  # the input is all ones, whose norm is √d; rotations change nothing
        output_D = last_DF.view(width, hidden) @ hidden_F * paper(width)
        ratios.append(output_D.norm().item() / math.sqrt(width))
    return mean_and_deviation(ratios)[1]


def alike(x_ND: Tensor) -> float:
    """The mean cosine between two different tokens."""
    tokens = len(x_ND)
    total = squared(F.normalize(x_ND, dim=-1).sum(dim=0)).item()
    return (total - tokens) / (tokens * (tokens - 1))


def _range(values: Tensor) -> list[float]:
    """The mean, the least and the largest."""
    return [values.mean().item(), values.min().item(), values.max().item()]
