// unit: once
// The C ABI of mixture-of-experts layers and the fat symbols: checks, workspace layout, launches.
#include <cmath>

#include "abi.h"
#include "checks.h"
#include "rows.h"
#include "workspace.h"

namespace exl3 {
namespace {

constexpr int kWideRows = 128;

struct MoeSpace {
  RoutingParams routing{};
  half *a, *a_up, *h, *rows;
  float *a_scale, *a_up_scale, *partial_gate_up, *partial_down;
  int64_t bytes;

  MoeSpace(void* base, int tokens, int topk, int experts, int hidden, int inter, int segment_rows, bool shared_suh, int splits_gate_up, int splits_down) {
    Workspace w(base);
    const int64_t slots = static_cast<int64_t>(tokens) * topk, segments = routing_max_segments(slots, experts, segment_rows);
    routing.counts = w.take<int32_t>(static_cast<int64_t>(routing_chunks(slots)) * experts);
    routing.expert_row = w.take<int32_t>(experts + 1);
    routing.row_token = w.take<int32_t>(slots);
    routing.row_expert = w.take<int32_t>(slots);
    routing.slot_row = w.take<int32_t>(slots);
    routing.segment_expert = w.take<int32_t>(segments);
    routing.segment_row = w.take<int32_t>(segments);
    routing.segment_rows = w.take<int32_t>(segments);
    routing.segments = w.take<int32_t>(1);
    routing.live_rows = w.take<int32_t>(1);
    const int64_t a_rows = shared_suh ? tokens : slots;
    a = w.take<half>(a_rows * hidden);
    a_scale = w.take<float>(a_rows);
    a_up = shared_suh ? nullptr : w.take<half>(a_rows * hidden);
    a_up_scale = shared_suh ? nullptr : w.take<float>(a_rows);
    h = w.take<half>(slots * inter);
    partial_gate_up = splits_gate_up ? w.take<float>(splits_gate_up * slots * 2 * inter) : nullptr;
    partial_down = splits_down ? w.take<float>(splits_down * slots * hidden) : nullptr;
    rows = splits_down ? nullptr : w.take<half>(slots * hidden);
    bytes = w.bytes();
  }
};

int check_launches(const exl3_launches& l, const char* phase) {
  EXL3_REQUIRE(l.count >= 1 && l.count <= EXL3_MAX_LAUNCHES, "moe %s: 1 or %d launches, here %d", phase, EXL3_MAX_LAUNCHES, l.count);
  for (int i = 0; i < l.count; ++i) {
    const int tile_rows = l.tile[i] == EXL3_TILE_THIN ? 32 : l.tile[i] == EXL3_TILE_HALF ? 64 : kWideRows;
    EXL3_REQUIRE(l.tile[i] >= 0 && l.tile[i] <= EXL3_TILE_NARROW, "moe %s: tile must be 0 (thin) to 3 (narrow), here %d", phase, l.tile[i]);
    EXL3_REQUIRE(l.max_rows[i] <= tile_rows, "moe %s: tile %d serves segments of up to %d rows, here %d", phase, l.tile[i], tile_rows, l.max_rows[i]);
  }
  return 0;
}

int check_classes(const exl3_classes& c, const char* phase) {
  EXL3_REQUIRE(c.count >= 1 && c.count <= EXL3_MAX_CLASSES, "moe %s: 1 to %d pairs of rate and codebook, here %d", phase, EXL3_MAX_CLASSES, c.count);
  EXL3_REQUIRE(c.count == 1 || c.table, "moe %s: several rates need the table of experts", phase);
  for (int i = 0; i < c.count; ++i) {
    if (!require_instance(c.rate2[i], c.codebook[i])) return -1;
  }
  return 0;
}

int check_moe(const exl3_moe_args& m) {
  EXL3_REQUIRE(m.tokens >= 0 && m.topk >= 1 && m.experts >= 1 && m.experts <= EXL3_MAX_EXPERTS,
               "moe: %d tokens, top-%d of %d experts; at most %d experts", m.tokens, m.topk, m.experts, EXL3_MAX_EXPERTS);
  EXL3_REQUIRE(m.hidden > 0 && m.hidden % 128 == 0 && m.inter > 0 && m.inter % 128 == 0, "moe: hidden %d and intermediate %d must be multiples of 128",
               m.hidden, m.inter);
  EXL3_REQUIRE(static_cast<int64_t>(m.tokens) * m.topk <= (1 << 24), "moe: %d tokens x top-%d are too many rows for one call", m.tokens, m.topk);
  EXL3_REQUIRE(known_type(m.x_type) && aligned16(m.x) && m.x_stride >= m.hidden && m.x_stride * type_bytes(m.x_type) % 16 == 0,
               "moe: x must be fp16, bf16 or fp32 with rows aligned to 16 bytes");
  EXL3_REQUIRE(known_type(m.out_type) && aligned16(m.out) && m.out_stride >= m.hidden && m.out_stride % 8 == 0,
               "moe: out must be fp16, bf16 or fp32 with rows aligned to 16 bytes");
  EXL3_REQUIRE(m.topk_ids && m.topk_weights && m.gate_trellis && m.up_trellis && m.down_trellis && m.gate_svh && m.up_svh && m.down_svh && m.down_suh,
               "moe: a routing array or a table of weights is missing");
  EXL3_REQUIRE(m.suh || (m.gate_suh && m.up_suh), "moe: give one suh, or the tables of gate's and up's");
  EXL3_REQUIRE(m.suh || m.splits_gate_up > 0, "moe: gate and up with suh of their own go through sums in the workspace: splits_gate_up must be at least 1");
  EXL3_REQUIRE(m.segment_rows >= 16 && m.segment_rows <= kWideRows && m.segment_rows % 16 == 0, "moe: segment_rows must be 16 to 128 in steps of 16, here %d",
               m.segment_rows);
  EXL3_REQUIRE(m.splits_gate_up >= 0 && m.splits_gate_up <= m.hidden / 64 && m.splits_down >= 0 && m.splits_down <= m.inter / 64,
               "moe: splits %d of K %d and %d of K %d", m.splits_gate_up, m.hidden, m.splits_down, m.inter);
  if (check_launches(m.launch_gate_up, "gate_up") || check_launches(m.launch_down, "down")) return -1;
  for (int i = 0; i < m.launch_gate_up.count; ++i) {
    EXL3_REQUIRE(m.launch_gate_up.tile[i] != EXL3_TILE_NARROW, "moe gate_up: a tile holds 128 columns of gate and of up, which narrow does not");
  }
  return check_classes(m.gate_up, "gate_up") || check_classes(m.down, "down") ? -1 : 0;
}

int columns_of(int tile) { return tile == EXL3_TILE_NARROW ? 128 : 256; }

// Every class times every tile class, over all segments; CTAs whose segment belongs to another launch return at once.
int launch_segments(GemmParams p, const exl3_classes& classes, const exl3_launches& launches, int segments, int splits, const char* what, cudaStream_t stream) {
  p.expert_class = classes.count > 1 ? classes.table : nullptr;
  for (int c = 0; c < classes.count; ++c) {
    const Instance* instance = find_instance(classes.rate2[c], classes.codebook[c]);
    for (int i = 0; i < launches.count; ++i) {
      p.min_rows = launches.min_rows[i];
      p.max_rows = launches.max_rows[i];
      p.beside = c > 0 || i > 0;
      const int columns = p.trellis[1] ? 128 : columns_of(launches.tile[i]);
      EXL3_LAUNCH(instance->gemm(p, launches.tile[i], dim3((p.n + columns - 1) / columns, segments, splits ? splits : 1), stream), what);
    }
  }
  return 0;
}

template <typename T>
T table(const int64_t* pointers) { return reinterpret_cast<T>(pointers); }
using Trellises = const uint8_t* const*;
using Scales = const half* const*;

GemmParams segment_params(const RoutingParams& r, int experts, int slots) {
  GemmParams p{};
  p.segment_expert = r.segment_expert;
  p.segment_row = r.segment_row;
  p.segment_rows = r.segment_rows;
  p.segments = r.segments;
  p.experts = experts;
  p.sorted_rows = slots;
  return p;
}

RotateParams token_rotation(const exl3_moe_args& m, const MoeSpace& space) {
  RotateParams r{};
  r.x = m.x;
  r.type = static_cast<Type>(m.x_type);
  r.x_stride = m.x_stride;
  r.x_columns = r.k = m.hidden;
  r.rows = r.x_rows = m.tokens;
  r.experts = m.experts;
  r.suh = static_cast<const half*>(m.suh);
  r.a = space.a;
  r.a_scale = space.a_scale;
  return r;
}

// Routing, and the rotation of every token (one suh) or of every routed row for gate and again for up.
int prepare(const exl3_moe_args& m, MoeSpace& space, int slots, cudaStream_t stream) {
  RoutingParams& routing = space.routing;
  routing.topk_ids = m.topk_ids;
  routing.tokens = m.tokens;
  routing.topk = m.topk;
  routing.experts = m.experts;
  routing.max_segment_rows = m.segment_rows;
  RotateParams r = token_rotation(m, space);
  const bool route = m.phases & 1, rotate = m.phases & 2;
  if (route) EXL3_LAUNCH(launch_routing(routing, m.suh && rotate ? &r : nullptr, stream), "moe routing");
  if (!rotate || (route && m.suh)) return 0;
  if (m.suh) {
    EXL3_LAUNCH(launch_rotate(r, stream), "moe rotation");
    return 0;
  }
  r.rows = slots;
  r.x_row = routing.row_token;
  r.row_expert = routing.row_expert;
  r.live_rows = routing.live_rows;
  for (int up = 0; up < 2; ++up) {
    r.suh_table = table<Scales>(up ? m.up_suh : m.gate_suh);
    r.a = up ? space.a_up : space.a;
    r.a_scale = up ? space.a_up_scale : space.a_scale;
    EXL3_LAUNCH(launch_rotate(r, stream), "moe rotation");
  }
  return 0;
}

int gate_up(const exl3_moe_args& m, const MoeSpace& space, int slots, int segments, cudaStream_t stream) {
  GemmParams p = segment_params(space.routing, m.experts, slots);
  p.k = m.hidden;
  p.n = m.inter;
  p.trellis[0] = table<Trellises>(m.gate_trellis);
  p.trellis[1] = table<Trellises>(m.up_trellis);
  p.svh[0] = table<Scales>(m.gate_svh);
  p.svh[1] = table<Scales>(m.up_svh);
  p.suh_down = table<Scales>(m.down_suh);
  p.a = space.a;
  p.a_scale = space.a_scale;
  p.a_row = m.suh ? space.routing.row_token : nullptr;
  p.a_rows = m.suh ? m.tokens : slots;
  p.limit = m.limit > 0 ? m.limit : INFINITY;
  p.out = space.h;
  p.out_stride = m.inter;
  p.partial = space.partial_gate_up;
  p.partial_rows = slots;
  p.partial_columns = 2 * m.inter;
  p.output = m.splits_gate_up ? Output::partial : Output::swiglu;
  if (m.suh) {
    if (launch_segments(p, m.gate_up, m.launch_gate_up, segments, m.splits_gate_up, "moe gate_up", stream)) return -1;
  } else {
    GemmParams one = p;
    one.trellis[1] = nullptr;
    if (launch_segments(one, m.gate_up, m.launch_gate_up, segments, m.splits_gate_up, "moe gate", stream)) return -1;
    one.trellis[0] = p.trellis[1];
    one.a = space.a_up;
    one.partial_column0 = m.inter;
    if (launch_segments(one, m.gate_up, m.launch_gate_up, segments, m.splits_gate_up, "moe up", stream)) return -1;
  }
  if (m.splits_gate_up) {
    EXL3_LAUNCH(launch_finish_swiglu(p, m.splits_gate_up, space.routing.row_expert, space.routing.live_rows, space.a_up_scale, space.h, stream), "moe swiglu");
  }
  return 0;
}

int down(const exl3_moe_args& m, const MoeSpace& space, int slots, int segments, cudaStream_t stream) {
  GemmParams p = segment_params(space.routing, m.experts, slots);
  p.k = m.inter;
  p.n = m.hidden;
  p.trellis[0] = table<Trellises>(m.down_trellis);
  p.a = space.h;
  p.a_rows = slots;
  p.partial = space.partial_down;
  p.partial_half = space.rows;
  p.partial_rows = slots;
  p.partial_columns = m.hidden;
  p.output = Output::partial;
  return launch_segments(p, m.down, m.launch_down, segments, m.splits_down, "moe down", stream);
}

int combine(const exl3_moe_args& m, const MoeSpace& space, int slots, cudaStream_t stream) {
  CombineParams c{};
  c.partial_half = space.rows;
  c.partial = space.partial_down;
  c.splits = m.splits_down;
  c.sorted_rows = slots;
  c.svh = table<Scales>(m.down_svh);
  c.topk_ids = m.topk_ids;
  c.topk_weights = m.topk_weights;
  c.slot_row = space.routing.slot_row;
  c.tokens = m.tokens;
  c.topk = m.topk;
  c.n = m.hidden;
  c.out = m.out;
  c.out_type = static_cast<Type>(m.out_type);
  c.out_stride = m.out_stride;
  EXL3_LAUNCH(launch_combine(c, stream), "moe combine");
  return 0;
}

}  // namespace
}  // namespace exl3

