"""Read the JSON lines that the items of `gpu.py` write."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any


def rows_of(path: Path, name: str, begin: int) -> list[dict[str, Any]]:
    """Return the rows that an item wrote since the file was `begin` bytes long, without incomplete lines."""
    with path.open("rb") as file:
        file.seek(begin)
        lines = file.read().decode(errors="replace").splitlines()
    rows = []
    for line in lines:
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return [row for row in rows if row["item"] == name]
