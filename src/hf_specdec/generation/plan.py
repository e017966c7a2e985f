"""What one `generate()` call will do, decided once and carried from hook to hook: `Plan`.

Everything that can be refused is refused here, before any work.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode

from hf_specdec.acceptance.rules import AcceptanceRule, greedy
from hf_specdec.config import COMBINED, AdaptiveConfig, SpeculativeConfig
from hf_specdec.control.controller import Controller, FixedController
from hf_specdec.control.cost_model import CostModelController
from hf_specdec.control.costs import verify_seconds
from hf_specdec.control.tiers import TierController
from hf_specdec.drafters.base import Drafter
from hf_specdec.drafters.draft_model import DraftModelDrafter
from hf_specdec.drafters.foreign import limits_of
from hf_specdec.drafters.hybrid import HybridDrafter
from hf_specdec.drafters.registry import choose_drafter
from hf_specdec.errors import InvalidConfigError, UnsupportedGenerationError, UnsupportedModelError
from hf_specdec.generation import options
from hf_specdec.generation.state import (
    captured_rule,
    compiled_drafter,
    current_costs,
    current_facts,
    current_program,
    rebind_if_changed,
    state_of,
)
from hf_specdec.trees.draft import Budget
from hf_specdec.verification.graph_backends import GRAPH_BACKENDS
from hf_specdec.verification.graphs import PAYS_AFTER
from hf_specdec.verification.memory import bucket_of
from hf_specdec.verification.model import execution_device, text_config
from hf_specdec.verification.plain import ordinary_tokens
from hf_specdec.verification.probe import TargetFacts
from hf_specdec.verification.runners import ExecutionMode, Runner
from hf_specdec.verification.target import Target

ASSISTED = "draft_model"
"""The method that drafts with an assistant model."""

logger = logging.getLogger(__name__)

NO_TOKEN = 2**31 - 1
"""No text ends with it."""

SHARED_NODES = 8
"""Nodes of a merged tree where costs cannot decide."""


@dataclass(frozen=True, slots=True)
class WithAssistant:
    """What a call of `generate()` was given: `speculative=`, and the model to draft with."""

    speculative: Any
    assistant: Any


@dataclass(frozen=True, slots=True)
class Plan:
    """One call: who drafts, how much, by which rule it is accepted, and what is handed out."""

    config: SpeculativeConfig
    drafter: Drafter
    limits: Budget  # no step of this call verifies more
    rule: AcceptanceRule
    facts: TargetFacts
    layer_outputs: dict[str, bool]  # hidden_states, attentions: whether to collect them
    runner: Runner | None = None  # what verifies instead of the model's own forward
    target: Target | None = None  # as soon as the prompt's size is known


def plan_call(
    model: PreTrainedModel,
    speculative: Any,
    mode: GenerationMode,
    generation_config: GenerationConfig,
    mode_kwargs: dict[str, Any],
) -> Plan:
    """Decide everything that does not depend on the prompt.

    Args:
        model: An attached model.
        speculative: What the user gave.
        mode, generation_config, mode_kwargs: What transformers made of the other arguments of `generate()`.

    Raises:
        InvalidConfigError: Invalid fields, or an unknown method.
        DrafterMismatchError: A head that is not loaded, or is another model's.
        UnsupportedGenerationError: Options that speculation cannot keep.
        UnsupportedModelError: The model, as it is now, cannot verify drafted tokens.
    """
    assistant = None
    if isinstance(speculative, WithAssistant):
        speculative, assistant = speculative.speculative, speculative.assistant
    config, state = SpeculativeConfig.of(speculative), state_of(model)
    options.check_mode(mode, generation_config, mode_kwargs)
    registered = state.drafters
    if assistant is not None:
        registered = {**registered, ASSISTED: _drafter_of(assistant, config, generation_config, state.made)}
    drafter = choose_drafter(config, model, registered, state.made, state.experience)
    limits = _limits(drafter, config)
    options.check_top_k(config, model)
    options.check_runner(config, model)
    rule = options.rule_for(config, generation_config)
    options.check_training(model)
    options.check_adapter(model)
    facts = current_facts(model)
    rebind_if_changed(model, drafter, facts.fingerprint)
    limits = limits if facts.supports_trees else limits.chain
    return Plan(
        config=config,
        drafter=drafter,
        limits=limits,
        rule=rule,
        facts=facts,
        layer_outputs=options.layer_outputs(generation_config, chains_only=not facts.supports_trees),
    )


def plan_of(generation_config: GenerationConfig) -> Plan | None:
    """The call's plan; None for plain generation.

    Raises:
        UnsupportedModelError: The model's own `generate()` reached decoding without the checks of transformers'.
    """
    plan: Any = getattr(generation_config, "speculative", None)
    if plan is not None and not isinstance(plan, Plan):
        raise UnsupportedModelError(
            "This model's own generate() skips the steps of transformers' generate() in which speculation is planned.",
            "Pass speculative=None.",
        )
    return plan


def with_programs(plan: Plan, model: PreTrainedModel) -> Plan:
    """The plan with forwards in the form that it asks for: the last preparation, for it takes its time.

    "auto" takes graphs where the device records them: they are made as it goes. A program takes a minute to make.
    """
    form = plan.config.compile
    if form == "none" or (form == "auto" and execution_device(model).type not in GRAPH_BACKENDS):
        return plan
    layers = frozenset(plan.drafter.needs.feature_layers)
    wanted: ExecutionMode = "compile" if form == "compile" else "cuda_graph"
    runner = current_program(model, plan.facts, layers, wanted, asked=form != "auto")
    rule = plan.rule
    if runner is not None and rule is greedy and execution_device(model).type in GRAPH_BACKENDS:
        rule = captured_rule(model)
    return replace(plan, runner=runner, rule=rule, drafter=compiled_drafter(model, plan.drafter, wanted))


def warm_up(model: PreTrainedModel, speculative: Any, *, rows: int, context: int) -> None:
    """Do now what the first call with these settings would do: check, compile, measure.

    Args:
        model: An attached model.
        speculative: As in `generate()`.
        rows: Of the batches to come.
        context: Tokens of their prompts.
    """
    mode = GenerationMode.GREEDY_SEARCH
    plan = plan_call(model, speculative, mode, model.generation_config, {"synced_gpus": False})
    plan = with_programs(plan, model)
    controller_of(plan, model, rows, context, synced_gpus=False)
    if plan.runner is not None:  # as often as a graph is worth recording
        verify_seconds(model, [1, plan.limits.num_nodes], context, plan.facts, rows=rows, runner=plan.runner)
        if execution_device(model).type in GRAPH_BACKENDS:
            _rehearse(model, speculative, plan.limits, rows, context)


def _rehearse(model: PreTrainedModel, speculative: Any, limits: Budget, rows: int, context: int) -> None:
    """Generate a little behind two lengths, the longer one first: what drafts is recorded, too, and memory is made.

    Nothing is learned from it.
    """
    state = state_of(model)
    learned, last = state.state_dict(), state.last
    new = (PAYS_AFTER + 2) * (limits.num_steps + 1)
    most = getattr(text_config(model), "max_position_embeddings", None) or context + new
    generate: Any = model.generate
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
        state.last = last


def _drafter_of(
    assistant: Any, config: SpeculativeConfig, generation_config: GenerationConfig, made: dict[str, Drafter]
) -> Drafter:
    """The drafter of the call's assistant, the one of the last call where it is the same.

    Raises:
        UnsupportedGenerationError: A method that drafts with no assistant.
    """
    if config.method not in (ASSISTED, *COMBINED):
        raise UnsupportedGenerationError(
            f"`assistant_model` means nothing to speculative={config.method!r}.",
            f'Use speculative={ASSISTED!r}, "hybrid" or "auto", or drop it.',
        )
    chain = config.top_k in (None, 1) and config.tree is None
    sample = bool(generation_config.do_sample) and config.method == ASSISTED and chain
    sample = sample and config.acceptance in ("auto", "rejection", "block")
    known = made.get(ASSISTED)
    if isinstance(known, DraftModelDrafter) and known.assistant is assistant and known.sample == sample:
        return known
    made[ASSISTED] = DraftModelDrafter(assistant, sample=sample)
    return made[ASSISTED]


def _limits(drafter: Drafter, config: SpeculativeConfig) -> Budget:
    """The largest tree of any step: tiers may ask for deeper ones than the drafter's default."""
    tiers = _tiers(drafter, config)
    if tiers is None or config.num_steps is not None or config.tree is not None:
        return limits_of(drafter, config)
    deeper = replace(config, num_steps=max(tiers.candidate_steps))
    try:
        limits = limits_of(drafter, deeper)
        if config.num_draft_tokens is None:  # as many nodes per level as the default has
            default = limits_of(drafter, config)
            per_level = -(-(default.num_nodes - 1) // max(default.num_steps, 1))
            deeper = replace(deeper, num_draft_tokens=1 + per_level * limits.num_steps)
            limits = limits_of(drafter, deeper)
    except InvalidConfigError:  # its tree is given
        return limits_of(drafter, config)
    return limits


def _tiers(drafter: Drafter, config: SpeculativeConfig) -> AdaptiveConfig | None:
    if isinstance(config.adaptive, AdaptiveConfig):
        return config.adaptive
    return AdaptiveConfig() if config.adaptive and not isinstance(drafter, HybridDrafter) else None


def controller_of(plan: Plan, model: PreTrainedModel, rows: int, context: int, *, synced_gpus: bool) -> Controller:
    """What decides how much every step of this call drafts.

    Args:
        plan: The call's.
        model: An attached model.
        rows: Of the batch.
        context: Tokens of the prompt.
        synced_gpus: Whether other ranks run the same number of forwards.
    """
    tiers = _tiers(plan.drafter, plan.config)
    if tiers is not None:
        return TierController(tiers, plan.limits)
    if not isinstance(plan.drafter, HybridDrafter) or plan.config.adaptive is False:
        return FixedController(plan.limits)
    if synced_gpus or runs_with_others():
        logger.info("Several processes generate together: costs differ between them, so every step drafts the same.")
        return FixedController(plan.limits.within(Budget(SHARED_NODES, plan.limits.num_steps, plan.limits.top_k)))
    widest, runner = plan.limits.num_nodes, plan.runner
    costs = current_costs(model, plan.facts, rows=rows, widest=widest, context=context, runner=runner)
    return CostModelController(plan.limits, costs)


def runs_with_others() -> bool:
    """Whether this process is one of several that torch has joined: all must take the same decisions."""
    joined = torch.distributed.is_available() and torch.distributed.is_initialized()
    return joined and torch.distributed.get_world_size() > 1
