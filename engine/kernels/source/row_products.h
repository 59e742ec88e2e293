// What attention of a single row does with the keys of one chunk: scores, and sums of V. Knows no slots and no parts.
//
// By words: a product takes what lies in memory. By halves: bfloat16 is widened as it is read, once for all heads, where the
// processor has no product of bfloat16 words.
#pragma once
#include <type_traits>

#include "paged.h"

namespace shoal {

constexpr long kChunk = 128;  // keys at once

// Sums over a head become its scores; those of keys beyond `count` count for nothing.
template <class T>
inline __attribute__((always_inline)) Floats finish_scores(const Attention<T>& call, Floats sums, long count) {
  Floats scores = sums * all(call.scale);
  if (call.cap > 0) scores = soft_cap<T>(scores, call.cap, 2 * 1.44269504f / call.cap);
  return select(lanes(count), scores, all(kNever));
}

template <class T, int NW>  // NW: sixteens of words of a head
struct ByWords {
  using Weight = T;
  static constexpr long kLanes = NW * 16 * Words<T>::kPer;  // numbers per head in the accumulator

  const Attention<T>& call;
  long words;  // of one head

  // Of H heads whose queries lie one behind the other: out [H, kChunk].
  template <int H>
  void scores(const T* const* keys, long count, long offset, const T* q, float* out) const {
    for (int h = 0; h < H; ++h) scores_of(keys, count, offset, q + h * call.d, out + h * kChunk);
  }

  __attribute__((noinline)) void scores_of(const T* const* keys, long count, long offset, const T* q, float* out) const {
    Ints query[NW];
    Lanes mask[NW];
    for (int w = 0; w < NW; ++w) {
      mask[w] = lanes(words - 16 * w);
      query[w] = load_words(reinterpret_cast<const uint32_t*>(q) + 16 * w, mask[w]);
    }
    for (long base = 0; base < count; base += 16) {
      Floats dots[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) {
        const uint32_t* key = reinterpret_cast<const uint32_t*>(keys[base + i] + offset);
        dots[i] = Words<T>::dot(zeros(), load_words(key, mask[0]), query[0]);
#pragma GCC unroll 16
        for (int w = 1; w < NW; ++w) {
          dots[i] = Words<T>::dot(dots[i], load_words(key + 16 * w, mask[w]), query[w]);
        }
      }
      store16(out + base, finish_scores(call, sum_each(dots), count - base));
    }
  }

  // Sums of H heads go on: what they were, times `factors`, and V by weights [H, kChunk].
  template <int H>
  void gather(const T* const* keys, long count, long offset, const T* weights, const float* factors, float* sums) const {
    for (int w = 0; w < NW; ++w) {
      const Lanes mask = lanes(words - 16 * w);
      if constexpr (sizeof(T) == 2) {
        Floats low[H], high[H];
        for (int h = 0; h < H; ++h) {
          low[h] = load16(sums + h * kLanes + 32 * w) * all(factors[h]);
          high[h] = load16(sums + h * kLanes + 32 * w + 16) * all(factors[h]);
        }
        for (long i = 0; i < count; i += 2) {  // an odd count: the last key comes twice, the second time with weight 0
          const Ints a = load_words(reinterpret_cast<const uint32_t*>(keys[i] + offset) + 16 * w, mask);
          const Ints b = load_words(reinterpret_cast<const uint32_t*>(keys[i + 1] + offset) + 16 * w, mask);
          const Ints first = pairs_of_first_words(a, b), second = pairs_of_last_words(a, b);
#pragma GCC unroll 4
          for (int h = 0; h < H; ++h) {
            uint32_t pair;
            std::memcpy(&pair, weights + h * kChunk + i, 4);
            const Ints p = all_words(pair);
            low[h] = Words<T>::dot(low[h], first, p);
            high[h] = Words<T>::dot(high[h], second, p);
          }
        }
        for (int h = 0; h < H; ++h) {
          store16(sums + h * kLanes + 32 * w, low[h]);
          store16(sums + h * kLanes + 32 * w + 16, high[h]);
        }
      } else {
        Floats sum[H];
        for (int h = 0; h < H; ++h) {
          sum[h] = load16(sums + h * kLanes + 16 * w) * all(factors[h]);
        }
        for (long i = 0; i < count; ++i) {
          const Floats v = as_floats(load_words(reinterpret_cast<const uint32_t*>(keys[i] + offset) + 16 * w, mask));
#pragma GCC unroll 4
          for (int h = 0; h < H; ++h) {
            sum[h] = multiply_add(v, all(weights[h * kChunk + i]), sum[h]);
          }
        }
        for (int h = 0; h < H; ++h) store16(sums + h * kLanes + 16 * w, sum[h]);
      }
    }
  }

