// Scores over the vocabulary: the final norm and rows of the head as they lie (often the embedding itself). Knows no sampling.
#include "layer.h"

namespace shoal {
namespace {

constexpr long kBlock = 16;  // rows of the head whose sums are folded together

constexpr int kRowsAtOnce = 4;
constexpr long kChunk = 32;  // rows of the head in one product


// Scores of R rows against 16 rows of the head, read one after the other so that memory is read in its order.
template <class T, int R>
void block_scores(const uint32_t* x, const uint32_t* const* weights, long words, float* out, long vocab, long left) {
  Floats sums[R][kBlock];
  for (long i = 0; i < kBlock; ++i) {
    Floats even[R], odd[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) even[r] = odd[r] = zeros();
    long at = 0;
    for (; at + 32 <= words; at += 32) {
      const Ints a = load_words(weights[i] + at), b = load_words(weights[i] + at + 16);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        even[r] = Words<T>::dot(even[r], a, load_words(x + r * words + at));
        odd[r] = Words<T>::dot(odd[r], b, load_words(x + r * words + at + 16));
      }
    }
    for (; at < words; at += 16) {
      const Lanes mask = lanes(words - at);
      const Ints a = load_words(weights[i] + at, mask);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) even[r] = Words<T>::dot(even[r], a, load_words(x + r * words + at, mask));
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) sums[r][i] = even[r] + odd[r];
  }
  for (int r = 0; r < R; ++r) store(out + r * vocab, sum_each(sums[r]), left);
}

// Rows of the head as what products take on their left: as they lie, or a copy.
template <class T, class L>
const L* as_left(const T* numbers, long count, Scratch<L>& copies) {
  if constexpr (std::is_same_v<T, L>) {
    return numbers;
  } else {
    L* to = copies.at_least(count);
    for (long i = 0; i < count; i += 16) store(to + i, load(numbers + i, count - i), count - i);
    return to;
  }
}

// Scores of many rows: rows of the head as the left side of a product, x turned as its right side.
template <class T, class L>
void chunk_scores(const uint32_t* turned, long columns, const L* head, long chunk, long hidden, float* c, float* out, long rows, long vocab) {
  const long whole = tiled<L>() ? chunk / kTileRows * kTileRows : 0;  // the rest is the end of the vocabulary
  if (whole) gemm<T, L>(whole, columns, hidden, head, hidden, turned, columns, c, columns, false);
  if (whole < chunk) {
    loop_gemm<T, L>(chunk - whole, columns, hidden, head + whole * hidden, hidden, turned, columns, c + whole * columns, columns, false);
  }
  for (long r = 0; r < rows; ++r) {
    for (long i = 0; i < chunk; ++i) out[r * vocab + i] = c[i * columns + r];
  }
}

template <class T, class L>
void score(const T* x, const T* norm, const T* head, float* out, long rows, long hidden, long vocab, float eps, int num_threads) {
  static thread_local Scratch<T> shared;
  const long words = hidden / Words<T>::kPer;
  T* normed = shared.at_least(rows * hidden);
  for (long r = 0; r < rows; ++r) rms_norm(x + r * hidden, norm, hidden, eps, normed + r * hidden);
  if (rows >= (tiled<T>() ? 2 : 16)) {
    static thread_local Scratch<uint32_t> shared_turned;
    const long columns = (rows + 15) / 16 * 16;
    uint32_t* turned = shared_turned.at_least(words * columns);
    const uint32_t* from = reinterpret_cast<const uint32_t*>(normed);
    for (long w = 0; w < words; ++w) {
      for (long r = 0; r < columns; ++r) turned[w * columns + r] = r < rows ? from[r * words + w] : 0;
    }
#pragma omp parallel num_threads(num_threads)
    {
      static thread_local Scratch<float> sums;
      static thread_local Scratch<L> copies;
      const ProductScope scope;
      float* c = sums.at_least(kChunk * columns);
#pragma omp for schedule(dynamic, 16)
      for (long chunk = 0; chunk < (vocab + kChunk - 1) / kChunk; ++chunk) {
        const long first = chunk * kChunk, some = std::min(kChunk, vocab - first);
        const char* ahead = reinterpret_cast<const char*>(head + (first + some) * hidden);
        for (long i = 0; i < kChunk * hidden * (long)sizeof(T); i += 64) _mm_prefetch(ahead + i, _MM_HINT_T1);
        const L* left = as_left(head + first * hidden, some * hidden, copies);
        chunk_scores<T, L>(turned, columns, left, some, hidden, c, out + first, rows, vocab);
      }
    }
    return;
  }
#pragma omp parallel for schedule(dynamic, 16) num_threads(num_threads)
  for (long block = 0; block < (vocab + kBlock - 1) / kBlock; ++block) {
    const long first = block * kBlock, left = vocab - first;
    const uint32_t* weights[kBlock];
    for (long i = 0; i < kBlock; ++i) weights[i] = reinterpret_cast<const uint32_t*>(head + std::min(first + i, vocab - 1) * hidden);
    for (long r = 0; r < rows; r += kRowsAtOnce) {
      const uint32_t* from = reinterpret_cast<const uint32_t*>(normed + r * hidden);
      float* to = out + r * vocab + first;
      const long some = rows - r;
      if (some == 1) block_scores<T, 1>(from, weights, words, to, vocab, left);
      if (some == 2) block_scores<T, 2>(from, weights, words, to, vocab, left);
      if (some == 3) block_scores<T, 3>(from, weights, words, to, vocab, left);
      if (some >= 4) block_scores<T, 4>(from, weights, words, to, vocab, left);
    }
  }
}

}  // namespace
}  // namespace shoal

// sizes: rows, hidden, vocab, num_threads. out [rows, vocab] float.
extern "C" void shoal_score(int is_bf16, const void* x, const void* norm, const void* head, float* out, const int64_t* sizes, float eps) {
  auto call = [&]<class T>(T) {
    shoal::with_left<T>([&]<class L>(L) {
      shoal::score<T, L>(static_cast<const T*>(x), static_cast<const T*>(norm), static_cast<const T*>(head), out, sizes[0], sizes[1],
                         sizes[2], eps, (int)sizes[3]);
    });
  };
  is_bf16 ? call(shoal::bf16{}) : call(float{});
}
