"""The EAGLE-3 draft layer, which reads low, middle and high hidden states of the target.

Source: Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test"
(https://arxiv.org/abs/2503.01840). The published weights differ from the paper's figure: query, key and value read
the concatenation of embedding and hidden state, without a second linear layer. Most have their own lm_head.

P-EAGLE (https://arxiv.org/abs/2602.01469) is the same head, trained to predict several tokens in one forward, at mask
tokens that follow the text: each has the embedding of `mask_token_id` and the learned features `mask_hidden`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from hf_specdec.errors import DrafterMismatchError, InvalidConfigError
from hf_specdec.heads.attention import Attend, DraftAttention, attend_causally
from hf_specdec.heads.eagle import EagleConfig, EagleLayer, check_mask_token
from hf_specdec.heads.head import EagleFamilyHead
from hf_specdec.heads.readings import Reading
from hf_specdec.heads.schema import EAGLE3
from hf_specdec.validation import Rule
from hf_specdec.verification.features import LAST
from hf_specdec.verification.memory import persistent_tensors

PAPER_LAYERS = ("2", "L/2", "L-3")
"""Numbers of the hidden states that a head reads if its config names none, for a target with L layers."""


class Eagle3Config(EagleConfig):
    """Configuration of an EAGLE-3 head: the fields of `EagleConfig`, and those of published variants.

    Args:
        eagle_aux_hidden_state_layer_ids: Ascending numbers of the hidden states of the target that are read: 0 is the
            embedding, i the output of the first i layers, before the final norm; a -1 at the end is the last one after
            the final norm. None for the paper's 2, L/2 and L-3, resolved when the head is loaded for a target with L
            layers.
        target_hidden_size: Hidden size of the target; None if it is `hidden_size`.
        norm_before_residual: Whether the residual around attention is the normalized hidden state (speculators).
        fc_norm: Whether each hidden state has an RMSNorm before `fc` (EAGLE-3.1).
        norm_before_fc: Whether one RMSNorm over all hidden states precedes `fc` (speculators, NVIDIA); excludes
            `fc_norm`.
        norm_output: Whether the next level reads the normalized output (EAGLE-3.1, https://arxiv.org/abs/2605.09992).
        own_lm_head: Whether the head has its own lm_head; otherwise it uses the target's, after its own norm.
        logit_scale: Factor of the logits.
        num_hidden_layers: Number of layers.
        embedding_in_every_layer: Whether layers after the first also read the token embedding (DeepSpec); otherwise
            they are ordinary decoder layers.
        mask_token_id: Mask token of a P-EAGLE head, which drafts all levels in one forward; None if it drafts level by
            level.
    """

    model_type = "hf_specdec_eagle3"
    rules: ClassVar[Mapping[str, Rule]] = EAGLE3

    bias: bool = False
    eagle_aux_hidden_state_layer_ids: list[int] | None = None
    target_hidden_size: int | None = None
    norm_before_residual: bool = False
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False
    own_lm_head: bool = True
    logit_scale: float = 1.0
    embedding_in_every_layer: bool = False
    mask_token_id: int | None = None

    @classmethod
    def for_target(cls, target_config: Any, **overrides: Any) -> Eagle3Config:
        """Return the config of a head with the sizes of the target's decoder layers and the paper's feature layers.

        Args:
            target_config: Config of the target; its text part is used.
            **overrides: Fields that do not follow the target or the paper.

        Raises:
            InvalidConfigError: As for `EagleConfig.for_target`, or the target's number of layers is unknown.
        """
        depth = getattr(target_config.get_text_config(), "num_hidden_layers", None)
        if depth is None and "eagle_aux_hidden_state_layer_ids" not in overrides:
            raise InvalidConfigError(
                f"{type(target_config).__name__} has no num_hidden_layers.",
                "Pass eagle_aux_hidden_state_layer_ids.",
            )
        ids = paper_layers(depth or 0)
        return super().for_target(target_config, **{"eagle_aux_hidden_state_layer_ids": ids, **overrides})


def paper_layers(depth: int) -> list[int]:
    """Return the numbers of the hidden states that EAGLE's code reads: three, or fewer for a target of few layers.

    Example: `paper_layers(32)` is `[2, 16, 29]`.
    """
    return sorted({min(2, depth - 1), depth // 2, max(depth - 3, 0)})


def _are_layers(ids: Sequence[int]) -> bool:
    """Whether ids are ascending numbers of hidden states, at least one; `LAST` may be at the end."""
    inner = ids[:-1] if ids and ids[-1] == LAST else ids
    return len(ids) > 0 and sorted(set(inner)) == list(inner) and all(number >= 0 for number in inner)


class Eagle3Layer(nn.Module):
    """A decoder layer whose attention reads the concatenation of embedding and hidden state."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = LlamaRMSNorm(size, eps)
        self.hidden_norm = LlamaRMSNorm(size, eps)
        self.self_attn = DraftAttention(config, 2 * size, bias=config.qkv_bias)
        self.post_attention_layernorm = LlamaRMSNorm(size, eps)
        self.mlp = LlamaMLP(config)

    def forward(self, embeddings: Tensor, hidden: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Map embeddings and hidden states `[B, T, D]` to hidden states `[B, T, D]`."""
        normed = self.hidden_norm(hidden)
        both = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
        hidden = (normed if self.norm_before_residual else hidden) + self.self_attn(both, rotary, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3Head(EagleFamilyHead):
    """An EAGLE-3 head: `g'[t+1] = midlayer([embed(x[t+1]); g[t]])`, with `g[t] = fc(features[t])` for verified tokens.

    `lm_head(norm(g'[t+1]))` scores the token x[t+2]; the next level uses g' instead of g. Tensor names are those of
    the published checkpoints (`yuhuili/EAGLE3-*`); further layers are `layers.1`, `layers.2`, ...

    Raises:
        InvalidConfigError: The layer ids or a size is invalid, or fields contradict each other.
    """

    config_class = Eagle3Config
    _lm_head_is_embedding = False
    _no_split_modules = ("Eagle3Layer", "EagleLayer")

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        ids = config.eagle_aux_hidden_state_layer_ids
        if ids is not None and not _are_layers(ids):
            raise InvalidConfigError(
                f"`eagle_aux_hidden_state_layer_ids` must be ascending indices >= 0, or -1 at the end, got {ids}.",
                "Eagle3Config.for_target(model.config) sets them.",
            )
        if config.fc_norm and config.norm_before_fc:
            raise InvalidConfigError("`fc_norm` and `norm_before_fc` exclude each other; both are set.")
        size, target_size = config.hidden_size, config.target_hidden_size or config.hidden_size
        if target_size != size and not config.own_embedding:
            raise InvalidConfigError(
                f"A head with hidden_size {size} for a target with hidden_size {target_size} needs its own embedding.",
                "Set own_embedding=True.",
            )
        count = len(ids or PAPER_LAYERS)
        width = count * target_size
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(LlamaRMSNorm(target_size, config.rms_norm_eps) for _ in range(count))
        if config.norm_before_fc:
            self.input_norm = LlamaRMSNorm(width, config.rms_norm_eps)
        self.fc = nn.Linear(width, size, bias=config.bias)
        if config.mask_token_id is not None:
            check_mask_token(config)
            self.mask_hidden = nn.Parameter(self.fc.weight.new_empty(1, 1, width).normal_())
        self.midlayer = Eagle3Layer(config)
        if config.num_hidden_layers > 1:
            wide = config.embedding_in_every_layer
            self.layers = nn.ModuleDict({
                str(number): Eagle3Layer(config) if wide else EagleLayer(config, norm_input=True)
                for number in range(1, config.num_hidden_layers)
            })  # fmt: skip
        self.norm = LlamaRMSNorm(size, config.rms_norm_eps)
        self.shares_lm_head = not config.own_lm_head
        if config.own_lm_head:
            self.lm_head = nn.Linear(size, config.draft_vocab_size or config.vocab_size, bias=False)
        self._add_common_parts()

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """See `FeatureHead`."""
        if self.config.eagle_aux_hidden_state_layer_ids is None:
            raise InvalidConfigError(
                "The layers that this EAGLE-3 head reads are not known yet.",
                "Call head.resolve_feature_layers(num_hidden_layers of the target).",
            )
        return tuple(self.config.eagle_aux_hidden_state_layer_ids)

    def check_sizes(self, target_config: Any) -> None:
        """See `FeatureHead.check_sizes`; an ambiguous head without a reading first gets its first possible one."""
        if self.ambiguity is not None and self.reading is None:
            self.read_as(self.ambiguity.readings(target_config)[0], target_config)
        super().check_sizes(target_config)

    def read_as(self, reading: Reading, target_config: Any) -> None:
        """Choose one of the readings of an ambiguous head, and set the config fields that depend on it."""
        assert self.ambiguity is not None
        self.config.norm_output = reading.norm_output
        layers = self.ambiguity.layers(reading, target_config.num_hidden_layers)
        if layers is not None:
            self.config.eagle_aux_hidden_state_layer_ids = layers
        self.reading = reading

    def share_embedding(self, model: PreTrainedModel) -> None:
        """See `FeatureHead`; also give a head with `tie_word_embeddings` the target's embedding as its lm_head.

        Only the rows of the draft vocabulary are copied. Not done if the head has its own lm_head, or if the target's
        lm_head is tied to its embedding anyway.

        Raises:
            DrafterMismatchError: The head needs the target's embedding as lm_head, but the embedding is offloaded.
        """
        super().share_embedding(model)
        embedding = model.get_input_embeddings()
        tied = getattr(model.get_output_embeddings(), "weight", None) is embedding.weight
        if not self.config.tie_word_embeddings or not (self.shares_lm_head or self._lm_head_is_embedding) or tied:
            return
        if embedding.weight.is_meta:
            raise DrafterMismatchError(
                "This head uses the target's token embedding as lm_head, but the embedding is offloaded.",
                "Load the target without offloading its embedding.",
            )
        with persistent_tensors():
            rows = embedding.weight.detach().to(self.device, self.dtype, copy=True)
            ids = self.hot_token_ids
            self.lm_head = nn.Linear(self.config.hidden_size, 1, bias=False, device="meta")
            self.lm_head.weight = nn.Parameter(rows if ids is None else rows[ids.to(rows.device)], requires_grad=False)
        self.config.own_lm_head, self.shares_lm_head, self._lm_head_is_embedding = True, False, True

    def resolve_feature_layers(self, depth: int) -> None:
        """Use the paper's layers for a target with `depth` layers, if the config names none."""
        if self.config.eagle_aux_hidden_state_layer_ids is not None:
            return
        ids = paper_layers(depth)
        if len(ids) != len(PAPER_LAYERS):
            raise DrafterMismatchError(
                f"This EAGLE-3 head's config names no layers, and a target with {depth} layers has too few for the "
                f"default of {len(PAPER_LAYERS)} different ones: {ids}.",
                "Set eagle_aux_hidden_state_layer_ids in its config.",
            )
        self.config.eagle_aux_hidden_state_layer_ids = ids

    def fuse(self, features: Tensor) -> Tensor:
        """Map the target's features `[..., layers * Dt]` to hidden states `[..., D]` of this head."""
        if self.config.fc_norm:
            chunks = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        return self.fc(features)

    def forward(
        self, token_embeddings: Tensor, hidden: Tensor, position_ids: Tensor, attend: Attend = attend_causally
    ) -> Tensor:
        """See `EagleFamilyHead.forward`; the output is normalized if `norm_output` is set."""
        rotary = self.rotary_emb(hidden, position_ids)
        output: Tensor = self.midlayer(token_embeddings, hidden, rotary, attend)
        if self.config.num_hidden_layers > 1:
            read = (token_embeddings,) if self.config.embedding_in_every_layer else ()
            for layer in self.layers.values():
                output = layer(*read, output, rotary, attend)
        return self.norm(output) if self.config.norm_output else output

    def score(self, hidden: Tensor, lm_head: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """See `FeatureHead.score`; the logits are scaled by `logit_scale`."""
        logits = super().score(hidden if self.config.norm_output else self.norm(hidden), lm_head)
        return logits if self.config.logit_scale == 1.0 else logits * self.config.logit_scale
