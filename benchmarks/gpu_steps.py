"""Items of `gpu.py` that call `generate()`: an oracle, a head, merged drafts, many calls, threads.

Models choose tokens by a wide margin (`make_sure` in `oracle.py`), so that answers can be compared in half precision.
Their tokens form one cycle, and prompts are parts of it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

from gpu_attention import captures
from gpu_items import Kit, free_mebibytes, module_of, seconds_of, synchronize

CONTEXT, NEW_TOKENS, TAUS, ORACLE_NODES = 512, 128, (1.0, 3.0, 4.5), 32
FORMS, HEAD = ("none", "cuda_graph"), "eagle"
TREE = {"num_draft_tokens": 32, "num_steps": 5, "top_k": 8}
DRAFT_VOCABULARY = 32000
"""As in published EAGLE-3 heads for 8B Llamas."""
FIRST_STEP, STEPS = 8, 20
"""First profiled step of a call, and number of profiled steps."""
AUTO_CALLS, AUTO_TOKENS = 3, 256
FEWER_LAYERS = 4
"""Layers of models whose calls are not timed."""
GROWING = ((100, 16), (400, 32), (900, 48), (1500, 64), (2000, 100))
"""Prompt length and new tokens of the calls in the item `calls`."""
ROWS = (1, 4, 1)
LENGTHS, COUNT, NUM_CALLS = (40, 90, 150, 200, 260, 300), 32, 100
"""Prompt lengths, new tokens and number of calls in the item `endurance`."""
WARM_UP = 4
"""Calls with each prompt before memory is measured."""
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel")
GRAPHS = ("cudaGraphLaunch", "cuGraphLaunch")
WAITS = (
    "cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cuStreamSynchronize",
    "cuCtxSynchronize",
)  # fmt: skip
BLOCKING = ("cudaMemcpy", "cudaMemcpy2D")
WINDOW = "profiled steps"

# ----------------------------------------------------------------------------------------------- tools


def cycle(model: Any) -> Any:
    """Return the tokens of a `make_sure` model in the order it generates them, on the CPU."""
    import torch

    return torch.randperm(model.config.vocab_size, generator=torch.Generator().manual_seed(0), device="cpu")


def prompts(model: Any, length: int, rows: int = 1) -> dict[str, Any]:
    """Return inputs of `generate()`; each row is another part of the cycle."""
    import torch

    order = cycle(model)
    places = torch.arange(length, device="cpu") + 3000 * torch.arange(rows, device="cpu")[:, None]
    ids = order[places % len(order)].to(model.device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def generated(model: Any, inputs: dict[str, Any], count: int, **how: Any) -> Any:
    """Generate greedily and return the new tokens `[B, count]`."""
    return model.generate(**inputs, max_new_tokens=count, do_sample=False, **how)[:, inputs["input_ids"].shape[1] :]


def add_head(model: Any) -> None:
    """Add an EAGLE-3 head with the sizes of published heads whose first drafted token is always correct.

    The layer is computed but adds nothing, since its output matrices are zero. The target's feature of x[t] reaches
    the lm_head unchanged, whose rows map it to x[t+2]; deeper levels draft the same token again.
    """
    import torch

    from hf_specdec import Eagle3Config, Eagle3Head
    from hf_specdec.drafters.eagle import EagleDrafter

    embedding, order = model.get_input_embeddings().weight, cycle(model)
    vocabulary, size = min(DRAFT_VOCABULARY, len(order)), model.config.hidden_size
    torch.manual_seed(0)
    with torch.device(embedding.device), torch.no_grad():
        config = Eagle3Config.for_target(model.config, draft_vocab_size=vocabulary)
        head = Eagle3Head._from_config(config, dtype=model.dtype)
        head.midlayer.self_attn.o_proj.weight.zero_()
        head.midlayer.mlp.down_proj.weight.zero_()
        head.fc.weight.zero_()
        head.fc.weight[:, -size:] = torch.eye(size, dtype=model.dtype)
        ids, places = order[:vocabulary].sort()
        before = embedding[order[places - 2].to(embedding.device)].float()  # of the token two places earlier
        head.lm_head.weight.copy_(torch.nn.functional.normalize(before, dim=-1))
    head.set_hot_token_ids(ids)
    model.add_drafter(EagleDrafter(head), HEAD)


@contextmanager
def around_steps(before: Callable[[Any], None], after: Callable[[Any], None]) -> Iterator[None]:
    """Call functions with the drafter's session before and after every step of every call."""
    from hf_specdec.generation import decode

    begin, lap = decode._Loop.begin_step, decode._Loop.lap

    def begin_step(loop: Any) -> None:
        before(loop._session)
        begin(loop)

    def ended(loop: Any) -> Any:
        after(loop._session)
        return lap(loop)

    decode._Loop.begin_step, decode._Loop.lap = begin_step, ended
    try:
        yield
    finally:
        decode._Loop.begin_step, decode._Loop.lap = begin, lap


