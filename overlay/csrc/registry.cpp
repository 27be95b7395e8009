// unit: once
// The instances that this library was built with. gemm.cu's objects add themselves when the library is loaded.
#include "params.h"

namespace exl3 {
namespace {
struct Table {
  Instance instance[40];  // 11 rates x 3 codebooks
  int count = 0;
};
Table& table() {
  static Table t;  // a function's static: registration runs before this file's own initialisers may have
  return t;
}
}  // namespace

void register_instance(const Instance& instance) {
  if (table().count < 40) table().instance[table().count++] = instance;
}

const Instance* find_instance(int rate2, int codebook) {
  for (int i = 0; i < table().count; ++i) {
    if (table().instance[i].rate2 == rate2 && table().instance[i].codebook == codebook) return &table().instance[i];
  }
  return nullptr;
}

const Instance* instance_at(int index) { return index < table().count ? &table().instance[index] : nullptr; }

}  // namespace exl3
