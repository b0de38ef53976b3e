// Collectives among the processes (or, in tests, threads) of one host, over a shared segment.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../algorithms/direct.h"
#include "../algorithms/math.h"
#include "../communicator.h"
#include "../error.h"
#include "heap.h"
#include "liveness.h"
#include "messenger.h"
#include "registry.h"
#include "segment.h"
#include "shm_slots.h"
#include "wait.h"

namespace pycomm {

class ShmCommunicator : public Communicator, private Watch {
 public:
  // Collective over the segment's ranks: returns when all of them have mapped it.
  ShmCommunicator(std::shared_ptr<Segment> segment, int rank, std::chrono::milliseconds timeout);
  ~ShmCommunicator() override;

  const char* transport() const override { return "shm"; }
  void abort(const std::string& reason, Cause cause = Cause::kAborted) override;
  void shutdown() override;
  Failure failure() const override;
  // Leaves without finishing anything, as destruction does. Its threads have ended afterwards.
  void end();
  // In a forked child.
  void forget() { liveness_.forget(); }
  // The segment with which a part of the ranks goes on; collective over these, in rising order.
  // What is under way in this communicator ends. Raises PeerDiedError if one of them dies
  // meanwhile.
  std::shared_ptr<Segment> succeed(const std::vector<int>& ranks,
                                   std::chrono::milliseconds timeout);
  std::vector<int> living_ranks() const override;
  double flag_latency_ns() override;
  Algorithm all_reduce_algorithm(int64_t bytes) const override {
    return choose_all_reduce(segment_->head().config.all_reduce, bytes);
  }
  std::shared_ptr<Pending> post(const Message& message, std::shared_ptr<void> keep_alive) override;
  std::shared_ptr<void> allocate(int64_t bytes) override {
    check_process();  // the parent, who has the heap too, would hand out the same memory
    return heap_->allocate(bytes);
  }
  int64_t shared_offset(const void* data, int64_t bytes) const override {
    return heap_->offset_of(data, bytes);
  }
  void* shared_address(int rank, int64_t offset) const override {
    return heap_->address(rank, offset);
  }
  void raise_signal(void* signal) override;
  void await_signal(void* signal, uint32_t target, int peer,
                    std::chrono::milliseconds timeout) override;
  uint64_t sequence() const override { return sequence_.load(std::memory_order_relaxed); }
  std::vector<RecordView> records(int rank) const override;
  RankState state_of(int rank) const override;
  std::optional<Error> failure_report() const override;
  void set_farewell(const std::string& reason) override;

 protected:
  void execute(const Request& request) override;

 private:
  class SignalGuard;
  // Where a peer waits for this rank in another group.
  struct Crossing {
    std::shared_ptr<Segment> segment;
    int rank;
    uint32_t sequence;
    std::string call, group;
  };

  // shm_collectives.cpp
  void dispatch(const Request& request);
  void all_reduce(const Request& request);
  void compressed_all_reduce(const Request& request);
  void reduce_scatter(const Request& request);
  void broadcast(const Request& request);
  void gather(const Request& request);
  void all_to_all(const Request& request);
  void monitored_barrier();
  std::string late_ranks(int first);

  // The head of every operation: publish my header with up to kEagerBytes of data, then see every
  // peer's.
  Announcement& announcement_of(int rank) const {
    return segment_->area(rank).announcements[sequence_ & 1];
  }
  bool has_entered(int rank) const {
    return reached(load_acquire(announcement_of(rank).header.sequence), sequence_);
  }
  void fill_header(const Request& request);
  void corrupt(OperationHeader& header) const;
  void announce(const void* payload = nullptr, int64_t payload_bytes = 0);
  void write_parts(const Request& request);
  int64_t place_of(const Request& request) const;
  uint64_t address_of(const Request& request) const;
  // Of a tensor that its rank's header places in shared memory.
  bool is_shared(int rank) const { return announcement_of(rank).header.place != 0; }
  bool all_are_shared();
  bool all_are_in_place();
  char* shared_tensor(int rank) {
    return heap_->address(rank, announcement_of(rank).header.place - 1);
  }
  bool is_sound(const OperationHeader& header) const;
  void check_sound(int peer) const;
  void meet() override;
  void meet_peer(int peer);
  bool agrees_with(int peer) const;
  void check_parts();
  // `stream`: whether slot writes should bypass the caches; what chunks use decides that by itself.
  Math math_for(const Request& request, bool stream);
  Math chunked_math(const Request& request);
  bool meets_later(const Request& request);

