"""The target's features of whole conversations: captured once to disk, or made anew in every step.

The tap is the one that inference uses (`target.FeatureTap`), so training and drafting see the same tensors.
"""

from __future__ import annotations

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
from hf_specdec.errors import InvalidConfigError
from hf_specdec.records import Fields, open_regular
from hf_specdec.training.conversations import Conversation, check_tokens, opening_mask
from hf_specdec.training.data import MOST_TOKENS
from hf_specdec.training.processes import processes
from hf_specdec.training.runs import read_state
from hf_specdec.verification.features import LAST, FeatureTap
from hf_specdec.verification.model import execution_device, text_config

INDEX = "features.json"


@torch.no_grad()
def features_of(model: PreTrainedModel, input_ids: Tensor, lengths: Tensor, layers: Sequence[int]) -> Tensor:
    """Features `[B, T, layers * D]` of right-padded conversations, in the target's dtype.

    Args:
        model: The target.
        input_ids: `[B, T]`.
        lengths: `[B]` how many are real.
        layers: Which hidden states, see `FeatureTap`.
    """
    device = execution_device(model)
    mask = torch.arange(input_ids.shape[1], device=device) < lengths.to(device)[:, None]
    with FeatureTap(model, layers) as tap:
        # right padding: position ids count from 0 in every row, the default of every model. The positions whose
        # logits are kept are a tensor, because an int lets some models skip the others in upper layers
        last = torch.tensor([-1], device=device)
        model(input_ids=input_ids.to(device), attention_mask=mask.long(), use_cache=False, logits_to_keep=last)
    return tap.take().of(layers)


def feature_bytes(model: PreTrainedModel, conversations: Sequence[Conversation], layers: Sequence[int]) -> int:
    """What `capture_features` will write."""
    tokens = sum(len(conversation.input_ids) for conversation in conversations)
    size = int(text_config(model).hidden_size) * len(layers)
    return tokens * (size * model.dtype.itemsize + 8 + 1)


class FeatureStore(Dataset[dict[str, Tensor]]):
    """Captured conversations on disk; tensors are read when they are asked for.

    Items: `input_ids [T]`, `loss_mask [T]` bool, `features [T, layers * D]`.

    Args:
        folder: What `capture_features` wrote.
        answer_tokens: Read no more than so many tokens of an answer, see `Conversation.opening`; 0 is all.

    Raises:
        InvalidConfigError: A directory that is none of that, or not finished.
    """

    def __init__(self, folder: str | Path, answer_tokens: int = 0) -> None:
        self.folder, self.answer_tokens = Path(folder), answer_tokens
        if not (self.folder / INDEX).is_file():
            raise InvalidConfigError(
                f"{self.folder} holds no captured features: it has no {INDEX}.", "capture_features(...) writes them."
            )
        index = _read_index(self.folder)
        self.layers: tuple[int, ...] = tuple(index["layers"])
        self.lengths: list[int] = index["lengths"]
        self._whole = self.lengths
        self._places = [(file, row) for file, count in enumerate(index["counts"]) for row in range(count)]
        missing = [file for file in range(len(index["counts"])) if not _part(self.folder, file).exists()]
        if missing:
            raise InvalidConfigError(
                f"{self.folder} is not finished: {len(missing)} of {len(index['counts'])} parts are missing.",
                "Run capture_features(...) again; it resumes where it stopped.",
            )
        if answer_tokens:
            self.lengths = [len(mask) for mask in self._opening_masks()]

    def opening(self, answer_tokens: int) -> FeatureStore:
        """The same conversations up to the first so many tokens of their last answers."""
        return FeatureStore(self.folder, answer_tokens)

    def _opening_masks(self) -> Iterator[Tensor]:
        for file, places in groupby(self._places, key=lambda place: place[0]):
            with _opened(_part(self.folder, file)) as tensors:
                for _, row in places:
                    yield opening_mask(tensors.get_tensor(f"{row}.loss_mask").bool(), self.answer_tokens)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        file, row = self._places[index]
        with _opened(_part(self.folder, file)) as tensors:
            self._check(tensors, row, self._whole[index])
            if not self.answer_tokens:
                return {name: tensors.get_tensor(f"{row}.{name}") for name in ("input_ids", "loss_mask", "features")}
            mask = opening_mask(tensors.get_tensor(f"{row}.loss_mask"), self.answer_tokens)
            ids, features = (tensors.get_slice(f"{row}.{name}")[: len(mask)] for name in ("input_ids", "features"))
            return {"input_ids": ids, "loss_mask": mask, "features": features}

    @staticmethod
    def _check(tensors: Any, row: int, length: int) -> None:
        """See that a conversation's tensors are what `capture_features` wrote.

        Raises:
            SafetensorError: They are something else.
        """
        found = [tensors.get_slice(f"{row}.{name}") for name in ("input_ids", "loss_mask", "features")]
        (ids, mask, features), kinds = (held.get_shape() for held in found), [held.get_dtype() for held in found]
        right = ids == mask == [length] and features[:1] == [length] and len(features) == 2
        if not right or kinds[:2] != ["I64", "BOOL"] or not kinds[2].startswith(("F", "BF")):
            raise SafetensorError(f"conversation {row} has shapes {ids}, {mask} and {features} of {', '.join(kinds)}")


