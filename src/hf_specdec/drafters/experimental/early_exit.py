"""Early exit: draft with some of the target's layers, its final norm, its lm_head and its key-value cache.

Experimental because it was slower in the benchmarks: 0.43x the speed of plain decoding (docs/benchmarks/history.md).

Sources: LayerSkip (https://arxiv.org/abs/2404.16710) for the first layers, Draft & Verify
(https://arxiv.org/abs/2309.08168) and SWIFT (https://arxiv.org/abs/2410.06916) for skipped layers. Whole layers are
skipped here, not attention and MLP separately, and the depth is fixed: to stop at a confidence threshold, the host
would have to read the device after every token.

The drafting model is a view that shares the target's weights and does not change it. Only the modules on the path to
the list of layers are copied, as shells: new module objects with the same parameters and, apart from this path, the
same submodules. A skipped layer is replaced by a shell that returns its input unchanged, so that the other layers keep
their numbers, masks and cache slots.
"""

from __future__ import annotations

import functools
import operator
import random
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from hf_specdec.config import SpeculativeConfig
from hf_specdec.drafters.base import SIZES, DraftContext, Drafter, DraftSession, DraftTarget
from hf_specdec.drafters.registry import register
from hf_specdec.errors import DrafterMismatchError, InvalidConfigError, UnsupportedModelError
from hf_specdec.transformers_private import dispatch_hook, mark_output_hooks_installed, original_forward
from hf_specdec.trees.draft import Budget, Draft
from hf_specdec.trees.growth import Level, best_children, grow_dynamic, growable
from hf_specdec.trees.tree import ROOT_PARENT, TokenTree
from hf_specdec.validation import require_integer
from hf_specdec.verification.model import execution_device, find_backbone, text_config
from hf_specdec.verification.probe import TargetFacts, inspect_target
from hf_specdec.verification.step import Step
from hf_specdec.verification.trials import FAILURES, first_inputs, reproducible

DEFAULT_SHARE = 3
"""Divisor of the number of layers that gives the default exit layer, because published models do not state one."""
DEFAULT_RATIO = 0.45
"""Fraction of the layers between the first and the last that `search_skipped_layers` skips, as in SWIFT."""
MAX_DIFFERENCE = 1e-2
"""Maximum relative distance between logits computed twice from the same cache; rounding errors are far smaller."""

SkippedLayers = Mapping[int, int | None]
"""Skipped layers by number from 0, each with the length of the tuple that it returns; None if it returns a tensor."""


@register("early_exit")
class EarlyExitDrafter(Drafter):
    """Drafts with some of the target's layers. Needs a model whose layers are in one list and run in sequence.

    Experimental (0.43x, see docs/methods/experimental.md): each drafted token runs these layers, and a model not
    trained for early exit rarely predicts the right token there. Config fields: `num_steps` (default 4), `top_k` (1,
    a chain), `num_draft_tokens` (1 + num_steps * top_k), `tree` (None or `"dynamic"`).

    Args:
        exit_layer: Run only the first `exit_layer` layers; default: the first third of all layers, at least one.
        skipped_layers: Run all layers except these, counted from 0; see `search_skipped_layers`. Layer 0 always runs,
            because the number of tokens in the cache is read from it.

    Raises:
        InvalidConfigError: Both arguments are given, or they are not valid layer numbers.
    """

    accepts = ("tree=dynamic", *SIZES)
    tree_from = "the probabilities that its layers give"
    defaults = Budget(5, 4, 1)

    def __init__(self, *, exit_layer: int | None = None, skipped_layers: Iterable[int] | None = None) -> None:
        if exit_layer is not None and skipped_layers is not None:
            raise InvalidConfigError("`exit_layer` and `skipped_layers` exclude each other.", "Pass only one of them.")
        if exit_layer is not None:
            require_integer("exit_layer", exit_layer, 1)
        if skipped_layers is not None:
            try:
                skipped_layers = tuple(sorted(set(map(operator.index, skipped_layers))))
            except TypeError as error:
                raise InvalidConfigError(f"`skipped_layers` must be layer numbers, got {skipped_layers!r}.") from error
            if skipped_layers and skipped_layers[0] < 1:
                raise InvalidConfigError(
                    f"`skipped_layers` must be at least 1, got {skipped_layers[0]}.",
                    "Layer 0 always runs and cannot be skipped.",
                )
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
        """Check on a few tokens that the model can draft without the skipped layers; see `skippable`."""
        self._bound[model] = skippable(model, self.layers_to_skip(model))

    def layers_to_skip(self, model: PreTrainedModel) -> tuple[int, ...]:
        """Return the numbers of the layers to skip in this model, from 0."""
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
        """Return the size of the chain, or of the tree if `top_k` is greater than 1."""
        limits = super().limits(config)
        num_nodes = config.num_draft_tokens or 1 + limits.num_steps * limits.top_k
        return growable(replace(limits, num_nodes=num_nodes))

    def start(self, target: DraftTarget, context: DraftContext, config: SpeculativeConfig) -> DraftSession:
        """Start a session on the target's cache, which already holds the prompt."""
        return _EarlyExitSession(target, without_layers(target.model, self._bound[target.model]), context.roots)


