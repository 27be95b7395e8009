// The 128-wide Hadamard transform H128 / sqrt(128), in fp32. It is applied to blocks of 128 neighbouring columns.
#pragma once
#include "ptx.cuh"

namespace exl3 {

constexpr int kHadamard = 128;
constexpr float kHadamardScale = 0.08838834764831845f;  // 1 / sqrt(128)

// One level between lanes that differ in the bits of `Mask`.
template <int Mask>
__device__ __forceinline__ float butterfly(float v, int lane) {
  const float sign = (lane & Mask) ? -1.f : 1.f;
  return fmaf(sign, v, __shfl_xor_sync(0xffffffffu, v, Mask));
}

__device__ __forceinline__ void butterfly_pair(float& x, float& y) {
  const float sum = x + y;
  y = x - y;
  x = sum;
}

// All levels between registers of one thread; N a power of two.
template <int N>
__device__ __forceinline__ void hadamard_registers(float (&v)[N]) {
#pragma unroll
  for (int step = 1; step < N; step <<= 1) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (!(i & step)) butterfly_pair(v[i], v[i | step]);
    }
  }
}

// 128 columns over a warp, lane l holding columns 4l .. 4l+3.
__device__ __forceinline__ void hadamard_warp(float (&v)[4], int lane) {
  hadamard_registers(v);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    v[i] = butterfly<1>(v[i], lane);
    v[i] = butterfly<2>(v[i], lane);
    v[i] = butterfly<4>(v[i], lane);
    v[i] = butterfly<8>(v[i], lane);
    v[i] = butterfly<16>(v[i], lane) * kHadamardScale;
  }
}

// 128 columns over eight lanes, lane l holding columns 32g + 4(l % 8) + i at v[4g + i]: 3 shuffles a value instead of 5.
__device__ __forceinline__ void hadamard_eight_lanes(float (&v)[16], int lane) {
  hadamard_registers(v);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    v[i] = butterfly<1>(v[i], lane);
    v[i] = butterfly<2>(v[i], lane);
    v[i] = butterfly<4>(v[i], lane) * kHadamardScale;
  }
}

}  // namespace exl3
