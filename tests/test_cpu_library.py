"""The library of CPU kernels: choices that processes share, other systems and compilers, an emulated ARM processor."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from filelock import FileLock

from hf_specdec.cpu import library
from hf_specdec.cpu.library import CHOICES, INSTRUCTION_SETS, MEASURE, compile_commands

SOURCE = str(Path(library.__file__).parents[2])
CLANG = pytest.mark.skipif(not shutil.which("clang++"), reason="needs clang++")
SETS = {one.name: one for one in INSTRUCTION_SETS}


def choose(path: Path, measured: int, name: str = "avx2") -> tuple[bool, set[int]]:
    """Return whether a process measures its choices for a library at a path, with that result, and what it uses."""
    asked, used = list[int](), dict[str, int]()

    def function(which: str, choice: int) -> int:
        asked.append(choice)
        used[which] = measured if choice == MEASURE else choice
        return used[which]

    loaded: Any = SimpleNamespace(**{which: functools.partial(function, which) for which in CHOICES})
    library._chosen(loaded, SETS[name], path)
    return MEASURE in asked, set(used.values())


def test_the_first_process_on_a_processor_chooses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kernels.so"
    assert [choose(path, 1), choose(path, 0)] == [(True, {1}), (False, {1})]
    [kept] = tmp_path.glob("*.json")
    assert (kept.stat().st_mode & 0o777, json.loads(kept.read_text())) == (0o600, dict.fromkeys(CHOICES, 1))
    assert [choose(tmp_path / "other.so", 0), choose(path, 0, "avx512")] == [(True, {0})] * 2
    monkeypatch.setattr(library, "processor_features", lambda: frozenset({"fma"}))
    assert choose(path, 0) == (True, {0})


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "empty": lambda kept: kept.write_text(""),
    "cut": lambda kept: os.truncate(kept, 9),
    "not UTF-8": lambda kept: kept.write_bytes(b"\xff{"),
    "deep": lambda kept: kept.write_text("[" * 10**6),
    "a list": lambda kept: kept.write_text(json.dumps(list(CHOICES))),
    "a number": lambda kept: kept.write_text("7"),
    "no choice": lambda kept: kept.write_text(json.dumps(dict.fromkeys(CHOICES, MEASURE))),
    "text": lambda kept: kept.write_text(json.dumps(dict.fromkeys(CHOICES, "1"))),
    "another function": lambda kept: kept.write_text(json.dumps(dict.fromkeys([*CHOICES, "read_memory"], 1))),
    "too few": lambda kept: kept.write_text("{}"),
    "open to others": lambda kept: kept.chmod(0o666),
    "a link": lambda kept: (kept.rename(kept.with_name("other")), kept.symlink_to("other")),
    "a FIFO": lambda kept: (kept.unlink(), os.mkfifo(kept, 0o600)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_choices_are_measured_again(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "kernels.so"
    choose(path, 0)
    [kept] = tmp_path.glob("*.json")
    DAMAGES[damage](kept)
    with caplog.at_level(logging.DEBUG, library.__name__):
        assert [choose(path, 1), choose(path, 0)] == [(True, {1}), (False, {1})]
    assert "measured again" in caplog.text


@pytest.mark.parametrize("obstacle", ["a directory", "no directory", "a lock"])
def test_choices_that_cannot_be_kept_hold_for_one_process(
    tmp_path: Path, obstacle: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "kernels.so"
    kept = path.with_name(f"kernels-{library._processor(SETS['avx2'])}.json")
    monkeypatch.setattr(library, "LOCK_TIMEOUT", 0.1)
    with FileLock(kept.with_suffix(".lock")) if obstacle == "a lock" else contextlib.nullcontext():
        if obstacle == "a directory":
            kept.mkdir()
        elif obstacle == "no directory":
            path.write_text("")
            path = path / "kernels.so"
        with caplog.at_level(logging.DEBUG, library.__name__):
            assert [choose(path, measured) for measured in (1, 0)] == [(True, {1}), (True, {0})]
    assert caplog.text.count("for this process only (") == 2


PROCESS = """import json, sys, time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from hf_specdec.cpu import library
used = {}
def choose(name, choice):
    if choice == library.MEASURE:
        time.sleep(0.1)
    used[name] = int(sys.argv[2]) if choice == library.MEASURE else choice
    return used[name]
