// oneDNN's matrix kernels, which use AMX, through torch. Knows torch's header; built only where it compiles.
#include <ATen/native/CPUBlas.h>

namespace shoal {
extern void (*brgemm_bf16)(long, long, long, long, long, long, bool, const void*, const void*, float*);
extern void (*brgemm_release)();
}  // namespace shoal

namespace {
void multiply(long m, long n, long k, long lda, long ldb, long ldc, bool add, const void* a, const void* b, float* c) {
  at::native::cpublas::brgemm(m, n, k, lda, ldb, ldc, add, static_cast<const at::BFloat16*>(a), static_cast<const at::BFloat16*>(b), c, true);
}
void release() { at::native::cpublas::brgemm_release(true); }
}  // namespace

extern "C" int shoal_use_brgemm(int use) {
  shoal::brgemm_bf16 = use ? multiply : nullptr;
  shoal::brgemm_release = use ? release : nullptr;
  return 1;
}
