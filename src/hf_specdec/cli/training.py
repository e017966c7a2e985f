"""The training commands: `hf-specdec distill | train medusa | train eagle | tree`, also under `accelerate launch`.

Everything that can be refused is refused before the target is loaded; the packages of training are imported by these
commands alone.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hf_specdec import viz
from hf_specdec.checkpoints.formats import Head
from hf_specdec.checkpoints.hub import load_head
from hf_specdec.cli.options import (
    Json,
    Model,
    Precision,
    Seed,
    finite,
    need_package,
    read_object,
    writable_directory,
    writable_file,
)
from hf_specdec.errors import InvalidConfigError
from hf_specdec.heads.base import portable_name
from hf_specdec.heads.eagle import EagleConfig, EagleHead
from hf_specdec.heads.eagle3 import Eagle3Config, Eagle3Head
from hf_specdec.heads.medusa import MedusaConfig, MedusaHeads
from hf_specdec.loading import load_config, load_target, load_tokenizer
from hf_specdec.target.features import LAST

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainingArguments

    from hf_specdec.training import Conversation, FeatureStore

Output = Annotated[Path, typer.Option(help="Directory to write to; run the same command again to go on there.")]
Data = Annotated[list[str], typer.Option(help="What `distill` wrote, a .jsonl file or a dataset; may be repeated.")]
Features = Annotated[
    Path | None, typer.Option(help="Capture the target's features here once; else they are made in every step.")
]
MaxLength = Annotated[int, typer.Option(min=8, help="Longer conversations are cut.")]
Epochs = Annotated[float, typer.Option(min=1e-6, callback=finite, help="Passes over the data.")]
MaxSteps = Annotated[int | None, typer.Option(min=-1, help="Optimiser steps, in the place of epochs.")]
Batch = Annotated[int, typer.Option(min=1, help="Conversations per process and forward.")]
Accumulate = Annotated[int, typer.Option(min=1, help="Forwards per optimiser step.")]
Rate = Annotated[float, typer.Option(min=0.0, callback=finite, help="Highest learning rate.")]
Vocabulary = Annotated[
    int | None, typer.Option(min=1, help="Draft over so many of the most frequent tokens; default: all.")
]
More = Annotated[
    Path | None,
    typer.Option("--arguments", help="JSON file of further transformers TrainingArguments (bf16, fsdp, ...)."),
]
Fields = Annotated[
    Path | None,
    typer.Option(help="JSON file of further fields of the head's config (fc_norm, intermediate_size, ...)."),
]
BaseName = Annotated[
    str | None,
    typer.Option(help="Name of the target to write down in the head, where --model is a path: its Hub id."),
]

train = typer.Typer(help="Train a draft head for a model from its own answers.", no_args_is_help=True)


def distill(
    output: Output,
    prompts: Annotated[str | None, typer.Option(help="File of prompts, or a dataset's name.")] = None,
    invent: Annotated[int, typer.Option(min=0, help="Prompts that the model makes up, besides.")] = 0,
    model: Model = None,
    split: Annotated[str, typer.Option(help="Of a dataset.")] = "train",
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts at most.")] = None,
    temperature: Annotated[
        list[float] | None, typer.Option(min=0.0, callback=finite, help="Repeat for a mix; 0 is greedy.")
    ] = None,
    turns: Annotated[int, typer.Option(min=1, help="User turns; missing ones are invented.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Length of an answer at most.")] = 512,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts per generate() call.")] = 32,
    seed: Seed = 0,
    dtype: Precision = "bfloat16",
    as_json: Json = False,
) -> None:
    """Let a model answer prompts, and keep prompts and answers to train heads on."""
    if prompts is None and not invent:
        raise InvalidConfigError("There is nothing to answer.", "Give --prompts, or --invent N.")
    need_package("datasets", "Distilling", "training")
    writable_directory(output, "--output")
    training = _training()
    asked = training.read_prompts(prompts, split=split, limit=limit) if prompts is not None else []
    config = training.DistillConfig(
        max_new_tokens=max_new_tokens, num_turns=turns, batch_size=batch_size, seed=seed,
        temperatures=tuple(temperature or training.DistillConfig().temperatures),
    )  # fmt: skip
    target, tokenizer = _target(model, dtype)
    training.distill(target, tokenizer, [*asked, *training.invented_prompts(invent)], output, config)
    talks = training.read_conversations(output)
    answered = sum(sum(talk.loss_mask) for talk in talks)
    _tell({"output": str(output), "conversations": len(talks), "answer_tokens": answered}, as_json)


@train.command()
def medusa(
    data: Data,
    output: Output,
    model: Model = None,
    base_model_name: BaseName = None,
    num_heads: Annotated[int, typer.Option(min=1, max=64, help="Tokens drafted ahead.")] = 4,
    num_layers: Annotated[int, typer.Option(min=1, max=64, help="Residual blocks per head.")] = 1,
    own_lm_head: Annotated[bool, typer.Option(help="An lm_head per head, not the target's.")] = False,
    joint: Annotated[bool, typer.Option(help="Medusa-2: train an adapter of the target, too, and merge it.")] = False,
    draft_vocab_size: Vocabulary = None,
    head_fields: Fields = None,
    features: Features = None,
    max_length: MaxLength = 2048,
    epochs: Epochs = 2,
    max_steps: MaxSteps = None,
    batch_size: Batch = 8,
    accumulate: Accumulate = 1,
    learning_rate: Rate = 1e-3,
    seed: Seed = 0,
    more: More = None,
    dtype: Precision = "bfloat16",
    as_json: Json = False,
) -> None:
    """Train Medusa heads (Medusa-1: the target is frozen; with --joint Medusa-2)."""
    if joint:
        need_package("peft", "Medusa-2", "training")
    fields = {"draft_vocab_size": draft_vocab_size, **read_object(head_fields, "--head-fields")}
    run = _Run(output, features, read_object(more, "--arguments"), num_train_epochs=epochs,
               max_steps=max_steps or -1, per_device_train_batch_size=batch_size,
               gradient_accumulation_steps=accumulate, learning_rate=learning_rate, seed=seed)  # fmt: skip
    config = MedusaConfig.for_target(
        load_config(model), medusa_num_heads=num_heads, medusa_num_layers=num_layers, shared_lm_head=not own_lm_head,
        **fields,
    )  # fmt: skip
    _name_target(config, base_model_name, path="./model" if joint else None)
    talks = _conversations(data, model, max_length)
    heads = MedusaHeads(config)
    _set_vocabulary(heads, talks)
    training = _training()
    if not joint:
        training.check_same_run(output, training.run_facts(heads, training.MedusaTrainingConfig(), _lengths(talks)))
    target, tokenizer = _target(model, dtype)
    heads.start_from(target.get_output_embeddings())
    if joint:
        adapted = training.train_medusa2(
            target, heads, talks, run.arguments(), heads_arguments=run.arguments("heads"), resume=True
        )
        if _is_main():
            adapted.merge_and_unload().save_pretrained(output / "model")
            tokenizer.save_pretrained(output / "model")
    else:
        heads = training.train_medusa(target, heads, run.data(target, talks, (LAST,)), run.arguments(), resume=True)
    _finish(heads, output, as_json)


@train.command()
def eagle(
    data: Data,
    output: Output,
    model: Model = None,
    base_model_name: BaseName = None,
    version: Annotated[int, typer.Option(min=1, max=3, help="1 (also drafts EAGLE-2's trees) or 3.")] = 3,
    aligned_steps: Annotated[int | None, typer.Option(min=1, help="Drafted levels per step of training.")] = None,
    initial_head: Annotated[str | None, typer.Option(help="Go on from this head.")] = None,
    draft_vocab_size: Vocabulary = None,
    head_fields: Fields = None,
    features: Features = None,
    max_length: MaxLength = 2048,
    epochs: Epochs = 2,
    max_steps: MaxSteps = None,
    batch_size: Batch = 8,
    accumulate: Accumulate = 1,
    learning_rate: Rate = 3e-4,
    seed: Seed = 0,
    more: More = None,
    dtype: Precision = "bfloat16",
    as_json: Json = False,
) -> None:
    """Train an EAGLE head: version 1, or version 3 with an lm_head of its own."""
    if version == 2:
        raise InvalidConfigError("EAGLE-2 is EAGLE-1's weights with another tree.", "Use --version 1.")
    fields = {"draft_vocab_size": draft_vocab_size, **read_object(head_fields, "--head-fields")}
    run = _Run(output, features, read_object(more, "--arguments"), num_train_epochs=epochs,
               max_steps=max_steps or -1, per_device_train_batch_size=batch_size,
               gradient_accumulation_steps=accumulate, learning_rate=learning_rate, seed=seed)  # fmt: skip
    target_config = load_config(model)
    head = _new_eagle(version, target_config, fields) if initial_head is None else _read_eagle(initial_head)
    head.check_sizes(target_config.get_text_config(decoder=True))
    _name_target(head.config, base_model_name)
    talks = _conversations(data, model, max_length)
    if initial_head is None:
        _set_vocabulary(head, talks)
    training = _training()
    recipe = training.EagleTrainingConfig.for_head(head)
    if aligned_steps is not None:
        recipe = recipe.with_steps(aligned_steps)
    training.check_same_run(output, training.run_facts(head, recipe, _lengths(talks)))
    target, _ = _target(model, dtype)
    if initial_head is None and isinstance(head, Eagle3Head):
        misfits = training.start_from_target(head, target)
        reason = f"at random: of the target's parts {', '.join(misfits)} would not fit"
        parts = "from the target's lm_head, final norm and last layer but one"
        _note(f"The head starts {reason if misfits else parts}.")
    stored = run.data(target, talks, tuple(dict.fromkeys((*head.feature_layers, LAST))))
    head = training.train_eagle(target, head, stored, run.arguments(), recipe, resume=True)
    _finish(head, output, as_json)


def tree(
    drafter: Annotated[str, typer.Option(help="Path or Hub id of the head.")],
    data: Data,
    output: Annotated[Path, typer.Option(help="Where to write the head with its tree; may be the head's directory.")],
    model: Model = None,
    num_nodes: Annotated[int | None, typer.Option(min=2, help="Size, root included; default: the fastest.")] = None,
    max_nodes: Annotated[int, typer.Option(min=2, help="Largest size to choose from.")] = 64,
    num_steps: Annotated[int, typer.Option(min=1, help="Deepest level.")] = 5,
    top_k: Annotated[int, typer.Option(min=1, help="Candidates measured per node.")] = 10,
    limit: Annotated[int, typer.Option(min=1, help="Conversations to calibrate on.")] = 200,
    plot: Annotated[Path | None, typer.Option(help="Draw the tree into this file.")] = None,
    dtype: Precision = "bfloat16",
    as_json: Json = False,
) -> None:
    """Find the static tree that pays most for a head on this device."""
    writable_directory(output, "--output")
    writable_file(plot, "--plot")
    if plot is not None:
        need_package("matplotlib", "--plot", "training")
    head = load_head(drafter)
    if (output / "config.json").exists() and output.resolve() != Path(drafter).resolve():
        raise InvalidConfigError(
            f"--output {output} holds another head, it is not the directory of this head.",
            "Give a new one, or the head's.",
        )
    head.check_sizes(load_config(model).get_text_config(decoder=True))
    talks = _conversations(data, model, 2048)[:limit]
    target, _ = _target(model, dtype)
    head = head.to(target.device, target.dtype)
    found = _training().search_tree(
        target, head, talks, num_nodes=num_nodes, max_nodes=max_nodes, num_steps=num_steps, top_k=top_k
    )
    head.save_pretrained(output)
    if plot is not None:
        viz.save_plot(viz.plot_tree(found.choices, found.acceptance), plot)
    if not as_json:
        table = Table("nodes", "expected tau", "verify ms")
        for size, seconds in found.verify_seconds.items():
            table.add_row(str(size), f"{found.expected_tau[size]:.2f}", f"{1e3 * seconds:.1f}")
        if found.verify_seconds:
            Console().print(table)
    tau, choices = found.expected_tau[found.num_nodes], [list(path) for path in found.choices]
    _tell({"output": str(output), "num_nodes": found.num_nodes, "expected_tau": tau, "tree": choices}, as_json)


# ----------------------------------------------------------------------------------------------------- what they share


def _training() -> Any:
    """The package that does the work: transformers' Trainer and what it imports, which no other command needs."""
    from hf_specdec import training

    return training


