"""Every published layout: read, computed with, written and read again; and what cannot be written is refused."""

from __future__ import annotations

import functools
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import drafters
import layouts
import zoo
from block_engines import Block, close, corrected
from hf_specdec import (
    CheckpointFormatError,
    DFlashHead,
    DrafterMismatchError,
    Eagle3Config,
    Eagle3Head,
    EagleConfig,
    EagleHead,
    InvalidConfigError,
    MedusaConfig,
    MedusaHeads,
    MtpConfig,
    MtpHead,
    SpeculativeGenerationMixin,
    export_head,
    load_head,
)
from hf_specdec.drafters.eagle import EagleDrafter
from hf_specdec.verification.features import LAST
from layouts import Example, Target
from reference import window_of

EXAMPLES = layouts.all_examples()


@torch.no_grad()
def draft(head: Any, target: Target) -> list[Tensor]:
    lm_head = nn.Linear(target.lm_head.shape[1], layouts.V, bias=False)
    lm_head.weight.data = target.lm_head
    if isinstance(head, DFlashHead):
        return draft_block(head, target, lm_head)
    if isinstance(head, MedusaHeads):
        return [head(target.features, lm_head)]
    table = head.embed_tokens.weight if head.config.own_embedding else target.embedding
    attend, length = window_of(head.config.sliding_window), target.features.shape[1]
    positions, hidden, logits = torch.arange(length + 2)[None], head.fuse(target.features), []
    if getattr(head.config, "mask_token_id", None) is not None:  # P-EAGLE
        hidden = torch.cat([hidden, head.fuse(head.mask_hidden).expand(1, 2, -1)], 1)
        tokens = torch.cat([target.tokens[:, :length], torch.full((1, 2), head.config.mask_token_id)], 1)
        scores = head.score(head(table[tokens], hidden, positions, attend), lm_head)
        return list(scores.split([length, 1, 1], 1))
    for step in range(3):
        size = hidden.shape[1]
        outputs = head(table[target.tokens[:, :size]], hidden, positions[:, :size], attend)
        logits.append(head.score(outputs if step == 0 else outputs[:, -1:], lm_head))
        hidden = torch.cat([hidden, outputs[:, -1:]], 1)
    return logits


def draft_block(head: DFlashHead, target: Target, lm_head: nn.Module) -> list[Tensor]:
    block = Block(head, nn.Embedding.from_pretrained(target.embedding), lm_head)
    block.append(target.features)
    outputs = block.outputs(int(target.tokens[0, target.features.shape[1] - 1]))
    logits, chain = corrected(outputs)
    previous = torch.cat([outputs.roots, chain[:-1]])
    sure = head.confidence(outputs.hidden[0], previous) if head.config.confidence_head else torch.zeros(0)
    return [outputs.logits[0], logits, sure]


def num_layers(example: Example) -> int:
    tensors = layouts.canonical(example.tensors)
    reads_several = {"layers.0.hidden_norm.weight", "hidden_norm.weight"} & tensors.keys()
    return tensors["fc.weight"].shape[1] // example.target_size if reads_several else 1


@pytest.mark.parametrize("name", EXAMPLES)
def test_reads_as_its_authors_do(name: str, tmp_path: Path) -> None:
    example = EXAMPLES[name]
    head = load_head(example.write(tmp_path))
    assert head.layout == example.layout
    target = layouts.target_for(num_layers(example), example.target_size)
    exact = functools.partial(torch.testing.assert_close, atol=1e-5, rtol=1e-5)
    compare = (
        close if getattr(head.config, "conv_kernel_size", 0) else exact
    )  # convolutions make logits of 10 and more
    for ours, theirs in zip(draft(head, target), example.draft(example, target), strict=True):
        compare(ours, theirs)
    ids = layouts.token_ids(example.tensors)
    if head.hot_token_ids is not None:
        assert ids is not None
        assert torch.equal(head.hot_token_ids, ids.sort().values)


