"""Format large numbers and durations for people, and any values for JSON."""

import math
from collections.abc import Mapping
from typing import Any

FLOP_PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z", "Y")
COUNT_PREFIXES = ("", "k", "M", "B", "T")


def scale(value: float, prefixes: tuple[str, ...]) -> tuple[float, str]:
    """Return the divisor and the prefix that bring a value below 1000."""
    # Rounding comes first: 999,960 is shown as 1M, not as 1000k.
    rounded = float(f"{abs(value):.3g}")
    power = 0
    while power < len(prefixes) - 1 and rounded >= 1000 ** (power + 1):
        power += 1
    return 1000.0**power, prefixes[power]


def short(value: float, prefixes: tuple[str, ...] = COUNT_PREFIXES, space: str = "") -> str:
    """Format a value with three digits and a prefix, such as `40.9M`, with `space` between them."""
    divisor, prefix = scale(value, prefixes)
    scaled = value / divisor
    if abs(scaled) >= 999.5:
        return f"{scaled:,.0f}{space}{prefix}"
    return f"{scaled:.3g}{space}{prefix}"


def duration(seconds: float) -> str:
    """Format a duration, such as `0.4s`, `3m 12s` or `2h 05m`."""
    if not math.isfinite(seconds):
        return str(seconds)
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    minutes = round(seconds / 60)
    return f"{minutes // 60}h {minutes % 60:02d}m"


def step_time(seconds: float) -> str:
    """Format the time of a step with three digits, such as `850 µs`, `42.1 ms` or `1.25 s`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if float(f"{seconds / size:.3g}") >= 1 or unit == "µs":
            break
    return f"{seconds / size:.3g} {unit}"


def time_unit(seconds: float) -> tuple[float, str]:
    """Return the unit for plotting times up to this one: its length in seconds and its name."""
    for size, name in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * size:
            return size, name
    return 1.0, "seconds"


def counted(number: float, word: str) -> str:
    """Format a number, which may be an average, with the word for what it counts, such as `6 layers`."""
    return f"{number:.3g} {word}{'' if number == 1 else 's'}"


def plain(value: Any) -> Any:
    """Convert nested values to what JSON can hold; a number that is not finite becomes None."""
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
