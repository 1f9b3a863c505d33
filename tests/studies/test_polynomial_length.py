"""Polynomials at several lengths: the best rate of each, and training that goes on where it was stopped."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from raptr.studies import polynomial, polynomial_length
from raptr.studies.boolean import BOOLEAN
from raptr.studies.contract import conduct
from raptr.studies.polynomial import SNAPSHOT, Job, train
from raptr.studies.polynomial_length import POLYNOMIAL_LENGTH, Lengths
from raptr.studies.snapshot import write_snapshot
from tests.studies.test_polynomial import TOY

QUIET = Console(quiet=True)
PARTS = [Job(name, 5e-3, seed) for name in ("full", "raptr", "pld-matched") for seed in (0, 1)]


class Stop(Exception):
    pass


def stop_after(monkeypatch: pytest.MonkeyPatch, evaluations: int) -> None:
    """Let the training be interrupted after it kept its state so many times."""
    kept: list[Any] = []

    def write(*arguments: Any) -> None:
        write_snapshot(*arguments)
        kept.append(arguments)
        if len(kept) == evaluations:
            raise Stop

    monkeypatch.setattr(polynomial, "write_snapshot", write)
    monkeypatch.setattr(polynomial, "SNAPSHOT_SECONDS", 0.0)


@pytest.mark.parametrize("evaluations", [1, 3])
def test_stopped_training_goes_on_to_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evaluations: int
) -> None:
    monkeypatch.setattr("raptr.studies.residual_mlp_training.AHEAD", 7)  # no divisor of an evaluation's step
    whole = train(TOY, PARTS, device="cpu", console=QUIET)
    with monkeypatch.context() as patched:
        stop_after(patched, evaluations)
        with pytest.raises(Stop):
            train(TOY, PARTS, device="cpu", console=QUIET, snapshot=tmp_path / SNAPSHOT)
    drawn: list[int] = []
    scales = polynomial.scales

    def counted(*given: Any) -> Any:
        drawn.append(given[3])
        return scales(*given)

    monkeypatch.setattr(polynomial, "scales", counted)
    assert train(TOY, PARTS, device="cpu", console=QUIET, snapshot=tmp_path / SNAPSHOT) == whole
    assert min(drawn) == 5 * evaluations


def test_snapshots_are_not_written_more_often_than_they_should(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Any] = []
    monkeypatch.setattr(polynomial, "write_snapshot", lambda *arguments: written.append(arguments))
    train(TOY, PARTS, device="cpu", console=QUIET, snapshot=tmp_path / SNAPSHOT)
    assert len(written) == 0
    monkeypatch.setattr(polynomial, "SNAPSHOT_SECONDS", 0.0)
    train(TOY, PARTS, device="cpu", console=QUIET, snapshot=tmp_path / SNAPSHOT)
    assert len(written) == TOY.evaluations


def test_a_snapshot_of_other_runs_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        stop_after(patched, 2)
        with pytest.raises(Stop):
            train(TOY, PARTS, device="cpu", console=QUIET, snapshot=tmp_path / SNAPSHOT)
    other = replace(TOY, warmup=5)
    fresh = train(other, PARTS, device="cpu", console=QUIET)
    assert train(other, PARTS, device="cpu", console=QUIET, snapshot=tmp_path / SNAPSHOT) == fresh
    (tmp_path / SNAPSHOT).write_bytes(b"damaged")
    assert train(other, PARTS, device="cpu", console=QUIET, snapshot=tmp_path / SNAPSHOT) == fresh


def test_every_length_has_its_best_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"full": (1e-3, 1e-2), "raptr": (1e-3, 1e30), "pld-matched": (1e-2,)}
    monkeypatch.setattr(polynomial_length, "SMALL_SIZE", Lengths(TOY, steps=(20, 40), rates=rates))

    def go(**rest: Any) -> dict[str, Any]:
        folder = conduct(POLYNOMIAL_LENGTH, tmp_path, seeds=2, small=True, device="cpu", console=QUIET, **rest)
        assert (folder / "polynomial-length.png").stat().st_size > 10_000
        assert not list(folder.rglob(SNAPSHOT))
        result: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        return result

    result = go()
    assert [entry["steps"] for entry in result["lengths"]] == [20, 40]
    for entry in result["lengths"]:
        assert entry["methods"]["raptr"]["rate"] == 1e-3
        for name, numbers in entry["methods"].items():
            reached = [loss for loss in numbers["search"].values() if loss is not None]
            assert numbers["loss"][0] == pytest.approx(min(reached)), name
            assert numbers["runs"][0]["steps"][-1] == entry["steps"]
    monkeypatch.setattr(polynomial, "train", None)  # everything is there
    assert go() == result
    assert [entry["steps"] for entry in go(steps=[20])["lengths"]] == [20]


def test_steps_that_are_refused(tmp_path: Path) -> None:
    given: dict[str, Any] = {"seeds": 1, "small": True, "device": "cpu", "console": QUIET}
    with pytest.raises(ValueError, match=r"steps.*-3"):
        conduct(POLYNOMIAL_LENGTH, tmp_path, steps=[-3], **given)
    with pytest.raises(ValueError, match=r"steps is 7.*boolean"):
        conduct(BOOLEAN, tmp_path, steps=[7], **given)
