"""The default of `speculative=` that a model's generation config may hold: saving it, and calls that ignore it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hf_specdec.config import SpeculativeConfig
from hf_specdec.errors import UnsupportedGenerationError
from hf_specdec.generation.state import state_of
from hf_specdec.transformers_private import is_derived, set_derived

logger = logging.getLogger(__name__)


@contextmanager
def storable(generation_config: Any) -> Iterator[None]:
    """Make the default `speculative`, if any, JSON-serialisable in this block.

    transformers drops unknown fields of a generation config that is marked as derived from the model's config, so the
    mark is removed as well.
    """
    speculative = getattr(generation_config, "speculative", None)
    if speculative is None:
        yield
        return
    derived, generation_config.speculative = is_derived(generation_config), SpeculativeConfig.storable(speculative)
    set_derived(generation_config, False)
    try:
        yield
    finally:
        set_derived(generation_config, derived)
        generation_config.speculative = speculative


def stored_in(*configs: Any) -> Any:
    """Return `speculative` of the first generation config that has one; None if none has."""
    values = (getattr(config, "speculative", None) for config in configs)
    return next((value for value in values if value is not None), None)


def check_batch_arguments(arguments: dict[str, Any]) -> None:
    """Remove `speculative` and `assistant_model` from the arguments of `generate_batch()`, which would ignore them.

    Raises:
        UnsupportedGenerationError: One of them asks for speculation.
    """
    for name in ("speculative", "assistant_model"):
        if arguments.pop(name, None) not in (None, False):
            raise UnsupportedGenerationError(
                f"Continuous batching decodes without speculation, so `{name}` would have no effect.",
                f"Drop `{name}`, or use generate().",
            )


def note_continuous_batching(model: Any, generation_config: Any) -> None:
    """Log once per model, as a warning, that continuous batching ignores a default `speculative`.

    Args:
        model: An attached model.
        generation_config: Generation config of the call; None: the model's.
    """
    used, state = generation_config or model.generation_config, state_of(model)
    if getattr(used, "speculative", None) not in (None, False) and not state.has_noted_batching:
        state.has_noted_batching = True
        logger.warning(
            "Continuous batching decodes without speculation: `speculative` of the generation config has no effect."
        )
