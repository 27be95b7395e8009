// unit: once
// The C ABI of dense layers: checks, workspace layout, launches. moe.cpp has that of experts.
#include "abi.h"

#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "checks.h"
#include "rows.h"
#include "workspace.h"

namespace exl3 {

static thread_local char last_error[512] = "";

int refuse(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(last_error, sizeof last_error, format, arguments);
  va_end(arguments);
  return -1;
}

int launched(cudaError_t error, const char* what) {
  return error == cudaSuccess ? 0 : refuse("%s: the launch failed: %s", what, cudaGetErrorString(error));
}

int type_bytes(int type) { return type == EXL3_F32 ? 4 : 2; }

const Instance* require_instance(int rate2, int codebook) {
  const Instance* instance = find_instance(rate2, codebook);
  if (!instance) {
    refuse("this library has no kernels for %g bits with codebook %d (0 3inst, 1 mcg, 2 mul1); it has rate2:codebook %s; build it with that rate",
           rate2 / 2.0, codebook, exl3_instances());
  }
  return instance;
}

namespace {

int check_matrix(const exl3_matrix& m, int k) {
  EXL3_REQUIRE(m.trellis && m.svh, "a matrix has no trellis or svh");
  EXL3_REQUIRE(aligned16(m.trellis) && aligned16(m.svh) && aligned16(m.suh), "trellis, suh and svh must be aligned to 16 bytes");
  EXL3_REQUIRE(k > 0 && k % 128 == 0 && m.n > 0 && m.n % 128 == 0, "K and N must be multiples of 128, here %d and %d", k, m.n);
  EXL3_REQUIRE(m.columns > 0 && m.columns <= m.n && m.columns % 4 == 0, "columns must be a multiple of 4 up to N = %d, here %d", m.n, m.columns);
  return require_instance(m.rate2, m.codebook) ? 0 : -1;
}

int check_input(const void* x, int x_type, int64_t x_stride, int x_columns, int k) {
  EXL3_REQUIRE(known_type(x_type), "x must be fp16, bf16 or fp32");
  EXL3_REQUIRE(x_columns > 0 && x_columns <= k && x_columns % 4 == 0, "x must have a multiple of 4 columns up to K = %d, here %d", k, x_columns);
  EXL3_REQUIRE(aligned16(x) && x_stride >= x_columns && x_stride * type_bytes(x_type) % 16 == 0, "rows of x must be aligned to 16 bytes");
  return 0;
}

RotateParams rotation(const exl3_gemm_args& g, const void* suh, half* a, float* a_scale) {
  RotateParams r{};
  r.x = g.x;
  r.type = static_cast<Type>(g.x_type);
  r.x_stride = g.x_stride;
  r.x_columns = g.x_columns;
  r.k = g.k;
  r.rows = r.x_rows = g.rows;
  r.suh = static_cast<const half*>(suh);
  r.a = a;
  r.a_scale = a_scale;
  return r;
}

struct GemmSpace {
  half* a;
  float *a_scale, *partial;
  int64_t bytes;
  GemmSpace(void* base, int rows, int k, int total_n, int rotations, int splits) {
    Workspace w(base);
    a = w.take<half>(static_cast<int64_t>(rotations) * rows * k);
    a_scale = w.take<float>(static_cast<int64_t>(rotations) * rows);
    partial = w.take<float>(static_cast<int64_t>(splits) * rows * total_n);
    bytes = w.bytes();
  }
};

// Fills p.part for the parts of one class, or all when instance is null; returns how many column tiles they have.
int fill_parts(GemmParams& p, const exl3_gemm_args& g, const GemmSpace& space, const Instance* instance, int streams) {
  int tiles = 0, first_block = 0, out_column = 0;
  p.parts = 0;
  for (int i = 0; i < g.parts; ++i) {
    const exl3_matrix& m = g.part[i];
    if (!instance || (m.rate2 == instance->rate2 && m.codebook == instance->codebook)) {
      Part& part = p.part[p.parts++];
      const int64_t rotation = g.shared_suh ? 0 : i;
      part.trellis = static_cast<const uint8_t*>(m.trellis);
      part.svh = static_cast<const half*>(m.svh);
      part.a = space.a + rotation * g.rows * g.k;
      part.a_scale = space.a_scale + rotation * g.rows;
      part.first_tile = tiles;
      part.first_block = first_block;
      part.blocks = m.n / 128;
      part.out_column = out_column;
      part.columns = m.columns;
      tiles += (part.blocks + streams - 1) / streams;
    }
    first_block += m.n / 128;
    out_column += m.columns;
  }
  return tiles;
}

int check_gemm(const exl3_gemm_args& g) {
  EXL3_REQUIRE(g.rows >= 0, "rows must not be negative");
  EXL3_REQUIRE(g.parts >= 1 && g.parts <= EXL3_MAX_PARTS, "a layer has 1 to %d parts, here %d", EXL3_MAX_PARTS, g.parts);
  int columns = 0;
  for (int i = 0; i < g.parts; ++i) {
    if (check_matrix(g.part[i], g.k)) return -1;
    EXL3_REQUIRE(g.part[i].suh, "part %d has no suh", i);
    columns += g.part[i].columns;
  }
  if (check_input(g.x, g.x_type, g.x_stride, g.x_columns, g.k)) return -1;
  EXL3_REQUIRE(known_type(g.out_type) && aligned16(g.out) && g.out_stride >= columns && g.out_stride % 4 == 0,
               "out must be fp16, bf16 or fp32, aligned to 16 bytes, with rows of at least %d elements and a stride in multiples of 4", columns);
  EXL3_REQUIRE(g.tile >= 0 && g.tile < 4, "tile must be 0 (thin) to 3 (narrow), here %d", g.tile);
  const int tile_rows = g.tile == EXL3_TILE_THIN ? 32 : g.tile == EXL3_TILE_HALF ? 64 : 128;
  EXL3_REQUIRE(g.row_tiles >= 1 && static_cast<int64_t>(g.row_tiles) * tile_rows >= g.rows, "%d row tiles of %d rows cannot hold %d rows", g.row_tiles,
               tile_rows, g.rows);
  EXL3_REQUIRE(g.splits >= 0 && g.splits <= g.k / 64 && g.splits <= 64, "splits must be 0 to 64 and at most K / 64, here %d", g.splits);
  return 0;
}

}  // namespace
}  // namespace exl3

