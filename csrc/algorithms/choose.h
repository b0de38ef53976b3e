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

// From this size on, what an operation moves will not be found in the caches by whoever reads it
// next, so outputs are written past them: that saves reading each line before it is written (1.2 to
// 1.7 times at 4 to 64 MiB, 2 ranks; a loss at 1 MiB). Not where the output has just been read.
inline constexpr int64_t kStreamOutputBytes = 4 << 20;

inline bool stream_output(Operation operation, int64_t bytes) {
  const bool just_read = operation == Operation::kAllReduce || operation == Operation::kReduce;
  return !just_read && bytes >= kStreamOutputBytes;
}

}  // namespace pycomm
