#!/bin/sh
# Generate the answers that the shipped heads are trained on. Continues an interrupted run.
#
#   heads/recipe/shipped_answers.sh WORK BENCHMARK.jsonl [MORE.jsonl ...] -- DISTILL_OPTION ...
#
# BENCHMARK: questions to keep out of the prompts. MORE: existing prompts (rows of `prompt`). After `--`: options of
# `hf-specdec distill`, such as `--server http://localhost:8000/v1`. On two CPU cores a vLLM server is faster:
#
#   vllm serve MODEL --dtype bfloat16 --max-model-len 4096 --max-num-seqs 64
set -eu
WORK=$1 AVOID=$2
shift 2
MORE=
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    MORE="$MORE --add $1"
    shift
done
[ $# -eq 0 ] || shift
HERE=$(dirname "$0")
mkdir -p "$WORK"

prompts() { # NAME OPTION ...
    name=$1
    shift
    [ -f "$WORK/$name.jsonl" ] || python "$HERE/make_prompts.py" "$WORK/$name.jsonl" --avoid "$AVOID" "$@"
}
[ -f "$WORK/texts.jsonl" ] || python "$HERE/fetch_texts.py" "$WORK/texts.jsonl"

# tasks and questions, a quarter of them sampled; long answers are used as texts below
prompts tasks --kinds conversations questions $MORE
hf-specdec distill --prompts "$WORK/tasks.jsonl" --output "$WORK/tasks" \
    --temperature 0 --temperature 0 --temperature 0 --temperature 0.7 "$@"

# summaries and questions about texts of one paragraph to several pages, translations, rewriting
prompts readings --kinds readings translations --texts "$WORK/texts.jsonl" --texts "$WORK/tasks"
hf-specdec distill --prompts "$WORK/readings.jsonl" --output "$WORK/readings" --temperature 0 "$@"

# conversations with two turns
prompts chats --kinds conversations --turns 2 --seed 1 --scale 0.5
hf-specdec distill --prompts "$WORK/chats.jsonl" --output "$WORK/chats" --turns 2 --temperature 0 "$@"
