"""Grammars of logits processors: answers stay plain decoding's, forced text is drafted, forbidden tokens are not."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LogitsProcessor, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

import drafters
import zoo
from hf_specdec import DrafterMismatchError, SpeculativeGenerationMixin
from hf_specdec.drafters import grammar_states
from hf_specdec.drafters.base import Candidate
from hf_specdec.drafters.candidates import merge_sources
from hf_specdec.drafters.eagle import EagleDrafter
from hf_specdec.drafters.grammar import FORCED, LAST, OTHER, GrammarText
from hf_specdec.drafters.grammar_states import FEW, Vocabulary, last_of_few
from hf_specdec.drafters.medusa import MedusaDrafter
from hf_specdec.trees.draft import Budget
from policy import Table
from test_foreign_assistants import byte_level

END = 95
ANY = frozenset(range(zoo.VOCAB_SIZE - 1))


class Steps:
    """A grammar that allows a set of tokens at each position, then the end; a pair stands for text that may go on."""

    def __init__(self, allowed: Sequence[frozenset[int]], position: int = 0) -> None:
        self.allowed, self.position = [*allowed, frozenset([END]), frozenset()], position

    def forced(self) -> list[int]:
        tokens, position = list[int](), self.position
        while len(self.allowed[position]) == 1:
            tokens.append(min(self.allowed[position]))
            position += 1
        return [*tokens, min(self.allowed[position])] if len(self.allowed[position]) == 2 else tokens

    def accept(self, token: int) -> bool:
        accepted = token in self.allowed[self.position]
        self.position += accepted
        return accepted

    def rollback(self, count: int) -> None:
        assert 1 <= count <= self.position
        self.position -= count


class StepsProcessor(LogitsProcessor):  # type: ignore[misc]
    """A processor with a memory: every call takes the last token of each row, in order, or fails."""

    def __init__(self, allowed: Sequence[frozenset[int]]) -> None:
        self.allowed, self.rows = allowed, list[Steps]()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.rows:
            for row, token in zip(self.rows, input_ids[:, -1].tolist(), strict=True):
                assert row.accept(token) or not row.allowed[row.position]
        self.rows = self.rows or [Steps(self.allowed) for _ in input_ids]
        mask = torch.full_like(scores, -torch.inf)
        for row, steps in enumerate(self.rows):
            mask[row, list(steps.allowed[steps.position] or {END})] = 0
        return scores + mask


def of_steps(processor: StepsProcessor, _: Any) -> list[Steps]:
    return [Steps(processor.allowed, row.position) for row in processor.rows]


@pytest.fixture
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(grammar_states.COPIES, f"{__name__}.StepsProcessor", of_steps)


def forced(*tokens: int) -> list[frozenset[int]]:
    return [frozenset([token]) for token in tokens]


RECORD = [*forced(3, 4, 5, 6, 7), ANY, ANY, *forced(8, 9), frozenset([10, 11]), ANY, *forced(12, 13, 14), ANY, ANY,
          frozenset([10, 11]), *forced(3, 4, 5, 6, 7)]  # fmt: skip


# ------------------------------------------------------------------------------------------- one row's grammar


def test_forced_text_is_a_chain_and_its_end_is_what_the_model_wrote_there() -> None:
    usual = dict[int, int]()
    text = GrammarText(Steps([*forced(1, 2), frozenset([3, 4]), ANY, frozenset([3, 4])]), usual)
    assert text.start == ()
    assert text.after(()) == [Candidate(1, FORCED)]
    assert text.after((1,)) == [Candidate(2, FORCED)]
    assert text.after((1, 2)) == [Candidate(3, LAST)]
    assert text.after((1, 2, 3)) == []
    text.extend([1, 2, 4, 50])
    assert usual == {3: 4}
    assert text.after(()) == [Candidate(4, LAST), Candidate(3, OTHER)]
    assert text.after((3,)) == [Candidate(END, LAST)]
    text.extend([9])
    assert text.start is None


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sets(st.integers(0, 3), min_size=1, max_size=3).map(frozenset), min_size=1, max_size=5),
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), max_size=12),
)
def test_any_order_of_visits_finds_the_same_places(allowed: list[frozenset[int]], paths: list[list[int]]) -> None:
    """The state walks from branch to branch; every answer is that of a state that came there directly."""
    text = GrammarText(Steps(allowed), {})
    for path in paths:
        fresh, place = Steps(allowed), text.start
        for token in path:
            assert place is not None
            place = text.follow(place, token)
            if not fresh.accept(token):
                assert place is None
                break
            assert place is not None
            assert [token for token, _ in text.after(place)] == fresh.forced()[:1]


def test_what_the_grammar_forbids_takes_no_node() -> None:
    text = GrammarText(Steps([frozenset([1, 2]), ANY, *forced(5, 6)]), {})
    source = Table({(1,): 0.2, (3,): 0.5, (1, 4): 0.9, (1, 4, 7): 0.9, (3, 4): 0.9})
    tree = merge_sources(0, [source, text], Budget(9, 9, 9))
    paths = [list[int]()]
    for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
        paths.append([*paths[parent], token])
    assert sorted(paths[1:]) == [[1], [1, 4], [1, 4, 5], [1, 4, 5, 6], [1, 4, 5, 6, END]]
    assert tree.path_probs[1] == 0.8  # the grammar's own: 3 has claimed nothing


def test_a_vocabulary_writes_as_its_tokenizer_does() -> None:
    tokenizer = byte_level()
    alphabet = {character: byte for byte, character in bytes_to_unicode().items()}
    names = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    vocabulary = Vocabulary(bytes(map(alphabet.__getitem__, name)) for name in names)
    for text in ("the large model verifies", ' small  "drafts": { "the fox": 1}', "", "lazy" * 40):
        assert vocabulary.encode(text.encode()) == tokenizer.encode(text)
    assert Vocabulary([b"a", b"b", b"ab"]).encode(b"abac ab") == [2, 0]  # c is no token


@pytest.mark.parametrize("count", [0, 1, 2, FEW, FEW + 1])
def test_few_tokens_of_a_mask(count: int) -> None:
    tokens = [31 + 7 * place for place in range(count)]
    bits = torch.zeros(8 * 32, dtype=torch.long)
    bits[tokens] = 1
    words = (bits.view(8, 32) << torch.arange(32)).sum(-1).to(torch.int32)  # the highest bit is the sign
    assert last_of_few(words) == (tokens[-1:] if count <= FEW else [])


# ------------------------------------------------------------------------------------------- answers


def answer(model: Any, processor: Any, rows: int, speculative: Any, **options: Any) -> torch.Tensor:
    torch.manual_seed(1)
    ids = torch.randint(1, 90, (rows, 7))
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        mask[row, :row] = 0
    options = {"do_sample": False, "max_new_tokens": 60, "eos_token_id": END, "pad_token_id": 0, **options}
    found: torch.Tensor = model.generate(
        ids, attention_mask=mask, logits_processor=[processor], speculative=speculative, **options
    )
    return found


METHODS = ("grammar", "auto", "prompt_lookup", "token_recycling", "eagle", "medusa")


@pytest.mark.usefixtures("_known")
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_k": 20}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("method", METHODS)
def test_answers_and_processors_are_plain_decodings(
    llama: Any, method: str, rows: int, options: dict[str, Any]
) -> None:
    """The same tokens for the same seed, and the processor saw the same: a draft never advances its state."""
    llama.add_drafter(EagleDrafter(drafters.random_head(llama)))
    llama.add_drafter(MedusaDrafter(drafters.random_heads(llama)))
    expected, used = StepsProcessor(RECORD), StepsProcessor(RECORD)
    plain = answer(llama, expected, rows, None, **options)
    assert torch.equal(answer(llama, used, rows, method, **options), plain)
    assert [row.position for row in used.rows] == [row.position for row in expected.rows]


@pytest.mark.usefixtures("_known")
def test_forced_text_takes_one_forward_and_a_sampled_assistant_stays_within_the_grammar(llama: Any) -> None:
    answer(llama, StepsProcessor(RECORD), 1, "grammar")
    assert llama.last_speculation.num_generated_tokens == len(RECORD) + 1
    # the first token is the prompt's; then 4 + 1, 1, 2 + 1 + 1, 3 + 1, 1 + 1 + 5 + 1 at best
    assert llama.last_speculation.num_target_forwards - 1 <= 12
    used = StepsProcessor(RECORD)
    ids = answer(llama, used, 1, "draft_model", do_sample=True, assistant_model=drafters.assistant_for(llama, 0))
    assert ids.shape[1] == 7 + len(RECORD) + 1
    assert all(token in allowed for token, allowed in zip(ids[0, 7:].tolist(), used.rows[0].allowed, strict=False))


@pytest.mark.usefixtures("_known")
def test_auto_drafts_nothing_that_the_grammar_forbids(llama: Any) -> None:
    config = {"method": "auto", "trace": True, "adaptive": False}
    answer(llama, StepsProcessor(RECORD), 1, config)
    trace, start = llama.last_speculation.trace, 1
    sources = set[str]()
    for step in trace:
        (row,) = step.rows
        depths = [0]
        for token, parent in zip(row.tokens[1:], row.parents[1:], strict=True):
            depths.append(depths[parent] + 1)
            assert token in Steps(RECORD).allowed[start + depths[-1] - 1]
        sources |= set(row.sources[1:])
        start += len(row.emitted)
    assert "grammar" in sources
    assert "grammar" in llama.last_speculation.control["free_sources"]


def test_without_a_grammar_auto_drafts_as_before_and_the_method_is_refused(llama: Any) -> None:
    answer(llama, StepsProcessor(RECORD), 1, "auto")  # a processor that is not known
    assert llama.last_speculation.control["free_sources"] == ["prompt_lookup", "token_recycling"]
    for speculative in ("grammar", {"method": "hybrid", "methods": ["prompt_lookup", "grammar"]}):
        with pytest.raises(DrafterMismatchError, match=r"'grammar' drafts what the grammar .* Pass one"):
            answer(llama, StepsProcessor(RECORD), 1, speculative)


def test_what_the_model_wrote_can_be_stored(llama: Any) -> None:
    from hf_specdec.drafters.grammar import GrammarDrafter

    drafter = GrammarDrafter()
    drafter.load_state_dict({3: 4})
    state = drafter.state_dict()
    drafter.load_state_dict(None)
    assert (state, drafter.state_dict()) == ({3: 4}, {})


# ------------------------------------------------------------------------------------------- the libraries

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["small", "large"]},
        "legs": {"enum": [2, 4, 10]},
        "owner": {
            "type": "object",
            "properties": {"member": {"type": "boolean"}, "species": {"const": "quick brown fox"}},
            "required": ["member", "species"],
            "additionalProperties": False,
        },
    },
    "required": ["kind", "legs", "owner"],
    "additionalProperties": False,
}


@functools.cache
def speller() -> PreTrainedTokenizerFast:
    return byte_level()


@pytest.fixture
def writer() -> Any:
    """A tiny model whose tokens are those of a byte-level tokenizer."""
    torch.manual_seed(0)
    config = zoo.config_of("llama", {"vocab_size": 320})
    return SpeculativeGenerationMixin.attach(
        zoo.decisive(AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval())
    )


def xgrammar_processor() -> Callable[[], Any]:
    xgrammar = pytest.importorskip("xgrammar")
    from xgrammar.contrib.hf import LogitsProcessor as Processor

    info = xgrammar.TokenizerInfo.from_huggingface(speller(), vocab_size=320)
    grammar = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(SCHEMA), any_whitespace=False)
    return lambda: Processor(grammar)


def outlines_processor(backend: str) -> Callable[[], Any]:
    pytest.importorskip("outlines")
    pytest.importorskip(backend)
    import outlines
    from outlines.backends import get_json_schema_logits_processor

    model = AutoModelForCausalLM.from_config(zoo.config_of("llama", {"vocab_size": 320}))
    wrapped = outlines.from_transformers(model, speller())
    return lambda: get_json_schema_logits_processor(backend, wrapped, json.dumps(SCHEMA))


PROCESSORS = {
    "xgrammar": xgrammar_processor,
    **{f"outlines, {name}": functools.partial(outlines_processor, name)
       for name in ("xgrammar", "llguidance", "outlines_core")},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # the libraries' own
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "temperature": 2.0}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("library", PROCESSORS)
def test_processors_of_the_libraries(writer: Any, library: str, rows: int, options: dict[str, Any]) -> None:
    """The answers of plain decoding with a new processor, in fewer forwards; every answer fits the schema."""
    make, options = PROCESSORS[library](), {"eos_token_id": speller().eos_token_id, "max_new_tokens": 200, **options}
    plain = answer(writer, make(), rows, None, **options)
    ended = [row[7:] for row in plain.tolist() if options["eos_token_id"] in row[7:]]  # others wander in whitespace
    for tokens in ended:
        found = json.loads(speller().decode(tokens, skip_special_tokens=True))
        assert found["owner"]["species"] == "quick brown fox"
    for method in ("grammar", "auto", "prompt_lookup", "token_recycling"):
        assert torch.equal(answer(writer, make(), rows, method, **options), plain), method
        if method == "grammar":
            share = writer.last_speculation.num_target_forwards / (plain.shape[1] - 7)
            assert share < (0.9 if len(ended) == rows else 1), share
