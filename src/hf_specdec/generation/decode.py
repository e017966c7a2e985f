"""The decoding loop: prefill, then draft, verify, accept and commit until every row has ended.

It is independent of concrete drafters, acceptance rules, caches and models.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hf_specdec.acceptance.accepted import Accepted, Launch, Stopwatch
from hf_specdec.acceptance.rules import decides_on_device
from hf_specdec.drafters.base import DraftContext
from hf_specdec.drafters.checked import start_session
from hf_specdec.generation.call import Call
from hf_specdec.host_sync import read
from hf_specdec.reporting.stats import SpeculationStats, TracedRow, TracedStep
from hf_specdec.trees.draft import PLAIN_STEP, Draft
from hf_specdec.trees.tree import ROOT_PARENT
from hf_specdec.verification.cache import layer_windows
from hf_specdec.verification.memory import one_time_work
from hf_specdec.verification.model import CACHE_FIELD, text_config
from hf_specdec.verification.step import Step, StepSeconds, Verified

MIN_REMAINING = 8
"""Minimum number of tokens that some unfinished row may still emit, for finished rows to leave the batch. Moving a row
copies its keys and values, which every forward reads: a few steps pay for it."""


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """Output of a speculative `generate()`: transformers' fields, and the call's statistics in `speculation`."""

    speculation: SpeculationStats | None = None


def decode(call: Call, config: GenerationConfig) -> SpeculativeOutput:
    """Run the loop until every row is finished (with `synced_gpus`, on all ranks), and return its output.

    A returned cache holds all columns of the returned sequences except the last, as in plain `generate()`.
    """
    target, text, loop = call.target, call.text, _Loop(call)
    with loop.time("total"), ExitStack() as stack:
        roots = loop.begin(config, stack)
        while call.has_unfinished(all(text.finished)):
            loop.begin_step()
            with loop.time("draft"):
                draft = loop.draft(roots)
            with loop.time("verify"):
                verified = target.verify(draft.tree)
            with loop.time("accept"):
                text.launch = loop.launcher(draft, verified)  # called before the rule's one read of the device
                accepted = call.rule(draft.tree, verified.logits, text)
                loop.collect(verified, accepted)
            with loop.time("commit"):
                target.commit(draft.tree, accepted)
            loop.observe(Step(draft, verified, accepted, loop.lap()))
            roots = accepted.next_token
        cache = loop.end()
    return loop.output(config, cache)


class _Loop:
    """What surrounds the stages of the loop: sizes, launches, times, outputs, and rows that leave the batch.

    If steps are decided on the device, the session launches the next draft before the host reads a step, see
    `acceptance/accepted.py`; `_stopwatch` then measures the launched work.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self._stats = SpeculationStats(call.drafter.method, forwards=call.forwards)
        self._stats.accepted_per_step = [[] for _ in call.text.finished]
        self._layers = _LayerOutputs(text_config(call.target.model), **call.layer_outputs)
        self._stopwatch: Stopwatch | None = None
        self._budget = self._upcoming = PLAIN_STEP
        self.time = self._stats.time

    def begin(self, config: GenerationConfig, stack: ExitStack) -> Tensor:
        """Process the prompt and start the session; return the first roots `[B]`.

        The stack gets what is to be done when the call ends, also after an error.
        """
        call, target, needs = self._call, self._call.target, self._call.drafter.needs
        stack.callback(target.close)
        stack.enter_context(target.tapped(needs.feature_layers))
        wants_logits = needs.prompt_logits and not call.width  # torch's products of more rows round otherwise
        with self.time("prefill"):
            prefill = target.prefill(
                call.input_ids, config, call.model_kwargs, prompt_logits=wants_logits,
                window=call.drafter.feature_window(call.config),
            )  # fmt: skip
            roots = call.text.begin(prefill.logits[:, -1])
            self._layers.add_prompt(prefill)
        call.text.stream(call.streamer)
        with self.time("draft"):
            width, padding = call.input_ids.shape[1], target.padding
            prompt = call.model_kwargs["inputs_embeds"] if not width else call.input_ids
            launches = decides_on_device(call.rule, call.text, roots.device)
            context = DraftContext(
                input_ids=call.input_ids,
                padding=None if padding is None else padding.last(prompt.shape[1]),
                roots=roots,
                features=prefill.features,
                # not those of the last chunk alone
                logits=prefill.logits if wants_logits and prefill.logits.shape[1] == width else None,
                launches=launches,
                step_costs=call.controller.step_costs if needs.step_costs else None,
                tokens_left=call.text.num_remaining,
                processors=call.processors,
            )
            self._session = start_session(call.drafter, target, context, call.config)
            self._stopwatch = Stopwatch(roots.device) if launches else None
        stack.callback(self._session.close)
        self._decodes_on_cpu = roots.device.type == "cpu"
        self._begin = time.perf_counter()
        return roots

    def begin_step(self) -> None:
        """Choose the budgets of this step and of the next one; note counts and times before the step.

        No draft crosses a bound of the model's forward. On a CPU, where every node costs time, none is deeper than
        rows may still emit; elsewhere another depth is another graph.
        """
        call, target, text = self._call, self._call.target, self._call.text
        self._begun = time.perf_counter() - self._begin
        self._before = list(text.num_generated), self._stats.stage_seconds, one_time_work()
        reach = target.reach(range(len(text.finished)) if text.lockstep else text.active_rows)
        left = text.num_remaining - 1
        deepest = min(left, reach) if left < 1 or self._decodes_on_cpu else reach
        widest = reach + 1 if target.bounds.counts_slots else None
        self._budget = call.controller.next().no_deeper(deepest, widest) if deepest > 0 else PLAIN_STEP
        self._upcoming = self._budget.no_deeper(deepest - 1, widest)

    def draft(self, roots: Tensor) -> Draft:
        """Return the session's draft as far as the target can verify it; the roots alone in a plain step."""
        target, text = self._call.target, self._call.text
        draft = target.admit(Draft.plain(roots) if self._budget.is_plain else self._session.propose(self._budget))
        if text.lockstep and text.padded_rows:
            return draft.with_repeated(text.pad_token_id, text.padded(roots.device))
        return draft

    def launcher(self, draft: Draft, verified: Verified) -> Launch | None:
        """Return a function that launches the next draft, given the accepted tokens on the device."""
        if self._stopwatch is None or self._upcoming.is_plain:
            return None
        stopwatch = self._stopwatch

        def launch(unread: Accepted) -> Sequence[Tensor]:
            with stopwatch:
                return self._session.launch(Step(draft, verified, unread), self._upcoming)

        return launch

    def collect(self, verified: Verified, accepted: Accepted) -> None:
        """Add the step's layer outputs, before it is committed; count launched work as drafting."""
        self._call.text.launch = None
        self._layers.add(verified, accepted, self._call.target.start)
        if self._stopwatch is not None:
            self._stats.move_seconds(self._stopwatch.take(), "accept", "draft")
        self._drafted = accepted.num_drafted

    def lap(self) -> StepSeconds:
        """Count the step's tokens, and return how long its stages took."""
        generated, seconds, noted = self._before
        self._stats.add_step(map(operator.sub, self._call.text.num_generated, generated), self._drafted)
        draft, verify, rest = map(operator.sub, self._stats.stage_seconds, seconds)
        return StepSeconds(draft, verify, rest, self._call.target.active_share, usual=one_time_work() == noted)

    def observe(self, step: Step) -> None:
        """Show a step to the trace, the streamer, the session and the controller; leave out rows that have ended.

        The time that the session takes counts as drafting. Rows stay if their outputs are needed or few tokens remain.
        """
        call, target, text = self._call, self._call.target, self._call.text
        if call.config.trace:
            self._stats.trace.append(_traced(step, call.drafter.method, self._begun))
        text.stream(call.streamer)
        if all(text.finished):
            return
        begin = time.perf_counter()
        with self.time("draft"):
            self._session.observe(step)
        step.seconds.draft += time.perf_counter() - begin
        call.controller.observe(step)
        needed = call.returns_cache or text.lockstep or call.width  # with fewer rows, the kernels may be others
        if not needed and text.num_remaining >= MIN_REMAINING and any(text.finished):
            target.keep_rows(text.active_rows)

    def end(self) -> Any:
        """End the stream; return the cache if the caller wants it."""
        call, cache = self._call, None
        if call.returns_cache:
            call.target.equalize_row_lengths(call.text.new_tokens, call.text.pad_token_id)
            cache = call.target.hand_back()
        if call.streamer is not None:
            call.streamer.end()
        return cache

    def output(self, config: GenerationConfig, cache: Any) -> SpeculativeOutput:
        """Return the output of the call, with its statistics."""
        text, stats, layers = self._call.text, self._stats, self._layers
        stats.num_generated_tokens = sum(text.num_generated)
        stats.control = {**self._call.controller.report(), **self._session.report()}
        return SpeculativeOutput(
            sequences=text.sequences(),
            scores=tuple(text.scores) if config.output_scores else None,
            logits=tuple(text.logits) if config.output_logits else None,
            hidden_states=None if layers.hidden_states is None else tuple(layers.hidden_states),
            attentions=None if layers.attentions is None else tuple(layers.attentions),
            speculation=stats,
            **{CACHE_FIELD: cache},
        )


