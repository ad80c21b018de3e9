// Sixteen lanes of what sampling needs: Philox4x32-10, exp, log, and Gumbel noise from 32 uniform bits.
//
// The integers are those of model/philox.py, bit for bit; the functions agree with torch's to a few units in the last
// place.
#pragma once

#include "lanes.h"

namespace loraplex {

typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint64_t u64x16 __attribute__((vector_size(128)));

inline f32x16 select(i32x16 mask, f32x16 yes, f32x16 no) {
  return (f32x16)((mask & (i32x16)yes) | (~mask & (i32x16)no));
}
inline f32x16 at_most(f32x16 v, float limit) { return select(v > limit, f32x16{} + limit, v); }
inline f32x16 at_least(f32x16 v, float limit) { return select(v < limit, f32x16{} + limit, v); }

// High and low words of a 32 by 32 bit product.
inline void multiply(u32x16 a, uint32_t b, u32x16& high, u32x16& low) {
#if defined(__AVX512F__)
  const __m512i factor = _mm512_set1_epi32(int32_t(b));
  const __m512i even = _mm512_mul_epu32((__m512i)a, factor);
  const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64((__m512i)a, 32), factor);
  high = (u32x16)_mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd);
  low = (u32x16)_mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32));
#else
  const u64x16 product = __builtin_convertvector(a, u64x16) * uint64_t(b);
  high = __builtin_convertvector(product >> 32, u32x16);
  low = __builtin_convertvector(product, u32x16);
#endif
}

// Four words for each of sixteen counters (c0, c1, 0, 0).
inline void philox(u32x16 c0, uint32_t counter1, uint32_t k0, uint32_t k1, u32x16 (&out)[4]) {
  u32x16 c1 = u32x16{} + counter1, c2 = {}, c3 = {};
  for (int round = 0; round < 10; ++round) {
    if (round) k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    u32x16 high0, low0, high1, low1;
    multiply(c0, 0xD2511F53u, high0, low0);
    multiply(c2, 0xCD9E8D57u, high1, low1);
    c0 = high1 ^ c1 ^ k0, c1 = low1, c2 = high0 ^ c3 ^ k1, c3 = low0;
  }
  out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

// exp for arguments of at most 0; 0 below -87.
inline f32x16 exp_negative(f32x16 x) {
  const i32x16 vanish = x < -87.0f;
  x = at_least(x, -87.0f);
  const f32x16 scaled = x * 1.44269504f;
  const i32x16 whole = __builtin_convertvector(scaled - 0.5f, i32x16);
  const f32x16 n = __builtin_convertvector(whole, f32x16);
  const f32x16 r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  f32x16 p = f32x16{} + 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return select(vanish, f32x16{}, p * (f32x16)((whole + 127) << 23));
}

// log of positive normal numbers.
inline f32x16 log_positive(f32x16 x) {
  const i32x16 bits = (i32x16)x;
  i32x16 exponent = (bits >> 23) - 126;
  f32x16 m = (f32x16)((bits & 0x007FFFFF) | 0x3F000000);  // [0.5, 1)
  const i32x16 low = m < 0.707106781f;
  exponent += low;  // a true lane is -1
  m = select(low, m + m, m) - 1.0f;
  const f32x16 e = __builtin_convertvector(exponent, f32x16), z = m * m;
  f32x16 p = f32x16{} + 7.0376836292e-2f;
  p = p * m - 1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  f32x16 y = p * m * z + e * -2.12194440e-4f - 0.5f * z;
  return m + y + e * 0.693359375f;
}

// -log(-log(1 - v)) with v = (bits + 1/2) / 2^32; a small v, the tail that wins, keeps its relative precision.
inline f32x16 gumbel(u32x16 bits) {
  const f32x16 v = at_most((__builtin_convertvector(bits, f32x16) + 0.5f) * 2.3283064365386963e-10f, 0x1.fffffep-1f);
  const f32x16 rest = 1.0f - v, taken = 1.0f - rest;
  // log1p(-v) = log(rest) * v / taken, where `taken` is the part of v that `rest` could resolve.
  const f32x16 ratio = v / select(taken == 0.0f, f32x16{} + 1.0f, taken);
  const f32x16 exponential = select(taken == 0.0f, v, -log_positive(rest) * ratio);
  return -log_positive(exponential);
}

}  // namespace loraplex
