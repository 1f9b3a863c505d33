"""The statistics against numbers worked out by hand, and how they are shown."""

import math
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.figure import Figure

from raptr.comparison.outcomes import Outcome
from raptr.comparison.plot import draw
from raptr.comparison.table import Row, best_peak, denoisers_markdown, difference, finals, markdown, notes, rows
from raptr.report.statistics import Mean, mean, pooled, student

FULL, REDUCED = "full", "full (reduced)"


def run(label: str, peak: float, seed: int, loss: float | None, **other: float) -> Outcome:
    diverged = 7 if loss is None else None
    flops, seconds = other.get("flops", 100.0), other.get("seconds", 10.0)
    end = math.nan if loss is None else loss
    curve = ((0, 0.0, 9.0), (5, flops / 2, 5.0), (10, flops, end))
    return Outcome(label, peak, seed, 10, loss, diverged, flops, seconds, curve)


OUTCOMES = [
    *(run(FULL, 0.1, seed, loss) for seed, loss in enumerate([3.0, 3.2, 3.1])),
    *(run(FULL, 0.2, seed, loss) for seed, loss in enumerate([2.0, 2.4, 2.2])),
    *(run(FULL, 0.4, seed, loss) for seed, loss in enumerate([2.5, None, 1.0])),
    *(run(REDUCED, 0.1, seed, loss, flops=75.0) for seed, loss in enumerate([2.3, 2.8, 2.7])),
    *(run("raptr", 0.2, seed, loss, flops=76.0, seconds=8.0) for seed, loss in enumerate([2.1, 2.3, 2.5])),
    *(run("raptr", 0.4, seed, loss, flops=76.0, seconds=8.0) for seed, loss in enumerate([1.9, 2.5, 2.2])),
]
GRIDS = {FULL: (0.1, 0.2, 0.4), REDUCED: (0.1,), "raptr": (0.2, 0.4)}


def table(outcomes: list[Outcome], grids: dict[str, tuple[float, ...]] = GRIDS) -> dict[tuple[str, float], Row]:
    made = rows(outcomes, grids, 100.0)
    return {(row.label, row.peak): row for row in made}


def assert_near(found: Mean | None, expected: float, error: float, n: int) -> None:
    assert found is not None
    t = {2: 12.706, 3: 4.303}[n]
    assert (found.mean, found.interval) == pytest.approx((expected, t * error))
    assert found.n == n


def test_mean_and_interval() -> None:
    assert_near(mean([1.0, 2.0, 6.0]), 3.0, math.sqrt(7 / 3), 3)
    many = mean([0.0, 1.0] * 50)
    assert many is not None
    assert many.interval == pytest.approx(2.042 * math.sqrt(25 / 99) / 10)  # beyond 30 degrees of freedom, that of 30
    assert mean([4.0]) == Mean(4.0, None, 1)
    assert mean([]) is None


@pytest.mark.parametrize("free", range(1, 31))
def test_students_t_leaves_5_percent_outside(free: int) -> None:
    t = np.linspace(0, student(free), 20_001)
    scale = math.gamma((free + 1) / 2) / math.gamma(free / 2) / math.sqrt(free * math.pi)
    density = scale * (1 + t**2 / free) ** (-(free + 1) / 2)
    assert 2 * np.trapezoid(density, t) == pytest.approx(0.95, abs=6e-5)  # t has three decimals


def test_pooled_intervals_take_the_variance_within_all_groups() -> None:
    def group(*values: float, own: float | None = None) -> list[Mean]:
        return [Mean(value, own, 3) for value in values]

    # within: 2·0.5² and 2·1.5², on 2 degrees of freedom: variance 2.5
    one, other, single, none = pooled([group(1.0, 2.0), group(7.0, 10.0), group(4.0), []])
    assert_near(one, 1.5, math.sqrt(2.5 / 2) * 4.303 / 12.706, 2)
    assert_near(other, 8.5, math.sqrt(2.5 / 2) * 4.303 / 12.706, 2)
    assert single is not None
    assert (single.mean, single.n) == (4.0, 1)
    assert single.interval == pytest.approx(4.303 * math.sqrt(2.5))
    assert none is None
    assert pooled([group(1.0, 2.0, 6.0)]) == [mean([1.0, 2.0, 6.0])]
    assert pooled([group(1.0), group(2.0)]) == [Mean(1.0, None, 1), Mean(2.0, None, 1)]
    (pair,) = pooled([[Mean(1.0, 12.706 * 2.0, 2)] * 2])  # variance 4 on 2 degrees of freedom
    assert_near(pair, 1.0, 2.0 / math.sqrt(2) * 4.303 / 12.706, 2)
    # an error that rests on one value says nothing of how far values lie apart
    assert pooled([[Mean(1.0, 0.5, 1)], [Mean(2.0, 0.5, 1)]]) == [Mean(1.0, None, 1), Mean(2.0, None, 1)]
    # the values' own errors: variance 4 on 8 degrees of freedom, where those between them are smaller
    (near,) = pooled([group(1.0, 1.1, 1.2, 1.3, own=4.303 * 2.0)])
    assert near is not None
    assert near.interval == pytest.approx(2.306 * 2.0 / math.sqrt(4))


