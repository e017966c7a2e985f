"""The library of compiled CPU kernels: chosen for the processor, built on first use and kept on disk.

It has a plain C interface and no torch headers, so that it compiles in a few seconds and one file serves all versions
of torch. It is kept in `atomic.cache_directory()`. File names contain a hash of source, compiler and options, and
files end with a hash of their content: only a whole file that no other user can write to is loaded. What was chosen by
measurement on this processor (`CHOICES`) is kept beside it: all processes compute the same bits. Nothing is built at
import.

On macOS and Windows the kernels use the OpenMP runtime that torch brings along and has loaded (neither comes with a
header, an import library or a compiler that looks for it). Both were built by rule and not tried.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import functools
import hashlib
import importlib
import json
import logging
import os
import platform
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import Any

import psutil
from filelock import FileLock, Timeout

from hf_specdec.atomic import PARTIAL, cache_directory, clear_partials, whole_file
from hf_specdec.errors import InvalidConfigError

logger = logging.getLogger(__name__)

VARIABLE = "HF_SPECDEC_KERNELS"
"""Environment variable: the best instruction set to use, by name, or `none` for no kernels, those of GPUs included."""
HEADERS = "attention.h", "blocks.h", "packed.h", "products.h", "recurrence.h", "search.h", "steps.h", "vectors.h"
SOURCES = tuple(Path(__file__).with_name(name) for name in ("kernels.cpp", *HEADERS))
"""The file to compile, and those that it includes."""
FUNCTIONS = (
    "multiply", "normalize", "run", "rotate", "attend", "attend_joined", "convolve", "recur", "best", "grow",
)  # fmt: skip
"""Functions for tensors, see `operations.functions_for`; their names end with the bits of bfloat16 and float32."""
CHOICES = ("choose_pairs", "choose_prefetch")
"""Functions that take 0 or 1 to choose how the library computes, or `MEASURE`, and return what it uses now."""
MEASURE = -1
"""Argument of `CHOICES`: the faster way on this processor."""
OTHERS = (*CHOICES, "read_memory", "limit_scratch", "has_threads")
EXPORTED = (*(f"{name}_{bits}" for name in FUNCTIONS for bits in (16, 32)), *OTHERS)
SYSTEM = sys.platform
OPTIONS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-w", "-shared")
SYSTEM_OPTIONS: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "linux": (["-fPIC"], ["-fopenmp"]),
    "darwin": (["-fPIC", "-undefined", "dynamic_lookup"], ["-Xclang", "-fopenmp"]),
    "win32": ([f"-Wl,-export:{name}" for name in EXPORTED], ["-Xclang", "-fopenmp"]),
}
"""Options of each system, and those for OpenMP; `-Xclang`: clang does not link a runtime, which torch has loaded."""
OPENMP_FUNCTIONS = (
    "__kmpc_barrier", "__kmpc_dispatch_deinit", "__kmpc_dispatch_init_4", "__kmpc_dispatch_init_8",
    "__kmpc_dispatch_next_4", "__kmpc_dispatch_next_8", "__kmpc_end_reduce", "__kmpc_end_reduce_nowait",
    "__kmpc_end_serialized_parallel", "__kmpc_for_static_fini", "__kmpc_for_static_init_4",
    "__kmpc_for_static_init_8", "__kmpc_fork_call", "__kmpc_global_thread_num", "__kmpc_push_num_threads",
    "__kmpc_reduce", "__kmpc_reduce_nowait", "__kmpc_serialized_parallel", "omp_get_num_threads",
    "omp_get_thread_num", "omp_get_wtime",
)  # fmt: skip
"""What clang's code may call of the runtime; on Windows they must be named."""
NOTHING = 'extern "C" void nothing() {}'
"""The code of a DLL of which only the import library is needed."""
COMPILE_TIMEOUT = 300
"""Seconds after which a compiler is stopped."""
LOCK_TIMEOUT = 20
"""Seconds to wait for another process that measures `CHOICES`, which takes less than one."""
OPENMP_RUNTIMES = re.compile(r"[/\\]lib(?:gomp|iomp5|omp)[^/\\]*\.(?:so|dylib|dll)")
OPENMP_ERROR = re.compile(r"openmp|kmpc|(?<!c)omp\b|-Xclang", re.IGNORECASE)
"""What a compiler or linker says, among other things, if it has no OpenMP."""
NO_COMPILER = "no C++ compiler was found"
"""Beginning of the reason if a compiler is missing."""
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
"""What macOS and Windows call machines, and what Linux does."""


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """A set of instructions that the kernels can be compiled for."""

    name: str
    machine: str  # as in `platform.machine()`
    features: frozenset[str]  # required, as in /proc/cpuinfo
    options: tuple[str, ...]  # of the compiler


