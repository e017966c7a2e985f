"""Test every model with a `generate()`: its output must equal plain generate, or the model must be refused.

python tests/models.py     writes docs/models.md, which tests/test_models.py checks
"""

from __future__ import annotations

import re
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
NEW_TOKENS = 16
FEW_TOKENS = 6
"""Tokens for drafters that do not know the answer: enough to test how they read each architecture."""


INTRODUCTION = """\
# Models

Every model of transformers {version} with a `generate()`, tested as a tiny random model in float32 (`make models`).

* *Equal*: greedy output for one row and for three left-padded rows equals plain `generate()`'s, for drafts that are
  never, always and sometimes right. *Trees*: drafts may branch, and rows of a batch advance at their own pace.
  *Chains*: only the first children of a tree are verified, with rows in lockstep.
* *Refused*: `attach` raises `UnsupportedModelError` with the reason.
"""
CLASSES = """\
## All other classes with a `generate()`

Multimodal models (tested with text prompts), encoder-decoders, speech and audio-code models, parts of larger models.
"""
AUTO, EVERY_ROW = drafters.Row("auto", "auto"), (*drafters.ROWS, drafters.GEMMA4)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one architecture."""

    name: str
    outcome: Literal["tree", "chain", "refused"]
    reason: str = ""  # why not a tree

    @property
    def told(self) -> str:
        """Its outcome, as in the table."""
        return {"tree": "equal, trees", "chain": "equal, chains", "refused": "refused"}[self.outcome]


def prompts(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts of 21 tokens; in a batch of three, rows have 0, 4 and 9 tokens of left padding."""
    generator = torch.Generator().manual_seed(batch_size)
    ids = torch.randint(3, zoo.VOCAB_SIZE, (batch_size, 21), generator=generator)
    mask = torch.ones_like(ids)
    for row, padding in enumerate((0, 4, 9)[:batch_size]):
        ids[row, :padding] = 0
        mask[row, :padding] = 0
    return ids, mask


def verdict(name: str, rows: Sequence[drafters.Row] = EVERY_ROW) -> Verdict:
    """Test an architecture of the causal-LM mapping, see `judged`."""
    return judged(name, zoo.build(name), rows)


def class_verdict(
    name: str, rows: Sequence[drafters.Row] = (*EVERY_ROW, AUTO), batch_sizes: Sequence[int] = (1, 3)
) -> Verdict:
    """Test a class outside of the causal-LM mapping, see `judged`."""
    return judged(name, generative.build(name), rows, batch_sizes)


def judged(name: str, model: Any, rows: Sequence[drafters.Row], batch_sizes: Sequence[int] = (1, 3)) -> Verdict:
    """Attach, and compare greedy output with plain generate: for right, wrong and mixed drafts, and for every drafter.

    Args:
        name: The architecture or class.
        model: Its tiny model.
        rows: The drafters.
        batch_sizes: Batch sizes to test.

    Raises:
        AssertionError: The output differs, or right drafts are not accepted.
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
    """Return the reason without the model's name."""
    reason = reason.split("cannot verify drafted tokens")[-1].lstrip(":. ")
    error = r"(plain generate\(\) fails .*?)(\. | \(note: ).*"  # of which the first sentence is kept
    reason = re.sub(error, r"\1", reason.strip(), flags=re.DOTALL).rstrip(".")
    return reason.replace("|", "\\|").replace("\n", " ")


def page(verdicts: Sequence[Verdict], of_classes: Sequence[Verdict]) -> str:
    """Return the text of docs/models.md."""
    counts, _, *rows = _table("classes", of_classes)
    return "\n".join([
        INTRODUCTION.format(version=transformers.__version__), "## The causal-LM mapping", "",
        *_table("architectures", verdicts),
        CLASSES, counts, "", "<details markdown><summary>By class</summary>", "", *rows, "</details>", "",
        "Not tested, because no tiny model of them can be built offline:", "",
        *(f"* {name}: {reason}" for name, reason in generative.NOT_BUILT.items()), "",
    ])  # fmt: skip


def _table(head: str, verdicts: Sequence[Verdict]) -> list[str]:
    """One row per outcome and reason, the outcomes in order and their most frequent reasons first."""
    count = {kind: sum(v.outcome == kind for v in verdicts) for kind in ("tree", "chain", "refused")}
    groups: dict[tuple[str, str], list[str]] = {}
    for verdict in sorted(verdicts, key=lambda verdict: list(count).index(verdict.outcome)):
        groups.setdefault((verdict.told, verdict.reason), []).append(verdict.name)
    order = list(dict.fromkeys(outcome for outcome, _ in groups))
    rows = sorted(groups.items(), key=lambda group: (order.index(group[0][0]), -len(group[1])))
    return [
        f"**{count['tree']} equal with trees, {count['chain']} equal with chains, {count['refused']} refused.**", "",
        f"| outcome | why no tree | {head} |", "|---|---|---|",
        *(f"| {outcome} | {reason} | {', '.join(names)} |" for (outcome, reason), names in rows), "",
    ]  # fmt: skip


def told() -> dict[str, str]:
    """Outcomes in the page, by architecture or class."""
    rows = [line.removesuffix(" |").split(" | ") for line in TABLE.read_text().splitlines() if line.startswith("| ")]
    return {name: row[0].removeprefix("| ") for row in rows for name in row[2].split(", ") if row[0] != "| outcome"}


def _walk(names: Sequence[str], judge: Callable[[str], Verdict], failed: list[str]) -> list[Verdict]:
    verdicts = []
    for name in names:
        try:
            verdicts.append(judge(name))
            print(verdicts[-1].name, verdicts[-1].told, verdicts[-1].reason, sep=" | ", flush=True)
        except Exception as error:
            failed.append(name)
            print(f"FAILED {name}: {type(error).__name__}: {error}", flush=True)
            if not isinstance(error, AssertionError):
                traceback.print_exc(limit=-2)
    return verdicts


def main() -> None:
    """Test every model and write the page; the exit status is 1 if one is neither equal nor refused."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    selected, failed = sys.argv[1:], list[str]()
    names = [name for name in zoo.NAMES if name in selected or not selected]
    of_classes = [name for name in generative.classes() if name in selected or not selected]
    of_classes = [name for name in of_classes if name not in generative.NOT_BUILT]
    verdicts, class_verdicts = _walk(names, verdict, failed), _walk(of_classes, class_verdict, failed)
    print(len(verdicts) + len(class_verdicts), "equal or refused; failed:", failed)
    if failed or selected:
        sys.exit(bool(failed))
    TABLE.write_text(page(verdicts, class_verdicts))


if __name__ == "__main__":
    main()
