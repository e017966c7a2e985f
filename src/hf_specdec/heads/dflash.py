"""Block heads: one forward drafts a whole block of tokens, from mask tokens in place of those to predict.

Sources: DFlash and DFlash2 (https://github.com/z-lab/dflash); JetSpec (https://github.com/hao-ai-lab/JetSpec) for
causal blocks; DSpark (https://github.com/deepseek-ai/DeepSpec) for the Markov and confidence heads; speculators
(https://github.com/vllm-project/speculators) for draft vocabularies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_specdec.errors import DrafterMismatchError, InvalidConfigError
from hf_specdec.heads.attention import Attend, DraftAttention, attend_over
from hf_specdec.heads.eagle import EagleConfig, EagleLayer, check_mask_token
from hf_specdec.heads.head import FeatureHead, weights_equal
from hf_specdec.heads.schema import DFLASH
from hf_specdec.validation import Rule

FULL, SLIDING = "full_attention", "sliding_attention"
DEFAULT_BLOCK = 8
MARKOV_TYPES = ("vanilla", "gated", "rnn", "domino")


class DFlashConfig(EagleConfig):
    """Configuration of a block head: the fields of `EagleConfig`, and those of published variants.

    Args:
        vocab_size: Vocabulary size of the target; 0 until the head is loaded for a target.
        block_size: Slots of the block that the head was trained with, the root's included.
        mask_token_id: Token whose embedding stands for a token to predict.
        aux_hidden_state_layer_ids: Numbers of the target's hidden states that the head reads, in this order: 0 is the
            embedding, i the output of the first i layers, before the final norm; -1 is the last one after the final
            norm. None for DFlash's default, resolved when the head is loaded for a target.
        causal: Whether a slot sees only itself and earlier slots in layers with full attention (JetSpec).
        sliding_causal: The same in layers with a sliding window.
        window_from_anchor: Whether all slots of a block see the same context through a sliding window, the last
            `sliding_window` tokens before the root, and the whole block (speculators). Otherwise the window of a slot
            reaches `sliding_window - 1` positions from it, in both directions (z-lab).
        layer_types: `"full_attention"` or `"sliding_attention"` for each layer; None for full attention in all.
        sample_from_anchor: Whether the output of slot j, counted from the root's slot 0, predicts the token after the
            slot's own position, so that B slots draft B tokens. Otherwise it predicts the token at its position.
        markov_rank: Rank of the Markov head; 0 for none.
        markov_head_type: `"vanilla"`, `"gated"`, `"rnn"` or `"domino"`.
        gru_hidden_dim: Size of the recurrent state of type `"domino"`.
        confidence_head: Whether the head predicts how likely its tokens are accepted.
        confidence_with_markov: Whether this prediction reads the previous token, too.
        own_lm_head: Whether the head has its own lm_head; otherwise it uses the target's.
        input_embedding_scale: Factor of the rows of the embedding's table, which are then read without what the
            embedding itself adds (a norm, a factor); None for the embedding as it is.
        logit_multiplier: Factor of the logits.
        logit_softcap: Bound c of the logits x after this factor, which become `c tanh(x / c)`; None for no bound.
        conv_kernel_size: Slots that the convolutions in each layer read, the own one included; 0 for none (DFlash2).
        conv_group_size: Numbers of a hidden state whose kernels depend on the slot in the same way.
        selector_rank: Rank of the candidate selector; 0 for none (DFlash2).
        selector_top_k: Candidates per depth whose pairs the selector scores.
        lilicorr_candidate_topk: Candidates per depth whose pairs a small transformer scores; 0 for none (LiLiCorr).
        lilicorr_hidden_size: Its hidden size; 0 for that of the head.
        lilicorr_num_layers, lilicorr_num_heads, lilicorr_mlp_ratio: Its layers, their attention heads, and the width
            of their MLPs as a multiple of its hidden size.
        lilicorr_factor_dim, lilicorr_vector_eps, lilicorr_logit_scale: Size of the vectors whose cosines are the
            scores, the smallest length that they are divided by, and the factor of the scores.
        all_children: Whether trees get all `top_k` children of each expanded node, as JetSpec's do, rather than the
            likeliest nodes.
        num_hidden_layers: Number of layers.
        num_target_layers: Number of the target's layers; None until the head is loaded for a target. DFlash's own
            code needs it in exported heads.
    """

    model_type = "hf_specdec_dflash"
    rules: ClassVar[Mapping[str, Rule]] = DFLASH

    bias: bool = False
    qk_norm: bool = True
    num_hidden_layers: int = 2
    block_size: int = DEFAULT_BLOCK
    mask_token_id: int = 0
    aux_hidden_state_layer_ids: list[int] | None = None
    causal: bool = False
    sliding_causal: bool = False
    window_from_anchor: bool = False
    layer_types: list[str] | None = None
    sample_from_anchor: bool = False
    markov_rank: int = 0
    markov_head_type: str = "vanilla"
    gru_hidden_dim: int = 0
    confidence_head: bool = False
    confidence_with_markov: bool = False
    own_lm_head: bool = False
    input_embedding_scale: float | None = None
    logit_multiplier: float = 1.0
    logit_softcap: float | None = None
    conv_kernel_size: int = 0
    conv_group_size: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0
    lilicorr_candidate_topk: int = 0
    lilicorr_hidden_size: int = 0
    lilicorr_num_layers: int = 2
    lilicorr_num_heads: int = 4
    lilicorr_mlp_ratio: float = 4.0
    lilicorr_factor_dim: int = 64
    lilicorr_vector_eps: float = 1e-6
    lilicorr_logit_scale: float = 1.0
    all_children: bool = False
    num_target_layers: int | None = None

    @property
    def max_depth(self) -> int:
        """Number of tokens that a block of the trained size drafts."""
        return self.block_size - (not self.sample_from_anchor)

    @property
    def num_candidates(self) -> int:
        """Number of candidates per depth whose pairs are scored; 0: children do not depend on such pairs."""
        return self.selector_top_k or self.lilicorr_candidate_topk


def default_layers(depth: int, num_draft_layers: int) -> list[int]:
    """Return the hidden states that DFlash's code reads for a target with `depth` layers.

    Example: `default_layers(36, 5)` is `[2, 10, 18, 26, 34]`.
    """
    if num_draft_layers == 1:
        return [depth // 2 + 1]
    return [round(1 + i * (depth - 4) / (num_draft_layers - 1)) + 1 for i in range(num_draft_layers)]


class TableEmbedding(nn.Module):
    """Rows of an embedding's table times a factor, without what the embedding itself adds to them.

    Args:
        embedding: Has the table `[V, D]` as its `weight`.
        scale: The factor.

    Raises:
        DrafterMismatchError: It has no such table, or it is offloaded.
    """

    def __init__(self, embedding: nn.Module, scale: float) -> None:
        super().__init__()
        table = getattr(embedding, "weight", None)
        if not isinstance(table, Tensor) or not table.is_floating_point() or table.is_meta:
            raise DrafterMismatchError(
                f"This block head reads rows of the embedding's table, which the target's {type(embedding).__name__} "
                "does not have as a floating-point `weight` in memory.",
                "Load the target without a quantised or offloaded embedding.",
            )
        self.embedding, self.scale, self.embedding_dim = embedding, scale, table.shape[-1]

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the embeddings `[..., D]` of tokens `[...]`."""
        return nn.functional.embedding(tokens, self.embedding.weight) * self.scale  # type: ignore[arg-type]