@functools.cache
def model_of(size: int) -> Any:
    """A target of 32 layers, made and probed once."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=layouts.V, hidden_size=size, intermediate_size=24, num_hidden_layers=32,
                         num_attention_heads=2, num_key_value_heads=1, bos_token_id=None,
                         eos_token_id=None)  # fmt: skip
    return SpeculativeGenerationMixin.attach(LlamaForCausalLM(config).eval())


ONE_PER_LAYOUT = {example.layout: name for name, example in EXAMPLES.items()}.values()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ONE_PER_LAYOUT else pytest.mark.slow) for name in EXAMPLES]
)
def test_drafts_for_a_target_without_changing_its_answer(name: str, tmp_path: Path) -> None:
    model = model_of(EXAMPLES[name].target_size)
    drafter = model.load_drafter(EXAMPLES[name].write(tmp_path))
    ids = torch.randint(0, layouts.V, (2, 9), generator=torch.Generator().manual_seed(0))
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, speculative=drafter.method, **options), plain)
    assert model.last_speculation.num_drafted_tokens > 0
    for loaded in list(model.drafters):
        model.remove_drafter(loaded)


def same_head(first: Any, second: Any) -> None:
    assert type(first) is type(second)
    states = first.state_dict(), second.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(tensor, states[1][key]) for key, tensor in states[0].items())


@pytest.mark.parametrize("name", EXAMPLES)
def test_kept_in_our_own_layout(name: str, tmp_path: Path) -> None:
    example = EXAMPLES[name]
    head = load_head(example.write(tmp_path / "theirs"))
    export_head(head, tmp_path / "ours", format="hf-specdec")
    again = load_head(tmp_path / "ours")
    assert again.layout == "hf-specdec"
    same_head(head, again)
    target = layouts.target_for(num_layers(example), example.target_size)
    for one, two in zip(draft(head, target), draft(again, target), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("medusa of TGI", "medusa"),
        ("medusa version 2", "medusa"),
        ("eagle, bias by default, own embedding", "eagle"),
        ("eagle of LLaMA-3", "eagle"),
        ("eagle of Qwen2, scaled", "eagle"),
        ("eagle3, official", "eagle3"),
        ("eagle3, official", "sglang"),
        ("eagle3, official", "speculators"),
        ("eagle3, whole vocabulary, another width", "eagle3"),
        ("eagle3 of ModelOpt", "sglang"),
        ("eagle3 of ModelOpt", "speculators"),
        ("eagle3 of SpecForge, unmapped", "eagle3"),
        ("speculators eagle3, every norm", "speculators"),
        ("speculators eagle3 of Qwen3, sliding", "speculators"),
        ("speculators eagle3, converted", "sglang"),
        ("speculators mtp", "speculators-mtp"),
        ("eagle3.1 of TensorRT-LLM", "sglang"),
        ("eagle3.1 of TensorRT-LLM", "speculators"),
        ("eagle3 of NVIDIA for gpt-oss", "sglang"),
        ("eagle3 of ModelOpt, by frequency", "eagle3"),
        ("eagle3 of SGLang, three layers", "sglang"),
        ("eagle3 of ModelOpt, two layers", "speculators"),
        ("eagle3 of ModelOpt, two layers", "sglang"),
        ("speculators eagle3, two layers", "speculators"),
        ("speculators peagle", "speculators"),
        ("peagle of SpecForge", "speculators"),
        ("peagle of NeMo", "speculators"),
        ("dflash", "dflash"),
        ("dflash", "speculators"),
        ("dflash, factors", "dflash"),
        ("dflash, windows", "dflash"),
        ("dflash, windows of every layer", "dflash"),
        ("dflash, scaled, with biases", "dflash"),
        ("dflash, scaled, with biases", "speculators"),
        ("dflash of vLLM, cut vocabulary", "dflash"),
        ("dflash of vLLM, cut vocabulary", "speculators"),
        ("jetspec", "dflash"),
        ("jetspec, both ways", "dflash"),
        ("jetspec, windows", "dflash"),
        ("speculators dflash", "dflash"),
        ("speculators dflash, windows, cut vocabulary", "speculators"),
        ("speculators dflash, open windows", "speculators"),
        ("speculators dspark", "speculators"),
        ("speculators dspark, rnn, cut vocabulary", "speculators"),
        ("speculators dspark, unsure", "speculators"),
    ],
)
def test_written_for_others_and_read_again(name: str, format: str, tmp_path: Path) -> None:
    example = EXAMPLES[name]
    head = load_head(example.write(tmp_path / "theirs"))
    export_head(head, tmp_path / "out", format=format)
    again = load_head(tmp_path / "out")
    assert again.config.base_model_name_or_path == head.config.base_model_name_or_path
    target = layouts.target_for(num_layers(example), example.target_size)
    for one, two in zip(draft(head, target), draft(again, target), strict=True):
        assert torch.equal(one, two)
    # and by the reference of that layout, which knows nothing of ours
    files = list((tmp_path / "out").glob("*.safetensors"))
    assert {path.stat().st_mode for path in (tmp_path / "out").iterdir()} == {files[0].stat().st_mode}
    copy = Example(
        again.layout, json.loads((tmp_path / "out" / "config.json").read_text()), load_file(files[0]), example.draft
    )
    for ours, theirs in zip(draft(head, target), copy.draft(copy, target), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_published_tensors_come_back_bitwise(tmp_path: Path) -> None:
    pairs = {"eagle3, official": "eagle3", "eagle of LLaMA-3": "eagle", "medusa of TGI": "medusa",
             "speculators eagle3, converted": "speculators", "eagle3 for SGLang": "sglang"}  # fmt: skip
    for name, format in pairs.items():
        example = EXAMPLES[name]
        folder = tmp_path / name.replace(" ", "-")
        export_head(load_head(example.write(folder / "theirs")), folder / "out", format=format)
        written = load_file(next((folder / "out").glob("*.safetensors")))
        assert written.keys() == example.tensors.keys()
        assert all(torch.equal(tensor, written[key]) for key, tensor in example.tensors.items())
    unpickled = torch.load(tmp_path / "medusa-of-TGI" / "out" / "medusa_lm_head.pt", weights_only=True)
    assert unpickled.keys() == EXAMPLES["medusa of TGI"].tensors.keys()


def test_layer_ids_of_both_conventions(tmp_path: Path) -> None:
    ids = {name: load_head(EXAMPLES[name].write(tmp_path / str(i))).config.eagle_aux_hidden_state_layer_ids
           for i, name in enumerate(EXAMPLES) if "eagle3" in name}  # fmt: skip
    assert ids["eagle3, official"] is None
    assert ids["eagle3 of ModelOpt"] == [2, 16, 29]
    assert ids["eagle3 of SpecForge, 3.1"] == [1, 4, 7, 10]
    assert ids["speculators eagle3, converted"] == [2, 16, 29]
    head = load_head(EXAMPLES["eagle3 of ModelOpt"].write(tmp_path / "again"))
    for number, (layers, nested) in enumerate((([2, 16, 29], None), ([4, 16, 28], [3, 15, 27]))):
        head.config.eagle_aux_hidden_state_layer_ids = layers
        for format in ("sglang", "speculators"):
            folder = export_head(head, tmp_path / f"{format}{number}", format=format)
            config = json.loads((folder / "config.json").read_text())
            if format == "speculators":
                assert config["eagle_aux_hidden_state_layer_ids"] == layers
                continue
            # the paper's are SGLang's default; for some targets it does not add 1 to others, which the card says
            assert config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids") == nested
            assert ("adds 1 to the layer ids" in (folder / "README.md").read_text()) == (nested is not None)


def test_unnamed_layers_are_those_of_the_target(tmp_path: Path) -> None:
    head = load_head(EXAMPLES["eagle3, official"].write(tmp_path))
    with pytest.raises(InvalidConfigError, match="are not known yet"):
        _ = head.feature_layers
    head.resolve_feature_layers(32)
    assert head.feature_layers == (2, 16, 29)
    with pytest.raises(DrafterMismatchError, match="a target with 2 layers has"):
        load_head(tmp_path).resolve_feature_layers(2)


CONFIG = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}


LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}


def read(name: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return load_head(EXAMPLES[name].write(Path(folder)))


def untied_heads() -> MedusaHeads:
    """Two blocks per head, of which the second has learnt something else."""
    heads = MedusaHeads(MedusaConfig(32, 64, medusa_num_layers=2, shared_lm_head=False))
    torch.nn.init.ones_(heads.heads[1][1].linear.weight)  # type: ignore[index, union-attr, arg-type]
    return heads


@pytest.mark.parametrize(
    ("head", "format", "reason"),
    [
        (lambda: MedusaHeads(MedusaConfig(32, 64, draft_vocab_size=8)), "medusa", "no draft vocabulary"),
        (lambda: MedusaHeads(MedusaConfig(32, 64, medusa_num_layers=2)), "medusa", "one residual block"),
        (lambda: EagleHead(EagleConfig(**CONFIG, draft_vocab_size=8)), "eagle", "no draft vocabulary"),
        (lambda: untied_heads(), "medusa", "repeats one residual block per head, but these heads have 2"),
        (lambda: EagleHead(EagleConfig(**CONFIG, layernorms=True)), "eagle", "no layernorms"),
        (lambda: EagleHead(EagleConfig(**CONFIG, rope_parameters=LINEAR | {"rope_theta": 5e5})), "eagle",
         "linear at 500000"),
        (lambda: EagleHead(EagleConfig(**CONFIG, rope_parameters=LINEAR | {"rope_type": "dynamic"})), "eagle",
         "dynamic at 10000"),
        (lambda: Eagle3Head(Eagle3Config(**CONFIG, rope_parameters=layouts.LLAMA3 | {"rope_theta": 5e5})), "eagle3",
         "llama3 at 500000.*speculators"),
        (lambda: Eagle3Head(Eagle3Config(**CONFIG, head_dim=16)), "eagle3", "requires head_dim"),
        (lambda: EagleHead(EagleConfig(**CONFIG, head_dim=16)), "eagle", "requires head_dim"),
        (lambda: Eagle3Head(Eagle3Config(**CONFIG, norm_before_residual=True)), "eagle3", "norm_before_residual"),
        (lambda: Eagle3Head(Eagle3Config(**CONFIG, norm_output=True)), "eagle3", "no `norm_output`"),
        (lambda: Eagle3Head(Eagle3Config(**CONFIG, num_hidden_layers=2)), "eagle3", "has one layer"),
        (lambda: Eagle3Head(Eagle3Config(**CONFIG, own_lm_head=False)), "speculators", "uses the target's"),
        (lambda: Eagle3Head(Eagle3Config(**CONFIG, eagle_aux_hidden_state_layer_ids=[1, -1])), "sglang",
         "after the final norm"),
        (lambda: Eagle3Head(Eagle3Config(**CONFIG, rope_parameters=LINEAR | {"factor": 0.5})), "eagle3",
         "factor of at least 1"),
        (lambda: EagleHead(EagleConfig(**CONFIG, rope_parameters=layouts.HALF_ROTATED)), "eagle", "rotates all dimen"),
        (lambda: Eagle3Head(Eagle3Config(**CONFIG, fc_norm=True)), "eagle3", "no `fc_norm`"),
        (lambda: Eagle3Head(Eagle3Config(**CONFIG, eagle_aux_hidden_state_layer_ids=[1, 2])), "eagle3",
         "must read the layers 2"),
        (lambda: Eagle3Head(Eagle3Config(**CONFIG, own_embedding=True)), "sglang", "has its own"),
        (lambda: Eagle3Head(Eagle3Config(**CONFIG, mask_token_id=3)), "eagle3", "no parallel drafting"),
        (lambda: Eagle3Head(Eagle3Config(**CONFIG, mask_token_id=3)), "sglang", "no parallel drafting"),
        (lambda: Eagle3Head(Eagle3Config(**CONFIG, own_embedding=True, target_hidden_size=16)), "speculators",
         "hidden size of the head"),
        (lambda: EagleHead(EagleConfig(**CONFIG)), "eagle3", "is for Eagle3Head"),
        (lambda: read("dflash, factors"), "speculators", "no factors of embeddings and logits"),
        (lambda: read("dflash2"), "dflash", "no convolutions, no pairs of candidates and no GRU"),
        (lambda: read("domino, from the root"), "speculators", "no convolutions, no pairs of candidates and no GRU"),
        (lambda: read("muse-glimmer"), "dflash", "vocabulary is not known"),
        (lambda: MtpHead(MtpConfig(**CONFIG)), "speculators", "is for DFlashHead or Eagle3Head, this is MtpHead"),
        (lambda: MtpHead(MtpConfig(**CONFIG)), "speculators-mtp", "norms of queries and keys"),
        (lambda: MtpHead(MtpConfig(**CONFIG, qk_norm=True, sliding_window=4)), "speculators-mtp", "sliding window"),
        (lambda: MtpHead(MtpConfig(**CONFIG, qk_norm=True, draft_vocab_size=8)), "speculators-mtp", "draft vocab"),
    ],
)  # fmt: skip
def test_what_a_format_cannot_hold(head: Any, format: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointFormatError, match=reason):
        export_head(head(), tmp_path / "out", format=format)
    assert not (tmp_path / "out").exists()


def test_a_replacement_that_fails_leaves_the_old_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export_head(MedusaHeads(MedusaConfig(32, 64)), tmp_path / "out", format="medusa")
    before = sorted(path.name for path in (tmp_path / "out").iterdir())
    rename = Path.rename

    def fail(self: Path, target: Any) -> Path:
        if self.name == "new":
            raise OSError("no space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(InvalidConfigError, match="no space"):
        export_head(MedusaHeads(MedusaConfig(32, 64)), tmp_path / "out", format="medusa", replace=True)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == before


def test_no_such_format(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match="Known: hf-specdec, dflash, eagle, eagle3, medusa"):
        export_head(MedusaHeads(MedusaConfig(32, 64)), tmp_path, format="gguf")


NESTED = EXAMPLES["dflash"].config["dflash_config"]
MODELOPT = "eagle3 of ModelOpt"


def changed(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A copy of a config with other values at dotted paths; `...` removes the field."""
    copy = json.loads(json.dumps(config))
    for path, value in changes.items():
        *parents, name = path.split(".")
        place = copy
        for parent in parents:
            place = place[parent]
        place[name] = value
        if value is ...:
            del place[name]
    return copy


