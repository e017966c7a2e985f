"""What the commands of training share: the target and the data they work on, and what they tell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from hf_specdec.errors import InvalidConfigError
from hf_specdec.generation.loading import load_target, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_specdec.training import Conversation

Output = Annotated[Path, typer.Option(help="Directory to write to; run the same command again to go on there.")]
Data = Annotated[list[str], typer.Option(help="What `distill` wrote, a .jsonl file or a dataset; may be repeated.")]


def training_package() -> Any:
    """The package that does the work: transformers' Trainer and what it imports, which no other command needs."""
    from hf_specdec import training

    return training


def target_of(name: str | None, dtype: str) -> tuple[PreTrainedModel, Any]:
    """A target with its tokenizer, on this process's device."""
    from hf_specdec.training.processes import processes

    target, tokenizer = load_target(name, dtype)
    return target.to(processes().device).eval(), tokenizer


def is_main() -> bool:
    """Whether this process speaks for all."""
    from hf_specdec.training.processes import processes

    return bool(processes().is_main_process)


def wait_for_all() -> None:
    """A process that ends takes those that still work with it."""
    from hf_specdec.training.processes import processes

    processes().wait_for_everyone()


def conversations_of(data: list[str], model: str | None, max_length: int) -> list[Conversation]:
    """What to learn from, cut to a length.

    Raises:
        InvalidConfigError: There are no answers in it.
    """
    training = training_package()
    talks = training.read_conversations(*data, tokenizer=load_tokenizer(model))
    cut = [training.Conversation(talk.input_ids[:max_length], talk.loss_mask[:max_length]) for talk in talks]
    kept = [talk for talk in cut if sum(talk.loss_mask) > 1]
    if not kept:
        raise InvalidConfigError(f"{', '.join(data)} holds no answers.", "`hf-specdec distill` makes some.")
    return kept


def note(text: str) -> None:
    """A line for people, on stderr."""
    if is_main():
        Console(stderr=True).print(text, highlight=False, markup=False, soft_wrap=True)


def tell(result: dict[str, Any], as_json: bool) -> None:
    """A command's result, on stdout."""
    if not is_main():
        return
    if as_json:
        typer.echo(json.dumps(result))
        return
    for name, value in result.items():
        typer.echo(f"{name}: {value:.3f}" if isinstance(value, float) else f"{name}: {value}")
