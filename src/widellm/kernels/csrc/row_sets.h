// Which rows keep the same groups. Fetching and storing a row's sums for every group would cost as much as a third of the
// products. So neighbouring groups are taken together, as sets, and rows are sorted by which groups of the set they keep:
// rows that keep the same ones are multiplied with all of these while their sums stay in registers.
#pragma once
#include "gemm.h"
#include "team.h"

namespace {

constexpr int64_t kSetUnits = 512;  // inputs of a set, in units: its panel then takes 128 KiB
// Costs in multiplies of one unit by kNr columns: of loading those for a tile, of a visit to a row's sums, of a tile.
constexpr int64_t kLoadPanel = 2, kVisitRow = 12, kVisitTile = 40;

struct Run {  // rows ids[begin .. end) keep just these groups of the set: bit i is its i-th
  uint32_t groups;
  int32_t begin, end;
};

struct Set {
  int64_t first, count;  // of the list of groups
  uint32_t any;          // groups that any row keeps
  const int32_t *ids;    // of rows, ascending within a run
  const Run *runs;
  int64_t n_runs;
};

// The sets of a list of groups. Blocks of up to kMaxTerms groups are cut by whoever takes them; how they are cut changes
// the time, not the sums.
struct RowSets {
  int64_t rows, units;  // rows: there is room for
  Set *sets;         // [blocks, kMaxTerms]
  int64_t *n_sets;   // [blocks]
  Run *runs;         // [blocks, 2 ** kMaxTerms]
  int32_t *ids;      // [blocks, kMaxTerms, rows]
  uint8_t *kept_by;  // [blocks, rows]

  static int64_t blocks(int64_t groups) { return ceil_div(groups, kMaxTerms); }
  void reserve(Scratch &s, int64_t n_rows, int64_t groups, int64_t group_units) {
    rows = n_rows;
    units = group_units;
    sets = s.get<Set>(blocks(groups) * kMaxTerms);
    n_sets = s.get<int64_t>(blocks(groups));
    runs = s.get<Run>(blocks(groups) << kMaxTerms);
    ids = s.get<int32_t>(blocks(groups) * kMaxTerms * rows);
    kept_by = s.get<uint8_t>(blocks(groups) * rows);
  }

  // What it takes to add up a set of n groups; hist[p]: how many rows keep the groups p.
  int64_t cost(const int32_t *hist, int n) const {
    int64_t total = 0;
    for (uint32_t p = 1; p < 1u << n; p++)
      if (hist[p]) {
        int64_t depth = units * __builtin_popcount(p), tiles = ceil_div(hist[p], kMr);
        total += depth * (hist[p] + kLoadPanel * tiles) + kVisitRow * hist[p] + kVisitTile * tiles;
      }
    return total;
  }
  struct Cut {
    int64_t cost;
    uint32_t begins;  // bit i: a set begins at group i
  };
  Cut cut(const int32_t *hist, int n) const {
    if (n == 1) return {cost(hist, 1), 1};
    int low = (n + 1) / 2, high = n - low;
    int32_t lows[1 << kMaxTerms / 2] = {}, highs[1 << kMaxTerms / 2] = {};
    for (uint32_t p = 0; p < 1u << n; p++) {
      lows[p & ((1u << low) - 1)] += hist[p];
      highs[p >> low] += hist[p];
    }
    Cut a = cut(lows, low), b = cut(highs, high), both{a.cost + b.cost, a.begins | b.begins << low};
    if (n * units > kSetUnits) return both;
    Cut whole{cost(hist, n), 1};
    return whole.cost <= both.cost ? whole : both;
  }

  // Of n groups in all, those of block b, for n_rows rows. keep null: all kept.
  void build(int64_t b, int64_t n_rows, const int64_t *groups, int64_t n, const uint8_t *keep, int64_t ldkeep) const {
    int64_t begin = n * b / blocks(n), size = n * (b + 1) / blocks(n) - begin;
    uint8_t *kept = kept_by + b * rows;
    int32_t hist[1 << kMaxTerms] = {};
    for (int64_t m = 0; m < n_rows; m++) {
      uint32_t bits = keep ? 0 : (1u << size) - 1;
      for (int64_t i = 0; keep && i < size; i++) bits |= (uint32_t)(keep[m * ldkeep + groups[begin + i]] != 0) << i;
      kept[m] = (uint8_t)bits;
      hist[bits]++;
    }
    uint32_t begins = cut(hist, (int)size).begins;
    Run *run = runs + (b << kMaxTerms);
    int32_t *id = ids + b * kMaxTerms * rows;
    int64_t count = 0;
    for (int64_t first = 0, next; first < size; first = next) {
      for (next = first + 1; next < size && !(begins >> next & 1);) next++;
      Set &set = sets[b * kMaxTerms + count++];
      set = {begin + first, next - first, 0, id, run, 0};
      sort(kept, n_rows, first, next - first, set, run, id);
      run += set.n_runs;
    }
    n_sets[b] = count;
  }
  static void sort(const uint8_t *kept, int64_t rows, int64_t first, int64_t n, Set &set, Run *run, int32_t *&id) {
    int32_t at[1 << kMaxTerms] = {}, used = 0;
    const uint32_t mask = (1u << n) - 1;
    for (int64_t m = 0; m < rows; m++) at[kept[m] >> first & mask]++;
    for (uint32_t p = 1; p <= mask; p++) {
      int32_t count = at[p];
      at[p] = used;
      if (!count) continue;
      run[set.n_runs++] = {p, used, used + count};
      set.any |= p;
      used += count;
    }
    for (int64_t m = 0; m < rows; m++)
      if (uint32_t p = kept[m] >> first & mask) id[at[p]++] = (int32_t)m;
    id += used;
  }
};

}  // namespace
