#pragma once
#define EXL3_ABI_VERSION 1
#define EXL3_API extern "C" __attribute__((visibility("default")))