STRAY = {"a.weight": torch.zeros(2)}
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("peagle of SpecForge", {"mask_token_id": ...}, {}, "SpecForge does not store it: add `mask_token_id`"),
    ("peagle of SpecForge", {"mask_token_id": 64}, {}, "`mask_token_id` 64 is outside the vocabulary of 64"),
    ("peagle of SpecForge", {"mask_token_id": "7"}, {}, "`mask_token_id`"),
    ("peagle of SpecForge", {}, {"mask_hidden": ...}, "a P-EAGLE head, but the tensor mask_hidden is missing"),
    ("speculators peagle", {}, {"mask_hidden": ...}, "missing tensors: mask_hidden"),
    ("speculators peagle", {}, {"mask_hidden": torch.zeros(1, 1, 32)}, "wrong shapes: mask_hidden"),
    ("speculators peagle", {"speculators_config.proposal_methods": [{"speculative_tokens": "4"}]}, {}, "num_steps"),
    ("", {"architectures": ["LlamaForCausalLMEagle4"]}, STRAY, "is an EAGLE-4 head.*free licence.*hf-specdec find"),
    (MODELOPT, {"efficient_lm_head_config": {}}, {}, "is an EAGLE-4 head"),
    ("", {"architectures": ["K3DSparkModel"]}, STRAY, "is a DSpark drafter .K3DSparkModel. with layers of Kimi-K3"),
    ("", {"architectures": ["KimiK3DSparkModel"]}, STRAY, "with layers of Kimi-K3"),
    ("", {"architectures": ["DeepseekV4DSparkModel"]}, STRAY, "with layers of DeepSeek-V4"),
    ("", {"architectures": ["DSparkDraftModel"]}, STRAY, "with layers of DeepSeek-V4 or settings"),
    ("", {"architectures": ["Glm5_2DSparkModel"]}, STRAY, "with layers of Glm5_2"),
    ("dflash", {"dflash_config": {**NESTED, "xpress_rank": 256}}, {}, "is an XPress drafter"),
    ("dflash", {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}, {},
     "is a quantised head .quantization_config: 'NVFP4'."),
    ("", {"architectures": ["MLPSpeculatorPreTrainedModel"]}, STRAY, "MLP speculator"),
    ("", {"dflash_config": {}}, STRAY, "unknown tensors a.weight"),
    ("", {"speculators_model_type": "dspark"}, STRAY, "speculators-dspark.*unknown tensors a.weight"),
    ("", {"speculators_model_type": "dflash2"}, STRAY, "speculators-dflash2.*unknown tensors a.weight"),
    ("dflash2", {"dflash_config.selector_bias": True}, {}, "unknown fields selector_bias"),
    ("dflash2", {"dflash_config.selector_top_k": ...}, {}, "`selector_top_k` must both be set"),
    ("dflash2", {"dflash_config.conv_group_size": ...}, {}, "`conv_group_size` must both be set"),
    ("dflash2", {"dflash_config.conv_group_size": 5}, {}, "`conv_group_size` 5 must divide `hidden_size` 32"),
    ("dflash2", {"dflash_config.selector_top_k": 65}, {}, "65 candidates exceed 64 tokens"),
    ("dflash2", {"use_gemma_norm": True}, {}, "use_gemma_norm. is True"),
    ("dflash2", {"draft_vocab_size": 24}, {"d2t": torch.arange(24), "lm_head.weight": torch.zeros(24, 32)},
     "no Markov head and no draft vocabulary"),
    ("lilicorr", {"dflash_config.lilicorr_logit_scale": ...}, {}, "config has no `lilicorr_logit_scale`"),
    ("lilicorr", {"dflash_config.lilicorr_enabled": False}, {}, "lilicorr_enabled. is False"),
    ("lilicorr", {"dflash_config.lilicorr_num_layers": 2}, {}, "missing tensors: lilicorr"),
    ("lilicorr", {}, {"lilicorr.prior": torch.zeros(4)}, "unknown tensors: lilicorr.prior"),
    ("speculators dflash2", {"selector_rank": 5}, {}, "wrong shapes: .*candidate_selector"),
    ("", {"speculators_model_type": "xpress"}, STRAY, "is an XPress drafter .speculators."),
    ("", {"architectures": ["Gemma4DSparkModel"]}, STRAY, "with layers of Gemma 4 or settings"),
    ("", {"speculators_model_type": "peagle"}, STRAY, "its config names none"),
    ("", {"speculators_model_type": ["x"]}, STRAY, "of the unknown type"),
    ("peagle of NeMo", {}, {"mask_hidden": ...}, "a P-EAGLE head, but the tensor mask_hidden is missing"),
    ("", {"pard_token": 7}, STRAY, "PARD"),
    ("", {"model_type": "gemma4_assistant"}, STRAY, "is a Gemma 4 assistant"),
    ("", {"model_type": "llama"}, STRAY, "in a known layout: its config has .*model_type.*its tensors are a.weight"),
    (MODELOPT, {}, {"mask_hidden": torch.zeros(1, 1, 96)}, "A P-EAGLE head needs the mask token"),
    (MODELOPT, {}, {"parallel_draft_heads.0.medusa_layers.0.linear.weight": torch.zeros(2, 2)},
     "parallel Medusa heads"),
    (MODELOPT, {"kv_lora_rank": 16}, {}, "multi-head latent attention"),
    (MODELOPT, {}, {"midlayer.self_attn.kv_a_proj_with_mqa.weight": torch.zeros(2, 2)}, "multi-head latent attention"),
    (MODELOPT, {"quantization_config": {"quant_method": "fp8"}}, {},
     "is a quantised head .quantization_config: 'fp8'."),
    (MODELOPT, {"eagle_config": {"use_aux_hidden_state": False}}, {}, "on the final hidden state, without fc"),
    (MODELOPT, {"eagle_config": {**layouts.MODELOPT, "eh_proj_before_attn": True}}, {}, "eh_proj_before_attn"),
    (MODELOPT, {"num_hidden_layers": 3}, {"layers.2.input_layernorm.weight": torch.zeros(32)}, "a layer is missing"),
    (MODELOPT, {}, {"layers.1.self_attn.rotary.weight": torch.zeros(2, 2)}, "unknown tensors|missing tensors"),
    ("dflash", {"dflash_config": {**NESTED, "projector_type": "domino"}}, {}, "config has no `shift_label`"),
    ("dflash", {}, {"prefix_gru.weight_ih_l0": torch.zeros(3, 32)}, "unknown tensors prefix_gru"),
    ("domino, from the root", {"dflash_config.pure_draft_prefix_len": 2}, {}, "pure_draft_prefix_len.* is 2"),
    ("domino, from the root", {"dflash_config.gru_layers": 2}, {}, "unknown fields gru_layers"),
    ("domino, from the root", {"dflash_config.emb_dim": ...}, {}, "config has no `emb_dim`"),
    ("domino, from the root", {"dflash_config.gru_hidden_dim": 6}, {}, "wrong shapes: .*prefix_gru"),
    ("dflash", {}, {"layers.0.attention_conv.base_kernel": torch.zeros(2, 2, 32)},
     "unknown tensors: layers.0.attention_conv"),
    ("dflash", {}, {"candidate_selector.hidden_projection.weight": torch.zeros(4, 32)},
     "unknown tensors: candidate_selector"),
    ("dflash", {}, {"refiner.mix_l": torch.zeros(4, 5, 5)}, "is an XPress drafter"),
    ("dflash", {"dflash_config": {**NESTED, "projector_type": "dspark"}}, {}, "projector_type 'dspark'"),
    ("dflash", {"dflash_config": {**NESTED, "projector_type": ["x"]}}, {}, r"projector_type \['x'\]"),
    ("dflash", {}, {"mask_hidden": torch.zeros(1, 1, 64)}, "unknown tensors mask_hidden"),
    ("dflash", {"quantization_config": {"quant_method": "fp8"}}, {}, "is a quantised head"),
    ("dflash", {"dflash_config": {**NESTED, "attention_sink_bias": True}}, {}, "attention_sink_bias. is True"),
    ("dflash", {"add_swa_attention_sink_bias": True}, {}, "attention_sink_bias. is True"),
    ("dflash", {"is_neox_style": False}, {}, "is_neox_style. is False"),
    ("dflash", {"logit_scale": 0.5}, {}, "logit_scale. is 0.5"),
    ("dflash", {}, {"mask_embedding": torch.zeros(32)}, "unknown tensors mask_embedding"),
    ("dflash", {}, {"layers.0.self_attn.qkv_proj.weight": torch.zeros(64, 32)},
     r"unknown tensors layers\.0.*qkv_proj"),
    ("dflash", {}, {"layers.1.self_attn.g_proj.weight": torch.zeros(4, 32)}, r"unknown tensors layers\.1.*g_proj"),
    ("dflash", {}, {"layers.0.self_attn.attention_sink_bias": torch.zeros(4)}, "unknown tensors.*attention_sink_bias"),
    ("dflash", {}, {"encoder.fc.weight": torch.zeros(32, 64)}, r"unknown tensors encoder\.fc\.weight"),
    ("dflash", {}, {"hidden_dim_adapter.proj.weight": torch.zeros(32, 64)}, "unknown tensors hidden_dim_adapter"),
    ("dflash", {}, {"markov_head.markov_w1.weight": torch.zeros(64, 4)}, "unknown tensors: markov_head"),
    ("dflash", {}, {"lm_head.weight": torch.zeros(24, 32)}, "wrong shapes: lm_head.weight"),
    ("dflash", {"layer_types": ["sliding_attention"] * 3, "sliding_window": 4, "use_sliding_window": True}, {},
     "for 2 layers"),
    ("dflash", {"layer_types": ["linear_attention"] * 2}, {}, "layer_types. is"),
    ("dflash", {"num_hidden_layers": 3}, {}, "num_hidden_layers. is 3, but there are tensors of 2 layers"),
    ("dflash", {}, {"layers.3.mlp.up_proj.weight": torch.zeros(48, 32)}, "a layer is missing"),
    ("dflash", {"block_size": 1}, {}, "drafts no tokens"),
    ("dflash", {"dflash_config": {**NESTED, "mask_token_id": 64}}, {}, "outside the vocabulary of 64"),
    ("dflash", {"dflash_config": {**NESTED, "target_layer_ids": [1, 2, 3]}}, {}, "64 columns for 3 layers"),
    ("dflash", {"dflash_config": {**NESTED, "use_swa": True}}, {}, "no `swa_window_size`"),
    ("eagle3 of ModelOpt", {"eagle_config": {**layouts.MODELOPT, "use_last_layernorm": False}}, {},
     "use_last_layernorm"),
    ("eagle3 of SpecForge, 3.1", {"norm_output": 1}, {}, "norm_output"),
    ("eagle of LLaMA-3", {"num_hidden_layers": 2}, {}, "num_hidden_layers"),
    ("eagle3, official", {"target_hidden_size": 31}, {}, "names none, so there must be 3 of size 31"),
    ("eagle3, official", {"num_aux_hidden_states": 4}, {}, "reads 4 layers of the target, and its config does not"),
    ("eagle3, official", {"num_attention_heads": 8}, {}, "wrong shapes"),
    ("eagle3, official", {"fc_norm": True}, {}, r"missing tensors: fc_norm\.0\.weight"),
    ("eagle of LLaMA-3", {"bias": True}, {}, r"missing tensors: fc\.bias"),
    ("eagle, bias by default, own embedding", {"bias": False}, {}, r"unknown tensors: fc\.bias"),
    ("eagle3 of SpecForge, 3.1", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 1, 2, 3]}}, {},
     "distinct layers"),
    ("eagle3 of SpecForge, 3.1", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": "low"}}, {}, "layer indices"),
    ("speculators eagle", {"transformer_layer_config": {"model_type": "mixtral"}}, {}, "model_type 'mixtral'"),
    ("speculators eagle", {"transformer_layer_config": [1]}, {}, "expected an object"),
    ("speculators mtp", {"num_nextn_predict_layers": 2}, {}, "num_nextn_predict_layers. is 2"),
    ("speculators mtp", {"transformer_layer_config": {"model_type": "qwen3_moe"}}, {}, "model_type 'qwen3_moe'"),
    ("dflash", {"block_size": ...}, {}, "no `block_size`"),
    ("dflash", {"dflash_config.mask_token_id": ...}, {}, "no `mask_token_id`"),
    ("dflash", {"dflash_config.causal": "false"}, {}, "expected true or false"),
    ("jetspec", {"dflash_config.causal_head": "true"}, {}, "expected true or false"),
    ("speculators dflash", {"mask_token_id": None}, {}, "no `mask_token_id`"),
    ("speculators dflash", {"aux_hidden_state_layer_ids": None}, {}, "does not name the target's layers"),
    ("speculators dflash", {"sliding_window_non_causal": 1}, {}, "expected true or false"),
    ("speculators dflash", {"transformer_layer_config": [1]}, {}, "expected an object"),
    ("speculators dflash", {"transformer_layer_config.model_type": "mixtral"}, {}, "model_type 'mixtral'"),
    ("speculators dspark", {"markov_rank": 5}, {}, "wrong shapes: .*markov"),
    ("speculators dspark", {"markov_head_type": "gated"}, {}, "missing tensors: markov_head.gate_proj"),
    ("speculators dspark", {"markov_head_type": "lstm"}, {}, "markov_head_type"),
    ("speculators dspark", {"markov_rank": ...}, {}, "wrong shapes: .*markov"),
    ("speculators dspark", {"enable_confidence_head": False}, {}, "unknown tensors: confidence_head"),
    ("speculators dspark, unsure", {"enable_confidence_head": True}, {}, "missing tensors: confidence_head"),
    ("deepspec, plain", {"markov_rank": 6}, {}, "missing tensors: markov_head"),
    ("deepspec, no markov", {"confidence_head_with_markov": True}, {}, "confidence_with_markov. needs"),
    (MODELOPT, {}, {"d2t": torch.zeros(layouts.VD, dtype=torch.long) - torch.arange(layouts.VD)},
     "distinct target ids"),
    (MODELOPT, {}, {"d2t": torch.full((layouts.VD,), layouts.V)}, "distinct target ids from 0 to 63"),
    (MODELOPT, {}, {"d2t": torch.full((layouts.VD,), -1)}, "distinct target ids"),
    ("eagle3, official", {}, {"fc.weight": EXAMPLES["eagle3, official"].tensors["fc.weight"][0]},
     r"fc\.weight has shape \("),
    ("eagle3, official", {}, {"midlayer.self_attn.q_proj.weight": torch.zeros(31, 64)},
     "31 rows for 4 attention heads"),
    ("eagle3 for SGLang", {}, {"t2d": ~EXAMPLES["eagle3 for SGLang"].tensors["t2d"]}, "select different tokens"),
    (MODELOPT, {}, {"d2t": ...}, "lm_head has 24 rows for 64 tokens, without a d2t"),  # ModelOpt's Megatron export
    ("speculators eagle3, every norm", {}, dict.fromkeys(["layers.0.self_attn.o_proj.bias"], ...), "missing tensors"),
    ("speculators eagle3, every norm", {}, dict.fromkeys(layouts.BIASES, ...), "missing tensors"),
    ("speculators eagle3 of Qwen3, sliding", {}, dict.fromkeys(layouts.QWEN3_NORMS, ...), "missing tensors"),
    ("speculators mtp", {}, dict.fromkeys(["mtp_layers.0.final_layernorm.weight"], ...), "missing tensors"),
    ("speculators mtp", {},
     {f"mtp_layers.0.self_attn.{name}_norm.weight": ... for name in "qk"}, "missing tensors"),
    ("eagle of Qwen2, scaled", {}, dict.fromkeys(layouts.QKV_BIASES, ...), "missing tensors"),
]  # fmt: skip
"""What is not read: an example (or none), changes of its config and of its tensors, and what is said."""


