"""Training of block heads: what a block sees is what it sees when drafting, what is optimised, and where it starts."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import zoo
from block_engines import Block, corrected
from drafters import random_block
from hf_specdec import DFlashConfig, DFlashHead, SpeculativeGenerationMixin
from hf_specdec.drafters.dflash import BlockOutputs
from hf_specdec.heads import attention
from hf_specdec.heads.stages import stages_of
from hf_specdec.training import (
    Conversation,
    DFlashTrainingConfig,
    capture_features,
    start_block_from_target,
    start_first_layer,
    starts,
    train_dflash,
)
from hf_specdec.training.block_objective import DFlashObjective
from hf_specdec.training.objectives import HeadLoss, grown
from hf_specdec.training.tree_search import count_correct
from hf_specdec.verification.features import LAST
from hf_specdec.verification.model import lm_head_rows
from trained import answered, arguments, batch_of

MARKOV: dict[str, Any] = {"sample_from_anchor": True, "markov_rank": 4}
FULL: dict[str, Any] = {**MARKOV, "confidence_head": True, "confidence_with_markov": True}


def talks_of(lengths: tuple[int, ...], prompt: int = 4, seed: int = 0) -> list[Conversation]:
    """Random conversations with some tokens of a prompt."""
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(3, zoo.VOCAB_SIZE - 1, (length,), generator=generator).tolist() for length in lengths]
    return [Conversation.of(row[:prompt], row[prompt:]) for row in ids]


def block_behind(model: Any, head: DFlashHead, features: Tensor, ids: Tensor, anchor: int) -> Any:
    """The outputs of a drafted block behind one anchor of a row, with a cache of the context before it."""
    block = Block(head, model.get_input_embeddings(), lm_head_rows(model, head.hot_token_ids))
    block.append(features[None, :anchor])
    return block.outputs(int(ids[anchor]))


# ------------------------------------------------------------------------------------------------------ what it sees


def differentiable(model: Any, head: DFlashHead, features: Tensor, ids: Tensor, anchor: int) -> BlockOutputs:
    """The outputs of a block behind an anchor, without a cache, which holds no gradients."""
    size = head.config.block_size
    context = iter(head.context_states(head.fuse(features[None, :anchor]), torch.arange(anchor)[None]))
    mask = torch.ones(size, anchor + size, dtype=torch.bool)
    if head.config.causal:
        mask = mask.tril(anchor)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = next(context)
        key, value = torch.cat([keys, key], dim=2), torch.cat([values, value], dim=2)
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)

    tokens = torch.tensor([int(ids[anchor]), *[head.config.mask_token_id] * (size - 1)])
    embeddings = head.embedding_for(model)(tokens)[None].detach()
    slots = head(embeddings, anchor + torch.arange(size)[None], attend)
    stages = stages_of(head, lm_head_rows(model, head.hot_token_ids))
    return BlockOutputs(head, stages, ids[anchor][None], slots, head.embedding_for(model), slots[:, 0, :0])


def slow_loss(
    model: Any, head: DFlashHead, batch: dict[str, Tensor], recipe: DFlashTrainingConfig, most: int = 99
) -> Tensor:
    """The loss by definition, behind every anchor, token by token, of at most `most` tokens per block."""
    hot = head.hot_token_ids if head.hot_token_ids is not None else torch.arange(zoo.VOCAB_SIZE)
    rows, width = model.lm_head.weight[hot].detach(), 32 * len(head.feature_layers)
    losses, weights = [], []
    for row, (ids, mask) in enumerate(zip(batch["input_ids"], batch["loss_mask"], strict=True)):
        for anchor in range(len(ids) - 1):
            if not (mask[anchor] and mask[anchor + 1]):
                continue
            features = batch["features"][row]
            outputs = differentiable(model, head, features[:, :width], ids, anchor)
            depth = min(len(outputs.hidden[0]), most)
            text = torch.nn.functional.pad(ids, (0, depth))[anchor : anchor + depth + 1]
            whole = torch.nn.functional.pad(text, (0, len(outputs.hidden[0]) - depth))
            logits = corrected(outputs, whole[:-1])[0]
            confidence = head.confidence(outputs.hidden[0], whole[:-1]) if head.config.confidence_head else None
            for step in range(depth):
                place = anchor + step
                if place + 1 >= len(ids) or not mask[place + 1]:
                    break
                said = logits[step].log_softmax(-1)
                truth = (rows @ features[place, -32:]).softmax(-1)
                known = hot == text[step + 1]
                loss = -recipe.text_weight * said[known].sum() - recipe.soft_weight * (truth * said).sum()
                loss = loss + recipe.distance_weight * (said.exp() - truth).abs().sum()
                if confidence is not None:
                    agreed = torch.minimum(said.exp(), truth).sum().detach()
                    loss = loss + recipe.confidence_weight * torch.nn.functional.binary_cross_entropy_with_logits(
                        confidence[step], agreed
                    )
                losses.append(loss)
                weights.append(torch.tensor(-step / recipe.slot_decay).exp())
    weight = torch.stack(weights)
    return (torch.stack(losses) * weight).sum() / weight.sum()


@pytest.mark.parametrize(
    "fields",
    [
        {"causal": True},
        {"draft_vocab_size": 50, "own_lm_head": True, "confidence_head": True},
        FULL,
        {**FULL, "markov_head_type": "gated", "causal": True},
        {**FULL, "markov_head_type": "rnn", "draft_vocab_size": 50},
        {"markov_rank": 4, "markov_head_type": "rnn"},
        {"aux_hidden_state_layer_ids": [2, -1, 2], "own_embedding": True},
    ],
    ids=str,
)
def test_the_loss_is_its_definition(small: Any, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Several turns, answers of one token among them; gradients included, through attention in blocks of queries."""
    monkeypatch.setattr(attention, "QUERY_BLOCK", 256 if fields.get("causal") else 6)
    head = random_block(small, 4, **fields)
    recipe = DFlashTrainingConfig(text_weight=0.3, distance_weight=0.5, soft_weight=0.2, confidence_weight=0.7)
    objective = DFlashObjective(head, small, recipe).train()
    first, second = talks_of((14, 9), prompt=3)
    mask = [place not in (6, 7, 9) for place in range(14)]
    first = Conversation(
        first.input_ids, tuple(one and other for one, other in zip(first.loss_mask, mask, strict=True))
    )
    batch = batch_of(small, [first, second], objective.layers)
    found, wanted = objective(**batch).loss, slow_loss(small, head, batch, recipe)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
    gradients = [torch.autograd.grad(loss, head.fc.weight)[0] for loss in (found, wanted)]
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-3)


