// Products of a few rows with weights that are read once: dot products along a weight row, and sums of weight rows.
// A row's result has the same bits whatever other rows are in the call: every (row, weight) pair has one accumulator
// that walks along the inputs in order.
#pragma once
#include "vec.h"

namespace {

#if defined(WIDELLM_AVX512)
constexpr int kDotRows = 4;  // rows of x per tile; with 4 weight rows, half of the 32 registers accumulate
#else
constexpr int kDotRows = 2;
#endif
constexpr int kPairCols = 2 * kLanes;
constexpr int64_t kManySums = 12;    // rows whose sums take longer to fetch than the weights do
constexpr int64_t kDotChunk = 1024;  // inputs of a row that are taken at a time, where there are many rows and they are
constexpr int64_t kLongRow = 4096;   // longer than this in bytes: two tiles of whole rows would not fit the first cache

template <class T> struct Dot {  // one step along the inputs of a dot product
  typedef vf reg;
  static constexpr int step = kLanes;
  template <class W> WIDE_INLINE reg get(const W *p) { return load(p); }
  template <class W> WIDE_INLINE reg getn(const W *p, int64_t n) { return loadn(p, n); }
  WIDE_INLINE vf add(reg a, reg b, vf c) { return a * b + c; }
};

// Columns [0, kPairCols) of two weight rows (b null: of one), to be scaled by h[0], h[1] and added to y0, y1.
template <class T> struct Pair {
  static constexpr int batch = kLanes == 16 ? 2 : 1;  // pairs held in registers at a time
  vf a0, a1, b0, b1;
  template <class W> WIDE_INLINE Pair get(const W *a, const W *b) {
    return {load(a), load(a + kLanes), b ? load(b) : vf{}, b ? load(b + kLanes) : vf{}};
  }
  template <class W> WIDE_INLINE Pair getn(const W *a, const W *b, int64_t n) {
    int64_t lo = imin(n, kLanes), hi = n - lo;
    return {loadn(a, lo), loadn(a + lo, hi), b ? loadn(b, lo) : vf{}, b ? loadn(b + lo, hi) : vf{}};
  }
  template <bool both> WIDE_INLINE void add(const Pair &p, const T *h, vf &y0, vf &y1) {
    float h0 = to_float(h[0]);
    y0 = p.a0 * h0 + y0;
    y1 = p.a1 * h0 + y1;
    if (both) {
      float h1 = to_float(h[1]);
      y0 = p.b0 * h1 + y0;
      y1 = p.b1 * h1 + y1;
    }
  }
  WIDE_INLINE void in_order(vf &, vf &) {}
};

#if defined(WIDELLM_AVX512)
// 32 weights as bf16: every int8 is one, so nothing is rounded
WIDE_INLINE __m512i load32(const bf16 *p) { return _mm512_loadu_si512(p); }
WIDE_INLINE __m512i loadn32(const bf16 *p, int64_t n) {
  return _mm512_maskz_loadu_epi16((__mmask32)((1ull << n) - 1), p);
}
WIDE_INLINE __m512i widen32(__m256i q) {
  __m512 lo = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(q)));
  __m512 hi = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(q, 1)));
  return (__m512i)_mm512_cvtne2ps_pbh(hi, lo);
}
WIDE_INLINE __m512i load32(const int8_t *p) { return widen32(_mm256_loadu_si256((const __m256i *)p)); }
WIDE_INLINE __m512i loadn32(const int8_t *p, int64_t n) {
  return widen32(_mm256_maskz_loadu_epi8((__mmask32)((1ull << n) - 1), p));
}

template <> struct Dot<bf16> {
  typedef __m512bh reg;
  static constexpr int step = 2 * kLanes;
  template <class W> WIDE_INLINE reg get(const W *p) { return (reg)load32(p); }
  template <class W> WIDE_INLINE reg getn(const W *p, int64_t n) { return (reg)loadn32(p, n); }
  WIDE_INLINE vf add(reg a, reg b, vf c) { return (vf)_mm512_dpbf16_ps((__m512)c, a, b); }
};

