"""The registry of drafting methods: their names, their requirements and the factories of their drafters.

A package adds methods with `register_drafter`, or with an entry point of the group `hf_specdec.methods` that refers to
a `Method`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points

from transformers import PreTrainedModel

from hf_specdec.config import AUTO, COMBINED, ENTRY_POINTS, SpeculativeConfig
from hf_specdec.control.policy import LearnedStats
from hf_specdec.drafters.base import Drafter
from hf_specdec.drafters.dflash import DFlashDrafter
from hf_specdec.drafters.draft_model import DraftModelDrafter
from hf_specdec.drafters.eagle import EagleDrafter
from hf_specdec.drafters.experimental.early_exit import EarlyExitDrafter
from hf_specdec.drafters.experimental.last_logits import LastLogitsDrafter
from hf_specdec.drafters.experimental.lookahead import LookaheadDrafter
from hf_specdec.drafters.history import HistoryDrafter
from hf_specdec.drafters.hybrid import HybridDrafter
from hf_specdec.drafters.medusa import MedusaDrafter
from hf_specdec.drafters.mtp import MtpDrafter
from hf_specdec.drafters.pard import PardDrafter
from hf_specdec.drafters.prompt_lookup import PromptLookupDrafter
from hf_specdec.drafters.token_recycling import TokenRecyclingDrafter
from hf_specdec.errors import DrafterMismatchError, InvalidConfigError
from hf_specdec.heads.base import DraftHead
from hf_specdec.heads.dflash import DFlashHead
from hf_specdec.heads.eagle import EagleHead
from hf_specdec.heads.eagle3 import Eagle3Head
from hf_specdec.heads.layer_mtp import LayerMtpHead
from hf_specdec.heads.medusa import MedusaHeads
from hf_specdec.heads.mtp import MtpHead
from hf_specdec.validation import unknown_method
from hf_specdec.verification.memory import persistent_tensors


@dataclass(frozen=True, slots=True)
class Method:
    """One drafting method, as `register_drafter` adds it.

    Args:
        name: Name of the method.
        make: Returns its drafter. Called with a loaded head if `heads` is not empty, otherwise without arguments.
        aliases: Further names.
        heads: Classes of heads that it drafts with; empty if it needs no trained head.
        part: Another part that its drafter needs, such as "an assistant model".
        how_given: How a user provides that part, as an imperative sentence.
        native: Makes a drafter of the model's own modules, without a head.
    """

    name: str
    make: Callable[..., Drafter]
    aliases: tuple[str, ...] = ()
    heads: tuple[type[DraftHead], ...] = ()
    part: str = ""
    how_given: str = ""
    native: Callable[[PreTrainedModel], Drafter] | None = None

    @property
    def requires(self) -> str | None:
        """What the user must do first, as an imperative sentence; None if nothing."""
        if self.heads and self.native is None:
            return "call model.load_drafter(path_or_hub_id)"
        return self.how_given or None


_METHODS: dict[str, Method] = {}

HISTORY = HistoryDrafter.method
"""Name of the part of merged drafters that drafts from earlier answers, if the config sets `history`."""

FREE = ("prompt_lookup", "token_recycling")
"""Methods that `"auto"` and `"hybrid"` merge with the loaded drafters, because they cost almost nothing."""


def register_drafter(
    name: str, make: Callable[..., Drafter], *, aliases: Sequence[str] = (),
    heads: Sequence[type[DraftHead]] = (), part: str = "", how_given: str = "",
    native: Callable[[PreTrainedModel], Drafter] | None = None,
) -> Method:  # fmt: skip
    """Add a drafting method, so that `speculative=name` finds it.

    Args:
        name: Name of the method.
        make: Returns its drafter. Called with a loaded head if `heads` names its class, otherwise without arguments.
        aliases: Further names.
        heads: Classes of draft heads that it drafts with.
        part: Another part that it needs, for error messages, such as "an assistant model".
        how_given: How a user provides that part, as an imperative sentence.
        native: Makes a drafter of the model's own modules if no head is loaded.

    Returns:
        The method.

    Raises:
        InvalidConfigError: `make` cannot be called, a name is `"auto"`, `"hybrid"` or another method's, or a head
            belongs to another method.
    """
    if not callable(make):
        kind = type(make).__name__
        raise InvalidConfigError(
            f"`make` must be a class or a function that returns a drafter, got a {kind}.",
            f"Pass {kind}, or add this drafter to a model with model.add_drafter(...).",
        )
    return _add(Method(name, make, tuple(aliases), tuple(heads), part, how_given, native))


def _add(method: Method) -> Method:
    for name in (method.name, *method.aliases):
        if name in COMBINED or any(name in (row.name, *row.aliases) for row in _METHODS.values()):
            raise _taken(name)
    for head in method.heads:
        if any(head in row.heads for row in _METHODS.values()):
            raise InvalidConfigError(f"Another method drafts with {head.__name__}.", "Use a subclass of it.")
    _METHODS[method.name] = method
    return method


def _taken(name: str) -> InvalidConfigError:
    return InvalidConfigError(f"There is already a method {name!r}.", "Choose another name.")


register_drafter("eagle", EagleDrafter, heads=(EagleHead, Eagle3Head))
register_drafter("dflash", DFlashDrafter, heads=(DFlashHead,))
register_drafter("medusa", MedusaDrafter, heads=(MedusaHeads,))
register_drafter("mtp", MtpDrafter, heads=(MtpHead, LayerMtpHead), native=MtpDrafter.native)
register_drafter("prompt_lookup", PromptLookupDrafter, aliases=("ngram",))
register_drafter("token_recycling", TokenRecyclingDrafter)
register_drafter("last_logits", LastLogitsDrafter)
register_drafter("lookahead", LookaheadDrafter)
register_drafter("early_exit", EarlyExitDrafter)
register_drafter(
    "draft_model", DraftModelDrafter, part="an assistant model",
    how_given="pass assistant_model=, or call model.add_drafter(DraftModelDrafter(assistant))",
)  # fmt: skip
register_drafter(
    "pard", PardDrafter, part="a PARD assistant model",
    how_given="pass assistant_model=, or call model.load_drafter(path_or_hub_id)",
)  # fmt: skip


def methods() -> Mapping[str, Method]:
    """Return every method by name, including those that installed packages add.

    Raises:
        InvalidConfigError: An entry point is not a `Method`, or its names or heads belong to another method.
    """
    _load_entry_points()
    return dict(_METHODS)


@functools.cache
def _load_entry_points() -> None:
    for entry in entry_points(group=ENTRY_POINTS):
        method = entry.load()
        if not isinstance(method, Method):
            raise InvalidConfigError(
                f"The entry point {entry.name!r} of {ENTRY_POINTS} is a {type(method).__name__}, not a Method.",
                "It must refer to a hf_specdec.drafters.registry.Method.",
            )
        _add(method)


def check_drafter_name(name: str, own: Collection[str]) -> None:
    """Refuse a drafter's name that would hide a method with other drafts.

    Args:
        name: The name in `speculative=` that the drafter is to get.
        own: Names of the methods that the drafter may belong to: it may have their names and aliases.

    Raises:
        InvalidConfigError: The name is `"auto"`, or the name or alias of another method.
    """
    rows = methods()
    method = next((row.name for row in rows.values() if name in row.aliases), name)
    if method == AUTO or (method not in own and method in (*COMBINED, *rows)):
        raise _taken(name)


def method_named(name: str, registered: Iterable[str] = ()) -> str:
    """Resolve an alias to its method; return the name of a method, a registered drafter, `"auto"` or `"hybrid"` as is.

    Raises:
        InvalidConfigError: The name is unknown.
    """
    rows = methods()
    aliases = {alias: row.name for row in rows.values() for alias in row.aliases}
    method = aliases.get(name, name)
    available = {*COMBINED, *rows, *registered}
    if method in available:
        return method
    raise unknown_method(name, sorted(available))


def drafter_of(head: DraftHead) -> Drafter:
    """Create a drafter for a loaded head.

    Raises:
        DrafterMismatchError: No method drafts with such a head.
    """
    for method in methods().values():
        if type(head) in method.heads:
            return method.make(head)
    raise DrafterMismatchError(
        f"No method drafts with a {type(head).__name__}.", "Register one with hf_specdec.register_drafter(...)."
    )


def choose_drafter(
    config: SpeculativeConfig, model: PreTrainedModel, registered: Mapping[str, Drafter], made: dict[str, Drafter],
    learned: LearnedStats, history: Drafter | None = None,
) -> Drafter:  # fmt: skip
    """Return the drafter that a config names.

    Args:
        config: Its `method` names a registered drafter, a method, or several of them merged (`"auto"`, `"hybrid"`).
            `"auto"` with a `tree` uses the first loaded drafter alone, if any: a tree belongs to one drafter.
        model: The target.
        registered: Drafters of the model by name.
        made: Drafters made earlier for methods without a head, by method; new ones are added.
        learned: Statistics of merged drafting with the model.
        history: Drafter of earlier answers, merged with the others; None if the config uses no history.

    Raises:
        InvalidConfigError: A name is unknown, `methods` names a drafter that already merges others, or `history` is
            given for a single drafter.
        DrafterMismatchError: The method needs a head or another part, and none is loaded; or the model's own modules
            that it needs do not exist.
        UnsupportedModelError: The method drafts with modules of the model, and these are not supported.
        CheckpointFormatError: These modules cannot be read from the model's checkpoint.
    """

    def single(name: str) -> Drafter:
        return _single(name, model, registered, made)

    name = method_named(config.method, {*registered, *(drafter.method for drafter in registered.values())})
    if history is not None and (name in registered or config.tree is not None or HISTORY in registered):
        other = f"a drafter that is called {HISTORY!r}" if HISTORY in registered else f"a drafter called {name!r}"
        cause = f"tree={config.tree!r}" if config.tree is not None else other
        raise InvalidConfigError(f"`history` cannot be combined with {cause}.", "Drop one of them.")
    if name not in COMBINED or name in registered:
        return single(name)
    loaded = [known for known, drafter in registered.items() if not drafter.is_combined]
    if name == AUTO and config.tree is not None and loaded:  # a given tree belongs to one drafter
        return single(loaded[0])
    names = config.methods or dict.fromkeys((*loaded, *FREE))
    if any(part in COMBINED or (part in registered and registered[part].is_combined) for part in names):
        raise InvalidConfigError(f"`methods` must name single methods, got {list(names)}.", "Leave merged ones out.")
    parts = {part: single(part) for part in names}
    return HybridDrafter(parts if history is None else {**parts, HISTORY: history}, learned)


def _single(name: str, model: PreTrainedModel, registered: Mapping[str, Drafter], made: dict[str, Drafter]) -> Drafter:
    """Return the registered drafter of this name, else one of this method, else a drafter made without a head."""
    by_method: dict[str, Drafter] = {}
    for drafter in registered.values():
        by_method.setdefault(drafter.method, drafter)
    name = method_named(name, {*registered, *by_method})
    if name in registered:
        return registered[name]
    if name in by_method:
        return by_method[name]
    row = methods()[name]
    if row.requires is not None:
        part = "a head" if row.heads else row.part
        raise DrafterMismatchError(
            f"speculative={name!r} needs {part}, and none is loaded for this model.",
            f"First {row.requires}.",
        )
    if name not in made:
        with persistent_tensors():
            made[name] = row.make() if row.native is None else row.native(model)
    return made[name]
