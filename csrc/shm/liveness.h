// Notices that a peer's process has ended or stands still.
//
// Within a pid namespace by pidfd. Between containers, where pids do not carry over, and where one
// of the two is refused pidfds (seccomp), by a lock that every rank holds on the segment: the
// kernel drops it when the process ends, however it does. Where neither can be had, by a heartbeat:
// a thread of each rank counts, and a rank whose count stands still for kSilence is taken for dead.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "segment.h"

namespace pycomm {

// Why a rank that is gone went: it died, left in good order, or ended or left otherwise.
Cause cause_of_loss(const RankArea& area);

class Liveness {
 public:
  Liveness(std::shared_ptr<Segment> segment, int rank);
  ~Liveness();
  Liveness(const Liveness&) = delete;
  Liveness& operator=(const Liveness&) = delete;

  // Publishes who I am, so that peers can watch me.
  void introduce();
  // When all peers have: decides how each is watched, and helps those that cannot use pidfd.
  void begin();
  // In a forked child: lets go of what would make this rank seem alive.
  void forget();

  // From any thread. A rank that has not introduced itself yet is not dead.
  bool is_dead(int rank) const;
  // By a signal or a debugger; false where that cannot be seen.
  bool is_stopped(int rank) const;
  // "pid 7", with what helps to find it if it is a pid of another namespace.
  std::string process_of(int rank) const;
  static constexpr std::chrono::milliseconds kSilence{1500};

 private:
  struct Watched {
    int descriptor = -1;  // pidfd
    bool gone = false;    // before it could be watched
    uint32_t beats = 0;   // last seen, and when that was new
    std::chrono::steady_clock::time_point since{};
  };
  bool is_me(int rank) const;
  bool shares_namespace(int rank) const;
  bool shares_pids(int rank) const;
  bool take_lock();
  bool holds_lock(int rank) const;
  bool is_silent(int rank) const;
  void beat();

  const std::shared_ptr<Segment> segment_;
  const int rank_;
  const uint64_t pid_namespace_;
  mutable std::mutex mutex_;
  mutable std::vector<Watched> watched_;
  int lock_descriptor_ = -1;
  std::thread heart_;
  std::condition_variable heart_stops_;
  bool stopping_ = false;
};

}  // namespace pycomm
