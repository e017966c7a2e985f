#!/bin/sh
# The shipped heads from their answers, each in one command with one seed. Run again, it goes on where it was interrupted.
#
#   examples/shipped_heads.sh WORK [ANSWERS]
#
# ANSWERS: what `pack_answers.py` wrote, by default the answers in heads/data. The runs and the captured features go to
# WORK (some 20 GB); what comes out is in WORK/eagle3 and WORK/medusa. `accelerate` of the environment must be on PATH.
set -eu
WORK=$1
HERE=$(cd "$(dirname "$0")/.." && pwd)
ANSWERS=${2:-$HERE/heads/data/answers.parquet}
BASE=HuggingFaceTB/SmolLM2-135M-Instruct
mkdir -p "$WORK"
printf '{"bf16": true, "max_grad_norm": 1.0, "save_steps": 250}' > "$WORK/arguments.json"
printf '{"fc_norm": true, "norm_before_residual": true, "norm_output": true}' > "$WORK/norms.json"
printf '{"growing": 0.6}' > "$WORK/recipe.json"
printf '{"answer_tokens": 128}' > "$WORK/openings.json"

train() { # one process per core: two threads of one process wait for each other wherever anything else runs
    ACCELERATE_USE_CPU=true OMP_NUM_THREADS=1 accelerate launch --multi_gpu --num_processes 2 -m hf_specdec train "$@"
}

# on whole answers, then on their first 128 tokens: these are harder to foresee than what follows
train eagle --data "$ANSWERS" --features "$WORK/features" --output "$WORK/eagle3-whole" --base-model-name $BASE \
    --draft-vocab-size 12288 --aligned-steps 3 --recipe "$WORK/recipe.json" --head-fields "$WORK/norms.json" \
    --arguments "$WORK/arguments.json" --epochs 2 --batch-size 2 --learning-rate 1e-3 --max-length 1536 --held-out 64
train eagle --data "$ANSWERS" --features "$WORK/features" --output "$WORK/eagle3" --base-model-name $BASE \
    --initial-head "$WORK/eagle3-whole" --aligned-steps 3 --recipe "$WORK/openings.json" \
    --arguments "$WORK/arguments.json" --epochs 1 --batch-size 2 --learning-rate 5e-4 --max-length 1536 --held-out 64

# heads that share the target's lm_head learn as much from the openings alone
train medusa --data "$ANSWERS" --features "$WORK/features" --output "$WORK/medusa" --base-model-name $BASE \
    --num-heads 3 --num-layers 2 --draft-vocab-size 8192 --recipe "$WORK/openings.json" \
    --arguments "$WORK/arguments.json" --epochs 1 --batch-size 2 --learning-rate 1e-3 --max-length 1536 --held-out 64
