"""What a figure needs beside it: the machine, the versions, the commit, and how busy others kept it meanwhile."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers

SOURCE = Path(__file__).parents[2]
"""`src` in a checkout, `site-packages` where the package is installed."""

PROC_STAT = Path("/proc/stat")

BUSY = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
"""The first columns of `/proc/stat`; what the machine's host takes away (`steal`) disturbs as a process does."""
WAITING = ("idle", "iowait")

DISTURBING_SHARE = 0.05
"""Of one core, used by others during a timed call: more than that is worth a warning."""
DISTURBING_TICKS = 5
"""So many clock ticks, of all cores, may be rounding."""


def environment(model: Any) -> dict[str, Any]:
    """Hardware, versions, commit, dtype.

    Args:
        model: The model that was measured.
    """
    return {
        **versions(model.device),
        "model": model.config._name_or_path, "dtype": str(model.dtype).removeprefix("torch."),
        "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def versions(device: torch.device) -> dict[str, Any]:
    """Hardware, versions, commit.

    Args:
        device: What models run on.
    """
    named = None if device.type == "cpu" else getattr(torch.get_device_module(device), "get_device_name", None)
    name = _processor() if device.type == "cpu" else device.type if named is None else str(named())
    return {
        "device": name, "cores": os.cpu_count(), "threads": torch.get_num_threads(), "system": platform.platform(),
        "torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version(),
        "hf_specdec": importlib.metadata.version("hf-specdec"), "commit": commit(),
    }  # fmt: skip


def commit(source: Path = SOURCE) -> str | None:
    """The commit of the checkout that the package is run from, with `+changes` where tracked files differ from it.

    Args:
        source: The directory that the package lies in.

    Returns:
        None where it is installed elsewhere, or git is not there.
    """
    if source.name != "src" or not (source.parent / ".git").exists():
        return None
    try:
        head, changes = (
            subprocess.run(
                ["git", "-C", str(source.parent), *order], capture_output=True, text=True, check=True
            ).stdout
            for order in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.strip() + ("+changes" if changes.strip() else "")


class OtherProcesses:
    """CPU time that others use: the whole machine's from `/proc/stat`, less this process's own and its children's.

    Args:
        workers: Processes that work for this one; other children count when they have ended and were waited for.

    Example: in 2 s the machine worked 2.5 s over all cores and this process 2.3 s: others used 0.2 s, 0.1 of a core.
    """

    def __init__(self, workers: Sequence[psutil.Process] = ()) -> None:
        self._workers = workers
        self._begin = self._now()

    def _now(self) -> tuple[float, float] | None:
        """Seconds others have used since the machine was started, and the clock; None where that cannot be known."""
        try:
            columns = PROC_STAT.read_text().split("\n", 1)[0].split()
            workers = sum(sum(worker.cpu_times()[:4]) for worker in self._workers)
        except (OSError, psutil.NoSuchProcess):
            return None
        ticks = dict(zip(BUSY, map(int, columns[1:]), strict=False))
        worked = sum(count for name, count in ticks.items() if name not in WAITING) / os.sysconf("SC_CLK_TCK")
        return worked - sum(os.times()[:4]) - workers, time.perf_counter()

    def cores(self) -> float | None:
        """Cores, on average, that others kept busy since this object was made.

        Returns:
            None on systems without `/proc`, and where a worker has ended meanwhile.
        """
        now = self._now()
        if now is None or self._begin is None:
            return None
        return max(0.0, now[0] - self._begin[0]) / max(now[1] - self._begin[1], 1e-9)


def is_disturbed(cores: float | None, seconds: float) -> bool:
    """Whether others used more than `DISTURBING_SHARE` of a core, and more than the clock's ticks may round up to.

    Args:
        cores: What others used, on average; None is not known.
        seconds: For how long.

    Example: 0.1 of a core is a disturbance over one second, and nothing but rounding over 0.2 s.
    """
    if cores is None or cores <= DISTURBING_SHARE:
        return False
    return cores * seconds * os.sysconf("SC_CLK_TCK") >= DISTURBING_TICKS


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass  # not Linux: the next best name
    return platform.processor() or platform.machine()
