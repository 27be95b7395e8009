// unit: once
// The torch operators, on libtorch's stable ABI: one binary for every torch from 2.10 on and every Python. They only check tensors and fill
// the structs of abi.h; exl3_vllm/kernels.py wraps them and registers their fake implementations.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <string>
#include <vector>

#include "abi.h"

// Weak, so that a torch without CUDA can still load the library and show its operators.
#pragma weak aoti_torch_get_current_cuda_stream

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;
using Integers = std::vector<int64_t>;

// A call's device and stream, and the checks that name the argument they refuse.
class Call {
 public:
  Call(const char* op, const Tensor& first) : op_(op), device_(first.get_device_index()), guard_(device_) {
    STD_TORCH_CHECK(first.is_cuda(), op_, ": the tensors must be on a CUDA device");
    STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream, op_, ": this torch has no CUDA");
    STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream(device_, &stream) == 0, op_, ": torch gave no stream for device ", device_);
  }

  const void* in(const Tensor& t, const char* name, ScalarType type, Integers shape, bool row_strides = false) const {
    check(t, name, shape, row_strides);
    STD_TORCH_CHECK(t.scalar_type() == type, op_, ": ", name, " has the wrong dtype");
    return t.data_ptr();
  }
  void* out(const Tensor& t, const char* name, ScalarType type, Integers shape, bool row_strides = false) const {
    return const_cast<void*>(in(t, name, type, shape, row_strides));
  }
  // Activations: fp16, bf16 or fp32 [rows, columns], last dimension contiguous.
  int type(const Tensor& t, const char* name) const {
    check(t, name, {-1, -1}, true);
    switch (t.scalar_type()) {
      case ScalarType::Half: return EXL3_F16;
      case ScalarType::BFloat16: return EXL3_BF16;
      case ScalarType::Float: return EXL3_F32;
      default: STD_TORCH_CHECK(false, op_, ": ", name, " must be fp16, bf16 or fp32"); return -1;
    }
  }
  void done(int result) const { STD_TORCH_CHECK(result == 0, op_, ": ", exl3_last_error()); }

  void* stream = nullptr;

 private:
  // shape: -1 takes any size. row_strides: rows may be apart, elements not.
  void check(const Tensor& t, const char* name, const Integers& shape, bool row_strides) const {
    STD_TORCH_CHECK(t.is_cuda() && t.get_device_index() == device_, op_, ": ", name, " is on another device than the first tensor");
    STD_TORCH_CHECK(t.dim() == static_cast<int64_t>(shape.size()), op_, ": ", name, " has ", t.dim(), " dimensions, not ", shape.size());
    for (size_t i = 0; i < shape.size(); ++i) {
      STD_TORCH_CHECK(shape[i] < 0 || t.size(i) == shape[i], op_, ": ", name, " has size ", t.size(i), " in dimension ", i, ", not ", shape[i]);
    }
    const bool rows = row_strides && t.dim() == 2 && (t.size(1) <= 1 || t.stride(1) == 1);
    STD_TORCH_CHECK(rows || t.is_contiguous(), op_, ": ", name, " must be contiguous");
  }

  const char* op_;
  int32_t device_;
  torch::stable::accelerator::DeviceGuard guard_;
};

// rate2 and codebook travel in one number, as in the tables of experts.
int rate2_of(int64_t code) { return static_cast<int>(code & 31); }
int codebook_of(int64_t code) { return static_cast<int>(code >> 5); }

exl3_matrix matrix(const Call& call, const Tensor& trellis, const Tensor& suh, const Tensor& svh, int64_t code, int64_t columns, int64_t k) {
  const int64_t n = svh.numel();
  exl3_matrix m{};
  m.trellis = call.in(trellis, "trellis", ScalarType::Short, {k / 16, n / 16, 8 * rate2_of(code)});
  m.suh = call.in(suh, "suh", ScalarType::Half, {k});
  m.svh = call.in(svh, "svh", ScalarType::Half, {n});
  m.n = static_cast<int32_t>(n);
  m.columns = static_cast<int32_t>(columns);
  m.rate2 = rate2_of(code);
  m.codebook = codebook_of(code);
  return m;
}

