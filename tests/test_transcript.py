"""Sampling: the same tokens as plain generate for the same seed, and the same distribution on a whole model."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    EosTokenCriteria,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    MaxLengthCriteria,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
)

import zoo
from hf_specdec import SpeculativeGenerationMixin
from hf_specdec.acceptance.accepted import cut_rows
from hf_specdec.acceptance.processors import of_row
from hf_specdec.acceptance.transcript import Transcript
from reference import OracleDrafter
from zoo import IDS

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"temperature": 1.0, "top_p": 0.9, "top_k": 0},
        {"temperature": 1.3, "top_k": 20},
        {"temperature": 0.9, "min_p": 0.05, "repetition_penalty": 1.2, "eos_token_id": [5, 6, 7, 8, 9, 10]},
        {"typical_p": 0.8},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_the_same_seed_gives_plains_tokens(name: str, options: dict[str, Any], attach: Any) -> None:
    model = attach(name)
    accepted = 0.0
    for seed in range(6):
        torch.manual_seed(seed)
        plain = model.generate(IDS, max_new_tokens=24, do_sample=True, **options)
        state = torch.get_rng_state()
        for method in ("oracle", "prompt_lookup"):
            model.add_drafter(OracleDrafter(plain[:, 20:], "sometimes", zoo.VOCAB_SIZE, seed))
            torch.manual_seed(seed)
            speculative = model.generate(IDS, max_new_tokens=24, do_sample=True, speculative=method, **options)
            assert torch.equal(plain, speculative)
            # and what is drawn next is the same, too
            assert torch.equal(state, torch.get_rng_state())
            accepted += model.last_speculation.mean_accepted_length - 1
    assert accepted > 1


def test_a_whole_model_samples_its_exact_distribution() -> None:
    """Three tokens of a 5-word model through whole generations, against the product of its conditionals."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=5, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=1, pad_token_id=0, eos_token_id=None)  # fmt: skip
    model: Any = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.dim() > 1 else 1)
    model.generation_config.eos_token_id = None
    SpeculativeGenerationMixin.attach(model)
    prompt = [1, 2, 3]
    texts = torch.tensor([[*prompt, a, b, c] for a in range(5) for b in range(5) for c in range(5)])
    with torch.no_grad():
        logits = model(input_ids=texts).logits.double() / 0.8
    log_probs = logits.log_softmax(-1)[:, 2:5].gather(-1, texts[:, 3:, None]).sum((1, 2))
    exact = {tuple(text[3:].tolist()): float(p) for text, p in zip(texts, log_probs.exp(), strict=True)}
    assert sum(exact.values()) == pytest.approx(1)
    # 40 prompts at once and drafts that are often right: rows go different ways through their trees
    rows, rounds = 40, 60
    likely = max(exact, key=exact.__getitem__)
    model.add_drafter(OracleDrafter(torch.tensor([likely] * rows), "sometimes", 5))
    counts: Counter[tuple[int, ...]] = Counter()
    torch.manual_seed(1)
    for _ in range(rounds):
        out = model.generate(torch.tensor([prompt] * rows), max_new_tokens=3, do_sample=True, temperature=0.8,
                             top_k=0, speculative="oracle")  # fmt: skip
        counts.update(tuple(row) for row in out[:, 3:].tolist())
    total = rows * rounds
    # pool what is too rare for chi-square
    common = {key: p for key, p in exact.items() if total * p >= 5}
    rest, seen = 1 - sum(common.values()), total - sum(counts[key] for key in common)
    chi_square = sum((counts[key] - total * p) ** 2 / (total * p) for key, p in common.items())
    chi_square += (seen - total * rest) ** 2 / (total * rest) if rest > 1e-9 else 0
    degrees = len(common)
    assert chi_square < degrees + 3.1 * (2 * degrees) ** 0.5 + 4, (chi_square, degrees)


# ------------------------------------------------------------------------------------------------- text


class Seen:
    """A criterion that remembers the texts it was shown, and ends rows whose last token is 9."""

    def __init__(self) -> None:
        self.texts: list[list[list[int]]] = []

    def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.texts.append(ids.tolist())
        return ids[:, -1] == 9


def text_of(*prompts: list[int], rules: Any = (), processors: Any = (), **options: Any) -> Transcript:
    options = {"max_length": 99, "do_sample": False, **options}
    return Transcript(torch.tensor(prompts), LogitsProcessorList(processors), StoppingCriteriaList(rules), **options)


def test_criteria_see_the_exact_text_however_long_it_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_specdec.acceptance.transcript.RESERVED_TOKENS", 2)
    seen = Seen()
    text = text_of([4, 3], [6, 5], rules=[seen])
    for token in range(10, 20):
        assert not text.record(0, token)
    assert seen.texts == [[[4, 3, *range(10, token + 1)]] for token in range(10, 20)]
    assert text.record(1, 9)
    assert seen.texts[-1] == [[6, 5, 9]]
    assert text.finished == [False, True]
    assert text.sequences().tolist() == [[4, 3, *range(10, 20)], [6, 5, 9, *[0] * 9]]


class NotAgain:
    """A processor that forbids what the text holds."""

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.scatter(1, ids, -torch.inf)


@pytest.mark.parametrize("lockstep", [False, True])
def test_processors_see_the_text_and_the_assumed_path(lockstep: bool) -> None:
    text, logits = text_of([0, 1], [0, 2], processors=[NotAgain()], lockstep=lockstep), torch.arange(7.0).flip(0)
    assert text.begin(logits.expand(2, -1)).tolist() == [2, 1]
    assert text.new_tokens == [[2], [1]]
    for path, forbidden in (((), [0, 1, 2]), ((4, 6), [0, 1, 2, 4, 6])):
        scores = text.row_scores(1, logits, path)
        assert scores.isinf().nonzero()[:, 0].tolist() == forbidden
        assert scores[3] == logits[3]
    assert text.draw(text.column_scores(logits.expand(2, -1))).tolist() == [3, 3]
    assert text.new_tokens == [[2], [1]]


