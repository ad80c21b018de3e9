// The adapter branch on CPU: y = g * (y + s (x A^T) B^T) + c for all rows, adapters and modules of one call.
//
// Factors are read where they lie in the page pool, through the row table's extents; nothing is gathered. Shrink fills
// Z (float32 sums, rounded once to the model's type), expand adds into y. Work is cut into items; neither the cut nor
// the thread that takes an item can change a result (see tiles.h).
//
// The caller has checked every index, extent and stride; nothing is checked here.
// Specification: 0x02D "Indexed rows", 0x06D "one heterogeneous kernel".
#pragma once

#include <algorithm>
#include <vector>

#include "tiles.h"

namespace loraplex {

constexpr int kModules = 9, kFactors = 5;
constexpr int kA = 0, kB = 1, kH = 2, kG = 3, kC = 4;
constexpr int64_t kRowBlock = 32, kRankBlock = 16;
constexpr int64_t kColumnBlock = 256;
constexpr int64_t kFewRows = 8;  // up to here an item waits for memory, not for arithmetic

struct Extent { int64_t offset, rank_lo, rank_n, col_lo, col_n; };
struct Span { int64_t first, count; };

// One adapter's part of the row table; see ResidentAdapter.
struct Adapter {
  const int32_t* index;   // [layers][kModules]
  const int32_t* ranks;   // [n]
  const float* scales;    // [n]
  const Span* spans;      // [n][kFactors]
  const Extent* extents;
};

// One row set of one plan.
struct Step {
  const uint8_t* pool;
  int64_t groups;
  const int32_t* rows;      // [Na]
  const int32_t* offsets;   // [groups + 1]
  const Adapter* adapters;  // [groups]
};

// Which modules a call covers and where their columns lie in y.
struct Call {
  int64_t modules, d_in;
  const int32_t* ids;     // [modules]
  const int64_t* bounds;  // [modules + 1]
};

// One adapter in one module, with rows.
struct Unit {
  const int32_t* rows;
  int64_t row_count;
  int32_t rank;
  float scale;
  const Extent *a, *b, *a_end, *b_end;
  const float *h, *g, *c;  // h is the caller's: the branch itself reads inputs as they are
  int64_t column, d_out;
  int64_t z;  // first of row_count * rank values
};

struct Item { int32_t unit; int64_t row_lo, row_hi, lo, hi; };

struct Workspace {
  std::vector<Unit> units;
  std::vector<Item> whole, shrink, expand;
  std::vector<float> vectors;
  int64_t z = 0;  // values of Z that the units need
};

// A float32 vector of the general operator as one run, or null. A vector cut over pages is put together first.
inline const float* vector_at(const Adapter& adapter, const uint8_t* pool, int row, int factor, std::vector<float>& store) {
  const Span span = adapter.spans[row * kFactors + factor];
  if (span.count == 0) return nullptr;
  const Extent* e = adapter.extents + span.first;
  if (span.count == 1) return reinterpret_cast<const float*>(pool + e->offset);
  const size_t start = store.size();
  for (int64_t i = 0; i < span.count; ++i) {
    const float* part = reinterpret_cast<const float*>(pool + e[i].offset);
    store.insert(store.end(), part, part + e[i].col_n);
  }
  return store.data() + start;
}

// The units of a call; returns its multiply-adds.
inline int64_t collect(const Step& step, const Call& call, int64_t layer, Workspace& ws) {
  ws.units.clear();
  ws.vectors.clear();
  int64_t needed = 0, z = 0, work = 0;
  for (int64_t m = 0; m < call.modules; ++m) needed += 2 * (call.bounds[m + 1] - call.bounds[m]) + call.d_in;
  ws.vectors.reserve(size_t(needed * step.groups));  // pointers into it must stay
  for (int64_t group = 0; group < step.groups; ++group) {
    const Adapter& adapter = step.adapters[group];
    for (int64_t m = 0; m < call.modules; ++m) {
      const int32_t row = adapter.index[layer * kModules + call.ids[m]];
      if (row < 0) continue;
      const Span a = adapter.spans[row * kFactors + kA], b = adapter.spans[row * kFactors + kB];
      Unit u;
      u.rows = step.rows + step.offsets[group];
      u.row_count = step.offsets[group + 1] - step.offsets[group];
      u.rank = adapter.ranks[row];
      u.scale = adapter.scales[row];
      u.a = adapter.extents + a.first, u.a_end = u.a + a.count;
      u.b = adapter.extents + b.first, u.b_end = u.b + b.count;
      u.h = vector_at(adapter, step.pool, row, kH, ws.vectors);
      u.g = vector_at(adapter, step.pool, row, kG, ws.vectors);
      u.c = vector_at(adapter, step.pool, row, kC, ws.vectors);
      u.column = call.bounds[m], u.d_out = call.bounds[m + 1] - call.bounds[m];
      u.z = z;
      z += u.row_count * u.rank;
      work += u.row_count * u.rank * 2 * u.d_out + u.row_count * u.d_out;
      ws.units.push_back(u);
    }
  }
  ws.z = z;
  return work;
}

// Items of whole row blocks: lo and hi mean nothing.
inline void cut_rows(Workspace& ws) {
  ws.whole.clear();
  for (size_t i = 0; i < ws.units.size(); ++i) {
    const Unit& u = ws.units[i];
    if (u.rank == 0 && !u.g && !u.c) continue;  // an input vector alone: nothing to add
    for (int64_t row = 0, end = u.row_count; row < end; row += kRowBlock)
      ws.whole.push_back({int32_t(i), row, std::min(row + kRowBlock, end), 0, 0});
  }
}

// The same blocks cut further: the shrink by ranks, the expand by columns.
inline void cut_finer(Workspace& ws) {
  ws.shrink.clear();
  ws.expand.clear();
  for (const Item& block : ws.whole) {
    const Unit& u = ws.units[size_t(block.unit)];
    const int64_t chunks = (u.d_out + kColumnBlock - 1) / kColumnBlock;
    const int64_t width = ((u.d_out + chunks - 1) / chunks + 31) / 32 * 32;
    for (int64_t k = 0; k < u.rank; k += kRankBlock)
      ws.shrink.push_back({block.unit, block.row_lo, block.row_hi, k, std::min<int64_t>(k + kRankBlock, u.rank)});
    for (int64_t c = 0; c < u.d_out; c += width)
      ws.expand.push_back({block.unit, block.row_lo, block.row_hi, c, std::min(c + width, u.d_out)});
  }
}

// Pointers to rows [lo, hi) of the column tile whose first extent is `e`, shifted by `column`; returns the extent
// after the tile.
template <class T>
const Extent* tile_rows(const uint8_t* pool, const Extent* e, const Extent* end, int64_t lo, int64_t hi, int64_t column,
                        const T** out) {
  const int64_t tile = e->col_lo;
  for (; e != end && e->col_lo == tile; ++e) {
    const T* base = reinterpret_cast<const T*>(pool + e->offset) + column;
    const int64_t from = std::max(lo, e->rank_lo), to = std::min(hi, e->rank_lo + e->rank_n);
    for (int64_t k = from; k < to; ++k) out[k - lo] = base + (k - e->rank_lo) * e->col_n;
  }
  return e;
}

template <class T, int R, int K>
void dot_tile(const T* const* x, const T* const* a, int64_t n, float* z, int64_t rank, bool first) {
  float out[R][K];
  Dots<T, R, K>::run(x, a, n, out);
  for (int r = 0; r < R; ++r)
    for (int k = 0; k < K; ++k) z[r * rank + k] = first ? out[r][k] : z[r * rank + k] + out[r][k];
}

template <class T> struct Problem {
  const Step& step;
  const Workspace& ws;
  float* z_values;
  T* y;
  int64_t y_stride;
  const T* x;
  int64_t x_stride;

  void whole(const Item& block) {
    const Unit& u = ws.units[size_t(block.unit)];
    for (int64_t k = 0; k < u.rank; k += kRankBlock)
      shrink({block.unit, block.row_lo, block.row_hi, k, std::min<int64_t>(k + kRankBlock, u.rank)});
    expand({block.unit, block.row_lo, block.row_hi, 0, u.d_out});
  }

  void shrink(const Item& item) {
    const Unit& u = ws.units[size_t(item.unit)];
    float* z = z_values + u.z;
    const int count = int(item.hi - item.lo);
    const T* a[kRankBlock];
    for (const Extent* e = u.a; e != u.a_end;) {
      const int64_t column = e->col_lo, n = e->col_n;
      const bool first = e == u.a;
      e = tile_rows(step.pool, e, u.a_end, item.lo, item.hi, 0, a);
      int64_t row = item.row_lo;
      for (; row + kRowTile <= item.row_hi; row += kRowTile) {
        const T* input[kRowTile];
        for (int r = 0; r < kRowTile; ++r) input[r] = x + u.rows[row + r] * x_stride + column;
        float* out = z + row * u.rank + item.lo;
        int k = 0;
        for (; k + 4 <= count; k += 4) dot_tile<T, kRowTile, 4>(input, a + k, n, out + k, u.rank, first);
        for (; k < count; ++k) dot_tile<T, kRowTile, 1>(input, a + k, n, out + k, u.rank, first);
      }
      for (; row < item.row_hi; ++row) {
        const T* input = x + u.rows[row] * x_stride + column;
        float* out = z + row * u.rank + item.lo;
        int k = 0;
        for (; k + 8 <= count; k += 8) dot_tile<T, 1, 8>(&input, a + k, n, out + k, u.rank, first);
        for (; k < count; ++k) dot_tile<T, 1, 1>(&input, a + k, n, out + k, u.rank, first);
      }
    }
    for (int64_t row = item.row_lo; row < item.row_hi; ++row)
      for (int64_t k = item.lo; k < item.hi; ++k) {
        float& value = z[row * u.rank + k];
        value = Lanes<T>::round(value);
      }
  }

  // Asks for the rows of B of a shrink item's ranks: the expand comes after other work.
  void ask_for_b(const Item& item) const {
    const Unit& u = ws.units[size_t(item.unit)];
    const T* b[kRankBlock];
    for (const Extent* e = u.b; e != u.b_end;) {
      const int64_t n = e->col_n;
      e = tile_rows(step.pool, e, u.b_end, item.lo, item.hi, 0, b);
      for (int64_t k = 0; k < item.hi - item.lo; ++k) {
        const char* const end = reinterpret_cast<const char*>(b[k] + n);
        for (const char* p = reinterpret_cast<const char*>(b[k]); p < end; p += 64) __builtin_prefetch(p, 0, 2);
      }
    }
  }

  void expand(const Item& item) {
    const Unit& u = ws.units[size_t(item.unit)];
    if (u.rank == 0) return columns(u, item, item.lo, item.hi, nullptr);
    const T* b[kMaxRank];
    for (const Extent* e = u.b; e != u.b_end;) {
      const int64_t lo = std::max(item.lo, e->col_lo), hi = std::min(item.hi, e->col_lo + e->col_n);
      if (lo < hi) {
        e = tile_rows(step.pool, e, u.b_end, 0, u.rank, lo - e->col_lo, b);
        if (item.row_hi - item.row_lo <= kFewRows) prefetch(b, u.rank, hi - lo);
        columns(u, item, lo, hi, b);
      } else {
        const int64_t tile = e->col_lo;
        while (e != u.b_end && e->col_lo == tile) ++e;
      }
    }
  }

  // The expand walks all ranks a few columns at a time: too many short streams for the hardware to foresee.
  static void prefetch(const T* const* b, int rank, int64_t n) {
    for (int k = 0; k < rank; ++k) {
      const char* const end = reinterpret_cast<const char*>(b[k] + n);
      for (const char* p = reinterpret_cast<const char*>(b[k]); p < end; p += 64) __builtin_prefetch(p);
    }
  }

  void columns(const Unit& u, const Item& item, int64_t lo, int64_t hi, const T* const* b) {
    const Epilogue e{u.scale, u.g ? u.g + lo : nullptr, u.c ? u.c + lo : nullptr};
    const float* z = z_values + u.z;
    int64_t row = item.row_lo;
    for (; row + kRowTile <= item.row_hi; row += kRowTile) {
      T* out[kRowTile];
      const float* low[kRowTile];
      for (int r = 0; r < kRowTile; ++r) {
        out[r] = y + u.rows[row + r] * y_stride + u.column + lo;
        low[r] = z + (row + r) * u.rank;
      }
      Expand<T, kRowTile>::run(out, low, b, u.rank, hi - lo, e);
    }
    for (; row < item.row_hi; ++row) {
      T* out = y + u.rows[row] * y_stride + u.column + lo;
      const float* low = z + row * u.rank;
      Expand<T, 1>::run(&out, &low, b, u.rank, hi - lo, e);
    }
  }
};

}  // namespace loraplex
