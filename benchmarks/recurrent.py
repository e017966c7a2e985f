"""Time steps on a model with recurrent layers: plain ones, chains as before, trees; eagerly and with the CPU kernels.

    python benchmarks/recurrent.py --json benchmarks/results/recurrent_cpu.json

The model is a Qwen3.5 of about 100M random parameters. An oracle decides how many tokens a step keeps, on average
`tau`, so all forms do the same work. Chains are verified with transformers' own cache; one that is kept in part costs
a second forward over the kept tokens. Forms are interleaved; results are medians over rounds, in milliseconds.
"""

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3_5TextConfig

from hf_specdec import bench
from hf_specdec.acceptance.accepted import Accepted
from hf_specdec.generation.model_programs import make_runner
from hf_specdec.trees.tree import TokenTree
from hf_specdec.verification.probe import inspect_target
from hf_specdec.verification.trials import first_inputs

TAUS = {"1": [1], "2.5": [2, 3], "4": [4]}
CONFIG = {
    "vocab_size": 32000, "hidden_size": 640, "intermediate_size": 1792, "num_hidden_layers": 16,
    "num_attention_heads": 10, "num_key_value_heads": 2, "head_dim": 64, "linear_num_key_heads": 8,
    "linear_num_value_heads": 16, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 4,
    "tie_word_embeddings": True, "max_position_embeddings": 4096,
}  # fmt: skip


def tree_of(num_nodes, depth):
    """Parents of a path of `depth` nodes below the root, and of further children, spread over it."""
    parents = [-1, *range(depth)]
    while len(parents) < num_nodes:
        parents.append((len(parents) - depth - 1) % (depth + 1))
    return parents


class Form:
    """A way to make steps, with the state of one text."""

    def __init__(self, model, facts, parents, runner, prompt, keep_all=False):
        self.target = facts.new_target(model, 2048, 512, runner=runner)
        self.parents, self.keep_all = torch.tensor(parents), keep_all
        self.tokens = torch.randint(10, 1000, (1, len(parents)))
        config = GenerationConfig()
        self.target.prefill(prompt, config, first_inputs(model, torch.ones_like(prompt), self.target.cache))

    def step(self, kept):
        """Verify and commit; return the seconds."""
        tree = TokenTree(self.tokens, self.parents)
        kept = len(self.parents) if self.keep_all else kept
        path = tuple(range(kept))
        decided = Accepted(
            torch.tensor([path]), self.tokens[:, :kept], self.tokens[:, 0], (path,), (path,), (len(self.parents) - 1,)
        )  # fmt: skip
        begin = time.perf_counter()
        self.target.verify(tree)
        self.target.commit(tree, decided)
        return time.perf_counter() - begin


def plain_seconds(model, ids, cache):
    """Seconds of transformers' own decoding step."""
    begin = time.perf_counter()
    model(input_ids=ids, past_key_values=cache, use_cache=True)
    return time.perf_counter() - begin


@torch.no_grad()
def measure(dtype, rounds, context):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3_5TextConfig(**CONFIG), dtype=getattr(torch, dtype)).eval()
    facts = inspect_target(model)
    chains = replace(facts, cache_layout=None, chain_only_reason="as before")
    kernels = make_runner(model, facts, frozenset(), "kernels")
    prompt = torch.randint(10, 1000, (1, context))
    forms = {
        "chain of 8": lambda: Form(model, chains, tree_of(8, 7), None, prompt),
        "chain of 8, kept whole": lambda: Form(model, chains, tree_of(8, 7), None, prompt, keep_all=True),
    }
    for name, runner in (("eager", None), ("kernels", kernels)):
        for nodes in (1, 8, 16):
            parents = tree_of(nodes, min(nodes - 1, 5))
            forms[f"tree of {nodes}, {name}"] = lambda p=parents, r=runner: Form(model, facts, p, r, prompt)
    rows = []
    for tau, keeps in TAUS.items():
        made, cache = {name: form() for name, form in forms.items()}, None
        outputs = model(input_ids=prompt, use_cache=True)
        cache, taken = outputs.past_key_values, {"plain": [], **{name: [] for name in made}}
        for turn in range(rounds):
            taken["plain"].append(plain_seconds(model, prompt[:, :1], cache))
            for name, form in made.items():
                taken[name].append(form.step(min(keeps[turn % len(keeps)], len(form.parents))))
        # the first steps allocate, and the two numbers of kept tokens cost differently: the mean over an even number
        medians = {
            name: statistics.mean(statistics.median(times[4 + k :: len(keeps)]) for k in range(len(keeps)))
            for name, times in taken.items()
        }
        rows.append({"tau": float(tau), "ms": {name: round(1e3 * value, 2) for name, value in medians.items()}})
        print(rows[-1], flush=True)
    size = sum(parameter.numel() for parameter in model.parameters())
    return {
        "environment": bench.environment(model), "dtype": dtype, "parameters": size, "context": context,
        "rounds": rounds, "rows": rows,
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = [measure(dtype, options.rounds, options.context) for dtype in options.dtypes]
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
