// Many rows (prefill), out of the groups: column panels of the output in float32, each owned by one thread, summed over
// the groups in order, rounded once.
#pragma once
#include "many.h"
#include "row_sets.h"

namespace {

constexpr int64_t kSumsNear = 64 << 10;  // floats: sums that stay in a core's cache
constexpr int64_t kMaxStripe = 4;

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
  int64_t stripe(int64_t threads) const {
    return imax(imin(imin(kSumsNear / (rows * kNr), kMaxStripe), even(threads) / threads), 1);
  }
  struct Piece { int64_t first, panels; Range rows; };
  int64_t even(int64_t threads) const { return panels() - panels() % threads; }
  int64_t pieces(int64_t threads) const {
    return ceil_div(even(threads), stripe(threads)) + panels() % threads * threads;
  }
  Piece piece(int64_t i, int64_t threads) const {
    int64_t each = stripe(threads), stripes = ceil_div(even(threads), each);
    if (i < stripes) return {i * each, imin(each, even(threads) - i * each), {0, rows}};
    int64_t part = (i - stripes) % threads;
    return {even(threads) + (i - stripes) / threads, 1, {rows * part / threads, rows * (part + 1) / threads}};
  }
  static int64_t scratch(int64_t units) { return kMaxStripe * imax(units, kSetUnits) * kNr; }

  void pack(int64_t g, int64_t column, int64_t count, float *panel, int64_t ldpanel) const {
    if (input_major)
      return Columns<T, W>::pack(w + g * size * ldw + column, ldw, imin(outputs - column, count * kNr), size, panel,
                                 ldpanel);
    for (int64_t i = 0; i < count * kNr; i += kLanes) {
      int64_t at = column + i, n = imin(imax(outputs - at, 0), kLanes);
      pack_rows<T>(n > 0 ? w + at * ldw + g * size : w, ldw, n, size, panel + i / kNr * ldpanel + i % kNr);
    }
  }
  static const int32_t *not_before(const int32_t *begin, const int32_t *end, int64_t row) {
    while (begin < end) {
      const int32_t *middle = begin + (end - begin) / 2;
      if (*middle < row) begin = middle + 1;
      else end = middle;
    }
    return begin;
  }
  // groups: what the sets' numbers mean; h + at[i]: what the first row has for groups[i]
  void add(const Piece &piece, const Set &set, const int64_t *groups, const A *h, const int64_t *at, int64_t ldh,
           float *panel) const {
    int64_t column = piece.first * kNr, ldpanel = set.count * units * kNr;
    for (int64_t i = 0; i < set.count; i++)
      if (set.any >> i & 1)
        pack(groups[set.first + i], column, piece.panels, panel + i * units * kNr, ldpanel);
    for (int64_t p = 0; p < piece.panels; p++) {
      float *base = sums + (piece.first + p) * rows * kNr;
      for (const Run *run = set.runs; run < set.runs + set.n_runs; run++) {
        const int32_t *ids = set.ids + run->begin, *end = set.ids + run->end;
        ids = not_before(ids, end, piece.rows.begin);
        end = not_before(ids, end, piece.rows.end);
        Terms terms{0, {}, {}};
        for (uint32_t bits = run->groups; bits; bits &= bits - 1) {
          int64_t i = __builtin_ctz(bits);
          terms.panel[terms.count] = panel + p * ldpanel + i * units * kNr;
          terms.at[terms.count++] = at[set.first + i];
        }
        // As even as can be, the larger ones first.
        int64_t tiles = ceil_div(end - ids, kMr), some = tiles ? (end - ids) / tiles : 0, larger = end - ids - tiles * some;
        for (int64_t t = 0; t < tiles; t++, ids += some) {
          if (t == 0 && larger) some++;
          if (t == larger && larger) some--;
          const A *a[kMr];
          float *c[kMr];
          for (int64_t r = 0; r < kMr; r++) {
            int64_t row = ids[imin(r, some - 1)];
            a[r] = h + row * ldh;
            c[r] = base + row * kNr;
          }
          tile_of(some, a, terms, units, c, false);
        }
      }
    }
  }
  // All pieces of a list of n groups, the first or last of all.
  void run(const RowSets &sets, const int64_t *groups, int64_t n, const A *h, const int64_t *at, int64_t ldh,
           bool is_first, bool is_last, Queue &queue, const Team &team, float *panel) const {
    for (int64_t p = queue.take(); p < pieces(team.threads); p = queue.take()) {
      Piece now = piece(p, team.threads);
      if (is_first) clear(now);
      for (int64_t b = 0; b < RowSets::blocks(n); b++)
        for (int64_t i = 0; i < sets.n_sets[b]; i++)
          add(now, sets.sets[b * kMaxTerms + i], groups, h, at, ldh, panel);
      for (int64_t i = now.first; is_last && i < now.first + now.panels; i++) finish(i, now.rows);
    }
  }
  void clear(const Piece &piece) const {
    for (int64_t p = piece.first; p < piece.first + piece.panels; p++)
      memset((void *)(sums + (p * rows + piece.rows.begin) * kNr), 0,
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

}  // namespace
