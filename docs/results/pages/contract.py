"""What a results page consists of, and how its numbers are written."""

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
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    assert {len(line) for line in lines} == {len(head)}
    return "\n".join("|" + "|".join("---" if cell == "---" else f" {cell} " for cell in line) + "|" for line in lines)


def fixed(value: float, digits: int) -> str:
    """Format with this number of digits after the point and a real minus sign (none for what is rounded to 0)."""
    return f"{round(value, digits) + 0.0:.{digits}f}".replace("-", "−")


def short(value: float, digits: int = 2) -> str:
    """Format with this number of significant digits; very small and very large numbers as 1.8e-4."""
    if 10**digits <= abs(value) < 1e6:
        return f"{value:,.0f}".replace("-", "−")
    if value == 0 or 0.001 <= abs(value) < 1000:
        return f"{value:#.{digits}g}".rstrip(".").replace("-", "−")
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    return f"{mantissa.replace('-', '−')}e{int(exponent)}"


def rate(value: float) -> str:
    """Format a learning rate, such as 1.5e-3."""
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def with_deviation(pair: Sequence[float | None], digits: int = 3) -> str:
    """Format mean ± deviation, or "diverged" if there is none."""
    mean, deviation = pair
    return "diverged" if mean is None or deviation is None else f"{short(mean, digits)} ± {short(deviation, 1)}"


def with_interval(mean: float, interval: float | None, digits: int = 3, *, sign: bool = False) -> str:
    """Format a mean ± the half-width of its interval, if it has one; with `sign`, a plus too, for differences."""
    shown = f"{round(mean, digits) + 0.0:{'+' if sign else ''}.{digits}f}".replace("-", "−")
    return shown if interval is None else f"{shown} ± {fixed(interval, digits)}"


def ranged(interval: Mapping[str, float], digits: int | None = 2) -> str:
    """Format a mean with its interval, as −0.37 (−0.38 to −0.37); `digits` None: two significant digits."""
    values = [interval[name] for name in ("mean", "low", "high")]
    mean, low, high = (short(value) if digits is None else fixed(value, digits) for value in values)
    return f"{mean} ({low} to {high})"
