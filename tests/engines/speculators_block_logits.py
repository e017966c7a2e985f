"""Run by the Python of an environment with `speculators`: exported block heads, and what its own code computes.

    python speculators_block_logits.py HEADS OUT

HEADS/NAME is a head whose config names its target by a path; HEADS/NAME.safetensors holds a text `input_ids [1, T]`,
`features [1, T, n*H]`, `last [1, T, H]` (the target's last hidden states, which only its loss reads) and `anchors [k]`
(positions). OUT/NAME.safetensors gets, of the block at each anchor, `hidden [k, B, H]` and `logits [k, B, V_d]`; of
DSpark also `previous [k, B]` (the tokens of the text that its Markov head was given) and `confidence [k, B]` (before
the sigmoid). Embedding and lm_head are those that its own loader takes from the target. As in `speculators_blocks.py`,
only `compute_metrics`, called last, is replaced by a function that notes what it is given.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModelConfig
from speculators.models.dflash import DFlashDraftModel
from speculators.models.dflash import core as dflash
from speculators.models.dspark import DSparkDraftModel
from speculators.models.dspark import core as dspark

heads, out = map(Path, sys.argv[1:3])


def load(path):
    """The head by its own class, with exactly the tensors of the file and those of its target."""
    kind = SpeculatorModelConfig.from_pretrained(path).speculators_model_type
    model_class = {"dflash": DFlashDraftModel, "dspark": DSparkDraftModel}[kind]
    config = model_class.config_class.from_pretrained(path)
    config.transformer_layer_config._attn_implementation = "eager"  # its default is for GPUs
    model = model_class.from_pretrained(path, config=config, dtype=torch.float32).eval()
    stored, loaded = load_file(path / "model.safetensors"), model.state_dict()
    assert stored.keys() <= loaded.keys(), stored.keys() - loaded.keys()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in stored.items())
    of_target = {"embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight"}
    assert loaded.keys() - stored.keys() <= of_target, loaded.keys() - stored.keys()
    assert all(bool(tensor.isfinite().all()) for tensor in loaded.values())
    return model


def forward(model, given):
    """Its training forward for blocks at the anchors, which are all that the loss mask leaves to draw from."""
    noted = {}

    def note(logits, _targets, confidence, *_, **__):
        noted.update({"logits": logits} | ({} if confidence is None else {"confidence": confidence}))
        return torch.zeros(()), {}

    dflash.compute_metrics = lambda logits, targets, *_, **__: note(logits, targets, None)
    dspark.compute_metrics = note
    model.lm_head.register_forward_hook(lambda _module, inputs, _output: noted.update(hidden=inputs[0]))
    if getattr(model, "markov_head", None) is not None:
        model.markov_head.markov_w1.register_forward_hook(
            lambda _module, inputs, _output: noted.update(previous=inputs[0])
        )
    text, anchors = given["input_ids"], given["anchors"]
    mask = torch.zeros_like(text)
    mask[0, anchors] = 1
    with torch.no_grad():
        model(hidden_states=given["features"], input_ids=text, loss_mask=mask, document_ids=torch.zeros_like(text),
              verifier_last_hidden_states=given["last"], max_anchors=len(anchors))  # fmt: skip
    shape = len(anchors), model.block_size
    return {key: tensor.reshape(*shape, *tensor.shape[2:]) for key, tensor in noted.items()}


out.mkdir(parents=True)
for path in sorted(path for path in heads.iterdir() if path.is_dir()):
    made = forward(load(path), load_file(path.with_suffix(".safetensors")))
    save_file({key: tensor.clone().contiguous() for key, tensor in made.items()}, out / f"{path.name}.safetensors")
    print(path.name, {key: tuple(tensor.shape) for key, tensor in made.items()})
