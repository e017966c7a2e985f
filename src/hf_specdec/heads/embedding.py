"""The token embedding of a draft head: its own, or the target's."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel


class EmbeddingSharing:
    """Mixin for heads whose config has `own_embedding`: they embed tokens with `embed_tokens` or with the target."""

    config: Any
    embed_tokens: torch.nn.Embedding

    def _make_embedding(self) -> None:
        """Create the embedding if the head has its own."""
        if self.config.own_embedding:
            self.embed_tokens = torch.nn.Embedding(self.config.vocab_size, self.config.hidden_size)

    def embedding_for(self, model: PreTrainedModel) -> torch.nn.Module:
        """Return the head's own embedding, or else the target's."""
        own: torch.nn.Module = self.embed_tokens if self.config.own_embedding else model.get_input_embeddings()
        return own

    def share_embedding(self, model: PreTrainedModel) -> None:
        """Drop the head's own embedding if it equals the target's, as in most published checkpoints.

        Values are compared in the target's dtype. When the embedding is dropped, the config's `own_embedding` becomes
        False. It is kept if the target's is not a plain `nn.Embedding` or is on the meta device.
        """
        embedding = model.get_input_embeddings()
        if not self.config.own_embedding or type(embedding) is not torch.nn.Embedding:
            return
        weight, own = embedding.weight, self.embed_tokens.weight
        if own.shape == weight.shape and not weight.is_meta and torch.equal(own.to(weight), weight):
            del self.embed_tokens
            self.config.own_embedding = False
