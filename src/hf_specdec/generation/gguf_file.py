"""Load a GGUF file, the format of llama.cpp, with its quantised matrices packed as they are in the file.

transformers makes the config, knows the names of the tensors and undoes what llama.cpp changed in some of them. Its
own loading takes seconds for the lists of a tokenizer, and on a CPU it unpacks the weights of most architectures.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import mmap
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.gguf import GGUF_CONFIG_ARCHS
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from hf_specdec.cpu.library import NoKernelsError, load_library
from hf_specdec.cpu.quantized import UNPACKED, PackedWeight
from hf_specdec.errors import CheckpointFormatError, InvalidConfigError, UnsupportedModelError, listed, translated
from hf_specdec.transformers_private import set_model_name

logger = logging.getLogger(__name__)

GGUF_DTYPES = {
    None: torch.float32, "auto": torch.float32, "float32": torch.float32, "bfloat16": torch.bfloat16,
    torch.float32: torch.float32, torch.bfloat16: torch.bfloat16,
}  # fmt: skip
"""What can be given as dtype, and what it means."""
OTHER_FORMAT = "Give the directory or Hub id of the model in transformers' format instead."
FREQUENCY_DIVISORS = "rope_freqs.weight"
"""Tensor of Llama 3: divisors of the rotary frequencies. transformers ignores it, and then computes another model."""
FREQUENCY_BUFFERS = "inv_freq", "original_inv_freq"
_STRING, _ARRAY = 8, 9
_VALUE_SIZES = (1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8)
"""Bytes of a metadata value, by its type; those of strings and arrays vary."""


def load_gguf(
    path: str | Path, *, dtype: torch.dtype | str | None = None, round_activations: bool = False,
    attn_implementation: str | None = None,
) -> Any:  # fmt: skip
    """Load a GGUF file into a causal language model of transformers, on the CPU.

    Quantised matrices stay packed (`PackedWeight`): the model needs as much memory as the file, and loading about
    the time of reading it. Matrices that cannot stay packed are unpacked, with a warning.

    Args:
        path: The file. Its tokenizer is `AutoTokenizer.from_pretrained(directory, gguf_file=name)`.
        dtype: Dtype in which the model computes, float32 (None) or bfloat16.
        round_activations: Round inputs of packed matrices to 8 bits, as llama.cpp does: faster, but less accurate.
        attn_implementation: As in transformers.

    Returns:
        The model, in evaluation mode; no parameter requires a gradient.

    Raises:
        CheckpointFormatError: The file is broken or incomplete, or the package gguf is not installed.
        InvalidConfigError: The dtype is another one.
        UnsupportedModelError: Such a model (a mixture of experts, for example) cannot be loaded from GGUF, or this
            machine cannot run the CPU kernels.

    Example:
        ```python
        model = SpeculativeGenerationMixin.attach(load_gguf("qwen2.5-0.5b-instruct-q4_k_m.gguf"))
        ```
    """
    if dtype not in GGUF_DTYPES:
        raise InvalidConfigError(f"A GGUF file cannot be loaded in {dtype}.", "Use float32 or bfloat16.")
    try:
        load_library()
    except NoKernelsError as error:
        raise UnsupportedModelError(
            f"GGUF weights stay packed only with the CPU kernels, and {error}.", UNPACKED
        ) from error
    with _loading(path):
        file = _File(Path(path).expanduser())
        model = _empty_model(file, GGUF_DTYPES[dtype], attn_implementation)
        plan = _Plan(model, file)
        weights = {plan.names[tensor.name]: plan.parameter(tensor, round_activations) for tensor in plan.tensors}
        model.requires_grad_(False).load_state_dict(weights, strict=False, assign=True)
        model.tie_weights(missing_keys=set(model.state_dict()) - set(weights), recompute_mapping=False)
        plan.divide_frequencies()
    return model.eval()


def gguf_config(path: Path) -> Any:
    """Return the config of the model in a GGUF file."""
    with _loading(path):
        return _config(_File(path))


def _loading(path: str | Path) -> Any:
    if importlib.util.find_spec("gguf") is None:
        raise CheckpointFormatError("Reading GGUF files needs the package gguf.", "Run: pip install gguf")
    return translated(CheckpointFormatError, f"The model {str(path)!r} cannot be loaded", OTHER_FORMAT)


# ----------------------------------------------------------------------------------------------- the file


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor of a GGUF file; its type is one of `gguf.GGMLQuantizationType`."""

    name: str
    type: Any
    shape: tuple[int, ...]
    row_bytes: int
    offset: int  # from where the tensors begin

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes

    @property
    def is_quantised(self) -> bool:
        return self.type.name not in ("F32", "F16", "BF16")


