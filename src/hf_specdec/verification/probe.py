"""Determine whether a model can verify trees, only chains, or neither: by its configuration, then by a trial run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, GenerationMixin, PreTrainedModel

from hf_specdec.acceptance.paths import Acceptance
from hf_specdec.errors import UnsupportedModelError
from hf_specdec.transformers_private import (
    attention_name,
    is_stateful,
    prefill,
    supports_dynamic_cache,
    updated_kwargs,
)
from hf_specdec.trees.tree import TokenTree
from hf_specdec.verification.attention import REPLACED, AttentionContext, attending
from hf_specdec.verification.cache import TreeCache, measured_layout
from hf_specdec.verification.chain_cache import ChainCache
from hf_specdec.verification.chain_target import ChainTarget
from hf_specdec.verification.features import FeatureTap
from hf_specdec.verification.fingerprint import Fingerprint
from hf_specdec.verification.masks import LAYER_KINDS
from hf_specdec.verification.memory import CacheLayout
from hf_specdec.verification.model import cache_argument, execution_device, text_config
from hf_specdec.verification.plain import refusal, why_not_transformers_loop
from hf_specdec.verification.runners import Runner
from hf_specdec.verification.target import Target
from hf_specdec.verification.tree_target import TreeTarget
from hf_specdec.verification.trial_runs import (
    FAILURES,
    enters_autocast,
    first_inputs,
    multiplies_exactly,
    reproducible,
    run_whole,
)


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """How a model can verify drafted tokens: the result of `inspect_target`, for an unchanged fingerprint."""

    cache_layout: CacheLayout | None  # layout of the tree cache; None if the model verifies only chains
    chain_only_reason: str  # why it cannot verify trees; empty if it can
    fingerprint: Fingerprint
    unpacked_reason: str = ""  # why trees are verified without `verification/attention.py`; empty if with it
    uses_autocast: bool = False  # whether its forward enters autocast, as in a trainer's mixed precision

    @property
    def uses_packed_attention(self) -> bool:
        """Whether trees are verified with `verification/attention.py`."""
        return self.supports_trees and not self.unpacked_reason

    @property
    def supports_trees(self) -> bool:
        """Whether the model verifies trees."""
        return self.cache_layout is not None

    def new_target(
        self, model: PreTrainedModel, capacity: int, reserve: int | None,
        outputs: Mapping[str, bool] = MappingProxyType({}), runner: Runner | None = None,
    ) -> Target:  # fmt: skip
        """Create a target with an empty cache for one generation.

        Args:
            model: The model that these facts describe.
            capacity, reserve: See `TreeCache`; not used for chains.
            outputs, runner: See `TreeTarget`; chains have no runner.
        """
        if self.cache_layout is None:
            return ChainTarget(model, ChainCache(text_config(model)), outputs)
        new_cache = TreeCache if runner is None else runner.new_cache
        cache = new_cache(self.cache_layout, capacity, reserve)
        return TreeTarget(model, cache, outputs, uses_packed_attention=self.uses_packed_attention, runner=runner)


class _CannotVerifyError(Exception):
    """A model failed the probe; the message is the reason."""


def gate(model: Any) -> None:
    """Raise `UnsupportedModelError` if the model's class or configuration rules out both trees and chains."""
    if not isinstance(model, PreTrainedModel) or not hasattr(model, "generate"):
        raise refusal(model, "it is not a transformers model with generate()", "Load it with AutoModelForCausalLM.")
    if not isinstance(model, GenerationMixin):
        raise refusal(model, "its generate() is not transformers' GenerationMixin.generate()")
    if model.config.is_encoder_decoder:
        raise refusal(model, "it is an encoder-decoder model")
    if reason := why_not_transformers_loop(model):
        raise refusal(model, reason)
    if not cache_argument(model) or not supports_dynamic_cache(model):
        raise refusal(model, "it does not keep its past in a transformers cache that could be rolled back")
    try:
        config = text_config(model)
    except ValueError as error:
        raise refusal(model, "its configuration does not name one text decoder") from error
    for name in ("vocab_size", "num_hidden_layers"):
        if not isinstance(getattr(config, name, None), int):
            raise refusal(model, f"its configuration has no integer `{name}`")
    attention = attention_name(config)
    if attention not in ("sdpa", "eager"):
        reason = f"its attention {attention!r} takes no custom mask"
        raise refusal(model, reason, 'Call model.set_attn_implementation("sdpa") first.')


def why_chains_only(model: PreTrainedModel) -> str:
    """Return why the model's class or configuration rules out trees; empty if it does not."""
    if is_stateful(model) or cache_argument(model) == "cache_params":
        return "its layers carry a recurrent state, which cannot branch"
    for name in ("attention_mask", "position_ids"):
        if name not in inspect.signature(model.forward).parameters:
            return f"its forward takes no `{name}`, so the position of a node cannot be set"
    config = text_config(model)
    if getattr(config, "alibi", False):
        return "its alibi bias counts physical cache slots"
    other = set(getattr(config, "layer_types", None) or ()) - set(LAYER_KINDS)
    return f"its layers of type {', '.join(sorted(other))} hold more than keys and values" if other else ""


