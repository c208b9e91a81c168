// Vectors of floats for one instruction set, written once with the compiler's vector extension. The including file
// sets WIDELLM_AVX512 or WIDELLM_AVX2 (or neither: 4 lanes, any CPU). Everything has internal linkage: code compiled
// for one instruction set must never be merged by the linker with another's.
#pragma once
#include <string.h>

#define WIDE_INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define WIDE_SHUFFLE(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
#define WIDE_SHUFFLE(a, b, i, j, k, l) __builtin_shuffle(a, b, i4{i, j, k, l})
#endif

namespace {

struct bf16 { uint16_t bits; };

#if defined(WIDELLM_AVX512)
constexpr int kLanes = 16;
#elif defined(WIDELLM_AVX2)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float vf __attribute__((vector_size(4 * kLanes)));
typedef int32_t vi __attribute__((vector_size(4 * kLanes)));
typedef uint32_t vu __attribute__((vector_size(4 * kLanes)));
typedef uint16_t vh __attribute__((vector_size(2 * kLanes)));
typedef int8_t vc __attribute__((vector_size(kLanes)));
typedef float f4 __attribute__((vector_size(16)));
typedef int32_t i4 __attribute__((vector_size(16)));

WIDE_INLINE int64_t imin(int64_t a, int64_t b) { return a < b ? a : b; }
WIDE_INLINE int64_t imax(int64_t a, int64_t b) { return a > b ? a : b; }
WIDE_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
WIDE_INLINE int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

WIDE_INLINE vf vset(float a) { return a - vf{}; }
WIDE_INLINE vf load(const float *p) { vf r; memcpy(&r, p, sizeof r); return r; }
WIDE_INLINE void store(float *p, vf a) { memcpy(p, &a, sizeof a); }
WIDE_INLINE vf vmax(vf a, vf b) { return b > a ? b : a; }  // a NaN in a stays, one in b is passed over
WIDE_INLINE vf vmin(vf a, vf b) { return b < a ? b : a; }

WIDE_INLINE vf load(const bf16 *p) {
  vh h;
  memcpy(&h, p, sizeof h);
  return (vf)(__builtin_convertvector(h, vu) << 16);
}

WIDE_INLINE vf load(const int8_t *p) {
#if defined(WIDELLM_AVX512)
  return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
#elif defined(WIDELLM_AVX2)
  return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#else
  vc c;
  memcpy(&c, p, sizeof c);
  return __builtin_convertvector(c, vf);
#endif
}

WIDE_INLINE void store(bf16 *p, vf a) {  // round to nearest, ties to even; NaN stays NaN
#if defined(WIDELLM_AVX512)
  __m256bh h = _mm512_cvtneps_pbh((__m512)a);
#else
  vu u = (vu)a;
  vu r = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  r = (u & 0x7fffffffu) > 0x7f800000u ? vu{} + 0x7fc0u : r;
  vh h = __builtin_convertvector(r, vh);
#endif
  memcpy(p, &h, sizeof h);
}

// The first n lanes (0 <= n <= kLanes); the others are 0 on load and untouched on store.
#if defined(WIDELLM_AVX512)
WIDE_INLINE vf loadn(const float *p, int64_t n) { return (vf)_mm512_maskz_loadu_ps((1u << n) - 1u, p); }
WIDE_INLINE vf loadn(const bf16 *p, int64_t n) {
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16((1u << n) - 1u, p)), 16);
}
WIDE_INLINE vf loadn(const int8_t *p, int64_t n) {
  return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8((__mmask16)((1u << n) - 1u), p)));
}
WIDE_INLINE void storen(float *p, vf a, int64_t n) { _mm512_mask_storeu_ps(p, (1u << n) - 1u, (__m512)a); }
WIDE_INLINE void storen(bf16 *p, vf a, int64_t n) {
  _mm256_mask_storeu_epi16(p, (1u << n) - 1u, (__m256i)_mm512_cvtneps_pbh((__m512)a));
}
#else
template <class T> WIDE_INLINE vf loadn(const T *p, int64_t n) {
  T part[kLanes] = {};
  memcpy(part, p, (size_t)n * sizeof(T));
  return load(part);
}
template <class T> WIDE_INLINE void storen(T *p, vf a, int64_t n) {
  T part[kLanes];
  store(part, a);
  memcpy(p, part, (size_t)n * sizeof(T));
}
#endif