class _Run:
    """Where a run writes and how it is made; its directories and arguments are checked when it is created."""

    def __init__(self, output: Path, features: Path | None, more: dict[str, Any], **fields: Any) -> None:
        writable_directory(output, "--output")
        writable_directory(features, "--features")
        if (output / "config.json").exists() and not (output / "run.json").exists():
            raise InvalidConfigError(
                f"--output {output} holds a head or a model that no training run here has made.",
                "Give another directory.",
            )
        self._output, self._features, self._more, self._fields = output, features, more, fields
        self.arguments()

    def arguments(self, below: str = "") -> TrainingArguments:
        """For the Trainer, with its checkpoints in a directory below the output."""
        from transformers import set_seed

        set_seed(self._fields["seed"])
        arguments: TrainingArguments = _training().head_arguments(self._output / below, self._more, **self._fields)
        return arguments

    def data(
        self, target: PreTrainedModel, talks: list[Conversation], layers: tuple[int, ...]
    ) -> FeatureStore | list[Conversation]:
        """What to train on: captured features, or conversations."""
        if self._features is None:
            return talks
        training = _training()
        size = training.feature_bytes(target, talks, layers)
        _note(f"{size / 1e9:.2f} GB of features in {self._features}")
        captured: FeatureStore = training.capture_features(target, talks, self._features, layers=layers, progress=True)
        return captured