def test_errors_of_scores_are_pooled_over_the_entries() -> None:
    def judged(label: str, seed: int, *scores: float) -> Outcome:
        cells = {name: {"score": one, "interval": 0.2, "n": 3} for name, one in zip(("a", "b"), scores, strict=True)}
        return replace(run(label, 0.1, seed, 2.0), scores=cells)

    first, second = judged(FULL, 0, 0.5, 0.7), judged(FULL, 1, 0.6, 0.7)
    other = [judged("raptr", 0, 0.1, 0.1), judged("raptr", 1, 0.4, 0.5)]
    grids: dict[str, tuple[float, ...]] = {FULL: (0.1,), "raptr": (0.1,)}
    # a: variance (0.005 + 0.045) / 2, b: (0 + 0.08) / 2, averages 0.6, 0.65 and 0.1, 0.45: (0.00125 + 0.06125) / 2
    expected = ((0.55, 0.7, 0.625), (0.25, 0.3, 0.275))
    for row, means in zip(table([first, second, *other], grids).values(), expected, strict=True):
        assert list(row.scores) == ["a", "b", "Avg."]
        for score, centre, variance in zip(row.scores.values(), means, (0.025, 0.04, 0.03125), strict=True):
            assert_near(score, centre, math.sqrt(variance / 2) * 4.303 / 12.706, 2)
    both, alone = table([first, second, other[0]], grids).values()
    assert_near(both.scores["a"], 0.55, 0.05, 2)  # that of its own models: larger than 2.776·0.2/4.303/√2
    assert alone.scores["a"] == Mean(0.1, 0.2, 1)  # of one model alone the error of its own score
    assert alone.scores["Avg."].interval == pytest.approx(0.2 / math.sqrt(2))
    unsure = replace(other[0], scores={name: {**cell, "interval": 9.0} for name, cell in other[0].scores.items()})
    assert table([first, second, unsure], grids)[FULL, 0.1].scores == both.scores  # nor is it that of others
    assert table([first, second, run("raptr", 0.1, 0, 2.0)], grids)["raptr", 0.1].scores == {}


def test_differences_are_paired_by_seed_whatever_the_order() -> None:
    # 0.4 - 0.1 and 0.9 - 0.5: mean 0.35, deviation 0.05·√2, standard error 0.05; seed 2 has no partner
    ones = [run("a", 1, 0, 0.4), run("a", 1, 1, 0.9), run("a", 1, 2, 5.0)]
    others = [run("b", 1, 1, 0.5), run("b", 1, 0, 0.1), run("b", 1, 3, 9.0)]
    assert_near(difference(ones, others), 0.35, 0.05, 2)
    assert difference(ones, [run("b", 1, 0, None)]) is None


def test_a_whole_table_by_hand() -> None:
    made = table(OUTCOMES)
    raptr = made["raptr", 0.4]
    assert_near(raptr.loss, 2.2, 0.3 / math.sqrt(3), 3)
    # to full at 0.2: -0.1, +0.1, 0; to reduced: -0.4, -0.3, -0.5
    assert_near(raptr.to_full, 0.0, 0.1 / math.sqrt(3), 3)
    assert_near(raptr.to_reduced, -0.4, 0.1 / math.sqrt(3), 3)
    assert raptr.flops == pytest.approx(0.76)
    assert raptr.relative_time == pytest.approx(0.8)
    full = made[FULL, 0.2]
    assert full.to_full is None
    assert full.to_reduced is not None
    assert full.to_reduced.mean == pytest.approx(-0.4)
    assert made[REDUCED, 0.1].to_reduced is None
    line = "| raptr | 0.4* | 10 | 0.760 | 2.2000 ± 0.7453 | 3 | +0.0000 ± 0.2484 | -0.4000 ± 0.2484 | 8.0s | 0.80 |"
    assert line in markdown([*made.values()]).splitlines()


