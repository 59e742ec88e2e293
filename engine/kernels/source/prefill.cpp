// Attention of many rows of one run: tiles of rows over blocks of keys, softmax as it goes (FlashAttention). Knows no requests.
//
// K and V of the run are packed once, as the word-packed right sides of two matrix products: K transposed, V as it is.
// Slots that no row sees are packed as zeros without being read. Rows of a tile are (row, head) pairs of one K/V head.
#include "gemm.h"
#include "paged.h"

namespace shoal {
namespace {

constexpr long kColumns = 32;                // keys of one panel of K^T
constexpr long kRowsAtOnce = 32;             // rows whose scores are held at once: they stay in the first-level cache
constexpr size_t kPackedBytes = 24u << 20;  // K/V heads are packed together up to this

template <class T, class L>
struct Tiles {
  using Word = Words<T>;
  const Attention<T>& call;
  const Run& run;
  const int32_t* ids;
  long tile_rows, keys;      // of a tile, of a block
  long words, width;         // of K^T (zeros beyond d); columns of V (d, to a multiple of 16)
  long first_seen, sink_end;  // slots below first_seen are read only if below sink_end
  long num_blocks;
  long score_stride, weight_stride;  // an odd count of cache lines: rows then fall into different sets

  Tiles(const Attention<T>& call, const Run& run)
      : call(call), run(run), ids(run.ids(call.layer)), words(call.d / Word::kPer), width((call.d + 15) / 16 * 16) {
    if (tiled<L>()) words = (words + 15) / 16 * 16;
    tile_rows = std::max(1L, (tiled<L>() ? 192 : 48) / call.group());
    keys = 256;
    score_stride = keys + 16, weight_stride = keys + 64 / (long)sizeof(L);
    num_blocks = (run.num_slots() + keys - 1) / keys;
    first_seen = seen_from(run, run.start_slot, call.window).low;
    sink_end = seen_from(run, run.num_slots() - 1, call.window).sink;
  }

  long key_size() const { return words * keys; }                 // words of one packed block of K
  long value_size() const { return keys / Word::kPer * width; }  // and of V
  size_t head_size() const { return num_blocks * (key_size() + value_size()); }
  long num_tiles() const { return (run.num_rows + tile_rows - 1) / tile_rows; }
  bool is_read(long slot) const { return slot < run.num_slots() && (slot >= first_seen || slot < sink_end); }
  bool is_needed(long block) const { return (block + 1) * keys > first_seen || block * keys < sink_end; }

  void pack(long kv, long block, uint32_t* key_to, uint32_t* value_to) const {
    const long value = call.kv_heads * call.head_stride();
    for (long base = 0; base < keys; base += 16) {
      const T* from[16];
      for (long i = 0; i < 16; ++i) {
        const long slot = block * keys + base + i;
        from[i] = is_read(slot) ? call.key(ids, slot) + kv * call.head_stride() : nullptr;
      }
      pack_keys(from, key_to + base / kColumns * words * kColumns + base % kColumns);
      pack_values(from, value, value_to + base / Word::kPer * width);
    }
  }

  void pack_keys(const T* const* from, uint32_t* to) const {
    const long held = call.d / Word::kPer;
    for (long w = 0; w < words; w += 16) {
      const long some = std::min(16L, words - w);
      alignas(64) uint32_t square[16][16];
      for (int i = 0; i < 16; ++i) {
        const uint32_t* row = reinterpret_cast<const uint32_t*>(from[i]);
        store_words(square[i], from[i] ? load_words(row + w, lanes(held - w)) : all_words(0));
      }
      for (long k = 0; k < some; ++k) store_words(to + (w + k) * kColumns, column(square, k));
    }
  }

  void pack_values(const T* const* from, long value, uint32_t* to) const {
    if constexpr (sizeof(T) == 2) {
      for (int i = 0; i < 16; i += 2) {
        for (long n = 0; n < width; n += 16) {
          const Floats a = from[i] ? load(from[i] + value + n, call.d - n) : zeros();
          const Floats b = from[i + 1] ? load(from[i + 1] + value + n, call.d - n) : zeros();
          store_words(to + i / 2 * width + n, join_halves(a, b));
        }
      }
    } else {
      for (int i = 0; i < 16; ++i) {
        for (long n = 0; n < width; n += 16) {
          const Floats v = from[i] ? load(from[i] + value + n, call.d - n) : zeros();
          store16(reinterpret_cast<float*>(to + i * width + n), v);
        }
      }
    }
  }