void rotate(Tensor x, Tensor suh, Tensor a, Tensor a_scale) {
  const Call call("exl3::rotate", x);
  const int type = call.type(x, "x");
  const int64_t rows = x.size(0), k = suh.numel();
  call.done(exl3_rotate(x.data_ptr(), type, x.stride(0), rows, x.size(1), call.in(suh, "suh", ScalarType::Half, {k}), k,
                        call.out(a, "a", ScalarType::Half, {rows, k}), static_cast<float*>(call.out(a_scale, "a_scale", ScalarType::Float, {rows})),
                        call.stream));
}

void gemm(Tensor x, Tensors trellis, Tensors suh, Tensors svh, Integers codes, Integers columns, bool shared_suh, Tensor out, Tensor workspace, int64_t tile,
          int64_t row_tiles, int64_t splits) {
  const Call call("exl3::gemm", x);
  const size_t parts = trellis.size();
  STD_TORCH_CHECK(parts >= 1 && parts <= EXL3_MAX_PARTS && suh.size() == parts && svh.size() == parts && codes.size() == parts && columns.size() == parts,
                  "exl3::gemm: give 1 to 4 parts, each with trellis, suh, svh, code and columns");
  exl3_gemm_args g{};
  g.x_type = call.type(x, "x");
  g.x = x.data_ptr();
  g.x_stride = x.stride(0);
  g.rows = x.size(0);
  g.x_columns = x.size(1);
  g.k = suh[0].numel();
  g.parts = parts;
  g.shared_suh = shared_suh;
  int64_t total = 0;
  for (size_t i = 0; i < parts; ++i) {
    g.part[i] = matrix(call, trellis[i], suh[i], svh[i], codes[i], columns[i], g.k);
    total += columns[i];
  }
  g.out_type = call.type(out, "out");
  STD_TORCH_CHECK(out.size(0) == x.size(0) && out.size(1) == total, "exl3::gemm: out must be [", x.size(0), ", ", total, "]");
  g.out = out.data_ptr();
  g.out_stride = out.stride(0);
  g.tile = tile;
  g.row_tiles = row_tiles;
  g.splits = splits;
  g.workspace = call.out(workspace, "workspace", ScalarType::Byte, {-1});
  g.workspace_bytes = workspace.numel();
  g.stream = call.stream;
  call.done(exl3_gemm(&g));
}

void reconstruct(Tensor trellis, Tensor suh, Tensor svh, int64_t code, bool original_basis, Tensor out) {
  const Call call("exl3::reconstruct", trellis);
  const int64_t k = suh.numel(), n = svh.numel();
  const exl3_matrix m = matrix(call, trellis, suh, svh, code, n, k);
  call.done(exl3_reconstruct(&m, k, original_basis, call.out(out, "out", ScalarType::Half, {k, n}, true), out.stride(0), call.stream));
}

void finish(Tensor in, Tensor a_scale, std::optional<Tensor> svh, Tensor out) {
  const Call call("exl3::finish", in);
  const int64_t rows = in.size(0), n = in.size(1);
  const int type = call.type(out, "out");
  STD_TORCH_CHECK(out.size(0) == rows, "exl3::finish: out must have ", rows, " rows");
  call.done(exl3_finish(static_cast<const float*>(call.in(in, "in", ScalarType::Float, {rows, n})),
                        static_cast<const float*>(call.in(a_scale, "a_scale", ScalarType::Float, {rows})),
                        svh ? call.in(*svh, "svh", ScalarType::Half, {n}) : nullptr, rows, n, out.data_ptr(), type, out.stride(0), out.size(1), call.stream));
}