class _LayerOutputs:
    """Hidden states and attentions, one entry per emitted token as in plain `generate()`; None if unwanted.

    The entry of the first token is the prompt's, `[B, P, D]` and `[B, H, P, slots]` per layer; that of any other token
    is the tree node's after which it was chosen, with one row, and with the slots of the text up to this token.
    """

    def __init__(self, config: Any, *, hidden_states: bool, attentions: bool) -> None:
        self._windows = layer_windows(config) if attentions else []
        self.hidden_states: list[tuple[Tensor, ...]] | None = [] if hidden_states else None
        self.attentions: list[tuple[Tensor | None, ...]] | None = [] if attentions else None

    def add_prompt(self, prefill: Verified) -> None:
        """Add the outputs of the prompt as the entry of the first token."""
        if self.hidden_states is not None and prefill.hidden_states is not None:
            self.hidden_states.append(prefill.hidden_states)
        if self.attentions is not None and prefill.attentions is not None:
            self.attentions.append(tuple(map(self._within, range(len(prefill.attentions)), prefill.attentions)))

    def add(self, verified: Verified, accepted: Accepted, start: int) -> None:
        """Add the entries of one step's tokens; its paths have the same length in all rows (lockstep).

        `start` is the cache slot of the root, before the step is committed.
        """
        if self.hidden_states is None and self.attentions is None:
            return
        rows = torch.arange(len(accepted.nodes), device=accepted.path.device)
        for place in range(max(accepted.counts)):
            nodes = accepted.path[:, place]
            if self.hidden_states is not None and verified.hidden_states is not None:
                # [..., B, N, D]: Gemma 3n's states have a leading dimension
                states = (layer[..., rows, nodes, :][..., None, :] for layer in verified.hidden_states)
                self.hidden_states.append(tuple(states))
            if self.attentions is not None and verified.attentions is not None:
                slots = [[*range(start), *(start + node for node in path[: place + 1])] for path in accepted.nodes]
                index = torch.tensor(slots, dtype=torch.long, device=rows.device)[:, None]
                found = []
                for layer, weights in enumerate(verified.attentions):
                    if weights is not None:  # [B, H, S] after the node, of which the text's slots are gathered
                        weights = weights[rows, :, nodes]
                        slot = index.to(weights.device).expand(-1, weights.shape[1], -1)
                        weights = self._within(layer, weights.gather(-1, slot)[:, :, None])
                    found.append(weights)
                self.attentions.append(tuple(found))

    def _within(self, layer: int, weights: Tensor | None) -> Tensor | None:
        """Cut weights `[B, H, N, slots]` of a sliding-window layer to the columns that transformers' cache would hold.

        Unchanged: other layers, None, and square weights (a whole prompt).
        """
        window = self._windows[layer] if layer < len(self._windows) else None
        if weights is None or window is None or weights.shape[-1] == weights.shape[-2]:
            return weights
        return weights[..., -(window - 1 + weights.shape[-2]) :]


