"""The MTP module: one decoder layer on the target's last hidden state, with norms of both inputs.

Source: DeepSeek-AI, "DeepSeek-V3 Technical Report" (https://arxiv.org/abs/2412.19437), section 2.2, multi-token
prediction. One module is applied repeatedly to its own output, as in training by "FastMTP" (Cai et al.,
https://arxiv.org/abs/2509.18362) and in inference engines. A target's own modules (one or several, with the target's
architecture) are in `heads/native_mtp.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_specdec.errors import InvalidConfigError
from hf_specdec.heads.attention import Attend, attend_causally
from hf_specdec.heads.eagle import EagleConfig, EagleLayer, check_single_layer
from hf_specdec.heads.head import EagleFamilyHead
from hf_specdec.heads.rotary import DraftRotaryEmbedding
from hf_specdec.heads.schema import MTP
from hf_specdec.validation import Rule


class MtpConfig(EagleConfig):
    """Configuration of an MTP module: the fields of `EagleConfig`, with these other defaults.

    Args:
        bias: Whether `eh_proj` has a bias; published modules have none.
        layernorms: Must be True.
    """

    model_type = "hf_specdec_mtp"
    rules: ClassVar[Mapping[str, Rule]] = MTP

    bias: bool = False
    layernorms: bool = True


class MtpHead(EagleFamilyHead):
    """An MTP module: `h'[t+1] = norm(layer(eh_proj([enorm(embed(x[t+1])); hnorm(h[t])])))`.

    h are the target's hidden states after its final norm. `lm_head(h'[t+1])`, with the target's lm_head, scores the
    token x[t+2]; the next level uses h' instead of h. Tensor names are those of DeepSeek's checkpoints.

    Raises:
        InvalidConfigError: A size is invalid, `num_hidden_layers` is not 1, or `layernorms` is False.
    """

    method = "mtp"
    shares_lm_head = True
    config_class = MtpConfig
    _no_split_modules = ("EagleLayer",)

    def __init__(self, config: MtpConfig) -> None:
        super().__init__(config)
        check_single_layer(config)
        if not config.layernorms:
            raise InvalidConfigError(
                "An MTP module normalizes its inputs and its output, got layernorms=False.", "Use EagleHead instead."
            )
        size, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = LlamaRMSNorm(size, eps)
        self.hnorm = LlamaRMSNorm(size, eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=config.bias)
        self.layers = nn.ModuleList([EagleLayer(config, norm_input=True)])
        self.norm = LlamaRMSNorm(size, eps)
        self._make_embedding()
        self.rotary_emb = DraftRotaryEmbedding(config)
        self._make_hot_tokens()
        self.post_init()

    def forward(
        self,
        token_embeddings: Tensor,
        hidden: Tensor,
        position_ids: Tensor,
        attend: Attend = attend_causally,
    ) -> Tensor:
        """Predict the next hidden states.

        Args:
            token_embeddings: `[B, T, D]` embeddings of x[t+1].
            hidden: `[B, T, D]` the target's h[t], or the module's output for t below the first level.
            position_ids: `[B, T]` positions t.
            attend: Attention function, see `Attend`.

        Returns:
            `[B, T, D]` predicted h[t+1], normalized.
        """
        mixed = self.eh_proj(torch.cat([self.enorm(token_embeddings), self.hnorm(hidden)], dim=-1))
        output: Tensor = self.norm(self.layers[0](mixed, self.rotary_emb(mixed, position_ids), attend))
        return output

    def score(self, hidden: Tensor, lm_head: Callable[[Tensor], Tensor] | None) -> Tensor:
        """Return the logits `[..., Vd]` for the module's output `[..., D]`.

        Args:
            hidden: Output of the module.
            lm_head: The target's lm_head over the draft vocabulary.

        Raises:
            ValueError: `lm_head` is None.
        """
        if lm_head is None:
            raise ValueError("An MTP module shares the target's lm_head: pass it.")
        return lm_head(hidden)
