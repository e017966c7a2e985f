"""The EAGLE drafter: what the head sees, and the trees it grows, against a slow recomputation without any cache."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma3TextConfig, Mamba2Config

import zoo
from drafters import EagleFamily, random_head
from hf_specdec import (
    DrafterMismatchError,
    Eagle3Config,
    Eagle3Head,
    EagleConfig,
    InvalidConfigError,
    MedusaConfig,
    SpeculativeConfig,
    UnsupportedGenerationError,
)
from hf_specdec.drafters.eagle import DEFAULT_CHOICES, EagleDrafter
from hf_specdec.generation import call
from hf_specdec.training import Conversation, capture_features, find_tree, head_arguments, train_eagle
from hf_specdec.verification.features import LAST
from hf_specdec.verification.model import lm_head_rows
from hf_specdec.verification.step import Step
from reference import IDS, MASK, Recorder, SlowEagle, paths_of, slow_dynamic_tree

pytestmark = pytest.mark.usefixtures("full_depth")

PARALLEL: dict[str, Any] = {"version": 3, "mask_token_id": zoo.VOCAB_SIZE - 1}
VERSION_3: list[dict[str, Any]] = [
    {"version": 3, "draft_vocab_size": 40},
    {"version": 3, "norm_before_residual": True, "norm_before_fc": True, "norm_output": True, "qkv_bias": True},
    {"version": 3, "fc_norm": True, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
]


OF_OTHERS: list[dict[str, Any]] = [
    {"layernorms": True, "own_embedding": True, "attention_bias": True},
    {"sliding_window": 4},
    {"version": 3, "sliding_window": 4, "qk_norm": True, "norm_before_fc": True, "norm_before_residual": True},
    {"version": 3, "own_embedding": True, "target_hidden_size": 32, "hidden_size": 24, "intermediate_size": 40,
     "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 8},
    PARALLEL,
    {**PARALLEL, "own_embedding": True, "draft_vocab_size": 40, "num_hidden_layers": 2, "sliding_window": 4},
]  # fmt: skip
"""What only heads made elsewhere have."""


@pytest.mark.parametrize("fields", [{}, {"draft_vocab_size": 40}, *VERSION_3, *OF_OTHERS], ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_dynamic_trees_equal_the_definition(name: str, fields: dict[str, Any], attach: Any) -> None:
    """Every tree of a ragged, padded batch equals the one recomputed for its row alone, features included."""
    model = attach(name)
    head = random_head(model, **fields)
    drafter = EagleDrafter(head)
    recorder = Recorder(drafter, IDS)
    model.add_drafter(drafter)
    config = {"method": "eagle", "num_steps": 3, "top_k": 3, "num_draft_tokens": 10}
    options = {"attention_mask": MASK, "max_new_tokens": 8, "do_sample": False}
    plain = model.generate(IDS, **options)
    assert torch.equal(plain, model.generate(IDS, speculative=config, **options))
    assert len(recorder.trees) > 3
    for texts, tree in recorder.trees:
        tree.validate()
        for row in range(3):
            if len(texts[row]) < 14 + 8 - 9 * (row == 2) - 4 * (row == 1):
                slow = slow_dynamic_tree(SlowEagle(model, head, texts[row]), 3, 3, 10)
                assert set(paths_of(tree, row)) == slow


@pytest.mark.parametrize("length", [4, 5, 14])
def test_a_window_of_a_prompt_without_padding_equals_the_definition(llama: Any, length: int) -> None:
    head = random_head(llama, sliding_window=4)
    drafter, ids = EagleDrafter(head), IDS[:1, :length]
    recorder = Recorder(drafter, ids)
    llama.add_drafter(drafter)
    config = {"method": "eagle", "num_steps": 3, "top_k": 3, "num_draft_tokens": 10}
    llama.generate(ids, attention_mask=MASK[:1, :length], max_new_tokens=7, do_sample=False, speculative=config)
    assert len(recorder.trees) > 3
    for texts, tree in recorder.trees:
        assert set(paths_of(tree, 0)) == slow_dynamic_tree(SlowEagle(llama, head, texts[0]), 3, 3, tree.num_nodes)


def sharp_head(model: Any, version: int, seed: int) -> EagleFamily:
    """A head whose attention decides: whoever attends to another node's ancestors drafts other tokens."""
    head = random_head(model, seed=seed, version=version)
    with torch.no_grad():
        layer = head.midlayer if isinstance(head, Eagle3Head) else head.layers[0]
        for name in ("q_proj", "k_proj"):
            getattr(layer.self_attn, name).weight.mul_(3)
        layer.self_attn.o_proj.weight.mul_(8 if version == 3 else 40)
        layer.mlp.down_proj.weight.mul_(0.1)
    return head