  // What a row does not see of a block counts for nothing.
  static void hide(float* scores, long columns, long first, const Seen& seen) {
    for (long i = 0; i < columns; i += 16) {
      const long at = first + i;
      const Lanes is_seen = (lanes(seen.high - at) & ~lanes(seen.low - at)) | lanes(seen.sink - at);
      store16(scores + i, select(is_seen, load16(scores + i), all(kNever)));
    }
  }

  void cap_row(float* scores, long columns) const {
    const float twice = 2 * 1.44269504f / call.cap;
    for (long i = 0; i < columns; i += 16) {
      store16(scores + i, soft_cap<T>(load16(scores + i) * all(call.scale), call.cap, twice));
    }
  }

  // Scores of up to 16 (row, head) pairs of a block → weights, with their running maxima and sums, and what was summed before
  // put on the new maximum. `slot`: of pair 0's row, pair p's row being (p + ahead) / group further on.
  void weigh(float* scores, long count, long columns, long first, long slot, long ahead, L* weights, float* best, float* total, float* sums) const {
    const Floats scale = all(call.cap > 0 ? 1.0f : call.scale), least = all(kNever);
    Floats each[16];
    for (auto& one : each) one = least;
    for (long r = 0; r < count; ++r) {
      float* own = scores + r * score_stride;
      if (call.cap > 0) cap_row(own, columns);
      const Seen seen = seen_from(run, slot + (r + ahead) / call.group(), call.window);
      if (seen.low > first || seen.high < first + columns) hide(own, columns, first, seen);
      Floats even = least, odd = least;
      for (long i = 0; i < columns; i += 32) {
        even = maximum(even, load16(own + i)), odd = maximum(odd, load16(own + i + 16));
      }
      each[r] = maximum(even, odd);
    }
    const Floats before = load16(best), after = maximum(before, max_each(each) * scale);
    // Exactly 1 where the maximum stayed: exp2<T>(0) is a little less, and would be applied with every block.
    const Lanes moved = above(after, before);
    const Floats factor = select(moved, exp2<T>(before - after), all(1.0f));
    alignas(64) float factors[16], origins[16];
    store16(factors, factor);
    store16(origins, maximum(after, all(kNever * 1e-3f)));  // so that a row that sees nothing yet weighs nothing
    store16(best, after);
    for (auto& one : each) one = zeros();
    for (long r = 0; r < count; ++r) {
      if (bits(moved) >> r & 1) {
        const Floats by = all(factors[r]);
        for (long n = r * width; n < (r + 1) * width; n += 16) store16(sums + n, load16(sums + n) * by);
      }
      const Floats origin = all(origins[r]);
      const float* own = scores + r * score_stride;
      Floats even = zeros(), odd = even;
      for (long i = 0; i < columns; i += 32) {
        const Floats p = exp2<T>(multiply_subtract(load16(own + i), scale, origin));
        const Floats q = exp2<T>(multiply_subtract(load16(own + i + 16), scale, origin));
        even = even + p, odd = odd + q;
        store32(weights + r * weight_stride + i, p, q);
      }
      each[r] = even + odd;
    }
    store16(total, multiply_add(load16(total), factor, sum_each(each)));
  }

