// A fault on demand, for tests of what the other ranks then say: PYCOMM_TEST_FAULT. Inert unless
// set.
#pragma once

#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <thread>
#include <utility>

#include "error.h"

namespace pycomm {

struct TestFault {
  enum class Kind { kNone, kKill, kSegv, kExit, kStop, kRaise, kDelay, kCorrupt };
  static constexpr int64_t kAtEntry = -1;  // in place of a chunk: before anything is sent

  Kind kind = Kind::kNone;
  int rank = 0;
  uint32_t sequence = 0;  // of the operation
  int64_t chunk = kAtEntry;
  int64_t value = 0;  // milliseconds of a delay, seed of a corruption

  bool is_due(int at_rank, uint32_t at_sequence, int64_t at_chunk) const {
    return kind != Kind::kNone && rank == at_rank && sequence == at_sequence && chunk == at_chunk;
  }
};

inline TestFault& test_fault() {
  static TestFault fault;
  return fault;
}

// Does it, once.
inline void commit_test_fault(const TestFault fault) {
  test_fault().kind = TestFault::Kind::kNone;
  switch (fault.kind) {
    case TestFault::Kind::kKill:
      kill(getpid(), SIGKILL);
      break;
    case TestFault::Kind::kSegv:
      signal(SIGSEGV, SIG_DFL);
      raise(SIGSEGV);
      break;
    case TestFault::Kind::kExit:
      _exit(3);
    case TestFault::Kind::kStop:
      kill(getpid(), SIGSTOP);
      break;
    case TestFault::Kind::kRaise:
      throw Error(ErrorKind::kError, "PYCOMM_TEST_FAULT asked for this error");
    case TestFault::Kind::kDelay:
      std::this_thread::sleep_for(std::chrono::milliseconds(fault.value));
      break;
    default:
      break;
  }
}

inline void test_fault_point(int rank, uint32_t sequence, int64_t chunk) {
  const TestFault& fault = test_fault();
  if (__builtin_expect(fault.kind != TestFault::Kind::kNone, 0) &&
      fault.kind != TestFault::Kind::kCorrupt && fault.is_due(rank, sequence, chunk))
    commit_test_fault(fault);
}

}  // namespace pycomm
