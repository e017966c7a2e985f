#!/bin/sh
# A head for Qwen2.5-Coder-0.5B-Instruct, from prompts to the tree, on a CPU. Continues an interrupted run.
#
#   heads/recipe/coder_head.sh WORK MODEL.gguf BENCHMARK.jsonl
#
# MODEL.gguf: the target, Q4_K_M. BENCHMARK: questions to keep out of the prompts.
set -eu
WORK=$1 MODEL=$2 AVOID=$3
HERE=$(dirname "$0")
mkdir -p "$WORK"
[ -f "$WORK/prompts.jsonl" ] || python "$HERE/make_prompts.py" "$WORK/prompts.jsonl" --kinds programs --scale 3 \
    --avoid "$AVOID"
hf-specdec distill --model "$MODEL" --round-activations --prompts "$WORK/prompts.jsonl" --output "$WORK/answers" \
    --temperature 0 --temperature 0 --temperature 0.7 --max-new-tokens 256

printf '{"growing": 0.6}' > "$WORK/recipe.json"
hf-specdec train eagle --model "$MODEL" --round-activations --data "$WORK/answers" --features "$WORK/features" \
    --output "$WORK/head" --base-model-name Qwen/Qwen2.5-Coder-0.5B-Instruct --draft-vocab-size 8192 \
    --aligned-steps 3 --recipe "$WORK/recipe.json" --epochs 2 --batch-size 4 --learning-rate 1e-3
hf-specdec tree --model "$MODEL" --round-activations --drafter "$WORK/head" --data "$WORK/answers" \
    --output "$WORK/head"