def test_times_are_those_of_the_runs_that_have_any() -> None:
    timed, *others = OUTCOMES[-3:]
    untimed = [replace(run, seconds=None) for run in OUTCOMES[:-3]]
    rest = [replace(run, seconds=None) for run in others]
    made = table([*untimed, timed, *rest])
    assert (made["raptr", 0.4].seconds, made["raptr", 0.4].relative_time) == (8.0, None)  # full training has no time
    assert "| time |" in markdown([*made.values()])
    assert "| time |" not in markdown([*table([*untimed, *rest]).values()])


def test_the_best_learning_rate_and_the_edge_of_the_grid() -> None:
    made = table(OUTCOMES)
    assert [key for key, row in made.items() if row.best] == [(FULL, 0.2), (REDUCED, 0.1), ("raptr", 0.4)]
    assert [key for key, row in made.items() if row.edge] == [("raptr", 0.4)]  # full's is inside, reduced has no grid
    assert [(row.label, row.peak) for row in finals(list(made.values()))] == [
        (FULL, 0.2),
        (REDUCED, 0.1),
        ("raptr", 0.4),
    ]
    assert "edge of its grid" in " ".join(notes(list(made.values())))
    assert "| raptr | 0.4* |" in markdown(list(made.values()))


def test_the_best_learning_rate_is_judged_on_the_seeds_that_all_have() -> None:
    # over seed 0 alone 0.1 wins; a lucky seed that only 0.2 has run must not count
    outcomes = {0.1: [run("a", 0.1, 0, 2.0)], 0.2: [run("a", 0.2, 0, 3.0), run("a", 0.2, 1, 0.1)], 0.3: []}
    assert best_peak(outcomes) == 0.1
    assert best_peak({0.1: [run("a", 0.1, 0, 2.0)], 0.2: [run("a", 0.2, 1, 1.0)]}) is None
    assert best_peak({0.1: []}) is None


def test_a_learning_rate_that_diverged_on_a_seed_that_others_lack_is_not_the_best() -> None:
    outcomes = {0.1: [run("a", 0.1, 0, 3.0)], 0.2: [run("a", 0.2, 0, 2.0), run("a", 0.2, 1, None)]}
    assert best_peak(outcomes) == 0.1
    assert best_peak({0.2: outcomes[0.2]}) is None


def test_diverged_runs_are_named_and_their_learning_rate_is_never_the_best() -> None:
    made = table(OUTCOMES)
    row = made[FULL, 0.4]
    assert dict(row.diverged) == {1: 7}
    assert_near(row.loss, 1.75, 0.75, 2)
    assert not row.best
    assert "Diverged: full at peak 0.4, seed 1 in step 7." in notes(list(made.values()))
    assert "1.7500 ± 9.5295, 1 diverged | 2 |" in markdown(list(made.values()))


def test_an_entry_that_only_diverged_is_shown_without_a_loss() -> None:
    outcomes = [*OUTCOMES, *(run("wild", peak, 0, None) for peak in (0.2, 0.4))]
    made = table(outcomes, {**GRIDS, "wild": (0.2, 0.4)})
    last = finals(list(made.values())[::-1])[0]
    assert (last.label, last.peak, last.best, last.loss, last.to_full) == ("wild", 0.2, False, None, None)
    assert "| wild | 0.2 | 10 | – | 1 diverged | 0 | – | – | – | – |" in markdown([*made.values()])


def test_the_column_of_reduced_full_is_left_out_where_there_is_none() -> None:
    made = [replace(row, to_reduced=None) for row in table(OUTCOMES).values()]
    assert "to reduced" not in markdown(made)
    assert "to reduced" in markdown(list(table(OUTCOMES).values()))


def drawn(outcomes: list[Outcome], grids: dict[str, tuple[float, ...]]) -> Figure:
    made = list(table(outcomes, grids).values())
    figure = draw(made, outcomes, 100.0)
    figure.draw_without_rendering()
    return figure


