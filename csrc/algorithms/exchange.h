// Personalised messages: every rank has other data for every rank (all_to_all, scatter).
#pragma once

#include <algorithm>
#include <cstdint>

#include "../slots.h"

namespace pycomm {

// A slot divided into a cell per other rank: where in a rank's slot lies what is meant for `owner`.
struct Cells {
  Cells(int64_t slot_bytes, int world_size, int64_t element_bytes)
      : world_size(world_size),
        count(slot_bytes / std::max(world_size - 1, 1) / static_cast<int64_t>(kLineBytes) *
              static_cast<int64_t>(kLineBytes) / element_bytes),
        bytes(count * element_bytes) {}

  int64_t offset(int rank, int owner) const {
    return (owner - rank - 1 + world_size) % world_size * bytes;
  }

  int world_size;
  int64_t count;  // elements; a whole number of lines, so that ranks never read the same one
  int64_t bytes;
};

// inputs(rank), outputs(rank): data and count of what goes there and comes from there, this rank
// itself and ranks that take no part left out as 0. `most`: the greatest count between any two
// ranks, the same on all.
template <class Slots, class Math, class Inputs, class Outputs>
int64_t exchange(Slots& slots, const Math& math, Inputs&& inputs, Outputs&& outputs, int64_t most) {
  const int rank = slots.rank(), world_size = slots.world_size();
  const int64_t bytes = math.element_bytes();
  const Cells cells(slots.slot_bytes(), world_size, bytes);
  int64_t to_send = 0;
  for (int peer = 0; peer < world_size; ++peer)
    to_send = std::max<int64_t>(to_send, inputs(peer).count);

  const auto give = [&](int64_t chunk) {
    if (cells.count * chunk >= to_send) return;
    slots.acquire(chunk);
    for (int peer = 0; peer < world_size; ++peer) {
      const Chunks part{inputs(peer).count, cells.count};
      if (part.count_of(chunk) > 0)
        math.copy_to_slot(slots.mine(chunk) + cells.offset(rank, peer),
                          inputs(peer).data + part.begin(chunk) * bytes, part.count_of(chunk));
    }
    slots.post(Stage::kFilled, chunk);
  };
  const auto take = [&](int64_t chunk) {
    for (int step = 1; step < world_size; ++step) {
      const int peer = (rank + step) % world_size;
      const Chunks part{outputs(peer).count, cells.count};
      if (part.count_of(chunk) <= 0) continue;
      slots.await(peer, Stage::kFilled, chunk);
      math.copy_to_output(outputs(peer).data + part.begin(chunk) * bytes,
                          slots.of(peer, chunk) + cells.offset(peer, rank), part.count_of(chunk));
    }
    slots.post(Stage::kDrained, chunk);
  };
  const int64_t chunks = Chunks{most, cells.count}.number();
  pipeline(chunks, 1, give, take);
  return chunks;
}

}  // namespace pycomm
