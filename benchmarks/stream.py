"""Show how `auto` adapts to a text that changes its kind every 200 tokens, and compare it with fixed methods.

    python benchmarks/stream.py --json stream.json --plot stream

writes stream-light.png and stream-dark.png; with --redraw, from an existing JSON file, without measuring.

The answer is fixed: a logits processor allows only the next token of a script, while target and head run as usual. The
script is a copy of the prompt, then an answer of the model to a question, then noise; all three twice.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import transformers
from transformers import LogitsProcessor, LogitsProcessorList

from hf_specdec.generation import loading
from hf_specdec.reporting.palette import SMALL_TEXT, drawing
from hf_specdec.viz import save_plot

PART = 200
FIXED = {
    "plain": None, "prompt_lookup": "prompt_lookup", "eagle": "eagle",
    "both, 12 nodes": {"method": "hybrid", "methods": ["prompt_lookup", "eagle"], "adaptive": False,
                       "num_draft_tokens": 12},
}  # fmt: skip
QUESTIONS = ("Why is the sky blue? Explain in detail.", "How do plants grow? Explain in detail.")


class Script(LogitsProcessor):
    """Allows only the next token of the script."""

    def __init__(self, tokens, prompt_length):
        self.tokens, self.prompt_length = tokens, prompt_length

    def __call__(self, input_ids, scores):
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.tokens[input_ids.shape[1] - self.prompt_length]] = 0
        return forced


def script_of(model, tokenizer):
    """Return the tokens of a prompt and of the script."""
    proses = []
    for question in QUESTIONS:
        inputs = loading.encode(tokenizer, question, model.device)
        answer = model.generate(**inputs, max_new_tokens=PART, min_new_tokens=PART, do_sample=False)
        proses.append(answer[0, inputs["input_ids"].shape[1] :].tolist())
    passage = tokenizer("The harbour lay quiet that morning, and nobody had seen the letter yet. " * 2)["input_ids"]
    draw = torch.Generator().manual_seed(0)
    passage += torch.randint(1000, 20000, (PART,), generator=draw).tolist()  # text that the model cannot know
    noise = torch.randint(1000, 40000, (2, PART), generator=draw).tolist()
    copied = passage[-PART:]
    return passage, [*copied, *proses[0], *noise[0], *copied, *proses[1], *noise[1]]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--plot", type=Path, help="path without -light.png and -dark.png")
    parser.add_argument("--redraw", action="store_true")
    options = parser.parse_args()
    if options.redraw:
        plot(json.loads(options.json.read_text()), options.plot)
        return
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model, tokenizer = loading.load_model(None, loading.default_head(None), torch.bfloat16)
    prompt, script = script_of(model, tokenizer)
    ids = torch.tensor([prompt])
    seconds, controls = {}, {}
    for number in range(options.rounds + 1):
        for name, speculative in {**FIXED, "auto": "auto"}.items():
            count = len(script) if number else 16  # the first round is a warm-up
            begin = time.perf_counter()
            answer = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                speculative=speculative,
                logits_processor=LogitsProcessorList([Script(script, len(prompt))]),
            )
            taken = time.perf_counter() - begin
            assert answer[0, len(prompt) :].tolist() == script[:count]
            if number:
                seconds.setdefault(name, []).append(taken)
            if speculative == "auto":
                controls = {
                    "accepted": model.last_speculation.accepted_per_step[0],
                    "widths": model.last_speculation.control["width_by_step"],
                    "control": model.last_speculation.control,
                }
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    best = min((name for name in FIXED), key=medians.get)
    for name, taken in medians.items():
        print(f"{name}: {taken:.1f} s, {medians['plain'] / taken:.2f}x plain")
    print(f"auto against the best fixed choice ({best}): {medians['auto'] / medians[best] - 1:+.1%}")
    options.json.write_text(json.dumps({"seconds": seconds, "best": best, **controls}, indent=1))
    if options.plot:
        plot(controls, options.plot)


def plot(controls, path):
    tokens, widths, accepted = [], [], []
    reached = 1
    for width, count in zip(controls["widths"], controls["accepted"], strict=False):
        tokens.append(reached)
        widths.append(width)
        accepted.append(count)
        reached += count
    for theme in ("light", "dark"):
        with drawing(theme) as (pyplot, colors):
            _, axes = pyplot.subplots(figsize=(9, 3.2))
            axes.step(tokens, widths, where="post", label="nodes verified in a step", linewidth=0.9)
            axes.plot(tokens, accepted, ".", markersize=4, label="tokens emitted by a step")
            axes.set_yscale("log", base=2)
            axes.set_ylim(0.9, 2 * max(widths))
            axes.yaxis.set_major_formatter("{x:.0f}")
            axes.set_xlim(0, PART * 6)
            for part in range(1, 6):
                axes.axvline(part * PART, color=colors.muted, linewidth=0.5)
            for part, name in enumerate(("copy", "prose", "noise") * 2):
                axes.text((part + 0.5) * PART, 1.5 * max(widths), name, ha="center", va="center", fontsize=SMALL_TEXT)
            axes.set_xlabel("token of the answer")
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
        save_plot(axes, path.with_name(f"{path.name}-{theme}.png"))


if __name__ == "__main__":
    main()