@pytest.mark.parametrize("version", [1, 3])
@pytest.mark.parametrize("tree", ["dynamic", "static"])
def test_deep_trees_of_a_sharp_head_equal_the_definition(llama: Any, version: int, tree: str) -> None:
    """Six levels: a node deep below sees its own ancestors, and no others."""
    choices = sorted({(rank,) * min(depth, 1) + (0,) * (depth - 1) for rank in range(3) for depth in range(1, 7)})
    choices = [path for path in choices if path]
    for seed in range(3):
        head = sharp_head(llama, version, seed)
        drafter = EagleDrafter(head)
        recorder = Recorder(drafter, IDS[:1])
        llama.add_drafter(drafter)
        config: dict[str, Any] = {"method": "eagle", "tree": choices}
        if tree == "dynamic":
            config = {"method": "eagle", "num_steps": 6, "top_k": 3, "num_draft_tokens": 40}
        llama.generate(IDS[:1], max_new_tokens=6, do_sample=False, speculative=config)
        for texts, drafted in recorder.trees:
            slow = SlowEagle(llama, head, texts[0])
            if tree == "dynamic":
                assert set(paths_of(drafted, 0)) == slow_dynamic_tree(slow, 6, 3, 40)
                continue
            wanted: dict[tuple[int, ...], tuple[int, ...]] = {(): ()}
            for choice in sorted(choices, key=len):
                parent = wanted[choice[:-1]]
                wanted[choice] = (*parent, slow.best_children(list(parent), choice[-1] + 1)[-1][1])
            assert set(paths_of(drafted, 0)) == set(wanted.values()) - {()}


@pytest.mark.parametrize("fields", [{}, PARALLEL], ids=["eagle", "peagle"])
def test_static_trees_equal_the_definition(fields: dict[str, Any], llama: Any) -> None:
    head = random_head(llama, **fields)
    drafter = EagleDrafter(head)
    recorder = Recorder(drafter, IDS[:1])
    llama.add_drafter(drafter)
    llama.generate(IDS[:1], max_new_tokens=10, do_sample=False, speculative={"method": "eagle", "tree": "static"})
    assert len(recorder.trees) > 3
    for texts, tree in recorder.trees:
        slow = SlowEagle(llama, head, texts[0])
        wanted: dict[tuple[int, ...], tuple[int, ...]] = {(): ()}
        for choice in DEFAULT_CHOICES:
            parent = wanted[choice[:-1]]
            wanted[choice] = (*parent, slow.best_children(list(parent), choice[-1] + 1)[-1][1])
        assert set(paths_of(tree, 0)) == set(wanted.values()) - {()}


@pytest.mark.parametrize("version", [1, 3])
def test_features_of_training_and_inference_are_the_same_tensors(llama: Any, version: int, tmp_path: Path) -> None:
    """What `capture_features` stores equals what sessions see, prompt and accepted tokens alike."""
    drafter = EagleDrafter(random_head(llama, version=version))
    seen: list[Tensor] = []
    start, read = drafter.start, drafter.head.feature_layers

    def spying_start(target: Any, context: Any, config: SpeculativeConfig) -> Any:
        session = start(target, context, config)
        seen.append(context.features.of(read)[0])
        observe = session.observe

        def spying_observe(step: Step) -> None:
            seen.append(step.verification.features.of(read)[0, list(step.acceptance.nodes[0])])  # type: ignore[union-attr]
            observe(step)

        session.observe = spying_observe
        return session

    drafter.start = spying_start  # type: ignore[method-assign]
    llama.add_drafter(drafter)
    answer = llama.generate(IDS[:1], max_new_tokens=20, do_sample=False, speculative="eagle")[0].tolist()
    layers = tuple(dict.fromkeys((*read, LAST)))
    conversation = Conversation.of(answer[:14], answer[14:])
    captured = capture_features(llama, [conversation], tmp_path, layers=layers)[0]["features"]
    inference = torch.cat(seen)
    torch.testing.assert_close(inference, captured[: len(inference), : inference.shape[1]], atol=1e-6, rtol=0)
    assert len(inference) > 28
    assert captured.shape[1] == 32 * len(layers)


def test_a_head_of_a_deeper_model_is_refused(llama: Any) -> None:
    head = random_head(llama, version=3, eagle_aux_hidden_state_layer_ids=[1, 9])
    with pytest.raises(DrafterMismatchError, match=r"hidden states 0 to \d, the head reads \[1, 9\]"):
        llama.add_drafter(EagleDrafter(head))
    for ids in ([], [2, 1], [1, 1], [-1, 2]):
        with pytest.raises(InvalidConfigError, match="eagle_aux_hidden_state_layer_ids"):
            random_head(llama, version=3, eagle_aux_hidden_state_layer_ids=ids)
    with pytest.raises(InvalidConfigError, match="exclude each other"):
        random_head(llama, version=3, fc_norm=True, norm_before_fc=True)


def test_a_tree_of_the_root_alone_is_plain_decoding(llama: Any) -> None:
    llama.add_drafter(EagleDrafter(random_head(llama)))
    plain = llama.generate(IDS[:1], max_new_tokens=9, do_sample=False)
    speculative = {"method": "eagle", "num_draft_tokens": 1}
    assert torch.equal(plain, llama.generate(IDS[:1], max_new_tokens=9, do_sample=False, speculative=speculative))
    assert llama.last_speculation.mean_accepted_length == 1.0


