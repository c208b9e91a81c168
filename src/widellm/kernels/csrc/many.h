// Many rows (prefill) of routed_ffn, routed_in and routed_out. For each group the rows that keep it are gathered by
// pointer. Into a group: panels of gate and up columns, activation while the tile is warm. Out of the groups: column
// panels of the output in float32, each owned by one thread, summed over the groups in order, rounded once.
#pragma once
#include "few.h"
#include "gemm.h"

namespace {

constexpr int64_t kBatchBytes = 4 << 20;  // of hidden activations kept between the two halves of an FFN

struct Plan {  // rows that keep each group: ids[start[g] .. start[g + 1])
  int64_t *start;
  int32_t *ids;
  void reserve(Scratch &s, int64_t rows, int64_t groups) {
    start = s.get<int64_t>(groups + 1);
    ids = s.get<int32_t>(rows * groups);
  }
  void build(const uint8_t *keep, int64_t ld, int64_t rows, int64_t groups) {
    for (int64_t g = 0; g <= groups; g++) start[g] = keep || g == 0 ? 0 : rows;
    for (int64_t m = 0; keep && m < rows; m++)
      for (int64_t g = 0; g < groups; g++) start[g + 1] += keep[m * ld + g] != 0;
    for (int64_t g = 0; g < groups; g++) start[g + 1] += start[g];
    for (int64_t m = 0; m < rows; m++)
      for (int64_t g = 0; g < groups; g++)
        if (!keep || keep[m * ld + g]) ids[start[g]++] = (int32_t)m;  // start[g] runs to the end of g ..
    for (int64_t g = groups; g > 0; g--) start[g] = start[g - 1];     // .. and is put back
    start[0] = 0;
  }
  int64_t count(int64_t g) const { return start[g + 1] - start[g]; }
};

// Lines of the weights that a thread will pack next, asked for bit by bit while it multiplies.
struct Ahead {
  const char *base = nullptr;
  int64_t stride = 0, rows = 0, lines = 0, next = 0, total = 0;
  void set(const void *p, int64_t row_stride, int64_t n_rows, int64_t row_bytes) {
    base = (const char *)p;
    stride = row_stride;
    rows = n_rows;
    lines = ceil_div(row_bytes, 64);
    next = 0;
    total = rows * lines;
  }
  void ask(int64_t count) {
    for (int64_t end = imin(total, next + count); next < end; next++)
      __builtin_prefetch(base + next / lines * stride + next % lines * 64, 0, 2);
  }
};

template <class T> struct ManyIn {  // x -> the columns of a group: [act(gate)] * up, or plain with a bias
  typedef typename Packed<T>::A A;
  int64_t inputs, size, lda;
  const A *x;
  const T *gate;
  int64_t ldgate;
  const T *up;
  int64_t ldup;
  const T *gate_bias, *up_bias;

  int64_t width() const { return gate ? kNr / 2 : kNr; }  // columns per panel
  int64_t panels() const { return ceil_div(size, width()); }

  void pack(int64_t column, int64_t n, int64_t k, int64_t depth, float *panel) const {
    for (int v = 0; v < kNv; v++) {
      bool is_gate = gate && v < kNv / 2;
      int64_t at = (gate && !is_gate ? v - kNv / 2 : v) * kLanes, left = imin(imax(n - at, 0), kLanes);
      const T *w = is_gate ? gate : up;
      int64_t ld = is_gate ? ldgate : ldup;
      pack_rows(left > 0 ? w + (column + at) * ld + k : w, ld, left, depth, panel + v * kLanes);
    }
  }

  // finish(i, lane vector index v, gate, up) is called for every kept row i and vector of the panel
  template <class Finish>
  void run(int64_t column, int64_t n, const int32_t *ids, int64_t rows, float *panel, float *sums,
           const Finish &finish) const {
    const int vectors = gate ? kNv / 2 : kNv;
    for (int64_t k = 0; k < inputs; k += kInputBlock) {
      int64_t depth = imin(kInputBlock, inputs - k);
      bool last = k + depth == inputs;
      pack(column, n, k, depth, panel);
      for (int64_t i = 0; i < rows; i += kMr) {
        const A *a[kMr];
        float *c[kMr];
        int64_t some = imin(kMr, rows - i);
        for (int64_t r = 0; r < some; r++) {
          a[r] = x + (ids ? ids[i + r] : i + r) * lda + k;
          c[r] = sums + (i + r) * kNr;
        }
        tile_of(some, a, panel, ceil_div(depth, Packed<T>::per), c, k == 0);
        if (!last) continue;
        for (int64_t r = 0; r < some; r++)
          for (int v = 0; v < vectors; v++) {
            int64_t at = v * kLanes, lanes = imin(kLanes, n - at);
            if (lanes <= 0) break;
            vf first = load(c[r] + at), second = gate ? load(c[r] + kNr / 2 + at) : first;
            if (gate_bias) first += loadn(gate_bias + column + at, lanes);
            if (up_bias) second += loadn(up_bias + column + at, lanes);
            finish(i + r, at, lanes, first, second);
          }
      }
    }
  }
};

template <class T> struct ManyOut {  // sums[panel][row] += h[group] . w[group]
  typedef typename Packed<T>::A A;
  int64_t rows, outputs, size, units;  // units: of a group
  const T *w;
  int64_t ldw;
  bool input_major;
  const T *bias;
  T *out;
  int64_t ldout;
  float *sums;  // [panels, rows, kNr]

  int64_t panels() const { return ceil_div(outputs, kNr); }
  void pack(int64_t g, int64_t column, float *panel) const {
    for (int v = 0; v < kNv; v++) {
      int64_t at = column + v * kLanes, n = imin(imax(outputs - at, 0), kLanes);
      if (input_major) {
        pack_columns(n > 0 ? w + g * size * ldw + at : w, n > 0 ? ldw : 0, n, size, panel + v * kLanes);
      } else {
        pack_rows(n > 0 ? w + at * ldw + g * size : w, ldw, n, size, panel + v * kLanes);
      }
    }
  }
  void add(int64_t p, int64_t g, const A *h, const int32_t *ids, int64_t count, float *panel) const {
    if (!count) return;
    pack(g, p * kNr, panel);
    float *base = sums + p * rows * kNr;
    for (int64_t i = 0; i < count; i += kMr) {
      const A *a[kMr];
      float *c[kMr];
      int64_t some = imin(kMr, count - i);
      for (int64_t r = 0; r < some; r++) {
        a[r] = h + (i + r) * units * Packed<T>::per;
        c[r] = base + ids[i + r] * kNr;
      }
      tile_of(some, a, panel, units, c, false);
    }
  }
  void clear(int64_t p) const { memset(sums + p * rows * kNr, 0, (size_t)(rows * kNr) * sizeof(float)); }
  void finish(int64_t p) const {
    for (int64_t m = 0; m < rows; m++)
      for (int64_t j = p * kNr; j < imin((p + 1) * kNr, outputs); j += kLanes) {
        int64_t lanes = imin(kLanes, outputs - j);
        vf a = load(sums + (p * rows + m) * kNr + j - p * kNr);
        if (bias) a += loadn(bias + j, lanes);
        storen(out + m * ldout + j, a, lanes);
      }
  }
};

// The left operand: x itself where the kernel can read it in place, else a padded copy in its own type.
template <class T> struct LeftOperand {
  typedef typename Packed<T>::A A;
  const T *x;
  int64_t ldx, n, ld;
  A *copy;
  void reserve(Scratch &s, const T *data, int64_t ldx_, int64_t inputs, int64_t rows) {
    bool in_place = sizeof(A) == sizeof(T) && inputs % Packed<T>::per == 0;
    x = data;
    ldx = ldx_;
    n = inputs;
    ld = in_place ? ldx : round_up(inputs, Packed<T>::per);
    copy = in_place ? nullptr : s.get<A>(rows * ld);
  }
  void fill(int64_t row0, Range rows) const {
    for (int64_t m = rows.begin; copy && m < rows.end; m++) widen_row<T>(x + (row0 + m) * ldx, n, copy + m * ld);
  }
  const A *at(int64_t row0) const { return copy ? copy : reinterpret_cast<const A *>(x + row0 * ldx); }
};

// Whole rows of the router per thread: at this size its maps are a small part, and no barrier is needed.
template <class T>
static void route_rows(const WideRouter &r, const T *x, int64_t ldx, int64_t inputs, int64_t groups, Range rows,
                       float *wide, float *hidden, uint8_t *keep) {
  for (int64_t m = rows.begin; m < rows.end; m += kFewRows) {
    int64_t n = imin(kFewRows, rows.end - m);
    FewRouter<T> router{&r, n, inputs, groups, wide, hidden, keep + m * groups};
    for (int64_t i = 0; i < n; i++) router.widen(x + (m + i) * ldx, i);
    router.down({0, r.rank});
    router.up({0, groups});
  }
}

}  // namespace
