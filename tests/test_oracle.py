"""The drafter of `benchmarks/oracle.py`, which knows the answer: the wanted tau, plain's text, and what it refuses."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from benchmark_script import script
from hf_specdec import SpeculativeGenerationMixin
from hf_specdec.errors import InvalidConfigError

ROOT = Path(__file__).parents[1]
oracle = script("oracle")


def answers_of(model: Any, rows: int = 1, tokens: int = 40) -> tuple[Any, Any]:
    """Prompts, and plain's answers."""
    torch.manual_seed(0)
    ids = torch.randint(3, zoo.VOCAB_SIZE, (rows, 7))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": tokens, "do_sample": False}
    return inputs, model.generate(**inputs)[:, 7:]


@pytest.mark.parametrize(
    ("tau", "nodes", "rows"), [(1.0, 16, 1), (2.0, 16, 2), (3.0, 8, 1), (4.5, 32, 1), (6.0, 64, 1)]
)
def test_the_wanted_tau_is_the_measured_one(llama: Any, tau: float, nodes: int, rows: int) -> None:
    inputs, answers = answers_of(llama, rows, int(40 * tau))
    llama.add_drafter(oracle.OracleDrafter(answers, tau, seed=3))
    ids = llama.generate(**inputs, speculative={"method": "oracle", "num_draft_tokens": nodes})
    stats = llama.last_speculation
    assert torch.equal(ids[:, 7:], answers)
    assert stats.mean_accepted_length == pytest.approx(tau, rel=0.05)
    assert stats.control["diverged_at"] == [None] * rows
    assert stats.num_drafted_tokens >= (nodes - 1) * (stats.num_target_forwards - 1)


def test_the_oracles_numbers_by_hand() -> None:
    assert oracle.level_widths(16, 4) == [4, 4, 4, 3]
    assert oracle.level_widths(3, 4) == [1, 1]
    assert oracle.acceptance_for(2.75, 2) == pytest.approx(0.9142, abs=1e-4)
    assert oracle.acceptance_for(3, 2) == 1.0
    assert oracle.acceptance_for(1, 4) == pytest.approx(0.0, abs=1e-12)
    assert [oracle.drawn_depth(draw, 0.6, 4) for draw in (0.7, 0.3, 0.0)] == [0, 2, 4]


def test_an_answer_that_is_not_plains_is_told(llama: Any) -> None:
    inputs, answers = answers_of(llama, tokens=40)
    wrong = answers.clone()
    wrong[0, 20:] = (wrong[0, 20:] + 1) % zoo.VOCAB_SIZE
    llama.add_drafter(oracle.OracleDrafter(wrong, 3.0))
    assert torch.equal(llama.generate(**inputs, speculative="oracle")[:, 7:], answers)
    assert llama.last_speculation.control["diverged_at"] == [20]


def test_a_sure_model_has_no_near_ties_in_half_precision() -> None:
    model = oracle.make_sure(copy.deepcopy(zoo.build("llama")).bfloat16())
    SpeculativeGenerationMixin.attach(model)
    inputs, answers = answers_of(model, rows=2, tokens=90)
    assert len(set(answers[0].tolist())) == 90  # of a cycle of 96
    model.add_drafter(oracle.OracleDrafter(answers, 3.0))
    assert torch.equal(model.generate(**inputs, speculative="oracle")[:, 7:], answers)
    logits = model(input_ids=torch.cat([inputs["input_ids"], answers], dim=-1)).logits.float()
    best = logits[:, 7:].topk(2).values
    assert (best[..., 0] > 1.2 * best[..., 1]).all()
    tied = copy.deepcopy(zoo.build("llama"))
    tied.lm_head.weight = tied.model.embed_tokens.weight
    with pytest.raises(InvalidConfigError, match="share their weights"):
        oracle.make_sure(tied)


def test_the_oracles_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    zoo.build("llama").save_pretrained(tmp_path / "model")
    zoo.chat_tokenizer().save_pretrained(tmp_path / "model")
    oracle.main(["--model", str(tmp_path / "model"), "--prompt", "w05 w06", "--taus", "2", "--nodes", "8",
                 "--rounds", "1", "--max-new-tokens", "30", "--dtype", "float32",
                 "--json", str(tmp_path / "out.json")])  # fmt: skip
    (row,) = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert row["tau"] == pytest.approx(2, rel=0.15)
    assert "diverged at [None]" in capsys.readouterr().out


def test_the_oracle_of_the_docs_works(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "oracle", oracle)
    page = (ROOT / "docs" / "benchmarks" / "results.md").read_text()
    code = page.split("```python\n", 1)[1].split("```", 1)[0]
    ids = torch.randint(3, zoo.VOCAB_SIZE, (1, 7))
    exec(code, {"model": llama, "inputs": {"input_ids": ids, "attention_mask": torch.ones_like(ids)}})
    assert llama.last_speculation.mean_accepted_length == pytest.approx(3, rel=0.15)
