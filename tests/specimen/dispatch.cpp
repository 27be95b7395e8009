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

#define DISPATCHED(name)                                                                              \
  EXL3_API int name(int rate2, int codebook, const float* in, float* out, int count, void* stream) { \
    return dispatch(rate2, codebook, in, out, count, stream);                                        \
  }
DISPATCHED(exl3_gemm)
DISPATCHED(exl3_reconstruct)
DISPATCHED(exl3_finish)
DISPATCHED(exl3_moe)
DISPATCHED(exl3_fat_gemm)
DISPATCHED(exl3_fat_gemm_scatter)

EXL3_API int exl3_abi_version() { return EXL3_ABI_VERSION; }
EXL3_API const char* exl3_last_error() { return ""; }
EXL3_API const char* exl3_instances() { return ""; }
EXL3_API long exl3_gemm_workspace() { return 0; }
EXL3_API long exl3_moe_workspace() { return 0; }
EXL3_API int exl3_fat_moe_tile_rows_gateup() { return 16; }
EXL3_API int exl3_fat_moe_tile_rows_down() { return 16; }
