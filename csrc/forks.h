// Which process something belongs to. A forked child has a copy of all that its parent has, but not
// the threads that make it move: it may use only what was made since.
#pragma once

#include <unistd.h>

#include <atomic>

#include "error.h"

namespace pycomm {

// How often this process has been forked off since its first communicator.
inline std::atomic<unsigned> forks{0};

// A rank's process.
class Origin {
 public:
  explicit Origin(int rank) : rank_(rank), pid_(getpid()), forks_(forks.load()) {}

  bool is_here() const { return forks_ == forks.load(std::memory_order_relaxed); }
  // Throws in a forked child.
  void check() const {
    if (__builtin_expect(!is_here(), 0)) throw_forked();
  }

 private:
  [[noreturn]] void throw_forked() const {
    throw Error(ErrorKind::kError,
                concat("process ", getpid(), " was forked from rank ", rank_, " (pid ", pid_,
                       ") after the process group was made, and cannot communicate in its place. "
                       "Communicate in the parent, or start the process with the 'spawn' or "
                       "'forkserver' method and make a group of its own there."));
  }

  int rank_;
  pid_t pid_;
  unsigned forks_;
};

}  // namespace pycomm
