"""The house rules that a machine can check: who imports whom, words that must not occur."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "hf_specdec"
LAYERS = (
    "errors records atomic host_sync randomness transformers_private validation config",
    "trees reporting cpu fusion",
    "acceptance heads verification",
    "control checkpoints drafters",
    "generation training viz",
    "bench cli __main__",
)
"""Lowest first. A module imports modules of lower layers and of its own; the whole graph has no cycle."""
LAYER_OF = {name: layer for layer, names in enumerate(LAYERS) for name in names.split()} | {"": len(LAYERS)}
TRAINING_MAY_NOT_IMPORT = ("generation", "acceptance", "verification.cache", "drafters.eagle", "drafters.medusa",
                           "drafters.mtp")  # fmt: skip
FILES = sorted(SOURCE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {module_name(path) for path in FILES}


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "hf_specdec":
            module = (node.module or "").removeprefix("hf_specdec").removeprefix(".")
            for alias in node.names:
                name = f"{module}.{alias.name}".removeprefix(".")
                found.add(name if name in MODULES else module)
    return found


MAX_LINES = {
    "acceptance": 1030, "bench": 1214, "checkpoints": 3289, "cli": 2610, "control": 1170, "cpu": 1951,
    "drafters": 6714, "fusion": 761, "generation": 3671, "heads": 3132, "reporting": 375, "training": 4272,
    "trees": 683, "verification": 6751, "viz": 996,
}  # fmt: skip
"""Lines of each package. Lower a number when its package has shrunk; raise one only with the reason in the commit."""
MAX_LINES_AT_THE_TOP = 1427
MAX_CLOSURE = 2349
"""Lines that `drafters.base`, the interface for a drafter of one's own, imports; it may only shrink."""


def package_of(module: str) -> str:
    return module.split(".")[0]


def assert_no_cycle(graph: dict[str, set[str]]) -> None:
    visiting, done = set[str](), set[str]()

    def visit(name: str) -> None:
        assert name not in visiting, f"import cycle through {name}"
        if name not in done:
            visiting.add(name)
            for other in graph[name] - {name}:
                visit(other)
            visiting.remove(name)
            done.add(name)

    for name in graph:
        visit(name)


def test_every_module_has_its_layer() -> None:
    assert {package_of(name) for name in MODULES} == set(LAYER_OF)


def test_no_package_grows_unnoticed() -> None:
    lines = dict.fromkeys(MAX_LINES, 0)
    at_the_top = 0
    for path in FILES:
        count = len(path.read_text().splitlines())
        if path.parent == SOURCE:
            at_the_top += count
        else:
            lines[package_of(module_name(path))] += count
    assert {name: count for name, count in lines.items() if count > MAX_LINES[name]} == {}
    assert at_the_top <= MAX_LINES_AT_THE_TOP


def test_the_interface_of_drafters_imports_little() -> None:
    graph = {module_name(path): imports_of(path) for path in FILES}
    reached, waiting = set[str](), ["drafters.base"]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += graph[name]
    sizes = {module_name(path): len(path.read_text().splitlines()) for path in FILES}
    assert sum(sizes[name] for name in reached) <= MAX_CLOSURE


ONE_IMPORTER = {
    "checkpoints.block_layouts", "checkpoints.eagle_layouts", "cli.bench", "cli.demo", "cli.doctor",
    "cli.generate", "cli.train", "control.controller", "cpu.rewrite", "drafters.hybrid",
    "drafters.token_translation", "fusion.triton_kernels", "generation.auto",
    "generation.decode", "generation.reading_trial", "training.servers", "training.starts",
    "training.tree_search", "verification.chain_target", "viz.tree_plots",
}  # fmt: skip
"""Modules that a single other module imports; the list may only shrink, because they could be part of that module."""
NAMES_OF_KINDS = {"dflash.py", "eagle.py", "medusa.py", "mtp.py"}
"""File names that occur twice: a kind of head in `heads/`, and how it drafts in `drafters/`."""


