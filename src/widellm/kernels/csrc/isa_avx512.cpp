// The kernels for AVX512 with BF16. The target is set for this file alone, so one set of compiler flags serves all.
#include "abi.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#if defined(_OPENMP)
#include <omp.h>
#endif
#include <sched.h>
#include <string.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target( \
    "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")
#endif
#define WIDELLM_AVX512 1
#include "kernels.h"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

const WideOps *widellm_ops_avx512() {
  bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
             __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("fma");
  return has ? &kOps : nullptr;
}
#else
const WideOps *widellm_ops_avx512() { return nullptr; }
#endif
