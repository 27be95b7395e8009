// unit: once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

static int64_t elements(const torch::stable::Tensor& tensor) { return tensor.numel(); }

STABLE_TORCH_LIBRARY(exl3_specimen, library) { library.def("elements(Tensor tensor) -> int"); }
STABLE_TORCH_LIBRARY_IMPL(exl3_specimen, CPU, library) { library.impl("elements", TORCH_BOX(&elements)); }
