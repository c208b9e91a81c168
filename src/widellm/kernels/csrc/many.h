// Many rows (prefill): what routed_ffn, routed_in and routed_out share, and the maps into the groups. For each group the
// rows that keep it are gathered by pointer and multiplied with panels of gate and up columns; activation while the
// tile is warm. Maps out of the groups: many_out.h.
#pragma once
#include "few.h"
#include "gemm.h"

namespace {

constexpr int64_t kBatchBytes = 4 << 20;  // of inner activations kept at a time
constexpr int64_t kApart = 32;            // of them between rows, which would share cache sets a power of two apart

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

// The groups that any row keeps, in order, cut into batches by what their inner activations take. A batch holds them as
// [rows, its groups, row_size] with ld between rows; where a row drops a group there is a hole, neither written nor
// read. Batch b holds groups[begin[b] .. begin[b + 1]).
struct Batches {
  int64_t count, *groups, *begin, *offset, row_size, most, ld;
  void reserve(Scratch &s, int64_t n_groups, int64_t rows, int64_t size, int64_t most_of_them) {
    row_size = size;
    most = most_of_them;
    int64_t room = imin(imax(2 * most / (rows * size), 1), n_groups);
    ld = room * size + kApart;
    groups = s.get<int64_t>(n_groups);
    begin = s.get<int64_t>(n_groups + 1);
    offset = s.get<int64_t>(n_groups);
  }
  void build(const Plan &plan, int64_t n_groups) {
    int64_t kept = 0, used = 0, at = 0;
    count = 0;
    for (int64_t g = 0; g < n_groups; g++) {
      int64_t need = plan.count(g) * row_size;
      if (!need) continue;
      if (kept == 0 || used + need > most || at + row_size > ld) {
        begin[count++] = kept;
        used = at = 0;
      }
      offset[kept] = at;
      groups[kept++] = g;
      used += need;
      at += row_size;
    }
    if (kept == 0) begin[count++] = 0;  // one empty batch, which still writes the output
    begin[count] = kept;
  }
};

// Weights that a thread will pack next, asked for from memory line by line while it multiplies.
struct Ahead {
  const char *row = nullptr;
  int64_t stride = 0, rows = 0, bytes = 0, at = 0, per_tile = 0;

  template <class T> void want(const T *w, int64_t ldw, int64_t n_rows, int64_t n, int64_t tiles) {
    row = (const char *)w;
    stride = ldw * (int64_t)sizeof(T);
    rows = n_rows;
    bytes = n * (int64_t)sizeof(T);
    at = 0;
    per_tile = ceil_div(n_rows * ceil_div(bytes, 64), imax(tiles, 1));
  }
  void ask() {
    for (int64_t i = 0; rows > 0 && i < per_tile; i++) {
      __builtin_prefetch(row + at, 0, 2);
      at += 64;
      if (at < bytes) continue;
      at = 0;
      row += stride;
      rows--;
    }
  }
};

template <class T, class W> struct ManyIn {  // x -> the columns of a group: [act(gate)] * up, or plain with a bias
  typedef typename Packed<T>::A A;
  int64_t inputs, size, lda;
  const A *x;
  const W *gate;
  int64_t ldgate;
  const W *up;
  int64_t ldup;
  const float *gate_scale, *up_scale;  // null: 1
  const T *gate_bias, *up_bias;

  int64_t width() const { return gate ? kNr / 2 : kNr; }  // columns per panel
  int64_t panels() const { return ceil_div(size, width()); }
  int64_t column(int64_t piece) const { return piece % panels() * width(); }  // of a panel within its group

  void pack(int64_t column, int64_t n, int64_t k, int64_t depth, float *panel) const {
    for (int v = 0; v < kNv; v++) {
      bool is_gate = gate && v < kNv / 2;
      int64_t at = (gate && !is_gate ? v - kNv / 2 : v) * kLanes, left = imin(imax(n - at, 0), kLanes);
      const W *w = is_gate ? gate : up;
      int64_t ld = is_gate ? ldgate : ldup;
      pack_rows<T>(left > 0 ? w + (column + at) * ld + k : w, ld, left, depth, panel + v * kLanes);
    }
  }

  // finish(i, at, lanes, gate, up) is called for every kept row i and vector of the panel; after: the column of the
  // panel that this thread will do next, or -1
  template <class Finish>
  void run(int64_t column, int64_t n, int64_t after, const int32_t *ids, int64_t rows, float *panel, float *sums,
           const Finish &finish) const {
    Ahead first, second;
    const int vectors = gate ? kNv / 2 : kNv;
    for (int64_t k = 0; k < inputs; k += kInputBlock) {
      int64_t depth = imin(kInputBlock, inputs - k);
      bool last = k + depth == inputs;
      pack(column, n, k, depth, panel);
      int64_t next_column = last ? after : column, next_k = last ? 0 : k + depth, tiles = ceil_div(rows, kMr);
      if (next_column >= 0) {
        int64_t next_depth = imin(kInputBlock, inputs - next_k);
        if (gate) first.want(gate + next_column * ldgate + next_k, ldgate, n, next_depth, tiles);
        second.want(up + next_column * ldup + next_k, ldup, n, next_depth, tiles);
      }
      for (int64_t i = 0; i < rows; i += kMr) {
        first.ask();
        second.ask();
        const A *a[kMr];
        float *c[kMr];
        int64_t some = imin(kMr, rows - i);
        for (int64_t r = 0; r < some; r++) {
          a[r] = x + (ids ? ids[i + r] : i + r) * lda + k;
          c[r] = sums + (i + r) * kNr;
        }
        tile_of(some, a, {1, {panel}, {0}}, ceil_div(depth, Packed<T>::per), c, k == 0);
        if (!last) continue;
        for (int64_t r = 0; r < some; r++)
          for (int v = 0; v < vectors; v++) {
            int64_t at = v * kLanes, lanes = imin(kLanes, n - at);
            if (lanes <= 0) break;
            vf first = load(c[r] + at), second = gate ? load(c[r] + kNr / 2 + at) : first;
            if (gate_scale) first *= loadn(gate_scale + column + at, lanes);
            if (up_scale) second *= loadn(up_scale + column + at, lanes);
            if (gate_bias) first += loadn(gate_bias + column + at, lanes);
            if (up_bias) second += loadn(up_bias + column + at, lanes);
            finish(i + r, at, lanes, first, second);
          }
      }
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
