"""FLOPs in closed form: matrix products of the forward and the backward pass; a multiply-add counts as 2.

The cost of a layer and of the head comes from the family (`ModelConfig`). The backward pass of every product is two
products of the same size, hence the factor 3: the gradient flows down to the embeddings, so no layer saves one. There
are two counts: the layers alone, which the paper counts, and the whole model with its head, which bounds the speed-up
that can be seen. Normalisation, activation functions, softmax and the optimizer are not counted. A test compares with
`torch.utils.flop_counter`.
"""

from dataclasses import dataclass

from raptr.methods import Method, Phase
from raptr.models.contract import ModelConfig
from raptr.subnetworks import Subnetwork

TRAINING = 3  # forward and backward pass, in units of the forward pass


@dataclass(frozen=True)
class Flops:
    """The FLOPs of the layers alone, and of the whole model."""

    layers: float
    total: float

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(self.layers + other.layers, self.total + other.total)


def flops(config: ModelConfig, subnetwork: Subnetwork, *, sequences: int, length: int, targets: float) -> Flops:
    """Return the cost of a training step that runs `subnetwork` on `sequences` sequences of `length` tokens.

    `targets` is the mean number of positions of a sequence at which the loss is taken.
    """
    layers = 0
    for layer in subnetwork.kept:
        heads = len(subnetwork.heads[layer]) if subnetwork.heads else config.shape.heads
        parts = len(subnetwork.parts[layer]) if subnetwork.parts else config.shape.parts
        layers += config.layer_flops(heads, parts, length)
    head = config.head_flops(targets)
    return Flops(TRAINING * sequences * layers, TRAINING * sequences * (layers + head))


def expected_flops(config: ModelConfig, phase: Phase, *, sequences: int, length: int, targets: float) -> Flops:
    """Return the mean cost of a step of a phase."""
    layers = phase.size * (TRAINING * sequences * config.layer_flops(phase.heads, phase.parts, length))
    return Flops(layers, layers + TRAINING * sequences * config.head_flops(targets))


def planned_flops(config: ModelConfig, method: Method, *, sequences: int, length: int, targets: float) -> Flops:
    """Return the expected cost of a whole run."""
    total = Flops(0, 0)
    for phase in method.phases():
        step = expected_flops(config, phase, sequences=sequences, length=length, targets=targets)
        steps = phase.stop - phase.start
        total += Flops(step.layers * steps, step.total * steps)
    return total
