// Sixteen lanes in two registers of AVX2, for processors without AVX-512. What each function means is said in lanes512.h.
#pragma once
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace shoal {

struct Floats {
  __m256 low, high;  // lanes 0–7 and 8–15
};
struct Ints {
  __m256i low, high;
};
struct Lanes {
  __m256i low, high;  // all bits of a lane or none
};

constexpr bool kMultipliesWords = false;
constexpr long kRowsOf16 = 6, kRowsOf32 = 2;

#define SHOAL_INLINE inline __attribute__((always_inline))

SHOAL_INLINE Floats operator+(Floats a, Floats b) { return {a.low + b.low, a.high + b.high}; }
SHOAL_INLINE Floats operator-(Floats a, Floats b) { return {a.low - b.low, a.high - b.high}; }
SHOAL_INLINE Floats operator*(Floats a, Floats b) { return {a.low * b.low, a.high * b.high}; }

SHOAL_INLINE Lanes lanes(long count) {
  const __m256i first = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), last = _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15);
  const __m256i end = _mm256_set1_epi32((int)std::clamp(count, 0L, 16L));
  return {_mm256_cmpgt_epi32(end, first), _mm256_cmpgt_epi32(end, last)};
}
SHOAL_INLINE Lanes operator&(Lanes a, Lanes b) { return {_mm256_and_si256(a.low, b.low), _mm256_and_si256(a.high, b.high)}; }
SHOAL_INLINE Lanes operator|(Lanes a, Lanes b) { return {_mm256_or_si256(a.low, b.low), _mm256_or_si256(a.high, b.high)}; }
SHOAL_INLINE Lanes operator~(Lanes a) {
  const __m256i ones = _mm256_set1_epi32(-1);
  return {_mm256_xor_si256(a.low, ones), _mm256_xor_si256(a.high, ones)};
}
SHOAL_INLINE unsigned bits(Lanes some) {
  return _mm256_movemask_ps(_mm256_castsi256_ps(some.low)) | _mm256_movemask_ps(_mm256_castsi256_ps(some.high)) << 8;
}
SHOAL_INLINE Lanes above(Floats a, Floats b) {
  return {_mm256_castps_si256(_mm256_cmp_ps(a.low, b.low, _CMP_GT_OQ)), _mm256_castps_si256(_mm256_cmp_ps(a.high, b.high, _CMP_GT_OQ))};
}
SHOAL_INLINE Floats select(Lanes some, Floats there, Floats elsewhere) {
  return {_mm256_blendv_ps(elsewhere.low, there.low, _mm256_castsi256_ps(some.low)),
          _mm256_blendv_ps(elsewhere.high, there.high, _mm256_castsi256_ps(some.high))};
}

SHOAL_INLINE Floats zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
SHOAL_INLINE Floats all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
SHOAL_INLINE Ints all_words(uint32_t word) { return {_mm256_set1_epi32((int)word), _mm256_set1_epi32((int)word)}; }
SHOAL_INLINE Floats as_floats(Ints words) { return {_mm256_castsi256_ps(words.low), _mm256_castsi256_ps(words.high)}; }

SHOAL_INLINE Floats load16(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
SHOAL_INLINE void store16(float* p, Floats value) { _mm256_storeu_ps(p, value.low), _mm256_storeu_ps(p + 8, value.high); }
SHOAL_INLINE __m256i load_bits(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
SHOAL_INLINE void store_bits(void* p, __m256i value) { _mm256_storeu_si256(static_cast<__m256i*>(p), value); }
SHOAL_INLINE Ints load_words(const uint32_t* p) { return {load_bits(p), load_bits(p + 8)}; }
SHOAL_INLINE Ints load_words(const uint32_t* p, Lanes some) {
  const int* from = reinterpret_cast<const int*>(p);
  return {_mm256_maskload_epi32(from, some.low), _mm256_maskload_epi32(from + 8, some.high)};
}
SHOAL_INLINE void store_words(uint32_t* p, Ints words) { store_bits(p, words.low), store_bits(p + 8, words.high); }
SHOAL_INLINE void store_words(uint32_t* p, Ints words, long count) {
  if (count >= 16) return store_words(p, words);
  const Lanes some = lanes(count);
  int* to = reinterpret_cast<int*>(p);
  _mm256_maskstore_epi32(to, some.low, words.low), _mm256_maskstore_epi32(to + 8, some.high, words.high);
}
SHOAL_INLINE void copy_line_past_caches(char* to, const char* from) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), load_bits(from));
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to + 32), load_bits(from + 32));
}

