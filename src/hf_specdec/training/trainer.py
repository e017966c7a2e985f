"""Training shared by all heads: transformers' Trainer around an objective, which is a head with its loss.

Except in Medusa-2, the target is not a submodule of the objective, so the Trainer, DDP and FSDP see only the head.
"""

from __future__ import annotations

import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import Sampler
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer_utils import EvalPrediction, SchedulerType

from hf_specdec.atomic import directory_lock, write_text
from hf_specdec.errors import CheckpointFormatError, InvalidConfigError
from hf_specdec.training.batches import SeededLengthSampler, as_dataset, collate, columns_of, with_features
from hf_specdec.training.conversations import check_tokens
from hf_specdec.training.estimate import estimate_run
from hf_specdec.training.features import FeatureStore, TrainingData
from hf_specdec.training.measures import Counts, HeadLoss, predicted_tau
from hf_specdec.training.modes import check_trainable, training_modes
from hf_specdec.training.progress import clock, print_line, show_progress
from hf_specdec.training.runs import (
    RUN_NAME,
    check_processes,
    check_same_run,
    fsdp_tensor_names,
    last_checkpoint,
    reading,
    run_facts,
)
from hf_specdec.validation import check_type
from hf_specdec.verification.features import LAST
from hf_specdec.verification.model import text_config

HELD_OUT_TAU = "greedy chains on held-out conversations"
"""Key of the tau (tokens per target forward) on held-out conversations in `head.config.tau`."""


class Objective(nn.Module, ABC):
    """Base class of training objectives: a module that contains a head and computes its loss.

    Attributes:
        head: The head to train.
        layers: Indices of the target's hidden states that `forward` reads. The last is `LAST`, from which the labels
            are computed. Empty if the objective runs the target itself.
        learning_rate_multiplier: Factor on the learning rate of the head's parameters.
        progress: Fraction of the run that is done, 0 to 1; set by the trainer.
        recipe: The objective's settings, a dataclass.
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
        """Dtype of the head's inputs: float32, or float64 for float64 weights."""
        return torch.promote_types(next(self.head.parameters()).dtype, torch.float32)

    @abstractmethod
    def forward(
        self, input_ids: Tensor, loss_mask: Tensor, lengths: Tensor, features: Tensor, measure: int = 0
    ) -> HeadLoss:
        """Return the loss of right-padded conversations, with counts of correct drafted tokens if requested.

        Args:
            input_ids: `[B, T]`.
            loss_mask: `[B, T]` True at answers.
            lengths: `[B]` number of tokens without padding.
            features: `[B, T, layers * D]` hidden states of the target.
            measure: R, number of top drafted tokens to compare with the target's greedy choice; 0 measures nothing.
        """


