"""Assistants that do not have the target's vocabulary: fewer rows, or another tokenizer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import zoo
from assistants import CRITICAL, Spied, chi_square, of_four_tokens
from hf_specdec import (
    DrafterMismatchError,
    InvalidConfigError,
    SpeculativeGenerationMixin,
)
from hf_specdec.drafters.draft_model import DraftModelDrafter
from hf_specdec.drafters.pard import PardDrafter
from hf_specdec.drafters.token_translation import TokenTranslation, translation_between

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "a small model drafts for a large model",
    "the large model verifies what the small model drafts",
    "naïve café, 12345 tokens and more",
]
PROMPT = "the small fox drafts"
TREE = {"method": "draft_model", "top_k": 3, "num_steps": 3, "num_draft_tokens": 10, "adaptive": False}
CHAIN = {"method": "draft_model", "num_steps": 4, "adaptive": False}


def byte_level(size: int = 320) -> PreTrainedTokenizerFast:
    """Byte-level BPE as GPT-2's; its text has no beginning token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<|end|>", "<|turn|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")


def sentencepiece() -> PreTrainedTokenizerFast:
    """A SentencePiece-like BPE: "▁" for spaces, byte tokens for what it cannot spell, `<s>` before every text."""
    special = ["<unk>", "<s>", "</s>", "<|turn|>"]
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz,"]
    pairs = [("t", "h"), ("th", "e"), ("▁", "the"), ("s", "m"), ("sm", "al"), ("a", "l"), ("smal", "l"),
             ("▁", "small"), ("f", "o"), ("fo", "x"), ("▁", "fox"), ("m", "o"), ("d", "r"), ("▁", "dr")]  # fmt: skip
    pieces += [left + right for left, right in pairs]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs, byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.encode = lambda text, add_special_tokens=True: [  # type: ignore[method-assign,misc]
        *([1] if add_special_tokens else []), *tokenizer.encode(text, add_special_tokens=False).ids
    ]  # fmt: skip
    return fast


def words(names: str, eos: str | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer of whole words of one letter."""
    vocab = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocab, unk_token=names[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos)


def llama(vocab_size: int, seed: int = 0, layers: int = 2) -> Any:
    """A tiny Llama that is fairly sure of its choices and does not end its answers."""
    config = copy.deepcopy(zoo.build("llama").config)
    config.vocab_size, config.num_hidden_layers = vocab_size, layers
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def reordered(model: Any, order: list[int]) -> Any:
    """A copy whose token i is the model's token `order[i]`, or a new one if that is -1."""
    other = llama(len(order), seed=5)
    state = {name: value for name, value in model.state_dict().items() if "embed_tokens" not in name}
    other.load_state_dict({name: value for name, value in state.items() if "lm_head" not in name}, strict=False)
    known = torch.tensor(order)
    with torch.no_grad():
        for new, old in ((other.lm_head, model.lm_head), (other.model.embed_tokens, model.model.embed_tokens)):
            new.weight.copy_(torch.where((known >= 0)[:, None], old.weight[known.clamp(min=0)], 0.0))
    return other


def prompts(tokenizer: Any, batch_size: int) -> dict[str, Tensor]:
    """Left-padded prompts of different lengths."""
    texts = [tokenizer.encode(text) for text in (PROMPT, "naïve dog 12", CORPUS[1])][:batch_size]
    width = max(map(len, texts))
    return {
        "input_ids": torch.tensor([[0] * (width - len(ids)) + ids for ids in texts]),
        "attention_mask": torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in texts]),
    }


def generate(model: Any, inputs: dict[str, Tensor], **options: Any) -> Tensor:
    answer: Tensor = model.generate(**inputs, **{"max_new_tokens": 24, "do_sample": False, **options})
    return answer


def translation(tokenizer: Any, assistant_tokenizer: Any) -> TokenTranslation:
    found = translation_between(tokenizer, assistant_tokenizer, len(tokenizer), len(assistant_tokenizer))
    assert found is not None
    return found


