"""Means with 95% intervals.

Intervals are Student's: of three values 4.3 standard errors to either side, of two 12.7. Where several groups of so
few values are compared, `pooled` takes the variance within all of them: for six pairs, 2.4 standard errors.
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
    """Student's t at 0.975, for a 95% interval; beyond 30 degrees of freedom that of 30, which is a little wider."""
    return T95[min(free, len(T95)) - 1]


@dataclass(frozen=True)
class Mean:
    """A mean over n values and the half-width of its 95% interval; None for that of a single one."""

    mean: float
    interval: float | None
    n: int


def mean(values: Iterable[float]) -> Mean | None:
    """The mean and its 95% interval: t times the sample deviation over √n."""
    listed = list(values)
    if not listed:
        return None
    n = len(listed)
    interval = student(n - 1) * stdev(listed) / math.sqrt(n) if n > 1 else None
    return Mean(fmean(listed), interval, n)


def pooled(groups: Sequence[Sequence[Mean]]) -> list[Mean | None]:
    """The mean of each group of means with a 95% interval, from one variance for all groups.

    That is the variance within the groups, or that of the values' own errors where it is larger: two values can lie
    close together by chance.
    """
    centres = [fmean(value.mean for value in group) if group else math.nan for group in groups]
    squares = [(one.mean - centre) ** 2 for group, centre in zip(groups, centres, strict=True) for one in group]
    between = _error(sum(squares), sum(len(group) - 1 for group in groups if group))
    known = [(one.interval, one.n - 1) for group in groups for one in group if one.interval is not None and one.n > 1]
    own = _error(sum(free * (half / student(free)) ** 2 for half, free in known), sum(free for _, free in known))
    error = max((found for found in (between, own) if found is not None), default=None)
    return [
        Mean(centre, None if error is None else error / math.sqrt(len(group)), len(group)) if group else None
        for group, centre in zip(groups, centres, strict=True)
    ]


def _error(squares: float, free: int) -> float | None:
    """Half a 95% interval of one value; unknown without a degree of freedom."""
    return student(free) * math.sqrt(squares / free) if free else None


def shown(value: Mean | None, digits: int, *, factor: int = 1, sign: str = "") -> str:
    """A mean with its interval, times a factor; a dash where there is none. `sign` is `+` for a difference.

    Zero has no minus, also where a small negative number is rounded to it.
    """
    if value is None:
        return "–"
    error = "" if value.interval is None else f" ± {factor * value.interval:.{digits}f}"
    return f"{factor * value.mean:{sign}z.{digits}f}{error}"
