"""A view of a model that skips some decoder layers, for drafting: it shares the weights and does not change the model.

Only the modules on the path to the list of layers are copied, as shells: new module objects with the same parameters
and, apart from this path, the same submodules. A skipped layer is replaced by a shell that returns its input
unchanged, so that the other layers keep their numbers, masks and cache slots. `GrowingTree` uses such a view to draft
with the target's cache.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from hf_specdec.errors import DrafterMismatchError, UnsupportedModelError
from hf_specdec.transformers_private import dispatch_hook, mark_output_hooks_installed, original_forward
from hf_specdec.trees.tree import ROOT_PARENT, TokenTree
from hf_specdec.verification.model import execution_device, find_backbone, text_config
from hf_specdec.verification.probe import TargetFacts, inspect_target
from hf_specdec.verification.target import Target
from hf_specdec.verification.trials import FAILURES, first_inputs, reproducible

SkippedLayers = Mapping[int, int | None]
"""Skipped layers by number from 0, each with the length of the tuple that it returns; None if it returns a tensor."""

MAX_DIFFERENCE = 1e-2
"""Maximum relative distance between logits computed twice from the same cache; rounding errors are far smaller."""


def without_layers(model: PreTrainedModel, skipped: SkippedLayers) -> PreTrainedModel:
    """Return a view of the model that skips some layers, given as returned by `skippable`.

    Raises:
        UnsupportedModelError: The model has no list of decoder layers, or a forward on the path to it was replaced.
    """
    _, layers = find_backbone(model)
    kept = [_identity(layer, skipped[index]) if index in skipped else layer for index, layer in enumerate(layers)]
    copied: Any = _with_changed(model, {layers: nn.ModuleList(kept)})
    return copied


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

    Raises:
        UnsupportedModelError: The module's forward was replaced, other than by accelerate, and would run the original
            module instead of the shell.
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


# ------------------------------------------------------------------------------------------------------- checks


@torch.no_grad()
def skippable(model: PreTrainedModel, layers: Iterable[int]) -> SkippedLayers:
    """Check that a model can draft on its cache without these layers, and that drafting leaves the cache unchanged.

    Runs the forwards of `inspect_target` and seven more of at most two rows of 9 tokens. Does not change the model.

    Returns:
        The layers, for `without_layers`.

    Raises:
        DrafterMismatchError: The model has no such layers.
        UnsupportedModelError: The model has no list of decoder layers, does not run without these layers, or drafting
            changes its cache; the message gives the reason.
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
            kinds = [_num_outputs(outputs.get(modules[layer])) for layer in wanted]
            skipped = dict(zip(wanted, kinds, strict=True))
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


def _num_outputs(output: Any) -> int | None:
    if isinstance(output, Tensor):
        return None
    if isinstance(output, tuple | list) and output and isinstance(output[0], Tensor):
        return len(output)
    raise _CannotSkipError(f"they return {type(output).__name__} instead of hidden states")


def _try_drafting(model: PreTrainedModel, skipped: SkippedLayers, facts: TargetFacts) -> None:
    """Draft three levels and check that verification gives the same logits before and after.

    Raises:
        _CannotSkipError: The logits of the verifications differ, logits of the drafts are not finite, or the skipped
            layers still run.
    """
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


# ----------------------------------------------------------------------------------------------------- drafting


class GrowingTree:
    """Context manager that appends a tree to the target's cache level by level and removes it on exit.

    Layers that run already have the committed text in the cache, so drafting need not process it. Skipped layers get
    no entries; verification appends the whole tree again in all layers.

    Args:
        target: The target with some layers skipped, see `Target.with_model`.
    """

    def __init__(self, target: Target) -> None:
        self._target = target

    def __enter__(self) -> GrowingTree:
        self._tokens: Tensor | None = None  # [B, A] appended so far
        return self

    def __exit__(self, *exc: object) -> None:
        if self._tokens is not None:
            self._target.forget()

    def append(self, tokens: Tensor, parent_index: Tensor | None = None) -> Tensor:
        """Append the next level of the tree and run it without the skipped layers.

        Args:
            tokens: The roots `[B, 1]`, later K nodes `[B, K]`.
            parent_index: `[B, K]` parent of each node, as an index in the level above; None for the roots.

        Returns:
            Logits `[B, K, V]` after these nodes.
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