class MarkovHead(nn.Module):
    """Low-rank correction of the logits, given the previous token and the slot's output.

    `logits(next) += W2 m(W1[previous])`. DSpark draws chains; here the correction is computed for every node of a tree
    (`drafters/dflash.py`), which the tensors allow without change.

    Tensor names are DeepSpec's. In type `gated`, a gate that also reads the slot's output scales the token's
    embedding; in type `rnn`, a recurrent state carries all previous tokens of the path. In type `domino` (as SGLang
    0.5.23 runs Domino's heads), this state is that of a GRU over the embeddings of the block, a layer of size r reads
    it and the slot's output, and the first drafted token is not corrected.

    Args:
        config: Provides `vocab_size` V, `draft_vocab_size` Vd or None, `hidden_size` D, `markov_rank` r and
            `markov_head_type`; for type `domino` also `gru_hidden_dim`.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        size, rank, self.kind = config.hidden_size, config.markov_rank, config.markov_head_type
        self.state_size = config.gru_hidden_dim if self.kind == "domino" else rank
        if self.kind == "domino":
            self.prefix_gru = nn.GRU(size, self.state_size, bias=False)  # for its tensors only
            self.input_proj = nn.Linear(size + self.state_size, rank, bias=False)
        else:
            self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size or config.vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(size + rank, rank)
        if self.kind == "rnn":
            self.joint_proj = nn.Linear(size + 2 * rank, 3 * rank)

    def start(self, *shape: int) -> Tensor:
        """Return the state `[*shape, state size]` before the first token of a path: zeros."""
        weight = self.markov_w2.weight
        return torch.zeros(*shape, self.state_size, dtype=weight.dtype, device=weight.device)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings `[..., r]` of previous tokens `[...]`, given as ids of the target."""
        return self.markov_w1(tokens)

    def mix(
        self, tokens: Tensor, hidden: Tensor, state: Tensor, embedding: Callable[[Tensor], Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the r numbers `[..., r]` that `markov_w2` maps to the correction, and the state after.

        Args:
            tokens: `[...]` the previous tokens, as ids of the target.
            hidden: `[..., D]` the block's outputs that predict the tokens after them.
            state: `[..., state size]` states before these tokens; only types `rnn` and `domino` change them.
            embedding: That of the block's tokens, for type `domino`.
        """
        if self.kind == "domino":
            assert embedding is not None
            gru: Any = self.prefix_gru
            new = nn.functional.linear(embedding(tokens).to(state), gru.weight_ih_l0).chunk(3, dim=-1)
            old = nn.functional.linear(state, gru.weight_hh_l0).chunk(3, dim=-1)
            reset, keep = (new[0] + old[0]).sigmoid(), (new[1] + old[1]).sigmoid()
            state = keep * state + (1 - keep) * (new[2] + reset * old[2]).tanh()
            return nn.functional.silu(self.input_proj(torch.cat([hidden, state], dim=-1))), state
        embeddings = self.embed(tokens)
        if self.kind == "gated":
            embeddings = self.gate_proj(torch.cat([hidden, embeddings], dim=-1)).sigmoid() * embeddings
        if self.kind == "rnn":
            gate, candidate, output = self.joint_proj(torch.cat([state, embeddings, hidden], dim=-1)).chunk(3, dim=-1)
            gate = gate.sigmoid()
            state, embeddings = gate * state + (1 - gate) * candidate.tanh(), output.tanh()
        return embeddings, state

    def forward(
        self, tokens: Tensor, hidden: Tensor, state: Tensor, embedding: Callable[[Tensor], Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the correction of the logits `[..., Vd]` after some tokens, and the state after them; see `mix`."""
        numbers, state = self.mix(tokens, hidden, state, embedding)
        correction: Tensor = self.markov_w2(numbers)
        return correction, state


class BlockConvolution(nn.Module):
    """Causal convolutions along a block, before and after a part of a layer; the kernels depend on the slot (DFlash2).

    Slot t becomes the sum over taps j of `(base[j] + change[t, j]) * x[t - j]`; a block has nothing before its first
    slot. One projection of the part's input gives the changes of both kernels, one number per group.

    Args:
        config: Provides `hidden_size` D, `conv_kernel_size` and `conv_group_size`.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.taps, self.group_size = config.conv_kernel_size, config.conv_group_size
        count = 2 * self.taps * config.hidden_size // self.group_size
        self.kernel_projection = nn.Linear(config.hidden_size, count, bias=False)
        base = self.kernel_projection.weight.new_zeros(2, self.taps, config.hidden_size)
        base[:, 0] = 1.0
        self.base_kernel = nn.Parameter(base)

    def forward(self, hidden: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the convolved output of `part`, given its input `[B, T, D]` before the convolution."""
        changes = self.kernel_projection(hidden).unflatten(-1, (2, self.taps, -1))[..., None]
        kernels = self.base_kernel + changes.expand(*changes.shape[:-1], self.group_size).flatten(-2)
        before, after = kernels.unbind(-3)
        return self._convolved(part(self._convolved(hidden, before)), after)

    def _convolved(self, hidden: Tensor, kernels: Tensor) -> Tensor:
        """Convolve `[B, T, D]` with kernels `[B, T, taps, D]`."""
        padded = nn.functional.pad(hidden, (0, 0, self.taps - 1, 0))
        shifted = [padded[:, self.taps - 1 - tap :][:, : hidden.shape[1]] for tap in range(self.taps)]
        return (kernels * torch.stack(shifted, dim=-2)).sum(-2)


class ConvolvedLayer(EagleLayer):
    """A layer with convolutions around attention and MLP (DFlash2)."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config, norm_input=True)
        self.attention_conv, self.mlp_conv = BlockConvolution(config), BlockConvolution(config)

    def forward(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """See `EagleLayer`; the slots `[B, T, D]` are those of one block."""
        attention = partial(self.self_attn, rotary=rotary, attend=attend)
        hidden = hidden + self.attention_conv(self.input_layernorm(hidden), attention)
        return hidden + self.mlp_conv(self.post_attention_layernorm(hidden), self.mlp)


class CandidateSelector(nn.Module):
    """Scores of candidates after each candidate of the depth above (DFlash2).

    `score(p, c) = unary(c) + <pred[p] * (W h), succ[c]>` at a depth whose slot has the output h. Tensor names are
    z-lab's. SGLang and vLLM follow one path through these scores; here a tree is grown over them.

    Args:
        config: Provides `vocab_size` V, `hidden_size` D and `selector_rank` r.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)
        zeros, shape = self.hidden_projection.weight.new_zeros, (config.vocab_size, config.selector_rank)
        self.predecessor_codebook, self.successor_codebook = nn.Parameter(zeros(shape)), nn.Parameter(zeros(shape))

    def forward(self, roots: Tensor, candidates: Tensor, unary: Tensor, hidden: Tensor) -> Tensor:
        """Return scores `[B, S, C, C]` of each depth's candidates (last) after each of those above.

        At the first depth, all rows are those after the root.

        Args:
            roots: `[B]` root tokens.
            candidates, unary: `[B, S, C]` tokens at S depths, and their scores up to a constant per depth.
            hidden: `[B, S, D]` the block's outputs that predict them.
        """
        above = torch.cat([roots[:, None, None].expand_as(candidates[:, :1]), candidates[:, :-1]], dim=1)
        contexts = self.predecessor_codebook[above] * self.hidden_projection(hidden)[:, :, None]
        return unary[:, :, None] + contexts @ self.successor_codebook[candidates].transpose(-1, -2)


class UpDown(nn.Module):
    """An MLP `down_proj(silu(up_proj(x)))` with biases (LiLiCorr)."""

    def __init__(self, size: int, inner: int, outer: int) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(size, inner), nn.Linear(inner, outer)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map `[..., size]` to `[..., outer]`."""
        return self.down_proj(nn.functional.silu(self.up_proj(hidden)))


class CandidateLayer(nn.Module):
    """A transformer layer over all candidates of all depths, whose attention has a bias but no mask (LiLiCorr)."""

    def __init__(self, config: Any, size: int) -> None:
        super().__init__()
        self.attn_norm, self.mlp_norm = (LlamaRMSNorm(size, config.rms_norm_eps) for _ in range(2))
        self.attn = nn.MultiheadAttention(size, config.lilicorr_num_heads)  # for its tensors only
        self.mlp = UpDown(size, int(size * config.lilicorr_mlp_ratio), size)

    def forward(self, hidden: Tensor, bias: Tensor) -> Tensor:
        """Map `[B, N, D]` to `[B, N, D]`; `bias` `[heads, N, N]` is added to the attention's scores."""
        states = nn.functional.linear(self.attn_norm(hidden), self.attn.in_proj_weight, self.attn.in_proj_bias)
        query, key, value = states.unflatten(-1, (3, self.attn.num_heads, -1)).permute(2, 0, 3, 1, 4)
        output = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias[None])
        hidden = hidden + self.attn.out_proj(output.transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.mlp_norm(hidden))


