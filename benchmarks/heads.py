"""Measure the accept length of several heads, with chains and trees, by question category.

    python benchmarks/heads.py --prompts questions.jsonl --json benchmarks/results/heads_cpu_bf16.json \\
        eagle3=heads/smollm2-135m-instruct-eagle3 medusa2=run=run/model

A head is given as NAME=DIRECTORY, or NAME=DIRECTORY=MODEL if its target is not the packaged model. Greedy, batch size
1. Speed is not measured.
"""

import argparse
import gc
import json
import statistics
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table

from hf_specdec import bench
from hf_specdec.drafters.medusa import paper_tree
from hf_specdec.generation import loading


def shapes(method, config, sizes):
    """Return the trees to measure: a chain, the default, and several sizes (for Medusa the paper's and searched)."""
    depth = config.medusa_num_heads if method == "medusa" else config.max_depth if method == "dflash" else 5
    found = {"chain": {"tree": [[0] * length for length in range(1, depth + 1)]}, "default": {}}
    paper = [path for path in paper_tree("mc_sim_7b_63") if len(path) <= depth]
    for nodes in sizes:
        if method == "eagle":
            found[f"dynamic {nodes}"] = {"tree": "dynamic", "num_steps": 6, "top_k": 8, "num_draft_tokens": nodes}
            found[f"deep {nodes}"] = {"tree": "dynamic", "num_steps": 10, "top_k": 6, "num_draft_tokens": nodes}
        elif method == "dflash":
            found[f"dynamic {nodes}"] = {"tree": "dynamic", "top_k": 8, "num_draft_tokens": nodes}
        else:
            found[f"paper {nodes}"] = {"tree": paper[: nodes - 1]}
            found[f"searched {nodes}"] = {"tree": "static", "num_draft_tokens": nodes}
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heads", nargs="+")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--per-category", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--nodes", type=int, nargs="+", default=[32])
    parser.add_argument("--trees", nargs="+", help="only these trees, e.g. `default` and `dynamic 32`")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    questions = bench.read_questions(options.prompts, per_category=options.per_category)
    categories = list(dict.fromkeys(question.category for question in questions))
    table = Table("head", "tree", "nodes", *categories, "all", "by depth")
    rows = []
    for entry in options.heads:
        name, folder, base = (*entry.split("="), None)[:3]
        model, tokenizer = loading.load_model(base, folder, torch.bfloat16)
        (drafter,) = model.drafters.values()
        config = (drafter.heads if drafter.method == "medusa" else drafter.head).config
        for shape, fields in shapes(drafter.method, config, options.nodes).items():
            if options.trees and shape not in options.trees:
                continue
            taus, depths = {}, []
            for question in questions:
                inputs = loading.encode(tokenizer, question.turns[0], model.device)
                model.generate(**inputs, max_new_tokens=options.max_new_tokens, do_sample=False,
                               speculative={"method": drafter.method, **fields})  # fmt: skip
                stats = model.last_speculation
                taus.setdefault(question.category, []).append(stats.mean_accepted_length)
                depths.append(stats.acceptance_by_depth)
            deepest = max(map(len, depths))
            row = {
                "head": name, "tree": shape,
                "nodes": 1 + stats.num_drafted_tokens // max(stats.num_target_forwards, 1),
                "tau": {c: round(statistics.mean(taus[c]), 3) for c in categories},
                "tau_all": round(statistics.mean(tau for values in taus.values() for tau in values), 3),
                "acceptance_by_depth": [
                    round(statistics.mean(d[i] if i < len(d) else 0.0 for d in depths), 3) for i in range(deepest)
                ],
            }  # fmt: skip
            rows.append(row)
            table.add_row(name, shape, str(row["nodes"]), *(f"{row['tau'][c]:.2f}" for c in categories),
                          f"{row['tau_all']:.2f}", " ".join(map(str, row["acceptance_by_depth"])))  # fmt: skip
        environment = bench.environment(model)
        del model, drafter
        gc.collect()
    Console(width=180).print(table)
    if options.json is not None:
        record = {"environment": environment, "questions": len(questions), "max_new_tokens": options.max_new_tokens,
                  "rows": rows}  # fmt: skip
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
