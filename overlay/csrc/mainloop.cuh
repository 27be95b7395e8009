// The pipeline: cp.async stages of activations and trellis bits, decoding one mma step ahead, mma.
//
// A warp owns 16 * MB rows x 32 columns and decodes its own weights straight into B fragments: no weight ever returns to shared memory.
// Everything a step needs is fetched one step (weights, bits) or one mma group (activations) earlier, also across stages, and a quarter of
// the next step's decoding is issued between every few mma, so that the ALU works in the shadow of the tensor pipe within one warp. With two
// warps per scheduler there is nobody else to hide behind. For the same reason the stages' barrier is split: a warp arrives after the first
// step of a stage and waits after the second.
#pragma once
#include "tiles.cuh"

namespace exl3 {

// The product that one CTA computes: rows x (streams of 128 columns) over k stages [k_begin, k_end).
struct Slice {
  const half* a;             // [*, k]
  const int32_t* a_row;      // null, or the row of a for each sorted row
  int a_rows;                // bound for a_row
  int k;
  int row0, rows;            // rows >= 1
  const uint8_t* stream[2];  // each stream's first tile in tile row 0
  uint32_t tile_row_bytes;   // from one row of tiles to the next
  int k_begin, k_end;        // in stages of kBlockK
};

template <int Rate2, int Cb, int MB, int Warps, int Stages>
struct Mainloop {
  static constexpr int kThreads = Warps * 32, kStreams = Warps / 4;
  static constexpr int kTileBytes = tile_bytes(Rate2);
  static constexpr int kAStage = a_stage_bytes(MB), kBStage = b_stage_bytes(Rate2, Warps), kStage = kAStage + kBStage;
  static constexpr int kAChunks = MB * 128, kALoads = (kAChunks + kThreads - 1) / kThreads;    // 16-byte chunks per stage
  static constexpr int kStepBytes = stream_bytes_per_step(Rate2), kStreamBytes = kStepsPerStage * kStepBytes;
  static constexpr int kBChunks = kStreamBytes / 16, kBLoads = (kBChunks + 127) / 128;         // per stream, whose own four warps copy it
  static_assert(Stages >= 3, "a stage is read ahead while another is being filled");

  // What this thread copies in each stage. Activation rows are 128 bytes, their 16-byte chunks xor-swizzled by the row's low bits so that
  // ldmatrix reads eight rows without bank conflicts.
  struct Loader {
    const uint4* a;
    uint32_t a_offset[kALoads];
    const uint8_t* b;
    uint32_t b_offset[kBLoads], b_advance;  // one pointer and 32-bit offsets: a pointer for each chunk spilled at 6 and 7 bits
    uint32_t a_shared, b_shared;

    // Weights depend on no kernel before this one (dense), or are found after it has ended (experts).
    __device__ __forceinline__ Loader(const Slice& s, uint32_t shared) {
      const int t = threadIdx.x, stream = t / 128, c0 = t % 128;
      b_shared = shared + kAStage + stream * kStreamBytes + c0 * 16;
      b_advance = s.tile_row_bytes * kStepsPerStage;
      b = (stream ? s.stream[1] : s.stream[0]) + static_cast<size_t>(s.k_begin) * b_advance;
#pragma unroll
      for (int i = 0; i < kBLoads; ++i) {
        const int c = i * 128 + c0;
        b_offset[i] = c * 16 / kStepBytes * s.tile_row_bytes + c * 16 % kStepBytes;
      }
    }

    __device__ __forceinline__ void find_a(const Slice& s, uint32_t shared) {
      const int t = threadIdx.x, chunk = t & 7;
      a = reinterpret_cast<const uint4*>(s.a) + s.k_begin * (kBlockK / 8);
#pragma unroll
      for (int i = 0; i < kALoads; ++i) {
        // Rows past the end repeat the last one: in bounds, and their results are never stored.
        int row = s.row0 + min(i * (kThreads / 8) + t / 8, s.rows - 1);
        if (s.a_row) row = min(max(s.a_row[row], 0), s.a_rows - 1);
        a_offset[i] = static_cast<uint32_t>(row) * (s.k / 8) + chunk;
      }
      a_shared = shared + (t / 8) * 128 + ((chunk ^ ((t / 8) & 7)) << 4);
    }