def test_anchors_are_answer_tokens_before_answer_tokens(small: Any) -> None:
    objective = DFlashObjective(random_block(small), small, DFlashTrainingConfig(anchors=3))
    mask = torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 0, 1, 0, 0, 0, 0], [0] * 9 + [1]]).bool()
    drawn = set()
    for _ in range(20):
        anchors, known = objective.train()._anchors(mask, 3)
        assert known.sum(-1).tolist() == [3, 1, 0]
        assert anchors[1][known[1]].tolist() == [2]
        assert (anchors.diff(dim=-1) > 0).all()
        drawn.update(anchors[0].tolist())
    assert drawn == set(range(1, 9))
    anchors, known = objective.eval()._anchors(mask, 3)
    assert anchors[0].tolist() == [1, 4, 7]  # evenly spaced
    assert anchors[1][known[1]].tolist() == [2]
    assert known.sum(-1).tolist() == [3, 1, 0]


@pytest.mark.parametrize("fields", [{"causal": True}, {**FULL, "causal": True}], ids=["jetspec", "dspark"])
def test_blocks_grow_during_the_run(small: Any, fields: dict[str, Any]) -> None:
    """Short blocks at first, as many as there are places; whole ones later and in evaluation."""
    head = random_block(small, 4, **fields)
    whole, anchors = head.config.max_depth, 3
    recipe = DFlashTrainingConfig(anchors=anchors, growing=0.5, soft_weight=0.3)
    objective = DFlashObjective(head, small, recipe)
    talks = talks_of((12, 10), prompt=3)
    batch = batch_of(small, talks, objective.layers)
    seen = []
    for progress in (0.0, 0.2, 0.4, 0.5, 1.0):
        objective.progress = progress
        blocks = objective.train()._blocks(batch["input_ids"], batch["loss_mask"])
        depth = blocks.counted.shape[2]
        assert depth == grown(whole, progress, recipe.growing)
        assert blocks.anchors.shape[1] == min(anchors * whole // depth, 8)  # 9 answer tokens in the longer row
        seen.append(depth)
        assert objective.eval()._blocks(batch["input_ids"], batch["loss_mask"]).counted.shape[2] == whole
    assert seen == sorted(seen)
    assert (seen[0], seen[3]) == (1, whole)
    objective.progress = 0.0
    enough = DFlashObjective(head, small, replace(recipe, anchors=64))
    for mode, most in ((True, 1), (False, whole)):
        wanted = slow_loss(small, head, batch, recipe, most)
        torch.testing.assert_close(enough.train(mode)(**batch).loss, wanted, atol=1e-5, rtol=1e-4)


# ------------------------------------------------------------------------------------------------------ what it learns


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "weights"),
    [
        ({}, {}),
        pytest.param({"causal": True}, {"text_weight": 1.0, "distance_weight": 0.0}, marks=pytest.mark.slow),
        pytest.param({"num_hidden_layers": 1}, {"text_weight": 0.0, "distance_weight": 0.0, "soft_weight": 1.0},
                     marks=pytest.mark.slow),
        pytest.param({**MARKOV}, {"soft_weight": 1.0}, marks=pytest.mark.slow),
        pytest.param({**MARKOV, "markov_head_type": "gated"}, {"soft_weight": 1.0}, marks=pytest.mark.slow),
        ({"markov_rank": 4, "markov_head_type": "rnn", "own_lm_head": True, "draft_vocab_size": 60},
         {"soft_weight": 1.0}),
        ({**FULL, "causal": True, "qkv_bias": True}, {}),
    ],
    ids=str,
)  # fmt: skip
def test_a_few_steps_teach_it_something(
    sure_llama: Any, fields: dict[str, Any], weights: dict[str, Any], tmp_path: Path
) -> None:
    """The loss falls, tau rises, and gradients reach every parameter."""
    _, _, talks = answered(sure_llama, 4, 12)
    torch.manual_seed(0)
    base = {"block_size": 4, "mask_token_id": zoo.VOCAB_SIZE - 1, "aux_hidden_state_layer_ids": [1, 3]}
    head = DFlashHead(DFlashConfig.for_target(sure_llama.config, **{**base, **fields}))
    if head.config.draft_vocab_size:
        head.set_hot_token_ids(torch.arange(0, 60))
    recipe = DFlashTrainingConfig(**weights)
    objective = DFlashObjective(head, sure_llama, recipe)
    batch = batch_of(sure_llama, talks, objective.layers)
    # two steps, because a confidence head or a Markov head may start with zeros
    objective.train()(**batch).loss.backward()
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.any()), name
    head.zero_grad(set_to_none=True)
    store = capture_features(sure_llama, talks, tmp_path / "store", layers=(1, 3, LAST))
    options = arguments(
        tmp_path / "run", 30, learning_rate=1e-2, logging_steps=6, eval_strategy="steps", eval_steps=15
    )  # fmt: skip
    before = objective.eval()(**batch, measure=1)
    trained = train_dflash(sure_llama, head, store, options, recipe, held_out=store)
    assert trained is head
    rows = json.loads((tmp_path / "run" / "trainer_state.json").read_text())["log_history"]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < 0.9 * losses[0]
    counts = before.counts
    taus = [row["eval_tau"] for row in rows if "eval_tau" in row]
    assert taus[-1] > 1 + sum(counts.acceptance) + 0.2
    assert head.config.recipe["objective"] == "DFlashObjective"


