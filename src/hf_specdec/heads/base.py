"""What every draft head is: a transformers model with a hot-token vocabulary, a card, and a way to the Hub.

The heads are `eagle.py`, `eagle3.py`, `mtp.py` and `medusa.py`; third-party heads are read by `checkpoints/hub.py`.
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
from hf_specdec.errors import DrafterMismatchError
from hf_specdec.heads.attention import attend_over
from hf_specdec.heads.card import CARD_NAME, RUN_PICTURE, model_card
from hf_specdec.heads.schema import Rule, checked
from hf_specdec.heads.vocabulary import HotTokens

NATIVE_LAYOUT = "hf-specdec"

CUSTOM_GENERATE = '''"""For `model.generate(..., custom_generate={repo!r}, trust_remote_code=True)`."""

from hf_specdec import SpeculativeGenerationMixin

HEAD = {repo!r}


def generate(model, speculative=None, **kwargs):
    """`model.generate(**kwargs)` with this repository's head; `speculative` may be anything that it may be there."""
    SpeculativeGenerationMixin.attach(model)
    if HEAD not in model.drafters:
        model.load_drafter(HEAD, name=HEAD)
    return model.generate(speculative=HEAD if speculative is None else speculative, **kwargs)
'''
"""The file that lets a head's repository be named in `custom_generate=`."""


def portable_name(name: str | None) -> str | None:
    """A model's name as other machines know it: a Hub id. None for a path of this machine, and where there is none.

    Example: "org/model" stays, "/home/me/model" is None.
    """
    if not name or name.startswith(("/", ".", "~")) or Path(name).is_absolute() or Path(name).exists():
        return None
    return name


class CheckedConfig:
    """Mixin of a head's configuration, before transformers' class: what a file says is checked, or stays behind.

    Attributes:
        rules: What its fields may be.
    """

    rules: ClassVar[Mapping[str, Rule]]

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in transformers, from the fields of the schema alone: nothing else of a stranger's file gets there.

        Raises:
            InvalidConfigError: A value of the wrong type or out of range.
        """
        return super().from_dict(checked(config_dict, cls.rules), **kwargs)  # type: ignore[misc]


class DraftHead(HotTokens, PreTrainedModel):
    """Base of all heads.

    Attributes:
        method: What it is called in `speculative=`.
        layout: The layout that it was read from, see `checkpoints/layouts.py`.
    """

    base_model_prefix = ""
    method: ClassVar[str]
    layout: str = NATIVE_LAYOUT

    def check_sizes(self, target_config: Any) -> None:
        """Compare with the configuration of a target's text decoder, before its weights are loaded or anything is run.

        Raises:
            DrafterMismatchError: Another hidden size or vocabulary, or too few layers.
        """
        own = self.config
        read = getattr(own, "target_hidden_size", None) or own.hidden_size
        if own.vocab_size is None:  # Medusa heads without an lm_head say nothing of it
            own.vocab_size = target_config.vocab_size
        for size, wanted in (("hidden_size", read), ("vocab_size", own.vocab_size)):
            if getattr(target_config, size) != wanted:
                raise DrafterMismatchError(
                    f"This {type(self).__name__} is for a target of {size} {wanted}, this one "
                    f"({type(target_config).__name__}) has {getattr(target_config, size)}.",
                    f"It was trained for {own.base_model_name_or_path or 'another model'}: load it on that one.",
                )

    def num_forwards(self, num_steps: int) -> int:
        """Forwards of the head that a tree so deep takes."""
        return num_steps

    def draft_logits(self, features: Tensor, position: int, lm_head: nn.Module | None) -> Tensor:
        """Logits of what one forward of drafting foresees; what a level of a tree costs is measured on it.

        Args:
            features: `[B, 1, D]`.
            position: Of the token.
            lm_head: The target's over the draft vocabulary, where it is shared.
        """
        raise NotImplementedError

    def save_pretrained(
        self, save_directory: str | Path, *args: Any, push_to_hub: bool = False, **kwargs: Any
    ) -> None:
        """Save as transformers does, whole or not at all, and write a model card where the directory has none.

        Args:
            save_directory: Made where it is missing.
            *args: As for every transformers model.
            push_to_hub: Upload it as well, to `repo_id` or the directory's name.
            **kwargs: As for every transformers model.
        """
        repo_id = kwargs.pop("repo_id", None) or Path(save_directory).name
        upload = {name: kwargs.pop(name) for name in UPLOAD_OPTIONS if name in kwargs}
        is_main, folder = kwargs.get("is_main_process", True), Path(save_directory)
        with staging_directory(folder) as made:
            super().save_pretrained(made, *args, **kwargs)
            if is_main:
                if not (folder / CARD_NAME).exists():
                    picture = RUN_PICTURE if (folder / RUN_PICTURE).exists() else None
                    (made / CARD_NAME).write_text(model_card(self.config, self.method, picture=picture))
                move_into(made, folder, first="config.json", stale=WEIGHT_PATTERNS)
        if is_main and push_to_hub:
            self.push_to_hub(repo_id, **upload, **kwargs)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> CommitInfo:
        """Upload the head with its card, and a `custom_generate/generate.py` that names it.

        transformers' own method writes a card of its own over any other; this one keeps what the repository has.

        Args:
            repo_id: `name` or `owner/name`.
            **kwargs: `token`, `private`, `revision`, `commit_message`, `commit_description`, `create_pr`, and what
                `save_pretrained` takes, e.g. `max_shard_size`.
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
"""Files of weights that an earlier head may have left in a directory."""

UPLOAD_OPTIONS = ("token", "private", "revision", "commit_message", "commit_description", "create_pr")


class EagleFamilyHead(DraftHead):
    """What EAGLE heads and MTP modules share: a view of the target's features, perhaps an embedding of their own."""

    method = "eagle"

    @property
    def target_hidden_size(self) -> int:
        """Width of one of the target's features."""
        return int(getattr(self.config, "target_hidden_size", None) or self.config.hidden_size)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Which of the target's hidden states it reads, as transformers counts them; -1 is behind the final norm."""
        return (-1,)

    def fuse(self, features: Tensor) -> Tensor:
        """The features of a target `[..., layers * Dt]` as hidden states `[..., D]`: here as they are."""
        return features

    def resolve_feature_layers(self, depth: int) -> None:
        """Settle which layers of a target so deep are read, where that is still open."""

    def read(
        self, token_embeddings: Tensor, hidden: Tensor, position_ids: Tensor, cache: Cache, mask: Tensor | None
    ) -> Tensor:
        """One forward while drafting: T new entries are appended to a cache of one layer.

        Args:
            token_embeddings, hidden, position_ids: As for `forward`.
            cache: The draft layer's.
            mask: `[B, 1, T, S]` bool, see `attend_over`.
        """
        output: Tensor = self(token_embeddings, hidden, position_ids, attend_over(cache, mask))
        return output

    def draft_logits(self, features: Tensor, position: int, lm_head: nn.Module | None) -> Tensor:
        """See `DraftHead`; `[B, 1, Vd]`."""
        positions = torch.full((1, 1), position, dtype=torch.long, device=features.device)
        logits: Tensor = self.score(self(features, features, positions), lm_head)
        return logits

    def check_sizes(self, target_config: Any) -> None:
        """See `DraftHead.check_sizes`; settles which layers are read."""
        depth = target_config.num_hidden_layers
        self.resolve_feature_layers(depth)
        super().check_sizes(target_config)
        if max(self.feature_layers) > depth:
            raise DrafterMismatchError(
                f"The target has hidden states 0 to {depth}, the head reads {list(self.feature_layers)}.",
                "It was trained for a deeper model.",
            )

    def _make_embedding(self) -> None:
        """The embedding, where the head has its own; called by the head's `__init__`."""
        if self.config.own_embedding:
            self.embed_tokens = torch.nn.Embedding(self.config.vocab_size, self.config.hidden_size)

    def embedding_for(self, model: PreTrainedModel) -> torch.nn.Module:
        """Its own embedding, or the target's."""
        own: torch.nn.Module = self.embed_tokens if self.config.own_embedding else model.get_input_embeddings()
        return own

    def share_embedding(self, model: PreTrainedModel) -> None:
        """Drop an own embedding that is only a copy of the target's, as most published checkpoints have it."""
        theirs = model.get_input_embeddings()
        if not self.config.own_embedding or type(theirs) is not torch.nn.Embedding:
            return
        weight, own = theirs.weight, self.embed_tokens.weight
        if own.shape == weight.shape and not weight.is_meta and torch.equal(own.to(weight), weight):
            del self.embed_tokens
            self.config.own_embedding = False
