// Attention of many new tokens (prefill), in the manner of flash attention: for a block of query tokens, the kept
// (token, head) pairs that share a KV head walk together over blocks of keys, with an online softmax in float32. Keys
// and values are packed once per sequence. Dropped pairs take no part; their outputs are zeros.
#pragma once
#include "attention_few.h"
#include "gemm.h"

namespace {

constexpr int64_t kFewQueries = 8;  // up to here each key is better read where it lies
constexpr int64_t kPairs = 192;     // (token, head) pairs that walk together, about

template <class T> struct ManyAttention {
  typedef typename Packed<T>::A A;
  static constexpr int per = Packed<T>::per;
  WideAttention a;
  int64_t shared, tokens, blocks, units, width, q_width, key_floats, value_floats;
  float *keys, *values;  // one sequence: [K, blocks, key_floats], [K, blocks, value_floats]
  float *scores, *y;     // per thread: [pairs, kKeyBlock], [pairs, width]
  A *p, *q;              // per thread: [pairs, kKeyBlock], [pairs, q_width] (unused where q can be read in place)

  void reserve(Scratch &s) {
    shared = a.heads / a.kv_heads;
    tokens = imax(kPairs / shared, 8);
    blocks = ceil_div(a.keys, kKeyBlock);
    units = ceil_div(a.head_dim, per);
    width = round_up(a.head_dim, kNr);
    q_width = units * per;
    key_floats = units * kKeyBlock;
    value_floats = kKeyBlock / per * width;
    keys = s.get<float>(a.kv_heads * blocks * key_floats);
    values = s.get<float>(a.kv_heads * blocks * value_floats);
    int64_t pairs = tokens * shared * a.run.threads;
    scores = s.get<float>(pairs * kKeyBlock);
    y = s.get<float>(pairs * width);
    p = s.get<A>(pairs * kKeyBlock);
    q = in_place() ? nullptr : s.get<A>(pairs * q_width);
  }
  bool in_place() const { return sizeof(A) == sizeof(T) && a.head_dim % per == 0; }

  void pack(int64_t b, Queue &queue) const {
    for (int64_t u = queue.take(); u < a.kv_heads * blocks; u = queue.take()) {
      int64_t kv = u / blocks, j = u % blocks * kKeyBlock, n = imin(kKeyBlock, a.keys - j);
      const T *k = (const T *)a.k + b * a.k_batch + j * a.k_token + kv * a.k_head;
      const T *v = (const T *)a.v + b * a.v_batch + j * a.v_token + kv * a.v_head;
      for (int64_t i = 0; i < kKeyBlock; i += kLanes) {
        int64_t some = imin(imax(n - i, 0), kLanes);
        pack_rows<T>(some ? k + i * a.k_token : k, a.k_token, some, a.head_dim,
                     keys + u * key_floats + i / kNr * kNr * units + i % kNr);
      }
      Columns<T, T>::pack(v, a.v_token, a.head_dim, n, values + u * value_floats, kNr * (kKeyBlock / per));
    }
  }

  void run(int64_t b, Queue &queue, int64_t thread) const {
    int64_t query_blocks = ceil_div(a.queries, tokens);
    for (int64_t u = queue.take(); u < query_blocks * a.kv_heads; u = queue.take()) {
      int64_t block = query_blocks - 1 - u / a.kv_heads;  // the longest first
      walk(b, u % a.kv_heads, block * tokens, imin((block + 1) * tokens, a.queries), thread);
    }
  }

  struct Query { int32_t token, head; float best, total; };

  void walk(int64_t b, int64_t kv, int64_t t0, int64_t t1, int64_t thread) const {
    Query pairs[kPairs * 8];
    const A *qs[kPairs * 8];
    int64_t n = 0, base = thread * tokens * shared;
    for (int64_t t = t0; t < t1; t++)
      for (int64_t h = kv * shared; h < (kv + 1) * shared; h++) {
        if (!is_kept(a, b, t, h)) {
          memset((void *)output(b, t, h), 0, (size_t)a.head_dim * sizeof(T));
          continue;
        }
        const T *from = (const T *)a.q + b * a.q_batch + t * a.q_token + h * a.q_head;
        qs[n] = reinterpret_cast<const A *>(from);
        if (!in_place()) {
          widen_row<T>(from, a.head_dim, q + (base + n) * q_width);
          qs[n] = q + (base + n) * q_width;
        }
        memset(y + (base + n) * width, 0, (size_t)width * sizeof(float));
        pairs[n++] = {(int32_t)t, (int32_t)h, kMinusInf, 0.0f};
      }
    if (!n) return;
    // Tokens ascend, so the pairs that see a block of keys are a range of them.
    int64_t end = visible(a, b, pairs[n - 1].token).last, start = visible(a, b, pairs[0].token).first;
    for (int64_t j = start / kKeyBlock * kKeyBlock; j < imin(end, a.keys); j += kKeyBlock) {
      int64_t count = imin(kKeyBlock, a.keys - j), lo = 0, hi = n;
      while (lo < n && visible(a, b, pairs[lo].token).last <= j) lo++;
      while (hi > lo && visible(a, b, pairs[hi - 1].token).first >= j + count) hi--;
      while (lo < hi && hidden_from(a, b, pairs[lo].token, j, count)) lo++;
      while (hi > lo && hidden_from(a, b, pairs[hi - 1].token, j, count)) hi--;
      attend(b, kv, j, count, pairs, qs, lo, hi, base);
    }
    for (int64_t i = 0; i < n; i++) {
      float inverse = pairs[i].total > 0.0f ? 1.0f / pairs[i].total : 0.0f;
      T *out = output(b, pairs[i].token, pairs[i].head);
      for (int64_t c = 0; c < a.head_dim; c += kLanes)
        storen(out + c, load(y + (base + i) * width + c) * inverse, imin(kLanes, a.head_dim - c));
    }
  }

  void attend(int64_t b, int64_t kv, int64_t j, int64_t count, Query *pairs, const A *const *qs, int64_t lo,
              int64_t hi, int64_t base) const {
    int64_t block = kv * blocks + j / kKeyBlock;
    const float *key_panels = keys + block * key_floats, *value_panels = values + block * value_floats;
    float *c[kMr];
    const A *ps[kMr];
    for (int64_t i = lo; i < hi; i += kMr) {
      int64_t some = imin(kMr, hi - i);
      for (int64_t panel = 0; panel < kKeyBlock; panel += kNr) {
        for (int64_t r = 0; r < some; r++) c[r] = scores + (base + i + r) * kKeyBlock + panel;
        tile_of(some, qs + i, {1, {key_panels + panel * units}, {0}}, units, c, true);
      }
      for (int64_t r = 0; r < some; r++) {
        Query &query = pairs[i + r];
        int64_t at = base + i + r;
        float best = mask_scores(a, b, query.token, j, count, scores + at * kKeyBlock);
        softmax_step(scores + at * kKeyBlock, count, best, query.best, query.total, p + at * kKeyBlock,
                     y + at * width, width);
      }
      for (int64_t panel = 0; panel < width; panel += kNr) {
        for (int64_t r = 0; r < some; r++) {
          ps[r] = p + (base + i + r) * kKeyBlock;
          c[r] = y + (base + i + r) * width + panel;
        }
        tile_of(some, ps, {1, {value_panels + panel * (kKeyBlock / per)}, {0}}, ceil_div(count, per), c, false);
      }
    }
  }

  T *output(int64_t b, int64_t t, int64_t h) const {
    return (T *)a.out + b * a.out_batch + t * a.out_token + h * a.out_head;
  }
};

template <class T> static int64_t attention_many(const WideAttention &a, WideArena *arena) {
  Scratch s{arena};
  ManyAttention<T> attention{};
  attention.a = a;
  attention.reserve(s);
  Queue *queues = s.zeros<Queue>(2 * a.batch);
  if (!s.ok) return WIDELLM_NO_MEMORY;
  parallel(a.run.threads, [&](const Team &team) {
    for (int64_t b = 0; b < a.batch; b++) {
      attention.pack(b, queues[2 * b]);
      team.barrier();
      attention.run(b, queues[2 * b + 1], team.thread);
      team.barrier();
    }
  });
  return WIDELLM_OK;
}

}  // namespace
