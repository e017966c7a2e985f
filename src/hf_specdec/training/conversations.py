"""Tokenized conversations to train on: reading, writing, filtering and holding out.

The loss mask marks the target's answers; heads are not trained on the user's tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_specdec.atomic import whole_file
from hf_specdec.errors import InvalidConfigError
from hf_specdec.records import shortened
from hf_specdec.training.data import (
    Message,
    Row,
    datasets_package,
    mask_of,
    messages_of,
    read_each,
    read_rows,
    rendered,
    tokens_of,
    tools_of,
)


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation as token ids: prompts as the target read them and its answers, with a mask of the answers.

    Args:
        input_ids: Token ids, `[T]`.
        loss_mask: `[T]`, True at answers.

    Raises:
        InvalidConfigError: `input_ids` and `loss_mask` differ in length.
    """

    input_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]

    def __post_init__(self) -> None:
        if len(self.input_ids) != len(self.loss_mask):
            raise InvalidConfigError(
                f"A conversation needs one loss mask entry per token, got {len(self.loss_mask)} for "
                f"{len(self.input_ids)} tokens."
            )

    @classmethod
    def of(cls, prompt: Sequence[int], answer: Sequence[int]) -> Conversation:
        """Create a conversation from the token ids of one prompt and its answer.

        Example: prompt [5, 6], answer [7] has loss mask [False, False, True].
        """
        return cls((*prompt, *answer), (*(False for _ in prompt), *(True for _ in answer)))

    def opening(self, answer_tokens: int) -> Conversation:
        """Return a copy with only the first N tokens of every answer in the loss, cut after the last of them.

        A conversation without answers is not cut.

        Args:
            answer_tokens: N, at least 1.

        Example: prompt [5, 6], answer [7, 8, 9] and N = 2 give [5, 6, 7, 8] with the last two in the loss.
        """
        mask = opening_mask(torch.tensor(self.loss_mask, dtype=torch.bool, device="cpu"), answer_tokens)
        return Conversation(self.input_ids[: len(mask)], tuple(mask.tolist()))


def opening_mask(loss_mask: Tensor, answer_tokens: int) -> Tensor:
    """Keep the first N tokens of every answer in the loss, and cut the mask after the last of them.

    Args:
        loss_mask: `[T]` True at answers.
        answer_tokens: N, at least 1.

    Returns:
        `[T']` True at the first N tokens of every answer, the last of them at T' - 1; all False with
        T' = T without an answer.

    Example: [False, True, True, True, False, True, False] with N = 2 gives [False, True, True, False, False, True].
    """
    count = loss_mask.long().cumsum(0)
    count_before = torch.where(loss_mask, 0, count).cummax(0).values  # [T] answer tokens before the current answer
    mask = loss_mask & (count - count_before <= answer_tokens)
    return mask[: int(mask.nonzero()[-1]) + 1] if mask.any() else mask


def load_rows(source: str | Path, *, split: str = "train") -> Iterable[dict[str, Any]]:
    """Return an iterator over the rows of a source; see `read_rows` for sources and errors."""
    return (row for _, row in read_rows(source, split=split))


