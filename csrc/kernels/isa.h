// What the per-instruction-set files of the CPU kernels share: declarations, and 16-bit floats
// without hardware.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "codec.h"
#include "dispatch.h"
#include "elementwise.h"

namespace pycomm {

// IEEE binary16 by integer arithmetic; rounds to nearest, ties to even; a NaN stays quiet with its
// payload's top bits, as the hardware's conversions do.
float half_to_float(uint16_t half);
uint16_t float_to_half(float value);

#define PYCOMM_DECLARE_ISA(isa)                                                 \
  namespace isa {                                                               \
  void reduce(const ReduceCall& call);                                          \
  void copy(void* destination, const void* source, int64_t bytes, bool stream); \
  void transcode(const TranscodeCall& call);                                    \
  }
PYCOMM_DECLARE_ISA(generic)
#if defined(__x86_64__)
PYCOMM_DECLARE_ISA(avx2)
PYCOMM_DECLARE_ISA(avx512)
#endif
#undef PYCOMM_DECLARE_ISA

}  // namespace pycomm
