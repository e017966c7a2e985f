"""Run by a Python with `transformers`: heads that JetSpec's own class saves, and what its own drafters and loops do.

    python jetspec_heads.py ORIGINAL TARGET OUT

ORIGINAL is a checkout of github.com/hao-ai-lab/JetSpec, TARGET a tiny Llama or Qwen3. OUT/VARIANT is a head;
OUT/VARIANT.safetensors holds `shift` (their `draft_shift`, an argument of the drafter: no file tells it), a prompt
`input_ids [1, P]`, the first token after it `root [1]`, `features [1, P, n*H]`, `logits [1, B-1, V]` and `chain
[1, B-1]` of the first draft; `kept [k]` the tokens emitted by its verify, `features_2 [1, P+k, n*H]` (all of the
context), `logits_2`, `chain_2` of the second draft; `generated [24]`; `learnt`, the steps of training after which the
head kept some but not all of the first draft; `filled_logits [1, B-1, V]` of the first draft with the first two tokens
of its chain in place of masks. For each tree of a width and a budget, with the prefix `tree_WIDTH_BUDGET_`: `tokens`,
`parents` (-1: the root), `depths`, `logprobs` of the nodes of the first tree, `kept` by its verify, `logits_2` and
`tokens_2`, `parents_2` of the second, `generated [24]`, `lengths` (tokens of each verify) and `sizes` of the trees.

One change: no tokenizer is loaded.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, DynamicCache, Qwen3Config

original, target, out = sys.argv[1:]
sys.path.insert(0, original)
from jetspec.core import llm  # noqa: E402
from jetspec.core.model_runner import ModelRunner  # noqa: E402
from jetspec.draft_head_adapter import DraftHeadDrafter, DraftHeadTreeDrafter  # noqa: E402
from jetspec.models.draft_head import DFlashDraftModel, load_draft_head  # noqa: E402
from jetspec.tree import get_algorithm  # noqa: E402

target, out = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval(), Path(out)
target.requires_grad_(False)
WORDS, WIDTH = target.config.vocab_size, target.config.hidden_size
NEW, MASK = 24, WORDS - 1
TREES = (2, 4), (2, 15), (3, 8), (4, 32), (8, 64)
VARIANTS = {
    "plain": {"layers": 1, "block": 4, "ids": [1], "causal": False, "shift": False},
    "shift": {"layers": 2, "block": 4, "ids": [0, 2], "causal": False, "shift": True},
    "causal": {"layers": 2, "block": 8, "ids": [0, 2], "causal": True, "shift": False},
    "causal_shift": {"layers": 2, "block": 8, "ids": [0, 2], "causal": True, "shift": True},
    "last": {"layers": 1, "block": 4, "ids": [0, target.config.num_hidden_layers - 1], "causal": True, "shift": False},
    "last, both ways": {
        "layers": 1,
        "block": 4,
        "ids": [0, target.config.num_hidden_layers - 1],
        "causal": False,
        "shift": False,
    },
}


class Engine(llm.LLM):
    def __init__(self):
        self.model, self.runner, self.device, self.dtype = target, ModelRunner(target), "cpu", torch.float32
        self.eos_token_ids, self.tokenizer = set(), self

    def decode(self, *_, **__):
        return ""


engine, asked = Engine(), llm.SamplingParams(max_new_tokens=NEW)


def build(layers, block, ids, causal, **_):
    config = Qwen3Config(
        vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256, tie_word_embeddings=False, eos_token_id=None,
        rope_parameters=target.config.rope_parameters, num_target_layers=target.config.num_hidden_layers,
        block_size=block, dflash_config={"mask_token_id": MASK, "target_layer_ids": ids, "causal_head": causal},
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    head = DFlashDraftModel(config)
    with torch.no_grad():
        for parameter in head.parameters():
            flat = parameter.dim() == 1
            parameter.copy_(torch.rand_like(parameter) + 0.5 if flat else torch.randn_like(parameter) * 0.2)
    return head


def learn(head, text, first, shift, steps):
    """Some steps of training on the target's own text, from one anchor after another."""
    places = torch.arange(text.shape[1])[None]
    _, _, features = engine.runner.forward(text, DynamicCache(), places, True, head.target_layer_ids)
    features = features.clone()
    adam, block = torch.optim.Adam(head.parameters(), 3e-3), head.block_size
    for _ in range(steps):
        start = int(torch.randint(first, text.shape[1] - block, ()))
        ids = torch.full((1, block), MASK)
        ids[0, 0] = text[0, start]
        hidden = head(target_hidden=features[:, :start], noise_embedding=target.model.embed_tokens(ids),
                      position_ids=torch.arange(start + block)[None])  # fmt: skip
        logits = target.lm_head(hidden[0, :-1] if shift else hidden[0, 1:])
        torch.nn.functional.cross_entropy(logits, text[0, start + 1 : start + block]).backward()
        adam.step()
        adam.zero_grad()


