"""Plant a small bug, run the tests, see whether one notices; again and again. `make mutants`, by hand, not in CI.

    python tests/mutate.py [FILE ...] [--jobs 2] [--sample N] [--only LINE]

Every bug is one change of one expression or statement in a copy of the package: a comparison or a sign turned, a
constant moved, a condition negated, a statement left out. The tests of a file are run until one fails (the bug is
caught) or none does (it survives, and is printed). What survives is equivalent, or a test is missing.
"""

from __future__ import annotations

import argparse
import ast
import copy
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "hf_specdec"

TESTS: dict[str, list[str]] = {
    "trees/tree.py": ["test_tree", "test_accept", "test_eagle", "test_mixin"],
    "trees/growth.py": ["test_tree", "test_tree_search", "test_drafters", "test_eagle", "test_simulated_device"],
    "trees/draft.py": ["test_drafters", "test_medusa", "test_mixin"],
    "acceptance/paths.py": ["test_accept", "test_lossless", "test_mixin", "test_simulated_device"],
    "control/controller.py": ["test_control", "test_drafters", "test_hybrid_session"],
    "control/costs.py": ["test_control", "test_hybrid_session"],
    "drafters/registry.py": ["test_drafters", "test_mixin"],
    "generation/call.py": ["test_drafters", "test_mixin"],
    "verification/masks.py": ["test_masks", "test_equivalence", "test_mixin", "test_wrappers"],
    "verification/cache.py": ["test_cache", "test_mixin", "test_changes", "test_fuzz"],
    "verification/chain_target.py": [
        "test_drafters",
        "test_mixin",
        "test_draft_model",
        "test_early_exit",
        "test_fuzz",
    ],
    "acceptance/rules.py": ["test_accept", "test_lossless", "test_mixin", "test_simulated_device"],
    "acceptance/transcript.py": ["test_accept", "test_transcript", "test_mixin", "test_simulated_device", "test_fuzz"],
    "verification/tree_attention.py": ["test_attention", "test_mixin"],
    "verification/runners.py": ["test_runners"],
    "verification/memory.py": ["test_cache", "test_mixin", "test_changes", "test_simulated_device"],
    "verification/graphs.py": ["test_simulated_device"],
    "verification/graph_backends.py": ["test_graph_backends", "test_simulated_device"],
    "verification/captured.py": ["test_simulated_device"],
    "heads/stages.py": ["test_runners"],
    "verification/tree_target.py": ["test_mixin", "test_attention", "test_runners", "test_eagle", "test_wrappers"],
    "verification/target.py": ["test_mixin", "test_eagle", "test_early_exit", "test_wrappers", "test_training"],
    "generation/decode.py": ["test_mixin", "test_changes", "test_fuzz"],
    "drafters/eagle.py": ["test_eagle", "test_drafters", "test_mixin"],
    "drafters/medusa.py": ["test_medusa"],
    "drafters/token_recycling.py": ["test_token_recycling", "test_hybrid_session", "test_drafters"],
    "drafters/experimental/last_logits.py": ["test_last_logits", "test_drafters"],
    "drafters/experimental/lookahead.py": ["test_lookahead", "test_drafters"],
    "drafters/experimental/early_exit.py": ["test_early_exit", "test_drafters", "test_wrappers"],
    "drafters/prompt_lookup.py": ["test_prompt_lookup", "test_hybrid", "test_drafters"],
    "drafters/candidates.py": ["test_hybrid", "test_prompt_lookup"],
    "control/policy.py": ["test_hybrid", "test_hybrid_session", "test_policy"],
    "drafters/hybrid.py": ["test_hybrid", "test_hybrid_session", "test_drafters"],
    "drafters/draft_model.py": ["test_draft_model", "test_pard", "test_drafters"],
    "drafters/pard.py": ["test_pard"],
    "drafters/gemma4_assistant.py": ["test_gemma4_assistant"],
    "drafters/feature_session.py": ["test_eagle", "test_mtp", "test_simulated_device"],
    "drafters/mtp.py": ["test_mtp", "test_drafters"],
    "heads/attention.py": ["test_eagle", "test_training"],
    "heads/eagle.py": ["test_eagle", "test_layouts"],
    "heads/eagle3.py": ["test_eagle", "test_layouts"],
    "heads/medusa.py": ["test_medusa", "test_layouts"],
    "heads/mtp.py": ["test_mtp", "test_layouts"],
    "heads/head.py": ["test_hub", "test_medusa", "test_training"],
    "checkpoints/formats.py": ["test_layouts", "test_hub", "test_untrusted"],
    "checkpoints/files.py": ["test_hub", "test_untrusted", "test_layouts"],
    "heads/schema.py": ["test_untrusted", "test_hub"],
    "checkpoints/export.py": ["test_layouts", "test_cli"],
    "training/eagle_objective.py": ["test_training"],
    "training/medusa_objectives.py": ["test_training", "test_medusa2"],
    "training/objectives.py": ["test_training"],
    "training/distillation.py": ["test_distill"],
    "training/tree_search.py": ["test_tree_search"],
}
"""Which tests know a file, those that notice soonest first."""

