"""Finished rows leave the batch: the answers stay those of plain generate, and forwards get smaller."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import drafters
import lengths
import zoo
from hf_specdec import SpeculativeGenerationMixin, UnsupportedGenerationError
from hf_specdec.verification.cache import drop_order
from hf_specdec.verification.model import CACHE_FIELD
from hf_specdec.verification.tree_target import TreeTarget
from models import prompts

ROWS = 6


@pytest.fixture(scope="module", params=["llama", "gemma3_text", "gpt2"])
def model(request: pytest.FixtureRequest) -> Any:
    """Full attention, sliding windows, learned positions."""
    return SpeculativeGenerationMixin.attach(copy.deepcopy(zoo.build(request.param)))


def ends(model: Any, ids: Tensor, mask: Tensor, new: int = 40) -> tuple[Tensor, dict[str, Any]]:
    """The plain answers and the options of a call whose rows end at different steps, with one that never ends."""
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    answers = model.generate(ids, **options)[:, ids.shape[1] :].tolist()
    chosen = set[int]()
    for row in range(1, len(answers)):  # the first row never ends
        free = [token for token in answers[row][3 * row :] if token not in answers[0]]
        chosen |= set(free[:1])
    options["eos_token_id"] = sorted(chosen)
    plain = model.generate(ids, **options)
    lengths = {
        next((i for i, token in enumerate(row) if token in chosen), new) for row in plain[:, ids.shape[1] :].tolist()
    }
    assert len(lengths) >= 3
    return plain, options


@contextmanager
def forwards(model: Any) -> Iterator[list[tuple[int, int]]]:
    """Rows of the batch and rows that this model computed, of every verify forward."""
    seen = list[tuple[int, int]]()
    forward = TreeTarget._forward

    def watched(self: TreeTarget, tree: Any, *rest: Any) -> Any:
        outputs = forward(self, tree, *rest)
        if self.model is model:
            active = self.cache.active
            seen.append((len(tree.tokens) if active is None else active.num_rows, len(outputs.logits)))
        return outputs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TreeTarget, "_forward", watched)
        yield seen


@pytest.mark.parametrize("row", drafters.ROWS, ids=lambda row: row.name)
def test_answers_stay_and_forwards_shrink(model: Any, row: drafters.Row) -> None:
    ids, mask = prompts(ROWS)
    plain, options = ends(model, ids, mask)
    config = row.add(model, plain[:, ids.shape[1] :]) | {"compile": False}  # making a program runs forwards of its own
    with forwards(model) as seen:
        assert torch.equal(plain, model.generate(ids, speculative=config, **options))
    computed = [count for _, count in seen]
    assert computed[0] == ROWS > computed[-1]
    assert computed == sorted(computed, reverse=True)
    assert all(rows == ROWS for rows, _ in seen)


@pytest.mark.slow
def test_auto_on_kernels(model: Any) -> None:
    ids, mask = prompts(ROWS)
    plain, options = ends(model, ids, mask)
    with forwards(model) as seen:
        found = model.generate(ids, speculative={"method": "auto", "compile": "kernels"}, **options)
    assert torch.equal(plain, found)
    assert seen[-1][1] < ROWS


def test_rows_of_samples(model: Any) -> None:
    """Rows that leave change no draw of the rows that stay: the oracle of each row is its own answer."""
    ids, mask = prompts(1)
    _, options = ends(model, *prompts(ROWS))
    options.update(attention_mask=mask, do_sample=True, num_return_sequences=ROWS, temperature=1.5)

    def drawn(speculative: Any) -> Tensor:
        torch.manual_seed(5)
        found: Tensor = model.generate(ids, speculative=speculative, **options)
        return found

    with forwards(model) as seen:
        first = drawn("prompt_lookup")
    assert seen[-1][1] < ROWS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TreeTarget, "keep_rows", lambda *_: None)
        assert torch.equal(first, drawn("prompt_lookup"))


@pytest.mark.parametrize("needed", ["a returned cache", "scores", "a given cache"])
def test_rows_stay_where_they_are_needed(model: Any, needed: str) -> None:
    from transformers import DynamicCache

    ids, mask = prompts(ROWS)
    plain, options = ends(model, ids, mask)
    if needed == "a given cache":
        options[CACHE_FIELD] = DynamicCache(config=model.config)
    else:
        options |= {"return_dict_in_generate": True, "output_scores": needed == "scores"}
    with forwards(model) as seen:  # eager: making a program runs forwards of two rows
        found = model.generate(ids, speculative={"method": "prompt_lookup", "compile": "none"}, **options)
    assert torch.equal(plain, found if needed == "a given cache" else found.sequences)
    assert {count for _, count in seen} == {ROWS}


def test_rows_do_not_leave_shortly_before_the_end(model: Any) -> None:
    ids, mask = prompts(2)
    options = {"attention_mask": mask, "max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    answers = model.generate(ids, **options)[:, ids.shape[1] :].tolist()
    options["eos_token_id"] = next(token for token in answers[1][4:] if token not in (*answers[0], *answers[1][:4]))
    plain = model.generate(ids, **options)
    with forwards(model) as seen:
        assert torch.equal(plain, model.generate(ids, speculative="token_recycling", **options))
    assert {count for _, count in seen} == {2}


@pytest.mark.parametrize(
    ("count", "active", "order"),
    [(6, [0, 2, 3, 5], [0, 5, 2, 3]), (3, [2], [2]), (3, [0, 1], [0, 1]), (4, [1, 3], [3, 1]),
     (5, [0, 3, 4], [0, 4, 3])],
)  # fmt: skip
def test_the_last_rows_fill_the_gaps(count: int, active: list[int], order: list[int]) -> None:
    assert drop_order(count, active) == order


@pytest.mark.parametrize("name", ["longrope", "dynamic", "phimoe"])
def test_a_row_that_has_ended_counts_for_the_frequencies_of_the_others(name: str) -> None:
    """In plain, the frequencies follow the longest row, also after its end: the short row switches with it."""
    model: Any = SpeculativeGenerationMixin.attach(copy.deepcopy(lengths.build(name)))
    ids = torch.randint(3, zoo.VOCAB_SIZE, (2, 50), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :30] = 0
    ids = ids.masked_fill(mask == 0, 0)
    options: dict[str, Any] = {"attention_mask": mask, "do_sample": False, "pad_token_id": 0}
    plain: Any = copy.deepcopy(lengths.build(name))
    long, short = plain.generate(ids, **options, max_new_tokens=40)[:, 50:].tolist()
    end = next(token for token in long[2:12] if token not in short[:15])  # the long row ends before the limit
    options |= {"max_new_tokens": 40, "eos_token_id": end}
    expected = copy.deepcopy(lengths.build(name)).generate(ids, **options)
    assert expected.shape[1] > lengths.LIMIT + 2
    try:
        got = model.generate(ids, **options, speculative={"method": "prompt_lookup", "num_draft_tokens": 1})
    except UnsupportedGenerationError:
        return
    assert got.tolist() == expected.tolist()
