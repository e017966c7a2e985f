"""The packaged model, converted in the user's cache directory by one of several processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

START = """
import sys, torch, hf_specdec
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2)
print(hf_specdec.packaged_model())
"""


@pytest.mark.exhaustive
def test_two_processes_of_a_group_convert_the_packaged_model_once(small_model_path: Path, tmp_path: Path) -> None:
    """Neither finds half of it, and it equals the one that a single process converts."""
    command = [sys.executable, "-W", "ignore", "-c", START, str(tmp_path / "group")]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    started = [
        subprocess.Popen([*command, str(rank)], env=environment, stdout=subprocess.PIPE, text=True) for rank in (0, 1)
    ]
    folders = {process.communicate(timeout=300)[0].strip() for process in started}
    assert [process.returncode for process in started] == [0, 0]
    folder = tmp_path / "hf-specdec" / small_model_path.name
    assert folders == {str(folder)}
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == [small_model_path.name]
    converted, expected = (
        AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (folder, small_model_path)
    )
    assert converted.keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in converted.items())
