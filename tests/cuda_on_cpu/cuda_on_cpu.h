// Runs CUDA kernels on the CPU: include this, then the kernel's source, and call launch() for a
// kernel whose threads do not wait for each other, launch_blocks() for one with barriers, warp
// operations or shared memory, launch_resident() for one whose blocks wait for other launches'.
//
// A launch runs one thread of the grid at a time, in an order that a seed permutes: what depends on
// the order of threads gives another result. launch_blocks() is stricter than a device: it throws
// where threads wait for ones that never come. ThreadSanitizer sees the threads of a block as
// concurrent but for their barriers. Blocks of launch_blocks() follow each other, so two blocks'
// accesses to the same memory are found by the order of blocks only. Needs no CUDA toolkit; the
// conversions below are written from the formats' definitions, not from the code under test.
// Nothing is said about speed or memory order.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "fiber.h"

#define __global__
#define __device__
#define __host__
#define __shared__ static thread_local  // of one block at a time, which is in one thread
#define __grid_constant__
#define __launch_bounds__(...)

// ---- the built-in variables ---------------------------------------------------------------------

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
inline thread_local dim3 gridDim, blockDim, blockIdx, threadIdx;

namespace cuda_on_cpu {

// The order in which a launch's threads run: as numbered, from the last to the first, or shuffled
// by a seed.
enum class Order { kForward, kBackward, kShuffled };

// 0, 1, ... count - 1 in that order.
inline std::vector<unsigned> in_order(unsigned count, Order order, std::mt19937& generator) {
  std::vector<unsigned> sequence(count);
  std::iota(sequence.begin(), sequence.end(), 0u);
  if (order == Order::kBackward) std::reverse(sequence.begin(), sequence.end());
  if (order == Order::kShuffled) std::shuffle(sequence.begin(), sequence.end(), generator);
  return sequence;
}

template <class Kernel, class... Arguments>
void launch(unsigned blocks, unsigned threads, Order order, unsigned seed, Kernel&& kernel,
            const Arguments&... arguments) {
  std::mt19937 generator(seed);
  gridDim = dim3{blocks};
  blockDim = dim3{threads};
  for (const unsigned number : in_order(blocks * threads, order, generator)) {
    blockIdx = dim3{number / threads, 0, 0};
    threadIdx = dim3{number % threads, 0, 0};
    kernel(arguments...);
  }
}

// ---- threads that wait for each other -----------------------------------------------------------

inline constexpr unsigned kWarp = 32;

enum class Wait { kNothing, kSleep, kBarrier, kShuffle, kBallot, kDone };

struct Thread {
  unsigned number = 0;
  Wait wait = Wait::kNothing;
  unsigned mask = 0;    // of the warp operation that it waits in
  unsigned source = 0;  // the lane that it reads
  uint64_t value = 0;   // what it gives, then what it gets
  std::unique_ptr<Fiber> fiber;
};

// The threads of one block at a time, each a fiber.
class Block {
 public:
  static Block*& current() {
    static thread_local Block* block = nullptr;
    return block;
  }