# ------------------------------------------------------------------------------------------------- padding rows


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("kind", [DraftModelDrafter, PardDrafter])
def test_an_assistant_with_fewer_padding_rows(kind: Any, sample: bool) -> None:
    """Prompt and answer contain ids that the assistant does not embed; it gives them probability 0."""
    model, assistant = SpeculativeGenerationMixin.attach(llama(96)), llama(90, seed=0)
    assistant.load_state_dict(
        {name: value[:90] if value.shape[0] == 96 else value for name, value in model.state_dict().items()}
    )
    inputs = {"input_ids": torch.tensor([[95, 3, 94, 5], [0, 0, 93, 7]])}
    inputs["attention_mask"] = (inputs["input_ids"] > 0).long()
    with torch.no_grad():
        model.lm_head.weight[90:] *= 1.5  # so that it emits them
    if kind is PardDrafter:
        assistant.config.pard_token = 89
        model.add_drafter(PardDrafter(assistant))
        configs: list[Any] = ["pard", {"method": "pard", "top_k": 90, "num_steps": 2}]
    else:
        drafter = model.add_drafter(Spied(assistant, sample=sample))
        configs = ["draft_model"] if sample else [CHAIN, TREE, {**TREE, "top_k": 90}]
    plain = generate(model, inputs)
    assert (plain[:, 4:] >= 90).any()
    for config in configs:
        assert torch.equal(plain, generate(model, inputs, speculative=config))
    generate(model, inputs, do_sample=True, speculative=configs[0])
    if sample and kind is DraftModelDrafter:
        probs = drafter.seen[-1][1].tree.draft_probs
        assert probs.shape[-1] == 96
        assert (probs[..., 90:] == 0).all()


def test_with_the_same_tokenizer_any_number_of_rows_may_be_missing() -> None:
    tokenizer = byte_level()
    model = SpeculativeGenerationMixin.attach(llama(2000))
    same = DraftModelDrafter(llama(len(tokenizer)), tokenizer=tokenizer, assistant_tokenizer=copy.deepcopy(tokenizer))
    model.add_drafter(same)
    assert same.translation(model) is None
    fewer = DraftModelDrafter(llama(len(tokenizer) - 1), tokenizer=tokenizer, assistant_tokenizer=tokenizer)
    model.add_drafter(fewer)
    found = fewer.translation(model)  # one token is missing, so it is spelled in others
    assert found is not None
    assert len(found.shared) == len(tokenizer) - 1
    inputs = prompts(tokenizer, 3)
    assert torch.equal(generate(model, inputs), generate(model, inputs, speculative=TREE))


# ------------------------------------------------------------------------------------------------- translation


def test_tokens_are_shared_by_the_text_that_they_stand_for() -> None:
    ours, theirs = byte_level(), sentencepiece()
    found = translation(ours, theirs)
    names = {
        (ours.convert_ids_to_tokens(left), theirs.convert_ids_to_tokens(right))
        for left, right in found.shared.tolist()
    }
    assert {("Ġthe", "▁the"), ("Ġ", "▁"), ("a", "a")} <= names
    assert {("Ċ", "<0x0A>"), ("Ã", "<0xC3>"), ("<|end|>", "</s>"), ("<|turn|>", "<|turn|>")} <= names
    assert ("a", "<0x61>") not in names  # a letter is better than the byte
    lefts, rights = zip(*found.shared.tolist(), strict=True)
    assert len(set(lefts)) == len(set(rights)) == len(lefts)
    assert found.share == len(lefts) / len(ours)
    back = translation(theirs, ours)
    assert sorted(map(tuple, back.shared.flip(-1).tolist())) == sorted(map(tuple, found.shared.tolist()))
    assert translation(ours, theirs) is found  # made once


