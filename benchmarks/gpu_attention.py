"""Items of `gpu.py` that run single forwards: environment, SDPA kernels, verification, captures, inductor."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from importlib import metadata
from typing import Any

import gpu_items
from gpu_items import (
    ARCHITECTURES,
    Kit,
    captured_runner,
    copy_bandwidth,
    distance,
    free_mebibytes,
    largest,
    module_of,
    prefilled,
    seconds_of,
    synchronize,
    verify_often,
)

NODES = (1, 8, 32, 64)
CONTEXTS = (512, 2048, 8192)
HEADS = {"query": 32, "shared": 8, "dim": 128}
"""Heads of an 8B model's attention, and their dimension."""
LAYERS, FORWARDS, GROUPS = 32, 16, 3
"""Attention layers per forward, forwards timed together as a group, and number of groups."""
LONGEST = 1.0
"""Seconds after which no further group is timed; kernels that recompile for every length are slow."""
KERNELS = {
    "flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "cudnn": "CUDNN_ATTENTION", "math": "MATH",
}  # fmt: skip
PACKAGE = "hf_specdec"
NAME_LENGTH, SLOWEST = 80, 14
"""Characters kept of an operation's name, and number of operations reported, the slowest first."""
FEWER_LAYERS = (2, 4)
"""Layers of the models that inductor compiles; times are extrapolated linearly to 32 layers."""
AFTER_A_FAILURE = "after a failure"
"""Name of the part of the capture matrix that makes a capture fail."""


def environment(kit: Kit) -> None:
    """Report versions, device, the order in which SDPA tries its kernels, and the copy bandwidth."""
    import torch

    device = kit.device
    module = module_of(device)
    names = ("torch", "transformers", "triton", "accelerate", "pytest", "nvidia-cudnn-cu13", "nvidia-cublas")
    kit.row(python=sys.version.split()[0], **{name: version_of(name) for name in names})
    kit.row(
        device=module.get_device_name(), capability=list(module.get_device_capability()), cuda=torch.version.cuda,
        cudnn=torch.backends.cudnn.version(), memory=module.get_device_properties(0).total_memory,
        sdpa_order=sdpa_order(), cores=os.cpu_count(),
    )  # fmt: skip
    kit.row(copy_bytes_per_second=copy_bandwidth(device))


def version_of(name: str) -> str | None:
    """Return the version of a distribution, None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def sdpa_order() -> list[str] | str:
    """Return the names of SDPA's kernels in the order it tries them, or the error if torch does not expose it."""
    from torch.nn.attention import SDPBackend

    try:
        import torch

        names = {int(backend): name for name, backend in SDPBackend.__members__.items()}
        return [names.get(number, str(number)) for number in torch._C._get_sdp_priority_order()]
    except (AttributeError, RuntimeError, TypeError) as error:  # a private function
        return f"unknown: {error}"


# ----------------------------------------------------------------------------------------------- attention