exl3_classes classes(const Call& call, const std::optional<Tensor>& table, const Integers& codes, int64_t experts) {
  exl3_classes c{};
  STD_TORCH_CHECK(!codes.empty() && codes.size() <= EXL3_MAX_CLASSES, "exl3::moe: 1 to 12 pairs of rate and codebook");
  c.table = table ? static_cast<const uint8_t*>(call.in(*table, "classes", ScalarType::Byte, {experts})) : nullptr;
  c.count = codes.size();
  for (size_t i = 0; i < codes.size(); ++i) {
    c.rate2[i] = rate2_of(codes[i]);
    c.codebook[i] = codebook_of(codes[i]);
  }
  return c;
}

// tile, min_rows, max_rows of each launch
exl3_launches launches(const Integers& plan) {
  exl3_launches l{};
  STD_TORCH_CHECK(plan.size() >= 3 && plan.size() % 3 == 0 && plan.size() / 3 <= EXL3_MAX_LAUNCHES, "exl3::moe: a launch is tile, min_rows, max_rows; at most 2");
  l.count = plan.size() / 3;
  for (int i = 0; i < l.count; ++i) {
    l.tile[i] = plan[3 * i];
    l.min_rows[i] = plan[3 * i + 1];
    l.max_rows[i] = plan[3 * i + 2];
  }
  return l;
}

// pointers: int64 [10 or 7, experts] of gate, up, down trellis; gate, up, down svh; down suh; and, without a shared suh, gate suh, up suh.
void moe(Tensor x, Tensor topk_ids, Tensor topk_weights, std::optional<Tensor> suh, Tensor pointers, std::optional<Tensor> classes_gate_up,
         std::optional<Tensor> classes_down, Integers codes_gate_up, Integers codes_down, int64_t inter, double limit, int64_t segment_rows,
         int64_t splits_gate_up, int64_t splits_down, Integers launch_gate_up, Integers launch_down, int64_t phases, Tensor out, Tensor workspace) {
  const Call call("exl3::moe", x);
  exl3_moe_args m{};
  m.x_type = call.type(x, "x");
  m.x = x.data_ptr();
  m.x_stride = x.stride(0);
  m.tokens = x.size(0);
  m.hidden = x.size(1);
  m.inter = inter;
  STD_TORCH_CHECK(topk_ids.dim() == 2 && pointers.dim() == 2, "exl3::moe: topk_ids and pointers have two dimensions");
  m.topk = topk_ids.size(1);
  m.experts = pointers.size(1);
  m.topk_ids = static_cast<const int32_t*>(call.in(topk_ids, "topk_ids", ScalarType::Int, {m.tokens, m.topk}));
  m.topk_weights = static_cast<const float*>(call.in(topk_weights, "topk_weights", ScalarType::Float, {m.tokens, m.topk}));
  m.suh = suh ? call.in(*suh, "suh", ScalarType::Half, {m.hidden}) : nullptr;
  const int64_t* table = static_cast<const int64_t*>(call.in(pointers, "pointers", ScalarType::Long, {suh ? 7 : 9, m.experts}));
  const auto row = [&](int i) { return table + static_cast<int64_t>(i) * m.experts; };
  m.gate_trellis = row(0);
  m.up_trellis = row(1);
  m.down_trellis = row(2);
  m.gate_svh = row(3);
  m.up_svh = row(4);
  m.down_svh = row(5);
  m.down_suh = row(6);
  m.gate_suh = suh ? nullptr : row(7);
  m.up_suh = suh ? nullptr : row(8);
  m.gate_up = classes(call, classes_gate_up, codes_gate_up, m.experts);
  m.down = classes(call, classes_down, codes_down, m.experts);
  m.limit = limit;
  m.out_type = call.type(out, "out");
  STD_TORCH_CHECK(out.size(0) == m.tokens && out.size(1) == m.hidden, "exl3::moe: out must be [", m.tokens, ", ", m.hidden, "]");
  m.out = out.data_ptr();
  m.out_stride = out.stride(0);
  m.segment_rows = segment_rows;
  m.splits_gate_up = splits_gate_up;
  m.splits_down = splits_down;
  m.launch_gate_up = launches(launch_gate_up);
  m.launch_down = launches(launch_down);
  m.phases = phases;
  m.workspace = call.out(workspace, "workspace", ScalarType::Byte, {-1});
  m.workspace_bytes = workspace.numel();
  m.stream = call.stream;
  call.done(exl3_moe(&m));
}