  void attend(long kv, long tile, const uint32_t* key_blocks, const uint32_t* value_blocks) const {
    static thread_local Scratch<float> floats;
    static thread_local Scratch<L> numbers;
    const long group = call.group(), first_row = tile * tile_rows, some = std::min(tile_rows, (long)run.num_rows - first_row);
    const long used = some * group, m = (used + 15) / 16 * 16, ldq = words * Word::kPer;  // pairs beyond `used` come out unused
    float* scores = floats.at_least(kRowsAtOnce * score_stride + m * (width + 2));
    float *sums = scores + kRowsAtOnce * score_stride, *best = sums + m * width, *total = best + m;
    L* query = numbers.at_least(m * ldq + kRowsAtOnce * weight_stride);
    L* weights = query + m * ldq;
    std::fill(sums, sums + m * width, 0.0f);
    std::fill(best, best + m, kNever);
    std::fill(total, total + m, 0.0f);
    std::memset(query, 0, m * ldq * sizeof(L));
    for (long i = 0; i < used; ++i) {
      const T* from = call.q + (run.first_row + first_row + i / group) * call.q_stride + (kv * group + i % group) * call.d;
      for (long n = 0; n < call.d; n += 16) store(query + i * ldq + n, load(from + n, call.d - n), call.d - n);
    }
    const long start = run.start_slot + first_row;
    const long low = seen_from(run, start, call.window).low, high = run.is_causal ? start + some : run.num_slots();
    for (long block = 0; block * keys < high; ++block) {
      const long first = block * keys;
      if (first + keys <= low && first >= sink_end) continue;
      const uint32_t *own_keys = key_blocks + block * key_size(), *own_values = value_blocks + block * value_size();
      for (long row = 0; row < used; row += kRowsAtOnce) {
        const long rows = std::min(kRowsAtOnce, used - row), whole = whole_tiles(rows);
        const long seen_to = run.is_causal ? start + (row + rows - 1) / group + 1 : high;  // behind the last slot that these rows see
        if (first >= seen_to) continue;
        const long columns = std::min(keys, (seen_to - first + kColumns - 1) / kColumns * kColumns);
        for (long at = 0; at < columns; at += kColumns) {
          gemm<T, L>(whole, kColumns, ldq, query + row * ldq, ldq, own_keys + at * words, kColumns, scores + at, score_stride, false);
        }
        for (long i = 0; i < rows; i += 16) {
          const long pair = row + i;
          weigh(scores + i * score_stride, std::min(16L, rows - i), columns, first, start + pair / group, pair % group,
                weights + i * weight_stride, best + pair, total + pair, sums + pair * width);
        }
        gemm<T, L>(whole, width, columns, weights, weight_stride, own_values, width, sums + row * width, width, true);
      }
    }
    for (long i = 0; i < used; ++i) {
      const Floats by = all(1.0f / total[i]);
      T* to = call.out + ((run.first_row + first_row + i / group) * call.heads + kv * group + i % group) * call.d;
      for (long n = 0; n < call.d; n += 16) store(to + n, load16(sums + i * width + n) * by, call.d - n);
    }
  }
};

}  // namespace

template <class T, class L>
void attend_many_rows(const Attention<T>& call, long index) {
  static thread_local Scratch<uint32_t> packed_memory;
  const Tiles<T, L> tiles(call, call.runs[index]);
  const long at_once = std::clamp((long)(kPackedBytes / (4 * tiles.head_size())), 1L, call.kv_heads);
  uint32_t* packed = packed_memory.at_least(at_once * tiles.head_size());
  for (long kv = 0; kv < call.kv_heads; kv += at_once) {
    const long some = std::min(at_once, call.kv_heads - kv);
    const long num_packs = some * tiles.num_blocks, num_tiles = some * tiles.num_tiles();
#pragma omp parallel num_threads(call.num_threads)
    {
      const ProductScope scope;
#pragma omp for schedule(dynamic, 1)
      for (long i = 0; i < num_packs; ++i) {
        uint32_t* head = packed + i / tiles.num_blocks * tiles.head_size();
        const long block = i % tiles.num_blocks;
        if (!tiles.is_needed(block)) continue;
        tiles.pack(kv + i / tiles.num_blocks, block, head + block * tiles.key_size(),
                   head + tiles.num_blocks * tiles.key_size() + block * tiles.value_size());
      }
#pragma omp for schedule(dynamic, 1)
      for (long i = num_tiles - 1; i >= 0; --i) {  // the longest first
        uint32_t* head = packed + i % some * tiles.head_size();
        tiles.attend(kv + i % some, i / some, head, head + tiles.num_blocks * tiles.key_size());
      }
    }
  }
}

template void attend_many_rows<float, float>(const Attention<float>&, long);
template void attend_many_rows<bf16, bf16>(const Attention<bf16>&, long);
template void attend_many_rows<bf16, float>(const Attention<bf16>&, long);

}  // namespace shoal
