"""Export of a run's trained model to a folder that `transformers` loads without this project.

model.safetensors, config.json            the stock model
tokenizer.json, tokenizer_config.json     the stock tokenizer
README.md                                 the model card

The folder is written under a temporary name and then renamed, so an export is complete or not there.
"""

import errno
import json
from pathlib import Path

from safetensors import SafetensorError

from raptr.data.tokenizer import read_vocabulary
from raptr.files import new_folder, sync
from raptr.methods import Method
from raptr.models.contract import ModelConfig
from raptr.models.export import Exporter, save
from raptr.models.model import Model
from raptr.subnetworks import Subnetwork
from raptr.train.advice import plain_settings
from raptr.train.checkpoint import Checkpoint
from raptr.train.config import BUILTIN, Config
from raptr.train.loading import load_model
from raptr.train.run import RunFolder

STEP = "raptr_step"  # in an export's config.json: the step of the checkpoint that it holds


def export(run: Path, out: Path | None = None, *, layers: int | None = None, step: int | None = None) -> Path:
    """Export the model of a run, by default from its newest checkpoint, and return the folder.

    `layers` exports a subnetwork of that many layers (see `spread`) instead of the model that evaluation uses;
    `step` exports the checkpoint of that step. Each choice of `layers` and `step` has its own folder in the run, unless
    `out` names another.
    """
    loaded = load_model(run, step)
    model, checkpoint = loaded.model, loaded.checkpoint
    subnetwork = judged(loaded.method, checkpoint.step) if layers is None else spread(layers, model.config.layers)
    names = ["export", f"{layers}-layers" if layers else "", "" if step is None else f"step-{step}"]
    place = out or run / "-".join(filter(None, names))
    text = card(run.resolve().name, loaded.config, model.config, checkpoint, subnetwork, measured=layers is None)
    return export_trained(model, subnetwork, RunFolder(run).tokenizer, place, text, checkpoint.step)


def export_trained(model: Model, subnetwork: Subnetwork, tokenizer_file: Path, out: Path, card: str, step: int) -> Path:
    """Write the running layers as a stock model with tokenizer and card into `out`, replacing an earlier export."""
    if not out.name:
        raise ValueError(f"out is {str(out)!r}; a folder with a name is allowed")
    if out.exists() and not out.is_dir():
        raise ValueError(f"out is {str(out)!r}, a file. Name a new or empty folder, or an earlier export.")
    exporter = exporter_of(model.config)
    exported = exporter.convert(model, subnetwork, read_vocabulary(tokenizer_file))
    setattr(exported.config, STEP, step)
    tokenizer = exporter.tokenizer(tokenizer_file, model.config.positions)
    try:
        with new_folder(out) as partial:
            save(exported, tokenizer, partial)
            (partial / "README.md").write_text(card, encoding="utf-8", newline="\n")
            for path in (*partial.iterdir(), partial):
                sync(path)
            _refuse_strange(out, {path.name for path in partial.iterdir()})
    except Exception as error:
        if not isinstance(error, OSError | SafetensorError) and type(error) is not Exception:
            raise
        # On a full disk safetensors raises a SafetensorError and tokenizers a bare Exception, not an OSError.
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        number = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
        message = f"the export could not be written ({reason}). Free some space, or choose another folder as out"
        raise OSError(number, message, str(out)) from error
    return out


def exporter_of(config: ModelConfig) -> Exporter:
    """Return the exporter for a model of these dimensions; raises ValueError if there is no stock class."""
    exporter = config.exporter()
    if exporter is None:
        raise ValueError(f"models of {type(config).__name__} have no stock class of transformers to be exported to")
    return exporter


def judged(method: Method, step: int) -> Subnetwork:
    """Return the model that evaluation uses after `step` steps; raises ValueError if no stock model can hold it."""
    subnetwork = method.evaluated(step)
    gates = {*(subnetwork.head_gates or ()), *(subnetwork.part_gates or ())} - {1}
    scales = {*subnetwork.scales} - {0, 1} if subnetwork.scaled == "layer" else set()
    if gates or scales:
        numbers = ", ".join(f"{number:.3g}" for number in sorted(gates or scales))
        branches = ", or train with method.scaled=branches" if "scaled" in method.settings() else ""
        raise ValueError(
            f"after {step:,} of {method.steps:,} steps, method {method.name} multiplies "
            f"{'heads or MLP parts' if gates else 'whole layers'} by {numbers}, which a stock model cannot do. "
            f"Export a step at which every scale is 1, or an unscaled part with layers from 1 to "
            f"{subnetwork.layers}{branches}."
        )
    return subnetwork