// The fat symbols take EXL3's own two flags; neither set means 3inst.
int codebook_of(const char* op, bool mcg, bool mul1) {
  STD_TORCH_CHECK(!(mcg && mul1), op, ": a tensor is mcg or mul1, not both");
  return mcg ? 1 : mul1 ? 2 : 0;
}
int32_t* fault_of(const Call& call, const std::optional<Tensor>& fault) {
  return fault ? static_cast<int32_t*>(call.out(*fault, "fault", ScalarType::Int, {1})) : nullptr;
}

void fat_gemm(Tensor a, Tensor packed, Tensor out, Tensor svh, int64_t K, bool mcg, bool mul1) {
  const Call call("exl3_fat_gemm", a);
  STD_TORCH_CHECK(a.dim() == 2, "exl3_fat_gemm: a must be [M, K]");
  const int64_t rows = a.size(0), k = a.size(1), n = svh.numel();
  call.done(exl3_fat_gemm(call.in(a, "a", ScalarType::Half, {rows, k}), call.in(packed, "packed", ScalarType::Short, {k / 16, n / 16, 16 * K}),
                          static_cast<float*>(call.out(out, "out", ScalarType::Float, {rows, n})), call.in(svh, "svh", ScalarType::Half, {n}), rows, k, n, 2 * K,
                          codebook_of("exl3_fat_gemm", mcg, mul1), call.stream));
}

void fat_gemm_scatter(Tensor a, Tensor packed, Tensor out, Tensor svh, Tensor token_idx, Tensor route_weight, int64_t K, bool mcg, bool mul1,
                      std::optional<Tensor> fault) {
  const Call call("exl3_fat_gemm_scatter", a);
  STD_TORCH_CHECK(a.dim() == 2 && out.dim() == 2, "exl3_fat_gemm_scatter: a must be [M, K] and out [T, N]");
  const int64_t rows = a.size(0), k = a.size(1), n = svh.numel(), tokens = out.size(0);
  call.done(exl3_fat_gemm_scatter(call.in(a, "a", ScalarType::Half, {rows, k}), call.in(packed, "packed", ScalarType::Short, {k / 16, n / 16, 16 * K}),
                                  static_cast<float*>(call.out(out, "out", ScalarType::Float, {tokens, n})), call.in(svh, "svh", ScalarType::Half, {n}),
                                  static_cast<const int64_t*>(call.in(token_idx, "token_idx", ScalarType::Long, {rows})),
                                  call.in(route_weight, "route_weight", ScalarType::Half, {rows}), rows, tokens, k, n, 2 * K,
                                  codebook_of("exl3_fat_gemm_scatter", mcg, mul1), fault_of(call, fault), call.stream));
}

const int64_t* pointer_table(const Call& call, const Tensor& t, const char* name, int64_t experts) {
  return static_cast<const int64_t*>(call.in(t, name, ScalarType::Long, {experts}));
}
const int32_t* integers(const Call& call, const Tensor& t, const char* name, int64_t count) {
  return static_cast<const int32_t*>(call.in(t, name, ScalarType::Int, {count}));
}

