"""EAGLE drafting: grow a tree level by level with a draft layer; a dynamic tree keeps its most likely nodes.

Sources: EAGLE (https://arxiv.org/abs/2401.15077) for static trees, EAGLE-2 (https://arxiv.org/abs/2406.16858) for
dynamic trees. `LayerDrafter` works with any `DraftLayer`: EAGLE heads and MTP modules (`drafters/mtp.py`).
"""

from __future__ import annotations

import copy
from dataclasses import replace

from transformers import PreTrainedModel

from hf_specdec.config import ExecutionMode, SpeculativeConfig
from hf_specdec.drafters.base import HOW_TO_LOAD, DraftContext, Drafter, DraftSession, DraftTarget, Needs
from hf_specdec.drafters.draft_layer import DraftLayer
from hf_specdec.drafters.feature_session import LayerLimits
from hf_specdec.drafters.layer_session import EagleSession
from hf_specdec.drafters.registry import register
from hf_specdec.errors import DrafterMismatchError, InvalidConfigError
from hf_specdec.heads.base import EagleFamilyHead, bind_head
from hf_specdec.heads.captured import GraphDraftLayer
from hf_specdec.heads.compiled import CompiledDraftLayer
from hf_specdec.heads.dflash import DFlashHead
from hf_specdec.heads.eagle import EagleHead
from hf_specdec.heads.eagle3 import Eagle3Head
from hf_specdec.trees.draft import Budget
from hf_specdec.trees.growth import growable, limits_of
from hf_specdec.validation import Choice, check_type, validate_choices
from hf_specdec.verification.graph_backends import GRAPH_BACKENDS
from hf_specdec.verification.model import lm_head_rows
from hf_specdec.verification.window import Window

DEFAULT_NUM_STEPS = 4
DEFAULT_TOP_K = 4
DEFAULT_NUM_NODES = 16
DEFAULT_CHOICES: tuple[Choice, ...] = (
    (0,), (1,), (2,), (3,),
    (0, 0), (0, 1), (0, 2), (1, 0), (2, 0),
    (0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0),
    (0, 0, 0, 0), (0, 0, 0, 1),
)  # fmt: skip
"""Tree for `tree="static"` if the head's config contains none: wide at the top, and deepest below the best child."""


class LayerDrafter(Drafter):
    """Base of the drafters that draft with a `DraftLayer`: an EAGLE head or MTP modules.

    Attributes:
        head: The layer.
        program: Compiled or captured version of the layer, used by sessions instead of `head`; None if there is none.
        default_num_steps, default_top_k: Depth and width of the tree if neither the call nor the layer's config
            sets them.
    """

    head: DraftLayer
    program: DraftLayer | None = None
    default_num_steps = DEFAULT_NUM_STEPS
    default_top_k = DEFAULT_TOP_K
    has_window = True

    def feature_window(self, config: SpeculativeConfig) -> Window | None:
        """Return the window of the call, or else the length of the texts that the layer was trained on, if known."""
        last = config.draft_window or getattr(self.head.config, "trained_length", None)
        return None if last is None else Window(last)

    @property
    def copies_target_weights(self) -> bool:
        """Whether a compiled layer holds rows or a packed copy of the target's lm_head, see `lm_head_rows`."""
        layer = self.program or self.head
        return layer.shares_lm_head and (layer.hot_token_ids is not None or layer.copies_weights)

    def tree_limits(self, config: SpeculativeConfig) -> LayerLimits:
        """Return the largest tree for this config; fields that are None come from the head's config or the defaults.

        A static tree determines all sizes; `top_k` of the config is then ignored.

        Raises:
            InvalidConfigError: The static tree is invalid or contradicts `num_draft_tokens` or `num_steps`, or `top_k`
                exceeds the draft vocabulary.
        """
        defaults = self.head.config
        tree = config.tree or defaults.tree
        if tree == "static":
            tree = DEFAULT_CHOICES if isinstance(defaults.tree, str) else defaults.tree
        if tree == "dynamic":
            num_steps = config.num_steps or defaults.num_steps or self.default_num_steps
            top_k = config.top_k or defaults.top_k or self.default_top_k
            wanted = config.num_draft_tokens or defaults.num_draft_tokens or DEFAULT_NUM_NODES
            limits = LayerLimits(self.largest(Budget(wanted, num_steps, top_k)), None, self.feature_window(config))
        else:
            choices = tuple(validate_choices(tree))
            limits = LayerLimits(limits_of(choices), choices, self.feature_window(config))
            for name, wanted, actual in (
                ("num_draft_tokens", config.num_draft_tokens, limits.budget.num_nodes),
                ("num_steps", config.num_steps, limits.budget.num_steps),
            ):
                if wanted not in (None, actual):
                    raise InvalidConfigError(
                        f"The static tree has {name}={actual}, got {name}={wanted}.", f"Leave {name} None."
                    )
        vocabulary = defaults.draft_vocab_size or defaults.vocab_size
        if limits.budget.top_k > vocabulary:
            raise InvalidConfigError(
                f"`top_k` {limits.budget.top_k} exceeds the draft vocabulary of {vocabulary} tokens."
            )
        return limits

    def largest(self, budget: Budget) -> Budget:
        """Return the budget with `num_nodes` reduced to the most nodes that a dynamic tree within it can have."""
        return growable(budget)

    def limits(self, config: SpeculativeConfig) -> Budget:
        """Return the budget of the largest tree, see `tree_limits`."""
        return self.tree_limits(config).budget

    def start(self, target: DraftTarget, context: DraftContext, config: SpeculativeConfig) -> DraftSession:
        """Start a session; it reads the prompt in its first `propose`."""
        return self._session(target.model, context, self.tree_limits(config))

    def _session(self, model: PreTrainedModel, context: DraftContext, limits: LayerLimits) -> DraftSession:
        return EagleSession(self.program or self.head, model, context, limits)