loaded = SimpleNamespace(**{name: partial(choose, name) for name in library.CHOICES})
time.sleep(max(0, float(sys.argv[3]) - time.time()))
library._chosen(loaded, library.INSTRUCTION_SETS[2], Path(sys.argv[1]))
print(json.dumps(used))"""


@pytest.mark.slow
@pytest.mark.parametrize("before", [None, "{"])
def test_processes_that_start_at_once_make_the_same_choice(tmp_path: Path, before: str | None) -> None:
    """Each would measure something else; one of them also replaces a damaged file."""
    kept = tmp_path / f"kernels-{library._processor(SETS['avx2'])}.json"
    if before:
        kept.write_text(before)
    begin, path, own = str(time.time() + 2), str(tmp_path / "kernels.so"), {**os.environ, "PYTHONPATH": SOURCE}
    runs = [[sys.executable, "-c", PROCESS, path, number, begin] for number in "0110"]
    processes = [subprocess.Popen(run, stdout=-1, text=True, env=own) for run in runs]
    found = [process.communicate()[0] for process in processes]
    assert [json.loads(one) for one in found] == [json.loads(kept.read_text())] * 4


# ------------------------------------------------------------------------------------------ systems and compilers

RUNTIMES = {
    "linux": [], "darwin": ["/x/torch/lib/libomp.dylib"], "win32": [r"C:\x\torch\lib\libiomp5md.dll"],
}  # fmt: skip


def on(
    system: str, patch: pytest.MonkeyPatch, runtimes: list[str], functions: Iterable[str] = ("omp_get_wtime",)
) -> None:
    """Have the package believe that it runs on a system where torch has loaded OpenMP runtimes with functions."""
    patch.setattr(library, "SYSTEM", system)
    patch.setattr(library, "openmp_runtimes", lambda: set(runtimes))
    patch.setattr(library.ctypes, "CDLL", lambda _: SimpleNamespace(**dict.fromkeys(functions)))


@pytest.mark.parametrize("has_threads", [True, False])
def test_commands_of_each_system(has_threads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    source = str(library.SOURCES[0])
    first, last = ["cxx", "-std=c++17", "-O3", "-ffp-contract=fast", "-w", "-shared"], ["-march=armv8-a", source]
    exports = [f"-Wl,-export:{name}" for name in library.EXPORTED]
    clang = ["-Xclang", "-fopenmp"] if has_threads else []
    runtime = ["/b/libiomp5md.lib"] if has_threads else []
    wanted = {
        "linux": [[*first, "-fPIC", *(["-fopenmp"] if has_threads else []), *last, "-o", "/b/k.so"]],
        "darwin": [[*first, "-fPIC", "-undefined", "dynamic_lookup", *clang, *last, "-o", "/b/k.so"]],
        "win32": [[*first, *exports, *clang, *last, *runtime, "-o", "/b/k.so"]],
    }
    if has_threads:
        named = "-Wl,-export:omp_get_wtime=nothing"
        double = ["cxx", "-shared", "-nostdlib", "-Wl,-noentry", named, "/b/nothing.cpp", "-o", "/b/libiomp5md.dll"]
        wanted["win32"].insert(0, double)
    for system, commands in wanted.items():
        on(system, monkeypatch, RUNTIMES[system])
        assert compile_commands(["cxx"], SETS["arm"], Path("/b/k.so"), has_threads) == commands
        assert bool(library._openmp()) is True
    assert {"multiply_16", "grow_32", "choose_pairs", "has_threads"} <= set(library.EXPORTED)


def test_the_runtime_that_torch_uses_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    others = ["/a/libomp.dylib", "/x/torch/lib/libomp.dylib", "/x/libgomp.1.dylib"]
    on("darwin", monkeypatch, others)
    assert library._openmp() == [others[1], others[0]]
    monkeypatch.undo()
    for path in (*others, r"C:\lib\libiomp5md.dll", "/usr/lib/libgomp.so.1.0.0"):
        assert library.OPENMP_RUNTIMES.search(path)
    assert not library.OPENMP_RUNTIMES.search("/lib/libcomp.so")


def fake_torch(level: str, **functions: bool) -> SimpleNamespace:
    capability = SimpleNamespace(cpu=SimpleNamespace(get_cpu_capability=lambda: level))
    return SimpleNamespace(
        backends=capability, cpu=SimpleNamespace(**{k: lambda v=v: v for k, v in functions.items()})
    )


@pytest.mark.parametrize(
    ("system", "machine", "level", "functions", "bf16", "wanted"),
    [
        ("darwin", "arm64", "DEFAULT", {}, "1", "arm_bf16"),
        ("darwin", "arm64", "DEFAULT", {}, "0", "arm"),
        ("darwin", "arm64", "DEFAULT", {}, "", "arm"),
        ("darwin", "x86_64", "AVX2", {}, "", "avx2"),
        ("win32", "AMD64", "AVX2", {"_is_avx512_bf16_supported": False}, "", "avx2"),
        ("win32", "AMD64", "AVX512", {}, "", "avx512"),
        ("win32", "AMD64", "AVX512", {"_is_avx512_bf16_supported": True}, "", "avx512"),
        (
            "win32",
            "AMD64",
            "AVX512",
            {"_is_avx512_bf16_supported": True, "_is_vnni_supported": True},
            "",
            "avx512_bf16",
        ),
        ("win32", "ARM64", "DEFAULT", {}, "", "arm"),
        ("win32", "AMD64", "DEFAULT", {}, "", None),
    ],
)
def test_features_of_each_system(
    system: str, machine: str, level: str, functions: dict[str, bool], bf16: str, wanted: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(library, "SYSTEM", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setitem(sys.modules, "torch", fake_torch(level, **functions))
    monkeypatch.setattr(library, "_sysctl", {"hw.optional.arm.FEAT_BF16": bf16}.get)
    features = library._features_by_torch()
    if wanted:
        assert library.choose_instruction_set(features, library._machine(), "").name == wanted
    else:
        with pytest.raises(library.NoKernelsError, match="its features are not known"):
            library.choose_instruction_set(features, library._machine(), "")


def test_torch_knows_the_features_that_linux_lists() -> None:
    needed = frozenset[str]().union(*(one.features for one in INSTRUCTION_SETS)) | {"amx_bf16"}
    assert library._features_by_torch() == library.processor_features() & needed


def test_files_and_compilers_of_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modes are not read, and clang++ is found where a path has backslashes and quotes."""
    (tmp_path / "file").write_text("")
    (tmp_path / "file").chmod(0o666)
    with pytest.raises(PermissionError, match="other users can write to"):
        library._check_private(tmp_path / "file")
    monkeypatch.setattr(library, "SYSTEM", "win32")
    library._check_private(tmp_path / "file")
    monkeypatch.setattr(shutil, "which", lambda name: f"found {name}")
    for wanted, found in (("", ["found clang++"]), (r'"C:\a b\clang++.exe" -v', [r"found C:\a b\clang++.exe", "-v"])):
        monkeypatch.setenv("CXX", wanted)
        assert library.find_compiler() == found


