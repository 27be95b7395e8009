// From accumulators to memory: output Hadamard, svh, scales, and what each kind of output needs.
//
// The 128-wide Hadamard is split: 32 columns lie in one warp's fragments (three levels in registers, two shuffles), the remaining factor
// of four lies across the stream's four warps and is done while reading the fp32 staging. That is 2.5 times fewer shuffles than a
// whole-warp transform of staged rows.
#pragma once
#include <cuda_bf16.h>
#include "hadamard.cuh"
#include "params.h"
#include "tiles.cuh"

namespace exl3 {

__device__ __forceinline__ void load4(float (&v)[4], const half* p) {
  const uint2 u = *reinterpret_cast<const uint2*>(p);
  const float2 x = __half22float2(*reinterpret_cast<const half2*>(&u.x)), y = __half22float2(*reinterpret_cast<const half2*>(&u.y));
  v[0] = x.x; v[1] = x.y; v[2] = y.x; v[3] = y.y;
}

// fp16 that is an input of the next product must not become infinite by rounding: one infinity would poison a whole row of the result.
// Written so that NaN stays NaN (fminf would turn it into the bound and hide it).
__device__ __forceinline__ float clamp_half(float x) {
  x = x > 65504.f ? 65504.f : x;
  return x < -65504.f ? -65504.f : x;
}
__device__ __forceinline__ half2 to_half2_finite(float x, float y) { return __floats2half2_rn(clamp_half(x), clamp_half(y)); }

__device__ __forceinline__ void store4_finite(half* p, const float (&v)[4]) {
  const half2 x = to_half2_finite(v[0], v[1]), y = to_half2_finite(v[2], v[3]);
  *reinterpret_cast<uint2*>(p) = make_uint2(*reinterpret_cast<const uint32_t*>(&x), *reinterpret_cast<const uint32_t*>(&y));
}

__device__ __forceinline__ void store4(void* out, Type type, int64_t index, const float (&v)[4]) {
  if (type == Type::f32) {
    *reinterpret_cast<float4*>(static_cast<float*>(out) + index) = make_float4(v[0], v[1], v[2], v[3]);
  } else if (type == Type::f16) {
    const half2 x = __floats2half2_rn(v[0], v[1]), y = __floats2half2_rn(v[2], v[3]);
    *reinterpret_cast<uint2*>(static_cast<half*>(out) + index) = make_uint2(*reinterpret_cast<const uint32_t*>(&x), *reinterpret_cast<const uint32_t*>(&y));
  } else {
    const __nv_bfloat162 x = __floats2bfloat162_rn(v[0], v[1]), y = __floats2bfloat162_rn(v[2], v[3]);
    *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(out) + index) = make_uint2(*reinterpret_cast<const uint32_t*>(&x), *reinterpret_cast<const uint32_t*>(&y));
  }
}

__device__ __forceinline__ float swiglu(float gate, float up, float limit) {
  gate = fminf(gate, limit);
  up = fminf(fmaxf(up, -limit), limit);
  return gate / (1.f + __expf(-gate)) * up;
}

// Where a CTA's results go. Streams are 128 columns; `streams` of them are valid (the last tile of an odd part has one).
struct Target {
  int row0, rows;            // of the sorted rows
  int streams;
  const half* svh[2];        // at the stream's first column
  const half* suh_down;      // swiglu, at the tile's first column
  int column[2];             // of out, or of the partial sums
  int columns[2];            // how many of the stream's 128 columns are stored
  const float* a_scale;      // per row of a, or null
  const int32_t* a_row;
  int a_rows;
};

// Indexing the two-element arrays with a run-time stream would put them in local memory.
template <typename X>
__device__ __forceinline__ X of_stream(const X (&x)[2], int stream) { return stream ? x[1] : x[0]; }

