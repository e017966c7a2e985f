"""Can this model verify a tree of tokens, or at least a chain? Gate by configuration, then probe the real model."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationConfig, GenerationMixin, PreTrainedModel

from hf_specdec.acceptance.paths import Acceptance
from hf_specdec.errors import UnsupportedModelError
from hf_specdec.trees.tree import TokenTree
from hf_specdec.verification.attention import REPLACED, implementation
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


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """What gate and probe found out about a model; plain data, valid as long as the model has this fingerprint."""

    cache_layout: CacheLayout | None  # of a tree cache; None: the model verifies chains only
    chain_only_reason: str  # why it does; empty for trees
    fingerprint: Fingerprint
    uses_packed_attention: bool = (
        False  # whether its layers attend to trees without copies, see `verification/attention.py`
    )

    @property
    def supports_trees(self) -> bool:
        """Whether the model verifies trees."""
        return self.cache_layout is not None

    def new_target(
        self,
        model: PreTrainedModel,
        capacity: int,
        reserve: int | None,
        outputs: Mapping[str, bool] = MappingProxyType({}),
        runner: Runner | None = None,
    ) -> Target:
        """A target for one generation, its cache empty.

        Args:
            model: The model that these are the facts of.
            capacity, reserve: Of a `TreeCache`; a chain's is transformers' own and grows with every token.
            outputs: See `Target`.
            runner: See `TreeTarget`.
        """
        if self.cache_layout is None:
            return ChainTarget(model, ChainCache(text_config(model)), outputs)
        new_cache = TreeCache if runner is None else runner.new_cache
        cache = new_cache(self.cache_layout, capacity, reserve)
        return TreeTarget(model, cache, outputs, uses_packed_attention=self.uses_packed_attention, runner=runner)


class _CannotVerifyError(Exception):
    """A model failed the probe; the message tells how."""


def gate(model: Any) -> None:
    """Refuse, from class and configuration alone, what can verify neither a tree nor a chain.

    Raises:
        UnsupportedModelError: Naming the reason.
    """
    if not isinstance(model, PreTrainedModel) or not hasattr(model, "generate"):
        raise refusal(model, "it is not a transformers model with generate()", "Load it with AutoModelForCausalLM.")
    if not isinstance(model, GenerationMixin):
        raise refusal(model, "its generate() is not transformers' GenerationMixin.generate()")
    if model.config.is_encoder_decoder:
        raise refusal(model, "it is an encoder-decoder model")
    if reason := why_not_transformers_loop(model):
        raise refusal(model, reason)
    if not cache_argument(model) or not model._supports_default_dynamic_cache():
        raise refusal(model, "it does not keep its past in a transformers cache that could be rolled back")
    try:
        config = text_config(model)
    except ValueError as error:
        raise refusal(model, "its configuration does not name one text decoder") from error
    for name in ("vocab_size", "num_hidden_layers"):
        if not isinstance(getattr(config, name, None), int):
            raise refusal(model, f"its configuration has no number `{name}`")
    if implementation(config) not in ("sdpa", "eager"):
        raise refusal(
            model,
            f"its attention {implementation(config)!r} takes no custom mask",
            'Call model.set_attn_implementation("sdpa") first.',
        )


def why_chains_only(model: PreTrainedModel) -> str:
    """What in class and configuration rules out a tree; empty where nothing does."""
    if getattr(model, "_is_stateful", False) or cache_argument(model) == "cache_params":
        return "its layers carry a recurrent state, which cannot branch"
    for name in ("attention_mask", "position_ids"):
        if name not in inspect.signature(model.forward).parameters:
            return f"its forward takes no `{name}`, so the place of a node cannot be told"
    config = text_config(model)
    if getattr(config, "alibi", False):
        return "its alibi bias counts physical cache slots"
    strange = set(getattr(config, "layer_types", None) or ()) - set(LAYER_KINDS)
    return f"its layers of type {', '.join(sorted(strange))} hold more than keys and values" if strange else ""


@torch.no_grad()
def inspect_target(model: PreTrainedModel) -> TargetFacts:
    """Gate, then probe: verify a tiny tree, or else a chain, on the real model and compare with plain forwards.

    Costs seven forwards of at most 17 tokens in two to six rows, eight in half precision, and as many again without
    `verification/attention.py` where that fails, and for a chain where no tree will do; changes nothing.

    Raises:
        UnsupportedModelError: The model fails or disagrees with itself; the message tells where.
    """
    gate(model)
    config, signs = text_config(model), Fingerprint.of(model)
    reason = why_chains_only(model)
    with reproducible(model):
        # layers that compare the name of their attention take no other, although it computes the same
        forms = (True, False) if implementation(config) == REPLACED else (False,)
        for packed in forms if not reason else ():
            cache = TreeCache([None] * config.num_hidden_layers, capacity=32, reserve=0)
            try:
                _probe(TreeTarget(model, cache, uses_packed_attention=packed), [-1, 0, 0, 1])
                return TargetFacts(measured_layout(cache), "", signs, packed)
            except _CannotVerifyError as failure:
                reason = str(failure)
        try:
            _probe(ChainTarget(model, ChainCache(config)), [-1, 0, 1, 2])
        except _CannotVerifyError as failure:
            raise UnsupportedModelError(
                f"{type(model).__name__} cannot verify drafted tokens. As a tree: {reason}. As a chain: {failure}.",
                "Use plain generate() for it.",
            ) from failure.__cause__
    return TargetFacts(None, reason, signs)


FAILURES = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip
"""What a forward raises that cannot do what it is asked for."""
PROBE_TEXTS = 3
"""Texts of the probe in half precision (one in float32, float64); half of its rows are without padding, half with."""
PROBE_PADDING = 3
"""Left padding of the latter."""


def _probe(target: Target, parents: list[int]) -> None:
    """Prefill some rows, verify four nodes, commit the root and its first child, verify one more; compare each.

    Raises:
        _CannotVerifyError: The forward fails, or its logits are not those of plain decoding.
    """
    model = target.model
    device, config = execution_device(model), text_config(model)
    exact = model.dtype in (torch.float32, torch.float64) and _multiplies_exactly(device)
    rows = 2 if exact else 2 * PROBE_TEXTS
    tokens = ((torch.arange(17 * rows, device=device) * 7 + 3) % config.vocab_size).view(rows, 17)
    prompt, nodes = tokens.split([13, 4], dim=-1)
    pad_token_id = getattr(config, "pad_token_id", None)
    if isinstance(pad_token_id, int) and 0 <= pad_token_id < config.vocab_size:
        nodes[:, 1] = pad_token_id  # some models do not count it as a position
    mask = torch.ones_like(prompt)
    mask[rows // 2 :, :PROBE_PADDING] = 0
    tree = TokenTree(nodes, torch.tensor(parents, dtype=torch.long, device=device))
    try:
        target.prefill(prompt, GenerationConfig(), first_inputs(model, mask, target.cache))
        logits = target.verify(tree).logits.float()
        target.commit(tree, _first_child_kept(nodes))
        root = TokenTree(nodes[:, 2:3], torch.tensor([-1], dtype=torch.long, device=device))
        seen = [("after a committed path", [0, 1, 2], target.verify(root).logits[:, 0].float())]
        for node in range(1, len(parents)):
            path = [node]
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            seen.append((f"at node {node} of {parents}", path, logits[:, node]))
        paths = [path for _, path, _ in seen]
        plain = _along_paths(_decode_plainly, model, prompt, mask, nodes, paths)
        tolerance = EXACT
        if not exact:
            again = _along_paths(_run_whole, model, prompt, mask, nodes, paths)
            tolerance = _rounding(again, plain)
        for (place, _, got), wanted in zip(seen, plain, strict=True):
            _compare(got, wanted, tolerance, place)
    except FAILURES as error:
        raise _CannotVerifyError(f"its forward failed with {type(error).__name__}: {error}") from error


def _first_child_kept(tokens: Tensor) -> Acceptance:
    """The root and its first child, in every row of the tree's tokens `[B, N]`."""
    path = torch.tensor([[0, 1]] * len(tokens), dtype=torch.long, device=tokens.device)
    kept, rows = tokens[:, 1:3], ((0, 1),) * len(tokens)
    return Acceptance(path, kept, kept[:, 1], rows, rows, (tokens.shape[1] - 1,) * len(tokens))


