"""`AutoSpeculativeModelForCausalLM`: a target and its head in one call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from transformers import AutoModelForCausalLM, PreTrainedConfig

from hf_specdec.checkpoints.hub import load_head
from hf_specdec.checkpoints.layouts import WHOLE_MODELS, is_head_config, target_name
from hf_specdec.checkpoints.target_config import WHAT_TO_GIVE, first_line, refuse_foreign_kernels
from hf_specdec.drafters.registry import drafter_of
from hf_specdec.errors import CheckpointFormatError, InvalidConfigError, SpeculativeDecodingError
from hf_specdec.generation.mixin import SpeculativeGenerationMixin

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
            CheckpointFormatError: A head that names no target, or one that is neither a Hub id nor a directory with
                a model (before any weights are read); no head at `drafter`; a target that cannot be loaded, or whose
                config asks for kernels of another repository.
            InvalidConfigError: `trust_remote_code` with a head alone: it is not passed on to a second repository.
            DrafterMismatchError: The head was made for another model.
            UnsupportedModelError: The target cannot verify a tree of tokens.
        """
        shared = {name: kwargs[name] for name in HUB_OPTIONS if name in kwargs}
        named = {name: kwargs[name] for name in HEAD_OPTIONS if name in kwargs}
        head, named_by = None, None
        if drafter is not None:
            head = load_head(drafter, **shared)
        else:
            with _as_ours(name_or_path, named_by):
                fields = PreTrainedConfig.get_config_dict(name_or_path, **shared, **named)[0]
            if is_head_config(fields):
                _check_target(target_name(fields), name_or_path, named.get("subfolder") or "")
                head, named_by = load_head(name_or_path, **shared, **named), name_or_path
                name_or_path, kwargs = _target_of(head, name_or_path, kwargs)
        with _as_ours("/".join(filter(None, (str(name_or_path), kwargs.get("subfolder")))), named_by):
            if "attn_implementation" not in kwargs:
                where = {name: kwargs[name] for name in (*HUB_OPTIONS, *HEAD_OPTIONS) if name in kwargs}
                refuse_foreign_kernels(PreTrainedConfig.get_config_dict(name_or_path, **where)[0], str(name_or_path))
            target = AutoModelForCausalLM.from_pretrained(name_or_path, **kwargs)
        model = SpeculativeGenerationMixin.attach(target)
        if head is not None:
            model.add_drafter(drafter_of(head))
        return model


def _target_of(head: Any, named: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Where a head's target is, and the arguments to load it with.

    Args:
        head: The head.
        named: What the user named: the head's path or Hub id.
        kwargs: What the user gave for it.
    """
    base = head.config.base_model_name_or_path
    if head.layout in WHOLE_MODELS:  # the target and its heads are one checkpoint
        return named, kwargs
    if not base:
        raise CheckpointFormatError(f"The head {named} names no target (base_model_name_or_path).", _name_it(named))
    subfolder = kwargs.get("subfolder") or ""
    _check_target(base, named, subfolder)
    if base.startswith(BESIDE):  # the model that was trained with it, in a directory below
        return named, {**kwargs, "subfolder": str(Path(subfolder) / base.removeprefix(BESIDE))}
    if kwargs.get("trust_remote_code"):
        raise InvalidConfigError(
            f"trust_remote_code=True would run code of {base}, which the head {named} names: it is not passed on to a "
            "second repository.",
            f"Name it yourself: from_pretrained({base!r}, drafter={str(named)!r}, trust_remote_code=True).",
        )
    return base, {name: value for name, value in kwargs.items() if name not in HEAD_OPTIONS}


def _name_it(head: Any) -> str:
    return f"Name the target yourself: from_pretrained(target, drafter={str(head)!r})."


def _check_target(base: Any, head: Any, subfolder: str) -> None:
    """Refuse a target that a head cannot name for the user.

    A head from the Hub is a stranger's file: it may name a Hub id, or a directory below itself, but no other path of
    this machine. A head in a local directory may also name a local directory that holds a model.

    Args:
        base: What the head's configuration says; None and "" are no name.
        head: The path or Hub id of the head.
        subfolder: Where the head is below that.

    Raises:
        CheckpointFormatError: A path, a URL, a name that exists as a path here, or no text.
    """
    if base in (None, "") or (isinstance(base, str) and _can_be_named(base, Path(head), subfolder)):
        return
    raise CheckpointFormatError(
        f"The head {head} names the target {base!r:.200}, which is neither a Hub id nor a directory with a model"
        f"{' but a path of this machine' if _is_hub_id(base) else ''}.",
        _name_it(head),
    )


def _can_be_named(base: str, head: Path, subfolder: str) -> bool:
    if not base.isprintable():
        return False
    if base.startswith(BESIDE):
        below = PurePosixPath(base.removeprefix(BESIDE))
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


@contextmanager
def _as_ours(name: Any, head: Any) -> Iterator[None]:
    """Raise transformers' errors about a model that cannot be loaded as ours.

    Args:
        name: The model's path or Hub id.
        head: The head that names the model; None if the user does.

    Raises:
        CheckpointFormatError: No such repository or directory, no access, or files that are no model's.
    """
    try:
        yield
    except SpeculativeDecodingError:
        raise
    except (OSError, ValueError) as error:
        named = "" if head is None else f", which the head {head} names,"
        raise CheckpointFormatError(
            f"The model {str(name)!r}{named} cannot be loaded: {first_line(error)}",
            WHAT_TO_GIVE if head is None else _name_it(head),
        ) from error
