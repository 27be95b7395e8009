// Trellis decoding: from the bits of one 16x16 tile in shared memory to the B fragment of an mma, in registers.
//
// A tile is a ring of 256 * bits bits. Weight t is a function of the 16 bits that end at bit ((t + 1) * rate2) / 2, where rate2 is twice
// the bits per weight. Lane l owns weights 8l .. 8l+7, in the order of its B fragment, so it needs one run of at most 72 bits that ends
// at bit 4 * rate2 * (l + 1): two or three consecutive words of the ring.
#pragma once
#include "ptx.cuh"

namespace exl3 {

enum Codebook : int { k3inst = 0, kMcg = 1, kMul1 = 2 };

__host__ __device__ constexpr int tile_bytes(int rate2) { return 16 * rate2; }

// Where each weight's window starts, in bits below the end of the lane's run.
__host__ __device__ constexpr int window_shift(int rate2, int j) { return 4 * rate2 - (((j + 1) * rate2) >> 1); }

// How many ring words cover the lane's run, for the worst alignment of its end.
__host__ __device__ constexpr int words_per_lane(int rate2) {
  int step = 32;  // the run's end is a multiple of 4 * rate2, so its distance to a word boundary is one of gcd(4 * rate2, 32)
  while ((4 * rate2) % step) step >>= 1;
  return (window_shift(rate2, 0) + 16 + (32 - step) + 31) / 32;
}

// The raw words of one tile for one lane, newest last.
template <int Rate2>
struct RawTile {
  static constexpr int kWords = words_per_lane(Rate2);
  uint32_t word[kWords];
};

// Byte offsets inside a tile of the lane's words, and the shift that drops the bits behind its run. Constant for the whole kernel.
template <int Rate2>
struct LanePosition {
  static constexpr int kWords = words_per_lane(Rate2);
  uint32_t offset[kWords];
  uint32_t shift;

  __device__ __forceinline__ explicit LanePosition(int lane) {
    const int end = 4 * Rate2 * (lane + 1);
    int index = (end - 1) >> 5;
    shift = (32 - (end & 31)) & 31;
#pragma unroll
    for (int i = kWords - 1; i >= 0; --i) {
      offset[i] = index * 4;
      index = index ? index - 1 : 4 * Rate2 - 1;  // the ring
    }
  }
};

template <int Rate2>
__device__ __forceinline__ void load_raw(RawTile<Rate2>& raw, const LanePosition<Rate2>& lane, uint32_t tile) {
#pragma unroll
  for (int i = 0; i < RawTile<Rate2>::kWords; ++i) raw.word[i] = load_shared(tile + lane.offset[i]);
}

// The lane's run, right-aligned: bits 0..31 in lo, 32..63 in hi, 64.. in top.
struct Run { uint32_t lo, hi, top; };

template <int Rate2>
__device__ __forceinline__ Run align(const RawTile<Rate2>& raw, uint32_t shift) {
  constexpr int n = RawTile<Rate2>::kWords;
  constexpr bool always_aligned = (4 * Rate2) % 32 == 0;
  const uint32_t w2 = raw.word[n - 1], w1 = raw.word[n - 2], w0 = n > 2 ? raw.word[0] : 0;
  if constexpr (always_aligned) {
    return {w2, w1, w0};
  } else {
    return {__funnelshift_r(w2, w1, shift), __funnelshift_r(w1, w0, shift), w0 >> shift};
  }
}

// Bits Shift .. Shift+31 of the run.
template <int Shift>
__device__ __forceinline__ uint32_t run_from(const Run& run) {
  if constexpr (Shift == 0) {
    return run.lo;
  } else if constexpr (Shift < 32) {
    return __funnelshift_r(run.lo, run.hi, Shift);
  } else if constexpr (Shift == 32) {
    return run.hi;
  } else {
    return __funnelshift_r(run.hi, run.top, Shift - 32);
  }
}

// The 16 bits at Shift. Windows that lie 0, 8 or 16 bits above the same shift share its funnel shift, so at 4 bits per weight eight windows
// cost 3 shifts and 8 permutes (shift + mask for each would be 16 instructions).
template <int Shift>
__device__ __forceinline__ uint32_t window(const Run& run) {
  constexpr int step = (Shift / 8) % 3;
  const uint32_t bits = run_from<Shift - 8 * step>(run);
  if constexpr (step == 2) {
    return bits >> 16;
  } else {
    return __byte_perm(bits, 0, step ? 0x4421 : 0x4410);
  }
}

// Two trellis states to two fp16 weights, bit-exact to the format: one rounding each.
template <int Cb>
__device__ __forceinline__ uint32_t decode_pair(uint32_t s0, uint32_t s1) {
  if constexpr (Cb == kMul1) {
    // 0x6400 + bytesum is the fp16 number 1024 + bytesum, so the sum needs no conversion before the affine map.
    const uint32_t h0 = __dp4a(s0 * 0x83DCD12Du, 0x01010101u, 0x6400u), h1 = __dp4a(s1 * 0x83DCD12Du, 0x01010101u, 0x6400u);
    uint32_t sums = __byte_perm(h0, h1, 0x5410), weights;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(weights) : "r"(sums), "r"(0x1EEE1EEEu), "r"(0xC931C931u));
    return weights;
  } else {
    constexpr uint32_t multiplier = Cb == kMcg ? 0xCBAC1FEDu : 89226354u, offset = Cb == kMcg ? 0u : 64248484u;
    const uint32_t x0 = mask_flip<0x8FFF8FFFu, 0x3B603B60u>(s0 * multiplier + offset);
    const uint32_t x1 = mask_flip<0x8FFF8FFFu, 0x3B603B60u>(s1 * multiplier + offset);
    return add_halves(x0, x1);
  }
}

// One register (two weights, J = 0..3) of the tile's B fragment. Split so that the mainloop can spread decoding between mma.
template <int Rate2, int Cb, int J>
__device__ __forceinline__ uint32_t decode_register(const Run& run) {
  return decode_pair<Cb>(window<window_shift(Rate2, 2 * J)>(run), window<window_shift(Rate2, 2 * J + 1)>(run));
}

template <int Rate2, int Cb>
__device__ __forceinline__ void decode_tile(FragmentB& b, const RawTile<Rate2>& raw, uint32_t shift) {
  const Run run = align<Rate2>(raw, shift);
  b.r[0] = decode_register<Rate2, Cb, 0>(run);
  b.r[1] = decode_register<Rate2, Cb, 1>(run);
  b.r[2] = decode_register<Rate2, Cb, 2>(run);
  b.r[3] = decode_register<Rate2, Cb, 3>(run);
}

}  // namespace exl3
