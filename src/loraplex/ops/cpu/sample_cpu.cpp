// Sampling on CPU: penalties in one pass, truncation without a sort, and the Gumbel draw without most of the logarithms.
//
// The definition is model/sampler.py with model/truncate.py and model/philox.py: the same tokens, up to scores that tie
// within float32 rounding. What min_p, top_k and top_p keep is always a prefix of the order (value down, id up), so a
// row's truncation is one cut: the last value and id that stay. A row's result depends on that row alone.
//
// Plain C ABI, called through ctypes; the caller has checked every index. Specification: rulings "Sampling".
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "noise.h"

namespace loraplex {

constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr int kBuckets = 2048;
constexpr float kBucketsPerUnit = 64.0f;  // 2048 buckets reach 32 below the best: a weight of 1e-14
constexpr double kComplete = 1e-6;        // as in model/truncate.py

struct Options {
  float temperature, min_p, top_p;
  int32_t top_k;
  uint32_t seed_low, seed_high;
  int32_t position;
};

struct Cut { float value; int64_t id; };  // a token stays when it is above `value`, or at it with at most this id

struct Scratch {
  std::vector<float> scaled;   // logits over temperature, the best at 0; padded with -inf to whole blocks of 64
  std::vector<float> weight;   // exp of the same
  std::vector<float> peaks;    // the best of each block of 64
  std::vector<double> mass;    // by bucket
  std::vector<int64_t> count;  // by bucket
  std::vector<int64_t> ids;
};

int64_t scale_row(const float* logits, int64_t vocab, float temperature, Scratch& s) {
  int64_t best = 0;
  f32x16 top = f32x16{} + kNone;
  int64_t i = 0;
  for (; i + kLanes <= vocab; i += kLanes) {
    const f32x16 v = Lanes<float>::load(logits + i);
    top = select(v > top, v, top);
  }
  float peak = kNone;
  for (int lane = 0; lane < kLanes; ++lane) peak = std::max(peak, top[lane]);
  for (; i < vocab; ++i) peak = std::max(peak, logits[i]);
  while (best + 1 < vocab && !(logits[best] == peak)) ++best;
  const int64_t padded = (vocab + 63) / 64 * 64;
  s.scaled.resize(size_t(padded));
  for (i = 0; i + kLanes <= vocab; i += kLanes)
    Lanes<float>::store(&s.scaled[size_t(i)], (Lanes<float>::load(logits + i) - peak) / temperature);
  for (; i < vocab; ++i) s.scaled[size_t(i)] = (logits[i] - peak) / temperature;
  std::fill(s.scaled.begin() + vocab, s.scaled.end(), kNone);
  return best;
}

int bucket_of(float scaled) {
  const float b = -scaled * kBucketsPerUnit;
  return b < float(kBuckets - 1) ? int(b) : kBuckets - 1;
}

bool before(const Scratch& s, int64_t a, int64_t b) {
  const float x = s.scaled[size_t(a)], y = s.scaled[size_t(b)];
  return x > y || (x == y && a < b);
}

// Calls `visit` with the tokens whose value lies in [least, most], -inf never, sixteen at a time passed over.
template <class Visit> void within(const Scratch& s, float least, float most, Visit visit) {
  least = std::max(least, -std::numeric_limits<float>::max());
  for (size_t i = 0; i < s.scaled.size(); i += kLanes) {
    const f32x16 v = Lanes<float>::load(&s.scaled[i]);
    const i32x16 in = (v >= least) & (v <= most);
    int32_t any = 0;
    for (int lane = 0; lane < kLanes; ++lane) any |= in[lane];
    if (!any) continue;
    for (int lane = 0; lane < kLanes; ++lane)
      if (in[lane]) visit(i + size_t(lane));
  }
}

// Weights, and the sum of those at or above `floor`.
double weigh(Scratch& s, float floor) {
  s.weight.resize(s.scaled.size());
  double total = 0;
  for (size_t i = 0; i < s.scaled.size(); i += 64) {
    f32x16 sum = {};
    for (size_t j = i; j < i + 64; j += kLanes) {
      const f32x16 v = Lanes<float>::load(&s.scaled[j]);
      const f32x16 w = exp_negative(v);
      Lanes<float>::store(&s.weight[j], w);
      sum += select(v >= floor, w, f32x16{});
    }
    total += double(reduce(sum));
  }
  return total;
}

// A value that at least `count` tokens reach: that many blocks have a best token at or above it.
float reached_by(Scratch& s, int64_t count) {
  if (count > int64_t(s.scaled.size() / 64)) return kNone;
  s.peaks.clear();
  for (size_t i = 0; i < s.scaled.size(); i += 64) {
    f32x16 top = Lanes<float>::load(&s.scaled[i]);
    for (size_t j = i + kLanes; j < i + 64; j += kLanes) {
      const f32x16 v = Lanes<float>::load(&s.scaled[j]);
      top = select(v > top, v, top);
    }
    float peak = kNone;
    for (int lane = 0; lane < kLanes; ++lane) peak = std::max(peak, top[lane]);
    s.peaks.push_back(peak);
  }
  std::nth_element(s.peaks.begin(), s.peaks.begin() + (count - 1), s.peaks.end(), std::greater<float>());
  return s.peaks[size_t(count - 1)];
}

// The cut of a row whose scaled logits lie in `s`.
Cut find_cut(const Options& o, int64_t vocab, Scratch& s) {
  const int64_t limit = o.top_k > 0 ? std::min<int64_t>(o.top_k, vocab) : vocab;
  const float floor = o.min_p > 0 ? std::log(o.min_p) : kNone;
  const bool by_rank = limit < vocab, by_mass = o.top_p < 1.0f;
  if (!by_rank && !by_mass) return {floor, vocab};
  double total = 0;
  float lowest = floor;  // tokens below it cannot stay
  if (by_rank) {
    lowest = std::max(floor, reached_by(s, limit));
  } else {
    total = weigh(s, floor);
    lowest = std::max(floor, float(std::log(total * (1.0 - double(o.top_p)) / (2.0 * double(vocab)))));
  }
  s.mass.assign(kBuckets, 0.0);
  s.count.assign(kBuckets, 0);
  within(s, lowest, 1.0f, [&](size_t i) {
    const size_t b = size_t(bucket_of(s.scaled[i]));
    ++s.count[b];
    if (!by_rank) s.mass[b] += double(s.weight[i]);
  });
  const double goal = (double(o.top_p) - kComplete) * total;
  double mass = 0;
  int64_t kept = 0;
  int edge = 0;
  for (; edge < kBuckets; ++edge) {
    if (by_rank ? kept + s.count[size_t(edge)] >= limit : mass + s.mass[size_t(edge)] >= goal) break;
    kept += s.count[size_t(edge)];
    mass += s.mass[size_t(edge)];
  }
  // With top_k the mass counts from the best token; else only the tokens of the edge bucket are still in question.
  const int first = by_rank ? 0 : edge;
  s.ids.clear();
  // Wider by half a bucket at both ends than the buckets wanted; bucket_of decides.
  const float least = edge >= kBuckets - 1 ? lowest : std::max(lowest, -(float(edge) + 1.5f) / kBucketsPerUnit);
  within(s, least, (0.5f - float(first)) / kBucketsPerUnit, [&](size_t i) {
    const int b = bucket_of(s.scaled[i]);
    if (b >= first && b <= edge) s.ids.push_back(int64_t(i));
  });
  if (s.ids.empty()) return {lowest, vocab};
  std::sort(s.ids.begin(), s.ids.end(), [&](int64_t a, int64_t b) { return before(s, a, b); });
  if (!by_rank) {
    size_t n = 0;
    while (n < s.ids.size() && (mass < goal || kept + int64_t(n) == 0))
      mass += double(s.weight[size_t(s.ids[n++])]);
    n = std::max<size_t>(n, 1);  // the edge bucket was needed: only the order of summing can say otherwise
    return {s.scaled[size_t(s.ids[n - 1])], s.ids[n - 1]};
  }
  size_t n = std::min<size_t>(s.ids.size(), size_t(limit));
  if (by_mass) {
    for (size_t i = 0; i < n; ++i) total += std::exp(double(s.scaled[size_t(s.ids[i])]));
    const double wanted = (double(o.top_p) - kComplete) * total;
    double upto = 0;
    size_t keep = 0;
    while (keep < n && (keep == 0 || upto < wanted)) upto += std::exp(double(s.scaled[size_t(s.ids[keep++])]));
    n = keep;
  }
  return {s.scaled[size_t(s.ids[n - 1])], s.ids[n - 1]};
}

struct Best { float score; int64_t id; };

// Scores the 64 tokens from `first` on and keeps the best. `certain`: score without asking whether any could win.
void score_block(const Options& o, const Scratch& s, const Cut& cut, int64_t first, bool certain, Best& best) {
  f32x16 value[4], top = f32x16{} + kNone;
  for (int j = 0; j < 4; ++j) {
    value[j] = Lanes<float>::load(&s.scaled[size_t(first + j * kLanes)]);
    top = select(value[j] > top, value[j], top);
  }
  float peak = kNone;
  for (int lane = 0; lane < kLanes; ++lane) peak = std::max(peak, top[lane]);
  if (!(peak >= cut.value) || peak == kNone) return;
  u32x16 counter;
  for (uint32_t lane = 0; lane < kLanes; ++lane) counter[lane] = uint32_t(first / 4) + lane;
  u32x16 words[4];
  philox(counter, uint32_t(o.position), o.seed_low, o.seed_high, words);
  if (!certain) {
    // A token wins only with noise above best - value, and noise above t needs v below exp(-t).
    const float need = best.score - peak;
    const double reach = need > 0 ? std::exp(-double(need)) * 4294967296.0 * 1.0001 + 2.0 : 4294967296.0;
    if (reach < 4294967295.0) {
      const u32x16 limit = u32x16{} + uint32_t(reach);
      i32x16 any = {};
      for (int w = 0; w < 4; ++w) any |= words[w] <= limit;
      int32_t hit = 0;
      for (int lane = 0; lane < kLanes; ++lane) hit |= any[lane];
      if (!hit) return;
    }
  }
  f32x16 noise[4];
  for (int w = 0; w < 4; ++w) noise[w] = gumbel(words[w]);
  for (int lane = 0; lane < kLanes; ++lane)
    for (int w = 0; w < 4; ++w) {
      const int64_t id = first + 4 * lane + w;
      const float v = s.scaled[size_t(id)];
      if (v == kNone || v < cut.value || (v == cut.value && id > cut.id)) continue;
      const float score = v + noise[w][lane];
      if (score > best.score || (score == best.score && id < best.id)) best = {score, id};
    }
}

int64_t draw_row(const float* logits, int64_t vocab, const Options& o, Scratch& s) {
  const int64_t top = scale_row(logits, vocab, o.temperature, s);
  const Cut cut = find_cut(o, vocab, s);
  Best best{kNone, top};
  const int64_t start = top / 64 * 64;
  score_block(o, s, cut, start, true, best);
  for (int64_t first = 0; first < vocab; first += 64)
    if (first != start) score_block(o, s, cut, first, false, best);
  return best.id;
}

}  // namespace loraplex

