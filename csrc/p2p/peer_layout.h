// What each rank of a host keeps in device memory that all the others map: its region. Of host and
// device.
//
// The blocks of a kernel work side by side: block b of all ranks shares out one strip of the
// tensor, with a queue of slots and flags of its own. A rank announces a stage by writing into the
// flags of every peer, so that each polls its own memory; data is read from where it was written.
//
// A region is zero at first. What an operation leaves there is what the next one begins with, so
// that a kernel that is launched again, as part of a CUDA graph, needs no other arguments.
#pragma once

#include <cstdint>

#include "../common.h"
#include "../slots.h"

namespace pycomm {

// The most ranks that one host's peer memory holds: a bound for arrays in kernels.
inline constexpr int kMostPeers = 16;
inline constexpr int kPeerThreads = 256;  // of a block, at most
// Three stages of a chunk are under way at once (slots.h: pipeline), and it is a power of two.
inline constexpr int kFewestPeerSlots = 4;
// A line of elements, and of the ring's partial results, of any type.
inline constexpr int64_t kLeastPeerSlotBytes = 2 * kLineBytes * sizeof(double);

struct PeerLayout {
  int32_t blocks = 32;
  int32_t slots = 4;
  int64_t slot_bytes = 64 << 10;  // a multiple of kPartBytes

  // Parts begin at multiples of it.
  static constexpr int64_t kPartBytes = 128;

  // The word that ends all waits of this rank, once it is not 0: kAbortedByHost, or kAbortedByFirst
  // and the number of the rank that gave up.
  PYCOMM_HOST_DEVICE int64_t abort_offset() const { return 0; }
  // How many chunks each block has had in all operations before; this rank's own.
  PYCOMM_HOST_DEVICE int64_t sequence_offset(int block) const {
    return kPartBytes + block * int64_t{sizeof(uint64_t)};
  }
  // How many chunks `peer` has finished a stage of.
  PYCOMM_HOST_DEVICE int64_t flag_offset(int block, Stage stage, int peer) const {
    const int64_t row = int64_t{block} * kStages + static_cast<int>(stage);
    return flags_offset() + (row * kMostPeers + peer) * int64_t{sizeof(uint64_t)};
  }
  PYCOMM_HOST_DEVICE int64_t slot_offset(int block, int64_t slot) const {
    return slots_offset() + (int64_t{block} * slots + slot) * slot_bytes;
  }
  int64_t region_bytes() const { return slot_offset(blocks, 0); }

 private:
  PYCOMM_HOST_DEVICE int64_t flags_offset() const {
    return round_up(sequence_offset(blocks), kPartBytes);
  }
  PYCOMM_HOST_DEVICE int64_t slots_offset() const {
    return round_up(flag_offset(blocks, Stage::kFilled, 0), kPartBytes);
  }
};

// How a rank's kernels end: whose chunk was waited for in vain, in memory that the host reads.
struct PeerStatus {
  enum State : uint32_t {
    kGood,
    kTimedOut,  // `peer` did not post within the bound
    kAborted    // `peer` gave up before; the host, if it is -1
  };
  uint32_t claimed;  // by the first thread that has something to report
  uint32_t state;    // written last
  int32_t rank, peer;
  int32_t block;
  Stage stage;
  uint64_t chunk;           // of the operation
  uint64_t expected, seen;  // of the flag
};

// A rank's view of it all, which a kernel gets. Also the pointers' targets stay where they are.
struct PeerGroup {
  char* regions[kMostPeers];  // by rank, as this one maps them
  PeerStatus* status;
  // Looks at a flag before a wait is given up. Each takes about as long as a read of local memory
  // past the caches and kPollNanoseconds together.
  uint64_t most_polls;
  PeerLayout layout;
  int32_t rank, world_size;
};
inline constexpr unsigned kPollNanoseconds = 32;
inline constexpr uint64_t kAbortedByHost = 1, kAbortedByFirst = 2;

}  // namespace pycomm