@pytest.mark.parametrize(("name", "fields", "tensors", "message"), REFUSED)
def test_what_is_not_read_is_named(
    name: str, fields: dict[str, Any], tensors: dict[str, Any], message: str, tmp_path: Path
) -> None:
    example = EXAMPLES[name] if name else Example("", {}, {}, layouts.draft_eagle)
    kept = {key: tensor for key, tensor in {**example.tensors, **tensors}.items() if tensor is not ...}
    folder = tmp_path / ("a-rather-long-name-of-a-folder-" * 4)
    Example("", changed(example.config, fields), kept, example.draft, example.file).write(folder)
    with pytest.raises(CheckpointFormatError, match=message) as caught:
        load_head(folder)
    assert str(folder) in str(caught.value)


EAGLE3 = EXAMPLES["eagle3 of ModelOpt"]


@pytest.mark.parametrize(
    ("content", "reads"),
    [({"quantization": {"quant_algo": "FP8"}}, False), ({"quantization": {"quant_algo": None}}, True), ({}, True)],
)
def test_quantised_weights_are_refused_by_their_own_file(content: Any, reads: bool, tmp_path: Path) -> None:
    EAGLE3.write(tmp_path)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(content))
    if reads:
        load_head(tmp_path)
        return
    with pytest.raises(CheckpointFormatError, match=r"is a quantised head \(hf_quant_config.json: 'FP8'\)"):
        load_head(tmp_path)


