"""Self-distillation: the target answers prompts, and its own answers become what heads learn from.

Heads that learn from text by others learn to predict somebody else (Medusa, arXiv:2401.10774, section 2.3.2).
The work is cut into parts, each a pure function of settings and prompts, written whole or not at all: an interrupted
run resumes where it stopped, with the same result.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import PreTrainedModel

from hf_specdec.atomic import clear_partials, directory_lock, write_text
from hf_specdec.errors import InvalidConfigError
from hf_specdec.records import open_regular, shortened
from hf_specdec.training.conversations import write_parquet
from hf_specdec.training.data import datasets_package
from hf_specdec.training.processes import processes
from hf_specdec.training.prompts import INVENTED, Prompt
from hf_specdec.training.recipes import MOST_TOKENS, check_numbers
from hf_specdec.training.runs import read_state
from hf_specdec.training.teachers import ModelTeacher, Teacher

logger = logging.getLogger(__name__)

SETTINGS = ".distill.json"
"""What a directory was made with; hidden, so that `datasets` does not take it for data."""

HOTTEST = 1000
"""Temperature at which every token is as likely as any other."""

ROW = ("number", "source", "temperature", "messages", "input_ids", "loss_mask", "finish_reason")
"""Of a conversation, in a row of the dataset."""

MARK = "USER-TURN-8d1f"
"""Stands for the user's words while the chat template is taken apart."""


@dataclass(frozen=True, slots=True)
class DistillConfig:
    """How prompts are answered.

    Args:
        max_new_tokens: Length of an answer at most; one that is cut there is marked `finish_reason="length"`.
        temperatures: Prompt i is answered at `temperatures[i % len]`; 0 is greedy. Repeat a value to weigh it.
        num_turns: User turns per conversation; those that a prompt lacks are invented by the model.
        batch_size: Rows per `generate()` call; a server has its own number of requests.
        batches_per_part: Batches between two writes: what an interrupt can cost.
        max_prompt_tokens: Longer prompts are left out; a conversation ends where it grows longer.
        max_invented_tokens: Length of an invented user turn at most.
        invention_temperature: At which the model speaks as the user.
        seed: Of all draws.
    """

    max_new_tokens: int = 512
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    num_turns: int = 1
    batch_size: int = 32
    batches_per_part: int = 4
    max_prompt_tokens: int = 2048
    max_invented_tokens: int = 128
    invention_temperature: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        sizes = ("max_new_tokens", "num_turns", "batch_size", "batches_per_part", "max_prompt_tokens",
                 "max_invented_tokens")  # fmt: skip
        check_numbers(self, {"seed": 2**63}, MOST_TOKENS)
        for name in sizes:
            if getattr(self, name) < 1:
                raise InvalidConfigError(f"`{name}` must be >= 1, got {getattr(self, name)}.")
        numbers = all(isinstance(value, int | float) and 0 <= value <= HOTTEST for value in self.temperatures)
        if not self.temperatures or not numbers:
            raise InvalidConfigError(f"`temperatures` must be values from 0 to {HOTTEST}, got {self.temperatures}.")


@dataclass(slots=True)
class _Chat:
    """One conversation while it grows."""

    number: int  # of its prompt
    source: str
    temperature: float
    asked: list[str]  # user turns that are known and not answered yet
    messages: list[dict[str, str]] = field(default_factory=list)
    input_ids: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    finish_reason: str = ""

    def add(self, prompt: Sequence[int], answer: Sequence[int], text: str, finish_reason: str) -> None:
        """Append a turn. Where the template reads earlier turns otherwise than they were said, its reading counts."""
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self.input_ids, prompt, strict=False)))
        self.loss_mask = [*self.loss_mask[:common], *[False] * (len(prompt) - common), *[True] * len(answer)]
        self.input_ids = [*prompt, *answer]
        self.messages += [{"role": "user", "content": self.asked.pop(0)}, {"role": "assistant", "content": text}]
        self.finish_reason = finish_reason


def invented_prompts(count: int) -> list[Prompt]:
    """Prompts that the model makes up: a chat model continues its empty user turn, any other an empty text."""
    return [Prompt((), INVENTED)] * count