extern "C" {

using loraplex::Options;

// tokens[i]: drawn from row index[i] of logits [*, stride], of which the first `vocab` columns count.
void sample_draw(const float* logits, int64_t stride, const int64_t* index, int64_t n, int64_t vocab,
                 const Options* options, int64_t* tokens) {
#pragma omp parallel if (n > 1)
  {
    loraplex::Scratch scratch;
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < n; ++i)
      tokens[i] = loraplex::draw_row(logits + index[i] * stride, vocab, options[i], scratch);
  }
}

// In place on row index[i] of logits; rows[i]: row of output counts and prompt flags [*, width]. penalties [n][3]:
// repetition, presence, frequency.
void sample_penalise(float* logits, int64_t stride, const int64_t* index, int64_t n, int64_t vocab,
                     const int32_t* output, const uint8_t* prompt, int64_t width, const int64_t* rows,
                     const float* penalties) {
#pragma omp parallel for schedule(dynamic, 1) if (n > 1)
  for (int64_t i = 0; i < n; ++i) {
    float* const row = logits + index[i] * stride;
    const int32_t* const drawn = output + rows[i] * width;
    const uint8_t* const seen = prompt + rows[i] * width;
    const float repetition = penalties[3 * i], presence = penalties[3 * i + 1], frequency = penalties[3 * i + 2];
    for (int64_t t = 0; t < vocab; ++t) {
      const float v = row[t];
      const float repeated = v > 0.0f ? v / repetition : v * repetition;
      const float before = (drawn[t] > 0 || seen[t]) ? repeated : v;
      row[t] = before - frequency * float(drawn[t]) - presence * (drawn[t] > 0 ? 1.0f : 0.0f);
    }
  }
}

// ids [n][count]: the best columns of row i of logits, best first, ties to the lowest id; count at most vocab.
void sample_best(const float* logits, int64_t stride, int64_t n, int64_t vocab, int64_t count, int64_t* ids) {
#pragma omp parallel for schedule(dynamic, 1) if (n > 1)
  for (int64_t i = 0; i < n; ++i) {
    const float* const row = logits + i * stride;
    int64_t* const out = ids + i * count;
    int64_t held = 0;
    for (int64_t t = 0; t < vocab; ++t) {
      if (held == count && !(row[t] > row[out[count - 1]])) continue;
      int64_t at = held < count ? held++ : count - 1;
      for (; at > 0 && row[t] > row[out[at - 1]]; --at) out[at] = out[at - 1];
      out[at] = t;
    }
  }
}

}  // extern "C"
