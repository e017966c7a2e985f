"""Drafting with a Gemma 4 assistant, a small model that attends to the target's keys and values and has none itself.

Source: transformers' `SinglePositionMultiTokenCandidateGenerator`, which drafts one chain for one row. From the
embedding of a token and a hidden state, the assistant predicts the next token and the next hidden state. The first
hidden state is the target's last one. All drafted nodes have the position of the root and see the committed text, but
not each other: a level of a tree is one forward, and the hidden states stand for the path.

Drafts equal those of the source if that gets the outputs of one forward over the text. In its own loop, the keys of
rejected tokens stay visible, and its cache drops the first keys of the window.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_specdec.checkpoints.formats import SHARING_ASSISTANTS
from hf_specdec.config import SpeculativeConfig
from hf_specdec.drafters.base import DraftContext, DraftSession, DraftTarget, Needs
from hf_specdec.drafters.draft_model import AssistantReader, DraftModelDrafter, DraftModelSession, DraftVocabulary
from hf_specdec.drafters.launching import features_of
from hf_specdec.errors import DrafterMismatchError, UnsupportedModelError
from hf_specdec.transformers_private import attention_name
from hf_specdec.trees.draft import Budget
from hf_specdec.verification.features import LAST, Window
from hf_specdec.verification.model import execution_device, find_backbone, text_config
from hf_specdec.verification.step import Step
from hf_specdec.verification.tree_target import TreeTarget

TARGETS = ("gemma4_text", "gemma4_unified_text")
"""Model types of the text decoders whose keys and values assistants are trained to attend to."""


class Gemma4AssistantDrafter(DraftModelDrafter):
    """Drafts with a Gemma 4 assistant (`Gemma4AssistantForCausalLM`, `Gemma4UnifiedAssistantForCausalLM`).

    Config fields as for `DraftModelDrafter`; the default is a tree with 4 steps, `top_k` 4 and 16 nodes, as for heads:
    the assistant reads no text. With `sample=True` it draws chains.

    Args:
        assistant: The assistant, on any device. It is not modified.
        sample: See `DraftModelDrafter`.
        tokenizer, assistant_tokenizer: Refused by `bind`, because it has the target's tokenizer.
    """

    needs = Needs(feature_layers=(LAST,))
    defaults = Budget(num_nodes=16, num_steps=4, top_k=4)
    drafts_trees = True

    def with_program(self, make: Any) -> Gemma4AssistantDrafter:
        """Return this drafter: the assistant runs as it is."""
        return self

    def feature_window(self, config: SpeculativeConfig) -> Window | None:
        """Return a window of one token: only the last one's hidden state is read."""
        return Window(1)

    def bind(self, model: PreTrainedModel) -> None:
        """Check that the assistant was made for a target like this one.

        Raises:
            DrafterMismatchError: The assistant or the model is not a Gemma 4, or their sizes differ.
            UnsupportedModelError: The assistant has an attention implementation without masks.
        """
        own, config, name = self.assistant.config, text_config(model), type(self.assistant).__name__
        if own.model_type not in SHARING_ASSISTANTS:
            raise DrafterMismatchError(f"{name} is not a Gemma 4 assistant.", "Use DraftModelDrafter for it.")
        if config.model_type not in TARGETS:
            raise DrafterMismatchError(
                f"{name} attends to the keys and values of a Gemma 4, and {type(model).__name__} is none.",
                "Use an assistant of the model's own family, or another method.",
            )
        if self.tokenizer is not None:
            raise DrafterMismatchError(f"{name} has its target's tokenizer.", "Leave `assistant_tokenizer` out.")
        super().bind(model)
        sizes = {
            "a hidden size": (own.backbone_hidden_size, config.hidden_size),
            "a vocabulary": (text_config(self.assistant).vocab_size, config.vocab_size),
        }
        sources, layers = source_layers(config), find_backbone(model)[1]
        for kind, layer in zip(text_config(self.assistant).layer_types, find_backbone(self.assistant)[1], strict=True):
            there = _key_shape(layers[sources[kind]]) if kind in sources else "none"
            sizes[f"keys in {kind} layers"] = _key_shape(layer), there
        for what, (wanted, found) in sizes.items():
            if wanted != found:
                raise DrafterMismatchError(
                    f"{name} needs {what} of {wanted}, {type(model).__name__} has {found}.",
                    "Use the assistant that was published for this model.",
                )
        if attention_name(text_config(self.assistant)) not in ("eager", "sdpa"):
            raise UnsupportedModelError(
                f"{name} runs with {attention_name(text_config(self.assistant))}, which takes no masks of rows.",
                'Load it with attn_implementation="sdpa".',
            )
        head = self.assistant.masked_embedding
        if head is not None and (
            config.vocab_size % head.num_centroids or head.centroid_intermediate_top_k > head.num_centroids
        ):
            raise DrafterMismatchError(
                f"The sparse head of {name} scores {head.centroid_intermediate_top_k} of {head.num_centroids} "
                f"centroids of equal size, which {config.vocab_size} tokens cannot have."
            )
        if head is not None and sorted(head.token_ordering.tolist()) != list(range(config.vocab_size)):
            raise DrafterMismatchError(
                f"The `token_ordering` of {name} does not list every token once: it was not loaded.",
                "Load the assistant with from_pretrained().",
            )

    def start(self, target: DraftTarget, context: DraftContext, config: SpeculativeConfig) -> DraftSession:
        """Start a session."""
        if not target.supports_trees:
            raise UnsupportedModelError(
                f"{type(target.model).__name__} verifies chains with transformers' cache, which drops the keys and "
                f"values that {type(self.assistant).__name__} attends to.",
                "Use another method.",
            )
        return _Session(self, cast(TreeTarget, target), context, self.limits(config))


