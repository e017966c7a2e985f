"""Time the verify forward by nodes and context: transformers' attention, packed attention, compiled.

    python benchmarks/forwards.py --json benchmarks/results/forwards_cpu_bf16.json

The three forms are interleaved; results are medians over rounds, in milliseconds. `linear layers` times only the
model's linear layers, `packed` the same with weights in the layout of compiled programs (bf16 on a CPU).
"""

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch
import transformers
from torch import nn

from hf_specdec import bench
from hf_specdec.control.costs import verify_seconds
from hf_specdec.generation import loading
from hf_specdec.verification.compiling import make_runner
from hf_specdec.verification.probe import inspect_target


def linear_seconds(model, width, packed):
    """Return the seconds of all linear layers for `width` rows of inputs."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    inputs = {size: torch.randn(1, width, size).to(model.dtype) for size in {layer.in_features for layer in layers}}
    if packed:
        weights = [torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), width) for layer in layers]
    taken = []
    for _ in range(6):
        begin = time.perf_counter()
        for index, layer in enumerate(layers):
            if packed:
                given = inputs[layer.in_features]
                torch.ops.mkldnn._linear_pointwise(given, weights[index], layer.bias, "none", [], "")
            else:
                layer(inputs[layer.in_features])
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[1:])


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 2, 4, 8, 12, 16, 24, 32, 64])
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 512, 2048])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model, _ = loading.load_model(None, loading.default_head(None), getattr(torch, options.dtype))
    facts = inspect_target(model)
    program = make_runner(model, facts, frozenset(), "inductor")
    forms = {
        "transformers' attention": (replace(facts, uses_packed_attention=False), None),
        "packed attention": (facts, None),
        "compiled": (facts, program),
    }
    rows = []
    for context in options.contexts:
        taken = {(name, width): [] for name in forms for width in options.widths}
        for _ in range(options.rounds):
            for name, (given, runner) in forms.items():
                seconds = verify_seconds(model, options.widths, context, given, rounds=2, runner=runner)
                for width, value in seconds.items():
                    taken[name, width].append(1000 * value)
        for name in forms:
            row = {width: round(statistics.median(taken[name, width]), 1) for width in options.widths}
            rows.append({"context": context, "form": name, **row})
            print(f"| {context} | {name} | " + " | ".join(map(str, row.values())) + " |", flush=True)
    kinds = {"linear layers": False, "linear layers, packed": True} if model.dtype == torch.bfloat16 else {
        "linear layers": False
    }  # fmt: skip
    for name, packed in kinds.items():
        row = {width: round(1000 * linear_seconds(model, width, packed), 1) for width in options.widths}
        rows.append({"form": name, **row})
        print(f"| - | {name} | " + " | ".join(map(str, row.values())) + " |", flush=True)
    document = {"environment": bench.environment(model), "compile_seconds": program.seconds, "rows": rows}
    options.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
