// All kernels of one instruction set, and the table of their entry points. Included once per isa_*.cpp.
#pragma once
#include "attention_many.h"
#include "ffn_few.h"
#include "ffn_many.h"
#include "layer.h"

namespace {

#define WIDELLM_BY_DTYPE(function, run, ...) \
  ((run).dtype == WIDELLM_BF16 ? function<bf16>(__VA_ARGS__) : function<float>(__VA_ARGS__))
// Kernels whose weights may be int8.
#define WIDELLM_BY_WEIGHTS(function, run, ...)                                                                 \
  ((run).weights != WIDELLM_I8       ? (run).dtype == WIDELLM_BF16 ? function<bf16, bf16>(__VA_ARGS__)         \
                                                                   : function<float, float>(__VA_ARGS__)       \
   : (run).dtype == WIDELLM_BF16     ? function<bf16, int8_t>(__VA_ARGS__)                                     \
                                     : function<float, int8_t>(__VA_ARGS__))

static int64_t ops_ffn(const WideFfn *f, WideArena *arena) {
  return f->rows <= kFewRows ? WIDELLM_BY_WEIGHTS(ffn_few, f->run, *f, arena)
                             : WIDELLM_BY_WEIGHTS(ffn_many, f->run, *f, arena);
}
static int64_t ops_in(const WideIn *f, WideArena *arena) {
  return f->rows <= kFewRows ? WIDELLM_BY_WEIGHTS(in_few, f->run, *f, arena)
                             : WIDELLM_BY_WEIGHTS(in_many, f->run, *f, arena);
}
static int64_t ops_out(const WideOut *f, WideArena *arena) {
  return f->rows <= kFewRows ? WIDELLM_BY_WEIGHTS(out_few, f->run, *f, arena)
                             : WIDELLM_BY_WEIGHTS(out_many, f->run, *f, arena);
}
static int64_t ops_attention(const WideAttention *a, WideArena *arena) {
  bool few = a->queries <= kFewQueries;
  return few ? WIDELLM_BY_DTYPE(attention_few, a->run, *a, arena) : WIDELLM_BY_DTYPE(attention_many, a->run, *a, arena);
}
static int64_t ops_qkv(const WideLayer *l, const WideQkv *c, WideArena *arena) {
  return WIDELLM_BY_WEIGHTS(layer_qkv, l->run, *l, *c, arena);
}
static int64_t ops_rest(const WideLayer *l, const WideRest *c, WideArena *arena) {
  return WIDELLM_BY_WEIGHTS(layer_rest, l->run, *l, *c, arena);
}
static int64_t ops_step(const WideLayer *l, const WideQkv *c, const WideRest *r, WideArena *arena) {
  return WIDELLM_BY_WEIGHTS(layer_step, l->run, *l, *c, *r, arena);
}
const WideOps kOps = {ops_ffn, ops_in, ops_out, ops_attention, ops_qkv, ops_rest, ops_step};

}  // namespace
