"""Early exit: draft with some of the target's layers, its final norm, its lm_head and its key-value cache.

Experimental because it was slower in the benchmarks: 0.43x the speed of plain decoding (docs/benchmarks/history.md).

Sources: LayerSkip (https://arxiv.org/abs/2404.16710) for the first layers, Draft & Verify
(https://arxiv.org/abs/2309.08168) and SWIFT (https://arxiv.org/abs/2410.06916) for skipped layers. Whole layers are
skipped here, not attention and MLP separately, and the depth is fixed: to stop at a confidence threshold, the host
would have to read the device after every token.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.config import SpeculativeConfig
from hf_specdec.drafters.base import DraftContext, Drafter, DraftSession, DraftTarget
from hf_specdec.drafters.experimental.partial import GrowingTree, SkippedLayers, skippable, without_layers
from hf_specdec.drafters.registry import register
from hf_specdec.errors import DrafterMismatchError, InvalidConfigError, UnsupportedModelError
from hf_specdec.trees.draft import Budget, Draft
from hf_specdec.trees.growth import Level, best_children, grow_dynamic, growable
from hf_specdec.validation import require_integer
from hf_specdec.verification.model import execution_device, find_backbone
from hf_specdec.verification.step import Step

DEFAULT_NUM_STEPS = 4
DEFAULT_TOP_K = 1
DEFAULT_SHARE = 3
"""Divisor of the number of layers that gives the default exit layer, because published models do not state one."""
DEFAULT_RATIO = 0.45
"""Fraction of the layers between the first and the last that `search_skipped_layers` skips, as in SWIFT."""


@register("early_exit")
class EarlyExitDrafter(Drafter):
    """Drafts with some of the target's layers. Needs a model whose layers are in one list and run in sequence.

    Experimental (0.43x, see docs/methods/early_exit.md): each drafted token runs these layers, and a model not trained
    for early exit rarely predicts the right token there. Config fields: `num_steps` (default 4), `top_k` (1, a chain),
    `num_draft_tokens` (1 + num_steps * top_k), `tree` (None or `"dynamic"`).

    Args:
        exit_layer: Run only the first `exit_layer` layers; default: the first third of all layers, at least one.
        skipped_layers: Run all layers except these, counted from 0; see `search_skipped_layers`. Layer 0 always runs,
            because the number of tokens in the cache is read from it.

    Raises:
        InvalidConfigError: Both arguments are given, or they are not valid layer numbers.
    """

    def __init__(self, *, exit_layer: int | None = None, skipped_layers: Iterable[int] | None = None) -> None:
        if exit_layer is not None and skipped_layers is not None:
            raise InvalidConfigError("`exit_layer` and `skipped_layers` exclude each other.", "Pass only one of them.")
        if exit_layer is not None:
            require_integer("exit_layer", exit_layer, 1)
        if skipped_layers is not None:
            skipped_layers = _layer_numbers(skipped_layers)
        self.exit_layer, self.skipped_layers = exit_layer, skipped_layers
        self._bound: WeakKeyDictionary[PreTrainedModel, SkippedLayers] = WeakKeyDictionary()

    def __repr__(self) -> str:
        settings = {"exit_layer": self.exit_layer, "skipped_layers": self.skipped_layers}
        given = (f"{name}={value}" for name, value in settings.items() if value is not None)
        return f"EarlyExitDrafter({', '.join(given)})"

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the bound models, so that copies are not bound."""
        return {name: value for name, value in vars(self).items() if name != "_bound"}

    def __setstate__(self, values: dict[str, Any]) -> None:
        vars(self).update(values, _bound=WeakKeyDictionary())

    def bind(self, model: PreTrainedModel) -> None:
        """Check on a few tokens that the model can draft without the skipped layers; see `skippable`.

        Raises:
            DrafterMismatchError: The model has fewer layers than `exit_layer` or `skipped_layers` need.
            UnsupportedModelError: The model has no list of decoder layers, does not run without these layers, or
                drafting changes its cache.
        """
        self._bound[model] = skippable(model, self.layers_to_skip(model))

    def layers_to_skip(self, model: PreTrainedModel) -> tuple[int, ...]:
        """Return the numbers of the layers to skip in this model, from 0.

        Raises:
            DrafterMismatchError: The model has fewer layers than `exit_layer`.
            UnsupportedModelError: The model has no list of decoder layers.
        """
        if self.skipped_layers is not None:
            return self.skipped_layers
        _, layers = find_backbone(model)
        last = self.exit_layer or max(1, len(layers) // DEFAULT_SHARE)
        if last > len(layers):
            raise DrafterMismatchError(
                f"{type(model).__name__} has {len(layers)} layers, got exit_layer={last}.", "Choose an earlier layer."
            )
        return tuple(range(last, len(layers)))

    def limits(self, config: SpeculativeConfig) -> Budget:
        """Return the size of the chain, or of the tree if `top_k` is greater than 1.

        Raises:
            InvalidConfigError: `tree` is set and not `"dynamic"`.
        """
        if config.tree not in (None, "dynamic"):
            raise InvalidConfigError(
                f"The tree of 'early_exit' is dynamic, got tree={config.tree!r}.", "Set num_steps and top_k instead."
            )
        num_steps, top_k = config.num_steps or DEFAULT_NUM_STEPS, config.top_k or DEFAULT_TOP_K
        return growable(Budget(config.num_draft_tokens or 1 + num_steps * top_k, num_steps, top_k))

    def start(self, target: DraftTarget, context: DraftContext, config: SpeculativeConfig) -> DraftSession:
        """Start a session on the target's cache, which already holds the prompt."""
        return _EarlyExitSession(target, without_layers(target.model, self._bound[target.model]), context.roots)


def _layer_numbers(layers: Iterable[int]) -> tuple[int, ...]:
    """Return layer numbers as ascending ints without duplicates.

    Raises:
        InvalidConfigError: They are not integers >= 1.
    """
    try:
        numbers = sorted(set(map(operator.index, layers)))
    except TypeError as error:
        raise InvalidConfigError(f"`skipped_layers` must be layer numbers, got {layers!r}.") from error
    if numbers and numbers[0] < 1:
        raise InvalidConfigError(
            f"`skipped_layers` must be at least 1, got {numbers[0]}.", "Layer 0 always runs and cannot be skipped."
        )
    return tuple(numbers)


class _EarlyExitSession(DraftSession):
    def __init__(self, target: DraftTarget, part: PreTrainedModel, roots: Tensor) -> None:
        self._target, self._roots = target.with_model(part), roots

    def propose(self, budget: Budget) -> Draft:
        if budget.is_plain:
            return Draft.plain(self._roots)
        budget = _fitting(budget if self._target.supports_trees else budget.chain)
        with GrowingTree(self._target) as tree:

            def expand(tokens: Tensor, above: Level, parent_index: Tensor, seen: Tensor, depth: int) -> Level:
                return _level(tree.append(tokens, parent_index), budget.top_k)

            root = _level(tree.append(self._roots[:, None]), budget.top_k)
            return grow_dynamic(self._roots, root, expand, budget)

    def observe(self, step: Step) -> None:
        self._roots = step.acceptance.next_token


def _fitting(budget: Budget) -> Budget:
    """Limit the depth, so that the nodes that run while drafting fit in the cache slots reserved for the tree.

    Example: 5 nodes and top_k 2 allow a depth of 3, for which the root, two nodes and two nodes run.
    """
    num_steps = min(budget.num_steps, 1 + (budget.num_nodes - 1) // budget.top_k)
    return growable(Budget(budget.num_nodes, num_steps, budget.top_k))


def _level(logits: Tensor, top_k: int) -> Level:
    """Return the `Level` of K nodes after which the logits are `[B, K, V]`: the `top_k` likeliest children of each."""
    log_probs, ids = best_children(logits, top_k)
    return Level(ids, log_probs, ids)


# -------------------------------------------------------------------------------------------- search of layers


@torch.no_grad()
def search_skipped_layers(
    model: PreTrainedModel,
    prompts: Sequence[Tensor],
    *,
    ratio: float = DEFAULT_RATIO,
    trials: int = 100,
    new_tokens: int = 32,
    seed: int = 0,
) -> tuple[int, ...]:
    """Search for the layers that matter least for a model's answers to the given prompts.

    First each layer is skipped alone, and the layers with the least effect form the initial set. Then a random layer
    of the set is replaced by another one, up to `trials` times, and improvements are kept. The score of a set is the
    share of positions in the model's greedy answers where the argmax without these layers agrees with that of the
    whole model, in one forward over prompt and answer. The first and the last layer are never skipped.

    Args:
        model: The target; it is not changed.
        prompts: Token ids, each `[1, P]` or `[P]`.
        ratio: Fraction of the layers between the first and the last to skip.
        trials: Replacements to try; fewer are tried if all positions agree. Each takes one forward per prompt, as does
            the initial test of each layer.
        new_tokens: Maximum length of the answers, in tokens.
        seed: Random seed of the replacements.

    Returns:
        Layers for `EarlyExitDrafter(skipped_layers=...)`, ascending.

    Raises:
        InvalidConfigError: `prompts` is empty, or `ratio` is not in (0, 1].
        DrafterMismatchError: The model has no layers between the first and the last.
        UnsupportedModelError: The model has no list of decoder layers, or none of them can be skipped.
    """
    if not prompts or not 0 < ratio <= 1:
        raise InvalidConfigError(f"Expected prompts and a ratio in (0, 1], got {len(prompts)} prompts and {ratio}.")
    _, modules = find_backbone(model)
    inner: Sequence[int] = range(1, len(modules) - 1)
    size = min(len(inner), max(1, round(ratio * len(inner))))
    if not size:
        raise DrafterMismatchError(f"{type(model).__name__} has {len(modules)} layers, none of which can be skipped.")
    texts = [_answered(model, prompt, new_tokens) for prompt in prompts]
    known = _known_skippable(model, inner)
    inner, size = sorted(known), min(size, len(known))

    def agreement(layers: Iterable[int]) -> float:
        part = without_layers(model, {layer: known[layer] for layer in layers})
        hits = [_choices(part, text)[begin:] == choices[begin:] for text, begin, choices in texts]
        return float(torch.cat(hits).float().mean())

    alone = {layer: agreement([layer]) for layer in inner}
    best = set(sorted(inner, key=lambda layer: (-alone[layer], layer))[:size])
    score, draws = agreement(best), random.Random(seed)
    for _ in range(trials if size < len(inner) else 0):
        if score == 1:
            break
        other = best - {draws.choice(sorted(best))} | {draws.choice(sorted(set(inner) - best))}
        found = agreement(other)
        if found > score:
            best, score = other, found
    return tuple(sorted(best))


def _known_skippable(model: PreTrainedModel, layers: Sequence[int]) -> SkippedLayers:
    """Return the given layers that can be skipped. A layer whose cache length transformers reads, for example, cannot.

    Raises:
        UnsupportedModelError: None of the layers can be skipped.
    """
    try:
        return skippable(model, layers)
    except UnsupportedModelError as refusal:
        known: dict[int, int | None] = {}
        for layer in layers:
            with suppress(UnsupportedModelError):
                known.update(skippable(model, [layer]))
        if not known:
            raise refusal
        return known


def _answered(model: PreTrainedModel, prompt: Tensor, new_tokens: int) -> tuple[Tensor, int, Tensor]:
    """Return prompt and greedy answer `[1, T]`, the index of the prompt's last token, and `_choices` of this text."""
    ids = prompt.view(1, -1).to(execution_device(model))
    generate: Any = model.generate
    text = generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False)
    return text, ids.shape[1] - 1, _choices(model, text)


def _choices(model: PreTrainedModel, text: Tensor) -> Tensor:
    """Return the most likely token `[T]` after each token of a text `[1, T]`."""
    choices: Tensor = model(input_ids=text, use_cache=False).logits[0].argmax(-1)
    return choices