def openings(data: FeatureStore | Sequence[Conversation], answer_tokens: int) -> FeatureStore | Sequence[Conversation]:
    """The conversations up to the first so many tokens of their last answers; 0 leaves them whole."""
    if not answer_tokens:
        return data
    if isinstance(data, FeatureStore):
        return data.opening(answer_tokens)
    return [talk.opening(answer_tokens) for talk in data]


def capture_features(
    model: PreTrainedModel,
    conversations: Sequence[Conversation],
    folder: str | Path,
    *,
    layers: Sequence[int] = (LAST,),
    batch_size: int = 8,
    progress: bool = False,
) -> FeatureStore:
    """Run the frozen target once over all conversations and keep the features its head will see.

    Started again after an interrupt it goes on; a directory of the same conversations is read as it is, and may have
    more layers than are asked for. Under `accelerate launch` every process captures its share of the files, and all
    wait for the last.

    Args:
        model: The target; its dtype is the dtype of the features.
        conversations: What to read, longest first (batches of similar length waste no padding).
        folder: Where to write; the size is `feature_bytes(...)`.
        layers: Which hidden states; the last one must be `LAST`, which teachers read.
        batch_size: Conversations per forward and file.
        progress: Show a progress bar.

    Raises:
        InvalidConfigError: No conversations, layers without the last, a disk that is too small, a directory of other
            features or fewer layers, or one in which another process is at work.
    """
    if not conversations or not layers or layers[-1] != LAST:
        raise InvalidConfigError(
            f"Capturing needs conversations and layers that end with {LAST}, got {len(conversations)} and {layers}."
        )
    check_tokens(conversations, int(text_config(model).vocab_size))
    folder, state = Path(folder), processes()
    ordered = sorted(conversations, key=lambda conversation: -len(conversation.input_ids))
    parts = [ordered[start : start + batch_size] for start in range(0, len(ordered), batch_size)]
    lengths = [len(conversation.input_ids) for conversation in ordered]
    told = json.dumps([(conversation.input_ids, conversation.loss_mask) for conversation in ordered])
    index = {"layers": list(layers), "lengths": lengths, "counts": [len(part) for part in parts],
             "conversations": hashlib.sha256(told.encode()).hexdigest(), "model": model.config._name_or_path,
             "dtype": str(model.dtype)}  # fmt: skip
    with directory_lock(folder, "capture") if state.is_main_process else nullcontext():
        with state.main_process_first():
            left = [row for number, part in enumerate(parts) if not _part(folder, number).exists() for row in part]
            layers = _claim(folder, index, model, left)
        training, _ = model.training, model.eval()
        _capture_parts(model, parts, folder, layers, progress=progress)
        model.train(training)
        state.wait_for_everyone()
    return FeatureStore(folder)


