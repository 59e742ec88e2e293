// Words, conversions and exponentials on 16 lanes. Knows numbers; knows no attention and no layers.
//
// A "word" is 32 bits: one float, or two neighbouring bfloat16 numbers. Matrix products are sums over words, whatever the type.
#pragma once
#include <cmath>
#include <cstring>

#ifdef __AVX512F__
#include "lanes512.h"
#else
#include "lanes256.h"
#endif

namespace shoal {

struct bf16 {
  uint16_t bits;
};

template <class T>
struct Words;  // how many numbers a word holds, and the product of words

template <>
struct Words<float> {
  static constexpr long kPer = 1;
  static inline Floats dot(Floats sum, Ints a, Ints b) { return multiply_add(as_floats(a), as_floats(b), sum); }
};

template <>
struct Words<bf16> {
  static constexpr long kPer = 2;
  static inline Floats dot(Floats sum, Ints a, Ints b) { return add_word_products(sum, a, b); }
};

// Whether single rows' products take words of T apart into halves: where there is no product of words.
template <class T>
constexpr bool kByHalves = sizeof(T) == 2 && !kMultipliesWords;

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

// `count` ≤ 16 numbers as float, zero beyond.
inline Floats load(const float* p, long count) { return load_some(p, count); }
inline Floats load(const bf16* p, long count) { return widen(&p->bits, count); }

inline void store(float* p, Floats value, long count) { store_some(p, value, count); }
inline void store(bf16* p, Floats value, long count) { narrow(&p->bits, value, count); }

// A score that counts for nothing: 2^kNever is 0, and unlike −∞ it survives being split into whole and fraction.
constexpr float kNever = -1e30f;

// 2^x by a polynomial of the fraction on [0, 1); 0 where x is very small (not for −∞). Relative error 1e-7 for float, 8e-5 for
// bfloat16.
template <class T>
inline Floats exp2(Floats x) {
  const Floats f = fraction(x);
  Floats p;
  if constexpr (sizeof(T) == 4) {
    p = all(1.877576e-3f);
    p = multiply_add(p, f, all(8.98934228e-3f));
    p = multiply_add(p, f, all(5.58263156e-2f));
    p = multiply_add(p, f, all(2.40153618e-1f));
    p = multiply_add(p, f, all(6.93153073e-1f));
    p = multiply_add(p, f, all(9.99999925e-1f));
  } else {
    p = all(7.80244634e-2f);
    p = multiply_add(p, f, all(2.26067274e-1f));
    p = multiply_add(p, f, all(6.9583348e-1f));
    p = multiply_add(p, f, all(9.99925225e-1f));
  }
  return times_power(p, x);
}

// 1 / x, as exactly as T needs it.
template <class T>
inline Floats reciprocal(Floats x) {
  return sizeof(T) == 4 ? exact_reciprocal(x) : rough_reciprocal(x);
}

// cap · tanh(x / cap), as exactly as T needs it. `twice` = 2 · log2 e / cap.
template <class T>
inline Floats soft_cap(Floats x, float cap, float twice) {
  const Floats e = exp2<T>(x * all(twice));
  const Floats share = reciprocal<T>(e + all(1.0f)) * all(2.0f);
  return (all(1.0f) - share) * all(cap);
}

inline void store32(float* p, Floats low, Floats high) { store16(p, low), store16(p + 16, high); }
inline void store32(bf16* p, Floats low, Floats high) { narrow32(&p->bits, low, high); }

// Lane i of the result is the sum, or the largest, of all lanes of r[i].
inline Floats sum_each(const Floats (&r)[16]) {
  return join_each(r, [](auto a, auto b) { return a + b; });
}
inline Floats max_each(const Floats (&r)[16]) {
  return join_each(r, [](auto a, auto b) { return maximum(a, b); });
}

}  // namespace shoal
