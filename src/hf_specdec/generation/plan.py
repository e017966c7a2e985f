"""`Plan`: the decisions for one `generate()` call, all made before the prompt is processed.

`plan_call` decides what does not depend on the prompt, and checks those options. `generation/hooks.py` adds the target
and the compiled forwards, and checks inputs and cache; `generation/call.py` checks prompt and processors. The mixin
keeps the plan as `speculative` in the call's copy of the generation config, in which it replaces the `Request`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode

from hf_specdec.acceptance.rules import AcceptanceRule, greedy
from hf_specdec.config import AdaptiveConfig, SpeculativeConfig
from hf_specdec.control.controller import Controller, FixedController
from hf_specdec.control.cost_model import CostModelController
from hf_specdec.control.costs import verify_seconds
from hf_specdec.control.tiers import TierController
from hf_specdec.drafters.base import Drafter
from hf_specdec.drafters.checked import is_third_party, limits_of
from hf_specdec.drafters.history import HistoryDrafter
from hf_specdec.drafters.registry import choose_drafter
from hf_specdec.errors import InvalidConfigError, UnsupportedGenerationError, UnsupportedModelError
from hf_specdec.generation import options
from hf_specdec.generation.assisted import Assistant, assisted_drafters, check_no_assistant
from hf_specdec.generation.histories import answer_history
from hf_specdec.generation.model_programs import captured_rule, compiled_drafter, current_program, kernels_pay
from hf_specdec.generation.state import current_costs, current_facts, measure_costs, rebind_if_changed, state_of
from hf_specdec.reporting.stats import EAGER
from hf_specdec.trees.draft import Budget
from hf_specdec.verification.graph_backends import GRAPH_BACKENDS
from hf_specdec.verification.graphs import CAPTURE_AFTER
from hf_specdec.verification.memory import bucket_of
from hf_specdec.verification.model import execution_device, text_config
from hf_specdec.verification.probe import TargetFacts
from hf_specdec.verification.runners import Runner, WeightsVersion
from hf_specdec.verification.target import Target
from hf_specdec.verification.trials import NO_TOKEN, ordinary_tokens

logger = logging.getLogger(__name__)

SHARED_NODES = 8
"""Maximum nodes of a merged tree, root included, if several processes generate together: they must choose the same
size, but the costs that each would measure differ."""


WARM_UP_TOKENS = 2**31
"""New tokens that `warm_up` assumes for later calls: enough for any one-time work to pay."""


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments of `generate()` that select the drafter: `speculative=` and the assistant, if any."""

    speculative: Any
    assistant: Assistant | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """The decisions for one call: drafter, maximum size of trees, acceptance rule, outputs to collect, ..."""

    config: SpeculativeConfig
    drafter: Drafter
    limits: Budget  # largest tree of any step
    rule: AcceptanceRule
    facts: TargetFacts
    layer_outputs: dict[str, bool]  # whether to collect hidden_states and attentions
    runner: Runner | None = None  # verifies instead of the model's own forward
    forwards: str = EAGER  # how verify forwards run, see `SpeculationStats.forwards`
    target: Target | None = None  # set once the size of the prompt is known


def plan_call(
    model: PreTrainedModel,
    request: Request,
    mode: GenerationMode,
    generation_config: GenerationConfig,
    mode_kwargs: dict[str, Any],
) -> Plan:
    """Return a plan of everything that does not depend on the prompt, after checking those options of the call.

    If the model has changed, it is probed again and the drafter is bound again.

    Args:
        model: An attached model.
        request: The user's arguments.
        mode, generation_config, mode_kwargs: The other arguments of `generate()`, as transformers prepared them.

    Raises:
        InvalidConfigError: Invalid fields, or an unknown method.
        DrafterMismatchError: A head that is not loaded, or belongs to another model.
        UnsupportedGenerationError: Options that cannot be combined with speculation.
        UnsupportedModelError: In its current state the model cannot verify drafted tokens.
    """
    config, state = SpeculativeConfig.of(request.speculative), state_of(model)
    options.check_mode(mode, generation_config, mode_kwargs)
    check_no_assistant(mode_kwargs)
    registered = state.drafters
    if request.assistant is not None:
        registered = {**registered, **assisted_drafters(request.assistant, config, generation_config, state.made)}
    history = None if config.history is None else HistoryDrafter(answer_history(model), config.history)
    drafter = choose_drafter(config, model, registered, state.made, state.learned, history)
    limits = _limits(drafter, config)
    options.check_draft_window(config, drafter)
    options.check_top_k(config, model)
    options.check_runner(config, model)
    rule = options.rule_for(config, generation_config)
    _check_block(config, drafter)
    options.check_training(model)
    options.check_adapter(model)
    facts = current_facts(model)
    rebind_if_changed(model, drafter, facts.fingerprint)
    state.fade_if_weights_changed(WeightsVersion.of(model))
    limits = limits if facts.supports_trees else limits.chain
    return Plan(
        config=config,
        drafter=drafter,
        limits=limits,
        rule=rule,
        facts=facts,
        layer_outputs=options.layer_outputs(generation_config, chains_only=not facts.supports_trees),
    )


def _check_block(config: SpeculativeConfig, drafter: Drafter) -> None:
    """Refuse `acceptance="block"` for drafters that do not sample; drafts of third-party drafters are checked later.

    Raises:
        UnsupportedGenerationError: The acceptance is `"block"`, and the drafter of this package does not sample.
    """
    if config.acceptance == "block" and not drafter.samples and not is_third_party(drafter):
        raise UnsupportedGenerationError(
            f"acceptance='block' verifies sampled chains, and {drafter.method!r} does not sample its drafts.",
            'Use acceptance="auto", which is also lossless, or draft a chain with assistant_model= in a call that '
            "samples.",
        )


