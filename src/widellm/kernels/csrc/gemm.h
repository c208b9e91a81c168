// Many rows (prefill): a register-tiled matrix product on packed weight panels. A panel is kNr columns wide; its step
// along the inputs is one unit of 4 bytes per column: a float, or (AVX512) two neighbouring bf16 inputs that one
// instruction multiplies and sums. The left operand is read in place through row pointers, so gathering the rows that
// keep a group costs nothing.
#pragma once
#include "rows.h"

namespace {

#if defined(WIDELLM_AVX512)
constexpr int kNv = 4, kMr = 6;  // 24 of 32 registers accumulate
#elif defined(WIDELLM_AVX2)
constexpr int kNv = 2, kMr = 6;
#else
constexpr int kNv = 2, kMr = 4;
#endif
constexpr int kNr = kNv * kLanes;
constexpr int64_t kInputBlock = 1024;  // inputs per panel, which then takes 128 KiB of a core's cache (bf16)
constexpr int64_t kRowBlock = 1024;    // rows per pass, so that scratch does not grow with the prompt

template <class T> struct Packed {  // what the left operand is made of
  typedef float A;
  static constexpr int per = 1;  // inputs per unit
};
#if defined(WIDELLM_AVX512)
template <> struct Packed<bf16> {
  typedef bf16 A;
  static constexpr int per = 2;
};
#endif

WIDE_INLINE vf multiply_unit(const float *a, vf b, vf c) { return b * *a + c; }
#if defined(WIDELLM_AVX512)
WIDE_INLINE vf multiply_unit(const bf16 *a, vf b, vf c) {
  uint32_t u;
  memcpy(&u, a, 4);
  return (vf)_mm512_dpbf16_ps((__m512)c, (__m512bh)_mm512_set1_epi32((int)u), (__m512bh)b);
}
#endif

// What a tile sums, in this order: the left operand's units from at[i] on, times panel[i].
constexpr int kMaxTerms = 8;
struct Terms {
  int count;
  const float *panel[kMaxTerms];
  int64_t at[kMaxTerms];
};

// c[r][:kNr] (+)= sum over the terms of a[r][at : at + units] . panel
template <class A, int R>
static void tile(const A *const *a, const Terms &terms, int64_t units, float *const *c, bool fresh) {
  constexpr int per = sizeof(float) / sizeof(A);
  vf acc[R][kNv];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < kNv; v++) acc[r][v] = fresh ? vf{} : load(c[r] + v * kLanes);
  for (int i = 0; i < terms.count; i++) {
    const A *ap[R];
    const float *panel = terms.panel[i];
    for (int r = 0; r < R; r++) ap[r] = a[r] + terms.at[i];
#pragma GCC unroll 4
    for (int64_t k = 0; k < units; k++) {
      vf b[kNv];
      for (int v = 0; v < kNv; v++) b[v] = load(panel + v * kLanes);
      panel += kNr;
      for (int r = 0; r < R; r++)
        for (int v = 0; v < kNv; v++) acc[r][v] = multiply_unit(ap[r] + k * per, b[v], acc[r][v]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < kNv; v++) store(c[r] + v * kLanes, acc[r][v]);
}

template <class A>
static void tile_of(int64_t rows, const A *const *a, const Terms &terms, int64_t units, float *const *c, bool fresh) {
  switch (rows) {
    case 1: return tile<A, 1>(a, terms, units, c, fresh);
    case 2: return tile<A, 2>(a, terms, units, c, fresh);
    case 3: return tile<A, 3>(a, terms, units, c, fresh);
    case 4: return tile<A, 4>(a, terms, units, c, fresh);
#if defined(WIDELLM_AVX512) || defined(WIDELLM_AVX2)
    case 5: return tile<A, 5>(a, terms, units, c, fresh);
    case 6: return tile<A, 6>(a, terms, units, c, fresh);
#endif
  }
}

#if defined(WIDELLM_AVX512)
WIDE_INLINE void transpose16(__m512i (&r)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; i++) {  // r[4 j + i]: 128-bit lanes hold columns i, 4 + i, 8 + i, 12 + i of rows 4 j ..
    __m512i a = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88), b = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
    __m512i c = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88), d = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
    t[i] = _mm512_shuffle_i32x4(a, c, 0x88);
    t[8 + i] = _mm512_shuffle_i32x4(a, c, 0xdd);
    t[4 + i] = _mm512_shuffle_i32x4(b, d, 0x88);
    t[12 + i] = _mm512_shuffle_i32x4(b, d, 0xdd);
  }
  for (int i = 0; i < 16; i++) r[i] = t[i];
}

// The first n weights of 64 bytes of type T; the others read as 0.
template <class T> WIDE_INLINE __m512i line(const T *w, int64_t n) {
  return _mm512_maskz_loadu_epi8(n * (int64_t)sizeof(T) < 64 ? (1ull << (n * sizeof(T))) - 1 : ~0ull, w);
}
template <class T> WIDE_INLINE __m512i line(const int8_t *w, int64_t n) {
  return sizeof(T) == 2 ? loadn32(w, n) : (__m512i)loadn(w, n);
}

