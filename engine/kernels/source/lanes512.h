// Sixteen lanes in one register of AVX-512. Knows instructions; knows no numbers' meaning. lanes256.h says the same for AVX2.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace shoal {

using Floats = __m512;    // +, −, · are the compiler's own
using Ints = __m512i;     // sixteen words of 32 bits
using Lanes = __mmask16;  // some of the lanes

constexpr bool kMultipliesWords = true;  // there is a product of words of two bfloat16 numbers
constexpr long kRowsOf16 = 12, kRowsOf32 = 12;  // of a product, 16 or 32 columns wide, whose sums stay in registers

inline Lanes lanes(long count) { return count >= 16 ? 0xffff : (Lanes)((1u << (count < 0 ? 0 : count)) - 1); }
inline unsigned bits(Lanes some) { return some; }
inline Lanes above(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
inline Floats select(Lanes some, Floats there, Floats elsewhere) { return _mm512_mask_blend_ps(some, elsewhere, there); }

inline Floats zeros() { return _mm512_setzero_ps(); }
inline Floats all(float x) { return _mm512_set1_ps(x); }
inline Ints all_words(uint32_t word) { return _mm512_set1_epi32((int)word); }
inline Floats as_floats(Ints words) { return _mm512_castsi512_ps(words); }

inline Floats load16(const float* p) { return _mm512_loadu_ps(p); }
inline void store16(float* p, Floats value) { _mm512_storeu_ps(p, value); }
inline Ints load_words(const uint32_t* p) { return _mm512_loadu_si512(p); }
inline Ints load_words(const uint32_t* p, Lanes some) { return _mm512_maskz_loadu_epi32(some, p); }
inline void store_words(uint32_t* p, Ints words) { _mm512_storeu_si512(p, words); }
inline void store_words(uint32_t* p, Ints words, long count) { _mm512_mask_storeu_epi32(p, lanes(count), words); }
inline void copy_line_past_caches(char* to, const char* from) { _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from)); }

inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats multiply_subtract(Floats a, Floats b, Floats c) { return _mm512_fmsub_ps(a, b, c); }
inline Floats maximum(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats exact_reciprocal(Floats x) { return _mm512_div_ps(_mm512_set1_ps(1.0f), x); }
inline Floats rough_reciprocal(Floats x) { return _mm512_rcp14_ps(x); }  // 14 bits
inline float sum_all(Floats x) { return _mm512_reduce_add_ps(x); }
inline float max_all(Floats x) { return _mm512_reduce_max_ps(x); }

inline Floats fraction(Floats x) { return _mm512_reduce_ps(x, 0x9); }               // x − ⌊x⌋
inline Floats times_power(Floats p, Floats x) { return _mm512_scalef_ps(p, x); }  // p · 2^⌊x⌋

// Of words of two bfloat16 numbers: the first of each, the second, and back.
inline Floats first_halves(Ints words) { return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16)); }
inline Floats second_halves(Ints words) { return _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32((int)0xffff0000))); }
inline Ints join_halves(Floats first, Floats second) {  // of numbers that are bfloat16 already
  return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(first), 16), _mm512_castps_si512(second));
}
inline Ints narrow_pairs(Floats first, Floats second) {
  return join_halves(_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(first)), 16)),
                     _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(second)), 16)));
}
inline Floats add_word_products(Floats sum, Ints a, Ints b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }

// Halves of two rows' words side by side, of the first and of the last two words of every four; and the numbers of sums over
// such words in their own order.
inline Ints pairs_of_first_words(Ints a, Ints b) { return _mm512_unpacklo_epi16(a, b); }
inline Ints pairs_of_last_words(Ints a, Ints b) { return _mm512_unpackhi_epi16(a, b); }
inline Floats first_numbers(Floats low, Floats high) {
  return _mm512_permutex2var_ps(low, _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23), high);
}
inline Floats last_numbers(Floats low, Floats high) {
  return _mm512_permutex2var_ps(low, _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31), high);
}

// bfloat16 as its 16 bits; `count` ≤ 16.
inline Floats widen(const uint16_t* p, long count) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes(count), p)), 16));
}
inline void narrow(uint16_t* p, Floats value, long count) { _mm256_mask_storeu_epi16(p, lanes(count), (__m256i)_mm512_cvtneps_pbh(value)); }
inline void narrow32(uint16_t* p, Floats low, Floats high) { _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(high, low)); }

// `count` floats, zero beyond.
inline Floats load_some(const float* p, long count) { return _mm512_maskz_loadu_ps(lanes(count), p); }
inline void store_some(float* p, Floats value, long count) { _mm512_mask_storeu_ps(p, lanes(count), value); }

// Lane i of the result is all lanes of r[i] joined by `join`, which is associative.
template <class Join>
inline Floats join_each(const Floats (&r)[16], Join join) {
  Floats pairs[8], quads[4];
  for (int i = 0; i < 8; ++i) {
    pairs[i] = join(_mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]), _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]));
  }
  for (int i = 0; i < 4; ++i) {
    __m512d a = _mm512_castps_pd(pairs[2 * i]), b = _mm512_castps_pd(pairs[2 * i + 1]);
    quads[i] = join(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  auto fold = [&](Floats a, Floats b) { return join(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd)); };
  return fold(fold(quads[0], quads[1]), fold(quads[2], quads[3]));
}

// Column k of a square.
inline Ints column(const uint32_t (&square)[16][16], long k) {
  const Ints step = _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), _mm512_set1_epi32(16));
  return _mm512_i32gather_epi32(step, &square[0][k], 4);
}

}  // namespace shoal