def test_text_is_the_same_in_both() -> None:
    ours, theirs = byte_level(), sentencepiece()
    text = "the small naïve café fox 123\n  drafts 😀"
    found, back = translation(ours, theirs), translation(theirs, ours)
    assert theirs.decode(found.translated(ours.encode(text))) == text
    assert ours.decode(back.translated(theirs.encode(text, add_special_tokens=False))) == text
    prompt = found.translated_prompt(ours.encode(text))
    assert prompt[0] == theirs.bos_token_id
    assert found.translated_prompt([]) == [theirs.bos_token_id]
    begun = back.translated_prompt(theirs.encode(text))
    assert ours.decode(begun) == text  # the beginning token is left out
    assert back.translated_prompt([theirs.bos_token_id]) == [ours.eos_token_id]  # but a prompt has one token
    assert found.translated([9999]) == []
    assert theirs.decode(found.translated([ours.convert_tokens_to_ids("<|turn|>")])) == "<|turn|>"


# ------------------------------------------------------------------------------------------------- the answer


@pytest.mark.parametrize(
    ("config", "batch_size"), [(CHAIN, 1), (TREE, 1), (CHAIN, 3), (TREE, 3), ("auto", 3), ("hybrid", 1)], ids=str
)
@pytest.mark.parametrize("swap", [False, True])
def test_the_plain_answer(config: Any, batch_size: int, swap: bool) -> None:
    """Byte-level target with a SentencePiece assistant, and the reverse."""
    tokenizer, other = (sentencepiece(), byte_level()) if swap else (byte_level(), sentencepiece())
    model, assistant = SpeculativeGenerationMixin.attach(llama(len(tokenizer) + 7)), llama(len(other), seed=1)
    inputs, given = prompts(tokenizer, batch_size), {"tokenizer": tokenizer, "assistant_tokenizer": other}
    plain = generate(model, inputs)
    assert torch.equal(plain, generate(model, inputs, assistant_model=assistant, speculative=config, **given))
    assert torch.equal(plain, generate(model, inputs))
    assert model.drafters == {}


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("config", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_copy_that_numbers_its_tokens_otherwise_is_always_right(batch_size: int, config: Any) -> None:
    names = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOP"
    order = torch.randperm(len(names), generator=torch.Generator().manual_seed(0)).tolist()
    tokenizer, other = words(names), words("".join(names[index] for index in order))
    model = SpeculativeGenerationMixin.attach(llama(len(names)))
    assistant = reordered(model, order)
    inputs = {"input_ids": torch.tensor([[1, 5, 9, 2], [0, 0, 3, 4], [0, 7, 7, 8]][:batch_size])}
    inputs["attention_mask"] = (inputs["input_ids"] > 0).long()
    num_steps = config["num_steps"]
    given = {"tokenizer": tokenizer, "assistant_tokenizer": other, "max_new_tokens": 1 + 4 * (num_steps + 1)}
    given = {**given, "speculative": config}
    plain = generate(model, inputs, max_new_tokens=given["max_new_tokens"])
    assert torch.equal(plain, generate(model, inputs, assistant_model=assistant, **given))
    tau = model.last_speculation.mean_accepted_length
    assert tau == num_steps + 1 if config is CHAIN else tau > num_steps + 0.5  # a full tree may lack its best path
    # without some letters it is right until one of them is due
    fewer = words("".join(names[index] for index in order if index % 5))
    part = reordered(model, [index for index in order if index % 5])
    given["assistant_tokenizer"] = fewer
    assert torch.equal(plain, generate(model, inputs, assistant_model=part, **given))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_next", "gemma3_text"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_other_architectures(name: str, batch_size: int) -> None:
    """A recurrent assistant reads row by row, because rows get different numbers of its tokens."""
    tokenizer, other = byte_level(), sentencepiece()
    config = copy.deepcopy(zoo.build(name).config)
    config.vocab_size = len(other)
    torch.manual_seed(0)
    assistant = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model, inputs = SpeculativeGenerationMixin.attach(llama(len(tokenizer))), prompts(tokenizer, batch_size)
    model.add_drafter(DraftModelDrafter(assistant, tokenizer=tokenizer, assistant_tokenizer=other))
    plain = generate(model, inputs)
    assert torch.equal(plain, generate(model, inputs, speculative=TREE))
    # in lockstep, rows emit equally many tokens, but not of the assistant's
    scores = {"output_scores": True, "return_dict_in_generate": True}
    answer: Any = generate(model, inputs, speculative=CHAIN, **scores)
    assert torch.equal(plain, answer.sequences)


@pytest.mark.parametrize("config", ["pard", {"method": "pard", "top_k": 2, "num_steps": 3}], ids=str)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_pard(config: Any, batch_size: int) -> None:
    tokenizer, other = byte_level(), sentencepiece()
    model, assistant = SpeculativeGenerationMixin.attach(llama(len(tokenizer))), llama(len(other), seed=1)
    inputs = prompts(tokenizer, batch_size)
    plain = generate(model, inputs)
    for mask in (0, int(other.convert_tokens_to_ids("a"))):  # not shared, shared
        assistant.config.pard_token = mask
        given = {"tokenizer": tokenizer, "assistant_tokenizer": other, "assistant_model": assistant}
        assert torch.equal(plain, generate(model, inputs, speculative=config, **given))
        assert torch.equal(plain, generate(model, inputs, speculative="auto", **given))


@pytest.mark.slow
def test_tokens_without_any_text_for_the_assistant() -> None:
    """The assistant knows none of the emitted tokens: it reads nothing new, and drafts after the same text."""
    tokenizer, other = words("abcdefgh"), words("abxyz")
    model = SpeculativeGenerationMixin.attach(llama(8))
    with torch.no_grad():
        model.lm_head.weight[:2] *= -1
        model.lm_head.weight[2:] *= 3
    assistant = llama(5, seed=3)
    assistant.config.pard_token = 4
    for batch_size in (1, 3):
        inputs = {"input_ids": torch.tensor([[2, 3, 4], [5, 6, 7], [0, 1, 2]])[:batch_size]}
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        plain = generate(model, inputs)
        for config in (CHAIN, TREE, "pard"):
            found = generate(
                model, inputs, assistant_model=assistant, tokenizer=tokenizer, assistant_tokenizer=other,
                speculative=config,
            )  # fmt: skip
            assert torch.equal(plain, found)


# ------------------------------------------------------------------------------------------------- sampling


@pytest.mark.slow
@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_sampled_chains_are_exact(acceptance: str) -> None:
    """The assistant knows three of the target's four tokens, in another order, and two that the target lacks."""
    model: Any = SpeculativeGenerationMixin.attach(of_four_tokens(0))
    assistant = llama(5, seed=1, layers=1)
    with torch.no_grad():
        assistant.lm_head.weight.mul_(0.1)
    tokenizers = {"tokenizer": words("abcd"), "assistant_tokenizer": words("xcyba")}
    model.add_drafter(DraftModelDrafter(assistant, sample=True, **tokenizers))
    assert chi_square(model, acceptance) < CRITICAL


@pytest.mark.slow
def test_a_call_that_samples_draws_its_chain() -> None:
    tokenizer, other = byte_level(), sentencepiece()
    model, assistant = SpeculativeGenerationMixin.attach(llama(len(tokenizer))), llama(len(other), seed=1)
    given = {"tokenizer": tokenizer, "assistant_tokenizer": other, "assistant_model": assistant}
    for batch_size in (1, 3):
        inputs = prompts(tokenizer, batch_size)
        generate(model, inputs, do_sample=True, speculative="draft_model", **given)
    made = model.__dict__["_speculation"].made["draft_model"]
    assert made.sample
    generate(model, inputs, do_sample=True, speculative="draft_model", **given)
    assert model.__dict__["_speculation"].made["draft_model"] is made
    drawn = []
    for speculative in ({}, {"speculative": TREE, **given}):  # the likeliest drafts: a seed gives the same tokens
        torch.manual_seed(3)
        drawn.append(generate(model, prompts(tokenizer, 1), do_sample=True, **speculative))
    assert torch.equal(*drawn)


# ------------------------------------------------------------------------------------------------- arguments


def test_arguments_that_do_not_fit_together() -> None:
    tokenizer, other = byte_level(), sentencepiece()
    model, assistant = SpeculativeGenerationMixin.attach(llama(len(tokenizer))), llama(len(other), seed=1)
    inputs = prompts(tokenizer, 1)
    both, call = {"tokenizer": tokenizer, "assistant_tokenizer": other}, {"speculative": "draft_model"}
    with pytest.raises(InvalidConfigError, match="`assistant_tokenizer` is given, but `tokenizer`"):
        generate(model, inputs, assistant_model=assistant, assistant_tokenizer=other, **call)
    for speculative in ("draft_model", "auto", "prompt_lookup"):
        with pytest.raises(InvalidConfigError, match="`assistant_tokenizer` is given without `assistant_model`"):
            generate(model, inputs, speculative=speculative, **both)
    model.generation_config.speculative = "auto"
    with pytest.raises(InvalidConfigError, match="`assistant_tokenizer` is given without `assistant_model`"):
        generate(model, inputs, **both)
    model.generation_config.speculative = None
    for one in both:
        with pytest.raises(InvalidConfigError, match=f"Only `{one}` is given"):
            DraftModelDrafter(assistant, **{one: both[one]})
    # stop strings need the tokenizer, and an assistant with the same one needs no other
    same = llama(len(tokenizer), seed=2)
    stops = {"stop_strings": ["fox"], "tokenizer": tokenizer}
    plain = generate(model, inputs, **stops)
    assert torch.equal(plain, generate(model, inputs, assistant_model=same, **stops, **call))
    assert torch.equal(plain, generate(model, inputs, assistant_model=assistant, **{**stops, **both}, **call))


def test_without_speculative_everything_is_as_in_transformers() -> None:
    tokenizer, other = byte_level(), sentencepiece()
    model, assistant = SpeculativeGenerationMixin.attach(llama(len(tokenizer))), llama(len(other), seed=1)
    inputs = prompts(tokenizer, 1)
    given = {"tokenizer": tokenizer, "assistant_tokenizer": other, "assistant_model": assistant}
    assert model.config.vocab_size != assistant.config.vocab_size
    with pytest.raises(ValueError, match="have different tokenizers"):
        generate(model, inputs, assistant_model=assistant)
    same = llama(len(tokenizer), seed=2)
    with pytest.raises(ValueError, match="`assistant_tokenizer` is not required"):
        generate(model, inputs, **{**given, "assistant_model": same})
    plain = generate(model, inputs)
    # transformers demands that the sizes differ; this package looks at the tokenizers themselves
    found = generate(model, inputs, **{**given, "assistant_model": same, "assistant_tokenizer": tokenizer},
                     speculative="draft_model")  # fmt: skip
    assert torch.equal(plain, found)


def test_too_few_shared_tokens() -> None:
    tokenizer, other = byte_level(600), words("ab" + "".join(chr(0x4E00 + index) for index in range(300)))
    model = SpeculativeGenerationMixin.attach(llama(len(tokenizer)))
    forwards = list[int]()
    model.register_forward_pre_hook(lambda *_: forwards.append(1))
    generate(model, prompts(tokenizer, 1), speculative="prompt_lookup")  # probes the model
    forwards.clear()
    with pytest.raises(
        DrafterMismatchError, match=r"share 2 tokens, 0\.\d% of the tokens of Llama.*Use another assis"
    ):
        generate(
            model, prompts(tokenizer, 1), assistant_model=llama(len(other)), tokenizer=tokenizer,
            assistant_tokenizer=other, speculative="draft_model",
        )  # fmt: skip
    assert forwards == []