def test_the_plot_of_a_grid() -> None:
    left, right = drawn(OUTCOMES, GRIDS).axes
    lines = [line for line in left.lines if line.get_linestyle() == "--"]
    assert [float(np.ravel(line.get_xdata())[0]) for line in lines] == pytest.approx([2.2, 2.6])
    names = [tick.get_text() for tick in left.get_yticklabels()]
    assert names == [
        "full, 1.00 FLOPs, peak 0.2",
        "raptr, 0.76 FLOPs, peak 0.4*",
        "full (reduced), 0.75 FLOPs, peak 0.1",
    ]
    assert right.get_xscale() == "log"
    (cross,) = [line for line in right.lines if line.get_gid() == "diverged"]
    assert cross.get_xdata() == [0.4]


def test_the_plot_without_a_grid_shows_the_way_there() -> None:
    outcomes = [run for run in OUTCOMES if (run.label, run.peak) in ((FULL, 0.2), (REDUCED, 0.1), ("raptr", 0.2))]
    outcomes[-1] = replace(outcomes[-1], curve=outcomes[-1].curve[1:])  # a run that was evaluated less often
    _, right = drawn(outcomes, {FULL: (0.2,), REDUCED: (0.1,), "raptr": (0.2,)}).axes
    assert [line.get_gid() for line in right.lines] == [FULL, REDUCED, "raptr"]
    assert right.lines[1].get_xydata().tolist()[-1] == [0.75, pytest.approx(2.6)]  # type: ignore[union-attr]
    assert len(right.lines[2].get_xydata()) == 2  # type: ignore[arg-type]


def test_losses_above_the_panel_are_named_at_its_edge() -> None:
    bad = [run("raptr", 0.8, seed, 900.0) for seed in range(3)]
    figure = drawn([*OUTCOMES, *bad], {**GRIDS, "raptr": (0.2, 0.4, 0.8)})
    _, right = figure.axes
    assert right.get_ylim()[1] < 900
    (text,) = [text for text in right.texts if text.get_gid() == "beyond"]
    assert "900.00" in text.get_text()
    assert text.xy[0] == 0.8  # type: ignore[attr-defined]
    assert "above the panel" in right.get_title()
    assert right.title.get_window_extent().x1 < figure.bbox.x1
    assert "above the panel" not in drawn(OUTCOMES, GRIDS).axes[1].get_title()


def test_labels_are_shown_as_they_stand_not_as_markup() -> None:
    shown = markdown([replace(row, label="<b>a|b</b> *c* [d](e)") for row in table(OUTCOMES).values()])
    assert r"| &lt;b&gt;a\|b&lt;/b&gt; \*c\* \[d\](e) |" in shown


def test_an_entry_that_only_diverged_is_drawn_last_under_its_own_name() -> None:
    name = r"$\wild$"  # no formula
    left, _ = drawn([*OUTCOMES, run(name, 0.2, 0, None)], {**GRIDS, name: (0.2,)}).axes
    assert left.get_yticklabels()[-1].get_text().startswith(name)
    (text,) = left.texts
    assert (text.get_text(), text.xy[1]) == ("diverged", len(left.get_yticks()) - 1)  # type: ignore[attr-defined]


def test_a_plot_of_nothing_but_divergence() -> None:
    outcomes = [run(FULL, peak, 0, None) for peak in (0.1, 0.2)]
    figure = drawn(outcomes, {FULL: (0.1, 0.2)})
    assert [text.get_text() for text in figure.axes[0].texts] == ["diverged"]


def test_losses_of_denoisers_are_means_over_the_seeds() -> None:
    losses = {0: {"R-3-0.15": 2.0, "S": 3.0}, 1: {"R-3-0.15": 2.2, "S": 3.4}}
    outcomes = [replace(run("full", 0.1, seed, 2.5), denoisers=found) for seed, found in losses.items()]
    outcomes.append(run("full", 0.1, 2, None))  # it diverged before it was judged
    shown = denoisers_markdown(list(table([*outcomes, run("raptr", 0.2, 0, 2.6)]).values()))
    lines = {line.split(" | ")[0].strip("| "): line for line in shown.splitlines()}
    assert [cell.strip() for cell in lines["entry"].strip("| ").split("|")] == ["entry", "held-out loss", *losses[0]]
    assert "2.1000 ±" in lines["full"]
    assert "3.2000 ±" in lines["full"]
    assert lines["raptr"].count("–") == 2
