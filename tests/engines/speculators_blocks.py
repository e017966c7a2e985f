"""Run by the Python of an environment with `speculators`: block drafters that its own classes save, and their logits.

    python speculators_blocks.py TARGET OUT

TARGET is a tiny Llama or Qwen3. OUT/VARIANT is a DFlash or DSpark module; OUT/VARIANT.safetensors holds a text
`input_ids [1, T]`, `features [1, T, n*H]` of the target, `anchors [k]` (positions) and, of the block at each of them,
`hidden [k, B, H]`, `logits [k, B, V_d]`; of DSpark also `base_logits` (before the correction by the previous tokens),
`previous [k, B]` (the tokens of the text that it was given), `confidence [k, B]` (before the sigmoid). They are what
the training forward hands to its loss, which is not computed. Slot 0 means nothing unless `sample_from_anchor`.

Nothing of theirs is changed: `compute_metrics`, called last, is replaced by one that only notes what it is given. The
attention is their `eager` (the files do not tell which, and flex attention compiles for a minute).
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from speculators.models.dflash import DFlashDraftModel
from speculators.models.dflash import core as dflash
from speculators.models.dspark import DSparkDraftModel
from speculators.models.dspark import core as dspark
from transformers import AutoModelForCausalLM, Qwen3Config

path, out = sys.argv[1], Path(sys.argv[2])
target = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
WORDS, WIDTH, LENGTH, ANCHORS = target.config.vocab_size, target.config.hidden_size, 32, (1, 9, 17, 20)
SIZES = {"vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 48, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "tie_word_embeddings": False,
         "rope_parameters": target.config.rope_parameters}  # fmt: skip
WINDOW = {"use_sliding_window": True, "sliding_window": 5}
SHIFT, SMALL = {"sample_from_anchor": True}, {"draft_vocab_size": 40}
SOME = {"layer_types": ["sliding_attention", "full_attention"], **WINDOW}
ALL = {"layer_types": ["sliding_attention"] * 2, **WINDOW}
DSPARK = {"markov_rank": 8}
VARIANTS = {
    "dflash": ({}, {}), "dflash_shift": ({}, SHIFT), "dflash_small": ({}, SMALL),
    "dflash_small_shift": ({}, SMALL | SHIFT), "dflash_block4": ({}, {"block_size": 4}),
    "dflash_window": (SOME, {}), "dflash_window_open": (SOME, {"sliding_window_non_causal": True}),
    "dflash_window_all": (ALL, SMALL), "dspark": ({}, DSPARK),
    "dspark_small": ({}, DSPARK | SMALL), "dspark_late": ({}, DSPARK | SMALL | {"sample_from_anchor": False}),
    "dspark_gated": ({}, DSPARK | SMALL | {"markov_head_type": "gated"}),
    "dspark_rnn": ({}, DSPARK | {"markov_head_type": "rnn"}),
    "dspark_rnn_late": ({}, DSPARK | {"markov_head_type": "rnn", "sample_from_anchor": False}),
    "dspark_unsure": ({}, DSPARK | {"enable_confidence_head": False, "confidence_head_with_markov": False}),
    "dspark_plain_sure": ({}, DSPARK | {"confidence_head_with_markov": False}),
    "dspark_no_markov": ({}, {"markov_rank": 0, "confidence_head_with_markov": False}),
    "dspark_window": (SOME, DSPARK | SMALL),
}  # fmt: skip


def build(kind, layer, more):
    layer = Qwen3Config(**(SIZES | {"num_hidden_layers": 2} | layer))
    given = {"verifier_name_or_path": path, "target_layer_ids": [1, 3], "mask_token_id": WORDS - 1, "block_size": 8,
             "draft_vocab_size": WORDS, "draft_attn_impl": "eager"} | more  # fmt: skip
    kept = torch.zeros(WORDS, dtype=torch.bool)
    kept[torch.randperm(WORDS)[: given["draft_vocab_size"]]] = True
    ids = kept.nonzero()[:, 0]
    model = kind.from_training_args(layer, t2d=kept, d2t=ids - torch.arange(len(ids)), **given)
    theirs = ("embed_tokens", "lm_head", "verifier_lm_head", "verifier_norm")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.startswith(theirs):
                flat = parameter.dim() == 1
                parameter.copy_(torch.rand_like(parameter) + 0.5 if flat else torch.randn_like(parameter) * 0.2)
    return model


def forward(model, text, features, last, anchors):
    """Their training forward for blocks at these anchors, which are all that the loss mask leaves to draw from."""
    noted = {}

    def note(logits, _targets, confidence, *_, **__):
        noted.update({"logits": logits} | ({} if confidence is None else {"confidence": confidence}))
        return torch.zeros(()), {}

    dflash.compute_metrics = lambda logits, targets, *_, **__: note(logits, targets, None)
    dspark.compute_metrics = note
    head = lambda _module, inputs, base: noted.update(hidden=inputs[0], base=base)  # noqa: E731
    hooks = [model.lm_head.register_forward_hook(head)]
    if getattr(model, "markov_head", None) is not None:
        hooks.append(model.markov_head.markov_w1.register_forward_hook(
            lambda _module, inputs, _output: noted.update(previous=inputs[0])))  # fmt: skip
    mask = torch.zeros_like(text)
    mask[0, list(anchors)] = 1
    with torch.no_grad():
        model(hidden_states=features, input_ids=text, loss_mask=mask, verifier_last_hidden_states=last,
              document_ids=torch.zeros_like(text), max_anchors=len(anchors))  # fmt: skip
    for hook in hooks:
        hook.remove()
    shape = len(anchors), model.block_size
    if not hasattr(model, "markov_head"):
        noted.pop("base")
    elif "base" in noted:
        noted["base_logits"] = noted.pop("base")
    return {key: tensor.reshape(*shape, *tensor.shape[2:]) for key, tensor in noted.items()}


def check(model, text, features, last, made):
    """A block sees the features of positions below its anchor and the anchor's token, and nothing else."""
    for row, anchor in enumerate(ANCHORS):
        others, later, ids = features.clone(), features.clone(), torch.randint(0, WORDS, text.shape)
        later[:, anchor:] = torch.randn_like(later[:, anchor:])
        others[:, anchor - 1] += 1
        ids[0, anchor] = text[0, anchor]
        same = forward(model, ids, later, last, [anchor])["hidden"][0]
        torch.testing.assert_close(same, made["hidden"][row])
        assert not torch.allclose(forward(model, text, others, last, [anchor])["hidden"][0], made["hidden"][row])


