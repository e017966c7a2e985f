"""Earlier answers as a source of drafts: what is stored, for whom, how long, and that it changes no answer."""

from __future__ import annotations

import copy
import json
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from hf_specdec import (
    AnswerHistory,
    CheckpointFormatError,
    InvalidConfigError,
    SpeculativeConfig,
    SpeculativeGenerationMixin,
    UnsupportedGenerationError,
)
from hf_specdec.config import PER_PROMPT
from hf_specdec.drafters.history import CONTEXT_TOKENS, NAMED, SHARED, AnswerMatches, history_keys
from hf_specdec.drafters.prompt_lookup import NO_MATCH, PromptLookupDrafter, SuffixAutomaton
from hf_specdec.generation import call
from hf_specdec.trees.draft import Budget
from models import prompts

GREEDY = {"max_new_tokens": 24, "do_sample": False}


@pytest.fixture(params=["llama", "gemma3_text", "qwen3_next"])
def model(request: pytest.FixtureRequest) -> Any:
    """Full attention, sliding windows, a recurrent state."""
    return SpeculativeGenerationMixin.attach(copy.deepcopy(zoo.build(request.param)))


@pytest.fixture
def attached() -> Any:
    return SpeculativeGenerationMixin.attach(copy.deepcopy(zoo.build("llama")))


def config(history: Any, **fields: Any) -> dict[str, Any]:
    return {"method": "auto", "methods": ["prompt_lookup"], "history": history, "adaptive": False, **fields}


def followers(history: AnswerHistory, key: str, text: list[int]) -> list[int]:
    """The tokens that a history expects after a text, likeliest first."""
    source = AnswerMatches(history.find(key), text)
    return [candidate.token for candidate in source.after(source.start)]


# ------------------------------------------------------------------------------------------- generating


@pytest.mark.parametrize("rows", [1, 3])
def test_a_second_call_is_drafted_by_the_first_one(model: Any, rows: int) -> None:
    ids, mask = prompts(rows)
    plain = model.generate(ids, attention_mask=mask, **GREEDY)
    steps = []
    for _ in range(2):
        assert torch.equal(plain, model.generate(ids, attention_mask=mask, speculative=config(True), **GREEDY))
        steps.append(model.last_speculation.num_target_forwards)
    assert steps[1] < 0.6 * steps[0]
    assert len(model.answer_history) == 2 * rows
    assert "history" in model.last_speculation.control["free_sources"]


def test_names_do_not_see_each_other(attached: Any) -> None:
    ids, mask = prompts(1)

    def steps(history: Any) -> int:
        attached.generate(ids, attention_mask=mask, speculative=config(history), **GREEDY)
        found: int = attached.last_speculation.num_target_forwards
        return found

    alone = steps("ann")
    for other in ("ben", True, PER_PROMPT):
        assert abs(steps(other) - alone) <= 2  # the trust in prompt lookup has changed
    assert max(steps("ann"), steps("ben"), steps(True), steps(PER_PROMPT)) < 0.6 * alone
    assert attached.answer_history.names == ["ann", "ben"]


def test_one_history_per_prompt(attached: Any) -> None:
    """Rows of the same prompt share one, whatever their padding."""
    ids, mask = prompts(3)
    attached.generate(ids, attention_mask=mask, speculative=config(PER_PROMPT), num_return_sequences=2, **{
        **GREEDY, "do_sample": True})  # fmt: skip
    keys = list(attached.answer_history._answers)
    assert len(keys) == 3
    assert len(attached.answer_history) == 6
    row = int(mask.sum(-1).argmin())
    alone = ids[row : row + 1, mask[row].bool()]
    attached.generate(alone, speculative=config(PER_PROMPT), **GREEDY)
    assert list(attached.answer_history._answers) == keys


def test_one_name_per_row_or_prompt(attached: Any) -> None:
    ids, mask = prompts(2)
    options = {"attention_mask": mask, "num_return_sequences": 2, **GREEDY, "do_sample": True}
    attached.generate(ids, speculative=config(["a", "b"]), **options)
    assert attached.answer_history.names == ["a", "b"]
    attached.generate(ids, speculative=config(["a", "b", "c", "d"]), **options)
    assert attached.answer_history.names == ["a", "b", "c", "d"]
    with pytest.raises(InvalidConfigError, match="3 names, but there are 2 prompts"):
        attached.generate(ids, speculative=config(["a", "b", "c"]), **options)


