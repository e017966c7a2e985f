"""Base classes of draft heads: transformers models with an optional draft vocabulary, a model card and Hub upload.

The heads are in `eagle.py`, `eagle3.py`, `mtp.py`, `layer_mtp.py` and `medusa.py`; files are read by
`checkpoints/hub.py`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from huggingface_hub import CommitInfo, HfApi
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from hf_specdec.atomic import move_into, staging_directory
from hf_specdec.errors import DrafterMismatchError, InvalidConfigError
from hf_specdec.heads.attention import Attend, DraftRotaryEmbedding, attend_causally, attend_over
from hf_specdec.heads.card import CARD_NAME, RUN_PICTURE, model_card
from hf_specdec.heads.readings import Ambiguity, Reading
from hf_specdec.heads.schema import NEUTRAL, checked
from hf_specdec.records import checked_path, shortened
from hf_specdec.validation import Rule
from hf_specdec.verification.cache import TreeCache
from hf_specdec.verification.device_attention import Mask
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


class DraftHead(PreTrainedModel):
    """Base class of all heads.

    A head may draft frequent ("hot") tokens only, its draft vocabulary, as in FR-Spec
    (https://arxiv.org/abs/2502.14856): target id = draft id + `d2t[draft id]`, as in EAGLE-3 checkpoints.

    Attributes:
        method: Name for `speculative=`.
        layout: Layout of the checkpoint that it was read from, such as `"eagle3"` or `"speculators-eagle3"`.
        ambiguity: Possible interpretations of the files of an EAGLE-3 head in a layout other than ours; else None.
        reading: The interpretation chosen for an ambiguous head; None until one is chosen.
        shares_lm_head: Whether the head uses the target's lm_head; otherwise it has its own.
        adapter: The adapter of the target with which it was trained (`checkpoints.hub.AdapterFiles`), or None.
    """

    base_model_prefix = ""
    method: ClassVar[str]
    d2t: Tensor
    shares_lm_head: bool
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

    def _make_hot_tokens(self) -> None:
        """Create the buffer `d2t` `[Vd]`, zeros, if the head has a draft vocabulary."""
        size, whole = self.config.draft_vocab_size, self.config.vocab_size
        if size is None:
            return
        if size < 1 or (whole is not None and size > whole):
            raise InvalidConfigError(
                f"`draft_vocab_size` must be from 1 to the target's {whole} tokens, got {size}.",
                "Use None for the whole vocabulary.",
            )
        self.register_buffer("d2t", torch.zeros(size, dtype=torch.long))

    @property
    def hot_token_ids(self) -> Tensor | None:
        """Ascending target ids `[Vd]` of the draft vocabulary; None if it is the target's whole vocabulary."""
        if self.config.draft_vocab_size is None:
            return None
        return torch.arange(self.config.draft_vocab_size, device=self.d2t.device) + self.d2t

    def set_hot_token_ids(self, token_ids: Tensor) -> None:
        """Set the draft vocabulary, given distinct target ids `[Vd]` in ascending order."""
        ids = self._checked(token_ids)
        if len(ids) != self.config.draft_vocab_size:
            raise InvalidConfigError(
                f"The head's `draft_vocab_size` is {self.config.draft_vocab_size}, got {len(ids)} hot tokens.",
                "Give as many, or create the head with another `draft_vocab_size`.",
            )
        self.d2t = ids.to(self.d2t) - torch.arange(len(ids), device=self.d2t.device)

    def _checked(self, ids: Tensor) -> Tensor:
        size = self.config.vocab_size or 2**31  # unknown until the head is loaded for a target
        if not len(ids) or int(ids[0]) < 0 or int(ids[-1]) >= size or bool((ids[1:] <= ids[:-1]).any()):
            raise InvalidConfigError(f"Hot tokens must be one or more distinct, ascending ids from 0 to {size - 1}.")
        return ids

    def use_hot_tokens(self, token_ids: Tensor) -> None:
        """Restrict a head that shares the target's lm_head to these tokens, and set the config's `draft_vocab_size`.

        Args:
            token_ids: Target ids in any order.
        """
        if not self.shares_lm_head:
            raise InvalidConfigError(
                "This head has its own lm_head, which determines its draft vocabulary.",
                "Hot tokens can be set only for heads that share the target's lm_head.",
            )
        ids = self._checked(token_ids.to(torch.long).flatten().sort().values)
        self.config.draft_vocab_size = len(ids)
        self._make_hot_tokens()
        self.set_hot_token_ids(ids)

    def rows_of(self, lm_head: nn.Module) -> Tensor:
        """Return the rows `[Vd, D]` of a (possibly quantised) lm_head for the draft vocabulary."""
        rows, ids = linear_weight(lm_head, self.config.hidden_size), self.hot_token_ids
        return rows if ids is None else rows[ids.to(rows.device)]

    def check_sizes(self, target_config: Any) -> None:
        """Check that the head fits a target, given the config of the target's text decoder.

        If the head's `vocab_size` is unknown, it is set to the target's.

        Raises:
            DrafterMismatchError: The hidden size or vocabulary size differs.
        """
        own = self.config
        hidden_size = getattr(own, "target_hidden_size", None) or own.hidden_size
        if not own.vocab_size:  # unknown for Medusa heads without lm_heads, and in Muse-Glimmer's files
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
        """Return the logits `[B, 1, Vd]` of one forward, to measure the cost of drafting a tree level.

        The hidden states `features` `[B, 1, D]` are also used in place of token embeddings: only the cost matters.
        Medusa heads return `[K, B, 1, Vd]`.
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


class FeatureHead(DraftHead):
    """Base class of heads that read the target's features: EAGLE heads, MTP modules and block heads.

    Those whose config has `own_embedding` embed tokens with `embed_tokens`, others with the target.
    """

    embed_tokens: nn.Embedding
    needs_masks: ClassVar[bool] = False
    """Whether graphs must pass masks to `read`, because layers of transformers attend with them."""

    def _add_common_parts(self) -> None:
        """Create the parts that most of these heads have, as the last step of their constructors."""
        if self.config.own_embedding:
            self.embed_tokens = nn.Embedding(self.config.vocab_size, self.config.hidden_size)
        self.rotary_emb = DraftRotaryEmbedding(self.config)
        self._make_hot_tokens()
        self.post_init()

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Numbers of the target's hidden states that the head reads, see `Features`; -1: after the final norm.

        Raises `InvalidConfigError` while they are unknown.
        """
        return (-1,)

    def fuse(self, features: Tensor) -> Tensor:
        """Map the target's features `[..., layers * Dt]` to hidden states `[..., D]`; here the identity."""
        return features

    def new_cache(self, reserve: int) -> TreeCache:
        """Return a cache with one layer per draft layer for one call; it keeps `reserve` free slots after the text."""
        return TreeCache([None] * self.config.num_hidden_layers, capacity=0, reserve=reserve)

    def resolve_feature_layers(self, depth: int) -> None:
        """Set the feature layers for a target with `depth` layers if the config names none; here nothing to do."""

    def check_sizes(self, target_config: Any) -> None:
        """See `DraftHead.check_sizes`; also calls `resolve_feature_layers`."""
        depth = target_config.num_hidden_layers
        self.resolve_feature_layers(depth)
        super().check_sizes(target_config)
        if not all(-1 <= layer <= depth for layer in self.feature_layers):
            raise DrafterMismatchError(
                f"The target has hidden states 0 to {depth}, the head reads {list(self.feature_layers)}.",
                "Use it with the model that it was trained for.",
            )

    def score(self, hidden: Tensor, lm_head: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Return the logits `[..., Vd]` of outputs `[..., D]`.

        Args:
            hidden: Output of the head.
            lm_head: The target's lm_head over the draft vocabulary; used only if the head has none.

        Raises:
            ValueError: The head has no lm_head, and `lm_head` is None.
        """
        score = lm_head if self.shares_lm_head else self.lm_head
        if score is None:
            raise ValueError("This head shares the target's lm_head: pass it.")
        return score(hidden)

    def embedding_for(self, model: PreTrainedModel) -> nn.Module:
        """Return the head's own embedding, or else the target's."""
        return self.embed_tokens if self.config.own_embedding else model.get_input_embeddings()

    def share_embedding(self, model: PreTrainedModel) -> None:
        """Drop the head's own embedding if it equals the target's, as in most published checkpoints.

        Values are compared in the target's dtype. When the embedding is dropped, the config's `own_embedding` becomes
        False. It is kept if the target's is not a plain `nn.Embedding` or is on the meta device.
        """
        shared = model.get_input_embeddings()
        if self.config.own_embedding and type(shared) is nn.Embedding and weights_equal(self.embed_tokens, shared):
            del self.embed_tokens
            self.config.own_embedding = False


class EagleFamilyHead(FeatureHead):
    """Base class of EAGLE heads and MTP modules, which read features of the target and embeddings of tokens."""

    method = "eagle"
    shares_lm_head = True

    @property
    def target_hidden_size(self) -> int:
        """Hidden size of the target."""
        return int(getattr(self.config, "target_hidden_size", None) or self.config.hidden_size)

    def forward(
        self, token_embeddings: Tensor, hidden: Tensor, position_ids: Tensor, attend: Attend = attend_causally
    ) -> Tensor:
        """Return the predicted next hidden states `[B, T, D]`, which the next level reads.

        Args:
            token_embeddings: `[B, T, D]` embeddings of x[t+1].
            hidden: `[B, T, D]` output of `fuse` for the target's features at t; when drafting deeper than the first
                level, the head's own output at t.
            position_ids: `[B, T]` positions t.
            attend: Attention function, see `Attend`.
        """
        raise NotImplementedError

    def read(
        self, token_embeddings: Tensor, hidden: Tensor, position_ids: Tensor, cache: Cache, mask: Mask | None
    ) -> Tensor:
        """Do the same as `forward` for T new entries, which are appended to the cache; `mask` as for `attend_over`."""
        return self(token_embeddings, hidden, position_ids, attend_over(cache, mask))

    def draft_logits(self, features: Tensor, position: int, lm_head: nn.Module | None) -> Tensor:
        """See `DraftHead`."""
        positions = torch.full((1, 1), position, dtype=torch.long, device=features.device)
        return self.score(self(features, features, positions), lm_head)


def weights_equal(own: Any, layer: Any) -> bool:
    """Whether two layers' weights are equal in the dtype of the second; False if that is on the meta device."""
    weight, other = own.weight, layer.weight
    return weight.shape == other.shape and not other.is_meta and torch.equal(weight.to(other), other)


@torch.no_grad()
def linear_weight(layer: nn.Module, in_features: int) -> Tensor:
    """Return the weight `[out, in]` of a linear layer, which may be quantised."""
    weight = getattr(layer, "weight", None)
    if type(layer) is nn.Linear and type(weight) is nn.Parameter and weight.is_floating_point():
        return weight.detach()
    # works for any quantisation: the outputs for the unit vectors are the columns of the weight, plus the bias
    example = next(layer.parameters())
    dtype = example.dtype if example.is_floating_point() else torch.float32
    units = torch.eye(in_features, dtype=dtype, device=example.device)
    columns: Tensor = layer(units) - layer(torch.zeros_like(units[:1]))
    return columns.T


def bind_head(head: DraftHead, model: PreTrainedModel) -> None:
    """Check that a head fits the target, then move it to `lm_head_device` and cast it to the target's dtype."""
    head.check_sizes(text_config(model))
    if any(parameter.is_meta for parameter in head.parameters()):
        raise DrafterMismatchError(
            f"The weights of this {type(head).__name__} are on the meta device: they have no values.",
            "Load or create it on a real device; torch.set_default_device('meta') moves new modules there.",
        )
    device, size = lm_head_device(model, f"this {type(head).__name__}"), head.config.hidden_size
    read = getattr(model.get_output_embeddings(), "in_features", size)
    if head.shares_lm_head and read != size:
        raise DrafterMismatchError(
            f"The lm_head of {type(model).__name__} takes {read} inputs, this head produces {size}.",
            "Use a head with its own lm_head.",
        )
    scored, own = getattr(model.get_output_embeddings(), "out_features", None), head.config
    if getattr(own, "markov_rank", 0) and not own.draft_vocab_size and scored not in (None, own.vocab_size):
        raise DrafterMismatchError(
            f"The lm_head of {type(model).__name__} scores {scored} tokens, the head's Markov head {own.vocab_size}.",
            "Use a head without one.",
        )
    head.to(device=device, dtype=model.dtype)


def lm_head_device(model: PreTrainedModel, reader: str) -> torch.device:
    """Return the device of the target's lm_head, or that on which the target runs if the lm_head is offloaded.

    Args:
        model: The target.
        reader: What needs the lm_head, for the error if the target has none.
    """
    lm_head = model.get_output_embeddings()
    if lm_head is None:
        raise DrafterMismatchError(f"{type(model).__name__} has no lm_head for {reader}.")
    device = next((parameter.device for parameter in lm_head.parameters()), model.device)
    return execution_device(model) if device.type == "meta" else device
