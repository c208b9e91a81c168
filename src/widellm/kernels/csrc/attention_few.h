// Attention of a few new tokens over a long cache. The work is cut into (sequence, KV head, span of keys); the kept
// query heads that share a KV head read its span together, and spans nobody keeps are not read. Each span leaves a
// partial result (online softmax in float32); spans are cut by the number of keys alone and merged in order, so a
// row's result depends neither on its batch mates nor on the number of threads.
#pragma once
#include "few.h"

namespace {

constexpr int64_t kKeyBlock = 64;
constexpr int64_t kQueryTile = 16;
constexpr float kMinusInf = -__builtin_inff();

struct Visible { int64_t first, last; };  // [first, last)

static inline Visible visible(const WideAttention &a, int64_t b, int64_t t) {
  int64_t position = a.keys - a.queries + t;
  Visible v = {a.start ? a.start[b] : 0, a.causal ? position + 1 : a.keys};
  if (a.window > 0) v.first = imax(v.first, position - a.window + 1);
  v.first = imax(v.first, 0);
  return v;
}

static inline bool is_kept(const WideAttention &a, int64_t b, int64_t t, int64_t h) {
  return !a.keep || a.keep[(b * a.queries + t) * a.ldkeep + h / (a.heads / a.groups)];
}

// Whether a boolean mask hides keys j0 .. j0 + n from query t: much of a static cache is empty, and need not be read.
static inline bool hidden_from(const WideAttention &a, int64_t b, int64_t t, int64_t j0, int64_t n) {
  if (a.mask_kind != WIDELLM_MASK_BOOL) return false;
  return !memchr((const uint8_t *)a.mask + b * a.mask_batch + t * a.mask_query + j0, 1, (size_t)n);
}

// scores[j] for keys j0 .. j0 + n of one query: scaled, masked, padded with -inf to whole vectors; returns the maximum.
static inline float mask_scores(const WideAttention &a, int64_t b, int64_t t, int64_t j0, int64_t n, float *scores) {
  Visible v = visible(a, b, t);
  vf best = vset(kMinusInf);
  int64_t lo = imin(imax(v.first - j0, 0), n), hi = imin(imax(v.last - j0, lo), n);
  for (int64_t j = 0; j < lo; j++) scores[j] = kMinusInf;
  for (int64_t j = hi; j < round_up(n, kLanes); j++) scores[j] = kMinusInf;
  int64_t at = b * a.mask_batch + t * a.mask_query + j0;
  for (int64_t j = lo / kLanes * kLanes; j < hi; j += kLanes) {
    int64_t lanes = imin(kLanes, n - j);
    vf s = load(scores + j) * (float)a.scale;
    if (a.mask_kind == WIDELLM_MASK_F32) s += loadn((const float *)a.mask + at + j, lanes);
    if (a.mask_kind == WIDELLM_MASK_BF16) s += loadn((const bf16 *)a.mask + at + j, lanes);
    store(scores + j, s);
    if (a.mask_kind == WIDELLM_MASK_BOOL)
      for (int64_t i = 0; i < lanes; i++)
        if (!((const uint8_t *)a.mask)[at + j + i]) scores[j + i] = kMinusInf;
    best = vmax(best, load(scores + j));
  }
  return max_of(best);
}

// The online softmax step of one query and one block of keys: probabilities (unnormalised) into p, y rescaled.
template <class P>
static inline void softmax_step(float *scores, int64_t n, float block_max, float &running_max, float &running_sum,
                                P *p, float *y, int64_t width) {
  float new_max = block_max > running_max ? block_max : running_max;
  int64_t padded = round_up(n, kLanes);
  if (new_max == kMinusInf) {
    for (int64_t j = 0; j < padded; j += kLanes) {  // nothing is seen; a NaN must not pass for that
      vf s = load(scores + j), e = s != s ? s : vf{};
      running_sum += sum(e);
      store(p + j, e);
    }
    return;
  }
  vf total = {};
  for (int64_t j = 0; j < padded; j += kLanes) {
    vf e = vexp(load(scores + j) - new_max);
    total += e;
    store(p + j, e);
  }
  if (new_max > running_max) {
    vf factor = vexp(vset(running_max - new_max));
    running_sum *= factor[0];
    for (int64_t i = 0; i < width; i += kLanes) store(y + i, load(y + i) * factor);
    running_max = new_max;
  }
  running_sum += sum(total);
}

template <class T> struct FewAttention {
  WideAttention a;
  int64_t span, spans, width;  // keys per span, spans, padded head_dim
  float *y;                    // [B, Tq, H, spans, width]
  float *maxima, *sums;        // [B, Tq, H, spans]

  void reserve(Scratch &s) {
    span = imax(kKeyBlock, round_up(ceil_div(a.keys, 16), kKeyBlock));
    spans = ceil_div(a.keys, span);
    width = round_up(a.head_dim, kPairCols);
    int64_t parts = a.batch * a.queries * a.heads * spans;
    y = s.get<float>(parts * width);
    maxima = s.get<float>(parts);
    sums = s.get<float>(parts);
  }

  void run(Queue &queue) const {
    int64_t shared = a.heads / a.kv_heads, units = a.batch * a.kv_heads * spans;
    for (int64_t u = queue.take(); u < units; u = queue.take()) {
      int64_t b = u / (a.kv_heads * spans), kv = u / spans % a.kv_heads, part = u % spans;
      int64_t tokens[kQueryTile], heads[kQueryTile], n = 0;
      for (int64_t t = 0; t < a.queries; t++)
        for (int64_t h = kv * shared; h < (kv + 1) * shared; h++) {
          if (!is_kept(a, b, t, h)) continue;
          tokens[n] = t;
          heads[n] = h;
          if (++n == kQueryTile) {
            unit(b, kv, part, tokens, heads, n);
            n = 0;
          }
        }
      if (n) unit(b, kv, part, tokens, heads, n);
    }
  }

  void unit(int64_t b, int64_t kv, int64_t part, const int64_t *tokens, const int64_t *heads, int64_t n) const {
    float scores[kQueryTile * kKeyBlock], running_max[kQueryTile], running_sum[kQueryTile];
    T p[kQueryTile * kKeyBlock];
    const T *qs[kQueryTile], *ps[kQueryTile];
    float *ys[kQueryTile];
    int64_t first = a.keys, last = 0;
    for (int64_t c = 0; c < n; c++) {
      Visible v = visible(a, b, tokens[c]);
      first = imin(first, v.first);
      last = imax(last, v.last);
      qs[c] = (const T *)a.q + b * a.q_batch + tokens[c] * a.q_token + heads[c] * a.q_head;
      ps[c] = p + c * kKeyBlock;
      ys[c] = y + (((b * a.queries + tokens[c]) * a.heads + heads[c]) * spans + part) * width;
      memset(ys[c], 0, (size_t)width * sizeof(float));
      running_max[c] = kMinusInf;
      running_sum[c] = 0.0f;
    }
    // Blocks start at the same keys whatever is visible (a row's bits must not depend on the others); their ends are
    // trimmed, and blocks that nobody sees are skipped.
    int64_t end = imin(imin((part + 1) * span, a.keys), last);
    for (int64_t block = part * span; block < end; block += kKeyBlock) {
      int64_t j = block, keys = imin(block + kKeyBlock, end) - j;
      bool seen = block + kKeyBlock > first;
      if (seen && a.mask_kind == WIDELLM_MASK_BOOL) {
        seen = false;
        for (int64_t c = 0; c < n && !seen; c++) seen = !hidden_from(a, b, tokens[c], j, keys);
      }
      if (!seen) continue;
      dot_rows((const T *)a.k + b * a.k_batch + j * a.k_token + kv * a.k_head, a.k_token, keys, qs, n, a.head_dim,
               scores, kKeyBlock);
      for (int64_t c = 0; c < n; c++) {
        float *row = scores + c * kKeyBlock;
        float best = mask_scores(a, b, tokens[c], j, keys, row);
        softmax_step(row, keys, best, running_max[c], running_sum[c], p + c * kKeyBlock, ys[c], width);
      }
      sum_rows((const T *)a.v + b * a.v_batch + j * a.v_token + kv * a.v_head, a.v_token, keys, ps, ys, n, a.head_dim);
    }
    for (int64_t c = 0; c < n; c++) {
      int64_t at = ((b * a.queries + tokens[c]) * a.heads + heads[c]) * spans + part;
      maxima[at] = running_max[c];
      sums[at] = running_sum[c];
    }
  }

  void merge(Range rows_and_heads, bool write_zeros) const {  // after a barrier
    for (int64_t u = rows_and_heads.begin; u < rows_and_heads.end; u++) {
      int64_t m = u / a.heads, h = u % a.heads, b = m / a.queries, t = m % a.queries;
      T *out = (T *)a.out + b * a.out_batch + t * a.out_token + h * a.out_head;
      if (!is_kept(a, b, t, h)) {
        if (write_zeros) memset((void *)out, 0, (size_t)a.head_dim * sizeof(T));
        continue;
      }
      float best = kMinusInf, total = 0.0f, scale[16];
      for (int64_t s = 0; s < spans; s++) best = maxima[u * spans + s] > best ? maxima[u * spans + s] : best;
      for (int64_t s = 0; s < spans; s++) {
        scale[s] = best == kMinusInf ? 0.0f : vexp(vset(maxima[u * spans + s] - best))[0];
        total += scale[s] * sums[u * spans + s];
      }
      float inverse = total > 0.0f ? 1.0f / total : 0.0f;  // a query that sees nothing gives 0
      for (int64_t i = 0; i < a.head_dim; i += kPairCols) {
        vf lo = {}, hi = {};
        for (int64_t s = 0; s < spans; s++) {
          const float *from = y + (u * spans + s) * width + i;
          lo += load(from) * scale[s];
          hi += load(from + kLanes) * scale[s];
        }
        Pair<T>::in_order(lo, hi);
        storen(out + i, lo * inverse, imin(kLanes, a.head_dim - i));
        if (i + kLanes < a.head_dim) storen(out + i + kLanes, hi * inverse, imin(kLanes, a.head_dim - i - kLanes));
      }
    }
  }
};

template <class T> static int64_t attention_few(const WideAttention &a, WideArena *arena) {
  Scratch s{arena};
  WideAttention part = a;  // a bounded number of sequences at a time, so that partial results stay small
  part.batch = imin(a.batch, kFewRows);
  FewAttention<T> attention{part, 0, 0, 0, nullptr, nullptr, nullptr};
  attention.reserve(s);
  Queue *queue = s.get<Queue>(1);
  if (!s.ok) return WIDELLM_NO_MEMORY;
  for (int64_t b = 0; b < a.batch; b += kFewRows) {
    WideAttention &now = attention.a;
    now.batch = imin(kFewRows, a.batch - b);
    now.q = (const T *)a.q + b * a.q_batch;
    now.k = (const T *)a.k + b * a.k_batch;
    now.v = (const T *)a.v + b * a.v_batch;
    now.out = (T *)a.out + b * a.out_batch;
    now.keep = a.keep ? a.keep + b * a.queries * a.ldkeep : nullptr;
    now.start = a.start ? a.start + b : nullptr;
    int64_t mask_bytes = a.mask_kind == WIDELLM_MASK_BOOL ? 1 : a.mask_kind == WIDELLM_MASK_BF16 ? 2 : 4;
    now.mask = a.mask ? (const char *)a.mask + b * a.mask_batch * mask_bytes : nullptr;
    queue->next = 0;
    parallel(a.run.threads, [&](const Team &team) {
      attention.run(*queue);
      team.barrier();
      attention.merge(share(now.batch * a.queries * a.heads, 1, team), true);
    });
  }
  return WIDELLM_OK;
}

}  // namespace
