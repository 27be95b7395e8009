#pragma once
// Each compiled (rate, codebook) adds itself when the library is loaded, so the dispatcher needs no list of them.
using Launch = int (*)(const float* in, float* out, int count, void* stream);

struct Instance {
  Instance(int rate2, int codebook, Launch launch);
  int rate2, codebook;
  Launch launch;
  Instance* next;
};
