// The trellis GEMM kernel: finds the CTA's work, runs the mainloop for its number of row blocks, writes the results.
#pragma once
#include "epilogue.cuh"
#include "mainloop.cuh"

namespace exl3 {

// Splits `rows` into `tiles` nearly equal runs that start at multiples of 16, so that padding is paid once and not on every tile.
__device__ __forceinline__ void balanced_rows(int rows, int tiles, int tile, int& row0, int& count) {
  const int blocks = (rows + 15) / 16, base = blocks / tiles, extra = blocks % tiles;
  row0 = (tile * base + min(tile, extra)) * 16;
  count = min((base + (tile < extra ? 1 : 0)) * 16, rows - row0);
}

template <int TileBytes>
__device__ __forceinline__ bool find_dense(const GemmParams& p, int column_tile, int row_tile, int row_tiles, int streams, Slice& s, Target& t) {
  int i = 0;
#pragma unroll
  for (int j = 1; j < kMaxParts; ++j) {
    if (j < p.parts && column_tile >= p.part[j].first_tile) i = j;
  }
  const Part& part = p.part[i];
  const int block = (column_tile - part.first_tile) * streams;
  balanced_rows(p.rows, row_tiles, row_tile, s.row0, s.rows);
  s.a = part.a;
  s.a_row = nullptr;
  s.a_rows = p.rows;
  s.tile_row_bytes = part.blocks * 8 * TileBytes;
  t.streams = min(streams, part.blocks - block);
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int b = block + (j < t.streams ? j : 0);  // a missing second stream repeats the first and is not stored
    s.stream[j] = part.trellis + static_cast<size_t>(b) * 8 * TileBytes;
    t.svh[j] = part.svh + b * kHadamard;
    t.column[j] = p.output == Output::partial ? (part.first_block + b) * kHadamard : part.out_column + b * kHadamard;
    t.columns[j] = min(part.columns - b * kHadamard, kHadamard);
  }
  t.suh_down = nullptr;
  t.a_scale = part.a_scale;
  return s.rows > 0;
}

// Every number that comes from a device table is checked: a wrong one costs its CTA's work, never memory.
template <int TileBytes>
__device__ __forceinline__ bool find_segment(const GemmParams& p, int column_tile, int segment, int streams, int expert_class, Slice& s, Target& t) {
  if (segment >= *p.segments) return false;
  const int expert = p.segment_expert[segment], row0 = p.segment_row[segment], rows = p.segment_rows[segment];
  if (rows < p.min_rows || rows > p.max_rows) {
    if (p.fault && rows > tile_rows(Tile::wide)) atomicOr(p.fault, 2);
    return false;
  }
  if (expert < 0 || expert >= p.experts) {
    if (p.fault) atomicOr(p.fault, 1);
    return false;
  }
  if (row0 < 0 || row0 > p.sorted_rows - rows) {
    if (p.fault) atomicOr(p.fault, 2);
    return false;
  }
  if (p.expert_class && p.expert_class[expert] != expert_class) return false;
  const bool pair = p.trellis[1] != nullptr;  // gate and up: the tile is one block of each
  const int blocks = p.n / kHadamard, block = pair ? column_tile : column_tile * streams;
  s.row0 = row0;
  s.rows = rows;
  s.a = p.a;
  s.a_row = p.a_row;
  s.a_rows = p.a_rows;
  s.tile_row_bytes = blocks * 8 * TileBytes;
  t.streams = pair ? 2 : min(streams, blocks - block);
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int matrix = pair ? j : 0, b = pair ? block : block + (j < t.streams ? j : 0);
    s.stream[j] = p.trellis[matrix][expert] + static_cast<size_t>(b) * 8 * TileBytes;
    t.svh[j] = p.output == Output::partial ? nullptr : p.svh[matrix][expert] + b * kHadamard;
    t.column[j] = b * kHadamard + p.partial_column0 + (pair && p.output == Output::partial ? j * p.n : 0);
    t.columns[j] = kHadamard;
  }
  t.suh_down = p.output == Output::swiglu ? p.suh_down[expert] + block * kHadamard : nullptr;
  t.a_scale = p.a_scale;
  return true;
}

