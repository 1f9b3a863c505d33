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
# Settings of `model` that are kept when another size is chosen.
NO_DIMENSIONS = ("dropout", "init", "residual_multiplier", "norm_scaling")
MOST = 2**31  # a larger value is a slip, and would overflow
# Arguments of every method, and what to set instead of them.
COMMON = {"shape": "the model's layers, heads and parts", "steps": "train.steps", "seed": "train.seed"}
DEVICES = ("auto", "cpu", "cuda")
BUILTIN = "builtin"  # the data.source that is the text of the Python standard library
ROUNDING = ("train.device", "train.precision")  # affect rounding alone; a resumed run keeps its own unless they are set


@dataclass(frozen=True)
class DataSettings:
    """The source of the text, and how it is cut into windows."""

    source: str | None = field(default=None, metadata=FREE)  # a folder written by `raptr prepare`, or builtin
    vocabulary: int = 8192  # size of the built-in text's tokenizer; a prepared folder has its own
    length: int = 128
    isolate_documents: bool = False  # attention does not cross document boundaries

    def __post_init__(self) -> None:
        if not 512 <= self.vocabulary <= 2**20:
            raise ValueError(f"data.vocabulary is {self.vocabulary}; 512 to {2**20} is allowed")
        if not 8 <= self.length <= MOST_WIDE:
            raise ValueError(f"data.length is {self.length}; a whole number from 8 to {MOST_WIDE} is allowed")

    def mapping(self) -> dict[str, Any]:
        """Return the settings, without `vocabulary` if the source is a prepared folder, which has its own."""
        unused = () if self.source in (None, BUILTIN) else ("vocabulary",)
        return {key: value for key, value in asdict(self).items() if key not in unused}


