// Many rows (prefill) of routed_ffn, routed_in and routed_out. For each group the rows that keep it are gathered by
// pointer. Into a group: panels of gate and up columns, activation while the tile is warm. Out of the groups: column
// panels of the output in float32, each owned by one thread, summed over the groups in order, rounded once.
#pragma once
#include "few.h"
#include "gemm.h"

namespace {

constexpr int64_t kBatchBytes = 4 << 20;   // of inner activations kept at a time
constexpr int64_t kSumsNear = 128 << 10;   // floats: sums that stay in a core's cache
constexpr int64_t kMaxStripe = 4;
constexpr int64_t kPackRows = 8;

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
  // Rows of g before `row`: they ascend.
  int64_t before(int64_t g, int64_t row) const {
    int64_t lo = 0, hi = count(g);
    while (lo < hi) {
      int64_t middle = (lo + hi) / 2;
      if (ids[start[g] + middle] < row) lo = middle + 1;
      else hi = middle;
    }
    return lo;
  }
};

// The groups that any row keeps, in order, cut into batches whose inner activations ([rows that keep it, row_size] for
// each group) fit a limit. Batch b holds groups[begin[b] .. begin[b + 1]).
struct Batches {
  int64_t count, *groups, *begin, *offset, limit, row_size;
  void reserve(Scratch &s, int64_t n_groups, int64_t rows, int64_t size, int64_t most) {
    row_size = size;
    limit = imax(most, rows * size);
    groups = s.get<int64_t>(n_groups);
    begin = s.get<int64_t>(n_groups + 1);
    offset = s.get<int64_t>(n_groups);
  }
  void build(const Plan &plan, int64_t n_groups) {
    int64_t kept = 0, used = 0;
    count = 0;
    for (int64_t g = 0; g < n_groups; g++) {
      int64_t need = plan.count(g) * row_size;
      if (!need) continue;
      if (kept == 0 || used + need > limit) {
        begin[count++] = kept;
        used = 0;
      }
      offset[kept] = used;
      groups[kept++] = g;
      used += need;
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
        tile_of(some, a, panel, ceil_div(depth, Packed<T>::per), c, k == 0);
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

template <class T, class W> struct ManyOut {  // sums[panel][row] += h[group] . w[group]
  typedef typename Packed<T>::A A;
  int64_t rows, outputs, size, units;  // units: of a group
  const W *w;
  int64_t ldw;
  bool input_major;
  const float *scale;  // null: 1
  const T *bias;
  T *out;
  int64_t ldout;
  float *sums;  // [panels, rows, kNr]

  int64_t panels() const { return ceil_div(outputs, kNr); }
  // Panels that a thread takes together: a weight row is then read in pieces worth a page walk, and the sums of all
  // rows still fit a core's cache. Panels that would leave a thread idle at the end are cut by rows instead.
  int64_t stripe() const { return imin(imax(kSumsNear / (rows * kNr), 1), kMaxStripe); }
  struct Piece { int64_t first, panels; Range rows; };
  int64_t even(int64_t threads) const { return panels() - panels() % threads; }
  int64_t pieces(int64_t threads) const {
    return ceil_div(even(threads), stripe()) + panels() % threads * threads;
  }
  Piece piece(int64_t i, int64_t threads) const {
    int64_t stripes = ceil_div(even(threads), stripe());
    if (i < stripes) return {i * stripe(), imin(stripe(), even(threads) - i * stripe()), {0, rows}};
    int64_t part = (i - stripes) % threads;
    return {even(threads) + (i - stripes) / threads, 1, {rows * part / threads, rows * (part + 1) / threads}};
  }
  static int64_t scratch(int64_t size) { return kMaxStripe * (size + 1) * kNr; }

  void pack(int64_t g, int64_t column, int64_t count, float *panel) const {
    if (input_major) {  // a pair of rows at a time, so that each is read once from end to end
      for (int64_t k = 0; k < size; k += kPackRows)
        for (int64_t i = 0; i < count * kNr; i += kLanes) {
          int64_t at = column + i, n = imin(imax(outputs - at, 0), kLanes), depth = imin(kPackRows, size - k);
          float *to = panel + i / kNr * units * kNr + k / Packed<T>::per * kNr + i % kNr;
          Columns<T, W>::pack(n > 0 ? w + (g * size + k) * ldw + at : w, n > 0 ? ldw : 0, n, depth, to);
        }
      return;
    }
    for (int64_t i = 0; i < count * kNr; i += kLanes) {
      int64_t at = column + i, n = imin(imax(outputs - at, 0), kLanes);
      pack_rows<T>(n > 0 ? w + at * ldw + g * size : w, ldw, n, size, panel + i / kNr * units * kNr + i % kNr);
    }
  }
  // next: the group that comes after g, or -1
  void add(const Piece &piece, int64_t g, int64_t next, const A *h, const int32_t *ids, int64_t count,
           float *panel) const {
    int64_t first = piece.first, some_panels = piece.panels, column = first * kNr;
    Ahead ahead;
    pack(g, column, some_panels, panel);
    if (next >= 0 && input_major)
      ahead.want(w + next * size * ldw + column, ldw, size, imin(some_panels * kNr, outputs - column),
                 some_panels * ceil_div(count, kMr));
    for (int64_t p = 0; p < some_panels; p++) {
      float *base = sums + (first + p) * rows * kNr;
      for (int64_t i = 0; i < count; i += kMr) {
        const A *a[kMr];
        float *c[kMr];
        int64_t some = imin(kMr, count - i);
        for (int64_t r = 0; r < some; r++) {
          a[r] = h + (i + r) * units * Packed<T>::per;
          c[r] = base + ids[i + r] * kNr;
        }
        ahead.ask();
        for (int64_t r = i + kMr; r < imin(i + 2 * kMr, count); r++)  // rows lie apart: nothing else foresees them
          for (int v = 0; v < kNv; v++) __builtin_prefetch(base + ids[r] * kNr + v * kLanes, 1);
        tile_of(some, a, panel + p * units * kNr, units, c, false);
      }
    }
  }
  // All pieces of one batch of groups.
  void run(const Batches &batches, int64_t b, const Plan &plan, const A *h, Queue &queue, const Team &team,
           float *panel) const {
    for (int64_t p = queue.take(); p < pieces(team.threads); p = queue.take()) {
      Piece now = piece(p, team.threads);
      if (b == 0) clear(now);
      for (int64_t i = batches.begin[b]; i < batches.begin[b + 1]; i++) {
        int64_t g = batches.groups[i], next = i + 1 < batches.begin[b + 1] ? batches.groups[i + 1] : -1;
        int64_t from = plan.before(g, now.rows.begin), to = plan.before(g, now.rows.end);
        const A *rows_of = h + batches.offset[i] + from * batches.row_size;
        if (from < to) add(now, g, next, rows_of, plan.ids + plan.start[g] + from, to - from, panel);
      }
      for (int64_t i = now.first; b + 1 == batches.count && i < now.first + now.panels; i++) finish(i, now.rows);
    }
  }
  void clear(const Piece &piece) const {
    for (int64_t p = piece.first; p < piece.first + piece.panels; p++)
      memset(sums + (p * rows + piece.rows.begin) * kNr, 0,
             (size_t)((piece.rows.end - piece.rows.begin) * kNr) * sizeof(float));
  }
  void finish(int64_t p, Range part) const {
    for (int64_t m = part.begin; m < part.end; m++)
      for (int64_t j = p * kNr; j < imin((p + 1) * kNr, outputs); j += kLanes) {
        int64_t lanes = imin(kLanes, outputs - j);
        vf a = load(sums + (p * rows + m) * kNr + j - p * kNr);
        if (scale) a *= loadn(scale + j, lanes);
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
