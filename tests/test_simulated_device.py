"""What runs on the simulated device runs in a process of its own: a second device changes what torch does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils import backend_registration

TESTS = Path(__file__).parent
OF_GPU_TESTS = "llama and 3 and (eagle3 or auto or graphs)"
"""Which of the GPU tests run there: every function, with few of its arguments."""
NEED_A_GPU = {"test_quantised_targets_on_the_device"}
"""Those that cannot run there: quantisation methods bring kernels of their own."""


SHARDS = {
    "graphs_on_simulated_device.py": 22,
    "on_simulated_device.py": 8,
    "test_gpu.py": 1,
    "auto_on_modelled_gpu.py": 1,
}
"""In how many parts a file runs, so that two workers share it; `make test` runs the last part of each."""
SLOW = {"test_gpu.py", "auto_on_modelled_gpu.py"}
"""Files of one part that only `make check-all` runs."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shard"),
    [
        pytest.param(
            name,
            f"{part}/{parts}",
            marks=[] if part == parts - 1 and name not in SLOW else pytest.mark.slow,
        )
        for name, parts in SHARDS.items()
        for part in range(parts)
    ],
)
def test_on_the_simulated_device(name: str, shard: str) -> None:
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip(f"torch {torch.__version__} cannot have a device that is written in Python")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(TESTS / name), "--shard", shard]
    of_gpu = name == "test_gpu.py"
    command += ["-k", OF_GPU_TESTS, "-rp"] if of_gpu else []
    environment = os.environ | ({"SPECDEC_SIMULATED_DEVICE": "1"} if of_gpu else {})
    done = subprocess.run(command, cwd=TESTS.parent, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    if of_gpu:
        passed = set(re.findall(r"PASSED \S+::(test_\w+)", done.stdout))
        assert passed == set(re.findall(r"^def (test_\w+)", (TESTS / name).read_text(), re.MULTILINE)) - NEED_A_GPU
