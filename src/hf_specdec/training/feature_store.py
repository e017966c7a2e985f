"""Hidden states ("features") of the target for whole conversations: captured to disk, or computed in every step.

`FeatureTap` reads them, as in inference, so a head sees the same tensors in both.
"""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from hf_specdec.atomic import clear_partials, directory_lock, whole_file, write_text
from hf_specdec.cpu.quantized import packed_forms
from hf_specdec.errors import InvalidConfigError
from hf_specdec.records import Fields, checked_path, open_regular
from hf_specdec.training.data import TOKEN_ID_LIMIT, Conversation, check_tokens, opening_mask
from hf_specdec.training.progress import ticking
from hf_specdec.training.run_setup import processes, read_state
from hf_specdec.transformers_private import model_name
from hf_specdec.verification.features import LAST, FeatureTap
from hf_specdec.verification.model import execution_device, text_config
from hf_specdec.verification.programs import faster_products

INDEX = "features.json"
"""Index file of a directory of captured features."""


@torch.no_grad()
def target_features(model: PreTrainedModel, input_ids: Tensor, lengths: Tensor, layers: Sequence[int]) -> Tensor:
    """Return the features `[B, T, layers * D]` of right-padded conversations `[B, T]` in the target's dtype.

    `lengths` `[B]` are without padding, and `layers` numbered as in `verification.features.Features`.
    """
    device = execution_device(model)
    mask = torch.arange(input_ids.shape[1], device=device) < lengths.to(device)[:, None]
    with FeatureTap(model, layers) as tap, faster_products(model):
        # with right padding every model's default position ids are correct; `logits_to_keep` is a tensor because
        # some models skip the other positions in their upper layers if it is an int
        last = torch.tensor([-1], device=device)
        model(input_ids=input_ids.to(device), attention_mask=mask.long(), use_cache=False, logits_to_keep=last)
    return tap.take().of(layers)


# ------------------------------------------------------------------------------------------------------ reading data


class FeatureStore(Dataset[dict[str, Tensor]]):
    """Dataset of conversations and their captured features on disk; every item is read when it is accessed.

    Items: `input_ids [T]` long, `loss_mask [T]` bool, `features [T, layers * D]` in the target's dtype. Reading one
    raises `InvalidConfigError` if its file is damaged.

    Args:
        folder: Directory written by `capture_features`.
        answer_tokens: Train on only the first N tokens of each answer, see `Conversation.opening`; 0 for all.

    Raises:
        InvalidConfigError: The directory holds no captured features, capturing has not finished, or a file that is
            read here (the index, and for `answer_tokens` all parts) is damaged.
    """

    def __init__(self, folder: str | Path, answer_tokens: int = 0) -> None:
        self.folder, self.answer_tokens = checked_path(folder), answer_tokens
        if not (self.folder / INDEX).is_file():
            raise InvalidConfigError(
                f"{self.folder} holds no captured features: it has no {INDEX}.", "capture_features(...) writes them."
            )
        index = _read_index(self.folder)
        self.layers: tuple[int, ...] = tuple(index["layers"])
        self.lengths: list[int] = index["lengths"]
        self._full_lengths = self.lengths
        self._chosen: list[int] | None = None  # places in `layers` of those to return; None for all
        self._places = [(file, row) for file, count in enumerate(index["counts"]) for row in range(count)]
        missing = [file for file in range(len(index["counts"])) if not _part(self.folder, file).exists()]
        if missing:
            raise InvalidConfigError(
                f"{self.folder} is not finished: {len(missing)} of {len(index['counts'])} parts are missing.",
                "Run capture_features(...) again; it resumes after the last stored part.",
            )
        if answer_tokens:
            self.lengths = []
            for file, places in groupby(self._places, key=lambda place: place[0]):
                with _opened(_part(self.folder, file)) as tensors:
                    for _, row in places:
                        mask = tensors.get_tensor(f"{row}.loss_mask").bool()
                        self.lengths.append(len(opening_mask(mask, answer_tokens)))

    def opening(self, answer_tokens: int) -> FeatureStore:
        """Return the same dataset with only the first `answer_tokens` tokens of each answer to train on."""
        return FeatureStore(self.folder, answer_tokens)

    def select(self, layers: Sequence[int]) -> FeatureStore:
        """Return the same dataset with the features of these layers, in their order; without layers, of all."""
        if any(layer not in self.layers for layer in layers):
            raise InvalidConfigError(
                f"Features of the layers {list(self.layers)} were captured, but this head reads {list(layers)}.",
                f"Capture them with layers={list(layers)}.",
            )
        selected = copy.copy(self)
        if layers and tuple(layers) != self.layers:
            selected._chosen = [self.layers.index(layer) for layer in layers]
        return selected

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        file, row = self._places[index]
        names = ("input_ids", "loss_mask", "features")
        with _opened(_part(self.folder, file)) as tensors:
            slices = [tensors.get_slice(f"{row}.{name}") for name in names]
            shapes, dtypes = [each.get_shape() for each in slices], [each.get_dtype() for each in slices]
            length, features = [self._full_lengths[index]], shapes[2]
            fits = shapes[0] == shapes[1] == length and features[:1] == length and len(features) == 2
            if not fits or dtypes[:2] != ["I64", "BOOL"] or not dtypes[2].startswith(("F", "BF")):
                raise SafetensorError(f"conversation {row} has the shapes {shapes} and dtypes {', '.join(dtypes)}")
            ids, mask, features = (each[: self.lengths[index]] for each in slices)
            if self.answer_tokens:
                mask = opening_mask(slices[1][:], self.answer_tokens)
        if self._chosen is not None:
            features = features.unflatten(1, (len(self.layers), -1))[:, self._chosen].flatten(1)
        return {"input_ids": ids, "loss_mask": mask, "features": features}


