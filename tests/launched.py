"""The command line as one of several processes: `launch` starts them, each tells its number first."""

from __future__ import annotations

import os
import subprocess
import sys

import torch

from hf_specdec.cli import main
from hf_specdec.training.run_setup import processes as started


def launch(*arguments: str, processes: int = 2) -> str:
    """What `accelerate launch` of the command line prints. Its name for several local processes is `--multi_gpu`."""
    options = ["--num_processes", str(processes), "--num_machines", "1", "--mixed_precision", "no",
               "--dynamo_backend", "no", "--main_process_port", "29631"]  # fmt: skip
    several = ["--multi_gpu"] if processes > 1 else ["--cpu"]
    command = [sys.executable, "-W", "ignore", "-m", "accelerate.commands.launch", *several, *options, __file__]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(f"process {started().process_index} of {started().num_processes}", flush=True)
    main()
