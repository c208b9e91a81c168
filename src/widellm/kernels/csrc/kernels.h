// All kernels of one instruction set, and the table of their entry points. Included once per isa_*.cpp.
#pragma once
#include "attention_many.h"
#include "ffn_few.h"
#include "ffn_many.h"
#include "layer.h"

namespace {

#define WIDELLM_BY_DTYPE(function, args, arena) \
  ((args)->run.dtype == WIDELLM_BF16 ? function<bf16>(*(args), arena) : function<float>(*(args), arena))

static int64_t ops_ffn(const WideFfn *f, WideArena *arena) {
  return f->rows <= kFewRows ? WIDELLM_BY_DTYPE(ffn_few, f, arena) : WIDELLM_BY_DTYPE(ffn_many, f, arena);
}
static int64_t ops_in(const WideIn *f, WideArena *arena) {
  return f->rows <= kFewRows ? WIDELLM_BY_DTYPE(in_few, f, arena) : WIDELLM_BY_DTYPE(in_many, f, arena);
}
static int64_t ops_out(const WideOut *f, WideArena *arena) {
  return f->rows <= kFewRows ? WIDELLM_BY_DTYPE(out_few, f, arena) : WIDELLM_BY_DTYPE(out_many, f, arena);
}
static int64_t ops_attention(const WideAttention *a, WideArena *arena) {
  bool few = a->queries <= kFewQueries;
  return few ? WIDELLM_BY_DTYPE(attention_few, a, arena) : WIDELLM_BY_DTYPE(attention_many, a, arena);
}
static int64_t ops_qkv(const WideLayer *l, const WideQkv *c, WideArena *arena) {
  return l->run.dtype == WIDELLM_BF16 ? layer_qkv<bf16>(*l, *c, arena) : layer_qkv<float>(*l, *c, arena);
}
static int64_t ops_rest(const WideLayer *l, const WideRest *c, WideArena *arena) {
  return l->run.dtype == WIDELLM_BF16 ? layer_rest<bf16>(*l, *c, arena) : layer_rest<float>(*l, *c, arena);
}
static int64_t ops_step(const WideLayer *l, const WideQkv *c, const WideRest *r, WideArena *arena) {
  return l->run.dtype == WIDELLM_BF16 ? layer_step<bf16>(*l, *c, *r, arena) : layer_step<float>(*l, *c, *r, arena);
}
const WideOps kOps = {ops_ffn, ops_in, ops_out, ops_attention, ops_qkv, ops_rest, ops_step};

}  // namespace
