"""The benchmark of the engines: what it counts, what it prints, and that a way without an engine runs."""

from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks import parallel_speed
from raptr.distributed.processes import ALONE

GIVEN = Namespace(
    family="bert", size="tiny", batch=2, length=8, layers=[3, 6], rounds=1, steps=1, device="cpu", out=Path("none")
)


def test_the_saving_is_a_part_of_the_counted_one() -> None:
    counted = parallel_speed.counted(GIVEN, Path())
    assert counted["6"] == 1
    assert 0.5 < counted["3"] < 1  # the head does not shrink
    exact = {size: 100 * part for size, part in counted.items()}
    half = {"3": 100 - (100 - exact["3"]) / 2, "6": 100.0}
    ways = {name: {"milliseconds": times} for name, times in {"exact": exact, "half": half}.items()}
    lines = parallel_speed.table({"counted": counted, "ways": ways}).splitlines()
    assert lines[2].endswith("1.00 |")
    assert lines[3].endswith("0.50 |")


@pytest.mark.parametrize("name", [name for name, way in parallel_speed.WAYS.items() if "parallel" not in way])
def test_a_way_without_an_engine_is_timed(name: str, tmp_path: Path) -> None:
    found = parallel_speed.timed(name, GIVEN, tmp_path, ALONE)
    assert {size: len(times) for size, times in found["rounds"].items()} == {"3": 1, "6": 1}
    assert min(found["milliseconds"].values()) > 0
