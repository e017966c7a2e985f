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
rollouts per prompt and of low temperatures. docs/trainers.md has measurements.

Expected output, with one line per rollout and the trainer's log before the rewards; the first rollout includes the
one-time probe and measurement of costs. Tau varies: in one run it was 1.04 and 1.01 in the first two rollouts, and
1.02 to 1.77 in the others:

    rollout: plain ... s, speculative ... s, tau 1.04
    rollout: plain ... s, speculative ... s, tau 1.01
    rollout: plain ... s, speculative ... s, tau 1.24
    ...
    rewards: ...
    same tokens for the same seed: True
"""

import argparse
import time
import warnings

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdec import SpeculativeDecodingError, SpeculativeGenerationMixin, model_and_head

SPECULATIVE = {"method": "auto", "history": "per_prompt"}
TOPICS = ("a train timetable", "a football table")


def digits(completions, **_):
    """Return the share of digits in each answer."""
    texts = [completion[-1]["content"] for completion in completions]
    return [sum(map(str.isdigit, text)) / max(len(text), 1) for text in texts]


def compare(model):
    """Generate every rollout of the model twice, print both times, and return the speculative answer."""
    generate = model.generate

    def generate_both(*args, **kwargs):
        seconds = []
        for options in ({"speculative": None}, {}):
            begin = time.perf_counter()
            ids = generate(*args, **kwargs, **options)
            seconds.append(time.perf_counter() - begin)
        tau = model.last_speculation.mean_accepted_length
        print(f"rollout: plain {seconds[0]:.1f} s, speculative {seconds[1]:.1f} s, tau {tau:.2f}")
        return ids

    model.generate = generate_both


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="path or Hub id; default: the packaged SmolLM2-135M-Instruct")
    parser.add_argument("--lora", action="store_true", help="train a LoRA adapter instead of all weights")
    parser.add_argument("--steps", type=int, default=8, help="of training, one prompt each; default: %(default)s")
    parser.add_argument("--num-generations", type=int, default=2, help="rollouts per prompt; default: %(default)s")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="of each answer; default: %(default)s")
    parser.add_argument("--output", default="grpo", help="output directory of the trainer; default: %(default)s")
    options = parser.parse_args()
    if options.max_new_tokens < 1:
        parser.error(f"--max-new-tokens must be at least 1, got {options.max_new_tokens}")
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")
    if options.num_generations < 2:  # a reward counts relative to those of the same prompt
        parser.error(f"--num-generations must be at least 2, got {options.num_generations}")
    try:
        from datasets import Dataset
        from peft import LoraConfig
        from trl import GRPOConfig, GRPOTrainer
    except ImportError as error:
        raise SystemExit(f"This example needs trl: pip install 'hf-specdec[trl]' ({error})") from error
    # TRL uses names that transformers has renamed
    warnings.filterwarnings("ignore", ".*gradient_checkpointing.* is deprecated", FutureWarning)
    try:
        name, _ = model_and_head(options.model, None)
        tokenizer = AutoTokenizer.from_pretrained(name)
        if tokenizer.chat_template is None:
            parser.error(f"The model {name!r} has no chat template. Give an instruct model: --model.")
        model = SpeculativeGenerationMixin.attach(AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32))
    except (OSError, SpeculativeDecodingError) as error:
        parser.error(str(error))
    model.generation_config.speculative = SPECULATIVE
    compare(model)
    adapter = LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear") if options.lora else None
    config = GRPOConfig(
        output_dir=options.output, max_steps=options.steps, learning_rate=1e-5, bf16=False, seed=0,
        num_generations=options.num_generations, per_device_train_batch_size=options.num_generations,
        gradient_accumulation_steps=1, max_completion_length=options.max_new_tokens,
        save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    prompts = [[{"role": "user", "content": f"Write {topic} with many numbers."}] for topic in TOPICS]
    trainer = GRPOTrainer(
        model, reward_funcs=digits, args=config, train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer, peft_config=adapter,
    )  # fmt: skip
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    print("rewards:", ", ".join(f"{reward:.3f}" for reward in rewards) or "none were logged")

    del model.generate  # the original one again
    model.eval()  # the trainer leaves it in train mode with gradient checkpointing, which has no KV cache
    inputs = tokenizer("1, 2, 3, 4, 5,", return_tensors="pt").to(model.device)
    answers = []
    for speculative in (None, SPECULATIVE):
        torch.manual_seed(0)
        answers.append(model.generate(**inputs, speculative=speculative, do_sample=True, max_new_tokens=32).tolist())
    print("same tokens for the same seed:", answers[0] == answers[1])


if __name__ == "__main__":
    main()
