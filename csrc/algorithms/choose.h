// Which algorithm a message takes: the one table of thresholds.
//
// Measured with benchmarks/collectives.py on 2 and 4 ranks; README records the machine.
#pragma once

#include <cstdint>

#include "../common.h"

namespace pycomm {

struct Threshold {
  int64_t up_to_bytes;
  Algorithm algorithm;
};

inline constexpr Threshold kAllReduceThresholds[] = {
    {32 << 10, Algorithm::kOneShot},
    {INT64_MAX, Algorithm::kTwoShot},
};

inline Algorithm choose_all_reduce(Algorithm asked, int64_t bytes) {
  if (asked != Algorithm::kAuto) return asked;
  for (const Threshold& threshold : kAllReduceThresholds)
    if (bytes <= threshold.up_to_bytes) return threshold.algorithm;
  return Algorithm::kTwoShot;
}

}  // namespace pycomm
