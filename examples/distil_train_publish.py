"""Train a head from a model and a file of prompts, and publish it: answers, training, tree, card, upload.

    pip install 'hf-specdec[training]'
    python examples/distil_train_publish.py --prompts prompts.txt --work work
    python examples/distil_train_publish.py --model org/model --prompts prompts.txt --work work --publish you/your-head

All files are in WORK, and an interrupted run continues when run again. Without --publish the head stays in WORK/head.
The commands `hf-specdec distill`, `train eagle` and `tree` do the same. See docs/training.md for their options and for
the amount of data that a head needs. To try the script, three prompts are enough; such a head is of no use.

Progress bars show the stages. Output at the end (values vary):

    a static tree of ... nodes: expected tau ..., ...x plain decoding here
    the head is in work/head: use it with model.load_drafter("work/head")
"""

import argparse
from pathlib import Path

import torch
from huggingface_hub import whoami
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdec import Eagle3Config, Eagle3Head, InvalidConfigError, SpeculativeDecodingError, model_and_head, training

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
    parser.add_argument(
        "--draft-vocab-size", type=int, default=8192, help="tokens that the head can draft; default: %(default)s"
    )
    options = parser.parse_args()
    if options.max_new_tokens < 1:
        parser.error(f"--max-new-tokens must be at least 1, got {options.max_new_tokens}")
    if not 0 < options.epochs < float("inf"):
        parser.error(f"--epochs must be above 0 and finite, got {options.epochs}")
    if options.draft_vocab_size < 1:
        parser.error(f"--draft-vocab-size must be at least 1, got {options.draft_vocab_size}")
    try:
        import datasets  # noqa: F401  # reads and stores the answers
    except ImportError as error:
        raise SystemExit(f"This example needs datasets: pip install 'hf-specdec[training]' ({error})") from error
    try:
        prompts = training.read_prompts(options.prompts)
    except InvalidConfigError as error:
        missing = "" if Path(options.prompts).exists() else f"{options.prompts} is not a file. "
        parser.error(f"{missing}{error}")
    if not prompts:
        parser.error(f"{options.prompts} has no prompts")
    if options.work.exists() and not options.work.is_dir():
        parser.error(f"--work {options.work} is a file; give a directory")
    if options.publish:
        try:
            whoami()  # now, not after hours of training
        except Exception as error:  # the Hub's client raises many types
            parser.error(f"--publish needs the Hub and a login: {error}")
    try:
        name, _ = model_and_head(options.model, None)
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, dtype="auto")
    except (OSError, SpeculativeDecodingError) as error:
        parser.error(str(error))
    if torch.accelerator.is_available():
        model = model.to(torch.accelerator.current_accelerator())

    settings = training.DistillConfig(max_new_tokens=options.max_new_tokens, temperatures=(0.0, 0.0, 0.7))
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
    try:
        found = training.find_tree(model, head, measured, max_nodes=32)
        print(f"a static tree of {found.num_nodes} nodes: expected tau {found.expected_tau[found.num_nodes]:.2f}, "
              f"{found.expected_speed_up:.2f}x plain decoding here")  # fmt: skip
    except InvalidConfigError as error:  # too few prompts
        print(f"no tree was found, so the head keeps its dynamic one: {error}")
    folder = options.work / "head"
    head.save_pretrained(folder, push_to_hub=bool(options.publish), repo_id=options.publish)
    print(f'the head is in {folder}: use it with model.load_drafter("{folder}")')


if __name__ == "__main__":
    main()