def source_layers(config: Any) -> dict[str, int]:
    """Return the layer of each type whose keys and values are shared: the last one that computes them itself.

    Example: with three sliding layers and one full layer, of which the last two share, only sliding layer 1.
    """
    own = config.layer_types[: config.num_hidden_layers - config.num_kv_shared_layers]
    return {kind: index for index, kind in enumerate(own)}


def _key_shape(layer: Any) -> str:
    attention = layer.self_attn
    heads = attention.config.num_attention_heads // attention.num_key_value_groups
    return f"{heads} heads of {attention.head_dim} channels"


class _Session(DraftModelSession):
    def __init__(
        self, drafter: Gemma4AssistantDrafter, target: TreeTarget, context: DraftContext, limits: Budget
    ) -> None:
        assistant, features = drafter.assistant, context.features
        assert features is not None
        self._drafter, self._roots, self._rows = drafter, context.roots, [slice(0, len(context.roots))]
        self._reader = _SharedReader(assistant, target, features.of([LAST])[:, -1:], context.roots)
        self._readers = [self._reader]
        self._longest, self._max_length = 0, None  # no draft is at a position beyond the text
        self._vocabulary = DraftVocabulary.of(target.model, assistant, None, self._reader.device)
        self._limits = replace(limits, top_k=min(limits.top_k, self._reader.num_scored))

    def observe(self, step: Step) -> None:
        """See `DraftSession.observe`."""
        path, states = step.acceptance.path, features_of(step).of([LAST])
        last = path.gather(1, ((path >= 0).sum(-1, keepdim=True) - 1).clamp(min=0)).clamp(min=0)
        self._roots = step.acceptance.next_token
        index = last.to(states.device)[:, :, None].expand(-1, -1, states.shape[-1])
        self._reader.follow(states.gather(1, index), self._roots)


