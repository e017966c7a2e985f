"""Tokenised conversations: what `distill` writes and every trainer reads.

The loss mask says which tokens are the target's own answers: a head learns nothing from what users say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_specdec.atomic import whole_file
from hf_specdec.errors import InvalidConfigError
from hf_specdec.records import shortened
from hf_specdec.training.data import Row, datasets_package, mask_of, read_rows, tokens_of, turns_of


@dataclass(frozen=True, slots=True)
class Conversation:
    """Prompt and answer, or several of both, as the target read and wrote them."""

    input_ids: tuple[int, ...]  # [T]
    loss_mask: tuple[bool, ...]  # [T] True at answers

    def __post_init__(self) -> None:
        if len(self.input_ids) != len(self.loss_mask):
            raise InvalidConfigError(
                f"A conversation needs one loss mask entry per token, got {len(self.loss_mask)} for "
                f"{len(self.input_ids)} tokens."
            )

    @classmethod
    def of(cls, prompt: Sequence[int], answer: Sequence[int]) -> Conversation:
        """One prompt with its answer.

        Example: prompt [5, 6], answer [7] has loss mask [False, False, True].
        """
        return cls((*prompt, *answer), (*(False for _ in prompt), *(True for _ in answer)))

    def opening(self, answer_tokens: int) -> Conversation:
        """The same up to the first so many tokens of the last answer, with those of every answer in the loss.

        Example: prompt [5, 6], answer [7, 8, 9], 2 answer tokens: [5, 6, 7, 8], the last two in the loss.
        """
        mask = opening_mask(torch.tensor(self.loss_mask, dtype=torch.bool, device="cpu"), answer_tokens)
        return Conversation(self.input_ids[: len(mask)], tuple(mask.tolist()))


def opening_mask(loss_mask: Tensor, answer_tokens: int) -> Tensor:
    """The first so many tokens of every answer, up to the last of them.

    Args:
        loss_mask: `[T]` True at answers.
        answer_tokens: N.

    Returns:
        `[T']`: True at the first N tokens of every run of True; T' ends with the last one. Without answers all `[T]`.

    Example: [False, True, True, True, False, True, False] with 2 gives [False, True, True, False, False, True].
    """
    before = loss_mask.long().cumsum(0)
    # what had been counted when the current answer began
    begun = torch.where(loss_mask, 0, before).cummax(0).values
    mask = loss_mask & (before - begun <= answer_tokens)
    return mask[: int(mask.nonzero()[-1]) + 1] if mask.any() else mask


def load_rows(source: str | Path, *, split: str = "train") -> Iterable[dict[str, Any]]:
    """Rows of a JSON-lines file (`.gz` too), of a directory that `distill` wrote, or of a `datasets` name.

    Raises:
        InvalidConfigError: See `read_rows`; while the rows are read.
    """
    return (row for _, row in read_rows(source, split=split))


def write_parquet(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write rows of a distilled dataset; the file appears whole or not at all.

    Raises:
        InvalidConfigError: The `datasets` package is missing.
    """
    datasets, parquet = datasets_package(f"Writing {path}")
    words = {"role": datasets.Value("string"), "content": datasets.Value("string")}
    features = datasets.Features({
        "number": datasets.Value("int32"), "source": datasets.Value("string"), "model": datasets.Value("string"),
        "temperature": datasets.Value("float32"), "messages": datasets.List(words),
        "input_ids": datasets.List(datasets.Value("int32")), "loss_mask": datasets.List(datasets.Value("bool")),
        "finish_reason": datasets.Value("string"),
    })  # fmt: skip
    columns = {name: [row[name] for row in rows] for name in features}
    table = datasets.Dataset.from_dict(columns, features=features).data.table
    with whole_file(path) as partial:
        parquet.write_table(table, partial)  # what to_parquet does, without a progress bar per file


def read_conversations(*sources: str | Path, tokenizer: Any = None, split: str = "train") -> list[Conversation]:
    """Conversations to train on; rows without an answer teach nothing and are left out.

    Args:
        *sources: What `distill` wrote; or rows with `input_ids` and `loss_mask`, with `prompt_ids` and
            `response_ids`, or with `messages` (then a tokenizer is needed, and each assistant turn is an answer).
        tokenizer: For rows of text.
        split: Of a dataset.

    Raises:
        InvalidConfigError: A row that is none of that.
    """
    found: list[Conversation] = []
    for source in sources:
        for place, row in read_rows(source, split=split):
            try:
                talk = _conversation(row, tokenizer, place)
            except InvalidConfigError as error:
                raise error if str(error).startswith(place) else InvalidConfigError(f"{place}: {error}") from error
            if any(talk.loss_mask):
                found.append(talk)
    return found


