"""A model with some of its decoder layers left out, to draft with: the same weights, nothing written on the model.

Only the modules on the way to the list of layers are copied, and only their shells: parameters and all other modules
are shared. A layer that is left out stays in its place as a copy of its shell that passes the hidden states on, so
that layers keep their numbers, their masks and their slots in the cache.
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
from hf_specdec.trees.tree import ROOT_PARENT, TokenTree
from hf_specdec.verification.model import execution_device, find_backbone, text_config
from hf_specdec.verification.probe import FAILURES, TargetFacts, first_inputs, inspect_target, reproducible
from hf_specdec.verification.target import Target

SkippedLayers = Mapping[int, int | None]
"""Numbers of the decoder layers that are left out, each with how many values it returns; None: hidden states alone."""


def without_layers(model: PreTrainedModel, skipped: SkippedLayers) -> PreTrainedModel:
    """The model with these layers left out, as `skippable` found them.

    Raises:
        UnsupportedModelError: There is no list of decoder layers, or a forward on the way to it is not its class's.
    """
    _, layers = find_backbone(model)
    kept = [_gap(layer, skipped[index]) if index in skipped else layer for index, layer in enumerate(layers)]
    copied: Any = _around(model, {layers: nn.ModuleList(kept)})
    return copied


def _around(module: nn.Module, changed: dict[nn.Module, nn.Module]) -> nn.Module:
    """The module itself, or a copy of its shell where something below it is another now."""
    if module not in changed:
        below = module._modules.items()
        children = {name: None if child is None else _around(child, changed) for name, child in below}
        changed[module] = module
        if any(child is not module._modules[name] for name, child in children.items()):
            changed[module] = _shell(module)
            vars(changed[module])["_modules"] = children
    return changed[module]


def _shell(module: nn.Module) -> nn.Module:
    """A module of the same class with the same attributes, parameters and hooks.

    Raises:
        UnsupportedModelError: Its forward was replaced by one that is bound to the module.
    """
    shell: nn.Module = object.__new__(type(module))
    own = vars(shell)
    own.update(vars(module))
    own["_compiled_call_impl"] = None  # it is the original's
    # transformers would put hooks that collect hidden states on shared modules once more
    own["_output_capturing_hooks_installed"] = True
    if "forward" in own:
        if "_hf_hook" not in own or getattr(own.get("_old_forward"), "__func__", None) is not type(module).forward:
            raise UnsupportedModelError(
                f"The forward of this {type(module).__name__} was replaced (by torch.compile, say), so its layers "
                "cannot be left out.",
                "Use a drafter that runs no layers of the model, such as prompt_lookup.",
            )
        own["forward"] = functools.partial(_forward_with_hook, shell)
    return shell


def _forward_with_hook(module: nn.Module, *inputs: Any, **named: Any) -> Any:
    """What accelerate makes of a forward where weights are offloaded, or lie on several devices."""
    hook: Any = module._hf_hook
    inputs, named = hook.pre_forward(module, *inputs, **named)
    return hook.post_forward(module, type(module).forward(module, *inputs, **named))


def _gap(layer: nn.Module, num_outputs: int | None) -> nn.Module:
    """A copy of a layer's shell that passes its hidden states on."""
    base: Any = type(layer)
    gap: nn.Module = object.__new__(_passing_on(base, num_outputs))
    own = {name: value for name, value in vars(layer).items() if name != "forward"}
    vars(gap).update(own, _forward_hooks=OrderedDict(), _forward_pre_hooks=OrderedDict(), _compiled_call_impl=None)
    return gap


@functools.cache
def _passing_on(base: Any, num_outputs: int | None) -> Any:
    """A subclass that keeps what a model asks of its layers besides (kinds of attention, ...)."""

    def forward(_self: nn.Module, *inputs: Any, **named: Any) -> Any:
        hidden = inputs[0] if inputs else named["hidden_states"]
        return hidden if num_outputs is None else (hidden, *[None] * (num_outputs - 1))

    return type(base.__name__, (base,), {"__module__": base.__module__, "__doc__": base.__doc__, "forward": forward})


