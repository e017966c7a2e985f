"""Logits at nodes of a deep tree, against plain steps along the same path: beside transformers' form for many tokens.

Random models of about 20M parameters; four paths of 48 nodes below one root, after a prompt of 64 tokens. Printed by
depth: largest absolute and mean relative distance, of the tree and of one plain forward over each path alone.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache, GenerationConfig

from hf_specdec.trees.tree import TokenTree
from hf_specdec.verification.model import cache_argument
from hf_specdec.verification.probe import inspect_target
from hf_specdec.verification.trials import first_inputs

DEPTHS, PATHS, VOCAB = (1, 8, 24, 48), 4, 8192
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"intermediate_size": 1024, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64,
                     "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 64,
                     "linear_value_head_dim": 64, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2},
    "mamba2": {"num_heads": 12, "head_dim": 64, "n_groups": 1, "state_size": 128, "expand": 2},
}  # fmt: skip


@torch.no_grad()
def measure(kind: str, dtype: torch.dtype) -> None:
    """Print the distances of one model."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 384, "num_hidden_layers": 8, "eos_token_id": None}
    model: Any = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**sizes, **MODELS[kind]), dtype=dtype).eval()
    prompt, paths = torch.randint(VOCAB, (1, 64)), torch.randint(VOCAB, (PATHS, DEPTHS[-1]))
    parents = torch.arange(-1, PATHS * DEPTHS[-1])
    parents[1 :: DEPTHS[-1]] = 0
    target: Any = inspect_target(model).new_target(model, 512, None)
    target.prefill(prompt, GenerationConfig(), first_inputs(model, torch.ones_like(prompt), target.cache))
    root = prompt[:, :1]
    nodes = target.verify(TokenTree(torch.cat([root, paths.reshape(1, -1)], -1), parents)).logits[0, 1:]
    cache, name = DynamicCache(config=model.config), cache_argument(model)
    model(input_ids=prompt, use_cache=True, **{name: cache})
    texts, steps, whole = torch.cat([root.expand(PATHS, 1), paths], -1), list[Any](), list[Any]()
    for text in texts:
        plain, chunk = copy.deepcopy(cache), copy.deepcopy(cache)
        steps.append([model(input_ids=t.view(1, 1), use_cache=True, **{name: plain}).logits[0, -1] for t in text])
        whole.append(model(input_ids=text[None], use_cache=True, **{name: chunk}).logits[0])
    exact, chunks = torch.stack([torch.stack(row) for row in steps])[:, 1:].float(), torch.stack(whole)[:, 1:]
    for form, logits in (("tree", nodes.view(*paths.shape, -1)), ("chunks", chunks)):
        for depth in DEPTHS:
            off, size = (logits - exact)[:, depth - 1], exact[:, depth - 1].norm(dim=-1)
            print(f"{kind} {dtype} {form} depth {depth}: {off.abs().max():.1e} {(off.norm(dim=-1) / size).mean():.1e}")


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    for kind in MODELS:
        for dtype in (torch.float32, torch.bfloat16):
            measure(kind, dtype)
