// The exported functions: choose the instruction set, own the scratch memory.
#include <stdlib.h>
#include <string.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <vector>

#include "abi.h"
#if defined(_OPENMP)
#include <omp.h>
#endif

#if defined(_WIN32)
#define WIDELLM_EXPORT extern "C" __declspec(dllexport)
#else
#define WIDELLM_EXPORT extern "C" __attribute__((visibility("default")))
#endif

// Bump allocation from blocks. A call that needs more than the last block leaves several; the next call replaces them
// by one that is large enough, so that a steady state allocates nothing and touches the same pages again.
constexpr size_t kHugePage = 2 << 20;
constexpr size_t kKeptBytes = 128 << 20;  // a call that needed more gives it back
#if defined(__SANITIZE_ADDRESS__)
constexpr bool kGuarded = true;  // a block of its own for every piece, so that the sanitizer sees where it ends
#else
constexpr bool kGuarded = false;
#endif

struct WideArena {
  struct Block {
    char *data;
    size_t size, used;
  };
  std::vector<Block> blocks;

  ~WideArena() { release(); }
  void release() {
    for (Block &b : blocks) free(b.data);
    blocks.clear();
  }
  size_t size() const {
    size_t total = 0;
    for (const Block &b : blocks) total += b.size;
    return total;
  }
  void begin() {
    if (kGuarded) return release();
    if (blocks.size() > 1) {
      size_t total = size();
      release();
      add(total);
    }
    for (Block &b : blocks) b.used = 0;
  }
  bool add(size_t size) {
    void *data = nullptr;
    if (!kGuarded) size = (size + 4095) / 4096 * 4096;
    if (posix_memalign(&data, size < kHugePage ? 4096 : kHugePage, size) != 0) return false;
#if defined(MADV_HUGEPAGE)
    if (size >= kHugePage) madvise(data, size, MADV_HUGEPAGE);  // a wish: fewer page walks where it is granted
#endif
    try {
      blocks.push_back({static_cast<char *>(data), size, 0});
    } catch (...) {
      free(data);
      return false;
    }
    return true;
  }
  void *get(size_t bytes) {
    if (!kGuarded) bytes = (bytes + 63) / 64 * 64;
    if (kGuarded || blocks.empty() || blocks.back().used + bytes > blocks.back().size) {
      size_t least = kGuarded ? 0 : blocks.empty() ? 65536 : blocks.back().size;
      if (!add(bytes > least ? bytes : least)) return nullptr;
    }
    Block &b = blocks.back();
    void *p = b.data + b.used;
    b.used += bytes;
    return p;
  }
};

void *widellm_arena_get(WideArena *arena, size_t bytes) { return arena->get(bytes); }

namespace {

thread_local WideArena scratch;

const WideOps *ops_of(int64_t level) {
  switch (level) {
    case WIDELLM_AVX512: return widellm_ops_avx512();
    case WIDELLM_AVX2: return widellm_ops_avx2();
    case WIDELLM_PORTABLE: return widellm_ops_portable();
    default: return nullptr;
  }
}

template <class Call> int64_t with_ops(const WideRun &run, const Call &call) {
  const WideOps *ops = ops_of(run.level);
  if (!ops) return WIDELLM_NO_LEVEL;
  scratch.begin();
  int64_t code = call(*ops, &scratch);
  if (scratch.size() > kKeptBytes) scratch.release();
  return code;
}

}  // namespace

WIDELLM_EXPORT int64_t widellm_abi() { return WIDELLM_ABI; }
WIDELLM_EXPORT int64_t widellm_few_rows() { return kFewRows; }

// The best instruction set not above the one asked for (a test asks for less than the CPU has).
WIDELLM_EXPORT int64_t widellm_level(int64_t at_most) {
  for (int64_t level = at_most; level > WIDELLM_PORTABLE; level--)
    if (ops_of(level)) return level;
  return WIDELLM_PORTABLE;
}

// How many threads a call that asks for this many gets.
WIDELLM_EXPORT int64_t widellm_team(int64_t threads) {
  int64_t got = 1;
#if defined(_OPENMP)
#pragma omp parallel num_threads((int)threads)
  {
#pragma omp single
    got = omp_get_num_threads();
  }
#endif
  (void)threads;
  return got;
}

