#!/bin/sh
# Train the shipped heads from their answers, with fixed seeds. Continues an interrupted run.
#
#   heads/recipe/shipped_heads.sh WORK [ANSWERS]
#
# ANSWERS: output of `pack_answers.py`. The shipped heads were trained on all answers, which `shipped_answers.sh` makes
# again; the default are the two thirds of them in heads/data, which can be shipped. Runs and captured features are
# stored in WORK (about 40 GB), the heads in WORK/eagle3, WORK/medusa and WORK/dflash. The environment's `accelerate`
# must be on PATH.
set -eu
WORK=$1
HERE=$(cd "$(dirname "$0")/../.." && pwd)
ANSWERS=${2:-$HERE/heads/data/answers.parquet}
BASE=HuggingFaceTB/SmolLM2-135M-Instruct
mkdir -p "$WORK"
printf '{"bf16": true, "max_grad_norm": 1.0, "save_steps": 250}' > "$WORK/arguments.json"
printf '{"fc_norm": true, "norm_before_residual": true, "norm_output": true}' > "$WORK/norms.json"
printf '{"growing": 0.6}' > "$WORK/recipe.json"
printf '{"answer_tokens": 128}' > "$WORK/openings.json"

train() { # one process per core: two threads of one process wait for each other if the machine is busy
    ACCELERATE_USE_CPU=true OMP_NUM_THREADS=1 accelerate launch --multi_gpu --num_processes 2 -m hf_specdec train "$@"
}

# on whole answers, then on their first 128 tokens, which are harder to predict than the rest
train eagle --data "$ANSWERS" --features "$WORK/features" --output "$WORK/eagle3-whole" --base-model-name $BASE \
    --draft-vocab-size 12288 --aligned-steps 3 --recipe "$WORK/recipe.json" --head-fields "$WORK/norms.json" \
    --arguments "$WORK/arguments.json" --epochs 2 --batch-size 2 --learning-rate 1e-3 --max-length 1536 --held-out 64
train eagle --data "$ANSWERS" --features "$WORK/features" --output "$WORK/eagle3" --base-model-name $BASE \
    --initial-head "$WORK/eagle3-whole" --aligned-steps 3 --recipe "$WORK/openings.json" \
    --arguments "$WORK/arguments.json" --epochs 1 --batch-size 2 --learning-rate 5e-4 --max-length 1536 --held-out 64

# heads that share the target's lm_head learn as much from the first 128 tokens alone
train medusa --data "$ANSWERS" --features "$WORK/features" --output "$WORK/medusa" --base-model-name $BASE \
    --num-heads 3 --num-layers 2 --draft-vocab-size 8192 --recipe "$WORK/openings.json" \
    --arguments "$WORK/arguments.json" --epochs 1 --batch-size 2 --learning-rate 1e-3 --max-length 1536 --held-out 64

# a block head on these beginnings, in two stages. With a key head for every query head, its first layer can pass on
# all of what the last token's features hold. The first stage ran on a processor where bfloat16 was slower
printf '{"aux_hidden_state_layer_ids": [2, 15, 28], "num_key_value_heads": 9}' > "$WORK/layers.json"
recipe='"text_weight": 0, "distance_weight": 0, "soft_weight": 1, "slot_decay": 3'
printf '{%s, "growing": 0.5}' "$recipe" > "$WORK/blocks.json"
printf '{"max_grad_norm": 1.0, "save_steps": 500}' > "$WORK/in-float32.json"
python "$HERE/heads/recipe/pack_openings.py" "$WORK/openings.parquet" "$ANSWERS"
train dflash --data "$WORK/openings.parquet" --features "$WORK/openings" --output "$WORK/dflash-first" \
    --base-model-name $BASE --num-layers 2 --block-size 5 --causal --markov-rank 32 --anchors 64 \
    --draft-vocab-size 12288 --head-fields "$WORK/layers.json" --recipe "$WORK/blocks.json" \
    --arguments "$WORK/in-float32.json" --dtype float32 --max-steps 5600 --batch-size 2 --learning-rate 1e-3 \
    --max-length 640 --held-out 64
printf '{%s, "growing": 0.15}' "$recipe" > "$WORK/more.json"
printf '{"bf16": true, "weight_decay": 0.1, "max_grad_norm": 1.0, "save_steps": 500}' > "$WORK/decaying.json"
train dflash --data "$WORK/openings.parquet" --features "$WORK/openings" --output "$WORK/dflash" \
    --base-model-name $BASE --initial-head "$WORK/dflash-first" --anchors 64 --recipe "$WORK/more.json" \
    --arguments "$WORK/decaying.json" --dtype float32 --max-steps 6000 --batch-size 2 --learning-rate 8e-4 \
    --max-length 640 --held-out 64
