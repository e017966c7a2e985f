"""Count work that is done once rather than in every step: capturing a graph, compiling, growing a cache.

The duration of a step that contains such work must not be used as the cost of a step. Code that does the work calls
`note_one_time_work`; code that measures steps compares `one_time_work` before and after. Each thread has a separate
count.
"""

from __future__ import annotations

import threading


class _Notes(threading.local):
    count = 0


_notes = _Notes()


def note_one_time_work() -> None:
    """Mark the current step as containing one-time work."""
    _notes.count += 1


def one_time_work() -> int:
    """Return how often this thread has done one-time work."""
    return _notes.count