def test_embeddings_without_ids_are_refused(llama: Any) -> None:
    llama.add_drafter(EagleDrafter(random_head(llama)))
    embeddings = llama.get_input_embeddings()(IDS[:1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call.Call, "set_target", lambda *_: pytest.fail("refused too late"))
        for method in ("eagle", "auto"):
            with pytest.raises(UnsupportedGenerationError, match="of 'eagle' need the prompt's token ids"):
                llama.generate(inputs_embeds=embeddings, max_new_tokens=4, speculative=method)
    assert llama.last_speculation is None
    plain = llama.generate(inputs_embeds=embeddings, max_new_tokens=12, do_sample=False)
    lookup = llama.generate(inputs_embeds=embeddings, max_new_tokens=12, do_sample=False, speculative="prompt_lookup")
    assert torch.equal(plain, lookup)


@pytest.mark.slow
def test_chunked_prefill_keeps_all_features(llama: Any) -> None:
    llama.add_drafter(EagleDrafter(random_head(llama)))
    options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": MASK[:1]}
    plain = llama.generate(IDS[:1], **options)
    assert torch.equal(plain, llama.generate(IDS[:1], speculative="eagle", **options))
    tau = llama.last_speculation.accepted_per_step
    assert torch.equal(plain, llama.generate(IDS[:1], speculative="eagle", prefill_chunk_size=5, **options))
    assert llama.last_speculation.accepted_per_step == tau


def test_an_unusual_lm_head_is_run_whole(llama: Any) -> None:
    class Wrapped(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, hidden: Tensor) -> Tensor:
            return self.inner(hidden)

    ids, hidden = torch.tensor([3, 5, 90]), torch.randn(2, 4, 32)
    plain = llama.get_output_embeddings()
    cut = lm_head_rows(llama, ids)(hidden)
    llama.set_output_embeddings(Wrapped(plain))
    try:
        torch.testing.assert_close(lm_head_rows(llama, ids)(hidden), cut)
    finally:
        llama.set_output_embeddings(plain)
    torch.testing.assert_close(cut, plain(hidden)[..., ids])


# ------------------------------------------------------------------------------------------------- configurations


def test_a_head_takes_the_rotary_settings_of_full_attention() -> None:
    config = Gemma3TextConfig(hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2)
    for shaped in (EagleConfig.for_target(config), Eagle3Config.for_target(config)):
        assert shaped.rope_parameters == {"rope_type": "default", "rope_theta": 1_000_000.0}


def test_a_target_without_attention_heads_is_told_what_to_give() -> None:
    config = Mamba2Config()
    with pytest.raises(
        InvalidConfigError, match=r"Mamba2Config has no num_attention_heads.*num_attention_heads=\.\.\."
    ):
        EagleConfig.for_target(config)
    assert EagleConfig.for_target(config, num_attention_heads=4).intermediate_size == 4 * config.hidden_size


@pytest.mark.parametrize("shape", [EagleConfig, Eagle3Config, MedusaConfig])
def test_unknown_fields_and_paths_of_this_machine_stay_out(shape: Any, tmp_path: Path) -> None:
    config = copy.deepcopy(zoo.build("llama").config)
    with pytest.raises(InvalidConfigError, match=r"has no field 'draft_vocab'. Did you mean 'draft_vocab_size'"):
        shape.for_target(config, draft_vocab=3)
    for name, wanted in ((str(tmp_path), None), ("~/model", None), ("./model", None), ("org/model", "org/model")):
        config._name_or_path = name
        assert shape.for_target(config).base_model_name_or_path == wanted


def test_a_head_that_is_loaded_already_is_taken(llama: Any, tmp_path: Path) -> None:
    head = random_head(llama)
    assert llama.load_drafter(head, name="mine").head is head
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(IDS)}
    assert torch.equal(llama.generate(IDS, **options), llama.generate(IDS, speculative="mine", **options))
    with pytest.raises(
        InvalidConfigError, match="revision are options for loading a head, but this EagleHead is already loaded"
    ):
        llama.load_drafter(head, revision="main")


def test_a_parallel_head_is_not_trained_level_by_level(llama: Any, tmp_path: Path) -> None:
    head, data = random_head(llama, **PARALLEL), [Conversation.of([5, 6, 7], [8, 9, 10, 11])]
    with pytest.raises(InvalidConfigError, match=r"is a P-EAGLE head.*Train it with speculators"):
        train_eagle(llama, head, data, head_arguments(tmp_path / "run", {"max_steps": 1}))
    with pytest.raises(InvalidConfigError, match="is a P-EAGLE head"):
        find_tree(llama, head, data)
    with pytest.raises(InvalidConfigError, match="`mask_token_id` 96 is outside the vocabulary of 96"):
        random_head(llama, version=3, mask_token_id=zoo.VOCAB_SIZE)