def in_threads(*runs: Callable[[], Any]) -> list[Any]:
    """Call functions concurrently, each in a new thread, and return their results."""
    with ThreadPoolExecutor(len(runs)) as pool:
        return [future.result() for future in [pool.submit(run) for run in runs]]


# ----------------------------------------------------------------------------------------------- one call


def oracle(kit: Kit) -> None:
    """Time the steps of an 8B model of random weights with the oracle drafter."""
    import torch
    from oracle import OracleDrafter

    device, model, different, slowest = kit.device, kit.sure_llama(), 0, 0.0
    inputs = prompts(model, CONTEXT)
    answers = generated(model, inputs, NEW_TOKENS)
    first = seconds_of(lambda: generated(model, inputs, 1), device, 2, 1)
    whole = seconds_of(lambda: generated(model, inputs, NEW_TOKENS), device, 2, 0)
    kit.row(
        method="plain", first_token_ms=1000 * first, tokens_per_second=NEW_TOKENS / whole,
        milliseconds_per_token=1000 * (whole - first) / (NEW_TOKENS - 1),
    )  # fmt: skip
    for form in FORMS:
        for tau in TAUS:
            model.add_drafter(OracleDrafter(answers, tau))
            how = {"speculative": {"method": "oracle", "num_draft_tokens": ORACLE_NODES, "compile": form}}
            found: list[Any] = []
            run = partial(generated, model, inputs, NEW_TOKENS, **how)
            untimed = 3 if form == "cuda_graph" else 1  # captures all shapes
            whole = seconds_of(lambda run=run, found=found: found.append(run()), device, 3, untimed)
            stats = model.last_speculation
            per_step = 1000 * (whole - first) / stats.num_target_forwards
            wrong = sum(not torch.equal(answer, answers) for answer in found)
            kit.row(
                method="oracle", form=form, wanted_tau=tau, tau=stats.mean_accepted_length,
                tokens_per_second=NEW_TOKENS / whole, milliseconds_per_step=per_step, answers_equal=not wrong,
            )  # fmt: skip
            different += wrong
            slowest = max(slowest, per_step) if form == "cuda_graph" else slowest
    kit.bar("answers that differ from plain", different)
    kit.bar("milliseconds per captured step", slowest)


class Window:
    """Times, and optionally profiles, `STEPS` steps of one call from `FIRST_STEP` on.

    Args:
        device: Device of the model.
        profiles: Whether to run torch's profiler.

    Attributes:
        seconds: Duration of the steps, None before they have ended.
        events: Events of the profiler.
    """

    def __init__(self, device: Any, *, profiles: bool) -> None:
        self._device, self._profiles, self._count = device, profiles, -1
        self.seconds: float | None = None
        self.events: Sequence[Any] = ()

    def before(self, _session: Any) -> None:
        """Start or stop the window before a step."""
        self._count += 1
        if self._count == FIRST_STEP:
            self._start()
        elif self._count == FIRST_STEP + STEPS:
            self._stop()

    def _start(self) -> None:
        import torch

        if self._profiles:
            self._profile = torch.profiler.profile(activities=torch.profiler.supported_activities())
            self._profile.start()
        synchronize(self._device)
        self._range = torch.profiler.record_function(WINDOW)
        self._range.__enter__()
        self._begin = time.perf_counter()

    def _stop(self) -> None:
        self.seconds = time.perf_counter() - self._begin
        self._range.__exit__(None, None, None)
        if self._profiles:
            self._profile.stop()
            self.events = self._profile.events()


