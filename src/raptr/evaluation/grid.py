"""Grids of learning rates that are widened until the best rate lies inside, in pretraining and in fine-tuning."""

from collections.abc import Sequence

MOST = 8  # rates that may be added to a grid


def widened(rates: Sequence[float], given: int, best: float | None) -> list[float]:
    """The rates to add to a grid of which `given` were asked for; none where the best lies inside, or `MOST` are added.

    Half the lowest rate, twice the highest, or both, where the best is one of these; half where all diverged.
    """
    if len(rates) >= given + MOST:
        return []
    low, high = min(rates), max(rates)
    lower = [low / 2] if best in (None, low) else []
    higher = [high * 2] if best == high else []
    return lower + higher