// A wish that memory be held in large pages from now on, with what lies beside it: contents and addresses stay.
// Weights in small pages are read a tenth slower, for every page is looked up anew. Returns how many pages are so.
WIDELLM_EXPORT int64_t widellm_large_pages(void *data, int64_t bytes) {
  int64_t large = 0;
#if defined(MADV_HUGEPAGE)
  constexpr int kCollapse = 25;  // MADV_COLLAPSE, Linux 6.1; older C libraries do not name it
  for (uintptr_t at = (uintptr_t)data / kHugePage * kHugePage; at < (uintptr_t)data + (uintptr_t)bytes; at += kHugePage)
    large += madvise((void *)at, kHugePage, MADV_HUGEPAGE) == 0 && madvise((void *)at, kHugePage, kCollapse) == 0;
#else
  (void)data, (void)bytes;
#endif
  return large;
}

WIDELLM_EXPORT void widellm_release_scratch() { scratch.release(); }

// For tests: results must not depend on what scratch memory holds.
WIDELLM_EXPORT void widellm_fill_scratch(int64_t byte) {
  for (WideArena::Block &b : scratch.blocks) memset(b.data, (int)byte, b.size);
}

WIDELLM_EXPORT int64_t widellm_routed_ffn(const WideFfn *f) {
  return with_ops(f->run, [&](const WideOps &o, WideArena *a) { return o.ffn(f, a); });
}
WIDELLM_EXPORT int64_t widellm_routed_in(const WideIn *f) {
  return with_ops(f->run, [&](const WideOps &o, WideArena *a) { return o.in(f, a); });
}
WIDELLM_EXPORT int64_t widellm_routed_out(const WideOut *f) {
  return with_ops(f->run, [&](const WideOps &o, WideArena *a) { return o.out(f, a); });
}
WIDELLM_EXPORT int64_t widellm_routed_attention(const WideAttention *f) {
  return with_ops(f->run, [&](const WideOps &o, WideArena *a) { return o.attention(f, a); });
}
WIDELLM_EXPORT int64_t widellm_layer_qkv(const WideLayer *l, const WideQkv *c) {
  return with_ops(l->run, [&](const WideOps &o, WideArena *a) { return o.layer_qkv(l, c, a); });
}
WIDELLM_EXPORT int64_t widellm_layer_rest(const WideLayer *l, const WideRest *c) {
  return with_ops(l->run, [&](const WideOps &o, WideArena *a) { return o.layer_rest(l, c, a); });
}
WIDELLM_EXPORT int64_t widellm_layer_step(const WideLayer *l, const WideQkv *c, const WideRest *r) {
  return with_ops(l->run, [&](const WideOps &o, WideArena *a) { return o.layer_step(l, c, r, a); });
}
WIDELLM_EXPORT int64_t widellm_stack_step(const WideStack *s) {
  int64_t rows = s->batch * s->tokens;
  const void *x = s->x;
  for (int64_t i = 0; i < s->count; i++) {
    WideLayer layer = *s->layers[i];
    layer.run.threads = s->threads;
    uint8_t *keep = s->keep + i * rows * layer.attn_groups;
    void *out = (char *)s->out + i * rows * layer.hidden * (layer.run.dtype == WIDELLM_BF16 ? 2 : 4);
    WideQkv qkv = {s->batch, s->tokens, x, layer.hidden, s->cosine, s->sine, s->rope_batch, nullptr, nullptr, nullptr,
                   keep};
    WideRest rest = {s->batch, s->tokens, s->keys, x, layer.hidden, nullptr, keep,
                     s->k[i], s->kv_batch, s->kv_token, s->kv_head, s->v[i], s->kv_batch, s->kv_token, s->kv_head,
                     s->mask, s->mask_kind, s->mask_batch, s->mask_query, nullptr, s->causal, 0,
                     out, s->ffn_keep + i * rows * layer.ffn_groups, 0};
    if (int64_t code = widellm_layer_step(&layer, &qkv, &rest)) return code;
    x = out;
  }
  return WIDELLM_OK;
}