def test_without_history_nothing_is_stored(attached: Any) -> None:
    ids, mask = prompts(1)
    attached.generate(ids, attention_mask=mask, speculative="auto", **GREEDY)
    attached.generate(ids, attention_mask=mask, speculative=config(False), **GREEDY)
    assert attached._speculation.history is None
    attached.generate(ids, attention_mask=mask, speculative=config("ann"), **GREEDY)
    assert len(copy.deepcopy(attached).answer_history) == 0  # a copy has stored nothing
    assert len(pickle.loads(pickle.dumps(attached._speculation.__getstate__()))) > 0


def test_what_is_stored(attached: Any) -> None:
    """The end of the prompt without padding, and the answer with its last token but without padding."""
    ids, mask = prompts(3)
    plain = attached.generate(ids, attention_mask=mask, **GREEDY)[:, ids.shape[1] :].tolist()
    end = plain[0][10]
    options = {"eos_token_id": end, "pad_token_id": 0, **GREEDY}
    attached.generate(ids, attention_mask=mask, speculative=config("x"), **options)
    stored = list(attached.answer_history._answers["named:x"].texts.values())
    for row, text in enumerate(stored):
        prompt = ids[row, mask[row].bool()].tolist()[-CONTEXT_TOKENS:]
        answer = plain[row][: plain[row].index(end) + 1] if end in plain[row] else plain[row]
        assert list(text) == [*prompt, *answer]


def test_a_warmup_stores_nothing(attached: Any) -> None:
    """The calls of a warmup with device graphs, made here on the CPU."""
    attached.answer_history.add([5, 6, 7], NAMED + "ann")
    before = attached.answer_history
    call._rehearse(attached, config("ann"), Budget(4, 3, 1), 2, 20)
    assert attached.last_speculation is None
    assert attached.answer_history is before
    assert (len(before), before.num_tokens) == (1, 3)


@pytest.mark.parametrize(("fields", "match"), [
    ({"method": "prompt_lookup", "history": True}, "None unless `method` is"),
    ({"method": "auto", "history": ""}, "a name"),
    ({"method": "auto", "history": ["a", 3]}, "one name per row"),
    ({"method": "auto", "history": 5}, "a name"),
])  # fmt: skip
def test_invalid_settings(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidConfigError, match=match):
        SpeculativeConfig(**fields)


