// One dense projection of any number of rows, all threads. Plain C ABI, called through ctypes; nothing is checked here.
#include "gemm.h"

#if defined(_OPENMP)
#include <omp.h>
#else
inline int omp_get_max_threads() { return 1; }
#endif

namespace loraplex {

template <class T>
void dense(const T* w, const T* bias, int64_t d_in, int64_t columns, int64_t rows, T* y, int64_t y_stride, const T* x,
           int64_t x_stride) {
  const Dense<T> shape{w, bias, d_in, columns};
  const int threads = rows * columns * d_in < (1 << 18) ? 1 : omp_get_max_threads();
  const int64_t panels = shape.panels(), step = panels_per_item(panels, threads);
  DenseColumns<T> work{shape, y, y_stride, x, x_stride};
  work.ahead = elements_ahead(shape, step, threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    static thread_local std::vector<float> scratch;
#pragma omp for schedule(dynamic, 1)
    for (int64_t panel = 0; panel < panels; panel += step)
      work.run(rows, panel, std::min(step, panels - panel), scratch);
  }
}

}  // namespace loraplex

extern "C" {

using loraplex::BF16;

// Whether bf16 products run in the processor's tile unit.
int32_t dense_matrix_unit() { return loraplex::matrix_unit; }

// Bytes of a packed weight.
int64_t dense_packed_bytes(int64_t columns, int64_t d_in, int64_t itemsize) {
  if (itemsize == 2) return loraplex::Dense<BF16>{nullptr, nullptr, d_in, columns}.panels() *
                            loraplex::Dense<BF16>{nullptr, nullptr, d_in, columns}.stride() * 2;
  return loraplex::Dense<float>{nullptr, nullptr, d_in, columns}.panels() *
         loraplex::Dense<float>{nullptr, nullptr, d_in, columns}.stride() * 4;
}
void dense_pack_bfloat16(const void* from, int64_t columns, int64_t d_in, void* to) {
  loraplex::pack_panels(static_cast<const BF16*>(from), columns, d_in, static_cast<BF16*>(to));
}
void dense_pack_float32(const void* from, int64_t columns, int64_t d_in, void* to) {
  loraplex::pack_panels(static_cast<const float*>(from), columns, d_in, static_cast<float*>(to));
}
void dense_unpack_bfloat16(const void* from, int64_t columns, int64_t d_in, void* to) {
  loraplex::unpack_panels(static_cast<const BF16*>(from), columns, d_in, static_cast<BF16*>(to));
}
void dense_unpack_float32(const void* from, int64_t columns, int64_t d_in, void* to) {
  loraplex::unpack_panels(static_cast<const float*>(from), columns, d_in, static_cast<float*>(to));
}
// y [rows, columns] = x [rows, d_in] W^T + bias; strides in elements between rows.
void dense_bfloat16(const void* w, const void* bias, int64_t d_in, int64_t columns, int64_t rows, void* y, int64_t ys,
                    const void* x, int64_t xs) {
  loraplex::dense(static_cast<const BF16*>(w), static_cast<const BF16*>(bias), d_in, columns, rows,
                  static_cast<BF16*>(y), ys, static_cast<const BF16*>(x), xs);
}
void dense_float32(const void* w, const void* bias, int64_t d_in, int64_t columns, int64_t rows, void* y, int64_t ys,
                   const void* x, int64_t xs) {
  loraplex::dense(static_cast<const float*>(w), static_cast<const float*>(bias), d_in, columns, rows,
                  static_cast<float*>(y), ys, static_cast<const float*>(x), xs);
}

}  // extern "C"
