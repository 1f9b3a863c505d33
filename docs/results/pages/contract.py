"""What a results page is made of, and how its numbers are written."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from matplotlib.figure import Figure

Records = Mapping[str, Any]


@dataclass(frozen=True)
class Page:
    """A page (its path below docs/, without .md), its records (paths from the root), its tables and its figures."""

    name: str
    records: dict[str, str]
    tables: dict[str, Callable[[Records], str]]
    figures: dict[str, Callable[[Records], Figure | None]] = field(default_factory=dict)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    assert {len(line) for line in lines} == {len(head)}
    return "\n".join("|" + "|".join("---" if cell == "---" else f" {cell} " for cell in line) + "|" for line in lines)


def fixed(value: float, digits: int) -> str:
    """With so many digits after the point, and a real minus sign (none for what is rounded to 0)."""
    return f"{round(value, digits) + 0.0:.{digits}f}".replace("-", "−")


def short(value: float, digits: int = 2) -> str:
    """With so many significant digits; small numbers as 1.8e-4."""
    if 10**digits <= abs(value) < 1e6:
        return f"{value:,.0f}".replace("-", "−")
    if value == 0 or 0.001 <= abs(value) < 1000:
        return f"{value:#.{digits}g}".rstrip(".").replace("-", "−")
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    return f"{mantissa.replace('-', '−')}e{int(exponent)}"


def rate(value: float) -> str:
    """A learning rate, such as 1.5e-3."""
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def with_deviation(pair: Sequence[float | None], digits: int = 3) -> str:
    """Mean ± deviation; a run that diverged has none."""
    mean, deviation = pair
    return "diverged" if mean is None or deviation is None else f"{short(mean, digits)} ± {short(deviation, 1)}"


def with_interval(mean: float, interval: float | None, digits: int = 3, *, sign: bool = False) -> str:
    """A mean with the half-width of its interval, where it has one; `sign`: with a plus too, for a difference."""
    shown = f"{round(mean, digits) + 0.0:{'+' if sign else ''}.{digits}f}".replace("-", "−")
    return shown if interval is None else f"{shown} ± {fixed(interval, digits)}"


def ranged(interval: Mapping[str, float], digits: int | None = 2) -> str:
    """A mean with its interval: −0.37 (−0.38 to −0.37); without a number of digits two significant ones."""
    values = [interval[name] for name in ("mean", "low", "high")]
    mean, low, high = (short(value) if digits is None else fixed(value, digits) for value in values)
    return f"{mean} ({low} to {high})"
