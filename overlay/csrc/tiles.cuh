// Every tile size of the family, and what follows from it. The host chooses among the classes (api.cpp); kernels never do.
#pragma once
#include "decode.cuh"

#ifndef EXL3_MMA_REPEAT
#define EXL3_MMA_REPEAT 1  // 3 on the H200 makes the tensor pipe as slow, relative to the rest, as on sm_12x (bench K9)
#endif

namespace exl3 {

constexpr int kBlockK = 64;            // k per pipeline stage: 4 mma steps, so that one barrier is paid per 4 * MB * 4 mma of a warp
constexpr int kStepsPerStage = kBlockK / 16;
constexpr int kWarpColumns = 32;       // two trellis tiles: each A fragment then feeds 4 mma, which halves the ldmatrix traffic of one tile
constexpr int kSharedLimit = 101376;   // bytes a block may have on sm_12x (227 KB on sm_90, which we do not use)

// thin:   decode and small batches; decode-bound, so what counts is warps in flight (3 CTAs x 8 warps) and bytes in flight
// half:   up to 64 rows, 128 registers, 2 CTAs per SM: decode of one CTA hides behind the mma of the other
// wide:   up to 128 rows, all registers, 1 CTA per SM: decode amortised over most rows
// narrow: up to 128 rows x 128 columns, 4 warps, 2 CTAs per SM: two CTAs that are out of step use an SM 10 % better than 8 warps in step
enum class Tile : int { thin, half, wide, narrow };

template <Tile T> struct TileShape;
template <> struct TileShape<Tile::thin>   { static constexpr int row_blocks = 2, warps = 8, ctas = 3, most_stages = 6; };
template <> struct TileShape<Tile::half>   { static constexpr int row_blocks = 4, warps = 8, ctas = 2, most_stages = 4; };
template <> struct TileShape<Tile::wide>   { static constexpr int row_blocks = 8, warps = 8, ctas = 1, most_stages = 4; };
template <> struct TileShape<Tile::narrow> { static constexpr int row_blocks = 8, warps = 4, ctas = 2, most_stages = 4; };

__host__ __device__ constexpr int tile_rows(Tile t) { return t == Tile::thin ? 32 : t == Tile::half ? 64 : 128; }
__host__ __device__ constexpr int tile_columns(Tile t) { return t == Tile::narrow ? 128 : 256; }
__host__ __device__ constexpr int tile_threads(Tile t) { return t == Tile::narrow ? 128 : 256; }

// One 128-column Hadamard block of the output is a "stream": its weights are contiguous in each 16-row of tiles.
__host__ __device__ constexpr int stream_bytes_per_step(int rate2) { return 8 * tile_bytes(rate2); }
__host__ __device__ constexpr int a_stage_bytes(int row_blocks) { return row_blocks * 16 * kBlockK * 2; }
__host__ __device__ constexpr int b_stage_bytes(int rate2, int warps) { return kStepsPerStage * (warps / 4) * 8 * tile_bytes(rate2); }

// CTAs per SM that the registers must allow. Rates whose runs span three words (3.5, 5, 6, 7, 8 bits) need a few more registers than 80 and
// 128: at 80 the 6-bit thin kernel took 94 us for what it does in 50 with 128, and half spilled. On sm_12x ptxas spills half at 128 at every
// rate, and its slower tensor cores are busy with one CTA.
template <Tile T>
__host__ __device__ constexpr int ctas_for(int rate2, bool sm12x) {
  const bool tight = words_per_lane(rate2) > 2;
  if (T == Tile::thin) return tight || sm12x || rate2 == 2 ? 2 : TileShape<T>::ctas;  // 1 bit of 3inst is one register over 80
  if (T == Tile::half) return tight || sm12x || EXL3_MMA_REPEAT > 1 ? 1 : TileShape<T>::ctas;  // the emulation is of sm_12x
  if (T == Tile::narrow && sm12x) return 1;  // three stages of two CTAs do not fit 100 KB
  return TileShape<T>::ctas;
}

// Shared memory that the CTAs of an SM can have together, less 1 KB that each costs beside its own, and less what is static.
constexpr int kSharedPerSm12x = 102400, kSharedPerSm90 = 233472, kSharedPerCta = 1024 + 256;

// Pipeline depth: as deep as keeps the class's CTAs resident. On the H200 three stages leave one iteration for a DRAM round trip, which at
// few rows is longer than the iteration (68 us instead of 40 for 17408 x 5120 at one row); sm_12x has neither the room nor the bandwidth.
template <Tile T>
__host__ __device__ constexpr int stages_for(int rate2, bool sm12x) {
  const int stage = a_stage_bytes(TileShape<T>::row_blocks) + b_stage_bytes(rate2, TileShape<T>::warps);
  int room = (sm12x ? kSharedPerSm12x : kSharedPerSm90) / ctas_for<T>(rate2, sm12x) - kSharedPerCta;
  if (room > kSharedLimit - 256) room = kSharedLimit - 256;
  const int stages = room / stage;
  return stages < 3 ? 3 : stages > TileShape<T>::most_stages ? TileShape<T>::most_stages : stages;
}

// The output passes through shared memory 32 rows at a time, after the pipeline's buffers are free. +8: a row stride of 8 banks makes the
// fragments' 8-byte stores conflict-free.
constexpr int kStagingRows = 32;
__host__ __device__ constexpr int staging_stride(int warps) { return warps * kWarpColumns + 8; }
template <Tile T>
__host__ __device__ constexpr int shared_bytes(int rate2, bool sm12x) {
  const int pipeline = stages_for<T>(rate2, sm12x) * (a_stage_bytes(TileShape<T>::row_blocks) + b_stage_bytes(rate2, TileShape<T>::warps));
  const int staging = kStagingRows * staging_stride(TileShape<T>::warps) * 4;
  return pipeline > staging ? pipeline : staging;
}

// The code of one target is compiled for its own depth; the host asks for the shared memory that goes with it.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr bool kSm12x = true;
#else
constexpr bool kSm12x = false;
#endif

}  // namespace exl3