def test_unset_buffers_of_angelslim(tmp_path: Path) -> None:
    words = {"d2t": torch.zeros(layouts.VD, dtype=torch.long), "t2d": torch.zeros(layouts.V, dtype=torch.bool)}
    head = load_head(Example("", EAGLE3.config, {**EAGLE3.tensors, **words}, EAGLE3.draft).write(tmp_path))
    assert torch.equal(head.hot_token_ids, torch.arange(layouts.VD))
    words["t2d"] = words["t2d"].float()
    Example("", EAGLE3.config, {**EAGLE3.tensors, **words}, EAGLE3.draft).write(tmp_path)
    with pytest.raises(CheckpointFormatError, match=r"t2d is torch\.float32"):
        load_head(tmp_path)


def test_medusa_heads_with_hot_tokens_before_a_target_is_known(tmp_path: Path) -> None:
    heads = load_head(EXAMPLES["medusa version 2"].write(tmp_path / "theirs"), hot_tokens=torch.tensor([9, 3, 5]))
    heads.save_pretrained(tmp_path / "ours")
    assert load_head(tmp_path / "ours").hot_token_ids.tolist() == [3, 5, 9]


def test_a_window_at_the_top_level_is_the_draft_layers_own_or_a_copy(tmp_path: Path) -> None:
    window = {"sliding_window": 4, "layer_types": ["sliding_attention"]}
    config = {**EAGLE3.config, **window}
    assert load_head(Example("", config, EAGLE3.tensors, EAGLE3.draft).write(tmp_path)).config.sliding_window == 4
    config["layer_types"] = ["sliding_attention"] * 36
    assert load_head(Example("", config, EAGLE3.tensors, EAGLE3.draft).write(tmp_path)).config.sliding_window is None