TrainingData = FeatureStore | Sequence[Conversation]
"""Captured features, or conversations whose features are computed in every step."""


class ConversationDataset(Dataset[dict[str, Tensor]]):
    """Dataset of conversations without captured features: `input_ids [T]` long and `loss_mask [T]` bool."""

    def __init__(self, conversations: Sequence[Conversation]) -> None:
        self._conversations = conversations
        self.lengths = [len(conversation.input_ids) for conversation in conversations]

    def __len__(self) -> int:
        return len(self._conversations)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        conversation = self._conversations[index]
        mask = torch.tensor(conversation.loss_mask, dtype=torch.bool, device="cpu")
        return {"input_ids": torch.tensor(conversation.input_ids, device="cpu"), "loss_mask": mask}


def as_dataset(data: TrainingData, layers: Sequence[int]) -> FeatureStore | ConversationDataset:
    """Return a dataset with `lengths`, the tokens of each conversation; captured features are of these layers."""
    return data.select(layers) if isinstance(data, FeatureStore) else ConversationDataset(data)


def openings(data: TrainingData, answer_tokens: int) -> TrainingData:
    """Return `data` with only the first tokens of each answer to train on, see `Conversation.opening`.

    Args:
        data: Conversations or captured features.
        answer_tokens: Number of tokens of each answer; 0 returns `data` unchanged.
    """
    conversations = isinstance(data, Sequence) and all(isinstance(row, Conversation) for row in data)
    if not conversations and not isinstance(data, FeatureStore):
        raise InvalidConfigError(
            f"Training data are conversations or a FeatureStore, got a {type(data).__name__}.",
            "Use read_conversations(path), or FeatureStore(folder) for captured features.",
        )
    if not answer_tokens:
        return data
    if isinstance(data, FeatureStore):
        return data.opening(answer_tokens)
    return [conversation.opening(answer_tokens) for conversation in data]


