// What a layer's two halves are given, and the arithmetic of single rows: norm, rotation, SiLU. Knows no threads.
#pragma once
#include "gemm.h"
#include "paged.h"

namespace shoal {

constexpr long kPanel = 32;  // columns of one packed panel of weights

// Weights [n, k] as panels: words [n / 32][k words][32], rows beyond n zero.
struct Linear {
  const uint32_t* packed;
  int64_t n, k;

  template <class T>
  const uint32_t* panel(long index) const {
    return packed + index * kPanel * (k / Words<T>::kPer);
  }
  long num_panels() const { return (n + kPanel - 1) / kPanel; }
};

// Input norm, q, k and v, head norms, rotation; k and v go to the pool. As Python lays it out.
struct Project {
  const void *x, *norm, *bias, *q_norm, *k_norm;  // [rows, hidden], [hidden], [n] or null, [d] or null
  Linear linear;                                  // rows ordered q, k, v
  const float *cos, *sin;                         // [rows, d / 2]
  void *q, *pool;                                 // [rows, heads, d], KvPool.data
  const int64_t *blocks, *offsets;                // [rows] where k and v go
  int64_t rows, heads, kv_heads, d, block_size, num_threads;  // heads 0: k and v alone
  double eps;
};

// Output projection, residual, norm, gate and up, SiLU or GELU, down, residual; with branch norms, a norm before each residual.
struct Finish {
  const void *x, *attended, *norm;  // [rows, hidden], [rows + 15, heads · d], [hidden]
  const void *attention_norm, *mlp_norm;  // [hidden], both or neither (null)
  Linear output, gate_up, down;     // each panel of gate_up: 16 rows of gate, then the 16 of up
  void* out;                        // [rows, hidden]
  int64_t rows, num_threads, gelu;  // gelu: 1 for its tanh form, 0 for SiLU
  double eps;
};

// What one layer holds; `project` without its rows, addresses of rows and places. Of a layer held for K and V alone only kv.
struct Layer {
  Project project, kv;
  Finish finish;
};

// Some rows, and where their K and V go.
struct Rows {
  void* x;                          // [rows, hidden]; full rows: replaced by the layers' output
  const float *cos, *sin;           // [rows, d / 2], of layers without a window
  const float *local_cos, *local_sin;  // and with one
  const int64_t *blocks, *offsets;  // [layers, rows], [rows]
  int64_t rows;
};

// Consecutive layers with the same active rows (stages.py): `full` rows run everything, `kv` rows only leave K and V.
struct Stage {
  const Layer* const* full_layers;  // [layers], or null
  const Layer* const* kv_layers;    // the same
  const int64_t* windows;           // [layers], 0 = none
  Rows full, kv;
  void *q, *attended, *pool;  // of the full rows; KvPool.data
  const Run* runs;
  int64_t num_runs, heads, kv_heads, d, block_size, num_threads;
  double scale, cap;  // of scores, times log2 e; cap 0 = none
};

template <class T>
inline float norm_factor(const T* x, long n, float eps) {
  Floats sum = zeros();
  for (long i = 0; i < n; i += 16) {
    const Floats v = load(x + i, n - i);
    sum = multiply_add(v, v, sum);
  }
  return 1.0f / std::sqrt(sum_all(sum) / n + eps);
}

template <class From, class T, class To>
inline void rms_norm(const From* x, const T* weight, long n, float eps, To* out) {
  const Floats factor = all(norm_factor(x, n, eps));
  for (long i = 0; i < n; i += 16) {
    store(out + i, load(x + i, n - i) * factor * load(weight + i, n - i), n - i);
  }
}

// Numbers i and i + d/2 turn together.
inline void rotate(float* head, const float* cos, const float* sin, long d) {
  const long half = d / 2;
  for (long i = 0; i < half; i += 16) {
    const long left = half - i;
    const Floats a = load(head + i, left), b = load(head + half + i, left), c = load(cos + i, left), s = load(sin + i, left);
    store(head + i, multiply_subtract(a, c, b * s), left);
    store(head + half + i, multiply_add(b, c, a * s), left);
  }
}

template <class T>
inline Floats silu_times(Floats gate, Floats up) {
  const Floats e = exp2<T>(gate * all(-1.44269504f));
  return gate * up * reciprocal<T>(e + all(1.0f));
}

// The tanh form of GELU: gate · sigmoid(2 · √(2/π) · (gate + 0.044715 · gate³)).
template <class T>
inline Floats gelu_times(Floats gate, Floats up) {
  const Floats cubic = multiply_add(gate * gate, all(0.044715f), all(1.0f));
  const Floats e = exp2<T>(gate * cubic * all(-2.0f * 0.7978845608f * 1.44269504f));
  return gate * up * reciprocal<T>(e + all(1.0f));
}

constexpr long kMostTileRows = 512;  // with the tile unit: fewer, and reading the weights takes longer than multiplying by them
constexpr long kWideRows = 256;      // rows whose activations behind gate and up stay in the second-level cache

// How the rows of a call are cut: by tiles of rows where every thread gets a large one, else each thread takes columns of all
// rows, so that the weights are read once by all threads together.
struct Cut {
  long tile, num_tiles;
  bool by_rows;

  Cut(long rows, long num_threads, bool tiled) {
    const long most = tiled ? kMostTileRows : 96, unit = tiled ? 32 : 1;
    by_rows = rows >= (tiled ? 384 : 24) * num_threads;
    const long rounds = (rows + num_threads * most - 1) / (num_threads * most);
    const long even = (rows + rounds * num_threads - 1) / (rounds * num_threads);
    tile = by_rows ? (even + unit - 1) / unit * unit : rows;
    num_tiles = (rows + tile - 1) / tile;
  }
};

}  // namespace shoal
