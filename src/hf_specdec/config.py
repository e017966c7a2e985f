"""`SpeculativeConfig` and `AdaptiveConfig`: the settings of `generate(speculative=...)`, validated on creation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args

from hf_specdec.errors import InvalidConfigError
from hf_specdec.records import read_json
from hf_specdec.validation import (
    MAX_NODES,
    MAX_SLOTS,
    MAX_TIERS,
    MAX_WAIT,
    ConfigFields,
    Rule,
    integer,
    is_number,
    named_fields,
    one_of,
    optional,
    validate_choices,
)

AcceptanceName = Literal["auto", "greedy", "rejection", "block", "typical", "nucleus"]
Compile = Literal["auto", "none", "kernels", "inductor", "cuda_graph"]
ExecutionMode = Literal["inductor", "cuda_graph", "kernels"]
"""How a forward runs if not eagerly.

`"inductor"` compiles it, and captures the result if the device has graphs; `"cuda_graph"` captures it uncompiled;
`"kernels"` runs the traced operations with the CPU kernels."""

COMPILE_ALIASES: dict[bool | str, Compile] = {True: "inductor", "compile": "inductor", False: "none"}

AUTO, HYBRID, PLAIN = "auto", "hybrid", "plain"
COMBINED = (AUTO, HYBRID)
"""Methods that combine several drafters."""

ENTRY_POINTS = "hf_specdec.methods"
"""Group of entry points through which an installed package adds methods."""

PER_PROMPT = "per_prompt"
"""Value of `history`: one history per prompt. No history can have this name."""

MAX_HISTORY_NAME = 4000
"""Maximum length of a history's name in characters."""


_FRACTION = Rule("a number in (0, 1]", lambda value: is_number(value) and 0 < value <= 1)
_FINITE = Rule("a finite number", is_number)
_BOOL = Rule("True or False", lambda value: isinstance(value, bool))


def _are_tiers(value: Any) -> bool:
    if not isinstance(value, tuple) or not 0 < len(value) <= MAX_TIERS:
        return False
    return all(map(integer(1, MAX_NODES).holds, value)) and list(value) == sorted(set(value))


@named_fields
@dataclass(frozen=True, slots=True)
class AdaptiveConfig(ConfigFields):
    """Settings for adapting the drafted depth to a moving average of the accepted drafted tokens per row and step.

    Invalid values raise `InvalidConfigError`. Depths change every few steps only, and at thresholds that differ
    upwards and downwards, so that the depth does not oscillate, as in SGLang.

    Args:
        candidate_steps: Depths to choose from, ascending: at most 64, each from 1 to 4096.
        ema_alpha: Weight of the newest value in the moving average, in (0, 1].
        update_interval: Steps between two decisions, at least 1.
        warmup_batches: Steps before the first decision, at least 1.
        down_hysteresis: Added to the threshold at or below which the depth decreases; negative values delay it.
        up_hysteresis: Added to the threshold above which the depth increases; positive values delay it.

    Example:
        ```python
        tiers = AdaptiveConfig(candidate_steps=[1, 3, 5])
        ids = model.generate(**inputs, speculative={"method": "eagle", "adaptive": tiers})
        ```
    """

    rules: ClassVar[Mapping[str, Rule]] = {
        "candidate_steps": Rule(f"up to {MAX_TIERS} ascending depths from 1 to {MAX_NODES}", _are_tiers),
        "ema_alpha": _FRACTION,
        "update_interval": integer(1, MAX_WAIT),
        "warmup_batches": integer(1, MAX_WAIT),
        "down_hysteresis": _FINITE,
        "up_hysteresis": _FINITE,
    }

    candidate_steps: list[int] | tuple[int, ...] = (1, 3, 7)  # stored as a tuple
    ema_alpha: float = 0.2
    update_interval: int = 5
    warmup_batches: int = 10
    down_hysteresis: float = -0.25
    up_hysteresis: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.candidate_steps, list):
            object.__setattr__(self, "candidate_steps", tuple(self.candidate_steps))
        self.check_fields()

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Create a config from a JSON file of its fields.

        Raises:
            InvalidConfigError: The file cannot be read, is not a JSON object, or has unknown fields or invalid values.
        """
        try:
            values = read_json(Path(path))
        except InvalidConfigError as error:
            raise InvalidConfigError(f"`adaptive` must be a JSON file of AdaptiveConfig's fields: {error}") from error
        return cls.from_dict(values)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-serialisable values."""
        return {**asdict(self), "candidate_steps": list(self.candidate_steps)}