def collate(rows: Sequence[dict[str, Any]], vocab_size: int = TOKEN_ID_LIMIT) -> dict[str, Tensor]:
    """Batch items of a dataset with right padding, which `loss_mask` excludes.

    Returns:
        `input_ids [B, T]`, `loss_mask [B, T]`, `lengths [B]`, and `features [B, T, layers * D]` if captured.
    """
    for ids in (row["input_ids"] for row in rows):
        if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < vocab_size):
            raise InvalidConfigError(
                f"A conversation has token ids from {int(ids.min())} to {int(ids.max())}, the target's vocabulary has "
                f"{vocab_size} tokens.",
                "Use data that was tokenised for this target.",
            )
    names = [name for name in ("input_ids", "loss_mask", "features") if name in rows[0]]
    batch: dict[str, Tensor] = {name: pad_sequence([row[name] for row in rows], batch_first=True) for name in names}
    return {**batch, "lengths": torch.tensor([len(row["input_ids"]) for row in rows], device="cpu")}


def with_features(batch: dict[str, Tensor], target: PreTrainedModel, layers: Sequence[int]) -> dict[str, Tensor]:
    """Return a batch of `collate` with `features [B, T, layers * D]`; if none were captured, run the target."""
    if "features" in batch or not layers:
        return batch
    features = target_features(target, batch["input_ids"], batch["lengths"], layers)
    return {**batch, "features": features.to(batch["input_ids"].device)}


# --------------------------------------------------------------------------------------------------------- capturing


def feature_bytes(model: PreTrainedModel, conversations: Sequence[Conversation], layers: Sequence[int]) -> int:
    """Return how many bytes `capture_features` writes to an empty directory, without file headers and index.

    Args:
        model, conversations, layers: As for `capture_features`.
    """
    tokens = sum(len(conversation.input_ids) for conversation in conversations)
    size = int(text_config(model).hidden_size) * len(layers)
    return tokens * (size * model.dtype.itemsize + 8 + 1)


def capture_features(
    model: PreTrainedModel,
    conversations: Sequence[Conversation],
    folder: str | Path,
    *,
    layers: Sequence[int] = (LAST,),
    batch_size: int = 8,
    progress: bool = False,
) -> FeatureStore:
    """Run the frozen target once over all conversations and write their features to `folder`.

    An interrupted capture resumes with the missing files. If `folder` already holds these conversations, possibly with
    more layers, its features are used. Under `accelerate launch` the files are divided among the processes, and all
    processes wait until the last file is written.

    Args:
        model: The target; its dtype is the dtype of the features.
        conversations: Conversations, in any order; they are stored longest first, to minimise padding.
        folder: Directory to write to; `feature_bytes(...)` is the size.
        layers: Indices of hidden states, numbered as in `verification.features.Features`. The last must be `LAST`, the
            input of the lm_head, from which the labels are computed.
        batch_size: Conversations per forward and file.
        progress: Show a progress bar.

    Raises:
        InvalidConfigError: No conversations, token ids outside the target's vocabulary, `layers` without `LAST` at the
            end, not enough disk space, or a directory that holds something else, lacks one of the layers, has a
            damaged index, or is in use by another process.
        DrafterMismatchError: The target has no such layer.
    """
    if not conversations or not layers or layers[-1] != LAST:
        raise InvalidConfigError(
            f"Capturing needs conversations, and layers that end with {LAST}; "
            f"got {len(conversations)} conversations and layers {list(layers)}."
        )
    check_tokens(conversations, int(text_config(model).vocab_size))
    folder, state = checked_path(folder), processes()
    ordered = sorted(conversations, key=lambda conversation: -len(conversation.input_ids))
    parts = [ordered[start : start + batch_size] for start in range(0, len(ordered), batch_size)]
    content = json.dumps([(conversation.input_ids, conversation.loss_mask) for conversation in ordered])
    index = {
        "layers": list(layers),
        "lengths": [len(conversation.input_ids) for conversation in ordered],
        "counts": [len(part) for part in parts],
        "conversations": hashlib.sha256(content.encode()).hexdigest(),
        "model": model_name(model.config),
        "dtype": str(model.dtype),
        **packed_forms(model),
    }
    with directory_lock(folder, "capture") if state.is_main_process else nullcontext():
        with state.main_process_first():
            missing = [row for number, part in enumerate(parts) if not _part(folder, number).exists() for row in part]
            layers = _prepare_folder(folder, index, model, missing)
        # the share depends on file numbers only, because other processes are writing files meanwhile
        share = range(state.process_index, len(parts), state.num_processes)
        mine = [number for number in share if not _part(folder, number).exists()]
        training, _ = model.training, model.eval()
        try:
            with tqdm(mine, unit="batch", disable=not (progress and state.is_main_process)) as bar, ticking(bar):
                for number in bar:
                    _capture_part(model, parts[number], layers, _part(folder, number))
        finally:
            model.train(training)
        state.wait_for_everyone()
    return FeatureStore(folder)


