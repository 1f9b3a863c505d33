"""The settings of the model: a family, one of its sizes, and values that override the size's."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from raptr.models.contract import Family, ModelConfig
from raptr.models.registry import FAMILIES
from raptr.settings import check_choice, nearest, read, values
from raptr.train.starting import with_start

FAMILY = next(iter(FAMILIES))  # the default
FROM_DATA = ("vocabulary", "positions")  # dimensions that follow from the data and are no settings of `model`
MOST_LAYERS, MOST_WIDE = 10_000, 2**20  # larger values are slips, and would exhaust the memory
FREE = {"free": True}  # metadata of a field that a resumed run may change: training stays the same up to rounding


@dataclass(frozen=True)
class ModelSettings:
    """A family and one of its sizes; `given` holds the values that override the size's."""

    family: str = FAMILY
    size: str = ""  # empty: the family's first
    start: str | None = field(default=None, metadata=FREE)  # a `transformers` model's folder; None: random weights
    start_sha256: str | None = None  # of that folder's weights; computed when the settings are read
    given: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_choice("model.family", self.family, FAMILIES)
        sizes = self.kind.sizes
        if not self.size:
            object.__setattr__(self, "size", next(iter(sizes)))
        check_choice("model.size", self.size, sizes)
        if self.start is None and self.start_sha256 is not None:
            raise ValueError(f"model.start_sha256 is {self.start_sha256!r} without model.start. Give both or neither.")
        for name, value in self.given.items():
            most = MOST_LAYERS if name == "layers" else MOST_WIDE
            if type(value) is int and not 1 <= value <= most:
                raise ValueError(f"model.{name} is {value}; a whole number from 1 to {most} is allowed")

    @classmethod
    def read(cls, settings: object) -> "ModelSettings":
        """Read the section `model`: family, size, start and the family's own settings; other keys raise ValueError."""
        if not isinstance(settings, Mapping):
            raise ValueError(f"model is {settings!r}; a mapping is allowed")
        settings, names = with_start(settings), ("family", "size", "start", "start_sha256")
        base = read(cls, {key: settings[key] for key in names if key in settings}, "model.")
        if settings.get("size") == "":  # without a size the first is taken, but an empty name is an error
            check_choice("model.size", "", base.kind.sizes)
        known = [entry.name for entry in fields(base.kind.config) if entry.name not in FROM_DATA]
        for key in settings:
            if key not in (*names, *known):
                allowed = ", ".join((*names, *known))
                raise ValueError(f"Unknown setting model.{key}; {nearest(key, known)}allowed: {allowed}")
        given = {key: settings[key] for key in known if settings.get(key) is not None}
        return replace(base, given=values(base.kind.config, given, "model."))

    @property
    def kind(self) -> Family:
        return FAMILIES[self.family]

    def build(self, vocabulary: int, positions: int) -> ModelConfig:
        return replace(self.kind.sizes[self.size], **self.given, vocabulary=vocabulary, positions=positions)

    def mapping(self, dimensions: ModelConfig) -> dict[str, Any]:
        """Return all settings as a mapping, with `dimensions` written out."""
        sizes = {key: value for key, value in asdict(dimensions).items() if key not in FROM_DATA}
        start = {"start": self.start, "start_sha256": self.start_sha256} if self.start is not None else {}
        return {"family": self.family, "size": self.size, **start, **sizes}
