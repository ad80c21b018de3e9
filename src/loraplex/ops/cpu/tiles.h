// The two inner products of the adapter branch, for a few rows at a time.
//
// What one element becomes depends on its own row, factor row and column alone: every variant below walks the same
// elements in the same order with the same instructions, so the number of rows beside it cannot change a bit.
#pragma once

#include "lanes.h"

namespace loraplex {

constexpr int kRowTile = 4;   // rows that share loads of a factor
constexpr int kMaxRank = 512;

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define LORAPLEX_DOT_BF16 1
inline __m512i load32(const BF16* p) { return _mm512_loadu_si512(p); }
inline __m512i load32(const BF16* p, __mmask32 mask) { return _mm512_maskz_loadu_epi16(mask, p); }
inline __mmask32 tail_mask(int64_t n) { return __mmask32((uint64_t(1) << n) - 1); }
#else
#define LORAPLEX_DOT_BF16 0
#endif

// out[r][k] = x[r] . a[k] over n elements.
template <class T, int R, int K> struct Dots {
  static void run(const T* const* x, const T* const* a, int64_t n, float (&out)[R][K]) {
    f32x16 sum[R][K] = {};
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
      f32x16 factor[K];
      for (int k = 0; k < K; ++k) factor[k] = Lanes<T>::load(a[k] + i);
      for (int r = 0; r < R; ++r) {
        const f32x16 input = Lanes<T>::load(x[r] + i);
        for (int k = 0; k < K; ++k) sum[r][k] += input * factor[k];
      }
    }
    if (i < n)
      for (int r = 0; r < R; ++r) {
        const f32x16 input = load_tail(x[r] + i, n - i);
        for (int k = 0; k < K; ++k) sum[r][k] += input * load_tail(a[k] + i, n - i);
      }
    for (int r = 0; r < R; ++r)
      for (int k = 0; k < K; ++k) out[r][k] = reduce(sum[r][k]);
  }
};

#if LORAPLEX_DOT_BF16
template <int R, int K> struct Dots<BF16, R, K> {
  static void run(const BF16* const* x, const BF16* const* a, int64_t n, float (&out)[R][K]) {
    __m512 sum[R][K];
    for (int r = 0; r < R; ++r)
      for (int k = 0; k < K; ++k) sum[r][k] = _mm512_setzero_ps();
    int64_t i = 0;
    for (; i + 32 <= n; i += 32) {
      __m512i factor[K];
      for (int k = 0; k < K; ++k) factor[k] = load32(a[k] + i);
      for (int r = 0; r < R; ++r) {
        const __m512i input = load32(x[r] + i);
        for (int k = 0; k < K; ++k)
          sum[r][k] = _mm512_dpbf16_ps(sum[r][k], (__m512bh)input, (__m512bh)factor[k]);
      }
    }
    if (i < n) {
      const __mmask32 mask = tail_mask(n - i);
      for (int r = 0; r < R; ++r) {
        const __m512i input = load32(x[r] + i, mask);
        for (int k = 0; k < K; ++k)
          sum[r][k] = _mm512_dpbf16_ps(sum[r][k], (__m512bh)input, (__m512bh)load32(a[k] + i, mask));
      }
    }
    for (int r = 0; r < R; ++r)
      for (int k = 0; k < K; ++k) out[r][k] = reduce((f32x16)sum[r][k]);
  }
};
#endif

// What follows the sum over ranks of one output: y = g * (y + scale * sum) + c, rounded once.
struct Epilogue {
  float scale;
  const float* g;  // null: absent
  const float* c;
};

inline f32x16 finish(f32x16 y, f32x16 sum, const Epilogue& e, int64_t column, int64_t n) {
  y += e.scale * sum;
  if (e.g) y *= n < kLanes ? load_tail(e.g + column, n) : Lanes<float>::load(e.g + column);
  if (e.c) y += n < kLanes ? load_tail(e.c + column, n) : Lanes<float>::load(e.c + column);
  return y;
}

// y[r][j] for columns [0, n) of one column tile. z[r]: `rank` values; b[k]: row k of B-transposed at column 0; the
// epilogue's vectors start at column 0 too.
template <class T, int R> struct Expand {
  static void run(T* const* y, const float* const* z, const T* const* b, int rank, int64_t n, const Epilogue& e) {
    constexpr int U = R == 1 ? 4 : 2;
    int64_t j = 0;
    for (; j + U * kLanes <= n; j += U * kLanes) block<U>(y, z, b, rank, j, e);
    for (; j + kLanes <= n; j += kLanes) block<1>(y, z, b, rank, j, e);
    if (j == n) return;
    f32x16 sum[R] = {};
    for (int k = 0; k < rank; ++k) {
      const f32x16 factor = load_tail(b[k] + j, n - j);
      for (int r = 0; r < R; ++r) sum[r] += z[r][k] * factor;
    }
    for (int r = 0; r < R; ++r)
      store_tail(y[r] + j, finish(load_tail(y[r] + j, n - j), sum[r], e, j, n - j), n - j);
  }

  template <int U>
  static void block(T* const* y, const float* const* z, const T* const* b, int rank, int64_t j, const Epilogue& e) {
    f32x16 sum[R][U] = {};
    for (int k = 0; k < rank; ++k)
      for (int u = 0; u < U; ++u) {
        const f32x16 factor = Lanes<T>::load(b[k] + j + u * kLanes);
        for (int r = 0; r < R; ++r) sum[r][u] += z[r][k] * factor;
      }
    for (int r = 0; r < R; ++r)
      for (int u = 0; u < U; ++u) {
        T* out = y[r] + j + u * kLanes;
        Lanes<T>::store(out, finish(Lanes<T>::load(out), sum[r][u], e, j + u * kLanes, kLanes));
      }
  }
};

