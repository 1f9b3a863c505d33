"""The `raptr` command, also as `python -m raptr`."""

from raptr.extras import require_train
from raptr.failures import importing, reported


def main() -> None:
    """Import the command line and run it."""
    with reported(), importing():
        require_train("the command raptr")
        from raptr.cli import main as run

    run()


if __name__ == "__main__":
    main()