using namespace exl3;

extern "C" {

int exl3_abi_version(void) { return EXL3_ABI_VERSION; }
const char* exl3_last_error(void) { return last_error; }

const char* exl3_instances(void) {
  static thread_local char text[512];
  int at = 0;
  text[0] = 0;
  for (int i = 0; const Instance* one = instance_at(i); ++i) {
    at += snprintf(text + at, sizeof text - at, "%s%d:%d", i ? " " : "", one->rate2, one->codebook);
  }
  return text;
}

int exl3_rotate(const void* x, int x_type, int64_t x_stride, int rows, int x_columns, const void* suh, int k, void* a, float* a_scale, void* stream) {
  if (rows == 0) return 0;
  EXL3_REQUIRE(rows > 0 && k > 0 && k % 128 == 0, "rotate: rows must not be negative and K a multiple of 128, here %d and %d", rows, k);
  if (check_input(x, x_type, x_stride, x_columns, k)) return -1;
  EXL3_REQUIRE(suh && a && aligned16(suh) && aligned16(a), "rotate: suh and a must be aligned to 16 bytes");
  exl3_gemm_args g{};
  g.x = x; g.x_type = x_type; g.x_stride = x_stride; g.x_columns = x_columns; g.k = k; g.rows = rows;
  EXL3_LAUNCH(launch_rotate(rotation(g, suh, static_cast<half*>(a), a_scale), static_cast<cudaStream_t>(stream)), "rotate");
  return 0;
}

int64_t exl3_gemm_workspace(int rows, int k, int total_n, int rotations, int splits) {
  return GemmSpace(nullptr, rows, k, total_n, rotations, splits).bytes;
}

int exl3_gemm(const exl3_gemm_args* args) {
  const exl3_gemm_args& g = *args;
  if (check_gemm(g)) return -1;
  if (g.rows == 0) return 0;
  const cudaStream_t stream = static_cast<cudaStream_t>(g.stream);
  int total_n = 0;
  for (int i = 0; i < g.parts; ++i) total_n += g.part[i].n;
  const int rotations = g.shared_suh ? 1 : g.parts;
  const GemmSpace space(g.workspace, g.rows, g.k, total_n, rotations, g.splits);
  EXL3_REQUIRE(g.workspace && g.workspace_bytes >= space.bytes, "the workspace has %lld bytes and needs %lld", static_cast<long long>(g.workspace_bytes),
               static_cast<long long>(space.bytes));
  for (int i = 0; i < rotations; ++i) {
    const int64_t row = static_cast<int64_t>(i) * g.rows;
    EXL3_LAUNCH(launch_rotate(rotation(g, g.part[i].suh, space.a + row * g.k, space.a_scale + row), stream), "gemm rotation");
  }
  GemmParams p{};
  p.output = g.splits ? Output::partial : Output::store;
  p.k = g.k;
  p.rows = g.rows;
  p.out = g.out;
  p.out_type = static_cast<Type>(g.out_type);
  p.out_stride = g.out_stride;
  p.partial = space.partial;
  p.partial_rows = g.rows;
  p.partial_columns = total_n;
  p.rows_fastest = 1;  // CTAs that share weights run together
  const int streams = g.tile == EXL3_TILE_NARROW ? 1 : 2;
  for (int i = 0; i < g.parts; ++i) {
    bool served = false;  // with an earlier part of the same class
    for (int j = 0; j < i; ++j) served |= g.part[j].rate2 == g.part[i].rate2 && g.part[j].codebook == g.part[i].codebook;
    if (served) continue;
    const Instance* instance = find_instance(g.part[i].rate2, g.part[i].codebook);
    const int tiles = fill_parts(p, g, space, instance, streams);
    EXL3_LAUNCH(instance->gemm(p, g.tile, dim3(g.row_tiles, tiles, g.splits ? g.splits : 1), stream), "gemm");
  }
  if (g.splits) {
    fill_parts(p, g, space, nullptr, streams);
    EXL3_LAUNCH(launch_finish_dense(p, g.splits, stream), "gemm finish");
  }
  return 0;
}

int exl3_reconstruct(const exl3_matrix* matrix, int k, int original_basis, void* out, int64_t out_stride, void* stream) {
  if (check_matrix(*matrix, k)) return -1;
  EXL3_REQUIRE(!original_basis || matrix->suh, "reconstruct: the original basis needs suh");
  EXL3_REQUIRE(out && aligned16(out) && out_stride >= matrix->n && out_stride % 8 == 0, "reconstruct: rows of out must be aligned to 16 bytes");
  const Instance* instance = find_instance(matrix->rate2, matrix->codebook);
  const half* suh = original_basis ? static_cast<const half*>(matrix->suh) : nullptr;
  EXL3_LAUNCH(instance->reconstruct(static_cast<const uint8_t*>(matrix->trellis), suh, static_cast<const half*>(matrix->svh), static_cast<half*>(out), k,
                                    matrix->n, out_stride, static_cast<cudaStream_t>(stream)),
              "reconstruct");
  return 0;
}

int exl3_finish(const float* in, const float* a_scale, const void* svh, int rows, int n, void* out, int out_type, int64_t out_stride, int columns,
                void* stream) {
  if (rows == 0) return 0;
  EXL3_REQUIRE(rows > 0 && n > 0 && n % 128 == 0 && columns > 0 && columns <= n && columns % 4 == 0, "finish: bad sizes %d x %d, %d columns", rows, n, columns);
  EXL3_REQUIRE(aligned16(in) && aligned16(out) && aligned16(svh) && known_type(out_type) && out_stride >= columns && out_stride % 4 == 0,
               "finish: in, svh and out must be aligned to 16 bytes, out fp16, bf16 or fp32");
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  if (!svh) {
    EXL3_REQUIRE(columns == n, "finish: without svh all columns are stored");
    EXL3_LAUNCH(launch_cast_rows(in, a_scale, out, static_cast<Type>(out_type), out_stride, rows, n, s), "finish");
    return 0;
  }
  GemmParams p{};
  p.parts = 1;
  p.part[0].svh = static_cast<const half*>(svh);
  p.part[0].a_scale = a_scale;
  p.part[0].columns = columns;
  p.rows = p.partial_rows = rows;
  p.partial_columns = n;
  p.partial = const_cast<float*>(in);
  p.out = out;
  p.out_type = static_cast<Type>(out_type);
  p.out_stride = out_stride;
  EXL3_LAUNCH(launch_finish_dense(p, 1, s), "finish");
  return 0;
}

}  // extern "C"
