"""`Call`, the record of one speculative `generate()` call, which the stages of transformers' `generate()` complete.

`plan_call` decides what does not depend on the prompt, `Call.set_target` what depends on its size, and `Call.set_text`
the rest. Everything unsupported is refused before the prompt is processed, see `generation/checks.py`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.streamers import BaseStreamer

from hf_specdec.acceptance import rules
from hf_specdec.acceptance.processors import is_rowwise
from hf_specdec.acceptance.transcript import Transcript
from hf_specdec.checkpoints.formats import SHARING_ASSISTANTS, drafts_in_parallel
from hf_specdec.config import AdaptiveConfig, SpeculativeConfig
from hf_specdec.control.controller import Controller, CostModelController, FixedController, TierController
from hf_specdec.control.costs import time_forwards
from hf_specdec.drafters.base import Drafter
from hf_specdec.drafters.checked import checked_limits
from hf_specdec.drafters.draft_model import DraftModelDrafter
from hf_specdec.drafters.gemma4_assistant import Gemma4AssistantDrafter
from hf_specdec.drafters.history import HistoryDrafter
from hf_specdec.drafters.hybrid import choose_drafter
from hf_specdec.drafters.pard import PardDrafter, fields_of
from hf_specdec.errors import InvalidConfigError, UnsupportedGenerationError, UnsupportedModelError
from hf_specdec.generation import checks
from hf_specdec.generation.checks import ASSISTED, PARD
from hf_specdec.generation.model_programs import captured_rule, compiled_drafter, current_program, kernels_pay
from hf_specdec.generation.state import (
    answer_history,
    current_costs,
    current_facts,
    measure_costs,
    rebind_if_changed,
    state_of,
)
from hf_specdec.reporting.stats import EAGER
from hf_specdec.transformers_private import has_unfinished, pad_token_id
from hf_specdec.trees.draft import Budget
from hf_specdec.verification.graph_backends import GRAPH_BACKENDS
from hf_specdec.verification.graphs import CAPTURE_AFTER, EXACT_WIDTH
from hf_specdec.verification.memory import ANSWER_SLOTS, bucket_of
from hf_specdec.verification.model import execution_device, text_config
from hf_specdec.verification.probe import TargetFacts
from hf_specdec.verification.programs import CaptureError
from hf_specdec.verification.runners import Runner, WeightsVersion
from hf_specdec.verification.target import Target
from hf_specdec.verification.trials import NO_TOKEN, ordinary_tokens

logger = logging.getLogger(__name__)

SHARED_NODES = 8
"""Maximum nodes of a merged tree, root included, if several processes generate together: they must choose the same
size, but the costs that each would measure differ."""
GGUF_ROWS = 8
"""Rows up to which transformers multiplies by packed GGUF weights as they are; for more it unpacks them."""


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments of `generate()` that select the drafter; `tokenizer` also serves stop strings."""

    speculative: Any
    assistant_model: Any = None
    tokenizer: Any = None
    assistant_tokenizer: Any = None

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Request:
        """Return what all arguments of `generate()` ask for; an assistant is removed from `kwargs`.

        A `Request` is returned unchanged: a model whose own `generate()` calls this one again passes it on.
        """
        if isinstance(kwargs["speculative"], Request):
            return kwargs["speculative"]
        checks.check_arguments(args[0] if args else kwargs.get("inputs", kwargs.get("input_ids")))
        if kwargs.get("assistant_model") is None:
            return cls(kwargs["speculative"])
        assistant = kwargs.pop("assistant_model"), kwargs.get("tokenizer"), kwargs.pop("assistant_tokenizer", None)
        return cls(kwargs["speculative"], *assistant)


