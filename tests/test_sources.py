"""Directories and Hub ids of heads and models, and the reasons why they cannot be loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

import zoo
from hf_specdec import CheckpointFormatError, SpeculativeGenerationMixin, load_head
from hf_specdec.checkpoints.sources import head_directory, is_connection_error, model_directory
from hf_specdec.errors import InvalidConfigError, first_sentence
from hf_specdec.records import read_json
from hf_specdec.training.data import read_rows


def test_hub_ids_and_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "head").mkdir()
    assert head_directory(tmp_path) == tmp_path
    assert head_directory("~/head") == tmp_path / "head"
    assert head_directory("org/none") is None
    assert model_directory("gpt2") is None
    for name in ("x" * 5000, "a\0b"):
        with pytest.raises(CheckpointFormatError):
            head_directory(name)


@pytest.mark.parametrize("name", ["/nope", "./nope", "../nope", ".nope", "~/nope", "~nobody/nope", "a/b/c", "file"])
def test_a_path_without_a_directory_is_not_looked_up_on_the_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_specdec.checkpoints.sources.hf_hub_download", None)
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    found = "is a file" if name == "file" else "cannot be loaded: there is no such directory"
    with pytest.raises(CheckpointFormatError, match=rf"The head '.*' {found}\. Use a directory with config\.json"):
        load_head(name)


def test_connection_errors_are_found_behind_others() -> None:
    assert is_connection_error(OfflineModeIsEnabled())
    translated = OSError("We couldn't connect")
    translated.__cause__ = LocalEntryNotFoundError("not cached")
    assert is_connection_error(translated)
    assert not is_connection_error(OSError("broken"))
    assert not is_connection_error(None)


def test_reasons_are_whole_sentences_without_numbers(tmp_path: Path) -> None:
    assert first_sentence(ValueError("It failed")) == "It failed."
    assert first_sentence(ValueError("It failed after a while. It may work later")) == "It failed after a while."
    with pytest.raises(InvalidConfigError, match=r"none.json' cannot be read: No such file or directory\.$"):
        read_json(tmp_path / "none.json")
    for name in (f"{tmp_path}/none", "none.txt", "none.jsonl.gz"):
        with pytest.raises(InvalidConfigError) as refused:
            next(read_rows(name))
        assert str(refused.value) == f"{name!r} does not exist."


def test_a_whole_model_and_none_are_no_heads(tmp_path: Path) -> None:
    zoo.build("llama").save_pretrained(tmp_path)
    with pytest.raises(CheckpointFormatError) as refused:
        load_head(tmp_path)
    assert str(refused.value) == (
        f"{tmp_path} is a whole model ('LlamaForCausalLM'), not a head in a known layout. "
        "To draft with it, pass it as assistant_model= to generate(); or give a head."
    )
    with pytest.raises(CheckpointFormatError, match=r"^`repo_or_path` must be a local directory or a Hub id, got N"):
        load_head(None)  # type: ignore[arg-type]
    model = SpeculativeGenerationMixin.attach(zoo.build("llama"))
    for wrong in (None, zoo.build("llama")):
        with pytest.raises(CheckpointFormatError, match=r"a loaded head, got \w+\. A whole model is passed"):
            model.load_drafter(wrong)
