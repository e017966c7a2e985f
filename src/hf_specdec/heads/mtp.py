"""The MTP module: one decoder layer that goes on from the target's last feature, with norms on both of its inputs.

Source: DeepSeek-AI, "DeepSeek-V3 Technical Report" (https://arxiv.org/abs/2412.19437), section 2.2, multi-token
prediction. One module is applied again and again, each time on its own output, as "FastMTP" (Cai et al.,
https://arxiv.org/abs/2509.18362) trains it and engines run it. Modules that come with a target, which are several and
in its own architecture, are `heads/native_mtp.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from hf_specdec.errors import InvalidConfigError
from hf_specdec.heads.attention import Attend, attend_causally
from hf_specdec.heads.base import EagleFamilyHead
from hf_specdec.heads.eagle import EagleConfig, EagleLayer
from hf_specdec.heads.schema import MTP, Rule


class MtpConfig(EagleConfig):
    """Configuration of an MTP module: that of an EAGLE head whose norms are always there.

    Args:
        bias: Whether `eh_proj` has a bias; published modules have none.
        layernorms: True.
    """

    model_type = "hf_specdec_mtp"
    rules: ClassVar[Mapping[str, Rule]] = MTP

    bias: bool = False
    layernorms: bool = True


class MtpHead(EagleFamilyHead):
    """`h'[t+1] = norm(layer(eh_proj([enorm(embed(x[t+1])); hnorm(h[t])])))`, h the target's post-final-norm features.

    `lm_head(h'[t+1])`, with the target's own lm_head, scores the token x[t+2]; h' itself, behind its norm, takes the
    place of h one level deeper. Names follow DeepSeek's checkpoints; embedding and lm_head are the target's.
    """

    method = "mtp"
    shares_lm_head = True
    config_class = MtpConfig
    _no_split_modules = ("EagleLayer",)

    def __init__(self, config: MtpConfig) -> None:
        super().__init__(config)
        if not config.layernorms:
            raise InvalidConfigError(
                "An MTP module norms its inputs and its output, got layernorms=False.", "EagleHead has no such norms."
            )
        size, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = LlamaRMSNorm(size, eps)
        self.hnorm = LlamaRMSNorm(size, eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=config.bias)
        self.layers = nn.ModuleList([EagleLayer(config)])
        self.norm = LlamaRMSNorm(size, eps)
        self._make_embedding()
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self._make_hot_tokens()
        self.post_init()

    def forward(
        self,
        token_embeddings: Tensor,
        hidden: Tensor,
        position_ids: Tensor,
        attend: Attend = attend_causally,
    ) -> Tensor:
        """Predict the next features.

        Args:
            token_embeddings: `[B, T, D]` the target's embeddings of x[t+1].
            hidden: `[B, T, D]` the target's features h[t], or, below the first level, the module's own output there.
            position_ids: `[B, T]` the positions t of the features.
            attend: How the layer attends, see `heads/attention.py`.

        Returns:
            `[B, T, D]` predicted features h[t+1], normed.
        """
        mixed = self.eh_proj(torch.cat([self.enorm(token_embeddings), self.hnorm(hidden)], dim=-1))
        output: Tensor = self.norm(self.layers[0](mixed, self.rotary_emb(mixed, position_ids), attend))
        return output

    def score(self, hidden: Tensor, lm_head: Callable[[Tensor], Tensor] | None) -> Tensor:
        """Logits `[..., Vd]` of the tokens after `hidden [..., D]`.

        Args:
            hidden: The module's output.
            lm_head: The target's, over the draft vocabulary.
        """
        if lm_head is None:
            raise ValueError("an MTP module shares the target's lm_head: pass it")
        return lm_head(hidden)