@pytest.mark.parametrize("fields", [{}, FULL], ids=["dflash", "dspark"])
def test_batches_with_few_answers(small: Any, fields: dict[str, Any]) -> None:
    """Rows without answers, with answers of one and two tokens, alone and beside longer ones: finite losses."""
    head = random_block(small, **fields)
    few = [Conversation.of([5, 6, 7], []), Conversation.of([5, 6], [8]), Conversation.of([5], [8, 9]),
           Conversation.of([], [8, 9, 10]), Conversation.of([], [8])]  # fmt: skip
    objective = DFlashObjective(head, small, DFlashTrainingConfig(soft_weight=0.1))
    for talks in (*([talk] for talk in few), few, [*few, *talks_of((12,))]):
        batch = batch_of(small, talks, objective.layers)
        for training in (True, False):
            objective.train(training)
            head.zero_grad()
            outputs: HeadLoss = objective(**batch, measure=3)
            assert outputs.loss.isfinite()
            outputs.loss.backward()
            assert all(p.grad is None or p.grad.isfinite().all() for p in head.parameters())
            assert outputs.counts is not None
            tokens = sum(
                mask and follows
                for talk in talks
                for mask, follows in zip(talk.loss_mask, talk.loss_mask[1:], strict=False)
            )
            assert outputs.counts.counted.tolist()[0] == tokens
            assert (outputs.loss == 0) == (tokens == 0)


