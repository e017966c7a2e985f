"""`AutoSpeculativeModelForCausalLM`: load a target model and, if any, its draft head in one call."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from transformers import AutoModelForCausalLM, PreTrainedConfig

from hf_specdec.checkpoints.formats import is_head_config, target_name
from hf_specdec.checkpoints.hub import load_head
from hf_specdec.checkpoints.medusa_layouts import WHOLE_MODELS
from hf_specdec.checkpoints.sources import CONNECT, EXPECTED_MODEL, is_connection_error, refuse_foreign_kernels
from hf_specdec.errors import CheckpointFormatError, InvalidConfigError, translated
from hf_specdec.generation.head_loading import assistant_config, opened
from hf_specdec.generation.mixin import SpeculativeGenerationMixin

HUB_OPTIONS = ("token", "cache_dir", "force_download", "local_files_only")
"""Arguments that apply to both repositories, that of the target model and that of the head."""

RELATIVE_PREFIX = "./"
"""Prefix of a target name that is a path inside the head's directory or repository."""

HEAD_OPTIONS = ("revision", "subfolder")
"""Arguments that apply only to the repository that `name_or_path` gives."""


class AutoSpeculativeModelForCausalLM:
    """Loader of a target model with speculation attached: `from_pretrained(target, drafter=head)`.

    `from_pretrained(head)` loads the head and the target that its config names; `from_pretrained(target)` loads no
    head.

    Example:
        ```python
        model = AutoSpeculativeModelForCausalLM.from_pretrained("org/model", drafter="org/head", dtype="auto")
        ids = model.generate(**inputs, speculative="auto")
        ```
    """

    def __init__(self) -> None:
        raise TypeError("AutoSpeculativeModelForCausalLM cannot be instantiated. Use from_pretrained().")

    @classmethod
    def from_pretrained(cls, name_or_path: Any, *, drafter: Any = None, **kwargs: Any) -> Any:
        """Load a target model, attach speculation, register its head or assistant (if any) and return the model.

        Args:
            name_or_path: Path or Hub id of a target model, or of a head that names its target.
            drafter: Path or Hub id of a head or an assistant; None: a head is at `name_or_path`, or there is none.
            **kwargs: Arguments of `AutoModelForCausalLM.from_pretrained` for the target (dtype, device_map, ...).
                `token`, `cache_dir`, `force_download` and `local_files_only` apply to the head as well; `revision` and
                `subfolder` apply to `name_or_path` only.

        Returns:
            The model, an instance of its transformers class, with the methods of `SpeculativeGenerationMixin`.

        Raises:
            CheckpointFormatError: The head names no target, or a target that is neither a Hub id nor a directory with
                a model (checked before any weights are read); there is no head at `drafter`; the target cannot be
                loaded; or its config loads kernels from another repository and `attn_implementation` is not given.
            InvalidConfigError: `trust_remote_code` with a head alone; it is not passed on to a second repository.
            DrafterMismatchError: The head was made for another model, or its tensors do not match its config.
            UnsupportedModelError: The target does not support speculation.
        """
        shared = {name: kwargs[name] for name in HUB_OPTIONS if name in kwargs}
        named = {name: kwargs[name] for name in HEAD_OPTIONS if name in kwargs}
        head, named_by = None, None
        if drafter is not None and assistant_config(opened(drafter, shared)) is None:
            head = load_head(drafter, **shared)
        elif drafter is None:
            with _translate_errors(name_or_path, named_by):
                fields = PreTrainedConfig.get_config_dict(name_or_path, **shared, **named)[0]
            if is_head_config(fields):
                _check_target(target_name(fields), name_or_path, named.get("subfolder") or "")
                head, named_by = load_head(name_or_path, **shared, **named), name_or_path
                name_or_path, kwargs = _target_of(head, name_or_path, kwargs)
        with _translate_errors("/".join(filter(None, (str(name_or_path), kwargs.get("subfolder")))), named_by):
            if "attn_implementation" not in kwargs:
                options = {name: kwargs[name] for name in (*HUB_OPTIONS, *HEAD_OPTIONS) if name in kwargs}
                refuse_foreign_kernels(PreTrainedConfig.get_config_dict(name_or_path, **options)[0], str(name_or_path))
            target = AutoModelForCausalLM.from_pretrained(name_or_path, **kwargs)
        model = SpeculativeGenerationMixin.attach(target)
        if head is not None:
            model.load_drafter(head)
        elif drafter is not None:
            model.load_drafter(drafter, **shared)
        return model


def _target_of(head: Any, named: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the name of the target of a head, given by the user as `named`, and the arguments to load it with."""
    base = head.config.base_model_name_or_path
    if head.layout in WHOLE_MODELS:  # the target and its heads are one checkpoint
        return named, kwargs
    if not base:
        raise CheckpointFormatError(
            f"The head {named} names no target model (base_model_name_or_path).", _name_it(named)
        )
    subfolder = kwargs.get("subfolder") or ""
    _check_target(base, named, subfolder)
    if base.startswith(RELATIVE_PREFIX):  # Medusa-2: the target trained with the head is inside it
        return named, {**kwargs, "subfolder": str(Path(subfolder) / base.removeprefix(RELATIVE_PREFIX))}
    if kwargs.get("trust_remote_code"):
        raise InvalidConfigError(
            f"trust_remote_code=True would run code from {base}, the target that the head {named} names. It is not "
            "passed on to a second repository.",
            f"If you trust it, call from_pretrained({base!r}, drafter={str(named)!r}, trust_remote_code=True).",
        )
    return base, {name: value for name, value in kwargs.items() if name not in HEAD_OPTIONS}


def _name_it(head: Any) -> str:
    return f"Name the target: from_pretrained(target, drafter={str(head)!r})."


def _check_target(base: Any, head: Any, subfolder: str) -> None:
    """Check that a head may name this target.

    A head from the Hub is untrusted: it may name a Hub id or a directory inside its own repository, but no other path
    on this machine. A head in a local directory may also name a local directory that holds a model.

    The target None or "" means that there is none. The subfolder is that of the head inside its repository.
    """
    if base in (None, "") or (isinstance(base, str) and _can_be_named(base, Path(head), subfolder)):
        return
    raise CheckpointFormatError(
        f"The head {head} names the target {base!r:.200}, which is "
        f"{'a path on this machine' if _is_hub_id(base) else 'neither a Hub id nor a directory with a model'}.",
        _name_it(head),
    )


def _can_be_named(base: str, head: Path, subfolder: str) -> bool:
    if not base.isprintable():
        return False
    if base.startswith(RELATIVE_PREFIX):
        below = PurePosixPath(base.removeprefix(RELATIVE_PREFIX))
        if not below.parts or below.is_absolute() or ".." in below.parts or "\\" in base:
            return False
        return not head.is_dir() or (head / subfolder / below).resolve().is_relative_to(head.resolve())
    if Path(base).exists():
        return head.is_dir() and (Path(base) / "config.json").is_file()
    return _is_hub_id(base)


def _is_hub_id(name: Any) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _translate_errors(name: Any, head: Any) -> AbstractContextManager[None]:
    """Convert the errors of loading the model of this name, which a head names (None: the user)."""
    named = "" if head is None else f", which the head {head} names,"
    return translated(
        CheckpointFormatError,
        f"The model {str(name)!r}{named} cannot be loaded",
        lambda error: _name_it(head) if head is not None
        else CONNECT if is_connection_error(error) else EXPECTED_MODEL,
        (OSError, ValueError),
    )  # fmt: skip
