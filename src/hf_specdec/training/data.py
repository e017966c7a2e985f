"""Training data from files and datasets: rows, chat messages, prompts to answer, and tokenized conversations.

The loss mask of a conversation marks the target's answers; heads are not trained on the user's tokens.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from hf_specdec.errors import InvalidConfigError, listed, sentence
from hf_specdec.records import existing_path, open_regular, read_lines, read_list, read_records, shortened

logger = logging.getLogger(__name__)
T = TypeVar("T")

TOKEN_ID_LIMIT = 2**31
"""Exclusive upper bound of token ids, which are stored in 32 bits."""

MAX_SKIPPED_SHARE = 0.01
"""Largest share of a source's rows that is skipped because they cannot be read."""

NGRAM_SIZE = 8
"""Tokens per n-gram compared to find near-duplicates."""

DataRow = dict[str, Any]
"""Values of a row by field name."""

Message = dict[str, Any]
"""A message as chat templates take it: `role`, `content` and possibly other fields, such as `tool_calls`."""

ROLES = {
    "system": "system", "developer": "developer", "tool": "tool", "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "model": "assistant",
}  # fmt: skip
"""Roles of chat templates by the names in data; ShareGPT has `human` and `gpt`, Gemini and Gemma have `model`."""

NOT_READ = ("functions", "documents", "images", "image", "videos", "audios", "chat_template_kwargs")
"""Fields of a row that belong to its messages and are not supported."""


# -------------------------------------------------------------------------------------------------------------- rows


def read_each(
    source: str | Path, read: Callable[[DataRow, str], T], *, split: str = "train", limit: int | None = None
) -> list[T]:
    """Return what `read` makes of each row and its location; rows that it refuses are skipped and logged."""
    found: list[T] = []
    failed: list[str] = []  # errors, each with the location of its row

    def check(rows: int) -> None:
        if len(failed) > MAX_SKIPPED_SHARE * rows:
            raise InvalidConfigError(
                failed[0], f"Up to {MAX_SKIPPED_SHARE:.0%} of the rows are skipped; {len(failed)} cannot be read."
            )

    def skip(error: InvalidConfigError) -> None:
        failed.append(str(error))
        check(max(len(found) + len(failed), 1000))  # before the end of the source, reading stops at the eleventh

    for place, row in read_rows(source, split=split, refuse=skip):
        if limit is not None and len(found) == limit:
            break
        try:
            found.append(read(row, place))
        except InvalidConfigError as error:
            skip(error if str(error).startswith(place) else InvalidConfigError(f"{place}: {error}"))
    check(len(found) + len(failed))
    if failed:
        logger.warning("%d of %d rows are skipped: %s", len(failed), len(found) + len(failed), listed(failed))
    return found


def read_rows(
    source: str | Path, *, split: str = "train", refuse: Callable[[InvalidConfigError], None] | None = None
) -> Iterator[tuple[str, DataRow]]:
    """Yield pairs of a row's location (file and line or row number, for error messages) and the row.

    A source is a `.jsonl`, `.jsonl.gz`, `.json`, parquet or `.txt` file (one prompt per line), a directory written by
    `distill`, or a name or directory for `datasets.load_dataset`. `refuse` is called with the error of a row of a JSON
    file that is not an object, which is then skipped; None raises it.
    """
    path = existing_path(source)
    options = {} if refuse is None else {"refuse": refuse}
    if path is not None and path.is_file() and path.suffix == ".txt":
        yield from ((f"{path}, line {number}", {"prompt": line.strip()}) for number, line in read_lines(path))
    elif path is not None and ".jsonl" in path.suffixes and not path.is_dir():
        yield from ((f"{path}, line {number}", row) for number, row in read_records(path, **options))
    elif path is not None and path.suffix == ".json" and not path.is_dir():
        yield from ((f"{path}, {place}", row) for place, row in read_list(path, **options))
    else:
        datasets, parquet = datasets_package(f"Reading {str(source)!r}")
        try:
            yield from _rows_of_dataset(source, path, split, datasets, parquet)
        except InvalidConfigError:
            raise
        except Exception as error:  # datasets raises many unrelated classes for a missing or unreadable source
            first, *_ = (*str(error).strip().splitlines(), type(error).__name__)
            absent = " is not a file or directory, and it" if path is None else ""
            raise InvalidConfigError(
                f"{str(source)!r}{absent} cannot be read as a dataset: {sentence(first[:300])}",
                "Give a .jsonl, .parquet or .txt file, a directory written by `hf-specdec distill`, or a Hub id.",
            ) from error


