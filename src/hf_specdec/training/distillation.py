"""Self-distillation: let the target answer prompts to create training data for its draft heads.

Heads trained on other text learn to predict its authors, not the target (Medusa, arXiv:2401.10774, section 2.3.2).
The prompts are split into parts. The rows of a part depend only on settings, target and prompts, and each part is
written atomically, so an interrupted run resumes with the same result (if a server honours the seeds sent to it).
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import PreTrainedModel

from hf_specdec.atomic import clear_partials, directory_lock, whole_file, write_text
from hf_specdec.errors import InvalidConfigError
from hf_specdec.records import checked_path, open_regular, shortened
from hf_specdec.training.data import Message, Prompt, datasets_package, num_shared, rendered
from hf_specdec.training.objectives import check_settings
from hf_specdec.training.progress import ticking
from hf_specdec.training.run_setup import processes, read_state
from hf_specdec.training.teachers import ModelTeacher, Teacher

logger = logging.getLogger(__name__)

SETTINGS = ".distill.json"
"""File with the settings that a directory was written with; hidden, so that `datasets` does not read it as data."""

MAX_TEMPERATURE = 1000
"""Maximum temperature; sampling is practically uniform there."""

MARK = "USER-TURN-8d1f"
"""Placeholder for the user's text, to find its position in the output of the chat template."""

ROW_FIELDS = ("number", "source", "temperature", "messages", "input_ids", "loss_mask", "finish_reason")
"""Fields of a row of the dataset, except `model`."""


