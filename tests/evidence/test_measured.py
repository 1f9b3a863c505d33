"""What advice rests on: the packaged table is that of the records, and only sound rows are in it."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from docs.results import redraw
from evidence import measured
from raptr.train.advice import Place, best, table


@pytest.fixture(scope="module")
def records() -> dict[str, Any]:
    return measured.read_records()


def test_the_packaged_table_is_that_of_the_records(records: dict[str, Any]) -> None:
    assert redraw.MEASURED.read_text("utf-8") == measured.packaged(records), "run `make results`"
    assert len(table()) == len(measured.measurements(records))


def test_the_long_runs_advise_progressive_stacking(records: dict[str, Any]) -> None:
    rows = measured.measurements({name: records[name] for name in ("long-12x256", "progressive-12x256")})
    found = best(Place("bert", "mlm", "bert", 12, 256, 4, 4, 20.0), rows)
    assert found is not None
    assert found.method == {"name": "progressive-stacking", "schedule": "3-6-12"}
    assert (found.to_full.seeds, round(found.to_full.mean, 3), round(found.longer, 2)) == (3, -0.070, 1.27)
    assert found.record == "progressive-12x256"


def labels(record: dict[str, Any]) -> set[str]:
    return {row.entry for row in measured.measurements({"some": record})}


def test_what_is_not_on_equal_terms_is_left_out(records: dict[str, Any]) -> None:
    record = records["long-12x256"]
    assert labels(record) == {"raptr, sqrt", "raptr, none", "stacking"}
    other = deepcopy(record)
    other["configs"]["stacking"]["optimizer"]["weight_decay"] = 0.1
    assert labels(other) == {"raptr, sqrt", "raptr, none"}
    other = deepcopy(record)
    other["runs"] = [run for run in other["runs"] if (run["label"], run["peak"]) != ("stacking", 0.004)]
    assert labels(other) == labels(record)  # its best rate still lies inside the grid
    other["runs"] = [run for run in other["runs"] if (run["label"], run["peak"]) != ("stacking", 0.0005)]
    assert labels(other) == {"raptr, sqrt", "raptr, none"}  # now it does not
    for key, value in (("decay", 0.1), ("epochs", 30.0)):
        other = deepcopy(record)
        for config in other["configs"].values():
            config["optimizer"]["decay"] = value if key == "decay" else 0.25
        for run in other["runs"]:
            run["epochs"] = value if key == "epochs" else 3.0
        assert labels(other) == set()
    for setting in ({"norm_scaling": True}, {"residual_multiplier": 0.5}):
        other = deepcopy(record)
        for config in other["configs"].values():
            config["model"] |= setting
        assert labels(other) == set()


def test_of_two_records_the_one_with_more_seeds_counts(records: dict[str, Any]) -> None:
    rows = measured.measurements({name: records[name] for name in ("rivals-12x256", "progressive-12x256")})
    (found,) = [row for row in rows if row.entry == "progressive stacking, 33-33-33%"]
    assert (found.record, found.to_full.seeds) == ("progressive-12x256", 3)


def test_the_file_is_small_and_plain(tmp_path: Path) -> None:
    rows = json.loads(redraw.MEASURED.read_text("utf-8"))
    assert len({json.dumps([row["place"], row["method"]]) for row in rows}) == len(rows)
    assert redraw.MEASURED.stat().st_size < 100_000


def test_records_of_other_models_have_their_place(records: dict[str, Any]) -> None:
    record = deepcopy(records["long-12x256"])
    sizes = {"family": "decoder", "size": "mini", "layers": 24}
    for config in record["configs"].values():
        config["model"] = sizes
        config["objective"] = {"name": "causal"}
        if "schedule" in config["method"]:
            config["method"]["schedule"] = "12-16-20-24"
    places = {row.place for row in measured.measurements({"some": record})}
    (place,) = places
    assert (place.family, place.objective, place.layers, place.width) == ("decoder", "causal", 24, 256)
    assert place.tokens_per_weight == pytest.approx(190_054_400 / (24 * 12 * 256**2), rel=0.02)
    assert set(measured.full_training({"some": record})) == places