  Block(unsigned threads, Order order, unsigned seed, std::function<void()> kernel)
      : order_(order), generator_(seed), kernel_(std::move(kernel)) {
    for (unsigned number = 0; number < threads; ++number) {
      threads_.push_back(std::make_unique<Thread>());
      threads_.back()->number = number;
      threads_.back()->fiber = take_fiber();
    }
  }
  ~Block() {
    for (const auto& thread : threads_) give_back(std::move(thread->fiber));
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  // Throws if the threads of the block cannot all come to their end.
  void run(unsigned block) {
    const UnwatchedByTsan unwatched;
    Block* outer = std::exchange(current(), this);
    blockIdx = dim3{block, 0, 0};
    done_ = at_barrier_ = 0;
    ready_.clear();
    error_.clear();
    released(&start_);
    for (const auto& thread : threads_) {
      thread->wait = Wait::kNothing;
      thread->fiber->prepare(&Block::enter, this);
    }
    make_all_ready();
    while (!ready_.empty() && error_.empty()) step();
    current() = outer;
    acquired(&end_);
    if (error_.empty() && done_ < threads_.size()) error_ = stuck();
    if (!error_.empty()) throw std::runtime_error(error_);
  }

  // Whether any thread came with a `vote`.
  bool barrier(bool vote) {
    void* const edge = &barriers_[barrier_turn_ % 2];  // the next barrier's may come early
    released(edge);
    {
      const UnwatchedByTsan unwatched;
      running_->value = vote;
    }
    suspend(Wait::kBarrier);
    acquired(edge);
    const UnwatchedByTsan unwatched;
    return running_->value != 0;
  }
  // Lets the other threads of the block run, and the other blocks.
  void sleep() { suspend(Wait::kSleep); }
  // Now and then, where the order of threads is shuffled: as if something else came between.
  void disturb() {
    if (order_ != Order::kShuffled) return;
    bool now = false;
    {
      const UnwatchedByTsan unwatched;
      now = generator_() % 4 == 0;
    }
    if (now) sleep();
  }

  uint64_t warp_operation(Wait kind, unsigned mask, uint64_t value, unsigned source) {
    Thread& thread = *running_;
    {
      const UnwatchedByTsan unwatched;
      thread.mask = mask;
      thread.value = value;
      thread.source = source;
    }
    suspend(kind);
    return thread.value;
  }
  unsigned lane() const { return running_->number % kWarp; }

 private:
  // Threads [first, first + count) of those in `mask`, which is for at most a warp.
  void make_ready(unsigned first, unsigned count, unsigned mask = ~0u) {
    for (const unsigned number : in_order(count, order_, generator_)) {
      if (count <= kWarp && !(mask >> number & 1)) continue;
      Thread& thread = *threads_[first + number];
      thread.wait = Wait::kNothing;
      ready_.push_back(&thread);
    }
  }
  void make_all_ready() { make_ready(0, static_cast<unsigned>(threads_.size())); }

  // Runs a thread until it waits or ends, and sees whom that lets go on.
  void step() {
    running_ = ready_.front();
    ready_.pop_front();
    threadIdx = dim3{running_->number, 0, 0};
    running_->fiber->resume();
    switch (running_->wait) {
      case Wait::kDone:
        ++done_;
        return;
      case Wait::kSleep:
        running_->wait = Wait::kNothing;
        ready_.push_back(running_);
        std::this_thread::yield();
        return;
      case Wait::kBarrier:
        if (++at_barrier_ < threads_.size()) return;
        return open_barrier();
      default:
        return exchange(running_->number / kWarp * kWarp);
    }
  }

  void open_barrier() {
    bool any = false;
    for (const auto& thread : threads_) any = any || thread->value != 0;
    for (const auto& thread : threads_) thread->value = any;
    at_barrier_ = 0;
    ++barrier_turn_;
    make_all_ready();
  }

  // The warp operation that the running thread waits in, if it was the last to come.
  void exchange(unsigned first) {
    const unsigned mask = running_->mask;
    const auto lanes = static_cast<unsigned>(std::min<size_t>(kWarp, threads_.size() - first));
    if (!(mask >> (running_->number - first) & 1)) return fail("a mask leaves out its own lane");
    uint64_t given[kWarp] = {}, ballot = 0;
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      if (!(mask >> lane & 1)) continue;
      if (lane >= lanes) return fail("a mask names a lane that the block does not have");
      const Thread& thread = *threads_[first + lane];
      if (thread.wait == Wait::kDone) return fail("a mask names a lane that has ended");
      if (thread.wait == Wait::kNothing) return;  // yet to come
      if (thread.wait != running_->wait || thread.mask != mask)
        return fail("the lanes of a warp are in different operations");
      given[lane] = thread.value;
      ballot |= uint64_t{thread.value != 0} << lane;
    }
    const bool shuffles = running_->wait == Wait::kShuffle;
    for (unsigned lane = 0; lane < lanes; ++lane) {
      if (!(mask >> lane & 1)) continue;
      Thread& thread = *threads_[first + lane];
      if (shuffles && !(mask >> thread.source & 1)) return fail("a shuffle reads an absent lane");
      thread.value = shuffles ? given[thread.source] : ballot;
    }
    make_ready(first, lanes, mask);
  }

  void suspend(Wait wait) {
    released(&end_);  // it may be the last that is heard of this thread
    Fiber* fiber = nullptr;
    {
      const UnwatchedByTsan unwatched;
      running_->wait = wait;
      fiber = running_->fiber.get();
    }
    fiber->suspend();
  }

  static void enter(void* self) {
    Block& block = *static_cast<Block*>(self);
    acquired(&block.start_);
    block.kernel_();
    block.suspend(Wait::kDone);
  }

