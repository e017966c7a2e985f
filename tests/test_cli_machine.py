"""`hf-specdec env` and `doctor` on a tiny model: what they tell, and that it is so."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import zoo
from command_line import error_line, run
from hf_specdec import SpeculativeGenerationMixin, UnsupportedModelError
from hf_specdec.bench import diagnosis
from hf_specdec.bench.diagnosis import (
    REPORTED_WIDTHS,
    Advice,
    Circumstances,
    Diagnosis,
    Drafting,
    advise,
    diagnose,
)
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


@pytest.mark.slow
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
    (of_bytes,) = (one for one in found["advice"] if "float32" in one["problem"])  # of 32 bits, as --dtype says
    assert of_bytes["gain"] is None
    assert of_bytes["source"] == "rule"
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


# ------------------------------------------------------------------------------------------- advice

SPEED_UP = {"plain": 1.0, "eagle": 1.5, "auto": 2.0}
RAN = dict.fromkeys(("eagle", "auto"), Drafting(draft=1.0, verify=4.0, rest=1.0, nodes=2.0))
FORWARDS = {1: 1.0, 2: 1.0, 4: 1.5, 8: 3.0}
FINE = Diagnosis(
    True, "", True, FORWARDS, SPEED_UP, SPEED_UP, {"plain": 1.0, "eagle": 1.8, "auto": 1.8},
    {"plain": "eager", "eagle": "kernels", "auto": "kernels"}, {1: 0.5, 2: 0.5, 4: 0.75, 8: 1.5}, RAN,
)  # fmt: skip
HERE = Circumstances(
    "cpu", "bfloat16", "", 4, 4, frozenset({"avx512_bf16"}), "", "", is_quantised=False, is_unpacked_gguf=False,
    has_four_bits=False,
)  # fmt: skip
OLD = frozenset({"avx2"})
EAGER_EAGLE = {"forwards": {**FINE.forwards, "eagle": "eager"}}
ALL_EAGER = {"forwards": dict.fromkeys(SPEED_UP, "eager"), "compiled_seconds": {}}
SLOW_HEAD = {"drafting": {"eagle": Drafting(3.0, 4.0, 1.0, 2.0)}}
WIDE = {"drafting": {"eagle": Drafting(0.5, 8.0, 0.5, 8.0)}}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], list[tuple[str, str]]]] = {
    "nothing": ({}, {}, []),
    "no compiler": ({}, {"no_kernels": "no C++ compiler was found (g++)"}, [("no C++ compiler was", "apt install")]),
    "switched off": ({}, {"no_kernels": "HF_SPECDEC_KERNELS is 'none'"}, [("is 'none'", "Unset HF_SPECDEC_KERNELS")]),
    "broken compiler": ({}, {"no_kernels": "g++ cannot compile them"}, [("g++ cannot compile", "Set CXX")]),
    "kernels unused": (EAGER_EAGLE, {}, [("without the CPU kernels (eagle).", 'compile="kernels"')]),
    "kernels refused": (ALL_EAGER, {"no_program": "it has hooks"}, [("because it has hooks", "Remove that cause")]),
    "float16": ({}, {"dtype": "float16", "features": OLD}, [("no instructions for it", "torch.bfloat16")]),
    "float16 with instructions": (
        ALL_EAGER, {"dtype": "float16", "features": frozenset({"avx512_fp16"})}, [("no CPU kernels.", "bfloat16")],
    ),
    "bfloat16, old processor, no kernels": (
        ALL_EAGER, {"features": OLD, "no_kernels": "HF_SPECDEC_KERNELS is 'none'"},
        [("is 'none'", "Unset"), ("bfloat16, for which", "torch.float32")],
    ),
    "bfloat16, old processor, kernels": ({}, {"features": OLD}, []),
    "bfloat16, unknown processor": (
        {}, {"features": frozenset(), "no_kernels": "HF_SPECDEC_KERNELS is 'none'"}, [("is 'none'", "Unset")],
    ),
    "float32": ({}, {"dtype": "float32"}, [("twice the bytes", "torch.bfloat16")]),
    "float32, quantised": ({}, {"dtype": "float32", "is_quantised": True}, []),
    "float32, where bfloat16 is slow": (
        {}, {"dtype": "float32", "features": OLD, "no_kernels": "HF_SPECDEC_KERNELS is 'none'"}, [("'none'", "Unset")],
    ),
    "unpacked GGUF": ({}, {"dtype": "float32", "is_unpacked_gguf": True}, [("are unpacked", "load_gguf")]),
    "threads": ({}, {"threads": 8}, [("Threads: 8. Physical cores", "set_num_threads(4)")]),
    "unknown cores": ({}, {"cores": None}, []),
    "chains": (
        {**ALL_EAGER, "supports_trees": False, "chain_only_reason": "of alibi"}, {"no_program": "of alibi"},
        [("because of alibi", "docs/models.md")],
    ),
    "eager attention": (ALL_EAGER, {"wrong_attention": "eager"}, [("is 'eager'", 'set_attn_implementation("sdpa")')]),
    "slow head": (SLOW_HEAD, {}, [("0.8 times as long", "Use speculative='auto'")]),
    "slow head, yet the fastest": (
        {**SLOW_HEAD, "speed_up": {"plain": 1.0, "eagle": 1.5}}, {}, [("0.8 times", "Use a head with")],
    ),
    "slow head, plain is faster": (
        {**SLOW_HEAD, "speed_up": {"plain": 1.0, "eagle": 0.5}}, {}, [("0.8 times", "Use plain generate()")],
    ),
    "wide tree": (WIDE, {}, [("8 nodes, which takes 3.0 times as long as one, and gives 1.8", "num_draft_tokens")]),
    "wide tree of lookup": (
        {"drafting": {"prompt_lookup": WIDE["drafting"]["eagle"]}, "forwards": {"prompt_lookup": "kernels"}}, {}, [],
    ),
    "unpacked GGUF, which cannot stay packed": (
        {}, {"is_unpacked_gguf": True, "no_kernels": "HF_SPECDEC_KERNELS is 'none'"}, [("is 'none'", "Unset")],
    ),
    "wide tree of auto": ({"drafting": {"auto": WIDE["drafting"]["eagle"]}}, {}, []),
    "graphs": (ALL_EAGER, {"device": "cuda"}, [("without graphs (eagle, auto)", 'compile="cuda_graph"')]),
    "no graphs on this device": (ALL_EAGER, {"device": "mps", "dtype": "float32", "threads": 8}, []),
    "4-bit products of few rows": (WIDE, {"device": "cuda", "has_four_bits": True}, []),
    "4-bit products of wide trees": (
        {"drafting": {"auto": Drafting(1.0, 1.0, 1.0, 30.0)}}, {"device": "cuda", "has_four_bits": True},
        [("30 nodes a step; 4-bit", "num_draft_tokens=8")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_each_cause_gives_its_advice_and_no_other(name: str) -> None:
    of_run, of_machine, expected = CASES[name]
    found = advise(replace(FINE, **of_run), replace(HERE, **of_machine))
    assert len(found) == len(expected), found
    for advice, (problem, change) in zip(found, expected, strict=True):
        assert problem in advice.problem
        assert change in advice.change
        assert (advice.source == "rule") == (advice.gain is None)


def test_advice_is_in_the_order_of_its_gain() -> None:
    speed_up = {"plain": 1.0, "eagle": 0.5, "auto": 3.0}
    drafting = {"eagle": Drafting(5.0, 8.0, 0.0, 8.0), "auto": RAN["auto"]}
    found = advise(
        replace(FINE, speed_up=speed_up, drafting=drafting, **EAGER_EAGLE), replace(HERE, threads=8, dtype="float32")
    )
    gains = [3.0 / 0.5, 13 / (5 + 8 / 2)]
    assert [one.gain for one in found] == [*map(pytest.approx, gains), None, None, None]
    assert [one.source for one in found] == ["measured", "estimated", "rule", "rule", "rule"]
    assert ["float32" in one.problem for one in found[2:]] == [True, False, False]


def test_circumstances_are_those_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = SpeculativeGenerationMixin.attach(copy.deepcopy(zoo.build("llama")))
    here = Circumstances.of(model, diagnosis.current_facts(model))
    assert (here.device, here.dtype, here.wrong_attention, here.no_program) == ("cpu", "float32", "", "")
    assert here.threads == torch.get_num_threads()
    assert not any((here.is_quantised, here.is_unpacked_gguf, here.has_four_bits))
    model.set_attn_implementation("eager")
    model.config.quantization_config = transformers.GgufConfig(dequantize=True)
    monkeypatch.setattr(diagnosis.psutil, "cpu_count", lambda logical: 1)
    here = Circumstances.of(model, diagnosis.current_facts(model))
    assert (here.wrong_attention, here.cores, here.is_unpacked_gguf) == ("eager", 1, True)
    assert "eager" in here.no_program
    model.config.quantization_config = transformers.BitsAndBytesConfig(load_in_4bit=True)
    assert Circumstances.of(model, diagnosis.current_facts(model)).has_four_bits


def test_doctor_lists_advice_in_order(
    saved: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    advice = Advice("A is slow.", "Do B.", 1.5, "measured"), Advice("C is off.", "Install D.")
    found = replace(FINE, advice=advice)
    monkeypatch.setattr("hf_specdec.bench.diagnosis.diagnose", lambda *_, **__: found)
    assert run(monkeypatch, "doctor", saved) == 0
    text = capsys.readouterr().out
    assert "1. A is slow. Do B. (1.50x, measured)\n2. C is off. Install D. (gain not measured)\n" in text
    assert run(monkeypatch, "doctor", saved, "--json") == 0
    assert json.loads(capsys.readouterr().out)["advice"] == [
        {"problem": "A is slow.", "change": "Do B.", "gain": 1.5, "source": "measured"},
        {"problem": "C is off.", "change": "Install D.", "gain": None, "source": "rule"},
    ]
    disturbed = replace(FINE, warnings=["Others disturbed it."])
    monkeypatch.setattr("hf_specdec.bench.diagnosis.diagnose", lambda *_, **__: disturbed)
    assert run(monkeypatch, "doctor", saved) == 0
    shown = capsys.readouterr()
    assert "No setting was found that would make it faster." in shown.out
    assert "Others disturbed it." in shown.err


@pytest.mark.slow
def test_doctor_advises_on_the_packaged_model(
    small_model_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(diagnosis.psutil, "cpu_count", lambda logical: 1)
    monkeypatch.setattr(diagnosis.torch, "get_num_threads", lambda: 3)
    assert run(monkeypatch, "doctor", "--max-new-tokens", 8, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert any(one["problem"].startswith("Threads: 3.") for one in found["advice"])
    gains = [one["gain"] or 0.0 for one in found["advice"]]
    assert gains == sorted(gains, reverse=True)
    assert found["drafting"]["eagle"]["nodes"] > 1
    assert min(found["drafting"]["eagle"][stage] for stage in ("draft", "verify", "rest")) > 0