# ------------------------------------------------------------------------------------------------------ measuring


@pytest.mark.parametrize("fields", [{}, {**MARKOV, "markov_head_type": "rnn", "causal": True}], ids=str)
def test_evaluation_counts_greedy_chains(small: Any, fields: dict[str, Any]) -> None:
    """Deterministic, and equal to chains that a cached block drafts behind every answer token."""
    prompt = torch.tensor([[5, 6, 7]])
    answer = small.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=20, do_sample=False)
    ids = answer[0].tolist()
    ids[12] = 7 if ids[12] != 7 else 8  # not what the target would have chosen
    talks = [Conversation.of(ids[:3], ids[3:]), Conversation.of(ids[:5], ids[5:14])]
    head = trained_a_little(small, talks, fields)
    objective = DFlashObjective(head, small, DFlashTrainingConfig()).eval()
    batch = batch_of(small, talks, objective.layers)
    with torch.no_grad():
        first, again = (objective(**batch, measure=2) for _ in range(2))
    assert torch.equal(first.loss, again.loss)
    assert torch.equal(first.counts.packed(), again.counts.packed())
    accepted, chains, counted = ([0] * head.config.max_depth for _ in range(3))
    with torch.no_grad():
        for row, talk in enumerate(talks):
            choices = small.lm_head(batch["features"][row, :, -32:]).argmax(-1).tolist()
            own = objective.split(batch["features"][row])[0]
            for anchor in range(len(talk.input_ids) - 1):
                if not (talk.loss_mask[anchor] and talk.loss_mask[anchor + 1]):
                    continue
                chain = corrected(block_behind(small, head, own, batch["input_ids"][row], anchor))[1].tolist()
                greedy = right = True
                for step in range(min(head.config.max_depth, len(talk.input_ids) - 1 - anchor)):
                    counted[step] += 1
                    right = right and chain[step] == choices[anchor + step]
                    chains[step] += greedy
                    accepted[step] += greedy and right
                    greedy = greedy and talk.input_ids[anchor + step + 1] == choices[anchor + step]
    counts = first.counts
    assert counts.counted.tolist() == counted
    assert counts.chains.tolist() == chains
    assert counts.accepted.tolist() == accepted
    assert accepted[1] > 0
    found = count_correct(small, head, talks, num_steps=9, top_k=2)
    assert torch.equal(found.packed(), counts.packed())


