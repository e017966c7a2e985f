"""Run by a Python with `transformers`: heads that DeepSpec's own DSpark class saves, and what its own evaluator does.

    python dspark_heads.py ORIGINAL TARGET OUT

ORIGINAL is a checkout of github.com/deepseek-ai/DeepSpec, TARGET a tiny Qwen3 (or Llama). OUT/VARIANT is a head;
OUT/VARIANT.safetensors holds a prompt `input_ids [1, P]`, the first token after it `root [1]` and, of the first draft,
`features [1, P, n*H]`, `hidden [1, B, H]`, `base_logits [1, B, V]`, `logits [1, B, V]` (corrected by previous tokens),
`chain [1, B]`, `confidence [1, B]` (before the sigmoid); `kept [k]` the tokens emitted by its verify; the same of the
second draft with `_2` (`features_2 [1, k, n*H]`); `generated [1, P+24]`, `lengths` (tokens of each verify), `proposed`
(drafts of each). With a confidence head, the same three with `cut_` for a `threshold [1]` between its confidences.
`learnt`: the steps of training after which the head kept some but not all of the first draft.

Nothing of theirs is changed: the evaluator is made without its start-up (processes, data sets, bfloat16 models).
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3Config

original, target, out = sys.argv[1:]
sys.path.insert(0, original)
from deepspec.eval.dspark import evaluator as theirs  # noqa: E402
from deepspec.modeling.dspark.common import extract_context_feature  # noqa: E402
from deepspec.modeling.dspark.qwen3 import Qwen3DSparkModel  # noqa: E402
from deepspec.modeling.dspark.qwen3.config import build_draft_config  # noqa: E402
from deepspec.utils.config import ConfigNode  # noqa: E402

target, out = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval(), Path(out)
target.requires_grad_(False)
NEW, MASK = 24, target.config.vocab_size - 1
VANILLA = {"markov_rank": 8, "markov_head_type": "vanilla"}
SURE = {"confidence_head_alpha": 1.0, "confidence_head_with_markov": True}
VARIANTS = {
    "vanilla": {"layers": 2, "ids": [0, 2], **VANILLA, **SURE},
    "gated": {"layers": 2, "ids": [0, 1], **VANILLA, "markov_head_type": "gated", **SURE},
    "rnn": {"layers": 2, "ids": [0, 1], **VANILLA, "markov_head_type": "rnn", **SURE},
    "unsure": {"layers": 1, "ids": [1], **VANILLA},
    "plain_sure": {"layers": 1, "ids": [0, 1], **VANILLA, **SURE, "confidence_head_with_markov": False},
    "no_markov": {"layers": 1, "ids": [1], "markov_rank": 0, **SURE, "confidence_head_with_markov": False},
    "dflash": {"layers": 2, "ids": [0, 1], "markov_rank": 0},
    "embedding": {"layers": 1, "ids": [-1, 1], **VANILLA, "block_size": 4},
}


def build(layers, ids, **more):
    config = target.config
    if config.model_type != "qwen3":
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                 "num_key_value_heads", "head_dim", "max_position_embeddings", "rope_parameters")  # fmt: skip
        config = Qwen3Config(**{name: getattr(config, name) for name in names})
    asked = {"block_size": 7, "num_draft_layers": layers, "target_layer_ids": ids, "mask_token_id": MASK,
             "num_anchors": 4, "confidence_head_alpha": 0.0}  # fmt: skip
    config = build_draft_config(config, ConfigNode(asked | more))
    config._attn_implementation = "sdpa"
    head = Qwen3DSparkModel(config)
    with torch.no_grad():
        for parameter in head.parameters():
            flat = parameter.dim() == 1
            parameter.copy_(torch.rand_like(parameter) + 0.5 if flat else torch.randn_like(parameter) * 0.2)
        if head.confidence_head is not None:
            head.confidence_head.proj.bias.fill_(0.2)
    head.initialize_embeddings_and_head(embed_tokens=target.model.embed_tokens, lm_head=target.lm_head)
    return head


def learn(head, text, first, steps):
    """Some steps of training on the target's own text, from one anchor after another."""
    with torch.no_grad():
        states = target(text, output_hidden_states=True).hidden_states
    features = extract_context_feature(states, head.target_layer_ids)
    used = [part for part in head.parameters() if part.requires_grad]
    adam, block = torch.optim.Adam(used, 3e-3), head.block_size
    for _ in range(steps):
        start = int(torch.randint(first, text.shape[1] - block, ()))
        ids = torch.full((1, block), MASK)
        ids[0, 0] = text[0, start]
        hidden = head._forward_backbone(
            target_hidden_states=features[:, :start], noise_embedding=head.embed_tokens(ids),
            position_ids=torch.arange(start + block)[None], is_causal=False,
        )  # fmt: skip
        logits = head.compute_logits(hidden)
        if head.markov_head is not None:
            logits = head.markov_head.apply_block_logits(
                logits, token_ids=text[:, start : start + block], hidden_states=hidden
            )
        torch.nn.functional.cross_entropy(logits[0], text[0, start + 1 : start + 1 + block]).backward()
        adam.step()
        adam.zero_grad()


