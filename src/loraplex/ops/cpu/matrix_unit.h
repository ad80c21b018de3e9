// Products of bf16 matrices in the processor's tile unit (AMX), where it has one and the kernel lets this process use it.
//
// Panels are what its right operand wants already: a step of 32 elements of d_in by sixteen columns is one tile, whose rows
// are pairs. Two row tiles by two panels give four accumulators. A row of a tile is computed from that row alone, with the
// same instructions however many rows lie beside it, so that its bits are the same alone and in any batch; they differ in
// rounding from those of the vector unit, which therefore never serves some rows of a model and this unit the others.
// Sums flush denormal values to zero, as both units' bf16 products do.
//
// Specification: 0x02 (one base projection over all rows); rulings "Equality".
#pragma once

#include <algorithm>

#include "tiles.h"

#if LORAPLEX_DOT_BF16 && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__)
#define LORAPLEX_MATRIX_UNIT 1
#include <sys/syscall.h>
#include <unistd.h>
#else
#define LORAPLEX_MATRIX_UNIT 0
#endif

namespace loraplex {

#if LORAPLEX_MATRIX_UNIT

// Tile state is eight KiB a thread, which a process has to ask for once (arch_prctl: request permission, tile data).
inline bool request_matrix_unit() { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }
static const bool matrix_unit = request_matrix_unit();  // not inline: that one would be shared with other builds in a process

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileDepth = 32;  // elements of d_in

// Tiles 0 to 3: sums, row tile by panel. 4, 5: inputs. 6, 7: weights.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t column_bytes[16] = {};
  uint8_t rows[16] = {};

  TileConfig(int64_t first, int64_t second) {
    const int64_t heights[8] = {first, first, second, second, first, second, kTileRows, kTileRows};
    for (int i = 0; i < 8; ++i)
      if (heights[i]) column_bytes[i] = 64, rows[i] = uint8_t(heights[i]);
    asm volatile("" ::: "memory");
    _tile_loadconfig(this);
  }
  ~TileConfig() { _tile_release(); }
};

// R row tiles of x times C panels of w, over all of d_in, into sums[row tile][panel][16][16].
template <int R, int C> struct TileProduct {
  const BF16* x;
  int64_t x_stride;
  const BF16* w;
  int64_t stride, d_in, ahead;  // elements of a panel; see DenseColumns

  void run(int64_t first, int64_t second, float* sums) const {
    asm volatile("" ::: "memory");  // tile loads do not tell the compiler what they read
    _tile_zero(0);
    if (C > 1) _tile_zero(1);
    if (R > 1) _tile_zero(2);
    if (R > 1 && C > 1) _tile_zero(3);
    const int64_t whole = d_in / kTileDepth * kTileDepth;
    for (int64_t k = 0; k < whole; k += kTileDepth) {
      const BF16* const weights = w + k * kLanes;
      if (ahead)
        for (int c = 0; c < C; ++c)
          for (int line = 0; line < kTileRows; ++line) __builtin_prefetch(weights + c * stride + ahead + line * 32, 0, 2);
      step(x + k, x + kTileRows * x_stride + k, x_stride * 2, weights, weights + stride);
    }
    if (whole < d_in) last(whole, first, second);
    _tile_stored(0, sums, 64);
    if (C > 1) _tile_stored(1, sums + 256, 64);
    if (R > 1) _tile_stored(2, sums + C * 256, 64);
    if (R > 1 && C > 1) _tile_stored(3, sums + 3 * 256, 64);
  }

  static inline __attribute__((always_inline)) void step(const BF16* low, const BF16* high, int64_t bytes,
                                                         const BF16* left, const BF16* right) {
    _tile_loadd(6, left, 64);
    _tile_loadd(4, low, bytes);
    _tile_dpbf16ps(0, 4, 6);
    if (C > 1) {
      _tile_loadd(7, right, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (R > 1) {
      _tile_loadd(5, high, bytes);
      _tile_dpbf16ps(2, 5, 6);
      if (C > 1) _tile_dpbf16ps(3, 5, 7);
    }
  }

  // What is left of d_in, filled up with zeros: nothing is read beyond a row or a panel.
  void last(int64_t from, int64_t first, int64_t second) const {
    const int64_t n = d_in - from, pairs = (n + 1) / 2;
    alignas(64) BF16 rows[2][kTileRows * kTileDepth] = {}, weights[2][kTileRows * kTileDepth] = {};
    for (int64_t r = 0; r < first; ++r) std::memcpy(rows[0] + r * kTileDepth, x + r * x_stride + from, size_t(n) * 2);
    for (int64_t r = 0; R > 1 && r < second; ++r)
      std::memcpy(rows[1] + r * kTileDepth, x + (kTileRows + r) * x_stride + from, size_t(n) * 2);
    for (int c = 0; c < C; ++c) std::memcpy(weights[c], w + c * stride + from * kLanes, size_t(pairs) * 64);
    asm volatile("" ::: "memory");
    step(rows[0], rows[1], 64, weights[0], weights[1]);
  }
};

// Sixteen bf16 values of sums, rounded to nearest even.
inline void store_rounded(BF16* out, f32x16 v) {
  const __m256bh packed = _mm512_cvtneps_pbh((__m512)v);
  std::memcpy(out, &packed, 32);
}

#else
static const bool matrix_unit = false;
#endif

}  // namespace loraplex
