// Dense projections: y = x W^T + b over weights packed in panels of sixteen output columns.
//
// A panel holds all of d_in for its columns, in the order in which a step reads them: pairs of bf16, single floats.
// Every element is one sum over d_in in ascending order in one accumulator (bf16 in the tile unit: in steps of 32), whatever
// the number of rows, the tile that it falls into and the thread that computes it: a row's result is the same bits alone
// and in any batch.
//
// Specification: 0x02 (one base projection over all rows); rulings "Equality".
#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>
#include <vector>

#include "matrix_unit.h"
#include "tiles.h"

namespace loraplex {

constexpr int64_t kDenseRows = 8;      // rows of a register tile
constexpr int kDensePanels = 3;        // panels of a register tile: 24 accumulators
constexpr int kItemPanels = LORAPLEX_MATRIX_UNIT ? 4 : kDensePanels;  // panels of a work item
constexpr int64_t kDenseBlock = 2048;  // elements of d_in that many row blocks reuse from the second-level cache

// Elements of d_in that one step consumes.
template <class T> struct Depth { static constexpr int64_t value = 1; };
#if LORAPLEX_DOT_BF16
template <> struct Depth<BF16> { static constexpr int64_t value = 2; };
#endif

// A weight [columns, d_in] in panels.
template <class T> struct Dense {
  const T* w;
  const T* bias;  // [columns] or null
  int64_t d_in, columns;

  static int64_t steps(int64_t d_in) { return (d_in + Depth<T>::value - 1) / Depth<T>::value; }
  int64_t panels() const { return (columns + kLanes - 1) / kLanes; }
  int64_t stride() const { return steps(d_in) * Depth<T>::value * kLanes; }  // elements of a panel
};

template <class T> void pack_panels(const T* from, int64_t columns, int64_t d_in, T* to) {
  constexpr int64_t depth = Depth<T>::value;
  const Dense<T> shape{nullptr, nullptr, d_in, columns};
  std::memset(to, 0, size_t(shape.panels() * shape.stride()) * sizeof(T));
  for (int64_t n = 0; n < columns; ++n) {
    T* panel = to + n / kLanes * shape.stride() + n % kLanes * depth;
    for (int64_t k = 0; k < d_in; ++k) panel[k / depth * depth * kLanes + k % depth] = from[n * d_in + k];
  }
}

template <class T> void unpack_panels(const T* from, int64_t columns, int64_t d_in, T* to) {
  constexpr int64_t depth = Depth<T>::value;
  const Dense<T> shape{nullptr, nullptr, d_in, columns};
  for (int64_t n = 0; n < columns; ++n) {
    const T* panel = from + n / kLanes * shape.stride() + n % kLanes * depth;
    for (int64_t k = 0; k < d_in; ++k) to[n * d_in + k] = panel[k / depth * depth * kLanes + k % depth];
  }
}

// A weight is read once, from memory: ask for the second-level cache what a later item of this thread will read.
inline void fetch(const void* p) { __builtin_prefetch(p, 0, 2); }

template <class T, int R, int C> struct DenseTile {
  static void run(const T* const* x, const T* w, int64_t stride, int64_t begin, int64_t end, int64_t,
                  f32x16 (&sum)[R][C]) {
    for (int64_t k = begin; k < end; ++k) {
      f32x16 factor[C];
      for (int c = 0; c < C; ++c) factor[c] = Lanes<T>::load(w + c * stride + k * kLanes);
      for (int r = 0; r < R; ++r) {
        const f32x16 input = f32x16{} + value(x[r] + k);
        for (int c = 0; c < C; ++c) sum[r][c] += input * factor[c];
      }
    }
  }
  static float value(const T* p) {
    T buffer[kLanes] = {*p};
    return Lanes<T>::load(buffer)[0];
  }
};

template <int R, int C> struct DenseTile<float, R, C> {
  static void run(const float* const* x, const float* w, int64_t stride, int64_t begin, int64_t end, int64_t ahead,
                  f32x16 (&sum)[R][C]) {
    for (int64_t k = begin; k < end; ++k) {
      if (ahead)
        for (int c = 0; c < C; ++c) fetch(w + c * stride + k * kLanes + ahead);
      f32x16 factor[C];
      for (int c = 0; c < C; ++c) factor[c] = Lanes<float>::load(w + c * stride + k * kLanes);
      for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) sum[r][c] += x[r][k] * factor[c];
    }
  }
};

