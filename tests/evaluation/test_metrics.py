"""The metrics are those of scikit-learn and scipy."""

import numpy as np
import pytest
from numpy.typing import NDArray

from raptr.evaluation.metrics import METRICS, accuracy, binary_f1, macro_f1, matthews, pearson, score, spearman


@pytest.mark.parametrize("classes", [2, 3])
def test_values_are_those_of_scikit_learn_and_scipy(classes: int) -> None:
    sklearn, scipy = pytest.importorskip("sklearn.metrics"), pytest.importorskip("scipy.stats")
    random = np.random.default_rng(classes)
    for size in (10, 277, 1043):
        true = random.integers(0, classes, size)
        predicted = np.where(random.random(size) < 0.5, true, random.integers(0, classes, size))
        assert accuracy(true, predicted) == pytest.approx(sklearn.accuracy_score(true, predicted))
        assert matthews(true, predicted) == pytest.approx(sklearn.matthews_corrcoef(true, predicted))
        values, ties = true + random.normal(size=size), predicted.astype(float)
        assert pearson(values, ties) == pytest.approx(scipy.pearsonr(values, ties).statistic)
        assert spearman(values, ties) == pytest.approx(scipy.spearmanr(values, ties).statistic)


def test_values_of_the_documentation_of_scikit_learn_and_scipy() -> None:
    assert matthews([1, 1, 1, -1], [1, -1, 1, 1]) == pytest.approx(-1 / 3)
    assert spearman([1, 2, 3, 4, 5], [5, 6, 7, 8, 7]) == pytest.approx(0.8207826816681233)
    assert pearson([1, 2, 3, 4, 5, 6, 7], [10, 9, 2.5, 6, 4, 3, 2]) == pytest.approx(-0.828503883588428)
    assert accuracy([0, 1, 2, 3], [0, 2, 1, 3]) == 0.5


@pytest.mark.parametrize("seed", range(3))
def test_matthews_of_two_classes(seed: int) -> None:
    true, predicted = np.random.default_rng(seed).integers(0, 2, (2, 50))
    hits, rejections = int(sum(true & predicted)), int(sum((1 - true) & (1 - predicted)))
    alarms, misses = int(sum((1 - true) & predicted)), int(sum(true & (1 - predicted)))
    spread = (hits + alarms) * (hits + misses) * (rejections + alarms) * (rejections + misses)
    assert matthews(true, predicted) == pytest.approx((hits * rejections - alarms * misses) / spread**0.5)


@pytest.mark.parametrize("seed", range(3))
def test_matthews_of_three_classes_is_a_correlation_of_indicators(seed: int) -> None:
    random = np.random.default_rng(seed)
    true = random.integers(0, 3, 60)
    predicted = np.where(random.random(60) < 0.5, true, random.integers(0, 3, 60))
    x, y = (np.eye(3)[labels] - np.eye(3)[labels].mean(0) for labels in (true, predicted))
    assert matthews(true, predicted) == pytest.approx((x * y).sum() / np.sqrt((x * x).sum() * (y * y).sum()))


@pytest.mark.parametrize("seed", range(3))
def test_pearson_and_spearman_with_ties(seed: int) -> None:
    random = np.random.default_rng(seed)
    x = random.integers(0, 6, 40).astype(float)
    y = x + random.integers(-3, 4, 40).astype(float)
    assert pearson(x, y) == pytest.approx(np.corrcoef(x, y)[0, 1])
    assert spearman(x, y) == pytest.approx(np.corrcoef(ranks(x), ranks(y))[0, 1])


def ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.array([sum(values < value) + (sum(values == value) + 1) / 2 for value in values], dtype=np.float64)


def test_a_constant_scores_zero_in_every_correlation() -> None:
    expected = {"accuracy": 0.6, "matthews": 0, "pearson": 0, "spearman": 0, "pearson-spearman": 0}
    assert score(list(METRICS), [0, 1, 1, 0, 1], [1, 1, 1, 1, 1]) == expected
    assert score(list(METRICS), [1, 1, 1, 1, 1], [0, 1, 1, 0, 1]) == expected


def test_rounding_does_not_make_a_constant_vary() -> None:
    values = np.random.default_rng(0).random(1501)
    assert pearson(values, np.full(1501, values.mean())) == 0


def test_the_one_number_of_stsb_is_the_mean_of_both_correlations() -> None:
    scores = score(["pearson-spearman", "pearson", "spearman"], [1, 2, 3, 9], [1, 3, 2, 9])
    assert scores["pearson"] != pytest.approx(scores["spearman"])
    assert scores["pearson-spearman"] == pytest.approx((scores["pearson"] + scores["spearman"]) / 2)


def test_f1_of_a_class_that_is_neither_there_nor_predicted() -> None:
    assert binary_f1([0, 0], [0, 0]) == 0


def test_f1_is_scikit_learns() -> None:
    reference = pytest.importorskip("sklearn.metrics")
    random = np.random.default_rng(0)
    for size in (1, 5, 40):
        targets, predictions = random.integers(0, 3, size), random.integers(0, 3, size)
        assert macro_f1(targets, predictions) == pytest.approx(
            reference.f1_score(targets, predictions, average="macro")
        )
        assert binary_f1(targets == 1, predictions == 1) == pytest.approx(
            reference.f1_score(targets == 1, predictions == 1, zero_division=0)
        )
