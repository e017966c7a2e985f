"""Drafting with some of the target's own layers, its final norm and its lm_head, over its own cache.

Sources: LayerSkip (https://arxiv.org/abs/2404.16710) for the first layers, Draft & Verify
(https://arxiv.org/abs/2309.08168) and SWIFT (https://arxiv.org/abs/2410.06916) for skipped layers. Whole layers are
skipped here, not attention and MLP apart, and the depth is fixed: a threshold on the confidence would be read from the
device after every token.
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

from hf_specdec.config import SpeculativeConfig, require_integer
from hf_specdec.drafters.base import DraftContext, Drafter, DraftSession
from hf_specdec.drafters.experimental.partial import GrowingTree, SkippedLayers, skippable, without_layers
from hf_specdec.errors import DrafterMismatchError, InvalidConfigError, UnsupportedModelError
from hf_specdec.trees.draft import Budget, Draft
from hf_specdec.trees.growth import Level, best_children, grow_dynamic, growable
from hf_specdec.verification.model import execution_device, find_backbone
from hf_specdec.verification.step import Step
from hf_specdec.verification.target import Target

DEFAULT_NUM_STEPS = 4
DEFAULT_TOP_K = 1
DEFAULT_SHARE = 3
"""One layer in so many runs where no setting tells; models are released without a word on where to exit."""
DEFAULT_RATIO = 0.45
"""Of the layers that `search_skipped_layers` may skip; SWIFT's."""