def _conversation(row: Row, tokenizer: Any, place: str) -> Conversation:
    if "input_ids" in row and "loss_mask" in row:
        return Conversation(tokens_of(row, "input_ids", place), mask_of(row, "loss_mask", place))
    if "prompt_ids" in row and "response_ids" in row:
        return Conversation.of(tokens_of(row, "prompt_ids", place), tokens_of(row, "response_ids", place))
    if "messages" in row and tokenizer is not None and tokenizer.chat_template:
        return _of_messages(turns_of(row, "messages", "role", "content", place), tokenizer)
    raise InvalidConfigError(
        f"{place} is not a conversation; it has the fields {shortened(list(row))}.",
        "Expected input_ids and loss_mask, or messages and a tokenizer with a chat template. "
        "`hf-specdec distill` makes such a dataset.",
    )


def _of_messages(turns: Sequence[tuple[str, str]], tokenizer: Any) -> Conversation:
    """An answer is what a longer conversation's template adds to the one that asked for it."""
    messages = [{"role": role, "content": content} for role, content in turns]
    ids: list[int] = []
    mask: list[bool] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        try:
            asked, told = (
                tokenizer.apply_chat_template(part, add_generation_prompt=prompt, return_dict=True)["input_ids"]
                for part, prompt in ((messages[:index], True), (messages[: index + 1], False))
            )
        except Exception as error:  # a template is a program of the tokenizer's author
            raise InvalidConfigError(f"The chat template does not take these messages: {error}.") from error
        if told[: len(asked)] != asked or asked[: len(ids)] != ids:
            raise InvalidConfigError(
                "The chat template rewrites earlier turns, so answers cannot be told from it.",
                "Give input_ids and loss_mask, as `hf-specdec distill` writes them.",
            )
        mask += [False] * (len(asked) - len(ids)) + [True] * (len(told) - len(asked))
        ids = told
    return Conversation(tuple(ids), tuple(mask))


def check_tokens(conversations: Iterable[Conversation], vocab_size: int) -> None:
    """See that a target knows every token, before it is given them.

    Raises:
        InvalidConfigError: Naming the first conversation with another one.
    """
    for number, talk in enumerate(conversations, start=1):
        if talk.input_ids and max(talk.input_ids) >= vocab_size:
            raise InvalidConfigError(
                f"Conversation {number} has the token {max(talk.input_ids)}; the target has {vocab_size} tokens.",
                "Give data that was tokenised for this target.",
            )


RUN_OF_TOKENS = 8
"""Tokens in a row that are compared where conversations are told to be alike."""


def drop_near_duplicates(
    conversations: Sequence[Conversation], most_seen: float, besides: Sequence[Conversation] = ()
) -> list[Conversation]:
    """Leave out what earlier conversations have said already, and what goes round in itself.

    Args:
        conversations: All; the first of those that are alike stays.
        most_seen: Of an answer's runs of eight tokens, the share that may stand in answers that were kept, or have
            stood in itself before.
        besides: What is said elsewhere, in what is held out, say.

    Example: of two equal conversations the second one is left out whatever the share, unless it is 1.
    """
    kept, seen = [], {run for talk in besides for run in _runs(talk)}
    for talk in conversations:
        runs = _runs(talk)
        fresh = set(runs) - seen
        if not runs or len(runs) - len(fresh) <= most_seen * len(runs):
            kept.append(talk)
            seen |= fresh
    return kept


def _runs(talk: Conversation) -> list[int]:
    """A number for every run of tokens in its answers."""
    return [
        hash(talk.input_ids[start : start + RUN_OF_TOKENS])
        for start in range(len(talk.input_ids) - RUN_OF_TOKENS + 1)
        if all(talk.loss_mask[start : start + RUN_OF_TOKENS])
    ]


def hold_out(conversations: Sequence[Conversation], count: int) -> tuple[list[Conversation], list[Conversation]]:
    """Set some apart, at even distances, so that all sources have their share.

    Args:
        conversations: All.
        count: How many to set apart, at most.

    Returns:
        Those to train on, without copies of what is apart, and those apart.

    Example: of [a, b, c, d, e, f] two apart are [c, f].
    """
    number = len(conversations)
    count = min(count, number)
    apart = [conversations[number * (place + 1) // count - 1] for place in range(count)]
    known = {talk.input_ids for talk in apart}
    return [talk for talk in conversations if talk.input_ids not in known], apart


def most_frequent_tokens(conversations: Iterable[Conversation], size: int) -> Tensor:
    """The `size` most frequent tokens of the answers, ascending; ties and gaps go to the lowest ids.

    Low ids are the frequent ones in a BPE vocabulary, so they fill up what the data does not show.

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
