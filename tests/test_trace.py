"""What a trace tells is what happened: the text, the trees, the target's own probabilities."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import drafters
from hf_specdec import SpeculativeGenerationMixin
from hf_specdec.trees.tree import ROOT_PARENT
from models import prompts
from zoo import build

TRACED = ["sometimes", "eagle3", "medusa", "hybrid", "prompt_lookup"]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", TRACED)
def test_a_trace_has_the_text_and_what_the_target_said(llama: Any, name: str, rows: int) -> None:
    ids, mask = prompts(rows)
    given = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False}
    plain = llama.generate(ids, **given)
    config = drafters.BY_NAME[name].add(llama, plain[:, ids.shape[1] :])
    assert torch.equal(llama.generate(ids, **given, speculative=config), plain)
    assert llama.last_speculation.trace == []
    assert torch.equal(llama.generate(ids, **given, speculative={**config, "trace": True}), plain)
    stats = llama.last_speculation
    assert len(stats.trace) == stats.num_target_forwards
    assert sum(row.num_drafted for step in stats.trace for row in step.rows if row.emitted) == stats.num_drafted_tokens
    for row in range(rows):
        steps = [step.rows[row] for step in stats.trace if step.rows[row].emitted]
        text = [steps[0].tokens[0], *(token for step in steps for token in step.emitted)]
        assert text == plain[row, ids.shape[1] :].tolist()[: len(text)]
        for step in steps:
            assert [step.tokens[node] for node in step.path[1:]] == step.emitted[:-1]
            assert [step.choices[node] for node in step.path] == step.emitted
            assert len(step.tokens) == len(step.parents) == len(step.sources) == len(step.target_probs)
            assert step.draft_probs is None or len(step.draft_probs) == len(step.tokens)
            assert step.target_probs[0] == 1.0
    assert all(later.begin > step.begin for step, later in zip(stats.trace, stats.trace[1:], strict=False))
    json.dumps(stats.to_dict())


def test_probabilities_are_the_targets_own(llama: Any) -> None:
    """Every node's, given its parent, by a forward over the path alone."""
    ids, _ = prompts(1)
    config = drafters.BY_NAME["eagle3"].add(llama)
    llama.generate(ids, max_new_tokens=12, do_sample=False, speculative={**config, "trace": True})
    text = ids[0].tolist()
    for step in llama.last_speculation.trace:
        (row,) = step.rows
        for node in range(1, len(row.tokens)):
            path, parent = [node], row.parents[node]
            while parent != ROOT_PARENT:
                path, parent = [parent, *path], row.parents[parent]
            whole = torch.tensor([[*text, *(row.tokens[place] for place in path)]])
            logits = llama(whole).logits[0, -2].detach()
            assert row.target_probs[node] == pytest.approx(float(logits.softmax(-1)[row.tokens[node]]), abs=1e-4)
        text += [row.tokens[node] for node in row.path]


def test_sources_of_a_merged_tree_are_its_parts(llama: Any) -> None:
    ids, _ = prompts(1)
    drafters.BY_NAME["eagle3"].add(llama)
    for _ in range(2):  # what the first call leaves behind, the second one recycles
        llama.generate(ids, max_new_tokens=40, do_sample=False, speculative={"method": "auto", "trace": True})
    named = {name for step in llama.last_speculation.trace for name in step.rows[0].sources[1:]}
    assert named <= {"eagle3", "prompt_lookup", "token_recycling"}
    assert "token_recycling" in named


def test_a_chain_is_traced_where_a_model_takes_no_branches() -> None:
    model = SpeculativeGenerationMixin.attach(build("bloom"))
    ids, _ = prompts(1)
    plain = model.generate(ids, max_new_tokens=16, do_sample=False)
    config = drafters.BY_NAME["sometimes"].add(model, plain[:, ids.shape[1] :])
    model.generate(ids, max_new_tokens=16, do_sample=False, speculative={**config, "trace": True})
    emitted = [token for step in model.last_speculation.trace for token in step.rows[0].emitted]
    assert emitted == plain[0, ids.shape[1] + 1 :].tolist()
