"""The library of compiled CPU kernels: chosen for the processor, built on first use and kept on disk.

It has a plain C interface and no torch headers, so that it compiles in a few seconds and one file serves all versions
of torch. The cache directory is `$XDG_CACHE_HOME/hf_specdec` or `~/.cache/hf_specdec`; file names contain a hash of
source, compiler and options. Nothing is built at import.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

VARIABLE = "HF_SPECDEC_KERNELS"
"""Environment variable: the best instruction set to use, by name, or `none` for no kernels. For tests and reports."""
SOURCES = tuple(
    Path(__file__).with_name(name)
    for name in ("kernels.cpp", "attention.h", "blocks.h", "products.h", "search.h", "steps.h", "vectors.h")
)
"""The file to compile, and those that it includes."""
MEASURE = -1
"""Argument of the library's `choose_pairs`: use the instructions for pairs of bfloat16 unless they are slow."""
OPTIONS = ("-std=c++17", "-O3", "-w", "-fopenmp", "-shared", "-fPIC")
COMPILE_TIMEOUT = 300
"""Seconds after which a compiler is stopped."""
OPENMP_RUNTIMES = re.compile(r"/lib(?:gomp|iomp5|omp)[^/]*\.so")


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """A set of instructions that the kernels can be compiled for."""

    name: str
    machine: str  # as in `platform.machine()`
    features: frozenset[str]  # required, as in /proc/cpuinfo
    options: tuple[str, ...]  # of the compiler


_AVX512 = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma", "avx2"})
_AVX512_OPTIONS = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mavx2")
INSTRUCTION_SETS = (
    InstructionSet("avx512_bf16", "x86_64", _AVX512 | {"avx512_bf16"}, (*_AVX512_OPTIONS, "-mavx512bf16")),
    InstructionSet("avx512", "x86_64", _AVX512, _AVX512_OPTIONS),
    InstructionSet("avx2", "x86_64", frozenset({"avx2", "fma"}), ("-mavx2", "-mfma")),
    InstructionSet("arm_bf16", "aarch64", frozenset({"bf16", "asimd"}), ("-march=armv8.2-a+bf16",)),
    InstructionSet("arm", "aarch64", frozenset({"asimd"}), ("-march=armv8-a",)),
)
"""Best first. Processors with AMX have AVX-512 with bfloat16; wide products are left to oneDNN, which uses AMX."""


class NoKernelsError(Exception):
    """Raised if this machine cannot use the kernels; the message is a clause, such as "no C++ compiler was found"."""


@functools.cache
def processor_features() -> frozenset[str]:
    """Return the processor's features as Linux names them; empty on other systems."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return frozenset(found[1].split()) if found else frozenset()


def choose_instruction_set(features: frozenset[str], machine: str, most: str) -> InstructionSet:
    """Return the best instruction set of a processor.

    Args:
        features: Features of the processor, see `processor_features`.
        machine: Result of `platform.machine()`.
        most: Value of the environment variable: a name that excludes better ones, "none", or empty.

    Raises:
        NoKernelsError: There is none, or the value is unknown.
    """
    names = [entry.name for entry in INSTRUCTION_SETS]
    if most == "none":
        raise NoKernelsError(f"{VARIABLE} is 'none'")
    if most and most not in names:
        raise NoKernelsError(f"{VARIABLE} is {most!r}, but must be 'none' or one of {', '.join(names)}")
    for entry in INSTRUCTION_SETS[names.index(most) if most else 0 :]:
        if entry.machine == machine and entry.features <= features:
            return entry
    if most:
        names = names[names.index(most) :]
    raise NoKernelsError(
        f"this processor ({machine}) supports none of the instruction sets {', '.join(names)}"
        + (f", to which {VARIABLE} limits them" if most else "")
        + ("" if features else ", or the system is not Linux")
    )


def find_compiler() -> list[str]:
    """Return the command of a C++ compiler: `$CXX`, which may have options (`ccache g++`), else `g++` or `clang++`.

    Returns:
        Path of the program, and its options; empty if none was found.
    """
    wanted = os.environ.get("CXX", "").strip()
    try:
        commands = [shlex.split(wanted)] if wanted else [["g++"], ["clang++"]]
    except ValueError:  # quotes that are not closed
        return []
    for name, *options in commands:
        if path := shutil.which(name):
            return [path, *options]
    return []


def cache_directory() -> Path:
    """Return the directory in which compiled kernels are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_specdec"