class _EarlyExitSession(DraftSession):
    def __init__(self, target: DraftTarget, part: PreTrainedModel, roots: Tensor) -> None:
        self._target, self._roots = target.with_model(part), roots

    def propose(self, budget: Budget) -> Draft:
        if budget.is_plain:
            return Draft.plain(self._roots)
        budget = budget if self._target.supports_trees else budget.chain
        # all nodes that run while drafting must fit in the slots reserved for the tree: 5 nodes and top_k 2 allow
        # a depth of 3, for which the root, two nodes and two nodes run
        num_steps = min(budget.num_steps, 1 + (budget.num_nodes - 1) // budget.top_k)
        budget = growable(Budget(budget.num_nodes, num_steps, budget.top_k))
        with GrowingTree(self._target) as tree:

            def level(tokens: Tensor, parent_index: Tensor | None = None) -> Level:
                log_probs, ids = best_children(tree.append(tokens, parent_index), budget.top_k)
                return Level(ids, log_probs, ids)

            def expand(tokens: Tensor, above: Level, parent_index: Tensor, seen: Tensor, depth: int) -> Level:
                return level(tokens, parent_index)

            return grow_dynamic(self._roots, level(self._roots[:, None]), expand, budget)

    def observe(self, step: Step) -> None:
        self._roots = step.acceptance.next_token


class GrowingTree:
    """Context manager that appends a tree to the target's cache level by level and removes it on exit.

    Layers that run already have the committed text in the cache, so drafting need not process it. Skipped layers get
    no entries; verification appends the whole tree again in all layers. The target is one of `Target.with_model`.
    """

    def __init__(self, target: DraftTarget) -> None:
        self._target = target

    def __enter__(self) -> GrowingTree:
        self._tokens: Tensor | None = None  # [B, A] appended so far
        return self

    def __exit__(self, *exc: object) -> None:
        if self._tokens is not None:
            self._target.forget()

    def append(self, tokens: Tensor, parent_index: Tensor | None = None) -> Tensor:
        """Append the next level of the tree, run it without the skipped layers and return the logits `[B, K, V]`.

        Args:
            tokens: The roots `[B, 1]`, later K nodes `[B, K]`.
            parent_index: `[B, K]` parent of each node, as an index in the level above; None for the roots.
        """
        if self._tokens is None or parent_index is None:
            self._tokens, self._parents = tokens, torch.full_like(tokens, ROOT_PARENT)
            self._last, self._depth = 0, 0
            return self._target.extend(TokenTree(self._tokens, self._parents, max_depth=0), 0)
        known = self._tokens.shape[1]
        self._tokens = torch.cat([self._tokens, tokens], dim=-1)
        self._parents = torch.cat([self._parents, self._last + parent_index], dim=-1)
        self._last, self._depth = known, self._depth + 1
        return self._target.extend(TokenTree(self._tokens, self._parents, max_depth=self._depth), known)


# ------------------------------------------------------------ a view without some layers


def without_layers(model: PreTrainedModel, skipped: SkippedLayers) -> PreTrainedModel:
    """Return a view of the model that skips some layers, given as returned by `skippable`."""
    _, layers = find_backbone(model)
    kept = [_identity(layer, skipped[index]) if index in skipped else layer for index, layer in enumerate(layers)]
    return _with_changed(model, {layers: nn.ModuleList(kept)})


def _with_changed(module: nn.Module, changed: dict[nn.Module, nn.Module]) -> nn.Module:
    """Return the module's entry in `changed`, made if missing: a shell if a module below it is replaced, or itself."""
    if module not in changed:
        below = module._modules.items()
        children = {name: None if child is None else _with_changed(child, changed) for name, child in below}
        changed[module] = module
        if any(child is not module._modules[name] for name, child in children.items()):
            changed[module] = _shell(module)
            vars(changed[module])["_modules"] = children
    return changed[module]


def _shell(module: nn.Module) -> nn.Module:
    """Create a module of the same class that shares all attributes, parameters and hooks with the given one.

    A forward that was replaced, other than by accelerate, would run the original module instead, and is refused.
    """
    shell: nn.Module = object.__new__(type(module))
    own = vars(shell)
    own.update(vars(module))
    own["_compiled_call_impl"] = None  # compiled for the original
    # otherwise transformers would install its hooks for hidden states a second time on shared modules
    mark_output_hooks_installed(own)
    if "forward" in own:
        original = getattr(original_forward(module), "__func__", None)
        if dispatch_hook(module) is None or original is not type(module).forward:
            raise UnsupportedModelError(
                f"The forward of this {type(module).__name__} was replaced (for example by torch.compile), so its "
                "layers cannot be skipped.",
                "Use a drafter that runs no layers of the model, such as prompt_lookup.",
            )
        own["forward"] = functools.partial(_forward_with_hook, shell)
    return shell


def _forward_with_hook(module: nn.Module, *inputs: Any, **named: Any) -> Any:
    """Run a module's forward with accelerate's hook, which loads offloaded weights or moves inputs between devices."""
    hook: Any = dispatch_hook(module)
    inputs, named = hook.pre_forward(module, *inputs, **named)
    return hook.post_forward(module, type(module).forward(module, *inputs, **named))


def _identity(layer: nn.Module, num_outputs: int | None) -> nn.Module:
    """Create a shell of a layer, without hooks, whose forward returns its input unchanged.

    The input is returned as a tensor, or followed by None values as a tuple of length `num_outputs` if that is given.
    """
    base: Any = type(layer)
    shell: nn.Module = object.__new__(_identity_class(base, num_outputs))
    own = {name: value for name, value in vars(layer).items() if name != "forward"}
    vars(shell).update(own, _forward_hooks=OrderedDict(), _forward_pre_hooks=OrderedDict(), _compiled_call_impl=None)
    return shell


@functools.cache
def _identity_class(base: Any, num_outputs: int | None) -> Any:
    """Create a subclass for `_identity`; it inherits the attributes that models read from their layers."""

    def forward(_self: nn.Module, *inputs: Any, **named: Any) -> Any:
        hidden = inputs[0] if inputs else named["hidden_states"]
        return hidden if num_outputs is None else (hidden, *[None] * (num_outputs - 1))

    return type(base.__name__, (base,), {"__module__": base.__module__, "__doc__": base.__doc__, "forward": forward})


# ------------------------------------------------------------ can it draft so?


@torch.no_grad()
def skippable(model: PreTrainedModel, layers: Iterable[int]) -> SkippedLayers:
    """Check that a model can draft on its cache without these layers, and that drafting leaves the cache unchanged.

    Runs the forwards of `inspect_target` and seven more of at most two rows of 9 tokens. Does not change the model.
    Returns the layers, for `without_layers`.
    """
    wanted = sorted(set(layers))
    _, modules = find_backbone(model)
    if wanted and not 0 <= wanted[0] <= wanted[-1] < len(modules):
        raise DrafterMismatchError(
            f"{type(model).__name__} has layers 0 to {len(modules) - 1}, got {wanted}.", "Choose layers in this range."
        )
    with reproducible(model):
        try:
            with _collect_outputs([modules[layer] for layer in wanted]) as outputs:
                tokens = torch.arange(9, device=execution_device(model))[None] % text_config(model).vocab_size
                model(input_ids=tokens, use_cache=False)
            skipped = dict[int, int | None]()
            for layer in wanted:
                output: Any = outputs.get(modules[layer])
                is_tuple = isinstance(output, tuple | list) and bool(output)
                if not isinstance(output[0] if is_tuple else output, Tensor):
                    raise _CannotSkipError(f"they return {type(output).__name__} instead of hidden states")
                skipped[layer] = len(output) if is_tuple else None
            _try_drafting(model, skipped, inspect_target(model))
        except (_CannotSkipError, *FAILURES) as error:
            reason = str(error) if isinstance(error, _CannotSkipError) else f"{type(error).__name__}: {error}"
            raise UnsupportedModelError(
                f"{type(model).__name__} cannot draft without its layers {wanted}: {reason}.",
                "Skip other layers, or use a drafter that runs no layers, such as prompt_lookup.",
            ) from error
    return skipped


class _CannotSkipError(Exception):
    """Raised if a model does not run without some layers; the message gives the reason."""


@contextmanager
def _collect_outputs(modules: Iterable[nn.Module]) -> Iterator[dict[nn.Module, Any]]:
    """Context manager that collects the outputs of modules in the current thread's forwards, by module."""
    outputs: dict[nn.Module, Any] = {}
    thread = threading.get_ident()

    def keep(module: nn.Module, _inputs: Any, output: Any) -> None:
        if threading.get_ident() == thread:
            outputs[module] = output

    handles = [module.register_forward_hook(keep) for module in modules]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _try_drafting(model: PreTrainedModel, skipped: SkippedLayers, facts: TargetFacts) -> None:
    """Draft three levels and check that verification gives the same logits before and after."""
    device = execution_device(model)
    tokens = (torch.arange(26, device=device) * 7 + 3).view(2, 13) % text_config(model).vocab_size
    prompt, nodes = tokens.split([9, 4], dim=-1)
    mask = torch.ones_like(prompt)
    mask[1, :3] = 0  # left padding
    target = facts.new_target(model, capacity=32, reserve=0)
    target.prefill(prompt, GenerationConfig(), first_inputs(model, mask, target.cache))
    chain = TokenTree(nodes, torch.arange(ROOT_PARENT, nodes.shape[1] - 1, device=device))
    before = target.verify(chain).logits
    target.rollback(chain.num_nodes)
    _, modules = find_backbone(model)
    growth = GrowingTree(target.with_model(without_layers(model, skipped)))
    with _collect_outputs([modules[layer] for layer in skipped]) as outputs, growth:
        logits = growth.append(nodes[:, :1])
        for column in (1, 2):
            below = nodes[:, column:][:, : 2 if facts.supports_trees else 1]
            logits = growth.append(below, torch.zeros_like(below))
    if outputs:
        raise _CannotSkipError("they still run, because the model does not take them from its list of layers")
    if not bool(logits.isfinite().any(-1).all()):
        raise _CannotSkipError("its logits are not finite")
    after = target.verify(chain).logits
    if not (after - before).float().norm() <= MAX_DIFFERENCE * before.float().norm():
        raise _CannotSkipError("drafting changes its cache")


# ------------------------------------------------------------ search of layers


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
    try:
        known = skippable(model, inner)
    except UnsupportedModelError:  # some cannot be skipped, for example one whose cache length transformers reads
        single: dict[int, int | None] = {}
        for layer in inner:
            with suppress(UnsupportedModelError):
                single.update(skippable(model, [layer]))
        if not single:
            raise
        known = single
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


def _answered(model: PreTrainedModel, prompt: Tensor, new_tokens: int) -> tuple[Tensor, int, Tensor]:
    """Return prompt and greedy answer `[1, T]`, the index of the prompt's last token, and `_choices` of this text."""
    ids = prompt.view(1, -1).to(execution_device(model))
    generate: Any = model.generate
    text = generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False)
    return text, ids.shape[1] - 1, _choices(model, text)


def _choices(model: PreTrainedModel, text: Tensor) -> Tensor:
    """Return the most likely token `[T]` after each token of a text `[1, T]`."""
    return model(input_ids=text, use_cache=False).logits[0].argmax(-1)
