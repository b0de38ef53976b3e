// direct: ranks use each other's tensors without slots: mapped ones in place (memory(rank)), others
// by copying out of them (read(rank, offset, to, bytes)).
//
// All ranks have entered, so all tensors are ready to be read; a rank leaves when all have done
// their part, since until then its own is read or written by others. The whole operation is one
// "chunk" that carries no data.
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

// Memory for blocks of other ranks' tensors; small enough to stay in the cache.
struct Scratch {
  char* data;
  int64_t bytes;
};

// Calls reduce(sources, at, n) for the blocks of `count` elements that begin at byte `offset` of
// all tensors: sources are this rank's own tensor and copies of the others'.
template <class Slots, class Math, class Read, class Reduce>
void reduce_blocks(Slots& slots, const Math& math, Read&& read, const char* own, int64_t offset,
                   int64_t count, Scratch scratch, Reduce&& reduce) {
  const int rank = slots.rank(), world_size = slots.world_size();
  const int64_t line = static_cast<int64_t>(kLineBytes), bytes = math.element_bytes();
  const int64_t room = scratch.bytes / std::max(world_size - 1, 1) / line * line;
  const Chunks blocks{count, room / bytes};
  for (int64_t block = 0; block < blocks.number(); ++block) {
    const int64_t begin = offset + blocks.begin(block) * bytes, n = blocks.count_of(block);
    const char* sources[kMaxRanks];
    char* copy = scratch.data;
    for (int peer = 0; peer < world_size; ++peer) {
      sources[peer] = peer == rank ? own + begin : copy;
      if (peer == rank) continue;
      read(peer, begin, copy, n * bytes);
      copy += room;
    }
    reduce(sources, blocks.begin(block), n);
  }
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

// The same for tensors that have to be copied. `scratch` holds a block of every other rank's part.
template <class Slots, class Math, class Read>
int64_t copied_reduce_scatter(Slots& slots, const Math& math, Read&& read, const char* input,
                              int64_t offset, char* output, int64_t count, Scratch scratch) {
  reduce_blocks(slots, math, read, input, offset, count, scratch,
                [&](const char* const* sources, int64_t at, int64_t n) {
                  math.reduce_to_output(sources, output + at * math.element_bytes(), n);
                });
  return leave_together(slots);
}

// In place, in two shots: every rank reduces its shard, then all copy the finished shards.
template <class Slots, class Math, class Read>
int64_t copied_all_reduce(Slots& slots, const Math& math, Read&& read, char* data, int64_t count,
                          Scratch scratch) {
  const int rank = slots.rank(), world_size = slots.world_size();
  const int64_t bytes = math.element_bytes();
  const Shard mine = shard_of(count, world_size, rank, math.granule());
  reduce_blocks(slots, math, read, data, mine.begin * bytes, mine.count, scratch,
                [&](const char* const* sources, int64_t at, int64_t n) {
                  math.reduce_all(sources, nullptr, data + (mine.begin + at) * bytes, n);
                });
  slots.post(Stage::kReduced, 0);
  for (int step = 1; step < world_size; ++step) {
    const int owner = (rank + step) % world_size;
    const Shard s = shard_of(count, world_size, owner, math.granule());
    slots.await(owner, Stage::kReduced, 0);
    if (s.count > 0) read(owner, s.begin * bytes, data + s.begin * bytes, s.count * bytes);
  }
  return leave_together(slots);
}

// output(rank): where that rank's bytes(rank) bytes go here, null if they are not wanted. Ranks
// whose tensor nobody reads may leave first.
template <class Slots, class Read, class Outputs, class Sizes>
int64_t direct_gather(Slots& slots, Read&& read, Outputs&& output, Sizes&& bytes) {
  const int rank = slots.rank(), world_size = slots.world_size();
  for (int step = 0; step < world_size; ++step) {
    const int peer = (rank + step) % world_size;
    char* to = output(peer);
    if (to && bytes(peer) > 0) read(peer, 0, to, bytes(peer));
  }
  if (bytes(rank) > 0) return leave_together(slots);
  slots.post(Stage::kDrained, 0);
  return 1;
}

}  // namespace pycomm
