// The rotation of activations, a device function: rows.cu launches it alone, routing.cu beside the routing tables.
#pragma once
#include "epilogue.cuh"
#include "rows.h"

namespace exl3 {

__device__ __forceinline__ void load4_any(float (&v)[4], const void* p, Type type, int64_t index) {
  if (type == Type::f32) {
    const float4 x = *reinterpret_cast<const float4*>(static_cast<const float*>(p) + index);
    v[0] = x.x; v[1] = x.y; v[2] = x.z; v[3] = x.w;
  } else if (type == Type::f16) {
    load4(v, static_cast<const half*>(p) + index);
  } else {
    const uint2 u = *reinterpret_cast<const uint2*>(static_cast<const __nv_bfloat16*>(p) + index);
    v[0] = __uint_as_float(u.x << 16); v[1] = __uint_as_float(u.x & 0xffff0000u);
    v[2] = __uint_as_float(u.y << 16); v[3] = __uint_as_float(u.y & 0xffff0000u);
  }
}

// One CTA per row, a warp per 128 columns at a time. The result is fp16; a row whose rotated values pass kLargest is stored again, divided by
// a power of two which a_scale carries to the end of the product. So bf16 rows of any magnitude survive, and all others keep scale 1 and
// the same bits as without it.
constexpr float kLargest = 32768.f;
constexpr int kRotateThreads = 1024;  // at most

__device__ __forceinline__ void rotated_block(float (&v)[4], const RotateParams& p, int64_t source, const half* suh, int block, int lane) {
  const int column = block * kHadamard + lane * 4;
  if (column < p.x_columns) {
    float s[4];
    load4_any(v, p.x, p.type, source * p.x_stride + column);
    load4(s, suh + column);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] *= s[i];
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = 0.f;
  }
  hadamard_warp(v, lane);
}

__device__ __forceinline__ void rotate_row(const RotateParams& p, int row) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  if (p.live_rows && row >= *p.live_rows) return;
  int64_t source = p.x_row_64 ? p.x_row_64[row] : p.x_row ? p.x_row[row] : row;
  int expert = p.suh_table ? p.row_expert[row] : 0;
  if (source < 0 || source >= p.x_rows || expert < 0 || (p.suh_table && expert >= p.experts)) {
    if (p.fault && threadIdx.x == 0) atomicOr(p.fault, source < 0 || source >= p.x_rows ? 4 : 1);
    return;
  }
  const half* suh = p.suh_table ? p.suh_table[expert] : p.suh;
  half* a = p.a + static_cast<int64_t>(row) * p.k;
  const int blocks = p.k / kHadamard;
  float largest = 0.f;
  for (int block = warp; block < blocks; block += warps) {
    float v[4];
    rotated_block(v, p, source, suh, block, lane);
    largest = fmaxf(fmaxf(largest, fmaxf(fabsf(v[0]), fabsf(v[1]))), fmaxf(fabsf(v[2]), fabsf(v[3])));
    store4_finite(a + block * kHadamard + lane * 4, v);
  }
  if (!p.a_scale) return;
  if (!__syncthreads_or(largest > kLargest)) {
    if (threadIdx.x == 0) p.a_scale[row] = 1.f;
    return;
  }
  __shared__ float warp_largest[kRotateThreads / 32];
#pragma unroll
  for (int i = 16; i; i >>= 1) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, i));
  if (lane == 0) warp_largest[warp] = largest;
  __syncthreads();
  for (int i = 0; i < warps; ++i) largest = fmaxf(largest, warp_largest[i]);
  const float scale = exp2f(ceilf(log2f(largest)) - 15.f);  // infinite or NaN input: scale is not finite and neither is the row, as it should be
  for (int block = warp; block < blocks; block += warps) {
    float v[4];
    rotated_block(v, p, source, suh, block, lane);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] /= scale;
    store4_finite(a + block * kHadamard + lane * 4, v);
  }
  if (threadIdx.x == 0) p.a_scale[row] = scale;
}

// Few rows get a warp for each block, many rows 8 warps.
inline int rotate_threads(const RotateParams& p) {
  const int blocks = p.k / kHadamard, most = kRotateThreads / 32;
  return 32 * (p.rows > 256 ? 8 : blocks < most ? blocks : most);
}

}  // namespace exl3
