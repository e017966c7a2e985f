"""Train a head from a model and a file of prompts, and publish it: answers, training, tree, card, export, upload.

    pip install -e '.[training]'
    python examples/distil_train_publish.py --prompts prompts.txt --work work
    python examples/distil_train_publish.py --model org/model --prompts prompts.txt --work work --publish you/your-head

All files are in WORK, and an interrupted run continues when run again. Without --publish the head stays in WORK/head;
WORK/vllm has it in the layout of speculators, which vLLM loads.
The commands `hf-specdec distill`, `train eagle` and `tree` do the same. See docs/training.md for their options and for
the amount of data that a head needs. To try the script, a dozen prompts are enough; such a head is of no use.

Progress bars show the stages. Output at the end (values vary):

    a static tree of ... nodes: expected tau ..., ...x plain decoding here
    the head is in work/head: use it with model.load_drafter("work/head")
"""

import argparse
from pathlib import Path

from huggingface_hub import whoami
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdec import Eagle3Config, Eagle3Head, export_head, model_and_head, training

SMALL_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""Hub id of the packaged model: a head stores which model it is for, and a local path would be useless elsewhere."""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="path or Hub id; default: the packaged SmolLM2-135M-Instruct")
    parser.add_argument("--prompts", required=True, help=".txt with one prompt per line, or JSON lines")
    parser.add_argument("--work", type=Path, required=True, help="directory for all files; run again to continue")
    parser.add_argument("--publish", help="Hub repository to upload the head to")
    parser.add_argument("--epochs", type=float, default=2, help="of training; default: %(default)s")
    parser.add_argument("--max-new-tokens", type=int, default=512, help="of each answer; default: %(default)s")
    parser.add_argument("--draft-vocab-size", type=int, default=8192, help="tokens that the head can draft")
    options = parser.parse_args()

    if options.publish:
        whoami()  # fails without a login: now, not after hours of training
    name, _ = model_and_head(options.model)
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name, dtype="auto", device_map="auto")

    settings = training.DistillConfig(max_new_tokens=options.max_new_tokens, temperatures=(0.0, 0.0, 0.7))
    prompts = training.read_prompts(options.prompts)
    answers = training.distill(model, tokenizer, prompts, options.work / "answers", settings)
    talks = training.read_conversations(answers)
    talks, held_out = training.hold_out(talks, min(len(talks) // 20 + 1, 64))

    config = Eagle3Config.for_target(model.config, draft_vocab_size=options.draft_vocab_size)
    config.base_model_name_or_path = options.model or SMALL_MODEL
    head = Eagle3Head(config)
    head.set_hot_token_ids(training.most_frequent_tokens(talks, options.draft_vocab_size))
    training.start_from_target(head, model)

    layers = (*head.feature_layers, training.LAST)
    store = training.capture_features(model, talks, options.work / "features", layers=layers, progress=True)
    measured = training.capture_features(model, held_out, options.work / "held-out", layers=layers)
    arguments = training.head_arguments(
        options.work / "run", {"bf16": True}, held_out=True, num_train_epochs=options.epochs,
        per_device_train_batch_size=4, learning_rate=1e-3,
    )  # fmt: skip
    recipe = training.EagleTrainingConfig.for_head(head).changed(growing=0.6)
    head = training.train_eagle(model, head, store, arguments, recipe, resume=True, held_out=measured)

    head = head.to(model.dtype)
    found = training.find_tree(model, head, measured, max_nodes=32)
    print(f"a static tree of {found.num_nodes} nodes: expected tau {found.expected_tau[found.num_nodes]:.2f}, "
          f"{found.expected_speed_up:.2f}x plain decoding here")  # fmt: skip
    folder = options.work / "head"
    head.save_pretrained(folder, push_to_hub=bool(options.publish), repo_id=options.publish)
    export_head(head, options.work / "vllm", "speculators", replace=True)
    print(f'the head is in {folder}: use it with model.load_drafter("{folder}")')


if __name__ == "__main__":
    main()
