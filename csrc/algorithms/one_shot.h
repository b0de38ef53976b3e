// one_shot: every rank publishes its whole contribution, and every rank reads all of them.
//
// One synchronisation per chunk, but n times the reading: the algorithm for short messages.
// Messages that fit beside the operation's header do not even come here (shm_communicator.cpp:
// eager).
#pragma once

#include <algorithm>
#include <cstdint>

#include "../slots.h"

namespace pycomm {

// `output` null: this rank only contributes (reduce).
template <class Slots, class Math>
PYCOMM_ON_DEVICE int64_t one_shot_all_reduce(Slots& slots, const Math& math, const char* input,
                                             char* output, int64_t count) {
  const int64_t bytes = math.element_bytes();
  const Chunks chunks{count, slots.slot_bytes() / bytes};

  const auto contribute = [&](int64_t chunk) {
    slots.acquire(chunk);
    math.copy_to_slot(slots.mine(chunk), input + chunks.begin(chunk) * bytes,
                      chunks.count_of(chunk));
    slots.post(Stage::kFilled, chunk);
  };
  const auto reduce_all = [&](int64_t chunk) {
    const int64_t offset = chunks.begin(chunk) * bytes;
    const char* sources[Slots::kMostRanks];
    for (int peer = 0; output && peer < slots.world_size(); ++peer) {
      if (peer != slots.rank()) slots.await(peer, Stage::kFilled, chunk);
      sources[peer] = peer == slots.rank() ? input + offset : slots.of(peer, chunk);
    }
    if (output) math.reduce_all(sources, nullptr, output + offset, chunks.count_of(chunk));
    slots.post(Stage::kDrained, chunk);
  };
  pipeline(chunks.number(), 1, contribute, reduce_all);
  return chunks.number();
}

// Broadcast, gather and all-gather are one_shot's two halves: publish, and read what one wants.
// count_of(rank): elements which that rank publishes, the same on all ranks. output_of(rank): where
// they go here, null where this rank does not want them.
template <class Slots, class Math, class Counts, class Outputs>
int64_t one_shot_gather(Slots& slots, const Math& math, const char* input, Counts&& count_of,
                        Outputs&& output_of) {
  const int rank = slots.rank(), world_size = slots.world_size();
  const int64_t bytes = math.element_bytes();
  const auto chunks_of = [&](int peer) {
    return Chunks{count_of(peer), slots.slot_bytes() / bytes};
  };
  int64_t chunks = 0;
  for (int peer = 0; peer < world_size; ++peer) chunks = std::max(chunks, chunks_of(peer).number());

  const auto contribute = [&](int64_t chunk) {
    const Chunks mine = chunks_of(rank);
    if (mine.count_of(chunk) <= 0) return;
    const char* part = input + mine.begin(chunk) * bytes;
    slots.acquire(chunk);
    math.copy_to_slot(slots.mine(chunk), part, mine.count_of(chunk));
    slots.post(Stage::kFilled, chunk);
    if (char* output = output_of(rank))
      math.copy_to_output(output + mine.begin(chunk) * bytes, part, mine.count_of(chunk));
  };
  const auto collect = [&](int64_t chunk) {
    for (int step = 1; step < world_size; ++step) {
      const int peer = (rank + step) % world_size;
      const Chunks theirs = chunks_of(peer);
      char* output = output_of(peer);
      if (!output || theirs.count_of(chunk) <= 0) continue;
      slots.await(peer, Stage::kFilled, chunk);
      math.copy_to_output(output + theirs.begin(chunk) * bytes, slots.of(peer, chunk),
                          theirs.count_of(chunk));
    }
    slots.post(Stage::kDrained, chunk);
  };
  pipeline(chunks, 1, contribute, collect);
  return chunks;
}

}  // namespace pycomm
