"""The `raptr` command, also as `python -m raptr`.

This module imports nothing heavy: torch and its like take seconds, in which Ctrl-C must work too.
"""

import os
import signal
from types import FrameType


def main() -> None:
    """Import the command line and run it."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # a parent may have set it to be ignored
        signal.signal(signal.SIGINT, _leave)
    from raptr.cli import main as run

    signal.signal(signal.SIGINT, before)
    run()


def _leave(number: int, frame: FrameType | None) -> None:
    """Leave at once: an exception in the middle of an import may be swallowed or turned into another."""
    os.write(2, b"raptr: interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    main()
