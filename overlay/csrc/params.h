// What a launch of the trellis GEMM gets: plain data, filled by api.cpp.
#pragma once
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <cstdint>

namespace exl3 {

enum class Type : int { f16, bf16, f32 };

enum class Output : int {
  partial,  // sums of one split of K as they are, before the output Hadamard, to partial[split][row][column] or partial_half[row][column]
  store,    // Hadamard, svh, scales; out[row][column] in the caller's type
  scatter,  // the same, added to out[token][column] in fp32
  swiglu,   // stream 0 is gate, stream 1 up: limit, SiLU(gate) * up, suh of down, Hadamard; fp16 out[row][column]
};

constexpr int kMaxParts = 4;  // qkv has three, gate_up two

// One weight matrix of a fused layer. Blocks are 128 columns.
struct Part {
  const uint8_t* trellis;  // [k/16][n/16][tile]
  const half* svh;         // [n]
  const half* a;           // [rows][k], rotated with this part's suh
  const float* a_scale;    // [rows], see rotate in rows.cu
  int first_tile;          // of the grid's column tiles
  int first_block;         // of the partial sums' columns
  int blocks;              // n / 128
  int out_column;          // where this part starts in a row of out
  int columns;             // columns stored; < n where the checkpoint padded n
};

struct GemmParams {
  Output output;
  int k;

  // dense: parts > 0
  int parts;
  Part part[kMaxParts];
  int rows;           // of the whole product
  int rows_per_tile;  // multiple of 16; the grid's row tiles are balanced

  // grouped (MoE): parts == 0. Segments are runs of rows of one expert.
  const int32_t* segment_expert;
  const int32_t* segment_row;
  const int32_t* segment_rows;
  const int32_t* segments;               // [1], live count
  int min_rows, max_rows;                // this launch serves segments of min_rows..max_rows rows
  int beside;                            // the launch before serves other segments of the same phase: run beside it
  int experts;
  const uint8_t* const* trellis[2];      // [experts] per stream; [1] only for swiglu
  const half* const* svh[2];
  const half* const* suh_down;           // swiglu: the rotation that the down projection wants
  const uint8_t* expert_class;           // [experts] or null: rate2 | codebook << 5; this launch serves one class
  int n;                                 // columns of one expert's matrix
  const half* a;
  const float* a_scale;                  // per row of a
  const int32_t* a_row;                  // row of a that sorted row r reads, or null for r itself
  int a_rows;                            // rows of a, bound for a_row
  int sorted_rows;                       // bound for segment rows

  float limit;                           // swiglu: gate <= limit, |up| <= limit; infinity for none
  const half* row_weight;                // scatter: [sorted rows]
  const int64_t* row_token;              // scatter: [sorted rows]
  int tokens;                            // rows of out for scatter, bound for row_token

  void* out;
  Type out_type;
  int64_t out_stride;                    // elements between rows of out
  float* partial;                        // [splits][partial_rows][partial_columns], or null with
  half* partial_half;                    // the same of one split in fp16
  int partial_rows, partial_columns;
  int partial_column0;                   // where this launch's matrix starts in the partial sums (gate and up in turn)
  int32_t* fault;                        // null, or a debug word: bit 0 expert, 1 segment rows, 2 input row, 3 token out of range
  int rows_fastest;                      // grid order: consecutive CTAs share weights (dense) or activations (grouped)
};

// The constants of one compiled (rate, codebook): how its kernels are launched.
struct Instance {
  int rate2, codebook;
  // grid.x/y: column and row tiles as rows_fastest says; grid.z: splits of K
  cudaError_t (*gemm)(const GemmParams&, int tile, dim3 grid, cudaStream_t);
  // out [k][n] fp16 with row stride n. suh and svh null: the inner weight; both given: the weight in the original basis.
  cudaError_t (*reconstruct)(const uint8_t* trellis, const half* suh, const half* svh, half* out, int k, int n, int64_t out_stride, cudaStream_t);
};

void register_instance(const Instance& instance);
const Instance* find_instance(int rate2, int codebook);  // null if the library was built without it
const Instance* instance_at(int index);                    // null past the last

}  // namespace exl3
