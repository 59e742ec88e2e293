// Words, conversions and exponentials on 16 lanes. Knows AVX-512; knows no attention and no layers.
//
// A "word" is 32 bits: one float, or two neighbouring bfloat16 numbers. Matrix products are sums over words, whatever the type.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cmath>
#include <cstring>

namespace shoal {

struct bf16 {
  uint16_t bits;
};

template <class T>
struct Words;  // how many numbers a word holds, and the product of words

template <>
struct Words<float> {
  static constexpr long kPer = 1;
  static inline __m512 dot(__m512 sum, __m512i a, __m512i b) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
  }
};

template <>
struct Words<bf16> {
  static constexpr long kPer = 2;
  static inline __m512 dot(__m512 sum, __m512i a, __m512i b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
};

// Denormal numbers of this thread's arithmetic are zeros, as products of bfloat16 words take them anyway: one of them makes a
// product of floats take a hundred times as long, and weights of keys far below a row's best are many.
class FlushScope {
 public:
  FlushScope() : before_(_mm_getcsr()) { _mm_setcsr(before_ | kFlushResults | kZeroOperands); }
  ~FlushScope() { _mm_setcsr(before_); }
  FlushScope(const FlushScope&) = delete;
  FlushScope& operator=(const FlushScope&) = delete;

 private:
  static constexpr unsigned kFlushResults = 0x8000, kZeroOperands = 0x0040;
  unsigned before_;
};

inline __mmask16 lanes(long count) { return count >= 16 ? 0xffff : (__mmask16)((1u << (count < 0 ? 0 : count)) - 1); }

// `count` ≤ 16 numbers as float, zero beyond.
inline __m512 load(const float* p, long count) { return _mm512_maskz_loadu_ps(lanes(count), p); }
inline __m512 load(const bf16* p, long count) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes(count), p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

inline void store(float* p, __m512 value, long count) { _mm512_mask_storeu_ps(p, lanes(count), value); }
inline void store(bf16* p, __m512 value, long count) {
  _mm256_mask_storeu_epi16(p, lanes(count), (__m256i)_mm512_cvtneps_pbh(value));
}

// A score that counts for nothing: 2^kNever is 0, and unlike −∞ it survives being split into whole and fraction.
constexpr float kNever = -1e30f;

// 2^x by a polynomial of the fraction on [0, 1); 0 where x is very small (not for −∞). Relative error 1e-7 for float, 8e-5 for
// bfloat16. The last instruction takes the whole part of x itself.
template <class T>
inline __m512 exp2(__m512 x) {
  const __m512 f = _mm512_reduce_ps(x, 0x9);  // x − ⌊x⌋
  __m512 p;
  if constexpr (sizeof(T) == 4) {
    p = _mm512_set1_ps(1.877576e-3f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(8.98934228e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.58263156e-2f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.40153618e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.93153073e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.99999925e-1f));
  } else {
    p = _mm512_set1_ps(7.80244634e-2f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.26067274e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9583348e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.99925225e-1f));
  }
  return _mm512_scalef_ps(p, x);
}

// 1 / x, as exactly as T needs it.
template <class T>
inline __m512 reciprocal(__m512 x) {
  if constexpr (sizeof(T) == 4) return _mm512_div_ps(_mm512_set1_ps(1.0f), x);
  return _mm512_rcp14_ps(x);
}

// cap · tanh(x / cap), as exactly as T needs it. `twice` = 2 · log2 e / cap.
template <class T>
inline __m512 soft_cap(__m512 x, float cap, float twice) {
  const __m512 e = exp2<T>(_mm512_mul_ps(x, _mm512_set1_ps(twice)));
  const __m512 share = _mm512_mul_ps(reciprocal<T>(_mm512_add_ps(e, _mm512_set1_ps(1.0f))), _mm512_set1_ps(2.0f));
  return _mm512_mul_ps(_mm512_sub_ps(_mm512_set1_ps(1.0f), share), _mm512_set1_ps(cap));
}

inline void store32(float* p, __m512 low, __m512 high) { _mm512_storeu_ps(p, low), _mm512_storeu_ps(p + 16, high); }
inline void store32(bf16* p, __m512 low, __m512 high) { _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(high, low)); }

// Lane i of the result is all lanes of r[i] joined by `join`, which is associative.
template <class Join>
inline __m512 join_each(const __m512 (&r)[16], Join join) {
  __m512 pairs[8], quads[4];
  for (int i = 0; i < 8; ++i) {
    pairs[i] = join(_mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]), _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]));
  }
  for (int i = 0; i < 4; ++i) {
    __m512d a = _mm512_castps_pd(pairs[2 * i]), b = _mm512_castps_pd(pairs[2 * i + 1]);
    quads[i] = join(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  auto fold = [&](__m512 a, __m512 b) { return join(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd)); };
  return fold(fold(quads[0], quads[1]), fold(quads[2], quads[3]));
}

inline __m512 sum_each(const __m512 (&r)[16]) {
  return join_each(r, [](__m512 a, __m512 b) { return _mm512_add_ps(a, b); });
}

inline __m512 max_each(const __m512 (&r)[16]) {
  return join_each(r, [](__m512 a, __m512 b) { return _mm512_max_ps(a, b); });
}

}  // namespace shoal