def _rows_of_dataset(
    source: str | Path, path: Path | None, split: str, datasets: Any, parquet: Any
) -> Iterator[tuple[str, DataRow]]:
    files = []
    if path is not None:
        files = sorted(path.glob("data/part-*.parquet")) if path.is_dir() else [path]
    for file in files:  # read directly: datasets would copy them to its cache first
        open_regular(file).close()
        number = 0
        for batch in parquet.ParquetFile(file).iter_batches(batch_size=256):
            for row in batch.to_pylist():
                number += 1
                yield f"{file}, row {number}", _without_nulls(row)
    if not files:
        rows = datasets.load_dataset(str(source), split=split)
        yield from ((f"{source}, row {number}", _without_nulls(row)) for number, row in enumerate(rows, start=1))


def _without_nulls(value: Any) -> Any:
    """Remove the null fields of objects: in Arrow every object of a column has the fields of all of them."""
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return [_without_nulls(each) for each in value]
    return value


def datasets_package(why: str) -> tuple[Any, Any]:
    """Import and return the modules `datasets` and `pyarrow.parquet`; an error begins with `why` they are needed."""
    try:
        import datasets  # an optional dependency
        from pyarrow import parquet
    except ImportError as error:
        raise InvalidConfigError(
            f"{why} needs the package datasets.", "Run `pip install 'hf-specdec[training]'`."
        ) from error
    return datasets, parquet


# ---------------------------------------------------------------------------------------------------------- messages


def _messages_of(row: DataRow, place: str) -> list[Message]:
    """Return the messages of a row as chat templates take them; an empty list if it has none.

    They are those in `messages` (`role` and `content`) or ShareGPT's `conversations` (`from` and `value`), after the
    row's `system`, if it has one. All other fields of a message are kept, except empty ones. Content that is null is
    empty text, and arguments of tool calls that are JSON text are parsed: templates expect an object
    (https://huggingface.co/docs/transformers/chat_extras).
    """
    name = next((name for name in ("messages", "conversations") if row.get(name)), None)
    if name is None:
        return []
    unread = [field for field in NOT_READ if row.get(field)]
    if unread:
        raise InvalidConfigError(f"{place}: `{unread[0]}` beside `{name}` is not supported.", "Leave such rows out.")
    turns = row[name]
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise InvalidConfigError(f"{place}: `{name}` must be a list of objects, got {shortened(turns)}.")
    messages = [_message(turn, f"{place}: `{name}`") for turn in turns]
    system = _system_of(row, place)
    if system and messages[0]["role"] == "system":
        raise InvalidConfigError(f"{place} has a `system`, and `{name}` begins with another.", "Keep one of them.")
    messages = [{"role": "system", "content": system}, *messages] if system else messages
    _unicode(json.dumps(messages, ensure_ascii=False, default=str), place)
    return messages


def _system_of(row: DataRow, place: str) -> str:
    system = row.get("system") or ""
    if not isinstance(system, str):
        raise InvalidConfigError(f"{place}: `system` must be a text, got {shortened(system)}.")
    return _unicode(system, place)


def _message(turn: DataRow, where: str) -> Message:
    given, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    role = ROLES.get(given) if isinstance(given, str) else None
    if role is None or not isinstance(content, str | None):
        raise InvalidConfigError(
            f"{where} has a message with the role {shortened(given)} and the content {shortened(content)}.",
            f"Expected one of {', '.join(ROLES)}, and text.",
        )
    rest = {
        name: value
        for name, value in turn.items()
        if name not in ("role", "from", "content", "value") and value not in (None, "", [], {})
    }
    if "tool_calls" in rest:
        rest["tool_calls"] = _tool_calls(rest["tool_calls"], where)
    if role in ("user", "assistant") and not rest and not (content or "").strip():
        raise InvalidConfigError(f"{where} has an empty message of the {role}.", "Leave such rows out.")
    return {"role": role, "content": content or "", **rest}


def _tool_calls(calls: Any, where: str) -> list[DataRow]:
    parsed = []
    for call in calls if isinstance(calls, list) else [None]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(call, dict) or not isinstance(function, dict):
            raise InvalidConfigError(f"{where} has `tool_calls` that are not a list of calls: {shortened(calls)}.")
        if isinstance(function.get("arguments"), str):
            function = {**function, "arguments": _parsed(function["arguments"], f"{where} has `arguments`")}
        parsed.append({**call, "function": function} if "function" in call else function)
    return parsed


