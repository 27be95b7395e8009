// What moe.cpp and fat.cpp share: tables of experts, and launches over segments.
#pragma once
#include "abi.h"
#include "checks.h"
#include "rows.h"

namespace exl3 {

constexpr int kWideRows = 128;  // the longest segment that a tile class serves

inline int columns_of(int tile) { return tile == EXL3_TILE_NARROW ? 128 : 256; }

// Every class times every tile class, over all segments; CTAs whose segment belongs to another launch return at once.
inline int launch_segments(GemmParams p, const exl3_classes& classes, const exl3_launches& launches, int segments, int splits, const char* what, cudaStream_t stream) {
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

inline GemmParams segment_params(const RoutingParams& r, int experts, int slots) {
  GemmParams p{};
  p.segment_expert = r.segment_expert;
  p.segment_row = r.segment_row;
  p.segment_rows = r.segment_rows;
  p.segments = r.segments;
  p.experts = experts;
  p.sorted_rows = slots;
  return p;
}

}  // namespace exl3