PRODUCTS = """import logging, os, sys
logging.basicConfig(format="%(message)s", stream=sys.stdout)
import torch
from hf_specdec.cpu import library, operations
if len(sys.argv) > 1:  # as on macOS, but for the linker's option
    library.ctypes.CDLL(sys.argv[1])
    library.SYSTEM, library.SYSTEM_OPTIONS["darwin"] = "darwin", (["-fPIC"], ["-Xclang", "-fopenmp"])
    library.openmp_runtimes = lambda: {sys.argv[1]}
x, weight = torch.randn(9, 200), torch.randn(3000, 200)
library.load_library()
torch.set_num_threads(3)
before = os.listdir("/proc/self/task")
found = operations.linear(x, [weight], [None])
print(library.load_library()[1].has_threads(), len(os.listdir("/proc/self/task")) - len(before))
torch.testing.assert_close(found, x @ weight.T, atol=1e-4, rtol=1e-4)"""
LLVM_RUNTIME = next(Path("/usr/lib").glob("llvm-*/lib/libomp.so*"), None)


def multiply(tmp_path: Path, compiler: str, *arguments: str) -> list[str]:
    """Return what a process prints that compiles the kernels with a compiler and multiplies with three threads."""
    own = {"PYTHONPATH": SOURCE, "CXX": compiler, "XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    run = [sys.executable, "-c", PRODUCTS, *arguments]
    done = subprocess.run(run, env={**os.environ, **own}, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["g++", pytest.param("clang++", marks=CLANG)])
def test_a_compiler_without_openmp_makes_kernels_for_one_thread(tmp_path: Path, compiler: str) -> None:
    script = tmp_path / "refuses"
    script.write_text(
        f"""#!/bin/sh\ncase "$*" in *-fopenmp*) echo "error: unsupported option '-fopenmp'"; exit 1;; esac\n"""
        f"""exec {compiler} "$@"\n"""
    )
    script.chmod(0o755)
    [warning, numbers] = multiply(tmp_path, str(script))
    assert warning.startswith("The CPU kernels use one thread: ")
    assert numbers == "0 0"


@CLANG
@pytest.mark.slow
@pytest.mark.skipif(LLVM_RUNTIME is None, reason="needs LLVM's OpenMP runtime, libomp5")
def test_code_by_clang_uses_a_runtime_that_is_loaded(tmp_path: Path) -> None:
    [numbers] = multiply(tmp_path, "clang++", str(LLVM_RUNTIME))
    assert numbers == "1 2"


MINGW = next(Path("/usr/lib/gcc/x86_64-w64-mingw32").glob("*/include/c++"), None)
CLANG_FOR_WINDOWS = [
    "clang++", "--target=x86_64-w64-mingw32", "-nostdinc++", f"-isystem{MINGW}",
    f"-isystem{MINGW}/x86_64-w64-mingw32", f"-L{MINGW}/../..", f"-B{MINGW}/../..",
]  # fmt: skip


@pytest.mark.slow
@CLANG
@pytest.mark.skipif(not shutil.which("llvm-nm"), reason="needs llvm-nm")
@pytest.mark.skipif(MINGW is None, reason="needs the headers of g++-mingw-w64-x86-64")
def test_the_functions_that_clang_calls_on_windows_are_known(tmp_path: Path) -> None:
    """The kernels compile where `long` has 32 bits, and call nothing of OpenMP but what commands name."""
    given = ["-std=c++17", "-O0", "-w", "-Xclang", "-fopenmp", *SETS["avx2"].options, "-c", library.SOURCES[0]]
    subprocess.run([*CLANG_FOR_WINDOWS, *given, "-o", tmp_path / "k.o"], check=True)
    called = subprocess.check_output(["llvm-nm", "-u", tmp_path / "k.o"], text=True).split()
    found = {name for name in called if name.startswith(("omp_", "__kmpc"))}
    assert "__kmpc_fork_call" in found
    assert found <= set(library.OPENMP_FUNCTIONS)


@CLANG
@pytest.mark.skipif(not shutil.which("lld-link"), reason="needs lld")
def test_windows_links_with_a_double_of_the_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first command that runs on Windows makes an import library that the linker accepts for code with OpenMP."""
    on("win32", monkeypatch, RUNTIMES["win32"], library.OPENMP_FUNCTIONS)
    target = ["clang++", "--target=x86_64-pc-windows-msvc", "-fuse-ld=lld"]
    (tmp_path / "nothing.cpp").write_text(library.NOTHING)
    command, _ = compile_commands(target, SETS["avx2"], tmp_path / "k.so", has_threads=True)
    subprocess.run(command, check=True)
    code = 'extern "C" int omp_get_thread_num();\nvoid f() {\n#pragma omp parallel\nomp_get_thread_num();\n}'
    (tmp_path / "some.cpp").write_text(code)
    options = ["-Xclang", "-fopenmp", "-shared", "-nostdlib", "-Wl,-noentry", "-fno-exceptions", "some.cpp"]
    subprocess.run([*target, *options, "libiomp5md.lib", "-o", "some.dll"], cwd=tmp_path, check=True)
    content = (tmp_path / "some.dll").read_bytes()
    assert all(name in content for name in (b"libiomp5md.dll", b"__kmpc_fork_call", b"omp_get_thread_num"))


# --------------------------------------------------------------------------------------------------- other processors

DRIVER = Path(__file__).with_name("kernels_driver.cpp")
LIMITS = {"bf16": 0.01, "pairs": 0.01, "float": 1e-6}
"""Largest errors relative to the largest output."""
GCC_FOR_ARM, CLANG_FOR_ARM = ["aarch64-linux-gnu-g++", "-fopenmp"], ["clang++", "--target=aarch64-linux-gnu"]
EMULATED = [
    ("arm", GCC_FOR_ARM, "qemu-aarch64"),
    ("arm_bf16", GCC_FOR_ARM, "qemu-aarch64"),
    ("arm", CLANG_FOR_ARM, "qemu-aarch64"),
    ("arm_bf16", CLANG_FOR_ARM, "qemu-aarch64"),
    ("avx2", CLANG_FOR_WINDOWS, "wine"),
]
"""Instruction set, compiler and emulator; docs/compatibility.md names them."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "compiler", "runner"), EMULATED, ids=lambda given: given if isinstance(given, str) else given[0]
)
def test_kernels_are_right_in_an_emulator(tmp_path: Path, name: str, compiler: list[str], runner: str) -> None:
    """Products, norms, rotary embedding, attention, recurrences; rows and nodes have the bits that they have alone."""
    if not (shutil.which(runner) and shutil.which(compiler[0]) and (MINGW or runner != "wine")):
        pytest.skip(f"needs {runner} and {compiler[0]} with the headers of its target")
    options = [one for one in library.OPTIONS if one != "-shared"]
    given = [f"-I{library.SOURCES[0].parent}", DRIVER, "-static", "-lstdc++", "-lpthread", "-o", tmp_path / "run.exe"]
    subprocess.run([*compiler, *options, *SETS[name].options, *given], check=True, stderr=subprocess.DEVNULL)
    own = {"WINEPREFIX": str(tmp_path), "WINEDEBUG": "-all"}
    found = json.loads(subprocess.check_output([runner, tmp_path / "run.exe"], env={**os.environ, **own}))
    assert list(found) == (["bf16", "pairs", "float"] if name == "arm_bf16" else ["bf16", "float"])
    for kind, (*errors, different) in found.items():
        assert max(errors) < LIMITS[kind]
        assert different == 0