// The two rows are interleaved so that one instruction multiplies both. Interleaving works within 128-bit lanes, so
// the accumulators hold their columns in another order until in_order() restores it.
template <> struct Pair<bf16> {
  static constexpr int batch = 2;  // rows of 4 KiB share cache sets, which hold these and those asked for
  __m512i lo, hi;
  WIDE_INLINE Pair of(__m512i a, __m512i b) { return {_mm512_unpacklo_epi16(a, b), _mm512_unpackhi_epi16(a, b)}; }
  template <class W> WIDE_INLINE Pair get(const W *a, const W *b) {
    return of(load32(a), b ? load32(b) : _mm512_setzero_si512());
  }
  template <class W> WIDE_INLINE Pair getn(const W *a, const W *b, int64_t n) {
    return of(loadn32(a, n), b ? loadn32(b, n) : _mm512_setzero_si512());
  }
  template <bool both> WIDE_INLINE void add(const Pair &p, const bf16 *h, vf &y0, vf &y1) {
    uint32_t u = 0;
    memcpy(&u, h, both ? 4 : 2);
    __m512bh scale = (__m512bh)_mm512_set1_epi32((int)u);
    y0 = (vf)_mm512_dpbf16_ps((__m512)y0, scale, (__m512bh)p.lo);
    y1 = (vf)_mm512_dpbf16_ps((__m512)y1, scale, (__m512bh)p.hi);
  }
  WIDE_INLINE void in_order(vf &y0, vf &y1) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    __m512 a = (__m512)y0, b = (__m512)y1;
    y0 = (vf)_mm512_permutex2var_ps(a, first, b);
    y1 = (vf)_mm512_permutex2var_ps(a, second, b);
  }
};
#endif

// acc[r][c] += w[r] . x[c] over n inputs; meanwhile asks memory for the n inputs at each of ahead[0 .. A)
template <class T, class W, int R, int C, int A = 0>
WIDE_INLINE void dot_tile(const W *const *w, const T *const *x, int64_t n, vf (&acc)[R][C],
                          const W *const *ahead = nullptr) {
  typedef Dot<T> D;
  const W *wp[R];
  const T *xp[C];
  for (int r = 0; r < R; r++) wp[r] = w[r];
  for (int c = 0; c < C; c++) xp[c] = x[c];
  int64_t i = 0;
  for (; i + D::step <= n; i += D::step) {
    typename D::reg xv[C];
    for (int a = 0; a < A; a++) __builtin_prefetch(ahead[a] + i);
    for (int c = 0; c < C; c++) xv[c] = D::get(xp[c] + i);
    for (int r = 0; r < R; r++) {
      typename D::reg wv = D::get(wp[r] + i);
      for (int c = 0; c < C; c++) acc[r][c] = D::add(wv, xv[c], acc[r][c]);
    }
  }
  if (i < n) {
    for (int c = 0; c < C; c++) {
      typename D::reg xv = D::getn(xp[c] + i, n - i);
      for (int r = 0; r < R; r++) acc[r][c] = D::add(D::getn(wp[r] + i, n - i), xv, acc[r][c]);
    }
  }
}

template <class T, class W, int C>
static void dot_columns(const W *w, int64_t ldw, int64_t nw, const T *const *x, int64_t n, float *out, int64_t ldout,
                        const W *const *ahead) {
  int64_t r = 0;
  for (; r + 4 <= nw; r += 4) {
    const W *wp[4] = {w + r * ldw, w + (r + 1) * ldw, w + (r + 2) * ldw, w + (r + 3) * ldw};
    vf acc[4][C] = {};
    if (ahead) {
      dot_tile<T, W, 4, C, 2>(wp, x, n, acc, ahead);
    } else {
      dot_tile<T, W, 4, C>(wp, x, n, acc);
    }
    for (int c = 0; c < C; c++) {
      f4 y = sum_each(acc[0][c], acc[1][c], acc[2][c], acc[3][c]);
      memcpy(out + c * ldout + r, &y, sizeof y);
    }
  }
  for (; r < nw; r++) {
    const W *wp[1] = {w + r * ldw};
    vf acc[1][C] = {};
    dot_tile<T, W, 1, C>(wp, x, n, acc);
    for (int c = 0; c < C; c++) out[c * ldout + r] = sum(acc[0][c]);
  }
}

