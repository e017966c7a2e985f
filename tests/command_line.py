"""The command line in this process, for tests."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from hf_specdec import cli


def run(monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> int:
    """Run a command line; return its exit code."""
    monkeypatch.setattr(sys, "argv", ["hf-specdec", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def error_line(stderr: str) -> str:
    """Return the only line that is not one of progress, such as "Loading the model ..."."""
    (line,) = (line for line in stderr.splitlines() if not line.endswith(" ..."))
    return line