def drafter(kind, head, shift):
    """One of their drafters, and a list of what it is given and gives."""
    made, drafts = kind(head, target, head.block_size, head.target_layer_ids, draft_shift=shift), []
    forward = made._fwd._forward_head

    def note(context, features, depth, fill_tokens=None):
        logits = forward(context, features, depth, fill_tokens=fill_tokens)
        drafts.append((context.clone(), features.clone(), logits.clone()))
        return logits

    made._fwd._forward_head = note
    return made, drafts


def chain(head, prompt, shift):
    made, drafts = drafter(DraftHeadDrafter, head, shift)
    asked_for = {"block_size": head.block_size, "target_layer_ids": head.target_layer_ids, "sampling_params": asked}
    return engine.generate_chain(prompt, made, **asked_for)["token_ids"], drafts


def first_kept(drafts):
    return drafts[1][0].shape[1] - drafts[0][0].shape[1]


def grow(head, root, logits, width, budget):
    return get_algorithm("accum_logp").build(root, logits, head.block_size, width, budget, torch.device("cpu"))


def trees(head, prompt, shift, width, budget):
    made, drafts = drafter(DraftHeadTreeDrafter, head, shift)
    result = engine.generate_tree(prompt, made, head.block_size, width, budget, target_layer_ids=head.target_layer_ids,
                                  sampling_params=asked, return_stats=True, return_text=False)  # fmt: skip
    (before, _, first), (after, _, second) = drafts[:2]
    one = grow(head, int(before[0, -1]), first, width, budget)
    two = grow(head, int(after[0, -1]), second, width, budget)
    return {"tokens": one.token_ids, "parents": one.parent_indices, "depths": one.depth, "logprobs": one.cum_logprob,
            "kept": after[0, before.shape[1] :], "logits_2": second, "tokens_2": two.token_ids,
            "parents_2": two.parent_indices, "generated": torch.tensor(result["token_ids"]),
            "lengths": torch.tensor(result["accept_lengths"]),
            "sizes": torch.tensor(result["tree_sizes"])}  # fmt: skip


out.mkdir(parents=True)
for number, (name, variant) in enumerate(VARIANTS.items()):
    torch.manual_seed(number)
    shift = variant["shift"]
    head, prompt = build(**variant), torch.randint(0, MASK, (1, 9 + number % 4))
    text = target.generate(prompt, max_new_tokens=NEW + 8, do_sample=False, eos_token_id=None, pad_token_id=MASK)
    learnt = 0
    while learnt < 2000 and not 1 < first_kept(chain(head, prompt, shift)[1]) < head.block_size:
        learn(head, text, prompt.shape[1], shift, 5)
        learnt += 5
    head.save_pretrained(out / name)

    head = load_draft_head(str(out / name), "cpu", torch.float32)
    generated, drafts = chain(head, prompt, shift)
    assert generated == text[0, prompt.shape[1] : prompt.shape[1] + NEW].tolist()
    (before, features, logits), (after, features_2, logits_2) = drafts[:2]
    path = logits[0].argmax(-1)[:2].tolist()
    filled = drafter(DraftHeadTreeDrafter, head, shift)[0].propose_logits_conditioned(before, path, features)
    tensors = {"shift": torch.tensor([shift]), "input_ids": prompt, "root": before[0, -1:], "features": features,
               "logits": logits, "chain": logits.argmax(-1), "kept": after[0, before.shape[1] :],
               "features_2": features_2, "logits_2": logits_2, "chain_2": logits_2.argmax(-1), "filled_logits": filled,
               "generated": torch.tensor(generated), "learnt": torch.tensor([learnt])}  # fmt: skip
    for width, budget in TREES:
        made = trees(head, prompt, shift, width, budget)
        assert torch.equal(made["generated"], tensors["generated"])
        tensors |= {f"tree_{width}_{budget}_{key}": tensor for key, tensor in made.items()}
    save_file({key: tensor.clone().contiguous() for key, tensor in tensors.items()}, out / f"{name}.safetensors")
    print(name, "learnt", learnt, "kept", tensors["kept"].tolist(), "tree", tensors["tree_4_32_lengths"].tolist())
