"""EAGLE drafting: grow a tree of tokens level by level with a draft layer, and keep its likeliest nodes.

Sources: EAGLE (https://arxiv.org/abs/2401.15077) for static trees, EAGLE-2 (https://arxiv.org/abs/2406.16858) for
the dynamic tree. Entry t of the draft cache pairs the target's feature of x[t] with the embedding of x[t+1]. Entries
from true features are committed; entries made while a tree grows are forgotten with it. Whatever is a `DraftLayer`
drafts so: EAGLE heads, MTP modules (`drafters/mtp.py`).
"""

from __future__ import annotations

import copy

from transformers import PreTrainedModel

from hf_specdec.config import Choice, SpeculativeConfig, validate_choices
from hf_specdec.drafters.base import DraftContext, Drafter, DraftSession, Needs, bind_head
from hf_specdec.drafters.draft_layer import DraftLayer
from hf_specdec.drafters.layer_session import EagleSession, EagleTreeShape
from hf_specdec.errors import DrafterMismatchError, InvalidConfigError, UnsupportedGenerationError
from hf_specdec.heads.base import EagleFamilyHead
from hf_specdec.heads.captured import GraphDraftLayer
from hf_specdec.heads.compiled import CompiledDraftLayer
from hf_specdec.trees.draft import Budget
from hf_specdec.trees.growth import (
    growable,
    limits_of,
)
from hf_specdec.verification.graph_backends import GRAPH_BACKENDS
from hf_specdec.verification.model import lm_head_rows
from hf_specdec.verification.runners import ExecutionMode
from hf_specdec.verification.target import Target

DEFAULT_NUM_STEPS = 4
DEFAULT_TOP_K = 4
DEFAULT_NUM_NODES = 16
DEFAULT_CHOICES: tuple[Choice, ...] = (
    (0,), (1,), (2,), (3,),
    (0, 0), (0, 1), (0, 2), (1, 0), (2, 0),
    (0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0),
    (0, 0, 0, 0), (0, 0, 0, 1),
)  # fmt: skip
"""The static tree of `tree="static"` where the head brings none: wide at the top, deep below the best child."""


class LayerDrafter(Drafter):
    """Drafts with a draft layer.

    Attributes:
        head: The layer.
        program: What reads and scores in its place.
        default_num_steps, default_top_k: The tree's depth and width where neither config nor layer say it.
    """

    head: DraftLayer
    program: DraftLayer | None = None  # the same layer, compiled or captured
    default_num_steps = DEFAULT_NUM_STEPS
    default_top_k = DEFAULT_TOP_K

    def shape(self, config: SpeculativeConfig) -> EagleTreeShape:
        """The tree that this config and the head's own defaults ask for.

        Raises:
            InvalidConfigError: A size that contradicts the choices, or more children than there are draft tokens.
        """
        defaults = self.head.config
        tree = config.tree or defaults.tree
        if tree == "static":
            tree = DEFAULT_CHOICES if isinstance(defaults.tree, str) else defaults.tree
        if tree == "dynamic":
            num_steps = config.num_steps or defaults.num_steps or self.default_num_steps
            top_k = config.top_k or defaults.top_k or self.default_top_k
            wanted = config.num_draft_tokens or defaults.num_draft_tokens or DEFAULT_NUM_NODES
            shape = EagleTreeShape(growable(Budget(wanted, num_steps, top_k)), None)
        else:
            choices = tuple(validate_choices(tree))
            shape = EagleTreeShape(limits_of(choices), choices)
            for name, wanted, actual in (
                ("num_draft_tokens", config.num_draft_tokens, shape.limits.num_nodes),
                ("num_steps", config.num_steps, shape.limits.num_steps),
            ):
                if wanted not in (None, actual):
                    raise InvalidConfigError(
                        f"The static tree has {name} {actual}, got {name}={wanted}.", f"Leave {name} None."
                    )
        vocabulary = defaults.draft_vocab_size or defaults.vocab_size
        if shape.limits.top_k > vocabulary:
            raise InvalidConfigError(
                f"`top_k` {shape.limits.top_k} exceeds the draft vocabulary of {vocabulary} tokens."
            )
        return shape

    def limits(self, config: SpeculativeConfig) -> Budget:
        """The tree of `shape`."""
        return self.shape(config).limits

    def start(self, target: Target, context: DraftContext, config: SpeculativeConfig) -> DraftSession:
        """A session that has yet to read the prompt; its first `propose` does.

        Raises:
            UnsupportedGenerationError: A prompt of embeddings without ids.
        """
        if context.input_ids.shape[1] == 0:
            raise UnsupportedGenerationError(
                f"The method {self.method!r} needs the prompt's token ids, got only inputs_embeds.",
                "Pass input_ids as well.",
            )
        return self._session(target.model, context, self.shape(config))

    def _session(self, model: PreTrainedModel, context: DraftContext, shape: EagleTreeShape) -> DraftSession:
        return EagleSession(self.program or self.head, model, context, shape)


class EagleDrafter(LayerDrafter):
    """Drafts with an EAGLE head: version 1/2, which shares the target's embedding and lm_head, or 3.

    Config fields: `tree` (`"dynamic"`, `"static"` or choices), `num_steps`, `top_k`, `num_draft_tokens`; what is None
    comes from the head's config, else it is 4 steps, top 4, 16 nodes.

    Args:
        head: The draft layer; it is moved to the target's device and dtype when it is loaded for a model.
    """

    method = "eagle"
    head: EagleFamilyHead

    def __init__(self, head: EagleFamilyHead) -> None:
        self.head = head.eval().requires_grad_(False)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.head).__name__} of {self.head.name_or_path or 'this process'})"

    def compiled(self, model: PreTrainedModel, form: ExecutionMode) -> EagleDrafter:
        """See `Drafter`."""
        lm_head = lm_head_rows(model, self.head.hot_token_ids) if self.head.shares_lm_head else None
        other, device = copy.copy(self), self.head.device
        layer = CompiledDraftLayer.of(self.head, lm_head) if form == "compile" else self.head
        other.program = layer
        if device.type in GRAPH_BACKENDS:
            other.program = GraphDraftLayer(layer, lm_head, GRAPH_BACKENDS[device.type](device))
        return other

    def bind(self, model: PreTrainedModel) -> None:
        """Compare sizes, then move the head next to the target's lm_head.

        Raises:
            DrafterMismatchError: Another hidden size or vocabulary, too few layers, or no lm_head.
        """
        bind_head(self.head, model)
        self.needs = Needs(feature_layers=self.head.feature_layers)
        self.head.share_embedding(model)
        size = self.head.config.hidden_size
        width = getattr(self.head.embedding_for(model), "embedding_dim", size)
        if width != size:
            raise DrafterMismatchError(
                f"{type(model).__name__} embeds tokens in {width} numbers, this head takes {size}.",
                "A head with an embedding of its own fits such a model.",
            )
