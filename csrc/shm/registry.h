// The shared-memory communicators of this process: what concerns several groups at once, or all of
// them when the process forks.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <functional>

namespace pycomm {

class ShmCommunicator;

namespace registry {

void add(ShmCommunicator* communicator);
void remove(ShmCommunicator* communicator);
// With the registry locked: `visit` must not wait. Ends early when it returns true.
void visit(const std::function<bool(ShmCommunicator&)>& visit);

// Notes who calls operations; whether more than one thread of this process ever has.
inline std::atomic<uint64_t> only_caller{0};
inline std::atomic<bool> many_callers{false};
inline bool note_caller() {
  if (many_callers.load(std::memory_order_relaxed)) return true;
  const auto self = static_cast<uint64_t>(pthread_self());
  uint64_t known = only_caller.load(std::memory_order_relaxed);
  if (__builtin_expect(known == self, 1)) return false;
  if (known == 0 && only_caller.compare_exchange_strong(known, self)) return false;
  many_callers = true;
  return true;
}

}  // namespace registry
}  // namespace pycomm
