"""The configuration of a run: frozen, complete, and checked before anything is computed."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from raptr.data import TokenStore, open_store
from raptr.distributed.processes import TIMEOUT, Engine
from raptr.methods import Method, make_method
from raptr.methods.axes import in_units, narrowed, widened
from raptr.models.contract import ModelConfig
from raptr.models.registry import FAMILIES
from raptr.settings import check_choice, flat, listed, nearest, read
from raptr.train import advice
from raptr.train.advice import AUTO
from raptr.train.idle import Policy, needed
from raptr.train.model import FREE, MOST_WIDE, ModelSettings
from raptr.train.objective import ObjectiveSettings
from raptr.train.optimizer import OptimizerSettings
from raptr.train.starting import start_vocabulary
from raptr.train.trackers.registry import NAMES as TRACKERS

Arithmetic = Literal["float32", "mixed", "bfloat16"]
Precision = Literal["auto", "float32", "mixed", "bfloat16"]
DecidedForm = Literal["skip", "gather", "shared"]
Form = Literal["auto", DecidedForm]
NO_DIMENSIONS = ("dropout", "init")  # settings of a model that its size says nothing about
MOST = 2**31  # more is a slip, and would overflow
COMMON = {"shape": "the model's dimensions", "steps": "train.steps", "seed": "train.seed"}  # of all methods
DEVICES = ("auto", "cpu", "cuda")
BUILTIN = "builtin"  # data.source: the Python standard library's text
ROUNDING = ("train.device", "train.precision")  # a resume changes them only where they are given


@dataclass(frozen=True)
class DataSettings:
    """Where the text comes from and how it is cut."""

    source: str | None = field(default=None, metadata=FREE)  # a folder made by `raptr prepare`, or builtin
    vocabulary: int = 8192  # of the built-in text's tokenizer; a prepared folder has its own
    length: int = 128
    isolate_documents: bool = False  # attention stays inside documents

    def __post_init__(self) -> None:
        if not 512 <= self.vocabulary <= 2**20:
            raise ValueError(f"data.vocabulary is {self.vocabulary}; 512 to {2**20} is allowed")
        if not 8 <= self.length <= MOST_WIDE:
            raise ValueError(f"data.length is {self.length}; a whole number from 8 to {MOST_WIDE} is allowed")

    def mapping(self) -> dict[str, Any]:
        """The settings, without `vocabulary` where a prepared folder has its own."""
        unused = () if self.source in (None, BUILTIN) else ("vocabulary",)
        return {key: value for key, value in asdict(self).items() if key not in unused}


@dataclass(frozen=True)
class TrainSettings:
    """How long, with how much data a step, and what is written on the way."""

    steps: int
    batch: int = 32  # sequences per optimizer step
    accumulate: int = field(default=1, metadata=FREE)  # micro-batches per optimizer step, all with one subnetwork
    seed: int = 0
    device: str = "auto"
    precision: Precision = "auto"  # mixed: bfloat16 products; bfloat16: also between layers; auto: that on a GPU
    execution: Form = field(default="auto", metadata=FREE)  # auto: gather on a GPU where it can
    compile: bool | None = field(default=None, metadata=FREE)  # None: on a GPU, unless deterministic
    deterministic: bool = False  # a GPU gives the same bits every time; costs the compiler and the CUDA graphs
    recompute: bool = field(default=False, metadata=FREE)  # activations in the backward pass: less memory, more time
    parallel: Engine | None = field(default=None, metadata=FREE)  # of many processes: docs/distributed.md; None: ddp
    reduce: Literal["float32", "bfloat16"] = field(default="float32", metadata=FREE)  # sums of gradients between them
    shards: int | None = field(default=None, metadata=FREE)  # of hsdp; None: the processes of one machine
    timeout: float = field(default=TIMEOUT, metadata=FREE)  # seconds without a sign of another process
    eval_every: int | None = field(default=None, metadata=FREE)  # None: 20 times a run, less in a short one
    eval_samples: int = field(default=256, metadata=FREE)
    eval_sizes: tuple[int, ...] = field(default=(), metadata=FREE)  # also judge random parts of these sizes
    checkpoint_every: int | None = field(default=None, metadata=FREE)  # None: 10 times a run
    keep: int = field(default=2, metadata=FREE)  # checkpoints
    async_checkpoints: bool = field(default=False, metadata=FREE)  # written beside training, from copies
    log_every: int = field(default=10, metadata=FREE)
    tracker: str = field(default="tensorboard", metadata=FREE)  # also gets the numbers: train/trackers/

    def __post_init__(self) -> None:
        least = {"steps": 1, "batch": 1, "accumulate": 1, "seed": 0, "eval_samples": 1, "keep": 1, "log_every": 1}
        for name in ("eval_every", "checkpoint_every", "shards"):
            if getattr(self, name) is not None:
                least[name] = 1
        for name, lowest in least.items():
            value, most = getattr(self, name), 2**63 if name == "seed" else MOST
            if not lowest <= value <= most:
                raise ValueError(f"train.{name} is {value}; a whole number from {lowest} to {most} is allowed")
        if not 0 < self.timeout < math.inf:
            raise ValueError(f"train.timeout is {self.timeout}; a number of seconds above 0 is allowed")
        if self.shards is not None and self.parallel != "hsdp":
            raise ValueError(f"train.shards is {self.shards}, which only train.parallel hsdp has. Leave it out.")
        if self.batch % self.accumulate:
            raise ValueError(
                f"train.accumulate is {self.accumulate}; a divisor of train.batch, {self.batch}, is allowed"
            )
        check_choice("train.device", self.device, DEVICES)
        check_choice("train.tracker", self.tracker, TRACKERS)

    @property
    def eval_interval(self) -> int:
        """Steps between two evaluations (stage ends come on top); they train on no fewer sequences than one reads."""
        return self.eval_every or max(self.steps // 20, math.ceil(self.eval_samples / self.batch))

    @property
    def checkpoint_interval(self) -> int:
        """Steps between two checkpoints."""
        return self.checkpoint_every or max(1, self.steps // 10)

    def following(self, begun: "TrainSettings") -> "TrainSettings":
        """The same, `auto` replaced by the device and the precision that a run began with."""
        return replace(
            self,
            device=begun.device if self.device == "auto" else self.device,
            precision=begun.precision if self.precision == "auto" else self.precision,
        )

    def resolved(self) -> "TrainSettings":
        """The same, `auto` replaced by the device and the precision that this machine gets."""
        device = self.resolve_device()
        return replace(self, device=device.type, precision=self.arithmetic(device))

    def resolve_device(self) -> torch.device:
        """The device to run on: a GPU if there is one, unless said otherwise."""
        device = find_device(self.device, setting="train.device")
        if self.half(device) and not _has_bfloat16(device):
            raise ValueError(f"train.precision is {self.precision}, which this GPU cannot compute in. Use float32.")
        return device

    @property
    def reduced(self) -> torch.dtype | None:
        """The precision in which gradients are added up between processes; None: their own."""
        return torch.bfloat16 if self.reduce == "bfloat16" else None

    def autocast(self, device: torch.device) -> torch.autocast:
        """A context in which matrix products have the chosen precision; weights and sums stay float32."""
        return torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.half(device))

    def arithmetic(self, device: torch.device) -> Arithmetic:
        """The precision on this device: `auto` is bfloat16 on a GPU that has it, otherwise float32."""
        if self.precision != "auto":
            return self.precision
        return "bfloat16" if device.type == "cuda" and _has_bfloat16(device) else "float32"

    def half(self, device: torch.device) -> bool:
        """Whether matrix products are made in bfloat16."""
        return self.arithmetic(device) != "float32"

    def stream(self, device: torch.device) -> torch.dtype | None:
        """The precision of what layers hand on; None: float32."""
        return torch.bfloat16 if self.arithmetic(device) == "bfloat16" else None

    def compiled(self, device: torch.device) -> bool:
        """Whether blocks are compiled."""
        return device.type == "cuda" and not self.deterministic if self.compile is None else self.compile

    def form(self, device: torch.device, *, sharded: bool = False) -> DecidedForm:
        """The execution's form; `sharded` are weights of which no process has the whole."""
        if self.execution != "auto":
            return self.execution
        fits = device.type == "cuda" and not (self.deterministic or self.recompute or sharded)
        return "gather" if fits else "skip"


