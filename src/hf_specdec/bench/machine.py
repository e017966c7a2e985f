"""Describe the conditions of a measurement: hardware, versions, commit, and CPU load by other processes."""

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

from hf_specdec.transformers_private import model_name

SOURCE = Path(__file__).parents[2]
"""Directory that contains the package: `src` in a checkout, `site-packages` if the package is installed."""

PROC_STAT = Path("/proc/stat")

CPU_COLUMNS = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
"""Columns of the first line of `/proc/stat`; `steal`, CPU time that a hypervisor gave to others, counts as load."""

DISTURBING_SHARE = 0.05
"""Largest fraction of one core that other processes may use on average before a timed call counts as disturbed."""
DISTURBING_TICKS = 5
"""Clock ticks of load, summed over all cores, below which a call never counts as disturbed: it may be rounding."""


def environment(model: Any) -> dict[str, Any]:
    """Return hardware, versions, commit, date, and the name and dtype of a model, as JSON-serialisable values.

    Args:
        model: The measured model; its device is described, too.
    """
    return {
        **versions(model.device),
        "model": model_name(model.config), "dtype": str(model.dtype).removeprefix("torch."),
        "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def versions(device: torch.device) -> dict[str, Any]:
    """Return hardware, versions and commit; `device` is the accelerator or CPU to name."""
    get_name = None if device.type == "cpu" else getattr(torch.get_device_module(device), "get_device_name", None)
    name = _processor() if device.type == "cpu" else device.type if get_name is None else str(get_name())
    return {
        "device": name, "cores": os.cpu_count(), "threads": torch.get_num_threads(), "system": platform.platform(),
        "torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version(),
        "hf_specdec": importlib.metadata.version("hf-specdec"), "commit": commit(),
    }  # fmt: skip


def commit(source: Path = SOURCE) -> str | None:
    """Return the commit of the checkout, followed by `+changes` if tracked files differ from it; None without git."""
    if source.name != "src" or not (source.parent / ".git").exists():
        return None
    try:
        head, changes = (
            subprocess.run(
                ["git", "--no-optional-locks", "-C", str(source.parent), *order],  # a reader must leave no lock
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            for order in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.strip() + ("+changes" if changes.strip() else "")


class OtherProcesses:
    """Meter of the CPU load by other processes since its creation.

    Subtracts the CPU time of this process and its children from that of the whole machine in `/proc/stat`; children
    that still run must be given as `workers`.

    Example: if within 2 s all cores together were busy for 2.5 s and this process for 2.3 s, others used 0.1 cores.
    """

    def __init__(self, workers: Sequence[psutil.Process] = ()) -> None:
        self._workers = workers
        self._begin = self._now()

    def _now(self) -> tuple[float, float] | None:
        """Return the CPU seconds of other processes since boot, and the current time; None if they cannot be read."""
        try:
            columns = PROC_STAT.read_text().split("\n", 1)[0].split()
            workers = sum(sum(worker.cpu_times()[:4]) for worker in self._workers)
        except (OSError, psutil.NoSuchProcess):
            return None
        ticks = dict(zip(CPU_COLUMNS, map(int, columns[1:]), strict=False))
        busy = sum(count for name, count in ticks.items() if name not in ("idle", "iowait")) / os.sysconf("SC_CLK_TCK")
        return busy - sum(os.times()[:4]) - workers, time.perf_counter()

    def cores(self) -> float | None:
        """Return the average number of cores that other processes used since its creation; None if unknown."""
        now = self._now()
        if now is None or self._begin is None:
            return None
        return max(0.0, now[0] - self._begin[0]) / max(now[1] - self._begin[1], 1e-9)


def is_disturbed(cores: float | None, seconds: float) -> bool:
    """Return whether other processes used more than `DISTURBING_SHARE` and at least `DISTURBING_TICKS` during a call.

    Example: at 100 ticks per second, 0.1 cores disturb a call of 1 s (10 ticks), but not one of 0.2 s (2 ticks).
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
        pass  # not Linux
    return platform.processor() or platform.machine()
