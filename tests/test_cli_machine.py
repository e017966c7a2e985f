"""`hf-specdec env` and `doctor` on a tiny model: what they tell, and that it is so."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import zoo
from command_line import error_line, run
from hf_specdec import SpeculativeGenerationMixin, UnsupportedModelError
from hf_specdec.bench.diagnosis import REPORTED_WIDTHS, Diagnosis, diagnose
from hf_specdec.cli import doctor


def test_env_has_what_a_bug_report_needs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "env", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["torch"] == torch.__version__
    assert found["transformers"] == transformers.__version__
    assert {"device", "python", "accelerate", "methods", "commit"} <= found.keys()
    assert found["methods"].startswith("plain, auto, hybrid, eagle")
    assert found["methods"].endswith("early_exit, last_logits, draft_model, pard, grammar")  # first as in the help
    monkeypatch.setattr(doctor, "_kernels", lambda: ("avx2", ""))
    monkeypatch.setattr(doctor.shutil, "which", lambda _: None)
    monkeypatch.setattr(doctor, "_version", lambda name: "not installed" if name == "peft" else "1")
    assert run(monkeypatch, "env") == 0
    text = capsys.readouterr().out
    assert 'compile="inductor": no C++ compiler' in text
    assert 'compile="kernels": yes (avx2)' in text
    assert "peft: not installed" in text


def test_doctor_tells_what_pays(
    saved: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["doctor", saved, "--max-new-tokens", 12, "--dtype", "float32"]
    assert run(monkeypatch, *command, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["supports_trees"]
    assert list(found["forward_seconds"]) == [str(width) for width in REPORTED_WIDTHS]
    assert list(found["speed_up"]) == ["plain", "prompt_lookup", "auto"]
    assert found["speed_up"]["plain"] == found["tau"]["plain"] == 1
    assert found["best"] in found["speed_up"]
    assert found["head"] is None
    assert run(monkeypatch, *command) == 0
    text = capsys.readouterr().out
    assert "LlamaForCausalLM, weights in float32: verifies trees, several drafts at once\nhead: none\n" in text
    assert "prompt_lookup" in text
    assert " ".join(doctor.compile_hint("cpu").split()) in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80
    assert set(found["forwards"].values()) <= {"eager", "kernels"}
    assert found["forwards"]["plain"] == "eager"
    assert bool(found["compiled_seconds"]) == ("kernels" in found["forwards"].values())
    assert ("x as fast with CPU kernels as eagerly" in " ".join(text.split())) == bool(found["compiled_seconds"])
    assert run(monkeypatch, "doctor", "/nowhere/at/all") == 2
    assert "there is no such directory" in error_line(capsys.readouterr().err)


def test_doctor_names_the_compiled_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--methods auto,auto+cuda_graph" in doctor.compile_hint("cuda")
    monkeypatch.setattr(doctor, "_kernels", lambda: ("avx2", ""))
    assert 'compile="kernels" runs forwards with CPU kernels (avx2)' in doctor.compile_hint("cpu")
    monkeypatch.setattr(doctor, "_kernels", lambda: ("", "none"))
    monkeypatch.setattr(doctor, "_has_compiler", lambda: True)
    assert "auto+inductor" in doctor.compile_hint("cpu")
    monkeypatch.setattr(doctor, "_has_compiler", lambda: False)
    assert "no C++ compiler (g++ or clang++) is found" in doctor.compile_hint("cpu")
    assert doctor.compile_hint("mps").startswith("No compiled mode")


def test_a_model_of_chains_and_one_of_neither() -> None:
    tokenizer = zoo.chat_tokenizer()
    chains = SpeculativeGenerationMixin.attach(zoo.build("bloom"))
    found = diagnose(chains, tokenizer, ["prompt_lookup"], max_new_tokens=8)
    assert not found.supports_trees
    assert "position_ids" in found.chain_only_reason
    broken: Any = SpeculativeGenerationMixin.attach(copy.deepcopy(zoo.build("llama")))

    class Unsteady(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.rand(()).add(0.5)

    broken.model.layers[0].mlp = Unsteady()
    with pytest.raises(UnsupportedModelError):
        diagnose(broken, tokenizer, ["prompt_lookup"], max_new_tokens=8)


def test_doctor_separates_what_compiled_forwards_gain(
    saved: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    speed_up = {"plain": 1.0, "prompt_lookup": 2.0, "auto": 2.5}
    found = Diagnosis(
        True, "", False, {1: 0.03, 4: 0.06}, speed_up, worst=speed_up, tau=speed_up,
        forwards={"plain": "eager", "prompt_lookup": "eager", "auto": "kernels"}, compiled_seconds={1: 0.02, 4: 0.03},
    )  # fmt: skip
    assert (found.compiled, found.gain_of_forwards) == ("kernels", pytest.approx(1.5))
    monkeypatch.setattr("hf_specdec.bench.diagnosis.diagnose", lambda *_, **__: found)
    assert run(monkeypatch, "doctor", saved) == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in (
        "eager, ms",
        "CPU kernels, ms",
        "Fastest here: speculative='auto'.",
        "a forward of one token is 1.50x as fast with CPU kernels as eagerly",
    ):
        assert part in text
    speed_up["auto"] = 1.95
    assert run(monkeypatch, "doctor", saved) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Best here: speculative='auto', within 5 % of the fastest, and it adapts to other texts." in text


@pytest.mark.parametrize(
    ("speeds", "best"),
    [
        ({"plain": 1.0, "eagle": 2.0, "auto": 1.91}, "auto"),
        ({"plain": 1.0, "eagle": 2.0, "auto": 1.89}, "eagle"),
        ({"plain": 1.0, "auto": 0.99}, "plain"),
    ],
)
def test_auto_is_recommended_if_it_is_nearly_the_fastest(speeds: dict[str, float], best: str) -> None:
    eager = Diagnosis(True, "", False, {1: 1.0}, speeds, {}, {}, forwards=dict.fromkeys(speeds, "eager"))
    assert (eager.best, eager.compiled, eager.gain_of_forwards) == (best, "", 1.0)
