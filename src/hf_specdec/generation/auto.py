"""`AutoSpeculativeModelForCausalLM`: a target and its head in one call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedConfig

from hf_specdec.checkpoints.hub import load_head
from hf_specdec.checkpoints.layouts import is_head_config
from hf_specdec.drafters.registry import drafter_of
from hf_specdec.errors import CheckpointFormatError, InvalidConfigError
from hf_specdec.generation.mixin import SpeculativeGenerationMixin
from hf_specdec.loading import refuse_foreign_kernels

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
            CheckpointFormatError: A head that names no target, no head at `drafter`, or a target whose config asks
                for kernels of another repository.
            InvalidConfigError: `trust_remote_code` with a head alone: trust in it is none in the target it names.
            DrafterMismatchError: The head was made for another model.
            UnsupportedModelError: The target cannot verify a tree of tokens.
        """
        shared = {name: kwargs[name] for name in HUB_OPTIONS if name in kwargs}
        named = {name: kwargs[name] for name in HEAD_OPTIONS if name in kwargs}
        head = None
        if drafter is not None:
            head = load_head(drafter, **shared)
        elif is_head_config(PreTrainedConfig.get_config_dict(name_or_path, **shared, **named)[0]):
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
                if kwargs.get("trust_remote_code"):
                    raise InvalidConfigError(
                        f"trust_remote_code=True would run code of {base}, which the head {name_or_path} names: trust "
                        "in one repository is none in another.",
                        f"Name it yourself: from_pretrained({base!r}, drafter={str(name_or_path)!r}, "
                        "trust_remote_code=True).",
                    )
                kwargs = {name: value for name, value in kwargs.items() if name not in HEAD_OPTIONS}
                name_or_path = base
        if "attn_implementation" not in kwargs:
            where = {name: kwargs[name] for name in (*HUB_OPTIONS, *HEAD_OPTIONS) if name in kwargs}
            refuse_foreign_kernels(PreTrainedConfig.get_config_dict(name_or_path, **where)[0], str(name_or_path))
        model = SpeculativeGenerationMixin.attach(AutoModelForCausalLM.from_pretrained(name_or_path, **kwargs))
        if head is not None:
            model.add_drafter(drafter_of(head))
        return model