  // Other ranks' private memory, by single copies.
  void find_single_copy();
  bool copies_once(const Request& request) const;
  bool reaches(int64_t bytes) const;
  // For algorithms: copies out of the tensor that a rank's header names.
  auto reader() {
    return [this](int peer, int64_t offset, char* to, int64_t bytes) {
      read_tensor(peer, offset, to, bytes);
    };
  }
  void read_tensor(int peer, int64_t offset, char* to, int64_t bytes);
  void read_memory(int peer, uint64_t from, char* to, int64_t bytes);
  void advance_directly(int64_t chunks);
  Scratch scratch();

  // placement.cpp
  void measure_latency();
  double round_trip_ns(int peer, uint32_t turn);
  void wait_for_flag(int peer, Flag& flag, uint32_t target) const;
  bool probe_is_due() const;
  void follow_placement(const Request& request);

  void begin(const Request& request);
  void finish(bool failed);
  void fail(const Error& error);
  bool is_short() const { return request_->bytes() <= kEagerBytes; }
  void leave(Departure how);
  bool a_call_found_one_gone() const;
  void see_others_leave() const;

  // succession.cpp
  std::shared_ptr<Segment> lead(const std::vector<int>& ranks,
                                std::chrono::steady_clock::time_point deadline);
  std::shared_ptr<Segment> follow(const std::vector<int>& ranks,
                                  std::chrono::steady_clock::time_point deadline);
  void wait_for_offer(int leader, uint32_t seen, std::chrono::steady_clock::time_point deadline);

  uint32_t operation_number() const override { return sequence_; }

  // The end of a wait.
  bool check_wait(int peer, bool sleeping) const override;
  void look_around(int peer) const;
  bool has_ended() const;
  bool is_gone(int peer) const;
  [[noreturn]] void throw_ended(const std::string& where) const;
  void check_entry();
  void record_abort(const Error& error);
  static void wake_all(RankArea& area);

  // diagnosis.cpp: what is said then.
  [[noreturn]] void lost_peer(int peer) const override;
  [[noreturn]] void throw_mismatch(const std::string& difference) const;
  [[noreturn]] void throw_late(int peer) const;
  [[noreturn]] void throw_left_early(int peer, uint32_t sequence) const;
  void check_for_crossing(int peer) const;
  std::optional<Crossing> awaited_by(const RankArea& process) const;
  std::string where() const;
  std::string own_call() const;
  std::string call_of(int rank) const;
  std::string calls() const;
  void report() const;
  std::string arrivals() const;
  std::string last_of(int rank) const;

  std::shared_ptr<Segment> segment_;
  std::shared_ptr<Heap> heap_;
  mutable Liveness liveness_;
  Patience patience_;
  bool can_copy_once_ = false;  // ranks can read each other's memory; the same on all ranks
  bool single_copy_ = false;    // and it pays, where they are now
  uint64_t probe_word_ = 0;
  std::vector<char> scratch_;
  bool crowded_ = false;  // more ranks than cores; the same on all ranks
  const bool checks_headers_;
  const bool records_;
  ShmSlots slots_;
  std::atomic<uint32_t> sequence_{0};  // of the operation in progress, or the last one; wraps
  int64_t until_probe_ = 0;  // bytes of large operations before the latency is measured again
  bool stream_ = false;
  uint32_t probe_base_ = 0;          // rank 0's latency flag before the next measurement
  std::atomic<bool> failed_{false};  // a failure has been reported here: later calls say so
  std::atomic<bool> closing_{false};
  std::shared_ptr<Messenger> messenger_;  // its helper and its transfers hold it, too

  // Of the operation in progress.
  const Request* request_ = nullptr;
  uint64_t record_ = 0;  // its number in the flight recorder
  uint64_t started_ = 0, met_ = 0;
  bool meeting_ = false;                // until all ranks have entered it
  std::chrono::milliseconds limit_{0};  // of its waits
  double factors_[kMaxRanks];           // every rank's, of a premul_sum
  mutable std::chrono::steady_clock::time_point wait_began_;
  mutable bool waiting_ = false;
  mutable bool waited_ = false;  // for longer than a few hundred polls
};

}  // namespace pycomm
