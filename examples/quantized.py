"""Quantise the model to int8 weights, and speculate with a head that was trained for the unquantised one.

    pip install optimum-quanto            # or torchao
    python examples/quantized.py
    python examples/quantized.py --backend torchao

The head reads the hidden states of the quantised model and loses little by that. The draft is checked by the quantised
model itself, so the answer is that of its plain `generate()`. What is quantised changes the answer; speculation does
not. In float32 the token ids are equal; the script checks it.

int8 weights save memory. They make a forward faster only if the backend has int8 kernels for the device; otherwise it
converts the weights in every forward. Other backends of transformers work the same way if the model passes the probe
of `attach`; on a CPU, quanto and torchao were tested, bitsandbytes was not. For GGUF files: `load_gguf`.

Expected output, with the quantised model's answer twice (tau depends on the machine: `auto` measures what drafting
costs):

    weights: 210.0 MiB instead of 513.1 MiB
    ```python
    def calculate_mean(numbers):
    ...
    plain: 128 tokens, ... s, ... tokens/s, tau 1.00
    ...
    auto: 128 tokens, ... s, ... tokens/s, tau ...
    the same ids: True
"""

import argparse

import torch
from transformers import AutoTokenizer, QuantoConfig, TorchAoConfig

from hf_specdec import AutoSpeculativeModelForCausalLM, model_and_head
from hf_specdec.viz import LiveStreamer

QUESTION = "Write a Python function that returns the mean of a list of numbers, and explain it line by line."


def quantization(backend):
    """Return transformers' configuration for int8 weights."""
    if backend == "quanto":
        import optimum.quanto  # noqa: F401  # transformers would import it only after reading the weights

        return QuantoConfig(weights="int8")
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


def num_bytes(tensor):
    """Return the size of a tensor's data; quantised ones consist of several tensors."""
    if hasattr(tensor, "__tensor_flatten__"):
        return sum(num_bytes(getattr(tensor, part)) for part in tensor.__tensor_flatten__()[0])
    return tensor.nbytes


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", nargs="?", default=QUESTION, help="default: about a Python function")
    parser.add_argument("--model", help="path or Hub id; default: the packaged SmolLM2-135M-Instruct")
    parser.add_argument("--drafter", help="path or Hub id of a head; default: the packaged model's, if it is there")
    parser.add_argument("--backend", choices=["quanto", "torchao"], default="quanto", help="default: %(default)s")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="of each answer; default: %(default)s")
    options = parser.parse_args()

    name, head = model_and_head(options.model, options.drafter)
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoSpeculativeModelForCausalLM.from_pretrained(
        name, drafter=head, dtype="float32", device_map="auto", quantization_config=quantization(options.backend)
    )
    sizes = (sum(map(size, model.parameters())) / 2**20 for size in (num_bytes, lambda weight: weight.nbytes))
    print("weights: {:.1f} MiB instead of {:.1f} MiB".format(*sizes))
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": options.question}], add_generation_prompt=True, return_tensors="pt",
        return_dict=True,
    ).to(model.device)  # fmt: skip
    model.warmup()  # one-time work, so that it is not timed
    answers = [
        model.generate(
            **inputs, max_new_tokens=options.max_new_tokens, do_sample=False, speculative=speculative,
            streamer=LiveStreamer(tokenizer, speculative or "plain"),
        )
        for speculative in (None, "auto")
    ]  # fmt: skip
    print("the same ids:", torch.equal(*answers))


if __name__ == "__main__":
    main()
