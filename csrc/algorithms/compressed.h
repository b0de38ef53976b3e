// all_reduce of encoded values: the three algorithms again, with encoding, summing and decoding
// where the plain ones copy and reduce. encoder.h has the encoder of the CPU, p2p/peer_encoder.cuh
// that of a CUDA kernel.
//
// one_shot rounds each contribution once. two_shot rounds each contribution once, but for the own
// one of the rank that sums, and the sum once: two roundings at any world size. ring rounds the
// partial sum at each of its world_size hops. Whoever rounds keeps the error in its residual, so
// with error feedback sent and kept values add up to what came in.
//
// Error bound without error feedback, u being half the distance of neighbours at 1 in the format,
// relative to the sum of the contributions' magnitudes: one_shot u, two_shot 2u, ring world_size *
// u, to first order.
#pragma once

#include <cstdint>

#include "../slots.h"

namespace pycomm {

template <class Slots, class Encoder>
PYCOMM_ON_DEVICE int64_t compressed_two_shot(Slots& slots, const Encoder& encoder, int64_t count) {
  const int rank = slots.rank(), world_size = slots.world_size();
  const int64_t capacity = encoder.capacity(slots.slot_bytes());
  const Chunks chunks{count, capacity};
  const auto shard = [&](int64_t chunk, int owner) {
    return shard_of(chunks.count_of(chunk), world_size, owner, encoder.codec().granule());
  };
  auto wires = encoder.wires();

  const auto contribute = [&](int64_t chunk) {
    slots.acquire(chunk);
    for (int owner = 0; owner < world_size; ++owner) {
      if (owner == rank) continue;
      const Shard s = shard(chunk, owner);
      encoder.encode(chunks.begin(chunk) + s.begin, s.count,
                     encoder.place(slots.mine(chunk), capacity, s.begin));
    }
    slots.post(Stage::kFilled, chunk);
  };
  const auto reduce_shard = [&](int64_t chunk) {
    const Shard s = shard(chunk, rank);
    wires.clear();
    for (int peer = 0; peer < world_size; ++peer) {
      if (peer == rank) continue;
      slots.await(peer, Stage::kFilled, chunk);
      wires.push_back(encoder.wire(slots.of(peer, chunk), capacity, s.begin));
    }
    encoder.reduce(wires, rank, chunks.begin(chunk) + s.begin, s.count,
                   encoder.place(slots.mine(chunk), capacity, s.begin), true);
    slots.post(Stage::kReduced, chunk);
  };
  const auto collect = [&](int64_t chunk) {
    for (int step = 1; step < world_size; ++step) {
      const int owner = (rank + step) % world_size;
      const Shard s = shard(chunk, owner);
      slots.await(owner, Stage::kReduced, chunk);
      encoder.decode(encoder.wire(slots.of(owner, chunk), capacity, s.begin),
                     chunks.begin(chunk) + s.begin, s.count);
    }
    slots.post(Stage::kDrained, chunk);
  };
  pipeline(chunks.number(), 1, contribute, reduce_shard, collect);
  return chunks.number();
}

template <class Slots, class Encoder>
PYCOMM_ON_DEVICE int64_t compressed_one_shot(Slots& slots, const Encoder& encoder, int64_t count) {
  const int64_t capacity = encoder.capacity(slots.slot_bytes());
  const Chunks chunks{count, capacity};
  auto wires = encoder.wires();

  const auto contribute = [&](int64_t chunk) {
    slots.acquire(chunk);
    encoder.encode(chunks.begin(chunk), chunks.count_of(chunk),
                   encoder.place(slots.mine(chunk), capacity, 0));
    slots.post(Stage::kFilled, chunk);
  };
  const auto sum = [&](int64_t chunk) {
    wires.clear();
    for (int peer = 0; peer < slots.world_size(); ++peer) {
      if (peer != slots.rank()) slots.await(peer, Stage::kFilled, chunk);
      wires.push_back(encoder.wire(slots.of(peer, chunk), capacity, 0));
    }
    encoder.sum(wires, chunks.begin(chunk), chunks.count_of(chunk));
    slots.post(Stage::kDrained, chunk);
  };
  pipeline(chunks.number(), 1, contribute, sum);
  return chunks.number();
}

// As ring.h, a chunk's partial sum starts at rank 0 and travels right; the result comes round.
template <class Slots, class Encoder>
PYCOMM_ON_DEVICE int64_t compressed_ring(Slots& slots, const Encoder& encoder, int64_t count) {
  const int rank = slots.rank(), last = slots.world_size() - 1;
  const int left = rank == 0 ? last : rank - 1;
  // A slot holds a partial and, behind it, a result.
  const int64_t half = slots.slot_bytes() / 2;
  const int64_t capacity = encoder.capacity(half);
  const Chunks chunks{count, capacity};
  auto wires = encoder.wires();

  const auto add_mine = [&](int64_t chunk) {
    wires.clear();
    if (rank > 0) {
      slots.await(left, Stage::kFilled, chunk);
      wires.push_back(encoder.wire(slots.of(left, chunk), capacity, 0));
    }
    slots.acquire(chunk);
    char* to = slots.mine(chunk) + (rank == last ? half : 0);
    encoder.reduce(wires, static_cast<int>(wires.size()), chunks.begin(chunk),
                   chunks.count_of(chunk), encoder.place(to, capacity, 0), rank == last);
    slots.post(rank == last ? Stage::kReduced : Stage::kFilled, chunk);
  };
  const auto pass_on = [&](int64_t chunk) {
    if (rank < last) {
      slots.await(left, Stage::kReduced, chunk);
      const char* result = slots.of(left, chunk) + half;
      if (rank < last - 1)
        encoder.pass_on(result, slots.mine(chunk) + half, capacity, chunks.count_of(chunk));
      slots.post(Stage::kReduced, chunk);
      encoder.decode(encoder.wire(result, capacity, 0), chunks.begin(chunk),
                     chunks.count_of(chunk));
    }
    slots.post(Stage::kDrained, chunk);
  };
  // A result comes back after `last` hops; further behind than the slots reach, nobody could move.
  const int64_t reach = slots.slots() - 1;
  pipeline(chunks.number(), last < reach ? last : reach, add_mine, pass_on);
  return chunks.number();
}

}  // namespace pycomm