class _SharedReader(AssistantReader):
    """Runs an assistant on the keys and values in the target's cache.

    Args:
        assistant: The assistant.
        target: The target, whose cache holds the committed text whenever `read` is called.
        hidden: The target's last hidden states `[B, 1, D]` before the roots.
        roots: The last emitted tokens `[B]`.
    """

    def __init__(self, assistant: Any, target: TreeTarget, hidden: Tensor, roots: Tensor) -> None:
        self._assistant, self._source, self.device = assistant, target, execution_device(assistant)
        config, sources = text_config(assistant), source_layers(text_config(target.model))
        last = {"sliding_attention": config.sliding_window + 1}  # transformers' mask includes both ends of the window
        self._layers = {kind: (sources[kind], last.get(kind)) for kind in config.layer_types}
        head = assistant.masked_embedding
        self.num_scored = assistant.lm_head.out_features
        if head is not None:
            self.num_scored = self.num_scored // head.num_centroids * head.centroid_intermediate_top_k
        self.follow(hidden, roots)

    def follow(self, hidden: Tensor, roots: Tensor) -> None:
        """Set the hidden states before new roots, see the class."""
        self._hidden, self._tokens = hidden, roots[:, None]

    def read(self, num_masks: int = 0, mask_token: int = 0) -> Tensor:
        """Return the logits `[B, 1, V]` after the roots."""
        self._text = self._committed()
        self._states = self._hidden[:, :0].to(self.device)
        return self._run(self._tokens, self._hidden)

    def extend(self, tokens: Tensor, parents: Tensor, depth: int) -> Tensor:
        """See `AssistantReader`; the states are those of the root, then of the drafted nodes."""
        index = (parents + 1)[:, :, None].expand(-1, -1, self._states.shape[-1])
        return self._run(tokens, self._states.gather(1, index))

    def forget(self) -> None:
        """Drop the states of the drafted nodes."""
        del self._text, self._states

    def _committed(self) -> tuple[Mapping[str, tuple[Tensor, Tensor]], Mapping[str, Tensor], Tensor]:
        """Return the keys and values of each layer type, their masks `[R, 1, 1, S]`, and the roots' positions."""
        dtype, is_added = self._assistant.dtype, attention_name(text_config(self._assistant)) == "eager"
        shared, masks = {}, {}
        for kind, (index, last) in self._layers.items():
            *states, valid = self._source.committed(index, last)
            shared[kind] = states[0].to(self.device, dtype), states[1].to(self.device, dtype)
            mask = valid[:, None, None].to(self.device)
            lowest = torch.finfo(dtype).min
            masks[kind] = torch.where(mask, 0.0, lowest).to(dtype) if is_added else mask
        return shared, masks, self._source.root_positions().to(self.device)

    def _run(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Return the logits `[B, K, V]` after K nodes, given the hidden states `[B, K, D]` before them."""
        assistant, (shared, masks, positions) = self._assistant, self._text
        model, count, active = self._source.model, tokens.shape[1], self._source.cache.active
        embedded = model.get_input_embeddings()(tokens.to(execution_device(model)))
        inputs = torch.cat([states.to(self.device, assistant.dtype) for states in (embedded, hidden)], dim=-1)
        if active is not None:
            inputs = inputs[active.index.to(self.device)]
        outputs = assistant.model(
            inputs_embeds=assistant.pre_projection(inputs),
            attention_mask={kind: mask.expand(-1, -1, count, -1) for kind, mask in masks.items()},
            position_ids=positions.expand(-1, count),
            shared_kv_states=shared,
            use_cache=False,
            logits_to_keep=None,  # with an int, layers that share keys expect inputs per layer, which it has not
        ).last_hidden_state
        states, logits = assistant.post_projection(outputs), self._score(outputs)
        if active is not None:
            states, logits = active.in_batch(states), active.in_batch(logits)
        self._states = torch.cat([self._states.to(states), states], dim=1)
        return logits

    def _score(self, outputs: Tensor) -> Tensor:
        """Return logits `[R, K, V]`; with a sparse head, -inf for tokens of all but the likeliest centroids."""
        assistant, head = self._assistant, self._assistant.masked_embedding
        if head is None:
            logits: Tensor = assistant.lm_head(outputs)
            return logits
        best = head.centroids(outputs).topk(head.centroid_intermediate_top_k, dim=-1).indices
        tokens = head.token_ordering.long().unflatten(0, (head.num_centroids, -1))[best].flatten(-2)
        scores = (nn.functional.embedding(tokens, assistant.lm_head.weight) @ outputs[..., None])[..., 0]
        shape = *outputs.shape[:-1], assistant.lm_head.out_features
        return scores.new_full(shape, -torch.inf).scatter(-1, tokens, scores)
