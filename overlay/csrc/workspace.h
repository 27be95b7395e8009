// Cuts one caller-provided buffer into arrays. With a null base it only counts.
#pragma once
#include <cstdint>

namespace exl3 {

class Workspace {
 public:
  explicit Workspace(void* base) : base_(static_cast<unsigned char*>(base)) {}

  template <typename T>
  T* take(int64_t count) {
    T* at = base_ ? reinterpret_cast<T*>(base_ + used_) : nullptr;
    used_ += (count * static_cast<int64_t>(sizeof(T)) + 255) / 256 * 256;
    return at;
  }
  int64_t bytes() const { return used_; }

 private:
  unsigned char* base_;
  int64_t used_ = 0;
};

}  // namespace exl3