def build(instructions: InstructionSet, compiler: list[str], directory: Path) -> Path:
    """Return the compiled library in a directory, built if it is missing; several processes may build at once.

    Args:
        instructions: The instruction set.
        compiler: See `find_compiler`. Without one, a library that any compiler has built of these sources is used.
        directory: The directory.

    Raises:
        NoKernelsError: The compiler fails, or there is none and nothing was built before.
        OSError: The directory cannot be written to.
    """
    library = path_of(instructions, compiler, directory)
    if library.exists():
        return library
    command = [*compiler, *OPTIONS, *instructions.options]
    directory.mkdir(parents=True, exist_ok=True)
    logger.info(
        "Compiling CPU kernels for %s with %s; this takes a few seconds, once.", instructions.name, compiler[0]
    )
    with tempfile.TemporaryDirectory(dir=directory, prefix=".build-") as working:
        made, messages = Path(working) / library.name, Path(working) / "messages"
        try:
            with messages.open("w") as output:  # not a pipe, which would outlive a stopped compiler
                done = subprocess.run(
                    [*command, str(SOURCES[0]), "-o", str(made)], stdout=output, stderr=output,
                    timeout=COMPILE_TIMEOUT, check=False,
                )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NoKernelsError(f"{compiler[0]} failed ({error})") from error
        if done.returncode:
            text = messages.read_text(errors="replace")
            line = next((line for line in text.splitlines() if "error" in line), text[:200])
            raise NoKernelsError(f"{compiler[0]} cannot compile them for {instructions.name} ({line.strip()})")
        made.replace(library)
    return library


def path_of(instructions: InstructionSet, compiler: list[str], directory: Path) -> Path:
    """Return where `build` puts the library; without a compiler, the newest that any compiler has built.

    Args:
        instructions, compiler, directory: See `build`.

    Raises:
        NoKernelsError: No compiler was found, and no library was built before.
    """
    prefix = f"kernels-{instructions.name}-{_hash([*OPTIONS, *(source.read_text() for source in SOURCES)])}"
    if compiler:
        command = [*compiler, *OPTIONS, *instructions.options]
        version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False).stdout
        return directory / f"{prefix}-{_hash([*command, version])}.so"
    found = max(directory.glob(f"{prefix}-*.so"), key=lambda path: path.stat().st_mtime, default=None)
    if found is None:
        wanted = os.environ.get("CXX") or "g++ or clang++"
        raise NoKernelsError(f"no C++ compiler was found ({wanted}; set CXX to use another one)")
    return found


def _hash(texts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def openmp_runtimes() -> set[str]:
    """Return the paths of the OpenMP runtimes loaded in this process."""
    text = Path("/proc/self/maps").read_text()
    return {line.split()[-1] for line in text.splitlines() if OPENMP_RUNTIMES.search(line)}


def open_library() -> tuple[InstructionSet, ctypes.CDLL]:
    """Return the kernels for this processor, built if necessary.

    If the cache directory cannot be written, they are built for this process only.

    Raises:
        NoKernelsError: There are none for this machine.
    """
    instructions, compiler = _this_machine(), find_compiler()
    try:
        path = build(instructions, compiler, cache_directory())
        return instructions, _opened(path)
    except (OSError, RuntimeError) as error:  # RuntimeError: no home directory
        logger.info("Compiled CPU kernels cannot be kept (%s); they are built for this process only.", error)
    try:
        with tempfile.TemporaryDirectory(prefix="hf_specdec-") as working:  # a loaded library may be deleted
            return instructions, _opened(build(instructions, compiler, Path(working)))
    except OSError as error:
        raise NoKernelsError(f"they cannot be built or loaded ({error})") from error


def _this_machine() -> InstructionSet:
    return choose_instruction_set(processor_features(), platform.machine(), os.environ.get(VARIABLE, "").strip())


def _opened(path: Path) -> ctypes.CDLL:
    before = openmp_runtimes()
    library = ctypes.CDLL(str(path))
    if before and openmp_runtimes() != before:  # two pools of threads would slow each other down
        raise NoKernelsError(f"torch uses another OpenMP runtime ({', '.join(sorted(before))}) than the compiler")
    library.choose_pairs.argtypes, library.choose_pairs.restype = [ctypes.c_long], ctypes.c_long
    paired = library.choose_pairs(MEASURE)  # takes a few milliseconds
    logger.debug("Products of bfloat16 are computed %s.", "in pairs" if paired else "as products of floats")
    return library


_LOADING = threading.Lock()
_loaded: list[tuple[InstructionSet, ctypes.CDLL] | str] = []


def load_library() -> tuple[InstructionSet, ctypes.CDLL]:
    """Return the result of `open_library`, which is called once per process; a failure is logged once.

    Raises:
        NoKernelsError: This machine cannot use the kernels.
    """
    with _LOADING:
        if not _loaded:
            try:
                _loaded.append(open_library())
            except NoKernelsError as error:
                logger.info("CPU kernels are not used: %s.", error)
                _loaded.append(str(error))  # an exception would keep the frames of its callers
    known = _loaded[0]
    if isinstance(known, str):
        raise NoKernelsError(known)
    return known


def loads_at_once() -> bool:
    """Whether `load_library` would return, or fail, without compiling anything."""
    if _loaded:
        return True
    try:
        return path_of(_this_machine(), find_compiler(), cache_directory()).exists()
    except (NoKernelsError, OSError, RuntimeError) as error:  # RuntimeError: no home directory
        return isinstance(error, NoKernelsError)


def load_or_none() -> ctypes.CDLL | None:
    """Return the library; None if this machine cannot use it."""
    try:
        return load_library()[1]
    except NoKernelsError:
        return None


def is_loaded() -> bool:
    """Whether the library is loaded; does not build it."""
    return bool(_loaded) and not isinstance(_loaded[0], str)


def forget_library() -> None:
    """Make the next `load_library` choose and build again; for tests. Functions bound to the old one still work."""
    _loaded.clear()