@dataclass(slots=True)
class Call:
    """What was decided for one call. The mixin keeps it as `speculative` in the call's copy of the generation config.

    It refers to no generation config: a cycle would keep the cache's memory alive. Fields without a value are set by
    `plan_call`, those from `target` on by `set_target` and `set_text`.
    """

    model: PreTrainedModel
    config: SpeculativeConfig
    drafter: Drafter
    limits: Budget  # largest tree of any step
    rule: rules.AcceptanceRule
    facts: TargetFacts
    layer_outputs: dict[str, bool]  # whether to collect hidden_states and attentions
    runner: Runner | None = None  # verifies instead of the model's own forward
    forwards: str = EAGER  # how verify forwards run, see `SpeculationStats.forwards`
    width: int = 0  # see `Target.width`
    target: Target = field(init=False)
    controller: Controller = field(init=False)
    text: Transcript = field(init=False)
    input_ids: Tensor = field(init=False)  # [B, P]
    processors: LogitsProcessorList = field(init=False)
    model_kwargs: dict[str, Any] = field(init=False)
    streamer: BaseStreamer | None = field(init=False)
    returns_cache: bool = field(init=False)  # whether the cache is returned, or is the caller's and must be updated
    # gets whether all rows are finished; True: continue, also for other ranks
    has_unfinished: Callable[[bool], bool] = field(init=False)

    def use_programs(self, new_tokens: int, *, waits: bool = False) -> None:
        """Use compiled or captured forwards, as the config specifies and as far as they are possible.

        `compile="auto"` uses graphs, which are captured during generation, if the device supports them, and the
        kernels on a CPU as soon as `kernels_pay`, or at once if the call is exact; it never uses inductor, which takes
        longer to compile.
        """
        mode: Any = self.config.compile
        exact = self.config.exact
        has_graphs = execution_device(self.model).type in GRAPH_BACKENDS
        if mode == "auto" and has_graphs:
            mode = "cuda_graph"
        elif mode == "auto" and (exact or kernels_pay(self.model, new_tokens, waits=waits)):
            mode = "kernels"
        if mode in ("none", "auto"):
            return
        layers, requested = frozenset(self.drafter.needs.feature_layers), self.config.compile != "auto"
        try:
            self.runner = current_program(self.model, self.facts, layers, mode, requested=requested, required=exact)
            if exact and self.runner is not None and self.runner.inexact:
                raise CaptureError(self.runner.inexact)
        except CaptureError as error:
            raise UnsupportedGenerationError(
                f"exact=True needs a program with the CPU kernels or graphs, and the forward of "
                f"{type(self.model).__name__} has none that is exact: {error}.",
                "Drop `exact`.",
            ) from error
        self.drafter = compiled_drafter(self.model, self.drafter, mode)
        if self.runner is not None:
            self.forwards = mode
            if self.rule is rules.greedy and has_graphs:
                self.rule = captured_rule(self.model)

    def set_target(self, needed_slots: int, new_tokens: int) -> None:
        """Create the target, whose cache can hold prompt, answer and one tree, and the programs that run it."""
        self.use_programs(new_tokens)
        limit = self.config.max_cache_length
        reserve = ANSWER_SLOTS if limit is None else None
        wanted = {f"output_{output}": True for output, asked in self.layer_outputs.items() if asked}
        self.target = self.facts.new_target(self.model, limit or needed_slots, reserve, wanted, self.runner)
        self.target.width, self.target.is_exact = self.width, self.config.exact
        if self.config.exact and self.runner is not None and not self.runner.can_run(self.width, self.target.cache):
            raise UnsupportedGenerationError(
                "exact=True needs the memory of the model's graphs, which another call uses or `max_cache_length` "
                "replaces.",
                "Generate in one thread at a time, and leave `max_cache_length` None.",
            )

    def set_text(
        self, input_ids: Tensor, processors: LogitsProcessorList, criteria: StoppingCriteriaList,
        config: GenerationConfig, synced_gpus: bool, streamer: BaseStreamer | None, model_kwargs: dict[str, Any],
    ) -> None:  # fmt: skip
        """Check prompt and processors, and create the transcript, given the arguments of transformers' loop."""
        model, target, device = self.model, self.target, input_ids.device
        max_length = target.start + config.max_length
        target.bounds = target.bounds.within(max_length)
        embeds = model_kwargs.get("inputs_embeds")
        checks.check_prompt(self.config, target, input_ids, embeds, processors, max_length, synced_gpus=synced_gpus)
        self.input_ids, self.model_kwargs, self.streamer = input_ids, model_kwargs, streamer
        self.processors = processors
        returns_dict = bool(config.return_dict_in_generate)
        self.returns_cache = returns_dict or target.is_adopted
        self.has_unfinished = lambda finished: has_unfinished(model, finished, synced_gpus, device)
        self.text = Transcript(
            input_ids,
            processors,
            criteria,
            max_length=config.max_length,
            do_sample=config.do_sample,
            # rows of different lengths would need a final forward that other ranks do not run
            lockstep=target.lockstep
            or bool(target.bounds.switches)
            or (synced_gpus and self.returns_cache)
            or any(self.layer_outputs.values())
            or _needs_lockstep(config, processors, criteria),
            keep_scores=returns_dict and bool(config.output_scores),
            keep_logits=returns_dict and bool(config.output_logits),
            pad_token_id=pad_token_id(config),
        )
        target.text = self.text.sequences
        self.controller = self._new_controller(input_ids.shape[0], synced_gpus=synced_gpus)

    def learns_costs(self, *, synced_gpus: bool) -> bool:
        """Whether the drafter chooses tree sizes by the costs of steps.

        Not with several processes, which must choose the same sizes but measure different costs, and not if all trees
        are padded to one width.
        """
        if self.width:
            return False
        if not self.drafter.needs.step_costs or self.config.adaptive is False or _tiers(self.drafter, self.config):
            return False
        if synced_gpus or is_distributed():
            logger.info("Several processes generate together, whose costs differ: all steps use the same budget.")
            return False
        return True

    def _new_controller(self, rows: int, *, synced_gpus: bool) -> Controller:
        tiers, limits = _tiers(self.drafter, self.config), self.limits
        packed = getattr(getattr(self.model, "hf_quantizer", None), "packed_modules", None)
        if packed and rows == 1 and self.config.num_draft_tokens is None and self.config.tree is None:
            limits = limits.no_deeper(limits.num_steps, GGUF_ROWS)
        if tiers is not None:
            return TierController(tiers, limits)
        if self.learns_costs(synced_gpus=synced_gpus):
            costs = current_costs(self.model, self.facts, rows=rows, widest=limits.num_nodes, runner=self.runner)
            return CostModelController(limits, costs)
        if self.drafter.needs.step_costs and self.config.adaptive is not False:  # several processes
            return FixedController(limits.within(Budget(SHARED_NODES, limits.num_steps, limits.top_k)))
        return FixedController(limits)


