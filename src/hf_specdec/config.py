"""`SpeculativeConfig` and `AdaptiveConfig`: the settings of `generate(speculative=...)`, validated on creation."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar, get_args

from hf_specdec.errors import InvalidConfigError
from hf_specdec.records import read_object, shortened

AcceptanceName = Literal["auto", "greedy", "rejection", "block", "typical", "nucleus"]
Compile = Literal["auto", "none", "kernels", "inductor", "cuda_graph"]
Choice = tuple[int, ...]
ConfigClass = TypeVar("ConfigClass")

COMPILE_ALIASES: dict[bool | str, Compile] = {True: "inductor", "compile": "inductor", False: "none"}

AUTO, HYBRID = "auto", "hybrid"
COMBINED = (AUTO, HYBRID)
"""Methods that combine several drafters."""

MAX_NODES, MAX_STEPS, MAX_TOP_K = 4096, 64, 1024
"""Limits for stored heads: nodes and depth of a tree, children per node. In `SpeculativeConfig`, each of the three is
at most `MAX_NODES`."""

MAX_SLOTS = 2**48
"""Limit of `max_cache_length` in slots, larger than any device's memory."""

MAX_RANK = 2**31
"""Exclusive limit of a rank in a tree path, larger than any vocabulary."""

MAX_TIERS, MAX_WAIT = 64, 10**9
"""Limits of `AdaptiveConfig`: number of `candidate_steps`; `update_interval` and `warmup_batches`."""


def validate_choices(choices: Iterable[Any]) -> list[Choice]:
    """Validate the paths of a static tree and sort them level by level.

    A path is a tuple of ranks: `(0, 2)` is the third-best child of the root's best child (the notation of Medusa's
    `medusa_choices` and of vLLM's `speculative_token_tree`).

    Returns:
        The paths sorted by depth, then by rank.

    Raises:
        InvalidConfigError: No paths or more than `MAX_NODES`, an entry that is not a non-empty list or tuple, a rank
            that is not an integer from 0 to `MAX_RANK - 1`, a duplicate path, or a path whose parent is missing.
    """
    paths: list[Choice] = []
    for choice in choices:
        if len(paths) >= MAX_NODES:
            raise InvalidConfigError(f"A tree has at most {MAX_NODES} paths, got more.")
        if not isinstance(choice, list | tuple) or not choice:
            raise InvalidConfigError(
                f"A tree is a list of non-empty paths such as [(0,), (0, 0), (1,)], got the entry {shortened(choice)}."
            )
        if any(not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < MAX_RANK for rank in choice):
            raise InvalidConfigError(
                f"The ranks of a tree path must be integers from 0 to {MAX_RANK - 1}, got {shortened(choice)}."
            )
        paths.append(tuple(choice))
    if not paths:
        raise InvalidConfigError("A tree needs at least one path, got an empty list.")
    known = set(paths)
    if len(known) != len(paths):
        repeated = next(path for path in paths if paths.count(path) > 1)
        raise InvalidConfigError(f"The tree path {repeated} occurs twice.", "List each path once.")
    for path in paths:
        if len(path) > 1 and path[:-1] not in known:
            raise InvalidConfigError(f"The tree path {path} has no parent.", f"Add {path[:-1]} to the list.")
    return sorted(paths, key=lambda path: (len(path), path))


