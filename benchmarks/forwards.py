"""Time the verify forward by nodes and context, and its linear layers by rows, in each form.

    python benchmarks/forwards.py --json benchmarks/results/forwards_cpu_bf16.json

Forms are interleaved; results are medians over rounds, in milliseconds. `memory limit` is the time in which all
threads read as many bytes as the linear layers' weights have, once. Products are also timed with the other way to
multiply bfloat16 than the kernels chose. With HF_SPECDEC_KERNELS=none, inductor compiles without kernels, with packed
weights.
"""

import argparse
import ctypes
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch
import transformers
from torch.nn import functional

from hf_specdec import bench
from hf_specdec.control.costs import time_forwards
from hf_specdec.cpu import library, operations
from hf_specdec.generation import loading
from hf_specdec.generation.model_programs import make_runner
from hf_specdec.verification.probe import inspect_target


def linear_groups(model):
    """Return the model's linear layers in groups that share their input, as the kernels multiply them."""
    groups = []
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        groups += [[attention.q_proj, attention.k_proj, attention.v_proj], [attention.o_proj],
                   [mlp.gate_proj, mlp.up_proj], [mlp.down_proj]]  # fmt: skip
    return [*groups, [model.lm_head]]


def linear_seconds(groups, rows, multiply):
    """Return the median seconds of all linear layers for `rows` rows of inputs."""
    weight = groups[0][0].weight
    sizes = {layer.in_features for group in groups for layer in group}
    inputs = {size: torch.randn(rows, size, dtype=torch.float32).to(weight.dtype) for size in sizes}
    taken = []
    for _ in range(8):
        begin = time.perf_counter()
        for group in groups:
            multiply(inputs[group[0].in_features], [layer.weight for layer in group])
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[1:])


def by_torch(x, weights):
    for weight in weights:
        functional.linear(x, weight)


def by_kernel(x, weights):
    operations.linear(x, weights, [None] * len(weights))


def memory_seconds(groups):
    """Return the seconds in which all threads read as much memory as the groups' weights occupy."""
    read = library.load_library()[1].read_memory
    read.argtypes, read.restype = [ctypes.c_void_p, ctypes.c_long, ctypes.c_long], ctypes.c_float
    size = sum(layer.weight.nbytes for group in groups for layer in group)
    memory, taken = torch.ones(size // 4 + 1, dtype=torch.float32), []  # pages of zeros would share one page
    for _ in range(12):
        begin = time.perf_counter()
        read(memory.data_ptr(), size, torch.get_num_threads())
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[1:]), size


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 2, 4, 8, 12, 16, 24, 32])
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 512, 2048])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model, _ = loading.load_model(None, loading.default_head(None), getattr(torch, options.dtype))
    facts = inspect_target(model)
    forms = {
        "transformers' attention": (replace(facts, unpacked_reason="for comparison"), None),
        "eager": (facts, None),
    }
    built = {}
    for mode in ("kernels", "inductor") if library.load_or_none() else ("inductor",):
        begin = time.perf_counter()
        forms[mode] = facts, make_runner(model, facts, frozenset(), mode)
        built[mode] = round(time.perf_counter() - begin, 1)
    rows = []
    for context in options.contexts:
        taken = {(name, width): [] for name in forms for width in options.widths}
        for _ in range(options.rounds):
            for name, (given, runner) in forms.items():
                seconds = time_forwards(model, options.widths, context, given, rounds=2, runner=runner)
                for width, value in seconds.items():
                    taken[name, width].append(1000 * value)
        for name in forms:
            row = {width: round(statistics.median(taken[name, width]), 1) for width in options.widths}
            rows.append({"context": context, "form": name, **row})
            print(f"| {context} | {name} | " + " | ".join(map(str, row.values())) + " |", flush=True)
    groups, memory, instructions = linear_groups(model), None, "none"
    kernels = {"torch": (by_torch, None)}
    if library.load_or_none():
        instructions, loaded = library.load_library()[0].name, library.load_library()[1]
        chosen = loaded.choose_pairs(library.MEASURE)
        kernels["kernel"] = by_kernel, chosen
        if loaded.choose_pairs(1 - chosen) != chosen:
            kernels[f"kernel, {'floats' if chosen else 'pairs of bfloat16'} instead"] = by_kernel, 1 - chosen
        seconds, size = memory_seconds(groups)
        memory = {
            "bytes": size,
            "milliseconds": round(1000 * seconds, 2),
            "GB_per_second": round(size / seconds / 1e9, 1),
        }
    for name, (multiply, paired) in kernels.items():
        if paired is not None:
            loaded.choose_pairs(paired)
        row = {width: round(1000 * linear_seconds(groups, width, multiply), 1) for width in options.widths}
        rows.append({"form": f"linear layers, {name}", **row})
        print(f"| - | linear layers, {name} | " + " | ".join(map(str, row.values())) + " |", flush=True)
    print(memory, built)
    document = {
        "environment": bench.environment(model), "instructions": instructions, "memory": memory,
        "built_in_seconds": built, "rows": rows,
    }  # fmt: skip
    options.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
