"""Base classes of draft heads: transformers models with an optional draft vocabulary, a model card and Hub upload.

The heads are in `eagle.py`, `eagle3.py`, `mtp.py`, `layer_mtp.py` and `medusa.py`; files are read by
`checkpoints/hub.py`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from huggingface_hub import CommitInfo, HfApi
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from hf_specdec.atomic import move_into, staging_directory
from hf_specdec.errors import DrafterMismatchError, InvalidConfigError
from hf_specdec.heads.attention import attend_over
from hf_specdec.heads.card import CARD_NAME, RUN_PICTURE, model_card
from hf_specdec.heads.embedding import EmbeddingSharing
from hf_specdec.heads.readings import Ambiguity, Reading
from hf_specdec.heads.schema import NEUTRAL, checked
from hf_specdec.heads.vocabulary import HotTokens
from hf_specdec.records import checked_path, shortened
from hf_specdec.validation import Rule
from hf_specdec.verification.cache import TreeCache
from hf_specdec.verification.model import execution_device, text_config

NATIVE_LAYOUT = "hf-specdec"
"""Name of the layout that `save_pretrained` writes."""

CUSTOM_GENERATE = '''"""For `model.generate(..., custom_generate={repo!r}, trust_remote_code=True)`."""

from hf_specdec import SpeculativeGenerationMixin

HEAD = {repo!r}


def generate(model, speculative=None, **kwargs):
    """Call `model.generate(**kwargs)` with this repository's head, or with another `speculative=` method."""
    SpeculativeGenerationMixin.attach(model)
    if HEAD not in model.drafters:
        model.load_drafter(HEAD, name=HEAD)
    return model.generate(speculative=HEAD if speculative is None else speculative, **kwargs)
