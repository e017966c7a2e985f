"""Convert a quantised GGUF file to bf16, with the same values that `load_model` dequantises to.

python benchmarks/workers/gguf_bf16.py quantised.gguf bf16.gguf
"""

import sys
from pathlib import Path

import numpy
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize, quantize

OF_THE_FILE = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")
"""Prefixes of keys that the writer sets, or that no longer apply."""


def convert(source: Path, destination: Path) -> None:
    """Write `destination`; vectors are rounded to bf16 but stored as float32, as llama.cpp requires."""
    reader = GGUFReader(source)
    writer = GGUFWriter(destination, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if key.startswith(OF_THE_FILE):
            continue
        kind, inner = field.types[0], field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), kind, inner)
    writer.add_file_type(LlamaFileType.MOSTLY_BF16)
    bf16 = GGMLQuantizationType.BF16
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(numpy.float32)
        halves = quantize(values, bf16)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, dequantize(halves, bf16))
        else:
            writer.add_tensor(tensor.name, halves, raw_dtype=bf16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