_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
_AVX512_OPTIONS = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mavx2", "-mf16c")
INSTRUCTION_SETS = (
    InstructionSet(
        "avx512_bf16",
        "x86_64",
        _AVX512 | {"avx512_bf16", "avx512_vnni"},
        (*_AVX512_OPTIONS, "-mavx512bf16", "-mavx512vnni"),
    ),
    InstructionSet("avx512", "x86_64", _AVX512, _AVX512_OPTIONS),
    InstructionSet("avx2", "x86_64", _AVX2, ("-mavx2", "-mfma", "-mf16c")),
    InstructionSet("arm_bf16", "aarch64", frozenset({"bf16", "asimd"}), ("-march=armv8.2-a+bf16",)),
    InstructionSet("arm", "aarch64", frozenset({"asimd"}), ("-march=armv8-a",)),
)
"""Best first. Processors with AMX have AVX-512 with bfloat16; wide products are left to oneDNN, which uses AMX."""


class NoKernelsError(Exception):
    """Raised if this machine cannot use the kernels; the message is a clause, such as "no C++ compiler was found"."""


class BrokenKernelsError(NoKernelsError):
    """Raised if a machine that should have kernels cannot compile or load them."""


class _NoOpenMPError(BrokenKernelsError):
    """Raised if a compiler refuses OpenMP."""