class Attention:
    """Attention of one layer of an 8B model over a cache, with any kernel and number of keys.

    Queries that share keys are packed as rows of one head, as the package passes them to SDPA.

    Args:
        device: Device of the tensors.
        nodes: Queries per head.
        slots: Slots of the cache.
    """

    def __init__(self, device: Any, nodes: int, slots: int) -> None:
        import torch

        torch.manual_seed(0)
        sizes = {"device": device, "dtype": torch.bfloat16}
        heads, shared, dim = HEADS["query"], HEADS["shared"], HEADS["dim"]
        self.query = torch.randn(1, heads, nodes, dim, **sizes)
        self.packed = self.query.reshape(1, shared, heads // shared * nodes, dim)
        self.keys, self.values = (torch.randn(1, shared, slots, dim, **sizes) for _ in range(2))

    def seen(self, length: int) -> Any:
        """Return the causal mask `[1, 1, N, S]` of a chain whose nodes are the last of `length` keys."""
        import torch

        nodes = torch.arange(self.query.shape[2], device=self.query.device)
        return (torch.arange(length, device=nodes.device) <= nodes[:, None] + length - len(nodes))[None, None]

    def step(self, name: str, length: int) -> Callable[[], Any]:
        """Return a function that runs the attention of all layers of a forward, which share one mask."""
        import torch

        from hf_specdec.verification.tree_attention import AttentionContext

        kind, groups = "full_attention", HEADS["query"] // HEADS["shared"]
        whole = frozenset([kind]) if self.query.shape[2] == 1 else frozenset()
        forward = AttentionContext({kind: self.seen(length)}, whole)
        keys, values = self.keys[:, :, :length], self.values[:, :, :length]
        attend = torch.nn.functional.scaled_dot_product_attention

        def run() -> Any:
            if name == PACKAGE:
                return [forward.attend(kind, self.query, keys, values, None) for _ in range(LAYERS)][-1]
            mask = None if name == "flash" else forward.packed(kind, groups, self.query.dtype)  # flash takes no mask
            return [attend(self.packed, keys, values, attn_mask=mask) for _ in range(LAYERS)][-1]

        return run

    def error(self, name: str, length: int) -> float:
        """Compare a kernel's output with the math kernel's in float32."""
        import torch

        found = self.step(name, length)()
        if name == PACKAGE:  # as [B, N, H, D]
            found = found.transpose(1, 2).reshape(self.packed.shape)
        seen = self.seen(length) if name != "flash" else torch.ones_like(self.seen(length))
        mask = torch.zeros(seen.shape, device=seen.device).masked_fill(~seen, -torch.inf)
        groups = HEADS["query"] // HEADS["shared"]
        with kernel("math"):
            wanted = torch.nn.functional.scaled_dot_product_attention(
                self.packed.float(), self.keys[:, :, :length].float(), self.values[:, :, :length].float(),
                attn_mask=mask.repeat(1, 1, groups, 1),
            )  # fmt: skip
        return distance(found, wanted)


def kernel(name: str) -> Any:
    """Restrict SDPA to one kernel; no restriction for the package's attention."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return nullcontext() if name == PACKAGE else sdpa_kernel(getattr(SDPBackend, KERNELS[name]))


def seconds_per_layer(attention: Attention, name: str, lengths: Sequence[int]) -> float:
    """Return the median seconds per layer over groups of forwards without synchronisation in between.

    Args:
        attention: The attention.
        name: The kernel.
        lengths: Number of keys of every forward, `FORWARDS` per group; the first group is a warm-up.
    """
    taken, begin, device = [], time.perf_counter(), attention.query.device
    for first in range(0, len(lengths), FORWARDS):
        steps = [attention.step(name, length) for length in lengths[first : first + FORWARDS]]
        synchronize(device)
        began = time.perf_counter()
        for step in steps:
            step()
        synchronize(device)
        taken.append((time.perf_counter() - began) / (len(steps) * LAYERS))
        if len(taken) > 1 and time.perf_counter() - begin > LONGEST:
            break
    return statistics.median(taken[1:])


def attention(kit: Kit) -> None:
    """Time SDPA's kernels and the package's attention with a fixed number of keys, and with one more per forward."""
    import torch

    device, worst, ours = kit.device, 0.0, {}
    for keys in CONTEXTS:
        for nodes in NODES:
            number = FORWARDS * (GROUPS + 1)
            layer = Attention(device, nodes, keys + number)
            for name in (PACKAGE, *KERNELS):
                about = {"kernel": name, "keys": keys, "nodes": nodes, "masked": name != "flash" and nodes > 1}
                try:
                    with torch.no_grad(), kernel(name):
                        fixed = seconds_per_layer(layer, name, [keys + number // 2] * number)
                        growing = seconds_per_layer(layer, name, range(keys, keys + number))
                        found = {"fixed_us": 1e6 * fixed, "growing_us": 1e6 * growing, "ratio": growing / fixed}
                        found["error"] = layer.error(name, keys)
                except RuntimeError as error:  # the kernel does not support this
                    kit.row(**about, refused=str(error)[:200])
                    continue
                kit.row(**about, **found)
                if name == PACKAGE:
                    worst = max(worst, found["ratio"])
                    ours[keys, nodes] = layer.step(name, keys)
    kit.bar("growing key length, times a fixed one: the package's attention", worst)
    for (keys, nodes), step in ours.items():
        kit.row(
            kernel=PACKAGE,
            keys=keys,
            nodes=nodes,
            operations=Counter(name for name, _ in device_operations(step, device)),
        )


# ----------------------------------------------------------------------------------------------- verification


def weight_bytes(model: Any) -> int:
    """Return the bytes of weights that a forward reads: all but the embedding, of which it reads few rows."""
    return sum(weight.nbytes for weight in model.parameters()) - model.get_input_embeddings().weight.nbytes


def captured_step(verify: Callable[[int], Any], width: int, runner: Any, device: Any) -> dict[str, Any]:
    """Capture a width; measure the time of the capture, the memory it keeps, and the time of a replay."""
    from hf_specdec.verification.graphs import CAPTURE_AFTER

    before, found, known = free_mebibytes(device), {"captured": False}, len(runner.captured_keys())
    for _ in range(CAPTURE_AFTER + 1):
        synchronize(device)
        begin = time.perf_counter()
        verify(width)
        synchronize(device)
        if len(runner.captured_keys()) > known:
            found = {"captured": True, "capture_seconds": time.perf_counter() - begin}
            break
    found["capture_mebibytes"] = before - free_mebibytes(device)
    found["captured_ms"] = 1000 * seconds_of(lambda: verify(width), device, 7)
    return found


def verify(kit: Kit) -> None:
    """Time verification with an 8B model of random weights, eager and captured, by nodes and context."""
    device = kit.device
    bandwidth, model = copy_bandwidth(device), kit.llama()
    floor, runner = 1000 * weight_bytes(model) / bandwidth, captured_runner(model)
    kit.row(weight_bytes=weight_bytes(model), copy_floor_ms=floor)
    far: list[float] = []
    slow: list[float] = []
    for context in sorted(CONTEXTS, reverse=True):  # longest first, so memory is allocated once
        with prefilled(model, None, NODES, context) as run:
            logits = {width: run(width) for width in NODES}
            eager = {width: 1000 * seconds_of(lambda width=width: run(width), device, 5, 1) for width in NODES}
            with kernel("math"):
                rounding = {width: distance(run(width), logits[width]) for width in NODES}
        with prefilled(model, runner, NODES, context) as run:
            for width in NODES:
                found = captured_step(run, width, runner, device)
                apart, times = distance(run(width), logits[width]), found["captured_ms"] / floor
                kit.row(
                    context=context, nodes=width, eager_ms=eager[width], distance=apart, rounding=rounding[width],
                    times_floor=times, **found,
                )  # fmt: skip
                far, slow = [*far, apart / max(rounding[width], 1e-6)], [*slow, times]
    kit.bar("distance of a replay from the eager forward, times that of SDPA's math kernel", largest(far))
    kit.bar("captured verification, times the copy floor", largest(slow))
    for key, step in runner._graphed._shapes.items():  # last, because profilers have crashed with graphs
        if step.replay is not None:
            operations = device_operations(step.replay, device)
            times = Counter()
            for name, seconds in operations:
                times[name[:NAME_LENGTH]] += 1000 * seconds
            kit.row(
                rows_width_bucket=key, graph_nodes=len(operations) or None, device_ms=sum(times.values()),
                slowest_ms=dict(times.most_common(SLOWEST)),
            )  # fmt: skip


def device_operations(run: Callable[[], Any], device: Any) -> list[tuple[str, float]]:
    """Return names and seconds of a function's device operations, for a replay those of its graph.

    The list is empty if the profiler shows nothing of this device.
    """
    import torch

    with torch.profiler.profile(activities=torch.profiler.supported_activities()) as profiled:
        run()
        synchronize(device)
    on_device = [event for event in profiled.events() if event.device_type != torch.autograd.DeviceType.CPU]
    return [(event.name, (event.time_range.end - event.time_range.start) / 1e6) for event in on_device]


def inductor(kit: Kit) -> None:
    """Capture verification compiled by inductor; measure it with few layers and extrapolate to 32."""
    from hf_specdec.verification.programs import CaptureError

    device, found = kit.device, {}
    for layers in FEWER_LAYERS:
        model = kit.llama(num_hidden_layers=layers)
        taken = {}
        for form in ("cuda_graph", "inductor"):
            begin = time.perf_counter()
            try:
                runner = captured_runner(model, form)
            except CaptureError as error:
                kit.row(layers=layers, form=form, refused=str(error)[:500])
                return
            taken[form] = {"seconds": time.perf_counter() - begin}
            with prefilled(model, runner, (1, 32), min(CONTEXTS)) as run:
                taken[form] |= {
                    f"ms_{width}": captured_step(run, width, runner, device)["captured_ms"] for width in (1, 32)
                }
            kit.row(layers=layers, form=form, **taken[form])
        found[layers] = taken
    few, more = FEWER_LAYERS
    for form in ("cuda_graph", "inductor"):
        slopes = {key: (found[more][form][key] - found[few][form][key]) / (more - few) for key in found[more][form]}
        whole = {key: found[more][form][key] + (32 - more) * slope for key, slope in slopes.items()}
        kit.row(form=form, per_layer=slopes, extrapolated_to_32_layers=whole)


# ----------------------------------------------------------------------------------------------- captures


@contextmanager
def captures() -> Iterator[list[tuple[str, tuple[int, ...]]]]:
    """Collect the captures made in this context: kind of step and shape."""
    from hf_specdec.verification.graphs import Graphed

    found: list[tuple[str, tuple[int, ...]]] = []
    original = Graphed._capture

    def noted(self: Any, step: Any) -> Any:
        replay = original(self, step)
        found.append((self._name, next(key for key, known in self._shapes.items() if known is step)))
        return replay

    Graphed._capture = noted
    try:
        yield found
    finally:
        Graphed._capture = original


def capture_after_a_failure(kit: Kit) -> None:
    """Check that captures work after the package refused one and after one failed on the device."""
    import torch

    from hf_specdec.verification.graph_backends import GRAPH_BACKENDS
    from hf_specdec.verification.graphs import REPLAY_TOLERANCE

    device, begin = kit.device, time.perf_counter()

    class ReadsTheDevice(torch.nn.Module):
        def forward(self, hidden: Any) -> Any:
            return hidden if (hidden.float().sum() < 1e30).item() else hidden + 1

    model = gpu_items.tiny("llama", device)
    norm = model.model.norm
    model.model.norm = torch.nn.Sequential(norm, ReadsTheDevice())
    runner = captured_runner(model)
    verify_often(model, runner, (1, 8), 40, 4)
    refused, number, failed = not runner.captured_keys(), torch.ones(8, device=device), ""
    try:
        GRAPH_BACKENDS[device.type](device).capture(lambda: number.add_(number.sum().item()))
    except Exception as error:  # the type depends on the driver
        failed = f"{type(error).__name__}: {str(error)[:300]}"
    model.model.norm = norm
    runner = captured_runner(model)
    once, often = (verify_often(model, runner, (1, 8), 40, times) for times in (1, 6))
    apart = largest(distance(often[width], once[width]) for width in once)
    drawn = float(torch.randn(8, device=device).abs().sum())  # allocator and generators are usable
    kit.row(
        part=AFTER_A_FAILURE, refused=refused, failed_with=failed, distance=apart,
        works=len(runner.captured_keys()) == len(once) and apart <= REPLAY_TOLERANCE and drawn > 0,
        seconds=round(time.perf_counter() - begin, 2),
    )  # fmt: skip


def capture_matrix(kit: Kit) -> None:
    """Capture every architecture in a separate process, a few at a time; those with experts come last."""
    if kit.options.part is not None:
        return capture_after_a_failure(kit) if kit.options.part == AFTER_A_FAILURE else gpu_items.capture(kit)
    from gpu import run_part

    from hf_specdec.verification.graphs import REPLAY_TOLERANCE

    kit.device  # noqa: B018
    parts = (AFTER_A_FAILURE, *ARCHITECTURES)
    with ThreadPoolExecutor(max(1, min(6, (os.cpu_count() or 1) // 2))) as pool:
        list(pool.map(lambda part: run_part(kit, part, "part" if part == AFTER_A_FAILURE else "architecture"), parts))
    rows = kit.rows()
    models = {row["architecture"]: row for row in rows if "architecture" in row}
    wrong = [name for name, row in models.items() if "failed" in row or not row.get("distance", 0) <= REPLAY_TOLERANCE]
    kit.row(
        wrong=wrong, captured=[name for name, row in models.items() if row.get("captured")],
        refused=[name for name, row in models.items() if "refused" in row],
    )  # fmt: skip
    kit.bar("architectures that are wrong, or fail", len(wrong))
    after = next((row for row in rows if row.get("part") == AFTER_A_FAILURE), {})
    failed = after.get("failed_with", "the process")
    kit.bar(
        "captures that work after one that failed", int(after.get("works", False)) if failed else None,
        "the capture that should have failed on the device did not fail",
    )  # fmt: skip