// acc[.][j][q]: the thread's columns are 8j + 2(lane % 4) + q % 2 of the warp's 32.
__device__ __forceinline__ void hadamard_fragment(float (&a)[4][4], int lane) {
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    butterfly_pair(a[0][q], a[1][q]);
    butterfly_pair(a[2][q], a[3][q]);
    butterfly_pair(a[0][q], a[2][q]);
    butterfly_pair(a[1][q], a[3][q]);
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    butterfly_pair(a[j][0], a[j][1]);
    butterfly_pair(a[j][2], a[j][3]);
#pragma unroll
    for (int q = 0; q < 4; ++q) a[j][q] = butterfly<2>(butterfly<1>(a[j][q], lane), lane);
  }
}

// Finishes the transform of one row of one stream: v[4g + i] is column 32g + 4(lane % 8) + i.
__device__ __forceinline__ void read_staged(float (&v)[16], const float* staged) {
#pragma unroll
  for (int g = 0; g < 4; ++g) {
    const float4 x = *reinterpret_cast<const float4*>(staged + 32 * g);
    v[4 * g] = x.x; v[4 * g + 1] = x.y; v[4 * g + 2] = x.z; v[4 * g + 3] = x.w;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    butterfly_pair(v[i], v[4 + i]);
    butterfly_pair(v[8 + i], v[12 + i]);
    butterfly_pair(v[i], v[8 + i]);
    butterfly_pair(v[4 + i], v[12 + i]);
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) v[i] *= kHadamardScale;
}

__device__ __forceinline__ void scale_columns(float (&v)[16], const half* scale, float row_scale) {
#pragma unroll
  for (int g = 0; g < 4; ++g) {
    float s[4];
    load4(s, scale + 32 * g);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[4 * g + i] *= s[i] * row_scale;
  }
}

__device__ __forceinline__ float row_scale(const GemmParams& p, const Target& t, int row) {
  float scale = 1.f;
  if (t.a_scale) scale = t.a_scale[t.a_row ? min(max(t.a_row[row], 0), t.a_rows - 1) : row];
  if (p.output == Output::scatter) scale *= __half2float(p.row_weight[row]);
  return scale;
}

// Eight lanes store one row of one stream.
__device__ __forceinline__ void store_row(const GemmParams& p, const Target& t, int stream, int row, int lane_column, float (&v)[16]) {
  int64_t out_row = row;
  if (p.output == Output::scatter) {
    out_row = p.row_token[row];
    if (out_row < 0 || out_row >= p.tokens) {
      if (p.fault) atomicOr(p.fault, 8);
      return;
    }
  }
#pragma unroll
  for (int g = 0; g < 4; ++g) {
    const int c = 32 * g + lane_column;
    if (c >= of_stream(t.columns, stream)) continue;
    const int64_t index = out_row * p.out_stride + of_stream(t.column, stream) + c;
    const float x[4] = {v[4 * g], v[4 * g + 1], v[4 * g + 2], v[4 * g + 3]};
    if (p.output == Output::scatter) {
      atomicAdd(reinterpret_cast<float4*>(static_cast<float*>(p.out) + index), make_float4(x[0], x[1], x[2], x[3]));
    } else {
      store4(p.out, p.out_type, index, x);
    }
  }
}

__device__ __forceinline__ void store_swiglu(const GemmParams& p, const Target& t, int row, int lane, const float (&gate)[16], const float (&up)[16]) {
  const int lane_column = (lane & 7) * 4;
  float h[16];
#pragma unroll
  for (int g = 0; g < 4; ++g) {
    float s[4];
    load4(s, t.suh_down + 32 * g + lane_column);
#pragma unroll
    for (int i = 0; i < 4; ++i) h[4 * g + i] = swiglu(gate[4 * g + i], up[4 * g + i], p.limit) * s[i];
  }
  hadamard_eight_lanes(h, lane);
  if (row < 0) return;  // only after the shuffles, which every lane must join
#pragma unroll
  for (int g = 0; g < 4; ++g) {
    const float x[4] = {h[4 * g], h[4 * g + 1], h[4 * g + 2], h[4 * g + 3]};
    store4_finite(static_cast<half*>(p.out) + row * p.out_stride + t.column[0] + 32 * g + lane_column, x);
  }
}

