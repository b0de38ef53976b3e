// Arithmetic on arrays: reduce and copy. No waiting, no torch. The CPU version is chosen once, by
// what the processor can do (AVX-512, AVX2 + F16C, or plain x86-64 / other); all give the same
// bits.
#pragma once

#include <cstdint>

#include "../common.h"

namespace pycomm {

// result[i] = finish(sources[0][i] op sources[1][i] op ... ), in that order, accumulated without
// rounding to the element type (dispatch.h: Accumulator) and rounded once. A destination may be one
// of the sources.
struct ReduceCall {
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  int divisor = 1;  // of kAvg
  int64_t count = 0;

  const void* const* sources = nullptr;
  int num_sources = 0;
  bool first_is_partial = false;  // sources[0] holds accumulators rather than elements
  // One per source, of kPremulSum: the sum of scales[s] * sources[s], with scales and products in
  // the accumulators' type. A partial first source is not scaled.
  const double* scales = nullptr;

  void* slot = nullptr;         // destination 1, may be null
  bool stream_to_slot = false;  // write it past the caches; it must be 64-byte aligned then
  void* output = nullptr;       // destination 2, may be null
  bool leave_partial =
      false;  // `slot` receives accumulators, nothing is divided or rounded; `output` must be null
};
// Throws kInvalidArgument for a pair that can_reduce excludes, a complex type (see real_view) and
// missing scales.
void reduce(const ReduceCall& call);

// Copies without looking; `stream` writes past the caches. The two must not overlap.
void copy(void* destination, const void* source, int64_t bytes, bool stream);

// The instruction set in use: "avx512", "avx2" or "generic". set_ returns false if this machine
// lacks it (for tests: from then on every copy is ours).
const char* instruction_set();
bool set_instruction_set(const char* name);

}  // namespace pycomm
