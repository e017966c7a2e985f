"""What a user may set: `SpeculativeConfig` and `AdaptiveConfig`. Validated on creation, JSON in and out, no torch."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, Self, get_args

from hf_specdec.errors import InvalidConfigError
from hf_specdec.records import read_object, shortened

Acceptance = Literal["auto", "greedy", "rejection", "block", "typical", "nucleus"]
Compile = Literal["auto", "none", "cuda_graph", "compile"]
Choice = tuple[int, ...]


AUTO, HYBRID = "auto", "hybrid"
COMBINED = (AUTO, HYBRID)
"""Methods that draft with several others."""

MAX_NODES, MAX_STEPS, MAX_TOP_K = 4096, 64, 1024
"""What a stored head may ask for at most: nodes of a tree, its depth, children of a node. A user may ask for depths
and children up to the number of nodes."""

MAX_SLOTS = 2**48
"""Of a cache: no device holds more."""

MAX_RANK = 2**31
"""Of a child among its siblings; vocabularies are smaller."""

MAX_TIERS, MAX_WAIT = 64, 10**9
"""Depths that a controller chooses from, and target forwards between its decisions."""


def validate_choices(choices: Iterable[Any]) -> list[Choice]:
    """Check a choice list and sort it level by level.

    A choice is a path of ranks: `(0, 2)` is the third best child of the best child of the root (the notation of
    Medusa's `medusa_choices` and of vLLM's `speculative_token_tree`).

    Returns:
        The choices sorted by depth, then by rank.

    Raises:
        InvalidConfigError: Empty list or path, a negative or non-integer rank, a duplicate, a path whose parent
            is missing.
    """
    paths: list[Choice] = []
    for choice in choices:
        if len(paths) >= MAX_NODES:
            raise InvalidConfigError(f"A tree has at most {MAX_NODES} paths, got more.")
        if not isinstance(choice, list | tuple) or not choice:
            raise InvalidConfigError(
                f"A tree is a list of non-empty paths of ranks such as [(0,), (0, 0), (1,)], got the entry "
                f"{shortened(choice)}."
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
        raise InvalidConfigError(f"The tree path {repeated} occurs twice.", "List every node once.")
    for path in paths:
        if len(path) > 1 and path[:-1] not in known:
            raise InvalidConfigError(f"The tree path {path} has no parent.", f"Add {path[:-1]} to the list.")
    return sorted(paths, key=lambda path: (len(path), path))


class _Fields:
    """Dictionaries in, with the nearest known name where a field is unknown."""

    __slots__ = ()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`.

        Raises:
            InvalidConfigError: Unknown field (the nearest known one is named) or a value that is not valid.
        """
        check_names(cls.__name__, values, [field.name for field in fields(cls)])  # type: ignore[arg-type]
        return cls(**values)


