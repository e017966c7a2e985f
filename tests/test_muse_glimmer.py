"""Muse-Glimmer's assistant: drafts and answers of transformers' own generator for DFlash heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

from hf_specdec import DFlashHead, SpeculativeGenerationMixin, load_head

pytestmark = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.24"), reason="transformers has Muse-Glimmer from 5.24 on"
)
V, SIZE, WINDOW, NEW = 96, 32, 8, 40
SIZES = {"hidden_size": SIZE, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 8, "sliding_window": WINDOW, "bos_token_id": None, "eos_token_id": None,
         "pad_token_id": 0}  # fmt: skip


@pytest.fixture(scope="module")
def target() -> Any:
    """A tiny Muse-Glimmer, whose embedding is normalised."""
    torch.manual_seed(0)
    text = transformers.MuseGlimmerTextConfig(vocab_size=V, num_hidden_layers=4, **SIZES)
    vision = transformers.MuseGlimmerVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    config = transformers.MuseGlimmerConfig(text_config=text, vision_config=vision)
    model = transformers.MuseGlimmerForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.model.language_model.parameters():
            parameter.mul_(3)
    return SpeculativeGenerationMixin.attach(model)


@pytest.mark.parametrize("types", [["sliding_attention"] * 2, ["full_attention", "sliding_attention"]])
def test_drafts_the_chains_of_transformers(
    target: Any, types: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(3)
    config = transformers.MuseGlimmerAssistantConfig(
        num_hidden_layers=2, layer_types=types, block_size=5, mask_token_id=V - 1, target_layer_ids=[0, 2], **SIZES
    )
    assistant = transformers.MuseGlimmerAssistantModel(config).eval()
    with torch.no_grad():
        for parameter in assistant.parameters():
            parameter.mul_(4 if parameter.dim() > 1 else 1.5)
    assistant.save_pretrained(tmp_path)
    generator = transformers.generation.candidate_generator.DFlashTokenCandidateGenerator
    drafts: dict[tuple[int, ...], list[int]] = {}
    original = generator.get_candidates

    def spied(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        candidates, logits = original(self, input_ids, *args, **kwargs)
        drafts[tuple(input_ids[0].tolist())] = candidates[0, input_ids.shape[1] :].tolist()
        return candidates, logits

    monkeypatch.setattr(generator, "get_candidates", spied)
    ids = torch.randint(0, V - 1, (1, 12), generator=torch.Generator().manual_seed(5))
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": False}
    theirs = target.generate(ids, assistant_model=assistant, speculation_type="dflash", **options)

    head = load_head(tmp_path)
    assert isinstance(head, DFlashHead)
    assert head.layout == "muse-glimmer"
    assert head.config.vocab_size == 0
    target.load_drafter(tmp_path, name="muse")
    chain = {"method": "muse", "top_k": 1, "adaptive": False, "trace": True}
    ours = target.generate(ids, speculative=chain, **options)
    assert ours.tolist() == theirs.tolist() == target.generate(ids, **options).tolist()
    text, compared = ids[0].tolist(), 0
    trace = target.last_speculation.trace
    text.append(trace[0].rows[0].tokens[0])
    for step in trace:
        row = step.rows[0]
        if tuple(text) in drafts and len(text) < ids.shape[1] + NEW - 5:
            assert row.tokens[1:] == drafts[tuple(text)]
            compared += 1
        text.extend(row.emitted)
    assert compared > 10
    batch, mask = ids.repeat(2, 1), torch.ones(2, ids.shape[1], dtype=torch.long)
    batch[1, :4], mask[1, :4] = 0, 0
    options["attention_mask"] = mask
    tree = {"method": "muse", "top_k": 3, "num_draft_tokens": 12}
    assert torch.equal(target.generate(batch, speculative=tree, **options), target.generate(batch, **options))
    target.remove_drafter("muse")
