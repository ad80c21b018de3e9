// One call of the adapter branch for one module group, all threads: see lora.h.
//
// Where adapters and row blocks keep all threads busy, one item does shrink and expand for its rows; else ranks and
// columns are cut finer and a barrier lies between. Plain C ABI, called through ctypes.
#if defined(_OPENMP)
#include <omp.h>
#else
inline int omp_get_max_threads() { return 1; }
#endif

#include "lora.h"

namespace loraplex {

constexpr int64_t kItemsPerThread = 4;  // from here on an item is a whole row block of one adapter and module
constexpr int64_t kSerialWork = 1 << 16;  // multiply-adds, about: below, waking other threads costs more than they save

template <class T>
void apply(const Step* step, const Call* call, int64_t layer, void* y, int64_t y_stride, const void* x,
           int64_t x_stride) {
  static thread_local Workspace own;
  Workspace& ws = own;  // the threads of the region below must see this one
  const int64_t work = collect(*step, *call, layer, ws);
  cut_rows(ws);
  if (ws.whole.empty()) return;
  static thread_local std::vector<float> z_values;
  if (z_values.size() < size_t(ws.z)) z_values.resize(size_t(ws.z));
  Problem<T> problem{*step, ws, z_values.data(), static_cast<T*>(y), y_stride, static_cast<const T*>(x), x_stride};
  const int64_t blocks = int64_t(ws.whole.size());
  const int threads = work < kSerialWork ? 1 : omp_get_max_threads();
  if (threads == 1) {
    for (const Item& block : ws.whole) problem.whole(block);
    return;
  }
  if (blocks >= kItemsPerThread * threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int64_t i = 0; i < blocks; ++i) problem.whole(ws.whole[size_t(i)]);
    return;
  }
  cut_finer(ws);
  const int64_t shrinks = int64_t(ws.shrink.size()), expands = int64_t(ws.expand.size());
#pragma omp parallel num_threads(int(std::min<int64_t>(threads, expands)))
  {
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < shrinks; ++i) problem.shrink(ws.shrink[size_t(i)]);
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t i = 0; i < expands; ++i) problem.expand(ws.expand[size_t(i)]);
  }
}

}  // namespace loraplex

extern "C" {

using loraplex::BF16;
using loraplex::Call;
using loraplex::F16;
using loraplex::Step;

// y [rows, *] and x [rows, *]: strides in elements between rows.
void lora_apply_float32(const Step* s, const Call* c, int64_t layer, void* y, int64_t ys, const void* x, int64_t xs) {
  loraplex::apply<float>(s, c, layer, y, ys, x, xs);
}
void lora_apply_bfloat16(const Step* s, const Call* c, int64_t layer, void* y, int64_t ys, const void* x, int64_t xs) {
  loraplex::apply<BF16>(s, c, layer, y, ys, x, xs);
}
void lora_apply_float16(const Step* s, const Call* c, int64_t layer, void* y, int64_t ys, const void* x, int64_t xs) {
  loraplex::apply<F16>(s, c, layer, y, ys, x, xs);
}

// Which vector path was compiled in: 2 bf16 products, 1 AVX-512, 0 neither.
int32_t lora_vector_level() {
#if LORAPLEX_DOT_BF16
  return 2;
#elif defined(__AVX512F__)
  return 1;
#else
  return 0;
#endif
}

int32_t lora_max_threads() { return omp_get_max_threads(); }

}  // extern "C"
