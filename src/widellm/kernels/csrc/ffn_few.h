// routed_ffn, routed_in and routed_out for few rows: one parallel region each.
#pragma once
#include "few.h"

namespace {

template <class T, class W> static int64_t ffn_few(const WideFfn &f, WideArena *arena) {
  Scratch s{arena};
  int64_t size = f.inner / f.groups;
  bool routes = f.router.down != nullptr;
  FewInner<T, W> inner{f.act, f.rows, f.hidden, size, f.groups, (const T *)f.x, f.ldx,
                       (const W *)f.gate, f.ldgate, (const W *)f.up, f.ldup, f.gate_scale, f.up_scale,
                       (const T *)f.gate_bias, (const T *)f.up_bias, s.get<T>(f.rows * f.inner)};
  FewOuter<T, W> outer{f.rows, f.hidden, size, f.groups, inner.h, f.inner, (const W *)f.down, f.lddown,
                       f.down_input_major != 0, f.down_scale, (const T *)f.down_bias, nullptr, 0, (T *)f.out, f.ldout,
                       nullptr, nullptr};
  outer.reserve(s);
  FewRouter<T> router{&f.router, f.rows, f.hidden, f.groups, nullptr, nullptr, f.keep_out};
  if (routes) router.reserve(s);
  Queue *queue = s.zeros<Queue>(1);
  Kept *kept = s.get<Kept>(f.run.threads);
  for (int64_t t = 0; s.ok && t < f.run.threads; t++) kept[t].reserve(s, f.groups);
  if (!s.ok) return WIDELLM_NO_MEMORY;

  parallel(f.run.threads, [&](const Team &team) {
    const uint8_t *keep = f.keep;
    int64_t ldkeep = f.ldkeep;
    if (routes) {
      Range part = share(f.rows, 1, team);
      for (int64_t m = part.begin; m < part.end; m++) router.widen(inner.x + m * f.ldx, m);
      team.barrier();
      router.down(share(f.router.rank, 4, team));
      team.barrier();
      router.decide(team);
      keep = f.keep_out;
      ldkeep = f.groups;
    }
    Kept &mine = kept[team.thread];
    mine.build(keep, ldkeep, f.rows, f.groups);
    inner.run(mine, *queue);
    team.barrier();
    outer.run(mine, team);
  });
  return WIDELLM_OK;
}

template <class T, class W> static int64_t in_few(const WideIn &f, WideArena *arena) {
  Scratch s{arena};
  int64_t size = f.outputs / f.groups, pieces = ceil_div(size, kUnit);
  Queue *queue = s.zeros<Queue>(1);
  Kept kept;
  kept.reserve(s, f.groups);
  if (!s.ok) return WIDELLM_NO_MEMORY;
  kept.build(f.keep, f.ldkeep, f.rows, f.groups);
  const T *x = (const T *)f.x, *bias = (const T *)f.bias;
  const W *w = (const W *)f.w;
  T *out = (T *)f.out;

  parallel(f.run.threads, [&](const Team &) {
    for (int64_t u = queue->take(), after; u < f.groups * pieces; u = after) {
      after = queue->take();
      const W *next = after < f.groups * pieces ? w + (after / pieces * size + after % pieces * kUnit) * f.ldw : nullptr;
      int64_t g = u / pieces, i = u % pieces * kUnit, n = g * size + i, count = imin(kUnit, size - i);
      Picked rows(kept.rows[g]);
      const T *xs[kFewRows];
      T *ys[kFewRows];
      for (int64_t c = 0; c < rows.count; c++) {
        xs[c] = x + rows.at[c] * f.ldx;
        ys[c] = out + rows.at[c] * f.ldout + n;
      }
      for (int64_t m = 0; m < f.rows; m++)
        if (!(kept.rows[g] >> m & 1)) memset((void *)(out + m * f.ldout + n), 0, (size_t)count * sizeof(T));
      if (rows.count)
        linear_unit(w + n * f.ldw, f.ldw, f.scale ? f.scale + n : nullptr, bias ? bias + n : nullptr, count, xs,
                    rows.count, f.inputs, ys, next);
    }
  });
  return WIDELLM_OK;
}

template <class T, class W> static int64_t out_few(const WideOut &f, WideArena *arena) {
  Scratch s{arena};
  int64_t size = f.inputs / f.groups;
  FewOuter<T, W> outer{f.rows, f.outputs, size, f.groups, (const T *)f.x, f.ldx, (const W *)f.w, f.ldw,
                       f.input_major != 0, f.scale, (const T *)f.bias, nullptr, 0, (T *)f.out, f.ldout, nullptr,
                       nullptr};
  outer.reserve(s);
  Kept kept;
  kept.reserve(s, f.groups);
  if (!s.ok) return WIDELLM_NO_MEMORY;
  kept.build(f.keep, f.ldkeep, f.rows, f.groups);
  parallel(f.run.threads, [&](const Team &team) { outer.run(kept, team); });
  return WIDELLM_OK;
}

}  // namespace