def test_partial_rotation_in_our_own_config(tmp_path: Path) -> None:
    head = Eagle3Head(Eagle3Config(**CONFIG, rope_parameters=layouts.HALF_ROTATED))
    head.save_pretrained(tmp_path)
    again = load_head(tmp_path)
    assert again.config.rope_parameters["partial_rotary_factor"] == 0.5
    same_head(head, again)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"]["partial_rotary_factor"] = 0.1  # 0.8 of 8 dimensions
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointFormatError, match="rotates 0 of 8 dimensions"):
        load_head(tmp_path)
    del config["rope_parameters"]["partial_rotary_factor"]
    (tmp_path / "config.json").write_text(json.dumps({**config, "partial_rotary_factor": 0.5}))
    assert load_head(tmp_path).config.rope_parameters["partial_rotary_factor"] == 0.5
    for field, value in (("attention_multiplier", 0.1), ("final_logit_softcapping", 30.0), ("residual_multiplier", 2)):
        (tmp_path / "config.json").write_text(json.dumps({**config, field: value}))
        with pytest.raises(CheckpointFormatError, match=f"`{field}`"):
            load_head(tmp_path)


def test_an_embedding_equal_to_the_targets_is_not_kept_twice(tmp_path: Path) -> None:
    model = SpeculativeGenerationMixin.attach(zoo.build("llama"))
    table = model.get_input_embeddings().weight.detach()
    size = table.shape[1]
    assert (len(table), size) == (zoo.VOCAB_SIZE, 32)
    for same in (True, False):
        head = EagleHead(EagleConfig.for_target(model.config, own_embedding=True))
        head.embed_tokens.weight.data = table.clone() if same else torch.randn_like(table)
        head.save_pretrained(tmp_path / str(same))
        loaded = model.load_drafter(tmp_path / str(same)).head
        assert loaded.config.own_embedding is not same
        assert ("embed_tokens.weight" in loaded.state_dict()) is not same
        ids = torch.arange(3, 9)[None]
        plain = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12)
        assert torch.equal(
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, speculative="eagle"), plain
        )
    SpeculativeGenerationMixin.detach(model)