def trained_a_little(model: Any, talks: list[Conversation], fields: dict[str, Any]) -> DFlashHead:
    """A head that is right now and then."""
    torch.manual_seed(1)
    base = {"block_size": 4, "mask_token_id": zoo.VOCAB_SIZE - 1, "aux_hidden_state_layer_ids": [1, 2]}
    head = DFlashHead(DFlashConfig.for_target(model.config, **{**base, **fields}))
    objective = DFlashObjective(head, model, DFlashTrainingConfig(text_weight=1.0)).train()
    batch = batch_of(model, talks, objective.layers)
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
    for _ in range(25):
        optimizer.zero_grad()
        objective(**batch).loss.backward()
        optimizer.step()
    return head.eval()


# ------------------------------------------------------------------------------------------------------ the start


@pytest.mark.parametrize(
    ("name", "fields", "misfits"),
    [
        ("llama", {"qk_norm": False}, ()),
        ("llama", {"num_hidden_layers": 3}, ()),
        ("llama", {"num_key_value_heads": 4, "qk_norm": False}, ()),  # the target has two
        ("llama", {"num_hidden_layers": 6}, ()),  # more than the target has
        ("qwen3", {}, ()),
        ("qwen2", {"qkv_bias": True, "qk_norm": False}, ()),
        ("qwen2", {}, ("layers",)),
        ("gemma", {}, ("layers",)),  # another activation
        ("gemma", {"hidden_act": "gelu_pytorch_tanh"}, ()),  # norms of another notation
        ("llama", {"num_attention_heads": 8, "num_key_value_heads": 2}, ("layers",)),
        ("gpt2", {}, ("layers", "norm")),
    ],
)
def test_a_head_starts_from_the_targets_last_layers(
    name: str, fields: dict[str, Any], misfits: tuple[str, ...]
) -> None:
    model: Any = copy.deepcopy(zoo.build(name))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.rand_like(parameter))
    head = random_block(model, aux_hidden_state_layer_ids=[1, 4, 2], **fields)
    before = {key: tensor.clone() for key, tensor in head.state_dict().items()}
    assert start_block_from_target(head, model) == misfits
    if misfits:
        assert all(torch.equal(tensor, before[key]) for key, tensor in head.state_dict().items())
        return
    count, hidden = head.config.num_hidden_layers, torch.randn(3, 32)
    torch.testing.assert_close(head.norm(hidden), model.model.norm(hidden), atol=1e-4, rtol=1e-4)
    for number, own in enumerate(list[Any](head.layers)):
        theirs = model.model.layers[max(4 - count + number, 0)]
        torch.testing.assert_close(own.mlp(hidden), theirs.mlp(hidden))
        torch.testing.assert_close(
            own.post_attention_layernorm(hidden), theirs.post_attention_layernorm(hidden), atol=1e-4, rtol=1e-4
        )
        assert torch.equal(own.self_attn.o_proj.weight, theirs.self_attn.o_proj.weight)
        assert torch.equal(own.input_layernorm.weight, torch.ones(32))
        normed = theirs.input_layernorm(hidden)
        for part in ("q_proj", "k_proj", "v_proj"):
            wanted = getattr(theirs.self_attn, part)(normed).unflatten(-1, (-1, 8))
            found = getattr(own.self_attn, part)(own.input_layernorm(hidden)).unflatten(-1, (-1, 8))
            copies = found.shape[1] // wanted.shape[1]
            assert copies == (2 if "num_key_value_heads" in fields and part != "q_proj" else 1)
            torch.testing.assert_close(found, wanted.repeat_interleave(copies, dim=1), atol=1e-4, rtol=1e-4)
        if head.config.qk_norm and hasattr(theirs.self_attn, "q_norm"):
            for part in ("q_norm", "k_norm"):
                states = torch.randn(5, 8)
                wanted, found = (getattr(each.self_attn, part)(states) for each in (theirs, own))
                torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    nearest = {2: 2, 3: 0, 6: 0}[count]  # column of feature 2 for two layers, of feature 1 for more
    wanted = 0.3 * before["fc.weight"]
    wanted[:, nearest * 32 : (nearest + 1) * 32] += torch.eye(32)
    torch.testing.assert_close(head.fc.weight.detach(), wanted)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("llama", {}),
        ("llama", {"num_key_value_heads": 4}),
        ("llama", {"num_key_value_heads": 1, "num_attention_heads": 4}),
        ("qwen2", {"qkv_bias": True, "qk_norm": False}),
        ("gemma", {"hidden_act": "gelu_pytorch_tanh"}),
        ("llama", {"draft_vocab_size": 50, "own_embedding": True}),
    ],
    ids=str,
)
def test_the_first_layer_starts_at_the_last_token_and_the_root(
    name: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every slot's attention: context heads see context, the last token most; root heads see the root.

    Embeddings and context of a tiny random model are too similar to tell apart, so the sample is replaced.
    """
    model: Any = SpeculativeGenerationMixin.attach(copy.deepcopy(zoo.build(name)))
    head = random_block(model, 4, causal=True, **fields)
    state = torch.get_rng_state()
    start_first_layer(head, model)  # its own sample
    assert torch.equal(state, torch.get_rng_state())
    assert all(tensor.isfinite().all() for tensor in head.state_dict().values())
    kinds = 0.3 * torch.randn(3, 500, 32)
    kinds += torch.nn.functional.pad(torch.eye(3), (0, 29))[:, None] * 5
    context, tokens, mask = kinds / kinds.square().mean(-1, keepdim=True).sqrt()
    monkeypatch.setattr(starts, "_read_sample", lambda *_: starts._Sample(context, tokens, mask[0], 3.0, 2.0))
    start_first_layer(head, model)
    layer, weights = head.layers[0], {}

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        pairs = zip(head.context_states(context[None, :29], torch.arange(29)[None])[0], (key, value), strict=True)
        repeats = query.shape[1] // key.shape[1]
        keys, values = (torch.cat(pair, 2).repeat_interleave(repeats, 1) for pair in pairs)
        scores = query @ keys.transpose(-1, -2) * query.shape[-1] ** -0.5
        weights["all"] = scores.masked_fill(torch.ones(4, 33, dtype=torch.bool).triu(30), -torch.inf).softmax(-1)[0]
        return weights["all"] @ values

    with torch.no_grad():
        slots = torch.stack([tokens[0], *[mask[0]] * 3])[None]
        rotary = head.rotary_emb(slots, 29 + torch.arange(4)[None])
        output = layer.self_attn(layer.input_layernorm(slots), rotary, attend)[0]
    groups, heads = head.config.num_key_value_heads, head.config.num_attention_heads
    at_root = 0 if groups == 1 else max(groups // 4, 1) * heads // groups
    to_context, to_root = weights["all"].split([heads - at_root, at_root])
    assert (to_context[..., :29].sum(-1) > 0.99).all()
    assert (to_context[..., :29].argmax(-1) >= (28 if head.config.qk_norm else 25)).all()  # norms remove the noise
    assert (to_root[..., 29] > 0.99).all()
    if groups == 4:  # enough heads for the most of both: 3.0 times the context, 2.0 times the root
        wanted = 3.0 * (to_context[0, :, :29] @ context[:29]) + 2.0 * (tokens[0] - tokens.mean(0))
        assert torch.cosine_similarity(output, wanted).min() > 0.9