WIDE_INLINE float to_float(float a) { return a; }
WIDE_INLINE float to_float(int8_t a) { return a; }
WIDE_INLINE float to_float(bf16 a) {
  uint32_t u = (uint32_t)a.bits << 16;
  float r;
  memcpy(&r, &u, 4);
  return r;
}

// What a value becomes when the model's dtype stores it: bf16 rounds, float32 does not.
template <class T> WIDE_INLINE vf rounded(vf a) {
  T part[kLanes];
  store(part, a);
  return load(part);
}
template <> inline __attribute__((always_inline)) vf rounded<float>(vf a) { return a; }

// Sums are folded in halves, always in the same order, so that a dot product has the same bits in every tile.
WIDE_INLINE f4 fold4(vf a) {
#if defined(WIDELLM_AVX512)
  __m256 h = _mm256_add_ps(_mm512_castps512_ps256((__m512)a), _mm512_extractf32x8_ps((__m512)a, 1));
  return (f4)_mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
#elif defined(WIDELLM_AVX2)
  return (f4)_mm_add_ps(_mm256_castps256_ps128((__m256)a), _mm256_extractf128_ps((__m256)a, 1));
#else
  return a;
#endif
}

WIDE_INLINE f4 sum_each(vf a, vf b, vf c, vf d) {  // {sum a, sum b, sum c, sum d}
  f4 p = fold4(a), q = fold4(b), r = fold4(c), s = fold4(d);
  f4 pq = WIDE_SHUFFLE(p, q, 0, 4, 1, 5) + WIDE_SHUFFLE(p, q, 2, 6, 3, 7);
  f4 rs = WIDE_SHUFFLE(r, s, 0, 4, 1, 5) + WIDE_SHUFFLE(r, s, 2, 6, 3, 7);
  return WIDE_SHUFFLE(pq, rs, 0, 1, 4, 5) + WIDE_SHUFFLE(pq, rs, 2, 3, 6, 7);
}
WIDE_INLINE float sum(vf a) { return sum_each(a, vf{}, vf{}, vf{})[0]; }
WIDE_INLINE float max_of(vf a) {
  float part[kLanes], best;
  store(part, a);
  best = part[0];
  for (int i = 1; i < kLanes; i++) best = part[i] > best ? part[i] : best;
  return best;
}

WIDE_INLINE vf vexp(vf x) {  // relative error below 2e-7; 0 below -87.3, finite above 88; NaN stays NaN
  vf given = x;
  x = vmin(vmax(x, vset(-87.3f)), vset(88.3f));
  vf shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the rounded power of two sits in the low bits
  vf n = shifted - 12582912.0f;
  vf r = x - n * 0.693145752f - n * 1.42860677e-6f;
  vf p = r * 1.3888889e-3f + 8.3333333e-3f;
  p = p * r + 4.1666667e-2f;
  p = p * r + 1.6666667e-1f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return given < -87.3f ? vf{} : (vf)((vi)p + (((vi)shifted) << 23));
}

WIDE_INLINE vf verf(vf x) {  // Abramowitz and Stegun 7.1.26: absolute error below 2e-7
  vf a = x < 0.0f ? -x : x;
  vf t = 1.0f / (a * 0.3275911f + 1.0f);
  vf p = t * 1.061405429f - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  vf r = 1.0f - p * t * vexp(-(a * a));
  return x < 0.0f ? -r : r;
}

WIDE_INLINE vf activate(vf x, int64_t act) {
  switch (act) {
    case WIDELLM_SILU: return x / (vexp(-x) + 1.0f);
    case WIDELLM_GELU_TANH: {
      vf y = (x * x * x * 0.044715f + x) * 0.7978845608f;
      return x * (1.0f - 1.0f / (vexp(y * 2.0f) + 1.0f));
    }
    case WIDELLM_GELU: return x * (verf(x * 0.7071067812f) * 0.5f + 0.5f);
    default: return vmax(x, vf{});
  }
}

}  // namespace
