"""The law: how a method's gap to full training with the same FLOPs depends on width, depth and length of training.

    gap = a + b·log2(width) + c·log2(layers) + d·log2(tokens per weight)

It is fitted by least squares over the places where the method was measured, provided that there are more places than
coefficients and that they differ in all three quantities. One size is kept back as a test: its gap is predicted without
its measurement.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raptr.train.advice import Measured, named, scaled

METHODS: tuple[Mapping[str, Any], ...] = (  # their settings at 12 layers
    {"name": "raptr", "schedule": "6-8-10-12"},
    {"name": "stacking", "schedule": "6-8-10-12"},
    {"name": "progressive-stacking", "schedule": "3-6-12", "lengths": "equal", "average": 9.0},
)
LAYERS = 12  # the depth of the models that these schedules are for
KEPT_BACK = (8, 384)  # layers and width of the size that the law is tested on
KEPT_BACK_LENGTH = 13.4  # its tokens per weight in evidence/kept-back-8x384.yaml
NUMBERS = 4  # coefficients that are fitted


@dataclass(frozen=True)
class Law:
    """A fitted law: the constant, the change of the gap with each doubling, and the largest error at a fitted place."""

    constant: float
    width: float
    layers: float
    tokens_per_weight: float
    error: float

    def gap(self, layers: int, width: int, tokens_per_weight: float) -> float:
        """Return the predicted difference in held-out loss to full training with the same FLOPs."""
        terms = np.array(_terms(layers, width, tokens_per_weight))
        return float(terms @ [self.constant, self.width, self.layers, self.tokens_per_weight])


def of_method(method: Mapping[str, Any], rows: Iterable[Measured]) -> list[Measured]:
    """Return a method's measurements at its relative depths, on BERT with its usual initial weights."""
    usual = [row for row in rows if (row.place.family, row.place.init) == ("bert", "bert")]
    return [row for row in usual if row.method == scaled(method, row.place.layers / LAYERS, 1.0)]


def fitted(rows: Sequence[Measured]) -> Law | None:
    """Return the law over these measurements, or None if they do not determine it."""
    places = [row.place for row in rows]
    matrix = np.array([_terms(place.layers, place.width, place.tokens_per_weight) for place in places])
    if len(rows) <= NUMBERS or np.linalg.matrix_rank(matrix, tol=1e-6) < NUMBERS:
        return None
    gaps = np.array([row.to_reduced.mean for row in rows])
    solution = np.linalg.lstsq(matrix, gaps, rcond=None)[0]
    constant, width, layers, tokens_per_weight = map(float, solution)
    return Law(constant, width, layers, tokens_per_weight, float(np.abs(matrix @ solution - gaps).max()))


def described(rows: Sequence[Measured]) -> str:
    """Return a Markdown list with each method's law, or what is missing for it."""
    lines = []
    for method in METHODS:
        measured = of_method(method, rows)
        kept = [row for row in measured if (row.place.layers, row.place.width) == KEPT_BACK]
        law = fitted([row for row in measured if row not in kept])
        lines.append(
            f"- **{named(method)}**: " + (_missing(measured) if law is None else _found(law, kept, len(measured)))
        )
    return "\n".join(lines)


def _found(law: Law, kept: Sequence[Measured], count: int) -> str:
    layers, width = KEPT_BACK
    predicted = law.gap(layers, width, KEPT_BACK_LENGTH)
    measured = f"measured {kept[0].to_reduced.mean:+.3f}" if kept else "not measured yet"
    return (
        f"gap = {law.constant:+.3f} {law.width:+.3f}·log2(width) {law.layers:+.3f}·log2(layers) "
        f"{law.tokens_per_weight:+.3f}·log2(tokens per weight), from {count - len(kept)} places, off by at most "
        f"{law.error:.3f} at one of them. For {layers}×{width} at {KEPT_BACK_LENGTH} tokens per weight it predicts "
        f"{predicted:+.3f}; {measured}."
    )


def _missing(rows: Sequence[Measured]) -> str:
    sizes = {f"{row.place.layers}×{row.place.width}" for row in rows}
    lengths = {row.place.tokens_per_weight for row in rows}
    return (
        f"not enough measurements: {len(rows)} ({', '.join(sorted(sizes)) or 'no size'}, {len(lengths)} "
        f"length{'' if len(lengths) == 1 else 's'}). At least {NUMBERS + 1} are needed, with different widths, depths "
        "and lengths that do not change together."
    )


def _terms(layers: int, width: int, tokens_per_weight: float) -> list[float]:
    return [1.0, math.log2(width), math.log2(layers), math.log2(tokens_per_weight)]
