// The C ABI of the kernel library. Pointers are device pointers unless said otherwise; `stream` is a cudaStream_t. Every function that
// returns int returns 0, or -1 with a sentence in exl3_last_error(). Nothing allocates, synchronises or remembers anything: memory comes
// from the caller, so calls can be captured, and two streams may run at once with a workspace each.
#pragma once
#include <stdint.h>

#define EXL3_ABI_VERSION 1
#define EXL3_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

enum { EXL3_F16 = 0, EXL3_BF16 = 1, EXL3_F32 = 2 };
enum { EXL3_TILE_THIN = 0, EXL3_TILE_HALF = 1, EXL3_TILE_WIDE = 2, EXL3_TILE_NARROW = 3 };
enum { EXL3_MAX_PARTS = 4, EXL3_MAX_CLASSES = 12, EXL3_MAX_LAUNCHES = 2, EXL3_MAX_EXPERTS = 1024 };

EXL3_API int exl3_abi_version(void);
EXL3_API const char* exl3_last_error(void);  // of this thread
EXL3_API const char* exl3_instances(void);   // "8:1 10:1 ...": rate2:codebook of what is compiled in

// One trellis matrix: y = (((x * suh) H) What H) * svh
typedef struct {
  const void* trellis;  // int16 [k/16][n/16][8 * rate2], 16-byte aligned
  const void* suh;      // fp16 [k]
  const void* svh;      // fp16 [n]
  int32_t n;
  int32_t columns;      // columns stored, <= n: the checkpoint's padding is left out; multiple of 4
  int32_t rate2, codebook;
} exl3_matrix;

// x rotated for the matrix: a[r] = (x[r] * suh) H, fp16; a_scale[r] is a power of two, 1 unless the row would not fit fp16.
EXL3_API int exl3_rotate(const void* x, int x_type, int64_t x_stride, int rows, int x_columns, const void* suh, int k, void* a, float* a_scale,
                         void* stream);

// A layer of up to EXL3_MAX_PARTS matrices over the same x, results side by side in out.
typedef struct {
  const void* x;         // [rows][x_columns], row stride x_stride; columns x_columns..k-1 count as zero
  int64_t x_stride;
  int32_t x_type, rows, x_columns, k;
  int32_t parts;
  int32_t shared_suh;    // the parts' suh are equal: rotate once
  exl3_matrix part[EXL3_MAX_PARTS];
  void* out;             // [rows][sum of columns], row stride out_stride
  int64_t out_stride;
  int32_t out_type;
  int32_t tile, row_tiles, splits;  // splits > 0: K is cut and fp32 sums go through the workspace; 0: one pass
  void* workspace;       // exl3_gemm_workspace bytes, 256-byte aligned
  int64_t workspace_bytes;
  void* stream;
} exl3_gemm_args;
EXL3_API int64_t exl3_gemm_workspace(int rows, int k, int total_n, int rotations, int splits);
EXL3_API int exl3_gemm(const exl3_gemm_args* args);

// The decoded weight, fp16 [k][n] with row stride out_stride: the inner one (suh, svh null) or that of the original basis.
EXL3_API int exl3_reconstruct(const exl3_matrix* matrix, int k, int original_basis, void* out, int64_t out_stride, void* stream);

// out = (in * a_scale) H * svh for fp32 products that cuBLAS made of rotated rows and an inner weight; svh null: only scale and cast.
EXL3_API int exl3_finish(const float* in, const float* a_scale, const void* svh, int rows, int n, void* out, int out_type, int64_t out_stride, int columns,
                         void* stream);

// One phase's launches: tile class and the range of segment rows that it serves.
typedef struct { int32_t count, tile[EXL3_MAX_LAUNCHES], min_rows[EXL3_MAX_LAUNCHES], max_rows[EXL3_MAX_LAUNCHES]; } exl3_launches;
// Which (rate, codebook) an expert has: table[expert] = rate2 | codebook << 5; the host lists those that occur. Table null: one for all.
typedef struct { const uint8_t* table; int32_t count; int32_t rate2[EXL3_MAX_CLASSES], codebook[EXL3_MAX_CLASSES]; } exl3_classes;