// What a CTA knows beside its accumulators waits in shared memory: two dozen registers that the mainloop of a 128-register class does not have.
struct Work {
  Slice slice;
  Target target;
  uint64_t barrier;
};

template <int Rate2, int Cb, int MB, Tile T>
__device__ __forceinline__ void multiply(const GemmParams& p, const Work& work, unsigned char* shared) {
  constexpr int warps = TileShape<T>::warps;
  float acc[MB][4][4];
  Mainloop<Rate2, Cb, MB, warps, stages_for<T>(Rate2, kSm12x)>::run(acc, work.slice, shared_address(shared), shared_address(&work.barrier), !p.beside);
  if (p.output == Output::partial) {
    store_partial<MB, warps>(acc, p, work.target, blockIdx.z);
  } else {
    store_transformed<MB, warps>(acc, p, work.target, reinterpret_cast<float*>(shared));
  }
}

// A launch beside the one before it (`p.beside`) reads nothing of that one, only of kernels that ended before that one let it start. But whoever
// waits for this launch must find both ended, so one CTA stays until then.
__device__ __forceinline__ void leave(const GemmParams& p) {
  if (p.beside && blockIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0) wait_for_previous_kernel();
}

template <int Rate2, int Cb, Tile T>
__global__ void __launch_bounds__(tile_threads(T), ctas_for<T>(Rate2, kSm12x)) trellis_gemm(const __grid_constant__ GemmParams p) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ Work work;
  constexpr int streams = TileShape<T>::warps / 4;
  const int column_tile = p.rows_fastest ? blockIdx.y : blockIdx.x, row_tile = p.rows_fastest ? blockIdx.x : blockIdx.y;
  const int row_tiles = p.rows_fastest ? gridDim.x : gridDim.y;
  Slice s;
  Target t;
  if (!p.parts && !p.beside) wait_for_previous_kernel();  // segments are tables of the kernels before; a dense slice needs only parameters
  const bool found = p.parts ? find_dense<tile_bytes(Rate2)>(p, column_tile, row_tile, row_tiles, streams, s, t)
                             : find_segment<tile_bytes(Rate2)>(p, column_tile, row_tile, streams, Rate2 | Cb << 5, s, t);
  if (!found) return leave(p);
  if (threadIdx.x == 0) {
    const int stages = p.k / kBlockK, split = blockIdx.z, splits = gridDim.z;
    s.k = p.k;
    s.k_begin = static_cast<int>(static_cast<int64_t>(stages) * split / splits);
    s.k_end = static_cast<int>(static_cast<int64_t>(stages) * (split + 1) / splits);
    t.row0 = s.row0;
    t.rows = s.rows;
    t.a_row = s.a_row;
    t.a_rows = s.a_rows;
    work.slice = s;
    work.target = t;
    barrier_init(shared_address(&work.barrier), tile_threads(T));
  }
  __syncthreads();
  // One mainloop per number of 16-row blocks: rounding every segment up to the tile wasted 22-28 % at 57 and 199 rows.
  switch ((s.rows + 15) >> 4) {
#define EXL3_ROW_BLOCKS(MB) \
  case MB: \
    if constexpr (MB <= TileShape<T>::row_blocks) { multiply<Rate2, Cb, MB, T>(p, work, shared); } \
    break;
    EXL3_ROW_BLOCKS(1) EXL3_ROW_BLOCKS(2) EXL3_ROW_BLOCKS(3) EXL3_ROW_BLOCKS(4)
    EXL3_ROW_BLOCKS(5) EXL3_ROW_BLOCKS(6) EXL3_ROW_BLOCKS(7) EXL3_ROW_BLOCKS(8)
#undef EXL3_ROW_BLOCKS
  }
  leave(p);
}

}  // namespace exl3
