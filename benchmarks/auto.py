"""Compare drafting methods, alone and merged, with plain `generate()` and transformers' prompt lookup.

    python benchmarks/auto.py --prompts questions.jsonl --per-category 8 --json benchmarks/results/auto_cpu_bf16.json

Greedy, batch size 1, methods interleaved per question in one process. Every finished question is written to the JSON
file, and an interrupted run resumes. `--set main` is the main table, `--set ablations` disables one part at a time,
`--set methods` runs every method alone. Drafters keep what they learn from question to question, separately for each
row of the table, as they do in normal use. `--before HEAD` adds the same methods with another head of any kind;
`--set heads --before HEAD` compares the two heads only. Compiled rows run as `--compile` says.
"""

import argparse
import json
import statistics
from dataclasses import asdict, replace
from pathlib import Path

import torch
import transformers

from hf_specdec import bench
from hf_specdec.drafters import hybrid
from hf_specdec.drafters.hybrid import HybridDrafter
from hf_specdec.drafters.prompt_lookup import PromptLookupDrafter
from hf_specdec.drafters.token_recycling import TokenRecyclingDrafter
from hf_specdec.generation import loading

HEADS = Path(__file__).parents[1] / "heads"
FREE = ["prompt_lookup", "token_recycling"]
COMPILED = {"compile": "inductor"}
SETTINGS = {
    "auto, no head": {"method": "hybrid", "methods": FREE},
    "eagle, compiled": {"method": "eagle", **COMPILED},
    "auto, no head, compiled": {"method": "hybrid", "methods": FREE, **COMPILED},
    "auto, compiled": {"method": "auto", **COMPILED},
    "eagle where it pays": {"method": "hybrid", "methods": ["eagle"]},
    "recycling off": {"method": "hybrid", "methods": ["eagle", "prompt_lookup"]},
    "lookup off": {"method": "hybrid", "methods": ["eagle", "token_recycling"]},
    "switching": {"method": "switching"},
    "fixed width": {"method": "hybrid", "methods": ["eagle", *FREE], "adaptive": False, "num_draft_tokens": 12},
}
"""Values of `speculative=` for rows whose name is not a method."""

MAIN = [
    "transformers_prompt_lookup", "prompt_lookup", "eagle", "eagle where it pays", "auto, no head", "auto",
    "eagle, compiled", "auto, no head, compiled", "auto, compiled",
]  # fmt: skip
BEFORE = {
    "before: eagle": {"method": "before"},
    "before: auto": {"method": "hybrid", "methods": ["before", *FREE]},
    "before: eagle, compiled": {"method": "before", **COMPILED},
    "before: auto, compiled": {"method": "hybrid", "methods": ["before", *FREE], **COMPILED},
    "auto": {"method": "hybrid", "methods": ["eagle", *FREE]},  # `auto` would use both heads
    "auto, compiled": {"method": "hybrid", "methods": ["eagle", *FREE], **COMPILED},
}
"""Additional rows with `--before`."""
ABLATIONS = ["auto", "switching", "recycling off", "lookup off", "auto, no head", "fixed width"]

METHODS = [
    "transformers_prompt_lookup", "prompt_lookup", "token_recycling", "eagle", "medusa", "lookahead", "early_exit",
    "last_logits",
]  # fmt: skip
"""Methods that need only the packaged model and its heads."""
SETS = {"main": MAIN, "heads": ["eagle", "eagle, compiled"], "ablations": ABLATIONS, "methods": METHODS}


class SwitchingSession(hybrid._HybridSession):
    """Keeps each row's best tree of a single source instead of merging."""

    def _merge(self, *args):
        everything, active = self._candidates, self._active
        trees = []
        for row in active:
            found = []
            for index, (name, candidates) in enumerate(everything.items()):
                self._candidates, self._active = {name: candidates}, [row]
                (tree,) = super()._merge(*args)
                found.append(replace(tree, sources=[index] * len(tree.sources)))
            trees.append(max(found, key=lambda tree: sum(tree.path_probs)))
        self._candidates, self._active = everything, active
        return trees


class SwitchingDrafter(HybridDrafter):
    def start(self, target, context, config):
        session = super().start(target, context, config)
        session.__class__ = SwitchingSession
        return session


def add_drafters(model):
    """Add variants of the merged drafter to the model."""

    def parts():
        return {"eagle": model.drafters["eagle"], "prompt_lookup": PromptLookupDrafter(),
                "token_recycling": TokenRecyclingDrafter()}  # fmt: skip

    model.add_drafter(SwitchingDrafter(parts()), "switching")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--per-category", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--set", choices=list(SETS), default="main", dest="methods")
    parser.add_argument("--before", type=Path)
    parser.add_argument("--compile", choices=["kernels", "inductor", "cuda_graph"], default="inductor")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model, tokenizer = loading.load_model(None, loading.default_head(None), getattr(torch, options.dtype))
    add_drafters(model)
    methods, settings = list(SETS[options.methods]), dict(SETTINGS)
    if options.before is not None:
        model.load_drafter(options.before, name="before")
        settings.update(BEFORE)
        methods = [*(name for name in BEFORE if name not in methods), *methods]
    settings |= {name: {"method": name} for name in methods if name not in settings and name not in bench.PEERS}
    for name, fields in settings.items():
        settings[name] = {**fields, "compile": options.compile if "compile" in fields else "none"}
    if "medusa" in methods:
        model.load_drafter(HEADS / "smollm2-135m-instruct-medusa")
    done = json.loads(options.json.read_text()) if options.json.exists() else {"measurements": []}
    known = {row["question_id"] for row in done["measurements"]}
    questions = bench.read_questions(options.prompts, per_category=options.per_category)
    left = [question for question in questions if question.question_id not in known]
    rows = []
    for row in bench.measure(
        model, tokenizer, left, methods, max_new_tokens=options.max_new_tokens, rounds=options.rounds,
        settings={name: settings[name] for name in methods if name in settings},
    ):  # fmt: skip
        rows.append(asdict(row))
        if row.method != methods[-1]:
            continue
        done["measurements"] += rows
        rows = []
        measured = [bench.Measurement(**one) for one in done["measurements"]]
        done["environment"], done["summary"] = bench.environment(model), bench.summarise(measured)
        options.json.write_text(json.dumps(done, indent=1))
    report(done["summary"], ["plain", *methods])


def report(summary, methods):
    by_method = {method: [row for row in summary if row["method"] == method] for method in methods}
    categories = [row["category"] for row in by_method["plain"] if row["category"] != "all"]
    print("| method | tau | " + " | ".join(categories) + " | mean | worst question |")
    for method, rows in by_method.items():
        means = {row["category"]: row["speed_up_mean"] for row in rows}
        overall = next(row for row in rows if row["category"] == "all")
        mean = statistics.mean(means[category] for category in categories)
        cells = " | ".join(f"{means[category]:.2f}" for category in categories)
        print(f"| {method} | {overall['tau']:.2f} | {cells} | {mean:.2f} | {overall['speed_up_worst']:.2f} |")


if __name__ == "__main__":
    main()
