// one_shot: every rank publishes its whole contribution, and every rank reads all of them.
//
// One synchronisation per chunk, but n times the reading: the algorithm for short messages.
// Messages that fit beside the operation's header do not even come here (shm_communicator.cpp:
// eager).
#pragma once

#include <cstdint>

#include "../slots.h"

namespace pycomm {

template <class Slots, class Math>
int64_t one_shot_all_reduce(Slots& slots, const Math& math, const char* input, char* output,
                            int64_t count) {
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
    const char* sources[kMaxRanks];
    for (int peer = 0; peer < slots.world_size(); ++peer) {
      if (peer != slots.rank()) slots.await(peer, Stage::kFilled, chunk);
      sources[peer] = peer == slots.rank() ? input + offset : slots.of(peer, chunk);
    }
    math.reduce_all(sources, nullptr, output + offset, chunks.count_of(chunk));
    slots.post(Stage::kDrained, chunk);
  };
  pipeline(chunks.number(), 1, contribute, reduce_all);
  return chunks.number();
}

// Broadcast and all-gather are one_shot's two halves: publish, and read.
template <class Slots, class Math>
int64_t one_shot_broadcast(Slots& slots, const Math& math, char* data, int64_t count, int root) {
  const int64_t bytes = math.element_bytes();
  const Chunks chunks{count, slots.slot_bytes() / bytes};
  for (int64_t chunk = 0; chunk < chunks.number(); ++chunk) {
    char* part = data + chunks.begin(chunk) * bytes;
    if (slots.rank() == root) {
      slots.acquire(chunk);
      math.copy_to_slot(slots.mine(chunk), part, chunks.count_of(chunk));
      slots.post(Stage::kFilled, chunk);
    } else {
      slots.await(root, Stage::kFilled, chunk);
      math.copy_to_output(part, slots.of(root, chunk), chunks.count_of(chunk));
    }
    slots.post(Stage::kDrained, chunk);
  }
  return chunks.number();
}

// outputs(rank): where that rank's `count` elements go.
template <class Slots, class Math, class Outputs>
int64_t one_shot_all_gather(Slots& slots, const Math& math, const char* input, Outputs&& outputs,
                            int64_t count) {
  const int64_t bytes = math.element_bytes();
  const Chunks chunks{count, slots.slot_bytes() / bytes};

  const auto contribute = [&](int64_t chunk) {
    const int64_t offset = chunks.begin(chunk) * bytes;
    slots.acquire(chunk);
    math.copy_to_slot(slots.mine(chunk), input + offset, chunks.count_of(chunk));
    slots.post(Stage::kFilled, chunk);
    math.copy_to_output(outputs(slots.rank()) + offset, input + offset, chunks.count_of(chunk));
  };
  const auto collect = [&](int64_t chunk) {
    const int64_t offset = chunks.begin(chunk) * bytes;
    for (int step = 1; step < slots.world_size(); ++step) {
      const int peer = (slots.rank() + step) % slots.world_size();
      slots.await(peer, Stage::kFilled, chunk);
      math.copy_to_output(outputs(peer) + offset, slots.of(peer, chunk), chunks.count_of(chunk));
    }
    slots.post(Stage::kDrained, chunk);
  };
  pipeline(chunks.number(), 1, contribute, collect);
  return chunks.number();
}

}  // namespace pycomm