def write_parquet(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write rows of a distilled dataset to a parquet file atomically.

    Raises:
        InvalidConfigError: The `datasets` package is missing, or the file cannot be written.
    """
    datasets, parquet = datasets_package(f"Writing {path}")
    message = {"role": datasets.Value("string"), "content": datasets.Value("string")}
    features = datasets.Features({
        "number": datasets.Value("int32"), "source": datasets.Value("string"), "model": datasets.Value("string"),
        "temperature": datasets.Value("float32"), "messages": datasets.List(message),
        "input_ids": datasets.List(datasets.Value("int32")), "loss_mask": datasets.List(datasets.Value("bool")),
        "finish_reason": datasets.Value("string"),
    })  # fmt: skip
    columns = {name: [row[name] for row in rows] for name in features}
    table = datasets.Dataset.from_dict(columns, features=features).data.table
    with whole_file(path) as partial:
        parquet.write_table(table, partial)  # same as Dataset.to_parquet, without a progress bar per file


def read_conversations(*sources: str | Path, tokenizer: Any = None, split: str = "train") -> list[Conversation]:
    """Read conversations to train on, skipping rows without an answer.

    Rows that cannot be read are skipped, too, and logged, unless they are more than 1 % of a source.

    Args:
        *sources: Directories written by `distill`; or files (.jsonl, .jsonl.gz, .json, .parquet) or names of datasets
            whose rows have `input_ids` and `loss_mask`, `prompt_ids` and `response_ids`, or `messages` or ShareGPT's
            `conversations` (every assistant turn is an answer; `system` and `tools` are read, too).
        tokenizer: Tokenizer with a chat template; required for rows with messages.
        split: Split to load if a source is a `datasets` name.

    Raises:
        InvalidConfigError: A source cannot be read, or too many rows: they lack these fields, have invalid values, or
            have messages that cannot be tokenized with this tokenizer or of which its template leaves something out.
    """
    rows = [
        conversation
        for source in sources
        for conversation in read_each(source, lambda row, place: _conversation(row, tokenizer, place), split=split)
    ]
    return [conversation for conversation in rows if any(conversation.loss_mask)]


def _conversation(row: Row, tokenizer: Any, place: str) -> Conversation:
    if "input_ids" in row and "loss_mask" in row:
        return Conversation(tokens_of(row, "input_ids", place), mask_of(row, "loss_mask", place))
    if "prompt_ids" in row and "response_ids" in row:
        return Conversation.of(tokens_of(row, "prompt_ids", place), tokens_of(row, "response_ids", place))
    messages = messages_of(row, place) if tokenizer is not None and tokenizer.chat_template else []
    if messages:
        return _of_messages(messages, tools_of(row, place), tokenizer)
    raise InvalidConfigError(
        f"{place} is not a conversation; it has the fields {shortened(list(row))}.",
        "Expected input_ids and loss_mask, or messages and a tokenizer with a chat template. "
        "`hf-specdec distill` writes such a dataset.",
    )


def _of_messages(messages: Sequence[Message], tools: Sequence[Row] | None, tokenizer: Any) -> Conversation:
    """Tokenize messages with the chat template, up to the last assistant turn.

    An answer is what the template adds for an assistant turn after the generation prompt, up to the end token. A line
    break after it is not the assistant's, nor what the template writes at the end of every conversation (Phi-3:
    `<|endoftext|>`), where another turn could follow. Without an assistant turn the conversation is empty.

    Raises:
        InvalidConfigError: The template rejects the messages, leaves out the tools or a part of an answer, or a later
            turn changes the tokens of earlier ones.
    """
    ids: list[int] = []
    mask: list[bool] = []
    if tools and rendered(tokenizer, messages, tools, answer_next=False) == rendered(
        tokenizer, messages, answer_next=False
    ):
        raise InvalidConfigError("The chat template ignores `tools`.", "Leave out rows with tools.")
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        texts = [
            rendered(tokenizer, messages[:count], tools, answer_next=answer_next)
            for count, answer_next in ((index, False), (index, True), (index + 1, False))
        ]
        _check_whole(texts[0], texts[2], messages[:index], message, tools, tokenizer)
        before, prompt, whole = (list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts)
        closing = before[num_shared(before, prompt) :]  # of every conversation
        if not texts[1].startswith(texts[0]) and whole[-len(closing) :] == closing:
            whole = whole[: -len(closing)]
        if whole[: len(prompt)] != prompt or prompt[: len(ids)] != ids:
            raise InvalidConfigError(
                "The chat template rewrites earlier turns, so the tokens of the answers are unknown.",
                "Give input_ids and loss_mask, as `hf-specdec distill` writes them.",
            )
        end = len(whole)
        while end > len(prompt) and tokenizer.decode(whole[end - 1]).isspace():
            end -= 1
        mask += [False] * (len(prompt) - len(ids)) + [True] * (end - len(prompt)) + [False] * (len(whole) - end)
        ids = whole
    return Conversation(tuple(ids), tuple(mask))


def num_shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of tokens with which both texts begin."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def _check_whole(
    before: str, text: str, earlier: Sequence[Message], message: Message, tools: Sequence[Row] | None, tokenizer: Any
) -> None:
    """Check that everything an assistant turn holds is in the text that the template makes of it.

    Args:
        before, text: What the template makes of the messages before the turn, and with it.
        earlier: The messages before the turn.
        message: The turn.
        tools, tokenizer: See `rendered`.

    Raises:
        InvalidConfigError: A text of the turn is not there (white space is not compared), or leaving out a field with
            another value, such as `tool_calls`, changes nothing.
    """
    turn = "".join(text.removeprefix(before).split())
    for name, value in message.items():
        if name == "role":
            continue
        if isinstance(value, str):
            missing = "".join(value.split()) not in turn
        else:
            less = {key: other for key, other in message.items() if key != name}
            missing = rendered(tokenizer, [*earlier, less], tools, answer_next=False) == text
        if missing:
            raise InvalidConfigError(
                f"The chat template leaves out or changes `{name}` of an answer: {shortened(value)}.",
                "Leave out such rows, or give input_ids and loss_mask, as `hf-specdec distill` writes them.",
            )


def check_tokens(conversations: Iterable[Conversation], vocab_size: int) -> None:
    """Check that every token id is below the size of the target's vocabulary.

    Raises:
        InvalidConfigError: A token id is too large; the message names the first such conversation.
    """
    for number, conversation in enumerate(conversations, start=1):
        if conversation.input_ids and max(conversation.input_ids) >= vocab_size:
            raise InvalidConfigError(
                f"Conversation {number} has the token id {max(conversation.input_ids)}; the target's vocabulary has "
                f"{vocab_size} tokens.",
                "Give data that was tokenized for this target.",
            )


NGRAM_SIZE = 8
"""Tokens per n-gram compared to find near-duplicates."""


def drop_near_duplicates(
    conversations: Sequence[Conversation], max_seen: float, held_out: Sequence[Conversation] = ()
) -> list[Conversation]:
    """Return the conversations except those whose answers mostly repeat themselves or answers of other kept ones.

    Args:
        conversations: Conversations to filter, in order; one without an answer of at least 8 tokens is always kept.
        max_seen: Largest fraction of 8-grams of a kept conversation's answers that may also occur in answers kept
            before, in answers of `held_out`, or earlier in its own answers.
        held_out: Further conversations to compare with; they are not returned.

    Example: the second of two equal conversations with answers of 8 tokens or more is dropped unless `max_seen` is 1.
    """
    kept, seen = [], {ngram for conversation in held_out for ngram in _ngrams(conversation)}
    for conversation in conversations:
        ngrams = _ngrams(conversation)
        unseen = set(ngrams) - seen
        if not ngrams or len(ngrams) - len(unseen) <= max_seen * len(ngrams):
            kept.append(conversation)
            seen |= unseen
    return kept


def _ngrams(conversation: Conversation) -> list[int]:
    """Return the hashes of all n-grams of `NGRAM_SIZE` tokens that lie within answers, in order."""
    ids, mask = conversation.input_ids, conversation.loss_mask
    return [
        hash(ids[start : start + NGRAM_SIZE])
        for start in range(len(ids) - NGRAM_SIZE + 1)
        if all(mask[start : start + NGRAM_SIZE])
    ]


def hold_out(conversations: Sequence[Conversation], count: int) -> tuple[list[Conversation], list[Conversation]]:
    """Split off conversations for evaluation at even intervals, so that they come from all large sources.

    Args:
        conversations: All conversations.
        count: Number to hold out; all conversations if there are fewer.

    Returns:
        The conversations to train on, without copies of held-out ones; and the held-out conversations.

    Example: holding out two of [a, b, c, d, e, f] gives [c, f].
    """
    number = len(conversations)
    count = min(count, number)
    held_out = [conversations[number * (index + 1) // count - 1] for index in range(count)]
    excluded = {conversation.input_ids for conversation in held_out}
    return [conversation for conversation in conversations if conversation.input_ids not in excluded], held_out


def most_frequent_tokens(conversations: Iterable[Conversation], size: int) -> Tensor:
    """Return the ids `[size]` of the most frequent tokens of the answers, in ascending order.

    Of equally frequent tokens the lower ids are chosen. If the answers have fewer distinct tokens, the lowest other
    ids are added: in BPE vocabularies low ids are the most frequent.

    Example: answers [7, 7, 9] with size 3 give [0, 7, 9].
    """
    counts = Counter(
        token
        for conversation in conversations
        for token, answered in zip(conversation.input_ids, conversation.loss_mask, strict=True)
        if answered
    )
    ranked = sorted(counts, key=lambda token: (-counts[token], token))[:size]
    chosen = set(ranked)
    candidate = 0
    while len(chosen) < size:
        chosen.add(candidate)
        candidate += 1
    return torch.tensor(sorted(chosen), device="cpu")