using namespace exl3;

extern "C" {

int64_t exl3_moe_workspace(int tokens, int topk, int experts, int hidden, int inter, int segment_rows, int shared_suh, int splits_gate_up, int splits_down) {
  return MoeSpace(nullptr, tokens, topk, experts, hidden, inter, segment_rows, shared_suh, splits_gate_up, splits_down).bytes;
}

int exl3_moe(const exl3_moe_args* args) {
  const exl3_moe_args& m = *args;
  if (check_moe(m)) return -1;
  if (m.tokens == 0) return 0;
  MoeSpace space(m.workspace, m.tokens, m.topk, m.experts, m.hidden, m.inter, m.segment_rows, m.suh, m.splits_gate_up, m.splits_down);
  EXL3_REQUIRE(m.workspace && m.workspace_bytes >= space.bytes, "moe: the workspace has %lld bytes and needs %lld", static_cast<long long>(m.workspace_bytes),
               static_cast<long long>(space.bytes));
  const cudaStream_t stream = static_cast<cudaStream_t>(m.stream);
  const int slots = m.tokens * m.topk, segments = routing_max_segments(slots, m.experts, m.segment_rows);
  if (prepare(m, space, slots, stream)) return -1;
  if (m.phases & 4 && gate_up(m, space, slots, segments, stream)) return -1;
  if (m.phases & 8 && down(m, space, slots, segments, stream)) return -1;
  if (m.phases & 16 && combine(m, space, slots, stream)) return -1;
  return 0;
}

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
