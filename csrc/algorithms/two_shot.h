// two_shot: every rank reduces its own shard of a chunk from all peers (first shot), then everybody
// reads the finished shards (second shot).
//
// The contribution and the result share a slot: a rank contributes every shard but its own, whose
// place in the slot then takes the result. Contributing chunk k, reducing k-1 and collecting k-2
// overlap. Per rank and byte of tensor: one read and one write of the user's memory; the slots stay
// in cache.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../slots.h"
#include "exchange.h"

namespace pycomm {

// `output` null: this rank reduces its shard, but wants no result (reduce).
template <class Slots, class Math>
PYCOMM_ON_DEVICE int64_t two_shot_all_reduce(Slots& slots, const Math& math, const char* input,
                                             char* output, int64_t count) {
  const int rank = slots.rank(), world_size = slots.world_size();
  const int64_t bytes = math.element_bytes();
  const Chunks chunks{count, slots.slot_bytes() / bytes};
  const auto shard = [&](int64_t chunk, int owner) {
    return shard_of(chunks.count_of(chunk), world_size, owner, math.granule());
  };

  const auto contribute = [&](int64_t chunk) {
    slots.acquire(chunk);
    const char* part = input + chunks.begin(chunk) * bytes;
    for (int owner = 0; owner < world_size; ++owner) {
      if (owner == rank) continue;
      const Shard s = shard(chunk, owner);
      math.copy_to_slot(slots.mine(chunk) + s.begin * bytes, part + s.begin * bytes, s.count);
    }
    slots.post(Stage::kFilled, chunk);
  };
  const auto reduce_shard = [&](int64_t chunk) {
    const Shard s = shard(chunk, rank);
    const int64_t in_chunk = s.begin * bytes, in_tensor = chunks.begin(chunk) * bytes + in_chunk;
    const char* sources[Slots::kMostRanks];
    for (int peer = 0; peer < world_size; ++peer) {
      if (peer != rank) slots.await(peer, Stage::kFilled, chunk);
      sources[peer] = peer == rank ? input + in_tensor : slots.of(peer, chunk) + in_chunk;
    }
    math.reduce_all(sources, slots.mine(chunk) + in_chunk, output ? output + in_tensor : nullptr,
                    s.count);
    slots.post(Stage::kReduced, chunk);
  };
  const auto collect = [&](int64_t chunk) {
    for (int step = 1; output && step < world_size; ++step) {
      const int owner = (rank + step) % world_size;
      const Shard s = shard(chunk, owner);
      slots.await(owner, Stage::kReduced, chunk);
      math.copy_to_output(output + (chunks.begin(chunk) + s.begin) * bytes,
                          slots.of(owner, chunk) + s.begin * bytes, s.count);
    }
    slots.post(Stage::kDrained, chunk);
  };
  pipeline(chunks.number(), 1, contribute, reduce_shard, collect);
  return chunks.number();
}

// Reduce-scatter is the first shot alone, with a cell of the slot for each other rank.
// inputs(rank): data and count of what is meant for that rank; the counts are the same on all
// ranks.
template <class Slots, class Math, class Inputs>
int64_t two_shot_reduce_scatter(Slots& slots, const Math& math, Inputs&& inputs, char* output) {
  const int rank = slots.rank(), world_size = slots.world_size();
  const int64_t bytes = math.element_bytes();
  const Cells cells(slots.slot_bytes(), world_size, bytes);
  const auto chunks_of = [&](int owner) { return Chunks{inputs(owner).count, cells.count}; };
  int64_t chunks = 0;
  for (int owner = 0; owner < world_size; ++owner)
    chunks = std::max(chunks, chunks_of(owner).number());

  const auto contribute = [&](int64_t chunk) {
    slots.acquire(chunk);
    for (int owner = 0; owner < world_size; ++owner) {
      const Chunks theirs = chunks_of(owner);
      if (owner != rank && theirs.count_of(chunk) > 0)
        math.copy_to_slot(slots.mine(chunk) + cells.offset(rank, owner),
                          inputs(owner).data + theirs.begin(chunk) * bytes, theirs.count_of(chunk));
    }
    slots.post(Stage::kFilled, chunk);
  };
  const auto reduce_cell = [&](int64_t chunk) {
    const Chunks mine = chunks_of(rank);
    if (mine.count_of(chunk) > 0) {
      const int64_t offset = mine.begin(chunk) * bytes;
      const char* sources[kMaxRanks];
      for (int peer = 0; peer < world_size; ++peer) {
        if (peer != rank) slots.await(peer, Stage::kFilled, chunk);
        sources[peer] = peer == rank ? inputs(rank).data + offset
                                     : slots.of(peer, chunk) + cells.offset(peer, rank);
      }
      math.reduce_to_output(sources, output + offset, mine.count_of(chunk));
    }
    slots.post(Stage::kDrained, chunk);
  };
  pipeline(chunks, 1, contribute, reduce_cell);
  return chunks;
}

}  // namespace pycomm
