"""How sensitive the drafting policy is to its constants, in the simulated scenarios of `tests/test_policy.py`.

Every constant of `hf_specdec/control/constants.py` is halved and doubled, the others stay. A score is the geometric
mean of the speed-ups in all scenarios, relative to the score with the defaults. No model is needed; a run takes
minutes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import test_policy
from hf_specdec.bench.machine import versions
from hf_specdec.control import constants, costs, head_schedule, learned_stats, merge_policy, tree_width
from hf_specdec.drafters import candidates
from policy import Clock, Source, World, speedup

MODULES = (constants, costs, head_schedule, learned_stats, merge_policy, tree_width, candidates)
MEASUREMENT = ("MEASURED_WIDTHS", "TIMED_ROUNDS", "QUICK_ROUNDS", "MEASURED_CONTEXT", "MAX_MEASURED_NODES",
               "MIN_MEASURED_WIDTH")  # fmt: skip
"""Constants of how costs are measured, which these scenarios do not do."""


def scenarios() -> dict[str, float]:
    """Run the scenarios and return their median speed-ups over plain decoding."""
    patch, plain = pytest.MonkeyPatch(), test_policy.plain()

    def heads(accuracy, steps):
        return test_policy.calls_of(patch, accuracy, steps)

    def free(accuracy, claimed, steps):
        sources = [{"lookup": Source(accuracy, says=claimed, seed=seed)} for seed in test_policy.SEEDS]
        return [World(Clock(patch), source, test_policy.one_row).generate(steps) for source in sources]

    def batches(accuracy):
        made = (
            {"lookup": test_policy.noise(seed), "head": test_policy.head(accuracy, seed)} for seed in test_policy.SEEDS
        )
        return [World(Clock(patch), sources, test_policy.dear_rows).generate(200, rows=4) for sources in made]

    changing = heads(lambda step: 0.02 if 200 <= step < 400 else 0.85, 700)
    returning = free(lambda step: 0.02 if step < 150 else 0.9, 0.5, 260)
    parts = {
        "good head": heads(lambda _step: 0.85, 100),
        "useless head": heads(lambda _step: 0.02, 600),
        "head becomes useless": [call[200:400] for call in changing],
        "head becomes useful": [call[400:] for call in changing],
        "overconfident source": free(lambda _step: 0.3, 0.9, 300),
        "useless source": [call[:150] for call in returning],
        "source becomes useful": [call[150:] for call in returning],
    }
    found = {name: statistics.median(speedup(call, plain) for call in calls) for name, calls in parts.items()}
    rows = batches(lambda _step: 0.85)
    found["batch of four"] = statistics.median(
        speedup(call, test_policy.dear_rows(1, 4, 0), rows=4) for call in rows
    )  # fmt: skip
    patch.undo()
    return found


def multiplied(value, factor):
    """Return a constant times a factor; of a table or tuple, each value."""
    if isinstance(value, dict):
        return {key: multiplied(entry, factor) for key, entry in value.items()}
    if isinstance(value, tuple):
        return tuple(multiplied(entry, factor) for entry in value)
    return type(value)(value * factor)


def changed(name: str, factor: float) -> dict[str, float]:
    """Run the scenarios with one constant multiplied."""
    value = getattr(constants, name)
    patch = pytest.MonkeyPatch()
    for module in MODULES:
        if hasattr(module, name):
            patch.setattr(module, name, multiplied(value, factor))
    try:
        return scenarios()
    finally:
        patch.undo()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="Write the scores to this file.")
    options = parser.parse_args()
    default = scenarios()
    print(json.dumps(default, indent=1))
    names = [name for name in vars(constants) if name.isupper() and name not in MEASUREMENT]
    rows = {}
    for name in names:
        for factor in (0.5, 2.0):
            found = changed(name, factor)
            ratios = {scenario: found[scenario] / default[scenario] for scenario in default}
            worst = min(ratios, key=ratios.__getitem__)
            rows[f"{name} x {factor:g}"] = [statistics.geometric_mean(ratios.values()), worst, ratios[worst]]
            print(
                f"{name:20} x {factor:<4g} {rows[f'{name} x {factor:g}'][0]:.3f}   worst: {ratios[worst]:.2f} {worst}"
            )
    if options.json:
        record = {"environment": versions(torch.device("cpu")), "default": default, "changed": rows}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
