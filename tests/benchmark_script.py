"""Import scripts of `benchmarks/`, `examples/` and `heads/recipe/` as modules by file name, or run them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def script(name: str, folder: Path = BENCHMARKS) -> ModuleType:
    """The module of a script, run as an import runs it.

    Args:
        name: Its path below the folder, without the ending.
        folder: Where it lies.
    """
    spec = importlib.util.spec_from_file_location(f"{folder.name}_{Path(name).name}", folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    if str(folder) not in sys.path:  # a script may import its neighbours
        sys.path.append(str(folder))
    spec.loader.exec_module(module)
    return module


def run_script(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> Any:
    """Run the main function of a script, and return its module."""
    module = script(name, folder)
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    module.main()
    return module
