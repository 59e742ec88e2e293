// The two halves of a decoder layer around attention. Knows rows and weights; knows no requests.
//
// Many rows: each thread carries a tile of rows through everything, its intermediates staying in its cache. Few rows: each
// thread takes panels of weights for all rows, so that the weights are read from memory once, by all threads together.
#include <numeric>

#include "layer.h"

namespace shoal {
namespace {

// Numbers from one scratch row of k numbers to the next: with the tile unit an odd count of cache lines, so that a tile's rows
// do not fall into the same few sets of a cache.
template <class L>
inline long spread(long k) {
  if (!tiled<L>()) return k;
  const long line = 64 / sizeof(L);
  return ((k + line - 1) / line | 1) * line;
}

// A linear's panels for all rows of x: `then(first row, rows)` for pieces of the panel's c [rows, 32].
template <class T, class L, class Then>
inline void multiply(const Linear& linear, long panel, const L* x, long ldx, long rows, float* c, long ldc, Then then) {
  multiply_panel<T, L>(x, ldx, linear.panel<T>(panel), linear.k, rows, c, ldc, [&](long row, long some) {
    if (row < rows) then(row, std::min(some, rows - row));
  });
}

// One head of one row, from the float sums in place to q or to the pool.
template <class T>
void emit_head(const Project& p, long row, long head, float* sums) {
  const long d = p.d;
  const bool is_q = head < p.heads, is_k = !is_q && head < p.heads + p.kv_heads;
  if (p.bias) {
    const T* bias = static_cast<const T*>(p.bias) + head * d;
    for (long i = 0; i < d; i += 16) store(sums + i, load(sums + i, d - i) + load(bias + i, d - i), d - i);
  }
  const T* norm = static_cast<const T*>(is_q ? p.q_norm : is_k ? p.k_norm : nullptr);
  if (norm) {
    const Floats factor = all(norm_factor(sums, d, (float)p.eps));
    for (long i = 0; i < d; i += 16) {
      store(sums + i, load(sums + i, d - i) * factor * load(norm + i, d - i), d - i);
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

template <class T, class From, class L>
void normed_rows(const From* x, const void* norm, long rows, long n, double eps, L* out, long ldo) {
  for (long r = 0; r < rows; ++r) rms_norm(x + r * n, static_cast<const T*>(norm), n, (float)eps, out + r * ldo);
}

// to [rows, 16] = SiLU or GELU of gate, times up, of one panel's c [rows, 32].
template <class T, class L>
void activate(const float* c, long first, long rows, long panel, long width, bool gelu, L* to, long ldo) {
  const long left = width - panel * 16;
  for (long r = first; r < first + rows; ++r) {
    const Floats gate = load16(c + r * kPanel), up = load16(c + r * kPanel + 16);
    store(to + r * ldo + panel * 16, gelu ? gelu_times<T>(gate, up) : silu_times<T>(gate, up), left);
  }
}

// to = c + x for one panel's columns; x may be null: c alone.
template <class X, class To>
void add_rows(const float* c, long first, long rows, long panel, long n, const X* x, To* to) {
  const long begin = panel * kPanel, end = std::min(n, begin + kPanel);
  for (long r = first; r < first + rows; ++r) {
    for (long i = begin; i < end; i += 16) {
      Floats sum = load16(c + r * kPanel + i - begin);
      if (x) sum = sum + load(x + r * n + i, n - i);
      store(to + r * n + i, sum, n - i);
    }
  }
}

// to = x + the norm of a branch's sums, for one row. `to` may be either of them.
template <class X, class T, class To>
void add_normed(const float* sums, const X* x, const T* norm, long n, float eps, To* to) {
  const Floats factor = all(norm_factor(sums, n, eps));
  for (long i = 0; i < n; i += 16) {
    store(to + i, multiply_add(load(sums + i, n - i) * factor, load(norm + i, n - i), load(x + i, n - i)), n - i);
  }
}

template <class T, class L>
void project(const Project& p) {
  static thread_local Scratch<L> shared;
  const Linear& linear = p.linear;
  const long hidden = linear.k, panels = linear.num_panels(), num_heads = p.heads + 2 * p.kv_heads, ldx = spread<L>(hidden);
  const long unit = std::lcm(p.d, kPanel), num_units = (panels * kPanel + unit - 1) / unit;  // columns at which heads and panels meet
  const Cut cut(p.rows, p.num_threads, tiled<L>());
  L* shared_x = cut.by_rows ? nullptr : shared.at_least(whole_tiles(p.rows) * ldx);
#pragma omp parallel num_threads((int)p.num_threads)
  {
    static thread_local Scratch<float> floats;
    static thread_local Scratch<L> numbers;
    const ProductScope scope;
    float* c = floats.at_least(whole_tiles(cut.tile) * unit);
    L* x = cut.by_rows ? numbers.at_least(whole_tiles(cut.tile) * ldx) : shared_x;
    auto heads_of = [&](long index, long first, long rows) {  // one unit: some panels, and the heads that they make
      const long end = std::min(panels, (index + 1) * (unit / kPanel)), head = index * (unit / p.d);
      const long heads = std::min(unit / p.d, num_heads - head);
      for (long panel = index * (unit / kPanel); panel < end; ++panel) {
        multiply<T>(linear, panel, x, ldx, rows, c + panel * kPanel % unit, unit, [&](long row, long some) {
          if (panel < end - 1) return;
          for (long r = row; r < row + some; ++r) {
            for (long i = 0; i < heads; ++i) emit_head<T>(p, first + r, head + i, c + r * unit + i * p.d);
          }
        });
      }
    };
    if (cut.by_rows) {
#pragma omp for schedule(dynamic, 1) nowait
      for (long tile = 0; tile < cut.num_tiles; ++tile) {
        const long first = tile * cut.tile, rows = std::min(cut.tile, (long)p.rows - first);
        normed_rows<T>(static_cast<const T*>(p.x) + first * hidden, p.norm, rows, hidden, p.eps, x, ldx);
        for (long index = 0; index < num_units; ++index) heads_of(index, first, rows);
      }
    } else {
#pragma omp for schedule(static)
      for (long r = 0; r < p.rows; ++r) normed_rows<T>(static_cast<const T*>(p.x) + r * hidden, p.norm, 1, hidden, p.eps, x + r * ldx, ldx);
#pragma omp for schedule(static)
      for (long index = 0; index < num_units; ++index) heads_of(index, 0, p.rows);
    }
  }
}

template <class T, class L>
void finish(const Finish& f) {
  static thread_local Scratch<float> shared_sums;
  static thread_local Scratch<L> shared_numbers;
  const long hidden = f.output.n, from = f.output.k, width = f.down.k, ldn = spread<L>(hidden), lda = spread<L>(width);
  const Cut cut(f.rows, f.num_threads, tiled<L>());
  const long copied_width = std::is_same_v<T, L> ? 0 : from;  // of a row of `attended`, copied as what products take
  const long most = whole_tiles(cut.tile), planes = f.mlp_norm ? 2 : 1;  // with branch norms the MLP's sums are kept too
  float* shared_middle = cut.by_rows ? nullptr : shared_sums.at_least(planes * f.rows * hidden);
  L* shared_normed = cut.by_rows ? nullptr : shared_numbers.at_least(most * (ldn + lda + copied_width));
#pragma omp parallel num_threads((int)f.num_threads)
  {
    static thread_local Scratch<float> floats;
    static thread_local Scratch<L> numbers;
    const ProductScope scope;
    float* c = floats.at_least(most * (cut.by_rows ? kPanel + planes * hidden : kPanel));
    float* middle = cut.by_rows ? c + most * kPanel : shared_middle;
    float* sums = middle + (cut.by_rows ? most : (long)f.rows) * hidden;  // only with branch norms
    L* normed = cut.by_rows ? numbers.at_least(most * (ldn + lda + copied_width)) : shared_normed;
    L *active = normed + most * ldn, *copied = active + most * lda;
    auto copy_attended = [&](long first, long row) {
      const T* x = static_cast<const T*>(f.attended) + (first + row) * from;
      for (long i = 0; i < from; i += 16) store(copied + row * from + i, load(x + i, from - i), from - i);
    };
    auto output = [&](long panel, long first, long rows) {
      const L* attended = copied_width ? copied : static_cast<const L*>(f.attended) + first * from;
      multiply<T>(f.output, panel, attended, from, rows, c, kPanel, [&](long row, long some) {
        add_rows(c, row, some, panel, hidden, f.attention_norm ? nullptr : static_cast<const T*>(f.x) + first * hidden, middle);
      });
    };
    auto norm_middle = [&](long first, long row) {  // what the MLP reads
      float* own = middle + row * hidden;
      if (f.attention_norm) {
        const T* x = static_cast<const T*>(f.x) + (first + row) * hidden;
        add_normed(own, x, static_cast<const T*>(f.attention_norm), hidden, (float)f.eps, own);
      }
      normed_rows<T>(own, f.norm, 1, hidden, f.eps, normed + row * ldn, ldn);
    };
    auto end_row = [&](long first, long row) {
      T* to = static_cast<T*>(f.out) + (first + row) * hidden;
      add_normed(sums + row * hidden, middle + row * hidden, static_cast<const T*>(f.mlp_norm), hidden, (float)f.eps, to);
    };
    auto gate_up = [&](long panel, long rows) {
      multiply<T>(f.gate_up, panel, normed, ldn, rows, c, kPanel,
               [&](long row, long some) { activate<T>(c, row, some, panel, width, f.gelu != 0, active, lda); });
    };
    auto down = [&](long panel, long first, long begin, long end) {  // rows [begin, end) of a tile that starts at `first`
      const float* x = middle + begin * hidden;
      T* to = static_cast<T*>(f.out) + (first + begin) * hidden;
      multiply<T>(f.down, panel, active + begin * lda, lda, end - begin, c, kPanel,
               [&](long row, long some) {
                 if (f.mlp_norm) add_rows(c, row, some, panel, hidden, static_cast<const float*>(nullptr), sums + begin * hidden);
                 else add_rows(c, row, some, panel, hidden, x, to);
               });
    };
    if (cut.by_rows) {
#pragma omp for schedule(dynamic, 1) nowait
      for (long tile = 0; tile < cut.num_tiles; ++tile) {
        const long first = tile * cut.tile, rows = std::min(cut.tile, (long)f.rows - first);
        for (long r = 0; copied_width && r < rows; ++r) copy_attended(first, r);
        for (long panel = 0; panel < f.output.num_panels(); ++panel) output(panel, first, rows);
        for (long r = 0; r < rows; ++r) norm_middle(first, r);
        for (long panel = 0; panel < f.gate_up.num_panels(); ++panel) gate_up(panel, rows);
        for (long at = 0; at < rows; at += kWideRows) {
          for (long panel = 0; panel < f.down.num_panels(); ++panel) down(panel, first, at, std::min(rows, at + kWideRows));
        }
        for (long r = 0; f.mlp_norm && r < rows; ++r) end_row(first, r);
      }
    } else {
      if (copied_width) {
#pragma omp for schedule(static)
        for (long r = 0; r < f.rows; ++r) copy_attended(0, r);
      }
#pragma omp for schedule(static)
      for (long panel = 0; panel < f.output.num_panels(); ++panel) output(panel, 0, f.rows);
#pragma omp for schedule(static)
      for (long r = 0; r < f.rows; ++r) norm_middle(0, r);
#pragma omp for schedule(static)
      for (long panel = 0; panel < f.gate_up.num_panels(); ++panel) gate_up(panel, f.rows);
      for (long at = 0; at < f.rows; at += kWideRows) {
#pragma omp for schedule(static) nowait
        for (long panel = 0; panel < f.down.num_panels(); ++panel) down(panel, 0, at, std::min((long)f.rows, at + kWideRows));
      }
      if (f.mlp_norm) {
#pragma omp barrier
#pragma omp for schedule(static)
        for (long r = 0; r < f.rows; ++r) end_row(0, r);
      }
    }
  }
}

template <class T, class L>
void project_rows(const Stage& stage, Project call, const Rows& rows, long layer, void* q) {
  const bool is_local = stage.windows[layer] > 0;
  call.x = rows.x, call.rows = rows.rows;
  call.cos = is_local ? rows.local_cos : rows.cos, call.sin = is_local ? rows.local_sin : rows.sin;
  call.blocks = rows.blocks + layer * rows.rows, call.offsets = rows.offsets;
  call.q = q, call.pool = stage.pool, call.block_size = stage.block_size, call.num_threads = stage.num_threads;
  project<T, L>(call);
}

// Seconds that this thread's steps spent in each phase so far: projections, attention, the rest of the layers.
thread_local double phase_seconds[3];

class PhaseTimer {
 public:
  explicit PhaseTimer(int phase) : phase_(phase), begin_(omp_get_wtime()) {}
  ~PhaseTimer() { phase_seconds[phase_] += omp_get_wtime() - begin_; }

 private:
  int phase_;
  double begin_;
};

// Half steps [from, to): 2·i writes K and V of layer i, 2·i + 1 is its attention and everything behind.
template <class T, class L>
void run_stage(const Stage& stage, long from, long to) {
  for (long half = from; half < to; ++half) {
    const long layer = half / 2;
    if (half % 2 == 0) {
      const PhaseTimer timer(0);
      if (stage.kv_layers) project_rows<T, L>(stage, stage.kv_layers[layer]->kv, stage.kv, layer, nullptr);
      if (stage.full_layers) project_rows<T, L>(stage, stage.full_layers[layer]->project, stage.full, layer, stage.q);
    } else if (stage.full_layers) {
      {
        const PhaseTimer timer(1);
        attend(Attention<T>{static_cast<const T*>(stage.q), static_cast<T*>(stage.attended), static_cast<const T*>(stage.pool), stage.runs,
                            stage.num_runs, layer, stage.windows[layer], stage.heads, stage.kv_heads, stage.d, stage.block_size,
                            (int)stage.num_threads, stage.heads * stage.d, (float)stage.scale, (float)stage.cap});
      }
      const PhaseTimer timer(2);
      Finish call = stage.full_layers[layer]->finish;
      call.x = call.out = stage.full.x, call.attended = stage.attended, call.rows = stage.full.rows;
      call.num_threads = stage.num_threads;
      finish<T, L>(call);
    }
  }
}

}  // namespace
}  // namespace shoal

extern "C" void shoal_run_stage(int is_bf16, const shoal::Stage* stage, int64_t from, int64_t to) {
  auto call = [&]<class T>(T) { shoal::with_left<T>([&]<class L>(L) { shoal::run_stage<T, L>(*stage, from, to); }); };
  is_bf16 ? call(shoal::bf16{}) : call(float{});
}

// Seconds of the three phases, of steps run by the calling thread.
extern "C" void shoal_phase_seconds(double* out) { std::copy(shoal::phase_seconds, shoal::phase_seconds + 3, out); }
