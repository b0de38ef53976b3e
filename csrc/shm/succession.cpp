// The survivors of a group go on with a segment of their own. They find each other through the old
// one, which lives as long as any of them: no Store is needed, whose host may be gone.
#include <algorithm>
#include <cstring>
#include <string>

#include "../error.h"
#include "rendezvous.h"
#include "shm_communicator.h"

namespace pycomm {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

milliseconds until(Clock::time_point deadline) {
  return std::max(std::chrono::ceil<milliseconds>(deadline - Clock::now()), milliseconds(1));
}

uint64_t bits(const std::vector<int>& ranks) {
  uint64_t mask = 0;
  for (const int rank : ranks) mask |= UINT64_C(1) << rank;
  return mask;
}

std::string text(uint64_t mask) {
  std::string ranks;
  for (int rank = 0; rank < kMaxRanks; ++rank)
    if (mask >> rank & 1) ranks += concat(ranks.empty() ? "" : ", ", rank);
  return "[" + ranks + "]";
}

}  // namespace

std::vector<int> ShmCommunicator::living_ranks() const {
  std::vector<int> ranks;
  for (int peer = 0; peer < world_size(); ++peer)
    if (peer == rank() || !is_gone(peer)) ranks.push_back(peer);
  return ranks;
}

// Wakes whoever waits in the old group, then offers or takes the new segment.
std::shared_ptr<Segment> ShmCommunicator::succeed(const std::vector<int>& ranks,
                                                  milliseconds timeout) {
  check_process();
  for (size_t i = 0; i < ranks.size(); ++i)
    PYCOMM_CHECK(ranks[i] >= 0 && ranks[i] < world_size() && (i == 0 || ranks[i] > ranks[i - 1]),
                 kInvalidArgument, "rank ", rank(),
                 ": shrink needs different ranks of the group of ", world_size(),
                 ", in rising order");
  PYCOMM_CHECK(std::find(ranks.begin(), ranks.end(), rank()) != ranks.end(), kInvalidArgument,
               "rank ", rank(), ": shrink(", text(bits(ranks)),
               ") leaves this rank out; only the ranks that go on may call it");
  record_abort(Error(ErrorKind::kAborted,
                     concat("rank ", rank(), " shrinks the group to ranks ", text(bits(ranks))),
                     {Cause::kAborted, rank()}));
  const auto deadline = Clock::now() + timeout;
  return rank() == ranks[0] ? lead(ranks, deadline) : follow(ranks, deadline);
}

std::shared_ptr<Segment> ShmCommunicator::lead(const std::vector<int>& ranks,
                                               Clock::time_point deadline) {
  ShmOffer offer(static_cast<int>(ranks.size()), segment_->head().config);
  RankArea& mine = segment_->area(rank());
  PYCOMM_CHECK(offer.address().size() < sizeof mine.offer, kError, "rank ", rank(),
               ": the address of the new segment is too long");
  std::strcpy(mine.offer, offer.address().c_str());
  mine.heirs = bits(ranks);
  set_and_wake(mine.offered.value, mine.offered.value + 1, mine.offered.sleepers);
  offer.serve(until(deadline), [&](const std::vector<int>&) {
    for (const int peer : ranks)
      PYCOMM_CHECK(peer == rank() || !is_gone(peer), kPeerDied, "rank ", rank(), ": shrink(",
                   text(bits(ranks)), ") lost rank ", peer, " (", liveness_.process_of(peer),
                   "), which died or left meanwhile. Call it again without that rank.");
    return std::string();
  });
  return offer.accept(until(deadline));
}

// An offer may be one that its rank has given up: then a newer one follows.
std::shared_ptr<Segment> ShmCommunicator::follow(const std::vector<int>& ranks,
                                                 Clock::time_point deadline) {
  const int leader = ranks[0];
  RankArea& area = segment_->area(leader);
  const int place = static_cast<int>(std::find(ranks.begin(), ranks.end(), rank()) - ranks.begin());
  for (uint32_t seen = 0;;) {
    wait_for_offer(leader, seen, deadline);
    seen = load_acquire(area.offered.value);
    PYCOMM_CHECK(area.heirs == bits(ranks), kMismatch, "rank ", rank(),
                 ": the ranks disagree on who goes on: shrink(", text(bits(ranks)),
                 ") here, but shrink(", text(area.heirs), ") on rank ", leader,
                 ". Every survivor must give the same ranks.");
    auto segment = try_join_shm(area.offer, place, static_cast<int>(ranks.size()), until(deadline));
    if (segment) return segment;
  }
}

void ShmCommunicator::wait_for_offer(int leader, uint32_t seen, Clock::time_point deadline) {
  const auto what = [&] {
    return concat("rank ", rank(), ": shrink, waiting for rank ", leader, " (",
                  liveness_.process_of(leader), ")");
  };
  Flag& offered = segment_->area(leader).offered;
  while (load_acquire(offered.value) == seen) {
    check_interrupt();
    PYCOMM_CHECK(!is_gone(leader), kPeerDied, what(),
                 ", which died or left. Call it again without that rank.");
    PYCOMM_CHECK(Clock::now() < deadline, kTimeout, what(),
                 ", exceeded its timeout. Every survivor must call it.");
    const Sleeper sleeper(offered.sleepers);
    futex_wait(offered.value, seen, kSleep);
  }
}

}  // namespace pycomm
