"""Break down the time of a step: forwards of target and head, eager or compiled, and everything else.

    python benchmarks/step_time.py --prompts questions.jsonl --json benchmarks/results/step_time.json

Shares are of the decoding time (without prefill), summed over the prompts; medians over rounds. The first round, which
compiles programs and measures costs, is not counted.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import transformers

from hf_specdec import bench
from hf_specdec.generation import loading
from hf_specdec.verification.programs import Program
from hf_specdec.verification.runners import CompiledForward

COMPILED = {"compile": "inductor"}
METHODS = {
    "eagle": {"method": "eagle"}, "prompt_lookup": {"method": "prompt_lookup"}, "auto": {"method": "auto"},
    "eagle, compiled": {"method": "eagle", **COMPILED}, "auto, compiled": {"method": "auto", **COMPILED},
}  # fmt: skip


class Clock:
    """Sums the wall-clock seconds spent in modules; nested watched modules count as part of the outer one."""

    def __init__(self):
        self.seconds = {}
        self.depth = 0
        self._hooks = []

    def watch(self, module, name):
        begins = []

        def before(*_):
            self.depth += 1
            begins.append(time.perf_counter())

        def after(*_):
            elapsed = time.perf_counter() - begins.pop()
            self.depth -= 1
            if self.depth == 0:
                self.seconds[name] = self.seconds.get(name, 0.0) + elapsed

        self._hooks += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]

    def leave_modules(self):
        """Stop watching modules, because modules with hooks are not compiled."""
        for hook in self._hooks:
            hook.remove()

    def watch_method(self, owner, method, name):
        """Watch a method of a class that is not a module."""
        wrapped = getattr(owner, method)

        def timed(*arguments, **options):
            self.depth += 1
            begin = time.perf_counter()
            try:
                return wrapped(*arguments, **options)
            finally:
                self.depth -= 1
                if self.depth == 0:
                    self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

        setattr(owner, method, timed)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--questions", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model, tokenizer = loading.load_model(None, loading.default_head(None), torch.bfloat16)
    clock = Clock()
    clock.watch(model, "target")
    head = model.drafters["eagle"].head
    clock.watch(head, "head")
    for method in ("fuse", "score"):
        clock.watch_method(type(head), method, "head")
    clock.watch_method(CompiledForward, "__call__", "target")
    clock.watch_method(Program, "__call__", "head")  # inside the target's forward it is not counted
    clock.watch(model.get_input_embeddings(), "draft embedding")

    document = {"environment": bench.environment(model)}
    questions = bench.read_questions(options.prompts, limit=options.questions)
    for method, settings in METHODS.items():
        if "compile" in settings:
            clock.leave_modules()
        rounds = []
        for _ in range(options.rounds + 1):
            totals = {}
            for question in questions:
                clock.seconds = {}
                inputs = loading.encode(tokenizer, question.turns[0], model.device)
                model.generate(**inputs, max_new_tokens=options.max_new_tokens, do_sample=False, speculative=settings)
                stats, inside = model.last_speculation, clock.seconds
                step = stats.total_seconds - stats.prefill_seconds
                target = inside["target"] - (0.0 if "compile" in settings else stats.prefill_seconds)
                head = sum(inside.get(name, 0.0) for name in ("head", "draft embedding"))
                parts = {
                    "decoding": step, "target forward": target, "head, its embedding and lm_head": head,
                    "draft, rest": stats.draft_seconds - head, "verify, rest": stats.verify_seconds - target,
                    "accept": stats.accept_seconds, "commit": stats.commit_seconds,
                    "loop": step - stats.draft_seconds - stats.verify_seconds - stats.accept_seconds
                    - stats.commit_seconds, "steps": stats.num_target_forwards,
                }  # fmt: skip
                for name, value in parts.items():
                    totals[name] = totals.get(name, 0.0) + value
            rounds.append(totals)
        rounds = rounds[1:]
        steps = statistics.median(r.pop("steps") for r in rounds)
        shares = {name: statistics.median(r[name] / r["decoding"] for r in rounds) for name in rounds[0]}
        outside = statistics.median(
            1 - (r["target forward"] + r["head, its embedding and lm_head"]) / r["decoding"] for r in rounds
        )
        document[method] = {
            "shares": shares, "outside_the_forwards": outside,
            "milliseconds_per_step": 1000 * statistics.median(r["decoding"] for r in rounds) / steps,
        }  # fmt: skip
        print(method, json.dumps(document[method], indent=1), flush=True)
    options.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
