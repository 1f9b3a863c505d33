"""Errors that end a run of many processes. No torch: the command line needs them before it imports torch."""


class Elsewhere(RuntimeError):
    """Another process failed; the message has its reason."""


class Lost(RuntimeError):
    """Another process has ended or does not answer."""


class Disagreement(RuntimeError):
    """The processes disagree on what they are about to compute."""
