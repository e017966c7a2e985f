"""The library of compiled CPU kernels: chosen for the processor, built on first use and kept on disk.

It has a plain C interface and no torch headers, so that it compiles in a few seconds and one file serves all versions
of torch. It is kept in `atomic.cache_directory()`. File names contain a hash of source, compiler and options, and
files end with a hash of their content: only a whole file that no other user can write to is loaded. Nothing is built
at import.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import functools
import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hf_specdec.atomic import PARTIAL, cache_directory, clear_partials

logger = logging.getLogger(__name__)

VARIABLE = "HF_SPECDEC_KERNELS"
"""Environment variable: the best instruction set to use, by name, or `none` for no kernels. For tests and reports."""
SOURCES = tuple(
    Path(__file__).with_name(name)
    for name in ("kernels.cpp", "attention.h", "blocks.h", "products.h", "search.h", "steps.h", "vectors.h")
)
"""The file to compile, and those that it includes."""
FUNCTIONS = ("multiply", "normalize", "run", "rotate", "attend", "attend_joined", "best", "grow")
"""Functions for tensors, see `operations.functions_for`; their names end with the bits of bfloat16 and float32."""
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


class BrokenKernelsError(NoKernelsError):
    """Raised if a machine that should have kernels cannot compile or load them."""


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
    """Return the best instruction set of a processor (see `processor_features`), or raise `NoKernelsError`.

    `most` is the environment variable: a name that excludes better ones, "none", or empty.
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
    """Return path and options of a C++ compiler, empty if there is none: `$CXX` (`ccache g++`), `g++` or `clang++`."""
    wanted = os.environ.get("CXX", "").strip()
    try:
        commands = [shlex.split(wanted)] if wanted else [["g++"], ["clang++"]]
    except ValueError:  # quotes that are not closed
        return []
    for name, *options in commands:
        if path := shutil.which(name):
            return [path, *options]
    return []


def build(instructions: InstructionSet, compiler: list[str], directory: Path) -> ctypes.CDLL:
    """Load the library in a directory, built if it is missing; several processes may build at once.

    A file that is damaged, or that another user may have changed, is replaced, with a warning. Without a compiler (see
    `find_compiler`), a library that any compiler has built of these sources is used.

    Raises:
        NoKernelsError: The compiler fails, or there is none and nothing was built before.
        OSError: The directory cannot be written to, or the new library cannot be loaded from it.
    """
    library = library_path(instructions, compiler, directory)
    try:
        _check_file(library)
        return _opened(library)
    except OSError as error:
        if not compiler or library.is_dir():  # a directory cannot be replaced
            raise
        if not isinstance(error, FileNotFoundError):
            logger.warning("The CPU kernels are compiled again: %s.", error)
    logger.info(
        "Compiling CPU kernels for %s with %s; this takes a few seconds, once.", instructions.name, compiler[0]
    )
    clear_partials(directory, ".build-")
    suffix = f".{os.getpid()}{PARTIAL}"
    with tempfile.TemporaryDirectory(dir=directory, prefix=".build-", suffix=suffix) as working:
        made = Path(working) / library.name
        command = [*compiler, *OPTIONS, *instructions.options, str(SOURCES[0]), "-o", str(made)]
        try:
            status, output = _run(command, working)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BrokenKernelsError(f"{compiler[0]} failed ({error})") from error
        if "No space left on device" in output:
            raise OSError(errno.ENOSPC, "No space left on device", str(directory))
        if status:
            line = next((line for line in output.splitlines() if "error" in line), output[:200]).strip()
            reason = line or f"exit status {status}"
            raise BrokenKernelsError(f"{compiler[0]} cannot compile them for {instructions.name} ({reason})")
        with made.open("r+b") as file:
            file.write(hashlib.sha256(file.read()).digest())
            file.flush()
            os.fsync(file.fileno())
        made.chmod(0o700)
        opened = _opened(made)  # what crashes here is not kept
        made.replace(library)
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return opened


def _run(command: list[str], working: str) -> tuple[int, str]:
    """Run a compiler; return its status and output. It leaves no processes, and files only in the directory."""
    environment = {**os.environ, "LC_ALL": "C", "TMPDIR": working}
    is_stopped, starting, started = threading.Event(), threading.Lock(), list[subprocess.Popen[bytes]]()

    def stop() -> None:
        is_stopped.set()
        with starting:
            for process in started:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    atexit.register(stop)  # before it starts: the interpreter may end at any time
    with starting:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment,
            process_group=0,
        )  # fmt: skip
        started.append(process)
    with process:
        try:
            if is_stopped.is_set():
                stop()
            output, _ = process.communicate(timeout=COMPILE_TIMEOUT)
        except BaseException:
            stop()
            raise
        finally:
            atexit.unregister(stop)
    if is_stopped.is_set():
        raise SystemExit  # this thread is in the background, and the process ends
    return process.returncode, output.decode(errors="replace")


