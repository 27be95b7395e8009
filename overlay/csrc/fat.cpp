// unit: once
// The fat symbols: EXL3's known grouped and single-expert products, under their names, over this library's kernels.
#include <cmath>

#include "abi.h"
#include "checks.h"
#include "grouped.h"

using namespace exl3;

extern "C" {

int exl3_fat_moe_tile_rows_gateup(void) { return kWideRows; }
int exl3_fat_moe_tile_rows_down(void) { return kWideRows; }

static int check_fat(const void* a, const void* packed, const void* svh, const void* out, int rows, int k, int n) {
  EXL3_REQUIRE(rows >= 0 && k > 0 && k % 128 == 0 && n > 0 && n % 128 == 0, "fat: %d rows, K %d, N %d; K and N must be multiples of 128", rows, k, n);
  EXL3_REQUIRE(rows == 0 || (a && packed && svh && out), "fat: a tensor is missing");
  EXL3_REQUIRE(aligned16(a) && aligned16(packed) && aligned16(svh) && aligned16(out), "fat: tensors must be aligned to 16 bytes");
  return 0;
}

static GemmParams fat_params(const void* a, const void* packed, float* out, const void* svh, int rows, int k, int n) {
  GemmParams p{};
  p.output = Output::store;
  p.k = k;
  p.parts = 1;
  p.part[0].trellis = static_cast<const uint8_t*>(packed);
  p.part[0].svh = static_cast<const half*>(svh);
  p.part[0].a = static_cast<const half*>(a);
  p.part[0].blocks = n / 128;
  p.part[0].columns = n;
  p.rows = rows;
  p.rows_fastest = 1;
  p.out = out;
  p.out_type = Type::f32;
  p.out_stride = n;
  return p;
}

// The tile of the fat symbols, which come without a plan: two 4-warp CTAs fit an SM only where it has more than 100 KB of shared memory.
static int fat_tile() {
  int device = 0, major = 0;
  if (cudaGetDevice(&device) != cudaSuccess || cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess) return EXL3_TILE_WIDE;
  return major < 12 ? EXL3_TILE_NARROW : EXL3_TILE_WIDE;
}

static dim3 fat_grid(int tile, int rows, int n) {
  return dim3((rows + kWideRows - 1) / kWideRows, (n + columns_of(tile) - 1) / columns_of(tile));
}

int exl3_fat_gemm(const void* a, const void* packed, float* out, const void* svh, int rows, int k, int n, int rate2, int codebook, void* stream) {
  const Instance* instance = require_instance(rate2, codebook);
  if (!instance || check_fat(a, packed, svh, out, rows, k, n)) return -1;
  if (rows == 0) return 0;
  const GemmParams p = fat_params(a, packed, out, svh, rows, k, n);
  const int tile = fat_tile();
  EXL3_LAUNCH(instance->gemm(p, tile, fat_grid(tile, rows, n), static_cast<cudaStream_t>(stream)), "fat_gemm");
  return 0;
}

int exl3_fat_gemm_scatter(const void* a, const void* packed, float* out, const void* svh, const int64_t* token_idx, const void* route_weight, int rows,
                          int tokens, int k, int n, int rate2, int codebook, int32_t* fault, void* stream) {
  const Instance* instance = require_instance(rate2, codebook);
  if (!instance || check_fat(a, packed, svh, out, rows, k, n)) return -1;
  EXL3_REQUIRE(tokens >= 0 && token_idx && route_weight, "fat_gemm_scatter: token_idx and route_weight are needed");
  if (rows == 0) return 0;
  GemmParams p = fat_params(a, packed, out, svh, rows, k, n);
  p.output = Output::scatter;
  p.row_token = token_idx;
  p.row_weight = static_cast<const half*>(route_weight);
  p.tokens = tokens;
  p.fault = fault;
  const int tile = fat_tile();
  EXL3_LAUNCH(instance->gemm(p, tile, fat_grid(tile, rows, n), static_cast<cudaStream_t>(stream)), "fat_gemm_scatter");
  return 0;
}

int exl3_fat_moe_gather(const void* x, const int64_t* row_token, const int32_t* row_expert, const int64_t* suh_ptrs, void* h13, const int32_t* num_rows,
                        int tokens, int rows_cap, int experts, int k, int32_t* fault, void* stream) {
  EXL3_REQUIRE(rows_cap >= 0 && tokens >= 0 && experts > 0 && k > 0 && k % 128 == 0, "fat_moe_gather: %d rows of %d tokens, K %d", rows_cap, tokens, k);
  EXL3_REQUIRE(x && row_token && row_expert && suh_ptrs && h13 && num_rows && aligned16(x) && aligned16(h13), "fat_moe_gather: tensors must be aligned to 16 bytes");
  if (rows_cap == 0) return 0;
  RotateParams r{};
  r.x = x;
  r.x_stride = r.x_columns = r.k = k;
  r.rows = rows_cap;
  r.x_rows = tokens;
  r.x_row_64 = row_token;
  r.row_expert = row_expert;
  r.suh_table = table<Scales>(suh_ptrs);
  r.experts = experts;
  r.live_rows = num_rows;
  r.a = static_cast<half*>(h13);
  r.fault = fault;
  EXL3_LAUNCH(launch_rotate(r, static_cast<cudaStream_t>(stream)), "fat_moe_gather");
  return 0;
}

static GemmParams fat_segments(const int32_t* seg_expert, const int32_t* seg_row0, const int32_t* seg_rows, const int32_t* num_segs, int rows_cap, int experts,
                               int32_t* fault) {
  RoutingParams r{};
  r.segment_expert = const_cast<int32_t*>(seg_expert);
  r.segment_row = const_cast<int32_t*>(seg_row0);
  r.segment_rows = const_cast<int32_t*>(seg_rows);
  r.segments = const_cast<int32_t*>(num_segs);
  GemmParams p = segment_params(r, experts, rows_cap);
  p.a_rows = rows_cap;
  p.fault = fault;
  return p;
}

static exl3_classes one_class(int rate2, int codebook) {
  exl3_classes c{};
  c.count = 1;
  c.rate2[0] = rate2;
  c.codebook[0] = codebook;
  return c;
}

static exl3_launches one_launch(int tile) {
  exl3_launches l{};
  l.count = 1;
  l.tile[0] = tile;
  l.min_rows[0] = 1;
  l.max_rows[0] = kWideRows;
  return l;
}

int exl3_fat_moe_gateup(const void* h13, const int64_t* gate_trellis, const int64_t* up_trellis, const int64_t* gate_svh, const int64_t* up_svh,
                        const int64_t* down_suh, void* h2, const int32_t* seg_expert, const int32_t* seg_row0, const int32_t* seg_rows,
                        const int32_t* num_segs, int rows_cap, int segs_cap, int experts, int k, int n, int rate2, int codebook, float limit, int32_t* fault,
                        void* stream) {
  if (!require_instance(rate2, codebook) || check_fat(h13, gate_trellis, gate_svh, h2, rows_cap, k, n)) return -1;
  EXL3_REQUIRE(up_trellis && up_svh && down_suh && seg_expert && seg_row0 && seg_rows && num_segs && experts > 0, "fat_moe_gateup: a table is missing");
  if (rows_cap == 0 || segs_cap <= 0) return 0;
  GemmParams p = fat_segments(seg_expert, seg_row0, seg_rows, num_segs, rows_cap, experts, fault);
  p.output = Output::swiglu;
  p.k = k;
  p.n = n;
  p.trellis[0] = table<Trellises>(gate_trellis);
  p.trellis[1] = table<Trellises>(up_trellis);
  p.svh[0] = table<Scales>(gate_svh);
  p.svh[1] = table<Scales>(up_svh);
  p.suh_down = table<Scales>(down_suh);
  p.a = static_cast<const half*>(h13);
  p.limit = limit > 0 ? limit : INFINITY;
  p.out = h2;
  p.out_stride = n;
  return launch_segments(p, one_class(rate2, codebook), one_launch(EXL3_TILE_WIDE), segs_cap, 0, "fat_moe_gateup", static_cast<cudaStream_t>(stream));
}

int exl3_fat_moe_down(const void* h2, const int64_t* down_trellis, const int64_t* down_svh, float* out, const int64_t* row_token, const void* row_weight,
                      const int32_t* seg_expert, const int32_t* seg_row0, const int32_t* seg_rows, const int32_t* num_segs, int tokens, int rows_cap,
                      int segs_cap, int experts, int k, int n, int rate2, int codebook, int32_t* fault, void* stream) {
  if (!require_instance(rate2, codebook) || check_fat(h2, down_trellis, down_svh, out, rows_cap, k, n)) return -1;
  EXL3_REQUIRE(row_token && row_weight && seg_expert && seg_row0 && seg_rows && num_segs && experts > 0, "fat_moe_down: a table is missing");
  if (rows_cap == 0 || segs_cap <= 0) return 0;
  GemmParams p = fat_segments(seg_expert, seg_row0, seg_rows, num_segs, rows_cap, experts, fault);
  p.output = Output::scatter;
  p.k = k;
  p.n = n;
  p.trellis[0] = table<Trellises>(down_trellis);
  p.svh[0] = table<Scales>(down_svh);
  p.a = static_cast<const half*>(h2);
  p.row_token = row_token;
  p.row_weight = static_cast<const half*>(row_weight);
  p.tokens = tokens;
  p.out = out;
  p.out_stride = n;
  return launch_segments(p, one_class(rate2, codebook), one_launch(fat_tile()), segs_cap, 0, "fat_moe_down", static_cast<cudaStream_t>(stream));
}

}  // extern "C"