template <int MB, int Warps>
__device__ __forceinline__ void store_partial(const float (&acc)[MB][4][4], const GemmParams& p, const Target& t, int split) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, stream = warp >> 2;
  if (stream >= t.streams) return;
  const int column = of_stream(t.column, stream) + (warp & 3) * kWarpColumns + (lane & 3) * 2;
#pragma unroll
  for (int mb = 0; mb < MB; ++mb) {
#pragma unroll
    for (int half_block = 0; half_block < 2; ++half_block) {
      const int r = mb * 16 + half_block * 8 + (lane >> 2);
      if (r >= t.rows) continue;
      const int64_t at = (static_cast<int64_t>(split) * p.partial_rows + t.row0 + r) * p.partial_columns + column;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float x = acc[mb][j][2 * half_block], y = acc[mb][j][2 * half_block + 1];
        if (p.partial_half) {
          *reinterpret_cast<half2*>(p.partial_half + at + 8 * j) = to_half2_finite(x, y);
        } else {
          *reinterpret_cast<float2*>(p.partial + at + 8 * j) = make_float2(x, y);
        }
      }
    }
  }
}

template <int MB, int Warps>
__device__ __forceinline__ void store_transformed(float (&acc)[MB][4][4], const GemmParams& p, const Target& t, float* staging) {
  constexpr int kStreams = Warps / 4, kStride = staging_stride(Warps);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int lane_row = lane >> 3, lane_column = (lane & 7) * 4;
  const bool pair = p.output == Output::swiglu;
  // A loop, not unrolled: the accumulators need constant indices, so only their staging is repeated for every row block.
#pragma unroll 1
  for (int first = 0; first < MB && first * 16 < t.rows; first += 2) {
#pragma unroll
    for (int mb = 0; mb < MB; ++mb) {
      if (mb >> 1 != first >> 1) continue;
      hadamard_fragment(acc[mb], lane);
      float* s = staging + ((mb & 1) * 16 + (lane >> 2)) * kStride + warp * kWarpColumns + (lane & 3) * 2;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        *reinterpret_cast<float2*>(s + 8 * j) = make_float2(acc[mb][j][0], acc[mb][j][1]);
        *reinterpret_cast<float2*>(s + 8 * kStride + 8 * j) = make_float2(acc[mb][j][2], acc[mb][j][3]);
      }
    }
    __syncthreads();
    // Items: four rows of one stream, or of both for swiglu. A last lone block of 16 rows leaves half of the staging unused.
    const int items = min(kStagingRows, (MB - first) * 16) / 4 * (pair ? 1 : kStreams);
#pragma unroll 1
    for (int item = warp; item < items; item += Warps) {
      const int stream = pair ? 0 : item % kStreams, r = (pair ? item : item / kStreams) * 4 + lane_row;
      const bool live = first * 16 + r < t.rows;
      const int row = t.row0 + (live ? first * 16 + r : 0);
      if (stream >= t.streams) continue;
      const float scale = row_scale(p, t, row);
      float v[16];
      read_staged(v, staging + r * kStride + stream * kHadamard + lane_column);
      scale_columns(v, of_stream(t.svh, stream) + lane_column, scale);
      if (kStreams == 2 && pair) {
        float up[16];
        read_staged(up, staging + r * kStride + kHadamard + lane_column);
        scale_columns(up, t.svh[1] + lane_column, scale);
        store_swiglu(p, t, live ? row : -1, lane, v, up);
      } else if (live) {
        store_row(p, t, stream, row, lane_column, v);
      }
    }
    __syncthreads();
  }
}

}  // namespace exl3