out.mkdir(parents=True)
for number, (name, (layer, more)) in enumerate(VARIANTS.items()):
    torch.manual_seed(number)
    text = torch.randint(0, WORDS - 1, (1, LENGTH))
    kept = []
    hook = target.model.layers[-1].register_forward_hook(
        lambda _module, _inputs, states, kept=kept: kept.append(states if torch.is_tensor(states) else states[0])
    )
    with torch.no_grad():
        states = target(text, output_hidden_states=True).hidden_states
    hook.remove()
    kind = DFlashDraftModel if name.startswith("dflash") else DSparkDraftModel
    build(kind, layer, more).save_pretrained(out / name)

    config = kind.config_class.from_pretrained(out / name)
    config.transformer_layer_config._attn_implementation = "eager"
    model = kind.from_pretrained(out / name, config=config, dtype=torch.float32).eval()
    features = torch.cat([states[place] for place in model.target_layer_ids], -1)
    made = forward(model, text, features, kept[0], ANCHORS)
    check(model, text, features, kept[0], made)
    made |= {"input_ids": text, "features": features, "anchors": torch.tensor(ANCHORS)}
    save_file({key: tensor.clone().contiguous() for key, tensor in made.items()}, out / f"{name}.safetensors")
    print(name, {key: tuple(tensor.shape) for key, tensor in made.items()})