def plan_of(generation_config: GenerationConfig) -> Plan | None:
    """Return the call's plan; None for plain generation.

    Raises:
        UnsupportedModelError: The model overrides `generate()` and skips the step in which speculation is planned.
    """
    plan: Any = getattr(generation_config, "speculative", None)
    if plan is not None and not isinstance(plan, Plan):
        raise UnsupportedModelError(
            "This model overrides generate() and skips the steps of transformers in which speculation is planned.",
            "Pass speculative=None.",
        )
    return plan


def with_programs(plan: Plan, model: PreTrainedModel, new_tokens: int, *, waits: bool = False) -> Plan:
    """Return the plan with compiled or captured forwards, as its config specifies and as far as they are possible.

    `compile="auto"` uses graphs, which are captured during generation, if the device supports them, and the kernels on
    a CPU as soon as `kernels_pay`; it never uses inductor, which takes longer to compile.

    Args:
        plan: The call's plan.
        model: An attached model.
        new_tokens: Maximum number of new tokens of this call.
        waits: Whether to wait until the CPU kernels are compiled if `compile` is `"auto"`.
    """
    mode, device = plan.config.compile, execution_device(model)
    if mode == "auto":
        if device.type in GRAPH_BACKENDS:
            mode = "cuda_graph"
        elif kernels_pay(model, new_tokens, waits=waits):
            mode = "kernels"
    if mode in ("none", "auto"):
        return plan
    layers = frozenset(plan.drafter.needs.feature_layers)
    wanted: Any = mode  # an `ExecutionMode`: the config has resolved all other values
    runner = current_program(model, plan.facts, layers, wanted, requested=plan.config.compile != "auto")
    rule = plan.rule
    if runner is not None and rule is greedy and device.type in GRAPH_BACKENDS:
        rule = captured_rule(model)
    forwards, drafter = EAGER if runner is None else wanted, compiled_drafter(model, plan.drafter, wanted)
    return replace(plan, runner=runner, forwards=forwards, rule=rule, drafter=drafter)


def warm_up(model: PreTrainedModel, speculative: Any, *, rows: int, context: int) -> None:
    """Do the one-time work of the first call with these settings: check, compile, capture, measure.

    Args:
        model: An attached model.
        speculative: As in `generate()`.
        rows: Batch size of later calls.
        context: Prompt tokens of later calls.

    Raises:
        InvalidConfigError, DrafterMismatchError, UnsupportedGenerationError, UnsupportedModelError: See `plan_call`.
    """
    mode = GenerationMode.GREEDY_SEARCH
    plan = plan_call(model, Request(speculative), mode, model.generation_config, {"synced_gpus": False})
    plan = with_programs(plan, model, WARM_UP_TOKENS, waits=True)
    if _learns_costs(plan, synced_gpus=False):
        widest = plan.limits.num_nodes
        measure_costs(model, plan.facts, rows=rows, widest=widest, context=context, runner=plan.runner)
    if plan.runner is not None:  # runs each size more than `CAPTURE_AFTER` times, so that its graph is captured
        verify_seconds(model, [1, plan.limits.num_nodes], context, plan.facts, rows=rows, runner=plan.runner)
        if execution_device(model).type in GRAPH_BACKENDS:
            _rehearse(model, speculative, plan.limits, rows, context)


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


def _limits(drafter: Drafter, config: SpeculativeConfig) -> Budget:
    """Return the maximum size of a tree.

    With tiers, it is as deep as the largest of `candidate_steps`, unless the user or the drafter fixes depth or tree.
    """
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
    except InvalidConfigError:  # for example, its tree is fixed
        return limits_of(drafter, config)
    return limits


def _tiers(drafter: Drafter, config: SpeculativeConfig) -> AdaptiveConfig | None:
    if isinstance(config.adaptive, AdaptiveConfig):
        return config.adaptive
    return AdaptiveConfig() if config.adaptive and not drafter.needs.step_costs else None


def controller_of(plan: Plan, model: PreTrainedModel, rows: int, *, synced_gpus: bool) -> Controller:
    """Return the controller that sets the budget of every step.

    Args:
        plan: The call's plan.
        model: An attached model.
        rows: Batch size.
        synced_gpus: Whether all ranks must run the same number of forwards.
    """
    tiers = _tiers(plan.drafter, plan.config)
    if tiers is not None:
        return TierController(tiers, plan.limits)
    if _learns_costs(plan, synced_gpus=synced_gpus):
        costs = current_costs(model, plan.facts, rows=rows, widest=plan.limits.num_nodes, runner=plan.runner)
        return CostModelController(plan.limits, costs)
    if plan.drafter.needs.step_costs and plan.config.adaptive is not False:  # several processes
        return FixedController(plan.limits.within(Budget(SHARED_NODES, plan.limits.num_steps, plan.limits.top_k)))
    return FixedController(plan.limits)


def _learns_costs(plan: Plan, *, synced_gpus: bool) -> bool:
    """Whether the drafter chooses tree sizes by the costs of steps.

    Not with several processes, which must choose the same sizes but measure different costs.
    """
    if not plan.drafter.needs.step_costs or plan.config.adaptive is False or _tiers(plan.drafter, plan.config):
        return False
    if synced_gpus or is_distributed():
        logger.info("Several processes generate together, whose costs differ: all steps use the same budget.")
        return False
    return True


def is_distributed() -> bool:
    """Whether torch.distributed runs several processes, which must all make the same decisions."""
    joined = torch.distributed.is_available() and torch.distributed.is_initialized()
    return joined and torch.distributed.get_world_size() > 1
