"""Work that is done once and not in every step: recording a graph, compiling a program, moving memory that grows.

A step that contains some of it says nothing about what steps cost. Whoever does such work notes it; whoever learns
from times compares the count before and after. Each thread has a count of its own, as each has steps of its own.
"""

from __future__ import annotations

import threading


class _Notes(threading.local):
    count = 0


_notes = _Notes()


def note_one_time_work() -> None:
    """Say that the current step contains work that is done once."""
    _notes.count += 1


def one_time_work() -> int:
    """How often this thread has done such work; equal before and after a step that did none."""
    return _notes.count
