"""What speculation makes of every model with a `generate()`: equal to plain generate, or refused; nothing else.

python tests/models.py     writes docs/models.md; tests/test_models.py holds it to be true
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

import drafters
import generative
import zoo
from hf_specdec import (
    DrafterMismatchError,
    InvalidConfigError,
    SpeculativeGenerationMixin,
    UnsupportedModelError,
)

TABLE = Path(__file__).parents[1] / "docs" / "models.md"
NEW_TOKENS = 24
FEW_TOKENS = 8
"""Of the drafters that do not know the answer: how they read the model is what may differ between architectures."""


INTRODUCTION = """\
# Models

Every model of transformers {version} with a `generate()`, as a tiny random model in float32 (`make models` wrote this
page, a test holds it to be true). There is no third outcome:

* *Equal*: greedy answers, to one row and to three left-padded rows, are those of plain `generate()` for drafts that
  are never, always and sometimes right. *Trees* branch, and rows of a batch go at their own pace. *Chains* are the
  first children of a tree, with rows in lockstep, over transformers' own cache; where a model has a recurrent state, a
  partly accepted chain costs a second, shorter forward.
* *Refused*: `attach` raises `UnsupportedModelError` with the reason.
"""
CLASSES = """\
## All other classes with a `generate()`

Models of text with images, audio or video (the prompts here are text), encoder-decoder models, models of speech and
of codes, parts of larger models.
"""
AUTO = drafters.Row("auto", "auto")


@dataclass(frozen=True, slots=True)
class Verdict:
    """How one architecture fares."""

    name: str
    outcome: Literal["tree", "chain", "refused"]
    reason: str = ""  # why not a tree

    @property
    def row(self) -> str:
        """Its line in the table."""
        told = {"tree": "equal, trees", "chain": "equal, chains", "refused": "refused"}[self.outcome]
        return f"| {self.name} | {told} | {self.reason} |"


def prompts(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts of 21 tokens; in a batch of three, rows have 0, 4 and 9 tokens of left padding."""
    generator = torch.Generator().manual_seed(batch_size)
    ids = torch.randint(3, zoo.VOCAB_SIZE, (batch_size, 21), generator=generator)
    mask = torch.ones_like(ids)
    for row, padding in enumerate((0, 4, 9)[:batch_size]):
        ids[row, :padding] = 0
        mask[row, :padding] = 0
    return ids, mask


def verdict(name: str, rows: Sequence[drafters.Row] = drafters.ROWS) -> Verdict:
    """The verdict on an architecture of the causal-LM mapping, see `judged`."""
    return judged(name, zoo.build(name), rows)


def class_verdict(
    name: str, rows: Sequence[drafters.Row] = (*drafters.ROWS, AUTO), batch_sizes: Sequence[int] = (1, 3)
) -> Verdict:
    """The verdict on a class that the mapping does not build, see `judged`."""
    return judged(name, generative.build(name), rows, batch_sizes)


def judged(name: str, model: Any, rows: Sequence[drafters.Row], batch_sizes: Sequence[int] = (1, 3)) -> Verdict:
    """Attach, and compare greedy answers: right, wrong and mixed drafts, and every drafter.

    Args:
        name: The architecture or class.
        model: Its tiny model.
        rows: The drafters.
        batch_sizes: Rows of the prompts.

    Raises:
        AssertionError: An answer differs, or right drafts are not accepted.
    """
    try:
        SpeculativeGenerationMixin.attach(model)
    except UnsupportedModelError as error:
        return Verdict(name, "refused", _short(str(error).removesuffix(error.hint)))
    try:
        facts = model._speculation.facts[0]
        for batch_size in batch_sizes:
            ids, mask = prompts(batch_size)
            options = {"attention_mask": mask, "max_new_tokens": NEW_TOKENS, "do_sample": False}
            few = {**options, "max_new_tokens": FEW_TOKENS}
            plain, short = model.generate(ids, **options), model.generate(ids, **few)
            for row in rows:
                if not row.knows_answers and batch_size != max(batch_sizes):
                    continue
                try:
                    config = row.add(model, plain[:, ids.shape[1] :])
                except (DrafterMismatchError, InvalidConfigError, UnsupportedModelError):  # nothing to draft with
                    continue
                wanted, limits = (plain, options) if row.knows_answers else (short, few)
                speculative = model.generate(ids, speculative=config, **limits)
                assert torch.equal(wanted, speculative), f"{name}: batch {batch_size}, {row.name}"
                if row.knows_answers:
                    tau = model.last_speculation.mean_accepted_length
                    # in lockstep the row with the worst draft sets the pace of all
                    slowed = facts.chain_only_reason and batch_size > 1
                    lowest = 1.0 if slowed else {"never": 1.0, "sometimes": 1.0, "always": 2.0}[row.name]
                    assert tau == 1.0 if row.name == "never" else tau >= lowest, (name, row.name, tau)
        return Verdict(name, "chain" if facts.chain_only_reason else "tree", _short(facts.chain_only_reason))
    finally:
        SpeculativeGenerationMixin.detach(model)


def _short(reason: str) -> str:
    """The reason without the model's name."""
    reason = reason.split("cannot verify drafted tokens")[-1].lstrip(":. ")
    reason = reason.strip().rstrip(".")
    return reason.replace("|", "\\|").replace("\n", " ")


def page(verdicts: Sequence[Verdict], of_classes: Sequence[Verdict]) -> str:
    """The whole of docs/models.md."""
    return "\n".join([
        INTRODUCTION.format(version=transformers.__version__), "## The causal-LM mapping", "",
        *_table("architecture", verdicts),
        CLASSES, *_table("class", of_classes),
        "Not walked, because no tiny model of them can be built offline:", "",
        *(f"* {name}: {reason}" for name, reason in generative.NOT_BUILT.items()), "",
    ])  # fmt: skip


def _table(head: str, verdicts: Sequence[Verdict]) -> list[str]:
    count = {kind: sum(v.outcome == kind for v in verdicts) for kind in ("tree", "chain", "refused")}
    return [
        f"**{count['tree']} equal with trees, {count['chain']} equal with chains, {count['refused']} refused.**", "",
        f"| {head} | outcome | why no tree |", "|---|---|---|", *(v.row for v in verdicts), "",
    ]  # fmt: skip


def _walk(names: Sequence[str], judge: Callable[[str], Verdict], failed: list[str]) -> list[Verdict]:
    verdicts = []
    for name in names:
        try:
            verdicts.append(judge(name))
            print(verdicts[-1].row, flush=True)
        except Exception as error:
            failed.append(name)
            print(f"FAILED {name}: {type(error).__name__}: {error}", flush=True)
            if not isinstance(error, AssertionError):
                traceback.print_exc(limit=-2)
    return verdicts


def main() -> None:
    """Walk every model and write the page; the exit status is 1 where one is neither equal nor refused."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    asked, failed = sys.argv[1:], list[str]()
    names = [name for name in zoo.NAMES if name in asked or not asked]
    of_classes = [name for name in generative.classes() if name in asked or not asked]
    of_classes = [name for name in of_classes if name not in generative.NOT_BUILT]
    verdicts, class_verdicts = _walk(names, verdict, failed), _walk(of_classes, class_verdict, failed)
    print(len(verdicts) + len(class_verdicts), "equal or refused; failed:", failed)
    if failed or asked:
        sys.exit(bool(failed))
    TABLE.write_text(page(verdicts, class_verdicts))


if __name__ == "__main__":
    main()