def plan_call(
    model: PreTrainedModel, request: Request, mode: GenerationMode, generation_config: GenerationConfig,
    mode_kwargs: dict[str, Any],
) -> Call:  # fmt: skip
    """Return the call with all that does not depend on the prompt, after checking those options.

    If the model has changed, it is probed again and the drafter is bound again. `mode`, `generation_config` and
    `mode_kwargs` are the other arguments of `generate()`, as transformers prepared them.
    """
    config, state = SpeculativeConfig.of(request.speculative), state_of(model)
    checks.check_mode(mode, generation_config, mode_kwargs)
    registered = state.drafters
    if request.assistant_model is not None:
        registered = {**registered, **_assisted_drafters(request, config, generation_config, state.made)}
    history = None if config.history is None else HistoryDrafter(answer_history(model), config.history)
    drafter = choose_drafter(config, model, registered, state.made, state.learned, history)
    limits = _limits(drafter, config)
    checks.check_config(config, drafter, model, generation_config)
    facts = current_facts(model)
    rebind_if_changed(model, drafter, facts.fingerprint)
    state.fade_if_weights_changed(WeightsVersion.of(model))
    layer_outputs = {
        name: bool(generation_config.return_dict_in_generate and getattr(generation_config, f"output_{name}"))
        for name in ("hidden_states", "attentions")
    }
    if config.exact:
        wanted, synced_gpus = any(layer_outputs.values()), bool(mode_kwargs.get("synced_gpus"))
        do_sample = bool(generation_config.do_sample)
        checks.check_exact(config, drafter, model, do_sample, layers=wanted, synced_gpus=synced_gpus)
    if layer_outputs["attentions"] and not facts.supports_trees:
        raise UnsupportedGenerationError(
            "`speculative` does not support `output_attentions` for a model that cannot verify trees.",
            "Drop one of them.",
        )
    limits = limits if facts.supports_trees else limits.chain
    width = EXACT_WIDTH if config.exact and execution_device(model).type in GRAPH_BACKENDS else 0
    if width:
        limits = limits.chain.within(Budget(width, width - 1, 1))
    rule = _rule(config, generation_config)
    return Call(model, config, drafter, limits, rule, facts, layer_outputs, width=width)


