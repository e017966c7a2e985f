"""The registry: one line per method that can be built without a checkpoint, and the names of all methods."""

from typing import Any

from hf_specdec.drafters.base import Drafter
from hf_specdec.drafters.eagle import EagleDrafter
from hf_specdec.drafters.medusa import MedusaDrafter
from hf_specdec.drafters.prompt_lookup import PromptLookupDrafter
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