def check_names(owner: str, given: Iterable[Any], known: Sequence[str]) -> None:
    """Refuse names of fields that there are not, and name the nearest that there is.

    Raises:
        InvalidConfigError: The first such name.
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


def require_integer(name: str, value: Any, least: int, most: int | None = None) -> None:
    """Check a number that a user gives to a drafter.

    Raises:
        InvalidConfigError: It is no integer, smaller, or larger.
    """
    _require(_is_int(value) and value >= least, f"an integer >= {least}", name, value)
    _require(most is None or value <= most, f"at most {most}", name, value)


@dataclass(frozen=True, slots=True)
class AdaptiveConfig(_Fields):
    """How the drafted depth follows the measured acceptance.

    Args:
        candidate_steps: Depths to choose from, ascending.
        ema_alpha: Weight of the newest acceptance in its moving average.
        update_interval: Target forwards between two decisions.
        warmup_batches: Target forwards before the first decision.
        down_hysteresis, up_hysteresis: Distance the average must pass before the depth falls or rises.
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
        """Read a JSON file of the fields.

        Raises:
            InvalidConfigError: A file that is not there, is no JSON object, or has unknown fields or bad values.
        """
        try:
            values = read_object(Path(path))
        except InvalidConfigError as error:
            raise InvalidConfigError(f"`adaptive` must be a JSON file of AdaptiveConfig's fields: {error}") from error
        return cls.from_dict(values)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, JSON-serialisable."""
        return {**asdict(self), "candidate_steps": list(self.candidate_steps)}


@dataclass(frozen=True, slots=True)
class SpeculativeConfig(_Fields):
    """How to draft, verify and accept. `None` leaves a field to the drafter, which documents its default.

    Args:
        method: A method name, the name of a registered drafter, `"hybrid"` (several of them, merged), or `"auto"`
            (the best of what is loaded).
        num_steps: Drafted depth.
        top_k: Branching per expanded node.
        num_draft_tokens: Nodes verified per step, root included.
        tree: `"dynamic"`, `"static"`, or a list of choice paths such as `[(0,), (0, 0), (1,)]`.
        acceptance: `"auto"` is lossless: greedy when not sampling, else rejection; so is `"block"` (sampled chains).
            `"typical"` and `"nucleus"` keep more and change what is generated (docs/acceptance.md).
        posterior_threshold, posterior_alpha: Typical acceptance keeps a token x iff
            `p(x) > min(threshold, alpha * exp(-H(p)))`.
        adaptive: What decides how much is drafted. None: measured costs for `"hybrid"` and `"auto"`, a fixed tree for
            all others. True: measured costs, or tiers. An `AdaptiveConfig`, a dict of its fields or the path of a JSON
            file: tiers. False: a fixed tree.
        compile: What runs the forwards that verify and draft: `"none"` the modules themselves, `"cuda_graph"` graphs
            of them, `"compile"` a program of inductor's; `"auto"` graphs where the device records them, else none.
        max_cache_length: Slots of the static cache, allocated at once; None is what prompt, answer and tree come to
            need, moved to larger memory where a text outgrows it.
        methods: What `"hybrid"` merges: names of methods or drafters; None is what is loaded and what is free.
        trace: Keep what every step drafted and what the target said to it, in `stats.trace`; for pictures (`viz`).
    """

    method: str = "auto"
    num_steps: int | None = None
    top_k: int | None = None
    num_draft_tokens: int | None = None
    tree: Literal["dynamic", "static"] | tuple[Choice, ...] | None = None
    acceptance: Acceptance = "auto"
    posterior_threshold: float = 0.09
    posterior_alpha: float = 0.3
    adaptive: bool | AdaptiveConfig | None = None  # a path or a dict becomes an AdaptiveConfig
    compile: Compile = "auto"
    max_cache_length: int | None = None
    methods: tuple[str, ...] | None = None
    trace: bool = False

    def __post_init__(self) -> None:
        _require(isinstance(self.method, str) and bool(self.method), "a method name", "method", self.method)
        self._check_methods()
        for name in ("num_steps", "top_k", "num_draft_tokens", "max_cache_length"):
            value, most = getattr(self, name), MAX_SLOTS if name == "max_cache_length" else MAX_NODES
            _require(value is None or (_is_int(value) and value >= 1), "an integer >= 1 or None", name, value)
            _require(value is None or value <= most, f"at most {most}", name, value)
        for name, choices in (("acceptance", get_args(Acceptance)), ("compile", get_args(Compile))):
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
        _require(self.method in COMBINED, "None where `method` is not 'hybrid'", "methods", self.methods)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, JSON-serialisable; `methods` and `trace` only where they are given."""
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
        """What JSON can hold of anything that `speculative=` takes."""
        return value.to_dict() if isinstance(value, SpeculativeConfig) else value

    @classmethod
    def of(cls, value: Any) -> Self:
        """A config from anything `speculative=` takes: a method name, a dict of fields, or a config.

        Raises:
            InvalidConfigError: Any other type, or bad fields.
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