def call_in(generation_config: GenerationConfig) -> Call | None:
    """Return the call that a generation config holds; None for plain generation."""
    call: Any = getattr(generation_config, "speculative", None)
    if call is not None and not isinstance(call, Call):
        raise UnsupportedModelError(
            "This model overrides generate() and skips the steps of transformers in which speculation is planned.",
            "Pass speculative=None.",
        )
    return call


def _rule(config: SpeculativeConfig, generation_config: GenerationConfig) -> rules.AcceptanceRule:
    name, do_sample = config.acceptance, bool(generation_config.do_sample)
    if name == "typical":
        return functools.partial(rules.typical, threshold=config.posterior_threshold, alpha=config.posterior_alpha)
    if name == "nucleus":
        top_p = generation_config.top_p
        if top_p is None or top_p >= 1:
            return rules.nucleus
        # when sampling, the top-p warper has already removed all other tokens
        return functools.partial(rules.nucleus, top_p=1.0 if do_sample else top_p)
    if name == "block":
        return rules.block
    return rules.rejection if do_sample else rules.greedy


def _needs_lockstep(config: GenerationConfig, processors: LogitsProcessorList, criteria: StoppingCriteriaList) -> bool:
    """Return whether all rows of a batch must emit the same number of tokens per step.

    Required by processors and criteria that may depend on several rows (custom ones, guidance, time limits): they then
    get the same batches as in plain `generate()`. Also required by outputs with one `[B, ...]` tensor per token.
    """
    known: tuple[type, ...] = (EosTokenCriteria, MaxLengthCriteria)
    if any(isinstance(rule, EosTokenCriteria) for rule in criteria):
        known = (*known, StopStringCriteria)  # without EOS, finished rows continue to emit tokens
    return bool(
        not is_rowwise(processors)
        or any(type(rule) not in known for rule in criteria)
        or (config.return_dict_in_generate and (config.output_scores or config.output_logits))
    )


def _assisted_drafters(
    request: Request, config: SpeculativeConfig, generation_config: GenerationConfig, made: dict[str, Drafter]
) -> dict[str, Drafter]:
    """Return drafters for the call's assistant model by method, and store them in `made`.

    Those of the last call are used again if they fit. If the config names neither method, there is one drafter: a PARD
    assistant drafts several tokens per forward, any other token by token. The latter samples its drafts if the call
    samples losslessly, and not exactly, with chains of this drafter alone.
    """
    model, named = request.assistant_model, {ASSISTED, PARD} & {config.method, *(config.methods or ())}
    checks.check_assistant(model, request.tokenizer, request.assistant_tokenizer, config)
    tokenizers = {"tokenizer": request.tokenizer, "assistant_tokenizer": request.assistant_tokenizer}
    if request.assistant_tokenizer is None:  # that of the target
        tokenizers = {}
    samples = (
        bool(generation_config.do_sample)
        and config.method == ASSISTED
        and config.top_k in (None, 1)
        and config.tree is None
        and config.acceptance in ("auto", "rejection", "block")
        and not config.exact
    )
    drafters: dict[str, Drafter] = {}
    for method in named or {PARD if drafts_in_parallel(fields_of(model)) else ASSISTED}:
        if method == PARD:
            drafter: DraftModelDrafter = PardDrafter(model, **tokenizers)
        else:
            shares = getattr(getattr(model, "config", None), "model_type", None) in SHARING_ASSISTANTS
            drafter = (Gemma4AssistantDrafter if shares else DraftModelDrafter)(model, sample=samples, **tokenizers)
        drafters[method] = drafter.or_known(made.get(method))
    made.update(drafters)
    return drafters


