"""How sensitive the drafting policy is to its constants, in simulated scenarios as those of `tests/test_policy.py`.

Every constant of `hf_specdec/control` is halved and doubled, and set to the value in `OFF` that switches its mechanism
off; the others stay. A score is the geometric mean of the speed-ups in all scenarios, relative to the score with the
defaults. No model is needed; a run takes about half an hour.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import statistics
import sys
from collections.abc import Iterator
from math import inf
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import test_policy
from hf_specdec import control
from hf_specdec.bench.machine import versions
from hf_specdec.drafters import candidates
from policy import Clock, Source, World, speedup

MODULES = [
    importlib.import_module(f"{control.__name__}.{found.name}") for found in pkgutil.iter_modules(control.__path__)
]
MODULES.append(candidates)
NOT_SIMULATED = ("MEASURED_WIDTHS", "MAX_MEASURED_NODES", "MIN_MEASURED_WIDTH", "TRUST_CLASSES", "SATURATED_TOKENS",
                 "UNKNOWN", "ANSWER_SLOTS", "ROOT_PARENT")  # fmt: skip
"""Constants of how costs are measured, of long drafts and of sources with several probabilities: no scenario has them.
"""
OFF = {
    "EXPECTED_NODE_COST": {"cpu": 0.0, "accelerator": 0.0}, "MIN_TRIAL_WIDTH": 64, "CHEAP_TREES": inf,
    "FIRST_STEPS": 0, "MAX_SURPRISE": inf, "STALE_STEPS": inf, "RETRY_STEPS": inf, "STRETCH_STEPS": inf,
    "ARM_MARGIN": 0.0, "MIN_PATH_PROBABILITY": 0.0, "MIN_BATCH_GAIN": 1.0, "TRUST_MEMORY": 1.0,
    "FASTER_SMOOTHING": 0.0, "STALE_WEIGHT": 0.0, "FADED_QUERIES": inf, "MIN_PAUSE": 0,
    "MAX_PAUSE": inf, "TRIAL_SHARE": 0.0, "MAX_PLAIN_STEPS": inf, "FIRST_TRIALS": 0,
}  # fmt: skip
"""Values that switch off what a constant tunes."""


def scenarios() -> dict[str, float]:
    """Run the scenarios and return their median speed-ups over plain decoding."""
    patch, plain, seeds = pytest.MonkeyPatch(), test_policy.plain(), test_policy.SEEDS

    def heads(accuracy, steps, **fields):
        return [
            World(
                Clock(patch),
                {"lookup": test_policy.noise(seed), "head": test_policy.head(accuracy, seed, **fields)},
                test_policy.one_row,
            ).generate(steps)
            for seed in seeds
        ]

    def free(accuracy, claimed, steps, seconds=test_policy.one_row, measured=None, **fields):
        sources = [{"lookup": Source(accuracy, says=claimed, seed=seed, **fields)} for seed in seeds]
        return [World(Clock(patch), source, seconds, measured).generate(steps) for source in sources]

    def batches(sources_of, steps=200):
        """The tokens of the slowest row count: a batch ends with it."""
        rates = []
        for seed in seeds:
            world = World(Clock(patch), sources_of(seed), test_policy.dear_rows)
            taken = world.generate(steps, rows=4)
            rates.append(min(world.call.positions) / sum(step.seconds for step in taken))
        return statistics.median(rates) * test_policy.dear_rows(1, 4, 0)

    def faded(before, after):
        """The target's weights change after 150 steps: what was learned counts less, and may be wrong."""
        parts = []
        for seed in seeds:
            head = test_policy.head(lambda step: before if step < 150 else after, seed)
            lookup = Source(lambda step: 0.5 * (before if step < 150 else after), says=0.6, seed=seed)
            world = World(Clock(patch), {"lookup": lookup, "head": head}, test_policy.one_row)
            world.generate(150)
            world.drafter.fade()
            parts.append(world.generate(100))
        return parts

    def drifting(width, rows, step):
        return 0.030 + (0.006 if 150 <= step < 300 else 0.001) * width

    def disturbed(width, rows, step):
        return test_policy.one_row(width, rows, step) * (20 if 3 <= step < 12 else 1)

    def dear(width, rows, step):
        return 0.020 + 0.012 * width

    def steps_up(width, rows, step):
        """Kernels whose cost jumps beyond eight nodes."""
        return 0.030 + 0.001 * width + (0.040 if width > 8 else 0.0)

    changing = heads(lambda step: 0.02 if 200 <= step < 400 else 0.85, 700)
    returning = free(lambda step: 0.02 if step < 150 else 0.9, 0.5, 260)
    wrong = {name: free(lambda _step: 0.6, 0.6, 400, measured=costs) for name, costs in test_policy.MEASURED.items()}
    parts = {
        "good head": heads(lambda _step: 0.85, 100),
        "useless head": heads(lambda _step: 0.02, 600),
        "slow head": heads(lambda _step: 0.6, 300, seconds=0.02),
        "head becomes useless": [call[200:400] for call in changing],
        "head becomes useful": [call[400:] for call in changing],
        "head useful now and then": heads(lambda step: 0.0 if step % 160 >= 120 else 0.85, 640),
        "overconfident source": free(lambda _step: 0.3, 0.9, 300),
        "modest source": free(lambda _step: 0.8, 0.3, 200),
        "useless source": [call[:150] for call in returning],
        "source becomes useful": [call[150:] for call in returning],
        "slow useless source": free(lambda _step: 0.02, 0.5, 300, look=0.002),
        "slow source": free(lambda _step: 0.5, 0.5, 300, look=0.004),
        "costs drift": free(lambda _step: 0.75, 0.75, 450, drifting),
        "other load at first": free(lambda _step: 0.6, 0.6, 100, disturbed),
        **{f"measured: {name}": [call[100:] for call in calls] for name, calls in wrong.items()},
        "costs unknown, good source": free(lambda _step: 0.85, 0.85, 60, measured={}),
        "costs unknown, dear nodes": free(lambda _step: 0.4, 0.9, 60, dear, measured={}),
        "costs unknown, steps": free(lambda _step: 0.9, 0.9, 100, steps_up, measured={}),
        "weights change, still good": faded(0.85, 0.8),
        "weights change, then useless": faded(0.85, 0.02),
    }
    found = {name: statistics.median(speedup(call, plain) for call in calls) for name, calls in parts.items()}
    found["batch of four"] = batches(
        lambda seed: {"lookup": test_policy.noise(seed), "head": test_policy.head(lambda _step: 0.85, seed)}
    )
    found["batch of four, free source"] = batches(
        lambda seed: {"lookup": Source(lambda _step: 0.8, says=0.8, seed=seed)}
    )
    found["batch of four, unequal rows"] = batches(
        lambda seed: {"lookup": Source(lambda _step: 0.9, says=0.7, seed=seed, row_factors=(1.0, 1.0, 0.9, 0.5))}
    )
    patch.undo()
    return found


