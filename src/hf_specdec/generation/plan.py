"""What one `generate()` call will do, decided once and carried from hook to hook: `Plan`.

Everything that can be refused is refused here, before any work. Called by: `generation/mixin.py`, which keeps the plan
on this call's own copy of the generation configuration. Feeds: `decode.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode

from hf_specdec.accept import AcceptanceRule
from hf_specdec.config import SpeculativeConfig
from hf_specdec.control.controller import Controller, FixedController
from hf_specdec.draft import Budget
from hf_specdec.drafters.base import Drafter
from hf_specdec.drafters.registry import choose_drafter
from hf_specdec.generation import options
from hf_specdec.generation.state import current_facts, keep_bound, state_of
from hf_specdec.target.probe import TargetFacts
from hf_specdec.target.target import Target


@dataclass(frozen=True, slots=True)
class Plan:
    """One call: who drafts, how much, by which rule it is accepted, and what is handed out."""

    config: SpeculativeConfig
    drafter: Drafter
    limits: Budget  # no step of this call verifies more
    controller: Controller
    rule: AcceptanceRule
    facts: TargetFacts
    layer_outputs: dict[str, bool]  # hidden_states, attentions: whether to collect them
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
    config, state = SpeculativeConfig.of(speculative), state_of(model)
    drafter = choose_drafter(config.method, state.drafters, state.made)
    limits = drafter.limits(config)
    options.check_mode(mode, generation_config, mode_kwargs)
    options.check_settings(config)
    rule = options.rule_for(config, generation_config)
    options.check_training(model)
    options.check_adapter(model)
    facts = current_facts(model)
    keep_bound(model, drafter, facts.fingerprint)
    limits = limits if facts.branches else limits.chain
    return Plan(
        config=config,
        drafter=drafter,
        limits=limits,
        controller=FixedController(limits),
        rule=rule,
        facts=facts,
        layer_outputs=options.layer_outputs(generation_config, chains_only=not facts.branches),
    )