'''
"""Content of `custom_generate/generate.py`, which makes a head's repository usable as `custom_generate=`."""


def portable_name(name: str | None) -> str | None:
    """Return the name if it can be a Hub id; None if it is None or empty, looks like a path, or exists on this disk.

    Example: `"org/model"` is returned, `"/home/me/model"` gives None.
    """
    if not name or name.startswith(("/", ".", "~")) or Path(name).is_absolute() or Path(name).exists():
        return None
    return name


class CheckedConfig:
    """Mixin that validates a head's config; must precede transformers' class in the bases.

    Attributes:
        rules: Allowed values by field name.
    """

    rules: ClassVar[Mapping[str, Rule]]

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Create the config as in transformers, from the fields in `rules` only; other fields are dropped.

        A `partial_rotary_factor` at the top level is moved into `rope_parameters`.
        """
        for name, neutral in NEUTRAL.items():
            if config_dict.get(name) not in neutral:
                raise InvalidConfigError(
                    f"`{name}` is {shortened(config_dict[name])}, which draft heads do not support."
                )
        fields, rope = checked(config_dict, cls.rules), config_dict.get("rope_parameters")
        partial = config_dict.get("partial_rotary_factor")
        if partial is not None and "rope_parameters" in cls.rules:
            rope = {
                "rope_type": "default",
                **(rope if isinstance(rope, dict) else {}),
                "partial_rotary_factor": partial,
            }
            fields |= checked({"rope_parameters": rope}, cls.rules)
        return super().from_dict(fields, **kwargs)  # type: ignore[misc]


class DraftHead(HotTokens, PreTrainedModel):
    """Base class of all heads.

    Attributes:
        method: Name for `speculative=`.
        layout: Layout of the checkpoint that it was read from, such as `"eagle3"` or `"speculators-eagle3"`.
        ambiguity: Possible interpretations of the files of an EAGLE-3 head in a layout other than ours; else None.
        reading: The interpretation chosen for an ambiguous head; None until one is chosen.
        adapter: The adapter of the target with which it was trained (`checkpoints.hub.AdapterFiles`), or None.
    """

    base_model_prefix = ""
    method: ClassVar[str]
    layout: str = NATIVE_LAYOUT
    adapter: Any = None
    ambiguity: Ambiguity | None = None
    reading: Reading | None = None

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move and cast as PyTorch does, but keep the dtype of rotary frequencies.

        Rounding them to bfloat16 would change rotation angles by up to 1.8 rad per 1,000 tokens (`rope_theta` 500,000,
        `head_dim` 128).
        """
        exact = [
            (module, name, buffer)
            for module in self.modules()
            for name, buffer in module._buffers.items()
            if name.endswith("inv_freq") and buffer is not None and not buffer.is_meta
        ]
        super()._apply(fn, recurse)
        for module, name, buffer in exact:
            moved = module._buffers[name]
            if moved is not None and moved.dtype != buffer.dtype:
                module._buffers[name] = buffer.to(moved.device)
        return self

    def check_sizes(self, target_config: Any) -> None:
        """Check that the head fits a target, given the config of the target's text decoder.

        If the head's `vocab_size` is unknown, it is set to the target's.

        Raises:
            DrafterMismatchError: The hidden size or vocabulary size differs.
        """
        own = self.config
        hidden_size = getattr(own, "target_hidden_size", None) or own.hidden_size
        if own.vocab_size is None:  # unknown for Medusa heads without lm_heads
            own.vocab_size = target_config.vocab_size
        for size, wanted in (("hidden_size", hidden_size), ("vocab_size", own.vocab_size)):
            if getattr(target_config, size) != wanted:
                raise DrafterMismatchError(
                    f"This {type(self).__name__} needs a target with {size} {wanted}; the target's "
                    f"{type(target_config).__name__} has {getattr(target_config, size)}.",
                    f"Use it with the model it was trained for ({own.base_model_name_or_path or 'name unknown'}).",
                )

    def num_forwards(self, num_steps: int) -> int:
        """Return the number of forwards of the head that draft a tree with `num_steps` levels below the root."""
        return num_steps

    def draft_logits(self, features: Tensor, position: int, lm_head: nn.Module | None) -> Tensor:
        """Run one forward of the head and return its logits; used to measure the cost of drafting a tree level.

        Args:
            features: `[B, 1, D]` hidden states, also used in place of token embeddings: only the cost matters.
            position: Position id of the entry.
            lm_head: The target's lm_head over the draft vocabulary, if the head shares it.

        Returns:
            `[B, 1, Vd]`; Medusa heads return `[K, B, 1, Vd]`.
        """
        raise NotImplementedError

    def save_pretrained(
        self, save_directory: str | Path, *args: Any, push_to_hub: bool = False, **kwargs: Any
    ) -> None:
        """Save as in transformers, and write a model card unless the directory has one.

        Weights of an earlier head in the directory are deleted. If the save is interrupted, the directory holds either
        a complete head or one that `load_head` refuses, never a mixture.

        Args:
            save_directory: Created if missing.
            *args: As in transformers.
            push_to_hub: Also upload the head, to `repo_id` or to a repository with the directory's name.
            **kwargs: As in transformers.

        Raises:
            InvalidConfigError: `save_directory` is a file, or cannot be written.
        """
        folder = checked_path(save_directory)
        repo_id = kwargs.pop("repo_id", None) or folder.name
        upload = {name: kwargs.pop(name) for name in UPLOAD_OPTIONS if name in kwargs}
        is_main = kwargs.get("is_main_process", True)
        with staging_directory(folder) as staged:
            super().save_pretrained(staged, *args, **kwargs)
            if is_main:
                if not (folder / CARD_NAME).exists():
                    picture = RUN_PICTURE if (folder / RUN_PICTURE).exists() else None
                    (staged / CARD_NAME).write_text(model_card(self.config, self.method, picture=picture))
                move_into(staged, folder, first="config.json", stale=WEIGHT_PATTERNS)
        if is_main and push_to_hub:
            self.push_to_hub(repo_id, **upload, **kwargs)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> CommitInfo:
        """Upload the head with a model card and a `custom_generate/generate.py`; create the repository if missing.

        Unlike transformers' method, it does not overwrite the card of an existing repository.

        Args:
            repo_id: `name` or `owner/name`.
            **kwargs: `token`, `private`, `revision`, `commit_message`, `commit_description`, `create_pr`, and
                arguments of `save_pretrained`, e.g. `max_shard_size`.
        """
        upload = {name: kwargs.pop(name) for name in UPLOAD_OPTIONS if name in kwargs}
        upload.setdefault("commit_message", f"Upload {type(self).__name__}")
        api = HfApi(token=upload.pop("token", None))
        repo = api.create_repo(repo_id, private=upload.pop("private", None), exist_ok=True).repo_id
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            self.save_pretrained(folder, **kwargs)
            code = folder / "custom_generate" / "generate.py"
            code.parent.mkdir()
            code.write_text(CUSTOM_GENERATE.format(repo=repo))
            card = folder / CARD_NAME
            if api.file_exists(repo, CARD_NAME):
                card.unlink()
            else:
                card.write_text(model_card(self.config, self.method, repo))
            return api.upload_folder(repo_id=repo, folder_path=folder, **upload)


WEIGHT_PATTERNS = ("model*.safetensors", "model*.safetensors.index.json", "pytorch_model*.bin*")
"""Glob patterns of weight files; a save deletes those that an earlier head left in the directory."""

UPLOAD_OPTIONS = ("token", "private", "revision", "commit_message", "commit_description", "create_pr")
"""Arguments for the upload, which are not passed on to transformers' `save_pretrained`."""


class EagleFamilyHead(EmbeddingSharing, DraftHead):
    """Base class of EAGLE heads and MTP modules, which read features of the target and embeddings of tokens."""

    method = "eagle"

    @property
    def target_hidden_size(self) -> int:
        """Hidden size of the target."""
        return int(getattr(self.config, "target_hidden_size", None) or self.config.hidden_size)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Numbers of the target's hidden states that the head reads, see `Features`; -1: after the final norm."""
        return (-1,)

    def fuse(self, features: Tensor) -> Tensor:
        """Map the target's features `[..., layers * Dt]` to hidden states `[..., D]`; here the identity."""
        return features

    def new_cache(self, reserve: int) -> TreeCache:
        """Return a cache with one layer per draft layer for one call; it keeps `reserve` free slots after the text."""
        return TreeCache([None], capacity=0, reserve=reserve)

    def resolve_feature_layers(self, depth: int) -> None:
        """Set the feature layers for a target with `depth` layers if the config names none; here nothing to do."""

    def read(
        self, token_embeddings: Tensor, hidden: Tensor, position_ids: Tensor, cache: Cache, mask: Tensor | None
    ) -> Tensor:
        """Run one forward on T new entries, which are appended to the cache, and return their features `[B, T, D]`.

        Args:
            token_embeddings, hidden, position_ids: As for `forward`.
            cache: Cache with one layer per draft layer.
            mask: `[B, 1, T, S]` bool, see `attend_over`.
        """
        output: Tensor = self(token_embeddings, hidden, position_ids, attend_over(cache, mask))
        return output

    def draft_logits(self, features: Tensor, position: int, lm_head: nn.Module | None) -> Tensor:
        """See `DraftHead`; returns `[B, 1, Vd]`."""
        positions = torch.full((1, 1), position, dtype=torch.long, device=features.device)
        logits: Tensor = self.score(self(features, features, positions), lm_head)
        return logits

    def check_sizes(self, target_config: Any) -> None:
        """See `DraftHead.check_sizes`; also calls `resolve_feature_layers`."""
        depth = target_config.num_hidden_layers
        self.resolve_feature_layers(depth)
        super().check_sizes(target_config)
        if max(self.feature_layers) > depth:
            raise DrafterMismatchError(
                f"The target has hidden states 0 to {depth}, the head reads {list(self.feature_layers)}.",
                "Use it with the model that it was trained for.",
            )


def bind_head(head: DraftHead, model: PreTrainedModel) -> None:
    """Check that a head fits the target, then move it to the lm_head's device and cast it to the target's dtype.

    If the lm_head is offloaded, the head is moved to the device on which the target runs.
    """
    head.check_sizes(text_config(model))
    if any(parameter.is_meta for parameter in head.parameters()):
        raise DrafterMismatchError(
            f"The weights of this {type(head).__name__} are on the meta device: they have no values.",
            "Load or create it on a real device; torch.set_default_device('meta') moves new modules there.",
        )
    lm_head = model.get_output_embeddings()
    if lm_head is None:
        raise DrafterMismatchError(f"{type(model).__name__} has no lm_head for this {type(head).__name__}.")
    size = head.config.hidden_size
    read = getattr(lm_head, "in_features", size)
    if head.shares_lm_head and read != size:
        raise DrafterMismatchError(
            f"The lm_head of {type(model).__name__} takes {read} inputs, this head produces {size}.",
            "Use a head with its own lm_head.",
        )
    device = next((parameter.device for parameter in lm_head.parameters()), model.device)
    head.to(device=execution_device(model) if device.type == "meta" else device, dtype=model.dtype)