def _traced(step: Step, method: str, begin: float) -> TracedStep:
    """Return a step's trees, probabilities and emitted tokens, copied to the host in several transfers.

    Calls without a trace avoid these transfers. `method` is the source of nodes without one; `begin` counts seconds
    from the start of the decoding loop (after the prefill).
    """
    draft, logits, acceptance = step.draft, step.verification.logits, step.acceptance
    tokens, parents = draft.tree.tokens, draft.tree.parents.expand(draft.tree.tokens.shape)
    best = logits.max(-1).indices.to(tokens.device)
    log_probs = logits.log_softmax(-1, dtype=torch.float32).to(tokens.device)
    row_indices = torch.arange(len(tokens), device=tokens.device)[:, None]
    node_log_probs = log_probs[row_indices, parents.clamp(min=0), tokens].where(parents != ROOT_PARENT, 0.0)
    all_tokens, all_parents, choices = read(tokens, parents, best)
    target_probs = node_log_probs.exp().tolist()
    draft_probs = None if draft.log_probs is None else draft.log_probs.exp().tolist()
    rows = []
    for row, row_tokens in enumerate(all_tokens):
        sources = draft.sources[row] if draft.sources is not None else ()
        rows.append(
            TracedRow(
                tokens=row_tokens,
                parents=all_parents[row],
                draft_probs=None if draft_probs is None else draft_probs[row],
                target_probs=target_probs[row],
                choices=choices[row],
                sources=[*sources, *[method] * (len(row_tokens) - len(sources))],
                path=list(acceptance.nodes[row]),
                emitted=list(acceptance.emitted[row]),
            )
        )
    return TracedStep(rows, begin, step.seconds.draft, step.seconds.verify, step.seconds.rest)
