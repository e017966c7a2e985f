"""Run by a Python with `transformers`: heads that z-lab's own DFlash class saves, and what its loop does with them.

    python dflash_heads.py ORIGINAL TARGET OUT

ORIGINAL is a checkout of github.com/z-lab/dflash, TARGET a tiny Llama or Qwen3. OUT/VARIANT is a head;
OUT/VARIANT.safetensors holds a prompt `input_ids [1, P]`, the first token after it `root [1]`, `features [1, P, n*H]`,
`logits [1, B-1, V]` and `chain [1, B-1]` of the first draft; `kept [k]` the tokens emitted by its verify, `features_2
[1, k, n*H]`, `logits_2`, `chain_2` of the second draft; `generated [1, P+24]`, `lengths` (tokens of each verify) and
`learnt`, the steps of training after which the head kept some but not all of the first draft.

Two changes: the clock, which waits for a GPU, and in the `window` variants the kernel `flash_attn_func`, here written
out (without flash-attn their loader takes sdpa, which ignores the window: `logits_sdpa` are those of the first draft).
"""

import sys
import time
from collections import defaultdict
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers import modeling_flash_attention_utils as flash

original, target, out = sys.argv[1:]
sys.path.insert(0, original)
from dflash import model as dflash  # noqa: E402

dflash._cuda_time = time.perf_counter
target, out = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval(), Path(out)
target.requires_grad_(False)
WORDS, WIDTH = target.config.vocab_size, target.config.hidden_size
NEW, MASK = 24, WORDS - 1
SLIDING = {"use_sliding_window": True, "sliding_window": 6}
VARIANTS = {
    "one": {"layers": 1, "block": 4, "ids": [1]},
    "one_default": {"layers": 1, "block": 8, "ids": None},
    "two": {"layers": 2, "block": 8, "ids": [0, 2]},
    "two_default": {"layers": 2, "block": 4, "ids": None},
    "three_ids": {"layers": 2, "block": 4, "ids": [2, 0, 1], "attention_bias": True, "head_dim": 16},
    "last": {"layers": 1, "block": 4, "ids": [0, target.config.num_hidden_layers - 1]},
    "llama3": {"layers": 2, "block": 8, "ids": [0, 2], "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16}},
    "window": {"layers": 2, "block": 8, "ids": [0, 2], **SLIDING, "layer_types": ["sliding_attention"] * 2},
    "window_one": {"layers": 2, "block": 4, "ids": [0, 2], **SLIDING,
                   "layer_types": ["sliding_attention", "full_attention"]},
}  # fmt: skip


def attend(query, key, value, softmax_scale=None, causal=False, window_size=(-1, -1), **_):
    """flash-attn's function: the last query stands at the last key, `window_size` keys to the left and right of it."""
    place = torch.arange(query.shape[1])[:, None] + key.shape[1] - query.shape[1]
    left, right = window_size[0], 0 if causal else window_size[1]
    away = torch.arange(key.shape[1]) - place
    seen = ((away >= -left) | (left < 0)) & ((away <= right) | (right < 0))
    states = [part.transpose(1, 2) for part in (query, key, value)]
    return torch.nn.functional.scaled_dot_product_attention(
        *states, attn_mask=seen, scale=softmax_scale, enable_gqa=True
    ).transpose(1, 2)


flash._loaded_implementation, flash._flash_fn = "flash_attention_2", attend
flash._flash_varlen_fn = flash._flash_with_kvcache_fn = flash._pad_fn = flash._unpad_fn = None
flash._process_flash_kwargs_fn = partial(
    flash._process_flash_attention_kwargs, supports_mapping=defaultdict(bool, window_size=True)
)
flash._process_with_kvcache_kwargs_fn = None


def build(layers, block, ids, **more):
    config = Qwen3Config(**{
        "vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
        "rope_parameters": target.config.rope_parameters, "tie_word_embeddings": False, "eos_token_id": None,
        "block_size": block, "num_target_layers": target.config.num_hidden_layers,
        "dflash_config": {"mask_token_id": MASK} | ({"target_layer_ids": ids} if ids else {}),
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}} | more)  # fmt: skip
    config._attn_implementation = "sdpa"
    head = dflash.DFlashDraftModel(config)
    with torch.no_grad():
        for parameter in head.parameters():
            flat = parameter.dim() == 1
            parameter.copy_(torch.rand_like(parameter) + 0.5 if flat else torch.randn_like(parameter) * 0.2)
    return head