def distill(
    model: PreTrainedModel | Teacher,
    tokenizer: Any,
    prompts: Sequence[Prompt | str],
    output_dir: str | Path,
    config: DistillConfig | None = None,
    *,
    progress: bool = True,
) -> Path:
    """Let the model answer prompts, and write prompts and answers with loss masks and provenance.

    Started again after an interrupt it goes on, and ends with the same rows: parts that lie there are kept, the rest
    is drawn as it would have been. Under `accelerate launch` every process takes each n-th part; the rows do not
    depend on the number of processes.

    Args:
        model: The target, attached or not: plain `generate()` is used, with no top-k or top-p. Or a `ServerTeacher`.
        tokenizer: Its tokenizer. With a chat template prompts are user turns; without one they are texts to go on
            with, and there is one turn.
        prompts: `read_prompts(...)`, `invented_prompts(n)`, or plain strings.
        output_dir: Where to write; `datasets.load_dataset(output_dir)` reads it, and so do the trainers.
        config: How to answer.
        progress: Show a progress bar.

    Returns:
        `output_dir`. Rows: `input_ids`, `loss_mask` (True at answers), `messages`, `source` of the prompt and its
        `number`, `model`, `temperature`, `finish_reason` (`"stop"` or `"length"`).

    Raises:
        InvalidConfigError: The package `datasets` is missing; another process is at work in the directory, or it was
            made with other settings, prompts or weights; no prompts, only ones that are too long, or turns that a
            model without chat template cannot take; a server that does not answer, or reads other tokens.
    """
    datasets_package("Distilling")
    config = config or DistillConfig()
    parts = _plan(prompts, config, tokenizer)
    teacher = model if isinstance(model, Teacher) else ModelTeacher(model, config.batch_size)
    teacher.check(_encode(tokenizer, [], next(iter(parts[0][0].asked), None)))
    folder = Path(output_dir)
    state = processes()
    with directory_lock(folder, "distill") if state.is_main_process else nullcontext():
        with state.main_process_first():
            _claim(folder, {**_settings(config, parts), **teacher.facts()})
        _answer_parts(teacher, tokenizer, folder, config, parts, progress=progress)
        state.wait_for_everyone()
    return folder


def _answer_parts(
    teacher: Teacher, tokenizer: Any, folder: Path, config: DistillConfig, parts: list[list[_Chat]], *, progress: bool
) -> None:
    """Answer the share of this process of the parts that are not there yet."""
    state = processes()
    files = [folder / "data" / f"part-{index:05}.parquet" for index in range(len(parts))]
    nothing = [folder / f".part-{index:05}.empty" for index in range(len(parts))]  # a file without rows is not read
    mine = range(state.process_index, len(parts), state.num_processes)
    left = [index for index in mine if not (files[index].exists() or nothing[index].exists())]
    silent = not (progress and state.is_main_process)
    tokens, begin = 0, time.perf_counter()
    with tqdm(total=len(mine), initial=len(mine) - len(left), unit="part", disable=silent) as bar:
        for index in left:
            rows = _answer_part(teacher, tokenizer, config, parts[index], f"{config.seed}/{index}")
            if rows:
                write_parquet(rows, files[index])
            else:
                nothing[index].touch()
            tokens += sum(sum(row["loss_mask"]) for row in rows)
            bar.set_postfix_str(f"{tokens / (time.perf_counter() - begin):.0f} answer tokens/s", refresh=False)
            bar.update()
    if teacher.num_lost:
        reasons = "; ".join(f"{number} x {reason}" for reason, number in teacher.lost.most_common())
        logger.warning("%d answers were given up: %s.", teacher.num_lost, reasons)


# ------------------------------------------------------------------------------------------------------ the plan


def _plan(prompts: Sequence[Prompt | str], config: DistillConfig, tokenizer: Any) -> list[list[_Chat]]:
    """Conversations in parts of one temperature and similar length (little padding)."""
    if not prompts:
        raise InvalidConfigError("There are no prompts to distil.", "Give some, or invented_prompts(n).")
    if config.num_turns > 1 and not tokenizer.chat_template:
        raise InvalidConfigError(
            f"num_turns={config.num_turns} needs a chat template, and this tokenizer has none.", "Use num_turns=1."
        )
    by_temperature: dict[float, list[tuple[int, _Chat]]] = {}
    for number, given in enumerate(prompts):
        prompt = given if isinstance(given, Prompt) else Prompt((given,), "given")
        temperature = float(config.temperatures[number % len(config.temperatures)])
        chat = _Chat(number, prompt.source, temperature, list(prompt.turns[: config.num_turns]))
        length = len(_encode(tokenizer, [], chat.asked[0])) if chat.asked else 0
        if length <= config.max_prompt_tokens:
            by_temperature.setdefault(temperature, []).append((length, chat))
    if not by_temperature:
        raise InvalidConfigError(
            f"Every prompt is longer than max_prompt_tokens={config.max_prompt_tokens}.", "Raise it."
        )
    size = config.batch_size * config.batches_per_part
    parts = []
    for _, chats in sorted(by_temperature.items()):
        ordered = [chat for _, chat in sorted(chats, key=lambda pair: pair[0])]
        parts += [ordered[start : start + size] for start in range(0, len(ordered), size)]
    return parts


