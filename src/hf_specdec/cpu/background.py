"""Compile the CPU kernels in the background, so that no call waits for a compiler."""

from __future__ import annotations

import contextlib
import os
import threading

from hf_specdec.cpu.library import load_or_none, loads_at_once

_LOCK = threading.Lock()
_running: list[threading.Thread] = []


def are_kernels_ready() -> bool:
    """Whether the kernels, or the reason why there are none, are known without compiling; if not, start to compile.

    The compiler runs in a thread and, on Linux, only on cores that would be idle otherwise. If the process ends first,
    the next one starts again; `compile="kernels"` and `warmup()` wait for it.
    """
    with _LOCK:
        if any(thread.is_alive() for thread in _running):
            return False
        if loads_at_once():
            return True
        _running[:] = [threading.Thread(target=_load, name="hf_specdec kernels", daemon=True)]
        _running[0].start()
        return False


def wait_for_kernels() -> None:
    """Wait until a compiler in the background has finished; for tests."""
    for thread in list(_running):
        thread.join()


def _load() -> None:
    if hasattr(os, "SCHED_IDLE"):  # Linux: this thread's, and that of the compiler that it starts
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    load_or_none()