SHOAL_INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)}; }
SHOAL_INLINE Floats multiply_subtract(Floats a, Floats b, Floats c) { return {_mm256_fmsub_ps(a.low, b.low, c.low), _mm256_fmsub_ps(a.high, b.high, c.high)}; }
SHOAL_INLINE __m256 maximum(__m256 a, __m256 b) { return _mm256_max_ps(a, b); }
SHOAL_INLINE Floats maximum(Floats a, Floats b) { return {maximum(a.low, b.low), maximum(a.high, b.high)}; }
SHOAL_INLINE Floats exact_reciprocal(Floats x) { return {1.0f / x.low, 1.0f / x.high}; }
SHOAL_INLINE Floats rough_reciprocal(Floats x) { return exact_reciprocal(x); }  // the rough one here has but 12 bits

template <class Join>
SHOAL_INLINE float join_all(Floats x, Join join) {
  const __m256 eight = join(x.low, x.high);
  const __m256 four = join(eight, _mm256_permute2f128_ps(eight, eight, 1));
  const __m256 two = join(four, _mm256_permute_ps(four, 0x4e));
  return _mm256_cvtss_f32(join(two, _mm256_permute_ps(two, 0xb1)));
}
SHOAL_INLINE float sum_all(Floats x) {
  return join_all(x, [](__m256 a, __m256 b) { return a + b; });
}
SHOAL_INLINE float max_all(Floats x) {
  return join_all(x, [](__m256 a, __m256 b) { return maximum(a, b); });
}

// An exponent that a float can have: infinity is the largest. In this order of arguments a NaN stays one.
constexpr float kLeastPower = -125.0f, kMostPower = 127.9999f;
SHOAL_INLINE __m256 bounded(__m256 x) { return _mm256_min_ps(_mm256_set1_ps(kMostPower), _mm256_max_ps(_mm256_set1_ps(kLeastPower), x)); }

SHOAL_INLINE __m256 fraction(__m256 x) { return bounded(x) - _mm256_floor_ps(bounded(x)); }
SHOAL_INLINE Floats fraction(Floats x) { return {fraction(x.low), fraction(x.high)}; }

// For p in [½, 2): ⌊x⌋ is added to its exponent. Zero where that would be denormal, the largest floats where it would overflow.
SHOAL_INLINE __m256 times_power(__m256 p, __m256 x) {
  const __m256i power = _mm256_slli_epi32(_mm256_cvtps_epi32(_mm256_floor_ps(bounded(x))), 23);
  const __m256 result = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), power));
  return _mm256_andnot_ps(_mm256_cmp_ps(x, _mm256_set1_ps(kLeastPower), _CMP_LT_OQ), result);
}
SHOAL_INLINE Floats times_power(Floats p, Floats x) { return {times_power(p.low, x.low), times_power(p.high, x.high)}; }

SHOAL_INLINE Floats first_halves(Ints words) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(words.low, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(words.high, 16))};
}
SHOAL_INLINE Floats second_halves(Ints words) {
  const __m256i mask = _mm256_set1_epi32((int)0xffff0000);
  return {_mm256_castsi256_ps(_mm256_and_si256(words.low, mask)), _mm256_castsi256_ps(_mm256_and_si256(words.high, mask))};
}
SHOAL_INLINE __m256i join_halves(__m256 first, __m256 second) {
  return _mm256_or_si256(_mm256_srli_epi32(_mm256_castps_si256(first), 16), _mm256_castps_si256(second));
}
SHOAL_INLINE Ints join_halves(Floats first, Floats second) { return {join_halves(first.low, second.low), join_halves(first.high, second.high)}; }
SHOAL_INLINE Floats add_word_products(Floats sum, Ints a, Ints b) {
  return multiply_add(second_halves(a), second_halves(b), multiply_add(first_halves(a), first_halves(b), sum));
}