#if LORAPLEX_DOT_BF16
template <int R, int C> struct DenseTile<BF16, R, C> {
  // begin and end are even, or end is d_in.
  static void run(const BF16* const* x, const BF16* w, int64_t stride, int64_t begin, int64_t end, int64_t ahead,
                  f32x16 (&sum)[R][C]) {
    __m512 acc[R][C];
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) acc[r][c] = (__m512)sum[r][c];
    if (ahead) {
      for (int64_t k = begin; k + 2 <= end; k += 2) {
        for (int c = 0; c < C; ++c) fetch(w + c * stride + k * kLanes + ahead);
        step(x, w, stride, k, acc, false);
      }
    } else {
      for (int64_t k = begin; k + 2 <= end; k += 2) step(x, w, stride, k, acc, false);
    }
    if (end & 1) step(x, w, stride, end - 1, acc, true);
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) sum[r][c] = (f32x16)acc[r][c];
  }
  static inline __attribute__((always_inline)) void step(const BF16* const* x, const BF16* w, int64_t stride, int64_t k,
                                                         __m512 (&acc)[R][C], bool half) {
    __m512i factor[C];
    for (int c = 0; c < C; ++c) factor[c] = _mm512_loadu_si512(w + c * stride + k * kLanes);
    for (int r = 0; r < R; ++r) {
      int32_t pair = 0;
      std::memcpy(&pair, x[r] + k, half ? 2 : 4);
      const __m512i input = _mm512_set1_epi32(pair);
      for (int c = 0; c < C; ++c) acc[r][c] = _mm512_dpbf16_ps(acc[r][c], (__m512bh)input, (__m512bh)factor[c]);
    }
  }
};
#endif

