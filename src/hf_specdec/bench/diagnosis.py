"""Diagnose a model on this device: whether it can verify trees, how long a forward takes, which method is fastest."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import psutil
import torch
from transformers import PreTrainedModel

from hf_specdec.bench.methods import PEERS
from hf_specdec.bench.questions import Question
from hf_specdec.bench.summary import summarise, warnings_of
from hf_specdec.bench.timing import Measurement, measure
from hf_specdec.config import PLAIN, ExecutionMode
from hf_specdec.control import costs
from hf_specdec.cpu.library import NO_COMPILER, VARIABLE, NoKernelsError, load_library, processor_features
from hf_specdec.cpu.quantized import PackedWeight
from hf_specdec.drafters.registry import methods
from hf_specdec.generation.call import GGUF_ROWS
from hf_specdec.generation.model_programs import current_program, unsupported_reason
from hf_specdec.generation.state import current_facts, state_of
from hf_specdec.reporting.stats import EAGER
from hf_specdec.transformers_private import attention_name
from hf_specdec.validation import Rule, require_integer
from hf_specdec.verification.graph_backends import GRAPH_BACKENDS
from hf_specdec.verification.model import execution_device, text_config
from hf_specdec.verification.probe import TargetFacts
from hf_specdec.verification.tree_attention import REPLACED

QUESTIONS = (
    Question("list", "prose", ("Give me five tips for sleeping better, with one sentence about each.",)),
    Question("sum", "reasoning", (
        "A train leaves at 9:40 and arrives at 12:15. It stops for 5 minutes at each of 4 stations. How long does it "
        "move? Think step by step.",
    )),
    Question("copy", "copying", (
        "Correct the spelling and repeat the whole text: The libary was build in 1890 by the town's first mayor. It "
        "had three rooms, a garden and a small tower, and every child of the town could lend two books a week. In "
        "the first winter the librarian counted nine hundred readers. The tower was closed after a storm in 1921.",
    )),
)  # fmt: skip
"""Questions of `diagnose`: the first answer repeats little, the second some phrases, the third copies the prompt."""

NEARLY = 0.95
"""Share of the best mean speed-up from which `"auto"` is recommended: it adapts to other texts, and three questions
do not show smaller differences."""

REPORTED_WIDTHS = (1, 2, 4, 8, 16, 32)
"""Numbers of tree nodes for which the verify forward is timed."""

HEAVY_DRAFTING = 0.5
"""Seconds of drafting relative to those of verifying, above which a drafter counts as too slow."""

MULTIPLYING = {
    "bfloat16": {"avx512_bf16", "amx_bf16", "bf16"}, "float16": {"avx512_fp16", "amx_fp16", "fphp", "asimdhp"},
}  # fmt: skip
"""Processor features, any of which multiplies in a dtype."""


@dataclass(frozen=True, slots=True)
class Advice:
    """A cause of slowness, and what to change."""

    problem: str
    change: str
    gain: float | None = None  # expected factor of tokens per second; None if it cannot be measured here
    # of the gain: "measured" in this run; "estimated" from its times; a "rule" has no number
    source: Literal["measured", "estimated", "rule"] = "rule"


@dataclass(frozen=True, slots=True)
class Drafting:
    """What a method did over all questions: seconds by stage, and the mean nodes of a verified tree."""

    draft: float
    verify: float
    rest: float  # accepting and committing
    nodes: float  # root included

    @classmethod
    def of(cls, rows: Sequence[Measurement]) -> Drafting:
        """Return the sums and the mean of a method's measurements."""
        draft, verify, *rest = (
            sum(row.stages.get(f"{stage}_seconds", 0.0) for row in rows)
            for stage in ("draft", "verify", "accept", "commit")
        )
        return cls(draft, verify, sum(rest), sum(row.nodes for row in rows) / len(rows))


