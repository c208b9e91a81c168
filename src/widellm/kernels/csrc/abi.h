// The C ABI between Python (ctypes) and the native kernels, and the table that each instruction set fills.
//
// Every integer is int64_t and every real is double, so that the ctypes mirror (cpu.py, fused.py) has no padding to
// get wrong. Pointers are read-only unless their comment says "out". Strides (ld*) count elements, not bytes, and
// every innermost dimension is contiguous. The Python side has checked all shapes: nothing here checks them again.
#pragma once
#include <stddef.h>
#include <stdint.h>

#define WIDELLM_ABI 5

enum { WIDELLM_F32 = 0, WIDELLM_BF16 = 1, WIDELLM_I8 = 2 };
enum { WIDELLM_SILU = 0, WIDELLM_GELU_TANH = 1, WIDELLM_GELU = 2, WIDELLM_RELU = 3 };
enum { WIDELLM_PORTABLE = 0, WIDELLM_AVX2 = 1, WIDELLM_AVX512 = 2 };
enum { WIDELLM_OK = 0, WIDELLM_NO_MEMORY = 1, WIDELLM_NO_LEVEL = 2 };
enum { WIDELLM_MASK_NONE = 0, WIDELLM_MASK_BOOL = 1, WIDELLM_MASK_F32 = 2, WIDELLM_MASK_BF16 = 3 };

// Up to this many rows the kernels read each weight once and keep all rows at hand; beyond, they gather or sort rows and
// pack weights (see gemm.h, row_sets.h). Python reads the number through widellm_few_rows().
constexpr int64_t kFewRows = 32;

struct WideRouter {       // logits = up(act(down(x))) + bias in float32; keep where logits > threshold
  const float *down;      // [rank, D]; null: no router, everything is kept
  const float *up;        // [G, rank]
  const float *bias;      // [G] or null
  int64_t rank, act;      // act: 0 none, 1 silu
  int64_t shared;         // layer calls of one token per sequence: 1: the rows agree on one set of groups
  double threshold;
};

struct WideRun {          // how to run: instruction set, threads, the dtype of x, biases and outputs, and of weights:
  int64_t level, threads, dtype, weights;         // the same, or int8 with a float32 scale per output
};

struct WideFfn {
  WideRun run;
  int64_t act, rows, hidden, inner, groups;       // M, D, F, G; F = G * S
  const void *x; int64_t ldx;                     // [M, D]
  const void *gate; int64_t ldgate;               // [F, D] or null (no gate: h = act(up x))
  const void *up; int64_t ldup;                   // [F, D]
  const void *down; int64_t lddown;               // input-major: [F, D]; else [D, F]
  int64_t down_input_major;
  const void *gate_bias, *up_bias, *down_bias;    // [F], [F], [D] or null
  const float *gate_scale, *up_scale, *down_scale;  // [F], [F], [D] of int8 weights, else null
  const uint8_t *keep; int64_t ldkeep;            // [M, G]; null: all kept, or the router decides
  WideRouter router;
  uint8_t *keep_out;                              // out [M, G], written when the router decides
  void *out; int64_t ldout;                       // out [M, D]
};

struct WideIn {                                   // y[m, n] = x[m] . w[n] where the group of n is kept, else 0
  WideRun run;
  int64_t rows, inputs, outputs, groups;          // M, D, N, G
  const void *x; int64_t ldx;
  const void *w; int64_t ldw;                     // [N, D]
  const void *bias;                               // [N] or null
  const float *scale;                             // [N] of int8 weights, else null
  const uint8_t *keep; int64_t ldkeep;            // [M, G] or null: all kept
  void *out; int64_t ldout;                       // out [M, N]
};

struct WideOut {                                  // y[m] = sum over kept n of h[m, n] w[:, n]
  WideRun run;
  int64_t rows, inputs, outputs, groups;          // M, N, D, G
  const void *x; int64_t ldx;                     // [M, N]
  const void *w; int64_t ldw;                     // input-major: [N, D]; else [D, N]
  int64_t input_major;
  const void *bias;                               // [D] or null
  const float *scale;                             // [D] of int8 weights, else null
  const uint8_t *keep; int64_t ldkeep;
  void *out; int64_t ldout;                       // out [M, D]
};

struct WideAttention {
  WideRun run;
  int64_t batch, queries, keys, heads, kv_heads, head_dim, groups;   // B, Tq, Tk, H, K, d, G
  const void *q; int64_t q_batch, q_token, q_head;                   // strides of q, k, v and out per dimension
  const void *k; int64_t k_batch, k_token, k_head;
  const void *v; int64_t v_batch, v_token, v_head;
  void *out; int64_t out_batch, out_token, out_head;                 // out
  const uint8_t *keep; int64_t ldkeep;                               // [B * Tq, G] or null
  const void *mask; int64_t mask_kind, mask_batch, mask_query;       // [B or 1, Tq or 1, Tk]: strides 0 broadcast
  const int64_t *start;                                              // [B] first visible key (left padding) or null
  int64_t causal;   // 1: query t sees keys up to Tk - Tq + t; 0: all keys
  int64_t window;   // > 0: and none further back than window - 1
  double scale;
};