@torch.no_grad()
def inspect_target(model: PreTrainedModel) -> TargetFacts:
    """Return how a model can verify: after `gate`, try a small tree, then a chain, against plain decoding's logits.

    Costs seven forwards of at most 17 tokens in 2 to 8 rows (eight in 6 to 24 rows if arithmetic is inexact); about as
    many again without `verification/attention.py` if that fails, and again for a chain. Does not modify the model.

    Raises:
        UnsupportedModelError: The model can verify neither; the message contains the reasons.
    """
    gate(model)
    config, fingerprint = text_config(model), Fingerprint.of(model)
    reason = why_chains_only(model)
    with reproducible(model):
        autocast = enters_autocast(model)
        name, unpacked = attention_name(config), ""
        if name != REPLACED:
            unpacked = f"its attention is {name!r}, not {REPLACED!r}"
        attempts = (False,) if unpacked else (True, False)
        for packed in attempts if not reason else ():
            cache, plain = TreeCache([None] * config.num_hidden_layers, capacity=32, reserve=0), AttentionContext({})
            try:
                with attending(plain):  # in the plain steps, whose masks are not ours
                    _probe(TreeTarget(model, cache, uses_packed_attention=packed), [-1, 0, 0, 1], autocast)
                if not plain.is_asked:
                    unpacked = unpacked or "its layers do not call transformers' attention function"
                return TargetFacts(measured_layout(cache), "", fingerprint, unpacked, autocast)
            except _CannotVerifyError as failure:
                reason = str(failure)
                unpacked = unpacked or f"with another attention function, {reason}"
        try:
            _probe(ChainTarget(model, ChainCache(config)), [-1, 0, 1, 2], autocast)
        except _CannotVerifyError as failure:
            raise UnsupportedModelError(
                f"{type(model).__name__} cannot verify drafted tokens. As a tree: {reason}. As a chain: {failure}.",
                "Use plain generate() with this model.",
            ) from failure.__cause__
    return TargetFacts(None, reason, fingerprint, uses_autocast=autocast)


PROBE_TEXTS = 3
"""Number of prompts without padding and of prompts with left padding, if arithmetic is inexact (else one of each)."""
PROBE_PADDING = 3
"""Left padding in tokens."""


