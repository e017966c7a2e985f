"""Medusa: the heads against a slow reference, the tree, equality with plain generate, and training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from drafters import random_heads
from hf_specdec import (
    DrafterMismatchError,
    InvalidConfigError,
    MedusaConfig,
    MedusaHeads,
    SpeculativeConfig,
    load_head,
)
from hf_specdec.drafters.base import DraftContext
from hf_specdec.drafters.medusa import PAPER_TREES, MedusaDrafter, paper_tree, tree_for_model
from hf_specdec.training import train_medusa
from hf_specdec.trees.draft import PLAIN_STEP, Budget
from hf_specdec.validation import validate_choices
from hf_specdec.verification.cache import TreeCache
from hf_specdec.verification.features import LAST, FeatureTap
from hf_specdec.verification.tree_target import TreeTarget
from models import prompts
from trained import answered, arguments

VARIANTS: list[dict[str, Any]] = [
    {},
    {"shared_lm_head": False},
    {"draft_vocab_size": 32},
    {"draft_vocab_size": 32, "shared_lm_head": False, "medusa_num_layers": 2, "medusa_num_heads": 3},
]


@pytest.mark.parametrize("fields", VARIANTS, ids=str)
def test_the_tree_holds_each_heads_best_tokens(fields: dict[str, Any]) -> None:
    """Node (r1, ..., rd) is the token that head d ranks rd-th at the accepted node, computed slowly."""
    model: Any = zoo.build("llama")
    heads = random_heads(model, **fields)
    ids, _ = prompts(1)
    with FeatureTap(model) as tap, torch.no_grad():
        model(input_ids=ids, use_cache=False)
    features, choices = tap.take(), [(0,), (0, 1), (1,), (2,), (0, 1, 3)]
    config = SpeculativeConfig("medusa", tree=choices)  # type: ignore[arg-type]
    context, drafter = DraftContext(ids, None, torch.tensor([9]), features), MedusaDrafter(heads)
    target = TreeTarget(model, TreeCache([None] * 2, capacity=32))
    session = drafter.start(target, context, config)
    draft = session.propose(drafter.limits(config))
    tree = draft.tree
    tree.validate()
    wanted, sure = [9], [0.0]
    for path in validate_choices(choices):
        hidden, parts = features.of((LAST,))[0, -1], list(heads.heads[len(path) - 1])
        for block in parts[: heads.config.medusa_num_layers]:
            out = block.linear(hidden)
            hidden = hidden + out * torch.sigmoid(out)
        hot = heads.hot_token_ids
        lm_head = model.lm_head.weight if hot is None else model.lm_head.weight[hot]
        logits = (lm_head if heads.config.shared_lm_head else parts[-1].weight) @ hidden
        sure.append(float(logits.detach().log_softmax(-1).sort(descending=True).values[path[-1]]))
        token = int(logits.argsort(descending=True)[path[-1]])
        wanted.append(token if hot is None else int(hot[token]))
    assert tree.tokens.tolist() == [wanted]
    assert tree.parents.tolist() == [-1, 0, 0, 0, 1, 4]
    torch.testing.assert_close(draft.log_probs, torch.tensor([sure]))
    smaller = session.propose(Budget(num_nodes=4, num_steps=2, top_k=1))
    assert smaller.tree.tokens.tolist() == [[wanted[0], wanted[1], wanted[4]]]
    assert session.propose(PLAIN_STEP).tree.tokens.tolist() == [[9]]


def test_heads_start_as_the_targets_lm_head() -> None:
    model: Any = zoo.build("llama")
    features = torch.randn(3, 32)
    for fields in ({}, {"shared_lm_head": False}, {"shared_lm_head": False, "draft_vocab_size": 8}):
        heads = MedusaHeads(MedusaConfig.for_target(model.config, **fields))
        if heads.config.draft_vocab_size:
            heads.set_hot_token_ids(torch.arange(0, 80, 10))
        heads.start_from(model.lm_head)
        wanted = model.lm_head(features)
        wanted = wanted if heads.hot_token_ids is None else wanted[:, heads.hot_token_ids]
        for logits in heads(features, model.lm_head):
            torch.testing.assert_close(logits, wanted)


@pytest.mark.parametrize("name", PAPER_TREES)
def test_the_papers_trees_can_be_cut_anywhere(name: str) -> None:
    tree = paper_tree(name)
    assert len(tree) == 63
    for size in range(1, 64):
        validate_choices(tree[:size])


def test_a_tree_for_every_model() -> None:
    assert tree_for_model("lmsys/vicuna-13b-v1.3") == paper_tree("vicuna_13b_stage2") != paper_tree("mc_sim_7b_63")
    assert tree_for_model("HuggingFaceH4/zephyr-7b-beta") == paper_tree("zephyr_stage2")
    assert tree_for_model(None) == tree_for_model("gpt2") == paper_tree("mc_sim_7b_63")
    with pytest.raises(InvalidConfigError, match="Unknown paper tree"):
        paper_tree("vicuna")
    drafter = MedusaDrafter(random_heads(zoo.build("llama")))
    assert drafter.limits(SpeculativeConfig("medusa")).num_nodes == 24
    assert drafter.limits(SpeculativeConfig("medusa", num_draft_tokens=64)).num_nodes == 64
    assert drafter.limits(SpeculativeConfig("medusa", num_draft_tokens=1)).num_nodes == 1
    assert max(map(len, drafter.choices(SpeculativeConfig("medusa", num_steps=2)))) == 2
    assert max(map(max, drafter.choices(SpeculativeConfig("medusa", top_k=3)))) == 2


def test_saved_loaded_and_checked_against_the_target(tmp_path: Path, llama: Any) -> None:
    random_heads(llama, draft_vocab_size=32, tree=[(0,), (1,), (0, 0)]).save_pretrained(tmp_path)
    heads = load_head(tmp_path)
    assert isinstance(heads, MedusaHeads)
    drafter = llama.load_drafter(tmp_path)
    assert llama.drafters == {"medusa": drafter}
    ids, mask = prompts(1)
    options = {"attention_mask": mask, "max_new_tokens": 10, "do_sample": False}
    assert torch.equal(llama.generate(ids, **options), llama.generate(ids, speculative="auto", **options))
    assert set(llama.last_speculation.control["queries"]) == {"medusa"}
    with pytest.raises(DrafterMismatchError, match="vocab_size 50"):
        llama.add_drafter(MedusaDrafter(MedusaHeads(MedusaConfig.for_target(llama.config, vocab_size=50))))
    with pytest.raises(InvalidConfigError, match="from 1 to 128"):
        MedusaHeads(MedusaConfig.for_target(llama.config, medusa_num_heads=0))


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"medusa_num_layers": 3}, marks=pytest.mark.slow),
        {"shared_lm_head": False, "draft_vocab_size": 64},
    ],
    ids=str,
)
def test_overfitted_heads_are_accepted_to_the_bottom_of_their_tree(
    tmp_path: Path, sure_llama: Any, fields: dict[str, Any]
) -> None:
    ids, answers, talks = answered(sure_llama, 4, 24)
    heads = MedusaHeads(MedusaConfig.for_target(sure_llama.config, medusa_num_heads=3, **fields))
    if heads.config.draft_vocab_size:
        seen = set(answers.flatten().tolist())
        ids_kept = sorted([*seen, *(t for t in range(zoo.VOCAB_SIZE) if t not in seen)][:64])
        heads.set_hot_token_ids(torch.tensor(ids_kept))
    heads.start_from(sure_llama.lm_head)
    train_medusa(sure_llama, heads, talks, arguments(tmp_path, 600))
    sure_llama.add_drafter(MedusaDrafter(heads))
    speculative = sure_llama.generate(ids, max_new_tokens=24, do_sample=False, speculative="medusa")
    assert torch.equal(speculative, answers)
    assert sure_llama.last_speculation.mean_accepted_length > 3.3
    assert sure_llama.last_speculation.acceptance_by_depth[2] > 0.8
