// unit: once
#include "abi.h"
#include "registry.h"

static Instance* first = nullptr;

Instance::Instance(int rate2, int codebook, Launch launch)
    : rate2(rate2), codebook(codebook), launch(launch), next(first) {
  first = this;
}

static int dispatch(int rate2, int codebook, const float* in, float* out, int count, void* stream) {
  for (const Instance* one = first; one; one = one->next)
    if (one->rate2 == rate2 && one->codebook == codebook) return one->launch(in, out, count, stream);
  return -1;
}

EXL3_API int exl3_abi_version() { return EXL3_ABI_VERSION; }

EXL3_API int exl3_fat_gemm(int rate2, int codebook, const float* in, float* out, int count, void* stream) {
  return dispatch(rate2, codebook, in, out, count, stream);
}

EXL3_API int exl3_fat_gemm_scatter(int rate2, int codebook, const float* in, float* out, int count, void* stream) {
  return dispatch(rate2, codebook, in, out, count, stream);
}
