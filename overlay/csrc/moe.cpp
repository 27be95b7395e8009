// unit: once
// The C ABI of mixture-of-experts layers: checks, workspace layout, launches.
#include <cmath>

#include "abi.h"
#include "checks.h"
#include "grouped.h"
#include "rows.h"
#include "workspace.h"

namespace exl3 {
namespace {

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

}  // extern "C"
