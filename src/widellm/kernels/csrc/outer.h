// Out of the groups for up to kFewRows rows, in either of two ways, which give the same bits: as a stream of weights, or,
// where so many rows keep a group that the products take longer than the weights, as tiles on packed panels.
#pragma once
#include "many_out.h"

namespace {

constexpr int64_t kPackRows = 28;           // rows that keep a group, on average, from which on packing pays,
constexpr int64_t kPackWeights = 512 << 10;  // with so many weights

template <class T, class W> struct Outer {
  FewOuter<T, W> few;
  ManyOut<T, W> out;
  SumMany<T, W> many;

  bool may_pack() const {
    return few.rows >= kPackRows && few.input_major && few.groups * few.size * few.outputs >= kPackWeights;
  }
  void reserve(Scratch &s, int64_t threads) {
    few.reserve(s);
    if (!may_pack()) return;
    out = {few.rows, few.outputs, few.size, ceil_div(few.size, Packed<T>::per), few.w, few.ldw, true, few.scale,
           few.bias, few.residual, few.ldres, few.out, few.ldout, nullptr, few.per_section(), nullptr};
    many.reserve(s, out, few.groups, threads);
  }
  // Every thread calls it once, with what keep says in `kept`.
  void run(const Kept &kept, const uint8_t *keep, int64_t ldkeep, const Team &team) const {
    int64_t pairs = 0;
    for (int64_t i = 0; may_pack() && i < kept.count; i++) pairs += __builtin_popcount(kept.rows[kept.groups[i]]);
    if (pairs && pairs >= kPackRows * kept.count) return many.run(out, few.h, few.ldh, keep, ldkeep, team);
    few.run(kept, team);
  }
};

}  // namespace
