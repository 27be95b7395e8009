// unit: once
// ops: exl3_moe
// MoE routing tables, made on the device: a stable counting sort of the (token, slot) pairs by expert, and the segments of each expert.
// Stable, so that results never depend on timing. Three launches; one when a single CTA can hold all slots (decode).
#include "launch.h"
#include "rotate.cuh"

namespace exl3 {
namespace {

constexpr int kChunk = 1024;      // slots a CTA sorts at once, one per thread
constexpr int kWarps = kChunk / 32;
constexpr int kSmall = 4 * kChunk;  // up to here one CTA does everything: 3 launches cost more than its 4 passes

__device__ __forceinline__ int expert_of(const RoutingParams& p, int slot) {
  const int expert = slot < p.tokens * p.topk ? p.topk_ids[slot] : -1;
  return expert < p.experts ? expert : -1;  // negative: no work
}

// counts[chunk][expert] = slots of this chunk that chose the expert.
__device__ __forceinline__ void count_chunk(const RoutingParams& p, int chunk, int32_t* histogram) {
  for (int e = threadIdx.x; e < p.experts; e += kChunk) histogram[e] = 0;
  __syncthreads();
  const int expert = expert_of(p, chunk * kChunk + threadIdx.x);
  if (expert >= 0) atomicAdd(&histogram[expert], 1);
  __syncthreads();
  for (int e = threadIdx.x; e < p.experts; e += kChunk) p.counts[chunk * p.experts + e] = histogram[e];
  __syncthreads();
}

// Inclusive sum over the CTA.
__device__ __forceinline__ int scan(int value, int32_t* warp_sums) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
  for (int i = 1; i < 32; i <<= 1) {
    const int below = __shfl_up_sync(0xffffffffu, value, i);
    if (lane >= i) value += below;
  }
  if (lane == 31) warp_sums[warp] = value;
  __syncthreads();
  if (warp == 0) {
    int sum = warp_sums[lane];
#pragma unroll
    for (int i = 1; i < 32; i <<= 1) {
      const int below = __shfl_up_sync(0xffffffffu, sum, i);
      if (lane >= i) sum += below;
    }
    warp_sums[lane] = sum;
  }
  __syncthreads();
  const int result = value + (warp ? warp_sums[warp - 1] : 0);
  __syncthreads();
  return result;
}

// One thread per expert: turns counts into each chunk's first position within its expert, places experts one after another, cuts segments.
__device__ __forceinline__ void lay_out(const RoutingParams& p, int chunks, int32_t* warp_sums) {
  const int e = threadIdx.x;
  int rows = 0;
  if (e < p.experts) {
#pragma unroll 8
    for (int chunk = 0; chunk < chunks; ++chunk) {
      int32_t& count = p.counts[chunk * p.experts + e];
      const int here = count;
      count = rows;
      rows += here;
    }
  }
  const int segments = (rows + p.max_segment_rows - 1) / p.max_segment_rows;
  const int row_end = scan(rows, warp_sums), segment_end = scan(segments, warp_sums);
  if (e < p.experts) {
    p.expert_row[e] = row_end - rows;
    // Nearly equal parts that start at multiples of 16 rows within the expert.
    const int blocks = (rows + 15) / 16;
    for (int i = 0; i < segments; ++i) {
      const int base = blocks / segments, extra = blocks % segments;
      const int first = (i * base + min(i, extra)) * 16, count = min((base + (i < extra ? 1 : 0)) * 16, rows - first);
      const int at = segment_end - segments + i;
      p.segment_expert[at] = e;
      p.segment_row[at] = row_end - rows + first;
      p.segment_rows[at] = count;
    }
  }
  if (e == kChunk - 1) {
    p.expert_row[p.experts] = row_end;
    *p.live_rows = row_end;
    *p.segments = segment_end;
  }
}

// Every slot's sorted row: the expert's first row, plus the chunk's position in it, plus the slots of earlier warps, plus earlier lanes.
__device__ __forceinline__ void place_chunk(const RoutingParams& p, int chunk, uint8_t* warp_counts) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  for (int i = threadIdx.x; i < kWarps * p.experts; i += kChunk) warp_counts[i] = 0;
  __syncthreads();
  const int slot = chunk * kChunk + threadIdx.x, expert = expert_of(p, slot);
  const uint32_t same = __match_any_sync(0xffffffffu, expert);
  const int rank = __popc(same & ((1u << lane) - 1));
  if (expert >= 0 && rank == 0) warp_counts[warp * p.experts + expert] = static_cast<uint8_t>(__popc(same));
  __syncthreads();
  if (expert >= 0) {
    int row = p.expert_row[expert] + p.counts[chunk * p.experts + expert] + rank;
    for (int w = 0; w < warp; ++w) row += warp_counts[w * p.experts + expert];
    p.row_token[row] = slot / p.topk;
    p.row_expert[row] = expert;
    p.slot_row[slot] = row;
  } else if (slot < p.tokens * p.topk) {
    p.slot_row[slot] = -1;
  }
  __syncthreads();
}