class HeadTrainer(Trainer):
    """Subclass of transformers' Trainer that trains the head of an objective.

    Its log also has `top1_accuracy_d`, the fraction of d-th drafted tokens that are the target's greedy choice, and
    `predicted_tau`, the tokens per target forward of a greedy chain with these accuracies.

    Args:
        objective: The head and its loss.
        target: The frozen target; it computes the features if `data` has none.
        data: Training data.
        arguments: transformers' training arguments.
        held_out: Evaluation data. Evaluations log `eval_tau`, the tokens per target forward of greedy chains on it,
            and `eval_accepted_d`, the fraction of such chains that are accepted at least to depth d.

    Raises:
        InvalidConfigError: `data` has no conversations, or captured features lack a layer that the objective reads.
    """

    def __init__(
        self, objective: Objective, target: PreTrainedModel, data: TrainingData, arguments: TrainingArguments,
        held_out: TrainingData | None = None,
    ) -> None:  # fmt: skip
        dataset = as_dataset(data)
        if not dataset.lengths:
            raise InvalidConfigError("There are no conversations to train on.")
        arguments = copy.copy(arguments)
        arguments.remove_unused_columns = False  # objectives read all columns
        super().__init__(
            model=objective, args=arguments, train_dataset=dataset,
            data_collator=partial(collate, vocab_size=int(text_config(target).vocab_size)),
            eval_dataset=None if held_out is None else as_dataset(held_out), compute_metrics=_metrics,
        )  # fmt: skip
        self.progress = show_progress(self)
        self._objective, self._target = objective, target
        self._tensor_names = frozenset(objective.state_dict())  # before FSDP wraps the objective and renames them
        self._columns = columns_of(data, objective.layers)
        self._held_out_columns = None if held_out is None else columns_of(held_out, objective.layers)
        self._right: Tensor | float = 0.0
        self._counted: Tensor | float = 0.0

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Tensor], return_outputs: bool = False, **_: Any
    ) -> Tensor | tuple[Tensor, HeadLoss]:
        """Return the loss of a batch, with the `HeadLoss` if requested.

        Sets the objective's `progress`, and counts correct drafted tokens for `log` if this step is logged.
        """
        inputs = with_features(inputs, self._target, self._objective.layers, self._columns)
        measure = (self.state.global_step + 1) % max(int(self.state.logging_steps or 1), 1) == 0
        self._objective.progress = self.state.global_step / max(self.state.max_steps, 1)
        outputs: HeadLoss = model(**inputs, measure=int(measure))
        if outputs.counts is not None:
            sums = self.accelerator.reduce(torch.stack([outputs.counts.right[:, 0], outputs.counts.counted]).float())
            self._right, self._counted = self._right + sums[0].cpu(), self._counted + sums[1].cpu()
        return (outputs.loss, outputs) if return_outputs else outputs.loss

    def rehearse(self, numbers: Sequence[int]) -> Tensor:
        """Return the loss of the training conversations with these indices, for an estimate before the run."""
        batch = self._prepare_inputs(collate([self.train_dataset[number] for number in numbers]))
        inputs = with_features(batch, self._target, self._objective.layers, self._columns)
        self._objective.progress = 1.0  # the last steps are the slowest; training sets it again
        with torch.random.fork_rng(), self.accelerator.autocast():
            outputs: HeadLoss = self._objective(**inputs)
        return outputs.loss

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Tensor], *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return loss, predictions and labels of a held-out batch; the last two are both its counts `[1, K, 4]`."""
        batch, layers = self._prepare_inputs(inputs), self._objective.layers
        inputs = with_features(batch, self._target, layers, self._held_out_columns)
        with torch.no_grad(), self.compute_loss_context_manager():
            outputs: HeadLoss = model(**inputs, measure=1)
        assert outputs.counts is not None
        packed = outputs.counts.packed()[None]
        return outputs.loss.detach(), packed, packed

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as the Trainer does, with the accuracies measured since the last log and the tau that they predict."""
        if "loss" in logs and isinstance(self._right, Tensor) and isinstance(self._counted, Tensor):
            accuracies = (self._right / self._counted.clamp(min=1)).tolist()
            logs.update({f"top1_accuracy_{depth}": value for depth, value in enumerate(accuracies, start=1)})
            logs["predicted_tau"] = predicted_tau(accuracies)
            self._right = self._counted = 0.0
        super().log(logs, start_time)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the Trainer's optimiser; if the head's learning rate differs, it gets its own parameter group."""
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
        """Load the objective's weights from a checkpoint; under FSDP, transformers loads them into `model`.

        Raises:
            CheckpointFormatError: The checkpoint cannot be read or holds other tensors.
        """
        checkpoint, tensors = Path(resume_from_checkpoint), dict[str, Tensor]()
        with reading(resume_from_checkpoint):
            if self.is_fsdp_enabled:
                names = fsdp_tensor_names(checkpoint)
            else:
                tensors = load_file(checkpoint / "model.safetensors")
                names = frozenset(tensors)
        # if the names are unknown, torch compares only sizes when it loads the flattened parameters
        differing = frozenset() if names is None else names ^ self._tensor_names
        if differing:
            raise CheckpointFormatError(
                f"{resume_from_checkpoint} is a checkpoint of another head: {', '.join(sorted(differing)[:4])} ...",
                "Use another output directory.",
            )
        if self.is_fsdp_enabled:
            with reading(resume_from_checkpoint):
                super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        self._objective.load_state_dict(tensors, strict=False)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load as transformers does; raise `CheckpointFormatError` if a file is damaged."""
        with reading(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Load as transformers does; raise `CheckpointFormatError` if the file is damaged."""
        with reading(checkpoint):
            super()._load_rng_state(checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Load as transformers does; raise `CheckpointFormatError` if the file is damaged."""
        with reading(checkpoint):
            super()._load_scaler(checkpoint)

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int] | None:
        """Return the sampler; to group by length, use the dataset's `lengths`: transformers would load all items."""
        if self.args.train_sampling_strategy == "group_by_length":
            size = self.args.train_batch_size * self.args.gradient_accumulation_steps
            seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
            return SeededLengthSampler(size, self.train_dataset.lengths, seed)
        sampler: Sampler[int] | None = super()._get_train_sampler(train_dataset)
        return sampler


def _metrics(gathered: EvalPrediction) -> dict[str, float]:
    """Compute tau and acceptance by depth on held-out conversations from the counts `[N, K, 4]` of all batches."""
    acceptance = Counts.of(torch.as_tensor(gathered.predictions, device="cpu").sum(0)).acceptance
    return {"tau": 1.0 + sum(acceptance), **{f"accepted_{depth}": value for depth, value in enumerate(acceptance, 1)}}


