"""The training commands: `hf-specdec distill | train medusa | train eagle | tree`, also under `accelerate launch`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel, TrainingArguments, set_seed

from hf_specdec import training, viz
from hf_specdec.demo import load_target
from hf_specdec.errors import InvalidConfigError
from hf_specdec.heads.eagle import EagleConfig, EagleHead
from hf_specdec.heads.eagle3 import Eagle3Config, Eagle3Head
from hf_specdec.heads.hub import load_head
from hf_specdec.heads.medusa import MedusaConfig, MedusaHeads
from hf_specdec.target import LAST
from hf_specdec.training.processes import processes

Model = Annotated[str | None, typer.Option(help="Path or Hub id; default: the packaged SmolLM2-135M-Instruct.")]
Output = Annotated[Path, typer.Option(help="Directory to write to; run the same command again to go on there.")]
Dtype = Annotated[Literal["float32", "bfloat16", "float16"], typer.Option(help="Of the target's weights.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Data = Annotated[list[str], typer.Option(help="What `distill` wrote, a .jsonl file or a dataset; may be repeated.")]
Features = Annotated[
    Path | None, typer.Option(help="Capture the target's features here once; else they are made in every step.")
]
MaxLength = Annotated[int, typer.Option(min=8, help="Longer conversations are cut.")]
Epochs = Annotated[float, typer.Option(min=0.0, help="Passes over the data.")]
MaxSteps = Annotated[int, typer.Option(help="Optimiser steps; -1 follows the epochs.")]
Batch = Annotated[int, typer.Option(min=1, help="Conversations per process and forward.")]
Accumulate = Annotated[int, typer.Option(min=1, help="Forwards per optimiser step.")]
Rate = Annotated[float, typer.Option(min=0.0, help="Highest learning rate.")]
Vocabulary = Annotated[
    int | None, typer.Option(min=1, help="Draft over so many of the most frequent tokens; default: all.")
]
Seed = Annotated[int, typer.Option(help="Of initial weights, order and noise.")]
More = Annotated[
    Path | None,
    typer.Option("--arguments", help="JSON file of further transformers TrainingArguments (bf16, fsdp, ...)."),
]

Fields = Annotated[
    Path | None,
    typer.Option(help="JSON file of further fields of the head's config (fc_norm, intermediate_size, ...)."),
]

train = typer.Typer(help="Train a draft head for a model from its own answers.", no_args_is_help=True)


def distill(
    output: Output,
    prompts: Annotated[str | None, typer.Option(help="File of prompts, or a dataset's name.")] = None,
    invent: Annotated[int, typer.Option(min=0, help="Prompts that the model makes up, besides.")] = 0,
    model: Model = None,
    split: Annotated[str, typer.Option(help="Of a dataset.")] = "train",
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts at most.")] = None,
    temperature: Annotated[list[float] | None, typer.Option(min=0.0, help="Repeat for a mix; 0 is greedy.")] = None,
    turns: Annotated[int, typer.Option(min=1, help="User turns; missing ones are invented.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Length of an answer at most.")] = 512,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts per generate() call.")] = 32,
    seed: Annotated[int, typer.Option(help="Of all draws.")] = 0,
    dtype: Dtype = "bfloat16",
    as_json: Json = False,
) -> None:
    """Let a model answer prompts, and keep prompts and answers to train heads on."""
    if prompts is None and not invent:
        raise InvalidConfigError("There is nothing to answer.", "Give --prompts, or --invent N.")
    asked = training.read_prompts(prompts, split=split, limit=limit) if prompts is not None else []
    target, tokenizer = _target(model, dtype)
    config = training.DistillConfig(
        max_new_tokens=max_new_tokens, num_turns=turns, batch_size=batch_size, seed=seed,
        temperatures=tuple(temperature or training.DistillConfig().temperatures),
    )  # fmt: skip
    training.distill(target, tokenizer, [*asked, *training.invented_prompts(invent)], output, config)
    talks = training.read_conversations(output)
    answered = sum(sum(talk.loss_mask) for talk in talks)
    _tell({"output": str(output), "conversations": len(talks), "answer_tokens": answered}, as_json)


@train.command()
def medusa(
    data: Data,
    output: Output,
    model: Model = None,
    num_heads: Annotated[int, typer.Option(min=1, help="Tokens drafted ahead.")] = 4,
    num_layers: Annotated[int, typer.Option(min=1, help="Residual blocks per head.")] = 1,
    own_lm_head: Annotated[bool, typer.Option(help="An lm_head per head, not the target's.")] = False,
    joint: Annotated[bool, typer.Option(help="Medusa-2: train an adapter of the target, too, and merge it.")] = False,
    draft_vocab_size: Vocabulary = None,
    head_fields: Fields = None,
    features: Features = None,
    max_length: MaxLength = 2048,
    epochs: Epochs = 2,
    max_steps: MaxSteps = -1,
    batch_size: Batch = 8,
    accumulate: Accumulate = 1,
    learning_rate: Rate = 1e-3,
    seed: Seed = 0,
    more: More = None,
    dtype: Dtype = "bfloat16",
    as_json: Json = False,
) -> None:
    """Train Medusa heads (Medusa-1: the target is frozen; with --joint Medusa-2)."""
    set_seed(seed)
    target, tokenizer = _target(model, dtype)
    talks = _conversations(data, tokenizer, max_length)
    config = MedusaConfig.for_target(
        target.config, medusa_num_heads=num_heads, medusa_num_layers=num_layers, shared_lm_head=not own_lm_head,
        draft_vocab_size=draft_vocab_size, **_json(head_fields),
    )  # fmt: skip
    heads = MedusaHeads(config)
    _set_vocabulary(heads, talks)
    heads.start_from(target.get_output_embeddings())
    arguments = training_arguments(output, epochs, max_steps, batch_size, accumulate, learning_rate, seed, more)
    if joint:
        first = training_arguments(
            output / "heads", epochs, max_steps, batch_size, accumulate, learning_rate, seed, more
        )
        adapted = training.train_medusa2(target, heads, talks, arguments, heads_arguments=first, resume=True)
        if processes().is_main_process:
            adapted.merge_and_unload().save_pretrained(output / "model")
            tokenizer.save_pretrained(output / "model")
        heads.config.base_model_name_or_path = str((output / "model").resolve())
    else:
        stored = _capture(target, talks, features, (LAST,))
        heads = training.train_medusa(target, heads, stored, arguments, resume=True)
    _finish(heads, output, as_json)


@train.command()
def eagle(
    data: Data,
    output: Output,
    model: Model = None,
    version: Annotated[int, typer.Option(min=1, max=3, help="1 (also drafts EAGLE-2's trees) or 3.")] = 3,
    aligned_steps: Annotated[int | None, typer.Option(min=1, help="Drafted levels per step of training.")] = None,
    initial_head: Annotated[str | None, typer.Option(help="Go on from this head.")] = None,
    draft_vocab_size: Vocabulary = None,
    head_fields: Fields = None,
    features: Features = None,
    max_length: MaxLength = 2048,
    epochs: Epochs = 2,
    max_steps: MaxSteps = -1,
    batch_size: Batch = 8,
    accumulate: Accumulate = 1,
    learning_rate: Rate = 3e-4,
    seed: Seed = 0,
    more: More = None,
    dtype: Dtype = "bfloat16",
    as_json: Json = False,
) -> None:
    """Train an EAGLE head: version 1, or version 3 with an lm_head of its own."""
    if version == 2:
        raise InvalidConfigError("EAGLE-2 is EAGLE-1's weights with another tree.", "Use --version 1.")
    set_seed(seed)
    target, tokenizer = _target(model, dtype)
    talks = _conversations(data, tokenizer, max_length)
    fields = {"draft_vocab_size": draft_vocab_size, **_json(head_fields)}
    head: EagleHead | Eagle3Head
    if initial_head is not None:
        loaded = load_head(initial_head)
        if not isinstance(loaded, EagleHead | Eagle3Head):
            raise InvalidConfigError(f"{initial_head} is no EAGLE head but {type(loaded).__name__}.")
        head = loaded.float()
    elif version == 1:
        head = EagleHead(EagleConfig.for_target(target.config, **{"bias": False, **fields}))
        _set_vocabulary(head, talks)
    else:
        head = Eagle3Head(Eagle3Config.for_target(target.config, **fields))
        _set_vocabulary(head, talks)
        training.start_from_target(head, target)
    recipe = training.EagleTrainingConfig.for_head(head)
    if aligned_steps is not None:
        recipe = recipe.with_steps(aligned_steps)
    stored = _capture(target, talks, features, tuple(dict.fromkeys((*head.feature_layers, LAST))))
    arguments = training_arguments(output, epochs, max_steps, batch_size, accumulate, learning_rate, seed, more)
    head = training.train_eagle(target, head, stored, arguments, recipe, resume=True)
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
    dtype: Dtype = "bfloat16",
    as_json: Json = False,
) -> None:
    """Find the static tree that pays most for a head on this device."""
    target, tokenizer = _target(model, dtype)
    talks = _conversations(data, tokenizer, 2048)[:limit]
    head = load_head(drafter).to(target.device, target.dtype)
    found = training.search_tree(
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


def _target(name: str | None, dtype: str) -> tuple[PreTrainedModel, Any]:
    """A target with its tokenizer, on this process's device."""
    target, tokenizer = load_target(name, getattr(torch, dtype))
    return target.to(processes().device).eval(), tokenizer