def _tools_of(row: DataRow, place: str) -> list[DataRow] | None:
    """Return the tools of a row for the chat template, also if they are JSON text; None if it has none."""
    tools = row.get("tools")
    if isinstance(tools, str) and tools.strip():
        tools = _parsed(tools, f"{place}: `tools`")
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InvalidConfigError(f"{place}: `tools` must be a list of objects, got {shortened(tools)}.")
    return tools


def _parsed(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidConfigError(f"{what} that is not JSON: {shortened(text)}.") from error


def _unicode(value: str, place: str) -> str:
    """Return a text, unless it has lone surrogates, which JSON can express but tokenizers reject."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidConfigError(f"{place} contains a lone surrogate, which is not text: {error.reason}.") from error
    return value


def rendered(
    tokenizer: Any, messages: Sequence[Message], tools: Sequence[DataRow] | None = None, *, answer_next: bool
) -> str:
    """Return the text that a chat template makes of messages; it ends where an answer begins if one comes next."""
    try:
        text: str = tokenizer.apply_chat_template(
            list(messages), tools=tools, tokenize=False, add_generation_prompt=answer_next
        )
    except Exception as error:  # templates are third-party programs
        raise InvalidConfigError(f"The chat template rejects these messages: {sentence(str(error)[:300])}") from error
    return text


# ----------------------------------------------------------------------------------------------------------- prompts


@dataclass(frozen=True, slots=True)
class Prompt:
    """User turns of one conversation, possibly none; the model invents those that are missing.

    Args:
        turns: Messages of the user, in order.
        source: Where the prompt comes from, such as a file name; stored with the answers.
        system: System message before the first turn; empty for none.
    """

    turns: tuple[str, ...]
    source: str
    system: str = ""


def invented_prompts(count: int) -> list[Prompt]:
    """Return `count` empty prompts, for which the model invents a user turn or, without a chat template, a text."""
    return [Prompt((), "invented")] * count


def read_prompts(source: str | Path, *, split: str = "train", limit: int | None = None) -> list[Prompt]:
    """Read prompts from a file or a dataset.

    Rows that cannot be read are skipped and logged, unless they are more than 1 % of the source.

    Args:
        source: A directory written by `distill`, a file (.jsonl, .jsonl.gz, .json, .parquet, .txt) or the name of a
            dataset on the Hub. Rows have `turns`, `messages`, `conversations` (ShareGPT), `instruction`
            (with or without `input`), `prompt` or `text`, of which the first is used; of a conversation
            only the user's turns and a system message before them are used. A row's `system` is such a message, and
            its `source` replaces the file or dataset name as `Prompt.source`.
        split: Split to load if `source` is a `datasets` name.
        limit: Read at most this many prompts.

    Raises:
        InvalidConfigError: The source cannot be read, or too many rows: they have no prompt, an empty turn, tools, or
            invalid Unicode.
    """
    path = existing_path(source)
    name = path.name if path is not None else str(source)
    return read_each(source, lambda row, place: prompt_of(row, place, name), split=split, limit=limit)


def prompt_of(row: DataRow, place: str, name: str) -> Prompt:
    """Return the prompt in a row, see `read_prompts`; its source is `name` if the row does not give one."""
    messages = [] if row.get("turns") else _messages_of(row, place)
    later = [message["role"] for message in messages[1:]]
    if row.get("tools") or "tool" in later or "system" in later or any("tool_calls" in each for each in messages):
        raise InvalidConfigError(
            f"{place} has tools or a later system message, which prompts cannot have.", "Leave such rows out."
        )
    system = _system_of(row, place) if not messages else ""
    turns: Any = None
    if messages:
        system = messages[0]["content"] if messages[0]["role"] == "system" else ""
        turns = [each["content"] for each in messages if each["role"] == "user"]
    elif row.get("turns"):
        turns = row["turns"] if isinstance(row["turns"], list) else None
    else:
        instruction = row.get("instruction")
        values = (instruction, row.get("input")) if instruction else (row.get("prompt") or row.get("text"),)
        parts = [value for value in values if value]
        if parts and all(isinstance(part, str) for part in parts):
            turns = ["\n\n".join(parts)]
    if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise InvalidConfigError(
            f"{place} has no prompt: {shortened(row)}.",
            "Expected one of prompt, turns, messages, conversations, instruction, text.",
        )
    given = row.get("source")
    origin = given if isinstance(given, str) and given else name
    return Prompt(tuple(_unicode(turn, place) for turn in turns), _unicode(origin, place), system)


# ----------------------------------------------------------------------------------------------------- conversations


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
    """Keep the first N tokens of every answer in a mask `[T]`, and cut it after the last of them, if there is one.

    Example: [False, True, True, True, False, True, False] with N = 2 gives [False, True, True, False, False, True].
    """
    count = loss_mask.long().cumsum(0)
    count_before = torch.where(loss_mask, 0, count).cummax(0).values  # [T] answer tokens before the current answer
    mask = loss_mask & (count - count_before <= answer_tokens)
    return mask[: int(mask.nonzero()[-1]) + 1] if mask.any() else mask


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


def _conversation(row: DataRow, tokenizer: Any, place: str) -> Conversation:
    if "input_ids" in row and "loss_mask" in row:
        mask = row["loss_mask"]
        if not isinstance(mask, list) or any(type(value) not in (int, bool) or value not in (0, 1) for value in mask):
            raise InvalidConfigError(f"{place}: `loss_mask` must be a list of true and false, got {shortened(mask)}.")
        return Conversation(_tokens_of(row, "input_ids", place), tuple(map(bool, mask)))
    if "prompt_ids" in row and "response_ids" in row:
        return Conversation.of(_tokens_of(row, "prompt_ids", place), _tokens_of(row, "response_ids", place))
    messages = _messages_of(row, place) if tokenizer is not None and tokenizer.chat_template else []
    if messages:
        return _of_messages(messages, _tools_of(row, place), tokenizer)
    raise InvalidConfigError(
        f"{place} is not a conversation; it has the fields {shortened(list(row))}.",
        "Expected input_ids and loss_mask, or messages and a tokenizer with a chat template. "
        "`hf-specdec distill` writes such a dataset.",
    )


def _tokens_of(row: DataRow, name: str, place: str) -> tuple[int, ...]:
    values = row[name]
    if not isinstance(values, list):
        raise InvalidConfigError(f"{place}: `{name}` must be a list of token ids, got {shortened(values)}.")
    for value in values:
        if type(value) is not int or not 0 <= value < TOKEN_ID_LIMIT:
            raise InvalidConfigError(
                f"{place}: `{name}` must hold token ids, integers from 0 to {TOKEN_ID_LIMIT - 1}, "
                f"got {shortened(value)}."
            )
    return tuple(values)


def _of_messages(messages: Sequence[Message], tools: Sequence[DataRow] | None, tokenizer: Any) -> Conversation:
    """Tokenize messages with the chat template, up to the last assistant turn.

    An answer is what the template adds for an assistant turn after the generation prompt, up to the end token. A line
    break after it is not the assistant's, nor what the template writes at the end of every conversation (Phi-3:
    `<|endoftext|>`), where another turn could follow. Without an assistant turn the conversation is empty.
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


def _check_whole(
    before: str,
    text: str,
    earlier: Sequence[Message],
    message: Message,
    tools: Sequence[DataRow] | None,
    tokenizer: Any,
) -> None:
    """Check that everything an assistant turn holds is in the text that the template makes of it.

    White space is not compared. A field that is no text, such as `tool_calls`, is there if the template's text changes
    without it. `before` and `text` are what the template makes of the messages before the turn, and with it.
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


def num_shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of tokens with which both texts begin."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def check_tokens(conversations: Iterable[Conversation], vocab_size: int) -> None:
    """Raise `InvalidConfigError` for the first conversation with a token id outside the target's vocabulary."""
    for number, conversation in enumerate(conversations, start=1):
        if conversation.input_ids and max(conversation.input_ids) >= vocab_size:
            raise InvalidConfigError(
                f"Conversation {number} has the token id {max(conversation.input_ids)}; the target's vocabulary has "
                f"{vocab_size} tokens.",
                "Give data that was tokenized for this target.",
            )


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
    chosen = set(sorted(counts, key=lambda token: (-counts[token], token))[:size])
    candidate = 0
    while len(chosen) < size:
        chosen.add(candidate)
        candidate += 1
    return torch.tensor(sorted(chosen), device="cpu")
