"""Train with TRL's GRPOTrainer on rollouts that are generated with speculation.

    pip install 'hf-specdec[trl]'
    python examples/grpo_rollouts.py            # the packaged SmolLM2-135M-Instruct, all weights
    python examples/grpo_rollouts.py --lora     # an adapter only

The reward is the share of digits in the answer. To compare the times, every rollout is generated twice, first without
speculation; training uses the speculative one. The last line compares one rollout of a single row in float32: both
ways give the same tokens for the same seed.

`"history": "per_prompt"` also drafts from earlier answers to the same prompt (docs/history.md). Eight steps answer
each of two prompts four times, so the first two steps have no earlier answers. The gain is small here, because short
answers that are sampled at temperature 1 share few phrases; expect more of long answers with fixed phrases, of many
rollouts per prompt and of low temperatures. docs/rollouts.md has measurements.

Expected output, with one line per rollout and the trainer's log in between; the first rollout includes the one-time
probe and measurement of costs. Tau varies: in one run it was 1.04 and 1.01 in the first two rollouts, and 1.02 to 1.77
in the others:

    rollout: plain ... s, speculative ... s, tau 1.04
    rollout: plain ... s, speculative ... s, tau 1.01
    rollout: plain ... s, speculative ... s, tau 1.24
    ...
    same tokens for the same seed: True
"""

import argparse
import time

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from hf_specdec import SpeculativeGenerationMixin, model_and_head

SPECULATIVE = {"method": "auto", "history": "per_prompt"}
TOPICS = ("a train timetable", "a football table")


def digits(completions, **_):
    """Return the share of digits in each answer."""
    texts = [completion[-1]["content"] for completion in completions]
    return [sum(map(str.isdigit, text)) / max(len(text), 1) for text in texts]


def compare(model):
    """Let the model generate every rollout twice, print both times, and return the speculative answer."""
    generate = model.generate

    def generate_both(*args, **kwargs):
        begin = time.perf_counter()
        generate(*args, **kwargs, speculative=None)
        middle = time.perf_counter()
        ids = generate(*args, **kwargs)
        plain, speculative = middle - begin, time.perf_counter() - middle
        tau = model.last_speculation.tau
        print(f"rollout: plain {plain:.1f} s, speculative {speculative:.1f} s, tau {tau:.2f}")
        return ids

    model.generate = generate_both


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="path or Hub id; default: the packaged SmolLM2-135M-Instruct")
    parser.add_argument("--lora", action="store_true", help="train a LoRA adapter instead of all weights")
    parser.add_argument("--steps", type=int, default=8, help="of training, one prompt each; default: %(default)s")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="of each answer; default: %(default)s")
    parser.add_argument("--output", default="grpo", help="output directory of the trainer; default: %(default)s")
    options = parser.parse_args()

    name, _ = model_and_head(options.model)
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = SpeculativeGenerationMixin.attach(AutoModelForCausalLM.from_pretrained(name, dtype="float32"))
    model.generation_config.speculative = SPECULATIVE  # the default of every call
    compare(model)
    config = GRPOConfig(
        output_dir=options.output, max_steps=options.steps, learning_rate=1e-5, bf16=False, seed=0,
        num_generations=2, per_device_train_batch_size=2, gradient_accumulation_steps=1, logging_steps=1,
        max_completion_length=options.max_new_tokens, save_strategy="no", report_to=[], disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    prompts = [[{"role": "user", "content": f"Write {topic} with many numbers."}] for topic in TOPICS]
    trainer = GRPOTrainer(
        model, reward_funcs=digits, args=config, train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        peft_config=LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear") if options.lora else None,
    )  # fmt: skip
    trainer.train()

    del model.generate  # the original one again
    model.eval()  # the trainer leaves it in train mode with gradient checkpointing, which has no KV cache
    inputs = tokenizer("1, 2, 3, 4, 5,", return_tensors="pt").to(model.device)
    answers = []
    for speculative in (None, SPECULATIVE):
        torch.manual_seed(0)
        answers.append(model.generate(**inputs, speculative=speculative, do_sample=True, max_new_tokens=32))
    print("same tokens for the same seed:", torch.equal(*answers))


if __name__ == "__main__":
    main()
