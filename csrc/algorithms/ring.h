// ring: every rank reads from its left neighbour only.
//
// The textbook ring reduces each shard in an order that depends on which shard it is, so bits would
// change with the bucket split. This one keeps rank order: a chunk's partial sum starts at rank 0
// and travels right, each rank adding its own contribution; the last rank finishes it and sends the
// result round once more. Partials travel in the accumulator type, so 16-bit floats are rounded
// once. Each link carries at most 2 N elements against the textbook's 2 N (n-1)/n; chunks follow
// each other, so all links are busy.
#pragma once

#include <cstdint>

#include "../slots.h"

namespace pycomm {

template <class Slots, class Math>
PYCOMM_ON_DEVICE int64_t ring_all_reduce(Slots& slots, const Math& math, const char* input,
                                         char* output, int64_t count) {
  const int rank = slots.rank(), last = slots.world_size() - 1;
  const int left = rank == 0 ? last : rank - 1;
  const int64_t bytes = math.element_bytes();
  const int64_t line = static_cast<int64_t>(kLineBytes);

  // A slot holds a partial and, behind it, a result.
  const int64_t chunk_count = slots.slot_bytes() / (bytes + math.partial_bytes()) / line * line;
  const int64_t result_at = chunk_count * math.partial_bytes();
  const Chunks chunks{count, chunk_count};

  const auto add_mine = [&](int64_t chunk) {
    const int64_t offset = chunks.begin(chunk) * bytes, n = chunks.count_of(chunk);
    if (rank > 0) slots.await(left, Stage::kFilled, chunk);
    const char* partial = rank > 0 ? slots.of(left, chunk) : nullptr;
    slots.acquire(chunk);
    if (rank < last) {
      math.reduce_partial(partial, input + offset, slots.mine(chunk), n);
      slots.post(Stage::kFilled, chunk);
    } else {
      math.reduce_final(partial, input + offset, slots.mine(chunk) + result_at, output + offset, n);
      slots.post(Stage::kReduced, chunk);
    }
  };
  const auto pass_on = [&](int64_t chunk) {
    const int64_t offset = chunks.begin(chunk) * bytes, n = chunks.count_of(chunk);
    if (rank < last) {
      slots.await(left, Stage::kReduced, chunk);
      const char* result = slots.of(left, chunk) + result_at;
      if (rank < last - 1) math.copy_to_slot(slots.mine(chunk) + result_at, result, n);
      slots.post(Stage::kReduced, chunk);
      math.copy_to_output(output + offset, result, n);
    }
    slots.post(Stage::kDrained, chunk);
  };
  // A result comes back after `last` hops; further behind than the slots reach, nobody could move.
  const int64_t reach = slots.slots() - 1;
  pipeline(chunks.number(), last < reach ? last : reach, add_mine, pass_on);
  return chunks.number();
}

}  // namespace pycomm