def _limits(drafter: Drafter, config: SpeculativeConfig) -> Budget:
    """Return the maximum size of a tree.

    With tiers, it is as deep as the largest of `candidate_steps`, unless the user or the drafter fixes depth or tree.
    """
    tiers = _tiers(drafter, config)
    if tiers is None or config.num_steps is not None or config.tree is not None:
        return checked_limits(drafter, config)
    deeper = replace(config, num_steps=max(tiers.candidate_steps))
    try:
        limits = checked_limits(drafter, deeper)
        if config.num_draft_tokens is None:  # as many nodes per level as the default has
            default = checked_limits(drafter, config)
            per_level = -(-(default.num_nodes - 1) // max(default.num_steps, 1))
            deeper = replace(deeper, num_draft_tokens=1 + per_level * limits.num_steps)
            limits = checked_limits(drafter, deeper)
    except InvalidConfigError:  # for example, its tree is fixed
        return checked_limits(drafter, config)
    return limits


def _tiers(drafter: Drafter, config: SpeculativeConfig) -> AdaptiveConfig | None:
    if isinstance(config.adaptive, AdaptiveConfig):
        return config.adaptive
    return AdaptiveConfig() if config.adaptive and not drafter.needs.step_costs else None


def is_distributed() -> bool:
    """Whether torch.distributed runs several processes, which must all make the same decisions."""
    joined = torch.distributed.is_available() and torch.distributed.is_initialized()
    return joined and torch.distributed.get_world_size() > 1


# ------------------------------------------------------------------------------------------- warm-up


def warm_up(model: PreTrainedModel, speculative: Any, *, rows: int, context: int) -> None:
    """Do the one-time work of calls with these settings, rows and prompt tokens: check, compile, capture, measure."""
    mode = GenerationMode.GREEDY_SEARCH
    call = plan_call(model, Request(speculative), mode, model.generation_config, {"synced_gpus": False})
    call.use_programs(2**31, waits=True)  # later calls are assumed to be long enough for any one-time work to pay
    widest = call.limits.num_nodes
    captures = execution_device(model).type in GRAPH_BACKENDS
    if measured := call.learns_costs(synced_gpus=False):
        measure_costs(model, call.facts, rows=rows, widest=widest, context=context, runner=call.runner)
    if call.runner is not None:
        # runs each size more than `CAPTURE_AFTER` times, so that its graph is captured; without graphs once is enough
        if not call.width and (captures or not measured):
            time_forwards(model, [1, widest], context, call.facts, rows=rows, runner=call.runner)
        if captures:
            _rehearse(model, speculative, call.limits, rows, context)


def _rehearse(model: PreTrainedModel, speculative: Any, limits: Budget, rows: int, context: int) -> None:
    """Generate a few tokens after prompts of two lengths, the longer first, to capture graphs and allocate memory.

    The longer prompt needs the next larger graphs (`bucket_of`), as a growing text will. A length that exceeds the
    model's maximum position is skipped. Statistics and answers of these calls are not kept; the costs of steps are.
    """
    state = state_of(model)
    learned, last, history = state.state_dict(), state.last, state.history
    new = (CAPTURE_AFTER + 2) * (limits.num_steps + 1)
    most = getattr(text_config(model), "max_position_embeddings", None) or context + new
    generate: Any = model.generate
    state.history = None  # these answers go to one that is thrown away
    try:
        for length in (bucket_of(context + limits.num_nodes) + 1, context):
            if length + new <= most:
                prompt = ordinary_tokens(model, length).expand(rows, -1)
                generate(
                    prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new, do_sample=False,
                    eos_token_id=NO_TOKEN, pad_token_id=0, speculative=speculative,
                )  # fmt: skip
    finally:
        state.load_state_dict(learned)
        state.last, state.history = last, history