class CandidateTransformer(nn.Module):
    """Scores of candidates after each candidate of the depth above, from a small transformer over all of them.

    Source: LiLiCorr as SGLang 0.5.23 runs it (`models/lilicorr.py`), with its tensor names. A candidate is its
    embedding, its depth's output, its rank and features of its probability. The transformer's output and the context
    give two vectors per candidate; the score of a pair is the scaled cosine of those that point at each other.

    Args:
        config: Provides `hidden_size` D, `block_size`, `rms_norm_eps` and the fields `lilicorr_*`.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        outer, self.config = config.hidden_size, config
        size, depths = config.lilicorr_hidden_size or outer, config.block_size - 1
        self.token_proj = nn.Identity() if size == outer else nn.Linear(outer, size)
        self.pass_hidden_proj, self.context_proj = nn.Linear(outer, size), nn.Linear(outer, size)
        self.feature_norm, self.feature_mlp = nn.LayerNorm(5), UpDown(5, size, size)
        count, heads = config.lilicorr_candidate_topk, config.lilicorr_num_heads
        zeros = self.context_proj.weight.new_zeros
        self.slot_embedding = nn.Parameter(zeros(1, 1, depths, 1, size))
        self.rank_embedding = nn.Parameter(zeros(1, 1, 1, count, size))
        self.relative_slot_bias = nn.Parameter(zeros(heads, 2 * config.block_size - 1))
        self.same_slot_bias = nn.Parameter(zeros(heads))
        self.layers = nn.ModuleList(CandidateLayer(config, size) for _ in range(config.lilicorr_num_layers))
        self.output_norm, self.anchor_norm = (LlamaRMSNorm(size, config.rms_norm_eps) for _ in range(2))
        self.factor_input_proj = nn.Linear(3 * size, size)
        self.out_head, self.in_head, self.anchor_out_head = (
            nn.Linear(size, config.lilicorr_factor_dim) for _ in range(3)
        )

    def forward(self, embeddings: Tensor, log_probs: Tensor, hidden: Tensor, context: Tensor) -> Tensor:
        """Return scores `[B, S, C, C]` of each depth's candidates (last) after each of those above.

        At the first depth, all rows are those after the root.

        Args:
            embeddings: `[B, S, C, D]` of the candidates at S depths, the likeliest first.
            log_probs: `[B, S, C]` their log-probabilities in the whole vocabulary.
            hidden: `[B, S, D]` the block's outputs that predict them.
            context: `[B, D]` the context of the token before the root, an output of `DFlashHead.fuse`.
        """
        (_, depths, count), eps = log_probs.shape, self.config.lilicorr_vector_eps
        ranks = torch.arange(count, device=log_probs.device)
        features = [log_probs, log_probs.exp(), log_probs - log_probs.amax(-1, keepdim=True),
                    (ranks / max(count - 1, 1)).expand_as(log_probs), (ranks == 0).expand_as(log_probs)]  # fmt: skip
        states = self.token_proj(embeddings) + self.pass_hidden_proj(hidden)[:, :, None]
        states = states + self.feature_mlp(self.feature_norm(torch.stack(features, dim=-1).to(states.dtype)))
        states = (states + self.slot_embedding[0, :, :depths] + self.rank_embedding[0]).flatten(1, 2)
        slots = torch.arange(depths, device=log_probs.device).repeat_interleave(count)
        behind = slots[:, None] - slots
        bias = self.relative_slot_bias[:, behind + self.config.block_size - 1]
        bias = bias + (behind == 0) * self.same_slot_bias[:, None, None]
        for layer in self.layers:
            states = layer(states, bias)
        states, root = self.output_norm(states), self.anchor_norm(self.context_proj(context))
        around = root[:, None].expand_as(states)
        factors = self.factor_input_proj(torch.cat([states, around, states * around], dim=-1))
        factors = nn.functional.silu(factors).unflatten(1, (depths, count))
        outwards, inwards = (nn.functional.normalize(head(factors), dim=-1, eps=eps)
                             for head in (self.out_head, self.in_head))  # fmt: skip
        first = nn.functional.normalize(self.anchor_out_head(root), dim=-1, eps=eps)
        outwards = torch.cat([first[:, None, None].expand_as(outwards[:, :1]), outwards[:, :-1]], dim=1)
        return self.config.lilicorr_logit_scale * (outwards @ inwards.transpose(-1, -2)).float()


class ConfidenceHead(nn.Module):
    """Logit of the probability that a drafted token is accepted if all tokens before it are.

    Args:
        input_size: D, or D + r if it also reads the Markov head's embedding of the previous token.
    """

    def __init__(self, input_size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(input_size, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits `[...]` for inputs `[..., input_size]`."""
        logits: Tensor = self.proj(hidden)
        return logits.squeeze(-1)