def test_a_drafter_is_not_a_head(tmp_path: Path) -> None:
    drafter = EagleDrafter(EagleHead(EagleConfig(**CONFIG)))
    with pytest.raises(InvalidConfigError, match=r"got EagleDrafter\. Pass its attribute `head`"):
        export_head(drafter, tmp_path / "out")  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_eagles_code_gets_exactly_two_keys_of_a_scaling(tmp_path: Path) -> None:
    head = EagleHead(EagleConfig(**CONFIG, rope_parameters=LINEAR))
    config = json.loads((export_head(head, tmp_path / "out", format="eagle") / "config.json").read_text())
    assert config["rope_scaling"] == {"type": "linear", "factor": 2.0}
    assert load_head(tmp_path / "out").config.rope_parameters == LINEAR
    for number, (factor, written) in enumerate(((4, {"type": "linear", "factor": 4.0}), (1, None), (1.0, None))):
        head = EagleHead(EagleConfig(**CONFIG, rope_parameters=LINEAR | {"factor": factor}))
        text = (export_head(head, tmp_path / str(number), format="eagle") / "config.json").read_text()
        assert json.loads(text)["rope_scaling"] == written
        assert written is None or '"factor": 4.0' in text  # EAGLE's code refuses an integer


def test_a_head_in_the_authors_layout_is_read_as_theirs(tmp_path: Path) -> None:
    head = Eagle3Head(Eagle3Config(**CONFIG, draft_vocab_size=16))
    head.set_hot_token_ids(torch.arange(16) * 2)
    for format in ("eagle3", "sglang"):
        assert load_head(export_head(head, tmp_path / format, format=format)).layout == format


# ----------------------------------------------------------------------------------------------- block heads