def _new_eagle(version: int, target_config: Any, fields: dict[str, Any]) -> EagleHead | Eagle3Head:
    if version == 1:
        return EagleHead(EagleConfig.for_target(target_config, **{"bias": False, **fields}))
    return Eagle3Head(Eagle3Config.for_target(target_config, **fields))


def _read_eagle(place: str) -> EagleHead | Eagle3Head:
    loaded = load_head(place)
    if not isinstance(loaded, EagleHead | Eagle3Head):
        raise InvalidConfigError(f"{place} is not an EAGLE head but {type(loaded).__name__}.")
    return loaded.float()


def _name_target(config: Any, name: str | None, path: str | None = None) -> None:
    """Write down which model a head is for, never where it lies on this machine.

    Args:
        config: The head's.
        name: What --base-model-name says.
        path: Relative to the head, where the model is saved beside it.
    """
    config.base_model_name_or_path = name or path or portable_name(config.base_model_name_or_path)


def _target(name: str | None, dtype: str) -> tuple[PreTrainedModel, Any]:
    """A target with its tokenizer, on this process's device."""
    from hf_specdec.training.processes import processes

    target, tokenizer = load_target(name, dtype)
    return target.to(processes().device).eval(), tokenizer


def _is_main() -> bool:
    from hf_specdec.training.processes import processes

    return bool(processes().is_main_process)


