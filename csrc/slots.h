// The memory seam: how one rank's bytes become visible to another.
//
// Every rank owns a queue of slots, cells of equal size that all peers can read. A tensor travels
// as a sequence of chunks, each in the slot `chunk % slots`; a chunk goes through stages, and for
// each stage a rank keeps a counter of the chunks it has finished, which peers wait for. An
// algorithm (algorithms/*.h) is written in these verbs and nothing else:
//
//   acquire(chunk)             wait until my slot for `chunk` is free again: all its readers have
//   drained its last tenant mine(chunk), of(peer, chunk)   the slot's bytes; only `mine` may be
//   written post(stage, chunk)         announce that I finished `stage` of `chunk` (and of all
//   before it); releases my writes await(peer, stage, chunk)  wait until `peer` has posted that;
//   acquires its writes rank(), world_size(), slot_bytes(), slots()
//
// Every wait ends by data, deadline, abort or a peer's death. shm/shm_slots.h implements the verbs
// over shared memory; p2p/peer_slots.cuh does in a CUDA kernel, where all threads of a block call
// them together. kMostRanks is how many ranks there can be.
#pragma once

#include <cstdint>

#include "common.h"

namespace pycomm {

// Stages of a chunk, in order. An algorithm may skip `reduced`; it must end with `drained` for
// every chunk.
enum class Stage : int {
  kFilled,   // my contribution lies in my slot
  kReduced,  // a result that peers may read lies in my slot
  kDrained,  // I have read all that I need from the peers' slots
};
inline constexpr int kStages = 3;

// `count` elements cut into chunks of at most `chunk_count`.
struct Chunks {
  int64_t count;
  int64_t chunk_count;

  PYCOMM_HOST_DEVICE int64_t number() const { return (count + chunk_count - 1) / chunk_count; }
  PYCOMM_HOST_DEVICE int64_t begin(int64_t chunk) const { return chunk * chunk_count; }
  PYCOMM_HOST_DEVICE int64_t count_of(int64_t chunk) const {
    const int64_t left = count - begin(chunk);
    return left < chunk_count ? left : chunk_count;  // negative past the end
  }
};

// The part of `count` elements that rank `part` of `parts` reduces; parts begin at multiples of
// `granule` elements.
struct Shard {
  int64_t begin;
  int64_t count;
};
PYCOMM_HOST_DEVICE inline Shard shard_of(int64_t count, int parts, int part, int64_t granule) {
  const int64_t even = round_up((count + parts - 1) / parts, granule);
  const int64_t begin = even * part < count ? even * part : count;
  const int64_t end = begin + even < count ? begin + even : count;
  return {begin, end - begin};
}

// Runs the stages of all chunks as a software pipeline: at each step, stage s works on the chunk
// that is s * lag behind, so that what a later stage waits for was started early enough.
template <class First, class Second>
PYCOMM_ON_DEVICE void pipeline(int64_t chunks, int64_t lag, First&& first, Second&& second) {
  for (int64_t step = 0; step < chunks + lag; ++step) {
    if (step < chunks) first(step);
    if (step >= lag) second(step - lag);
  }
}
template <class First, class Second, class Third>
PYCOMM_ON_DEVICE void pipeline(int64_t chunks, int64_t lag, First&& first, Second&& second,
                               Third&& third) {
  for (int64_t step = 0; step < chunks + 2 * lag; ++step) {
    if (step < chunks) first(step);
    if (step >= lag && step - lag < chunks) second(step - lag);
    if (step >= 2 * lag) third(step - 2 * lag);
  }
}

}  // namespace pycomm
