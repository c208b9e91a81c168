// routed_ffn, routed_in and routed_out for many rows: one parallel region per block of rows.
#pragma once
#include "many.h"

namespace {

template <class T> static int64_t ffn_many(const WideFfn &f, WideArena *arena) {
  typedef typename Packed<T>::A A;
  constexpr int per = Packed<T>::per;
  Scratch s{arena};
  int64_t size = f.inner / f.groups, units = ceil_div(size, per), block = imin(kRowBlock, f.rows);
  int64_t hidden_limit = imax(kBatchBytes / (int64_t)sizeof(A), block * units * per);
  int64_t threads = f.run.threads, panel_floats = imax(kInputBlock, size + 1) * kNr;
  bool routes = f.router.down != nullptr;
  Plan plan;
  plan.reserve(s, block, f.groups);
  LeftOperand<T> left;
  left.reserve(s, (const T *)f.x, f.ldx, f.hidden, block);
  A *h = s.get<A>(hidden_limit);
  int64_t *offset = s.get<int64_t>(f.groups + 1), *batch = s.get<int64_t>(f.groups + 1);
  Queue *queues = s.get<Queue>(2 * f.groups);
  float *panels = s.get<float>(threads * panel_floats), *sums = s.get<float>(threads * block * kNr);
  float *total = s.get<float>(ceil_div(f.hidden, kNr) * block * kNr);
  float *wide = routes ? s.get<float>(threads * kFewRows * (f.hidden + f.router.rank)) : nullptr;
  if (!s.ok) return WIDELLM_NO_MEMORY;

  for (int64_t row0 = 0; row0 < f.rows; row0 += block) {
    int64_t rows = imin(block, f.rows - row0);
    if (routes) {
      parallel(threads, [&](const Team &team) {
        float *mine = wide + team.thread * kFewRows * (f.hidden + f.router.rank);
        route_rows(f.router, (const T *)f.x + row0 * f.ldx, f.ldx, f.hidden, f.groups, share(rows, 1, team),
                   mine, mine + kFewRows * f.hidden, f.keep_out + row0 * f.groups);
      });
      plan.build(f.keep_out + row0 * f.groups, f.groups, rows, f.groups);
    } else {
      plan.build(f.keep ? f.keep + row0 * f.ldkeep : nullptr, f.ldkeep, rows, f.groups);
    }
    // Groups go in batches whose hidden activations fit the limit: [rows that keep g, units * per] each.
    int64_t batches = 0, used = 0;
    for (int64_t g = 0; g < f.groups; g++) {
      int64_t need = plan.count(g) * units * per;
      if (g == 0 || used + need > hidden_limit) {
        batch[batches++] = g;
        used = 0;
      }
      offset[g] = used;
      used += need;
    }
    batch[batches] = f.groups;
    memset(queues, 0, (size_t)(2 * batches) * sizeof(Queue));
    ManyIn<T> in{f.hidden, size, left.ld, left.at(row0), (const T *)f.gate, f.ldgate, (const T *)f.up, f.ldup,
                 (const T *)f.gate_bias, (const T *)f.up_bias};
    ManyOut<T> out{rows, f.hidden, size, units, (const T *)f.down, f.lddown, f.down_input_major != 0,
                   (const T *)f.down_bias, (T *)f.out + row0 * f.ldout, f.ldout, total};

    parallel(threads, [&](const Team &team) {
      float *panel = panels + team.thread * panel_floats, *own = sums + team.thread * block * kNr;
      left.fill(row0, share(rows, 1, team));
      team.barrier();
      for (int64_t b = 0; b < batches; b++) {
        Queue &first = queues[2 * b], &second = queues[2 * b + 1];
        int64_t units_of_work = (batch[b + 1] - batch[b]) * in.panels();
        for (int64_t u = first.take(); u < units_of_work; u = first.take()) {
          int64_t g = batch[b] + u / in.panels(), i = u % in.panels() * in.width(), n = imin(in.width(), size - i);
          if (!plan.count(g)) continue;
          A *to = h + offset[g];
          bool pad = i + n == size && size < units * per;
          in.run(g * size + i, n, plan.ids + plan.start[g], plan.count(g), panel, own,
                 [&](int64_t row, int64_t at, int64_t lanes, vf gate, vf up) {
                   // rounded<T>: on CPUs that multiply in float32 the hidden values still get the model's dtype
                   storen(to + row * units * per + i + at, rounded<T>(gated<T>(gate, up, f.gate != nullptr, f.act)),
                          lanes);
                 });
          for (int64_t row = 0; pad && row < plan.count(g); row++)
            memset((void *)(to + row * units * per + size), 0, sizeof(A));
        }
        team.barrier();
        for (int64_t p = second.take(); p < out.panels(); p = second.take()) {
          if (b == 0) out.clear(p);
          for (int64_t g = batch[b]; g < batch[b + 1]; g++)
            out.add(p, g, h + offset[g], plan.ids + plan.start[g], plan.count(g), panel);
          if (b + 1 == batches) out.finish(p);
        }
        team.barrier();
      }
    });
  }
  return WIDELLM_OK;
}

template <class T> static int64_t in_many(const WideIn &f, WideArena *arena) {
  Scratch s{arena};
  int64_t size = f.outputs / f.groups, block = imin(kRowBlock, f.rows), threads = f.run.threads;
  Plan plan;
  plan.reserve(s, block, f.groups);
  LeftOperand<T> left;
  left.reserve(s, (const T *)f.x, f.ldx, f.inputs, block);
  float *panels = s.get<float>(threads * kInputBlock * kNr), *sums = s.get<float>(threads * block * kNr);
  if (!s.ok) return WIDELLM_NO_MEMORY;

  for (int64_t row0 = 0; row0 < f.rows; row0 += block) {
    int64_t rows = imin(block, f.rows - row0);
    const uint8_t *keep = f.keep ? f.keep + row0 * f.ldkeep : nullptr;
    plan.build(keep, f.ldkeep, rows, f.groups);
    ManyIn<T> in{f.inputs, size, left.ld, left.at(row0), nullptr, 0, (const T *)f.w, f.ldw, nullptr, (const T *)f.bias};
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
      for (int64_t u = queue.take(); u < f.groups * in.panels(); u = queue.take()) {
        int64_t g = u / in.panels(), i = u % in.panels() * kNr, column = g * size + i;
        const int32_t *ids = plan.ids + plan.start[g];
        if (!plan.count(g)) continue;
        in.run(column, imin(kNr, size - i), ids, plan.count(g), panel, own,
               [&](int64_t row, int64_t at, int64_t lanes, vf, vf y) {
                 storen(out + ids[row] * f.ldout + column + at, y, lanes);
               });
      }
    });
  }
  return WIDELLM_OK;
}

