"""Run by the Python of an environment with `speculators`: heads that its own classes save, and what they compute.

    python speculators_heads.py TARGET OUT

OUT/inputs.safetensors holds the target's embedding `[V, D]`, features `[1, T, layers * D]` and the token after each
`[1, T]`; OUT/NUMBER is a head, OUT/NUMBER.safetensors its logits `[1, T, Vd]` of three aligned steps.
"""

import itertools
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import AutoConfig, LlamaConfig, Qwen3Config

target, out = sys.argv[1], Path(sys.argv[2])
verifier = AutoConfig.from_pretrained(target)
SIZES = {"vocab_size": verifier.vocab_size, "hidden_size": verifier.hidden_size, "intermediate_size": 48,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
         "max_position_embeddings": 128}  # fmt: skip
LENGTH, DRAFT = 12, 24

torch.manual_seed(0)
inputs = {"embedding": torch.randn(verifier.vocab_size, verifier.hidden_size),
          "features": torch.randn(1, LENGTH, 3 * verifier.hidden_size),
          "input_ids": torch.randint(0, verifier.vocab_size, (1, LENGTH))}  # fmt: skip
out.mkdir(parents=True)
save_file(inputs, out / "inputs.safetensors")
kinds = itertools.product((LlamaConfig, Qwen3Config), (False, True), ("", "norm_before_fc", "fc_norm"), (False, True),
                          (1, 2))  # fmt: skip
described = []
for number, (family, before_residual, norm, normed, layers) in enumerate(kinds):
    layer = family(**SIZES, num_hidden_layers=layers)
    layer._attn_implementation = "eager"
    flags = {norm: True} if norm else {}
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer, draft_vocab_size=DRAFT, norm_before_residual=before_residual,
        norm_output=normed, eagle_aux_hidden_state_layer_ids=[0, 1, 2], **flags,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3", proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=target, architectures=["LlamaForCausalLM"]),
        ),
    )  # fmt: skip
    model = Eagle3DraftModel(config).eval()
    ids = torch.randperm(verifier.vocab_size)[:DRAFT].sort().values
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                torch.rand_like(parameter) + 0.5 if parameter.dim() == 1 else torch.randn_like(parameter) * 0.2
            )
        model.embed_tokens.weight.copy_(inputs["embedding"])
        model.d2t.copy_(ids - torch.arange(DRAFT))
        model.t2d.zero_()[ids] = True
    model.save_pretrained(out / str(number))
    kept = {}
    model.lm_head.register_forward_hook(lambda _m, _i, o, kept=kept: kept.setdefault(f"logits_{len(kept)}", o))
    with torch.no_grad():
        model(hidden_states=inputs["features"], input_ids=inputs["input_ids"],
              document_ids=torch.zeros(1, LENGTH, dtype=torch.long), ttt_steps=3)  # fmt: skip
    save_file({name: logits.contiguous() for name, logits in kept.items()}, out / f"{number}.safetensors")
    described.append([family.__name__, before_residual, norm, normed, layers])
(out / "heads.json").write_text(json.dumps(described))
