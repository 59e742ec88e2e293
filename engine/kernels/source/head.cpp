// Scores over the vocabulary: the final norm and rows of the head as they lie (often the embedding itself). Knows no sampling.
#include "layer.h"

namespace shoal {
namespace {

constexpr long kBlock = 16;  // rows of the head whose sums are folded together

constexpr int kRowsAtOnce = 4;
constexpr long kChunk = 32;  // rows of the head in one product

// The products of one row of the head with R rows of x.
template <int R>
inline void add_halves(const uint32_t* weights, const float* x, long words, Floats (&sums)[R]) {
  Floats even[R], odd[R];  // the second ones only of few rows: they hide the time that a sum takes
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) even[r] = odd[r] = zeros();
  auto add = [&](Ints own, long at, auto load_x) {
    const Floats first = first_halves(own), second = second_halves(own);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      Floats& other = R > 2 ? even[r] : odd[r];
      even[r] = multiply_add(first, load_x(x + 2 * r * words + at), even[r]);
      other = multiply_add(second, load_x(x + (2 * r + 1) * words + at), other);
    }
  };
  long at = 0;
  for (; at + 16 <= words; at += 16) {
    if constexpr (R > 2) _mm_prefetch(reinterpret_cast<const char*>(weights + kBlock * words + at), _MM_HINT_T0);  // of the next block
    add(load_words(weights + at), at, [](const float* p) { return load16(p); });
  }
  const long left = words - at;
  if (left > 0) add(load_words(weights + at, lanes(left)), at, [&](const float* p) { return load_some(p, left); });
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) sums[r] = even[r] + odd[r];
}

template <int R>
void block_scores_of_halves(const float* x, const uint32_t* const* weights, long words, float* out, long vocab, long left) {
  Floats sums[R][kBlock];
  for (long i = 0; i < kBlock; ++i) {
    Floats own[R];
    add_halves<R>(weights[i], x, words, own);
    for (int r = 0; r < R; ++r) sums[r][i] = own[r];
  }
  for (int r = 0; r < R; ++r) store(out + r * vocab, sum_each(sums[r]), left);
}

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

// Scores of many rows: rows of the head as the left side of a product, x turned as its right side.
template <class T>
void chunk_scores(const uint32_t* turned, long columns, const T* head, long chunk, long hidden, float* c, float* out, long rows, long vocab) {
  const long whole = tiled<T>() ? chunk / kTileRows * kTileRows : 0;  // the rest is the end of the vocabulary
  if (whole) gemm<T, T>(whole, columns, hidden, head, hidden, turned, columns, c, columns, false);
  if (whole < chunk) {
    loop_gemm<T, T>(chunk - whole, columns, hidden, head + whole * hidden, hidden, turned, columns, c + whole * columns, columns, false);
  }
  for (long r = 0; r < rows; ++r) {
    for (long i = 0; i < chunk; ++i) out[r * vocab + i] = c[i * columns + r];
  }
}

// A row of x as floats: the first halves of its words, then the second.
inline void split_halves(const uint32_t* words, long count, float* to) {
  for (long at = 0; at < count; at += 16) {
    const Ints own = load_words(words + at, lanes(count - at));
    store(to + at, first_halves(own), count - at), store(to + count + at, second_halves(own), count - at);
  }
}

template <class T>
void score(const T* x, const T* norm, const T* head, float* out, long rows, long hidden, long vocab, float eps, int num_threads) {
  static thread_local Scratch<T> shared;
  const FlushScope flush;
  const long words = hidden / Words<T>::kPer;
  T* normed = shared.at_least(rows * hidden);
  for (long r = 0; r < rows; ++r) rms_norm(x + r * hidden, norm, hidden, eps, normed + r * hidden);
  if (!kByHalves<T> && rows >= (tiled<T>() ? 2 : 16)) {
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
      const ProductScope scope;
      float* c = sums.at_least(kChunk * columns);
#pragma omp for schedule(dynamic, 16)
      for (long chunk = 0; chunk < (vocab + kChunk - 1) / kChunk; ++chunk) {
        const long first = chunk * kChunk, some = std::min(kChunk, vocab - first);
        const char* ahead = reinterpret_cast<const char*>(head + (first + some) * hidden);
        for (long i = 0; i < kChunk * hidden * (long)sizeof(T); i += 64) _mm_prefetch(ahead + i, _MM_HINT_T1);
        chunk_scores<T>(turned, columns, head + first * hidden, some, hidden, c, out + first, rows, vocab);
      }
    }
    return;
  }
  static thread_local Scratch<float> shared_halves;
  float* halves = kByHalves<T> ? shared_halves.at_least(rows * hidden) : nullptr;
  for (long r = 0; kByHalves<T> && r < rows; ++r) split_halves(reinterpret_cast<const uint32_t*>(normed + r * hidden), words, halves + r * hidden);
#pragma omp parallel for schedule(dynamic, 16) num_threads(num_threads)
  for (long block = 0; block < (vocab + kBlock - 1) / kBlock; ++block) {
    const FlushScope flush_here;
    const long first = block * kBlock, left = vocab - first;
    const uint32_t* weights[kBlock];
    for (long i = 0; i < kBlock; ++i) weights[i] = reinterpret_cast<const uint32_t*>(head + std::min(first + i, vocab - 1) * hidden);
    for (long r = 0; r < rows; r += kRowsAtOnce) {
      auto serve = [&]<int R>(std::integral_constant<int, R>) {
        float* to = out + r * vocab + first;
        if constexpr (kByHalves<T>) block_scores_of_halves<R>(halves + r * hidden, weights, words, to, vocab, left);
        else block_scores<T, R>(reinterpret_cast<const uint32_t*>(normed + r * hidden), weights, words, to, vocab, left);
      };
      const long some = rows - r;
      if (some == 1) serve(std::integral_constant<int, 1>());
      if (some == 2) serve(std::integral_constant<int, 2>());
      if (some == 3) serve(std::integral_constant<int, 3>());
      if (some >= 4) serve(std::integral_constant<int, 4>());
    }
  }
}

}  // namespace
}  // namespace shoal

// sizes: rows, hidden, vocab, num_threads. out [rows, vocab] float.
extern "C" void shoal_score(int is_bf16, const void* x, const void* norm, const void* head, float* out, const int64_t* sizes, float eps) {
  auto call = [&]<class T>(T) {
    shoal::score(static_cast<const T*>(x), static_cast<const T*>(norm), static_cast<const T*>(head), out, sizes[0], sizes[1], sizes[2],
                 eps, (int)sizes[3]);
  };
  is_bf16 ? call(shoal::bf16{}) : call(float{});
}