@training_modes()
def fit(
    objective: Objective, target: PreTrainedModel, data: TrainingData, arguments: TrainingArguments, *, resume: bool,
    held_out: TrainingData | None = None,
) -> Any:  # fmt: skip
    """Train an objective's head in place and return it; logs and checkpoints are in `arguments.output_dir`.

    The head is converted to float32, and `recipe`, `tau` and (if it has one) `trained_length` of its config are set;
    the latter stays that of an earlier run if that had longer texts. Unless `disable_tqdm` is set or FSDP is used, an
    estimate of the run is printed first.

    Args:
        objective, target, data, arguments, held_out: See `HeadTrainer`. With `load_best_model_at_end` in the arguments
            (`head_arguments(..., held_out=True)` sets it), the head gets the weights of the checkpoint with the
            best metric on `held_out`.
        resume: Resume from the last complete checkpoint in `arguments.output_dir`, if there is one.

    Returns:
        The head. Under FSDP, which shards the weights, a new head: with the gathered weights on the main process,
        untrained on the others.

    Raises:
        InvalidConfigError: FSDP in a single process, weights created in inference mode, no conversations, token ids
            outside the target's vocabulary, features that lack a layer, an output directory in use by another
            process, or a resumed run that had another head, settings or data.
        CheckpointFormatError: The checkpoint to resume from is damaged or holds other tensors than the head.
        DrafterMismatchError: The head was made for another model.
    """
    check_type("arguments", arguments, TrainingArguments, "head_arguments(folder, {...}) makes them.")
    objective.head.check_sizes(text_config(target))
    for conversations in (data, held_out):
        if not isinstance(conversations, FeatureStore | None):
            check_tokens(conversations, int(text_config(target).vocab_size))
    check_trainable(objective.head, target)
    check_processes(arguments)
    objective.head.float()  # half precision would round small updates away
    checkpoint = last_checkpoint(Path(arguments.output_dir)) if resume else None
    facts = run_facts(objective.head, objective.recipe, as_dataset(data).lengths)
    if checkpoint is not None:
        check_same_run(Path(arguments.output_dir), facts)
    trainer = HeadTrainer(objective, target, data, arguments, held_out)
    if trainer.is_world_process_zero() and not arguments.disable_tqdm and not trainer.is_fsdp_enabled:
        done = 0 if checkpoint is None else int(checkpoint.rsplit("-", 1)[1])
        with clock("Timing three batches"):
            run = estimate_run(trainer.rehearse, objective, trainer.train_dataset.lengths, trainer.args, done)
        print_line(str(run))
    if checkpoint is None and trainer.is_world_process_zero():
        write_text(Path(arguments.output_dir) / RUN_NAME, json.dumps(facts, indent=1))
    lock = directory_lock(Path(arguments.output_dir), "train") if trainer.is_world_process_zero() else nullcontext()
    with closing(trainer.progress), lock:
        trainer.train(resume_from_checkpoint=checkpoint)
        trainer.save_state()
    _describe_run(objective, trainer)
    if not trainer.is_fsdp_enabled:
        return objective.head
    gathered = trainer.accelerator.get_state_dict(trainer.model_wrapped) or {}
    head = type(objective.head)(objective.head.config)
    tensors = {name.removeprefix("head."): tensor for name, tensor in gathered.items() if name.startswith("head.")}
    if tensors:
        head.load_state_dict(tensors)
    return head


def _describe_run(objective: Objective, trainer: HeadTrainer) -> None:
    """Set `recipe`, `tau` and, if it has one, `trained_length` of the head's config."""
    config, lengths, row = objective.head.config, trainer.train_dataset.lengths, _evaluation(trainer)
    config.recipe = _recipe(objective, len(lengths), trainer)
    config.tau = {HELD_OUT_TAU: round(row["eval_tau"], 2)} if row else None
    if hasattr(config, "trained_length"):
        config.trained_length = max(*lengths, config.trained_length or 0)


def _evaluation(trainer: Trainer) -> dict[str, Any]:
    """Return the log entry of the best evaluation if its checkpoint was loaded, else of the last one, or {}."""
    rows = [row for row in trainer.state.log_history if "eval_tau" in row]
    if trainer.args.load_best_model_at_end and trainer.state.best_model_checkpoint:
        rows = [row for row in rows if row["step"] == trainer.state.best_global_step] or rows
    return rows[-1] if rows else {}


def _recipe(objective: Objective, num_conversations: int, trainer: Trainer) -> dict[str, Any]:
    """Return the facts of a run for the head's model card."""
    arguments = trainer.args
    batch = arguments.train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size
    taus = [log["predicted_tau"] for log in trainer.state.log_history if "predicted_tau" in log]
    return {
        "objective": type(objective).__name__,
        "conversations": num_conversations,
        "optimiser steps": trainer.state.global_step,
        "batch": batch,
        "learning rate": f"{arguments.learning_rate:g} ({SchedulerType(arguments.lr_scheduler_type).value})",
        **{name.replace("_", " "): value for name, value in asdict(objective.recipe).items()},
        **({"predicted tau at the end, on training batches": round(taus[-1], 2)} if taus else {}),
        **({"weights of step": row["step"]} if (row := _evaluation(trainer)) else {}),
    }
