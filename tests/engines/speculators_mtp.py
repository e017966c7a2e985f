"""Run by the Python of an environment with `speculators`: MTP modules that its own classes save, and their logits.

    python speculators_mtp.py TARGET OUT

OUT/MODEL_TYPE is a module. OUT/MODEL_TYPE.safetensors holds the target's embedding and lm_head, hidden states
`[1, T, D]`, tokens `[1, T]`, and the logits `[1, S, V]` of the first step.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.mtp.config import MTPSpeculatorConfig
from speculators.models.mtp.core import MTPDraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import CONFIG_MAPPING

target, out = sys.argv[1], Path(sys.argv[2])
out.mkdir(parents=True)
LENGTH, WIDTH, WORDS = 12, 32, 96
SIZES = {"vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}  # fmt: skip
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
          "layer_types": ["linear_attention", "full_attention"]}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
           "shared_expert_intermediate_size": 24}  # fmt: skip
KINDS = {"qwen3": {}, "qwen3_next": LINEAR | EXPERTS, "qwen3_5_text": LINEAR, "qwen3_5_moe_text": LINEAR | EXPERTS}

torch.manual_seed(0)
for kind, more in KINDS.items():
    layer = CONFIG_MAPPING[kind](**SIZES, **more)
    layer._attn_implementation = "sdpa"
    config = MTPSpeculatorConfig(
        transformer_layer_config=layer,
        speculators_config=SpeculatorsConfig(
            algorithm="mtp", proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=target, architectures=["LlamaForCausalLM"]),
        ),
    )  # fmt: skip
    model = MTPDraftModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.2 if parameter.dim() > 1 else 0.3))
    model.save_pretrained(out / kind)
    hidden, tokens = torch.randn(1, LENGTH, WIDTH), torch.randint(0, WORDS, (1, LENGTH))
    with torch.no_grad():
        logits = model(input_ids=tokens, hidden_states=hidden)[0]
    save_file({"embedding": model.embed_tokens.weight.detach().clone(), "hidden": hidden, "tokens": tokens,
               "lm_head": model.lm_head.weight.detach().clone(), "logits": logits[0].contiguous()},
              out / f"{kind}.safetensors")  # fmt: skip