def _capture_part(
    model: PreTrainedModel, conversations: Sequence[Conversation], layers: Sequence[int], path: Path
) -> None:
    rows = [torch.tensor(conversation.input_ids, device="cpu") for conversation in conversations]
    sizes = torch.tensor([len(row) for row in rows], device="cpu")
    features = target_features(model, pad_sequence(rows, batch_first=True), sizes, layers).cpu()
    tensors = {}
    for place, (row, conversation) in enumerate(zip(rows, conversations, strict=True)):
        tensors[f"{place}.input_ids"] = row
        tensors[f"{place}.loss_mask"] = torch.tensor(conversation.loss_mask, dtype=torch.bool, device="cpu")
        tensors[f"{place}.features"] = features[place, : len(row)].contiguous()
    with whole_file(path) as partial:
        save_file(tensors, partial)


def _part(folder: Path, number: int) -> Path:
    return folder / f"part-{number:05}.safetensors"


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a file of captured features; convert a `SafetensorError`, also of the block."""
    try:
        open_regular(path).close()
        with safe_open(path, framework="pt") as tensors:
            yield tensors
    except SafetensorError as error:
        raise InvalidConfigError(
            f"{path} cannot be read: {error}.",
            "Delete it and run capture_features(...) again; it captures missing files only.",
        ) from error


def _read_index(folder: Path) -> Fields:
    index = read_state(folder / INDEX, folder)
    valid = all(
        isinstance(index.get(name), list) and all(type(value) is int and value >= minimum for value in index[name])
        for name, minimum in (("layers", LAST), ("lengths", 0), ("counts", 1))
    )
    if not valid or sum(index["counts"]) != len(index["lengths"]) or not index["layers"]:
        raise InvalidConfigError(
            f"{folder / INDEX} is not an index of captured features.", f"Delete {folder} to start over."
        )
    return index


def check_features_folder(folder: Path | None) -> None:
    """Raise `InvalidConfigError` if a directory holds something else than captured features; None is accepted."""
    if folder is None or not folder.is_dir() or (folder / INDEX).exists():
        return
    if any(path.suffix != ".lock" for path in folder.iterdir()):
        raise InvalidConfigError(f"{folder} is not empty and holds no captured features.", "Use another directory.")


def _prepare_folder(
    folder: Path, index: dict[str, Any], model: PreTrainedModel, missing: Sequence[Conversation]
) -> list[int]:
    """Write the folder's index, or check that an existing one is for the same data; return the layers to capture."""
    folder.mkdir(parents=True, exist_ok=True)
    clear_partials(folder)
    path = folder / INDEX
    if path.exists():
        existing = _read_index(folder)
        if {**existing, "layers": index["layers"]} != index:
            raise InvalidConfigError(
                f"{folder} holds features of other conversations or of another target.", "Use another directory."
            )
        if not set(index["layers"]) <= set(existing["layers"]):
            raise InvalidConfigError(
                f"{folder} holds the layers {existing['layers']}, not {index['layers']}.", "Use another directory."
            )
        index = existing
    else:
        check_features_folder(folder)
    needed, free = feature_bytes(model, missing, index["layers"]), shutil.disk_usage(folder).free
    if needed > free:
        raise InvalidConfigError(
            f"The features need {needed / 1e9:.1f} GB, but {folder} has {free / 1e9:.1f} GB free.",
            "Use another disk or fewer conversations, or train without captured features.",
        )
    write_text(path, json.dumps(index))
    return index["layers"]
