// What a decoder layer does to single rows: norms, rotation, attention over the page pool, the gated activation.
//
// Sums are float32 in a fixed order and each result is rounded once, so a row's bits do not depend on other rows.
// Loads touch exactly the elements of a row's own history. Specification: 0x03D; rulings "One page pool".
#pragma once

#include <cmath>
#include <vector>

#include "noise.h"
#include "tiles.h"

namespace loraplex {

template <class T> inline f32x16 load_some(const T* p, int64_t n) {
  return n < kLanes ? load_tail(p, n) : Lanes<T>::load(p);
}
template <class T> inline void store_some(T* p, f32x16 v, int64_t n) {
  if (n < kLanes) store_tail(p, v, n);
  else Lanes<T>::store(p, v);
}

// hidden += add (rounded), where there is one; out = hidden / rms(hidden) * weight.
template <class T>
void add_norm(T* hidden, const T* add, const T* weight, int64_t n, float eps, T* out) {
  f32x16 squares = {};
  for (int64_t i = 0; i < n; i += kLanes) {
    f32x16 v = load_some(hidden + i, n - i);
    if (add) {
      store_some(hidden + i, v + load_some(add + i, n - i), n - i);
      v = load_some(hidden + i, n - i);
    }
    squares += v * v;
  }
  const float scale = 1.0f / std::sqrt(reduce(squares) / float(n) + eps);
  for (int64_t i = 0; i < n; i += kLanes)
    store_some(out + i, load_some(hidden + i, n - i) * scale * load_some(weight + i, n - i), n - i);
}

// One head in place: its own norm where there is one, then the rotation. sin carries the rotation's sign.
template <class T>
void rotate(T* head, const T* norm, float eps, const T* cos, const T* sin, int64_t n, float* room) {
  float scale = 1.0f;
  if (norm) {
    f32x16 squares = {};
    for (int64_t i = 0; i < n; i += kLanes) {
      const f32x16 v = load_some(head + i, n - i);
      squares += v * v;
    }
    scale = 1.0f / std::sqrt(reduce(squares) / float(n) + eps);
  }
  const int64_t half = n / 2;
  for (int64_t i = 0; i < n; i += kLanes) {
    f32x16 v = load_some(head + i, n - i);
    if (norm) v = v * scale * load_some(norm + i, n - i);
    store_some(room + i, v, n - i);
  }
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t m = half - i;
    const f32x16 low = load_some(room + i, m), high = load_some(room + half + i, m);
    store_some(head + i, low * load_some(cos + i, m) + high * load_some(sin + i, m), m);
    store_some(head + half + i, high * load_some(cos + half + i, m) + low * load_some(sin + half + i, m), m);
  }
}

// Where the keys and values of one layer and key head lie.
template <class T> struct History {
  const uint8_t* pool;
  int64_t page_bytes, page_tokens, row_elements, first_element, value_elements;
  const int32_t* pages;  // page table of the request

  const T* key(int64_t position) const {
    const uint8_t* page = pool + pages[position / page_tokens] * page_bytes;
    return reinterpret_cast<const T*>(page) + first_element + position % page_tokens * row_elements;
  }
  const T* value(int64_t position) const { return key(position) + value_elements; }
};

struct AttentionRoom {
  std::vector<float> scores;  // [heads][positions, rounded up to lanes]
};

// G query heads q [G][n] over positions [first, end) of one key head; out[g] gets n values.
template <class T, int G>
void attend(const T* const* q, const History<T>& history, int64_t first, int64_t end, int64_t n, float scale,
            T* const* out, AttentionRoom& room) {
  constexpr int K = 4;
  const int64_t count = end - first, stride = (count + kLanes - 1) / kLanes * kLanes;
  room.scores.resize(size_t(G * stride));
  float* scores = room.scores.data();
  int64_t i = 0;
  for (; i + K <= count; i += K) {
    const T* keys[K];
    for (int k = 0; k < K; ++k) keys[k] = history.key(first + i + k);
    float dots[G][K];
    Dots<T, G, K>::run(q, keys, n, dots);
    for (int g = 0; g < G; ++g)
      for (int k = 0; k < K; ++k) scores[g * stride + i + k] = dots[g][k] * scale;
  }
  for (; i < count; ++i) {
    const T* key = history.key(first + i);
    float dots[G][1];
    Dots<T, G, 1>::run(q, &key, n, dots);
    for (int g = 0; g < G; ++g) scores[g * stride + i] = dots[g][0] * scale;
  }
  float inverse[G];
  for (int g = 0; g < G; ++g) {
    float* row = scores + g * stride;
    for (i = count; i < stride; ++i) row[i] = -std::numeric_limits<float>::infinity();
    float best = row[0];
    for (i = 1; i < count; ++i) best = std::max(best, row[i]);
    f32x16 total = {};
    for (i = 0; i < stride; i += kLanes) {
      const f32x16 p = exp_negative(Lanes<float>::load(row + i) - best);
      Lanes<float>::store(row + i, p);
      total += p;
    }
    inverse[g] = 1.0f / reduce(total);
  }
  constexpr int U = 4;  // lanes of values at a time
  for (int64_t d = 0; d < n; d += U * kLanes) {
    f32x16 sum[G][U] = {};
    if (n - d >= U * kLanes) {
      for (i = 0; i < count; ++i) {
        const T* value = history.value(first + i) + d;
        for (int u = 0; u < U; ++u) {
          const f32x16 v = Lanes<T>::load(value + u * kLanes);
          for (int g = 0; g < G; ++g) sum[g][u] += scores[g * stride + i] * v;
        }
      }
    } else {
      for (i = 0; i < count; ++i) {
        const T* value = history.value(first + i) + d;
        for (int u = 0; u < U && d + u * kLanes < n; ++u) {
          const f32x16 v = load_some(value + u * kLanes, n - d - u * kLanes);
          for (int g = 0; g < G; ++g) sum[g][u] += scores[g * stride + i] * v;
        }
      }
    }
    for (int g = 0; g < G; ++g)
      for (int u = 0; u < U && d + u * kLanes < n; ++u)
        store_some(out[g] + d + u * kLanes, sum[g][u] * inverse[g], n - d - u * kLanes);
  }
}

// Any number of query heads, four at a time.
template <class T>
void attend_group(const T* const* q, int64_t heads, const History<T>& history, int64_t first, int64_t end, int64_t n,
                  float scale, T* const* out, AttentionRoom& room) {
  for (int64_t h = 0; h < heads; h += 4) switch (std::min<int64_t>(heads - h, 4)) {
      case 1: attend<T, 1>(q + h, history, first, end, n, scale, out + h, room); break;
      case 2: attend<T, 2>(q + h, history, first, end, n, scale, out + h, room); break;
      case 3: attend<T, 3>(q + h, history, first, end, n, scale, out + h, room); break;
      default: attend<T, 4>(q + h, history, first, end, n, scale, out + h, room); break;
    }
}

// out = silu(gate) * up.
template <class T> void gated(const T* gate, const T* up, int64_t n, T* out) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const f32x16 g = load_some(gate + i, n - i);
    const i32x16 negative = g < 0.0f;
    const f32x16 e = exp_negative(select(negative, g, -g));
    const f32x16 sigmoid = select(negative, e, f32x16{} + 1.0f) / (1.0f + e);
    store_some(out + i, g * sigmoid * load_some(up + i, n - i), n - i);
  }
}

}  // namespace loraplex