typedef struct {
  const void* x;               // [tokens][hidden]
  int64_t x_stride;
  int32_t x_type, tokens, hidden, inter, topk, experts;
  const int32_t* topk_ids;     // [tokens][topk]; an id outside 0..experts-1 is another rank's expert: no work, no contribution
  const float* topk_weights;   // [tokens][topk]
  const void* suh;             // fp16 [hidden] that every gate and up shares, or null with the two tables
  const int64_t *gate_suh, *up_suh;                                     // device tables of pointers, [experts], used when suh is null
  const int64_t *gate_trellis, *gate_svh, *up_trellis, *up_svh;         // device tables of pointers, [experts]
  const int64_t *down_trellis, *down_suh, *down_svh;
  exl3_classes gate_up, down;
  float limit;                 // SwiGLU limit, <= 0 for none
  void* out;                   // [tokens][hidden]
  int64_t out_stride;
  int32_t out_type;
  int32_t segment_rows;        // longest run of rows of one expert that a CTA takes, multiple of 16, <= 128
  int32_t splits_gate_up, splits_down;  // 0: gate and up finished in the GEMM, down in fp16 sums; > 0: K cut that often, fp32 sums in the workspace
  exl3_launches launch_gate_up, launch_down;
  void* workspace;             // exl3_moe_workspace bytes, 256-byte aligned
  int64_t workspace_bytes;
  int32_t phases;              // bit 0 routing, 1 rotation, 2 gate and up, 3 down, 4 combine; 31 for the layer, fewer to time a phase
  void* stream;
} exl3_moe_args;
EXL3_API int64_t exl3_moe_workspace(int tokens, int topk, int experts, int hidden, int inter, int segment_rows, int shared_suh, int splits_gate_up,
                                    int splits_down);
EXL3_API int exl3_moe(const exl3_moe_args* args);

// The fat symbols, under the names and meaning that EXL3 deployments know. a is already rotated; out is fp32.
EXL3_API int exl3_fat_gemm(const void* a, const void* packed, float* out, const void* svh, int rows, int k, int n, int rate2, int codebook, void* stream);
// out[token_idx[r]] += route_weight[r] * row r. An index outside 0..tokens-1 is skipped; `fault` (may be null) gets bit 3.
EXL3_API int exl3_fat_gemm_scatter(const void* a, const void* packed, float* out, const void* svh, const int64_t* token_idx, const void* route_weight,
                                   int rows, int tokens, int k, int n, int rate2, int codebook, int32_t* fault, void* stream);
EXL3_API int exl3_fat_moe_gather(const void* x, const int64_t* row_token, const int32_t* row_expert, const int64_t* suh_ptrs, void* h13,
                                 const int32_t* num_rows, int tokens, int rows_cap, int experts, int k, int32_t* fault, void* stream);
// Segments: rows seg_row0 .. seg_row0 + seg_rows - 1 of one expert; seg_rows <= exl3_fat_moe_tile_rows_gateup().
EXL3_API int exl3_fat_moe_gateup(const void* h13, const int64_t* gate_trellis, const int64_t* up_trellis, const int64_t* gate_svh, const int64_t* up_svh,
                                 const int64_t* down_suh, void* h2, const int32_t* seg_expert, const int32_t* seg_row0, const int32_t* seg_rows,
                                 const int32_t* num_segs, int rows_cap, int segs_cap, int experts, int k, int n, int rate2, int codebook, float limit,
                                 int32_t* fault, void* stream);
EXL3_API int exl3_fat_moe_down(const void* h2, const int64_t* down_trellis, const int64_t* down_svh, float* out, const int64_t* row_token,
                               const void* row_weight, const int32_t* seg_expert, const int32_t* seg_row0, const int32_t* seg_rows,
                               const int32_t* num_segs, int tokens, int rows_cap, int segs_cap, int experts, int k, int n, int rate2, int codebook,
                               int32_t* fault, void* stream);
EXL3_API int exl3_fat_moe_tile_rows_gateup(void);
EXL3_API int exl3_fat_moe_tile_rows_down(void);

#ifdef __cplusplus
}
#endif