EXACT = 3e-5
"""Distance that is allowed in float32; 5.6e-6 is the largest that was seen over 168 architectures."""
ROUNDINGS, LEAST_ROUNDED, MOST_ROUNDED = 3, 1e-2, 1e-1
"""Distance that is allowed in half precision: multiples of the model's own rounding, within bounds; at most 1.6 of
them were seen in bf16 and fp16 over 43 architectures."""


def _compare(got: Tensor, wanted: Tensor, tolerance: float, place: str) -> None:
    """Logits `[B, V]` against plain decoding's, relative to their size; the first half of the rows has no padding.

    Some texts are ten times as sensitive to rounding as others: of each half the median text is taken.
    """
    for name, rows in zip(("", " in a padded row"), _distance(got, wanted).split(len(got) // 2), strict=True):
        if not float(rows.median()) <= tolerance:
            raise _CannotVerifyError(f"its logits {place}{name} differ from plain decoding's")


def _rounding(again: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The distance that is allowed where arithmetic is not exact.

    Args:
        again: Plain decoding's logits `[B, V]` of several places, computed in yet another way.
        wanted: The same of plain decoding. The place where the model's own rounding does most to a median text decides
            for all: of a few texts, one place alone tells little.
    """
    medians = [
        float(rows.median())
        for other, plain in zip(again, wanted, strict=True)
        for rows in _distance(other, plain).split(len(plain) // 2)
    ]
    return min(max(LEAST_ROUNDED, ROUNDINGS * max(medians)), MOST_ROUNDED)


def _distance(logits: Tensor, wanted: Tensor) -> Tensor:
    """`[B]` distances, relative to the size of the wanted ones `[B, V]`."""
    return (logits - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp(min=1e-6)


def first_inputs(model: PreTrainedModel, mask: Tensor, cache: Cache | None) -> dict[str, Any]:
    """What `generate()` gives to a first forward."""
    inputs: dict[str, Any] = {"attention_mask": mask, "use_cache": cache is not None}
    if cache is not None:
        inputs[cache_argument(model)] = cache
    if "position_ids" in inspect.signature(model.forward).parameters:
        inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    return inputs


def _along_paths(
    run: Callable[[PreTrainedModel, Tensor, Tensor, Tensor], list[Tensor]],
    model: PreTrainedModel, prompt: Tensor, mask: Tensor, nodes: Tensor, paths: list[list[int]],
) -> list[Tensor]:  # fmt: skip
    """Logits `[B, V]` after prompt `[B, P]` and each of the paths through the nodes `[B, N]`.

    The paths are rows of one batch, the shorter ones filled up behind their end, so that all take as many forwards as
    the longest.
    """
    width = max(map(len, paths))
    filled = [[*path, *path[-1:] * (width - len(path))] for path in paths]
    tokens = torch.cat([nodes[:, path] for path in filled])
    logits = run(model, prompt.repeat(len(paths), 1), mask.repeat(len(paths), 1), tokens)
    return [logits[len(path) - 1].chunk(len(paths))[index] for index, path in enumerate(paths)]


def _run_whole(model: PreTrainedModel, prompt: Tensor, mask: Tensor, tokens: Tensor) -> list[Tensor]:
    """Logits `[B, V]` after the prompt and each of the tokens `[B, T]`, in one forward without any cache."""
    text = torch.cat([prompt, tokens], dim=-1)
    inputs = first_inputs(model, torch.cat([mask, torch.ones_like(tokens)], dim=-1), None)
    inputs = model.prepare_inputs_for_generation(text, is_first_iteration=True, **inputs)
    inputs.pop("logits_to_keep", None)  # some models put it to one
    logits = model(**inputs, return_dict=True).logits[:, -tokens.shape[1] :].float()
    return list(logits.unbind(dim=1))


def _decode_plainly(model: PreTrainedModel, prompt: Tensor, mask: Tensor, tokens: Tensor) -> list[Tensor]:
    """Logits `[B, V]` after the prompt and each of the tokens `[B, T]`, as plain generate's loop gets them."""
    inputs = first_inputs(model, mask, DynamicCache(config=text_config(model)))
    outputs = model._prefill(prompt, GenerationConfig(), inputs, is_first_iteration=True)
    text, logits = prompt, []
    for column in tokens.split(1, dim=-1):
        inputs = model._update_model_kwargs_for_generation(outputs, inputs, is_encoder_decoder=False)
        text = torch.cat([text, column], dim=-1)
        outputs = model(
            **model.prepare_inputs_for_generation(text, next_sequence_length=1, **inputs), return_dict=True
        )
        logits.append(outputs.logits[:, -1].float())
    return logits


@contextmanager
def reproducible(model: nn.Module) -> Iterator[None]:
    """The model as it is where its forwards repeat themselves; else (dropout, ...) in evaluation mode for a while.

    A model whose forwards are random has no answer that could be kept; whether its layers can verify a tree, they
    tell without the noise. Every module is back in its mode afterwards, and so are the random numbers.
    """
    training = [vars(module) for module in model.modules() if module.training]
    device = execution_device(model)
    others = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(others, device_type=device.type if others else "cpu"):
        quiet = bool(training) and (drops_cache(model) or _is_random(model))
        try:
            try:
                _set_training(training, not quiet)
                yield
            finally:
                _set_training(training, True)
        finally:  # an interrupt may come at the line above
            _set_training(training, True)


@torch.no_grad()
def check_features(model: PreTrainedModel, layers: Sequence[int]) -> None:
    """Run two tokens, and see that the hooks on the model's layers find what a drafter is to read.

    Raises:
        DrafterMismatchError: The model has not as many layers.
        UnsupportedModelError: No hidden states `[B, T, D]` pass there: its layers are called in other ways, or it
            carries several streams.
    """
    if not layers:
        return
    tokens = torch.arange(2, device=execution_device(model))[None]
    with reproducible(model), FeatureTap(model, layers) as tap:
        _run_whole(model, tokens[:, :1], torch.ones_like(tokens[:, :1]), tokens[:, 1:])
        found = tap.shapes()
    wanted = [(1, 2, getattr(text_config(model), "hidden_size", None))]
    strange = {layer: shapes for layer, shapes in found.items() if shapes != wanted}
    if strange:
        raise UnsupportedModelError(
            f"{type(model).__name__} shows no hidden states of shape {wanted[0]} to a drafter that reads them: found "
            f"{strange}.",
            "Use a drafter that reads none, such as prompt_lookup.",
        )


def _set_training(modules: Sequence[dict[str, Any]], mode: bool) -> None:
    """Switch modules by their attributes, all in one instruction of Python's, which no interrupt divides."""
    deque(map(dict.__setitem__, modules, repeat("training"), repeat(mode)), maxlen=0)


def drops_cache(model: nn.Module) -> bool:
    """Whether layers checkpoint gradients in train mode, where transformers takes their cache away."""
    return any(module.training and getattr(module, "gradient_checkpointing", False) for module in model.modules())


def _multiplies_exactly(device: torch.device) -> bool:
    """Whether float32 matrices are multiplied in float32 here, not in TF32 or the like, which users may switch on."""
    matrix = torch.arange(64 * 64, dtype=torch.float32, device="cpu").cos().view(64, 64)
    exact = matrix.double() @ matrix.double()
    product = (matrix.to(device) @ matrix.to(device)).cpu().double()
    return bool((product - exact).norm() < 1e-5 * exact.norm())


def _is_random(model: PreTrainedModel) -> bool:
    """Whether two forwards over the same tokens differ."""
    tokens = torch.arange(13, device=execution_device(model))[None] % text_config(model).vocab_size
    try:
        first, second = (_run_whole(model, tokens, torch.ones_like(tokens), tokens[:, :1])[0] for _ in range(2))
    except FAILURES:
        return False  # the probe will tell how it fails
    return not torch.equal(first, second)
