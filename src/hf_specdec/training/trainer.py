"""What every head's training shares: transformers' Trainer around a head with its loss.

An objective is a module that holds the head and nothing else of its own, so that checkpoints, optimisers, DDP and
FSDP see the head alone; the frozen target stays outside.
"""

from __future__ import annotations

import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import EvalPrediction, SchedulerType

from hf_specdec.atomic import directory_lock, write_text
from hf_specdec.errors import CheckpointFormatError, InvalidConfigError
from hf_specdec.training.conversations import Conversation, check_tokens
from hf_specdec.training.estimate import estimate_run
from hf_specdec.training.features import FeatureStore, collate, features_of
from hf_specdec.training.measures import Counts, HeadLoss, predicted_tau
from hf_specdec.training.modes import check_trainable, training_modes
from hf_specdec.training.progress import say, show_progress
from hf_specdec.training.runs import RUN_NAME, check_processes, check_same_run, last_checkpoint, reading, run_facts
from hf_specdec.verification.features import LAST
from hf_specdec.verification.model import text_config

TrainingData = FeatureStore | Sequence[Conversation]
"""Captured features, or conversations whose features are made in every step."""


class Objective(nn.Module, ABC):
    """A head and its loss.

    Attributes:
        head: What is trained.
        layers: Which of the target's hidden states `forward` is given, the teacher's (`LAST`) at the end; none where
            it runs the target itself.
        learning_rate_multiplier: Of every parameter of the head, relative to others that are trained with it.
        progress: How much of the run is done, 0 to 1; the trainer keeps it.
        recipe: The objective's own settings, a dataclass.
    """

    head: Any
    recipe: Any
    layers: tuple[int, ...] = (LAST,)
    learning_rate_multiplier: float = 1.0
    progress: float = 0.0

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    @property
    def dtype(self) -> torch.dtype:
        """What the head computes in, outside of autocast: float32, or float64 where its weights are."""
        return torch.promote_types(next(self.head.parameters()).dtype, torch.float32)

    @abstractmethod
    def forward(
        self, input_ids: Tensor, loss_mask: Tensor, lengths: Tensor, features: Tensor, measure: int = 0
    ) -> HeadLoss:
        """The loss of right-padded conversations.

        Args:
            input_ids: `[B, T]`.
            loss_mask: `[B, T]` True at answers.
            lengths: `[B]` how many tokens are real.
            features: `[B, T, layers * D]` of the target.
            measure: R, how many ranks of drafted tokens to compare with the target's choice; 0 compares none.
        """


class _Tokens(Dataset[dict[str, Tensor]]):
    """Conversations as the trainer reads them; their features are not known yet."""

    def __init__(self, conversations: Sequence[Conversation]) -> None:
        self._conversations = conversations
        self.lengths = [len(conversation.input_ids) for conversation in conversations]

    def __len__(self) -> int:
        return len(self._conversations)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        conversation = self._conversations[index]
        mask = torch.tensor(conversation.loss_mask, dtype=torch.bool, device="cpu")
        return {"input_ids": torch.tensor(conversation.input_ids, device="cpu"), "loss_mask": mask}


class _ByLength(LengthGroupedSampler):
    """transformers' sampler of similar lengths, in an order that follows from seed and epoch: a run that is resumed
    in a later epoch goes on in the same one.
    """

    def __init__(self, batch_size: int, lengths: list[int], seed: int) -> None:
        super().__init__(batch_size, lengths=lengths)
        self._seed, self._epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Called by the DataLoader before each epoch."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator = torch.Generator().manual_seed(self._seed + self._epoch)
        order: Iterator[int] = super().__iter__()
        return order