// Rows [0, rows) of x times up to kItemPanels panels from `panel` on, into the columns [from, to) of y.
template <class T> struct DenseColumns {
  const Dense<T>& dense;
  T* y;
  int64_t y_stride;
  const T* x;
  int64_t x_stride;
  int64_t from = 0, to = std::numeric_limits<int64_t>::max();
  const int32_t* y_rows = nullptr;  // row of y for each row of x; null: the same
  int64_t ahead = 0;  // elements from a weight to the one that is asked for beside it; 0: none

  void run(int64_t rows, int64_t panel, int64_t count, std::vector<float>& scratch) const {
#if LORAPLEX_MATRIX_UNIT
    if constexpr (std::is_same_v<T, BF16>)
      if (matrix_unit) return in_tiles(rows, panel, count);
#endif
    for (; count >= kDensePanels; count -= kDensePanels, panel += kDensePanels)
      blocks<kDensePanels>(rows, panel, scratch);
    if (count == 2) blocks<2>(rows, panel, scratch);
    if (count == 1) blocks<1>(rows, panel, scratch);
  }

#if LORAPLEX_MATRIX_UNIT
  void in_tiles(int64_t rows, int64_t panel, int64_t count) const {
    const int64_t pairs = rows / (2 * kTileRows) * 2 * kTileRows, left = rows - pairs;
    if (pairs) {
      const TileConfig config(kTileRows, kTileRows);
      for (int64_t p = 0; p < count; p += 2)
        for (int64_t row = 0; row < pairs; row += 2 * kTileRows)
          tile_columns<2>(row, kTileRows, kTileRows, panel + p, count - p);
    }
    if (!left) return;
    const int64_t first = std::min(left, kTileRows), second = left - first;
    const TileConfig config(first, second);
    for (int64_t p = 0; p < count; p += 2)
      if (second) tile_columns<2>(pairs, first, second, panel + p, count - p);
      else tile_columns<1>(pairs, first, 0, panel + p, count - p);
  }

  template <int R> void tile_columns(int64_t row, int64_t first, int64_t second, int64_t panel, int64_t count) const {
    const BF16 *const input = x + row * x_stride, *const weights = dense.w + panel * dense.stride();
    const int64_t fetched = row == 0 ? ahead : 0;
    alignas(64) float sums[R * 2 * 256];
    if (count > 1) TileProduct<R, 2>{input, x_stride, weights, dense.stride(), dense.d_in, fetched}.run(first, second, sums);
    else TileProduct<R, 1>{input, x_stride, weights, dense.stride(), dense.d_in, fetched}.run(first, second, sums);
    const int wide = count > 1 ? 2 : 1;
    for (int c = 0; c < wide; ++c) {
      const int64_t column = (panel + c) * kLanes, n = std::min<int64_t>(dense.columns - column, kLanes);
      const int64_t low = std::max<int64_t>(from - column, 0), high = std::min(to - column, n);
      f32x16 bias = {};
      if (dense.bias) bias = n < kLanes ? load_tail(dense.bias + column, n) : Lanes<T>::load(dense.bias + column);
      for (int64_t r = 0; r < first + second; ++r) {
        const float* const sum = sums + ((r / kTileRows * wide + c) * kTileRows + r % kTileRows) * kLanes;
        T* const out = y + (y_rows ? y_rows[row + r] : row + r) * y_stride + column;
        const f32x16 value = Lanes<float>::load(sum) + bias;
        if (low == 0 && high == kLanes) store_rounded(out, value);
        else store(out, value, low, high);
      }
    }
  }
#endif

  template <int C> void blocks(int64_t rows, int64_t panel, std::vector<float>& scratch) const {
    const int64_t d_in = dense.d_in;
    const bool carried = rows > kDenseRows && d_in > kDenseBlock;
    if (carried) scratch.assign(size_t(rows * C * kLanes), 0.0f);
    const int64_t block = carried ? kDenseBlock : d_in;
    for (int64_t begin = 0; begin < d_in; begin += block) {
      const int64_t end = std::min(begin + block, d_in);
      for (int64_t row = 0; row < rows; row += kDenseRows) {
        float* carry = carried ? scratch.data() + row * C * kLanes : nullptr;
        switch (std::min(rows - row, kDenseRows)) {
          case 1: tile<1, C>(row, panel, begin, end, carry); break;
          case 2: tile<2, C>(row, panel, begin, end, carry); break;
          case 3: tile<3, C>(row, panel, begin, end, carry); break;
          case 4: tile<4, C>(row, panel, begin, end, carry); break;
          case 5: tile<5, C>(row, panel, begin, end, carry); break;
          case 6: tile<6, C>(row, panel, begin, end, carry); break;
          case 7: tile<7, C>(row, panel, begin, end, carry); break;
          default: tile<8, C>(row, panel, begin, end, carry); break;
        }
      }
    }
  }

  // Lanes [low, high) of v.
  static void store(T* out, f32x16 v, int64_t low, int64_t high) {
    if (low == 0 && high == kLanes) return Lanes<T>::store(out, v);
    if (low >= high) return;
    T lanes[kLanes];
    Lanes<T>::store(lanes, v);
    std::memcpy(out + low, lanes + low, size_t(high - low) * sizeof(T));
  }

  template <int R, int C> void tile(int64_t row, int64_t panel, int64_t begin, int64_t end, float* carry) const {
    const T* input[R];
    for (int r = 0; r < R; ++r) input[r] = x + (row + r) * x_stride;
    f32x16 sum[R][C] = {};
    if (carry)
      for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) sum[r][c] = Lanes<float>::load(carry + (r * C + c) * kLanes);
    DenseTile<T, R, C>::run(input, dense.w + panel * dense.stride(), dense.stride(), begin, end,
                            row == 0 ? ahead : 0, sum);
    if (carry && end < dense.d_in) {
      for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) Lanes<float>::store(carry + (r * C + c) * kLanes, sum[r][c]);
      return;
    }
    for (int c = 0; c < C; ++c) {
      const int64_t column = (panel + c) * kLanes, n = std::min<int64_t>(dense.columns - column, kLanes);
      f32x16 bias = {};
      if (dense.bias) bias = n < kLanes ? load_tail(dense.bias + column, n) : Lanes<T>::load(dense.bias + column);
      for (int r = 0; r < R; ++r) {
        T* out = y + (y_rows ? y_rows[row + r] : row + r) * y_stride + column;
        store(out, sum[r][c] + bias, std::max<int64_t>(from - column, 0), std::min(to - column, n));
      }
    }
  }
};

// Elements from an item's panels to those of the item after the next of the same thread.
template <class T> int64_t elements_ahead(const Dense<T>& dense, int64_t step, int threads) {
  return std::max<int64_t>(2, threads) * step * dense.stride();
}

// Panels of one work item: as many as share their inputs while every thread still gets several items.
inline int64_t panels_per_item(int64_t panels, int threads) {
  return std::clamp<int64_t>(panels / (4 * threads), 1, kItemPanels);
}

}  // namespace loraplex
