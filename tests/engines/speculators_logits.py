"""Run by the Python of an environment with `speculators`: an exported head, and what its own code computes with it.

    python speculators_logits.py HEAD INPUTS.safetensors OUTPUT.safetensors

INPUTS: `embedding [V, D]` of the target, `features [1, T, layers * D]`, `input_ids [1, T]`, each the token after its
feature. OUTPUT: `logits_0 [1, T, Vd]` after the features; its metadata has the version of speculators.
"""

import sys
from importlib.metadata import version

import torch
from safetensors.torch import load_file, save_file
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

head, inputs, output = sys.argv[1:4]
config = Eagle3SpeculatorConfig.from_pretrained(head)
config.transformer_layer_config._attn_implementation = "eager"  # its default is for GPUs
model = Eagle3DraftModel.from_pretrained(head, config=config, dtype=torch.float32).eval()
given = load_file(inputs)
# an exported head leaves the embedding to its target; speculators 0.9.0 with transformers 5.19 finds zeros where it
# expects NaN, so that its own load_verifier_weights() leaves them
model.embed_tokens.weight.data = given["embedding"]
kept = {}
model.lm_head.register_forward_hook(lambda _module, _inputs, logits: kept.setdefault(f"logits_{len(kept)}", logits))
with torch.no_grad():
    length = given["input_ids"].shape[1]
    model(
        hidden_states=given["features"],
        input_ids=given["input_ids"],
        document_ids=torch.zeros(1, length, dtype=torch.long),
        ttt_steps=1,
    )
written = {name: logits.contiguous() for name, logits in kept.items()}
save_file(written, output, metadata={"version": version("speculators")})
