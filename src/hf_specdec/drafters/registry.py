"""The registry: one line per method that can be built without a checkpoint, and the names of all methods."""

from collections.abc import Iterable
from typing import Any

from hf_specdec.drafters.base import Drafter
from hf_specdec.drafters.eagle import EagleDrafter
from hf_specdec.drafters.medusa import MedusaDrafter
from hf_specdec.drafters.prompt_lookup import PromptLookupDrafter
from hf_specdec.errors import InvalidConfigError, UnsupportedGenerationError
from hf_specdec.heads.eagle import EagleHead
from hf_specdec.heads.eagle3 import Eagle3Head
from hf_specdec.heads.medusa import MedusaHeads

TRAINING_FREE: dict[str, type[Drafter]] = {"prompt_lookup": PromptLookupDrafter}
"""Methods that need nothing loaded."""

ALIASES = {"ngram": "prompt_lookup"}

HEAD_DRAFTERS: dict[type, Any] = {
    EagleHead: EagleDrafter,
    Eagle3Head: EagleDrafter,
    MedusaHeads: MedusaDrafter,
}
"""What drafts with a head, by the head's class."""

NEEDS_HEAD = ("eagle", "medusa")
"""Methods that need `model.load_drafter(...)` or `model.add_drafter(...)` first."""

PLANNED = ("token_recycling", "lookahead", "draft_model", "early_exit", "mtp", "hybrid")
"""Methods of the public contract that this version does not have yet."""


def method_named(name: str, registered: Iterable[str] = ()) -> str:
    """The method or registered drafter that a name means, without its aliases; `"auto"` stays what it is.

    Raises:
        InvalidConfigError: There is none.
        UnsupportedGenerationError: A method of a later version.
    """
    method = ALIASES.get(name, name)
    available = {"auto", *TRAINING_FREE, *NEEDS_HEAD, *registered}
    if method in available:
        return method
    known = ", ".join(map(repr, sorted({*available, *ALIASES})))
    if method in PLANNED:
        raise UnsupportedGenerationError(f"The method {name!r} is not in this version.", f"There are: {known}.")
    raise InvalidConfigError(f"There is no method or drafter {name!r}.", f"There are: {known}.")