def spread(count: int, layers: int) -> Subnetwork:
    """Return an unscaled subnetwork of `count` layers: the first, the last, and others evenly spaced between them.

    By default the first and the last layer run in every step of training, and they contribute most; neighbours between
    them are alike, so even gaps lose least. Nothing is random: the same count gives the same layers in every run, and
    a count of 1 the first layer. There are no scales because a stock model cannot scale whole layers.
    """
    if not 1 <= count <= layers:
        raise ValueError(f"layers is {count}; 1 to {layers} are allowed")
    gaps = max(count - 1, 1)
    kept = {(2 * i * (layers - 1) + gaps) // (2 * gaps) for i in range(count)}
    return Subnetwork(tuple(float(layer in kept) for layer in range(layers)))


def card(
    name: str, config: Config, dimensions: ModelConfig, found: Checkpoint, part: Subnetwork, *, measured: bool
) -> str:
    """Return the model card: what the model is, how it was trained, the loss it reached, how to load it."""
    method, *settings = plain_settings(config.make_method()).items()
    chosen = ", ".join(f"{key} {value}" for key, value in settings)
    progress = found.progress()
    loss = progress.eval_loss
    target, mixture = config.objective.kind.target, config.objective.mixture or {}
    reached = "not measured" if loss is None else f"{loss:.4f} nats per {target}, as last measured up to this step"
    of = "" if measured else " (of the full model: this part was not measured)"
    kept = ", ".join(str(layer + 1) for layer in part.kept)
    depth = str(part.size) if part.size == part.layers else f"{part.size} of the trained model's {part.layers}: {kept}"
    rows = {
        "layers": depth,
        "width": f"{dimensions.width:,}",
        "attention heads": f"{dimensions.heads}, each of size {dimensions.head_size}",
        "MLP width": f"{dimensions.mlp:,}",
        "vocabulary": f"{dimensions.vocabulary:,} tokens",
        "longest sequence": f"{dimensions.positions:,} tokens",
        **({} if config.model.start is None else {"started from": config.model.start}),
        "training text": "the Python standard library" if config.data.source == BUILTIN else config.data.source,
        "training method": method[1] + (f" ({chosen})" if chosen else ""),
        **({"denoisers": ", ".join(name for name, quota in mixture.items() if quota)} if mixture else {}),
        "training steps": f"{found.step:,} of {config.train.steps:,}, each on {config.train.batch:,} sequences of "
        f"{config.data.length:,} tokens",
        "training compute": f"{progress.flops:.3g} FLOPs, {progress.flops_layers:.3g} of them in the layers",
        "held-out loss": reached + of,
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    exporter = exporter_of(dimensions)
    section = exporter.sections.get(config.objective.name, "")
    notes = "".join(f"\n{text}\n" for text in (exporter.note, section) if text)
    return f"""---
library_name: transformers
pipeline_tag: {exporter.task}
tags: [{", ".join((*exporter.tags, config.objective.name))}]
---

# {name}

{exporter.says}

| | |
|---|---|
{table}

To try it, in this folder (elsewhere, set `folder` to its path):

```python
{exporter.example}
```
{notes}"""


def exported_step(folder: Path) -> int | None:
    """Return the step of the exported checkpoint; None if there is no export, or an old one that does not record it."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    step = config.get(STEP) if isinstance(config, dict) else None
    return step if isinstance(step, int) else None


def _refuse_strange(out: Path, names: set[str]) -> None:
    """Refuse a folder that contains anything but an export."""
    if strange := sorted({path.name for path in out.iterdir()} - names) if out.exists() else []:
        raise ValueError(
            f"out is {str(out)!r}, a folder with other things in it ({', '.join(strange[:4])}). "
            "Name a new or empty folder, or an earlier export."
        )