def evaluator(head, threshold=0.0):
    """Their evaluator and a list of what its first steps of each draft give."""
    made, drafts = object.__new__(theirs.Qwen3DSparkEvaluator), []
    made.target_model, made.draft_model, made.confidence_head_recorder = target, head, None
    made.args = SimpleNamespace(max_new_tokens=NEW, temperature=0.0, confidence_threshold=threshold)

    def propose(context, output_ids, start, **more):
        features = context.target_hidden_states
        hidden = []
        hook = head.norm.register_forward_hook(lambda _module, _inputs, states: hidden.append(states))
        proposal = type(made)._propose(made, context=context, output_ids=output_ids, start=start, **more)
        hook.remove()
        base = head.compute_logits(hidden[0])
        first = output_ids[:, start]
        chain, logits = head.sample_draft_tokens(base, first_prev_token_ids=first, hidden_states=hidden[0])
        if threshold == 0.0:
            assert torch.equal(proposal.verify_input_ids[:, 1:], chain)
        draft = {"features": features, "hidden": hidden[0], "base_logits": base, "logits": logits, "chain": chain}
        if head.confidence_head is not None:
            draft["confidence"] = proposal.confidence_logits
        drafts.append(draft)
        return proposal

    made._propose = propose
    return made, drafts


def run(head, prompt, threshold=0.0):
    made, drafts = evaluator(head, threshold)
    result = made.generate_one_sample(input_ids=prompt, stop_token_ids=None)
    counts = {"lengths": result.acceptance_lengths, "proposed": result.proposal_lengths}
    return {"generated": result.output_ids} | {name: torch.tensor(count) for name, count in counts.items()}, drafts


out.mkdir(parents=True)
for number, (name, variant) in enumerate(VARIANTS.items()):
    torch.manual_seed(number)
    head, prompt = build(**variant).eval(), torch.randint(0, MASK, (1, 9 + number % 4))
    text = target.generate(prompt, max_new_tokens=NEW + 9, do_sample=False, eos_token_id=None, pad_token_id=MASK)
    learnt = 0
    while learnt < 2000 and not 1 < run(head, prompt)[0]["lengths"][0] < head.block_size:
        learn(head, text, prompt.shape[1], 5)
        learnt += 5
    head.save_pretrained(out / name)

    kinds = {"dtype": torch.float32, "attn_implementation": theirs.Qwen3DSparkEvaluator.EVAL_ATTN_IMPLEMENTATION}
    head = Qwen3DSparkModel.from_pretrained(out / name, **kinds).eval()
    tensors, drafts = run(head, prompt)
    places = prompt.shape[1]
    assert torch.equal(tensors["generated"], text[:, : tensors["generated"].shape[1]])
    tensors |= {"input_ids": prompt, "root": text[0, places : places + 1], "learnt": torch.tensor([learnt]),
                "kept": text[0, places + 1 : places + 1 + int(tensors["lengths"][0])]}  # fmt: skip
    for suffix, draft in zip(("", "_2"), drafts[:2], strict=True):
        tensors |= {key + suffix: tensor for key, tensor in draft.items()}
    if head.confidence_head is not None:
        sure = tensors["confidence"][0].sigmoid().sort().values
        tensors["threshold"] = (sure[2] + sure[3])[None] / 2
        cut = run(head, prompt, float(tensors["threshold"]))[0]
        assert torch.equal(cut["generated"], tensors["generated"])
        tensors |= {"cut_" + key: tensor for key, tensor in cut.items()}
        print(name, "cut", cut["proposed"].tolist())
    save_file({key: tensor.clone().contiguous() for key, tensor in tensors.items()}, out / f"{name}.safetensors")
    print(name, "learnt", learnt, "lengths", tensors["lengths"].tolist(), "proposed", tensors["proposed"].tolist())