class DFlashHead(FeatureHead):
    """A block head: layers whose queries are the slots `[root, mask, ..., mask]`.

    Every layer attends to the context and to the block. The context of a verified token p is
    `hidden_norm(fc(features[p]))`; it has no queries, so only its keys and values are computed, once per token.
    `lm_head(norm(h))` scores the tokens. Tensor names are those of z-lab's checkpoints.

    Raises:
        InvalidConfigError: A size is invalid, or fields contradict each other.
    """

    method = "dflash"
    config_class = DFlashConfig
    _no_split_modules = ("EagleLayer", "ConvolvedLayer")

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config)
        check_block(config)
        size, eps = config.hidden_size, config.rms_norm_eps
        count = len(config.aux_hidden_state_layer_ids or range(config.num_hidden_layers))
        self.fc = nn.Linear(count * size, size, bias=config.bias)
        self.hidden_norm = LlamaRMSNorm(size, eps)
        layer = ConvolvedLayer if config.conv_kernel_size else partial(EagleLayer, norm_input=True)
        self.layers = nn.ModuleList(layer(config) for _ in range(config.num_hidden_layers))
        self.norm = LlamaRMSNorm(size, eps)
        self.shares_lm_head = not config.own_lm_head
        if config.own_lm_head:
            self.lm_head = nn.Linear(size, config.draft_vocab_size or config.vocab_size, bias=False)
        if config.markov_rank:
            self.markov_head = MarkovHead(config)
        if config.selector_rank:
            self.candidate_selector = CandidateSelector(config)
        if config.lilicorr_candidate_topk:
            self.lilicorr = CandidateTransformer(config)
        if config.confidence_head:
            self.confidence_head = ConfidenceHead(size + config.confidence_with_markov * config.markov_rank)
        self._add_common_parts()

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """See `FeatureHead`."""
        if self.config.aux_hidden_state_layer_ids is None:
            raise InvalidConfigError(
                "The layers that this block head reads are not known yet.",
                "Set aux_hidden_state_layer_ids in its config, or load it for a target.",
            )
        return tuple(self.config.aux_hidden_state_layer_ids)

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """Sliding window of each layer in positions, the current one included; None for full attention."""
        types = self.config.layer_types or [FULL] * self.config.num_hidden_layers
        return tuple(self.config.sliding_window if kind == SLIDING else None for kind in types)

    def resolve_feature_layers(self, depth: int) -> None:
        """Use DFlash's layers for a target with `depth` layers, if the config names none."""
        if self.config.aux_hidden_state_layer_ids is None:
            self.config.aux_hidden_state_layer_ids = default_layers(depth, self.config.num_hidden_layers)

    def check_sizes(self, target_config: Any) -> None:
        """See `FeatureHead.check_sizes`; also checks the mask token, and sets `num_target_layers`."""
        super().check_sizes(target_config)
        check_block(self.config)
        self.config.num_target_layers = target_config.num_hidden_layers

    def embedding_for(self, model: PreTrainedModel) -> nn.Module:
        """See `FeatureHead`; the rows of its table only, if the config has an `input_embedding_scale`."""
        embedding, scale = super().embedding_for(model), self.config.input_embedding_scale
        is_plain = scale is None or (scale == 1 and type(embedding) is nn.Embedding)
        return embedding if is_plain else TableEmbedding(embedding, scale)

    def share_embedding(self, model: PreTrainedModel) -> None:
        """See `FeatureHead`; also drop the head's lm_head if it equals the target's, as in DeepSpec's files."""
        super().share_embedding(model)
        lm_head = model.get_output_embeddings()
        if self.config.own_lm_head and type(lm_head) is nn.Linear and weights_equal(self.lm_head, lm_head):
            del self.lm_head
            self.config.own_lm_head, self.shares_lm_head = False, True

    def num_forwards(self, num_steps: int) -> int:
        """Return 1: one forward drafts all levels."""
        return 1

    def fuse(self, features: Tensor) -> Tensor:
        """Map the target's features `[..., layers * D]` to the context `[..., D]`."""
        return self.hidden_norm(self.fc(features))

    def context_states(self, context: Tensor, position_ids: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return each layer's keys and values `[B, G, T, d]` of the context, the output `[B, T, D]` of `fuse`."""
        rotary = self.rotary_emb(context, position_ids)
        attentions: list[DraftAttention] = [layer.self_attn for layer in self.layers]  # type: ignore[misc]
        return [attention.keys_and_values(context, rotary) for attention in attentions]

    def forward(self, token_embeddings: Tensor, position_ids: Tensor, attend: Attend) -> Tensor:
        """Return the normalized outputs `[B, T, D]` of the slots of one or more blocks, given their embeddings.

        `attend` is the attention of the slots to context and block; its i-th call is layer i's.
        """
        rotary, hidden = self.rotary_emb(token_embeddings, position_ids), token_embeddings
        for layer in self.layers:
            hidden = layer(hidden, rotary, attend)
        return self.norm(hidden)

    def read(self, token_embeddings: Tensor, position_ids: Tensor, cache: Cache, masks: Sequence[Tensor]) -> Tensor:
        """Run one block after the cached context and return its outputs `[B, T, D]`; `masks` has one mask per layer.

        The block's keys and values are appended to the cache, for the caller to roll back.
        """
        return self(token_embeddings, position_ids, attend_over(cache, masks))

    def score(self, hidden: Tensor, lm_head: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """See `FeatureHead.score`; with the config's multiplier and bound of the logits."""
        logits, config = super().score(hidden, lm_head), self.config
        if config.logit_multiplier != 1:
            logits = logits * config.logit_multiplier
        return (
            logits if config.logit_softcap is None else config.logit_softcap * (logits / config.logit_softcap).tanh()
        )

    def start_state(self, roots: Tensor, first: Tensor) -> Tensor:
        """Return the Markov head's state before the roots `[...]`, whose slots' outputs are `first`.

        If the root's slot predicts nothing, the state of type `rnn` has passed it nevertheless, as in speculators.
        """
        state: Tensor = self.markov_head.start(*roots.shape)
        passes = self.config.sample_from_anchor or self.config.markov_head_type == "domino"
        return state if passes else self.markov_head(roots, first, state)[1]

    def confidence(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Return the logits `[...]` of the probability that the tokens predicted by outputs `[..., D]` are accepted.

        `tokens` `[...]` is the token before each predicted one.
        """
        if self.config.confidence_with_markov:
            hidden = torch.cat([hidden, self.markov_head.embed(tokens)], dim=-1)
        return self.confidence_head(hidden)

    def draft_logits(self, features: Tensor, position: int, lm_head: nn.Module | None) -> Tensor:
        """See `DraftHead`; runs a block whose slots all have the embedding `features`, and returns `[B, S, Vd]`."""
        slots = self.config.block_size
        positions = torch.arange(position, position + slots, dtype=torch.long, device=features.device)[None]
        cache, mask = self.new_cache(0), torch.ones(1, 1, slots, slots, dtype=torch.bool, device=features.device)
        embeddings = features.expand(-1, slots, -1)
        return self.score(self.read(embeddings, positions, cache, [mask] * len(self.layers)), lm_head)


def check_block(config: DFlashConfig) -> None:
    """Raise `InvalidConfigError` if fields of a block head's config are invalid or contradict each other."""
    types = config.layer_types or [FULL] * config.num_hidden_layers
    if len(types) != config.num_hidden_layers or not set(types) <= {FULL, SLIDING}:
        raise InvalidConfigError(
            f"`layer_types` must name {FULL} or {SLIDING} for each of {config.num_hidden_layers} layers, got {types}."
        )
    if SLIDING in types and config.sliding_window is None:
        raise InvalidConfigError(f"`layer_types` has {SLIDING}, but `sliding_window` is not set.")
    if config.max_depth < 1:
        raise InvalidConfigError(f"A block of {config.block_size} slots drafts no tokens.", "Use at least two.")
    if config.vocab_size:
        check_mask_token(config)
    for one, other in (("conv_kernel_size", "conv_group_size"), ("selector_rank", "selector_top_k")):
        if bool(getattr(config, one)) != bool(getattr(config, other)):
            raise InvalidConfigError(f"`{one}` and `{other}` must both be set, or neither.")
    if config.conv_group_size and config.hidden_size % config.conv_group_size:
        raise InvalidConfigError(
            f"`conv_group_size` {config.conv_group_size} must divide `hidden_size` {config.hidden_size}."
        )
    size = config.lilicorr_hidden_size or config.hidden_size
    if config.lilicorr_candidate_topk and (size % config.lilicorr_num_heads or config.sample_from_anchor):
        raise InvalidConfigError(
            f"`lilicorr_num_heads` {config.lilicorr_num_heads} must divide the hidden size {size}, and "
            "`sample_from_anchor` must be false."
        )
    if config.lilicorr_candidate_topk and config.selector_rank:
        raise InvalidConfigError("A head has a candidate selector (DFlash2) or LiLiCorr's transformer, not both.")
    if config.num_candidates and (config.markov_rank or config.draft_vocab_size):
        raise InvalidConfigError("Heads that score pairs of candidates have no Markov head and no draft vocabulary.")
    if config.vocab_size and config.num_candidates > config.vocab_size:
        raise InvalidConfigError(f"{config.num_candidates} candidates exceed {config.vocab_size} tokens.")
    if (config.markov_rank > 0 and config.markov_head_type == "domino") != bool(config.gru_hidden_dim):
        raise InvalidConfigError("`gru_hidden_dim` must be set for `markov_head_type` 'domino', and only for it.")
    if config.markov_head_type not in MARKOV_TYPES:
        raise InvalidConfigError(f"`markov_head_type` must be one of {MARKOV_TYPES}, got {config.markov_head_type!r}.")
    if config.confidence_head and config.gru_hidden_dim:
        raise InvalidConfigError("A head has a confidence head (DSpark) or a Markov head of type 'domino', not both.")
    if config.confidence_with_markov and not (config.confidence_head and config.markov_rank):
        raise InvalidConfigError("`confidence_with_markov` needs `confidence_head` and a `markov_rank` above 0.")


def block_views(head: DFlashHead, lengths: Tensor, size: int) -> dict[int | None, tuple[Tensor, Tensor, int | None]]:
    """Return what a block sees in layers with each of the head's windows.

    Places `[B, S]` of its S slots behind the rows' `[B]` committed ones, which slots of the block they see, bool
    `[S, S]`, and the number of slots up to its place that each sees; None: all.
    """
    slots = torch.arange(size, dtype=torch.long, device=lengths.device)
    behind, places = slots[:, None] - slots, lengths[:, None] + slots
    views: dict[int | None, tuple[Tensor, Tensor, int | None]] = {}
    for window in head.layer_windows:
        causal = head.config.causal if window is None else head.config.sliding_causal
        block = behind >= 0 if causal else torch.ones_like(behind, dtype=torch.bool)
        if window is None:
            views[window] = places, block, None
        elif head.config.window_from_anchor:
            views[window] = places[:, :1].expand_as(places), block, window + 1
        else:
            views[window] = places, block & (behind.abs() < window), window
    return views