@dataclass(frozen=True)
class TrainSettings:
    """The length of a run, its batches, its execution, and what it evaluates, saves and logs."""

    steps: int
    batch: int = 32  # sequences per optimizer step
    accumulate: int = field(default=1, metadata=FREE)  # micro-batches per optimizer step, all with one subnetwork
    seed: int = 0
    device: str = "auto"
    precision: Precision = "auto"  # mixed: bfloat16 matmuls; bfloat16: residual stream too; auto: bfloat16 on a GPU
    execution: Form = field(default="auto", metadata=FREE)  # auto: gather on a GPU if possible
    compile: bool | None = field(default=None, metadata=FREE)  # None: yes on a GPU, unless deterministic
    deterministic: bool = False  # bitwise reproducible on a GPU, without the compiler and CUDA graphs
    recompute: bool = field(default=False, metadata=FREE)  # activations in the backward pass: less memory, slower
    parallel: Engine | None = field(default=None, metadata=FREE)  # of several processes: docs/distributed.md; None: ddp
    reduce: Literal["float32", "bfloat16"] = field(default="float32", metadata=FREE)  # gradient sums across processes
    shards: int | None = field(default=None, metadata=FREE)  # per replica in hsdp; None: processes per machine
    timeout: float = field(default=TIMEOUT, metadata=FREE)  # seconds to wait for another process
    eval_every: int | None = field(default=None, metadata=FREE)  # None: 20 times per run, fewer in a short one
    eval_samples: int = field(default=256, metadata=FREE)
    eval_sizes: tuple[int, ...] = field(default=(), metadata=FREE)  # also evaluate random subnetworks of these sizes
    checkpoint_every: int | None = field(default=None, metadata=FREE)  # None: 10 times per run
    keep: int = field(default=2, metadata=FREE)  # checkpoints to keep
    async_checkpoints: bool = field(default=False, metadata=FREE)  # written in the background, from copies
    log_every: int = field(default=10, metadata=FREE)
    tracker: str = field(default="tensorboard", metadata=FREE)  # also receives the metrics: train/trackers/

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
        """Steps between evaluations, besides stage ends; by default enough to train on `eval_samples` sequences."""
        return self.eval_every or max(self.steps // 20, math.ceil(self.eval_samples / self.batch))

    @property
    def checkpoint_interval(self) -> int:
        """Steps between two checkpoints."""
        return self.checkpoint_every or max(1, self.steps // 10)

    def following(self, begun: "TrainSettings") -> "TrainSettings":
        """Return a copy with `auto` replaced by the device and precision with which a run began."""
        return replace(
            self,
            device=begun.device if self.device == "auto" else self.device,
            precision=begun.precision if self.precision == "auto" else self.precision,
        )

    def resolved(self) -> "TrainSettings":
        """Return a copy with `auto` replaced by this machine's device and precision."""
        device = self.resolve_device()
        return replace(self, device=device.type, precision=self.arithmetic(device))

    def resolve_device(self) -> torch.device:
        """Return the device to run on (`auto`: a GPU if there is one); raise ValueError if it lacks the precision."""
        device = find_device(self.device, setting="train.device")
        if self.half(device) and not _has_bfloat16(device):
            raise ValueError(f"train.precision is {self.precision}, which this GPU cannot compute in. Use float32.")
        return device

    @property
    def reduced(self) -> torch.dtype | None:
        """The precision in which processes sum their gradients; None: that of the gradients."""
        return torch.bfloat16 if self.reduce == "bfloat16" else None

    def autocast(self, device: torch.device) -> torch.autocast:
        """Return a context in which matrix multiplications have the chosen precision; weights and sums stay float32."""
        return torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.half(device))

    def arithmetic(self, device: torch.device) -> Arithmetic:
        """Return the precision on this device: `auto` is bfloat16 on a GPU that supports it, otherwise float32."""
        if self.precision != "auto":
            return self.precision
        return "bfloat16" if device.type == "cuda" and _has_bfloat16(device) else "float32"

    def half(self, device: torch.device) -> bool:
        """Return whether matrix multiplications are in bfloat16."""
        return self.arithmetic(device) != "float32"

    def stream(self, device: torch.device) -> torch.dtype | None:
        """Return the precision of the residual stream; None: float32."""
        return torch.bfloat16 if self.arithmetic(device) == "bfloat16" else None

    def compiled(self, device: torch.device) -> bool:
        """Return whether blocks are compiled."""
        return device.type == "cuda" and not self.deterministic if self.compile is None else self.compile

    def form(self, device: torch.device, *, sharded: bool = False) -> DecidedForm:
        """Return the form of execution; `sharded`: the weights are sharded, so no process has all of them."""
        if self.execution != "auto":
            return self.execution
        fits = device.type == "cuda" and not (self.deterministic or self.recompute or sharded)
        return "gather" if fits else "skip"


@dataclass(frozen=True)
class Config:
    """All settings of a run. `method` holds the method's name and settings; the name `auto` chooses by measurements."""

    train: TrainSettings
    model: ModelSettings = field(default_factory=ModelSettings)
    method: Mapping[str, Any] = field(default_factory=lambda: {"name": "raptr"})
    data: DataSettings = DataSettings()
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)

    def __post_init__(self) -> None:
        objectives = self.model.kind.objectives
        if not self.objective.name:
            object.__setattr__(self, "objective", replace(self.objective, name=objectives[0]))
        if self.objective.name not in objectives:
            raise ValueError(
                f"objective.name is {self.objective.name} with model.family {self.model.family}, which can learn: "
                f"{', '.join(objectives)}"
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
        """Build a configuration from nested mappings, such as a YAML file's; raise ValueError for unknown keys."""
        kinds = {
            "train": TrainSettings,
            "data": DataSettings,
            "objective": ObjectiveSettings,
            "optimizer": OptimizerSettings,
        }
        allowed = (*kinds, "model", "method")
        for key in given:
            if key not in allowed:
                raise ValueError(f"Unknown section {key}; {nearest(key, allowed)}allowed: {', '.join(allowed)}")
        sections: dict[str, Any] = {key: read(kind, given.get(key, {}), f"{key}.") for key, kind in kinds.items()}
        sections["model"] = ModelSettings.read(given.get("model", {}))
        method = given.get("method", {"name": "raptr"})
        if not isinstance(method, Mapping) or not isinstance(method.get("name"), str):
            raise ValueError(f"method is {method!r}; a mapping with a name is allowed")
        return cls(method=dict(method), **sections)

    def mapping(self) -> dict[str, Any]:
        """Return the configuration as nested plain mappings, with all defaults and the model's dimensions."""
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
        """Open the prepared text in a folder; raise ValueError if it lacks special tokens of the objective."""
        tokenizer = [] if self.model.start is None else ["--tokenizer", self.model.start]
        store = open_store(Path(source), ["--objective", self.objective.name, *tokenizer])
        specials = self.objective.kind.specials
        if store.vocabulary.missing(specials):
            others = [name for name, family in FAMILIES.items() if store.manifest.objective in family.objectives]
            more = f", or use --family {' or '.join(others)}" if others else ""
            if self.model.start is not None:  # the start determines the family, so --family is no remedy
                more = f" --tokenizer {self.model.start}"
            raise ValueError(
                f"data.source is {source!r}, prepared for {store.manifest.objective}, but model.family "
                f"{self.model.family} learns {self.objective.name}. Prepare the text with raptr prepare "
                f"--objective {self.objective.name}{more}."
            )
        return store

    def vocabulary_size(self) -> int:
        """Return the vocabulary size: the prepared text's, else the start model's, else the built-in text's."""
        source, start = self.data.source, self.model.start
        if source not in (None, BUILTIN):
            return self.prepared(source).vocabulary.size
        return self.data.vocabulary if start is None else start_vocabulary(start) or self.data.vocabulary

    @property
    def step_load(self) -> dict[str, Any]:
        """Keyword arguments that describe a step's batch to `flops` and `plan`."""
        length = self.data.length
        return {"sequences": self.train.batch, "length": length, "targets": self.objective.targets(length)}

    def check_processes(self, count: int, *, sharded: bool) -> None:
        """Raise ValueError if `count` processes cannot share a batch evenly, or the execution cannot shard weights."""
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
        """The model's dimensions, except that prepared text may have another vocabulary; no method depends on it."""
        return self.model.build(self.data.vocabulary, self.data.length)

    def following(self, begun: "Config") -> "Config":
        """Return a copy with `auto` replaced by the method, device and precision with which a run began."""
        method = begun.method if self.method["name"] == AUTO else self.method
        return replace(self, train=self.train.following(begun.train), method=method)

    def resolved(self) -> "Config":
        """Return a copy with `auto` replaced by the advised method and by this machine's device and precision."""
        method = self.mapping()["method"] if self.method["name"] == AUTO else self.method
        return replace(self, train=self.train.resolved(), method=method)

    def idle(self, method: Method) -> Policy:
        """Return the policy for idle parameters: the one set, else the one that the method needs."""
        return self.optimizer.idle or needed(method)

    def make_method(self) -> Method:
        """Build the training method; if its name is `auto`, it is chosen here."""
        method, dimensions = advice.decided(self), self.dimensions
        settings = {key: value for key, value in method.items() if key != "name"}
        for key in COMMON:
            if key in settings:
                raise ValueError(f"Unknown setting method.{key}. Set {COMMON[key]} instead.")
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
    """Return the device of this name (`auto`: a GPU if there is one); error messages name `setting`."""
    check_choice(setting, name, DEVICES)
    gpu = torch.cuda.is_available()
    if name == "cuda" and not gpu:
        raise ValueError(f"{setting} is cuda, but no GPU was found. Use auto or cpu.")
    return torch.device("cuda" if gpu and name != "cpu" else "cpu")


def _has_bfloat16(device: torch.device) -> bool:
    """Return whether the device supports bfloat16, as NVIDIA GPUs do from compute capability 8.0 on."""
    gpu = device.type == "cuda" and torch.cuda.is_available()
    return not gpu or torch.cuda.get_device_capability(device) >= (8, 0)


def merged(settings: Mapping[str, Mapping[str, Any]], later: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings, by section, updated with the later ones.

    If the later settings name a method or an objective, all earlier settings of that section are dropped. If they name
    a size, a family or a start, the earlier dimensions are dropped; a start also drops the earlier family and size. An
    earlier size is kept with a later family, although that may have no size of this name. An earlier start that is kept
    loses its checksum, so that its folder is read again: the later settings may not fit it.
    """
    result: dict[str, Any] = dict(settings)
    for section, updates in later.items():
        kept = dict(settings.get(section, {}))
        if section in ("method", "objective") and "name" in updates:
            kept = {}
        if section == "model":
            kept.pop("start_sha256", None)
            if not {"family", "size", "start"}.isdisjoint(updates):
                carried: tuple[str, ...] = NO_DIMENSIONS
                if "start" not in updates:
                    carried += ("family", "start", "size") if "family" in updates else ("family", "start", "z_loss")
                kept = {key: value for key, value in kept.items() if key in carried}
        result[section] = {**kept, **updates}
    return result


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings that differ and can change a run's results, each with the text `was a, now b`.

    Of two methods, only the names are listed, since their other settings do not compare.
    """
    sections = {"train": TrainSettings, "data": DataSettings, "model": ModelSettings}
    free = {f"{name}.{e.name}" for name, kind in sections.items() for e in fields(kind) if e.metadata.get("free")}
    if new.get("model", {}).get("dropout"):
        free -= {"train.accumulate"}  # dropout masks are drawn for each micro-batch
    before, after = flat(old), flat(new)
    if "data.vocabulary" not in before or "data.vocabulary" not in after:
        free |= {"data.vocabulary"}  # with prepared text, the data's fingerprint is compared instead
    changed = [key for key in {**before, **after} if before.get(key) != after.get(key) and key not in free]
    if "method.name" in changed:
        changed = [key for key in changed if key == "method.name" or not key.startswith("method.")]
    return {key: f"was {before.get(key)!r}, now {after.get(key)!r}" for key in changed}
