// Decodes a whole matrix into memory, for products large enough that cuBLAS earns the detour.
#pragma once
#include "epilogue.cuh"

namespace exl3 {

// One CTA decodes 128 x 128 weights: warp w the 16 columns 16w, all of k. In a fragment the lane's k bits 1-2 are lane % 4 and the rest of k
// lies in registers, so the Hadamard along k costs two shuffles a weight; then one pass through shared memory turns to rows for the one along n.
constexpr int kReconstructStride = kHadamard + 4;  // floats
constexpr int kReconstructShared = kHadamard * kReconstructStride * 4;

// r[8 * tile + j]: the lane's weight j of k tile `tile`; k bit 0 is j bit 0, k bit 3 is j bit 1, k bits 4-6 are the tile. j bit 2 is a column bit.
__device__ __forceinline__ void hadamard_k(float (&r)[64], int lane) {
#pragma unroll
  for (int step = 1; step < 64; step <<= 1) {
    if (step == 4) continue;
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      if (!(i & step)) butterfly_pair(r[i], r[i | step]);
    }
  }
#pragma unroll
  for (int i = 0; i < 64; ++i) r[i] = butterfly<2>(butterfly<1>(r[i], lane), lane) * kHadamardScale;
}

template <int Rate2, int Cb, bool Hadamard>
__global__ void __launch_bounds__(256, 2) reconstruct(const uint8_t* __restrict__ trellis, const half* __restrict__ suh, const half* __restrict__ svh,
                                                      half* __restrict__ out, int n, int64_t out_stride) {
  extern __shared__ __align__(128) unsigned char shared[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int column0 = blockIdx.x * kHadamard, row0 = blockIdx.y * kHadamard;
  constexpr int bytes = tile_bytes(Rate2);

  // 8 x 8 tiles of trellis bits, each row of tiles contiguous.
  constexpr int chunks = 8 * stream_bytes_per_step(Rate2) / 16;
  const uint8_t* source = trellis + (static_cast<size_t>(row0 / 16) * (n / 16) + column0 / 16) * bytes;
  const size_t tile_row_bytes = static_cast<size_t>(n / 16) * bytes;
  for (int c = threadIdx.x; c < chunks; c += 256) {
    cp_async_16(shared_address(shared) + c * 16, source + (c / (chunks / 8)) * tile_row_bytes + (c % (chunks / 8)) * 16);
  }
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();

  const LanePosition<Rate2> position(lane);
  float r[64];
#pragma unroll
  for (int tile = 0; tile < 8; ++tile) {
    RawTile<Rate2> raw;
    FragmentB b;
    load_raw<Rate2>(raw, position, shared_address(shared) + (tile * 8 + warp) * bytes);
    decode_tile<Rate2, Cb>(b, raw, position.shift);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 x = __half22float2(*reinterpret_cast<const half2*>(&b.r[j]));
      r[8 * tile + 2 * j] = x.x;
      r[8 * tile + 2 * j + 1] = x.y;
    }
  }
  if constexpr (Hadamard) { hadamard_k(r, lane); }
  __syncthreads();  // the bits are read; the same memory now takes the weights

  float* staging = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int tile = 0; tile < 8; ++tile) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int k = tile * 16 + (lane & 3) * 2 + (j & 1) + 8 * ((j >> 1) & 1), column = warp * 16 + (lane >> 2) + 8 * (j >> 2);
      staging[k * kReconstructStride + column] = r[8 * tile + j];
    }
  }
  __syncthreads();

  const int lane_column = (lane & 7) * 4;
#pragma unroll 1
  for (int row = warp * 4 + (lane >> 3); row < kHadamard; row += 32) {
    const float* s = staging + row * kReconstructStride + lane_column;
    float v[16];
#pragma unroll
    for (int g = 0; g < 4; ++g) {
      const float4 x = *reinterpret_cast<const float4*>(s + 32 * g);
      v[4 * g] = x.x; v[4 * g + 1] = x.y; v[4 * g + 2] = x.z; v[4 * g + 3] = x.w;
    }
    if constexpr (Hadamard) {
      hadamard_eight_lanes(v, lane);
      scale_columns(v, svh + column0 + lane_column, __half2float(suh[row0 + row]));
    }
#pragma unroll
    for (int g = 0; g < 4; ++g) {
      const float x[4] = {v[4 * g], v[4 * g + 1], v[4 * g + 2], v[4 * g + 3]};
      store4_finite(out + (row0 + row) * out_stride + column0 + 32 * g + lane_column, x);
    }
  }
}

}  // namespace exl3
