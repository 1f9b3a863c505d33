"""Accuracy, F1, Matthews correlation, Pearson and Spearman correlation, as scikit-learn and scipy define them.

One difference: a correlation with constant values is 0 here, while scipy gives nan.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray


def accuracy(targets: ArrayLike, predictions: ArrayLike) -> float:
    """Return the fraction of predictions that are right."""
    return float(np.mean(np.asarray(targets) == np.asarray(predictions)))


def binary_f1(targets: ArrayLike, predictions: ArrayLike, label: int = 1) -> float:
    """Return the F1 of one class, the harmonic mean of precision and recall; 0 if no target or prediction has it."""
    true, predicted = np.asarray(targets) == label, np.asarray(predictions) == label
    total = int(true.sum() + predicted.sum())
    return 2 * int((true & predicted).sum()) / total if total else 0.0


def macro_f1(targets: ArrayLike, predictions: ArrayLike) -> float:
    """Return the mean F1 of all classes that occur in targets or predictions."""
    classes = np.unique(np.concatenate([np.asarray(targets), np.asarray(predictions)]))
    return float(np.mean([binary_f1(targets, predictions, label) for label in classes.tolist()]))


def matthews(targets: ArrayLike, predictions: ArrayLike) -> float:
    """Return the Matthews correlation, for two or more classes (Gorodkin, 2004)."""
    true, predicted = np.asarray(targets), np.asarray(predictions)
    classes = np.unique(np.concatenate([true, predicted]))
    true_k = np.array([np.sum(true == k) for k in classes], dtype=np.float64)
    predicted_k = np.array([np.sum(predicted == k) for k in classes], dtype=np.float64)
    n, correct = float(len(true)), float(np.sum(true == predicted))
    spread = (n * n - true_k @ true_k) * (n * n - predicted_k @ predicted_k)
    return float((correct * n - true_k @ predicted_k) / np.sqrt(spread)) if spread > 0 else 0.0


def pearson(targets: ArrayLike, predictions: ArrayLike) -> float:
    """Return the linear correlation."""
    x, y = np.asarray(targets, dtype=np.float64), np.asarray(predictions, dtype=np.float64)
    if np.ptp(x) == 0 or np.ptp(y) == 0:  # a constant minus its mean may not be exactly 0
        return 0.0
    x, y = x - x.mean(), y - y.mean()
    return float(np.clip(x @ y / (np.sqrt(x @ x) * np.sqrt(y @ y)), -1, 1))


def spearman(targets: ArrayLike, predictions: ArrayLike) -> float:
    """Return the correlation of ranks; equal values share their mean rank."""
    return pearson(_ranks(targets), _ranks(predictions))


def _ranks(values: ArrayLike) -> NDArray[np.float64]:
    _, inverse, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: NDArray[np.float64] = (last - (counts - 1) / 2)[inverse]
    return ranks


METRICS: dict[str, Callable[[ArrayLike, ArrayLike], float]] = {
    "accuracy": accuracy,
    "matthews": matthews,
    "pearson": pearson,
    "spearman": spearman,
    # GLUE's single number for STS-B
    "pearson-spearman": lambda targets, predictions: (
        (pearson(targets, predictions) + spearman(targets, predictions)) / 2
    ),
}


def score(names: Sequence[str], targets: ArrayLike, predictions: ArrayLike) -> dict[str, float]:
    """Return the values of the named metrics."""
    return {name: METRICS[name](targets, predictions) for name in names}
