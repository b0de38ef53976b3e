// Which way a message takes: the one place of thresholds.
//
// `python benchmarks/thresholds.py` measures them on a machine; README records ours.
#pragma once

#include <cstdint>

#include "../common.h"

namespace pycomm {

struct Threshold {
  int64_t up_to_bytes;
  Algorithm algorithm;
};

// Lines for growing sizes; the last one that counts has no limit. PYCOMM_ALL_REDUCE brings others
// than these: rank 0's stand in the segment, so ranks cannot disagree.
inline constexpr int kMaxThresholds = 8;
struct AllReduceTable {
  Threshold lines[kMaxThresholds] = {
      {32 << 10, Algorithm::kOneShot},
      {INT64_MAX, Algorithm::kTwoShot},
  };
};

inline Algorithm choose_all_reduce(const AllReduceTable& table, int64_t bytes) {
  for (const Threshold& line : table.lines)
    if (bytes <= line.up_to_bytes) return line.algorithm;
  return Algorithm::kTwoShot;
}

// all_reduce of encoded values over NCCL, by the number of ranks and by what a rank's encoding
// takes: the first line that both fit. one_shot is one exchange and two kernels, but moves and sums
// all that all ranks have; two_shot is two exchanges and five kernels a chunk, and moves 2 (n-1)/n
// of one rank's. With some 15 us an exchange and 3 us a launch they meet near these lines, at 300
// GB/s (up to 8 ranks) and 50 GB/s; nobody has measured them on a GPU yet. ring only where it is
// asked for: it rounds world_size times, and its 3 n steps pay where exchanges of all with all run
// far below the links' speed.
struct WireThreshold {
  int up_to_ranks;
  int64_t up_to_bytes;
  Algorithm algorithm;
};

inline constexpr WireThreshold kNcclCompressedThresholds[] = {
    {2, 8 << 20, Algorithm::kOneShot},           {8, 1 << 20, Algorithm::kOneShot},
    {64, 256 << 10, Algorithm::kOneShot},        {INT32_MAX, 64 << 10, Algorithm::kOneShot},
    {INT32_MAX, INT64_MAX, Algorithm::kTwoShot},
};

inline Algorithm choose_nccl_compressed(Algorithm asked, int ranks, int64_t wire_bytes) {
  if (asked != Algorithm::kAuto) return asked;
  for (const WireThreshold& threshold : kNcclCompressedThresholds)
    if (ranks <= threshold.up_to_ranks && wire_bytes <= threshold.up_to_bytes)
      return threshold.algorithm;
  return Algorithm::kTwoShot;
}

// Flag latency between ranks above which slots are written past the caches. Where cores share no
// cache, ordinary slot writes are several times slower than streaming ones; else they are faster.
// Flags tell the two apart: 30-60 ns (near) and 185-235 ns (far) on a Zen 4, but 125-170 ns between
// cores of one Sapphire Rapids socket, where ordinary writes still win by 1.2.
inline constexpr uint32_t kFarLatencyNs = 175;

// Private tensors may be copied straight from rank to rank, where the kernel allows it. That pays
// between this flag latency and the one above. Nearer, cores share a cache, and the second copy
// through slots costs less than the system call (Zen 5, 30-60 ns: slots 2 to 3 times faster at all
// sizes, crowded or not). Sapphire Rapids, 125-170 ns: single copies up to 2 times faster. Farther,
// streaming slots win again (Zen 5, 185-235 ns: by 1.5).
inline constexpr uint32_t kSharedCacheLatencyNs = 90;

// And it pays between these sizes of what one rank reads of another: below, the system calls cost
// more than the second copy; above, the kernel's copying falls behind (Sapphire Rapids: 30 GB/s at
// 256 KiB, 21 at 1 MiB, 10 at 16 MiB).
inline constexpr int64_t kSingleCopyLeastBytes = 16 << 10;
inline constexpr int64_t kSingleCopyMostBytes = 4 << 20;

inline bool is_single_copy_size(int64_t bytes) {
  return bytes > kSingleCopyLeastBytes && bytes <= kSingleCopyMostBytes;
}

// From this size on, what an operation moves will hardly be found in the caches by whoever reads it
// next, so outputs are written past them: that saves reading each line before it is written (1.3 to
// 1.6 times at 64 MiB, 2 ranks). Shorter ones would gain as much by themselves, but lose it again
// in the next read. Not where the output has just been read.
inline constexpr int64_t kStreamOutputBytes = 32 << 20;

inline bool stream_output(Operation operation, int64_t bytes) {
  const bool just_read = operation == Operation::kAllReduce || operation == Operation::kReduce;
  return !just_read && bytes >= kStreamOutputBytes;
}

}  // namespace pycomm
