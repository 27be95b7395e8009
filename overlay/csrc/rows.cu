// unit: once
// ops: exl3_rotate exl3_finish exl3_gemm exl3_moe exl3_fat_moe_gather
// Everything around the GEMM that works on rows and knows no rate: input rotation, finishing split-K sums, combining experts.
#include "epilogue.cuh"
#include "launch.h"
#include "rotate.cuh"

namespace exl3 {
namespace {

__global__ void __launch_bounds__(kRotateThreads) rotate(const RotateParams p) {
  wait_for_previous_kernel();
  rotate_row(p, blockIdx.x);
}

// The sum of all splits, always in the same order.
__device__ __forceinline__ void sum_splits(float (&v)[4], const float* partial, int64_t split_stride, int splits) {
  float4 x = *reinterpret_cast<const float4*>(partial);
#pragma unroll 4
  for (int i = 1; i < splits; ++i) {
    const float4 y = *reinterpret_cast<const float4*>(partial + i * split_stride);
    x.x += y.x; x.y += y.y; x.z += y.z; x.w += y.w;
  }
  v[0] = x.x; v[1] = x.y; v[2] = x.z; v[3] = x.w;
}

__device__ __forceinline__ void transform_scale(float (&v)[4], const half* scale, float row_scale, int lane) {
  float s[4];
  hadamard_warp(v, lane);
  load4(s, scale + lane * 4);
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] *= s[i] * row_scale;
}

constexpr int kFinishWarps = 4;

__global__ void __launch_bounds__(kFinishWarps * 32) finish_dense(const __grid_constant__ GemmParams p, int splits) {
  wait_for_previous_kernel();
  const int lane = threadIdx.x & 31, block = blockIdx.y * kFinishWarps + (threadIdx.x >> 5), row = blockIdx.x;
  if (block * kHadamard >= p.partial_columns) return;
  int i = 0;
#pragma unroll
  for (int j = 1; j < kMaxParts; ++j) {
    if (j < p.parts && block >= p.part[j].first_block) i = j;
  }
  const Part& part = p.part[i];
  const int column = (block - part.first_block) * kHadamard;
  float v[4];
  sum_splits(v, p.partial + static_cast<int64_t>(row) * p.partial_columns + block * kHadamard + lane * 4,
             static_cast<int64_t>(p.partial_rows) * p.partial_columns, splits);
  transform_scale(v, part.svh + column, part.a_scale ? part.a_scale[row] : 1.f, lane);
  if (column + lane * 4 < part.columns) store4(p.out, p.out_type, row * p.out_stride + part.out_column + column + lane * 4, v);
}

// Loads come first and their checks after: at one token this kernel is a chain of memory latencies, and each link saved is 0.6 us.
__global__ void __launch_bounds__(kFinishWarps * 32) finish_swiglu(const __grid_constant__ GemmParams p, int splits, const int32_t* row_expert,
                                                                    const int32_t* live_rows, const float* up_scale, half* h) {
  wait_for_previous_kernel();
  const int lane = threadIdx.x & 31, block = blockIdx.y * kFinishWarps + (threadIdx.x >> 5), row = blockIdx.x;
  if (block * kHadamard >= p.n) return;
  const int expert = row_expert[row], live = *live_rows, a_row = p.a_row ? p.a_row[row] : row, column = block * kHadamard;
  const float* sums = p.partial + static_cast<int64_t>(row) * p.partial_columns + column + lane * 4;
  const int64_t stride = static_cast<int64_t>(p.partial_rows) * p.partial_columns;
  float gate[4], up[4], s[4];
  sum_splits(gate, sums, stride, splits);
  sum_splits(up, sums + p.n, stride, splits);
  if (row >= live) return;  // rows past the live count hold stale numbers, in bounds
  const float scale = p.a_scale[a_row];
  transform_scale(gate, p.svh[0][expert] + column, scale, lane);
  transform_scale(up, p.svh[1][expert] + column, up_scale ? up_scale[row] : scale, lane);
  load4(s, p.suh_down[expert] + column + lane * 4);
#pragma unroll
  for (int i = 0; i < 4; ++i) gate[i] = swiglu(gate[i], up[i], p.limit) * s[i];
  hadamard_warp(gate, lane);
  store4_finite(h + static_cast<int64_t>(row) * p.n + column + lane * 4, gate);
}

// Sums a token's experts in the order of its slots: a CTA per 128 columns, its warps take the slots in turn, then one of them adds up.
constexpr int kCombineWarps = 8;

__global__ void __launch_bounds__(kCombineWarps * 32) combine_partial(const CombineParams p) {
  wait_for_previous_kernel();
  __shared__ float4 finished[kCombineWarps][32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, column = blockIdx.y * kHadamard, token = blockIdx.x;
  float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
  for (int first = 0; first < p.topk; first += kCombineWarps) {
    const int count = min(kCombineWarps, p.topk - first);
    float v[4] = {0.f, 0.f, 0.f, 0.f};
    if (warp < count) {
      const int slot = token * p.topk + first + warp, row = p.slot_row[slot], expert = p.topk_ids[slot];
      const float weight = p.topk_weights[slot];
      if (row >= 0) {
        sum_splits(v, p.partial + static_cast<int64_t>(row) * p.n + column + lane * 4, static_cast<int64_t>(p.sorted_rows) * p.n, p.splits);
        transform_scale(v, p.svh[expert] + column, weight, lane);
      }
    }
    finished[warp][lane] = make_float4(v[0], v[1], v[2], v[3]);
    __syncthreads();
    if (warp == 0) {
      for (int i = 0; i < count; ++i) {
        const float4 x = finished[i][lane];
        total.x += x.x; total.y += x.y; total.z += x.z; total.w += x.w;
      }
    }
    __syncthreads();
  }
  const float sum[4] = {total.x, total.y, total.z, total.w};
  if (warp == 0) store4(p.out, p.out_type, token * p.out_stride + column + lane * 4, sum);
}

__global__ void __launch_bounds__(256) combine_rows(const CombineParams p) {
  wait_for_previous_kernel();
  const int token = blockIdx.x, column = (blockIdx.y * 256 + threadIdx.x) * 8;
  if (column >= p.n) return;
  float total[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
#pragma unroll 8
  for (int k = 0; k < p.topk; ++k) {
    const int row = p.slot_row[token * p.topk + k];
    if (row < 0) continue;
    const uint4 u = *reinterpret_cast<const uint4*>(static_cast<const half*>(p.rows) + static_cast<int64_t>(row) * p.n + column);
    const uint32_t words[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = __half22float2(*reinterpret_cast<const half2*>(&words[i]));
      total[2 * i] += x.x;
      total[2 * i + 1] += x.y;
    }
  }
  const float low[4] = {total[0], total[1], total[2], total[3]}, high[4] = {total[4], total[5], total[6], total[7]};
  store4(p.out, p.out_type, token * p.out_stride + column, low);
  store4(p.out, p.out_type, token * p.out_stride + column + 4, high);
}

__global__ void __launch_bounds__(256) cast_rows(const float* in, const float* scale, void* out, Type type, int64_t out_stride, int columns) {
  wait_for_previous_kernel();
  const int row = blockIdx.x, column = (blockIdx.y * 256 + threadIdx.x) * 4;
  if (column >= columns) return;
  const float4 x = *reinterpret_cast<const float4*>(in + static_cast<int64_t>(row) * columns + column);
  const float s = scale ? scale[row] : 1.f;
  const float v[4] = {x.x * s, x.y * s, x.z * s, x.w * s};
  store4(out, type, row * out_stride + column, v);
}

int ceil_div(int a, int b) { return (a + b - 1) / b; }

}  // namespace

cudaError_t launch_rotate(const RotateParams& p, cudaStream_t stream) {
  return launch_dependent(rotate, p.rows, rotate_threads(p), 0, stream, p);
}

cudaError_t launch_finish_dense(const GemmParams& p, int splits, cudaStream_t stream) {
  const dim3 grid(p.rows, ceil_div(p.partial_columns / kHadamard, kFinishWarps));
  return launch_dependent(finish_dense, grid, kFinishWarps * 32, 0, stream, p, splits);
}

cudaError_t launch_finish_swiglu(const GemmParams& p, int splits, const int32_t* row_expert, const int32_t* live_rows, const float* up_scale, half* h,
                                 cudaStream_t stream) {
  const dim3 grid(p.sorted_rows, ceil_div(p.n / kHadamard, kFinishWarps));
  return launch_dependent(finish_swiglu, grid, kFinishWarps * 32, 0, stream, p, splits, row_expert, live_rows, up_scale, h);
}

cudaError_t launch_combine(const CombineParams& p, cudaStream_t stream) {
  if (p.rows) return launch_dependent(combine_rows, dim3(p.tokens, ceil_div(p.n, 2048)), 256, 0, stream, p);
  return launch_dependent(combine_partial, dim3(p.tokens, p.n / kHadamard), kCombineWarps * 32, 0, stream, p);
}

cudaError_t launch_cast_rows(const float* in, const float* scale, void* out, Type type, int64_t out_stride, int rows, int columns, cudaStream_t stream) {
  return launch_dependent(cast_rows, dim3(rows, ceil_div(columns, 1024)), 256, 0, stream, in, scale, out, type, out_stride, columns);
}

}  // namespace exl3