@dataclass(frozen=True, slots=True)
class DistillConfig:
    """Settings of `distill`.

    Args:
        max_new_tokens: Maximum length of an answer; one cut there has `finish_reason="length"`.
        temperatures: Prompt i is answered at `temperatures[i % len]`; 0 is greedy. Repeat a value to weight it.
        num_turns: Maximum user turns per conversation; the model invents missing ones, further ones are ignored.
        batch_size: Conversations per `generate()` of a local model; for a server see `ServerTeacher(num_requests)`.
        batches_per_part: Batches of `batch_size` conversations per part; an interruption loses the parts in progress.
        max_prompt_tokens: Longer prompts are skipped; a conversation ends before a turn whose prompt would be longer.
        max_invented_tokens: Maximum length of an invented user turn.
        invention_temperature: Temperature for inventing user turns.
        seed: Seed of all sampling.
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
        check_settings(
            self,
            {"seed": (-(2**63), 2**63), "invention_temperature": (0, MAX_TEMPERATURE)},
            otherwise=(1, 2**31),
        )
        numbers = all(isinstance(value, int | float) and 0 <= value <= MAX_TEMPERATURE for value in self.temperatures)
        if not self.temperatures or not numbers:
            raise InvalidConfigError(
                f"`temperatures` must be values from 0 to {MAX_TEMPERATURE}, got {self.temperatures}."
            )


@dataclass(slots=True)
class _Dialog:
    """A conversation in progress."""

    number: int  # index of its prompt
    source: str
    temperature: float
    pending: list[str]  # known user turns that have no answer yet
    messages: list[Message] = field(default_factory=list)  # the system message, if any, and answered turns
    input_ids: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    finish_reason: str = ""  # of the last answer

    def add(self, prompt: Sequence[int], answer: Sequence[int], text: str, finish_reason: str) -> None:
        """Append the first pending user turn and its answer; `prompt` is the encoded conversation with that turn.

        From the first earlier token that the chat template now encodes differently, `prompt` is not in the loss.
        """
        common = num_shared(self.input_ids, prompt)
        self.loss_mask = [*self.loss_mask[:common], *[False] * (len(prompt) - common), *[True] * len(answer)]
        self.input_ids = [*prompt, *answer]
        self.messages += [{"role": "user", "content": self.pending.pop(0)}, {"role": "assistant", "content": text}]
        self.finish_reason = finish_reason


def distill(
    model: PreTrainedModel | Teacher,
    tokenizer: Any,
    prompts: Sequence[Prompt | str],
    output_dir: str | Path,
    config: DistillConfig | None = None,
    *,
    progress: bool = True,
) -> Path:
    """Let the model answer prompts, and write the conversations as a dataset with loss masks.

    An interrupted run resumes when it is called again with the same arguments, and ends with the same rows. Under
    `accelerate launch` the parts are divided among the processes; the rows do not depend on their number.

    Args:
        model: The target, whose `generate()` is called without top-k and top-p, or a `Teacher`, see `ServerTeacher`.
        tokenizer: Its tokenizer. With a chat template prompts are user turns; without one they are texts to continue,
            and `num_turns` must be 1.
        prompts: `read_prompts(...)`, `invented_prompts(n)`, or plain strings.
        output_dir: Directory to write, readable by `datasets.load_dataset(output_dir)` and the trainers.
        config: Settings; None uses the defaults.
        progress: Show a progress bar.

    Returns:
        `output_dir`. A row per conversation with an answer has `input_ids`, `loss_mask` (True at answers), `messages`,
        `source` and `number` of the prompt, `model`, `temperature`, and `finish_reason` (`"stop"` or `"length"`).

    Raises:
        InvalidConfigError: The package `datasets` is missing; another process uses the directory, or it is damaged
            or was written with other settings, prompts or weights; prompts are missing or all too long, `num_turns`
            needs a chat template, or the template changes the user's text; or the server is down or fails `check`.
    """
    datasets_package("Distilling")
    config = config or DistillConfig()
    parts = _plan(prompts, config, tokenizer)
    teacher = model if isinstance(model, Teacher) else ModelTeacher(model, config.batch_size)
    teacher.check(_encode_turn(tokenizer, [], next(iter(parts[0][0].pending), None)))
    plan = [[(dialog.number, dialog.source, dialog.pending, *dialog.messages) for dialog in part] for part in parts]
    settings = {
        **asdict(config),
        "temperatures": list(config.temperatures),
        "prompts": hashlib.sha256(json.dumps(plan).encode()).hexdigest()[:16],
    }
    folder, state = checked_path(output_dir), processes()
    files = [folder / "data" / f"part-{index:05}.parquet" for index in range(len(parts))]
    empty = [folder / f".part-{index:05}.empty" for index in range(len(parts))]  # markers of parts without rows
    with directory_lock(folder, "distill") if state.is_main_process else nullcontext():
        with state.main_process_first():
            _claim(folder, {**settings, **teacher.facts()})
        mine = range(state.process_index, len(parts), state.num_processes)
        left = [index for index in mine if not (files[index].exists() or empty[index].exists())]
        silent = not (progress and state.is_main_process)
        tokens, start = 0, time.perf_counter()
        with tqdm(total=len(mine), initial=len(mine) - len(left), unit="part", disable=silent) as bar, ticking(bar):
            for index in left:
                rows = _answer_part(teacher, tokenizer, config, parts[index], f"{config.seed}/{index}")
                if rows:
                    _write_part(rows, files[index])
                else:
                    empty[index].touch()
                tokens += sum(sum(row["loss_mask"]) for row in rows)
                bar.set_postfix_str(f"{tokens / (time.perf_counter() - start):.0f} answer tokens/s", refresh=False)
                bar.update()
        if teacher.num_lost:
            reasons = "; ".join(f"{number} x {reason}" for reason, number in teacher.lost.most_common())
            logger.warning("%d answers were dropped: %s.", teacher.num_lost, reasons)
        state.wait_for_everyone()
    return folder


def _write_part(rows: Sequence[dict[str, Any]], path: Path) -> None:
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


# ------------------------------------------------------------------------------------------------------ the plan


def check_prompts(prompts: Sequence[Prompt | str], tokenizer: Any, num_turns: int) -> None:
    """Check, before the model is loaded, that there are prompts, and that the tokenizer can encode what is asked."""
    if isinstance(prompts, str):
        raise InvalidConfigError(
            "`prompts` must be a list of prompts, got one text.", "Pass [text], or read_prompts(path) for a file."
        )
    if not prompts:
        raise InvalidConfigError("No prompts were given.", "Give prompts, or invented_prompts(n).")
    if not tokenizer.chat_template and any(isinstance(prompt, Prompt) and prompt.system for prompt in prompts):
        raise InvalidConfigError("Prompts with a system message need a chat template, but this tokenizer has none.")
    if num_turns > 1 and not tokenizer.chat_template:
        raise InvalidConfigError(
            f"num_turns={num_turns} needs a chat template, but this tokenizer has none.", "Use num_turns=1."
        )
    invents = any(isinstance(prompt, Prompt) and len(prompt.turns) < num_turns for prompt in prompts)
    if invents and not _encode_turn(tokenizer, [], None):
        raise InvalidConfigError(
            "This tokenizer has no chat template and no token that begins or ends a text, so the model cannot invent "
            "prompts.",
            "Give prompts.",
        )


def _encode_turn(tokenizer: Any, messages: Sequence[Message], user_text: str | None) -> list[int]:
    """Return the token ids of a prompt: `user_text` after the earlier messages, up to the answer.

    Without a text the prompt ends at the start of the user's turn, so that the model invents it. Without a chat
    template the text stands alone; without both, the prompt is the beginning token or else the end token.
    """
    if not tokenizer.chat_template:
        begin = [token for token in (tokenizer.bos_token_id, tokenizer.eos_token_id) if token is not None][:1]
        return list(tokenizer(user_text)["input_ids"]) if user_text is not None else begin
    turn = {"role": "user", "content": MARK if user_text is None else user_text}
    text = rendered(tokenizer, [*messages, turn], answer_next=user_text is not None)
    if user_text is None and MARK not in text:
        raise InvalidConfigError(
            "This chat template changes the user's text, so the model cannot invent user turns.", "Give prompts."
        )
    known = text if user_text is not None else text[: text.index(MARK)]
    return list(tokenizer(known, add_special_tokens=False)["input_ids"])


def _plan(prompts: Sequence[Prompt | str], config: DistillConfig, tokenizer: Any) -> list[list[_Dialog]]:
    """Group the prompts into parts of one temperature and similar length, for little padding; skip long prompts."""
    check_prompts(prompts, tokenizer, config.num_turns)
    by_temperature: dict[float, list[tuple[int, _Dialog]]] = {}
    for number, given in enumerate(prompts):
        prompt = given if isinstance(given, Prompt) else Prompt((given,), "given")
        temperature = float(config.temperatures[number % len(config.temperatures)])
        system: list[Message] = [{"role": "system", "content": prompt.system}] if prompt.system else []
        dialog = _Dialog(number, prompt.source, temperature, list(prompt.turns[: config.num_turns]), system)
        length = len(_encode_turn(tokenizer, system, dialog.pending[0])) if dialog.pending else 0
        if length <= config.max_prompt_tokens:
            by_temperature.setdefault(temperature, []).append((length, dialog))
    if not by_temperature:
        raise InvalidConfigError(
            f"Every prompt is longer than max_prompt_tokens={config.max_prompt_tokens}.", "Raise it."
        )
    size = config.batch_size * config.batches_per_part
    parts = []
    for _, dialogs in sorted(by_temperature.items()):
        ordered = [dialog for _, dialog in sorted(dialogs, key=lambda pair: pair[0])]
        parts += [ordered[start : start + size] for start in range(0, len(ordered), size)]
    return parts


def check_new_data(folder: Path) -> None:
    """Raise `InvalidConfigError` if a directory without settings of `distill` has data."""
    data = folder / "data"
    if not (folder / SETTINGS).exists() and data.exists() and (not data.is_dir() or any(data.iterdir())):
        raise InvalidConfigError(f"{folder} has data that distill did not write.", "Use another directory.")


def _claim(folder: Path, settings: dict[str, Any]) -> None:
    """Create the directory with its settings file, or check that the run in it can be resumed; clear partial files."""
    path = folder / SETTINGS
    clear_partials(folder / "data")
    if not path.exists():
        check_new_data(folder)
        (folder / "data").mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(settings, indent=1))
        return
    known = read_state(path, folder)
    differing = [name for name in settings if known.get(name) != settings[name]]
    if differing:
        changes = ", ".join(f"{name} {shortened(known.get(name))}, now {settings[name]!r}" for name in differing)
        raise InvalidConfigError(
            f"{folder} was distilled with other settings: {changes}.",
            "Use the same settings to resume, or another directory.",
        )
    _, parquet = datasets_package("Distilling")
    for part in sorted((folder / "data").glob("part-*.parquet")):
        open_regular(part).close()
        try:
            fault = ", ".join(sorted(set(ROW_FIELDS) - set(parquet.read_schema(part).names)))
            fault = f"lacks {fault}" if fault else ""
        except Exception as error:  # pyarrow raises many classes
            fault = f"cannot be read: {error}"
        if fault:
            raise InvalidConfigError(f"{part} {fault}.", "Delete it and run the same command to write it again.")


# ------------------------------------------------------------------------------------------------------ one part


def _answer_part(
    teacher: Teacher, tokenizer: Any, config: DistillConfig, dialogs: Sequence[_Dialog], label: str
) -> list[dict[str, Any]]:
    """Let the teacher answer every turn of a part's conversations; return a row per conversation with an answer.

    A conversation ends early if an answer is cut or dropped, its prompt is too long or empty, or an invented turn is
    empty or dropped. `label` is a unique name of the part, from which the random seeds are derived.
    """
    active, temperature = list(dialogs), dialogs[0].temperature  # the same in the whole part, see `_plan`
    for turn in range(config.num_turns):
        unprompted = [dialog for dialog in active if not dialog.pending]
        openings = [_encode_turn(tokenizer, dialog.messages, None) for dialog in unprompted]
        call = f"{label}/{turn}"
        invented = teacher.generate(openings, config.invention_temperature, config.max_invented_tokens, f"{call}/user")
        for dialog, ids in zip(unprompted, invented, strict=True):
            text = tokenizer.decode(ids or [], skip_special_tokens=True).strip()
            dialog.pending += [text] if text else []
        active = [dialog for dialog in active if dialog.pending]
        encoded = {dialog.number: _encode_turn(tokenizer, dialog.messages, dialog.pending[0]) for dialog in active}
        active = [dialog for dialog in active if 0 < len(encoded[dialog.number]) <= config.max_prompt_tokens]
        prompts = [encoded[dialog.number] for dialog in active]
        answers = teacher.generate(prompts, temperature, config.max_new_tokens, f"{call}/answer")
        triples = zip(active, prompts, answers, strict=True)
        answered = [(dialog, prompt, answer) for dialog, prompt, answer in triples if answer is not None]
        for dialog, prompt, answer in answered:
            text = tokenizer.decode(answer, skip_special_tokens=True)
            dialog.add(prompt, answer, text, "stop" if teacher.ended(answer) else "length")
        active = [dialog for dialog, _, _ in answered if dialog.finish_reason == "stop"]
    return [
        {"model": teacher.name, **{name: getattr(dialog, name) for name in ROW_FIELDS}}
        for dialog in dialogs
        if dialog.finish_reason
    ]
