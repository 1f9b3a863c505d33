"""What follows the last step of a run: its report, and its model for `transformers`."""

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
    """Write the export of a run into its folder; the last checkpoint stands for a model that no stock class holds."""
    from raptr.train.exporting import export  # imports transformers, which is slow

    try:
        return export(folder.path)
    except ValueError as error:  # a trained model that no stock class can hold is still a trained model
        console.print(f"no export: {error}", highlight=False, markup=False, soft_wrap=True)
        return checkpoint.place_of(folder.checkpoints, step)
