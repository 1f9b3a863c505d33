"""A run's settings from a recipe, a file and options: the later replaces the earlier."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from raptr.methods.axes import by_axis
from raptr.recipes import RECIPES
from raptr.settings import check_choice, nested
from raptr.strict_yaml import parse_setting, read_yaml
from raptr.train.config import Config, merged
from raptr.train.run import RunFolder


def resolve(
    recipe: str | None,
    file: Path | None,
    method: str | None,
    given: Mapping[str, Any],
    sets: Iterable[str],
    run: Path | None = None,
) -> Config:
    """The configuration of a command; `given` are options by `section.key` (None: not given), `sets` those of --set.

    A list under `method.schedule` holds schedules by axis, `mlp=1-2-4`; axes that it does not name run whole.
    Where the folder of `model.start` is gone, the run in the folder `run` knows what it held.
    """
    settings: dict[str, Any] = {}
    if recipe is not None:
        check_choice("recipe", recipe, RECIPES)
        settings = dict(RECIPES[recipe]())
    settings = merged(settings, _sections(file) if file else {})
    options = {name: value for name, value in given.items() if value is not None}
    if isinstance(schedules := options.get("method.schedule"), list):
        del options["method.schedule"]
        options |= {f"method.{setting}": sizes for setting, sizes in by_axis(schedules).items()}
    options |= dict(parse_setting(entry) for entry in sets)
    if method is not None and method != settings.get("method", {}).get("name"):
        options["method.name"] = method
    settings = merged(settings, nested(options))
    name = settings.get("method", {}).get("name")
    return Config.read(_remembered(settings, run or default_run(recipe, name)))


def default_run(recipe: str | None, method: object) -> Path:
    """The folder of a run that names none."""
    return Path("runs") / f"{recipe}-{method}"


def _remembered(settings: dict[str, Any], run: Path) -> dict[str, Any]:
    """The settings with the dimensions of the run that is there, if it started from the same folder, now gone."""
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