@dataclass(frozen=True)
class Config:
    """A complete run. `method` holds the method's name and its settings; `auto` takes the best that was measured."""

    train: TrainSettings
    model: ModelSettings = field(default_factory=ModelSettings)
    method: Mapping[str, Any] = field(default_factory=lambda: {"name": "raptr"})
    data: DataSettings = DataSettings()
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)

    def __post_init__(self) -> None:
        learnt = self.model.kind.objectives
        if not self.objective.name:
            object.__setattr__(self, "objective", replace(self.objective, name=learnt[0]))
        if self.objective.name not in learnt:
            raise ValueError(
                f"objective.name is {self.objective.name} with model.family {self.model.family}, which can learn: "
                f"{', '.join(learnt)}"
            )
        advice.check(self)
        isolate = self.data.isolate_documents
        self.objective.check(self.data.length, self.train.batch, self.train.accumulate, isolate=isolate)
        self.optimizer.check_steps(self.train.steps)
        method = self.make_method()
        if self.model.start is not None and method.shape(0) != method.target:
            raise ValueError(
                f"method.name is {method.name!r} with model.start; only methods that do not grow the model are allowed"
            )
        if self.train.execution == "gather" and self.train.recompute:
            raise ValueError("train.execution is 'gather' with train.recompute; auto and skip are allowed")
        for size in self.train.eval_sizes:
            if not 1 <= size <= method.target.layers:
                raise ValueError(f"train.eval_sizes has {size}; 1 to {method.target.layers} layers are allowed")
        for axis in narrowed(method):
            if self.optimizer.name == "muon":
                raise ValueError(
                    f"optimizer.name is muon with method.{axis} of {method.name}, which runs some of the {axis}: idle "
                    "ones have a gradient of zero, and muon would move them all the same. Use adamw or adafactor."
                )
            if self.optimizer.idle == "skip" and self.optimizer.name == "adafactor":
                raise ValueError(
                    f"optimizer.idle is 'skip' with method.{axis} and optimizer.name adafactor, whose means over whole "
                    "rows and columns cannot leave out idle heads and parts. Use zero, which is also the default, or "
                    "adamw."
                )
        for axis in widened(method):
            if self.optimizer.name == "adafactor":
                raise ValueError(
                    f"optimizer.name is adafactor with method.{axis} of {method.name}, which adds {axis} to trained "
                    "tensors: its means over whole rows and columns cannot be split between old and new. "
                    "Use adamw or muon."
                )

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> "Config":
        """Make a configuration from nested mappings (a YAML file's); unknown keys are errors."""
        kinds = {
            "train": TrainSettings,
            "data": DataSettings,
            "objective": ObjectiveSettings,
            "optimizer": OptimizerSettings,
        }
        allowed = (*kinds, "model", "method")
        for key in given:
            if key not in allowed:
                raise ValueError(
                    f"{key} is no section of the configuration; {nearest(key, allowed)}allowed: {', '.join(allowed)}"
                )
        sections: dict[str, Any] = {key: read(kind, given.get(key, {}), f"{key}.") for key, kind in kinds.items()}
        sections["model"] = ModelSettings.read(given.get("model", {}))
        method = given.get("method", {"name": "raptr"})
        if not isinstance(method, Mapping) or not isinstance(method.get("name"), str):
            raise ValueError(f"method is {method!r}; a mapping with a name is allowed")
        return cls(method=dict(method), **sections)

    def mapping(self) -> dict[str, Any]:
        """The configuration as nested plain mappings, complete with defaults and the model's dimensions."""
        method = self.make_method()
        return {
            "model": self.model.mapping(self.dimensions),
            "method": {"name": method.name, **{key: listed(value) for key, value in method.settings().items()}},
            "data": self.data.mapping(),
            "objective": {key: value for key, value in asdict(self.objective).items() if value is not None},
            "optimizer": {**asdict(self.optimizer), "idle": self.idle(method)},
            "train": {key: listed(value) for key, value in asdict(self.train).items()},
        }

    def prepared(self, source: str) -> TokenStore:
        """The prepared text in a folder; a vocabulary that the objective cannot use is refused."""
        store, objective = open_store(Path(source)), self.objective.kind.specials
        if store.vocabulary.missing(objective):
            others = [name for name, family in FAMILIES.items() if store.manifest.objective in family.objectives]
            more = f", or use --family {' or '.join(others)}" if others else ""
            if self.model.start is not None:  # the family is that of the folder
                more = f" --tokenizer {self.model.start}"
            raise ValueError(
                f"data.source is {source!r}, prepared for {store.manifest.objective}, but model.family "
                f"{self.model.family} learns {self.objective.name}. Prepare the text with raptr prepare "
                f"--objective {self.objective.name}{more}."
            )
        return store

    def vocabulary_size(self) -> int:
        """How many tokens there are: the prepared text's, those of the model to start from, or the built-in text's."""
        source, start = self.data.source, self.model.start
        if source not in (None, BUILTIN):
            return self.prepared(source).vocabulary.size
        return self.data.vocabulary if start is None else start_vocabulary(start) or self.data.vocabulary

    @property
    def step_load(self) -> dict[str, Any]:
        """The keyword arguments that describe a step to `flops` and `plan`."""
        length = self.data.length
        return {"sequences": self.train.batch, "length": length, "targets": self.objective.targets(length)}

    def check_processes(self, count: int, *, sharded: bool) -> None:
        """Refuse a batch that this many processes cannot share evenly, and what weights in shards do not allow."""
        settings = self.train
        if sharded and settings.execution in ("gather", "shared"):
            raise ValueError(
                f"train.execution is {settings.execution} with train.parallel {settings.parallel}, whose weights are "
                "in shards. Use auto or skip, or train.parallel ddp."
            )
        if settings.batch % (settings.accumulate * count):
            raise ValueError(
                f"train.batch is {settings.batch}; with {count} processes and train.accumulate {settings.accumulate} a "
                f"multiple of {settings.accumulate * count} is allowed"
            )
        isolate = self.data.isolate_documents
        self.objective.check(self.data.length, settings.batch, settings.accumulate, isolate=isolate, processes=count)

    @cached_property
    def dimensions(self) -> ModelConfig:
        """The model's dimensions; prepared text may have another vocabulary, which no method depends on."""
        return self.model.build(self.data.vocabulary, self.data.length)

    def following(self, begun: "Config") -> "Config":
        """The same, `auto` replaced by the method, the device and the precision that a run began with."""
        method = begun.method if self.method["name"] == AUTO else self.method
        return replace(self, train=self.train.following(begun.train), method=method)

    def resolved(self) -> "Config":
        """The same, `auto` replaced by the method that is advised and the device and precision that are here."""
        method = self.mapping()["method"] if self.method["name"] == AUTO else self.method
        return replace(self, train=self.train.resolved(), method=method)

    def idle(self, method: Method) -> Policy:
        """What happens to idle parameters: as given, or as the method needs."""
        return self.optimizer.idle or needed(method)

    def make_method(self) -> Method:
        """The training method, chosen where `method` says `auto`."""
        method, dimensions = advice.decided(self), self.dimensions
        settings = {key: value for key, value in method.items() if key != "name"}
        for key in COMMON:
            if key in settings:
                raise ValueError(f"method.{key} is no setting; it is set by {COMMON[key]}")
        for key, size in dimensions.unit_sizes.items():
            if key in settings:
                settings[key] = in_units(key, settings[key], getattr(dimensions.shape, key), size)
        return make_method(
            method["name"],
            shape=dimensions.shape,
            steps=self.train.steps,
            seed=self.train.seed,
            **settings,
        )


