// The verbs of slots.h over a shared segment.
#pragma once

#include <cstdint>

#include "../slots.h"
#include "../test_fault.h"
#include "segment.h"
#include "wait.h"

namespace pycomm {

// Looks after a rank's waits: see wait_until. Implemented by the communicator, which knows the
// operation in progress.
class Watch {
 public:
  // Sees every peer's header of this operation.
  virtual void meet() = 0;
  virtual uint32_t operation_number() const = 0;  // of the one in progress
  virtual bool check_wait(int peer, bool sleeping) const = 0;
  [[noreturn]] virtual void lost_peer(int peer) const = 0;

 protected:
  ~Watch() = default;
};
struct WaitGuard {
  const Watch& watch;
  int peer;
  bool check(bool sleeping) const { return watch.check_wait(peer, sleeping); }
  void lost() const { watch.lost_peer(peer); }
};

class ShmSlots {
 public:
  static constexpr int kMostRanks = kMaxRanks;

  ShmSlots(Segment& segment, int rank, const Patience& patience, Watch& watch)
      : segment_(segment), rank_(rank), patience_(patience), watch_(watch) {
    const SegmentHead& head = segment.head();
    world_size_ = head.world_size;
    slots_ = head.config.slots;
    slot_bytes_ = head.config.slot_bytes;
  }

  void set_patience(const Patience& patience) { patience_ = patience; }
  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  int64_t slots() const { return slots_; }
  int64_t slot_bytes() const { return slot_bytes_; }

  char* mine(int64_t chunk) { return slot(rank_, chunk); }
  const char* of(int peer, int64_t chunk) { return slot(peer, chunk); }

  void acquire(int64_t chunk) {
    const uint32_t number = base_ + static_cast<uint32_t>(chunk);
    for (int peer = 0; peer < world_size_; ++peer)
      if (peer != rank_) wait(peer, Stage::kDrained, number - static_cast<uint32_t>(slots_) + 1);
  }
  void post(Stage stage, int64_t chunk) {
    test_fault_point(rank_, watch_.operation_number(), chunk);
    Flag& flag = flag_of(rank_, stage);
    set_and_wake(flag.value, base_ + static_cast<uint32_t>(chunk) + 1, flag.sleepers);
  }
  void await(int peer, Stage stage, int64_t chunk) {
    meet();
    wait(peer, stage, base_ + static_cast<uint32_t>(chunk) + 1);
  }

  // The peers' headers are looked at before the first of their bytes, or at the end: so a rank
  // fills its first slots while others still finish the operation before.
  void meet_later() { met_ = false; }
  void meet() {
    if (met_) return;
    met_ = true;
    watch_.meet();
  }

  // Ends an operation of `chunks` chunks: the next one's are numbered behind them. Every rank must
  // have drained them.
  // Stages that it did not use catch up: left behind for 2^31 chunks, they would seem to lie ahead.
  void advance(int64_t chunks) {
    meet();
    base_ += static_cast<uint32_t>(chunks);
    for (Flag& stage : segment_.area(rank_).stages)
      if (stage.value != base_) store_release(stage.value, base_);  // nobody waits for it: no wake
  }

 private:
  char* slot(int rank, int64_t chunk) {
    const uint32_t number = base_ + static_cast<uint32_t>(chunk);
    return segment_.slots_of(rank) + (number % static_cast<uint32_t>(slots_)) * slot_bytes_;
  }
  Flag& flag_of(int rank, Stage stage) {
    return segment_.area(rank).stages[static_cast<int>(stage)];
  }
  void wait(int peer, Stage stage, uint32_t target) {
    Flag& flag = flag_of(peer, stage);
    if (reached(load_acquire(flag.value), target)) return;
    wait_until(flag.value, target, flag.sleepers, patience_, WaitGuard{watch_, peer});
  }

  Segment& segment_;
  const int rank_;
  int world_size_;
  int64_t slots_;
  int64_t slot_bytes_;
  Patience patience_;
  Watch& watch_;
  bool met_ = true;
  uint32_t base_ = 0;  // chunks of all operations before this one; wraps
};

}  // namespace pycomm
