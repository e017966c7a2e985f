"""The decoding loop: prefill, then draft, verify, accept and commit until every row has ended.

It is independent of concrete drafters, acceptance rules, caches and models.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hf_specdec.acceptance.pipelining import Decision, Stopwatch
from hf_specdec.acceptance.rules import AcceptanceRule, decides_on_device
from hf_specdec.acceptance.transcript import Transcript
from hf_specdec.config import SpeculativeConfig
from hf_specdec.control.controller import Controller
from hf_specdec.drafters.base import DraftContext, Drafter, DraftSession
from hf_specdec.drafters.checked import start_session
from hf_specdec.generation.outputs import LayerOutputs
from hf_specdec.generation.tracing import trace_step
from hf_specdec.reporting.stats import EAGER, SpeculationStats
from hf_specdec.transformers_private import decode_optimizations
from hf_specdec.trees.draft import PLAIN_STEP, Draft
from hf_specdec.verification.memory import one_time_work
from hf_specdec.verification.model import CACHE_FIELD, text_config
from hf_specdec.verification.step import Step, StepSeconds, UnreadStep
from hf_specdec.verification.target import Target, Verification

MIN_REMAINING = 8
"""Minimum number of tokens that some unfinished row may still emit, for finished rows to leave the batch. Moving a row
copies its keys and values, which every forward reads: a few steps pay for it."""


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """Output of a speculative `generate()`: transformers' fields, and the call's statistics in `speculation`."""

    speculation: SpeculationStats | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """Everything that the decoding loop needs for one `generate()` call."""

    target: Target
    drafter: Drafter
    controller: Controller
    rule: AcceptanceRule
    config: SpeculativeConfig
    input_ids: Tensor  # [B, P]
    generation_config: GenerationConfig
    model_kwargs: dict[str, Any]
    streamer: BaseStreamer | None
    has_unfinished: Callable[[bool], bool]  # gets whether all rows are finished; True: continue, also for other ranks
    returns_cache: bool  # whether the cache is returned, or was passed by the caller and must be updated
    layer_outputs: dict[str, bool]  # whether to collect hidden_states and attentions
    forwards: str = EAGER  # see `SpeculationStats.forwards`


def speculate(call: Call, transcript: Transcript) -> SpeculativeOutput:
    """Run the decoding loop until every row is finished (with `synced_gpus`, on all ranks), and return its output.

    A returned cache holds all columns of the returned sequences except the last, as in plain `generate()`.

    Args:
        call: The call, whose target has an empty cache or the one passed by the caller.
        transcript: Gets every emitted token, and shows which rows are finished.
    """
    config, target = call.generation_config, call.target
    stats = SpeculationStats(call.drafter.method, forwards=call.forwards)
    stats.accepted_per_step = [[] for _ in transcript.finished]
    layers = LayerOutputs(text_config(target.model), **call.layer_outputs)
    with stats.time("total"), ExitStack() as stack:
        stack.callback(target.close)
        stack.enter_context(target.tapped(call.drafter.needs.feature_layers))
        with stats.time("prefill"):
            prefill = target.prefill(
                call.input_ids, config, call.model_kwargs, prompt_logits=call.drafter.needs.prompt_logits,
                window=call.drafter.feature_window(call.config),
            )  # fmt: skip
            roots = transcript.begin(prefill.logits[:, -1])
            layers.add_prompt(prefill)
        transcript.stream(call.streamer)
        stack.enter_context(decode_optimizations(target.model))
        with stats.time("draft"):
            context = _context(call, prefill, roots, launches=decides_on_device(call.rule, transcript, roots.device))
            session = start_session(call.drafter, target, context, call.config)
            stopwatch = Stopwatch(roots.device) if context.launches else None
        stack.callback(session.close)
        del prefill
        begin = time.perf_counter()
        while call.has_unfinished(all(transcript.finished)):
            begun = time.perf_counter() - begin
            step, seconds = _step(call, session, roots, transcript, stats, layers, stopwatch)
            if call.config.trace:
                stats.trace.append(trace_step(step, call.drafter.method, begun, seconds))
            roots = step.acceptance.next_token
            transcript.stream(call.streamer)
            if not all(transcript.finished):
                _learn(call, session, step, seconds, stats)
                _leave_out_finished(call, transcript)
        if call.returns_cache:
            target.equalize_row_lengths(transcript.new_tokens, transcript.pad_token_id)
        cache = target.hand_back() if call.returns_cache else None
        if call.streamer is not None:
            call.streamer.end()
    stats.num_generated_tokens = sum(transcript.num_generated)
    stats.control = {**call.controller.report(), **session.report()}
    return SpeculativeOutput(
        sequences=transcript.sequences(),
        scores=tuple(transcript.scores) if config.output_scores else None,
        logits=tuple(transcript.logits) if config.output_logits else None,
        hidden_states=layers.hidden_states,
        attentions=layers.attentions,
        speculation=stats,
        **{CACHE_FIELD: cache},
    )


def _step(
    call: Call, session: DraftSession, roots: Tensor, transcript: Transcript, stats: SpeculationStats,
    layers: LayerOutputs, stopwatch: Stopwatch | None,
) -> tuple[Step, StepSeconds]:  # fmt: skip
    """Run one step (draft, verify, accept, commit), count its tokens, and return it with its durations.

    With a stopwatch (given if steps are decided on the device), and unless the step is plain, the session launches the
    next draft before the host reads this step, see `acceptance/pipelining.py`.
    """
    target, generated, begun = call.target, list(transcript.num_generated), stats.stage_seconds
    # no draft crosses a bound of the model's forward; on a CPU, where every node costs time, none is deeper than rows
    # may still emit (elsewhere another depth is another graph)
    reach = target.reach(range(len(transcript.finished)) if transcript.lockstep else transcript.active_rows)
    left = transcript.num_remaining - 1
    deepest = min(left, reach) if left < 1 or roots.device.type == "cpu" else reach
    widest = reach + 1 if target.bounds.counts_slots else None
    budget = call.controller.next().no_deeper(deepest, widest) if deepest > 0 else PLAIN_STEP
    upcoming = budget.no_deeper(deepest - 1, widest)
    before = one_time_work()
    with stats.time("draft"):
        draft = target.admit(Draft.plain(roots) if budget.is_plain else session.propose(budget))
        if transcript.lockstep and transcript.padded_rows:
            draft = draft.with_repeated(transcript.pad_token_id, transcript.padded(roots.device))
    with stats.time("verify"):
        verification = target.verify(draft.tree)

    def launch(decision: Decision) -> Sequence[Tensor]:
        assert stopwatch is not None
        with stopwatch:
            return session.launch(UnreadStep(draft, verification, decision), upcoming)

    transcript.launch = None if stopwatch is None or upcoming.is_plain else launch
    with stats.time("accept"):
        acceptance = call.rule(draft.tree, verification.logits, transcript)
        layers.add(verification, acceptance, target.start)
    if stopwatch is not None:
        stats.move_seconds(stopwatch.take(), "accept", "draft")
    with stats.time("commit"):
        target.commit(draft.tree, acceptance)
    stats.add_step(map(operator.sub, transcript.num_generated, generated), acceptance.num_drafted)
    drafting, verifying, rest = map(operator.sub, stats.stage_seconds, begun)
    seconds = StepSeconds(drafting, verifying, rest, target.active_share, usual=one_time_work() == before)
    return Step(draft, verification, acceptance), seconds


def _learn(
    call: Call, session: DraftSession, step: Step, seconds: StepSeconds, stats: SpeculationStats
) -> None:  # fmt: skip
    """Show a step to the session, and to the controller, which counts the time that this took as drafting."""
    begin = time.perf_counter()
    with stats.time("draft"):
        session.observe(step)
    taken = seconds.draft + time.perf_counter() - begin
    call.controller.observe(step, replace(seconds, draft=taken))


def _leave_out_finished(call: Call, transcript: Transcript) -> None:
    """Make further forwards smaller if rows have ended, unless their outputs are needed or few tokens remain."""
    needed = call.returns_cache or transcript.lockstep
    if not needed and transcript.num_remaining >= MIN_REMAINING and any(transcript.finished):
        call.target.keep_rows(transcript.active_rows)


def _context(call: Call, prefill: Verification, roots: Tensor, *, launches: bool) -> DraftContext:
    """Return the inputs of a new draft session; prompt logits only if they cover the whole prompt.

    Args:
        call, prefill, roots: The call, the outputs of its prompt, and the first token `[B]` of each row.
        launches: Whether the session's `launch` is called, because steps are decided on the device.
    """
    width, padding = call.input_ids.shape[1], call.target.padding
    whole = call.drafter.needs.prompt_logits and prefill.logits.shape[1] == width
    return DraftContext(
        input_ids=call.input_ids,
        padding=None if padding is None else padding.last(width),
        roots=roots,
        features=prefill.features,
        logits=prefill.logits if whole else None,
        launches=launches,
        step_costs=call.controller.step_costs if call.drafter.needs.step_costs else None,
    )