// Block 0 routes, the others rotate a row each.
__global__ void __launch_bounds__(kChunk) route_small(const RoutingParams p, const RotateParams rotation) {
  wait_for_previous_kernel();
  if (blockIdx.x) return rotate_row(rotation, blockIdx.x - 1);
  extern __shared__ int32_t shared[];
  __shared__ int32_t warp_sums[32];
  const int chunks = (p.tokens * p.topk + kChunk - 1) / kChunk;
  for (int chunk = 0; chunk < chunks; ++chunk) count_chunk(p, chunk, shared);
  lay_out(p, chunks, warp_sums);
  __syncthreads();
  for (int chunk = 0; chunk < chunks; ++chunk) place_chunk(p, chunk, reinterpret_cast<uint8_t*>(shared));
}

__global__ void __launch_bounds__(kChunk) route_count(const RoutingParams p) {
  wait_for_previous_kernel();
  extern __shared__ int32_t shared[];
  count_chunk(p, blockIdx.x, shared);
}

__global__ void __launch_bounds__(kChunk) route_lay_out(const RoutingParams p, int chunks, const RotateParams rotation) {
  wait_for_previous_kernel();
  if (blockIdx.x) return rotate_row(rotation, blockIdx.x - 1);
  __shared__ int32_t warp_sums[32];
  lay_out(p, chunks, warp_sums);
}

__global__ void __launch_bounds__(kChunk) route_place(const RoutingParams p) {
  wait_for_previous_kernel();
  extern __shared__ int32_t shared[];
  place_chunk(p, blockIdx.x, reinterpret_cast<uint8_t*>(shared));
}

}  // namespace

int routing_chunks(int slots) { return (slots + kChunk - 1) / kChunk; }

int routing_max_segments(int slots, int experts, int max_segment_rows) {
  return (slots < experts ? slots : experts) + slots / max_segment_rows;
}

cudaError_t launch_routing(const RoutingParams& p, const RotateParams* rotation, cudaStream_t stream) {
  const int slots = p.tokens * p.topk, chunks = routing_chunks(slots), blocks = 1 + (rotation ? rotation->rows : 0);
  const RotateParams r = rotation ? *rotation : RotateParams{};
  const size_t place_bytes = static_cast<size_t>(kWarps) * p.experts, count_bytes = static_cast<size_t>(p.experts) * 4;
  if (slots <= kSmall) return launch_dependent(route_small, blocks, kChunk, place_bytes, stream, p, r);
  cudaError_t error = launch_dependent(route_count, chunks, kChunk, count_bytes, stream, p);
  if (error == cudaSuccess) error = launch_dependent(route_lay_out, blocks, kChunk, 0, stream, p, chunks, r);
  return error == cudaSuccess ? launch_dependent(route_place, chunks, kChunk, place_bytes, stream, p) : error;
}

}  // namespace exl3
