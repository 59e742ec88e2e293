// Attention of many rows of one run: tiles of rows over blocks of keys, softmax as it goes (FlashAttention). Knows no requests.
//
// K and V of the run are packed once, as the word-packed right sides of two matrix products: K transposed, V as it is.
// Slots that no row sees are packed as zeros without being read. Rows of a tile are (row, head) pairs of one K/V head.
#include <numeric>

#include "gemm.h"
#include "paged.h"

namespace shoal {
namespace {

constexpr size_t kPackedBytes = 24u << 20;  // K/V heads are packed together up to this

template <class T>
struct Tiles {
  using Word = Words<T>;
  const Attention<T>& call;
  const Run& run;
  const int32_t* ids;
  long tile_rows, keys;      // of a tile, of a block
  long words, width;         // of K^T; columns of V (d, to a multiple of 16)
  long first_seen, sink_end;  // slots below first_seen are read only if below sink_end
  long num_blocks;

  Tiles(const Attention<T>& call, const Run& run)
      : call(call), run(run), ids(run.ids(call.layer)), words(call.d / Word::kPer), width((call.d + 15) / 16 * 16) {
    const bool wide = sizeof(T) == 2 && brgemm_bf16;
    const long unit = wide ? 16 / std::gcd(16L, call.group()) : 1;  // brgemm: whole tiles of 16
    tile_rows = std::max(unit, (wide ? 128 : 48) / call.group() / unit * unit);
    keys = 256;
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
      pack_keys(from, key_to + base);
      pack_values(from, value, value_to + base / Word::kPer * width);
    }
  }

