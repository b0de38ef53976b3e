// Private tensors copied straight from rank to rank: whether that works, and the reading itself.
#include <cstring>
#include <random>

#include "../algorithms/choose.h"
#include "peer_memory.h"
#include "shm_communicator.h"

namespace pycomm {
namespace {
// With a peer's block and the result in the innermost private cache of today's processors.
constexpr size_t kScratchBytes = 256 << 10;
}  // namespace

// Every rank reads a random word of every peer, and tells whether it found the right one: so ranks
// in other pid namespaces, under another user or behind ptrace restrictions are noticed.
void ShmCommunicator::find_single_copy() {
  bool can = segment_->head().config.single_copy != Choice::kNever;
  for (int peer = 0; can && peer < world_size(); ++peer) {
    const RankArea& area = segment_->area(peer);
    uint64_t word = 0;
    can = read_peer_memory(area.pid, area.probe_address, &word, sizeof word) &&
          word == area.probe_word;
  }
  Flag& mine = segment_->area(rank()).reads_peers;
  set_and_wake(mine.value, can ? 2 : 1, mine.sleepers);
  can_copy_once_ = can;
  const Request barrier{};
  request_ = &barrier;
  for (int peer = 0; peer < world_size(); ++peer) {
    Flag& theirs = segment_->area(peer).reads_peers;
    wait_for_flag(peer, theirs, 1);
    can_copy_once_ = can_copy_once_ && load_acquire(theirs.value) == 2;
  }
}

// Of an even operation; the same on all ranks.
bool ShmCommunicator::copies_once(const Request& request) const {
  if (!single_copy_ || request.compression || request.algorithm != Algorithm::kAuto) return false;
  const bool reduces_all = request.operation == Operation::kAllReduce;
  return is_single_copy_size(reduces_all ? request.bytes() / world_size() : request.bytes());
}

// Of the tensor that the peer's header names.
void ShmCommunicator::read_tensor(int peer, int64_t offset, char* to, int64_t bytes) {
  if (is_shared(peer)) {
    const char* from = shared_tensor(peer) + offset;
    if (to != from) copy(to, from, bytes, stream_output(request_->operation, bytes));
    return;
  }
  const uint64_t from =
      peer == rank() ? address_of(*request_) : announcement_of(peer).header.address;
  read_memory(peer, from + static_cast<uint64_t>(offset), to, bytes);
}

void ShmCommunicator::read_memory(int peer, uint64_t from, char* to, int64_t bytes) {
  if (peer == rank()) {
    if (reinterpret_cast<uint64_t>(to) != from)
      copy(to, reinterpret_cast<const char*>(from), bytes, false);
    return;
  }
  if (read_peer_memory(segment_->area(peer).pid, from, to, bytes)) return;
  const int why = errno;
  if (why == ESRCH || liveness_.is_dead(peer)) lost_peer(peer);
  errno = why;
  PYCOMM_CHECK_SYSTEM(false, where(), ": cannot read ", bytes, " bytes of rank ", peer, " (pid ",
                      segment_->area(peer).pid, "); set PYCOMM_SINGLE_COPY=never to do without");
}

// Ends an operation that used peers' tensors directly. A peer that failed meanwhile may have given
// its tensor back to its user, so what was read of it does not count.
void ShmCommunicator::advance_directly(int64_t chunks) {
  slots_.advance(chunks);
  if (has_ended()) throw_ended(where());
}

Scratch ShmCommunicator::scratch() {
  if (scratch_.empty()) scratch_.resize(kScratchBytes + kLineBytes);
  const auto address = reinterpret_cast<uintptr_t>(scratch_.data());
  const int64_t skip =
      round_up(static_cast<int64_t>(address), kLineBytes) - static_cast<int64_t>(address);
  return {scratch_.data() + skip, static_cast<int64_t>(kScratchBytes)};
}

}  // namespace pycomm