void fat_moe_gather(Tensor x, Tensor row_token, Tensor row_expert, Tensor suh_ptrs, Tensor h13, Tensor num_rows, std::optional<Tensor> fault) {
  const Call call("exl3_fat_moe_gather", x);
  STD_TORCH_CHECK(x.dim() == 2 && h13.dim() == 2, "exl3_fat_moe_gather: x must be [tokens, K] and h13 [rows, K]");
  const int64_t tokens = x.size(0), k = x.size(1), rows = h13.size(0), experts = suh_ptrs.numel();
  call.done(exl3_fat_moe_gather(call.in(x, "x", ScalarType::Half, {tokens, k}),
                                static_cast<const int64_t*>(call.in(row_token, "row_token", ScalarType::Long, {rows})),
                                integers(call, row_expert, "row_expert", rows), pointer_table(call, suh_ptrs, "suh_ptrs", experts),
                                call.out(h13, "h13", ScalarType::Half, {rows, k}), integers(call, num_rows, "num_rows", 1), tokens, rows, experts, k,
                                fault_of(call, fault), call.stream));
}

void fat_moe_gateup(Tensor h13, Tensor gate_trellis, Tensor up_trellis, Tensor gate_svh, Tensor up_svh, Tensor down_suh, Tensor h2, Tensor seg_expert,
                    Tensor seg_row0, Tensor seg_rows, Tensor num_segs, double limit, int64_t K, bool mcg, bool mul1, std::optional<Tensor> fault) {
  const Call call("exl3_fat_moe_gateup", h13);
  STD_TORCH_CHECK(h13.dim() == 2 && h2.dim() == 2, "exl3_fat_moe_gateup: h13 must be [rows, K] and h2 [rows, N]");
  const int64_t rows = h13.size(0), k = h13.size(1), n = h2.size(1), experts = gate_trellis.numel(), segments = seg_expert.numel();
  call.done(exl3_fat_moe_gateup(call.in(h13, "h13", ScalarType::Half, {rows, k}), pointer_table(call, gate_trellis, "gate_trellis", experts),
                                pointer_table(call, up_trellis, "up_trellis", experts), pointer_table(call, gate_svh, "gate_svh", experts),
                                pointer_table(call, up_svh, "up_svh", experts), pointer_table(call, down_suh, "down_suh", experts),
                                call.out(h2, "h2", ScalarType::Half, {rows, n}), integers(call, seg_expert, "seg_expert", segments),
                                integers(call, seg_row0, "seg_row0", segments), integers(call, seg_rows, "seg_rows", segments),
                                integers(call, num_segs, "num_segs", 1), rows, segments, experts, k, n, 2 * K,
                                codebook_of("exl3_fat_moe_gateup", mcg, mul1), limit, fault_of(call, fault), call.stream));
}

void fat_moe_down(Tensor h2, Tensor down_trellis, Tensor down_svh, Tensor out, Tensor row_token, Tensor row_weight, Tensor seg_expert, Tensor seg_row0,
                  Tensor seg_rows, Tensor num_segs, int64_t K, bool mcg, bool mul1, std::optional<Tensor> fault) {
  const Call call("exl3_fat_moe_down", h2);
  STD_TORCH_CHECK(h2.dim() == 2 && out.dim() == 2, "exl3_fat_moe_down: h2 must be [rows, K] and out [T, N]");
  const int64_t rows = h2.size(0), k = h2.size(1), tokens = out.size(0), n = out.size(1), experts = down_trellis.numel(), segments = seg_expert.numel();
  call.done(exl3_fat_moe_down(call.in(h2, "h2", ScalarType::Half, {rows, k}), pointer_table(call, down_trellis, "down_trellis", experts),
                              pointer_table(call, down_svh, "down_svh", experts), static_cast<float*>(call.out(out, "out", ScalarType::Float, {tokens, n})),
                              static_cast<const int64_t*>(call.in(row_token, "row_token", ScalarType::Long, {rows})),
                              call.in(row_weight, "row_weight", ScalarType::Half, {rows}), integers(call, seg_expert, "seg_expert", segments),
                              integers(call, seg_row0, "seg_row0", segments), integers(call, seg_rows, "seg_rows", segments),
                              integers(call, num_segs, "num_segs", 1), tokens, rows, segments, experts, k, n, 2 * K,
                              codebook_of("exl3_fat_moe_down", mcg, mul1), fault_of(call, fault), call.stream));
}

}  // namespace