    __device__ __forceinline__ void copy_a(uint32_t base) {
#pragma unroll
      for (int i = 0; i < kALoads; ++i) {
        if (kAChunks % kThreads == 0 || i * kThreads + threadIdx.x < kAChunks) {
          cp_async_16(a_shared + base + i * (kThreads / 8) * 128, a + a_offset[i]);
        }
      }
      a += kBlockK / 8;
    }

    __device__ __forceinline__ void copy_b(uint32_t base) {
#pragma unroll
      for (int i = 0; i < kBLoads; ++i) {
        if (kBChunks % 128 == 0 || i * 128 + threadIdx.x % 128 < kBChunks) cp_async_16(b_shared + base + i * 128 * 16, b + b_offset[i]);
      }
      b += b_advance;
    }
  };

  // acc[mb][j] is the 16x8 block of rows 16mb and the warp's columns 8j. `barrier`: 8 bytes of shared memory, initialised
  // for one arrival of each thread.
  static __device__ __forceinline__ void run(float (&acc)[MB][4][4], const Slice& s, uint32_t shared, uint32_t barrier, bool wait) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int stages = s.k_end - s.k_begin;
    Loader loader(s, shared);
#pragma unroll
    for (int i = 0; i < Stages - 1; ++i) {
      if (i < stages) loader.copy_b(i * kStage);
    }
    if (wait) wait_for_previous_kernel();
    let_next_kernel_start();
    loader.find_a(s, shared);
#pragma unroll
    for (int i = 0; i < Stages - 1; ++i) {
      if (i < stages) loader.copy_a(i * kStage);
      cp_async_commit();
    }

