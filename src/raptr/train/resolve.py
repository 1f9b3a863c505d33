"""Resolving a run's settings from a recipe, a file and options; later ones replace earlier ones."""

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from raptr.methods.axes import AXES, by_axis
from raptr.recipes import RECIPES
from raptr.settings import check_choice, nested, read
from raptr.strict_yaml import parse_setting, read_yaml
from raptr.train.config import BUILTIN, Config, TrainSettings, merged
from raptr.train.optimizer import OptimizerSettings
from raptr.train.run import RunFolder

# The options whose names differ from those of their settings, as messages name them.
OPTIONS = {
    "method.name": "--method",
    **{f"method.{setting}": "schedule" for setting in AXES.values()},
    "model.start": "--init",
    "data.source": "--data",
    "optimizer.peak": "--lr",
}


def resolve(
    recipe: str | None,
    file: Path | None,
    given: Mapping[str, Any],
    sets: Iterable[str],
    run: Path | None = None,
) -> Config:
    """Return a command's configuration; `given` has options by `section.key` (None: not given), `sets` those of --set.

    A list under `method.schedule` holds schedules by axis, such as `mlp=1-2-4`; axes that it does not name run whole.
    Naming the method of the recipe or the file changes nothing else; naming another method drops that one's settings.
    If the folder of `model.start` is gone, its dimensions are taken from the run in the folder `run`.
    """
    settings: dict[str, Any] = {}
    if recipe is not None:
        check_choice("recipe", recipe, RECIPES)
        settings = dict(RECIPES[recipe]())
    sections = _sections(file) if file else {}
    settings = merged(settings, sections)
    options = {name: value for name, value in given.items() if value is not None}
    if isinstance(schedules := options.get("method.schedule"), list):
        del options["method.schedule"]
        options |= {f"method.{setting}": sizes for setting, sizes in by_axis(schedules).items()}
    later = dict(parse_setting(entry) for entry in sets)
    _refuse_contradiction(options, later)
    options |= later
    if "method.name" in options and options["method.name"] == settings.get("method", {}).get("name"):
        del options["method.name"]
    asked = nested(options)
    settings = with_warmup(merged(settings, asked), recipe, sections, asked)
    name = settings.get("method", {}).get("name")
    config = Config.read(_remembered(settings, run or default_run(recipe, name)))
    check_vocabulary(config, sections, asked)
    return config


def with_warmup(
    settings: dict[str, Any], recipe: str | None, *given: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the settings with a shorter warm-up if the recipe's does not fit into the steps, unless one is given.

    The shorter warm-up takes the same share of the steps as in the recipe.
    """
    if recipe is None or any("warmup" in sections.get("optimizer", {}) for sections in given):
        return settings
    optimizer = read(OptimizerSettings, settings["optimizer"], "optimizer.")
    steps, usual = read(TrainSettings, settings["train"], "train.").steps, RECIPES[recipe]()["train"]["steps"]
    left = steps - optimizer.decay_steps(steps)
    if optimizer.warmup <= left:
        return settings
    warmup = min(max(1, round(optimizer.warmup * steps / usual)), left)
    warnings.warn(
        f"optimizer.warmup is {warmup}: the recipe {recipe}'s warm-up of {optimizer.warmup} steps and a decay of "
        f"{steps - left} do not fit into {steps} steps, so the warm-up takes the same share of these as in the recipe. "
        "--set optimizer.warmup=… sets another.",
        stacklevel=2,
    )
    return {**settings, "optimizer": {**settings["optimizer"], "warmup": warmup}}


def check_vocabulary(config: Config, *given: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse a given `data.vocabulary` that differs from that of the text or of the model to start from.

    A size that a file gives for the built-in text does not count if other text is named later.
    """
    size = None
    for data in (sections.get("data", {}) for sections in given):
        built_in = data.get("source") == BUILTIN != config.data.source
        size = None if built_in else data.get("vocabulary", size)
    if size is not None and size != (actual := config.vocabulary_size()):
        prepared = config.data.source not in (None, BUILTIN)
        place = f"data.source is {config.data.source!r}" if prepared else f"model.start is {config.model.start!r}"
        raise ValueError(f"data.vocabulary is {size}, but {place} with {actual} tokens. Leave data.vocabulary out.")


def _refuse_contradiction(options: Mapping[str, Any], sets: Mapping[str, Any]) -> None:
    """Refuse an option and a --set that give the same setting different values."""
    for name, value in sets.items():
        if options.get(name) is not None and not _same(options[name], value):
            option = OPTIONS.get(name, "--" + name.partition(".")[2].replace("_", "-"))
            raise ValueError(f"{option} is {options[name]!r}, but --set {name} is {value!r}; give one of them")


def _same(one: Any, other: Any) -> bool:
    """Return whether `other`, as YAML reads it, is the value `one`: YAML reads 1e-3 as a text and 12 as a number."""
    try:
        return bool(type(one)(other) == one)
    except (TypeError, ValueError):
        return False


def default_run(recipe: str | None, method: object) -> Path:
    """Return the folder of a run if the user names none."""
    return Path("runs") / f"{recipe}-{method}"


def _remembered(settings: dict[str, Any], run: Path) -> dict[str, Any]:
    """Return the settings with the model of the run in `run`, if it started from the same folder, which is now gone."""
    model, folder = settings.get("model", {}), RunFolder(run)
    start = model.get("start")
    if not isinstance(start, str) or Path(start).exists() or not folder.config.is_file():
        return settings
    begun = folder.read()
    return settings if begun.model.start != start else {**settings, "model": {**begun.mapping()["model"], **model}}


def _sections(path: Path) -> dict[str, dict[str, Any]]:
    sections = read_yaml(path, "config")
    if not isinstance(sections, dict) or not all(isinstance(values, dict) for values in sections.values()):
        raise ValueError(f"config {str(path)!r} is not a mapping of sections; the config.yaml of any run is one")
    return sections
