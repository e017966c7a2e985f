"""Determine whether a model can verify trees, only chains, or neither: by its configuration, then by a trial run."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from huggingface_hub import constants
from torch import Tensor, nn
from transformers import DynamicCache, GenerationConfig, GenerationMixin, PreTrainedModel

from hf_specdec.acceptance.accepted import Accepted
from hf_specdec.atomic import write_text
from hf_specdec.errors import InvalidConfigError, UnsupportedModelError
from hf_specdec.records import read_json
from hf_specdec.transformers_private import attention_name, is_stateful, supports_dynamic_cache
from hf_specdec.trees.tree import TokenTree
from hf_specdec.verification.cache import TreeCache, TreeLayer, measured_layout
from hf_specdec.verification.chain_target import ChainCache, ChainTarget
from hf_specdec.verification.features import FeatureTap
from hf_specdec.verification.fingerprint import Fingerprint
from hf_specdec.verification.masks import LAYER_KINDS
from hf_specdec.verification.memory import CacheLayout, LayerLayout
from hf_specdec.verification.model import cache_argument, execution_device, text_config
from hf_specdec.verification.recurrent_layer import attends, recurrent_layers, state_shapes
from hf_specdec.verification.runners import Runner
from hf_specdec.verification.target import Target
from hf_specdec.verification.tree_attention import REPLACED, AttentionContext, attending
from hf_specdec.verification.tree_target import TreeTarget
from hf_specdec.verification.trials import (
    FAILURES,
    PlainRun,
    enters_autocast,
    first_inputs,
    multiplies_exactly,
    refusal,
    reproducible,
    rounds_inputs,
    run_plainly,
    run_whole,
    why_not_transformers_loop,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """How a model can verify drafted tokens: the result of `inspect_target`, for an unchanged fingerprint."""

    cache_layout: CacheLayout | None  # layout of the tree cache; None if the model verifies only chains
    chain_only_reason: str  # why it cannot verify trees; empty if it can
    fingerprint: Fingerprint
    unpacked_reason: str = ""  # why trees are verified without `verification/tree_attention.py`; empty if with it
    uses_autocast: bool = False  # whether its forward enters autocast, as in a trainer's mixed precision
    # see `recurrent_layer.state_shapes`
    state_shapes: Mapping[int, list[list[int]]] = field(default_factory=dict)

    @property
    def uses_packed_attention(self) -> bool:
        """Whether trees are verified with `verification/tree_attention.py`."""
        return self.supports_trees and not self.unpacked_reason

    @property
    def supports_trees(self) -> bool:
        """Whether the model verifies trees."""
        return self.cache_layout is not None

    def new_target(
        self, model: PreTrainedModel, capacity: int, reserve: int | None,
        outputs: Mapping[str, bool] = MappingProxyType({}), runner: Runner | None = None,
    ) -> Target:  # fmt: skip
        """Create a target with an empty cache for one generation with the model that these facts describe.

        `capacity` and `reserve` are those of `TreeCache`, `outputs` and `runner` those of `TreeTarget`.
        """
        if self.cache_layout is None:
            return ChainTarget(model, ChainCache(text_config(model)), outputs)
        recurrent = recurrent_layers(text_config(model))
        if runner is None:
            cache = TreeCache(self.cache_layout, capacity, reserve, recurrent=recurrent)
        else:
            cache = runner.new_cache(self.cache_layout, capacity, reserve, recurrent)
        return TreeTarget(model, cache, outputs, uses_packed_attention=self.uses_packed_attention, runner=runner)

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the fingerprint as JSON values."""
        layers = None
        if self.cache_layout is not None:
            layers = [
                entry and [entry.num_heads, entry.key_dim, entry.value_dim, *map(str, entry.dtypes or ())]
                for entry in self.cache_layout
            ]
        reasons = {"chain_only_reason": self.chain_only_reason, "unpacked_reason": self.unpacked_reason}
        states = {str(index): shapes for index, shapes in self.state_shapes.items()}
        return {"layers": layers, **reasons, "uses_autocast": self.uses_autocast, "states": states}


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
    config = text_config(model)
    layers, recurrent = DynamicCache(config=config).layers, recurrent_layers(config)
    for name in ("attention_mask", "position_ids"):
        if len(recurrent) < len(layers) and name not in inspect.signature(model.forward).parameters:
            return f"its forward takes no `{name}`, so the position of a node cannot be set"
    if getattr(config, "alibi", False):
        return "its alibi bias counts physical cache slots"
    kinds = getattr(config, "layer_types", None) or ()
    other = {
        kind
        for index, (kind, layer) in enumerate(zip(kinds, layers, strict=False))
        if kind not in LAYER_KINDS and index not in recurrent and type(layer).__name__ != "DummyLayer"
    }
    if other:
        return f"its layers of type {', '.join(sorted(other))} hold more than keys and values"
    if is_stateful(model) and not recurrent:
        return "its recurrent states are not in transformers' cache"
    return ""


