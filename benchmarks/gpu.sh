#!/usr/bin/env bash
# Prove the Triton kernels on this machine's NVIDIA GPU, in under 8 minutes. Needs torch with CUDA (Triton comes with it);
# matplotlib for plots, flash-attn or flashinfer as further baselines where they are installed.
#
#     benchmarks/gpu.sh [--out DIR] [--tune] [--seconds N]
#
# Writes DIR/results.json (after every section, so that a killed run leaves what it had), DIR/results.md and plots.
# --tune first measures block sizes and keeps them in the user's cache. --dry-run runs every section at toy sizes on the
# CPU, in Triton's interpreter: it checks this script, not the GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD/src:$PWD/benchmarks${PYTHONPATH:+:$PYTHONPATH}"
exec timeout --signal=INT --kill-after=10 "${WIDELLM_GPU_TIMEOUT:-475}" "${PYTHON:-python3}" benchmarks/gpu_kernels.py "$@"