class _File:
    """The metadata and tensors of a GGUF file.

    `fields` maps each key to the type and the value, as bytes of the file. A list of the tokenizer, of which only the
    length matters for the config, is replaced by a string of that length.
    """

    def __init__(self, path: Path) -> None:
        import gguf

        self.path, self.fields, self.tensors = path, dict[str, bytes](), list[_Tensor]()
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            magic, version, num_tensors, num_fields = struct.unpack_from("<4sIQQ", data)
            if magic != b"GGUF" or version not in (2, 3):
                raise CheckpointFormatError(f"{str(path)!r} is not a GGUF file of version 2 or 3.", OTHER_FORMAT)
            at = 24
            for _ in range(num_fields):
                key, start = _text(data, at)
                at = _end(data, start)
                if at > len(data):
                    raise ValueError("it is incomplete")
                self.fields[key] = data[start:at]
                if key.startswith("tokenizer.") and data[start] == _ARRAY:
                    (length,) = struct.unpack_from("<Q", data, start + 8)
                    self.fields[key] = struct.pack("<IQ", _STRING, length) + b" " * length
            for _ in range(num_tensors):
                name, at = _text(data, at)
                (num_sizes,) = struct.unpack_from("<I", data, at)
                *sizes, number, offset = struct.unpack_from(f"<{num_sizes}QIQ", data, at + 4)
                at += 16 + 8 * num_sizes
                kind = gguf.GGMLQuantizationType(number)
                values, size = gguf.GGML_QUANT_SIZES[kind]
                self.tensors.append(_Tensor(name, kind, tuple(sizes[::-1]), sizes[0] // values * size, offset))
            self._begin = at + -at % (self.number("general.alignment") or 32)
            expected = self._begin + max(tensor.offset + tensor.num_bytes for tensor in self.tensors)
            if expected > len(data):
                raise CheckpointFormatError(
                    f"{str(path)!r} is incomplete: it has {len(data)} of {expected} bytes.", "Download it again."
                )
        self.architecture = self.fields["general.architecture"][12:].decode()

    def number(self, key: str) -> int:
        """Return a field's value, 0 if there is none."""
        return int.from_bytes(self.fields.get(key, b"")[4:], "little")

    def read(self, tensor: _Tensor) -> np.ndarray[Any, Any]:
        """Return a tensor's bytes, `[..., bytes per row]`."""
        content = np.fromfile(self.path, np.uint8, tensor.num_bytes, offset=self._begin + tensor.offset)
        return content.reshape(*tensor.shape[:-1], tensor.row_bytes)

    def without_content(self) -> bytes:
        """Return a GGUF file with the same metadata, and tensors of the same names without elements."""
        content = struct.pack("<4sIQQ", b"GGUF", 3, len(self.tensors), len(self.fields))
        for key, value in self.fields.items():
            content += _packed_text(key) + value
        for tensor in self.tensors:
            content += _packed_text(tensor.name) + struct.pack("<IQIQ", 1, 0, 0, 0)
        return content


def _packed_text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _text(data: mmap.mmap, at: int) -> tuple[str, int]:
    """Return the string at a position, and the position after it."""
    (length,) = struct.unpack_from("<Q", data, at)
    return data[at + 8 : at + 8 + length].decode(), at + 8 + length


def _end(data: mmap.mmap, at: int) -> int:
    """Return the position after a value whose type is at a position."""
    (kind,), count, at = struct.unpack_from("<I", data, at), 1, at + 4
    if kind == _ARRAY:
        kind, count = struct.unpack_from("<IQ", data, at)
        at += 12
    if kind == _ARRAY:
        raise ValueError("it holds a list of lists")
    if kind != _STRING:
        return at + count * _VALUE_SIZES[kind]
    for _ in range(count):
        at += 8 + struct.unpack_from("<Q", data, at)[0]
    return at


# ----------------------------------------------------------------------------------------------- the model


def _config(file: _File) -> Any:
    """Return the config that transformers makes of the metadata and the names of the tensors."""
    with tempfile.TemporaryDirectory(prefix="hf-specdec-") as folder:
        Path(folder, "model.gguf").write_bytes(file.without_content())
        config = AutoConfig.from_pretrained(folder, gguf_file="model.gguf")
    set_model_name(config, str(file.path))
    return config


def _empty_model(file: _File, dtype: torch.dtype, attn_implementation: str | None) -> Any:
    """Return the model, with parameters on the meta device and real buffers; refuse other files."""
    if file.number("split.count") > 1:
        raise UnsupportedModelError(
            f"{str(file.path)!r} is one of several files of a model.",
            "Merge them first: llama-gguf-split --merge FIRST_FILE NEW_FILE.",
        )
    if file.architecture in GGUF_CONFIG_ARCHS:
        raise UnsupportedModelError(
            f"`load_gguf` does not know the architecture {file.architecture!r}.",
            "Use AutoModelForCausalLM.from_pretrained(directory, gguf_file=name), which may keep it packed.",
        )
    if experts := [tensor.name for tensor in file.tensors if len(tensor.shape) > 2]:
        raise UnsupportedModelError(
            f"{str(file.path)!r} holds a mixture of experts: {listed(experts, 1)}.", OTHER_FORMAT
        )
    with (
        translated(UnsupportedModelError, f"The model {str(file.path)!r} cannot be loaded", OTHER_FORMAT),
        init_empty_weights(include_buffers=False),
    ):
        return AutoModelForCausalLM.from_config(_config(file), dtype=dtype, attn_implementation=attn_implementation)


class _Plan:
    """How the tensors of a file become the parameters of a model; checked before any tensor is read."""

    def __init__(self, model: Any, file: _File) -> None:
        self._model, self._file = model, file
        self._processor = TENSOR_PROCESSORS.get(file.architecture, TensorProcessor)(config=model.config.to_dict())
        self.names: dict[str, str] = get_gguf_hf_weights_map(_without_layers(model), self._processor)
        self._frequencies = [
            buffer for name, buffer in model.named_buffers() if name.rpartition(".")[2] in FREQUENCY_BUFFERS
        ]
        sizes = {tuple(buffer.shape) for buffer in self._frequencies}
        self._divisors = [one for one in file.tensors if one.name == FREQUENCY_DIVISORS and sizes == {one.shape}]
        self.tensors = [tensor for tensor in file.tensors if tensor not in self._divisors]
        """Those that become parameters."""
        self._check()
        self._rows = {tensor.name: self._packed_rows(tensor) for tensor in self.tensors if tensor.is_quantised}
        self._warn_of_unpacked()

    def _check(self) -> None:
        """Refuse a file that holds more, less or other tensors than the model."""
        state, file, kind = self._model.state_dict(), str(self._file.path), type(self._model).__name__
        if unknown := [tensor.name for tensor in self.tensors if tensor.name not in self.names]:
            raise UnsupportedModelError(
                f"{file!r} holds tensors that {kind} has no parameters for: {listed(unknown, 3)}.", OTHER_FORMAT
            )
        missing = set(state) - {self.names[tensor.name] for tensor in self.tensors}
        self._model.tie_weights(missing_keys=missing, recompute_mapping=False)
        if missing:
            raise UnsupportedModelError(
                f"{file!r} has no tensors for parameters of {kind}: {listed(sorted(missing), 3)}.", OTHER_FORMAT
            )
        for tensor in self.tensors:
            expected = state[self.names[tensor.name]]
            if expected.numel() != math.prod(tensor.shape):
                raise UnsupportedModelError(
                    f"{tensor.name} in {file!r} has the shape {tensor.shape}, but {kind} needs "
                    f"{tuple(expected.shape)}.",
                    OTHER_FORMAT,
                )

    def _packed_rows(self, tensor: _Tensor) -> Any:
        """Return which rows of the file, in which order, a packed matrix consists of; None if it cannot stay packed.

        How the processor orders rows is read off a matrix that holds the numbers of its rows.
        """
        place, _, name = self.names[tensor.name].rpartition(".")
        is_matrix = isinstance(self._model.get_submodule(place), nn.Linear | nn.Embedding) and name == "weight"
        if not is_matrix or not PackedWeight.supports(tensor.type.name, *tensor.shape):
            return None
        numbers = np.arange(tensor.shape[0], dtype=np.float64)
        before = np.stack([numbers, -numbers, np.full_like(numbers, 0.5)], axis=1)
        try:
            after = self._processed(before, tensor.name)
        except ValueError:  # it needs the real number of columns: more than the order of rows changes
            return None
        if np.array_equal(after, before):
            return slice(None)
        rows = after[:, 0].astype(np.int64)
        is_order = np.array_equal(np.sort(rows), numbers) and np.array_equal(after, before[rows])
        return rows if is_order else None

    def _warn_of_unpacked(self) -> None:
        unpacked = [tensor for tensor in self.tensors if self._rows.get(tensor.name, self) is None]
        if unpacked:
            logger.warning(
                "%d of the %d quantised matrices in %s cannot stay packed (%s); unpacked they need %.2f GB.",
                len(unpacked), len(self._rows), self._file.path,
                ", ".join(sorted({tensor.type.name for tensor in unpacked})),
                sum(math.prod(tensor.shape) for tensor in unpacked) * self._model.dtype.itemsize / 1e9,
            )  # fmt: skip

    def _processed(self, values: Any, name: str) -> Any:
        """Undo what llama.cpp changed in a tensor."""
        others: dict[str, Any] = {"tensors": {}}  # the processor of GPT-2 writes into it
        processed = self._processor.process(
            weights=values, name=name, tensor_key_mapping=self.names, parsed_parameters=others
        )
        return processed.weights

    def parameter(self, tensor: _Tensor, round_activations: bool) -> torch.Tensor:
        """Read a tensor and return the parameter."""
        content, rows, dtype = self._file.read(tensor), self._rows.get(tensor.name), self._model.dtype
        if rows is None:
            values = self._processed(_dequantised(tensor, content), tensor.name)
            return torch.tensor(values, dtype=dtype, device="cpu")
        return PackedWeight.from_gguf(torch.from_numpy(content[rows]), tensor.type.name, dtype, round_activations)

    def divide_frequencies(self) -> None:
        """Divide the rotary frequencies by the divisors in the file, if any."""
        for tensor in self._divisors:
            for buffer in self._frequencies:
                buffer /= torch.from_numpy(_dequantised(tensor, self._file.read(tensor)))


def _dequantised(tensor: _Tensor, content: Any) -> Any:
    import gguf

    return gguf.dequantize(content, tensor.type)


def _without_layers(model: Any) -> Any:
    """Return what `get_gguf_hf_weights_map` reads of a model; it would take seconds to look at every module."""
    body = SimpleNamespace(state_dict=model.base_model.state_dict, named_children=list)
    children = [(model.base_model_prefix, body)]
    return SimpleNamespace(config=model.config, state_dict=model.state_dict, named_children=lambda: children)
