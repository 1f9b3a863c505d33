"""Means with 95% intervals.

Intervals are Student's: 4.3 standard errors to either side for three values, 12.7 for two. When several groups of so
few values are compared, `pooled` uses the variance within all of them: for six pairs, 2.4 standard errors.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

# Student's t at 0.975 for 1 to 30 degrees of freedom
T95: tuple[float, ...] = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120),
    *(2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


def student(free: int) -> float:
    """Return Student's t at 0.975, for 95% intervals; above 30 degrees of freedom the slightly larger t of 30."""
    return T95[min(free, len(T95)) - 1]


@dataclass(frozen=True)
class Mean:
    """The mean of n values and the half-width of its 95% interval; None if unknown, as for a single value."""

    mean: float
    interval: float | None
    n: int


def mean(values: Iterable[float]) -> Mean | None:
    """Return the mean of values with its 95% interval, t times the sample deviation over √n; None without values."""
    listed = list(values)
    if not listed:
        return None
    n = len(listed)
    interval = student(n - 1) * stdev(listed) / math.sqrt(n) if n > 1 else None
    return Mean(fmean(listed), interval, n)


def pooled(groups: Sequence[Sequence[Mean]]) -> list[Mean | None]:
    """Return each group's mean (None if it is empty), with 95% intervals from one error for all groups.

    That error comes from the variance within the groups or, if it is larger, from the values' own errors, because two
    values can lie close together by chance.
    """
    centres = [fmean(value.mean for value in group) if group else math.nan for group in groups]
    squares = [(value.mean - centre) ** 2 for group, centre in zip(groups, centres, strict=True) for value in group]
    between = _error(sum(squares), sum(len(group) - 1 for group in groups if group))
    known = [
        (value.interval, value.n - 1)
        for group in groups
        for value in group
        if value.interval is not None and value.n > 1
    ]
    own = _error(sum(free * (half / student(free)) ** 2 for half, free in known), sum(free for _, free in known))
    error = max((half for half in (between, own) if half is not None), default=None)
    return [
        Mean(centre, None if error is None else error / math.sqrt(len(group)), len(group)) if group else None
        for group, centre in zip(groups, centres, strict=True)
    ]


def _error(squares: float, free: int) -> float | None:
    """Return half the 95% interval of one value, from a sum of squares and its degrees of freedom; None without any."""
    return student(free) * math.sqrt(squares / free) if free else None


def shown(value: Mean | None, digits: int, *, factor: int = 1, sign: str = "") -> str:
    """Format a mean with its interval, times a factor; None becomes a dash. `sign` is `+` for a difference.

    Zero has no minus sign, not even a small negative number that is rounded to zero.
    """
    if value is None:
        return "–"
    error = "" if value.interval is None else f" ± {factor * value.interval:.{digits}f}"
    return f"{factor * value.mean:{sign}z.{digits}f}{error}"