def _conversations(data: list[str], model: str | None, max_length: int) -> list[Conversation]:
    training = _training()
    talks = training.read_conversations(*data, tokenizer=load_tokenizer(model))
    cut = [training.Conversation(talk.input_ids[:max_length], talk.loss_mask[:max_length]) for talk in talks]
    kept = [talk for talk in cut if sum(talk.loss_mask) > 1]
    if not kept:
        raise InvalidConfigError(f"{', '.join(data)} holds no answers.", "`hf-specdec distill` makes some.")
    return kept


def _lengths(talks: list[Conversation]) -> list[int]:
    return [len(talk.input_ids) for talk in talks]


def _set_vocabulary(head: Head, talks: list[Conversation]) -> None:
    size = head.config.draft_vocab_size
    if size is not None:
        head.set_hot_token_ids(_training().most_frequent_tokens(talks, size))


def _finish(head: Head, output: Path, as_json: bool) -> None:
    """Store the head and the picture of its run."""
    import torch

    if not _is_main():
        return
    head.to(torch.bfloat16).save_pretrained(output)
    log = json.loads((output / "trainer_state.json").read_text())["log_history"]
    rows = [row for row in log if "predicted_tau" in row]
    if rows and importlib.util.find_spec("matplotlib") is None:
        _note("training.png was not drawn: pip install matplotlib.")
    elif rows:
        viz.save_plot(viz.plot_run(log), output / "training.png")
    if head.config.base_model_name_or_path is None:
        _note("The head does not name its target, for --model is a path of this machine: --base-model-name does.")
    last = {name: rows[-1][name] for name in rows[-1] if name.startswith(("top1", "predicted"))} if rows else {}
    _tell({"output": str(output), **last}, as_json)


def _note(text: str) -> None:
    """A line for people, on stderr."""
    if _is_main():
        Console(stderr=True).print(text, highlight=False, markup=False, soft_wrap=True)


def _tell(result: dict[str, Any], as_json: bool) -> None:
    if not _is_main():
        return
    if as_json:
        typer.echo(json.dumps(result))
        return
    for name, value in result.items():
        typer.echo(f"{name}: {value:.3f}" if isinstance(value, float) else f"{name}: {value}")
