"""The tables and the figure of corpus.md, from the record of its one run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from docs.results.pages.contract import Page, Records, fixed, table
from raptr.report.columns import escaped
from raptr.report.plots import draw_losses
from raptr.report.runs import EvalRecord, Run, TrainRecord
from raptr.report.speed import stages


def numbers(records: Records) -> str:
    """Tabulate what the two commands took, and their results."""
    record = records["corpus"]
    run, prepared, final = _run(record), record["prepare"], record["evaluations"][-1]
    domains, started = final["domains"], run.train[0]
    speeds = " / ".join(f"{stage.tokens_per_second / 1e6:.2f}" for stage in stages(run) if stage.tokens_per_second)
    rows = [
        [
            f"preparing {prepared['tokens'] / 1e6:.1f}M tokens",
            f"{prepared['seconds']:.0f} s in all, reading twice; "
            f"{prepared['tokens_per_second'] / 1e6:.1f}M tokens/s while encoding",
        ],
        [
            f"training {run.last.tokens / 1e6:.1f}M tokens",
            f"{run.last.seconds:.0f} s, of which {started.seconds:.0f} s before step {started.step}, to compile; "
            f"{record['command_seconds']:.0f} s with start, evaluation, checkpoints and export",
        ],
        ["million tokens/s in the four stages", speeds],
        ["held-out loss (nats per masked token)", f"**{fixed(final['loss'], 3)}**"],
        [f"… {' / '.join(domains)}", " / ".join(fixed(loss, 3) for loss in domains.values())],
    ]
    return table(["", ""], rows)


def answers(records: Records) -> str:
    """Tabulate the first five answers to every text that was tried."""
    filled = records["corpus"]["answers"]
    return table(["text", "filled with"], [[f"`{text}`", ", ".join(map(_shown, filled[text]))] for text in filled])


def _shown(answer: str) -> str:
    """Put an answer in quotation marks, unless it is a word."""
    word = answer.strip()
    return escaped(word) if word.replace("_", "a").isalnum() else f"“{escaped(word)}”"


def _run(record: Mapping[str, Any]) -> Run:
    return Run(
        path=Path(record["name"]),
        name=record["name"],
        config=record["config"],
        environment=record["environment"],
        train=tuple(TrainRecord(**line) for line in record["train"]),
        evals=tuple(EvalRecord(**line) for line in record["evaluations"]),
    )


def losses(records: Records) -> Figure:
    """Draw losses over steps and FLOPs."""
    return draw_losses([_run(records["corpus"])])


PAGE = Page(
    name="results/corpus",
    records={"corpus": "docs/results/corpus.json"},
    tables={"numbers": numbers, "answers": answers},
    figures={"corpus.png": losses},
)
