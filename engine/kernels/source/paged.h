// Runs of rows over paged slots, and which slots a row sees (query_runs.py says the same in Python). Knows no arithmetic.
#pragma once
#include <omp.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "vectors.h"

namespace shoal {

// One run as Python lays it out: nine 64-bit integers.
struct Run {
  int64_t first_row, num_rows, start_slot;
  int64_t blocks;        // address of int32 block ids, first layer of the stage
  int64_t layer_stride;  // bytes from one layer's ids to the next
  int64_t num_anchors, gap, sink;
  int64_t is_causal;  // else every row sees up to the run's last slot

  const int32_t* ids(long layer) const { return reinterpret_cast<const int32_t*>(blocks + layer * layer_stride); }
  long num_slots() const { return start_slot + num_rows; }
};

// A row sees slots [0, sink) and [low, high).
struct Seen {
  long sink, low, high;

  long count() const { return sink + high - low; }
  long slot(long index) const { return index < sink ? index : low + index - sink; }
};

inline Seen seen_from(const Run& run, long slot, long window) {
  Seen seen{0, 0, run.is_causal ? slot + 1 : run.num_slots()};
  if (window <= 0) return seen;
  const long alpha = run.num_anchors;
  const long position = slot < alpha ? slot : slot + run.gap;
  const long oldest = std::max(0L, position - window + 1);
  const long low = oldest < alpha ? oldest : std::max(alpha, oldest - (long)run.gap);
  const long sink = run.sink ? std::min(alpha, seen.high) : 0;
  if (sink < low) seen.sink = sink, seen.low = low;
  return seen;
}

// What every kernel needs to know of one attention call.
template <class T>
struct Attention {
  const T* q;  // [rows, heads, d], rows q_stride apart
  T* out;      // [rows, heads, d]
  const T* pool;  // [blocks, 2, kv_heads, block_size, d]
  const Run* runs;
  long num_runs, layer, window;
  long heads, kv_heads, d, block_size;
  int num_threads;
  long q_stride;
  float scale, cap;  // of scores, times log2 e; cap 0 = none

  long group() const { return heads / kv_heads; }
  long head_stride() const { return block_size * d; }
  // K of a slot in kv head 0; V lies kv_heads · head_stride further on.
  const T* key(const int32_t* ids, long slot) const {
    return pool + (long)ids[slot / block_size] * 2 * kv_heads * head_stride() + slot % block_size * d;
  }
};

// Memory of one thread, kept between calls and only ever grown. Aligned to cache lines, or in large pages where it fills some.
template <class T>
struct Scratch {
  T* data = nullptr;
  size_t size = 0;

  T* at_least(size_t count) {
    if (count > size) {
      std::free(data);
      constexpr size_t kPage = 2 << 20;
      const size_t bytes = count * sizeof(T), unit = bytes < kPage / 2 ? 64 : kPage;
      data = static_cast<T*>(std::aligned_alloc(unit, (bytes + unit - 1) / unit * unit));
      if (data && unit == kPage) madvise(data, (bytes + unit - 1) / unit * unit, MADV_HUGEPAGE);
      size = data ? count : 0;
      if (!data) std::abort();
    }
    return data;
  }
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::free(data); }
};

template <class T>
void attend_few_rows(const Attention<T>& call, const std::vector<long>& runs);
template <class T, class L>  // L: of products' left sides (gemm.h)
void attend_many_rows(const Attention<T>& call, long run);
template <class T>
void attend(const Attention<T>& call);  // picks one of them for each run

}  // namespace shoal
