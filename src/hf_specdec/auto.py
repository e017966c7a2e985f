"""`AutoSpeculativeModelForCausalLM`: a target and its head in one call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedConfig

from hf_specdec.drafters import HEAD_DRAFTERS
from hf_specdec.errors import CheckpointFormatError
from hf_specdec.heads.hub import load_head
from hf_specdec.heads.layouts import says_head
from hf_specdec.mixin import SpeculativeGenerationMixin

HUB_OPTIONS = ("token", "cache_dir", "force_download", "local_files_only")
"""What holds for both downloads."""

BESIDE = "./"
"""Begins the name of a target that lies in the head's own directory or repository."""

HEAD_OPTIONS = ("revision", "subfolder")
"""What holds for the repository that was named."""


class AutoSpeculativeModelForCausalLM:
    """Loads a target, attaches speculation and loads a head: `from_pretrained(target, drafter=head)`.

    With the head alone, `from_pretrained(head)`, the target is the one that the head's config names.
    """

    def __init__(self) -> None:
        raise TypeError("AutoSpeculativeModelForCausalLM is made by from_pretrained().")

    @classmethod
    def from_pretrained(cls, name_or_path: Any, *, drafter: Any = None, **kwargs: Any) -> Any:
        """Load a speculative model.

        Args:
            name_or_path: Path or Hub id of a target, or of a head that names its target.
            drafter: Path or Hub id of a head.
            **kwargs: For the target's `AutoModelForCausalLM.from_pretrained` (dtype, device_map, ...). `token`,
                `cache_dir`, `force_download` and `local_files_only` hold for the head as well; `revision` and
                `subfolder` for what `name_or_path` names.

        Raises:
            CheckpointFormatError: A head that names no target, or no head at `drafter`.
            DrafterMismatchError: The head was made for another model.
            UnsupportedModelError: The target cannot verify a tree of tokens.
        """
        shared = {name: kwargs[name] for name in HUB_OPTIONS if name in kwargs}
        named = {name: kwargs[name] for name in HEAD_OPTIONS if name in kwargs}
        head = None
        if drafter is not None:
            head = load_head(drafter, **shared)
        elif says_head(PreTrainedConfig.get_config_dict(name_or_path, **shared, **named)[0]):
            head = load_head(name_or_path, **shared, **named)
            if not head.config.base_model_name_or_path:
                raise CheckpointFormatError(
                    f"The head {name_or_path} names no target (base_model_name_or_path).",
                    "Give both: from_pretrained(target, drafter=head).",
                )
            base = head.config.base_model_name_or_path
            if base.startswith(BESIDE):  # the model that was trained with it, in a directory of its own there
                kwargs["subfolder"] = str(Path(kwargs.get("subfolder", "")) / base.removeprefix(BESIDE))
            elif base != str(name_or_path):
                kwargs = {name: value for name, value in kwargs.items() if name not in HEAD_OPTIONS}
                name_or_path = base
        model = SpeculativeGenerationMixin.attach(AutoModelForCausalLM.from_pretrained(name_or_path, **kwargs))
        if head is not None:
            model.add_drafter(HEAD_DRAFTERS[type(head)](head))
        return model
