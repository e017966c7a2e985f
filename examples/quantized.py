"""Quantise the model to int8 weights, and speculate with a head that was trained for the unquantised one.

    pip install optimum-quanto            # or torchao
    python examples/quantized.py
    python examples/quantized.py --backend torchao

The head reads the hidden states of the quantised model and loses little by that. The draft is checked by the quantised
model itself, so the answer is that of its plain `generate()`. What is quantised changes the answer; speculation does
not. In float32 the token ids are equal; the script checks it.

int8 weights save memory. They make a forward faster only if the backend has int8 kernels for the device; otherwise it
converts the weights in every forward. Other backends of transformers work the same way if the model passes the probe
of `attach`; on a CPU, quanto and torchao were tested, bitsandbytes and 4 bits were not.

Expected output (the answer is the quantised model's; tau depends on the machine: `auto` measures what drafting costs):

    weights: 210.0 MiB instead of 513.1 MiB
    plain: ... tokens/s
    auto: ... tokens/s, tau ...
    the same ids: True
    ```python
    def calculate_mean(numbers):
    ...
"""

import argparse
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, QuantoConfig, TorchAoConfig

from hf_specdec import SpeculativeDecodingError, SpeculativeGenerationMixin, model_and_head

DTYPES = ("float32", "bfloat16", "float16")
PACKAGES = {"quanto": "optimum-quanto", "torchao": "torchao"}
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
    return tensor.numel() * tensor.element_size()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", nargs="?", default=QUESTION, help="default: about a Python function")
    parser.add_argument("--model", help="path or Hub id; default: the packaged SmolLM2-135M-Instruct")
    parser.add_argument("--drafter", help="path or Hub id of a head; default: the packaged model's, if it is there")
    parser.add_argument(
        "--backend", choices=PACKAGES, default="quanto", help="package that quantises; default: %(default)s"
    )
    parser.add_argument("--max-new-tokens", type=int, default=128, help="of each answer; default: %(default)s")
    parser.add_argument("--dtype", choices=DTYPES, default="float32",
                        help="of activations; only float32 gives identical answers; default: %(default)s")  # fmt: skip
    options = parser.parse_args()
    if options.max_new_tokens < 1:
        parser.error(f"--max-new-tokens must be at least 1, got {options.max_new_tokens}")
    try:
        quantized = quantization(options.backend)
    except ImportError as error:
        package = PACKAGES[options.backend]
        raise SystemExit(f"This example needs {package}: pip install {package} ({error})") from error
    try:
        name, head = model_and_head(options.model, options.drafter)
        tokenizer = AutoTokenizer.from_pretrained(name)
        if tokenizer.chat_template is None:
            parser.error(f"The model {name!r} has no chat template. Give an instruct model: --model.")
        model = AutoModelForCausalLM.from_pretrained(
            name, dtype=options.dtype, quantization_config=quantized,
            device_map="cuda" if torch.cuda.is_available() else "cpu",
        )  # fmt: skip
        SpeculativeGenerationMixin.attach(model)
        if head:
            model.load_drafter(head)
    except (OSError, SpeculativeDecodingError) as error:
        parser.error(str(error))
    model.warmup()  # one-time work, so that it is not timed below
    sizes = (sum(map(size, model.parameters())) / 2**20 for size in (num_bytes, lambda weight: weight.nbytes))
    print("weights: {:.1f} MiB instead of {:.1f} MiB".format(*sizes))
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": options.question}], add_generation_prompt=True, return_tensors="pt",
        return_dict=True,
    ).to(model.device)  # fmt: skip
    answers = []
    for speculative in (None, "auto"):
        begin = time.perf_counter()
        ids = model.generate(
            **inputs, max_new_tokens=options.max_new_tokens, do_sample=False, speculative=speculative
        )[0, inputs["input_ids"].shape[1] :]
        speed = len(ids) / (time.perf_counter() - begin)
        tau = f", tau {model.last_speculation.mean_accepted_length:.2f}" if speculative else ""
        print(f"{speculative or 'plain'}: {speed:.1f} tokens/s{tau}")
        answers.append(ids)
    print("the same ids:", torch.equal(*answers))
    print(tokenizer.decode(answers[1], skip_special_tokens=True))


if __name__ == "__main__":
    main()