SLOW_TESTS = {"acceptance/rules.py": ["test_lossless"], "acceptance/paths.py": ["test_lossless"]}
"""Tests marked slow that a file needs: distributions are counted there."""

PATIENCE = 240
"""Seconds after which a bug that makes a test go on for ever counts as caught."""

SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd, ast.And: ast.Or, ast.Or: ast.And, ast.Pow: ast.Mult,
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "argmax": "argmin", "zeros": "ones", "ones": "zeros"}


@dataclass(frozen=True)
class Mutant:
    """One planted bug."""

    file: str
    line: int
    what: str
    text: str  # of the whole file


class _Planter(ast.NodeTransformer):
    """Counts the places where a bug can be planted, and plants the n-th."""

    def __init__(self, wanted: int | None) -> None:
        self.wanted, self.count, self.what, self.line = wanted, 0, "", 0

    def _here(self, node: Any, what: str) -> bool:
        self.count += 1
        if self.count - 1 != self.wanted:
            return False
        self.what, self.line = what, node.lineno
        return True

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if node.name in ("__repr__", "validate"):
            return node
        node.body = [self.visit(part) for part in node.body]
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        return node  # texts of errors

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        for place, operator in enumerate(node.ops):
            if type(operator) in SWAPS and self._here(node, f"{type(operator).__name__} turned"):
                node.ops[place] = SWAPS[type(operator)]()
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        left = getattr(node, "left", None)
        text = isinstance(left, ast.Constant) and isinstance(left.value, str)
        if type(node.op) in SWAPS and not text and self._here(node, f"{type(node.op).__name__} turned"):
            node.op = SWAPS[type(node.op)]()
        return node

    visit_AugAssign = visit_BinOp  # type: ignore[assignment]

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        if self._here(node, f"{type(node.op).__name__} turned"):
            node.op = SWAPS[type(node.op)]()
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        if self._here(node, f"{type(node.op).__name__} dropped"):
            return node.operand
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, bool):
            if self._here(node, f"{node.value} turned"):
                return ast.copy_location(ast.Constant(not node.value), node)
        elif isinstance(node.value, int | float) and self._here(node, f"{node.value} moved by one"):
            return ast.copy_location(ast.Constant(node.value + 1), node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        if name in NAMES and self._here(node, f"{name} turned"):
            if isinstance(function, ast.Attribute):
                function.attr = NAMES[name]
            else:
                function.id = NAMES[name]  # type: ignore[attr-defined]
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        self.generic_visit(node)
        if self._here(node, "condition negated"):
            node.test = ast.copy_location(ast.UnaryOp(ast.Not(), node.test), node.test)
        return node

    visit_IfExp = visit_If  # type: ignore[assignment]

    def _droppable(self, node: Any) -> ast.AST:
        self.generic_visit(node)
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        again = isinstance(node, ast.Assign) and _reads_itself(node)
        droppable = (isinstance(node, ast.Expr) and not docstring) or again
        if droppable and self._here(node, "statement left out"):
            return ast.copy_location(ast.Pass(), node)
        return node

    visit_Expr = _droppable
    visit_Assign = _droppable


def _reads_itself(node: ast.Assign) -> bool:
    """Whether what is assigned was there before: leaving the statement out keeps the old value."""
    written = {target.id for target in node.targets if isinstance(target, ast.Name)}
    read = {name.id for name in ast.walk(node.value) if isinstance(name, ast.Name)}
    attributes = [target for target in node.targets if isinstance(target, ast.Attribute | ast.Subscript)]
    return bool(written & read or attributes)


def mutants(file: str) -> Iterator[Mutant]:
    """Every bug that can be planted in a file."""
    tree = ast.parse((SOURCE / file).read_text())
    counter = _Planter(None)
    counter.visit(copy.deepcopy(tree))
    for number in range(counter.count):
        planter = _Planter(number)
        changed = ast.fix_missing_locations(planter.visit(copy.deepcopy(tree)))
        yield Mutant(file, planter.line, planter.what, ast.unparse(changed))


def survives(mutant: Mutant) -> bool:
    """Run the tests with the bug, in a process of its own, and see whether all pass."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "hf_specdec"
        shutil.copytree(SOURCE, package)
        (package / mutant.file).write_text(mutant.text)
        child = os.fork()
        if not child:
            os.setsid()
            code = 3
            try:
                code = _run_tests(folder, mutant.file)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        for _ in range(PATIENCE * 20):  # looks, not a clock: time in which all of this was stopped does not count
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status) == 0
            time.sleep(0.05)
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return False


def _run_tests(folder: str, file: str) -> int:
    import pytest

    quiet = os.open(os.environ.get("MUTATE_LOG", os.devnull), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(quiet, stream)
    sys.path[:0] = [folder, str(ROOT / "tests")]
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # tests that start processes start them with the bug
    os.chdir(ROOT)
    options = [
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-p",
        "no:anyio",
        "-W",
        "ignore::pytest.PytestAssertRewriteWarning",
    ]
    options += ["-c", str(ROOT / "pyproject.toml")]
    for marked, names in (("not slow", TESTS[file]), ("slow", SLOW_TESTS.get(file, []))):
        paths = [str(ROOT / "tests" / f"{name}.py") for name in names]
        failed = int(pytest.main([*options, "-m", marked, *paths])) if paths else 0
        if failed:
            return failed
    return 0


def main() -> None:
    """Walk the mutants of some files and print the survivors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", default=list(TESTS))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--sample", type=int, help="of each file, at random")
    parser.add_argument("--only", type=int, help="the bugs of this line")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import transformers  # noqa: F401  (once, for all children)
    from transformers import AutoModelForCausalLM, LlamaForCausalLM  # noqa: F401

    torch.set_num_threads(1)
    total = lost = 0
    for file in arguments.files:
        chosen = [mutant for mutant in mutants(file) if arguments.only in (None, mutant.line)]
        if arguments.sample and len(chosen) > arguments.sample:
            chosen = sorted(random.Random(0).sample(chosen, arguments.sample), key=lambda mutant: mutant.line)
        if not survives(Mutant(file, 0, "nothing", (SOURCE / file).read_text())):
            sys.exit(f"{file}: its tests fail without any bug")
        survivors = 0
        with multiprocessing.get_context("fork").Pool(arguments.jobs) as pool:
            for mutant, alive in zip(chosen, pool.imap(survives, chosen), strict=True):
                if alive:
                    survivors += 1
                    print(f"{file}:{mutant.line}: {mutant.what}", flush=True)
        print(f"{file}: {survivors} of {len(chosen)} survive", flush=True)
        total, lost = total + len(chosen), lost + survivors
    print(f"{lost} of {total} survive")


if __name__ == "__main__":
    main()