// A fragment: exl3_vllm registers operators of its own in the same namespace.
STABLE_TORCH_LIBRARY_FRAGMENT(exl3, m) {
  m.def("rotate(Tensor x, Tensor suh, Tensor(a!) a, Tensor(b!) a_scale) -> ()");
  m.def("gemm(Tensor x, Tensor[] trellis, Tensor[] suh, Tensor[] svh, int[] codes, int[] columns, bool shared_suh, Tensor(a!) out, "
        "Tensor(b!) workspace, int tile, int row_tiles, int splits) -> ()");
  m.def("reconstruct(Tensor trellis, Tensor suh, Tensor svh, int code, bool original_basis, Tensor(a!) out) -> ()");
  m.def("finish(Tensor x, Tensor a_scale, Tensor? svh, Tensor(a!) out) -> ()");
  m.def("moe(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor? suh, Tensor pointers, Tensor? classes_gate_up, Tensor? classes_down, "
        "int[] codes_gate_up, int[] codes_down, int inter, float limit, int segment_rows, int splits_gate_up, int splits_down, "
        "int[] launch_gate_up, int[] launch_down, int phases, Tensor(a!) out, Tensor(b!) workspace) -> ()");
  m.def("exl3_fat_gemm(Tensor a, Tensor packed, Tensor(a!) out, Tensor svh, int K, bool mcg, bool mul1) -> ()");
  m.def("exl3_fat_gemm_scatter(Tensor a, Tensor packed, Tensor(a!) out, Tensor svh, Tensor token_idx, Tensor route_weight, int K, bool mcg, "
        "bool mul1, Tensor(b!)? fault=None) -> ()");
  m.def("exl3_fat_moe_gather(Tensor x, Tensor row_token, Tensor row_expert, Tensor suh_ptrs, Tensor(a!) h13, Tensor num_rows, Tensor(b!)? fault=None) -> ()");
  m.def("exl3_fat_moe_gateup(Tensor h13, Tensor gate_trellis, Tensor up_trellis, Tensor gate_svh, Tensor up_svh, Tensor down_suh, Tensor(a!) h2, "
        "Tensor seg_expert, Tensor seg_row0, Tensor seg_rows, Tensor num_segs, float limit, int K=4, bool mcg=True, bool mul1=False, "
        "Tensor(b!)? fault=None) -> ()");
  m.def("exl3_fat_moe_down(Tensor h2, Tensor down_trellis, Tensor down_svh, Tensor(a!) out, Tensor row_token, Tensor row_weight, Tensor seg_expert, "
        "Tensor seg_row0, Tensor seg_rows, Tensor num_segs, int K=4, bool mcg=True, bool mul1=False, Tensor(b!)? fault=None) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(exl3, CUDA, m) {
  m.impl("rotate", TORCH_BOX(&rotate));
  m.impl("gemm", TORCH_BOX(&gemm));
  m.impl("reconstruct", TORCH_BOX(&reconstruct));
  m.impl("finish", TORCH_BOX(&finish));
  m.impl("moe", TORCH_BOX(&moe));
  m.impl("exl3_fat_gemm", TORCH_BOX(&fat_gemm));
  m.impl("exl3_fat_gemm_scatter", TORCH_BOX(&fat_gemm_scatter));
  m.impl("exl3_fat_moe_gather", TORCH_BOX(&fat_moe_gather));
  m.impl("exl3_fat_moe_gateup", TORCH_BOX(&fat_moe_gateup));
  m.impl("exl3_fat_moe_down", TORCH_BOX(&fat_moe_down));
}