def test_what_it_cannot_be_combined_with(attached: Any) -> None:
    ids, _ = prompts(1)
    with pytest.raises(InvalidConfigError, match="cannot be combined with tree"):
        attached.generate(ids, speculative={"method": "auto", "history": True, "tree": "dynamic"}, **GREEDY)
    embeddings = attached.get_input_embeddings()(ids)
    named = {"inputs_embeds": embeddings, "speculative": config("ann"), **GREEDY}
    assert torch.equal(attached.generate(**named), attached.generate(**{**named, "speculative": None}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call.Call, "set_target", lambda *_: pytest.fail("refused too late"))
        with pytest.raises(UnsupportedGenerationError, match="its token ids"):
            attached.generate(**{**named, "speculative": config(PER_PROMPT)})
    attached.add_drafter(PromptLookupDrafter(), "history")
    with pytest.raises(InvalidConfigError, match="a drafter that is called 'history'"):
        attached.generate(ids, speculative=config(True), **GREEDY)


def test_settings_are_stored(attached: Any, tmp_path: Path) -> None:
    for value in (True, "ann", ("a", "b"), PER_PROMPT):
        made = SpeculativeConfig(history=value, draft_window=64)
        assert SpeculativeConfig.from_dict(json.loads(json.dumps(made.to_dict()))) == made
    assert not {"history", "draft_window"} & SpeculativeConfig().to_dict().keys()


def test_the_same_tokens_are_drawn(attached: Any) -> None:
    ids, mask = prompts(1)
    options = {"max_new_tokens": 24, "do_sample": True, "temperature": 0.7, "attention_mask": mask}

    def drawn(speculative: Any) -> Any:
        torch.manual_seed(3)
        return attached.generate(ids, speculative=speculative, **options)

    plain = drawn(None)
    for _ in range(3):
        assert torch.equal(plain, drawn(config(True)))


# ------------------------------------------------------------------------------------------- what followed


def test_counts_are_those_of_the_text() -> None:
    """Of every state near the end of a text; the automaton bounds how many it updates."""
    draw = torch.Generator().manual_seed(0)
    text = torch.randint(3, (60,), generator=draw).tolist()
    automaton = SuffixAutomaton(text)
    for begin in range(60):
        match = NO_MATCH
        for end in range(begin + 1, min(begin + 5, 61)):
            match = automaton.follow(match, text[end - 1])
            wanted = text[begin:end]
            found = sum(text[at : at + len(wanted)] == wanted for at in range(61 - len(wanted)))
            assert automaton.count[match.state] == found


def test_probabilities_come_from_counts() -> None:
    history = AnswerHistory()
    for _ in range(3):
        history.add([1, 2, 3, 4])
    history.add([1, 2, 3, 5])
    source = AnswerMatches(history.find(SHARED), [1, 2, 3])
    four, five = source.after(source.start)
    assert (four.token, five.token) == (4, 5)
    assert four.probability == pytest.approx(3 * five.probability)
    assert 0.5 < four.probability < 0.75
    assert followers(history, SHARED, [7, 2, 3])[0] == 4  # a shorter match
    assert followers(history, SHARED, [9]) == []
    assert followers(history, SHARED, [3, 4]) == []  # no match crosses from one answer into the next
    assert followers(history, "named:other", [1, 2]) == []


def test_a_context_finds_the_first_token() -> None:
    history = AnswerHistory()
    history.add([50, 51], context=list(range(40)))
    assert followers(history, SHARED, [38, 39])[0] == 50
    assert followers(history, SHARED, list(range(40 - CONTEXT_TOKENS - 2, 40 - CONTEXT_TOKENS))) == []


# ------------------------------------------------------------------------------------------- bounds


def test_the_least_recently_used_answers_go() -> None:
    history = AnswerHistory(max_tokens=40)
    for number in range(4):
        history.add([100 + number] * 2 + list(range(8)), NAMED + str(number))
    used = history.find("named:0")
    assert used is not None
    history.use("named:0", used, AnswerMatches(used, [100, 100]).start.state)
    history.add([7] * 10, "named:new")
    assert "0" in history.names
    assert "1" not in history.names
    assert history.num_tokens <= 40


def test_memory_is_bounded() -> None:
    history, draw = AnswerHistory(max_tokens=500), torch.Generator().manual_seed(0)
    for number in range(400):
        size = int(torch.randint(1, 60, (1,), generator=draw))
        history.add(torch.randint(9, (size,), generator=draw).tolist(), NAMED + str(number % 7))
        assert history.num_tokens <= 500
        held = [answers.automaton for answers in history._answers.values()]
        assert sum(automaton.num_tokens for automaton in held) <= 500 + len(history)
        assert sum(len(answers.texts) for answers in history._answers.values()) == len(history)
    assert len(history) > 5


def test_an_answer_longer_than_the_bound_keeps_its_end() -> None:
    history = AnswerHistory(max_tokens=10)
    history.add(list(range(30)))
    assert history.num_tokens == 10
    assert followers(history, SHARED, [21, 22])[0] == 23
    history.add([])
    assert len(history) == 1


def test_clearing(attached: Any) -> None:
    history = attached.answer_history
    assert history is attached.answer_history
    history.add([1, 2], "named:a")
    history.add([1, 2], "named:b")
    history.add([1, 2])
    history.clear("a")
    assert (history.names, len(history), history.num_tokens) == (["b"], 2, 4)
    with pytest.raises(InvalidConfigError, match="No history is called 'a'"):
        history.clear("a")
    history.clear()
    assert (history.names, len(history), history.num_tokens) == ([], 0, 0)
    for wrong in (0, True, 1.5):
        with pytest.raises(InvalidConfigError):
            AnswerHistory(max_tokens=wrong)


def test_threads_add_and_search_at_once() -> None:
    history, failures = AnswerHistory(max_tokens=300), list[BaseException]()

    def work(seed: int) -> None:
        try:
            for number in range(150):
                history.add([seed, number % 5, number % 3, seed], NAMED + str(number % 2))
                followers(history, "named:1", [seed, number % 5])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert history.num_tokens <= 300


# ------------------------------------------------------------------------------------------- files


def test_a_stored_history_is_the_same(tmp_path: Path) -> None:
    history, other = AnswerHistory(vocab_size=90), AnswerHistory(vocab_size=90)
    for number in range(5):
        history.add([number, 2, 3], NAMED + str(number))
    history.save(tmp_path / "history.jsonl")
    other.load(tmp_path / "history.jsonl")
    assert (other.names, other.num_tokens) == (history.names, history.num_tokens)
    assert followers(other, "named:4", [4, 2]) == [3]
    with pytest.raises(InvalidConfigError, match="exists"):
        history.save(tmp_path / "history.jsonl")
    history.save(tmp_path / "history.jsonl", overwrite=True)
    small = AnswerHistory(max_tokens=6, vocab_size=90)
    small.load(tmp_path / "history.jsonl")
    assert small.num_tokens <= 6
    with pytest.raises(CheckpointFormatError, match="this one has 91"):
        AnswerHistory(vocab_size=91).load(tmp_path / "history.jsonl")


HEADER = {"format": "hf_specdec.history", "version": 1, "vocab_size": 90}


@pytest.mark.parametrize("lines", [
    [], [{}], [{**HEADER, "version": 2}], [{**HEADER, "format": "x"}],
    [HEADER, {"key": "shared"}], [HEADER, {"key": "shared", "tokens": [90]}],
    [HEADER, {"key": "shared", "tokens": [-1]}],
    [HEADER, {"key": "shared", "tokens": [True]}], [HEADER, {"key": "shared", "tokens": "12"}],
    [HEADER, {"key": 3, "tokens": [1]}], [HEADER, {"key": "x", "tokens": [1]}],
    [HEADER, {"key": "named:" + "x" * 5000, "tokens": [1]}],
])  # fmt: skip
def test_damaged_files_are_refused_and_add_nothing(lines: list[Any], tmp_path: Path) -> None:
    history = AnswerHistory(vocab_size=90)
    good = {"key": "shared", "tokens": [1, 2]}
    rows = [*lines[:1], good, *lines[1:]] if lines[:1] == [HEADER] else lines
    (tmp_path / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(CheckpointFormatError):
        history.load(tmp_path / "history.jsonl")
    assert len(history) == 0


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text("no json\n")
    for name in ("text.jsonl", "missing.jsonl", "x" * 300):
        with pytest.raises(InvalidConfigError):
            AnswerHistory().load(tmp_path / name)
    for name in ("", "x" * 300):
        with pytest.raises(InvalidConfigError):
            AnswerHistory().save(tmp_path / name)
    for use in (AnswerHistory().save, AnswerHistory().load, AnswerHistory().clear):
        with pytest.raises(InvalidConfigError):
            use(5)  # type: ignore[arg-type]


def test_no_more_of_a_file_is_read_than_fits(tmp_path: Path) -> None:
    """From the end, whose answers were used last; the damaged line before them is never reached."""
    path = tmp_path / "history.jsonl"
    rows = [json.dumps({"key": f"named:{number}", "tokens": [number] * (number % 7 + 1)}) for number in range(90)]
    path.write_text("\n".join([json.dumps(HEADER), "damaged" * 10**6, *rows]) + "\n")
    history = AnswerHistory(max_tokens=30, vocab_size=90)
    history.load(path)
    assert history.names == [str(number) for number in range(83, 90)]
    assert history.num_tokens == 28
    with pytest.raises(InvalidConfigError, match="Line 91 from the end"):
        AnswerHistory(vocab_size=90).load(path)


def test_keys() -> None:
    texts = [[1, 2], [3], [1, 2]]
    assert history_keys(True, texts) == ["shared"] * 3
    assert history_keys("x", texts) == ["named:x"] * 3
    assert history_keys(("a", "b", "c"), texts) == ["named:a", "named:b", "named:c"]
    first, second, third = history_keys(PER_PROMPT, texts)
    assert first == third != second
