// unit: rate codebook
// ops: exl3_gemm exl3_reconstruct exl3_moe exl3_fat_gemm exl3_fat_gemm_scatter exl3_fat_moe_gateup exl3_fat_moe_down
// budget: trellis_gemm registers=255 stack=0
// The kernels of one rate and one codebook: compiled once for every pair that the library holds.
#include "gemm.cuh"
#include "launch.h"
#include "reconstruct.cuh"

#if !defined(EXL3_RATE2) || !defined(EXL3_CODEBOOK)
#error "compile with -DEXL3_RATE2=<twice the bits per weight> -DEXL3_CODEBOOK=<0 3inst, 1 mcg, 2 mul1>"
#endif

namespace exl3 {
namespace {

constexpr int kRate2 = EXL3_RATE2, kCodebook = EXL3_CODEBOOK;

template <Tile T>
cudaError_t launch(const GemmParams& params, dim3 grid, cudaStream_t stream) {
  static_assert(shared_bytes<T>(kRate2, true) + 256 <= kSharedLimit && shared_bytes<T>(kRate2, false) + 256 <= kSharedLimit, "a tile class is too large");
  int device, major;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error != cudaSuccess) return error;
  const int bytes = shared_bytes<T>(kRate2, major >= 12);
  const auto kernel = trellis_gemm<kRate2, kCodebook, T>;
  // Set on every launch: the attribute belongs to a device, and remembering which were set would be state.
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  return error == cudaSuccess ? launch_dependent(kernel, grid, tile_threads(T), bytes, stream, params) : error;
}

cudaError_t launch_gemm(const GemmParams& params, int tile, dim3 grid, cudaStream_t stream) {
  switch (static_cast<Tile>(tile)) {
    case Tile::thin: return launch<Tile::thin>(params, grid, stream);
    case Tile::half: return launch<Tile::half>(params, grid, stream);
    case Tile::wide: return launch<Tile::wide>(params, grid, stream);
    case Tile::narrow: return launch<Tile::narrow>(params, grid, stream);
  }
  return cudaErrorInvalidValue;
}

template <bool Hadamard>
cudaError_t launch_reconstruct(const uint8_t* trellis, const half* suh, const half* svh, half* out, int k, int n, int64_t out_stride, cudaStream_t stream) {
  const auto kernel = reconstruct<kRate2, kCodebook, Hadamard>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kReconstructShared);
  if (error != cudaSuccess) return error;
  kernel<<<dim3(n / kHadamard, k / kHadamard), 256, kReconstructShared, stream>>>(trellis, suh, svh, out, n, out_stride);
  return cudaGetLastError();
}

cudaError_t reconstruct_any(const uint8_t* trellis, const half* suh, const half* svh, half* out, int k, int n, int64_t out_stride, cudaStream_t stream) {
  return suh ? launch_reconstruct<true>(trellis, suh, svh, out, k, n, out_stride, stream) : launch_reconstruct<false>(trellis, suh, svh, out, k, n, out_stride, stream);
}

struct Registration {
  Registration() { register_instance({kRate2, kCodebook, launch_gemm, reconstruct_any}); }
} registration;

}  // namespace
}  // namespace exl3