template <class T> static int64_t out_many(const WideOut &f, WideArena *arena) {
  typedef typename Packed<T>::A A;
  constexpr int per = Packed<T>::per;
  Scratch s{arena};
  int64_t size = f.inputs / f.groups, units = ceil_div(size, per), block = imin(kRowBlock, f.rows);
  int64_t threads = f.run.threads, row_units = units * per;
  Plan plan;
  plan.reserve(s, block, f.groups);
  A *h = s.get<A>(block * f.groups * row_units);
  float *panels = s.get<float>(threads * (size + 1) * kNr), *total = s.get<float>(ceil_div(f.outputs, kNr) * block * kNr);
  if (!s.ok) return WIDELLM_NO_MEMORY;

  for (int64_t row0 = 0; row0 < f.rows; row0 += block) {
    int64_t rows = imin(block, f.rows - row0);
    plan.build(f.keep ? f.keep + row0 * f.ldkeep : nullptr, f.ldkeep, rows, f.groups);
    const T *x = (const T *)f.x + row0 * f.ldx;
    ManyOut<T> out{rows, f.outputs, size, units, (const T *)f.w, f.ldw, f.input_major != 0, (const T *)f.bias,
                   (T *)f.out + row0 * f.ldout, f.ldout, total};
    Queue gather{0}, queue{0};
    parallel(threads, [&](const Team &team) {
      for (int64_t g = gather.take(); g < f.groups; g = gather.take())
        for (int64_t i = plan.start[g]; i < plan.start[g + 1]; i++)
          widen_row<T>(x + plan.ids[i] * f.ldx + g * size, size, h + i * row_units);
      team.barrier();
      for (int64_t p = queue.take(); p < out.panels(); p = queue.take()) {
        out.clear(p);
        for (int64_t g = 0; g < f.groups; g++)
          out.add(p, g, h + plan.start[g] * row_units, plan.ids + plan.start[g], plan.count(g),
                  panels + team.thread * (size + 1) * kNr);
        out.finish(p);
      }
    });
  }
  return WIDELLM_OK;
}

}  // namespace