@dataclass(frozen=True, slots=True)
class _Tried:
    """A tree that is tried, the path in it that the plain run has taken, and how many nodes of it are committed."""

    parents: tuple[int, ...]
    path: tuple[int, ...]
    num_kept: int

    @property
    def num_tokens(self) -> int:
        """Length of the plain run: the path, and one token more if that is verified after the commit."""
        return max(len(self.path), self.num_kept + self.tries_next)

    @property
    def tries_next(self) -> bool:
        """Whether the next token is verified as well, because recurrent layers hold no keys to compare."""
        return self.num_kept > 1 and len(self.path) > 2


TRIED_TREE = _Tried((-1, 0, 0, 1), (0, 2), num_kept=2)
"""Node 1 must not be seen."""
TRIED_STATES = _Tried((-1, 0, 0, 1, 3, 3, 5, 6, 7, 8), (0, 1, 3, 5, 6, 7, 8, 9), num_kept=8)
"""For recurrent layers: the commit is longer than any of transformers' convolutions."""
TRIED_CHAIN = _Tried((-1, 0, 1, 2), (0, 1, 2), num_kept=2)
"""A chain of which a part is committed."""
TEXTS = 3
"""Texts that decide in half precision if a first text shows rounding."""
MORE_TEXTS = 2 * TEXTS
"""Texts that decide on packed attention after a refusal by `TEXTS` of them, which may be chance."""


def inspect_target(model: PreTrainedModel) -> TargetFacts:
    """Return how a model can verify: after `gate`, try a small tree, then a chain, against plain decoding's logits.

    Costs a plain `generate()` of two tokens after prompts of six in two rows (three tokens for a chain), the same
    prompts again, and one forward over four nodes. If arithmetic is inexact and that shows rounding, three times as
    many texts decide, and six times as many if packed attention is refused. Does not modify the model. Verdicts on
    models of transformers itself are kept on disk, see `_kept_file`.
    """
    gate(model)
    fingerprint = Fingerprint.of(model)
    file = _kept_file(model, fingerprint)
    facts = None if file is None else _read_kept(file, model, fingerprint)
    if facts is None:
        facts = _try_forwards(model, fingerprint)
        if file is not None:
            try:
                write_text(file, json.dumps(facts.to_dict()))
            except InvalidConfigError as error:
                logger.warning("How %s verifies drafts is not kept for the next time: %s", type(model).__name__, error)
    return facts


