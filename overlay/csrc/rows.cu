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

// The same for many tokens, from fp16 sums: a warp takes eight blocks of 128 columns, four lanes each, and all slots of a token one after
// another. The output Hadamard of down is done here and not in its GEMM, whose K is so short that the epilogue was a sixth of its time; this
// kernel waits for memory and has the arithmetic to spare. A lane holds columns 32i + 8(l % 4) .. + 7 of its block, so two shuffles a value.
constexpr int kSlotsAtOnce = 2, kCombineCtas = 4;  // at 7,168 tokens 185 us; 4 slots and 3 CTAs 249 us, 8 and 2 254 us

struct Eighths { uint4 chunk[4]; };  // 32 halves

__device__ __forceinline__ Eighths load_eighths(const half* p) {
  Eighths x;
#pragma unroll
  for (int i = 0; i < 4; ++i) x.chunk[i] = *reinterpret_cast<const uint4*>(p + 32 * i);
  return x;
}

__device__ __forceinline__ void to_floats(float (&v)[32], const Eighths& x) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t words[4] = {x.chunk[i].x, x.chunk[i].y, x.chunk[i].z, x.chunk[i].w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 f = __half22float2(*reinterpret_cast<const half2*>(&words[j]));
      v[8 * i + 2 * j] = f.x;
      v[8 * i + 2 * j + 1] = f.y;
    }
  }
}

__device__ __forceinline__ void add_row(float (&total)[32], const Eighths& sums, const half* svh, float weight, int lane) {
  float v[32], s[32];
  to_floats(s, load_eighths(svh));
  to_floats(v, sums);
  hadamard_registers(v);
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    v[i] = butterfly<2>(butterfly<1>(v[i], lane), lane);
    total[i] = fmaf(v[i] * weight, s[i], total[i]);
  }
}

__global__ void __launch_bounds__(kFinishWarps * 32, kCombineCtas) combine_half(const CombineParams p) {
  wait_for_previous_kernel();
  const int lane = threadIdx.x & 31, token = blockIdx.x;
  const int block = (blockIdx.y * kFinishWarps + (threadIdx.x >> 5)) * 8 + (lane >> 2);
  const bool live = block * kHadamard < p.n;  // all lanes join the shuffles
  const int column = (live ? block : 0) * kHadamard + (lane & 3) * 8;
  float total[32];
#pragma unroll
  for (int i = 0; i < 32; ++i) total[i] = 0.f;
  for (int first = 0; first < p.topk; first += kSlotsAtOnce) {
    Eighths sums[kSlotsAtOnce];
    const half* svh[kSlotsAtOnce];
    float weight[kSlotsAtOnce];
#pragma unroll
    for (int k = 0; k < kSlotsAtOnce; ++k) {
      const int slot = token * p.topk + min(first + k, p.topk - 1), row = p.slot_row[slot];
      const bool counts = first + k < p.topk && row >= 0;
      // A slot without work adds zero times some valid row.
      sums[k] = load_eighths(p.partial_half + static_cast<int64_t>(counts ? row : 0) * p.n + column);
      svh[k] = p.svh[counts ? p.topk_ids[slot] : 0] + column;
      weight[k] = counts ? p.topk_weights[slot] * kHadamardScale : 0.f;
    }
#pragma unroll
    for (int k = 0; k < kSlotsAtOnce; ++k) {
      if (weight[k] != 0.f) add_row(total, sums[k], svh[k], weight[k], lane);  // the same for all lanes of the token
    }
  }
  if (!live) return;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float x[4] = {total[4 * i], total[4 * i + 1], total[4 * i + 2], total[4 * i + 3]};
    store4(p.out, p.out_type, token * p.out_stride + column + 32 * (i >> 1) + 4 * (i & 1), x);
  }
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
  if (p.partial_half) return launch_dependent(combine_half, dim3(p.tokens, ceil_div(p.n / kHadamard, 8 * kFinishWarps)), kFinishWarps * 32, 0, stream, p);
  return launch_dependent(combine_partial, dim3(p.tokens, p.n / kHadamard), kCombineWarps * 32, 0, stream, p);
}

cudaError_t launch_cast_rows(const float* in, const float* scale, void* out, Type type, int64_t out_stride, int rows, int columns, cudaStream_t stream) {
  return launch_dependent(cast_rows, dim3(rows, ceil_div(columns, 1024)), 256, 0, stream, in, scale, out, type, out_stride, columns);
}

}  // namespace exl3
