// C [M, N] (+)= A [M, K] · B, on one thread. Knows word-packed B; knows no weights.
//
// B is packed in words: word (k, n) holds B[k][n] (float) or B[2k][n], B[2k+1][n] (bfloat16) at b[k · ldb + n].
// This is also the layout ("VNNI") of the tile unit's right side: large bfloat16 products go there (amx.h).
//
// T: what B holds; L: what A holds. L is T, or float with a bfloat16 B, whose words are widened as they are read: that is for
// processors that have no product of bfloat16 words, or take as long for it as for four products of floats (`use_floats`).
#pragma once
#include <type_traits>

#include "amx.h"

namespace shoal {

// Calls f with a T or a float, of the type that left sides of products with T have.
template <class T, class F>
inline auto with_left(F f) {
  if constexpr (sizeof(T) == 2) {
    if (use_floats) return f(float{});
  }
  return f(T{});
}

// Never inlined: among a caller's values its sums no longer fit into the registers.
template <class T, class L, int MR, int NV>
__attribute__((noinline)) void micro(long words, const L* a, long lda, const uint32_t* b, long ldb, float* c, long ldc, bool add) {
  constexpr long kPer = Words<T>::kPer;
  Floats sum[MR][NV];
#pragma GCC unroll 16
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) sum[m][v] = add ? load16(c + m * ldc + 16 * v) : zeros();
  for (long k = 0; k < words; ++k) {
    if constexpr (MR <= 8) {  // few rows, or few registers: the right side comes from memory: ask for it early
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) _mm_prefetch(reinterpret_cast<const char*>(b + (k + 64) * ldb + 16 * v), _MM_HINT_T0);
    }
    Ints right[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) right[v] = load_words(b + k * ldb + 16 * v);
    if constexpr (std::is_same_v<T, L>) {
#pragma GCC unroll 16
      for (int m = 0; m < MR; ++m) {
        uint32_t word;
        std::memcpy(&word, a + m * lda + k * kPer, 4);
        const Ints left = all_words(word);
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) sum[m][v] = Words<T>::dot(sum[m][v], right[v], left);
      }
    } else {
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        Floats wide[NV];
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) wide[v] = half ? second_halves(right[v]) : first_halves(right[v]);
#pragma GCC unroll 16
        for (int m = 0; m < MR; ++m) {
          const Floats left = all(a[m * lda + k * kPer + half]);
#pragma GCC unroll 4
          for (int v = 0; v < NV; ++v) sum[m][v] = multiply_add(wide[v], left, sum[m][v]);
        }
      }
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) store16(c + m * ldc + 16 * v, sum[m][v]);
}

template <int NV>
constexpr long kMostRows = NV == 1 ? kRowsOf16 : kRowsOf32;

template <class T, class L, int NV>
inline void block(long m, long words, const L* a, long lda, const uint32_t* b, long ldb, float* c, long ldc, bool add) {
#define SHOAL_ROWS(MR)                      \
  case MR:                                  \
    if constexpr (MR <= kMostRows<NV>)      \
      return micro<T, L, MR, NV>(words, a, lda, b, ldb, c, ldc, add);
  switch (m) {
    SHOAL_ROWS(1)
    SHOAL_ROWS(2)
    SHOAL_ROWS(3)
    SHOAL_ROWS(4)
    SHOAL_ROWS(5)
    SHOAL_ROWS(6)
    SHOAL_ROWS(7)
    SHOAL_ROWS(8)
    SHOAL_ROWS(9)
    SHOAL_ROWS(10)
    SHOAL_ROWS(11)
    SHOAL_ROWS(12)
  }
#undef SHOAL_ROWS
}

template <class T, class L, int NV>
inline void rows(long m, long words, const L* a, long lda, const uint32_t* b, long ldb, float* c, long ldc, bool add) {
  const long pieces = (m + kMostRows<NV> - 1) / kMostRows<NV>;
  for (long i = 0; i < pieces; ++i) {  // of nearly equal size: a short last one would wait for its own sums
    const long some = (m * (i + 1)) / pieces - (m * i) / pieces;
    block<T, L, NV>(some, words, a, lda, b, ldb, c, ldc, add);
    a += some * lda, c += some * ldc;
  }
}

// n is a multiple of 16; k (numbers) of the word size; lda, ldc in numbers, ldb in words.
template <class T, class L>
inline void loop_gemm(long m, long n, long k, const L* a, long lda, const uint32_t* b, long ldb, float* c, long ldc, bool add) {
  constexpr long kWordBlock = 160;  // of K: a panel of 32 columns then stays in the first-level cache
  const long words = k / Words<T>::kPer;
  const bool by_32 = kRowsOf32 == kRowsOf16 || m <= kRowsOf32;
  const long block = m > kRowsOf32 ? kWordBlock : words;
  for (long at = 0; at < words; at += block) {
    const long some = words - at < block ? words - at : block;
    const bool onto = add || at;
    long col = 0;
    for (; by_32 && col + 32 <= n; col += 32) {
      rows<T, L, 2>(m, some, a + at * Words<T>::kPer, lda, b + at * ldb + col, ldb, c + col, ldc, onto);
    }
    for (; col < n; col += 16) rows<T, L, 1>(m, some, a + at * Words<T>::kPer, lda, b + at * ldb + col, ldb, c + col, ldc, onto);
  }
}

// The same; with the tile unit, within a ProductScope, m must be a multiple of 16.
template <class T, class L>
inline void gemm(long m, long n, long k, const L* a, long lda, const uint32_t* b, long ldb, float* c, long ldc, bool add) {
  if constexpr (sizeof(L) == 2) {
    if (use_amx) {
      const long steps = k / kTileDepth, done = steps * kTileDepth;
      if (steps) tile_gemm(m, n, steps, a, lda, b, ldb, c, ldc, add);
      if (done < k) loop_gemm<T, L>(m, n, k - done, a + done, lda, b + done / 2 * ldb, ldb, c, ldc, add || steps);
      return;
    }
  }
  loop_gemm<T, L>(m, n, k, a, lda, b, ldb, c, ldc, add);
}

// c [rows, 32] (rows ldc apart) = x [rows, k] · panel (words [k][32]), then `then(first row, rows)` for all rows, in pieces that
// suit the unit. With the tile unit, whole tiles of rows are read and written, and counted in what `then` is told.
template <class T, class L, class Then>
inline void multiply_panel(const L* x, long ldx, const uint32_t* panel, long k, long rows, float* c, long ldc, Then then) {
  if constexpr (sizeof(L) == 2) {
    const long steps = k / kTileDepth, done = steps * kTileDepth;
    if (use_amx && steps) {
      const long whole = whole_tiles(rows);
      if (done == k) return tile_panel(x, ldx, panel, steps, whole, c, ldc, then);
      tile_panel(x, ldx, panel, steps, whole, c, ldc, [](long, long) {});
      loop_gemm<T, L>(rows, 32, k - done, x + done, ldx, panel + done / 2 * 32, 32, c, ldc, true);
      return then(0, rows);
    }
  }
  loop_gemm<T, L>(rows, 32, k, x, ldx, panel, 32, c, ldc, false);
  then(0, rows);
}

}  // namespace shoal
