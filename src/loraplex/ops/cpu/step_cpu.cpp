// The layers of one step on CPU, in one parallel region: norms, projections with their adapters, attention of decode
// rows, activation. Attention of prefill rows is the caller's, layer by layer, between the two halves of a layer.
//
// Everything a row becomes depends on that row, its history and its adapter alone; threads, items and the other rows
// change no bit. Plain C ABI, called through ctypes; the caller has checked shapes, page tables and adapters.
// Specification: 0x02 (one base projection, many adapter projections), 0x03D; rulings "Equality".
#if defined(_OPENMP)
#include <omp.h>
#else
inline int omp_get_max_threads() { return 1; }
inline int omp_get_num_threads() { return 1; }
#endif

#include "gemm.h"
#include "lora.h"
#include "rows.h"
#include "team.h"

namespace loraplex {

// One projection of a layer.
struct Projection { const void *w, *bias; };

struct Layer {
  const void *input_norm, *post_norm, *qk_norm;
  Projection qkv, o, gate_up, down;
  int64_t window;  // positions that a row sees; 0: all
};

struct Model {
  int64_t hidden, inner, heads, kv_heads, head_dim;
  const Layer* layers;
  const void *cos, *sin;  // [positions][head_dim]
  uint8_t* pool;
  int64_t page_bytes, page_tokens;
  double eps;
};

struct Batch {
  int64_t rows, decode_from;   // rows from here on attend here
  const int64_t* positions;    // [rows]
  const int32_t* pages;        // [requests][entries]
  int64_t entries;
  const int32_t* request;      // [rows]
  void *hidden, *norm, *qkv, *attended, *gate_up, *active, *out;
  const Step* adapters;        // null: base rows only
  const Call* calls;           // [4]: q k v; o; gate up; down
  float* z;
  void* scaled;                // room for inputs times h: rows * modules of a call * d_in; null: no adapter has an h
};

enum Parts : int64_t { kHead = 1, kTail = 2, kFirst = 4, kLast = 8 };

template <class T> struct Layers {
  const Model& m;
  const Batch& b;
  Team& team;
  int64_t stage = 0;
  Workspace ws;
  AttentionRoom room;
  std::vector<float> scratch, head;
  std::vector<const T*> q;
  std::vector<T> own;
  T *hidden, *norm;  // the batch's, or this thread's own
  bool apart = false;
  std::vector<T*> outs;
  struct Scaled { const Unit* unit; int64_t row; };
  std::vector<Scaled> scaled;

  Layers(const Model& model, const Batch& batch, Team& shared) : m(model), b(batch), team(shared) {
    head.resize(size_t(m.head_dim));
    q.resize(size_t(m.heads / m.kv_heads));
    outs.resize(q.size());
    hidden = at(b.hidden), norm = at(b.norm);
  }

  static T* at(void* p) { return static_cast<T*>(p); }
  static const T* at(const void* p) { return static_cast<const T*>(p); }

  // y = x W^T + b for all rows, then the adapters of module group `call`.
  void project(const Projection& p, int64_t d_in, int64_t columns, const T* x, T* y, int64_t call, int64_t layer) {
    const Dense<T> dense{at(p.w), at(p.bias), d_in, columns};
    const int64_t panels = dense.panels(), step = panels_per_item(panels, team.threads());
    DenseColumns<T> work{dense, y, columns, x, d_in};
    work.ahead = elements_ahead(dense, step, team.threads());
    const int64_t tiles = (panels + step - 1) / step;
    int64_t shrinks = 0;
    if (b.adapters) {
      collect(*b.adapters, b.calls[call], layer, ws);
      cut_rows(ws);
      cut_finer(ws);
      shrinks = int64_t(ws.shrink.size());
    } else {
      ws.expand.clear();
    }
    static const Step nobody{};
    Problem<T> lora{b.adapters ? *b.adapters : nobody, ws, b.z, y, columns, x, d_in};
    team.each(tiles + shrinks, stage, [&](int64_t i) {
      if (i < shrinks) {
        const Item& item = ws.shrink[size_t(i)];
        lora.shrink(item);
        if (item.row_lo == 0) lora.ask_for_b(item);
      } else work.run(b.rows, (i - shrinks) * step, std::min(step, panels - (i - shrinks) * step), scratch);
    });
    if (b.scaled) scale_inputs(dense, d_in, columns, x, y);
    if (!ws.expand.empty())
      team.each(int64_t(ws.expand.size()), stage, [&](int64_t i) { lora.expand(ws.expand[size_t(i)]); });
  }

  // The rows with an input vector h once more, with x * h in place of x, into the columns of their module.
  void scale_inputs(const Dense<T>& dense, int64_t d_in, int64_t columns, const T* x, T* y) {
    scaled.clear();
    int64_t rows = 0;
    for (const Unit& u : ws.units)
      if (u.h) scaled.push_back({&u, rows}), rows += u.row_count;
    if (scaled.empty()) return;
    team.each(int64_t(scaled.size()), stage, [&](int64_t i) {
      const Unit& u = *scaled[size_t(i)].unit;
      for (int64_t r = 0; r < u.row_count; ++r) {
        const T* from = x + u.rows[r] * d_in;
        T* to = at(b.scaled) + (scaled[size_t(i)].row + r) * d_in;
        for (int64_t k = 0; k < d_in; k += kLanes)
          store_some(to + k, load_some(from + k, d_in - k) * load_some(u.h + k, d_in - k), d_in - k);
      }
    });
    const int64_t step = kItemPanels, most = (columns + kLanes - 1) / kLanes / step + 2;
    team.each(int64_t(scaled.size()) * most, stage, [&](int64_t item) {
      const Unit& u = *scaled[size_t(item / most)].unit;
      const int64_t first = u.column / kLanes, last = (u.column + u.d_out + kLanes - 1) / kLanes;
      const int64_t panel = first + item % most * step;
      if (panel >= last) return;
      const T* input = at(b.scaled) + scaled[size_t(item / most)].row * d_in;
      const DenseColumns<T> work{dense, y, columns, input, d_in, u.column, u.column + u.d_out, u.rows};
      work.run(u.row_count, panel, std::min(step, last - panel), scratch);
    });
  }

  // hidden += out, where asked, and norm = its norm. Few rows are normed by every thread for itself: that is cheaper than
  // waiting for one another twice a layer.
  void norms(const void* weight, bool add) {
    if (apart) {
      for (int64_t from = 0; from < b.rows * m.hidden; from += m.hidden)
        add_norm(hidden + from, add ? at(b.out) + from : nullptr, at(weight), m.hidden, float(m.eps), norm + from);
      return;
    }
    team.each(b.rows, stage, [&](int64_t row) {
      const int64_t from = row * m.hidden;
      add_norm(hidden + from, add ? at(b.out) + from : nullptr, at(weight), m.hidden, float(m.eps), norm + from);
    });
  }

  // Rotates the heads of one row that share a key head, appends key and value, attends if the row decodes.
  void head_group(const Layer& layer, int64_t index, int64_t row, int64_t kv) {
    const int64_t n = m.head_dim, group = m.heads / m.kv_heads, width = (m.heads + 2 * m.kv_heads) * n;
    const int64_t position = b.positions[row];
    T* const own = at(b.qkv) + row * width;
    const T *cos = at(m.cos) + position * n, *sin = at(m.sin) + position * n, *norm = at(layer.qk_norm);
    for (int64_t g = 0; g < group; ++g) {
      const int64_t h = kv * group + g;
      rotate(own + h * n, norm ? norm + h * n : nullptr, float(m.eps), cos, sin, n, head.data());
    }
    T* const key = own + (m.heads + kv) * n;
    rotate(key, norm ? norm + (m.heads + kv) * n : nullptr, float(m.eps), cos, sin, n, head.data());
    const History<T> history{m.pool, m.page_bytes, m.page_tokens, m.kv_heads * n,
                             index * 2 * m.page_tokens * m.kv_heads * n + kv * n, m.page_tokens * m.kv_heads * n,
                             b.pages + b.request[row] * b.entries};
    std::memcpy(const_cast<T*>(history.key(position)), key, size_t(n) * sizeof(T));
    std::memcpy(const_cast<T*>(history.value(position)), own + (m.heads + m.kv_heads + kv) * n, size_t(n) * sizeof(T));
    if (row < b.decode_from) return;
    for (int64_t g = 0; g < group; ++g) {
      q[size_t(g)] = own + (kv * group + g) * n;
      outs[size_t(g)] = at(b.attended) + (row * m.heads + kv * group + g) * n;
    }
    const int64_t end = position + 1, first = layer.window ? std::max<int64_t>(0, end - layer.window) : 0;
    attend_group<T>(q.data(), group, history, first, end, n, 1.0f / std::sqrt(float(n)), outs.data(), room);
  }

  void run(int64_t from, int64_t to, int64_t parts) {
    apart = team.threads() > 1 && b.rows <= kFewRows && (parts & kHead) && (parts & kTail);
    if (apart) {
      own.resize(size_t(2 * b.rows * m.hidden));
      std::memcpy(own.data(), b.hidden, size_t(b.rows * m.hidden) * sizeof(T));
      hidden = own.data(), norm = own.data() + b.rows * m.hidden;
    }
    const int64_t n = m.head_dim, q_size = m.heads * n, kv_size = m.kv_heads * n;
    for (int64_t i = from; i < to; ++i) {
      const Layer& layer = m.layers[i];
      if (parts & kHead) {
        norms(layer.input_norm, !(parts & kFirst) || i > from);
        project(layer.qkv, m.hidden, q_size + 2 * kv_size, norm, at(b.qkv), 0, i);
        team.each(b.rows * m.kv_heads, stage,
                  [&](int64_t item) { head_group(layer, i, item / m.kv_heads, item % m.kv_heads); });
      }
      if (parts & kTail) {
        project(layer.o, q_size, m.hidden, at(b.attended), at(b.out), 1, i);
        norms(layer.post_norm, true);
        project(layer.gate_up, m.hidden, 2 * m.inner, norm, at(b.gate_up), 2, i);
        team.each(b.rows, stage, [&](int64_t row) {
          const T* both = at(b.gate_up) + row * 2 * m.inner;
          gated(both, both + m.inner, m.inner, at(b.active) + row * m.inner);
        });
        project(layer.down, m.inner, m.hidden, at(b.active), at(b.out), 3, i);
      }
    }
    if (parts & kLast)
      team.each(b.rows, stage, [&](int64_t row) {
        const int64_t start = row * m.hidden;
        for (int64_t j = 0; j < m.hidden; j += kLanes) {
          const int64_t left = m.hidden - j;
          store_some(at(b.hidden) + start + j,
                     load_some(hidden + start + j, left) + load_some(at(b.out) + start + j, left), left);
        }
      });
  }
};

template <class T> void layers(const Model* m, const Batch* b, int64_t from, int64_t to, int64_t parts) {
  const int threads = omp_get_max_threads();
  Team team;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
#pragma omp single
    team.gather(omp_get_num_threads());  // fewer than asked for, where the machine says so
    Layers<T> own(*m, *b, team);
    own.run(from, to, parts);
  }
}

}  // namespace loraplex

extern "C" {

// Layers [from, to), the halves in `parts`: 1 up to attention, 2 after it; 4: `hidden` holds no sum of the layer before
// in `out` yet; 8: add the last sum to `hidden`.
void step_layers_bfloat16(const loraplex::Model* m, const loraplex::Batch* b, int64_t from, int64_t to, int64_t parts) {
  loraplex::layers<loraplex::BF16>(m, b, from, to, parts);
}
void step_layers_float32(const loraplex::Model* m, const loraplex::Batch* b, int64_t from, int64_t to, int64_t parts) {
  loraplex::layers<float>(m, b, from, to, parts);
}

}  // extern "C"