# ------------------------------------------------------------------------------------------------ does it work?


@torch.no_grad()
def skippable(model: PreTrainedModel, layers: Iterable[int]) -> SkippedLayers:
    """See that a model drafts without these layers over its own cache, and that it is then as it was.

    Costs the forwards of `inspect_target` and eight of at most 9 tokens in two rows; changes nothing.

    Raises:
        DrafterMismatchError: The model has no such layers.
        UnsupportedModelError: It does not work without them; the message tells why.
    """
    wanted = sorted(set(layers))
    _, modules = find_backbone(model)
    if wanted and not 0 <= wanted[0] <= wanted[-1] < len(modules):
        raise DrafterMismatchError(
            f"{type(model).__name__} has layers 0 to {len(modules) - 1}, asked to leave out {wanted}.",
            "Give other layers.",
        )
    with reproducible(model):
        try:
            with _watched([modules[layer] for layer in wanted]) as outputs:
                tokens = torch.arange(9, device=execution_device(model))[None] % text_config(model).vocab_size
                model(input_ids=tokens, use_cache=False)
            kinds = [_num_outputs(outputs.get(modules[layer])) for layer in wanted]
            skipped = dict(zip(wanted, kinds, strict=True))
            _try_drafting(model, skipped, inspect_target(model))
        except (_CannotSkipError, *FAILURES) as error:
            reason = str(error) if isinstance(error, _CannotSkipError) else f"{type(error).__name__}: {error}"
            raise UnsupportedModelError(
                f"{type(model).__name__} cannot draft without its layers {wanted}: {reason}.",
                "Leave out other layers, or use a drafter that runs none, such as prompt_lookup.",
            ) from error
    return skipped


class _CannotSkipError(Exception):
    """A model does not run without layers; the message tells how."""


@contextmanager
def _watched(modules: Iterable[nn.Module]) -> Iterator[dict[nn.Module, Any]]:
    """What modules return in this thread's forwards."""
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
    raise _CannotSkipError(f"they return {type(output).__name__}, where hidden states were expected")


def _try_drafting(model: PreTrainedModel, skipped: SkippedLayers, facts: TargetFacts) -> None:
    """Draft three levels over the cache of the whole model; what it verifies before and after must be the same.

    Raises:
        _CannotSkipError: It is not, or the layers run all the same.
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
    with _watched([modules[layer] for layer in skipped]) as outputs, growth:
        logits = growth.append(nodes[:, :1])
        for column in (1, 2):
            below = nodes[:, column:][:, : 2 if facts.supports_trees else 1]
            logits = growth.append(below, torch.zeros_like(below))
    if outputs:
        raise _CannotSkipError("they run all the same, reached in another way than by the list of layers")
    if not bool(logits.isfinite().any(-1).all()):
        raise _CannotSkipError("its logits are then no numbers")
    after = target.verify(chain).logits
    if not (after - before).float().norm() <= SAME * before.float().norm():
        raise _CannotSkipError("drafting does not leave its cache as it was")


# ----------------------------------------------------------------------------------------------------- drafting


class GrowingTree:
    """A tree that a part of the target appends to the target's cache level by level; a context, forgotten at its end.

    The entries of the layers that run are those that the committed text has there already, so drafting reads no text
    of its own; the layers that are left out get none, and verification appends the tree anew in all of them.

    Args:
        target: Seen with the part, see `Target.with_model`.
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
        """The next level: first the roots `[B, 1]`, then K nodes `[B, K]`.

        Args:
            tokens: The nodes.
            parent_index: `[B, K]` the parent of each in the level above.

        Returns:
            Logits `[B, K, V]`.
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


SAME = 1e-2
"""Relative distance of logits that are computed twice from the same cache, at most; rounding is far below it."""