def _probe(target: Target, parents: list[int], autocast: bool) -> None:
    """Prefill, verify four nodes, commit the root and its first child, verify one more; compare with plain steps.

    `autocast`: whether the forward enters autocast, so that float32 weights are not multiplied exactly.
    """
    model = target.model
    device, config = execution_device(model), text_config(model)
    exact = model.dtype in (torch.float32, torch.float64) and multiplies_exactly(device) and not autocast
    rows = 2 if exact else 2 * PROBE_TEXTS
    tokens = ((torch.arange(17 * rows, device=device) * 7 + 3) % config.vocab_size).view(rows, 17)
    prompt, nodes = tokens.split([13, 4], dim=-1)
    pad_token_id = getattr(config, "pad_token_id", None)
    if isinstance(pad_token_id, int) and 0 <= pad_token_id < config.vocab_size:
        nodes[:, 1] = pad_token_id  # some models skip it when they count positions
    mask = torch.ones_like(prompt)
    mask[rows // 2 :, :PROBE_PADDING] = 0
    tree = TokenTree(nodes, torch.tensor(parents, dtype=torch.long, device=device))
    try:
        target.prefill(prompt, GenerationConfig(), first_inputs(model, mask, target.cache))
        logits = target.verify(tree).logits.float()
        target.commit(tree, _first_child_kept(nodes))
        root = TokenTree(nodes[:, 2:3], torch.tensor([-1], dtype=torch.long, device=device))
        checks = [("after a committed path", [0, 1, 2], target.verify(root).logits[:, 0].float())]
        for node in range(1, len(parents)):
            path = [node]
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            checks.append((f"at node {node} of {parents}", path, logits[:, node]))
        paths = [path for _, path, _ in checks]
        plain = _along_paths(_decode_plainly, model, prompt, mask, nodes, paths)
        again = plain if exact else _along_paths(run_whole, model, prompt, mask, nodes, paths)
        for (place, _, actual), expected, recomputed in zip(checks, plain, again, strict=True):
            _compare(actual, expected, None if exact else _distance(recomputed, expected), place)
    except FAILURES as error:
        raise _CannotVerifyError(f"its forward failed with {type(error).__name__}: {error}") from error


def _first_child_kept(tokens: Tensor) -> Acceptance:
    """Return an acceptance that keeps the root and its first child in every row of a tree's tokens `[B, N]`."""
    path = torch.tensor([[0, 1]] * len(tokens), dtype=torch.long, device=tokens.device)
    kept, rows = tokens[:, 1:3], ((0, 1),) * len(tokens)
    return Acceptance(path, kept, kept[:, 1], rows, rows, (tokens.shape[1] - 1,) * len(tokens))


EXACT = 3e-5
"""Largest relative distance allowed in float32 and float64 (largest measured, over 168 architectures: 5.6e-6)."""
ROUNDING_FACTOR = 5
"""Largest multiple of the model's own rounding error allowed in half precision.

Largest multiples measured: 1.3 over 18 tiny architectures in bf16 and fp16, 2.6 for SmolLM2-135M in bf16 with
simulated kernel noise. Smallest multiple with a wrong mask (a node sees its sibling): 8.0."""
ROUNDING = 2e-3, 1e-1
"""Lower and upper bound of the rounding error, which is measured once and so may be too small by chance."""
MAX_TOLERANCE = 1e-1
"""Relative distance allowed between a compiled or captured forward and the model's own in half precision."""


def _compare(actual: Tensor, expected: Tensor, rounding: Tensor | None, place: str) -> None:
    """Raise `_CannotVerifyError` if logits `[B, V]` differ from plain decoding's; the second half of rows is padded.

    In half precision, the distance of each row is divided by its rounding error, because some texts, and some places
    in a text, are ten times as sensitive to rounding as others. The median row of each half decides.

    Args:
        actual: Logits to check.
        expected: Logits of plain decoding.
        rounding: Distance `[B]` between the logits of plain decoding and those recomputed by one forward without a
            cache; None for exact arithmetic.
        place: Where the logits are, for the message.
    """
    distance, allowed = _distance(actual, expected), EXACT
    if rounding is not None:
        distance, allowed = distance / rounding.clamp(*ROUNDING), float(ROUNDING_FACTOR)
    for name, rows in zip(("", " in a padded row"), distance.split(len(actual) // 2), strict=True):
        if not float(rows.median()) <= allowed:
            excess = (
                "" if rounding is None else f" by {float(rows.median()):.1f} times the rounding error of its forward"
            )
            raise _CannotVerifyError(f"its logits {place}{name} differ from plain decoding's{excess}")


def _distance(actual: Tensor, expected: Tensor) -> Tensor:
    """Return the distances `[B]` of logits `[B, V]`, relative to the norm of the expected ones."""
    return (actual - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-6)


def _along_paths(
    run: Callable[[PreTrainedModel, Tensor, Tensor, Tensor], list[Tensor]],
    model: PreTrainedModel, prompt: Tensor, mask: Tensor, nodes: Tensor, paths: list[list[int]],
) -> list[Tensor]:  # fmt: skip
    """Return, for each path through the nodes `[B, N]`, the logits `[B, V]` after prompt `[B, P]` and path.

    All paths run in one batch; shorter ones repeat their last node.
    """
    width = max(map(len, paths))
    tokens = torch.cat([nodes[:, [*path, *path[-1:] * (width - len(path))]] for path in paths])
    logits = run(model, prompt.repeat(len(paths), 1), mask.repeat(len(paths), 1), tokens)
    return [logits[len(path) - 1].chunk(len(paths))[index] for index, path in enumerate(paths)]


def _decode_plainly(model: PreTrainedModel, prompt: Tensor, mask: Tensor, tokens: Tensor) -> list[Tensor]:
    """Return, for each of the tokens `[B, T]`, the logits `[B, V]` after it, by the steps of plain `generate()`."""
    inputs = first_inputs(model, mask, DynamicCache(config=text_config(model)))
    outputs = prefill(model, prompt, GenerationConfig(), inputs)
    text, logits = prompt, []
    for column in tokens.split(1, dim=-1):
        inputs = updated_kwargs(model, outputs, inputs)
        text = torch.cat([text, column], dim=-1)
        step = model.prepare_inputs_for_generation(text, next_sequence_length=1, **inputs)
        outputs = model(**step, return_dict=True)
        logits.append(outputs.logits[:, -1].float())
    return logits


@torch.no_grad()
def check_features(model: PreTrainedModel, layers: Sequence[int]) -> None:
    """Check, by a forward over two tokens, that hooks capture hidden states of the expected shape in these layers.

    Raises:
        DrafterMismatchError: The model has fewer layers.
        UnsupportedModelError: No list of decoder layers is found, or the hooks capture other shapes, or nothing.
    """
    if not layers:
        return
    tokens = torch.arange(2, device=execution_device(model))[None]
    with reproducible(model), FeatureTap(model, layers) as tap:
        run_whole(model, tokens[:, :1], torch.ones_like(tokens[:, :1]), tokens[:, 1:])
        found = tap.shapes()
    expected = [(1, 2, getattr(text_config(model), "hidden_size", None))]
    wrong = {layer: shapes for layer, shapes in found.items() if shapes != expected}
    if wrong:
        raise UnsupportedModelError(
            f"The drafter needs hidden states of shape {expected[0]}; {type(model).__name__} has, by layer, {wrong}.",
            "Use a drafter that does not read hidden states, such as prompt_lookup.",
        )