// The same for rows of x that one tile holds: the weights pass once, and those wanted some tiles later are on their way
// (one row of x against long weight rows is left to the hardware's own foresight, which does better there; not so with
// rows of int8, which end sooner: asked for, they come at twice the speed).
template <class T, class W, int C>
static void dot_stream(const W *w, int64_t ldw, int64_t nw, const T *const *x, int64_t n, float *out, int64_t ldout,
                       const W *next) {
  const bool brief = n * (int64_t)sizeof(W) < 2048;
  const int64_t far = brief ? 8 : 4;  // rows
  if (C == 1 && !brief && sizeof(W) > 1) return dot_columns<T, W, C>(w, ldw, nw, x, n, out, ldout, nullptr);
  int64_t r = 0;
  for (; r + 4 <= nw; r += 4) {
    const W *wp[4] = {w + r * ldw, w + (r + 1) * ldw, w + (r + 2) * ldw, w + (r + 3) * ldw};
    const W *from = nullptr;
    if (r + far + 4 <= nw) from = w + (r + far) * ldw;
    else if (next && r + far >= nw) from = next + (r + far - nw) * ldw;
    vf acc[4][C] = {};
    if (from) {
      const W *ahead[4] = {from, from + ldw, from + 2 * ldw, from + 3 * ldw};
      dot_tile<T, W, 4, C, 4>(wp, x, n, acc, ahead);
    } else {
      dot_tile<T, W, 4, C>(wp, x, n, acc);
    }
    for (int c = 0; c < C; c++) {
      f4 y = sum_each(acc[0][c], acc[1][c], acc[2][c], acc[3][c]);
      memcpy(out + c * ldout + r, &y, sizeof y);
    }
  }
  if (r < nw) dot_columns<T, W, C>(w + r * ldw, ldw, nw - r, x, n, out + r, ldout, nullptr);
}

// Four weight rows against whole tiles of rows of x that are long: kDotChunk inputs at a time, so that the weights' stay
// in the first cache for all tiles. after: the four weight rows that are wanted next, or null
template <class T, class W>
static void dot_chunks(const W *w, int64_t ldw, const T *const *x, int64_t tiles, int64_t n, float *out, int64_t ldout,
                       const W *after) {
  vf sums[kFewRows / kDotRows][4][kDotRows];
  for (int64_t k = 0; k < n; k += kDotChunk) {
    int64_t depth = imin(kDotChunk, n - k);
    const W *wp[4] = {w + k, w + ldw + k, w + 2 * ldw + k, w + 3 * ldw + k};
    for (int64_t t = 0; t < tiles; t++) {
      vf acc[4][kDotRows] = {};
      if (k > 0) memcpy((void *)acc, sums[t], sizeof acc);
      const T *xp[kDotRows];
      for (int c = 0; c < kDotRows; c++) xp[c] = x[t * kDotRows + c] + k;
      int64_t wanted = 4 * t / tiles, wanted_end = 4 * (t + 1) / tiles;
      if (after && wanted_end > wanted) {
        const W *ahead[2] = {after + wanted * ldw + k, after + (wanted_end - 1) * ldw + k};
        dot_tile<T, W, 4, kDotRows, 2>(wp, xp, depth, acc, ahead);
      } else {
        dot_tile<T, W, 4, kDotRows>(wp, xp, depth, acc);
      }
      memcpy((void *)sums[t], acc, sizeof acc);
    }
  }
  for (int64_t t = 0; t < tiles; t++)
    for (int c = 0; c < kDotRows; c++) {
      f4 y = sum_each(sums[t][0][c], sums[t][1][c], sums[t][2][c], sums[t][3][c]);
      memcpy(out + (t * kDotRows + c) * ldout, &y, sizeof y);
    }
}

