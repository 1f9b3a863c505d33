"""The registry of studies, and `conduct_named`, which runs a study by its name."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from raptr.settings import check_choice
from raptr.studies.boolean import BOOLEAN
from raptr.studies.contract import Study, conduct, stoppable
from raptr.studies.linear import LINEAR
from raptr.studies.polynomial import POLYNOMIAL
from raptr.studies.polynomial_length import POLYNOMIAL_LENGTH
from raptr.studies.scaling import SCALING
from raptr.studies.stability import study_stability

STUDIES: dict[str, Study] = {study.name: study for study in (POLYNOMIAL, POLYNOMIAL_LENGTH, BOOLEAN, LINEAR, SCALING)}
STABILITY = "stability"  # studies a trained run; the others train models of their own
NAMES = (*STUDIES, STABILITY)


def conduct_named(
    name: str,
    run: Path | None,
    out: Path,
    *,
    step: int | None,
    seeds: int | None,
    small: bool,
    steps: Sequence[int],
    device: str,
    console: Console,
) -> Path:
    """Run a study by its name and return its folder.

    SIGTERM stops it as Ctrl-C does: finished jobs are kept. Options that the study does not take raise a ValueError.
    """
    check_choice("study", name, NAMES)
    if run is None and name == STABILITY:
        raise ValueError(f"The study {STABILITY} needs a run: raptr study {STABILITY} RUN, such as runs/demo-raptr.")
    if run is not None and name != STABILITY:
        raise ValueError(f"run is {str(run)!r}, but the study {name} trains models of its own. Leave it out.")
    if step is not None and name != STABILITY:
        raise ValueError(f"step is {step}, but the study {name} trains models of its own. Leave --step out.")
    options: dict[str, Any] = {"seeds": seeds, "small": small, "steps": steps}
    with stoppable():
        if run is None:
            return conduct(STUDIES[name], out, **options, device=device, console=console)
        for option, value in options.items():
            if value:
                raise ValueError(f"{option} is {value}; the study {STABILITY} does not take it")
        return study_stability(run, out, step=step, device=device, console=console)
