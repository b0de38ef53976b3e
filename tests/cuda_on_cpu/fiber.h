// A function that can be suspended in its middle, on a stack of its own; and what the sanitizers
// have to be told of it.
#pragma once

#include <sys/mman.h>
#include <ucontext.h>

#include <cstddef>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
extern "C" {
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#endif

namespace cuda_on_cpu {

// ThreadSanitizer: what came before released() happens before what follows acquired().
inline void released([[maybe_unused]] void* edge) {
#if defined(__SANITIZE_THREAD__)
  __tsan_release(edge);
#endif
}
inline void acquired([[maybe_unused]] void* edge) {
#if defined(__SANITIZE_THREAD__)
  __tsan_acquire(edge);
#endif
}
// While one exists, ThreadSanitizer does not look: the scheduler shares its notes with the fibers.
struct UnwatchedByTsan {
  UnwatchedByTsan() {
#if defined(__SANITIZE_THREAD__)
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
#endif
  }
  ~UnwatchedByTsan() {
#if defined(__SANITIZE_THREAD__)
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
#endif
  }
  UnwatchedByTsan(const UnwatchedByTsan&) = delete;
  UnwatchedByTsan& operator=(const UnwatchedByTsan&) = delete;
};

class Fiber {
 public:
  Fiber() {
    void* memory = mmap(nullptr, kStackBytes + kGuardBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    mapping_ = static_cast<char*>(memory);
    mprotect(mapping_, kGuardBytes, PROT_NONE);
#if defined(__SANITIZE_THREAD__)
    tsan_ = __tsan_create_fiber(0);
#endif
  }
  ~Fiber() {
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(stack(), kStackBytes);
#endif
#if defined(__SANITIZE_THREAD__)
    __tsan_destroy_fiber(tsan_);
#endif
    munmap(mapping_, kStackBytes + kGuardBytes);
  }
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // The next resume() calls function(argument), whatever the fiber was in the middle of. The
  // function ends with a suspend() from which it is not resumed.
  void prepare(void (*function)(void*), void* argument) {
    function_ = function;
    argument_ = argument;
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(stack(), kStackBytes);
    fake_stack_ = nullptr;
#endif
    getcontext(&own_);
    own_.uc_stack.ss_sp = stack();
    own_.uc_stack.ss_size = kStackBytes;
    own_.uc_link = nullptr;
    makecontext(&own_, &Fiber::enter, 0);
  }

  // Both return when the other is called.
  void resume() {
    starting() = this;
#if defined(__SANITIZE_THREAD__)
    caller_tsan_ = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(tsan_, __tsan_switch_to_fiber_no_sync);
#endif
#if defined(__SANITIZE_ADDRESS__)
    void* fake_stack = nullptr;
    __sanitizer_start_switch_fiber(&fake_stack, stack(), kStackBytes);
#endif
    swapcontext(&caller_, &own_);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
  }
  void suspend() {
#if defined(__SANITIZE_THREAD__)
    void* caller = nullptr;
    {
      const UnwatchedByTsan unwatched;
      caller = caller_tsan_;
    }
    __tsan_switch_to_fiber(caller, __tsan_switch_to_fiber_no_sync);
#endif
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&fake_stack_, caller_stack_, caller_stack_bytes_);
#endif
    swapcontext(&own_, &caller_);
    finish_switch();
  }

 private:
  static constexpr size_t kStackBytes = 64 << 10, kGuardBytes = 4 << 10;

  static Fiber*& starting() {
    static thread_local Fiber* fiber = nullptr;
    return fiber;
  }
  static void enter() {
    Fiber* fiber = starting();
    fiber->finish_switch();
    fiber->function_(fiber->argument_);
  }
  void finish_switch() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake_stack_, &caller_stack_, &caller_stack_bytes_);
#endif
  }
  char* stack() const { return mapping_ + kGuardBytes; }

  char* mapping_ = nullptr;
  void (*function_)(void*) = nullptr;
  void* argument_ = nullptr;
  ucontext_t own_{}, caller_{};
#if defined(__SANITIZE_ADDRESS__)
  void* fake_stack_ = nullptr;
  const void* caller_stack_ = nullptr;
  size_t caller_stack_bytes_ = 0;
#endif
#if defined(__SANITIZE_THREAD__)
  void *tsan_ = nullptr, *caller_tsan_ = nullptr;
#endif
};

// Fibers are kept for the next that needs one, but for ThreadSanitizer, which takes every start of
// one for a call that has not returned yet.
inline std::vector<std::unique_ptr<Fiber>>& idle_fibers() {
  static thread_local std::vector<std::unique_ptr<Fiber>> fibers;
  return fibers;
}
inline std::unique_ptr<Fiber> take_fiber() {
  auto& idle = idle_fibers();
  if (idle.empty()) return std::make_unique<Fiber>();
  auto fiber = std::move(idle.back());
  idle.pop_back();
  return fiber;
}
inline void give_back([[maybe_unused]] std::unique_ptr<Fiber> fiber) {
#if !defined(__SANITIZE_THREAD__)
  idle_fibers().push_back(std::move(fiber));
#endif
}

}  // namespace cuda_on_cpu
