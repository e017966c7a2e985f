"""Write a GGUF file with random weights in the sizes of a larger model: only the speed of its steps means something.

    python benchmarks/random_gguf.py qwen2.5-coder-1.5b-instruct-q4_k_m.gguf model.gguf

Tokenizer and kinds of blocks come from the given file, sizes from Qwen2.5-7B: 28 layers as in the 1.5B, 4.7 GB in
Q4_K_M. Numbers are those of trained weights in size (0.02), so that nothing overflows or underflows.
"""

import argparse
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES

SIZES = {"embedding_length": 3584, "feed_forward_length": 18944, "attention.head_count": 28,
         "attention.head_count_kv": 4}  # fmt: skip
HEAD_SIZE = 128


def random_tensor(draw, shape, kind):
    """Return a tensor of a shape (columns last) in blocks of a kind, as uint8, or float32 ones."""
    if kind == GGMLQuantizationType.F32:
        return np.ones(shape, np.float32)
    numbers, size = GGML_QUANT_SIZES[kind]
    blocks = draw.integers(0, 256, (*shape[:-1], shape[-1] // numbers, size), dtype=np.uint8)
    place, scales = {"Q4_K": (0, [1e-4, 7.5e-4]), "Q6_K": (208, [2e-5])}[kind.name]
    blocks[..., place : place + 2 * len(scales)] = np.array(scales, np.float16).view(np.uint8)
    if kind.name == "Q4_K":  # all eight groups: scale and offset 40 in 6 bits, which lie apart
        blocks[..., 4:12], blocks[..., 12:16] = 40 | 2 << 6, 8 | 8 << 4
    return blocks.reshape(*shape[:-1], -1)


def main():
    """Copy the metadata, and draw tensors of the larger sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    if options.output.exists():
        parser.error(f"{options.output} exists. Name another file.")
    reader, draw = GGUFReader(options.source), np.random.default_rng(0)
    architecture = reader.fields["general.architecture"].contents()
    known = {name: int(reader.fields[f"{architecture}.{name}"].contents()) for name in SIZES}
    larger = {known["embedding_length"]: SIZES["embedding_length"]}
    larger |= {known["feed_forward_length"]: SIZES["feed_forward_length"]}
    larger |= {known["attention.head_count_kv"] * HEAD_SIZE: SIZES["attention.head_count_kv"] * HEAD_SIZE}
    writer = GGUFWriter(options.output, architecture, use_temp_file=True)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind, value = field.types[0], SIZES.get(name.removeprefix(f"{architecture}."), field.contents())
        inner = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(name, value, kind, sub_type=inner)
    for tensor in reader.tensors:
        shape = [larger.get(int(size), int(size)) for size in reversed(tensor.shape)]
        drawn = random_tensor(draw, shape, tensor.tensor_type)
        writer.add_tensor(tensor.name, drawn, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    print(f"{options.output}: {options.output.stat().st_size / 1e9:.1f} GB")


if __name__ == "__main__":
    main()