def _settings(config: DistillConfig, parts: Sequence[Sequence[_Chat]]) -> dict[str, Any]:
    """What the result depends on beside the target; any difference is another dataset."""
    plan = json.dumps([[(chat.number, chat.source, chat.asked) for chat in part] for part in parts])
    return {
        **asdict(config),
        "temperatures": list(config.temperatures),
        "prompts": hashlib.sha256(plan.encode()).hexdigest()[:16],
    }


def _claim(folder: Path, settings: dict[str, Any]) -> None:
    """Make the directory, or see that it was made for the same work."""
    path = folder / SETTINGS
    clear_partials(folder / "data")
    if path.exists():
        known = read_state(path, folder)
        differing = [name for name in settings if known.get(name) != settings[name]]
        if differing:
            changes = ", ".join(f"{name} {shortened(known.get(name))}, now {settings[name]!r}" for name in differing)
            raise InvalidConfigError(
                f"{folder} was distilled with other settings: {changes}.",
                "Use the same ones to go on, or another directory.",
            )
        for part in sorted((folder / "data").glob("part-*.parquet")):
            _check_part(part)
        return
    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    if any(data.iterdir()):
        raise InvalidConfigError(f"{folder} holds data that distill did not begin.", "Use another directory.")
    write_text(path, json.dumps(settings, indent=1))


def _check_part(part: Path) -> None:
    """See that a part that lies there is one.

    Raises:
        InvalidConfigError: It is damaged.
    """
    parquet = datasets_package("Distilling")[1]
    open_regular(part).close()
    try:
        missing = set(ROW) - set(parquet.read_schema(part).names)
    except Exception as error:  # pyarrow raises its own classes, and others
        raise InvalidConfigError(
            f"{part} cannot be read: {error}.", "Delete it: it is made again when the same command is run."
        ) from error
    if missing:
        raise InvalidConfigError(f"{part} has no {', '.join(sorted(missing))}.", "Delete it: it is made again.")


# ------------------------------------------------------------------------------------------------------ one part


def _answer_part(
    teacher: Teacher, tokenizer: Any, config: DistillConfig, chats: Sequence[_Chat], label: str
) -> list[dict[str, Any]]:
    """Answer every turn of a part's conversations, and return their rows.

    A conversation ends early where an answer was cut or given up, the prompt grew too long, or there was nothing to
    invent.
    """
    alive = list(chats)
    for turn in range(config.num_turns):
        silent = [chat for chat in alive if not chat.asked]
        opened = [_encode(tokenizer, chat.messages, None) for chat in silent]
        place = f"{label}/{turn}"
        invented = teacher.generate(opened, config.invention_temperature, config.max_invented_tokens, f"{place}/user")
        for chat, words in zip(silent, invented, strict=True):
            text = tokenizer.decode(words or [], skip_special_tokens=True).strip()
            chat.asked += [text] if text else []
        prompts = {chat.number: _encode(tokenizer, chat.messages, chat.asked[0]) for chat in alive if chat.asked}
        alive = [chat for chat in alive if len(prompts.get(chat.number, ())) in range(1, config.max_prompt_tokens + 1)]
        asked = [prompts[chat.number] for chat in alive]
        answers = teacher.generate(asked, chats[0].temperature, config.max_new_tokens, f"{place}/answer")
        answered = [triple for triple in zip(alive, asked, answers, strict=True) if triple[2] is not None]
        for chat, prompt, answer in answered:
            text = tokenizer.decode(answer, skip_special_tokens=True)
            chat.add(prompt, answer or (), text, "stop" if teacher.ended(answer or ()) else "length")
        alive = [chat for chat, _, _ in answered if chat.finish_reason == "stop"]
    return [{"model": teacher.name, **{name: getattr(chat, name) for name in ROW}} for chat in chats if chat.messages]


def _encode(tokenizer: Any, messages: Sequence[dict[str, str]], asked: str | None) -> list[int]:
    """Token ids that the model continues.

    Args:
        tokenizer: With or without a chat template.
        messages: What was said before.
        asked: What the user says now; None opens the user's turn, for the model to speak in their place.
    """
    if not tokenizer.chat_template:
        begin = [token for token in (tokenizer.bos_token_id, tokenizer.eos_token_id) if token is not None][:1]
        return list(tokenizer(asked)["input_ids"]) if asked is not None else begin
    turn = {"role": "user", "content": MARK if asked is None else asked}
    if asked is not None:
        encoded = tokenizer.apply_chat_template([*messages, turn], add_generation_prompt=True, return_dict=True)
        return list(encoded["input_ids"])
    text = tokenizer.apply_chat_template([*messages, turn], tokenize=False)
    if MARK not in text:
        raise InvalidConfigError(
            "This chat template changes the user's words, so no user turn can be left open for the model to invent.",
            "Give prompts.",
        )
    return list(tokenizer(text[: text.index(MARK)], add_special_tokens=False)["input_ids"])
