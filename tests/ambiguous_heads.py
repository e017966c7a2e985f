"""Small heads that are trained for a known reading and stored so that the files allow several."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from hf_specdec import Eagle3Config, Eagle3Head, export_head
from hf_specdec.heads.attention import AlignedAttention
from hf_specdec.heads.readings import Reading
from hf_specdec.training import start_from_target
from hf_specdec.verification.features import LAST, FeatureTap

DEPTH, VOCABULARY, STEPS = 6, 64, 5
SHIFT = 3.0

READINGS = {
    "ids of layers, as documented": (Reading(True, 1), [1, 3, 4]),
    "ids of layers, SpecForge's norm": (Reading(False, 1), [1, 3, 4]),
    "counts of layers": (Reading(True, 0), [1, 3, 5]),
    "counts of layers, SpecForge's norm": (Reading(False, 0), [1, 3, 5]),
    "the last layer": (Reading(True, 0), [2, 4, 6]),
    "the last layer, after its norm": (Reading(True, 0, final_norm=True), [2, 4, 6]),
}
"""The right reading, and the numbers of the layers that are read."""


def tiny_target(seed: int) -> Any:
    """A target whose layers differ and whose next token is not a near tie."""
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=VOCABULARY, hidden_size=48, intermediate_size=96, num_hidden_layers=DEPTH,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1,
                         eos_token_id=None, pad_token_id=0)  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(14 if "lm_head" in name else 6 if "_proj" in name else 4)
        model.model.norm.weight.copy_(torch.randn(48) * 1.5)  # far from a plain rescaling
    for layer in model.model.layers:  # otherwise a later layer serves a head as well as the one that it learned with
        layer.register_forward_hook(functools.partial(_shifted, torch.randn(48) * SHIFT))
    model.generation_config.eos_token_id = None
    return model


def _shifted(shift: Tensor, _module: Any, _inputs: Any, output: Tensor) -> Tensor:
    return output + shift


def texts_of(model: Any, count: int = 768, length: int = 24) -> Tensor:
    begin = torch.randint(2, VOCABULARY, (count, 1))
    texts: Tensor = model.generate(
        begin, attention_mask=torch.ones_like(begin), do_sample=True, max_new_tokens=length, min_new_tokens=length
    )
    return texts


def trained_head(model: Any, reading: Reading, layers: list[int], seed: int, updates: int = 500) -> Eagle3Head:
    """A head that learned to draft `STEPS` tokens with this reading."""
    torch.manual_seed(seed)
    ids = [LAST if reading.final_norm and layer == DEPTH else layer for layer in layers]
    config = Eagle3Config.for_target(
        model.config, eagle_aux_hidden_state_layer_ids=ids, norm_output=reading.norm_output
    )
    head = Eagle3Head(config)
    start_from_target(head, model)
    texts = texts_of(model)
    with torch.no_grad(), FeatureTap(model, ids) as tap:
        probs = model(texts).logits[:, 1:].softmax(-1)
    features = tap.take().of(ids)[:, :-1]
    embeddings = model.get_input_embeddings()(texts[:, 1:]).detach()
    positions = torch.arange(features.shape[1]).expand(len(texts), -1)
    optimiser = torch.optim.AdamW(head.parameters(), lr=3e-3)
    for _ in range(updates):
        rows = torch.randint(len(texts), (16,))
        hidden, attend, loss = head.fuse(features[rows]), AlignedAttention(), torch.zeros(())
        for step in range(STEPS):
            output = head(embeddings[rows], hidden, positions[rows], attend)
            log_probs = head.score(output).log_softmax(-1)
            loss = loss - (probs[rows] * log_probs).sum(-1)[:, step:].mean()
            hidden = torch.cat([hidden[:, :1], output[:, :-1]], dim=1)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return head.eval()


def stored(head: Eagle3Head, reading: Reading, layers: list[int], folder: Path) -> Path:
    """Write the head as SpecForge writes it, with `norm_output` true whatever it means."""
    ids, normed = head.config.eagle_aux_hidden_state_layer_ids, head.config.norm_output
    head.config.eagle_aux_hidden_state_layer_ids = layers  # the format has no state after the final norm
    export_head(head, folder, format="sglang")
    head.config.eagle_aux_hidden_state_layer_ids, head.config.norm_output = ids, normed
    config = json.loads((folder / "config.json").read_text())
    config["norm_output"] = True
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [layer - reading.layer_offset for layer in layers]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