// out[c * ldout + r] = w[r] . x[c] for nw weight rows and nx rows of x; next: weight rows that are wanted after these
template <class T, class W>
static void dot_rows(const W *w, int64_t ldw, int64_t nw, const T *const *x, int64_t nx, int64_t n, float *out,
                     int64_t ldout, const W *next = nullptr) {
  if (nx <= kDotRows) {
    if (nx == kDotRows) return dot_stream<T, W, kDotRows>(w, ldw, nw, x, n, out, ldout, next);
    if (nx == 2) return dot_stream<T, W, 2>(w, ldw, nw, x, n, out, ldout, next);
    if (nx == 1) return dot_stream<T, W, 1>(w, ldw, nw, x, n, out, ldout, next);
    int64_t c = 0;
    for (; c + 2 <= nx; c += 2) dot_columns<T, W, 2>(w, ldw, nw, x + c, n, out + c * ldout, ldout, nullptr);
    if (c < nx) dot_columns<T, W, 1>(w, ldw, nw, x + c, n, out + c * ldout, ldout, nullptr);
    return;
  }
  // Four weight rows at a time stay in the first cache for all rows of x, while the next four are on their way.
  int64_t tiles = ceil_div(nx, kDotRows);
  for (int64_t r = 0; r < nw; r += 4) {
    int64_t rows = imin(4, nw - r);
    const W *after = r + 4 < nw ? w + (r + 4) * ldw : next;
    const bool chunks = n * (int64_t)sizeof(T) > kLongRow && rows == 4;
    if (chunks) dot_chunks<T, W>(w + r * ldw, ldw, x, nx / kDotRows, n, out + r, ldout, after);
    for (int64_t t = chunks ? nx / kDotRows : 0; t < tiles; t++) {
      int64_t c = t * kDotRows, wanted = 4 * t / tiles, wanted_end = 4 * (t + 1) / tiles;
      const W *ahead[2] = {after + wanted * ldw, after + imax(wanted_end - 1, wanted) * ldw};
      const W *const *pa = after && wanted_end > wanted ? ahead : nullptr;
      const W *from = w + r * ldw;
      float *to = out + c * ldout + r;
      if (c + kDotRows <= nx) {
        dot_columns<T, W, kDotRows>(from, ldw, rows, x + c, n, to, ldout, pa);
        continue;
      }
      for (; c + 2 <= nx; c += 2, to += 2 * ldout) dot_columns<T, W, 2>(from, ldw, rows, x + c, n, to, ldout, pa);
      if (c < nx) dot_columns<T, W, 1>(from, ldw, rows, x + c, n, to, ldout, pa);
    }
  }
}

// Not inlined: among its callers' variables GCC keeps the addresses of y in memory, which costs a tenth.
template <class T, class W, int P>
__attribute__((noinline)) static void pairs_into(const W *w, int64_t ldw, const T *const *h, int64_t f, float *const *y, int64_t nx,
                       int64_t cols, const W *ahead) {
  for (int64_t j = 0; j < cols; j += kPairCols) {
    Pair<T> pair[P];
    for (int p = 0; ahead && p < 2 * P; p++) __builtin_prefetch(ahead + p * ldw + j);
    if (j + kPairCols <= cols) {
      for (int p = 0; p < P; p++) pair[p] = Pair<T>::get(w + 2 * p * ldw + j, w + (2 * p + 1) * ldw + j);
    } else {
      for (int p = 0; p < P; p++)
        pair[p] = Pair<T>::getn(w + 2 * p * ldw + j, w + (2 * p + 1) * ldw + j, cols - j);
    }
    for (int64_t m = 0; m < nx; m++) {
      vf y0 = load(y[m] + j), y1 = load(y[m] + j + kLanes);
      for (int p = 0; p < P; p++) Pair<T>::template add<true>(pair[p], h[m] + f + 2 * p, y0, y1);
      store(y[m] + j, y0);
      store(y[m] + j + kLanes, y1);
    }
  }
}