def _capture_parts(
    model: PreTrainedModel, parts: Sequence[Sequence[Conversation]], folder: Path, layers: Sequence[int], *,
    progress: bool,
) -> None:  # fmt: skip
    """Capture the share of this process of the files that are not there yet."""
    state = processes()
    # the share follows from the number alone: another process may write while this one looks what is missing
    share = range(state.process_index, len(parts), state.num_processes)
    mine = [number for number in share if not _part(folder, number).exists()]
    for number in tqdm(mine, unit="batch", disable=not (progress and state.is_main_process)):
        rows = [torch.tensor(conversation.input_ids, device="cpu") for conversation in parts[number]]
        sizes = torch.tensor([len(row) for row in rows], device="cpu")
        features = features_of(model, pad_sequence(rows, batch_first=True), sizes, layers).cpu()
        tensors = {}
        for place, (row, conversation) in enumerate(zip(rows, parts[number], strict=True)):
            tensors[f"{place}.input_ids"] = row
            tensors[f"{place}.loss_mask"] = torch.tensor(conversation.loss_mask, dtype=torch.bool, device="cpu")
            tensors[f"{place}.features"] = features[place, : len(row)].contiguous()
        with whole_file(_part(folder, number)) as partial:
            save_file(tensors, partial)


def collate(rows: Sequence[dict[str, Any]], vocab_size: int = MOST_TOKENS) -> dict[str, Tensor]:
    """Pad to the right. What is padding has no loss.

    Args:
        rows: Items of a `FeatureStore`, say.
        vocab_size: Of the target.

    Returns:
        `input_ids [B, T]`, `loss_mask [B, T]`, `lengths [B]`, and `features [B, T, layers * D]` where captured.

    Raises:
        InvalidConfigError: Tokens that the target does not know.
    """
    for ids in (row["input_ids"] for row in rows):
        if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < vocab_size):
            raise InvalidConfigError(
                f"A conversation has the tokens {int(ids.min())} to {int(ids.max())}; the target has {vocab_size}.",
                "Give data that was tokenised for this target.",
            )
    names = [name for name in ("input_ids", "loss_mask", "features") if name in rows[0]]
    batch: dict[str, Tensor] = {name: pad_sequence([row[name] for row in rows], batch_first=True) for name in names}
    return {**batch, "lengths": torch.tensor([len(row["input_ids"]) for row in rows], device="cpu")}


def _part(folder: Path, number: int) -> Path:
    return folder / f"part-{number:05}.safetensors"


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A file of captured features.

    Raises:
        InvalidConfigError: It is damaged, or of something else.
    """
    try:
        open_regular(path).close()
        with safe_open(path, framework="pt") as tensors:
            yield tensors
    except SafetensorError as error:
        raise InvalidConfigError(
            f"{path} cannot be read: {error}.",
            "Delete it and run capture_features(...) again; it makes what is missing.",
        ) from error


def _read_index(folder: Path) -> Fields:
    """What a folder of captured features says of itself.

    Raises:
        InvalidConfigError: It cannot be read, or says something else.
    """
    index = read_state(folder / INDEX, folder)
    sound = all(
        isinstance(index.get(name), list) and all(type(value) is int and value >= least for value in index[name])
        for name, least in (("layers", LAST), ("lengths", 0), ("counts", 1))
    )
    if not sound or sum(index["counts"]) != len(index["lengths"]) or not index["layers"]:
        raise InvalidConfigError(
            f"{folder / INDEX} does not tell what was captured.", f"Delete {folder} to start anew."
        )
    return index


def _claim(folder: Path, index: dict[str, Any], model: PreTrainedModel, left: Sequence[Conversation]) -> list[int]:
    """Write down what the folder holds, or find that it is that already; the layers to capture there, or more."""
    folder.mkdir(parents=True, exist_ok=True)
    clear_partials(folder)
    path = folder / INDEX
    if path.exists():
        held = _read_index(folder)
        if {**held, "layers": index["layers"]} != index:
            raise InvalidConfigError(f"{folder} holds features of other conversations.", "Use another directory.")
        if not set(index["layers"]) <= set(held["layers"]):
            raise InvalidConfigError(
                f"{folder} holds the layers {held['layers']}, not {index['layers']}.", "Use another directory."
            )
        index = held
    elif any(path.suffix != ".lock" for path in folder.iterdir()):
        raise InvalidConfigError(f"{folder} is not empty and holds no captured features.", "Use another directory.")
    needed, free = feature_bytes(model, left, index["layers"]), shutil.disk_usage(folder).free
    if needed > free:
        raise InvalidConfigError(
            f"The features need {needed / 1e9:.1f} GB, {folder} has {free / 1e9:.1f} GB free.",
            "Use another disk, fewer conversations, or features made in every step (no folder).",
        )
    write_text(path, json.dumps(index))
    layers: list[int] = index["layers"]
    return layers
