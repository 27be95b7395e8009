// unit: once
// ops: exl3_rotate exl3_fat_moe_gather exl3_fat_moe_gateup exl3_fat_moe_down
#include <cuda_runtime.h>

#include "abi.h"

__global__ void specimen_gather(const float* in, float* out) { out[threadIdx.x] = in[threadIdx.x ^ 1]; }

static int run(const float* in, float* out, cudaStream_t stream) {
  specimen_gather<<<1, 32, 0, stream>>>(in, out);
  return static_cast<int>(cudaPeekAtLastError());
}

EXL3_API int exl3_rotate(const float* in, float* out, cudaStream_t stream) { return run(in, out, stream); }
EXL3_API int exl3_fat_moe_gather(const float* in, float* out, cudaStream_t stream) { return run(in, out, stream); }
EXL3_API int exl3_fat_moe_gateup(const float* in, float* out, cudaStream_t stream) { return run(in, out, stream); }
EXL3_API int exl3_fat_moe_down(const float* in, float* out, cudaStream_t stream) { return run(in, out, stream); }