def library_path(instructions: InstructionSet, compiler: list[str], directory: Path) -> Path:
    """Return where `build` puts the library; without a compiler, the newest whole one that any compiler has built.

    Compilers are identified by path, size and date, so that none is started to ask for its version.
    """
    prefix = f"kernels-{instructions.name}-{_hash([*OPTIONS, *(source.read_text() for source in SOURCES)])}"
    if compiler:
        program, status = os.path.realpath(compiler[0]), os.stat(compiler[0])
        command = [*compiler, *OPTIONS, *instructions.options]
        return directory / f"{prefix}-{_hash([*command, program, f'{status.st_size} {status.st_mtime_ns}'])}.so"
    for found in sorted(directory.glob(f"{prefix}-*.so"), key=lambda path: path.lstat().st_mtime, reverse=True):
        with contextlib.suppress(OSError):
            _check_file(found)
            return found
    wanted = os.environ.get("CXX") or "g++ or clang++"
    raise NoKernelsError(f"no C++ compiler was found ({wanted}; set CXX to use another one)")


def _check_private(path: Path) -> os.stat_result:
    """Raise OSError if a path is a symbolic link or if another user can write to it; return its status."""
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise PermissionError(f"{path} is a symbolic link")
    if status.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to another user")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"other users can write to {path}; to change that, run: chmod go-w '{path}'")
    return status


def _check_file(path: Path) -> None:
    """Raise OSError if a library is not private, not a file or not whole."""
    if not stat.S_ISREG(_check_private(path).st_mode):
        raise OSError(f"{path} is not a file")
    content, size = path.read_bytes(), hashlib.sha256().digest_size
    if hashlib.sha256(content[:-size]).digest() != content[-size:]:
        raise OSError(f"{path} is damaged")


def _private_cache() -> Path:
    """Return the cache directory; raise OSError or RuntimeError if it cannot be used."""
    directory = cache_directory()
    _check_private(directory)
    return directory


def _hash(texts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def openmp_runtimes() -> set[str]:
    """Return the paths of the OpenMP runtimes loaded in this process."""
    text = Path("/proc/self/maps").read_text()
    return {line.split()[-1] for line in text.splitlines() if OPENMP_RUNTIMES.search(line)}


def open_library() -> tuple[InstructionSet, ctypes.CDLL]:
    """Return the kernels for this processor, built if necessary.

    If the cache directory cannot be used, they are built for this process only, with a warning.
    """
    instructions, compiler = _this_machine(), find_compiler()
    try:
        return instructions, build(instructions, compiler, _private_cache())
    except (OSError, RuntimeError) as error:  # RuntimeError: no home directory
        obstacle = str(error)
    try:
        with tempfile.TemporaryDirectory(prefix="hf-specdec-") as working:  # a loaded library may be deleted
            library = build(instructions, compiler, Path(working))
    except OSError as error:
        raise BrokenKernelsError(f"they cannot be built or loaded ({error})") from error
    logger.warning("Compiled CPU kernels cannot be kept (%s); they are built for this process only.", obstacle)
    return instructions, library


def _this_machine() -> InstructionSet:
    return choose_instruction_set(processor_features(), platform.machine(), os.environ.get(VARIABLE, "").strip())


def _opened(path: Path) -> ctypes.CDLL:
    before = openmp_runtimes()
    library = ctypes.CDLL(str(path))
    names = [f"{name}_{bits}" for name in FUNCTIONS for bits in (16, 32)]
    for name in (*names, "choose_pairs", "read_memory"):
        if not hasattr(library, name):
            raise OSError(f"{path} has no function {name}")
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
                level = logging.WARNING if isinstance(error, BrokenKernelsError) else logging.INFO
                logger.log(level, "CPU kernels are not used: %s.", error)
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
        _check_file(library_path(_this_machine(), find_compiler(), _private_cache()))
    except (NoKernelsError, OSError, RuntimeError) as error:  # RuntimeError: no home directory
        return isinstance(error, NoKernelsError)
    return True


def load_or_none() -> ctypes.CDLL | None:
    """Return the library; None if this machine cannot use it."""
    try:
        return load_library()[1]
    except NoKernelsError:
        return None


def is_loaded() -> bool:
    """Whether the library is loaded; does not build it."""
    return bool(_loaded) and not isinstance(_loaded[0], str)


_LOCK = threading.Lock()
_running: list[threading.Thread] = []


def are_kernels_ready() -> bool:
    """Whether the kernels, or the reason why there are none, are known without compiling; if not, start to compile.

    The compiler runs in a thread and, on Linux, only on cores that would be idle otherwise. If the process ends first,
    the next one starts again; `compile="kernels"` and `warmup()` wait for it.
    """
    with _LOCK:
        if any(thread.is_alive() for thread in _running):
            return False
        if loads_at_once():
            return True
        _running[:] = [threading.Thread(target=_load, name="hf_specdec kernels", daemon=True)]
        _running[0].start()
        return False


def _load() -> None:
    if hasattr(os, "SCHED_IDLE"):  # Linux: this thread's, and that of the compiler that it starts
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    load_or_none()
