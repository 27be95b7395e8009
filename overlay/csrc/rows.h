// Launchers of rows.cu and routing.cu, for api.cpp.
#pragma once
#include "params.h"

namespace exl3 {

struct RotateParams {
  const void* x;             // [rows][x_columns], row stride x_stride
  Type type;
  int64_t x_stride;
  int x_columns;             // <= k; the rest of a row counts as zero (padded checkpoints)
  int k;
  int rows;
  const half* suh;           // one rotation for all rows, or null with suh_table
  const half* const* suh_table;  // [experts], chosen per row
  const int32_t* row_expert;     // with suh_table
  int experts;
  const int32_t* x_row;      // null, or the row of x that output row r reads
  const int64_t* x_row_64;   // the same as fat symbols pass it
  int x_rows;                // bound for x_row
  const int32_t* live_rows;  // null, or a device count: rows beyond it are left alone
  half* a;                   // [rows][k]
  float* a_scale;            // [rows] or null (then values are clamped to the fp16 range)
  int32_t* fault;            // as in GemmParams: 1 expert, 4 input row
};
cudaError_t launch_rotate(const RotateParams& p, cudaStream_t stream);

// Sums the splits of a dense product and finishes it as the GEMM's own epilogue would.
cudaError_t launch_finish_dense(const GemmParams& p, int splits, cudaStream_t stream);

// Sums the splits of gate and up, SwiGLU, rotation for down; rows as routed. up_scale: null, or the row scales of up's own rotation.
cudaError_t launch_finish_swiglu(const GemmParams& p, int splits, const int32_t* row_expert, const int32_t* live_rows, const float* up_scale, half* h,
                                  cudaStream_t stream);

struct CombineParams {
  const half* partial_half;    // [sorted rows][n], sums of down as they are; or null with
  const float* partial;        // [splits][sorted rows][n]
  int splits;
  int sorted_rows;
  const half* const* svh;      // [experts]
  const int32_t* topk_ids;     // [tokens][topk]
  const float* topk_weights;   // [tokens][topk]
  const int32_t* slot_row;     // [tokens][topk]: sorted row of each slot, < 0 for none
  int tokens, topk, n;
  void* out;
  Type out_type;
  int64_t out_stride;
};
cudaError_t launch_combine(const CombineParams& p, cudaStream_t stream);

// fp32 [rows][columns] products with row scales to the caller's type (large dense products through cuBLAS).
cudaError_t launch_cast_rows(const float* in, const float* scale, void* out, Type type, int64_t out_stride, int rows, int columns, cudaStream_t stream);

struct RoutingParams {
  const int32_t* topk_ids;     // [tokens][topk]; ids outside 0..experts-1 are slots without work (expert parallelism)
  int tokens, topk, experts;
  int max_segment_rows;        // multiple of 16
  // out
  int32_t* counts;             // scratch [chunks][experts]
  int32_t* expert_row;         // [experts + 1]: first sorted row
  int32_t* row_token;          // [tokens * topk]
  int32_t* row_expert;         // [tokens * topk]
  int32_t* slot_row;           // [tokens * topk]
  int32_t* segment_expert;
  int32_t* segment_row;
  int32_t* segment_rows;
  int32_t* segments;           // [1]
  int32_t* live_rows;          // [1]
};
int routing_chunks(int slots);
int routing_max_segments(int slots, int experts, int max_segment_rows);
// `rotation`: null, or rows to rotate in the shadow of the tables (it needs none of them).
cudaError_t launch_routing(const RoutingParams& p, const RotateParams* rotation, cudaStream_t stream);

}  // namespace exl3
