"""Training shared by all heads: transformers' Trainer around an objective, which is a head with its loss.

Except in Medusa-2, the target is not a submodule of the objective, so the Trainer, DDP and FSDP see only the head.
"""

from __future__ import annotations

import copy
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import Sampler
from tqdm.auto import tqdm
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import EvalPrediction, SchedulerType

from hf_specdec.atomic import directory_lock, write_text
from hf_specdec.errors import CheckpointFormatError, InvalidConfigError
from hf_specdec.training.data import check_tokens
from hf_specdec.training.feature_store import FeatureStore, TrainingData, as_dataset, collate, openings, with_features
from hf_specdec.training.objectives import Counts, HeadLoss, Objective, predicted_tau
from hf_specdec.training.progress import print_line, show_progress, ticking
from hf_specdec.training.run_setup import (
    RUN_NAME,
    check_processes,
    check_same_run,
    fsdp_tensor_names,
    last_checkpoint,
    reading,
    run_facts,
)
from hf_specdec.validation import check_type
from hf_specdec.verification.model import text_config


class SeededLengthSampler(LengthGroupedSampler):
    """Sampler that puts conversations of similar length in one batch, in a random order given by seed and epoch.

    A run resumed in a later epoch sees the same order as an uninterrupted one, unlike with transformers' sampler.
    """

    def __init__(self, batch_size: int, lengths: list[int], seed: int) -> None:
        super().__init__(batch_size, lengths=lengths)
        self._seed, self._epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that determines the order; the Trainer calls this at the start of each epoch."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator = torch.Generator().manual_seed(self._seed + self._epoch)
        return super().__iter__()


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
    """

    def __init__(
        self, objective: Objective, target: PreTrainedModel, data: TrainingData, arguments: TrainingArguments,
        held_out: TrainingData | None = None,
    ) -> None:  # fmt: skip
        dataset = as_dataset(data, objective.layers)
        if not dataset.lengths:
            raise InvalidConfigError("There are no conversations to train on.")
        arguments = copy.copy(arguments)
        arguments.remove_unused_columns = False  # objectives read all columns
        super().__init__(
            model=objective,
            args=arguments,
            train_dataset=dataset,
            data_collator=partial(collate, vocab_size=int(text_config(target).vocab_size)),
            eval_dataset=None if held_out is None else as_dataset(held_out, objective.layers),
            compute_metrics=_metrics,
        )
        self.progress = show_progress(self)
        self._objective, self._target = objective, target
        self._tensor_names = frozenset(objective.state_dict())  # before FSDP wraps the objective and renames them
        self._right: Tensor | float = 0.0
        self._counted: Tensor | float = 0.0

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Tensor], return_outputs: bool = False, **_: Any
    ) -> Tensor | tuple[Tensor, HeadLoss]:
        """Return the loss of a batch, with the `HeadLoss` if requested.

        Sets the objective's `progress`, and counts correct drafted tokens for `log` if this step is logged.
        """
        inputs = with_features(inputs, self._target, self._objective.layers)
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
        inputs = with_features(batch, self._target, self._objective.layers)
        self._objective.progress = 1.0  # the last steps are the slowest; training sets it again
        with torch.random.fork_rng(), self.accelerator.autocast():
            outputs: HeadLoss = self._objective(**inputs)
        return outputs.loss

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Tensor], *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return loss, predictions and labels of a held-out batch; the last two are both its counts `[1, K, 4]`."""
        inputs = with_features(self._prepare_inputs(inputs), self._target, self._objective.layers)
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
        if self.optimizer is not None or factor == 1.0:
            return super().create_optimizer()
        make, options = self.get_optimizer_cls_and_kwargs(self.args, self._objective)
        trained = [pair for pair in self._objective.named_parameters() if pair[1].requires_grad]
        of_head = [parameter for name, parameter in trained if name.startswith("head.")]
        others = [parameter for name, parameter in trained if not name.startswith("head.")]
        groups = [{"params": of_head, "lr": options["lr"] * factor}, {"params": others, "lr": options["lr"]}]
        self.optimizer: torch.optim.Optimizer = make([group for group in groups if group["params"]], **options)
        return self.optimizer

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load the objective's weights from a checkpoint; under FSDP, transformers loads them into `model`."""
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
        with reading(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with reading(checkpoint):
            super()._load_rng_state(checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        with reading(checkpoint):
            super()._load_scaler(checkpoint)

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int] | None:
        """Return the sampler; to group by length, use the dataset's `lengths`: transformers would load all items."""
        if self.args.train_sampling_strategy == "group_by_length":
            size = self.args.train_batch_size * self.args.gradient_accumulation_steps
            seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
            return SeededLengthSampler(size, self.train_dataset.lengths, seed)
        return super()._get_train_sampler(train_dataset)


def _metrics(gathered: EvalPrediction) -> dict[str, float]:
    """Compute tau and acceptance by depth on held-out conversations from the counts `[N, K, 4]` of all batches."""
    acceptance = Counts.of(torch.as_tensor(gathered.predictions, device="cpu").sum(0)).acceptance
    return {"tau": 1.0 + sum(acceptance), **{f"accepted_{depth}": value for depth, value in enumerate(acceptance, 1)}}


# ------------------------------------------------------------------------------------------------------------- a run


@contextmanager
def training_modes() -> Iterator[None]:
    """Context manager and decorator: gradients, no inference mode, new tensors on the CPU by default, no denormals.

    The Trainer and its DataLoader draw seeds and orders on the CPU, which torch refuses if `torch.set_default_device`
    names another device. Sharp attention has denormal weights and gradients (in float32 below 1e-38), and processors
    multiply them far more slowly than others. Worker threads keep their mode: train with one process per core
    (`accelerate launch`), not one process of several threads.
    """
    on_cpu = torch.get_default_device().type == "cpu"
    device = nullcontext() if on_cpu else torch.device("cpu")
    with torch.inference_mode(False), torch.enable_grad(), device:
        # torch has no function that returns the mode
        flushed = bool(torch.full((1,), 1e-40, dtype=torch.float32, device="cpu") * 0.5 == 0)
        torch.set_flush_denormal(True)
        try:
            yield
        finally:
            torch.set_flush_denormal(flushed)


@training_modes()
def fit(
    objective: Objective, target: PreTrainedModel, data: TrainingData, arguments: TrainingArguments, *, resume: bool,
    held_out: TrainingData | None = None,
) -> Any:  # fmt: skip
    """Train an objective's head in place and return it; see `train_eagle` for arguments, result and errors.

    The head is converted to float32, and `recipe`, `tau` and (if it has one) `trained_length` of its config are set;
    the latter stays that of an earlier run if that had longer texts. Unless `disable_tqdm` is set or FSDP is used, an
    estimate of the run is printed first.
    """
    answer_tokens = getattr(objective.recipe, "answer_tokens", 0)
    data, held_out = openings(data, answer_tokens), None if held_out is None else openings(held_out, answer_tokens)
    check_type("arguments", arguments, TrainingArguments, "head_arguments(folder, {...}) makes them.")
    objective.head.check_sizes(text_config(target))
    for conversations in (data, held_out):
        if not isinstance(conversations, FeatureStore | None):
            check_tokens(conversations, int(text_config(target).vocab_size))
    for name, model in (("head", objective.head), ("target", target)):
        if any(parameter.is_inference() for parameter in model.parameters()):
            raise InvalidConfigError(
                f"The {name}'s weights were created in `torch.inference_mode()`, which allows no gradients.",
                f"Load or create the {name} outside that mode.",
            )
    if not any(parameter.requires_grad for parameter in objective.head.parameters()):
        raise InvalidConfigError(
            "All weights of the head are frozen: `load_drafter` does that to a head that it is given.",
            "Train a copy: copy.deepcopy(head).requires_grad_().",
        )
    check_processes(arguments)
    objective.head.float()  # half precision would round small updates away
    output = Path(arguments.output_dir)
    checkpoint = last_checkpoint(output) if resume else None
    trainer = HeadTrainer(objective, target, data, arguments, held_out)
    facts = run_facts(objective.head, objective.recipe, trainer.train_dataset.lengths)
    if checkpoint is not None:
        check_same_run(output, facts)
    is_main = trainer.is_world_process_zero()
    if is_main and not arguments.disable_tqdm and not trainer.is_fsdp_enabled:
        done = 0 if checkpoint is None else int(checkpoint.rsplit("-", 1)[1])
        layout, silent = "{desc} {elapsed}", not sys.stderr.isatty()
        with tqdm(desc="Timing three batches", bar_format=layout, leave=False, disable=silent) as bar, ticking(bar):
            run = estimate_run(trainer.rehearse, objective, trainer.train_dataset.lengths, trainer.args, done)
        print_line(str(run))
    if checkpoint is None and is_main:
        write_text(output / RUN_NAME, json.dumps(facts, indent=1))
    with closing(trainer.progress), directory_lock(output, "train") if is_main else nullcontext():
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
    """Set `recipe`, `tau` and, if it has one, `trained_length` of the head's config, for its model card."""
    arguments, config, lengths = trainer.args, objective.head.config, trainer.train_dataset.lengths
    log = trainer.state.log_history
    rows = [row for row in log if "eval_tau" in row]
    if arguments.load_best_model_at_end and trainer.state.best_model_checkpoint:
        rows = [row for row in rows if row["step"] == trainer.state.best_global_step] or rows
    taus = [row["predicted_tau"] for row in log if "predicted_tau" in row]
    config.recipe = {
        "objective": type(objective).__name__,
        "conversations": len(lengths),
        "optimiser steps": trainer.state.global_step,
        "batch": arguments.train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size,
        "learning rate": f"{arguments.learning_rate:g} ({SchedulerType(arguments.lr_scheduler_type).value})",
        **{name.replace("_", " "): value for name, value in asdict(objective.recipe).items()},
        **({"predicted tau at the end, on training batches": round(taus[-1], 2)} if taus else {}),
        **({"weights of step": rows[-1]["step"]} if rows else {}),
    }
    config.tau = {"greedy chains on held-out conversations": round(rows[-1]["eval_tau"], 2)} if rows else None
    if hasattr(config, "trained_length"):
        config.trained_length = max(*lengths, config.trained_length or 0)


# -------------------------------------------------------------------------------------------------------- its estimate


@dataclass(frozen=True, slots=True)
class RunEstimate:
    """Estimated cost of a training run."""

    num_steps: int  # optimiser steps that remain to be done
    seconds_per_step: float
    memory_bytes: int  # memory of the accelerator, or of the process on a CPU
    disk_bytes: int  # for the checkpoints kept at the same time

    def __str__(self) -> str:
        seconds = self.num_steps * self.seconds_per_step
        hours, minutes = divmod(math.ceil(seconds / 60), 60)
        duration = f"{hours} h {minutes:02} min" if hours else f"{minutes} min"
        if seconds < 60:
            duration = f"{math.ceil(seconds)} s"
        steps = "1 step" if self.num_steps == 1 else f"{self.num_steps} steps"
        return (
            f"{steps} of {self.seconds_per_step:.2g} s: about {duration}; "
            f"{self.memory_bytes / 1e9:.1f} GB of memory, {self.disk_bytes / 1e9:.2f} GB of disk for checkpoints."
        )


def estimate_run(
    rehearse: Callable[[Sequence[int]], Tensor],
    trained: nn.Module,
    lengths: Sequence[int],
    arguments: TrainingArguments,
    num_done: int,
) -> RunEstimate:
    """Estimate a run by timing two batches, of median length and of the longest conversations.

    Time is assumed to be linear in the length of the longest conversation of a batch. No parameter of `trained` is
    changed, and their gradients are cleared. `rehearse` returns the loss of a batch, given the indices of its
    conversations; `num_done` optimiser steps are already done, if the run resumes.
    """
    batch = arguments.per_device_train_batch_size
    order = sorted(range(len(lengths)), key=lambda number: lengths[number])
    middle = max((len(order) - batch) // 2, 0)
    memory, points = 0, []
    for numbers in (order[middle : middle + batch], order[middle : middle + batch], order[-batch:]):  # first: warm-up
        begin = time.perf_counter()
        loss = rehearse(numbers)
        memory = max(memory, _memory_in_use(loss.device))  # all activations are in memory now
        if loss.requires_grad:
            loss.backward()
        float(loss.detach())  # waits for the accelerator
        points.append((max(lengths[number] for number in numbers), time.perf_counter() - begin))
        trained.zero_grad(set_to_none=True)
    (_, (short, fast), (long, slow)) = points
    slope = max(slow - fast, 0.0) / (long - short) if long > short else 0.0
    seconds = max(fast + slope * (sum(lengths) / len(lengths) - short), 0.0)
    num_parameters = sum(parameter.numel() for parameter in trained.parameters() if parameter.requires_grad)
    steps = num_steps_of(arguments, len(lengths))
    kept = min((arguments.save_total_limit or steps) + 1, max(math.ceil(steps / max(arguments.save_steps, 1)), 1))
    return RunEstimate(
        num_steps=max(steps - num_done, 0),
        seconds_per_step=seconds * arguments.gradient_accumulation_steps,
        memory_bytes=memory + 12 * num_parameters,  # in addition to the weight: gradient and Adam's two moments
        disk_bytes=0 if arguments.save_strategy == "no" else kept * 12 * num_parameters,  # the weight and the moments
    )


def num_steps_of(arguments: TrainingArguments, num_conversations: int) -> int:
    """Return the number of optimiser steps of a whole run."""
    if arguments.max_steps > 0:
        return arguments.max_steps
    per_epoch = math.ceil(num_conversations / (arguments.per_device_train_batch_size * arguments.world_size))
    updates = max(math.ceil(per_epoch / arguments.gradient_accumulation_steps), 1)
    return math.ceil(arguments.num_train_epochs * updates)


def _memory_in_use(device: torch.device) -> int:
    """Return the bytes that torch has allocated on `device`; if it does not report them, those of the process."""
    module = None if device.type == "cpu" else torch.get_device_module(device)
    for name in ("memory_allocated", "current_allocated_memory"):  # the second is MPS's name
        if hasattr(module, name):
            return int(getattr(module, name)())
    return int(psutil.Process().memory_info().rss)