@functools.cache
def processor_features() -> frozenset[str]:
    """Return the processor's features as Linux names them, as far as instruction sets need them on other systems."""
    with contextlib.suppress(OSError):
        found = re.search(r"^(?:flags|Features)\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        return frozenset(found[1].split()) if found else frozenset()
    return _features_by_torch()


def _features_by_torch() -> frozenset[str]:
    torch: Any = importlib.import_module("torch")
    if _machine() == "aarch64":
        return frozenset({"asimd", "bf16"} if _sysctl("hw.optional.arm.FEAT_BF16") == "1" else {"asimd"})
    level = torch.backends.cpu.get_cpu_capability()
    found = set(_AVX512 if level == "AVX512" else _AVX2 if level == "AVX2" else ())
    for name, has in (
        ("avx512_bf16", "_is_avx512_bf16_supported"),
        ("avx512_vnni", "_is_vnni_supported"),
        ("amx_bf16", "_is_amx_tile_supported"),
    ):
        if getattr(torch.cpu, has, bool)():
            found.add(name)
    return frozenset(found)


def _sysctl(name: str) -> str:
    """Return what macOS knows by a name; empty on other systems."""
    if SYSTEM != "darwin":
        return ""
    return subprocess.run(["/usr/sbin/sysctl", "-n", name], capture_output=True, text=True, check=False).stdout.strip()


def _machine() -> str:
    name = platform.machine()
    return MACHINES.get(name.lower(), name)


def _processor(instructions: InstructionSet) -> str:
    """Return a hash of the processor's model and the instruction set."""
    try:
        models = set(re.findall(r"^(?:model name|CPU part)\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE))
    except OSError:
        models = {_sysctl("machdep.cpu.brand_string") or platform.processor()}
    return _hash([instructions.name, *sorted(models), *sorted(processor_features())])


def check_switch() -> None:
    """Raise `NoKernelsError` if the environment variable switches all kernels off."""
    if os.environ.get(VARIABLE, "").strip() == "none":
        raise NoKernelsError(f"{VARIABLE} is 'none'")


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
        + ("" if features else ", or its features are not known")
    )


def find_compiler() -> list[str]:
    """Return path and options of a C++ compiler, empty if there is none: `$CXX` (`ccache g++`), `g++` or `clang++`.

    Only `clang++` can use torch's OpenMP runtime on macOS and Windows; there, GCC also misaligns vectors of 32 bytes.
    """
    wanted = os.environ.get("CXX", "").strip()
    try:
        commands = [shlex.split(wanted, posix=SYSTEM != "win32")] if wanted else [["clang++"]]
    except ValueError:  # quotes that are not closed
        return []
    if not wanted and SYSTEM not in ("darwin", "win32"):
        commands.insert(0, ["g++"])
    for name, *options in commands:
        if path := shutil.which(name.strip('"')):
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
        return _chosen(_opened(library), instructions, library)
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
    with tempfile.TemporaryDirectory(
        dir=directory, prefix=".build-", suffix=suffix, ignore_cleanup_errors=True
    ) as working:
        made = Path(working) / library.name
        for has_threads in [True, False] if _openmp() else [False]:
            try:
                _compile(compile_commands(compiler, instructions, made, has_threads), instructions, made)
                opened = _opened(made)  # what crashes here is not kept
                break
            except (OSError, _NoOpenMPError) as error:
                if not has_threads or not OPENMP_ERROR.search(str(error)):
                    raise
                logger.info("The CPU kernels are compiled without OpenMP: %s.", error)
        try:
            made.replace(library)
        except PermissionError:
            if SYSTEM != "win32" or not library.exists():  # there, a library that another process has loaded stays
                raise
    if SYSTEM != "win32":  # which cannot open directories
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return _chosen(opened, instructions, library)


def compile_commands(
    compiler: Sequence[str], instructions: InstructionSet, made: Path, has_threads: bool
) -> list[list[str]]:
    """Return the commands that compile the library to a file in an empty directory, with OpenMP or for one thread."""
    options, openmp = SYSTEM_OPTIONS.get(SYSTEM, SYSTEM_OPTIONS["linux"])
    commands = list[list[str]]()
    last = [*compiler, *OPTIONS, *options, *(openmp if has_threads else ()), *instructions.options, str(SOURCES[0])]
    if SYSTEM == "win32" and has_threads:
        # torch has the runtime but no import library for it: the linker writes one beside a DLL of the same name
        [runtime, *_] = _openmp()
        double, known = made.with_name(PureWindowsPath(runtime).name), ctypes.CDLL(runtime)
        given = [f"-Wl,-export:{name}=nothing" for name in OPENMP_FUNCTIONS if hasattr(known, name)]
        empty = str(made.with_name("nothing.cpp"))
        commands.append([*compiler, "-shared", "-nostdlib", "-Wl,-noentry", *given, empty, "-o", str(double)])
        last.append(str(double.with_suffix(".lib")))
    return [*commands, [*last, "-o", str(made)]]


def _compile(commands: list[list[str]], instructions: InstructionSet, made: Path) -> None:
    """Run commands that end with the library, and seal it with a hash of its content."""
    made.with_name("nothing.cpp").write_text(NOTHING)
    for command in commands:
        compiler = command[0]
        try:
            status, output = _run(command, str(made.parent))
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BrokenKernelsError(f"{compiler} failed ({error})") from error
        if "No space left on device" in output:
            raise OSError(errno.ENOSPC, "No space left on device", str(made.parent.parent))
        if status:
            lines = [line for line in output.splitlines() if re.search("error|cannot find|undefined", line)]
            reason = (lines or [output[:200]])[0].strip() or f"exit status {status}"
            kind = _NoOpenMPError if OPENMP_ERROR.search(reason) else BrokenKernelsError
            raise kind(f"{compiler} cannot compile them for {instructions.name} ({reason})")
    with made.open("r+b") as file:
        file.write(hashlib.sha256(file.read()).digest())
        file.flush()
        os.fsync(file.fileno())
    made.chmod(0o700)


def _run(command: list[str], working: str) -> tuple[int, str]:
    """Run a compiler; return its status and output. It leaves no processes, and files only in the directory."""
    environment = {**os.environ, "LC_ALL": "C", "TMPDIR": working, "TMP": working, "TEMP": working}
    is_stopped, starting, started = threading.Event(), threading.Lock(), list[subprocess.Popen[bytes]]()

    def stop() -> None:
        is_stopped.set()
        with starting:
            for process in started:
                with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                    if hasattr(os, "killpg"):
                        os.killpg(process.pid, signal.SIGKILL)
                    else:
                        for one in (*psutil.Process(process.pid).children(recursive=True), process):
                            one.kill()

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
    options = [SYSTEM, str(bool(_openmp())), *OPTIONS, *map(str, SYSTEM_OPTIONS.get(SYSTEM, ()))]
    prefix = f"kernels-{instructions.name}-{_hash([*options, *(source.read_text() for source in SOURCES)])}"
    if compiler:
        program, status = os.path.realpath(compiler[0]), os.stat(compiler[0])
        command = [*compiler, *OPTIONS, *instructions.options]
        return directory / f"{prefix}-{_hash([*command, program, f'{status.st_size} {status.st_mtime_ns}'])}.so"
    unusable = ""
    for found in sorted(directory.glob(f"{prefix}-*.so"), key=lambda path: path.lstat().st_mtime, reverse=True):
        try:
            _check_file(found)
            return found
        except OSError as error:
            unusable = f", and {error}"
    wanted = os.environ.get("CXX") or "g++ or clang++"
    raise NoKernelsError(f"{NO_COMPILER} ({wanted}; set CXX to use another one){unusable}")


def _check_private(path: Path) -> os.stat_result:
    """Raise OSError if a path is a symbolic link or if another user can write to it; return its status."""
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise PermissionError(f"{path} is a symbolic link")
    if SYSTEM == "win32":  # its modes say nothing; other users cannot write to a home directory
        return status
    if status.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to another user")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"other users can write to {path}; to change that, run: chmod go-w '{path}'")
    return status


def _private_content(path: Path) -> bytes:
    """Return the content of a private file; raise OSError if it is not one."""
    if not stat.S_ISREG(_check_private(path).st_mode):
        raise OSError(f"{path} is not a file")
    return path.read_bytes()


def _check_file(path: Path) -> None:
    """Raise OSError if a library is not private, not a file or not whole."""
    content, size = _private_content(path), hashlib.sha256().digest_size
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
    if SYSTEM == "linux":
        loaded = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
    elif SYSTEM == "darwin":
        importlib.import_module("torch")
        system = ctypes.CDLL(None)
        system._dyld_get_image_name.restype = ctypes.c_char_p
        names = [system._dyld_get_image_name(number) for number in range(system._dyld_image_count())]
        loaded = [os.fsdecode(name) for name in names if name]
    else:
        importlib.import_module("torch")
        loaded = [one.path for one in psutil.Process().memory_maps()]
    return {path for path in loaded if OPENMP_RUNTIMES.search(path)}


@functools.cache
def _gnu_openmp(kernels_are_loaded: bool) -> list[ctypes.CDLL]:
    """Return the loaded runtimes of GNU; the kernels may load one more."""
    paths = openmp_runtimes() if SYSTEM == "linux" else set[str]()
    runtimes = [ctypes.CDLL(path) for path in sorted(paths) if "libgomp" in path]
    return [runtime for runtime in runtimes if hasattr(runtime, "omp_pause_resource_all")]


def release_threads() -> None:
    """End the OpenMP threads that wait for the calling thread's next work, which starts them again (0.2 ms).

    They spin for milliseconds, so that the next product begins at once, but in GNU's runtime hardly as soon as it has
    more threads than there are cores. Every thread of Python that has computed something keeps its own: without this,
    a model that was loaded in the main thread would generate at half of its speed in another one.
    """
    for runtime in _gnu_openmp(is_loaded()):
        runtime.omp_pause_resource_all(1)  # omp_pause_soft


def _openmp() -> list[str]:
    """Return the loaded runtimes that clang's code can call, torch's first; on Linux compilers have their own."""
    if SYSTEM not in ("darwin", "win32"):
        return ["the compiler's"]
    return sorted((path for path in openmp_runtimes() if "libgomp" not in path), key=lambda path: "torch" not in path)


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
    return choose_instruction_set(processor_features(), _machine(), os.environ.get(VARIABLE, "").strip())


def _opened(path: Path) -> ctypes.CDLL:
    before = openmp_runtimes()
    if SYSTEM == "darwin":
        for runtime in _openmp()[:1]:
            ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)  # its functions are found by name
    library = ctypes.CDLL(str(path))
    for name in EXPORTED:
        if not hasattr(library, name):
            raise OSError(f"{path} has no function {name}")
    if before and openmp_runtimes() != before:  # two pools of threads would slow each other down
        raise NoKernelsError(f"torch uses another OpenMP runtime ({', '.join(sorted(before))}) than the compiler")
    if not library.has_threads():
        logger.warning("The CPU kernels use one thread: the compiler has no OpenMP (set CXX to use another one).")
    return library


def _chosen(library: ctypes.CDLL, instructions: InstructionSet, path: Path) -> ctypes.CDLL:
    """Return a library, kept at a path, with the choices that the first process on such a processor made."""
    kept = path.with_name(f"{path.stem}-{_processor(instructions)}.json")
    obstacle = ""
    try:
        chosen = _kept_choices(kept)
        if chosen is None:
            with FileLock(kept.with_suffix(".lock"), timeout=LOCK_TIMEOUT):
                chosen = _kept_choices(kept)
                if chosen is None:
                    measured = {name: _choice(library, name, MEASURE) for name in CHOICES}
                    with whole_file(kept) as partial:
                        partial.write_text(json.dumps(measured))
                        partial.chmod(0o600)
                    chosen = measured
    except (OSError, Timeout, InvalidConfigError, NotImplementedError) as error:
        chosen, obstacle = dict.fromkeys(CHOICES, MEASURE), f", for this process only ({error})"
    used = {name: _choice(library, name, choice) for name, choice in chosen.items()}
    logger.debug("The CPU kernels use %s%s.", used, obstacle)
    return library


def _choice(library: ctypes.CDLL, name: str, choice: int) -> int:
    function = getattr(library, name)
    function.argtypes, function.restype = [ctypes.c_int64], ctypes.c_int64
    return int(function(choice))


def _kept_choices(path: Path) -> dict[str, int] | None:
    """Return the choices that a file holds; None if they must be measured."""
    try:
        found = json.loads(_private_content(path))
        if set(found) == set(CHOICES) and all(found[name] in (0, 1) for name in CHOICES):
            return {name: int(found[name]) for name in CHOICES}
        raise ValueError(f"{path} holds other choices")
    except FileNotFoundError:
        pass
    except (OSError, ValueError, TypeError, RecursionError) as error:
        logger.debug("Choices of the CPU kernels are measured again: %s.", error)
    return None


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
