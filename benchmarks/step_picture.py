"""Draw one step of the packaged model with the shipped EAGLE-3 head, in both themes.

    python benchmarks/step_picture.py --plot docs/step

writes docs/step-light.png and docs/step-dark.png. It draws the step that accepted most tokens; among equals, the one
with the most branches.
"""

import argparse
from pathlib import Path

import transformers

from hf_specdec import viz
from hf_specdec.generation import loading

PROMPT = "How do plants grow? Explain in detail."
CONFIG = {"method": "eagle", "num_steps": 4, "num_draft_tokens": 12, "trace": True}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--plot", type=Path, required=True, help="path without -light.png and -dark.png")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model, tokenizer = loading.load_model(None, None, "float32")
    inputs = loading.encode(tokenizer, options.prompt, model.device)
    model.generate(**inputs, max_new_tokens=96, do_sample=False, speculative=CONFIG)
    step = max(model.last_speculation.trace, key=lambda step: interest(step.rows[0]))
    for theme in ("light", "dark"):
        axes = viz.plot_step(step, tokenizer, theme=theme)
        viz.save_plot(axes, options.plot.with_name(f"{options.plot.name}-{theme}.png"))


def interest(row):
    """Sort key of a step: number of accepted tokens, then number of nodes with several children."""
    return len(row.path), sum(row.parents.count(node) > 1 for node in range(len(row.parents)))


if __name__ == "__main__":
    main()
