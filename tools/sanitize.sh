#!/usr/bin/env bash
# Runs the native kernels' tests on a library built with the address and undefined-behaviour sanitizers (GCC, Linux).
# usage: tools/sanitize.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The tests run in a copy of the tree, so that nothing can import the ordinary library instead.
cp -r src tests pyproject.toml "$work"
rm -f "$work"/src/widellm/kernels/_native*
flags=(-std=gnu++17 -O1 -g -fPIC -fopenmp -fvisibility=hidden -fno-math-errno -fno-trapping-math -Wno-psabi
       -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer)
pids=()
for source in src/widellm/kernels/csrc/*.cpp; do
  g++ "${flags[@]}" -c "$source" -o "$work/$(basename "$source").o" &
  pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid"; done
g++ -shared "${flags[@]}" "$work"/*.o -o "$work/src/widellm/kernels/_native.so"

# The interpreter is not instrumented, so the runtimes come first by preload; its leaks are not ours. Fresh memory is
# filled with NaN.
export LD_PRELOAD="$(g++ -print-file-name=libasan.so):$(g++ -print-file-name=libubsan.so):$(g++ -print-file-name=libstdc++.so)"
export ASAN_OPTIONS=detect_leaks=0:malloc_fill_byte=255:max_malloc_fill_size=1000000000 UBSAN_OPTIONS=print_stacktrace=1
export PYTHONPATH="$work/src" PYTHONDONTWRITEBYTECODE=1
cd "$work"
python -m pytest -q -p no:cacheprovider tests/kernels/test_cpu_*.py "$@"
