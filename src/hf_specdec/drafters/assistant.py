"""`AssistantReader`: runs a small language model over the text of a batch, and over tokens or masks that follow it.

The assistant runs as a second `Target`, so its masks, windows, padding, ragged rows and recurrent states are handled
by `verification/`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from hf_specdec.acceptance.accepted import Accepted
from hf_specdec.transformers_private import supports_logits_to_keep
from hf_specdec.trees.tree import ROOT_PARENT, TokenTree
from hf_specdec.verification.model import execution_device, text_config
from hf_specdec.verification.target import Target
from hf_specdec.verification.trials import first_inputs


def num_embeddings(model: PreTrainedModel) -> int:
    """Return the number of token ids that a model can embed; it may exceed the config's vocabulary size."""
    return int(getattr(model.get_input_embeddings(), "num_embeddings", 0) or text_config(model).vocab_size)


def num_known_tokens(model: PreTrainedModel) -> int:
    """Return the number of token ids that a model can both embed and predict."""
    size = num_embeddings(model)
    return min(size, int(getattr(model.get_output_embeddings(), "out_features", size)))


class AssistantReader:
    """Runs the assistant on some rows of a batch; its cache holds their text, followed by the nodes being drafted.

    Args:
        target: The assistant, with an empty cache.
        prompt: `[R, P]` ids.
        mask: `[R, P]` long, 0 at padding, which is on the left.

    Attributes:
        device: The assistant's device, on which logits are returned.
    """

    def __init__(self, target: Target, prompt: Tensor, mask: Tensor) -> None:
        self._target, self.device = target, execution_device(target.model)
        self._largest_id = num_embeddings(target.model) - 1
        self._prompt: tuple[Tensor, Tensor] | None = (prompt.to(self.device), mask.to(self.device))
        self._pending = self._prompt[0][:, :0]
        self._counts = [0] * len(prompt)
        self._last: Tensor | None = None  # [R, V] after the text
        self._drafted: TokenTree | None = None

    def add(self, tokens: Tensor, counts: Sequence[int]) -> None:
        """Queue text for the next `read`: tokens `[R, P]`, padded with -1, and the number of tokens in each row."""
        self._pending = torch.cat([self._pending, tokens.to(self.device)], dim=-1)
        self._counts = [known + count for known, count in zip(self._counts, counts, strict=True)]

    def read(self, num_masks: int = 0, mask_token: int = 0) -> Tensor:
        """Commit queued text (first the prompt) in one forward, and predict the tokens after it.

        A row of the forward holds the queued tokens, then the masks, then padding, all as one chain: under a causal
        mask, padding at the end has no effect. Only the queued tokens stay in the cache.

        Args:
            num_masks: Mask tokens appended to the text; only for assistants that verify trees.
            mask_token: Their id.

        Returns:
            Logits `[R, 1 + num_masks, V]` after the text, then after each mask; all are also valid in rows without new
            text.
        """
        if self._prompt is not None:
            self._read_prompt(*self._prompt)
            self._prompt = None
        width = max(self._counts)
        if width + num_masks == 0:
            assert self._last is not None
            return self._last[:, None]
        chain, counts = self._packed(width, num_masks, mask_token)
        logits = self._verify(chain)
        nodes = torch.arange(width, device=counts.device)
        self._keep(chain, torch.where(nodes < counts, nodes, -1))
        # index of the last queued token, then of each mask
        last_token_and_masks = (counts + torch.arange(-1, num_masks, device=counts.device)).clamp(min=0)
        logits = logits.gather(1, last_token_and_masks[..., None].expand(-1, -1, logits.shape[-1]))
        if self._last is not None and min(self._counts) == 0:
            # the text of a row without queued tokens has not changed, nor have the logits after it
            after = torch.where(counts > 0, logits[:, 0], self._last)
            logits = torch.cat([after[:, None], logits[:, 1:]], dim=1)
        self._pending, self._counts = self._pending[:, :0], [0] * len(self._counts)
        self._last = logits[:, 0]
        return logits

    def _packed(self, width: int, num_masks: int, mask_token: int) -> tuple[TokenTree, Tensor]:
        """Return the queued tokens of each row without gaps, then the masks, as a chain padded with -1.

        Args:
            width: Queued tokens of the row that has the most.
            num_masks, mask_token: See `read`.

        Returns:
            The chain of `width + num_masks` nodes, and the number of queued tokens of each row, `[R, 1]`.
        """
        # tokens first, in order: each `add` has padded its own columns
        tokens_first = (self._pending < 0).int().sort(dim=-1, stable=True).indices[:, :width]
        tokens = nn.functional.pad(self._pending.gather(1, tokens_first), (0, num_masks), value=-1)
        counts = (tokens >= 0).sum(-1, keepdim=True)
        nodes = torch.arange(width + num_masks, device=tokens.device)
        masks = (nodes >= counts) & (nodes < counts + num_masks)
        return TokenTree(torch.where(masks, mask_token, tokens), nodes + ROOT_PARENT), counts

    def extend(self, tokens: Tensor, parents: Tensor, depth: int) -> Tensor:
        """Append a level of K drafted nodes per row and return the logits `[R, K, V]` after them.

        Args:
            tokens: `[R, K]`.
            parents: `[R, K]` index of each parent among the appended nodes; -1: the node directly follows the text.
            depth: Depth of the nodes, 1 if they directly follow the text.
        """
        known = 0
        if self._drafted is not None:
            known = self._drafted.num_nodes
            tokens = torch.cat([self._drafted.tokens, tokens], dim=-1)
            parents = torch.cat([self._drafted.parents, parents], dim=-1)
        self._drafted = TokenTree(tokens, parents, max_depth=depth - 1)
        return self._verify(self._drafted, known)

    def forget(self) -> None:
        """Remove the drafted nodes from the cache."""
        if self._drafted is not None:
            self._target.rollback(self._drafted.num_nodes)
            self._drafted = None

    def _verify(self, tree: TokenTree, known: int = 0) -> Tensor:
        # ids that the assistant does not embed are placeholders or padding rows of the target's embedding
        ids = tree.tokens.clamp(0, self._largest_id)
        tree = TokenTree(ids, tree.parents, max_depth=tree.max_depth)
        return self._target.extend(tree, known).to(self.device)

    def _read_prompt(self, ids: Tensor, mask: Tensor) -> None:
        model = self._target.model
        inputs = first_inputs(model, mask, self._target.cache)
        if supports_logits_to_keep(model):
            inputs["logits_to_keep"] = 1
        prefilled = self._target.prefill(ids.clamp(max=self._largest_id), GenerationConfig(), inputs)
        self._last = prefilled.logits[:, -1].to(self.device)

    def _keep(self, chain: TokenTree, path: Tensor) -> None:
        """Commit the first nodes of a verified chain, whose indices are `path` `[R, P]`, padded with -1."""
        nodes = tuple(tuple(range(count)) for count in self._counts)
        drafted = (chain.num_nodes - 1,) * len(nodes)
        self._target.commit(chain, Accepted(path, chain.tokens, chain.tokens[:, -1], nodes, nodes, drafted))