def test_in_lockstep_criteria_see_whole_columns_and_all_of_them_are_asked() -> None:
    first, second = Seen(), Seen()
    text = text_of([4, 3], [6, 5], rules=[first, second, EosTokenCriteria([8])], lockstep=True, pad_token_id=7)
    assert text.record_column([1, 9]) == [1, 9]
    assert text.padded_rows == [1]
    assert text.record_column([8, 2]) == [8, 7]
    assert text.finished == [True, True]
    assert text.num_generated == [2, 1]
    assert first.texts == second.texts == [[[4, 3, 1], [6, 5, 9]], [[4, 3, 1, 8], [6, 5, 9, 7]]]


def test_rows_that_no_criterion_knows_an_end_of_are_not_padded() -> None:
    text = text_of([4, 3], [6, 5], rules=[Seen()], lockstep=True)
    text.record_column([1, 9])
    assert text.finished == [False, True]
    assert text.padded_rows == []
    assert text.record_column([2, 2]) == [2, 2]


def test_what_remains_is_that_of_the_row_with_the_longest_way_to_go() -> None:
    text = text_of([4, 3], [6, 5], rules=[MaxLengthCriteria(7), EosTokenCriteria([8])], max_length=50)
    assert text.num_remaining == 5
    for token in (1, 2, 1):
        text.record(0, token)
    text.record(1, 1)
    assert text.num_remaining == 4
    text.record(1, 8)
    assert text.num_remaining == 2
    assert not text.record(0, 1)
    assert text.record(0, 1)
    assert text.num_remaining <= 0


def test_columns_are_streamed_when_every_row_that_goes_on_has_reached_them() -> None:
    put: list[list[int]] = []
    streamer: Any = SimpleNamespace(put=lambda tokens: put.append(tokens.tolist()))
    text = text_of([4, 3], [6, 5], rules=[EosTokenCriteria([8])], pad_token_id=7)
    for row, token in ((0, 1), (0, 2), (1, 3)):
        text.record(row, token)
        text.stream(streamer)
    assert put == [[1, 3]]
    text.record(1, 8)
    text.stream(streamer)
    assert put == [[1, 3], [2, 8]]
    text.record(0, 5)
    text.stream(streamer)
    text.stream(None)
    assert put == [[1, 3], [2, 8], [5, 7]]
    text.record(0, 8)
    text.stream(streamer)
    assert put == [[1, 3], [2, 8], [5, 7], [8, 7]]


# ------------------------------------------------------------------------------------------------- on the device


def test_the_device_decides_where_nobody_on_the_host_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert text_of([4, 3]).decides_on(GPU)
    assert not text_of([4, 3]).decides_on(CPU)
    assert text_of([4, 3], processors=[TemperatureLogitsWarper(0.5)]).decides_on(GPU)
    for options in (
        {"keep_scores": True},
        {"keep_logits": True},
        {"rules": [Seen()]},
        {"processors": [RepetitionPenaltyLogitsProcessor(1.1)]},
    ):
        assert not text_of([4, 3], **options).decides_on(GPU)
    for generator, decides in ((None, False), (torch.Generator(), True)):
        monkeypatch.setattr("hf_specdec.acceptance.transcript.generator_of", lambda _device, found=generator: found)
        assert text_of([4, 3], do_sample=True).decides_on(GPU) is decides
        assert text_of([4, 3]).decides_on(GPU)


@pytest.mark.parametrize(
    ("lockstep", "kept", "remaining"), [(False, [2, 2, 0, 1], [3, 0, 0, 0]), (True, [1, 1, 1, 1], [4, 1, 0, 0])]
)
def test_what_is_left_of_each_row_is_counted_where_tokens_are_chosen(
    lockstep: bool, kept: list[int], remaining: list[int]
) -> None:
    tokens = torch.tensor([[1, 2, 9], [1, 2, 3], [1, 2, 3], [9, 2, 8]])
    left, chosen, eos = torch.tensor([5, 2, 0, 4]), torch.tensor([2, 3, 3, 3]), torch.tensor([8, 9])
    found = cut_rows(tokens, chosen, left, eos, lockstep=lockstep)
    assert [part.tolist() for part in found] == [kept, remaining]
    endless = cut_rows(tokens[:2], chosen[:2], torch.tensor([5, 3]), None, lockstep=False)
    assert [part.tolist() for part in endless] == [[2, 3], [3, 0]]


def test_processors_that_know_rows_by_number_are_told_which_row_it_is() -> None:
    asked: list[int] = []

    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        asked.append(row)
        return [row]

    (prefix,) = of_row(LogitsProcessorList([PrefixConstrainedLogitsProcessor(allowed, num_beams=1)]), 1)
    assert prefix(torch.tensor([[1, 2]]), torch.zeros(1, 3))[0].tolist() == [-torch.inf, 0.0, -torch.inf]
    assert asked == [1]
    warper = TemperatureLogitsWarper(0.5)
    assert of_row(LogitsProcessorList([warper]), 1) == [warper]


def test_the_ignored_prompt_of_a_penalty_is_that_of_its_row() -> None:
    try:
        penalty = RepetitionPenaltyLogitsProcessor(2.0, torch.tensor([0, 2]))
    except ValueError:
        pytest.skip("this version of transformers has one length for all rows")
    (own,) = of_row(LogitsProcessorList([penalty]), 1)
    assert own.prompt_ignore_length.tolist() == [2]
