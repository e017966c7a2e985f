"""Ablate the training recipe of EAGLE-3 or block heads: the same small budget, one setting changed at a time.

    python benchmarks/ablate_training.py eagle --data data --features features --work runs --json ablations.json

Every variant is one `hf-specdec train eagle` or `train dflash` of `--steps` optimiser steps, with the same training
and held-out data. The result is the best tau of the run, for greedy chains on the held-out data: of five tokens for
EAGLE, of a whole block for block heads. Features are captured once. Variants that are already in the JSON file are
skipped, so an interrupted run can be resumed.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from hf_specdec.bench.machine import versions

EAGLE_VARIANTS = {
    "the recipe": {},
    "hard tokens": {"recipe": {"soft_tokens": False}},
    "depths weigh the same": {"recipe": {"step_decay": 1.0}},
    "depths weigh 0.6 of the one before": {"recipe": {"step_decay": 0.6}},
    "aligned steps grow over 60 %": {"recipe": {"growing": 0.6}},
    "1 aligned step": {"flags": ["--aligned-steps", "1"]},
    "2 aligned steps": {"flags": ["--aligned-steps", "2"]},
    "5 aligned steps": {"flags": ["--aligned-steps", "5"]},
    "noise 0.1": {"recipe": {"noise": 0.1}},
    "random start": {"flags": ["--random-start"]},
    "draft vocabulary 4k": {"vocabulary": 4096},
    "draft vocabulary 12k": {"vocabulary": 12288},
    "draft vocabulary 16k": {"vocabulary": 16384},
    "MLP half as wide": {"head": {"intermediate_size": 768}},
    "MLP twice as wide": {"head": {"intermediate_size": 3072}},
    "no norms (SGLang)": {"head": {"fc_norm": False, "norm_before_residual": False, "norm_output": False}},
    "learning rate falls linearly": {"arguments": {"lr_scheduler_type": "linear"}},
    "learning rate stays": {"arguments": {"lr_scheduler_type": "constant_with_warmup"}},
    "half the learning rate": {"flags": ["--learning-rate", "5e-4"]},
    "twice the learning rate": {"flags": ["--learning-rate", "2e-3"]},
    "in random order, not by length": {"arguments": {"train_sampling_strategy": "random"}},
    "near duplicates left out": {"flags": ["--drop-seen", "0.5"]},
}
"""Changes by variant: fields of the recipe, the head's config and the Trainer's arguments; command-line flags."""

BLOCK_VARIANTS = {
    "the recipe": {},
    "1 layer": {"flags": ["--num-layers", "1"]},
    "3 layers": {"flags": ["--num-layers", "3"]},
    "block of 6": {"flags": ["--block-size", "6"]},
    "block of 12": {"flags": ["--block-size", "12"]},
    "causal": {"flags": ["--causal"]},
    "Markov rank 32": {"flags": ["--markov-rank", "32"]},
    "Markov rank 64": {"flags": ["--markov-rank", "64"]},
    "causal and Markov rank 32": {"flags": ["--causal", "--markov-rank", "32"]},
    "causal, blocks grow over half of the run": {"flags": ["--causal"], "recipe": {"growing": 0.5}},
    "a key head for every query head": {"head": {"num_key_value_heads": 9}},
    "cross entropy 0.1 and L1 distance 0.9 (DSpark)": {
        "recipe": {"text_weight": 0.1, "distance_weight": 0.9, "soft_weight": 0.0}
    },
    "cross entropy on the text": {"recipe": {"text_weight": 1.0, "soft_weight": 0.0}},
    "slot decay 4": {"recipe": {"slot_decay": 4.0}},
    "random start": {"flags": ["--random-start"]},
}
"""Changes by variant, as for EAGLE. The recipe: 2 layers, blocks of 8, slots see each other, no Markov head. All heads
read the same three layers of SmolLM2-135M, so they can share captured features."""

HEAD = {"fc_norm": True, "norm_before_residual": True, "norm_output": True}
"""Config fields of the shipped EAGLE-3 head; see docs/heads.md."""

KINDS = {
    "eagle": (EAGLE_VARIANTS, HEAD, {}, ["--aligned-steps", 3]),
    "dflash": (
        BLOCK_VARIANTS, {"aux_hidden_state_layer_ids": [2, 15, 28]},
        {"text_weight": 0.0, "distance_weight": 0.0, "soft_weight": 1.0, "slot_decay": 2.5, "answer_tokens": 128},
        ["--anchors", 24],
    ),
}  # fmt: skip
"""By kind of head: variants, config fields, fields of the recipe, command-line flags."""


def run(name, change, options):
    """Train one variant and return its results."""
    _, head, recipe, flags = KINDS[options.kind]
    folder = options.work / name.replace(" ", "-").replace(",", "")
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for kind, fields in {
        "head-fields": {**head, **change.get("head", {})},
        "recipe": {**recipe, **change.get("recipe", {})},
        "arguments": {"bf16": True, "save_steps": options.steps // 2, "max_grad_norm": 1.0,
                      **change.get("arguments", {})},
    }.items():  # fmt: skip
        files[kind] = folder / f"{kind}.json"
        files[kind].write_text(json.dumps(fields))
    data = [word for place in options.data for word in ("--data", place)]
    features = ["--features", options.features] if "--drop-seen" not in change.get("flags", []) else []
    launch, several = [], {}
    if options.processes > 1:
        launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", options.processes]
        several = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable, *launch, "-m", "hf_specdec", "train", options.kind, *data, *features, "--json",
        "--output", folder / "run", "--max-steps", options.steps, "--batch-size", 4 // options.processes,
        "--learning-rate", 1e-3, "--held-out", options.held_out, "--max-length", options.max_length, *flags,
        "--draft-vocab-size", change.get("vocabulary", 8192),
        *(word for kind, path in files.items() for word in (f"--{kind}", path)), *change.get("flags", []),
    ]  # fmt: skip
    begin = time.perf_counter()
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, text=True, check=True,
                          env={**os.environ, **several})  # fmt: skip
    found = json.loads(done.stdout.strip().splitlines()[-1])
    depths = [found[key] for key in sorted(found) if key.startswith("held_out_accepted")]
    return {"variant": name, "tau": found["held_out_tau"], "accepted": depths, "seconds": time.perf_counter() - begin}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=list(KINDS))
    parser.add_argument("--data", action="append", required=True)
    parser.add_argument("--features", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--held-out", type=int, default=64)
    parser.add_argument("--max-length", type=int, default=1024)
    parser.add_argument("--processes", type=int, default=1, choices=[1, 2, 4], help="of one CPU thread each")
    parser.add_argument("--variants", nargs="*", help="names; default: all")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    variants = KINDS[options.kind][0]
    names = list(variants) if options.variants is None else options.variants
    if unknown := [name for name in names if name not in variants]:
        parser.error(f"--variants: unknown {', '.join(unknown)}; known: {', '.join(variants)}")
    environment = versions(torch.device("cpu"))
    record = {"environment": environment, "kind": options.kind, "steps": options.steps, "rows": []}
    if options.json.exists():
        record = json.loads(options.json.read_text())
    rows = record["rows"]
    for name in names:
        if name not in {row["variant"] for row in rows}:
            rows.append(run(name, variants[name], options))
            options.json.write_text(json.dumps(record, indent=1) + "\n")
    print("| variant | tau of greedy chains, held out | accepted by depth | minutes |")
    print("|---|---|---|---|")
    for row in rows:
        depths = " ".join(f"{share:.2f}" for share in row["accepted"])
        print(f"| {row['variant']} | {row['tau']:.2f} | {depths} | {row['seconds'] / 60:.1f} |")


if __name__ == "__main__":
    main()
