"""Run lm-evaluation-harness with speculation: the same scores in less time.

    pip install lm-eval
    python examples/evaluate.py --tasks gsm8k --limit 20
    python examples/evaluate.py --model org/model --drafter org/head --tasks gsm8k --limit 20

Generative tasks run twice, without and with speculation, in float32, where the answers are identical. In `--dtype
bfloat16`, for larger models, some differ after near-ties. The harness needs no change, because
`generation_config.speculative` is the default of every call. Tasks that compare likelihoods generate nothing.

Output (values vary), with the scores of the task:

    plain: gsm8k exact_match ..., ... s
    auto: gsm8k exact_match ..., ... s
    equal answers: ... of ...
"""

import argparse
import time

from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoTokenizer

from hf_specdec import AutoSpeculativeModelForCausalLM, model_and_head


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="path or Hub id; default: the packaged SmolLM2-135M-Instruct")
    parser.add_argument("--drafter", help="path or Hub id of a head; default: the packaged model's, if it is there")
    parser.add_argument("--tasks", required=True, help="names of tasks, separated by commas")
    parser.add_argument("--include-path", help="directory with your own task files (YAML)")
    parser.add_argument("--limit", type=int, help="questions per task; default: all")
    parser.add_argument("--dtype", default="float32", help="dtype of the weights; default: %(default)s")
    options = parser.parse_args()

    name, head = model_and_head(options.model, options.drafter)
    model = AutoSpeculativeModelForCausalLM.from_pretrained(name, drafter=head, dtype=options.dtype, device_map="auto")
    harness = HFLM(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(name), batch_size=1)
    tasks = TaskManager(include_path=options.include_path)
    answers = []
    for method in (None, "auto"):
        model.generation_config.speculative = method
        begin = time.perf_counter()
        found = simple_evaluate(
            harness, tasks=options.tasks.split(","), task_manager=tasks, limit=options.limit, bootstrap_iters=0
        )
        seconds = time.perf_counter() - begin
        scores = [
            f"{task} {metric.split(',')[0]} {value:.3f}"
            for task, metrics in found["results"].items()
            for metric, value in metrics.items()
            if isinstance(value, float) and "stderr" not in metric
        ]
        print(f"{method or 'plain'}: {', '.join(scores)}, {seconds:.1f} s")
        answers.append([sample["resps"] for samples in found["samples"].values() for sample in samples])
    equal = sum(plain == speculative for plain, speculative in zip(*answers, strict=True))
    print(f"equal answers: {equal} of {len(answers[0])}")


if __name__ == "__main__":
    main()
