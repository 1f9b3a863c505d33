"""What ends a run of many processes. No torch: the command line knows these errors before it imports torch."""


class Elsewhere(RuntimeError):
    """Another process failed and has said why."""


class Lost(RuntimeError):
    """Another process is gone, or does not answer."""


class Disagreement(RuntimeError):
    """The processes were about to compute different steps."""
