"""The law: what is put in comes out, and it is not claimed while the measurements do not determine it."""

from dataclasses import replace

import pytest

from evidence.law import Law, described, fitted, of_method
from raptr.train.advice import Difference, Measured, Place

LAW = Law(constant=0.5, width=-0.06, layers=0.02, tokens_per_weight=0.03, error=0.0)
SIZES = [(12, 128, 81.0), (6, 256, 40.0), (12, 256, 20.0), (24, 256, 10.0), (12, 512, 5.0), (12, 256, 3.5)]
STAGES = {6: "3-4-5-6", 8: "4-5-7-8", 12: "6-8-10-12", 24: "12-16-20-24"}


def row(layers: int, width: int, length: float, gap: float | None = None) -> Measured:
    place = Place("bert", "mlm", "bert", layers, width, 4, 4, length)
    difference = Difference(LAW.gap(layers, width, length) if gap is None else gap, 0.01, 3)
    method = {"name": "raptr", "schedule": STAGES[layers]}
    return Measured("some", "raptr", place, method, 1000, 1000, 0.75, 2.5, difference, difference)


def test_a_law_is_found_again_and_predicts_the_size_that_is_kept_back() -> None:
    rows = [row(*size) for size in SIZES]
    law = fitted(rows)
    assert law is not None
    assert law.error == pytest.approx(0, abs=1e-9)
    assert law.gap(8, 384, 13.4) == pytest.approx(LAW.gap(8, 384, 13.4))
    said = described(rows)
    assert f"{LAW.gap(8, 384, 13.4):+.3f}; not measured yet" in said
    assert f"{LAW.gap(8, 384, 13.4):+.3f}; measured +0.999" in described([*rows, row(8, 384, 13.4, gap=0.999)])


def test_no_law_without_enough_places_that_differ_in_everything() -> None:
    rows = [row(*size) for size in SIZES]
    assert fitted(rows[:4]) is None
    assert fitted([row(12, 256, float(length)) for length in range(2, 9)]) is None
    along = [row(layers, 256, 240 / layers) for layers in (6, 12, 24)] * 2  # length and depth change together
    assert fitted(along) is None
    assert described(rows[:4]).count("not enough measurements") == 3


def test_only_the_same_method_on_the_same_kind_of_model_counts() -> None:
    good = row(24, 256, 10.0)
    others = [
        replace(good, method={**good.method, "scaling": "sqrt"}),
        replace(good, method={**good.method, "schedule": "6-12-18-24"}),
        replace(good, place=replace(good.place, init="fan-in")),
        replace(good, place=replace(good.place, family="decoder", objective="causal")),
    ]
    assert of_method({"name": "raptr", "schedule": "6-8-10-12"}, [good, *others]) == [good]
