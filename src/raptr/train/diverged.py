"""The error that ends a run whose loss is not finite. No torch here: the command line catches it without torch."""

from pathlib import Path


class Diverged(ArithmeticError):
    """The loss or the gradient of step `step` was not finite; `kept` is the newest checkpoint, if there is one."""

    def __init__(self, step: int, kept: Path | None = None) -> None:
        self.step = step
        saved = "no checkpoint was written yet" if kept is None else f"{kept} is the newest checkpoint, from before it"
        super().__init__(
            f"the loss or the gradient of step {step} is not finite, so the run was stopped; {saved}. "
            "The same command would end here again: a lower optimizer.peak or a longer optimizer.warmup may help, "
            "in a new run or with --fresh."
        )
