// Waiting on shared words: spin, then yield, then sleep in the kernel, always with an end.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <chrono>
#include <climits>
#include <cstdint>

#include "../interrupt.h"
#include "segment.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pycomm {

// Shared words are plain integers, so that other compilers can see the structs; these are their
// only accessors.
inline uint32_t load_acquire(const uint32_t& word) {
  return __atomic_load_n(&word, __ATOMIC_ACQUIRE);
}
inline uint32_t load_ordered(const uint32_t& word) {
  return __atomic_load_n(&word, __ATOMIC_SEQ_CST);
}
inline void store_ordered(uint32_t& word, uint32_t value) {
  __atomic_store_n(&word, value, __ATOMIC_SEQ_CST);
}
inline uint64_t load_ordered(const uint64_t& word) {
  return __atomic_load_n(&word, __ATOMIC_SEQ_CST);
}
inline void store_ordered(uint64_t& word, uint64_t value) {
  __atomic_store_n(&word, value, __ATOMIC_SEQ_CST);
}
inline void store_release(uint32_t& word, uint32_t value) {
  __atomic_store_n(&word, value, __ATOMIC_RELEASE);
}

// Counters wrap: `value` is at or past `target` if it lies less than half the range ahead.
inline bool reached(uint32_t value, uint32_t target) {
  return static_cast<int32_t>(value - target) >= 0;
}

inline void cpu_relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline void futex_wait(uint32_t& word, uint32_t seen, std::chrono::milliseconds at_most) {
  const timespec limit{at_most.count() / 1000, (at_most.count() % 1000) * 1000000};
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &limit, nullptr, 0);
}
inline void futex_wake_all(uint32_t& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Sets a word and wakes its sleepers, if any. Store and load are both sequentially consistent, like
// the sleeper's announcement and its last look: one of the two sees the other.
inline void set_and_wake(uint32_t& word, uint32_t value, const uint32_t& sleepers) {
  store_ordered(word, value);
  if (__builtin_expect(load_ordered(sleepers) != 0, 0)) futex_wake_all(word);
}

// How long to poll before yielding, and to yield before sleeping. With more ranks than cores the
// peer cannot run while we spin, so we yield at once.
struct Patience {
  int spin_polls;
  int yields;
};

// Announces, while it lives, that a thread sleeps or is about to.
struct Sleeper {
  uint32_t& count;
  explicit Sleeper(uint32_t& word) : count(word) {
    __atomic_add_fetch(&count, 1, __ATOMIC_SEQ_CST);
  }
  ~Sleeper() { __atomic_sub_fetch(&count, 1, __ATOMIC_SEQ_CST); }
  Sleeper(const Sleeper&) = delete;
  Sleeper& operator=(const Sleeper&) = delete;
};

// Waits until the word of a peer reaches `target`. guard.check(sleeping) is called every so often,
// also while polling; it throws on abort or past the deadline, and returns false if the peer is
// gone. What a peer posted before it went still counts, so only a last look at the word decides
// that guard.lost() throws.
template <class Guard>
void wait_until(uint32_t& word, uint32_t target, uint32_t& sleepers, const Patience& patience,
                const Guard& guard) {
  const auto keep_waiting = [&](bool sleeping) {
    if (guard.check(sleeping)) return;
    if (!reached(load_ordered(word), target)) guard.lost();
  };
  for (int poll = 0; poll < patience.spin_polls; ++poll) {
    if (reached(load_acquire(word), target)) return;
    cpu_relax();
    if (poll % 256 == 255) keep_waiting(false);
  }
  for (int turn = 0; turn < patience.yields; ++turn) {
    if (reached(load_acquire(word), target)) return;
    sched_yield();
    if (turn % 64 == 63) keep_waiting(false);
  }
  const Sleeper sleeper(sleepers);
  for (;;) {
    const uint32_t seen = load_ordered(word);
    if (reached(seen, target)) return;
    keep_waiting(true);
    futex_wait(word, seen, kSleep);
  }
}

}  // namespace pycomm