  void pack_keys(const T* const* from, uint32_t* to) const {
    for (long w = 0; w < words; w += 16) {
      const long some = std::min(16L, words - w);
      alignas(64) uint32_t square[16][16];
      for (int i = 0; i < 16; ++i) {
        const uint32_t* row = reinterpret_cast<const uint32_t*>(from[i]);
        __m512i value = from[i] ? _mm512_maskz_loadu_epi32(lanes(some), row + w) : _mm512_setzero_si512();
        _mm512_store_si512(square[i], value);
      }
      const __m512i step = _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), _mm512_set1_epi32(16));
      for (long k = 0; k < some; ++k) _mm512_storeu_si512(to + (w + k) * keys, _mm512_i32gather_epi32(step, &square[0][k], 4));
    }
  }

  void pack_values(const T* const* from, long value, uint32_t* to) const {
    if constexpr (sizeof(T) == 2) {
      for (int i = 0; i < 16; i += 2) {
        for (long n = 0; n < width; n += 16) {
          const __mmask16 mask = lanes(call.d - n);
          const __m256i none = _mm256_setzero_si256();
          const __m256i a = from[i] ? _mm256_maskz_loadu_epi16(mask, from[i] + value + n) : none;
          const __m256i b = from[i + 1] ? _mm256_maskz_loadu_epi16(mask, from[i + 1] + value + n) : none;
          const __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16);
          _mm512_storeu_si512(to + i / 2 * width + n, _mm512_or_si512(_mm512_cvtepu16_epi32(a), high));
        }
      }
    } else {
      for (int i = 0; i < 16; ++i) {
        for (long n = 0; n < width; n += 16) {
          const __m512 v = from[i] ? load(from[i] + value + n, call.d - n) : _mm512_setzero_ps();
          _mm512_storeu_ps(to + i * width + n, v);
        }
      }
    }
  }

  // One row's scores of a block → weights, with the running maximum and sum; returns false when the maximum has not moved.
  bool weigh(float* scores, long columns, long first, const Seen& seen, T* weights, float& best, float& sum, float& factor) const {
    const bool whole = seen.low <= first && seen.high >= first + columns;
    const __m512 scale = _mm512_set1_ps(call.scale), least = _mm512_set1_ps(kNever);
    __m512 most = least;
    if (whole) {
      for (long i = 0; i < columns; i += 16) most = _mm512_max_ps(most, _mm512_loadu_ps(scores + i));
    } else {
      const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
      for (long i = 0; i < columns; i += 16) {
        const __m512i slot = _mm512_add_epi32(lane, _mm512_set1_epi32((int)(first + i)));
        const __mmask16 low = _mm512_cmpge_epi32_mask(slot, _mm512_set1_epi32((int)seen.low));
        const __mmask16 high = _mm512_cmplt_epi32_mask(slot, _mm512_set1_epi32((int)seen.high));
        const __mmask16 sink = _mm512_cmplt_epi32_mask(slot, _mm512_set1_epi32((int)seen.sink));
        const __m512 s = _mm512_mask_blend_ps((low & high) | sink, least, _mm512_loadu_ps(scores + i));
        _mm512_storeu_ps(scores + i, s);
        most = _mm512_max_ps(most, s);
      }
    }
    const float top = _mm512_reduce_max_ps(most) * call.scale;
    if (!whole && _mm512_reduce_max_ps(most) == kNever && best == kNever) {  // nothing seen yet
      for (long i = 0; i < columns; i += 16) store(weights + i, _mm512_setzero_ps(), 16);
      return false;
    }
    const bool moved = top > best;
    if (moved) {
      factor = __builtin_exp2f(best - top);
      best = top;
      sum *= factor;
    }
    const __m512 origin = _mm512_set1_ps(best);
    __m512 total = _mm512_setzero_ps();
    for (long i = 0; i < columns; i += 16) {
      const __m512 p = exp2<T>(_mm512_fmsub_ps(_mm512_loadu_ps(scores + i), scale, origin));
      total = _mm512_add_ps(total, p);
      store(weights + i, p, 16);
    }
    sum += _mm512_reduce_add_ps(total);
    return moved;
  }

  void attend(long kv, long tile, const uint32_t* key_blocks, const uint32_t* value_blocks) const {
    static thread_local Scratch<float> floats;
    static thread_local Scratch<T> numbers;
    const long group = call.group(), first_row = tile * tile_rows, some = std::min(tile_rows, (long)run.num_rows - first_row);
    const bool wide = sizeof(T) == 2 && brgemm_bf16;
    const long m = (wide ? tile_rows : some) * group, used = some * group;
    float* scores = floats.at_least(m * (keys + width + 2));
    float *sums = scores + m * keys, *best = sums + m * width, *total = best + m;
    T* query = numbers.at_least(m * (call.d + keys));
    T* weights = query + m * call.d;
    std::fill(sums, sums + m * width, 0.0f);
    std::fill(best, best + m, kNever);
    std::fill(total, total + m, 0.0f);
    if (m > used) std::memset(query + used * call.d, 0, (m - used) * call.d * sizeof(T));
    if (m > used) std::memset(weights + used * keys, 0, (m - used) * keys * sizeof(T));
    for (long r = 0; r < some; ++r) {
      const T* from = call.q + (run.first_row + first_row + r) * call.q_stride + kv * group * call.d;
      std::memcpy(query + r * group * call.d, from, group * call.d * sizeof(T));
    }
    const long start = run.start_slot + first_row;
    const long low = seen_from(run, start, call.window).low, high = start + some;
    for (long block = 0; block * keys < high; ++block) {
      const long first = block * keys;
      if (first + keys <= low && first >= sink_end) continue;
      const long step = wide ? 64 : 16;
      const long columns = std::min(keys, (high - first + step - 1) / step * step);
      gemm<T>(m, columns, call.d, query, call.d, key_blocks + block * key_size(), keys, scores, keys, false);
      for (long r = 0; r < some; ++r) {
        const Seen seen = seen_from(run, start + r, call.window);
        for (long i = r * group; i < (r + 1) * group; ++i) {
          float factor;
          if (weigh(scores + i * keys, columns, first, seen, weights + i * keys, best[i], total[i], factor)) {
            const __m512 by = _mm512_set1_ps(factor);
            for (long n = i * width; n < (i + 1) * width; n += 16) _mm512_storeu_ps(sums + n, _mm512_mul_ps(_mm512_loadu_ps(sums + n), by));
          }
        }
      }
      gemm<T>(m, width, columns, weights, keys, value_blocks + block * value_size(), width, sums, width, true);
    }
    for (long i = 0; i < used; ++i) {
      const __m512 by = _mm512_set1_ps(1.0f / total[i]);
      T* to = call.out + ((run.first_row + first_row + i / group) * call.heads + kv * group + i % group) * call.d;
      for (long n = 0; n < call.d; n += 16) store(to + n, _mm512_mul_ps(_mm512_loadu_ps(sums + i * width + n), by), call.d - n);
    }
  }
};

}  // namespace

template <class T>
void attend_many_rows(const Attention<T>& call, long index) {
  static thread_local Scratch<uint32_t> packed_memory;
  const Tiles<T> tiles(call, call.runs[index]);
  const long at_once = std::clamp((long)(kPackedBytes / (4 * tiles.head_size())), 1L, call.kv_heads);
  uint32_t* packed = packed_memory.at_least(at_once * tiles.head_size());
  for (long kv = 0; kv < call.kv_heads; kv += at_once) {
    const long some = std::min(at_once, call.kv_heads - kv);
    const long num_packs = some * tiles.num_blocks, num_tiles = some * tiles.num_tiles();
#pragma omp parallel num_threads(call.num_threads)
    {
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
      if (brgemm_release) brgemm_release();
    }
  }
}

template void attend_many_rows<float>(const Attention<float>&, long);
template void attend_many_rows<bf16>(const Attention<bf16>&, long);

}  // namespace shoal
