"""Which runs are wanted, given what others came to."""

import math
from typing import Any

from raptr.comparison.outcomes import Outcome
from raptr.comparison.search import wanted
from raptr.comparison.spec import Comparison, read_comparison
from raptr.evaluation.grid import MOST


def comparison(**keys: Any) -> Comparison:
    settings = {"model": {"size": "tiny"}, "data": {"vocabulary": 2048, "length": 64}, "train": {"steps": 400}}
    entries = {"full": {"name": "full"}}
    return read_comparison({"settings": settings, "seeds": [0, 1, 2], "entries": entries, **keys})


def train(asked: Comparison, loss: Any, diverging: Any = ()) -> list[tuple[float, int]]:
    """Every run in the order in which it was wanted, with the loss of a peak given by a function."""
    outcomes: list[Outcome] = []
    while True:
        done = [(run.peak, run.seed) for run in outcomes]
        runs = [run for run in wanted(asked, outcomes) if (run.peak, run.seed) not in done]
        if not runs:
            return done
        # They may all run at once: the best rate's other seeds are not wanted before it is known.
        assert len({run.seed in asked.tune for run in runs}) == 1
        value = math.inf if (runs[0].peak, runs[0].seed) in diverging else loss(runs[0].peak)
        diverged = None if math.isfinite(value) else 3
        end = None if diverged else value
        outcomes.append(Outcome("full", runs[0].peak, runs[0].seed, 400, end, diverged, 1.0, None))


def test_without_tuning_seeds_every_seed_runs_at_every_rate() -> None:
    done = train(comparison(peaks=[1.0, 2.0]), lambda peak: peak)
    assert done == [(peak, seed) for seed in (0, 1, 2) for peak in (1.0, 2.0)]


def test_other_seeds_run_at_the_best_rate_of_the_tuning_seeds() -> None:
    done = train(comparison(peaks=[1.0, 2.0, 4.0], tune=[1]), lambda peak: abs(peak - 2))
    assert done == [(1.0, 1), (2.0, 1), (4.0, 1), (2.0, 0), (2.0, 2)]


def test_a_grid_is_widened_until_its_best_rate_is_inside() -> None:
    up = train(comparison(peaks=[1.0, 2.0], tune=[0], widen=True), lambda peak: abs(math.log2(peak) - 3))
    assert up == [*((2.0**power, 0) for power in range(5)), (8.0, 1), (8.0, 2)]
    down = train(comparison(peaks=[1.0, 2.0], tune=[0], widen=True), lambda peak: abs(math.log2(peak) + 1))
    assert down == [(1.0, 0), (2.0, 0), (0.5, 0), (0.25, 0), (0.5, 1), (0.5, 2)]
    alone = train(comparison(peaks=[1.0], seeds=[0], widen=True), lambda peak: abs(math.log2(peak)))
    assert alone == [(1.0, 0), (0.5, 0), (2.0, 0)]


def test_a_rate_that_diverges_bounds_the_grid() -> None:
    done = train(comparison(peaks=[1.0], tune=[0], widen=True), lambda peak: math.inf if peak > 2 else 1 / peak)
    assert done == [(1.0, 0), (0.5, 0), (2.0, 0), (4.0, 0), (2.0, 1), (2.0, 2)]


def test_a_rate_that_diverges_on_a_later_seed_gives_way_to_the_next_best() -> None:
    done = train(comparison(peaks=[1.0, 2.0], tune=[0]), lambda peak: 1 / peak, diverging=[(2.0, 1)])
    assert done == [(1.0, 0), (2.0, 0), (2.0, 1), (1.0, 1), (1.0, 2)]


def test_an_entry_that_always_diverges_ends() -> None:
    done = train(comparison(peaks=[1.0], tune=[0], widen=True), lambda peak: math.inf)
    assert done == [(0.5**power, 0) for power in range(MOST + 1)]