def _are_methods(value: Any) -> bool:
    if not isinstance(value, tuple) or not all(isinstance(name, str) and name for name in value):
        return False
    return 0 < len(value) == len(set(value))


def _is_history(value: Any) -> bool:
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, tuple) or not names:
        return value is True
    return all(isinstance(name, str) and 0 < len(name) <= MAX_HISTORY_NAME for name in names)


@named_fields
@dataclass(frozen=True, slots=True)
class SpeculativeConfig(ConfigFields):
    """Settings for drafting, verification and acceptance.

    None means the drafter's default unless stated otherwise: see the table of settings on the method's page in
    docs/methods. Invalid values raise `InvalidConfigError`, and so do unknown fields, as keywords or in a dict: the
    message names the most similar one, if there is one.

    Args:
        method: `"auto"` (everything that is loaded, merged with prompt lookup and token recycling; plain steps if no
            draft pays; only the first loaded drafter if `tree` is given), `"hybrid"` (merged as well), or one method:
            `"prompt_lookup"` (or `"ngram"`), `"token_recycling"`, `"draft_model"`, `"pard"`, `"eagle"`, `"dflash"`,
            `"mtp"`, `"medusa"`; experimental: `"last_logits"`, `"lookahead"`, `"early_exit"`. Also the name of a
            drafter of yours, or `"plain"`: no drafts, only this package's forwards (`compile`).
        num_steps: Maximum depth of the drafted tree below the root, 1 to 4096.
        top_k: Children per expanded node of the tree, 1 to 4096; not the sampling parameter of `generate()`.
        num_draft_tokens: Maximum nodes verified per step, 1 to 4096. Counts the root, the token emitted last, as
            SGLang's `speculative_num_draft_tokens` and EAGLE's `total_token` do. transformers' `num_assistant_tokens`
            does not count it: 5 drafted tokens are `num_assistant_tokens=5` there and `num_draft_tokens=6` here.
        tree: `"dynamic"` (grown by likelihood), `"static"`, or a list of paths such as `[(0,), (0, 0), (1,)]`.
        acceptance: `"auto"` is `"greedy"` without sampling and `"rejection"` with it. Both are lossless, and each is
            refused in the other case. `"block"` is lossless, too; it needs sampling, and chains that the drafter
            sampled. `"typical"` and `"nucleus"` accept more and change the output. `"nucleus"` keeps tokens of the
            smallest set with the probability `top_p` of the call, or 0.8 if that is not set.
        posterior_threshold: Probability, in (0, 1], above which `"typical"` always keeps a drafted token. It keeps a
            token x if and only if `p(x) > min(threshold, alpha * exp(-H(p)))`; H is the entropy.
        posterior_alpha: Factor in (0, 1] of `exp(-H(p))` in this rule: the smaller, the more tokens are kept if the
            model is uncertain.
        adaptive: How the tree size is chosen. None: from measured costs for `"hybrid"` and `"auto"`, fixed for all
            other methods. True: from measured costs for `"hybrid"` and `"auto"`, by a default `AdaptiveConfig` for all
            others. An `AdaptiveConfig`, a dict of its fields or the path of a JSON file: by that config. False: fixed.
        compile: How the draft and verify forwards run: `"none"` (or False) eagerly, `"kernels"` with this package's
            CPU kernels, `"inductor"` (or True, or `"compile"`) compiled by torch.compile's inductor, `"cuda_graph"` as
            captured graphs, `"auto"` as graphs if the device can capture them, on a CPU with the kernels as soon as
            that pays, else eagerly.
        max_cache_length: Slots of the KV cache, allocated at once. None: as many as the text needs.
        methods: Names of the single methods or drafters that `"hybrid"` and `"auto"` merge, such as
            `["eagle", "prompt_lookup"]`. None: all loaded drafters, prompt lookup and token recycling.
        trace: Record every step in `stats.trace`, for the plots of `hf_specdec.viz`.
        history: Earlier answers of this model as another source of drafts, for `"auto"` and `"hybrid"`; None uses and
            stores none. True: one history for all calls. A name (such as `"user-42"`): the history of that name, which
            other names do not see. A list: one name per prompt. `"per_prompt"`: a history for each prompt, for
            repeated samples of the same prompts. Token ids of the answers and of the last 16 tokens of each prompt
            are stored, see `model.answer_history`.
        draft_window: Last tokens of the text that an EAGLE, MTP or block head attends to, in addition to the first
            four; up to half as many more between two cuts of its cache. None: the length of the texts that the head
            was trained on, if that is known, otherwise all. Refused if no part of the method has such a head.
        exact: Greedy ids, and for one row those sampled with the same seed, are those of `"plain"` with the same
            `compile`, in bfloat16 as well; `"auto"` means kernels or graphs. Other calls raise, see docs/exactness.md.
        eagle_topk: Another name of `top_k`, as in SGLang's `speculative_eagle_topk`.

    Example:
        ```python
        config = SpeculativeConfig(method="eagle", num_draft_tokens=12)
        ids = model.generate(**inputs, speculative=config)
        ```
    """

    aliases: ClassVar[Mapping[str, str]] = {"eagle_topk": "top_k"}
    rules: ClassVar[Mapping[str, Rule]] = {
        "method": Rule("a method name", lambda value: isinstance(value, str) and bool(value)),
        "num_steps": optional(integer(1, MAX_NODES)),
        "top_k": optional(integer(1, MAX_NODES)),
        "num_draft_tokens": optional(integer(1, MAX_NODES)),
        "tree": Rule("'dynamic', 'static', a list of paths or None",
                     lambda value: value in (None, "dynamic", "static") or isinstance(value, tuple)),
        "acceptance": one_of(*get_args(AcceptanceName)),
        "posterior_threshold": _FRACTION,
        "posterior_alpha": _FRACTION,
        "adaptive": Rule("True, False, None, an AdaptiveConfig, a dict of its fields or a JSON file",
                         lambda value: value is None or isinstance(value, bool | AdaptiveConfig)),
        "compile": one_of(*get_args(Compile)),
        "max_cache_length": optional(integer(1, MAX_SLOTS)),
        "methods": optional(Rule("a list of different method names", _are_methods)),
        "trace": _BOOL,
        "history": optional(Rule(f"True, False, a name of at most {MAX_HISTORY_NAME} characters, a list of one name "
                                 "per row", _is_history)),
        "draft_window": optional(integer(1, MAX_SLOTS)),
        "exact": _BOOL,
    }  # fmt: skip

    method: str = "auto"
    num_steps: int | None = None
    top_k: int | None = None
    num_draft_tokens: int | None = None
    tree: Literal["dynamic", "static"] | Sequence[Sequence[int]] | None = None  # paths are stored as tuples
    acceptance: AcceptanceName = "auto"
    posterior_threshold: float = 0.09
    posterior_alpha: float = 0.3
    adaptive: bool | AdaptiveConfig | Mapping[str, Any] | str | Path | None = None  # stored as an AdaptiveConfig
    compile: Compile | Literal["compile"] | bool = "auto"
    max_cache_length: int | None = None
    methods: list[str] | tuple[str, ...] | None = None  # stored as a tuple
    trace: bool = False
    history: bool | str | list[str] | tuple[str, ...] | None = None  # names are stored as a tuple; False as None
    draft_window: int | None = None
    exact: bool = False
    if TYPE_CHECKING:
        eagle_topk: int | None = None  # an argument, see `aliases`
    else:
        eagle_topk = property(lambda self: self.top_k)

    def __post_init__(self) -> None:
        if isinstance(self.compile, bool | str):
            object.__setattr__(self, "compile", COMPILE_ALIASES.get(self.compile, self.compile))
        for name in ("methods", "history"):
            value = getattr(self, name)
            object.__setattr__(self, name, tuple(value) if isinstance(value, list) else value)
        if self.history is False:
            object.__setattr__(self, "history", None)
        if isinstance(self.tree, list | tuple):
            object.__setattr__(self, "tree", tuple(validate_choices(self.tree)))
        if isinstance(self.adaptive, str | Path):
            object.__setattr__(self, "adaptive", AdaptiveConfig.from_file(self.adaptive))
        if isinstance(self.adaptive, Mapping):
            object.__setattr__(self, "adaptive", AdaptiveConfig.from_dict(self.adaptive))
        self.check_fields()
        for name in ("methods", "history"):
            if getattr(self, name) is not None and self.method not in COMBINED:
                raise InvalidConfigError(
                    f"`{name}` must be None unless `method` is 'hybrid' or 'auto', got {getattr(self, name)}."
                )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-serialisable values; omit those added later if they have their defaults."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("trace", "methods", "history", "draft_window", "exact"):
            if not values[name]:
                del values[name]
            elif isinstance(values[name], tuple):
                values[name] = list(values[name])
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
            "`speculative` must be None, False, a method name, a SpeculativeConfig or a dict of its fields, got "
            f"{value!r}.",
            "For the default method pass \"auto\"; to merge methods {'method': 'hybrid', 'methods': [...]}.",
        )