@dataclass(frozen=True, slots=True)
class Circumstances:
    """Settings of a model and this machine that decide how fast its forwards are."""

    device: str  # type of the device on which it runs
    dtype: str  # of its weights, such as "bfloat16"
    wrong_attention: str  # name of an attention with which trees are slow; empty if it has none
    threads: int
    cores: int | None  # physical cores that this process may use; None if unknown
    features: frozenset[str]  # see `processor_features`; empty if unknown
    no_kernels: str  # why the CPU kernels cannot be used, as a clause; empty if they can, or on other devices
    no_program: str  # why its forward cannot be compiled or captured, as a clause; empty if no reason is known
    is_quantised: bool
    is_unpacked_gguf: bool  # whether transformers unpacked the weights of a GGUF file
    has_four_bits: bool

    @classmethod
    def of(cls, model: Any, facts: TargetFacts) -> Circumstances:
        """Return those of a model; builds the CPU kernels if the model is on a CPU and they were not built yet."""
        device, no_kernels = execution_device(model).type, ""
        mode: ExecutionMode = "cuda_graph" if device in GRAPH_BACKENDS else "kernels"
        if device == "cpu":
            try:
                load_library()
            except NoKernelsError as error:
                no_kernels = str(error)
        kept, method = state_of(model).programs.get(mode), getattr(model.config, "quantization_config", None)
        is_gguf = getattr(method, "quant_method", "") == "gguf"
        quantizer = getattr(model, "hf_quantizer", None)
        attention = attention_name(text_config(model)) if facts.unpacked_reason else REPLACED
        is_packed = any(isinstance(weight, PackedWeight) for weight in model.parameters())
        is_packed |= bool(getattr(quantizer, "packed_modules", None))
        return cls(
            device, str(model.dtype).removeprefix("torch."), attention if attention != REPLACED else "",
            torch.get_num_threads(), _usable_cores(), processor_features(), no_kernels,
            (kept.reason if kept else "") or unsupported_reason(model, facts, mode),
            is_quantised=is_packed or (quantizer is not None and not is_gguf),
            is_unpacked_gguf=is_gguf and not is_packed,
            has_four_bits=bool(getattr(method, "load_in_4bit", False)) or getattr(method, "bits", None) == 4,
        )  # fmt: skip

    def lacks(self, dtype: str) -> bool:
        """Whether the processor is known to have no instructions for a dtype."""
        return bool(self.features) and not self.features & MULTIPLYING[dtype]