// Rows of 16 units, as 512-bit loads.
template <class T, class W>
WIDE_INLINE void pack_rows16(const W *w, int64_t ldw, int64_t columns, int64_t n, float *panel) {
  constexpr int64_t step = 64 / sizeof(T);
  for (int64_t k = 0; k < n; k += step) {
    int64_t left = imin(step, n - k), units = ceil_div(left * (int64_t)sizeof(T), 4);
    __m512i r[16];
    for (int i = 0; i < 16; i++)
      r[i] = i < columns ? line<T>(w + i * ldw + k, left) : _mm512_setzero_si512();
    transpose16(r);
    float *to = panel + k * (int64_t)sizeof(T) / 4 * kNr;
    if (units == 16) {
      for (int i = 0; i < 16; i++) _mm512_store_si512(to + i * kNr, r[i]);
    } else {
      for (int i = 0; i < 16; i++)
        if (i < units) _mm512_store_si512(to + i * kNr, r[i]);
    }
  }
}
#endif

// One vector of a panel (columns = up to kLanes weight rows of n inputs): panel[u * kNr + lane] = unit u of row lane.
// T: the type of the left operand's rows, which says what a unit is; W: of the weights.
template <class T, class W> static void pack_rows(const W *w, int64_t ldw, int64_t columns, int64_t n, float *panel) {
#if defined(WIDELLM_AVX512)
  pack_rows16<T>(w, ldw, columns, n, panel);
#else
  for (int64_t lane = 0; lane < kLanes; lane++)
    for (int64_t k = 0; k < n; k++) panel[k * kNr + lane] = lane < columns ? to_float(w[lane * ldw + k]) : 0.0f;
#endif
}

// The same for weights stored input-major, and for several panels, ldpanel floats apart: w[k] is input k's row, of which
// columns are taken. A row is read from end to end, and those that come soon are asked for: rows lie apart, often by a
// power of two, so neither the hardware's foresight nor a cache holds them for long.
constexpr int64_t kPackAhead = 6;  // rows

template <class T, class W> struct Columns {
  static void pack(const W *w, int64_t ldw, int64_t columns, int64_t n, float *panel, int64_t ldpanel) {
    for (int64_t k = 0; k < n; k++)
      for (int64_t i = 0; i < round_up(columns, kNr); i += kLanes) {
        int64_t left = imax(imin(columns - i, kLanes), 0);
        __builtin_prefetch(w + (k + kPackAhead) * ldw + i);
        store(panel + i / kNr * ldpanel + k * kNr + i % kNr, loadn(left ? w + k * ldw + i : w, left));
      }
  }
};

#if defined(WIDELLM_AVX512)
template <class W> struct Columns<bf16, W> {  // pairs of rows, as bf16
  static void pack(const W *w, int64_t ldw, int64_t columns, int64_t n, float *panel, int64_t ldpanel) {
    const __m512i odd = _mm512_set1_epi32(0x00200000);  // a word of the second row beside each of the first
    const __m512i low = _mm512_add_epi32(
        _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                           _mm512_set1_epi32(0x00010001)), odd);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(0x00100010));
    for (int64_t k = 0; k < n; k += 2) {
      const W *a = w + k * ldw, *b = a + ldw;
      const bool pair = k + 1 < n;
      for (int64_t p = 0, i = 0; i < columns; p++, i += kNr) {
        float *to = panel + p * ldpanel + k / 2 * kNr;
        for (int64_t j = 0; j < kNr; j += 32) {
          const int64_t left = imax(imin(columns - i - j, 32), 0);
          __m512i first, second = _mm512_setzero_si512();
          if (left == 32) {
            __builtin_prefetch(a + kPackAhead * ldw + i + j);
            __builtin_prefetch(b + kPackAhead * ldw + i + j);
            first = load32(a + i + j);
            if (pair) second = load32(b + i + j);
          } else {
            first = loadn32(left ? a + i + j : w, left);
            if (pair) second = loadn32(left ? b + i + j : w, left);
          }
          _mm512_store_si512(to + j, _mm512_permutex2var_epi16(first, low, second));
          _mm512_store_si512(to + j + kLanes, _mm512_permutex2var_epi16(first, high, second));
        }
      }
    }
  }
};
#endif

// Copies n inputs into the left operand's type, padded with 0 to whole units.
template <class T> static void widen_row(const T *x, int64_t n, typename Packed<T>::A *to) {
  for (int64_t i = 0; i < n; i += kLanes) {
    int64_t lanes = imin(kLanes, n - i);
    storen(to + i, loadn(x + i, lanes), lanes);
  }
  for (int64_t i = n; i < round_up(n, Packed<T>::per); i++) memset((void *)(to + i), 0, sizeof *to);
}

}  // namespace
