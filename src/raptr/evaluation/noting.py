"""Write the scores of a run's model into the run's folder, where reports and comparisons read them."""

from collections.abc import Mapping
from typing import Any

from raptr.evaluation.folder import ModelFolder
from raptr.evaluation.jobs import read_json
from raptr.files import write_json
from raptr.report.runs import EVALUATION


def note_scores(model: ModelFolder, name: str, columns: Mapping[str, Mapping[str, Any]]) -> None:
    """Add columns to RUN/evaluation/NAME.json; do nothing if the model is not a run's export.

    Columns of another model, such as the export of an earlier step, are dropped.
    """
    run = model.path.resolve().parent
    if model.path.resolve().name != "export" or not (run / "metrics.jsonl").is_file():
        return
    path = run / EVALUATION / f"{name}.json"
    earlier = read_json(path) if path.is_file() else {}
    kept = earlier["columns"] if earlier.get("model") == model.fingerprint else {}
    path.parent.mkdir(exist_ok=True)
    write_json(path, {"model": model.fingerprint, "columns": {**kept, **columns}})
