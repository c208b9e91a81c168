#!/usr/bin/env bash
# Both recipes on one GPU at the published recipe's scale per token (windows of 4,096, batches of 65,536 tokens), equal
# tokens, within 8 minutes together. Give it a calibrated directory, text to train on and text to evaluate on:
#
#     benchmarks/gpu_train.sh DIR OUT TRAIN_TEXT TEST_TEXT [TOKENS]
#
# TOKENS is per recipe (default 4,000,000: what a data-centre GPU reads of a 135M model in about 3 minutes, a guess that
# nobody has measured; take less on a smaller one). What is finished is not run again, so that a second call goes on.
set -euo pipefail
dir=$1 out=$2 text=$3 test=$4 tokens=${5:-4000000}
mkdir -p "$out"
cat >"$out/gpu.json" <<JSON
{"trainer": {"bf16": true, "dataloader_num_workers": 2, "logging_steps": 5}}
JSON
python - <<'PY'
import torch
assert torch.cuda.is_available(), "no GPU here: on a CPU call widellm compare with fewer tokens"
print(torch.cuda.get_device_name(), torch.__version__, torch.version.cuda)
PY
timeout 480 widellm compare "$dir" --out "$out" --recipe default --recipe wide --seeds 1 --budgets 0.75,0.5 \
    --config "$out/gpu.json" --text "$text" --eval-text "$test" --max-windows 96 \
    --tokens "$tokens" --window 4096 --batch-tokens 65536 --device cuda