def training_arguments(
    output: Path,
    epochs: float,
    max_steps: int,
    batch_size: int,
    accumulate: int,
    learning_rate: float,
    seed: int,
    more: Path | None,
) -> TrainingArguments:
    """Arguments for the Trainer; those of the file win.

    Raises:
        InvalidConfigError: A file that cannot be read, or arguments that transformers refuses.
    """
    given: dict[str, Any] = {
        "output_dir": str(output), "num_train_epochs": epochs, "max_steps": max_steps,
        "per_device_train_batch_size": batch_size, "gradient_accumulation_steps": accumulate,
        "learning_rate": learning_rate, "lr_scheduler_type": "cosine", "warmup_steps": 40, "adam_beta2": 0.95,
        "max_grad_norm": 0.5, "logging_steps": 10, "save_steps": 100, "save_total_limit": 2, "report_to": "none",
        "train_sampling_strategy": "group_by_length", "seed": seed,
        "ddp_find_unused_parameters": False,
        "use_cpu": not torch.accelerator.is_available(),
    }  # fmt: skip
    given.update(_json(more))
    try:
        return TrainingArguments(**given)
    except (ValueError, TypeError) as error:
        raise InvalidConfigError(f"The training arguments cannot be used: {error}.") from error


def _json(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidConfigError(f"{path} cannot be read: {error}.") from error
    if not isinstance(found, dict):
        raise InvalidConfigError(f"{path} holds no JSON object.", 'Expected something like {"bf16": true}.')
    return found


def _conversations(data: list[str], tokenizer: Any, max_length: int) -> list[training.Conversation]:
    talks = training.read_conversations(*data, tokenizer=tokenizer)
    cut = [training.Conversation(talk.input_ids[:max_length], talk.loss_mask[:max_length]) for talk in talks]
    kept = [talk for talk in cut if sum(talk.loss_mask) > 1]
    if not kept:
        raise InvalidConfigError(f"{', '.join(data)} holds no answers.", "`hf-specdec distill` makes some.")
    return kept


def _set_vocabulary(head: EagleHead | Eagle3Head | MedusaHeads, talks: list[training.Conversation]) -> None:
    size = head.config.draft_vocab_size
    if size is not None:
        head.set_hot_token_ids(training.most_frequent_tokens(talks, size))


def _capture(
    target: PreTrainedModel, talks: list[training.Conversation], folder: Path | None, layers: tuple[int, ...]
) -> training.FeatureStore | list[training.Conversation]:
    if folder is None:
        return talks
    size = training.feature_bytes(target, talks, layers)
    Console(stderr=True).print(f"{size / 1e9:.2f} GB of features in {folder}", highlight=False)
    with processes().main_process_first():
        return training.capture_features(target, talks, folder, layers=layers, progress=True)


def _finish(head: EagleHead | Eagle3Head | MedusaHeads, output: Path, as_json: bool) -> None:
    """Store the head and the picture of its run."""
    if not processes().is_main_process:
        return
    head.to(torch.bfloat16).save_pretrained(output)
    log = json.loads((output / "trainer_state.json").read_text())["log_history"]
    rows = [row for row in log if "predicted_tau" in row]
    if rows:
        viz.save_plot(viz.plot_run(log), output / "training.png")
    last = {name: rows[-1][name] for name in rows[-1] if name.startswith(("top1", "predicted"))} if rows else {}
    _tell({"output": str(output), **last}, as_json)


def _tell(result: dict[str, Any], as_json: bool) -> None:
    if not processes().is_main_process:
        return
    if as_json:
        typer.echo(json.dumps(result))
        return
    for name, value in result.items():
        typer.echo(f"{name}: {value:.3f}" if isinstance(value, float) else f"{name}: {value}")
