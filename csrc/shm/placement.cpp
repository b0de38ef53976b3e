// How far apart the ranks' cores are, and what follows for the way tensors travel.
#include <algorithm>
#include <chrono>

#include "../algorithms/choose.h"
#include "shm_communicator.h"

namespace pycomm {
namespace {

using Clock = std::chrono::steady_clock;

// The fastest batch of round trips counts: the others were disturbed.
constexpr int kProbeBatches = 5;
constexpr int kRoundsPerBatch = 12;
constexpr uint32_t kProbeRounds =
    1 + kProbeBatches * kRoundsPerBatch;  // the first brings both here
// Placement changes while a job runs (the scheduler, or the host under a virtual machine), so it is
// measured again.
constexpr int64_t kBytesBetweenProbes = 512 << 20;
// A shorter operation counts as this much: a probe may take as long as a few of them.
constexpr int64_t kLeastCounted = 1 << 20;

}  // namespace

bool ShmCommunicator::probe_is_due() const { return until_probe_ <= 0; }

// Of every operation on large private tensors, when all ranks have entered it if the probe is due.
void ShmCommunicator::follow_placement(const Request& request) {
  const ShmConfig& config = segment_->head().config;
  const bool due = probe_is_due();
  if (due) until_probe_ = kBytesBetweenProbes;
  // Ranks must agree, so where their counts may differ these do not count.
  const bool even = !announcement_of(rank()).header.has_parts;
  until_probe_ -= even ? std::max(request.bytes(), kLeastCounted) : kLeastCounted;
  if (!due) return;
  uint32_t latency = 0;  // while ranks take turns on a core and its caches
  if (!crowded_ && (config.streaming == Choice::kAuto || config.single_copy == Choice::kAuto)) {
    measure_latency();
    latency = segment_->area(0).flag_latency_ns;
  }
  const bool far = latency > kFarLatencyNs, between = !far && latency > kSharedCacheLatencyNs;
  const auto follows = [](Choice choice, bool automatic) {
    return choice == Choice::kAuto ? automatic : choice == Choice::kAlways;
  };
  stream_ = follows(config.streaming, far);
  single_copy_ = can_copy_once_ && follows(config.single_copy, between);
}

// Rank 0 exchanges a flag with each peer in turn; the slowest peer counts, and all ranks learn it.
void ShmCommunicator::measure_latency() {
  Flag& flag0 = segment_->area(0).latency_probe;
  const uint32_t base0 = probe_base_;  // rank 0's flag before this measurement
  probe_base_ += static_cast<uint32_t>(world_size() - 1) * kProbeRounds + 1;
  if (rank() == 0) {
    double slowest = 0;
    for (int peer = 1; peer < world_size(); ++peer)
      slowest = std::max(slowest, round_trip_ns(peer, base0 + (peer - 1) * kProbeRounds) / 2);
    segment_->area(0).flag_latency_ns = static_cast<uint32_t>(slowest);
    set_and_wake(flag0.value, probe_base_, flag0.sleepers);
    return;
  }
  const uint32_t turn = base0 + static_cast<uint32_t>(rank() - 1) * kProbeRounds;
  Flag& mine = segment_->area(rank()).latency_probe;
  for (uint32_t round = 1; round <= kProbeRounds; ++round) {
    wait_for_flag(0, flag0, turn + round);
    set_and_wake(mine.value, turn + round, mine.sleepers);
  }
  wait_for_flag(0, flag0, probe_base_);
}

// Rank 0's side of the exchange with one peer: kProbeRounds flags from `turn` on, each answered.
double ShmCommunicator::round_trip_ns(int peer, uint32_t turn) {
  Flag& mine = segment_->area(0).latency_probe;
  Flag& theirs = segment_->area(peer).latency_probe;
  const auto exchange = [&] {
    set_and_wake(mine.value, ++turn, mine.sleepers);
    wait_for_flag(peer, theirs, turn);
  };
  exchange();
  double fastest = 1e9;
  for (int batch = 0; batch < kProbeBatches; ++batch) {
    const auto began = Clock::now();
    for (int round = 0; round < kRoundsPerBatch; ++round) exchange();
    const std::chrono::duration<double, std::nano> took = Clock::now() - began;
    fastest = std::min(fastest, took.count() / kRoundsPerBatch);
  }
  return fastest;
}

void ShmCommunicator::wait_for_flag(int peer, Flag& flag, uint32_t target) const {
  wait_until(flag.value, target, flag.sleepers, patience_, WaitGuard{*this, peer});
}

double ShmCommunicator::flag_latency_ns() {
  Request request;
  request.operation = Operation::kMeasureLatency;
  run(request);
  return segment_->area(0).flag_latency_ns;
}

}  // namespace pycomm
