// Sixteen-lane arithmetic for the three factor types, on whatever vector unit the compiler was told of.
//
// Loads and stores touch exactly the elements they name: tails go through a zeroed buffer, never past the end.
// Rounding to bf16 and fp16 is to nearest even.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

namespace loraplex {

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

constexpr int kLanes = 16;

struct BF16 { uint16_t bits; };
struct F16 { uint16_t bits; };

// Lane sums in one fixed order: halves are folded until one lane is left.
inline float reduce(f32x16 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);  // the same folds
#endif
  float lane[kLanes];
  std::memcpy(lane, &v, sizeof lane);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
  return lane[0];
}

inline float half_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000u) << 16, exponent = (h >> 10) & 0x1Fu, mantissa = h & 0x3FFu;
  float out;
  uint32_t bits;
  if (exponent == 0) {
    out = float(mantissa) * 5.9604644775390625e-8f;  // 2^-24
    std::memcpy(&bits, &out, 4);
    bits |= sign;
  } else {
    bits = sign | (exponent == 31 ? 0x7F800000u : (exponent + 112) << 23) | (mantissa << 13);
  }
  std::memcpy(&out, &bits, 4);
  return out;
}

inline uint16_t float_to_half(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  const uint16_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return sign | 0x7E00u;
  if (magnitude >= 0x477FF000u) return sign | 0x7C00u;  // rounds to 65536 or more
  if (magnitude < 0x38800000u) {                        // below 2^-14: a multiple of 2^-24
    float positive, scaled;
    std::memcpy(&positive, &magnitude, 4);
    scaled = positive + 0.5f;  // the ulp of [0.5, 1) is 2^-24: the addition rounds
    uint32_t sum;
    std::memcpy(&sum, &scaled, 4);
    return sign | uint16_t(sum - 0x3F000000u);
  }
  const uint32_t odd = (magnitude >> 13) & 1u;
  return sign | uint16_t((magnitude - 0x38000000u + 0xFFFu + odd) >> 13);
}

inline i32x16 round_bf16_bits(f32x16 v) {
  const i32x16 bits = (i32x16)v;
  const i32x16 nan = (bits & 0x7FFFFFFF) > 0x7F800000;
  const i32x16 rounded = bits + 0x7FFF + ((bits >> 16) & 1);
  return (nan & (bits | 0x400000)) | (~nan & rounded);
}

template <class T> struct Lanes;

template <> struct Lanes<float> {
  static f32x16 load(const float* p) { f32x16 v; std::memcpy(&v, p, 64); return v; }
  static void store(float* p, f32x16 v) { std::memcpy(p, &v, 64); }
  static float round(float v) { return v; }
};

template <> struct Lanes<BF16> {
  static f32x16 load(const BF16* p) {
    u16x16 raw;
    std::memcpy(&raw, p, 32);
    return (f32x16)(__builtin_convertvector(raw, i32x16) << 16);
  }
  static void store(BF16* p, f32x16 v) {
    const u16x16 raw = __builtin_convertvector(round_bf16_bits(v) >> 16, u16x16);
    std::memcpy(p, &raw, 32);
  }
  static float round(float v) {
    uint32_t bits;
    std::memcpy(&bits, &v, 4);
    const bool nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
    bits = (nan ? bits | 0x400000u : bits + 0x7FFFu + ((bits >> 16) & 1u)) & 0xFFFF0000u;
    std::memcpy(&v, &bits, 4);
    return v;
  }
};

template <> struct Lanes<F16> {
  static f32x16 load(const F16* p) {
#if defined(__AVX512F__)
    __m256i raw;
    std::memcpy(&raw, p, 32);
    return (f32x16)_mm512_cvtph_ps(raw);
#else
    f32x16 v;
    for (int i = 0; i < kLanes; ++i) v[i] = half_to_float(p[i].bits);
    return v;
#endif
  }
  static void store(F16* p, f32x16 v) {
#if defined(__AVX512F__)
    const __m256i raw = _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    std::memcpy(p, &raw, 32);
#else
    for (int i = 0; i < kLanes; ++i) p[i].bits = float_to_half(v[i]);
#endif
  }
  static float round(float v) { return half_to_float(float_to_half(v)); }
};

// The first n < 16 elements; the other lanes are zero.
template <class T> inline f32x16 load_tail(const T* p, int64_t n) {
  T buffer[kLanes] = {};
  std::memcpy(buffer, p, size_t(n) * sizeof(T));
  return Lanes<T>::load(buffer);
}

template <class T> inline void store_tail(T* p, f32x16 v, int64_t n) {
  T buffer[kLanes];
  Lanes<T>::store(buffer, v);
  std::memcpy(p, buffer, size_t(n) * sizeof(T));
}

}  // namespace loraplex
