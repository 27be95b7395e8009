// unit: rate codebook
// ops: exl3_gemm exl3_reconstruct exl3_finish exl3_moe exl3_fat_gemm exl3_fat_gemm_scatter
// budget: specimen_gemm registers=64
// The smallest kernel that has a rate and a codebook; the tests of the build and of the symbol check compile it.
#include <cuda_runtime.h>

#include "registry.h"

template <int RATE2, int CODEBOOK>
__global__ void specimen_gemm(const float* in, float* out, int count) {
  const int index = blockIdx.x * blockDim.x + threadIdx.x;
  if (index < count) out[index] = in[index] * RATE2 + CODEBOOK;
}

static int launch(const float* in, float* out, int count, void* stream) {
  specimen_gemm<EXL3_RATE2, EXL3_CODEBOOK>
      <<<(count + 255) / 256, 256, 0, static_cast<cudaStream_t>(stream)>>>(in, out, count);
  return static_cast<int>(cudaPeekAtLastError());
}

static Instance instance(EXL3_RATE2, EXL3_CODEBOOK, launch);