class EarlyExitDrafter(Drafter):
    """Drafts with a part of the target. Needs a model whose layers stand in one list and run one after the other.

    It seldom pays: a drafted token costs the layers that run, and a model that was not trained to exit early is seldom
    right there. Config fields: `num_steps` (default 4), `top_k` (1, a chain), `num_draft_tokens` (1 + steps * top_k);
    `tree` may be `"dynamic"`, which it is.

    Args:
        exit_layer: Run the first so many layers; default: a third of them.
        skipped_layers: Run all but these, counted from 0; `search_skipped_layers` finds some. The first layer runs
            always: it counts the tokens of the cache.

    Raises:
        InvalidConfigError: Both, or numbers that are no layers.
    """

    method = "early_exit"

    def __init__(self, *, exit_layer: int | None = None, skipped_layers: Iterable[int] | None = None) -> None:
        if exit_layer is not None and skipped_layers is not None:
            raise InvalidConfigError("`exit_layer` and `skipped_layers` tell the same thing.", "Give one of the two.")
        if exit_layer is not None:
            require_integer("exit_layer", exit_layer, 1)
        if skipped_layers is not None:
            skipped_layers = _layer_numbers(skipped_layers)
        self.exit_layer, self.skipped_layers = exit_layer, skipped_layers
        self._bound: WeakKeyDictionary[PreTrainedModel, SkippedLayers] = WeakKeyDictionary()

    def __repr__(self) -> str:
        told = {"exit_layer": self.exit_layer, "skipped_layers": self.skipped_layers}
        return f"EarlyExitDrafter({', '.join(f'{name}={value}' for name, value in told.items() if value is not None)})"

    def __getstate__(self) -> dict[str, Any]:
        """A copy is bound to no model yet."""
        return {name: value for name, value in vars(self).items() if name != "_bound"}

    def __setstate__(self, values: dict[str, Any]) -> None:
        vars(self).update(values, _bound=WeakKeyDictionary())

    def bind(self, model: PreTrainedModel) -> None:
        """Try drafting on a few tokens.

        Raises:
            DrafterMismatchError: The model has fewer layers.
            UnsupportedModelError: It does not draft without these layers, or is not then as it was.
        """
        self._bound[model] = skippable(model, self.layers_to_skip(model))

    def layers_to_skip(self, model: PreTrainedModel) -> tuple[int, ...]:
        """The layers of this model that are left out."""
        if self.skipped_layers is not None:
            return self.skipped_layers
        _, layers = find_backbone(model)
        last = self.exit_layer or max(1, len(layers) // DEFAULT_SHARE)
        if last > len(layers):
            raise DrafterMismatchError(
                f"{type(model).__name__} has {len(layers)} layers, got exit_layer={last}.", "Exit earlier."
            )
        return tuple(range(last, len(layers)))

    def limits(self, config: SpeculativeConfig) -> Budget:
        """A chain, or the tree that `top_k` asks for.

        Raises:
            InvalidConfigError: A tree that is not dynamic.
        """
        if config.tree not in (None, "dynamic"):
            raise InvalidConfigError(
                f"The tree of 'early_exit' is dynamic, got tree={config.tree!r}.", "Set num_steps and top_k instead."
            )
        num_steps, top_k = config.num_steps or DEFAULT_NUM_STEPS, config.top_k or DEFAULT_TOP_K
        return growable(Budget(config.num_draft_tokens or 1 + num_steps * top_k, num_steps, top_k))

    def start(self, target: Target, context: DraftContext, config: SpeculativeConfig) -> DraftSession:
        """A session that shares the target's cache; it has nothing to read first."""
        return _EarlyExitSession(target, without_layers(target.model, self._bound[target.model]), context.roots)


def _layer_numbers(layers: Iterable[int]) -> tuple[int, ...]:
    """The layers to skip, ascending.

    Raises:
        InvalidConfigError: They are not integers >= 1.
    """
    try:
        numbers = sorted(set(map(operator.index, layers)))
    except TypeError as error:
        raise InvalidConfigError(f"`skipped_layers` must be numbers of layers, got {layers!r}.") from error
    if numbers and numbers[0] < 1:
        raise InvalidConfigError(
            f"`skipped_layers` are numbers from 1 on, got {numbers[0]}.", "The first layer, number 0, always runs."
        )
    return tuple(numbers)


class _EarlyExitSession(DraftSession):
    def __init__(self, target: Target, part: PreTrainedModel, roots: Tensor) -> None:
        self._target, self._roots = target.with_model(part), roots

    def propose(self, budget: Budget) -> Draft:
        if budget.is_plain:
            return Draft.plain(self._roots)
        budget = _affordable(budget if self._target.supports_trees else budget.chain)
        with GrowingTree(self._target) as tree:

            def expand(tokens: Tensor, above: Level, parent_index: Tensor, seen: Tensor, depth: int) -> Level:
                return _level(tree.append(tokens, parent_index), budget.top_k)

            root = _level(tree.append(self._roots[:, None]), budget.top_k)
            return grow_dynamic(self._roots, root, expand, budget)

    def observe(self, step: Step) -> None:
        self._roots = step.acceptance.next_token


def _affordable(budget: Budget) -> Budget:
    """The budget, no deeper than that the nodes that are run to draft fit where its tree will stand in the cache.

    Example: 5 nodes, top 2: three levels run the root, two nodes and two nodes.
    """
    num_steps = min(budget.num_steps, 1 + (budget.num_nodes - 1) // budget.top_k)
    return growable(Budget(budget.num_nodes, num_steps, budget.top_k))


def _level(logits: Tensor, top_k: int) -> Level:
    """The best children of K nodes with logits `[B, K, V]`."""
    log_probs, ids = best_children(logits, top_k)
    return Level(ids, log_probs, ids)


# -------------------------------------------------------------------------------------------------- which layers?


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
    """Find layers that a model does well without on prompts like these.

    Layers are left out one at a time first; those that are missed least are the first guess, then one of the guess and
    one other are exchanged at random, and what is better is kept. A set is as good as its argmax agrees with the
    whole model's at the tokens of the model's own greedy answers, in one forward over prompt and answer. The first and
    the last layer are kept.

    Args:
        model: The target; nothing of it is changed.
        prompts: Token ids `[1, P]` or `[P]` each.
        ratio: How much of the layers between the first and the last to leave out.
        trials: Exchanges that are tried; each is a forward per prompt, as is every layer at first.
        new_tokens: Length of the answers.
        seed: Of the exchanges.

    Returns:
        Layers for `EarlyExitDrafter(skipped_layers=...)`, ascending.

    Raises:
        InvalidConfigError: No prompts, or a ratio outside of 0 to 1.
        UnsupportedModelError: The model does not run without its layers.
    """
    if not prompts or not 0 < ratio <= 1:
        raise InvalidConfigError(f"Expected some prompts and a ratio in (0, 1], got {len(prompts)} and {ratio}.")
    _, modules = find_backbone(model)
    inner: Sequence[int] = range(1, len(modules) - 1)
    size = min(len(inner), max(1, round(ratio * len(inner))))
    if not size:
        raise DrafterMismatchError(f"{type(model).__name__} has {len(modules)} layers: none that could be left out.")
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
    """Those of the layers that may be left out; transformers counts tokens by the first attention layer, say.

    Raises:
        UnsupportedModelError: None of them.
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
    """Prompt and greedy answer `[1, T]`, the place after which the answer begins, and the choices `[T]` at all."""
    ids = prompt.view(1, -1).to(execution_device(model))
    generate: Any = model.generate
    text = generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False)
    return text, ids.shape[1] - 1, _choices(model, text)


def _choices(model: PreTrainedModel, text: Tensor) -> Tensor:
    """The likeliest token `[T]` after each token of a text `[1, T]`."""
    choices: Tensor = model(input_ids=text, use_cache=False).logits[0].argmax(-1)
    return choices
