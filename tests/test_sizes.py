"""Sizes that no model has: refused before any work, or harmless, for every method and every drafter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import drafters
import zoo
from hf_specdec.drafters.experimental.early_exit import EarlyExitDrafter
from hf_specdec.drafters.experimental.lookahead import LookaheadDrafter
from hf_specdec.drafters.prompt_lookup import PromptLookupDrafter
from hf_specdec.drafters.token_recycling import TokenRecyclingDrafter
from hf_specdec.errors import DrafterMismatchError, InvalidConfigError, SpeculativeDecodingError

IDS = torch.randint(3, zoo.VOCAB_SIZE, (2, 12), generator=torch.Generator().manual_seed(0))
OPTIONS: dict[str, Any] = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 8, "do_sample": False}
METHODS = [row.name for row in drafters.ROWS if not row.knows_answers and row.name != "eagle_static"]
WIDE = [[child] for child in range(zoo.VOCAB_SIZE + 4)]


@pytest.mark.parametrize("name", METHODS)
def test_more_children_than_tokens_are_refused(llama: Any, name: str) -> None:
    method = drafters.BY_NAME[name].add(llama)["method"]
    for fields in ({"top_k": zoo.VOCAB_SIZE + 1}, {"top_k": 10**9}, {"top_k": 97, "num_draft_tokens": 300}):
        with pytest.raises(InvalidConfigError, match=r"`top_k` (\d+ exceeds the|must be an integer from 1 to 4096)"):
            llama.generate(IDS, speculative={"method": method, **fields}, **OPTIONS)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    "fields",
    [{"top_k": zoo.VOCAB_SIZE, "num_steps": 1}, {"num_draft_tokens": zoo.VOCAB_SIZE + 1, "num_steps": 3},
     {"num_draft_tokens": 2000}, {"tree": WIDE}],
    ids=["all tokens", "a node per token", "2000 nodes", "a wide tree"],
)  # fmt: skip
def test_large_trees_are_drafted_or_refused(llama: Any, name: str, fields: dict[str, Any]) -> None:
    method = drafters.BY_NAME[name].add(llama)["method"]
    plain = llama.generate(IDS, **OPTIONS)
    try:
        answer = llama.generate(IDS, speculative={"method": method, **fields}, **OPTIONS)
    except SpeculativeDecodingError:
        return
    assert torch.equal(plain, answer)


@pytest.mark.parametrize("size", [0, -1, -(10**9), "3", "x", 2.5, True, [4], ()])
def test_chunks_of_no_size_are_refused(llama: Any, size: Any) -> None:
    with pytest.raises(SpeculativeDecodingError, match="`prefill_chunk_size` must be an integer >= 1"):
        llama.generate(IDS, speculative="prompt_lookup", prefill_chunk_size=size, **OPTIONS)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        *((TokenRecyclingDrafter, {name: value}) for name in ("width", "pairs") for value in (0, -1, "x", 2.5, None)),
        *((LookaheadDrafter, {name: value}) for name in ("window", "ngram", "guesses") for value in (0, "x", 2.5)),
        *((EarlyExitDrafter, {"exit_layer": value}) for value in (0, -1, "x", 1.5, True)),
        (EarlyExitDrafter, {"exit_layer": 2, "skipped_layers": (1,)}),
        *((EarlyExitDrafter, {"skipped_layers": value}) for value in ([0], [-1], ["a"], [1.5], 5, "12")),
        *((PromptLookupDrafter, {"corpus": value}) for value in (5, [1, 2, 3], "abc", [[1, "x"]], [[1.5]], [[-4, 5]])),
    ],
)
def test_settings_that_mean_nothing_are_refused(kind: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfigError, match=next(iter(settings))):
        kind(**settings)


def test_a_corpus_of_another_tokenizer_is_refused(llama: Any) -> None:
    with pytest.raises(DrafterMismatchError, match=r"The corpus contains token 96, but .* has only 96 tokens"):
        llama.add_drafter(PromptLookupDrafter(corpus=[[3, 4, 5], [6, zoo.VOCAB_SIZE]]))
    llama.add_drafter(PromptLookupDrafter(corpus=[torch.tensor([3, zoo.VOCAB_SIZE - 1]), (), range(9)]))


def test_a_table_is_no_wider_than_the_vocabulary(llama: Any) -> None:
    llama.add_drafter(TokenRecyclingDrafter(width=1000))
    plain = llama.generate(IDS, **OPTIONS)
    assert torch.equal(plain, llama.generate(IDS, speculative="token_recycling", **OPTIONS))
