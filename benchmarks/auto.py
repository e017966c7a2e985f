"""Every way to draft, its merger, and what its parts are worth, against plain `generate()` and transformers' lookup.

    python benchmarks/auto.py --prompts questions.jsonl --per-category 8 --json benchmarks/results/auto_cpu_bf16.json

Greedy, batch 1, methods interleaved per question in one process. Each finished question is written down, and a run
that was interrupted goes on where it stopped. `--set main` is the table of methods, `--set ablations` switches one
part off at a time, `--set methods` has every way to draft alone. Drafters keep what they have learned from question to
question, as they do for a user, each row its own. `--before HEAD` adds the same methods with another EAGLE head.
"""

import argparse
import json
import statistics
from dataclasses import asdict
from pathlib import Path

import torch
import transformers

from hf_specdec import bench
from hf_specdec.drafters import hybrid
from hf_specdec.drafters.calibration import Calibration
from hf_specdec.drafters.hybrid import HybridDrafter, LearnedStats
from hf_specdec.drafters.prompt_lookup import PromptLookupDrafter
from hf_specdec.drafters.token_recycling import TokenRecyclingDrafter
from hf_specdec.generation import loading

HEADS = Path(__file__).parents[1] / "heads"
FREE = ["prompt_lookup", "token_recycling"]
COMPILED = {"compile": "compile"}
SETTINGS = {
    "auto, no head": {"method": "hybrid", "methods": FREE},
    "eagle, compiled": {"method": "eagle", **COMPILED},
    "auto, no head, compiled": {"method": "hybrid", "methods": FREE, **COMPILED},
    "auto, compiled": {"method": "auto", **COMPILED},
    "eagle where it pays": {"method": "hybrid", "methods": ["eagle"]},
    "recycling off": {"method": "hybrid", "methods": ["eagle", "prompt_lookup"]},
    "lookup off": {"method": "hybrid", "methods": ["eagle", "token_recycling"]},
    "calibration off": {"method": "uncalibrated"},
    "switching": {"method": "switching"},
    "fixed width": {"method": "hybrid", "methods": ["eagle", *FREE], "adaptive": False, "num_draft_tokens": 12},
}
"""What `speculative=` is for the rows that are not called as they are asked for."""

MAIN = [
    "transformers_prompt_lookup", "prompt_lookup", "eagle", "eagle where it pays", "auto, no head", "auto",
    "eagle, compiled", "auto, no head, compiled", "auto, compiled",
]  # fmt: skip
BEFORE = {
    "before: eagle": {"method": "before"},
    "before: auto": {"method": "hybrid", "methods": ["before", *FREE]},
    "before: eagle, compiled": {"method": "before", **COMPILED},
    "before: auto, compiled": {"method": "hybrid", "methods": ["before", *FREE], **COMPILED},
    "auto": {"method": "hybrid", "methods": ["eagle", *FREE]},  # `auto` would hear both heads
    "auto, compiled": {"method": "hybrid", "methods": ["eagle", *FREE], **COMPILED},
}
"""With another head beside the shipped one."""
ABLATIONS = ["auto", "calibration off", "switching", "recycling off", "lookup off", "auto, no head", "fixed width"]

METHODS = [
    "transformers_prompt_lookup", "prompt_lookup", "token_recycling", "eagle", "medusa", "lookahead", "early_exit",
    "last_logits",
]  # fmt: skip
"""Every method that needs nothing but the packaged model and its heads."""
SETS = {"main": MAIN, "ablations": ABLATIONS, "methods": METHODS}


class Uncalibrated(Calibration):
    """Every source is believed."""

    def probability(self, kind, prior):
        return prior


class SwitchingSession(hybrid._HybridSession):
    """Of every row's trees, one per source, the one that is expected to bring most."""

    def _candidates(self, row):
        return self._one if self._one else super()._candidates(row)

    _one = None

    def _merge(self, *args):
        trees = []
        for place, row in enumerate(self._going):
            best = None
            for source in super()._candidates(row):
                self._one, going, self._going = [source], self._going, [row]
                (tree,) = super()._merge(*args)
                self._one, self._going = None, going
                if best is None or sum(tree.values) > sum(best.values):
                    best = tree
            trees.append(best)
            assert len(trees) == place + 1
        return trees


class SwitchingDrafter(HybridDrafter):
    def start(self, target, context, config):
        session = super().start(target, context, config)
        session.__class__ = SwitchingSession
        return session


def add_drafters(model):
    """Merging with a part of it replaced."""

    def parts():
        return {"eagle": model.drafters["eagle"], "prompt_lookup": PromptLookupDrafter(),
                "token_recycling": TokenRecyclingDrafter()}  # fmt: skip

    uncalibrated = LearnedStats()
    uncalibrated.calibration = Uncalibrated()
    model.add_drafter(HybridDrafter(parts(), uncalibrated), "uncalibrated")
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
