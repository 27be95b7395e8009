// The PTX that the kernels need by name. Everything here assembles for plain sm_90, sm_120 and sm_121 targets.
#pragma once
#include <cuda_fp16.h>
#include <cstdint>

namespace exl3 {

// Shared-memory instructions take 32-bit addresses in the shared window; generic pointers cost a register more.
__device__ __forceinline__ uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// 16 bytes from global to shared without passing through registers; .cg keeps the stream out of L1, which holds nothing we re-read.
__device__ __forceinline__ void cp_async_16(uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global));
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;"); }
// Waits until at most `Pending` of this thread's committed groups are still in flight.
template <int Pending>
__device__ __forceinline__ void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory"); }

// Programmatic dependent launch: a kernel may start while the one before it in the stream still runs, fetch what does not depend on it,
// and wait here until all of that kernel's writes are visible. Launch gaps of about 2 us are most of a small product's time. Only the GEMM
// lets its successor start before it ends: CTAs of a GEMM placed around the last CTAs of a small kernel load some SMs twice (77 us, not 47).
__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;"); }

// A barrier in two halves: a warp says that it is done with one buffer and may work on before it needs the others to have said so.
// __syncthreads instead makes all warps of a CTA run in step, with the tensor pipe idle while all of them decode.
__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("{.reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0];}" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{.reg .pred done;\n"
      "again_%=: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again_%=;}" ::"r"(barrier), "r"(parity) : "memory");
}

// The A operand of one m16n8k16 mma: rows and columns of a 16x16 fp16 block, as the four 8x8 quarters that ldmatrix delivers.
struct FragmentA { uint32_t r[4]; };
// The B operands of two neighbouring m16n8k16 mma: one 16(k) x 16(n) trellis tile. r[0..1] are columns 0-7, r[2..3] columns 8-15.
struct FragmentB { uint32_t r[4]; };

// One instruction fetches a whole A fragment; plain loads would need four and twice the shared-memory wavefronts.
__device__ __forceinline__ void load_matrix(FragmentA& a, uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a.r[0]), "=r"(a.r[1]), "=r"(a.r[2]), "=r"(a.r[3]) : "r"(shared));
}

__device__ __forceinline__ uint32_t load_shared(uint32_t shared) {
  uint32_t word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(shared));
  return word;
}

// fp16 inputs, fp32 accumulate: the only tensor instruction that sm_90, sm_120 and sm_121 share at full rate.
__device__ __forceinline__ void mma(float (&c)[4], const FragmentA& a, uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b0), "r"(b1));
}

// Adds the two halves of each word and packs both sums. Written with the half selectors in view so that ptxas uses HADD2 .H0_H0/.H1_H1
// instead of two permutes more.
__device__ __forceinline__ uint32_t add_halves(uint32_t x0, uint32_t x1) {
  uint32_t s0, s1;
  asm("{.reg .b16 l, h; .reg .b32 a, b; mov.b32 {l, h}, %1; mov.b32 a, {l, l}; mov.b32 b, {h, h}; add.f16x2 %0, a, b;}" : "=r"(s0) : "r"(x0));
  asm("{.reg .b16 l, h; .reg .b32 a, b; mov.b32 {l, h}, %1; mov.b32 a, {l, l}; mov.b32 b, {h, h}; add.f16x2 %0, a, b;}" : "=r"(s1) : "r"(x1));
  return __byte_perm(s0, s1, 0x5410);
}

// (x & mask) ^ flip in one LOP3, which the compiler finds only when both constants reach it as immediates.
template <uint32_t Mask, uint32_t Flip>
__device__ __forceinline__ uint32_t mask_flip(uint32_t x) {
  asm("lop3.b32 %0, %0, %1, %2, 0x6a;" : "+r"(x) : "n"(Mask), "n"(Flip));
  return x;
}

}  // namespace exl3