struct WideLayer {                                // one pre-norm decoder layer, bound once
  WideRun run;
  int64_t act, hidden, inner, heads, kv_heads, head_dim, rotary_dim, attn_groups, ffn_groups;
  int64_t reads_stream;                           // 1: routers read the stream before the norm, 0: what it gives
  int64_t one_decision;                           // 1: the FFN keeps the attention's groups; of its router only
                                                  // whether there is one is read; attn_groups = ffn_groups
  double attn_eps, ffn_eps, qk_eps, scale;
  const void *attn_norm, *ffn_norm;               // [D]
  const void *q_norm, *k_norm;                    // [d] or null
  const void *wq; int64_t ldq;                    // [H * d, D]
  const void *wk; int64_t ldk;                    // [K * d, D]
  const void *wv; int64_t ldv;
  const void *wo; int64_t ldo;                    // input-major [H * d, D]; else [D, H * d]
  int64_t o_input_major;
  const void *bq, *bk, *bv, *bo;
  const void *gate; int64_t ldgate;
  const void *up; int64_t ldup;
  const void *down; int64_t lddown;
  int64_t down_input_major;
  const void *gate_bias, *up_bias, *down_bias;
  const float *q_scale, *k_scale, *v_scale, *o_scale, *gate_scale, *up_scale, *down_scale;  // of int8 weights, or null
  WideRouter attn_router, ffn_router;
};

struct WideQkv {                                  // x -> q, k, v of the new tokens
  int64_t batch, tokens;                          // B, T; at most kFewRows rows in all
  const void *x; int64_t ldx;                     // [B * T, D]
  const void *cosine, *sine; int64_t rope_batch;  // [B or 1, T, rotary_dim]; rope_batch: stride of B, 0 for 1
  void *q, *k, *v;                                // out [B, H, T, d], [B, K, T, d]; q of dropped heads is 0
  uint8_t *keep;                                  // out [B * T, attn_groups] (all 1 without a router)
};

struct WideRest {                                 // attention over the cache, o, FFN, both residuals
  int64_t batch, tokens, keys;
  const void *x; int64_t ldx;                     // [B * T, D]: the layer's input (residual stream)
  const void *q;                                  // [B, H, T, d] as written by WideQkv
  const uint8_t *keep;                            // [B * T, attn_groups]
  const void *k; int64_t k_batch, k_token, k_head;
  const void *v; int64_t v_batch, v_token, v_head;
  const void *mask; int64_t mask_kind, mask_batch, mask_query;
  const int64_t *start;
  int64_t causal, window;
  void *out;                                      // out [B * T, D]
  uint8_t *ffn_keep;                              // out [B * T, ffn_groups] (all 1 without a router)
  int64_t attention_only;                         // 1: out is the residual stream after attention, ffn_keep unused
};

struct WideStack {                                // consecutive layers of the same sizes; x of each: out of the last
  int64_t count, threads;                         // N layers
  const WideLayer *const *layers;                 // [N]; their own numbers of threads are not read
  int64_t batch, tokens, keys;                    // as WideRest: the cache has room, its last `tokens` are written
  const void *x;                                  // [B * T, D]
  const void *cosine, *sine; int64_t rope_batch;  // as WideQkv
  void *const *k, *const *v;                      // [N] caches, out; all with the same strides
  int64_t kv_batch, kv_token, kv_head;
  const void *mask; int64_t mask_kind, mask_batch, mask_query;
  int64_t causal;
  void *out;                                      // out [N, B * T, D]
  uint8_t *keep, *ffn_keep;                       // out [N, B * T, groups]
};

// Scratch memory of one call: bump-allocated from a block that the calling thread keeps between calls.
struct WideArena;
void *widellm_arena_get(WideArena *arena, size_t bytes);  // 64-byte aligned; null when out of memory

struct WideOps {  // one instruction set
  int64_t (*ffn)(const WideFfn *, WideArena *);
  int64_t (*in)(const WideIn *, WideArena *);
  int64_t (*out)(const WideOut *, WideArena *);
  int64_t (*attention)(const WideAttention *, WideArena *);
  int64_t (*layer_qkv)(const WideLayer *, const WideQkv *, WideArena *);
  int64_t (*layer_rest)(const WideLayer *, const WideRest *, WideArena *);
  int64_t (*layer_step)(const WideLayer *, const WideQkv *, const WideRest *, WideArena *);
};

const WideOps *widellm_ops_portable();
const WideOps *widellm_ops_avx2();    // null when the compiler or the CPU has none
const WideOps *widellm_ops_avx512();  // likewise; needs AVX512-BF16