def counted(events: Sequence[Any], seconds: float) -> dict[str, Any]:
    """Count profiler events within the window, per step.

    Args:
        events: Events of the host and the device.
        seconds: Duration of the same number of steps without a profiler.
    """
    from torch.autograd import DeviceType

    window = next(event for event in events if event.name == WINDOW and event.device_type == DeviceType.CPU)
    begin, end = window.time_range.start, window.time_range.end
    inside = [event for event in events if begin <= event.time_range.start < end and event.name != WINDOW]
    calls = Counter(event.name for event in inside if event.device_type == DeviceType.CPU)
    of_device = [event.time_range for event in inside if event.device_type != DeviceType.CPU]
    busy = sum(place.end - place.start for place in of_device) / 1e6

    def per_step(chosen: Callable[[str], bool]) -> float:
        return sum(count for name, count in calls.items() if chosen(name)) / STEPS

    waits = {name: count / STEPS for name, count in calls.items() if name.startswith(WAITS) or name in BLOCKING}
    return {
        "launches_per_step": per_step(lambda name: name.startswith(LAUNCHES)),
        "graphs_per_step": per_step(lambda name: name.startswith(GRAPHS)),
        "copies_per_step": per_step(lambda name: name.startswith("cudaMemcpyAsync")),
        "reads_per_step": sum(waits.values()), "waits": waits, "device_operations_per_step": len(of_device) / STEPS,
        "device_ms_per_step": 1000 * busy / STEPS, "ms_per_step": 1000 * seconds / STEPS,
        "profiled_ms_per_step": (end - begin) / 1000 / STEPS, "idle": 1 - busy / seconds,
        "idle_beside_the_profiler": 1 - 1e6 * busy / (end - begin),
    }  # fmt: skip


def eagle(kit: Kit) -> None:
    """Profile steps with an EAGLE-3 head: launches, waits of the host, and idle time of the device."""
    device, model, found = kit.device, kit.sure_llama(), {}
    add_head(model)
    inputs = prompts(model, CONTEXT)
    for form in FORMS:
        run = partial(generated, model, inputs, NEW_TOKENS, speculative={"method": HEAD, "compile": form, **TREE})
        for _ in range(3 if form == "cuda_graph" else 1):
            run()
        windows = [Window(device, profiles=profiles) for profiles in (False, True)]
        for window in windows:
            with around_steps(window.before, lambda _session: None):
                run()
            if window.seconds is None:
                raise RuntimeError(f"a call had fewer than {FIRST_STEP + STEPS + 1} steps")
        assert windows[0].seconds is not None
        found = counted(windows[1].events, windows[0].seconds)
        kit.row(form=form, tau=model.last_speculation.mean_accepted_length, **found)
    reason = "" if found["device_operations_per_step"] else "torch's profiler shows nothing of this device"
    kit.bar("reads per step", None if reason else found["reads_per_step"], reason)
    kit.bar("idle share of the device", None if reason else found["idle"], reason)


# ----------------------------------------------------------------------------------------------- many calls


class Steps:
    """Records the steps, counted over several calls, in which graphs were captured and the head was queried.

    Args:
        captured: Captures so far, see `captures`.
    """

    def __init__(self, captured: Sequence[Any]) -> None:
        self._captured, self._known, self._queries, self._session = captured, 0, 0, None
        self.count = 0
        self.captured_at: list[int] = []
        self.queried_at: list[int] = []

    def before(self, _session: Any) -> None:
        """Remember the number of captures before a step."""
        self._known = len(self._captured)

    def after(self, session: Any) -> None:
        """Record a capture or query after a step; the session counts the queries of its call."""
        before = self._queries if session is self._session else 0
        queries = session.report()["queries"].get(HEAD, 0)
        if queries > before:
            self.queried_at.append(self.count)
        if len(self._captured) > self._known:
            self.captured_at.append(self.count)
        self.count, self._queries, self._session = self.count + 1, queries, session


def auto(kit: Kit) -> None:
    """Draft by "auto" with a head that is worth querying; record when graphs are captured and the head is queried."""
    kit.device  # noqa: B018
    model = kit.sure_llama()
    add_head(model)
    with captures() as found:
        steps = Steps(found)
        for number in range(AUTO_CALLS):
            begin, first = time.perf_counter(), steps.count
            with around_steps(steps.before, steps.after):
                generated(model, prompts(model, CONTEXT + 40 * number), AUTO_TOKENS, speculative="auto")
            stats = model.last_speculation
            kit.row(
                call=number, first_step=first, steps=steps.count - first, tau=stats.mean_accepted_length,
                seconds=time.perf_counter() - begin, control=stats.control,
                captured_at=[step for step in steps.captured_at if step >= first],
                queried_at=[step for step in steps.queried_at if step >= first],
            )  # fmt: skip
    waited = waits(steps.captured_at, steps.queried_at, steps.count)
    kit.row(captures=found, waited=waited)
    reason = "" if waited else "nothing was captured while steps ran"
    kit.bar("steps from a capture to the next query of the head", max(waited, default=None), reason)