def use(head, kind):
    head.config._attn_implementation = kind
    return head


def learn(head, text, first, steps):
    """Some steps of training on the target's own text, from one anchor after another."""
    with torch.no_grad():
        states = target(text, output_hidden_states=True).hidden_states
    features = dflash.extract_context_feature(states, head.target_layer_ids)
    adam, block = torch.optim.Adam(head.parameters(), 3e-3), head.block_size
    for _ in range(steps):
        start = int(torch.randint(first, text.shape[1] - block, ()))
        ids = torch.full((1, block), MASK)
        ids[0, 0] = text[0, start]
        hidden = head(target_hidden=features[:, :start], noise_embedding=target.model.embed_tokens(ids),
                      position_ids=torch.arange(start + block)[None], is_causal=False)  # fmt: skip
        wanted = text[0, start + 1 : start + block]
        torch.nn.functional.cross_entropy(target.lm_head(hidden[0, 1:]), wanted).backward()
        adam.step()
        adam.zero_grad()


def run(head, prompt):
    """Their loop; the context and the logits of each draft."""
    drafts = []

    def note(_module, _inputs, given, hidden):
        logits = target.lm_head(hidden[:, 1 - head.block_size :, :])
        drafts.append((given["target_hidden"].clone(), logits.clone()))

    hook = head.register_forward_hook(note, with_kwargs=True)
    stats = dflash.dflash_generate(head, target, prompt, NEW, None, 0.0, return_stats=True)
    hook.remove()
    return stats, drafts


out.mkdir(parents=True)
for number, (name, variant) in enumerate(VARIANTS.items()):
    torch.manual_seed(number)
    kind = "flash_attention_2" if "use_sliding_window" in variant else "sdpa"
    head, prompt = build(**variant), torch.randint(0, MASK, (1, 9 + number % 4))
    text = target.generate(prompt, max_new_tokens=NEW + 8, do_sample=False, eos_token_id=None, pad_token_id=MASK)
    learnt = 0
    while learnt < 2000 and not 1 < run(use(head, kind), prompt)[0].acceptance_lengths[0] < head.block_size:
        learn(head, text, prompt.shape[1], 5)
        learnt += 5
    head.save_pretrained(out / name)

    head = use(dflash.DFlashDraftModel.from_pretrained(out / name, dtype=torch.float32).eval(), kind)
    stats, drafts = run(head, prompt)
    generated = head.spec_generate(
        target=target, input_ids=prompt, max_new_tokens=NEW, stop_token_ids=None, temperature=0.0
    )
    assert torch.equal(generated, stats.output_ids)
    assert torch.equal(generated, text[:, : generated.shape[1]])
    places = prompt.shape[1]
    kept = generated[0, places + 1 : places + 1 + stats.acceptance_lengths[0]]
    kept_logits = {"logits": drafts[0][1], "logits_2": drafts[1][1], "chain": dflash.sample(drafts[0][1]),
                   "chain_2": dflash.sample(drafts[1][1])}  # fmt: skip
    if kind != "sdpa":
        kept_logits["logits_sdpa"] = run(use(head, "sdpa"), prompt)[1][0][1]
    tensors = {"input_ids": prompt, "root": generated[0, places : places + 1], "features": drafts[0][0], "kept": kept,
               "features_2": drafts[1][0], "generated": generated, "lengths": torch.tensor(stats.acceptance_lengths),
               "learnt": torch.tensor([learnt])} | kept_logits  # fmt: skip
    save_file({key: tensor.clone().contiguous() for key, tensor in tensors.items()}, out / f"{name}.safetensors")
    print(name, "learnt", learnt, "lengths", stats.acceptance_lengths)
