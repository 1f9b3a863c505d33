"""What follows the last step of a run: its report, and the export of its model for `transformers`."""

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from raptr.train import checkpoint
from raptr.train.run import RunFolder

if TYPE_CHECKING:
    from raptr.report import Report


def write_run_report(folder: RunFolder) -> "Report":
    """Write the report of a run into its folder."""
    from raptr.report import write_report  # imports matplotlib, which is slow

    return write_report([folder.path], folder.report)


def export_run(folder: RunFolder, step: int, console: Console) -> Path:
    """Export a run into its folder; return the export, or the last checkpoint if no stock class can hold the model."""
    from raptr.train.exporting import export  # imports transformers, which is slow

    try:
        return export(folder.path)
    except ValueError as error:  # not an error of the run: its model is trained, even if no stock class can hold it
        console.print(f"no export: {error}", highlight=False, markup=False, soft_wrap=True)
        return checkpoint.place_of(folder.checkpoints, step)
