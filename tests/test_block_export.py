"""Block heads, exported: read again they compute the same bit by bit; what a layout cannot hold is refused by name.

The last test needs speculators, see `test_engines.py`:

python -m venv /tmp/speculators && /tmp/speculators/bin/pip install torch==2.13.0 speculators
SPECULATORS_PYTHON=/tmp/speculators/bin/python make test
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import drafters
import zoo
from block_engines import PYTHON, Block, corrected, run_script
from hf_specdec import (
    CheckpointFormatError,
    DFlashHead,
    DrafterMismatchError,
    SpeculativeGenerationMixin,
    export_head,
    load_head,
)
from hf_specdec.checkpoints.export import lost_settings

FULL, SLIDES = "full_attention", "sliding_attention"
MIXED, ALL = [SLIDES, FULL], [SLIDES, SLIDES]
MARKOV = {"markov_rank": 6, "sample_from_anchor": True, "confidence_head": True, "confidence_with_markov": True}
SMALL = {"draft_vocab_size": 24, "own_lm_head": True}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip
ZLAB: dict[str, dict[str, Any]] = {
    "plain": {},
    "one layer, biases, head size": {"num_hidden_layers": 1, "attention_bias": True, "head_dim": 16,
                                     "aux_hidden_state_layer_ids": [0, 3, 2]},
    "scaled": {"rope_parameters": LLAMA3},
    "causal": {"causal": True, "all_children": True},
    "causal, likeliest nodes": {"causal": True},
    "all children": {"all_children": True},
    "windows": {"layer_types": MIXED, "sliding_window": 4},
    "causal windows": {"layer_types": MIXED, "sliding_window": 3, "causal": True, "sliding_causal": True},
    "only causal windows": {"layer_types": ALL, "sliding_window": 3, "sliding_causal": True},
    "cut vocabulary": SMALL,
    "cut vocabulary, causal": {**SMALL, "causal": True},
}  # fmt: skip
SPECULATORS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one layer, biases, head size": ZLAB["one layer, biases, head size"],
    "scaled": ZLAB["scaled"],
    "shifted": {"sample_from_anchor": True},
    "causal windows": {"layer_types": MIXED, "sliding_window": 4, "sliding_causal": True, "window_from_anchor": True},
    "open windows": {"layer_types": ALL, "sliding_window": 4, "window_from_anchor": True},
    "cut vocabulary": SMALL,
    "vanilla": MARKOV,
    "gated": {**MARKOV, **SMALL, "markov_head_type": "gated"},
    "rnn": {**MARKOV, "markov_head_type": "rnn"},
    "rnn, cut vocabulary, not shifted": {
        **MARKOV, **SMALL, "markov_head_type": "rnn", "sample_from_anchor": False},
    "without confidence": {"markov_rank": 6, "sample_from_anchor": True},
    "confidence alone": {"confidence_head": True},
    "confidence of the output": {**MARKOV, "confidence_with_markov": False},
    "windows and Markov": {**MARKOV, "layer_types": MIXED, "sliding_window": 4, "window_from_anchor": True,
                           "sliding_causal": True},
}  # fmt: skip
NATIVE = {**{f"dflash: {name}": fields for name, fields in ZLAB.items()}, **SPECULATORS,
          "everything else": {"bias": True, "qk_norm": False, "mlp_bias": True, "qkv_bias": True, "causal": True,
                              "own_embedding": True, "own_lm_head": True, "aux_hidden_state_layer_ids": [1, -1]},
          "shared lm_head, cut": {"draft_vocab_size": 24}}  # fmt: skip


def make(seed: int = 0, **fields: Any) -> DFlashHead:
    """A head for the tiny Llama, with two layers unless said."""
    return drafters.random_block(zoo.build("llama"), seed, base_model_name_or_path="org/target", **fields).eval()


@torch.no_grad()
def block_outputs(head: DFlashHead) -> list[Tensor]:
    """Everything that a head computes: outputs, logits, those of its chain, and confidences, of two blocks."""
    model, draw, found = zoo.build("llama"), torch.Generator().manual_seed(7), []
    block = Block(head, model.get_input_embeddings(), model.get_output_embeddings())
    for length, root in ((6, 5), (3, 8)):
        block.append(torch.randn(1, length, head.fc.in_features, generator=draw))
        outputs = block.outputs(root)
        if head.shares_lm_head and head.hot_token_ids is not None:
            found.append(outputs.slots)
            continue
        logits, chain = corrected(outputs)
        found += [outputs.slots, outputs.logits, logits, chain]
        if head.config.confidence_head:
            found.append(head.confidence(outputs.hidden[0], torch.cat([outputs.roots, chain[:-1]])))
    return found


def meaning(head: DFlashHead) -> dict[str, Any]:
    """What a config says, without what it says about layers that the head does not have."""
    config = head.config
    names = ("block_size", "mask_token_id", "aux_hidden_state_layer_ids", "sample_from_anchor", "markov_rank",
             "confidence_head", "confidence_with_markov", "own_lm_head", "own_embedding", "draft_vocab_size",
             "num_hidden_layers", "head_dim", "bias", "qk_norm", "attention_bias", "base_model_name_or_path",
             "vocab_size", "hidden_act", "rms_norm_eps")  # fmt: skip
    found = {name: getattr(config, name) for name in names}
    types = config.layer_types or [FULL] * config.num_hidden_layers
    found["types"], found["windows"] = types, head.layer_windows
    found["theta"] = config.rope_parameters["rope_theta"]
    if FULL in types:
        found["causal"] = config.causal
    if SLIDES in types:
        found["sliding"] = config.sliding_causal, config.window_from_anchor
    if config.markov_rank:
        found["kind"] = config.markov_head_type
    return found


def check_same(head: DFlashHead, again: Any) -> None:
    assert isinstance(again, DFlashHead)
    assert meaning(again) == meaning(head)
    states = head.state_dict(), again.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    for one, two in zip(block_outputs(head), block_outputs(again), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("name", ZLAB)
def test_z_labs_layout(name: str, tmp_path: Path) -> None:
    head = make(**ZLAB[name])
    head.check_sizes(zoo.build("llama").config)
    config = json.loads((export_head(head, tmp_path / "out", format="dflash") / "config.json").read_text())
    again = load_head(tmp_path / "out")
    check_same(head, again)
    causal = name in ("causal", "causal, likeliest nodes", "causal windows", "only causal windows",
                      "cut vocabulary, causal")  # fmt: skip
    assert again.layout == ("jetspec" if causal else "dflash")
    assert again.config.all_children == head.config.all_children
    assert (config["architectures"], config["model_type"]) == (["DFlashDraftModel"], "qwen3")
    assert config["num_target_layers"] == again.config.num_target_layers == 4
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == head.config.rope_parameters["rope_theta"]
    assert ("causal_head" in config["dflash_config"]) == causal
    # vLLM takes layers with a window for causal ones unless it is given
    assert config["dflash_config"].get("causal") == (True if causal else False if name == "windows" else None)
    assert config["dflash_config"]["target_layer_ids"] == [i - 1 for i in head.config.aux_hidden_state_layer_ids]
    assert ("draft_vocab_size" in config) == ("cut" in name)


@pytest.mark.parametrize("name", SPECULATORS)
def test_speculators_layout(name: str, tmp_path: Path) -> None:
    head = make(**SPECULATORS[name])
    config = json.loads((export_head(head, tmp_path / "out", format="speculators") / "config.json").read_text())
    again = load_head(tmp_path / "out")
    check_same(head, again)
    kind = "dspark" if head.config.markov_rank or head.config.confidence_head else "dflash"
    assert (again.layout, config["speculators_model_type"]) == (f"speculators-{kind}", kind)
    tokens = config["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    assert tokens == head.config.max_depth
    # speculators reads this for layers with a window; vLLM makes all layers causal if it is false
    slides = "sliding_attention" in (head.config.layer_types or ())
    assert config["sliding_window_non_causal"] == (not (slides and head.config.sliding_causal))
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {"d2t", "t2d", "lm_head.weight"}.isdisjoint(written) == (head.config.draft_vocab_size is None)


@pytest.mark.parametrize("name", NATIVE)
def test_our_own_layout(name: str, tmp_path: Path) -> None:
    head = make(**NATIVE[name])
    head.save_pretrained(tmp_path / "saved")
    for again in (load_head(tmp_path / "saved"), load_head(export_head(head, tmp_path / "exported"))):
        assert again.layout == "hf-specdec"
        check_same(head, again)
        for field in ("causal", "sliding_causal", "window_from_anchor", "all_children", "num_target_layers"):
            assert getattr(again.config, field) == getattr(head.config, field)


def test_the_number_of_target_layers_is_written_if_it_is_known(tmp_path: Path) -> None:
    head = make()
    folder = export_head(head, tmp_path / "unknown", format="dflash")
    assert "num_target_layers" not in json.loads((folder / "config.json").read_text())
    assert "add the number of the target's layers" in (folder / "README.md").read_text()
    model = SpeculativeGenerationMixin.attach(zoo.build("llama"))
    model.load_drafter(head, name="block")
    folder = export_head(head, tmp_path / "known", format="dflash")
    assert json.loads((folder / "config.json").read_text())["num_target_layers"] == 4
    assert "add the number of the target's layers" not in (folder / "README.md").read_text()
    model.remove_drafter("block")
    SpeculativeGenerationMixin.detach(model)


def test_settings_that_a_layout_cannot_store_are_named() -> None:
    head = make(all_children=True, top_k=3, tree=[[0], [1]])
    assert lost_settings(head, "dflash") == ["tree", "top_k"]
    assert lost_settings(head, "speculators") == ["tree", "top_k", "all_children"]


WINDOWS = {"layer_types": MIXED, "sliding_window": 4}


@pytest.mark.parametrize(
    ("fields", "formats", "reason"),
    [
        ({"qk_norm": False}, ("dflash", "speculators"), "train with qk_norm=True"),
        ({"bias": True}, ("dflash", "speculators"), "train with bias=False"),
        ({"mlp_bias": True}, ("dflash", "speculators"), "train with mlp_bias=False"),
        ({"qkv_bias": True}, ("dflash", "speculators"), "train with attention_bias=True"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
         ("dflash", "speculators"), "train without partial_rotary_factor"),
        ({"aux_hidden_state_layer_ids": [1, -1]}, ("dflash", "speculators"), "after the final norm"),
        ({"aux_hidden_state_layer_ids": None}, ("dflash", "speculators"), "model.load_drafter first"),
        ({"own_embedding": True}, ("dflash", "speculators"), "target's embedding, but this head has its own"),
        ({"own_lm_head": True}, ("dflash", "speculators"), "train with own_lm_head=False"),
        ({"draft_vocab_size": 24}, ("dflash", "speculators"), "pass the target.*--model"),
        ({"markov_rank": 4}, ("dflash",), "no Markov head .speculators"),
        ({"confidence_head": True}, ("dflash",), "no confidence head .speculators"),
        ({"sample_from_anchor": True}, ("dflash",), "no `sample_from_anchor` .speculators"),
        ({**WINDOWS, "window_from_anchor": True}, ("dflash",), "windows count from every slot.*speculators"),
        ({**WINDOWS, "sliding_causal": True}, ("dflash",), "all causal or all bidirectional"),
        ({**WINDOWS, "causal": True}, ("dflash",), "all causal or all bidirectional"),
        ({"causal": True}, ("speculators",), "are bidirectional, those of this head are causal .dflash"),
        ({**WINDOWS, "causal": True, "window_from_anchor": True}, ("speculators",), "are bidirectional"),
        (WINDOWS, ("speculators",), "windows count from the root.*dflash"),
    ],
)  # fmt: skip
def test_what_a_layout_cannot_hold(
    fields: dict[str, Any], formats: tuple[str, ...], reason: str, tmp_path: Path
) -> None:
    for format in formats:
        with pytest.raises(CheckpointFormatError, match=reason):
            export_head(make(**fields), tmp_path / "out", format=format)
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("format", ["dflash", "speculators"])
@torch.no_grad()
def test_a_draft_vocabulary_is_written_with_the_rows_of_the_targets_lm_head(format: str, tmp_path: Path) -> None:
    """As `train dflash --draft-vocab-size` makes heads; written with their target, they draft the same alone."""
    model, head = zoo.build("llama"), make(draft_vocab_size=24)
    assert head.shares_lm_head
    read = load_head(export_head(head, tmp_path / "head", format=format, target=model))
    assert isinstance(read, DFlashHead)
    assert not read.shares_lm_head
    assert head.shares_lm_head
    assert torch.equal(read.hot_token_ids, head.hot_token_ids)
    hidden = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(read.score(hidden), model.lm_head(hidden)[..., head.hot_token_ids])
    rest = {name: tensor for name, tensor in read.state_dict().items() if not name.startswith("lm_head")}
    for name, tensor in head.state_dict().items():
        assert torch.equal(rest.pop(name), tensor), name
    assert not rest
    with pytest.raises(DrafterMismatchError):
        export_head(head, tmp_path / "other", format=format, target=zoo.shallow("llama", 1))
    whole = make()
    assert load_head(export_head(whole, tmp_path / "whole", format=format, target=model)).shares_lm_head


def test_rows_of_a_quantised_lm_head_are_not_copied(tmp_path: Path) -> None:
    model = copy.deepcopy(zoo.build("llama"))
    model.lm_head = nn.Sequential(model.lm_head)
    with pytest.raises(CheckpointFormatError, match="Load the target in its original precision"):
        export_head(make(draft_vocab_size=24), tmp_path / "head", format="dflash", target=model)
    assert not (tmp_path / "head").exists()


def test_a_layer_that_dflash_reads_otherwise_is_refused(tmp_path: Path) -> None:
    head = make(aux_hidden_state_layer_ids=[1, 4])
    export_head(head, tmp_path / "unknown", format="dflash")
    head.check_sizes(zoo.build("llama").config)
    with pytest.raises(CheckpointFormatError, match="reads the last layer after the final norm"):
        export_head(head, tmp_path / "known", format="dflash")
    export_head(head, tmp_path / "speculators", format="speculators")
    causal = make(aux_hidden_state_layer_ids=[1, 4], causal=True)
    causal.check_sizes(zoo.build("llama").config)
    check_same(causal, load_head(export_head(causal, tmp_path / "jetspec", format="dflash")))


ANCHORS = (1, 5, 12)


@pytest.mark.slow
@pytest.mark.skipif(PYTHON is None, reason="SPECULATORS_PYTHON names no Python with speculators")
@torch.no_grad()
def test_speculators_computes_the_same_blocks(tmp_path: Path) -> None:
    """Its own classes load every export, take what it shares from the target, and run blocks at three anchors."""
    model = zoo.build("llama")
    model.save_pretrained(tmp_path / "target")
    draw, width = torch.Generator().manual_seed(0), 24
    ids = torch.randint(0, zoo.VOCAB_SIZE - 1, (1, width), generator=draw)
    for number, fields in enumerate(SPECULATORS.values()):
        head = make(number, **fields)
        head.config.base_model_name_or_path = str(tmp_path / "target")
        export_head(head, tmp_path / "heads" / str(number), format="speculators")
        given = {"input_ids": ids, "features": torch.randn(1, width, head.fc.in_features, generator=draw),
                 "last": torch.randn(1, width, 32, generator=draw), "anchors": torch.tensor(ANCHORS)}  # fmt: skip
        save_file(given, tmp_path / "heads" / f"{number}.safetensors")
    run_script("speculators_block_logits.py", tmp_path / "heads", tmp_path / "out")
    for number, (name, fields) in enumerate(SPECULATORS.items()):
        head, stored = make(number, **fields), load_file(tmp_path / "out" / f"{number}.safetensors")
        features = load_file(tmp_path / "heads" / f"{number}.safetensors")["features"]
        first = 0 if head.config.sample_from_anchor else 1
        for row, anchor in enumerate(ANCHORS):
            block = Block(head, model.get_input_embeddings(), model.get_output_embeddings())
            block.append(features[:, :anchor])
            outputs = block.outputs(int(ids[0, anchor]))
            previous = stored["previous"][row, first:] if "previous" in stored else None
            pairs = {"hidden": (outputs.slots[0], stored["hidden"][row]),
                     "logits": (corrected(outputs, previous)[0], stored["logits"][row, first:])}  # fmt: skip
            if "confidence" in stored:
                tokens = torch.zeros(head.config.max_depth, dtype=torch.long) if previous is None else previous
                pairs["confidence"] = head.confidence(outputs.hidden[0], tokens), stored["confidence"][row, first:]
            for kind, (ours, theirs) in pairs.items():
                scale = max(1.0, float(theirs.abs().max()))
                torch.testing.assert_close(ours, theirs, atol=1e-5 * scale, rtol=1e-5, msg=f"{name}, {kind}")