def _kept_file(model: PreTrainedModel, fingerprint: Fingerprint) -> Path | None:
    """Return the file, which may not exist, of the verdict on models like this one.

    It is named by class, configuration, dtypes, device, versions and `_own_code`. None if the verdict may depend on
    more: modules or forwards that are not transformers' or torch's, hooks, adapters, tensors that are not plain ones,
    several devices.
    """
    kinds = {type(module) for module in model.modules()}
    owners = {str(owner.__module__) for kind in kinds for owner in (kind, kind.forward)}
    tensors = {(type(tensor), tensor.dtype, tensor.device) for tensor in (*model.parameters(), *model.buffers())}
    devices = {str(device) for _, _, device in tensors}
    if (
        not all(owner.startswith(("transformers.", "torch.")) for owner in owners)
        or any("forward" in vars(module) for module in model.modules())
        or not all(kind in (Tensor, nn.Parameter, nn.Buffer) for kind, _, _ in tensors)
        or len(devices) != 1
        or "meta" in devices
        or fingerprint.hooks
        or any(map(any, fingerprint.modes))
    ):
        return None
    code = _own_code(), torch.__version__, transformers.__version__, type(model).__module__, type(model).__qualname__
    settings = attention_name(text_config(model)), model.config.to_json_string(use_diff=False)
    exact, autocast = multiplies_exactly(execution_device(model)), torch.is_autocast_enabled(model.device.type)
    facts = [*code, sorted({str(dtype) for _, dtype, _ in tensors}), *devices, *settings, exact, autocast]
    digest = hashlib.sha256(json.dumps(facts, default=str).encode())
    return Path(constants.HF_HOME) / "hf-specdec" / "verdicts" / f"{digest.hexdigest()[:40]}.json"


@functools.cache
def _own_code() -> str:
    """Return a digest of this package's code for forwards: a verdict made with other code is not read."""
    digest, package = hashlib.sha256(), Path(__file__).parent
    for file in sorted((*package.glob("*.py"), *package.parent.glob("trees/*.py"))):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _read_kept(file: Path, model: PreTrainedModel, fingerprint: Fingerprint) -> TargetFacts | None:
    """Return the kept verdict, see `TargetFacts.to_dict`; None if there is none that can be read."""
    if not file.is_file():
        return None
    try:
        kept, layers = read_json(file), list[LayerLayout | None]()
        for entry in kept["layers"] or ():
            layer = None
            if entry is not None:
                heads, key, value, *names = entry
                keys, values = (getattr(torch, name.removeprefix("torch.")) for name in names)
                layer = LayerLayout(int(heads), int(key), int(value), model.device, (keys, values))
            layers.append(layer)
        reasons = str(kept["chain_only_reason"]), fingerprint, str(kept["unpacked_reason"])
        states = {int(index): shapes for index, shapes in kept["states"].items()}
        layout = None if kept["layers"] is None else tuple(layers)
        return TargetFacts(layout, *reasons, bool(kept["uses_autocast"]), states)
    except (InvalidConfigError, LookupError, TypeError, ValueError, AttributeError):
        return None  # damaged: the model is tried again, and the file written again