class _Fields:
    """Base class of the configs, which can be created from a dict."""

    __slots__ = ()
    _aliases: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Create a config from a dict of its fields.

        Raises:
            InvalidConfigError: An unknown field (the message names the most similar one) or an invalid value.
        """
        names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        check_names(cls.__name__, values, [*names, *cls._aliases])
        return cls(**values)


def check_names(owner: str, given: Iterable[Any], known: Sequence[str]) -> None:
    """Check that all given field names are known.

    Raises:
        InvalidConfigError: A name is unknown; the message suggests the most similar known one.
    """
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(str(name)[:100], known, n=1, cutoff=0.0)[0]
            raise InvalidConfigError(
                f"{owner} has no field {shortened(name)}.", f"Did you mean {near!r}? Fields: {', '.join(known)}."
            )


def _require(condition: bool, expected: str, name: str, value: Any) -> None:
    if not condition:
        raise InvalidConfigError(f"`{name}` must be {expected}, got {shortened(value)}.")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300


def require_integer(name: str, value: Any, minimum: int, maximum: int | None = None) -> None:
    """Check that a value is an integer within bounds (inclusive).

    Raises:
        InvalidConfigError: The value has another type or is out of bounds.
    """
    _require(_is_int(value) and value >= minimum, f"an integer >= {minimum}", name, value)
    _require(maximum is None or value <= maximum, f"at most {maximum}", name, value)


@dataclass(frozen=True, slots=True)
class AdaptiveConfig(_Fields):
    """Settings for adapting the drafted depth to a moving average of the accepted drafted tokens per row and step.

    Invalid values raise `InvalidConfigError`. See also `control/tiers.py`.

    Args:
        candidate_steps: Depths to choose from, ascending.
        ema_alpha: Weight of the newest value in the moving average, in (0, 1].
        update_interval: Steps between two decisions.
        warmup_batches: Steps before the first decision.
        down_hysteresis, up_hysteresis: Added to the average at or below which the depth decreases, and to the average
            above which it increases.
    """

    candidate_steps: tuple[int, ...] = (1, 3, 7)
    ema_alpha: float = 0.2
    update_interval: int = 5
    warmup_batches: int = 10
    down_hysteresis: float = -0.25
    up_hysteresis: float = 0.0

    def __post_init__(self) -> None:
        _require(isinstance(self.candidate_steps, list | tuple), "a list of depths", "candidate_steps",
                 self.candidate_steps)  # fmt: skip
        steps = tuple(self.candidate_steps)
        object.__setattr__(self, "candidate_steps", steps)
        _require(
            0 < len(steps) <= MAX_TIERS and all(_is_int(s) and 1 <= s <= MAX_NODES for s in steps)
            and list(steps) == sorted(set(steps)),
            f"up to {MAX_TIERS} ascending depths from 1 to {MAX_NODES}", "candidate_steps", list(steps),
        )  # fmt: skip
        _require(_is_number(self.ema_alpha) and 0 < self.ema_alpha <= 1, "in (0, 1]", "ema_alpha", self.ema_alpha)
        for name in ("update_interval", "warmup_batches"):
            value = getattr(self, name)
            _require(_is_int(value) and 1 <= value <= MAX_WAIT, f"an integer from 1 to {MAX_WAIT}", name, value)
        for name in ("down_hysteresis", "up_hysteresis"):
            _require(_is_number(getattr(self, name)), "a finite number", name, getattr(self, name))

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Create a config from a JSON file of its fields.

        Raises:
            InvalidConfigError: The file cannot be read, is not a JSON object, or has unknown fields or invalid values.
        """
        try:
            values = read_object(Path(path))
        except InvalidConfigError as error:
            raise InvalidConfigError(f"`adaptive` must be a JSON file of AdaptiveConfig's fields: {error}") from error
        return cls.from_dict(values)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-serialisable values."""
        return {**asdict(self), "candidate_steps": list(self.candidate_steps)}


def _accept_eagle_topk(cls: type[ConfigClass]) -> type[ConfigClass]:
    """Add `eagle_topk` to a config class, in place, as another name of `top_k`: constructor argument and property.

    It cannot be a dataclass field: `dataclasses.replace(config, top_k=...)` would pass its old value along. The
    constructor raises `InvalidConfigError` if both names are given with different values.
    """
    create: Any = cls.__init__

    @functools.wraps(create)
    def create_with_alias(self: Any, *args: Any, eagle_topk: int | None = None, **kwargs: Any) -> None:
        create(self, *args, **kwargs)
        if eagle_topk is None:
            return
        require_integer("eagle_topk", eagle_topk, 1, MAX_NODES)
        if self.top_k not in (None, eagle_topk):
            raise InvalidConfigError(
                f"`eagle_topk` is another name of `top_k`, got eagle_topk={eagle_topk} and top_k={self.top_k}.",
                "Give one of them.",
            )
        object.__setattr__(self, "top_k", eagle_topk)

    cls.__init__ = create_with_alias  # type: ignore[method-assign]
    cls.eagle_topk = property(lambda self: self.top_k)  # type: ignore[attr-defined]
    return cls


@_accept_eagle_topk
@dataclass(frozen=True, slots=True)
class SpeculativeConfig(_Fields):
    """Settings for drafting, verification and acceptance; invalid values raise `InvalidConfigError`.

    None means the drafter's default unless stated otherwise.

    Args:
        method: Name of a built-in method or of a registered drafter, `"hybrid"` (several drafters merged into one
            tree), or `"auto"` (the same, but only the first loaded drafter if `tree` is given).
        num_steps: Maximum depth of the drafted tree below the root.
        top_k: Children per expanded node of the tree. Unrelated to the sampling parameter `top_k` of `generate()`.
        num_draft_tokens: Maximum nodes verified per step. Counts the root, the token emitted last, as
            SGLang's `speculative_num_draft_tokens` and EAGLE's `total_token` do. transformers' `num_assistant_tokens`
            does not count it: 5 drafted tokens are `num_assistant_tokens=5` there and `num_draft_tokens=6` here.
        tree: `"dynamic"` (grown by likelihood), `"static"`, or a list of paths such as `[(0,), (0, 0), (1,)]`.
        acceptance: `"auto"` is lossless: greedy without sampling, rejection with it. `"block"` is lossless, too (for
            sampled chains). `"typical"` and `"nucleus"` accept more and change the output (docs/acceptance.md).
        posterior_threshold, posterior_alpha: Both in (0, 1]. `"typical"` keeps a drafted token x if and only if
            `p(x) > min(threshold, alpha * exp(-H(p)))`; H is the entropy.
        adaptive: How the tree size is chosen. None: from measured costs for `"hybrid"` and `"auto"`, fixed for all
            other methods. True: from measured costs for `"hybrid"` and `"auto"`, by a default `AdaptiveConfig` for all
            others. An `AdaptiveConfig`, a dict of its fields or the path of a JSON file: by that config. False: fixed.
        compile: How the draft and verify forwards run: `"none"` (or False) eagerly, `"kernels"` with this package's
            CPU kernels, `"inductor"` (or True, or `"compile"`) compiled by torch.compile's inductor, `"cuda_graph"` as
            captured graphs, `"auto"` as graphs if the device can capture them, on a CPU with the kernels as soon as
            that pays (docs/compile.md), else eagerly.
        max_cache_length: Slots of the KV cache, allocated at once. None: as many as the text needs, reallocated as it
            grows.
        methods: Methods or drafters that `"hybrid"` and `"auto"` merge. None: all loaded drafters, prompt lookup and
            token recycling.
        trace: Record every step in `stats.trace`, for the plots of `hf_specdec.viz`.
        eagle_topk: Another name of `top_k`, as in SGLang's `speculative_eagle_topk`: children per expanded node,
            unrelated to the sampling parameter.
    """

    _aliases = ("eagle_topk",)

    method: str = "auto"
    num_steps: int | None = None
    top_k: int | None = None
    num_draft_tokens: int | None = None
    tree: Literal["dynamic", "static"] | tuple[Choice, ...] | None = None
    acceptance: AcceptanceName = "auto"
    posterior_threshold: float = 0.09
    posterior_alpha: float = 0.3
    adaptive: bool | AdaptiveConfig | None = None  # a path or a dict becomes an AdaptiveConfig
    compile: Compile | Literal["compile"] | bool = "auto"
    max_cache_length: int | None = None
    methods: tuple[str, ...] | None = None
    trace: bool = False
    if TYPE_CHECKING:
        eagle_topk: int | None = None  # a property, see `_accept_eagle_topk`

    def __post_init__(self) -> None:
        _require(isinstance(self.method, str) and bool(self.method), "a method name", "method", self.method)
        self._check_methods()
        for name in ("num_steps", "top_k", "num_draft_tokens", "max_cache_length"):
            value, most = getattr(self, name), MAX_SLOTS if name == "max_cache_length" else MAX_NODES
            _require(value is None or (_is_int(value) and value >= 1), "an integer >= 1 or None", name, value)
            _require(value is None or value <= most, f"at most {most}", name, value)
        if isinstance(self.compile, bool | str):
            object.__setattr__(self, "compile", COMPILE_ALIASES.get(self.compile, self.compile))
        for name, choices in (("acceptance", get_args(AcceptanceName)), ("compile", get_args(Compile))):
            value = getattr(self, name)
            _require(value in choices, f"one of {', '.join(map(repr, choices))}", name, value)
        _require(isinstance(self.trace, bool), "True or False", "trace", self.trace)
        for name in ("posterior_threshold", "posterior_alpha"):
            value = getattr(self, name)
            _require(_is_number(value) and 0 < value <= 1, "a number in (0, 1]", name, value)
        if isinstance(self.tree, list | tuple):
            object.__setattr__(self, "tree", tuple(validate_choices(self.tree)))
        else:
            _require(self.tree in (None, "dynamic", "static"), "'dynamic', 'static' or a list of paths", "tree",
                     self.tree)  # fmt: skip
        if isinstance(self.adaptive, str | Path):
            object.__setattr__(self, "adaptive", AdaptiveConfig.from_file(self.adaptive))
        if isinstance(self.adaptive, Mapping):
            object.__setattr__(self, "adaptive", AdaptiveConfig.from_dict(self.adaptive))
        _require(
            self.adaptive is None or isinstance(self.adaptive, bool | AdaptiveConfig),
            "True, False, None, an AdaptiveConfig, a dict of its fields or a JSON file", "adaptive", self.adaptive,
        )  # fmt: skip

    def _check_methods(self) -> None:
        if self.methods is None:
            return
        _require(
            isinstance(self.methods, list | tuple) and bool(self.methods)
            and all(isinstance(name, str) and name for name in self.methods)
            and len(set(self.methods)) == len(self.methods),
            "a list of different method names", "methods", self.methods,
        )  # fmt: skip
        object.__setattr__(self, "methods", tuple(self.methods))
        _require(self.method in COMBINED, "None unless `method` is 'hybrid' or 'auto'", "methods", self.methods)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-serialisable values; omit `methods` and `trace` if they have their defaults."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        if not self.trace:
            del values["trace"]
        if values.pop("methods") is not None:
            values["methods"] = list(self.methods or ())
        if isinstance(self.tree, tuple):
            values["tree"] = [list(path) for path in self.tree]
        if isinstance(self.adaptive, AdaptiveConfig):
            values["adaptive"] = self.adaptive.to_dict()
        return values

    @staticmethod
    def storable(value: Any) -> Any:
        """Return a JSON-serialisable form of a value of `speculative=`: a config as a dict, other values unchanged."""
        return value.to_dict() if isinstance(value, SpeculativeConfig) else value

    @classmethod
    def of(cls, value: Any) -> Self:
        """Return a config from any value of `speculative=` but None: a method name, a dict of fields, or a config.

        Raises:
            InvalidConfigError: A value of another type, an unknown field or an invalid value of a field.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            return cls(method=value)
        if isinstance(value, Mapping):
            return cls.from_dict(value)
        raise InvalidConfigError(
            f"`speculative` must be None, a method name, a SpeculativeConfig or a dict of its fields, got {value!r}."
        )