def test_modules_with_one_importer_become_fewer() -> None:
    graph = {module_name(path): imports_of(path) for path in FILES}
    packages = {module_name(path) for path in FILES if path.name == "__init__.py"}
    importers = Counter(other for name, imported in graph.items() for other in imported - {name})
    assert {name for name in MODULES - packages if importers[name] == 1 and "." in name} == ONE_IMPORTER


def test_a_public_name_has_one_meaning_and_a_file_name_one_file() -> None:
    names = Counter[str]()
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            found = {node.name} if isinstance(node, ast.FunctionDef | ast.ClassDef) else set[str]()
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
            names.update(name for name in found if not name.startswith("_") and name != "logger")
    assert {name for name, count in names.items() if count > 1} == set()
    files = Counter(path.name for path in FILES if not path.name.startswith("__"))
    assert {name for name, count in files.items() if count > 1} == NAMES_OF_KINDS


def test_imports_point_one_way() -> None:
    modules = {module_name(path): imports_of(path) for path in FILES}
    packages: dict[str, set[str]] = {package: set() for package in LAYER_OF}
    for name, imported in modules.items():
        for other in imported:
            assert LAYER_OF[package_of(other)] <= LAYER_OF[package_of(name)], f"{name} imports {other}"
            assert not name.startswith("training") or not other.startswith(TRAINING_MAY_NOT_IMPORT), name
        packages[package_of(name)] |= {package_of(other) for other in imported}
    assert_no_cycle(modules)
    assert_no_cycle(packages)


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_no_globals_prints_or_devices_by_name(path: Path) -> None:
    text = path.read_text()
    if path.name not in ("graph_backends.py", "tree_attention.py", "fused.py", "triton_kernels.py"):
        assert "cuda" not in text.replace("cuda_graph", "").lower(), "devices come from tensors"
    for node in ast.walk(ast.parse(text)):
        assert not isinstance(node, ast.Global)
        if isinstance(node, ast.Call):
            assert getattr(node.func, "id", "") != "print"


CONCRETE = re.compile(r"\w+(Drafter|Session|Candidates|DraftLayer|Runner|Forward|Target|Controller)")
PROTOCOLS = {"Drafter", "DraftSession", "Candidates", "Target", "Controller"}


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_no_concrete_class_is_tested_for_elsewhere(path: Path) -> None:
    """`isinstance` of a drafter, session, layer or runner occurs only in the file that defines the class."""
    tree = ast.parse(path.read_text())
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)} | PROTOCOLS | {"cls"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
            named = {name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name)}
            assert not {name for name in named - own if CONCRETE.fullmatch(name)}, f"{path.name}:{node.lineno}"


PARSE_FIRST = {"bench", "doctor", "generate", "heads", "status", "train"}
"""Modules of the commands, which import torch and transformers only after their options are parsed."""


def test_imports_stand_at_the_top() -> None:
    """A deferred import is of an optional dependency, in the one file that needs it, or of a command's libraries."""
    deferred = {
        (module_name(path), getattr(node, "module", None))
        for path in FILES
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
        and module_name(path) not in {f"cli.{name}" for name in PARSE_FIRST}
    }
    assert deferred == {
        ("reporting.palette", "matplotlib"),
        ("generation.gguf_file", None),  # gguf
        ("fusion.fused", "hf_specdec.fusion"),  # kernels in Triton
        ("viz.tree_plots", "matplotlib"),
        ("bench.summary", "matplotlib.figure"),
        ("training.data", None),
        ("training.data", "pyarrow"),
        ("training.servers", None),
        ("training.servers", "anyio.from_thread"),
        ("training.medusa_objectives", "peft"),
        ("viz.tree_plots", "PIL"),  # comes with matplotlib
        ("viz.tree_plots", None),
    }


MAKES = {"tensor", "as_tensor", "arange", "zeros", "ones", "empty", "full", "rand", "randn", "randint", "randperm",
         "linspace", "eye"}  # fmt: skip
OF_THE_DEFAULT_DTYPE = {"zeros", "ones", "empty", "full", "rand", "randn", "linspace", "eye"}
BUFFERS_OF_MODULES = {"heads.head"}
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
