// routed_ffn, routed_in and routed_out for many rows: one parallel region per block of rows.
#pragma once
#include "many_out.h"

namespace {

template <class T, class W> static int64_t ffn_many(const WideFfn &f, WideArena *arena) {
  typedef typename Packed<T>::A A;
  Scratch s{arena};
  int64_t size = f.inner / f.groups, units = ceil_div(size, Packed<T>::per), block = imin(kRowBlock, f.rows);
  int64_t threads = f.run.threads, panel_floats = imax(kInputBlock * kNr, ManyOut<T, W>::scratch(units));
  int64_t router_floats = kFewRows * (f.hidden + f.router.rank);
  bool routes = f.router.down != nullptr;
  Plan plan;
  plan.reserve(s, block, f.groups);
  Batches batches;
  batches.reserve(s, f.groups, block, units * Packed<T>::per, kBatchBytes / (int64_t)sizeof(A));
  LeftOperand<T> left;
  left.reserve(s, (const T *)f.x, f.ldx, f.hidden, block);
  A *h = s.get<A>(block * batches.ld);
  RowSets sets;
  sets.reserve(s, block, f.groups, units);
  Queue *queues = s.get<Queue>(3 * f.groups + 3);
  float *panels = s.get<float>(threads * panel_floats), *sums = s.get<float>(threads * block * kNr);
  float *total = s.get<float>(ceil_div(f.hidden, kNr) * block * kNr);
  float *wide = routes ? s.get<float>(threads * router_floats) : nullptr;
  if (!s.ok) return WIDELLM_NO_MEMORY;

  for (int64_t row0 = 0; row0 < f.rows; row0 += block) {
    int64_t rows = imin(block, f.rows - row0), ldkeep = routes ? f.groups : f.ldkeep;
    const uint8_t *keep = routes ? f.keep_out : f.keep;
    if (routes) {
      parallel(threads, [&](const Team &team) {
        float *mine = wide + team.thread * router_floats;
        route_rows(f.router, (const T *)f.x + row0 * f.ldx, f.ldx, f.hidden, f.groups, share(rows, 1, team), mine,
                   mine + kFewRows * f.hidden, f.keep_out + row0 * f.groups);
      });
    }
    plan.build(keep ? keep + row0 * ldkeep : nullptr, ldkeep, rows, f.groups);
    batches.build(plan, f.groups);
    memset(queues, 0, (size_t)(3 * batches.count) * sizeof(Queue));
    ManyIn<T, W> in{f.hidden, size, left.ld, left.at(row0), (const W *)f.gate, f.ldgate, (const W *)f.up, f.ldup,
                    f.gate_scale, f.up_scale, (const T *)f.gate_bias, (const T *)f.up_bias};
    ManyOut<T, W> out{rows, f.hidden, size, units, (const W *)f.down, f.lddown, f.down_input_major != 0, f.down_scale,
                      (const T *)f.down_bias, (T *)f.out + row0 * f.ldout, f.ldout, total};

    parallel(threads, [&](const Team &team) {
      float *panel = panels + team.thread * panel_floats, *own = sums + team.thread * block * kNr;
      left.fill(row0, share(rows, 1, team));
      team.barrier();
      for (int64_t b = 0; b < batches.count; b++) {
        const int64_t first = batches.begin[b], n_groups = batches.begin[b + 1] - first;
        const int64_t *groups = batches.groups + first, *offset = batches.offset + first;
        Queue *queue = queues + 3 * b;
        int64_t pieces = n_groups * in.panels();
        for (int64_t u = queue[0].take(), next; u < pieces; u = next) {
          next = queue[0].take();
          int64_t i = u / in.panels(), g = groups[i], at = in.column(u), n = imin(in.width(), size - at);
          const int32_t *ids = plan.ids + plan.start[g];
          A *to = h + offset[i] + at;
          in.run(g * size + at, n, next < pieces ? groups[next / in.panels()] * size + in.column(next) : -1, ids,
                 plan.count(g), panel, own, [&](int64_t row, int64_t j, int64_t lanes, vf gate, vf up) {
                   // Where the product runs in float32, the activations still get the model's dtype.
                   vf y = rounded<T>(gated<T>(gate, up, f.gate != nullptr, f.act));
                   storen(to + ids[row] * batches.ld + j, y, lanes);
                 });
          int64_t padding = at + n == size ? batches.row_size - size : 0;
          for (int64_t row = 0; padding && row < plan.count(g); row++)
            memset((void *)(to + n + ids[row] * batches.ld), 0, (size_t)padding * sizeof(A));
        }
        for (int64_t u = queue[1].take(); u < RowSets::blocks(n_groups); u = queue[1].take())
          sets.build(u, rows, groups, n_groups, keep ? keep + row0 * ldkeep : nullptr, ldkeep);
        team.barrier();
        out.run(sets, groups, n_groups, h, offset, batches.ld, b == 0, b + 1 == batches.count, queue[2], team,
                panel);
        team.barrier();
      }
    });
  }
  return WIDELLM_OK;
}

template <class T, class W> static int64_t in_many(const WideIn &f, WideArena *arena) {
  Scratch s{arena};
  int64_t size = f.outputs / f.groups, block = imin(kRowBlock, f.rows), threads = f.run.threads;
  Plan plan;
  plan.reserve(s, block, f.groups);
  Batches batches;
  batches.reserve(s, f.groups, block, 1, block * f.groups);  // one batch
  LeftOperand<T> left;
  left.reserve(s, (const T *)f.x, f.ldx, f.inputs, block);
  float *panels = s.get<float>(threads * kInputBlock * kNr), *sums = s.get<float>(threads * block * kNr);
  if (!s.ok) return WIDELLM_NO_MEMORY;

  for (int64_t row0 = 0; row0 < f.rows; row0 += block) {
    int64_t rows = imin(block, f.rows - row0);
    const uint8_t *keep = f.keep ? f.keep + row0 * f.ldkeep : nullptr;
    plan.build(keep, f.ldkeep, rows, f.groups);
    batches.build(plan, f.groups);
    ManyIn<T, W> in{f.inputs, size, left.ld, left.at(row0), nullptr, 0, (const W *)f.w, f.ldw, nullptr, f.scale,
                    nullptr, (const T *)f.bias};
    T *out = (T *)f.out + row0 * f.ldout;
    Queue queue{0};
    parallel(threads, [&](const Team &team) {
      Range part = share(rows, 1, team);
      left.fill(row0, part);
      for (int64_t m = part.begin; keep && m < part.end; m++)
        for (int64_t g = 0; g < f.groups; g++)
          if (!keep[m * f.ldkeep + g]) memset((void *)(out + m * f.ldout + g * size), 0, (size_t)size * sizeof(T));
      team.barrier();
      float *panel = panels + team.thread * kInputBlock * kNr, *own = sums + team.thread * block * kNr;
      int64_t pieces = batches.begin[1] * in.panels();
      for (int64_t u = queue.take(), next; u < pieces; u = next) {
        next = queue.take();
        int64_t g = batches.groups[u / in.panels()], at = in.column(u), column = g * size + at;
        const int32_t *ids = plan.ids + plan.start[g];
        in.run(column, imin(kNr, size - at),
               next < pieces ? batches.groups[next / in.panels()] * size + in.column(next) : -1, ids, plan.count(g),
               panel, own, [&](int64_t row, int64_t j, int64_t lanes, vf, vf y) {
                 storen(out + ids[row] * f.ldout + column + j, y, lanes);
               });
      }
    });
  }
  return WIDELLM_OK;
}

template <class T, class W> static int64_t out_many(const WideOut &f, WideArena *arena) {
  typedef typename Packed<T>::A A;
  Scratch s{arena};
  int64_t size = f.inputs / f.groups, units = ceil_div(size, Packed<T>::per), block = imin(kRowBlock, f.rows);
  int64_t threads = f.run.threads;
  // A group's inputs are read in place, or from a copy in the kernel's own type in which each group fills whole units.
  const bool in_place = sizeof(A) == sizeof(T) && size % Packed<T>::per == 0;
  const int64_t padded = in_place ? size : units * Packed<T>::per, ld = in_place ? f.ldx : f.groups * padded;
  A *copy = in_place ? nullptr : s.get<A>(block * ld);
  RowSets sets;
  sets.reserve(s, block, f.groups, units);
  int64_t *groups = s.get<int64_t>(f.groups), *at = s.get<int64_t>(f.groups);
  uint8_t *any = s.get<uint8_t>(f.groups);
  float *panels = s.get<float>(threads * ManyOut<T, W>::scratch(units));
  float *total = s.get<float>(ceil_div(f.outputs, kNr) * block * kNr);
  if (!s.ok) return WIDELLM_NO_MEMORY;

  for (int64_t row0 = 0; row0 < f.rows; row0 += block) {
    int64_t rows = imin(block, f.rows - row0), n_groups = 0;
    const uint8_t *keep = f.keep ? f.keep + row0 * f.ldkeep : nullptr;
    memset(any, keep == nullptr, (size_t)f.groups);
    for (int64_t m = 0; keep && m < rows; m++)
      for (int64_t g = 0; g < f.groups; g++) any[g] |= keep[m * f.ldkeep + g];
    for (int64_t g = 0; g < f.groups; g++) {
      if (!any[g]) continue;
      groups[n_groups] = g;
      at[n_groups++] = g * padded;
    }
    const T *x = (const T *)f.x + row0 * f.ldx;
    const A *h = in_place ? reinterpret_cast<const A *>(x) : copy;
    ManyOut<T, W> out{rows, f.outputs, size, units, (const W *)f.w, f.ldw, f.input_major != 0, f.scale,
                      (const T *)f.bias, (T *)f.out + row0 * f.ldout, f.ldout, total};
    Queue queue[2] = {};
    parallel(threads, [&](const Team &team) {
      Range part = share(rows, 1, team);
      for (int64_t m = part.begin; copy && m < part.end; m++)
        for (int64_t g = 0; g < f.groups; g++)
          if (!keep || keep[m * f.ldkeep + g]) widen_row<T>(x + m * f.ldx + g * size, size, copy + m * ld + g * padded);
      for (int64_t u = queue[0].take(); u < RowSets::blocks(n_groups); u = queue[0].take())
        sets.build(u, rows, groups, n_groups, keep, f.ldkeep);
      team.barrier();
      out.run(sets, groups, n_groups, h, at, ld, true, true, queue[1], team,
              panels + team.thread * ManyOut<T, W>::scratch(units));
    });
  }
  return WIDELLM_OK;
}

}  // namespace