@torch.no_grad()
def _try_forwards(model: PreTrainedModel, fingerprint: Fingerprint) -> TargetFacts:
    config, device, reason = text_config(model), execution_device(model), why_chains_only(model)
    with reproducible(model):
        autocast = enters_autocast(model)
        exact = model.dtype in (torch.float32, torch.float64) and multiplies_exactly(device) and not autocast
        exact = exact and not rounds_inputs(model)
        plain_attention = AttentionContext({})  # notes whether layers call transformers' attention function

        @functools.cache
        def plain(num_texts: int, num_tokens: int) -> PlainRun:
            with attending(plain_attention):
                return run_plainly(model, num_texts, num_tokens)

        def attempt(new_target: Callable[[], Target], tried: _Tried, texts: Sequence[int] = (TEXTS,)) -> Target:
            run = plain(1, tried.num_tokens)
            try:
                return _probe(new_target(), tried, run, None, exact_distance(config) if exact else CLOSE)
            except _CannotVerifyError:
                if exact:
                    raise
            for count in texts:
                run = plain(count, tried.num_tokens)
                whole = run_whole(model, run.prompt, run.mask, run.answer)
                rounding = [_distance(again, once) for again, once in zip(whole, run.logits, strict=True)]
                if not all(distance.all() for distance in rounding):  # both happen to have the same bits
                    nudged = run_whole(model, run.prompt, run.mask, run.answer, nudges=True)
                    others = [_distance(moved, once) for moved, once in zip(nudged, whole, strict=True)]
                    rounding = [torch.where(one > 0, one, other) for one, other in zip(rounding, others, strict=True)]
                try:
                    return _probe(new_target(), tried, run, rounding, ROUNDING_FACTOR)
                except _CannotVerifyError as refusal:
                    failure = refusal
            raise failure

        def new_tree_target(packed: bool) -> Target:
            cache = TreeCache([None] * config.num_hidden_layers, capacity=32, reserve=0, recurrent=recurrent)
            return TreeTarget(model, cache, uses_packed_attention=packed)

        name, unpacked, recurrent = attention_name(config), "", recurrent_layers(config)
        tried_tree = TRIED_STATES if recurrent else TRIED_TREE
        if name != REPLACED and attends(config):
            unpacked = f"its attention is {name!r}, not {REPLACED!r}"
        for packed in () if reason else (False,) if unpacked else (True, False):
            try:
                texts = (TEXTS, MORE_TEXTS) if packed else (TEXTS,)  # a refusal of packed attention alone is checked
                target = attempt(functools.partial(new_tree_target, packed), tried_tree, texts)
                assert isinstance(target.cache, TreeCache)
                if not plain_attention.is_asked and attends(config):
                    unpacked = unpacked or "its layers do not call transformers' attention function"
                layout, states = measured_layout(target.cache), state_shapes(target.cache)
                return TargetFacts(layout, "", fingerprint, unpacked, autocast, states)
            except _CannotVerifyError as failure:
                reason = str(failure)
                unpacked = unpacked or f"with another attention function, {reason}"
        try:
            attempt(lambda: ChainTarget(model, ChainCache(config)), TRIED_CHAIN)
        except _CannotVerifyError as failure:
            raise UnsupportedModelError(
                f"{type(model).__name__} cannot verify drafted tokens. As a tree: {reason}. As a chain: {failure}.",
                "Use plain generate() with this model.",
            ) from failure.__cause__
    return TargetFacts(None, reason, fingerprint, uses_autocast=autocast)


def _probe(
    target: Target, tried: _Tried, plain: PlainRun, rounding: Sequence[Tensor] | None, allowed: float
) -> Target:
    """Read the prompt, verify a tree, commit a path; compare logits and keys with the plain run's; return the target.

    Nodes that are not on the path of `tried` get another token than the plain run's. `rounding` and `allowed`: see
    `_compare`.
    """
    prompt, answer, parents, path, num_kept = plain.prompt, plain.answer, tried.parents, tried.path, tried.num_kept
    tokens = [answer[:, path.index(node)] if node in path else prompt[:, 0] for node in range(len(parents))]
    nodes = torch.stack(tokens, dim=-1)
    tree = TokenTree(nodes, torch.tensor(parents, dtype=torch.long, device=nodes.device))
    count = len(nodes)
    rows = (path[:num_kept],) * count
    kept = torch.tensor(rows, dtype=torch.long, device=nodes.device)
    host, drafted = ((0,) * num_kept,) * count, (len(parents) - 1,) * count
    acceptance = Accepted(kept, answer[:, :num_kept], answer[:, -1], rows, host, drafted)
    try:
        target.prefill(prompt, GenerationConfig(), first_inputs(target.model, plain.mask, target.cache))
        logits = target.verify(tree).logits
        found = [(index, f"at node {node} of {list(parents)}", logits[:, node]) for index, node in enumerate(path)]
        target.commit(tree, acceptance)
        if tried.tries_next:
            root = TokenTree(answer[:, num_kept : num_kept + 1], tree.parents[:1])
            found.append((num_kept, "after a committed path", target.verify(root).logits[:, 0]))
    except UnsupportedModelError as error:
        raise _CannotVerifyError(str(error).removesuffix(error.hint).rstrip(" .")) from error
    except FAILURES as error:
        raise _CannotVerifyError(f"its forward failed with {type(error).__name__}: {error}") from error
    for index, place, actual in found:
        _compare(actual.float(), plain.logits[index], None if rounding is None else rounding[index], place, allowed)
    exact, layers = rounding is None and allowed < CLOSE, getattr(plain.cache, "layers", ())
    for number, (ours, theirs) in enumerate(zip(target.cache.layers, layers, strict=False)):
        if isinstance(ours, TreeLayer) and ours.is_initialized and getattr(theirs, "is_initialized", False):
            keys = ours.keys[:, :, : ours.end][:, :, -2:].float()
            distance = _distance(keys.flatten(1), theirs.keys[:, :, -2:].float().flatten(1))
            if not float(distance.max()) <= (allowed if exact else KEYS):
                raise _CannotVerifyError(
                    f"the keys of layer {number} after a committed path differ from plain decoding's, for example "
                    "because their positions do"
                )
            if not exact:  # rounding adds up from layer to layer
                break
    return target