def find_device(name: str, *, setting: str = "--device") -> torch.device:
    """The device of this name, which `setting` has; `auto` is a GPU if there is one."""
    check_choice(setting, name, DEVICES)
    found = torch.cuda.is_available()
    if name == "cuda" and not found:
        raise ValueError(f"{setting} is cuda, but no GPU was found. Use auto or cpu.")
    return torch.device("cuda" if found and name != "cpu" else "cpu")


def _has_bfloat16(device: torch.device) -> bool:
    """Whether the device computes in bfloat16: NVIDIA GPUs do from compute capability 8 on."""
    there = device.type == "cuda" and torch.cuda.is_available()
    return not there or torch.cuda.get_device_capability(device) >= (8, 0)


def merged(settings: Mapping[str, Mapping[str, Any]], later: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The settings with the later ones in their place.

    Where a method or an objective is named later, no setting of an earlier one carries over; where a size, a family or
    a start is, no dimension. A size carries over to another family, which may have none of this name. A start that
    carries over is read again, since what is named later may not fit it.
    """
    result: dict[str, Any] = dict(settings)
    for section, given in later.items():
        kept = dict(settings.get(section, {}))
        if section in ("method", "objective") and "name" in given:
            kept = {}
        if section == "model":
            kept.pop("start_sha256", None)
            if not {"family", "size", "start"}.isdisjoint(given):
                carried: tuple[str, ...] = NO_DIMENSIONS
                if "start" not in given:
                    carried += ("family", "start", "size") if "family" in given else ("family", "start", "z_loss")
                kept = {key: value for key, value in kept.items() if key in carried}
        result[section] = {**kept, **given}
    return result


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, str]:
    """The settings in which two configurations' results differ, each with `was a, now b`."""
    sections = {"train": TrainSettings, "data": DataSettings, "model": ModelSettings}
    free = {f"{name}.{e.name}" for name, kind in sections.items() for e in fields(kind) if e.metadata.get("free")}
    if new.get("model", {}).get("dropout"):
        free -= {"train.accumulate"}  # what is dropped is drawn for each micro-batch
    before, after = flat(old), flat(new)
    if "data.vocabulary" not in before or "data.vocabulary" not in after:
        free |= {"data.vocabulary"}  # of prepared text, whose fingerprint is compared instead
    changed = [key for key in {**before, **after} if before.get(key) != after.get(key) and key not in free]
    return {key: f"was {before.get(key)!r}, now {after.get(key)!r}" for key in changed}
