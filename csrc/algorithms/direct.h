// direct: every rank's tensor is in shared memory, so nothing is copied into slots.
//
// memory(rank): that rank's tensor. All ranks have entered, so all tensors are ready to be read; a
// rank leaves when all have done their part, since until then its own is read or written by others.
// The whole operation is one "chunk" that carries no data.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../slots.h"

namespace pycomm {

// Posts that this rank is done, and waits until the others are.
template <class Slots>
int64_t leave_together(Slots& slots) {
  slots.post(Stage::kDrained, 0);
  for (int peer = 0; peer < slots.world_size(); ++peer)
    if (peer != slots.rank()) slots.await(peer, Stage::kDrained, 0);
  return 1;
}

// In place, and the least traffic there can be: every rank reduces its shard of all tensors and
// writes the result into all of them, so each is read once and written once.
template <class Slots, class Math, class Memory>
int64_t direct_all_reduce(Slots& slots, const Math& math, Memory&& memory, int64_t count) {
  const int rank = slots.rank(), world_size = slots.world_size();
  const int64_t bytes = math.element_bytes();
  const Shard shard = shard_of(count, world_size, rank, math.granule());
  // Beyond two tensors the result is copied on, while it is in the innermost cache.
  constexpr int64_t kBlockBytes = 16 << 10;
  const Chunks blocks{shard.count, world_size <= 2 ? shard.count : kBlockBytes / bytes};

  const int second = (rank + 1) % world_size;
  for (int64_t block = 0; block < blocks.number(); ++block) {
    const int64_t offset = (shard.begin + blocks.begin(block)) * bytes, n = blocks.count_of(block);
    const char* sources[kMaxRanks];
    for (int peer = 0; peer < world_size; ++peer) sources[peer] = memory(peer) + offset;
    char* mine = memory(rank) + offset;
    math.reduce_all(sources, world_size > 1 ? memory(second) + offset : nullptr, mine, n);
    for (int step = 2; step < world_size; ++step)
      math.copy_to_output(memory((rank + step) % world_size) + offset, mine, n);
  }
  return leave_together(slots);
}

// Only the root's tensor is written.
template <class Slots, class Math, class Memory>
int64_t direct_reduce(Slots& slots, const Math& math, Memory&& memory, int64_t count, int root) {
  const int64_t bytes = math.element_bytes();
  const Shard shard = shard_of(count, slots.world_size(), slots.rank(), math.granule());
  const char* sources[kMaxRanks];
  for (int peer = 0; peer < slots.world_size(); ++peer)
    sources[peer] = memory(peer) + shard.begin * bytes;
  if (shard.count > 0)
    math.reduce_all(sources, nullptr, memory(root) + shard.begin * bytes, shard.count);
  return leave_together(slots);
}

// memory(rank): the inputs, one part for each rank after another.
template <class Slots, class Math, class Memory>
int64_t direct_reduce_scatter(Slots& slots, const Math& math, Memory&& memory, char* output,
                              int64_t count) {
  const char* sources[kMaxRanks];
  for (int peer = 0; peer < slots.world_size(); ++peer)
    sources[peer] = memory(peer) + slots.rank() * count * math.element_bytes();
  math.reduce_to_output(sources, output, count);
  return leave_together(slots);
}

// output(rank): where that rank's count(rank) elements go here, null if they are not wanted.
template <class Slots, class Math, class Memory, class Outputs, class Counts>
int64_t direct_gather(Slots& slots, const Math& math, Memory&& memory, Outputs&& output,
                      Counts&& count) {
  for (int step = 0; step < slots.world_size(); ++step) {
    const int peer = (slots.rank() + step) % slots.world_size();
    char* to = output(peer);
    if (to && count(peer) > 0) math.copy_to_output(to, memory(peer), count(peer));
  }
  return leave_together(slots);
}

}  // namespace pycomm
