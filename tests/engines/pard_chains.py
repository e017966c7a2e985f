"""Run by any Python with torch and transformers: chains that PARD's own loop drafts for a tiny pair of Llamas.

    python pard_chains.py ORIGINAL OUT

ORIGINAL: a checkout of https://github.com/AMD-AGI/PARD. OUT: a folder for the two models (`target`, `draft`) and
`chains.json`, in which every step has the tokens that the draft model read (`read`, the prompt first) and the chain
that it drafted after them (`drafts`).

`PardInfer.generate` runs as published. Patched around it: the device (cpu), the dtype (float32), the clock (which
synchronises a GPU), the tokenizer (prompts are token ids), and logging. Since transformers 5 a static cache counts its
tokens itself and ignores `cache_position`; there, each forward first sets that counter to `cache_position`.
"""

import json
import sys
import types
from importlib.metadata import version
from pathlib import Path

import torch
import torch._dynamo
import torch._inductor.config
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB_SIZE, MASK, DRAFT_K, TOKENS = 96, 95, 5, 40
original, out = Path(sys.argv[1]), Path(sys.argv[2])


class Silent:
    def __getattr__(self, name):
        return lambda *_args, **_options: None


try:
    import loguru  # noqa: F401
except ImportError:
    sys.modules["loguru"] = types.SimpleNamespace(logger=Silent())
sys.path.insert(0, str(original / "pard"))
import pard_infer  # noqa: E402

pard_infer.logger = Silent()


def save_models() -> None:
    """A target whose logits have no near ties, and a draft model that agrees with it now and then."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512, pad_token_id=0, bos_token_id=1,
        eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    target = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in target.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    target.save_pretrained(out / "target")
    target.config.pard_token, target.config.spd_type = MASK, "pard"
    with torch.no_grad():
        for parameter in target.parameters():
            if parameter.dim() > 1:
                parameter.add_(0.1 * parameter.std() * torch.randn_like(parameter))
        target.lm_head.weight[MASK] = 0  # the original may draft the mask token, so it must not be likely
    target.save_pretrained(out / "draft")


class OnCpu(pard_infer.PardInfer):
    """The original, without a GPU, a tokenizer or a clock."""

    eos_token_id = -1  # it is its own tokenizer

    def get_input(self, prompt, tokenizer, prompt_type):
        return "", torch.tensor([prompt])

    def decode(self, ids):
        return ""

    def speed_logger(self, name=None, log=True):
        self.seconds = getattr(self, "seconds", 0) + 1
        return self.seconds


def watched(model, calls):
    """The model with its forward noted down, and the counter of a cache of transformers 5 set to `cache_position`."""
    forward = model.forward

    def noted(*, cache_position, **inputs):
        calls.append(inputs["input_ids"][0].tolist())
        layers = getattr(inputs["past_key_values"], "layers", ())
        if layers and hasattr(layers[0], "cumulative_length"):
            for layer in layers:
                layer.cumulative_length.fill_(int(cache_position[0]))
            return forward(**inputs)
        return forward(cache_position=cache_position, **inputs)

    model.forward = model.forward_gen = noted
    return model


save_models()
infer = OnCpu(DRAFT_K, TOKENS, str(out / "draft"), str(out / "target"), "none", True, True, max_cache_len=160,
              model_serie="llama3")  # fmt: skip
target, target_cache = infer.model_init(str(out / "target"), torch.float32, 160, "cpu")
draft, draft_cache = infer.model_init(str(out / "draft"), torch.float32, 160, "cpu")
runs = []
for seed, length in enumerate((3, 11, 21)):
    prompt = torch.randint(3, VOCAB_SIZE - 1, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    read, verified = [], []
    kept = target.forward, draft.forward
    watched(target, verified), watched(draft, read)
    infer.generate([prompt], target, draft, target_cache, draft_cache, infer)
    target.forward, draft.forward = kept
    steps = [
        {"read": tokens[: 1 - DRAFT_K], "drafts": chain[-DRAFT_K:]}
        for tokens, chain in zip(read, verified, strict=True)
    ]
    runs.append({"prompt": prompt, "steps": steps})
found = {"transformers": version("transformers"), "mask": MASK, "draft_k": DRAFT_K, "runs": runs}
(out / "chains.json").write_text(json.dumps(found))