#if LORAPLEX_DOT_BF16
// Two ranks at a time: 32 columns give two accumulators, one of the even and one of the odd columns, so that two rows
// of B pair up by shifts alone. z holds bf16 values, so that pairing them loses nothing.
template <int R> struct Expand<BF16, R> {
  static void run(BF16* const* y, const float* const* z, const BF16* const* b, int rank, int64_t n, const Epilogue& e) {
    constexpr int U = R == 1 ? 4 : 2;
    int64_t j = 0;
    for (; j + U * 32 <= n; j += U * 32) block<U>(y, z, b, rank, j, ~__mmask32(0), e);
    for (; j + 32 <= n; j += 32) block<1>(y, z, b, rank, j, ~__mmask32(0), e);
    if (j < n) block<1>(y, z, b, rank, j, tail_mask(n - j), e);
  }

  static __m512i pair(float low, float high) {
    uint32_t lo, hi;
    std::memcpy(&lo, &low, 4);
    std::memcpy(&hi, &high, 4);
    return _mm512_set1_epi32(int32_t((lo >> 16) | (hi & 0xFFFF0000u)));
  }

  template <int U>
  static void block(BF16* const* y, const float* const* z, const BF16* const* b, int rank, int64_t j, __mmask32 mask,
                    const Epilogue& e) {
    __m512 even[R][U], odd[R][U];
    for (int r = 0; r < R; ++r)
      for (int u = 0; u < U; ++u) even[r][u] = odd[r][u] = _mm512_setzero_ps();
    for (int k = 0; k < rank; k += 2) {
      const bool last = k + 1 == rank;
      __m512i weight[R];
      for (int r = 0; r < R; ++r) weight[r] = pair(z[r][k], last ? 0.0f : z[r][k + 1]);
      for (int u = 0; u < U; ++u) {
        const __m512i first = load32(b[k] + j + u * 32, mask);
        const __m512i second = last ? _mm512_setzero_si512() : load32(b[k + 1] + j + u * 32, mask);
        const __m512i evens = _mm512_mask_blend_epi16(0xAAAAAAAA, first, _mm512_slli_epi32(second, 16));
        const __m512i odds = _mm512_mask_blend_epi16(0xAAAAAAAA, _mm512_srli_epi32(first, 16), second);
        for (int r = 0; r < R; ++r) {
          even[r][u] = _mm512_dpbf16_ps(even[r][u], (__m512bh)weight[r], (__m512bh)evens);
          odd[r][u] = _mm512_dpbf16_ps(odd[r][u], (__m512bh)weight[r], (__m512bh)odds);
        }
      }
    }
    for (int r = 0; r < R; ++r)
      for (int u = 0; u < U; ++u) close(y[r] + j + u * 32, even[r][u], odd[r][u], j + u * 32, mask, e);
  }

  static void close(BF16* y, __m512 even, __m512 odd, int64_t column, __mmask32 mask, const Epilogue& e) {
    const __m512i raw = load32(y, mask);
    f32x16 low = (f32x16)_mm512_slli_epi32(raw, 16);
    f32x16 high = (f32x16)_mm512_and_si512(raw, _mm512_set1_epi32(int32_t(0xFFFF0000u)));
    low += e.scale * (f32x16)even;
    high += e.scale * (f32x16)odd;
    if (e.g) split(e.g + column, mask, low, high, [](f32x16& v, f32x16 by) { v *= by; });
    if (e.c) split(e.c + column, mask, low, high, [](f32x16& v, f32x16 by) { v += by; });
    const __m512i upper = _mm512_slli_epi32(rounded((__m512)high), 16);
    _mm512_mask_storeu_epi16(y, mask, _mm512_or_si512(upper, rounded((__m512)low)));
  }

  // Each value as bf16 bits in the low half of its lane.
  static __m512i rounded(__m512 v) {
    const __m256bh packed = _mm512_cvtneps_pbh(v);
    __m256i bits;
    std::memcpy(&bits, &packed, sizeof bits);
    return _mm512_cvtepu16_epi32(bits);
  }

  // Applies 32 float32 values to even and odd columns.
  template <class Apply>
  static void split(const float* v, __mmask32 mask, f32x16& low, f32x16& high, Apply apply) {
    const __m512 first = _mm512_maskz_loadu_ps(__mmask16(mask), v);
    const __m512 second = _mm512_maskz_loadu_ps(__mmask16(mask >> 16), v + 16);
    const __m512i evens = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odds = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    apply(low, (f32x16)_mm512_permutex2var_ps(first, evens, second));
    apply(high, (f32x16)_mm512_permutex2var_ps(first, odds, second));
  }
};
#endif

}  // namespace loraplex
