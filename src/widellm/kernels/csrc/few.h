// Few rows (decode): the pieces of a call that its threads share. Each weight of a kept group is read once for all
// rows that keep the group; a group that no row keeps is never read. A barrier stands between the pieces.
#pragma once
#include "rows.h"
#include "team.h"

namespace {

constexpr int64_t kUnit = 16;           // weight rows per piece of work
constexpr int64_t kNear = 256;          // inputs of a row that are gathered at a time
constexpr int64_t kSumBytes = 24 << 10;  // of sums that a thread works on at a time
constexpr int64_t kSection = 256;        // weight rows that an input-major sum adds up by themselves, at least
constexpr int64_t kSections = 16;        // and in how many parts it does so, at most

// Which rows keep each group (bit m of rows[g]) and the groups that any row keeps, in order. Each thread has its own.
struct Kept {
  int64_t count;
  int32_t *groups;
  uint32_t *rows;

  void reserve(Scratch &s, int64_t n_groups) {
    groups = s.get<int32_t>(n_groups);
    rows = s.get<uint32_t>(n_groups);
  }
  void build(const uint8_t *keep, int64_t ld, int64_t n_rows, int64_t n_groups) {  // keep null: all kept
    for (int64_t g = 0; g < n_groups; g++) rows[g] = keep ? 0u : (uint32_t)((1ull << n_rows) - 1);
    for (int64_t m = 0; keep && m < n_rows; m++)
      for (int64_t g = 0; g < n_groups; g++) rows[g] |= (uint32_t)(keep[m * ld + g] != 0) << m;
    count = 0;
    for (int64_t g = 0; g < n_groups; g++)
      if (rows[g]) groups[count++] = (int32_t)g;
  }
};

struct Picked {  // the numbers of the rows in a bit set
  int64_t count = 0;
  int64_t at[kFewRows];
  explicit Picked(uint32_t bits) {
    for (; bits; bits &= bits - 1) at[count++] = __builtin_ctz(bits);
  }
};

// y[c][i] = round(scale[i] * (w[i] . x[c]) + bias[i]) for n <= kUnit weight rows; scale null: 1
template <class T, class W>
static void linear_unit(const W *w, int64_t ldw, const float *scale, const T *bias, int64_t n, const T *const *x,
                        int64_t nx, int64_t inputs, T *const *y, const W *next = nullptr) {
  float part[kFewRows * kUnit];
  dot_rows(w, ldw, n, x, nx, inputs, part, kUnit, next);
  for (int64_t c = 0; c < nx; c++)
    for (int64_t i = 0; i < n; i += kLanes) {
      int64_t lanes = imin(kLanes, n - i);
      vf a = loadn(part + c * kUnit + i, lanes);
      if (scale) a *= loadn(scale + i, lanes);
      if (bias) a += loadn(bias + i, lanes);
      storen(y[c] + i, a, lanes);
    }
}

// h = round(round(act(gate)) * up), each of gate and up rounded first, as a model run op by op would; gate may be null
template <class T>
WIDE_INLINE vf gated(vf gate, vf up, bool has_gate, int64_t act) {
  up = rounded<T>(up);
  if (!has_gate) return activate(up, act);
  return rounded<T>(activate(rounded<T>(gate), act)) * up;
}

template <class T> struct FewRouter {
  const WideRouter *r;
  int64_t rows, inputs, groups;
  float *x;       // [rows, inputs]
  float *hidden;  // [rows, rank]
  uint8_t *keep;  // [rows, groups]
  float *totals = nullptr;  // [groups], where the rows agree: sums of their logits

  void reserve(Scratch &s, bool agrees = false) {
    x = s.get<float>(rows * inputs);
    hidden = s.get<float>(rows * r->rank);
    if (agrees) totals = s.get<float>(groups);
  }
  void widen(const T *row, int64_t m) const {
    for (int64_t i = 0; i < inputs; i += kLanes) {
      int64_t n = imin(kLanes, inputs - i);
      storen(x + m * inputs + i, loadn(row + i, n), n);
    }
  }
  void down(Range part) const {  // of the rank; after the barrier that follows widen
    const float *xs[kFewRows];
    for (int64_t m = 0; m < rows; m++) xs[m] = x + m * inputs;
    dot_rows(r->down + part.begin * inputs, inputs, part.end - part.begin, xs, rows, inputs, hidden + part.begin,
             r->rank);
    for (int64_t m = 0; r->act && m < rows; m++)
      for (int64_t i = part.begin; i < part.end; i++) {
        float *v = hidden + m * r->rank + i;
        *v = activate(vset(*v), WIDELLM_SILU)[0];
      }
  }
  void up(Range part) const {  // of the groups; after the barrier that follows down
    const float *hs[kFewRows];
    float logits[kFewRows * kUnit];
    for (int64_t m = 0; m < rows; m++) hs[m] = hidden + m * r->rank;
    for (int64_t g = part.begin; g < part.end; g += kUnit) {
      int64_t n = imin(kUnit, part.end - g);
      dot_rows(r->up + g * r->rank, r->rank, n, hs, rows, r->rank, logits, kUnit);
      for (int64_t m = 0; m < rows; m++)
        for (int64_t i = 0; i < n; i++)
          keep[m * groups + g + i] =
              logits[m * kUnit + i] + (r->bias ? r->bias[g + i] : 0.0f) > (float)r->threshold;
      for (int64_t i = 0; totals && i < n; i++) {
        float total = 0.0f;
        for (int64_t m = 0; m < rows; m++) total += logits[m * kUnit + i] + (r->bias ? r->bias[g + i] : 0.0f);
        totals[g + i] = total;
      }
    }
  }
  // How many groups the rows keep together: as many as they would keep on average.
  int64_t agreed_count() const {  // after the barrier that follows up
    int64_t kept = 0;
    for (int64_t i = 0; i < rows * groups; i++) kept += keep[i];
    return (2 * kept + rows) / (2 * rows);
  }
  // All rows keep the `count` groups with the largest totals, of equal ones the first. After a further barrier.
  void agree(Range part, int64_t count) const {
    for (int64_t g = part.begin; g < part.end; g++) {
      int64_t before = 0;
      for (int64_t j = 0; j < groups; j++) before += totals[j] > totals[g] || (totals[j] == totals[g] && j < g);
      for (int64_t m = 0; m < rows; m++) keep[m * groups + g] = before < count;
    }
  }
  // up, and what makes the rows agree where they should; every thread comes out with the masks complete
  void decide(const Team &team) const {
    Range part = share(groups, 4, team);
    up(part);
    team.barrier();
    if (!totals) return;
    int64_t count = agreed_count();
    team.barrier();
    agree(part, count);
    team.barrier();
  }
};

template <class T, class W> struct FewInner {  // gate, up, activation; weights of type W, with a scale per row or null
  int64_t act, rows, inputs, size, groups;
  const T *x;
  int64_t ldx;
  const W *gate;
  int64_t ldgate;
  const W *up;
  int64_t ldup;
  const float *gate_scale, *up_scale;
  const T *gate_bias, *up_bias;
  T *h;  // [rows, groups * size]

  void run(const Kept &kept, Queue &queue) const {
    int64_t pieces = ceil_div(size, kUnit);
    int64_t end = kept.count * pieces;
    for (int64_t u = queue.take(), after; u < end; u = after) {
      after = queue.take();
      int64_t g = kept.groups[u / pieces], i = u % pieces * kUnit;
      const W *next = nullptr;  // what this thread will want from memory after these
      if (after < end) {
        int64_t row = kept.groups[after / pieces] * size + after % pieces * kUnit;
        next = gate ? gate + row * ldgate : up + row * ldup;
      }
      unit(g, i, imin(kUnit, size - i), Picked(kept.rows[g]), next);
    }
  }
  void unit(int64_t g, int64_t i, int64_t n, const Picked &rows_of, const W *next) const {
    float gates[kFewRows * kUnit], ups[kFewRows * kUnit];
    const T *xs[kFewRows];
    int64_t f = g * size + i;
    for (int64_t c = 0; c < rows_of.count; c++) xs[c] = x + rows_of.at[c] * ldx;
    if (gate) dot_rows(gate + f * ldgate, ldgate, n, xs, rows_of.count, inputs, gates, kUnit, up + f * ldup);
    dot_rows(up + f * ldup, ldup, n, xs, rows_of.count, inputs, ups, kUnit, next);
    for (int64_t c = 0; c < rows_of.count; c++)
      for (int64_t j = 0; j < n; j += kLanes) {
        int64_t lanes = imin(kLanes, n - j);
        vf a = gate ? loadn(gates + c * kUnit + j, lanes) : vf{}, b = loadn(ups + c * kUnit + j, lanes);
        if (gate_scale) a *= loadn(gate_scale + f + j, lanes);
        if (up_scale) b *= loadn(up_scale + f + j, lanes);
        if (gate_bias) a += loadn(gate_bias + f + j, lanes);
        if (up_bias) b += loadn(up_bias + f + j, lanes);
        storen(h + rows_of.at[c] * groups * size + f + j, gated<T>(a, b, gate != nullptr, act), lanes);
      }
  }
};

// out = [residual +] [scale *] w h [+ bias] over the kept groups, in order
template <class T, class W> struct FewOuter {
  int64_t rows, outputs, size, groups;
  const T *h;
  int64_t ldh;
  const W *w;
  int64_t ldw;
  bool input_major;
  const float *scale;
  const T *bias, *residual;
  int64_t ldres;
  T *out;
  int64_t ldout;
  float *y;  // input-major only: sums of sections, see reserve
  Queue *queue;

  // Input-major sums are made section by section: the groups of a section (fixed by the sizes alone) in order from 0,
  // then the sections in order. So it changes no bit who makes which section, or which columns of all.
  int64_t per_section() const { return imax(ceil_div(kSection, size), ceil_div(groups, kSections)); }
  int64_t sections() const { return ceil_div(groups, per_section()); }
  int64_t width() const { return round_up(outputs, kPairCols); }
  bool compact() const { return rows * width() * (int64_t)sizeof(float) <= kSumBytes; }  // a section's sums stay near

  void reserve(Scratch &s) {
    y = input_major ? s.get<float>(rows * width() * imax(compact() ? 1 + sections() : 0, 4)) : nullptr;
    queue = s.zeros<Queue>(1);
  }
  // Every thread calls it once; no two calls share scratch.
  void run(const Kept &kept, const Team &team) const {
    if (!input_major) return along_rows(kept, share(outputs, 4, team));
    Range mine = share(outputs, kPairCols, team);
    if (compact() && kept.count >= 4 * team.threads) {
      by_section(kept);
      team.barrier();
      return add_sections(kept, mine);
    }
    // Threads own columns; as many at a time as keep the sums of all rows in the first cache.
    int64_t step = imax(kSumBytes / (int64_t)sizeof(float) / rows / kPairCols, 1) * kPairCols;
    for (int64_t j = mine.begin; j < mine.end; j += step) columns(kept, j, imin(step, mine.end - j));
  }
  int64_t section_end(const Kept &kept, int64_t k) const {  // of the section that kept.groups[k] is in
    int64_t section = kept.groups[k] / per_section();
    while (k < kept.count && kept.groups[k] / per_section() == section) k++;
    return k;
  }
  // Whole sections, the largest first: long pieces of memory for each thread, and an even end.
  void by_section(const Kept &kept) const {
    Range parts[kSections];  // of kept.groups
    int64_t count = 0;
    for (int64_t k = 0, to; k < kept.count; k = to) {
      to = section_end(kept, k);
      int64_t at = count++;
      for (; at > 0 && parts[at - 1].end - parts[at - 1].begin < to - k; at--) parts[at] = parts[at - 1];
      parts[at] = {k, to};
    }
    for (int64_t u = queue->take(), after; u < count; u = after) {
      after = queue->take();
      float *sums = y + (1 + kept.groups[parts[u].begin] / per_section()) * rows * width();
      memset((void *)sums, 0, (size_t)(rows * width()) * sizeof(float));
      for (int64_t i = parts[u].begin; i < parts[u].end; i++) {
        int64_t g = kept.groups[i], next = i + 1 < parts[u].end ? i + 1 : after < count ? parts[after].begin : -1;
        Picked rows_of(kept.rows[g]);
        const T *hs[kFewRows];
        float *ys[kFewRows];
        for (int64_t c = 0; c < rows_of.count; c++) {
          hs[c] = h + rows_of.at[c] * ldh + g * size;
          ys[c] = sums + rows_of.at[c] * width();
        }
        sum_stream(w + g * size * ldw, ldw, size, hs, ys, rows_of.count, outputs,
                   next >= 0 ? w + kept.groups[next] * size * ldw : nullptr);
      }
    }
  }
  void add_sections(const Kept &kept, Range mine) const {
    int64_t end = round_up(mine.end, kPairCols);
    for (int64_t m = 0; m < rows; m++) {
      float *total = y + m * width();
      memset((void *)(total + mine.begin), 0, (size_t)(end - mine.begin) * sizeof(float));
      for (int64_t k = 0; k < kept.count; k = section_end(kept, k)) {
        const float *sums = total + (1 + kept.groups[k] / per_section()) * rows * width();
        for (int64_t j = mine.begin; j < end; j += kLanes) store(total + j, load(total + j) + load(sums + j));
      }
      finish_row(m, mine.begin, mine.end - mine.begin, total + mine.begin);
    }
  }
  void columns(const Kept &kept, int64_t begin, int64_t n) const {
    // Sums and inputs are gathered side by side: rows a power of two apart would evict each other from the cache.
    int64_t ld = round_up(n, kPairCols) + kPairCols;
    float *totals = y + 4 * begin * rows, *sums = totals + rows * ld;
    T near[kFewRows * kNear];
    memset((void *)totals, 0, (size_t)(rows * ld) * sizeof(float));
    memset((void *)sums, 0, (size_t)(rows * ld) * sizeof(float));
    for (int64_t k = 0, to; k < kept.count; k = to) {
      to = section_end(kept, k);
      for (int64_t i = k; i < to; i++) {
        int64_t g = kept.groups[i];
        Picked rows_of(kept.rows[g]);
        const T *hs[kFewRows];
        const W *from = w + g * size * ldw + begin;
        float *ys[kFewRows];
        for (int64_t f = 0; f < size; f += kNear) {
          int64_t depth = imin(kNear, size - f);
          for (int64_t c = 0; c < rows_of.count; c++) {
            memcpy((void *)(near + c * kNear), h + rows_of.at[c] * ldh + g * size + f, (size_t)depth * sizeof(T));
            hs[c] = near + c * kNear;
            ys[c] = sums + rows_of.at[c] * ld;
          }
          const W *next = f + kNear < size     ? from + (f + kNear) * ldw
                          : i + 1 < kept.count ? w + kept.groups[i + 1] * size * ldw + begin
                                               : nullptr;
          sum_rows(from + f * ldw, ldw, depth, hs, ys, rows_of.count, n, next);
        }
      }
      for (int64_t i = 0; i < rows * ld; i += kLanes) {
        store(totals + i, load(totals + i) + load(sums + i));
        store(sums + i, vf{});
      }
    }
    for (int64_t m = 0; m < rows; m++) finish_row(m, begin, n, totals + m * ld);
  }
  void finish_row(int64_t m, int64_t begin, int64_t n, const float *sums) const {
    for (int64_t j = 0; j < n; j += kPairCols) {
      vf lo, hi;
      in_order<T>(sums + j, lo, hi);
      finish(m, begin + j, imin(kLanes, n - j), lo);
      if (j + kLanes < n) finish(m, begin + j + kLanes, imin(kLanes, n - j - kLanes), hi);
    }
  }
  void along_rows(const Kept &kept, Range part) const {
    for (int64_t j = part.begin; j < part.end; j += 4) {
      int64_t n = imin(4, part.end - j);
      for (int64_t m = 0; m < rows; m++) {
        vf acc[4][1] = {};
        for (int64_t k = 0; k < kept.count; k++) {
          int64_t g = kept.groups[k];
          if (!(kept.rows[g] >> m & 1)) continue;
          const T *hs[1] = {h + m * ldh + g * size};
          const W *ws[4];
          for (int64_t r = 0; r < 4; r++) ws[r] = w + (j + imin(r, n - 1)) * ldw + g * size;
          dot_tile<T, W, 4, 1>(ws, hs, size, acc);
        }
        float part4[kLanes] = {};
        f4 sums = sum_each(acc[0][0], acc[1][0], acc[2][0], acc[3][0]);
        memcpy(part4, &sums, sizeof sums);
        finish(m, j, n, load(part4));
      }
    }
  }
  void finish(int64_t m, int64_t j, int64_t n, vf a) const {
    if (scale) a *= loadn(scale + j, n);
    if (bias) a += loadn(bias + j, n);
    if (residual) a = rounded<T>(a) + loadn(residual + m * ldres + j, n);
    storen(out + m * ldout + j, a, n);
  }
};

}  // namespace