  void fail(const char* what) {
    error_ = "CUDA kernel, block " + std::to_string(blockIdx.x) + ", thread " +
             std::to_string(running_->number) + ": " + what;
  }
  std::string stuck() const {
    return "CUDA kernel, block " + std::to_string(blockIdx.x) + ": of " +
           std::to_string(threads_.size()) + " threads " + std::to_string(at_barrier_) +
           " wait at a barrier and " + std::to_string(done_) + " have ended";
  }

  const Order order_;
  std::mt19937 generator_;
  const std::function<void()> kernel_;
  std::vector<std::unique_ptr<Thread>> threads_;
  std::deque<Thread*> ready_;
  Thread* running_ = nullptr;
  size_t done_ = 0, at_barrier_ = 0;
  unsigned barrier_turn_ = 0;
  std::string error_;
  char start_ = 0, end_ = 0, barriers_[2] = {};  // whose addresses ThreadSanitizer is told
};

template <class Kernel, class... Arguments>
void launch_blocks(unsigned blocks, unsigned threads, Order order, unsigned seed, Kernel&& kernel,
                   const Arguments&... arguments) {
  std::mt19937 generator(seed);
  gridDim = dim3{blocks};
  blockDim = dim3{threads};
  Block block(threads, order, seed, [&] { kernel(arguments...); });
  for (const unsigned number : in_order(blocks, order, generator)) block.run(number);
}

// All blocks at once, each in a thread of its own: for blocks that wait for those of other
// launches. As on a device, they must all fit.
template <class Kernel, class... Arguments>
void launch_resident(unsigned blocks, unsigned threads, Order order, unsigned seed, Kernel&& kernel,
                     const Arguments&... arguments) {
  std::mt19937 generator(seed);
  std::vector<std::thread> running;
  std::vector<std::exception_ptr> failures(blocks);
  for (const unsigned number : in_order(blocks, order, generator))
    running.emplace_back([&, number] {
      gridDim = dim3{blocks};
      blockDim = dim3{threads};
      try {
        Block(threads, order, seed + number, [&] { kernel(arguments...); }).run(number);
      } catch (...) {
        failures[number] = std::current_exception();
      }
    });
  for (std::thread& thread : running) thread.join();
  for (const std::exception_ptr& failure : failures)
    if (failure) std::rethrow_exception(failure);
}

inline Block& waiting_block() {
  if (!Block::current()) throw std::logic_error("a kernel that waits needs launch_blocks()");
  return *Block::current();
}

template <class T>
T shuffle(unsigned mask, T value, unsigned source) {
  static_assert(sizeof(T) <= sizeof(uint64_t) && std::is_trivially_copyable_v<T>);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = waiting_block().warp_operation(Wait::kShuffle, mask, bits, source);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// An atomic operation in terms of compare-and-swap; returns what was there.
template <class T, class Change>
T change_atomically(T* at, Change&& change) {
  using Bits = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
  static_assert(sizeof(T) == sizeof(Bits));
  Bits before = __atomic_load_n(reinterpret_cast<Bits*>(at), __ATOMIC_RELAXED), after;
  T old;
  do {
    std::memcpy(&old, &before, sizeof old);
    const T changed = change(old);
    std::memcpy(&after, &changed, sizeof after);
  } while (!__atomic_compare_exchange_n(reinterpret_cast<Bits*>(at), &before, after, false,
                                        __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return old;
}

// ---- 16-bit floats ------------------------------------------------------------------------------

// A binary float of 1 + kExponentBits + kMantissaBits = 16 bits.
template <int kExponentBits, int kMantissaBits>
struct Format {
  static constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  static constexpr int kHidden = 1 << kMantissaBits;  // the mantissa's implied leading bit
  static constexpr uint16_t kInfinity =
      static_cast<uint16_t>(((1 << kExponentBits) - 1) << kMantissaBits);

  static float widen(uint16_t bits) {
    const int exponent = (bits & 0x7fff) >> kMantissaBits, mantissa = bits & (kHidden - 1);
    double magnitude = std::ldexp(mantissa, 1 - kBias - kMantissaBits);  // zero or subnormal
    if ((bits & 0x7fff) >= kInfinity)
      magnitude = mantissa ? NAN : INFINITY;
    else if (exponent)
      magnitude = std::ldexp(mantissa + kHidden, exponent - kBias - kMantissaBits);
    return static_cast<float>(bits & 0x8000 ? -magnitude : magnitude);
  }

  // To nearest, ties to even; every NaN becomes 0x7fff, as the device's conversions do.
  static uint16_t narrow(float value) {
    if (std::isnan(value)) return 0x7fff;
    const int sign = std::signbit(value) ? 0x8000 : 0;
    const double magnitude = std::fabs(static_cast<double>(value));
    if (magnitude == 0) return static_cast<uint16_t>(sign);
    const int exponent = std::max(std::ilogb(magnitude), 1 - kBias);
    if (exponent > kBias) return static_cast<uint16_t>(sign | kInfinity);
    const int units =
        static_cast<int>(std::nearbyint(std::ldexp(magnitude, kMantissaBits - exponent)));
    // The hidden bit adds one to the exponent field, and a carry out of the mantissa another: also
    // into infinity.
    return static_cast<uint16_t>(sign | (((exponent + kBias - 1) << kMantissaBits) + units));
  }
};
using Binary16 = Format<5, 10>;
using Brain16 = Format<8, 7>;

}  // namespace cuda_on_cpu

inline void __syncthreads() { cuda_on_cpu::waiting_block().barrier(false); }
inline int __syncthreads_or(int predicate) {
  return cuda_on_cpu::waiting_block().barrier(predicate != 0);
}
inline void __nanosleep(unsigned) { cuda_on_cpu::waiting_block().sleep(); }
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return static_cast<unsigned>(cuda_on_cpu::waiting_block().warp_operation(
      cuda_on_cpu::Wait::kBallot, mask, predicate != 0, 0));
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }
template <class T>
T __shfl_sync(unsigned mask, T value, int source) {
  return cuda_on_cpu::shuffle(mask, value, static_cast<unsigned>(source) % cuda_on_cpu::kWarp);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int distance) {
  const unsigned lane = cuda_on_cpu::waiting_block().lane();
  return cuda_on_cpu::shuffle(mask, value, lane ^ static_cast<unsigned>(distance));
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned distance) {
  const unsigned lane = cuda_on_cpu::waiting_block().lane();
  return cuda_on_cpu::shuffle(mask, value,
                              lane + distance < cuda_on_cpu::kWarp ? lane + distance : lane);
}
template <class T>
T atomicAdd(T* at, T value) {
  return cuda_on_cpu::change_atomically(at, [&](T old) { return static_cast<T>(old + value); });
}
template <class T>
T atomicMax(T* at, T value) {
  return cuda_on_cpu::change_atomically(at, [&](T old) { return std::max(old, value); });
}

// The part of libcu++ that the kernels use.
namespace cuda {
enum thread_scope { thread_scope_system };
namespace std {
enum memory_order { memory_order_relaxed, memory_order_acquire, memory_order_release };
}
template <class T, thread_scope>
class atomic_ref {
 public:
  explicit atomic_ref(T& word) : word_(&word) {}
  T load(std::memory_order order) const {
    cuda_on_cpu::waiting_block().disturb();
    return order == std::memory_order_acquire ? __atomic_load_n(word_, __ATOMIC_ACQUIRE)
                                              : __atomic_load_n(word_, __ATOMIC_RELAXED);
  }
  void store(T value, std::memory_order order) const {
    cuda_on_cpu::waiting_block().disturb();
    if (order == std::memory_order_release)
      __atomic_store_n(word_, value, __ATOMIC_RELEASE);
    else
      __atomic_store_n(word_, value, __ATOMIC_RELAXED);
  }
  T exchange(T value, std::memory_order) const {
    return __atomic_exchange_n(word_, value, __ATOMIC_RELAXED);
  }

 private:
  T* word_;
};
}  // namespace cuda

struct __half {
  uint16_t bits;
};
struct __nv_bfloat16 {
  uint16_t bits;
};
inline __half __ushort_as_half(uint16_t bits) { return {bits}; }
inline uint16_t __half_as_ushort(__half value) { return value.bits; }
inline float __half2float(__half value) { return cuda_on_cpu::Binary16::widen(value.bits); }
inline __half __float2half_rn(float value) { return {cuda_on_cpu::Binary16::narrow(value)}; }
inline __nv_bfloat16 __ushort_as_bfloat16(uint16_t bits) { return {bits}; }
inline uint16_t __bfloat16_as_ushort(__nv_bfloat16 value) { return value.bits; }
inline float __bfloat162float(__nv_bfloat16 value) {
  return cuda_on_cpu::Brain16::widen(value.bits);
}
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  return {cuda_on_cpu::Brain16::narrow(value)};
}
