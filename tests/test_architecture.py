"""The house rules that a machine can check: who imports whom, sizes, words that must not occur."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "hf_specdec"
ROWS = {
    0: "config errors atomic records one_time host_sync palette pipelining",
    1: "row_ends tree draft tree_growth transcript target.model target.masks heads.card",
    2: "acceptance accept captured_rules target target.cache target.chain_cache target.features target.target "
    "target.memory target.plain target.kernels target.attention target.runners target.recorders target.graphs "
    "target.graph_forward target.tree_target "
    "target.chain_target step trace stats "
    "heads heads.attention heads.base heads.schema heads.vocabulary heads.eagle heads.eagle3 heads.medusa heads.mtp "
    "heads.native_mtp heads.compiled heads.captured heads.captured_shapes",
    3: "outputs target.fingerprint target.probe target.compiling target.partial "
    "control control.controller control.costs control.cost_model control.tiers "
    "checkpoints checkpoints.files checkpoints.pickles checkpoints.layouts checkpoints.formats checkpoints.engines "
    "checkpoints.export checkpoints.hub checkpoints.report "
    "drafters drafters.base drafters.foreign drafters.candidates drafters.asking drafters.calibration "
    "drafters.suffix_automaton drafters.draft_layer drafters.layer_session drafters.launching drafters.queries "
    "drafters.recycled_tokens drafters.captured_recycling drafters.prompt_lookup drafters.token_recycling "
    "drafters.eagle drafters.medusa drafters.medusa_choices "
    "drafters.mtp drafters.draft_model drafters.last_logits drafters.lookahead drafters.early_exit drafters.hybrid",
    4: "drafters.registry drafters.compatibility decode viz viz.text viz.trees viz.steps viz.runs",
    5: "generation generation.options generation.state generation.plan generation.mixin "
    "training training.data training.conversations training.arguments training.modes training.processes "
    "training.progress training.runs training.prompts training.voices training.completions training.connections "
    "training.servers training.distill training.features training.measures training.teacher training.estimate "
    "training.recipes training.trainer training.eagle training.medusa training.medusa2 training.tree_search",
    6: "generation.auto loading demo bench bench.questions bench.machine bench.methods bench.measuring bench.report "
    "bench.diagnosis "
    "cli cli.options cli.runs cli.generation cli.bench cli.heads cli.distilling cli.new_heads cli.training cli.trees "
    "cli.machine __main__",
}
"""A row imports lower rows, or its own; the graph has no cycle. The public `__init__` is the empty name."""
ROW_OF = {name: row for row, names in ROWS.items() for name in names.split()} | {"": 6}
TRAINING_MAY_NOT_IMPORT = {"decode", "accept", "target.cache", "generation.mixin", "drafters.eagle", "drafters.medusa",
                           "drafters.mtp"}  # fmt: skip
FILES = sorted(SOURCE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "hf_specdec":
            module = (node.module or "").removeprefix("hf_specdec").removeprefix(".")
            for alias in node.names:
                name = f"{module}.{alias.name}".removeprefix(".")
                found.add(name if name in ROW_OF else module)
    return found


def test_every_module_has_its_row() -> None:
    assert {module_name(path) for path in FILES} == set(ROW_OF)


def test_imports_point_one_way() -> None:
    graph = {module_name(path): imports_of(path) for path in FILES}
    for name, imported in graph.items():
        for other in imported:
            assert ROW_OF[other] <= ROW_OF[name], f"{name} imports {other}"
        if name.startswith("training"):
            assert not imported & TRAINING_MAY_NOT_IMPORT, name
    seen: dict[str, int] = {}

    def visit(name: str) -> None:
        assert seen.get(name) != 1, f"import cycle through {name}"
        if name not in seen:
            seen[name] = 1
            for other in graph[name] - {name}:
                visit(other)
            seen[name] = 2

    for name in graph:
        visit(name)


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_small_on_purpose(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    if path.name not in ("recorders.py", "kernels.py"):
        assert "cuda" not in text.replace("cuda_graph", "").lower(), "devices come from tensors"
    for node in ast.walk(ast.parse(text)):
        assert not isinstance(node, ast.Global)
        if isinstance(node, ast.Call):
            assert getattr(node.func, "id", "") != "print"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines <= 75, f"{node.name} has {lines} lines"


def test_imports_stand_at_the_top() -> None:
    """A deferred import is of an optional dependency, in the one file that needs it."""
    deferred = {
        (module_name(path), getattr(node, "module", None))
        for path in FILES
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert deferred == {
        ("palette", "matplotlib"),
        ("bench.report", "matplotlib.figure"),
        ("training.data", None),
        ("cli.runs", "hf_specdec"),  # the packages of training, which no other command needs
        ("cli.runs", "hf_specdec.training.processes"),
        ("cli.training", "transformers"),
        ("training.data", "pyarrow"),
        ("training.connections", None),
        ("training.connections", "anyio.from_thread"),
        ("training.medusa2", "peft"),
    }


MAKES = {"tensor", "as_tensor", "arange", "zeros", "ones", "empty", "full", "rand", "randn", "randint", "randperm",
         "linspace", "eye"}  # fmt: skip
OF_THE_DEFAULT_DTYPE = {"zeros", "ones", "empty", "full", "rand", "randn", "linspace", "eye"}
BUFFERS_OF_MODULES = {"heads.vocabulary"}
"""They follow `torch.device("meta")` around a module's making, which is how transformers loads."""


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_new_tensors_name_their_device_and_dtype(path: Path) -> None:
    """What does not is made on the caller's default device, in the caller's default dtype."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MAKES):
            continue
        named = {keyword.arg for keyword in node.keywords}
        if ast.unparse(node.func.value) != "torch" or None in named or module_name(path) in BUFFERS_OF_MODULES:
            continue
        wanted = {"device"} | ({"dtype"} if node.func.attr in OF_THE_DEFAULT_DTYPE else set())
        assert wanted <= named, f"{path.name}:{node.lineno}: {ast.unparse(node)}"
