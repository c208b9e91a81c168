// One pre-norm decoder layer for a few rows, in two calls around the cache's own update, or in one (with one parallel
// region: threads that part and meet again cost more than a barrier). Between its pieces values are rounded to the
// model's dtype exactly where transformers' eager code rounds them (after each linear map, each norm and its weight,
// each half of the rotary sum, the activation, the product, each residual sum).
#pragma once
#include "attention_few.h"

namespace {

// out = round(weight * round(x / rms(x))); in place allowed
template <class T> static void rms_norm(const T *x, const T *weight, double eps, int64_t n, T *out) {
  vf squares = {};
  for (int64_t i = 0; i < n; i += kLanes) {
    vf a = loadn(x + i, imin(kLanes, n - i));
    squares += a * a;
  }
  float scale = 1.0f / __builtin_sqrtf(sum(squares) / (float)n + (float)eps);
  for (int64_t i = 0; i < n; i += kLanes) {
    int64_t lanes = imin(kLanes, n - i);
    storen(out + i, rounded<T>(loadn(x + i, lanes) * scale) * loadn(weight + i, lanes), lanes);
  }
}

// x = round(round(x * cos) + round(rotate_half(x) * sin)) over the first n elements of a head, in place
template <class T> static void rotate(T *x, const T *cosine, const T *sine, int64_t n) {
  int64_t half = n / 2;
  for (int64_t i = 0; i < half; i += kLanes) {
    int64_t lanes = imin(kLanes, half - i);
    vf a = loadn(x + i, lanes), b = loadn(x + half + i, lanes);
    vf a2 = rounded<T>(a * loadn(cosine + i, lanes)) - rounded<T>(b * loadn(sine + i, lanes));
    vf b2 = rounded<T>(b * loadn(cosine + half + i, lanes)) + rounded<T>(a * loadn(sine + half + i, lanes));
    storen(x + i, a2, lanes);
    storen(x + half + i, b2, lanes);
  }
}

template <class T, class W> struct Projection {  // x -> heads
  const WideLayer &layer;
  const WideQkv &call;
  const W *w;
  int64_t ldw;
  const float *scale;
  const T *bias;
  int64_t heads;
  T *out;                       // [B, heads, T, d] at these strides
  int64_t batch, token, head;

  int64_t pieces() const { return ceil_div(layer.head_dim, kUnit); }
  const W *rows_at(int64_t h, int64_t piece) const { return w + (h * layer.head_dim + piece * kUnit) * ldw; }
  // next: the weight rows that this thread will want after these, or null
  void unit(int64_t h, int64_t piece, uint32_t bits, const T *x, int64_t ldx, const W *next) const {
    int64_t d = layer.head_dim, i = piece * kUnit, n = h * d + i;
    Picked rows(bits);
    const T *xs[kFewRows];
    T *ys[kFewRows];
    for (int64_t c = 0; c < rows.count; c++) {
      xs[c] = x + rows.at[c] * ldx;
      ys[c] = at(rows.at[c], h) + i;
    }
    linear_unit(w + n * ldw, ldw, scale ? scale + n : nullptr, bias ? bias + n : nullptr, imin(kUnit, d - i), xs,
                rows.count, layer.hidden, ys, next);
  }
  T *at(int64_t m, int64_t h) const { return out + m / call.tokens * batch + m % call.tokens * token + h * head; }
  void finish(int64_t m, int64_t h, const void *norm) const {
    T *x = at(m, h);
    int64_t offset = m / call.tokens * call.rope_batch + m % call.tokens * layer.rotary_dim;
    if (norm) rms_norm(x, (const T *)norm, layer.qk_eps, layer.head_dim, x);
    if (call.cosine) rotate(x, (const T *)call.cosine + offset, (const T *)call.sine + offset, layer.rotary_dim);
  }
};

// What each thread does for q, k and v, once s.ok; l and c must outlive it. cache: where k and v are written, at its
// last positions; null: to c.k and c.v.
template <class T, class W>
static auto qkv_work(const WideLayer &l, const WideQkv &c, const WideRest *cache, Scratch &s) {
  int64_t rows = c.batch * c.tokens;
  bool routes = l.attn_router.down != nullptr;
  T *x = s.get<T>(rows * l.hidden);
  FewRouter<T> router{&l.attn_router, rows, l.hidden, l.attn_groups, nullptr, nullptr, c.keep};
  if (routes) router.reserve(s, l.attn_router.shared && c.tokens == 1);
  Queue *queues = s.zeros<Queue>(2);
  Kept *kept = s.get<Kept>(l.run.threads);
  for (int64_t t = 0; s.ok && t < l.run.threads; t++) kept[t].reserve(s, l.attn_groups);
  if (!routes) memset(c.keep, 1, (size_t)(rows * l.attn_groups));
  int64_t d = l.head_dim, each = c.tokens * d;
  Projection<T, W> q{l, c, (const W *)l.wq, l.ldq, l.q_scale, (const T *)l.bq, l.heads, (T *)c.q,
                     l.heads * each, d, each};
  Projection<T, W> k{l, c, (const W *)l.wk, l.ldk, l.k_scale, (const T *)l.bk, l.kv_heads, (T *)c.k,
                     l.kv_heads * each, d, each};
  Projection<T, W> v{l, c, (const W *)l.wv, l.ldv, l.v_scale, (const T *)l.bv, l.kv_heads, (T *)c.v,
                     l.kv_heads * each, d, each};
  if (cache) {
    int64_t at = cache->keys - c.tokens;
    k.out = (T *)cache->k + at * cache->k_token;
    k.batch = cache->k_batch, k.token = cache->k_token, k.head = cache->k_head;
    v.out = (T *)cache->v + at * cache->v_token;
    v.batch = cache->v_batch, v.token = cache->v_token, v.head = cache->v_head;
  }
  uint32_t all = (uint32_t)((1ull << rows) - 1);
  int64_t pieces = q.pieces(), kv_units = l.kv_heads * pieces, ranks = routes ? ceil_div(l.attn_router.rank, 8) : 0;
  int64_t heads_per_group = l.heads / l.attn_groups;

  return [=, &l, &c](const Team &team) {
    Range part = share(rows, 1, team);
    for (int64_t m = part.begin; m < part.end; m++) {
      rms_norm((const T *)c.x + m * c.ldx, (const T *)l.attn_norm, l.attn_eps, l.hidden, x + m * l.hidden);
      if (routes) router.widen(l.reads_stream ? (const T *)c.x + m * c.ldx : x + m * l.hidden, m);
    }
    team.barrier();
    // k and v are always whole, so they fill the time in which the router decides.
    for (int64_t u = queues[0].take(), after; u < ranks + 2 * kv_units; u = after) {
      after = queues[0].take();
      if (u < ranks) {
        router.down({u * 8, imin(u * 8 + 8, l.attn_router.rank)});
        continue;
      }
      int64_t i = (u - ranks) % kv_units, j = (after - ranks) % kv_units;
      const W *next = after < ranks + 2 * kv_units ? (after - ranks < kv_units ? k : v).rows_at(j / pieces, j % pieces)
                                                   : nullptr;
      (u - ranks < kv_units ? k : v).unit(i / pieces, i % pieces, all, x, l.hidden, next);
    }
    if (routes) {
      team.barrier();
      router.decide(team);
    }
    Kept &mine = kept[team.thread];
    mine.build(c.keep, l.attn_groups, rows, l.attn_groups);
    int64_t per_group = heads_per_group * pieces;
    for (int64_t u = queues[1].take(), after; u < mine.count * per_group; u = after) {
      after = queues[1].take();
      int64_t g = mine.groups[u / per_group], i = u % per_group, j = after % per_group;
      const W *next = nullptr;
      if (after < mine.count * per_group)
        next = q.rows_at(mine.groups[after / per_group] * heads_per_group + j / pieces, j % pieces);
      q.unit(g * heads_per_group + i / pieces, i % pieces, mine.rows[g], x, l.hidden, next);
    }
    team.barrier();
    part = share(rows * (l.heads + l.kv_heads), 1, team);
    for (int64_t i = part.begin; i < part.end; i++) {
      int64_t m = i / (l.heads + l.kv_heads), h = i % (l.heads + l.kv_heads);
      if (h >= l.heads) {
        k.finish(m, h - l.heads, l.k_norm);
      } else if (mine.rows[h / heads_per_group] >> m & 1) {
        q.finish(m, h, l.q_norm);
      } else {
        memset((void *)q.at(m, h), 0, (size_t)l.head_dim * sizeof(T));
      }
    }
  };
}

template <class T, class W> static int64_t layer_qkv(const WideLayer &l, const WideQkv &c, WideArena *arena) {
  Scratch s{arena};
  auto work = qkv_work<T, W>(l, c, nullptr, s);
  if (!s.ok) return WIDELLM_NO_MEMORY;
  parallel(l.run.threads, work);
  return WIDELLM_OK;
}

// What each thread does after that, likewise
template <class T, class W> static auto rest_work(const WideLayer &l, const WideRest &c, Scratch &s) {
  int64_t rows = c.batch * c.tokens, inner_dim = l.heads * l.head_dim, head = l.head_dim;
  bool whole = l.ffn_router.down == nullptr, follows = !whole && l.one_decision, routes = !whole && !follows;
  T *mixed = s.get<T>(rows * inner_dim), *x = s.get<T>(rows * l.hidden);
  T *middle = c.attention_only ? (T *)c.out : s.get<T>(rows * l.hidden);
  WideAttention a{l.run, c.batch, c.tokens, c.keys, l.heads, l.kv_heads, head, l.attn_groups,
                  c.q, l.heads * c.tokens * head, head, c.tokens * head,
                  c.k, c.k_batch, c.k_token, c.k_head, c.v, c.v_batch, c.v_token, c.v_head,
                  mixed, c.tokens * inner_dim, inner_dim, head, c.keep, l.attn_groups,
                  c.mask, c.mask_kind, c.mask_batch, c.mask_query, c.start, c.causal, c.window, l.scale};
  FewAttention<T> attention{a, 0, 0, 0, nullptr, nullptr, nullptr};
  attention.reserve(s);
  FewOuter<T, W> o{rows, l.hidden, inner_dim / l.attn_groups, l.attn_groups, mixed, inner_dim, (const W *)l.wo, l.ldo,
                   l.o_input_major != 0, l.o_scale, (const T *)l.bo, (const T *)c.x, c.ldx, middle, l.hidden, nullptr,
                   nullptr};
  o.reserve(s);
  FewRouter<T> router{&l.ffn_router, rows, l.hidden, l.ffn_groups, nullptr, nullptr, c.ffn_keep};
  if (routes) router.reserve(s, l.ffn_router.shared && c.tokens == 1);
  int64_t size = l.inner / l.ffn_groups;
  FewInner<T, W> inner{l.act, rows, l.hidden, size, l.ffn_groups, x, l.hidden, (const W *)l.gate, l.ldgate,
                       (const W *)l.up, l.ldup, l.gate_scale, l.up_scale, (const T *)l.gate_bias,
                       (const T *)l.up_bias, s.get<T>(rows * l.inner)};
  FewOuter<T, W> outer{rows, l.hidden, size, l.ffn_groups, inner.h, l.inner, (const W *)l.down, l.lddown,
                       l.down_input_major != 0, l.down_scale, (const T *)l.down_bias, middle, l.hidden, (T *)c.out,
                       l.hidden, nullptr, nullptr};
  outer.reserve(s);
  Queue *queues = s.zeros<Queue>(2);
  Kept *kept = s.get<Kept>(l.run.threads);
  for (int64_t t = 0; s.ok && t < l.run.threads; t++) kept[t].reserve(s, imax(l.attn_groups, l.ffn_groups));
  if (whole && !c.attention_only) memset(c.ffn_keep, 1, (size_t)(rows * l.ffn_groups));

  return [=, &l, &c](const Team &team) {
    Kept &mine = kept[team.thread];
    attention.run(queues[0]);
    team.barrier();
    attention.merge(share(rows * l.heads, 1, team), false);
    mine.build(c.keep, l.attn_groups, rows, l.attn_groups);
    team.barrier();
    o.run(mine, team);
    if (c.attention_only) return;
    team.barrier();
    Range part = share(rows, 1, team);
    for (int64_t m = part.begin; m < part.end; m++) {
      rms_norm(middle + m * l.hidden, (const T *)l.ffn_norm, l.ffn_eps, l.hidden, x + m * l.hidden);
      if (routes) router.widen((l.reads_stream ? middle : x) + m * l.hidden, m);
      if (follows) memcpy(c.ffn_keep + m * l.ffn_groups, c.keep + m * l.ffn_groups, (size_t)l.ffn_groups);
    }
    team.barrier();
    if (routes) {
      router.down(share(l.ffn_router.rank, 4, team));
      team.barrier();
      router.decide(team);
    }
    mine.build(c.ffn_keep, l.ffn_groups, rows, l.ffn_groups);
    inner.run(mine, queues[1]);
    team.barrier();
    outer.run(mine, team);
  };
}

template <class T, class W> static int64_t layer_rest(const WideLayer &l, const WideRest &c, WideArena *arena) {
  Scratch s{arena};
  auto work = rest_work<T, W>(l, c, s);
  if (!s.ok) return WIDELLM_NO_MEMORY;
  parallel(l.run.threads, work);
  return WIDELLM_OK;
}

// Both calls in one, for a cache that has room: the new keys and values become its last `tokens` positions.
template <class T, class W>
static int64_t layer_step(const WideLayer &l, WideQkv qkv, WideRest rest, WideArena *arena) {
  Scratch s{arena};
  T *q = s.get<T>(qkv.batch * qkv.tokens * l.heads * l.head_dim);
  qkv.q = q;
  rest.q = q;
  auto first = qkv_work<T, W>(l, qkv, &rest, s);
  auto second = rest_work<T, W>(l, rest, s);
  if (!s.ok) return WIDELLM_NO_MEMORY;
  parallel(l.run.threads, [&](const Team &team) {
    first(team);
    team.barrier();
    second(team);
  });
  return WIDELLM_OK;
}

}  // namespace
