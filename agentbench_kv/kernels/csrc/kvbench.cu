// All operations in one translation unit: nvcc makes the CUDA library of it, a C++17 compiler the
// CPU library (-x c++). See kvb.h for what each function does.
#include "kvb.h"
#include "rows.h"
#ifdef KVB_DEVICE
#include "device.cuh"
#else
#include "host.h"
#endif

#include "aabb.inl"
#include "attention.inl"
#include "attention_mass.inl"
#include "compact.inl"
#include "ring_write.inl"
#include "rope_rotate.inl"
#include "select_top.inl"
#include "similarity.inl"

extern "C" void kvb_use_team(kvb_team team) {
#ifdef KVB_DEVICE
  (void)team;
#else
  kvb::team() = team;
#endif
}

extern "C" const char* kvb_error(int code) {
#ifdef KVB_DEVICE
  return cudaGetErrorString(static_cast<cudaError_t>(code));
#else
  return code ? "unknown error" : "no error";
#endif
}