def _usable_cores() -> int | None:
    cores = psutil.cpu_count(logical=False)
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    return cores and allowed and min(cores, allowed)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What a model can verify on this device, and how fast, as measured by `diagnose`."""

    supports_trees: bool  # otherwise only chains can be verified
    chain_only_reason: str  # empty if trees are supported
    uses_packed_attention: bool  # whether trees are verified without copying cached keys and values
    forward_seconds: Mapping[int, float]  # of an eager forward after 256 tokens, by number of nodes; batch size 1
    speed_up: Mapping[str, float]  # by method: ratio to plain decoding, mean over the questions
    worst: Mapping[str, float]  # by method: smallest speed-up of a question
    tau: Mapping[str, float]  # by method: tokens per target forward, mean over the questions
    forwards: Mapping[str, str] = field(default_factory=dict)  # by method, see `SpeculationStats.forwards`
    compiled_seconds: Mapping[int, float] = field(default_factory=dict)  # of `compiled`; empty without it
    drafting: Mapping[str, Drafting] = field(default_factory=dict)  # by method of this package
    advice: Sequence[Advice] = ()  # see `advise`
    warnings: Sequence[str] = ()  # see `warnings_of`

    @property
    def best(self) -> str:
        """Method with the highest mean speed-up, possibly `"plain"`; `"auto"` if it is at most 5% slower."""
        best = max(self.speed_up, key=lambda method: self.speed_up[method])
        if best != "plain" and self.speed_up.get("auto", 0.0) >= NEARLY * self.speed_up[best]:
            return "auto"
        return best

    @property
    def compiled(self) -> str:
        """How the compiled or captured forwards of the last such method run; empty if all methods ran eagerly."""
        return next((how for how in reversed([*self.forwards.values()]) if how not in ("", EAGER)), "")

    @property
    def gain_of_forwards(self) -> float:
        """How many times as fast a forward of one token is with `compiled`, thus without drafting; 1.0 without it."""
        return self.forward_seconds[1] / self.compiled_seconds[1] if self.compiled_seconds else 1.0


def diagnose(
    model: Any, tokenizer: Any, methods: Sequence[str], *, max_new_tokens: int = 64,
    report: Callable[[str], object] = lambda _line: None,
) -> Diagnosis:  # fmt: skip
    """Check what a model can verify, time its verify forward, and measure methods on three questions.

    Args:
        model: The target, with speculation attached and its drafters loaded.
        tokenizer: Its tokenizer.
        methods: Method names, as for `measure`; plain decoding is always measured.
        max_new_tokens: Length limit of each answer.
        report: Called with a line about the speed of each answer.
    """
    facts, rows = current_facts(model), list[Measurement]()
    for row in measure(model, tokenizer, QUESTIONS, methods, max_new_tokens=max_new_tokens):
        rows.append(row)
        report(f"{row.category}, {row.method}: {row.tokens_per_second:.1f} tokens/s")
    overall = {row["method"]: row for row in summarise(rows) if row["category"] == "all"}
    eager = costs.time_forwards(model, REPORTED_WIDTHS, context=256, facts=facts)
    found = Diagnosis(
        facts.supports_trees, facts.chain_only_reason, facts.uses_packed_attention, eager,
        speed_up={method: row["speed_up_mean"] for method, row in overall.items()},
        worst={method: row["speed_up_worst"] for method, row in overall.items()},
        tau={method: row["tau"] for method, row in overall.items()},
        forwards={row.method: row.forwards or EAGER for row in rows},
        drafting={
            method: Drafting.of([row for row in rows if row.method == method])
            for method in overall if method not in PEERS
        },
        warnings=warnings_of(rows),
    )  # fmt: skip
    mode: Any = found.compiled  # an `ExecutionMode`
    runner = current_program(model, facts, frozenset(), mode, requested=False) if mode else None
    if runner is not None:
        compiled = costs.time_forwards(model, REPORTED_WIDTHS, context=256, facts=facts, runner=runner)
        found = replace(found, compiled_seconds=compiled)
    return replace(found, advice=advise(found, Circumstances.of(model, facts)))


def advise(found: Diagnosis, here: Circumstances) -> tuple[Advice, ...]:
    """Return what to change, the largest gain first; advice without a known gain comes last."""
    advice = [*_of_dtypes(here), *_of_forwards(found, here), *_of_drafting(found, here)]
    return tuple(sorted(advice, key=lambda one: -(one.gain or 0.0)))


def _of_dtypes(here: Circumstances) -> Iterator[Advice]:
    on_cpu = here.device == "cpu"
    if on_cpu and here.no_kernels:
        if here.no_kernels.startswith(NO_COMPILER):
            change = "Install one: apt install g++, dnf install gcc-c++, or xcode-select --install."
        elif here.no_kernels.startswith(VARIABLE):
            change = f"Unset {VARIABLE}."
        else:
            change = 'Set CXX to another compiler if this one fails, or try compile="inductor".'
        yield Advice(f"The CPU kernels are off: {here.no_kernels}.", change)
    if on_cpu and here.dtype == "float16":
        slow = ", and this processor has no instructions for it" if here.lacks("float16") else ""
        other = "float32" if here.no_kernels and here.lacks("bfloat16") else "bfloat16"
        yield Advice(f"The weights are in float16, for which there are no CPU kernels{slow}.",
                     _dtype(other))  # fmt: skip
    if on_cpu and here.dtype == "bfloat16" and here.lacks("bfloat16") and (here.no_kernels or here.no_program):
        yield Advice("The weights are in bfloat16, for which this processor has no instructions, and no kernels run.",
                     _dtype("float32"))  # fmt: skip
    if on_cpu and here.is_unpacked_gguf and not here.no_kernels:
        yield Advice("The weights of the GGUF file are unpacked.",
                     "Load it with load_gguf if docs/quantized.md lists its kind of blocks.")  # fmt: skip
    elif on_cpu and here.dtype == "float32" and not here.is_quantised and (
        not here.no_kernels or here.features & MULTIPLYING["bfloat16"]
    ):  # fmt: skip
        yield Advice("The weights are in float32: each forward reads twice the bytes of bfloat16.",
                     _dtype("bfloat16") + " Its rounding may change answers.")  # fmt: skip
    if on_cpu and here.cores and here.threads != here.cores:
        yield Advice(f"Threads: {here.threads}. Physical cores that this process may use: {here.cores}.",
                     f"On an idle machine, torch.set_num_threads({here.cores}) or "
                     f"OMP_NUM_THREADS={here.cores}.")  # fmt: skip


def _dtype(name: str) -> str:
    return f"Load them with dtype=torch.{name}; doctor --dtype {name} measures it."


def _of_forwards(found: Diagnosis, here: Circumstances) -> Iterator[Advice]:
    if not found.supports_trees:
        yield Advice(f"Only chains are verified, with the model's own forward, because {found.chain_only_reason}.",
                     "Use a model that verifies trees (docs/models.md), or methods that draft chains.")  # fmt: skip
        return
    if here.wrong_attention:
        yield Advice(f"The attention is {here.wrong_attention!r}, so forwards are neither compiled nor captured.",
                     f'If the model supports it: model.set_attn_implementation("{REPLACED}").')  # fmt: skip
        return
    eager = [method for method in found.drafting if found.forwards[method] == EAGER]
    if not eager or (here.device == "cpu" and (here.no_kernels or here.dtype not in ("bfloat16", "float32"))):
        return
    if here.device != "cpu" and here.device not in GRAPH_BACKENDS:
        return
    name, what = ("kernels", "without the CPU kernels") if here.device == "cpu" else ("cuda_graph", "without graphs")
    reason = f", because {here.no_program}" if here.no_program else ""
    remove = "Remove that cause if you can, see docs/compile.md."
    change = remove if here.no_program else f'Set compile="{name}", or call model.warmup("auto") first.'
    did, faster = found.drafting[eager[0]], found.gain_of_forwards
    rest = did.draft + did.rest
    is_timed = here.device == "cpu" and faster > 1 and did.verify  # stages overlap on an accelerator
    gain = (rest + did.verify) / (rest + did.verify / faster) if is_timed else None
    problem = f"Forwards ran {what} ({', '.join(eager)}){reason}."
    yield Advice(problem, change, gain, "estimated" if gain else "rule")


def _of_drafting(found: Diagnosis, here: Circumstances) -> Iterator[Advice]:
    for method, did in found.drafting.items():
        if here.device != "cpu" and here.has_four_bits and did.nodes > GGUF_ROWS:
            yield Advice(f"{method!r} verifies {did.nodes:.0f} nodes a step; 4-bit products are made for few rows.",
                         f"Compare with num_draft_tokens={GGUF_ROWS}.")  # fmt: skip
        known = methods().get(method.split("+")[0])
        if here.device != "cpu" or not did.verify or known is None or not known.heads:
            continue  # stages overlap on an accelerator; only heads have trees of about the same size in every step
        if did.draft > HEAVY_DRAFTING * did.verify:
            gain = found.speed_up[found.best] / found.speed_up[method]
            pays = gain > 1 / NEARLY
            other = "plain generate()" if found.best == PLAIN else f"speculative={found.best!r}"
            lighter = "a head with a smaller vocabulary, or a smaller num_steps"
            yield Advice(
                f"Drafting with {method!r} takes {did.draft / did.verify:.1f} times as long as verifying.",
                f"Use {other}, {lighter}." if pays else f"Use {lighter}.",
                gain if pays else None, "measured" if pays else "rule",
            )  # fmt: skip
        seconds = found.forward_seconds if found.forwards[method] == EAGER else found.compiled_seconds
        table = costs.StepCosts(seconds or found.forward_seconds).table()
        price = table[min(max(round(did.nodes), 1), len(table)) - 1] / table[0]
        if price > found.tau[method]:
            yield Advice(
                f"A step of {method!r} verifies {did.nodes:.0f} nodes, which takes {price:.1f} times as long as one, "
                f"and gives {found.tau[method]:.1f} tokens.",
                "Set a smaller num_draft_tokens, or use 'auto', which measures costs.",
            )  # fmt: skip


def verify_seconds(
    model: PreTrainedModel, sizes: Sequence[int], *, context: int = 256, rows: int = 1
) -> dict[int, float]:
    """Return the median seconds of one forward of the model, by the number of drafted nodes that it verifies.

    The forwards are those of generation, with the same cache and masks, neither compiled nor captured. The trees are
    binary, or chains if the model supports no trees. Time on an idle machine.

    Args:
        model: The model; speculation need not be attached.
        sizes: Numbers of nodes, the root included: 1 is a plain step.
        context: Tokens of the text before the tree.
        rows: Batch size.

    Returns:
        Seconds by number of nodes. A step with n nodes pays if it emits more than `seconds[n] / seconds[1]` tokens;
        drafting itself takes time as well.

    Raises:
        InvalidConfigError: `sizes` is empty, or a number is below 1.
        UnsupportedModelError: The model can verify neither trees nor chains.

    Example:
        ```python
        seconds = verify_seconds(model, [1, 4, 16])
        print(f"16 nodes pay above {seconds[16] / seconds[1]:.2f} tokens per step")
        ```
    """
    Rule("a sequence of at least one number", bool).check("sizes", list(sizes))
    for size in sizes:
        require_integer("sizes", size, 1)
    require_integer("context", context, 1)
    require_integer("rows", rows, 1)
    return costs.time_forwards(model, sizes, context, rows=rows)