def test_the_last_layer_is_normed_in_z_labs_code_only(tmp_path: Path) -> None:
    read = {}
    for name in ("dflash", "jetspec", "jetspec, both ways"):
        example = EXAMPLES[name]
        config = changed(example.config, {"dflash_config.target_layer_ids": [-1, 31]})
        read[name] = load_head(Example("", config, example.tensors, example.draft).write(tmp_path / name)).config
    layers = {name: (config.aux_hidden_state_layer_ids, config.all_children) for name, config in read.items()}
    jetspec = [0, 32], True
    assert layers == {"dflash": ([0, LAST], False), "jetspec": jetspec, "jetspec, both ways": jetspec}


def test_unnamed_layers_of_a_block_head_are_those_of_the_target(tmp_path: Path) -> None:
    example = EXAMPLES["dflash"]
    config = changed(example.config, {"dflash_config.target_layer_ids": ...})
    head = load_head(Example("", config, example.tensors, example.draft).write(tmp_path))
    with pytest.raises(InvalidConfigError, match="are not known yet"):
        _ = head.feature_layers
    head.check_sizes(LlamaConfig(vocab_size=layouts.V, hidden_size=32, num_hidden_layers=32))
    assert head.feature_layers == (2, 30)


def test_a_tower_of_lists_in_the_config_of_a_block_head(tmp_path: Path) -> None:
    example = EXAMPLES["dflash"]
    example.write(tmp_path)
    text = json.dumps(example.config)
    for name in ("layer_types", "block_size", "num_hidden_layers"):
        value = json.dumps(example.config[name])
        deep = text.replace(f'"{name}": {value}', f'"{name}": ' + "[" * 900 + "]" * 900)
        assert deep != text
        (tmp_path / "config.json").write_text(deep)
        with pytest.raises(CheckpointFormatError):
            load_head(tmp_path)


HOSTILE: list[Any] = [
    None, "", "x", "1", -1, 0, 1, 7, 2**31, -(2**63), 2**70, 1.5, -1e300, True, False, [], [[]], {}, {"a": {"b": []}},
    [1, "x"], [2**70] * 2, ["full_attention", 3], [None, None], ["sliding_attention", "sliding_attention"],
]  # fmt: skip
HOSTILE_FIELDS = (
    "block_size", "mask_token_id", "num_hidden_layers", "layer_types", "sliding_window", "use_sliding_window",
    "dflash_config", "num_target_layers", "draft_vocab_size", "architectures", "vocab_size", "hidden_size",
    "target_layer_ids", "markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov",
    "sample_from_anchor", "sliding_window_non_causal", "aux_hidden_state_layer_ids", "is_neox_style", "is_causal",
    "transformer_layer_config", "rope_parameters", "num_attention_heads", "head_dim", "logit_scale",
    *(f"dflash_config.{name}" for name in ("mask_token_id", "target_layer_ids", "causal", "causal_head", "use_swa",
                                           "swa_window_size", "block_size", "all_children", "projector_type")),
    *(f"transformer_layer_config.{name}" for name in ("layer_types", "sliding_window", "use_sliding_window",
                                                      "num_hidden_layers", "model_type", "rope_parameters")),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", [
    "dflash, windows", "speculators dspark",
    *(pytest.param(name, marks=pytest.mark.slow)
      for name in ("jetspec", "deepspec, rnn", "speculators dflash, open windows")),
])  # fmt: skip
def test_hostile_configs_of_block_heads(name: str, tmp_path: Path) -> None:
    """Each either raises an error of this package, or gives a head whose block can be run."""
    example = EXAMPLES[name]
    example.write(tmp_path)
    target = layouts.target_for(num_layers(example))
    for path in HOSTILE_FIELDS:
        if "." in path and path.split(".")[0] not in example.config:
            continue
        for value in HOSTILE:
            (tmp_path / "config.json").write_text(json.dumps(changed(example.config, {path: value})))
            head, message = None, ""
            try:
                head = load_head(tmp_path)
            except CheckpointFormatError as error:
                message = str(error)
            assert head is not None or 20 < len(message) < 3000, (path, value)
            if head is not None and head.config.block_size <= 64 and head.config.vocab_size == layouts.V:
                assert all(bool(part.isfinite().all()) for part in draft(head, target)), (path, value)


def test_the_table_of_engines_names_every_layout_that_can_be_written(tmp_path: Path) -> None:
    """docs/heads.md says which trained heads load in which engine: each of its cells, by writing that head."""
    model = zoo.shallow("llama", 4)
    eagle = {"version": 3, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    cut: dict[str, Any] = {"draft_vocab_size": 24}
    heads: dict[str, Any] = {
        "`eagle`": drafters.random_head(model, **eagle),
        "`eagle` with `qk_norm`": drafters.random_head(model, **eagle, qk_norm=True),
        "`eagle --version 1`": drafters.random_head(model),
        "`dflash`": drafters.random_block(model),
        "`dflash --draft-vocab-size N`": drafters.random_block(model, **cut),
        "`dflash --causal`": drafters.random_block(model, causal=True),
        "`dflash --markov-rank N`": drafters.random_block(model, markov_rank=4, sample_from_anchor=True),
        "`dflash --causal --markov-rank N`": drafters.random_block(
            model, causal=True, markov_rank=4, sample_from_anchor=True, **cut
        ),
    }
    page = (Path(__file__).parents[1] / "docs" / "heads.md").read_text()
    lines = page.partition("| trained with |")[2].split("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    for number, (start, head) in enumerate(heads.items()):
        found = [row for row in rows if row[0] == start or row[0].startswith((f"{start} or", f"{start},"))]
        ((_, vllm, sglang),) = found
        named = {word for cell in (vllm, sglang) for word in re.findall("`([a-z0-9]+)`", cell)}
        for format in ("dflash", "speculators", "sglang", "eagle"):
            folder = tmp_path / f"{number}{format}"
            if format in named:
                export_head(head, folder, format=format, target=model)
            else:
                with pytest.raises(CheckpointFormatError):
                    export_head(head, folder, format=format, target=model)
