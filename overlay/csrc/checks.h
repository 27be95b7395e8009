// Refusals: a C function that finds its arguments wrong says so in one sentence and returns -1.
#pragma once
#include <cuda_runtime.h>
#include <cstdint>
#include "params.h"

namespace exl3 {

int refuse(const char* format, ...) __attribute__((format(printf, 1, 2)));
int launched(cudaError_t error, const char* what);  // 0, or refuse with CUDA's own words

inline bool aligned16(const void* p) { return (reinterpret_cast<uintptr_t>(p) & 15) == 0; }
inline bool known_type(int type) { return type >= 0 && type <= 2; }
int type_bytes(int type);

// Returns the instance, or null after a refusal that names what the library holds.
const Instance* require_instance(int rate2, int codebook);

}  // namespace exl3

#define EXL3_REQUIRE(condition, ...) \
  do { \
    if (!(condition)) return ::exl3::refuse(__VA_ARGS__); \
  } while (0)
#define EXL3_LAUNCH(call, what) \
  do { \
    if (::exl3::launched((call), what)) return -1; \
  } while (0)
