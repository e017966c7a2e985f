"""MTP modules that transformers drops: whole drafts against a plain reference, in trees too, and rotary precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

import layer_mtp
from drafters import random_head, random_module
from hf_specdec import HeadTensorsError, SpeculativeGenerationMixin
from hf_specdec.drafters.mtp import MtpDrafter
from hf_specdec.heads.head import bind_head
from layer_mtp import loaded
from reference import IDS, MASK, Recorder, paths_of, slow_dynamic_tree

pytestmark = pytest.mark.usefixtures("full_depth")


class SlowModule:
    """The module by definition, recomputed in plain PyTorch for every path."""

    def __init__(self, model: Any, tensors: dict[str, Any], text: list[int]) -> None:
        self.model, self.tensors, self.text = model, tensors, text
        with torch.no_grad():
            outputs = model.model(input_ids=torch.tensor([text[:-1]]), use_cache=False)
        self.hidden = outputs.last_hidden_state[0]  # after the final norm

    @torch.no_grad()
    def best_children(self, path: list[int], k: int) -> list[tuple[float, int]]:
        tokens = torch.tensor([*self.text[1:], *path, 0, 0])
        steps = layer_mtp.reference(self.tensors, self.model.config, self.model, tokens, self.hidden)
        scores, ids = steps[len(path)][-1].log_softmax(-1).topk(k)
        return list(zip(scores.tolist(), ids.tolist(), strict=True))


@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("kind", layer_mtp.KINDS)
def test_drafts_equal_the_definition(kind: str, trees: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps deep, in a ragged, padded batch. Trees need a target that is not marked as recurrent."""
    layer_mtp.save(kind, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    stored["mtp.fc.weight"][:, :32] += 20 * torch.eye(32)  # the module looks at the token, as the target does
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    tensors = {name: tensor for name, tensor in stored.items() if name.startswith("mtp.")}
    if trees:
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(layer_mtp.config_of(kind, hybrid=False))]
        monkeypatch.setattr(model_class, "_is_stateful", False)
    model = loaded(tmp_path)
    ids = torch.where(MASK == 1, IDS, 0)
    recorder = Recorder(drafter := MtpDrafter.native(model), ids)  # type: ignore[arg-type]
    model.add_drafter(drafter)
    fields, sizes = ({"top_k": 2, "num_draft_tokens": 8}, (3, 2, 8)) if trees else ({}, (3, 1, 4))
    options = {"attention_mask": MASK, "max_new_tokens": 14, "do_sample": False}
    plain = model.generate(ids, **options)
    assert torch.equal(plain, model.generate(ids, speculative={"method": "mtp", **fields}, **options))
    assert model.last_speculation.mean_accepted_length > 1  # so accepted entries are committed, too
    assert {tree.num_nodes for _, tree in recorder.trees} == {sizes[2]}
    for texts, tree in recorder.trees:
        tree.validate()
        for row in range(3):
            if len(texts[row]) < 28 - 4 * (row == 1) - 9 * (row == 2):
                assert set(paths_of(tree, row)) == slow_dynamic_tree(SlowModule(model, tensors, texts[row]), *sizes)


def test_rotary_frequencies_stay_exact_in_half_precision(tmp_path: Path) -> None:
    layer_mtp.save("qwen3_5_text", tmp_path)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    SpeculativeGenerationMixin.attach(model)
    native: Any = MtpDrafter.native(model)
    config = model.config
    config.sliding_window = None
    for head in (native.head, random_module(model), random_head(model, version=1), random_head(model, version=3)):
        wanted = head.rotary_emb.inv_freq.clone()
        assert wanted.dtype == torch.float32
        bind_head(head, model)
        assert next(head.parameters()).dtype == torch.bfloat16
        assert head.rotary_emb.inv_freq.dtype == torch.float32
        assert torch.equal(head.rotary_emb.inv_freq, wanted)


def test_experts_run_as_the_target_runs_its_own(tmp_path: Path) -> None:
    """Without an implementation, transformers warns and loops over experts, which waits for the device."""
    layer_mtp.save("qwen3_next", tmp_path)
    model = loaded(tmp_path)
    head: Any = MtpDrafter.native(model).head
    own, target = head.module.mtp_block.mlp.experts.config, model.model.layers[0].mlp.experts.config
    assert own._experts_implementation == target._experts_implementation


@pytest.mark.parametrize(
    ("tensor", "message"),
    [(None, r"incomplete: .*experts\.1\.gate_proj\.weight is missing, there are 4"),
     (torch.zeros(25, 32), r"differ in shape: .*experts\.1\.gate_proj\.weight has \(25, 32\)")],
)  # fmt: skip
def test_experts_that_do_not_fit_together(tensor: Any, message: str, tmp_path: Path) -> None:
    layer_mtp.save("qwen3_next", tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    name = "mtp.layers.0.mlp.experts.1.gate_proj.weight"
    stored = {key: value for key, value in stored.items() if key != name} | ({} if tensor is None else {name: tensor})
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(HeadTensorsError, match=message):
        MtpDrafter.native(loaded(tmp_path))
