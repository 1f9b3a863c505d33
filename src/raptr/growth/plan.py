"""The plan of a growth: for each tensor of the larger model, where it comes from. No torch here.

n layers become n' = q·n + r layers in one of these orders; layers count from 0:

    stacked(6, 9)     0 1 2 3 4 5 3 4 5     q copies bottom to top, then the top r layers
    inserted(6, 9)    0 1 2 3 3 4 4 5 5     the same layers, each copy next to its source
    repeated(6, 9)    0 1 2 3 4 5 0 1 2     from the bottom again: layer j comes from layer j mod n
    centred(6, 8)     0 1 2 3 2 3 4 5       the middle n' - n layers a second time, right after the first time

Below a doubling `stacked` appends copies of the last n' - n layers (gradual stacking, Reddi et al. 2023). From a
doubling on it is progressive stacking (Gong et al. 2019) in the formulation of bert2BERT (Chen et al. 2021).
`inserted` is the consecutive insertion of LEMON (Wang et al. 2023). `repeated` is G_stack (Du et al. 2024); it differs
from `stacked` only where r is not 0. `centred` is MIDAS (Saunshi et al. 2024).

A new layer is a copy of its source. With `identity` its output projections are zero instead, so that a pre-LN block is
the identity. Optimizer state moves by a named policy: `copy` (a new tensor has its source's moments and step count),
`zero` (a new layer starts with zero moments and a step count of zero, so that its bias correction is right) or `reset`
(all layers start anew, old ones too). A tensor that is set to zero starts with zero moments under `copy` as well,
because its source's moments belong to other weights.

Heads and MLP parts (units) are added inside tensors, in old and new layers alike: `added(6, 9)` lists the sources of
nine units, None for the three new ones. A new unit has the initial weights of the larger model, zero moments and, if
the optimizer counts steps, a step count of its own that starts at zero.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Moments = Literal["copy", "zero", "reset"]
Units = tuple[int | None, ...]  # the source of each head or MLP part; None: it is new


@dataclass(frozen=True)
class Rule:
    """How one tensor is made: from the smaller model's tensor `source`, its weight or moments set to zero if so marked.

    In a tensor that gets new heads or MLP parts, this applies to those that the smaller model has.
    """

    source: str
    zero_weight: bool
    zero_moments: bool


@dataclass(frozen=True)
class Growth:
    """A growth: each layer's source in the smaller model, and what becomes of weights and optimizer state.

    The first mention of a source is that layer itself, later mentions are new layers. `heads` and `parts` are the
    sources of the heads and MLP parts in every layer; None: they do not change.
    """

    sources: tuple[int, ...]
    identity: bool = False
    moments: Moments = "copy"
    heads: Units | None = None
    parts: Units | None = None

    def __post_init__(self) -> None:
        kept = [source for layer, source in enumerate(self.sources) if layer not in self.new]
        assert kept == list(range(len(kept))), f"{self.sources} drops layers, or changes their order"
        for units in (self.heads or (), self.parts or ()):
            old = [source for source in units if source is not None]
            assert old == list(range(len(old))), f"{units} drops units, repeats them, or changes their order"

    @property
    def new(self) -> tuple[int, ...]:
        """The layers of the larger model that the smaller one does not have."""
        return tuple(layer for layer, source in enumerate(self.sources) if source in self.sources[:layer])

    def rule(self, name: str, *, layers: str, outputs: Sequence[str]) -> Rule:
        """Return how the parameter `name` is made, in a model whose list of layers is called `layers`.

        `outputs` names the modules of a layer that write to the residual stream.
        """
        if not name.startswith(f"{layers}."):
            return Rule(name, zero_weight=False, zero_moments=self.moments == "reset")
        number, inner = name.removeprefix(f"{layers}.").split(".", 1)
        new = int(number) in self.new
        zeroed = new and self.identity and inner.split(".")[0] in outputs
        return Rule(
            source=f"{layers}.{self.sources[int(number)]}.{inner}",
            zero_weight=zeroed,
            zero_moments=self.moments == "reset" or (new and self.moments == "zero") or zeroed,
        )


def added(old: int, new: int) -> Units | None:
    """Return the sources of `new` units: the `old` ones, then None for each new one. None if no unit is new."""
    assert 1 <= old <= new, (old, new)
    return (*range(old), *[None] * (new - old)) if old < new else None


def stacked(old: int, new: int) -> tuple[int, ...]:
    """Return the sources of `new` layers: the `old` ones bottom to top as often as they fit, then the topmost."""
    assert 1 <= old <= new, (old, new)
    copies, rest = divmod(new, old)
    return tuple(range(old)) * copies + tuple(range(old - rest, old))


def inserted(old: int, new: int) -> tuple[int, ...]:
    """Return the sources of `new` layers: those of `stacked`, but with each copy right after its source."""
    return tuple(sorted(stacked(old, new)))


def repeated(old: int, new: int) -> tuple[int, ...]:
    """Return the sources of `new` layers: the `old` ones bottom to top, again and again until there are enough."""
    assert 1 <= old <= new, (old, new)
    return tuple(layer % old for layer in range(new))


def centred(old: int, new: int) -> tuple[int, ...]:
    """Return the sources of `new` layers: the `old` ones, with the middle `new - old` of them twice in a row.

    If the old layers divide into groups of `new - old`, the repeated layers are the middle group, or the lower of the
    two middle groups. Otherwise they are as near to the middle as possible, rounded down. Beyond a doubling the result
    is that of `stacked`.
    """
    assert 1 <= old <= new, (old, new)
    size = new - old
    if size == 0 or size > old:
        return stacked(old, new)
    start = (old // size - 1) // 2 * size if old % size == 0 else (old - size) // 2
    return (*range(start + size), *range(start, old))
