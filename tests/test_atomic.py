"""Files that appear whole or not at all, whatever is killed where."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from hf_specdec import EagleConfig, EagleHead, InvalidConfigError, load_head
from hf_specdec.atomic import whole_file, write_text
from hf_specdec.drafters.token_recycling import TokenRecyclingDrafter
from hf_specdec.errors import CheckpointFormatError

OPERATIONS = ("replace", "unlink", "mkdir", "touch", "rename", "rmdir", "open")
"""What changes a directory; a process that is killed at any of them has done none of the later ones."""

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")


def killed_at(number: int, work: Callable[[], None]) -> bool:
    """Do a work in a process that dies at its n-th operation on files; whether it came that far."""
    child = os.fork()
    if child == 0:
        left = number

        def dying(real: Any) -> Any:
            def wrapped(*arguments: Any, **options: Any) -> Any:
                nonlocal left
                if left == 0:
                    os._exit(9)
                left -= 1
                return real(*arguments, **options)

            return wrapped

        for name in OPERATIONS:
            if hasattr(os, name):
                setattr(os, name, dying(getattr(os, name)))
            if hasattr(Path, name) and name != "open":
                setattr(Path, name, dying(getattr(Path, name)))
        try:
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def head_of(value: float) -> EagleHead:
    head = EagleHead(EagleConfig.for_target(zoo.build("llama").config))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.fill_(value)
    return head


@pytest.mark.slow
@forks
@pytest.mark.parametrize(("before", "after"), [("10MB", "10KB"), ("10KB", "10MB"), ("10MB", "10MB"), ("10KB", "10KB")])
def test_a_save_that_is_killed_anywhere_leaves_the_old_the_new_or_a_refusal(
    tmp_path: Path, before: str, after: str
) -> None:
    """Of one file and of shards, over the other."""
    old, new, outcomes = head_of(1.0), head_of(2.0), set()
    number, went_on = 0, True
    while went_on:
        folder = tmp_path / str(number)
        old.save_pretrained(folder, max_shard_size=before)
        (folder / "notes.txt").write_text("mine")
        went_on = killed_at(number, lambda folder=folder: new.save_pretrained(folder, max_shard_size=after))
        try:
            held = {value for weight in load_head(folder).parameters() for value in weight.unique().tolist()}
            outcomes.add(str(sorted(held)))
        except CheckpointFormatError as error:
            outcomes.add(str(error).split(str(folder))[0])
        new.save_pretrained(folder, max_shard_size=after)
        assert all(bool((weight == 2.0).all()) for weight in load_head(folder).parameters())
        assert not list(tmp_path.rglob("*.partial"))
        assert not list(tmp_path.rglob(".*"))
        assert (folder / "notes.txt").read_text() == "mine"
        number += 1
    assert number > 5
    assert outcomes == {"[1.0]", "[2.0]", "Saving a head in "}


def test_whoever_may_read_the_config_may_read_the_weights(tmp_path: Path) -> None:
    """Safetensors writes files that only their owner may read."""
    umask = os.umask(0o027)
    try:
        head_of(1.0).save_pretrained(tmp_path / "head")
    finally:
        os.umask(umask)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "head").iterdir()} == {0o640}


@forks
def test_a_table_that_is_killed_while_it_is_saved(tmp_path: Path, llama: Any) -> None:
    drafter = TokenRecyclingDrafter(width=4, pairs=16)
    drafter.bind(llama)
    path = tmp_path / "a[b]*"
    drafter.save(path)
    number = 0
    while killed_at(number, lambda: drafter.save(path)):
        drafter.load(path)
        drafter.save(path)
        assert [left.name for left in tmp_path.iterdir()] == [path.name]
        number += 1
    assert number > 2


@forks
def test_what_a_dead_process_left_is_cleared_and_what_a_living_one_makes_is_not(tmp_path: Path) -> None:
    dead = os.fork() or os._exit(0)
    os.waitpid(dead, 0)
    for process in (dead, os.getppid()):
        (tmp_path / f".state.json.{process}.partial").write_text("half")
    (tmp_path / f".other.json.{dead}.partial").write_text("half")
    write_text(tmp_path / "state.json", "{}")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f".other.json.{dead}.partial", f".state.json.{os.getppid()}.partial", "state.json",
    ]  # fmt: skip


def test_where_nothing_can_be_written_it_is_said_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path, tmp_path / "file" / "below", Path("/proc/nothing"), Path("a\0b"), tmp_path / ("x" * 300)):
        with pytest.raises(InvalidConfigError), whole_file(path):
            pytest.fail("the work was begun")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nothing"), Path("a\0b")):
        with pytest.raises(InvalidConfigError):
            head_of(1.0).save_pretrained(folder)
    with pytest.raises(TypeError), whole_file(tmp_path / "file") as partial:
        partial.write_text(partial.write_text("half"))  # type: ignore[arg-type]
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "x")]
