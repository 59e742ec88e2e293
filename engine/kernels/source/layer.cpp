// The two halves of a decoder layer around attention. Knows rows and weights; knows no requests.
//
// Many rows: each thread carries a tile of rows through everything, its intermediates staying in its cache. Few rows: each
// thread takes panels of weights for all rows, so that the weights are read from memory once, by all threads together.
#include "layer.h"

namespace shoal {
namespace {

// c [rows, n] = x [rows, k] · panel; a row of c has 32 numbers.
template <class T>
inline void multiply(const Linear& linear, long panel, const T* x, long rows, float* c, long ldc) {
  gemm<T>(rows, kPanel, linear.k, x, linear.k, linear.panel<T>(panel), kPanel, c, ldc, false);
}

// Rows to multiply where the buffers are padded: what lies behind the last row comes out behind it.
inline long whole_tiles(long rows) { return brgemm_bf16 ? (rows + 15) / 16 * 16 : rows; }

// One head of one row, from the float sums in place to q or to the pool.
template <class T>
void emit_head(const Project& p, long row, long head, float* sums) {
  const long d = p.d;
  const bool is_q = head < p.heads, is_k = !is_q && head < p.heads + p.kv_heads;
  if (p.bias) {
    const T* bias = static_cast<const T*>(p.bias) + head * d;
    for (long i = 0; i < d; i += 16) store(sums + i, _mm512_add_ps(load(sums + i, d - i), load(bias + i, d - i)), d - i);
  }
  const T* norm = static_cast<const T*>(is_q ? p.q_norm : is_k ? p.k_norm : nullptr);
  if (norm) {
    const __m512 factor = _mm512_set1_ps(norm_factor(sums, d, (float)p.eps));
    for (long i = 0; i < d; i += 16) {
      store(sums + i, _mm512_mul_ps(_mm512_mul_ps(load(sums + i, d - i), factor), load(norm + i, d - i)), d - i);
    }
  }
  if (is_q || is_k) rotate(sums, p.cos + row * (d / 2), p.sin + row * (d / 2), d);
  T* to;
  if (is_q) {
    to = static_cast<T*>(p.q) + (row * p.heads + head) * d;
  } else {
    const long plane = head - p.heads;  // K of each kv head, then V of each
    to = static_cast<T*>(p.pool) + ((p.blocks[row] * 2 * p.kv_heads + plane) * p.block_size + p.offsets[row]) * d;
  }
  for (long i = 0; i < d; i += 16) store(to + i, load(sums + i, d - i), d - i);
}

template <class From, class T>
void normed_rows(const From* x, const void* norm, long rows, long n, double eps, T* out) {
  for (long r = 0; r < rows; ++r) rms_norm(x + r * n, static_cast<const T*>(norm), n, (float)eps, out + r * n);
}

// to [rows, 16] = SiLU(gate) · up of one panel's c [rows, 32].
template <class T>
void activate(const float* c, long rows, long panel, long width, T* to) {
  const long left = width - panel * 16;
  for (long r = 0; r < rows; ++r) {
    store(to + r * width + panel * 16, silu_times<T>(_mm512_loadu_ps(c + r * kPanel), _mm512_loadu_ps(c + r * kPanel + 16)), left);
  }
}

// to = c + x for one panel's columns.
template <class X, class To>
void add_rows(const float* c, long rows, long panel, long n, const X* x, To* to) {
  for (long i = panel * kPanel; i < std::min(n, (panel + 1) * kPanel); i += 16) {
    for (long r = 0; r < rows; ++r) {
      const __m512 sum = _mm512_add_ps(_mm512_loadu_ps(c + r * kPanel + i - panel * kPanel), load(x + r * n + i, n - i));
      store(to + r * n + i, sum, n - i);
    }
  }
}

template <class T>
void project(const Project& p) {
  static thread_local Scratch<float> shared;
  const Linear& linear = p.linear;
  const long hidden = linear.k, panels = linear.num_panels(), wide = panels * kPanel, num_heads = p.heads + 2 * p.kv_heads;
  const Cut cut(p.rows, p.num_threads);
  float* all = cut.by_rows ? nullptr : shared.at_least(p.rows * wide);
#pragma omp parallel num_threads((int)p.num_threads)
  {
    static thread_local Scratch<float> floats;
    static thread_local Scratch<T> numbers;
    T* x = numbers.at_least(cut.tile * hidden);
    if (cut.by_rows) {
      float* sums = floats.at_least(cut.tile * wide);
#pragma omp for schedule(dynamic, 1) nowait
      for (long tile = 0; tile < cut.num_tiles; ++tile) {
        const long first = tile * cut.tile, rows = std::min(cut.tile, (long)p.rows - first);
        normed_rows(static_cast<const T*>(p.x) + first * hidden, p.norm, rows, hidden, p.eps, x);
        for (long panel = 0; panel < panels; ++panel) multiply(linear, panel, x, whole_tiles(rows), sums + panel * kPanel, wide);
        for (long r = 0; r < rows; ++r) {
          for (long head = 0; head < num_heads; ++head) emit_head<T>(p, first + r, head, sums + r * wide + head * p.d);
        }
      }
    } else {
      normed_rows(static_cast<const T*>(p.x), p.norm, p.rows, hidden, p.eps, x);
#pragma omp for schedule(dynamic, 2)
      for (long panel = 0; panel < panels; ++panel) multiply(linear, panel, x, p.rows, all + panel * kPanel, wide);
#pragma omp for schedule(static)
      for (long i = 0; i < p.rows * num_heads; ++i) {
        emit_head<T>(p, i / num_heads, i % num_heads, all + i / num_heads * wide + i % num_heads * p.d);
      }
    }
    if (brgemm_release) brgemm_release();
  }
}

template <class T>
void finish(const Finish& f) {
  static thread_local Scratch<float> shared_sums;
  static thread_local Scratch<T> shared_active;
  const long hidden = f.output.n, from = f.output.k, width = f.down.k;
  const Cut cut(f.rows, f.num_threads);
  float* shared_middle = cut.by_rows ? nullptr : shared_sums.at_least(f.rows * hidden);
  T* shared_wide = cut.by_rows ? nullptr : shared_active.at_least(f.rows * width);
#pragma omp parallel num_threads((int)f.num_threads)
  {
    static thread_local Scratch<float> floats;
    static thread_local Scratch<T> numbers;
    float* c = floats.at_least(cut.tile * (kPanel + hidden));
    T* normed = numbers.at_least(cut.tile * (hidden + width));
    if (cut.by_rows) {
      float* middle = c + cut.tile * kPanel;
      T* active = normed + cut.tile * hidden;
#pragma omp for schedule(dynamic, 1) nowait
      for (long tile = 0; tile < cut.num_tiles; ++tile) {
        const long first = tile * cut.tile, rows = std::min(cut.tile, (long)f.rows - first);
        const long padded = whole_tiles(rows);
        const T* x = static_cast<const T*>(f.x) + first * hidden;
        const T* attended = static_cast<const T*>(f.attended) + first * from;
        for (long panel = 0; panel < f.output.num_panels(); ++panel) {
          multiply(f.output, panel, attended, padded, c, kPanel);
          add_rows(c, rows, panel, hidden, x, middle);
        }
        normed_rows(middle, f.norm, rows, hidden, f.eps, normed);
        for (long panel = 0; panel < f.gate_up.num_panels(); ++panel) {
          multiply(f.gate_up, panel, normed, padded, c, kPanel);
          activate(c, rows, panel, width, active);
        }
        for (long panel = 0; panel < f.down.num_panels(); ++panel) {
          multiply(f.down, panel, active, padded, c, kPanel);
          add_rows(c, rows, panel, hidden, middle, static_cast<T*>(f.out) + first * hidden);
        }
      }
    } else {
#pragma omp for schedule(dynamic, 2)
      for (long panel = 0; panel < f.output.num_panels(); ++panel) {
        multiply(f.output, panel, static_cast<const T*>(f.attended), f.rows, c, kPanel);
        add_rows(c, f.rows, panel, hidden, static_cast<const T*>(f.x), shared_middle);
      }
      normed_rows(shared_middle, f.norm, f.rows, hidden, f.eps, normed);
#pragma omp for schedule(dynamic, 2)
      for (long panel = 0; panel < f.gate_up.num_panels(); ++panel) {
        multiply(f.gate_up, panel, normed, f.rows, c, kPanel);
        activate(c, f.rows, panel, width, shared_wide);
      }
#pragma omp for schedule(dynamic, 2)
      for (long panel = 0; panel < f.down.num_panels(); ++panel) {
        multiply(f.down, panel, shared_wide, f.rows, c, kPanel);
        add_rows(c, f.rows, panel, hidden, shared_middle, static_cast<T*>(f.out));
      }
    }
    if (brgemm_release) brgemm_release();
  }
}


template <class T>
void project_rows(const Stage& stage, Project call, const Rows& rows, long layer, void* q) {
  call.x = rows.x, call.cos = rows.cos, call.sin = rows.sin, call.rows = rows.rows;
  call.blocks = rows.blocks + layer * rows.rows, call.offsets = rows.offsets;
  call.q = q, call.pool = stage.pool, call.block_size = stage.block_size, call.num_threads = stage.num_threads;
  project<T>(call);
}

// Half steps [from, to): 2·i writes K and V of layer i, 2·i + 1 is its attention and everything behind.
template <class T>
void run_stage(const Stage& stage, long from, long to) {
  for (long half = from; half < to; ++half) {
    const long layer = half / 2;
    if (half % 2 == 0) {
      if (stage.kv_layers) project_rows<T>(stage, stage.kv_layers[layer]->kv, stage.kv, layer, nullptr);
      if (stage.full_layers) project_rows<T>(stage, stage.full_layers[layer]->project, stage.full, layer, stage.q);
    } else if (stage.full_layers) {
      attend(Attention<T>{static_cast<const T*>(stage.q), static_cast<T*>(stage.attended), static_cast<const T*>(stage.pool), stage.runs,
                          stage.num_runs, layer, stage.windows[layer], stage.heads, stage.kv_heads, stage.d, stage.block_size,
                          (int)stage.num_threads, stage.heads * stage.d, (float)stage.scale});
      Finish call = stage.full_layers[layer]->finish;
      call.x = call.out = stage.full.x, call.attended = stage.attended, call.rows = stage.full.rows;
      call.num_threads = stage.num_threads;
      finish<T>(call);
    }
  }
}

}  // namespace
}  // namespace shoal

extern "C" void shoal_run_stage(int is_bf16, const shoal::Stage* stage, int64_t from, int64_t to) {
  is_bf16 ? shoal::run_stage<shoal::bf16>(*stage, from, to) : shoal::run_stage<float>(*stage, from, to);
}