  // One head's sums, times `by`, in the order of its numbers.
  void write(const float* sums, Floats by, T* out) const {
    for (int w = 0; w < NW; ++w) {
      const float* own = sums + w * 16 * Words<T>::kPer;
      T* to = out + w * 16 * Words<T>::kPer;
      const long left = call.d - w * 16 * Words<T>::kPer;
      if constexpr (sizeof(T) == 2) {
        const Floats low = load16(own), high = load16(own + 16);  // four of eight numbers of each lane
        store(to, first_numbers(low, high) * by, left);
        if (left > 16) store(to + 16, last_numbers(low, high) * by, left - 16);
      } else {
        store(to, load16(own) * by, left);
      }
    }
  }
};

template <int NW>
struct ByHalves {
  using Weight = float;
  static constexpr long kLanes = NW * 32;  // of each sixteen words the first halves, then the second

  const Attention<bf16>& call;
  long words;

  __attribute__((always_inline)) Ints load_key(const bf16* key, int w) const {
    const uint32_t* from = reinterpret_cast<const uint32_t*>(key) + 16 * w;
    return words >= 16 * (w + 1) ? load_words(from) : load_words(from, lanes(words - 16 * w));
  }

  template <int H>
  __attribute__((noinline)) void scores(const bf16* const* keys, long count, long offset, const bf16* q, float* out) const {
    Floats query[H][NW][2];
    for (int h = 0; h < H; ++h) {
      for (int w = 0; w < NW; ++w) {
        const Ints own = load_key(q + h * call.d, w);
        query[h][w][0] = first_halves(own), query[h][w][1] = second_halves(own);
      }
    }
    for (long base = 0; base < count; base += 16) {
      Floats dots[H][16];
      for (int i = 0; i < 16; ++i) {
        Floats sums[H];
#pragma GCC unroll 4
        for (int h = 0; h < H; ++h) sums[h] = zeros();
#pragma GCC unroll 16
        for (int w = 0; w < NW; ++w) {
          const Ints key = load_key(keys[base + i] + offset, w);
          const Floats first = first_halves(key), second = second_halves(key);
#pragma GCC unroll 4
          for (int h = 0; h < H; ++h) sums[h] = multiply_add(second, query[h][w][1], multiply_add(first, query[h][w][0], sums[h]));
        }
#pragma GCC unroll 4
        for (int h = 0; h < H; ++h) dots[h][i] = sums[h];
      }
      for (int h = 0; h < H; ++h) store16(out + h * kChunk + base, finish_scores(call, sum_each(dots[h]), count - base));
    }
  }

  template <int H>
  void gather(const bf16* const* keys, long count, long offset, const float* weights, const float* factors, float* sums) const {
    if constexpr (H > 3) {
      gather<2>(keys, count, offset, weights, factors, sums);
      gather<H - 2>(keys, count, offset, weights + 2 * kChunk, factors + 2, sums + 2 * kLanes);
    } else {
      for (int w = 0; w < NW; ++w) {
        gather_half<H, 0>(keys, count, offset, w, weights, factors, sums + 32 * w);
        gather_half<H, 1>(keys, count, offset, w, weights, factors, sums + 32 * w + 16);
      }
    }
  }

  // Keys in two rows of sums, which fill the registers.
  template <int H, int HALF>
  __attribute__((noinline)) void gather_half(const bf16* const* keys, long count, long offset, int w, const float* weights,
                                             const float* factors, float* sums) const {
    auto load = [&](const bf16* key) { return HALF ? second_halves(load_key(key + offset, w)) : first_halves(load_key(key + offset, w)); };
    Floats even[H], odd[H];
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) even[h] = load16(sums + h * kLanes) * all(factors[h]), odd[h] = zeros();
    for (long i = 0; i < count; i += 2) {  // an odd count: the last key comes twice, the second time with weight 0
      const Floats first = load(keys[i]);
#pragma GCC unroll 4
      for (int h = 0; h < H; ++h) even[h] = multiply_add(first, all(weights[h * kChunk + i]), even[h]);
      const Floats second = load(keys[i + 1]);
#pragma GCC unroll 4
      for (int h = 0; h < H; ++h) odd[h] = multiply_add(second, all(weights[h * kChunk + i + 1]), odd[h]);
    }
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) store16(sums + h * kLanes, even[h] + odd[h]);
  }

  void write(const float* sums, Floats by, bf16* out) const {
    for (int w = 0; w < NW; ++w) {
      const Ints pairs = narrow_pairs(load16(sums + 32 * w) * by, load16(sums + 32 * w + 16) * by);
      store_words(reinterpret_cast<uint32_t*>(out) + 16 * w, pairs, words - 16 * w);
    }
  }
};

template <class T, int NW>
using RowProducts = std::conditional_t<kByHalves<T>, ByHalves<NW>, ByWords<T, NW>>;

}  // namespace shoal
