"""Compare a block head with the shipped EAGLE-3 head: accept length and time of drafting, at several tree sizes.

    python benchmarks/blocks.py HEAD --prompts questions.jsonl --json benchmarks/results/blocks_cpu_bf16.json

Greedy, batch size 1, all rows interleaved per question in one process. Drafting includes the forwards of the head, the
growth of the tree, and reading the accepted tokens; its time is the median over questions of milliseconds per step.
For whole answers, use `benchmarks/auto.py --before HEAD`, which adds the same methods with another head.
"""

import argparse
import json
import statistics
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table

from hf_specdec import bench
from hf_specdec.generation import loading

TREES = {"eagle": {"num_steps": 6, "top_k": 8}, "block": {"top_k": 8}}
"""Config fields of both heads besides the number of nodes."""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--per-category", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--compile", nargs="+", default=["none", "inductor"], dest="forms")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model, tokenizer = loading.load_model(None, loading.default_head(None), torch.bfloat16)
    model.load_drafter(options.head, name="block")
    questions = bench.read_questions(options.prompts, per_category=options.per_category)
    rows = {(name, nodes, form): {"method": name, "nodes": nodes, "compile": form, "tau": {}, "milliseconds": []}
            for form in options.forms for nodes in options.nodes for name in TREES}  # fmt: skip
    for question in (questions[0], *questions):  # the first time, programs are compiled
        for (name, nodes, form), row in rows.items():
            inputs = loading.encode(tokenizer, question.turns[0], model.device)
            config = {"method": name, "num_draft_tokens": nodes, "compile": form, "tree": "dynamic", **TREES[name]}
            model.generate(**inputs, max_new_tokens=options.max_new_tokens, do_sample=False, speculative=config)
            stats = model.last_speculation
            row["tau"].setdefault(question.category, {})[question.question_id] = stats.mean_accepted_length
            row["milliseconds"].append(1000 * stats.draft_seconds / max(stats.num_target_forwards, 1))
    categories = list(dict.fromkeys(question.category for question in questions))
    table = Table("head", "nodes", "compile", *categories, "all", "ms per draft")
    for row in rows.values():
        taus = {category: list(found.values()) for category, found in row["tau"].items()}
        row["milliseconds"] = round(statistics.median(row["milliseconds"][1:]), 3)
        row["tau"] = {category: round(statistics.mean(taus[category]), 3) for category in categories}
        row["tau_all"] = round(statistics.mean(tau for values in taus.values() for tau in values), 3)
        table.add_row(row["method"], str(row["nodes"]), row["compile"], *(f"{row['tau'][c]:.2f}" for c in categories),
                      f"{row['tau_all']:.2f}", f"{row['milliseconds']:.2f}")  # fmt: skip
    Console(width=180).print(table)
    if options.json is not None:
        record = {"environment": bench.environment(model), "questions": len(questions), "head": str(options.head),
                  "max_new_tokens": options.max_new_tokens, "rows": list(rows.values())}  # fmt: skip
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
