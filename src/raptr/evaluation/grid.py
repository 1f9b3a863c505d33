"""Grids of learning rates that are widened until the best rate lies inside, for pretraining and fine-tuning."""

from collections.abc import Sequence

MOST = 8  # how many rates may be added to a grid


def widened(rates: Sequence[float], given: int, best: float | None) -> list[float]:
    """Return the rates to add to a grid that had `given` rates at first; none once `MOST` rates were added.

    These are half the lowest rate if that is the best or if all diverged (None), and twice the highest if that is the
    best. If the best rate lies inside the grid, none are added.
    """
    if len(rates) >= given + MOST:
        return []
    low, high = min(rates), max(rates)
    lower = [low / 2] if best in (None, low) else []
    higher = [high * 2] if best == high else []
    return lower + higher