@register("eagle", heads=(EagleHead, Eagle3Head))
class EagleDrafter(LayerDrafter):
    """Drafts with a head of EAGLE-1 or 2, which shares the target's embedding and lm_head, or of EAGLE-3.

    Config fields: `tree` (`"dynamic"`, `"static"` or choices), `num_steps`, `top_k`, `num_draft_tokens`. Defaults come
    from the head's config; without them, the tree is dynamic with 4 steps, `top_k` 4 and 16 nodes.

    Args:
        head: The head. It is put in eval mode and its parameters are frozen; `bind` moves and casts it.
    """

    method = "eagle"
    head: EagleFamilyHead

    def __init__(self, head: EagleFamilyHead) -> None:
        check_type("head", head, EagleFamilyHead, HOW_TO_LOAD)
        self.head = head.eval().requires_grad_(False)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.head).__name__} of {self.head.name_or_path or 'this process'})"

    def compiled(self, model: PreTrainedModel, mode: ExecutionMode) -> EagleDrafter:
        """See `Drafter.compiled`; if the device has graphs, a head of one layer grows whole trees in one graph."""
        lm_head = lm_head_rows(model, self.head.hot_token_ids) if self.head.shares_lm_head else None
        other, device = copy.copy(self), self.head.device
        layer = self.head if mode == "cuda_graph" else CompiledDraftLayer.of(self.head, lm_head, mode)
        other.program = layer
        if device.type in GRAPH_BACKENDS and self.head.config.num_hidden_layers == 1:
            other.program = GraphDraftLayer(layer, lm_head, GRAPH_BACKENDS[device.type](device))
        return other

    def bind(self, model: PreTrainedModel) -> None:
        """See `Drafter.bind`."""
        self.needs = replace(bind_sharing_head(self.head, model), token_ids=True)


def bind_sharing_head(head: EagleFamilyHead | DFlashHead, model: PreTrainedModel) -> Needs:
    """Check, move and cast a head as `bind_head` does, drop its embedding if it equals the model's; return its needs.

    Raises:
        DrafterMismatchError: See `bind_head`; or the embedding sizes differ, or the head needs the target's embedding
            as lm_head and this is offloaded.
    """
    bind_head(head, model)
    head.share_embedding(model)
    size = head.config.hidden_size
    width = getattr(head.embedding_for(model), "embedding_dim", size)
    if width != size:
        raise DrafterMismatchError(
            f"{type(model).__name__} has token embeddings of size {width}, this head needs {size}.",
            "Use a head that includes a token embedding.",
        )
    return Needs(feature_layers=head.feature_layers)