class HeadTrainer(Trainer):
    """transformers' Trainer for an objective.

    Its log has, beside the loss, `top1_accuracy_d`: how often the d-th drafted token is the target's greedy choice,
    and `predicted_tau`: the accepted length of a greedy chain with these accuracies.

    Args:
        objective: What is trained.
        target: The frozen target; it makes features where `data` has none.
        data: What to train on.
        arguments: transformers' training arguments.
        held_out: What to measure on and never to train on; the log then has `eval_tau`, the accepted length of greedy
            chains there, and `eval_accepted_d`, how often they get d tokens far.
    """

    def __init__(
        self, objective: Objective, target: PreTrainedModel, data: TrainingData, arguments: TrainingArguments,
        held_out: TrainingData | None = None,
    ) -> None:  # fmt: skip
        dataset = as_dataset(data)
        if not dataset.lengths:
            raise InvalidConfigError("There are no conversations to train on.")
        arguments = copy.copy(arguments)
        arguments.remove_unused_columns = False  # an objective takes all of them
        super().__init__(
            model=objective, args=arguments, train_dataset=dataset,
            data_collator=partial(collate, vocab_size=int(text_config(target).vocab_size)),
            eval_dataset=None if held_out is None else as_dataset(held_out), compute_metrics=_metrics,
        )  # fmt: skip
        self.progress = show_progress(self)
        self._objective, self._target = objective, target
        self._columns = columns_of(data, objective.layers)
        self._held_out_columns = None if held_out is None else columns_of(held_out, objective.layers)
        self._right: Tensor | float = 0.0
        self._counted: Tensor | float = 0.0

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Tensor], return_outputs: bool = False, **_: Any
    ) -> Tensor | tuple[Tensor, HeadLoss]:
        """Complete the batch, and keep count of right tokens where the next log wants it."""
        inputs = with_features(inputs, self._target, self._objective.layers, self._columns)
        measure = (self.state.global_step + 1) % max(int(self.state.logging_steps or 1), 1) == 0
        self._objective.progress = self.state.global_step / max(self.state.max_steps, 1)
        outputs: HeadLoss = model(**inputs, measure=int(measure))
        if outputs.counts is not None:
            both = self.accelerator.reduce(torch.stack([outputs.counts.right[:, 0], outputs.counts.counted]).float())
            self._right, self._counted = self._right + both[0].cpu(), self._counted + both[1].cpu()
        return (outputs.loss, outputs) if return_outputs else outputs.loss

    def rehearse(self, numbers: Sequence[int]) -> Tensor:
        """The loss of a batch of these conversations, outside of training: it leaves nothing but gradients."""
        batch = self._prepare_inputs(collate([self.train_dataset[number] for number in numbers]))
        inputs = with_features(batch, self._target, self._objective.layers, self._columns)
        self._objective.progress = 1.0  # no step takes longer than the last; training sets it again
        with torch.random.fork_rng(), self.accelerator.autocast():
            outputs: HeadLoss = self._objective(**inputs)
        return outputs.loss

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Tensor], *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Loss and counts of a held-out batch, as the Trainer gathers them: `[1, K, 4]`, predictions and labels."""
        batch, layers = self._prepare_inputs(inputs), self._objective.layers
        inputs = with_features(batch, self._target, layers, self._held_out_columns)
        with torch.no_grad(), self.compute_loss_context_manager():
            outputs: HeadLoss = model(**inputs, measure=1)
        assert outputs.counts is not None
        packed = outputs.counts.packed()[None]
        return outputs.loss.detach(), packed, packed

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the accuracies since the last log to its row."""
        if "loss" in logs and isinstance(self._right, Tensor) and isinstance(self._counted, Tensor):
            accuracies = (self._right / self._counted.clamp(min=1)).tolist()
            logs.update({f"top1_accuracy_{depth}": value for depth, value in enumerate(accuracies, start=1)})
            logs["predicted_tau"] = predicted_tau(accuracies)
            self._right = self._counted = 0.0
        super().log(logs, start_time)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The Trainer's own, with another rate for the head where the objective asks for one."""
        factor = self._objective.learning_rate_multiplier
        if self.optimizer is None and factor != 1.0:
            trained = [(n, p) for n, p in self._objective.named_parameters() if p.requires_grad]
            make, options = self.get_optimizer_cls_and_kwargs(self.args, self._objective)
            rates = {True: options["lr"] * factor, False: options["lr"]}
            groups = [
                {"params": [p for n, p in trained if n.startswith("head.") is of_head], "lr": rates[of_head]}
                for of_head in (True, False)
            ]
            self.optimizer: torch.optim.Optimizer = make([group for group in groups if group["params"]], **options)
            return self.optimizer
        return super().create_optimizer()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """An objective's weights, all of them and no others.

        Raises:
            CheckpointFormatError: The checkpoint is of another head.
        """
        if self.is_fsdp_enabled:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        with reading(resume_from_checkpoint):
            tensors = load_file(Path(resume_from_checkpoint) / "model.safetensors")
        differing = tensors.keys() ^ self._objective.state_dict().keys()
        if differing:
            raise CheckpointFormatError(
                f"{resume_from_checkpoint} is a checkpoint of another head: {', '.join(sorted(differing)[:4])} ...",
                "Give another output directory.",
            )
        self._objective.load_state_dict(tensors, strict=False)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """The Trainer's own; a `CheckpointFormatError` where the files are damaged."""
        with reading(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """The Trainer's own; a `CheckpointFormatError` where the file is damaged."""
        with reading(checkpoint):
            super()._load_rng_state(checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        """The Trainer's own; a `CheckpointFormatError` where the file is damaged."""
        with reading(checkpoint):
            super()._load_scaler(checkpoint)

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int] | None:
        """The lengths are known: the Trainer would read every feature to find them."""
        if self.args.train_sampling_strategy == "group_by_length":
            size = self.args.train_batch_size * self.args.gradient_accumulation_steps
            return _ByLength(size, self.train_dataset.lengths, self.args.data_seed or self.args.seed)
        sampler: Sampler[int] | None = super()._get_train_sampler(train_dataset)
        return sampler


def _metrics(gathered: EvalPrediction) -> dict[str, float]:
    """Of held-out conversations, from the counts of all their batches `[N, K, 4]`."""
    acceptance = Counts.of(torch.as_tensor(gathered.predictions, device="cpu").sum(0)).acceptance
    return {"tau": 1.0 + sum(acceptance), **{f"accepted_{depth}": value for depth, value in enumerate(acceptance, 1)}}


@training_modes()
def fit(
    objective: Objective, target: PreTrainedModel, data: TrainingData, arguments: TrainingArguments, *, resume: bool,
    held_out: TrainingData | None = None,
) -> Any:  # fmt: skip
    """Train an objective's head in place, leave the log in `arguments.output_dir`, and return the head.

    Args:
        objective, target, data, arguments, held_out: See `HeadTrainer`. Where the arguments ask for it
            (`head_arguments(..., held_out=True)` does), the head is measured on `held_out` as it learns, and the best
            one is what is returned.
        resume: Go on from the last whole checkpoint in `arguments.output_dir`, if there is one.

    Returns:
        The head. Under FSDP what was trained lies in shards: there it is a new head with the gathered weights, on the
        main process, and an untrained one on the others.

    Raises:
        InvalidConfigError: FSDP in a single process, weights made in inference mode, tokens that the target
            does not know, or a directory whose run has another head, settings or data.
        DrafterMismatchError: The head was made for another model.
    """
    objective.head.check_sizes(text_config(target))
    for talks in (data, held_out):
        if not isinstance(talks, FeatureStore | None):
            check_tokens(talks, int(text_config(target).vocab_size))
    check_trainable(objective.head, target)
    check_processes(arguments)
    objective.head.float()  # what a head was made or loaded in is too coarse for small updates
    checkpoint = last_checkpoint(Path(arguments.output_dir)) if resume else None
    facts = run_facts(objective.head, objective.recipe, as_dataset(data).lengths)
    if checkpoint is not None:
        check_same_run(Path(arguments.output_dir), facts)
    trainer = HeadTrainer(objective, target, data, arguments, held_out)
    if trainer.is_world_process_zero() and not arguments.disable_tqdm and not trainer.is_fsdp_enabled:
        done = 0 if checkpoint is None else int(checkpoint.rsplit("-", 1)[1])
        say(str(estimate_run(trainer.rehearse, objective, trainer.train_dataset.lengths, trainer.args, done)))
    if checkpoint is None and trainer.is_world_process_zero():
        write_text(Path(arguments.output_dir) / RUN_NAME, json.dumps(facts, indent=1))
    held = directory_lock(Path(arguments.output_dir), "train") if trainer.is_world_process_zero() else nullcontext()
    with closing(trainer.progress), held:
        trainer.train(resume_from_checkpoint=checkpoint)
        trainer.save_state()
    objective.head.config.recipe = _recipe(objective, len(trainer.train_dataset), trainer)
    row = _measured(trainer)
    objective.head.config.tau = {HELD_OUT_TAU: round(row["eval_tau"], 2)} if row else None
    if not trainer.is_fsdp_enabled:
        return objective.head
    gathered = trainer.accelerator.get_state_dict(trainer.model_wrapped) or {}
    head = type(objective.head)(objective.head.config)
    of_head = {name.removeprefix("head."): tensor for name, tensor in gathered.items() if name.startswith("head.")}
    if of_head:
        head.load_state_dict(of_head)
    return head


HELD_OUT_TAU = "greedy chains on held-out conversations"
"""What a head's config says of the head that a run has returned."""


def _measured(trainer: Trainer) -> dict[str, Any]:
    """The log's row of the head that is returned: the best one where it was loaded, else the last; empty if none."""
    rows = [row for row in trainer.state.log_history if "eval_tau" in row]
    if trainer.args.load_best_model_at_end and trainer.state.best_model_checkpoint:
        rows = [row for row in rows if row["step"] == trainer.state.best_global_step] or rows
    return rows[-1] if rows else {}


def _recipe(objective: Objective, num_conversations: int, trainer: Trainer) -> dict[str, Any]:
    """What the head's card tells of a run; of several runs in a row, of the last."""
    arguments = trainer.args
    batch = arguments.train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size
    accuracies = [log["predicted_tau"] for log in trainer.state.log_history if "predicted_tau" in log]
    return {
        "objective": type(objective).__name__,
        "conversations": num_conversations,
        "optimiser steps": trainer.state.global_step,
        "batch": batch,
        "learning rate": f"{arguments.learning_rate:g} ({SchedulerType(arguments.lr_scheduler_type).value})",
        **{name.replace("_", " "): value for name, value in asdict(objective.recipe).items()},
        **({"predicted tau at the end, on training batches": round(accuracies[-1], 2)} if accuracies else {}),
        **({"weights of step": row["step"]} if (row := _measured(trainer)) else {}),
    }


def as_dataset(data: TrainingData) -> FeatureStore | _Tokens:
    """What a DataLoader reads; it knows its `lengths`."""
    return data if isinstance(data, FeatureStore) else _Tokens(data)


def with_features(
    batch: dict[str, Tensor], target: PreTrainedModel, layers: Sequence[int], columns: Tensor | None
) -> dict[str, Tensor]:
    """A collated batch with the features an objective reads: captured ones, or the target's now.

    Args:
        batch: What `collate` made.
        target: The frozen target.
        layers: Of the objective; none where it runs the target itself.
        columns: Which of the captured columns, see `columns_of`.
    """
    features = batch.get("features")
    if features is None and layers:
        features = features_of(target, batch["input_ids"], batch["lengths"], layers).to(batch["input_ids"].device)
    elif features is not None and columns is not None:
        features = features[..., columns.to(features.device)]
    return batch if features is None else {**batch, "features": features}


def columns_of(data: TrainingData, wanted: Sequence[int]) -> Tensor | None:
    """Which columns of captured features an objective reads; None is all of them."""
    if not wanted or not isinstance(data, FeatureStore) or tuple(data.layers) == tuple(wanted):
        return None
    if any(layer not in data.layers for layer in wanted):
        raise InvalidConfigError(
            f"The captured features are of the layers {list(data.layers)}, this head reads {list(wanted)}.",
            f"Capture them with layers={list(wanted)}.",
        )
    size = len(data[0]["features"][0]) // len(data.layers)
    return torch.cat([torch.arange(size, device="cpu") + size * data.layers.index(layer) for layer in wanted])