def waits(captured_at: Sequence[int], queried_at: Sequence[int], steps: int, enough: int = 20) -> list[int]:
    """Return the number of steps from each capture to the next query.

    A capture without a later query counts to the end, or not at all if fewer than `enough` steps followed.

    Example: captures at 3 and 50, queries at 4 and 9, 60 steps: [1].
    """
    found = []
    for place in captured_at:
        later = [query - place for query in queried_at if query > place]
        if later:
            found.append(min(later))
        elif steps - place > enough:
            found.append(steps - place)
    return found


def calls(kit: Kit) -> None:
    """Generate with growing lengths and with batch sizes 1, 4 and 1: no shape may be captured twice.

    `warmup` for the largest batch and longest text runs first, because it allocates the memory that graphs write to.
    """
    from hf_specdec.generation.state import state_of

    device, model = kit.device, kit.sure_llama(num_hidden_layers=FEWER_LAYERS)
    add_head(model)
    how = {"method": HEAD, "compile": "cuda_graph", **TREE}
    longest, most = GROWING[-1]
    model.warmup(how, batch_size=max(ROWS), prompt_length=longest + most)
    with captures() as found:
        for rows in ROWS:
            for length, count in GROWING:
                known, begin = len(found), time.perf_counter()
                for _ in range(2):
                    generated(model, prompts(model, length, rows), count, speculative=how)
                synchronize(device)
                runner = state_of(model).programs["cuda_graph"].runner
                kit.row(
                    rows=rows, prompt=length, new_tokens=count, seconds=time.perf_counter() - begin,
                    captured=found[known:], moves=None if runner is None else runner.moves,
                )  # fmt: skip
    twice = {f"{what} {key}": times for (what, key), times in Counter(found).items() if times > 1}
    kit.row(captures=len(found), captured_more_than_once=twice)
    reason = "" if found else "nothing was captured"
    kit.bar("shapes captured twice", len(twice) if found else None, reason)


def endurance(kit: Kit) -> None:
    """Check that 100 calls, every fourth in a new thread, keep no memory; then generate in two threads at once."""
    import torch

    device, model = kit.device, kit.sure_llama(num_hidden_layers=FEWER_LAYERS)
    add_head(model)
    how = {"method": HEAD, "compile": "cuda_graph", **TREE}
    texts = [prompts(model, length) for length in LENGTHS]
    wanted = [generated(model, text, COUNT) for text in texts]

    def different(number: int) -> int:
        text, answer = texts[number % len(texts)], wanted[number % len(texts)]
        return int(not torch.equal(generated(model, text, COUNT, speculative=how), answer))

    def one_after_another(count: int) -> int:
        runs = [partial(different, number) for number in range(count)]
        return sum(run() if number % 4 else in_threads(run)[0] for number, run in enumerate(runs))

    def held() -> tuple[float, float]:
        synchronize(device)
        return module_of(device).memory_allocated(device) / 2**20, free_mebibytes(device)

    wrong = one_after_another(WARM_UP * len(texts))
    allocated, free = held()
    begin, wrong = time.perf_counter(), wrong + one_after_another(NUM_CALLS)
    seconds, (allocated_then, free_then) = time.perf_counter() - begin, held()
    kit.row(
        calls=NUM_CALLS, seconds=seconds, allocated_mebibytes=[allocated, allocated_then],
        free_mebibytes=[free, free_then], different=wrong,
    )  # fmt: skip
    kit.bar("MiB that 100 calls keep", max(allocated_then - allocated, free - free_then))
    begin = time.perf_counter()
    sides = ([*range(len(texts))], [*reversed(range(len(texts)))])
    both = in_threads(*(lambda side=side: sum(map(different, side)) for side in sides))
    kit.row(threads=2, seconds=time.perf_counter() - begin, different=sum(both), free_mebibytes=held()[1])
    kit.bar("answers that differ from plain", wrong + sum(both))
