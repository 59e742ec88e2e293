// Scores over the vocabulary: the final norm and rows of the head as they lie (often the embedding itself). Knows no sampling.
#include "layer.h"

namespace shoal {
namespace {

constexpr long kBlock = 16;  // rows of the head whose sums are folded together

template <class T>
void score(const T* x, const T* norm, const T* head, float* out, long rows, long hidden, long vocab, float eps, int num_threads) {
  static thread_local Scratch<T> shared;
  const long words = hidden / Words<T>::kPer;
  T* normed = shared.at_least(rows * hidden);
  for (long r = 0; r < rows; ++r) rms_norm(x + r * hidden, norm, hidden, eps, normed + r * hidden);
#pragma omp parallel for schedule(dynamic, 16) num_threads(num_threads)
  for (long block = 0; block < (vocab + kBlock - 1) / kBlock; ++block) {
    const uint32_t* weights[kBlock];
    for (long i = 0; i < kBlock; ++i) {
      weights[i] = reinterpret_cast<const uint32_t*>(head + std::min(block * kBlock + i, vocab - 1) * hidden);
    }
    for (long r = 0; r < rows; ++r) {
      const uint32_t* left = reinterpret_cast<const uint32_t*>(normed + r * hidden);
      __m512 sums[kBlock];
#pragma GCC unroll 16
      for (long i = 0; i < kBlock; ++i) sums[i] = _mm512_setzero_ps();
      long at = 0;
      for (; at + 16 <= words; at += 16) {
        const __m512i a = _mm512_loadu_si512(left + at);
#pragma GCC unroll 16
        for (long i = 0; i < kBlock; ++i) sums[i] = Words<T>::dot(sums[i], a, _mm512_loadu_si512(weights[i] + at));
      }
      if (at < words) {
        const __mmask16 mask = lanes(words - at);
        const __m512i a = _mm512_maskz_loadu_epi32(mask, left + at);
#pragma GCC unroll 16
        for (long i = 0; i < kBlock; ++i) sums[i] = Words<T>::dot(sums[i], a, _mm512_maskz_loadu_epi32(mask, weights[i] + at));
      }
      store(out + r * vocab + block * kBlock, sum_each(sums), vocab - block * kBlock);
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