// y[m][j] += sum over f < nf of h[m][f] * w[f][j] for j < cols; y in the order of Pair, padded to kPairCols; next: the
// weight rows that are wanted after these. P: pairs of weight rows that are added up at a time.
template <class T, class W, int P>
static void sum_pairs(const W *w, int64_t ldw, int64_t nf, const T *const *h, float *const *y, int64_t nx,
                      int64_t cols, const W *next) {
  int64_t f = 0;
  for (; f + 2 * P <= nf; f += 2 * P) {
    const W *now = w + f * ldw;
    pairs_into<T, W, P>(now, ldw, h, f, y, nx, cols, f + 4 * P <= nf ? now + 2 * P * ldw : next);
  }
  for (; f + 2 <= nf; f += 2) pairs_into<T, W, 1>(w + f * ldw, ldw, h, f, y, nx, cols, nullptr);
  if (f < nf) {
    for (int64_t j = 0; j < cols; j += kPairCols) {
      Pair<T> pair = Pair<T>::getn(w + f * ldw + j, (const W *)nullptr, imin(kPairCols, cols - j));
      for (int64_t m = 0; m < nx; m++) {
        vf y0 = load(y[m] + j), y1 = load(y[m] + j + kLanes);
        Pair<T>::template add<false>(pair, h[m] + f, y0, y1);
        store(y[m] + j, y0);
        store(y[m] + j + kLanes, y1);
      }
    }
  }
}

template <class T, class W>
static void sum_rows(const W *w, int64_t ldw, int64_t nf, const T *const *h, float *const *y, int64_t nx,
                     int64_t cols, const W *next = nullptr) {
  constexpr int P = Pair<T>::batch;
  if (nx >= kManySums) return sum_pairs<T, W, 2 * P>(w, ldw, nf, h, y, nx, cols, next);
  sum_pairs<T, W, P>(w, ldw, nf, h, y, nx, cols, next);
}

// The same for whole weight rows, which lie in memory one after the other: they are asked for in that order, a fixed
// way ahead, which memory serves a third faster than several rows at a time.
template <class T, class W, int P>
static void pairs_stream(const W *w, int64_t ldw, const T *const *h, int64_t f, float *const *y, int64_t nx,
                         int64_t cols, const W *ahead) {
  constexpr int64_t bytes = 2 * P * kPairCols * sizeof(W);
  const char *line = (const char *)ahead;
  for (int64_t j = 0; j < cols; j += kPairCols, line += bytes) {
    Pair<T> pair[P];
    for (int64_t i = 0; ahead && i < bytes; i += 64) __builtin_prefetch(line + i);
    for (int p = 0; p < P; p++) {
      const W *a = w + 2 * p * ldw + j;
      pair[p] = j + kPairCols <= cols ? Pair<T>::get(a, a + ldw) : Pair<T>::getn(a, a + ldw, cols - j);
    }
    for (int64_t m = 0; m < nx; m++) {
      vf y0 = load(y[m] + j), y1 = load(y[m] + j + kLanes);
      for (int p = 0; p < P; p++) Pair<T>::template add<true>(pair[p], h[m] + f + 2 * p, y0, y1);
      store(y[m] + j, y0);
      store(y[m] + j + kLanes, y1);
    }
  }
}

template <class T, class W>
static void sum_stream(const W *w, int64_t ldw, int64_t nf, const T *const *h, float *const *y, int64_t nx,
                       int64_t cols, const W *next) {
  constexpr int P = Pair<T>::batch;
  const int64_t step = nx == 1 ? 2 : 2 * P, end = nf * ldw, far = (nx == 1 ? 8192 : 16384) / (int64_t)sizeof(W);
  int64_t f = 0;
  for (; f + step <= nf; f += step) {
    int64_t at = f * ldw + far;
    const W *ahead = at < end ? w + at : next ? next + (at - end) : nullptr;
    if (nx == 1) {
      pairs_stream<T, W, 1>(w + f * ldw, ldw, h, f, y, nx, cols, ahead);
    } else {
      pairs_stream<T, W, P>(w + f * ldw, ldw, h, f, y, nx, cols, ahead);
    }
  }
  const T *rest[kFewRows];
  for (int64_t m = 0; f < nf && m < nx; m++) rest[m] = h[m] + f;
  if (f < nf) sum_rows(w + f * ldw, ldw, nf - f, rest, y, nx, cols);
}

// Accumulators of sum_rows -> natural column order, into lo and hi
template <class T> WIDE_INLINE void in_order(const float *y, vf &lo, vf &hi) {
  lo = load(y);
  hi = load(y + kLanes);
  Pair<T>::in_order(lo, hi);
}

}  // namespace