SHOAL_INLINE Ints pairs_of_first_words(Ints a, Ints b) { return {_mm256_unpacklo_epi16(a.low, b.low), _mm256_unpacklo_epi16(a.high, b.high)}; }
SHOAL_INLINE Ints pairs_of_last_words(Ints a, Ints b) { return {_mm256_unpackhi_epi16(a.low, b.low), _mm256_unpackhi_epi16(a.high, b.high)}; }
SHOAL_INLINE Floats first_numbers(Floats low, Floats high) {
  return {_mm256_permute2f128_ps(low.low, high.low, 0x20), _mm256_permute2f128_ps(low.low, high.low, 0x31)};
}
SHOAL_INLINE Floats last_numbers(Floats low, Floats high) {
  return {_mm256_permute2f128_ps(low.high, high.high, 0x20), _mm256_permute2f128_ps(low.high, high.high, 0x31)};
}

SHOAL_INLINE Floats widen16(const uint16_t* p) {
  const __m256i numbers = load_bits(p);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(numbers)), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm256_extracti128_si256(numbers, 1)), 16))};
}
SHOAL_INLINE Floats widen(const uint16_t* p, long count) {
  if (count >= 16) return widen16(p);
  uint16_t some[16] = {};
  std::memcpy(some, p, 2 * std::max(count, 0L));
  return widen16(some);
}
// To the nearest, halves to the even one; a NaN stays one.
SHOAL_INLINE __m256i rounded(__m256 value) {
  const __m256i word = _mm256_castps_si256(value), odd = _mm256_and_si256(_mm256_srli_epi32(word, 16), _mm256_set1_epi32(1));
  const __m256i nearest = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(word, _mm256_set1_epi32(0x7fff)), odd), 16);
  const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(word, 16), _mm256_set1_epi32(0x40));
  return _mm256_blendv_epi8(nearest, quiet, _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q)));
}
SHOAL_INLINE Ints narrow_pairs(Floats first, Floats second) {
  return {_mm256_or_si256(rounded(first.low), _mm256_slli_epi32(rounded(second.low), 16)),
          _mm256_or_si256(rounded(first.high), _mm256_slli_epi32(rounded(second.high), 16))};
}
SHOAL_INLINE void narrow16(uint16_t* p, Floats value) {
  store_bits(p, _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded(value.low), rounded(value.high)), 0xd8));
}
SHOAL_INLINE void narrow(uint16_t* p, Floats value, long count) {
  if (count >= 16) return narrow16(p, value);
  uint16_t some[16];
  narrow16(some, value);
  std::memcpy(p, some, 2 * std::max(count, 0L));
}
SHOAL_INLINE void narrow32(uint16_t* p, Floats low, Floats high) { narrow16(p, low), narrow16(p + 16, high); }

SHOAL_INLINE Floats load_some(const float* p, long count) {
  if (count >= 16) return load16(p);
  const Lanes some = lanes(count);
  return {_mm256_maskload_ps(p, some.low), _mm256_maskload_ps(p + 8, some.high)};
}
SHOAL_INLINE void store_some(float* p, Floats value, long count) {
  if (count >= 16) return store16(p, value);  // a masked store takes several times as long
  const Lanes some = lanes(count);
  _mm256_maskstore_ps(p, some.low, value.low), _mm256_maskstore_ps(p + 8, some.high, value.high);
}

// Each joins its own two registers first; eight of them make one.
template <class Join>
SHOAL_INLINE __m256 join_eight(const Floats* r, Join join) {
  __m256 pairs[4], quads[2];
  for (int i = 0; i < 4; ++i) {
    const __m256 a = join(r[2 * i].low, r[2 * i].high), b = join(r[2 * i + 1].low, r[2 * i + 1].high);
    pairs[i] = join(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
  }
  for (int i = 0; i < 2; ++i) {
    const __m256d a = _mm256_castps_pd(pairs[2 * i]), b = _mm256_castps_pd(pairs[2 * i + 1]);
    quads[i] = join(_mm256_castpd_ps(_mm256_unpacklo_pd(a, b)), _mm256_castpd_ps(_mm256_unpackhi_pd(a, b)));
  }
  return join(_mm256_permute2f128_ps(quads[0], quads[1], 0x20), _mm256_permute2f128_ps(quads[0], quads[1], 0x31));
}
template <class Join>
SHOAL_INLINE Floats join_each(const Floats (&r)[16], Join join) {
  return {join_eight(r, join), join_eight(r + 8, join)};
}

SHOAL_INLINE Ints column(const uint32_t (&square)[16][16], long k) {
  uint32_t words[16];
  for (int i = 0; i < 16; ++i) words[i] = square[i][k];
  return load_words(words);
}

#undef SHOAL_INLINE

}  // namespace shoal
