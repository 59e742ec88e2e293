// Matrix products of bfloat16 on the tile unit (AMX). Knows tiles; knows no weights and no threads but its own.
//
// Tiles 0–3 hold 32 × 32 sums, 4–5 the left side, 6–7 the right side: two loads a side feed four products, which keeps the
// unit busy while loads come from the first two cache levels.
#pragma once
#include "vectors.h"

namespace shoal {

extern bool use_amx;     // set by `shoal_use_amx`; false: gemm.h's loops do it
extern bool use_floats;  // set by `shoal_use_floats`; true: with left sides of floats; never beside use_amx

constexpr long kTileRows = 16, kTileDepth = 32;  // rows of a tile; numbers of K that one product takes

// Whether products of T go there.
template <class T>
inline bool tiled() {
  return sizeof(T) == 2 && use_amx;
}

// What a thread's products need: denormal numbers as zeros, and its tiles, given back at the end: a thread that holds some is
// slower to switch.
class ProductScope {
 public:
  ProductScope() {
    if (!use_amx) return;
    alignas(64) uint8_t config[64] = {1};
    for (int tile = 0; tile < 8; ++tile) config[16 + 2 * tile] = 64, config[48 + tile] = kTileRows;
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  ~ProductScope() {
    if (use_amx) _tile_release();
  }

 private:
  FlushScope flush_;  // not to be copied either
};

// Rows to multiply: what lies behind the last row, up to a whole tile, must be readable and comes out behind it.
inline long whole_tiles(long rows) { return use_amx ? (rows + kTileRows - 1) / kTileRows * kTileRows : rows; }

// Sums [16 R, 16 S] at c (stride in bytes), or zeros.
template <int R, int S>
inline void begin_tiles(const float* c, long stride, bool add) {
  const char* at = reinterpret_cast<const char*>(c);
  if (!add) {
    _tile_zero(0);
    if constexpr (S == 2) _tile_zero(1);
    if constexpr (R == 2) _tile_zero(2);
    if constexpr (R == 2 && S == 2) _tile_zero(3);
    return;
  }
  _tile_loadd(0, at, stride);
  if constexpr (S == 2) _tile_loadd(1, at + 64, stride);
  if constexpr (R == 2) _tile_loadd(2, at + kTileRows * stride, stride);
  if constexpr (R == 2 && S == 2) _tile_loadd(3, at + kTileRows * stride + 64, stride);
}

template <int R, int S>
inline void store_tiles(float* c, long stride) {
  char* at = reinterpret_cast<char*>(c);
  _tile_stored(0, at, stride);
  if constexpr (S == 2) _tile_stored(1, at + 64, stride);
  if constexpr (R == 2) _tile_stored(2, at + kTileRows * stride, stride);
  if constexpr (R == 2 && S == 2) _tile_stored(3, at + kTileRows * stride + 64, stride);
}

// Adds A [16 R, 32 steps] · B [32 steps, 16 S]; strides in bytes. With each step asks for `lines` cache lines from `ahead` on.
template <int R, int S>
inline void add_products(const char* a, long lda, const char* b, long ldb, long steps, const char* ahead, long lines) {
  for (long step = 0; step < steps; ++step, a += 64, b += kTileRows * ldb) {
    _tile_loadd(4, a, lda);
    _tile_loadd(6, b, ldb);
    if constexpr (S == 2) _tile_loadd(7, b + 64, ldb);
    if constexpr (R == 2) _tile_loadd(5, a + kTileRows * lda, lda);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (S == 2) _tile_dpbf16ps(1, 4, 7);
    if constexpr (R == 2) _tile_dpbf16ps(2, 5, 6);
    if constexpr (R == 2 && S == 2) _tile_dpbf16ps(3, 5, 7);
    for (long line = 0; line < lines; ++line, ahead += 64) _mm_prefetch(ahead, _MM_HINT_T1);
  }
}

template <int R, int S>
inline void tile_block(const bf16* a, long lda, const uint32_t* b, long ldb, long steps, float* c, long ldc, bool add) {
  begin_tiles<R, S>(c, 4 * ldc, add);
  add_products<R, S>(reinterpret_cast<const char*>(a), 2 * lda, reinterpret_cast<const char*>(b), 4 * ldb, steps, nullptr, 0);
  store_tiles<R, S>(c, 4 * ldc);
}

// C [m, n] (+)= A [m, 32 steps] · B: m and n multiples of 16; lda, ldc in numbers, ldb in words.
inline void tile_gemm(long m, long n, long steps, const bf16* a, long lda, const uint32_t* b, long ldb, float* c, long ldc, bool add) {
  for (long col = 0; col < n; col += 32) {
    const bool two = n - col > kTileRows;
    for (long row = 0; row < m; row += 32) {
      const bf16* left = a + row * lda;
      float* to = c + row * ldc + col;
      if (m - row > kTileRows) {
        two ? tile_block<2, 2>(left, lda, b + col, ldb, steps, to, ldc, add) : tile_block<2, 1>(left, lda, b + col, ldb, steps, to, ldc, add);
      } else {
        two ? tile_block<1, 2>(left, lda, b + col, ldb, steps, to, ldc, add) : tile_block<1, 1>(left, lda, b + col, ldb, steps, to, ldc, add);
      }
    }
  }
}

// c [rows, 32] (rows ldc apart) = x [rows, 32 steps] · panel, rows a multiple of 16, then `then(first row, rows)` for every 32 rows: while the
// tile unit works on the next ones. The next panel is asked for meanwhile. A deep panel is taken in pieces that stay in the
// caches.
template <class Then>
inline void tile_panel(const bf16* x, long ldx, const uint32_t* panel, long steps, long rows, float* c, long ldc, Then then) {
  constexpr long kMostSteps = 48;
  const long pieces = (steps + kMostSteps - 1) / kMostSteps, blocks = (rows + 31) / 32;
  const char* ahead = reinterpret_cast<const char*>(panel) + steps * 2048;
  const long lines = (32 + blocks - 1) / blocks;  // of the 32 that a step of the next panel has
  for (long piece = 0; piece < pieces; ++piece) {
    const long first = steps * piece / pieces, some = steps * (piece + 1) / pieces - first;
    const char* right = reinterpret_cast<const char*>(panel + first * 512);
    for (long row = 0; row < rows; row += 32) {
      const char* left = reinterpret_cast<const char*>(x + row * ldx + first * kTileDepth);
      float* to = c + row * ldc;
      const bool two = rows - row > kTileRows;
      if (two) {
        begin_tiles<2, 2>(to, 4 * ldc, piece > 0);
        add_products<2, 2>(left, 2 * ldx, right, 128, some, ahead, lines);
      } else {
        begin_tiles<1, 2>(to, 4 * ldc, piece > 0);
        add_products<1, 2>(left, 2 * ldx, right, 128, some, ahead, lines);
      }
      ahead += some * lines * 64;
      if (piece == pieces - 1 && row > 0) then(row - 32, 32L);
      two ? store_tiles<2, 2>(to, 4 * ldc) : store_tiles<1, 2>(to, 4 * ldc);
    }
  }
  const long last = (rows - 1) / 32 * 32;
  then(last, rows - last);
}

}  // namespace shoal
