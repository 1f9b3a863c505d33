"""Growth as a value: for each tensor of the larger model, where it comes from. No torch here.

n layers become n' = q·n + r layers in one of these orders; layers count from 0:

    stacked(6, 9)     0 1 2 3 4 5 3 4 5     q copies bottom to top, then the top r layers
    inserted(6, 9)    0 1 2 3 3 4 4 5 5     the same layers, each copy next to its source
    repeated(6, 9)    0 1 2 3 4 5 0 1 2     from the bottom again: layer j comes from layer j mod n
    centred(6, 8)     0 1 2 3 2 3 4 5       the middle n' - n layers a second time, right after themselves

Up to a doubling `stacked` appends copies of the last n' - n layers (gradual stacking, Reddi et al. 2023); at a
doubling, and beyond, it is progressive stacking (Gong et al. 2019) as bert2BERT (Chen et al. 2021) writes it.
`inserted` is the consecutive insertion of LEMON (Wang et al. 2023). `repeated` is G_stack (Du et al. 2024); it differs
from `stacked` only where r is not 0. `centred` is MIDAS (Saunshi et al. 2024).

A new layer is a copy of its source or, with `identity`, one whose output projections are zero, which in a pre-LN
block is the identity. What the optimizer knows moves by a named policy: `copy` (a new tensor has its source's
moments and step count), `zero` (a new layer starts with zero moments and a step count of zero, so that the bias
correction is right for it) or `reset` (everything starts anew, old layers too). A zeroed tensor holds nothing of its
source, so under `copy` too it starts with zero moments: its source's were those of another point.

Heads and MLP parts (units) are added inside tensors, in old and new layers alike: `added(6, 9)` is the sources of nine
units, None for the three new ones. A new unit has the initial weights of the larger model, zero moments and, in a
tensor whose optimizer counts steps, a count of its own that starts at zero.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Moments = Literal["copy", "zero", "reset"]
Units = tuple[int | None, ...]  # where each head or MLP part comes from; None: it is new


@dataclass(frozen=True)
class Rule:
    """How one tensor is made: from the smaller model's `source`, its weight or its moments zero where it says so.

    Of a tensor that has an axis of heads or MLP parts, this is said of the units that the smaller model has.
    """

    source: str
    zero_weight: bool
    zero_moments: bool


@dataclass(frozen=True)
class Growth:
    """Each layer's source in the smaller model; a source's first mention is that layer itself, others are new.

    `heads` and `parts` say the same of the units of every layer; None: all stay as they are.
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
        """The layers that the smaller model does not have."""
        return tuple(layer for layer, source in enumerate(self.sources) if source in self.sources[:layer])

    def rule(self, name: str, *, layers: str, outputs: Sequence[str]) -> Rule:
        """How the parameter `name` is made, in a model whose list of layers is called `layers`.

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
    """The sources of `new` units: the `old` ones, then new ones; None where there are no new ones."""
    assert 1 <= old <= new, (old, new)
    return (*range(old), *[None] * (new - old)) if old < new else None


def stacked(old: int, new: int) -> tuple[int, ...]:
    """The sources of `new` layers: the `old` ones bottom to top, as often as they fit, then the topmost."""
    assert 1 <= old <= new, (old, new)
    copies, rest = divmod(new, old)
    return tuple(range(old)) * copies + tuple(range(old - rest, old))


def inserted(old: int, new: int) -> tuple[int, ...]:
    """The sources of `new` layers: as `stacked`, but each copy right after its source."""
    return tuple(sorted(stacked(old, new)))


def repeated(old: int, new: int) -> tuple[int, ...]:
    """The sources of `new` layers: the `old` ones bottom to top, again and again."""
    assert 1 <= old <= new, (old, new)
    return tuple(layer % old for layer in range(new))


def centred(old: int, new: int) -> tuple[int, ...]:
    """The sources of `new` layers: the middle `new - old` of the `old` ones appear twice in a row, as a block.

    Where the old layers are whole blocks of that size, the block is the middle one, the lower of the two if there are
    two. Otherwise it is as near to the middle as can be, the lower place first. Beyond a doubling: as `stacked`.
    """
    assert 1 <= old <= new, (old, new)
    size = new - old
    if size == 0 or size > old:
        return stacked(old, new)
    start = (old // size - 1) // 2 * size if old % size == 0 else (old - size) // 2
    return (*range(start + size), *range(start, old))
