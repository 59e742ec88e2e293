// Attention of a mix of runs, and its C interface. Knows which kernel suits which run.
#include <sys/syscall.h>
#include <unistd.h>

#include "gemm.h"
#include "paged.h"

namespace shoal {

bool use_amx = false, use_floats = false;

constexpr long kFewRows = 6;  // (row, head) pairs of one K/V head: below, packing K and V costs more than it saves

template <class T>
void attend(const Attention<T>& call) {
  std::vector<long> few;
  const long most = std::max(1L, kFewRows / call.group());
  for (long run = 0; run < call.num_runs; ++run) {
    if (call.runs[run].num_rows <= most) few.push_back(run);
  }
  if (!few.empty()) attend_few_rows<T>(call, few);
  for (long run = 0; run < call.num_runs; ++run) {
    if (call.runs[run].num_rows > most) with_left<T>([&]<class L>(L) { attend_many_rows<T, L>(call, run); });
  }
}

template void attend(const Attention<float>&);
template void attend(const Attention<bf16>&);

}  // namespace shoal

extern "C" {

// Send large bfloat16 products to the tile unit, or not. The system must allow its registers first; returns whether it is used.
int shoal_use_amx(int use) {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  shoal::use_amx = use && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return shoal::use_amx;
}

// Multiply floats with bfloat16 weights, K and V, or bfloat16 with them. Without the tile unit.
void shoal_use_floats(int use) { shoal::use_floats = use; }

// sizes: num_runs, layer, window (0 = none), heads, kv_heads, d, block_size, num_threads, q_stride. Scale and cap are times log2 e.
void shoal_attend(int is_bf16, const void* q, void* out, const void* pool, const void* runs, const int64_t* sizes, float scale, float cap) {
  auto call = [&]<class T>(T) {
    const shoal::Run* list = static_cast<const shoal::Run*>(runs);
    shoal::attend(shoal::Attention<T>{static_cast<const T*>(q), static_cast<T*>(out), static_cast<const T*>(pool), list, sizes[0],
                                      sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], (int)sizes[7], sizes[8], scale, cap});
  };
  is_bf16 ? call(shoal::bf16{}) : call(float{});
}
}
