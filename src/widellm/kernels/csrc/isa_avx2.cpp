// The kernels for AVX2 with FMA. The target is set for this file alone, so one set of compiler flags serves all.
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
    "avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
#define WIDELLM_AVX2 1
#include "kernels.h"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

const WideOps *widellm_ops_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &kOps : nullptr;
}
#else
const WideOps *widellm_ops_avx2() { return nullptr; }
#endif