    const LanePosition<Rate2> position(lane);
    const uint32_t a_lane = shared + (lane & 15) * 128;              // ldmatrix: lanes 0-15 rows, lane >> 4 the upper 8 of k
    const uint32_t a_swizzle = (lane >> 4) << 4, a_xor = (lane & 7) << 4;
    const uint32_t b_warp = shared + kAStage + (warp >> 2) * kStreamBytes + (warp & 3) * 2 * kTileBytes;
#pragma unroll
    for (int i = 0; i < MB; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int q = 0; q < 4; ++q) acc[i][j][q] = 0.f;
      }
    }
    cp_async_wait<Stages - 2>();
    __syncthreads();

    auto load_a = [&](FragmentA& a, uint32_t slot, int step, int mb) {
      load_matrix(a, a_lane + slot + mb * 2048 + ((step * 32 + a_swizzle) ^ a_xor));
    };
    auto load_bits = [&](RawTile<Rate2> (&raw)[2], uint32_t slot, int step) {
      load_raw<Rate2>(raw[0], position, b_warp + slot + step * kStepBytes);
      load_raw<Rate2>(raw[1], position, b_warp + slot + step * kStepBytes + kTileBytes);
    };

    FragmentA a[2];
    FragmentB b[2][2];
    RawTile<Rate2> raw[2];
    load_bits(raw, 0, 0);
    decode_tile<Rate2, Cb>(b[0][0], raw[0], position.shift);
    decode_tile<Rate2, Cb>(b[0][1], raw[1], position.shift);
    load_bits(raw, 0, 1);
    load_a(a[0], 0, 0, 0);

    // `here` is the slot being multiplied, `ahead` the next, `fill` the one before `here`, which is free once all warps have left it.
    uint32_t here = 0, ahead = kStage, fill = (Stages - 1) * kStage;
    for (int stage = 0; stage < stages; ++stage) {
#pragma unroll
      for (int step = 0; step < kStepsPerStage; ++step) {
        FragmentB(&now)[2] = b[step & 1];
        FragmentB(&then)[2] = b[(step & 1) ^ 1];
        const Run run0 = align<Rate2>(raw[0], position.shift), run1 = align<Rate2>(raw[1], position.shift);
#pragma unroll
        for (int mb = 0; mb < MB; ++mb) {
          const FragmentA& rows = a[(step * MB + mb) & 1];
          FragmentA& rows_then = a[(step * MB + mb + 1) & 1];
          if (mb + 1 < MB) {
            load_a(rows_then, here, step, mb + 1);
          } else if (step + 1 < kStepsPerStage) {
            load_a(rows_then, here, step + 1, 0);
          } else {
            load_a(rows_then, ahead, 0, 0);
          }
          // Repeated as a group: one mma repeated at once waits for its own sums, which a slower tensor pipe would not make it do.
#pragma unroll
          for (int repeat = 0; repeat < EXL3_MMA_REPEAT; ++repeat) {
            mma(acc[mb][0], rows, now[0].r[0], now[0].r[1]);
            mma(acc[mb][1], rows, now[0].r[2], now[0].r[3]);
            mma(acc[mb][2], rows, now[1].r[0], now[1].r[1]);
            mma(acc[mb][3], rows, now[1].r[2], now[1].r[3]);
          }
          // Registers mb * 8 / MB up to the next of the following step's weights.
          if (mb * 8 / MB <= 0 && 0 < (mb + 1) * 8 / MB) then[0].r[0] = decode_register<Rate2, Cb, 0>(run0);
          if (mb * 8 / MB <= 1 && 1 < (mb + 1) * 8 / MB) then[0].r[1] = decode_register<Rate2, Cb, 1>(run0);
          if (mb * 8 / MB <= 2 && 2 < (mb + 1) * 8 / MB) then[0].r[2] = decode_register<Rate2, Cb, 2>(run0);
          if (mb * 8 / MB <= 3 && 3 < (mb + 1) * 8 / MB) then[0].r[3] = decode_register<Rate2, Cb, 3>(run0);
          if (mb * 8 / MB <= 4 && 4 < (mb + 1) * 8 / MB) then[1].r[0] = decode_register<Rate2, Cb, 0>(run1);
          if (mb * 8 / MB <= 5 && 5 < (mb + 1) * 8 / MB) then[1].r[1] = decode_register<Rate2, Cb, 1>(run1);
          if (mb * 8 / MB <= 6 && 6 < (mb + 1) * 8 / MB) then[1].r[2] = decode_register<Rate2, Cb, 2>(run1);
          if (mb * 8 / MB <= 7 && 7 < (mb + 1) * 8 / MB) then[1].r[3] = decode_register<Rate2, Cb, 3>(run1);
        }
        if (step + 2 < kStepsPerStage) {
          load_bits(raw, here, step + 2);
        } else {
          load_bits(raw, ahead, step + 2 - kStepsPerStage);  // after the last stage: stale bits, decoded and never used
        }
        if (step == 0) {
          // This thread has left slot `fill`, and its own copies of the stage ahead have landed. One arrival for a warp, after __syncwarp,
          // would do and is 1 % faster, but compute-sanitizer does not follow it and reports a race.
          cp_async_wait<Stages - 3>();
          barrier_arrive(barrier);
        } else if (step == 1) {
          barrier_wait(barrier, stage & 1);
          if (stage + Stages - 1 < stages) {
            loader.copy_a(fill);
            loader.copy_b(fill);
          }
          cp_async_commit();
        }
      }
      fill = here;
      here = ahead;
      ahead = ahead + kStage == Stages * kStage ? 0 : ahead + kStage;
    }
    cp_async_wait<0>();  // the staging of the epilogue reuses the buffers
    __syncthreads();
  }
};

}  // namespace exl3
