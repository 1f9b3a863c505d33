"""The command line, called from a test."""

import sys

import pytest

from raptr.cli import main


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run a command in this process; returns its exit code."""
    monkeypatch.setattr(sys, "argv", ["raptr", *arguments])
    try:
        main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0