EXACT = 3e-5
"""Largest relative distance allowed in float32 and float64 (largest measured, over 168 architectures: 5.6e-6)."""
EXACT_STATES = 3e-4
"""The same with recurrent layers, whose states carry rounding along. The largest measured, over 21 architectures, is
2.7e-5; the smallest if a node continues its sibling's state is 7e-3."""
CLOSE = 4e-3
"""Relative distance of logits in half precision that decides by itself: one unit in the last place of bfloat16. The
same products in other shapes often round alike, as on CPUs; a wrong mask or position moved SmolLM2's by 0.05."""
KEYS = 0.05
"""Relative distance allowed in half precision for the keys of the first layer (with simulated kernel noise 0.005; one
position too early 0.23)."""
ROUNDING_FACTOR = 5.0
"""Largest multiple of the model's own rounding error allowed in half precision.

Largest multiples measured: 1.3 over 18 tiny architectures in bf16 and fp16, 2.6 for SmolLM2-135M in bf16 with
simulated kernel noise. Smallest multiple with a wrong mask (a node sees its sibling): 8.0."""
ROUNDING = 2e-3, 1e-1
"""Lower and upper bound of the rounding error, which is measured once and so may be too small by chance."""
MAX_TOLERANCE = 1e-1
"""Relative distance allowed between a compiled or captured forward and the model's own in half precision."""


def _compare(actual: Tensor, expected: Tensor, rounding: Tensor | None, place: str, allowed: float) -> None:
    """Raise `_CannotVerifyError` if logits `[B, V]` differ from plain decoding's; the second half of rows is padded.

    In half precision, the distance of each row is divided by its rounding error, because some texts, and some places
    in a text, are ten times as sensitive to rounding as others. The median row of each half decides. The rounding
    error `[B]` is the distance of plain decoding's logits from those recomputed by one forward without a cache; None:
    relative distances are compared. `place` is where the logits are, for the message.
    """
    distance = _distance(actual, expected)
    if rounding is not None:
        distance = distance / rounding.clamp(*ROUNDING)
    for name, rows in zip(("", " in a padded row"), distance.split(len(actual) // 2), strict=True):
        middle = float(rows.median())
        logger.debug("Logits %s%s: %.2g of %.2g allowed.", place, name, middle, allowed)
        if not middle <= allowed:
            excess = "" if rounding is None else f" by {middle:.1f} times the rounding error of its forward"
            raise _CannotVerifyError(f"its logits {place}{name} differ from plain decoding's{excess}")


def _distance(actual: Tensor, expected: Tensor) -> Tensor:
    """Return the distances `[B]` of logits `[B, V]`, relative to the norm of the expected ones."""
    return (actual - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-6)


def exact_distance(config: Any) -> float:
    """Return the relative distance of logits in full precision that is allowed for a text configuration."""
    return EXACT_STATES if recurrent_layers(config) else EXACT


@torch.no_grad()
def check_features(model: PreTrainedModel, layers: Sequence[int]) -> None:
    """Check, by a forward over two tokens, that hooks capture hidden states of the expected shape in these layers."""
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
