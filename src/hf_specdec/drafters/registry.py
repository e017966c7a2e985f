"""Every way to draft, a row each: names, what it takes, and how its drafter is made.

A package adds its own with `register`, or by an entry point of the group `hf_specdec.methods` that names a `Method`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points

from transformers import PreTrainedModel

from hf_specdec.config import AUTO, COMBINED, SpeculativeConfig
from hf_specdec.drafters.base import Drafter
from hf_specdec.drafters.draft_model import DraftModelDrafter
from hf_specdec.drafters.eagle import EagleDrafter
from hf_specdec.drafters.experimental.early_exit import EarlyExitDrafter
from hf_specdec.drafters.experimental.last_logits import LastLogitsDrafter
from hf_specdec.drafters.experimental.lookahead import LookaheadDrafter
from hf_specdec.drafters.hybrid import HybridDrafter, LearnedStats
from hf_specdec.drafters.medusa import MedusaDrafter
from hf_specdec.drafters.mtp import MtpDrafter
from hf_specdec.drafters.prompt_lookup import PromptLookupDrafter
from hf_specdec.drafters.token_recycling import TokenRecyclingDrafter
from hf_specdec.errors import DrafterMismatchError, InvalidConfigError
from hf_specdec.heads.base import DraftHead
from hf_specdec.heads.eagle import EagleHead
from hf_specdec.heads.eagle3 import Eagle3Head
from hf_specdec.heads.medusa import MedusaHeads
from hf_specdec.heads.mtp import MtpHead
from hf_specdec.verification.memory import persistent_tensors

ENTRY_POINTS = "hf_specdec.methods"
"""The group of entry points by which an installed package adds its methods."""


@dataclass(frozen=True, slots=True)
class Method:
    """One way to draft."""

    name: str
    make: Callable[..., Drafter]  # of a head or of another part where the method takes one, else of nothing
    aliases: tuple[str, ...] = ()
    heads: tuple[type[DraftHead], ...] = ()  # the heads that it drafts with; () is training-free
    part: str = ""  # what else its drafter is made of, such as "an assistant model"; "" is nothing
    how_given: str = ""  # how a user gives that part, as an order
    native: Callable[[PreTrainedModel], Drafter] | None = (
        None  # of what a model has in itself, where no head is loaded
    )

    @property
    def requires(self) -> str | None:
        """What has to be done first, as an order; None where nothing has, with a model that fits."""
        if self.heads and self.native is None:
            return "call model.load_drafter(path_or_hub_id)"
        return self.how_given or None


_METHODS: dict[str, Method] = {}

FREE = ("prompt_lookup", "token_recycling")
"""What `"auto"` and `"hybrid"` merge with what is loaded: they cost next to nothing."""


def register(method: Method) -> Method:
    """Add a method; its row is returned.

    Raises:
        InvalidConfigError: One of its names, or one of its heads, is another method's.
    """
    for name in (method.name, *method.aliases):
        if name in COMBINED or any(name in (row.name, *row.aliases) for row in _METHODS.values()):
            raise InvalidConfigError(f"There is a method {name!r} already.", "Give yours another name.")
    for head in method.heads:
        if any(head in row.heads for row in _METHODS.values()):
            raise InvalidConfigError(f"{head.__name__} is drafted with by another method.", "Subclass it.")
    _METHODS[method.name] = method
    return method


register(Method("eagle", EagleDrafter, heads=(EagleHead, Eagle3Head)))
register(Method("medusa", MedusaDrafter, heads=(MedusaHeads,)))
register(Method("mtp", MtpDrafter, heads=(MtpHead,), native=MtpDrafter.native))
register(Method("prompt_lookup", PromptLookupDrafter, aliases=("ngram",)))
register(Method("token_recycling", TokenRecyclingDrafter))
register(Method("last_logits", LastLogitsDrafter))
register(Method("lookahead", LookaheadDrafter))
register(Method("early_exit", EarlyExitDrafter))
register(
    Method(
        "draft_model", DraftModelDrafter, part="an assistant model",
        how_given="pass assistant_model=, or call model.add_drafter(DraftModelDrafter(assistant))",
    )
)  # fmt: skip


def methods() -> Mapping[str, Method]:
    """Every method by name, those of installed packages included."""
    _load_entry_points()
    return dict(_METHODS)


@functools.cache
def _load_entry_points() -> None:
    for entry in entry_points(group=ENTRY_POINTS):
        method = entry.load()
        if not isinstance(method, Method):
            raise InvalidConfigError(
                f"The entry point {entry.name!r} of {ENTRY_POINTS} is a {type(method).__name__}, not a Method.",
                "Let it name a hf_specdec.drafters.registry.Method.",
            )
        register(method)


def method_named(name: str, registered: Iterable[str] = ()) -> str:
    """The method or registered drafter that a name means, without its aliases; `"auto"` and `"hybrid"` stay.

    Raises:
        InvalidConfigError: There is none.
    """
    rows = methods()
    aliases = {alias: row.name for row in rows.values() for alias in row.aliases}
    method = aliases.get(name, name)
    available = {*COMBINED, *rows, *registered}
    if method in available:
        return method
    known = ", ".join(map(repr, sorted({*available, *aliases})))
    raise InvalidConfigError(f"There is no method or drafter {name!r}.", f"There are: {known}.")


def drafter_of(head: DraftHead) -> Drafter:
    """A drafter that drafts with this head.

    Raises:
        DrafterMismatchError: No method drafts with such a head.
    """
    for method in methods().values():
        if type(head) in method.heads:
            return method.make(head)
    raise DrafterMismatchError(
        f"No method drafts with a {type(head).__name__}.", "Register one: hf_specdec.drafters.registry.register(...)."
    )


def choose_drafter(
    config: SpeculativeConfig, model: PreTrainedModel, registered: Mapping[str, Drafter], made: dict[str, Drafter],
    experience: LearnedStats,
) -> Drafter:  # fmt: skip
    """The drafter that a config means.

    Args:
        config: Its `method` is the name of a registered drafter, of a method, or of several merged.
        model: The target.
        registered: Drafters of the model by name.
        made: Drafters without a head that were made for the model before; a new one is put in.
        experience: What merged drafting has learned with the model.

    Raises:
        InvalidConfigError: Unknown name, or merged drafters merged again.
        DrafterMismatchError: A method whose head is not loaded, or whose other part is missing.
        UnsupportedModelError: The model's own parts are of a kind that does not draft here.
    """

    def single(name: str) -> Drafter:
        return _single(name, model, registered, made)

    name = method_named(config.method, {*registered, *(drafter.method for drafter in registered.values())})
    if name not in COMBINED or name in registered:
        return single(name)
    loaded = [known for known, drafter in registered.items() if not isinstance(drafter, HybridDrafter)]
    if name == AUTO and config.tree is not None and loaded:  # a tree is one drafter's
        return single(loaded[0])
    names = config.methods or dict.fromkeys((*loaded, *FREE))
    if any(part in COMBINED or isinstance(registered.get(part), HybridDrafter) for part in names):
        raise InvalidConfigError(f"`methods` names what is merged, got {list(names)}.", "Name single methods.")
    return HybridDrafter({part: single(part) for part in names}, experience)


def _single(name: str, model: PreTrainedModel, registered: Mapping[str, Drafter], made: dict[str, Drafter]) -> Drafter:
    """A registered drafter, else one of that method, else one that needs no head."""
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
            f"speculative={name!r} needs {part}, and this model has none to draft with.",
            f"First {row.requires}.",
        )
    if name not in made:
        with persistent_tensors():
            made[name] = row.make() if row.native is None else row.native(model)
    return made[name]