def multiplied(value, factor):
    """Return a constant times a factor; of a table or tuple, each value."""
    if isinstance(value, dict):
        return {key: multiplied(entry, factor) for key, entry in value.items()}
    if isinstance(value, tuple):
        return tuple(multiplied(entry, factor) for entry in value)
    return type(value)(value * factor)


def changed(name: str, value: object) -> dict[str, float]:
    """Run the scenarios with another value of one constant."""
    patch = pytest.MonkeyPatch()
    for module in MODULES:
        if hasattr(module, name):
            patch.setattr(module, name, value)
    try:
        return scenarios()
    finally:
        patch.undo()


def constants() -> Iterator[tuple[str, object]]:
    """Return the constants of the policy by name, without those that are `NOT_SIMULATED`."""
    found = {name: value for module in MODULES for name, value in vars(module).items() if name.strip("_").isupper()}
    numbers = (int, float, tuple, dict)
    return ((name, value) for name, value in found.items() if isinstance(value, numbers) and name not in NOT_SIMULATED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="Write the scores to this file.")
    parser.add_argument("--only", nargs="*", help="Names of the constants to change; default: all.")
    options = parser.parse_args()
    default = scenarios()
    print(json.dumps(default, indent=1))
    rows = {}
    for name, value in constants():
        if options.only and name not in options.only:
            continue
        changes = {"x 0.5": multiplied(value, 0.5), "x 2": multiplied(value, 2.0)}
        if name in OFF:
            changes["off"] = OFF[name]
        for change, other in changes.items():
            try:
                found = changed(name, other)
            except (ArithmeticError, ValueError, IndexError, TypeError) as error:
                print(f"{name:20} {change:6} {error}")
                continue
            ratios = {scenario: found[scenario] / default[scenario] for scenario in default}
            worst = min(ratios, key=ratios.__getitem__)
            rows[f"{name} {change}"] = [statistics.geometric_mean(ratios.values()), worst, ratios[worst]]
            mean, _, least = rows[f"{name} {change}"]
            print(f"{name:20} {change:6} {mean:.3f}   worst: {least:.2f} {worst}", flush=True)
    if options.json:
        record = {"environment": versions(torch.device("cpu")), "default": default, "changed": rows}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
