// The verbs of slots.h in a CUDA kernel, over memory that the ranks of a host map of each other.
// All threads of a block call them together, with the same arguments; tests/cuda_on_cpu runs this
// same source on the CPU.
//
// A kernel cannot throw. A wait that ends without its flag is reported in the status, once, and
// tells all peers to give up; from then on this rank posts nothing, so that nobody takes what it
// has for a result, every wait returns at once, and failed() is true.
#pragma once

#include <cstdint>

#include "peer_layout.h"

namespace pycomm {

class PeerSlots {
 public:
  static constexpr int kMostRanks = kMostPeers;

  __device__ explicit PeerSlots(const PeerGroup& group)
      : group_(group), block_(static_cast<int>(blockIdx.x)), base_(*sequence()) {
    uint64_t aborted = 0;
    if (threadIdx.x == 0) aborted = peek(abort_word(rank()));
    if (aborted != 0) give_up(aborted_by(aborted));
    failed_ = __syncthreads_or(aborted != 0);
  }

  __device__ int rank() const { return group_.rank; }
  __device__ int world_size() const { return group_.world_size; }
  __device__ int64_t slots() const { return group_.layout.slots; }
  __device__ int64_t slot_bytes() const { return group_.layout.slot_bytes; }
  __device__ bool failed() const { return failed_; }

  __device__ char* mine(int64_t chunk) { return slot(rank(), chunk); }
  __device__ const char* of(int peer, int64_t chunk) { return slot(peer, chunk); }

  __device__ void acquire(int64_t chunk) {
    const uint64_t number = base_ + static_cast<uint64_t>(chunk) + 1;
    const auto slots = static_cast<uint64_t>(group_.layout.slots);
    if (number > slots) wait(threadIdx.x, Stage::kDrained, chunk, number - slots);
  }
  __device__ void post(Stage stage, int64_t chunk) {
    post(stage, chunk, cuda::std::memory_order_release);
  }
  __device__ void await(int peer, Stage stage, int64_t chunk) {
    const int poller = threadIdx.x == 0 ? peer : group_.world_size;
    wait(poller, stage, chunk, base_ + static_cast<uint64_t>(chunk) + 1);
  }
  // Ends an operation of `chunks` chunks: the next one's are numbered behind them.
  __device__ void advance(int64_t chunks) {
    __syncthreads();  // all have read it
    if (threadIdx.x == 0 && !failed_) *sequence() = base_ + static_cast<uint64_t>(chunks);
  }

 protected:
  using Word = cuda::atomic_ref<uint64_t, cuda::thread_scope_system>;
  using Counter = cuda::atomic_ref<uint32_t, cuda::thread_scope_system>;

  // The barrier orders what all threads did before what this one releases.
  __device__ void post(Stage stage, int64_t chunk, cuda::std::memory_order order) {
    __syncthreads();
    const int peer = static_cast<int>(threadIdx.x);
    if (failed_ || peer >= world_size() || peer == rank()) return;
    Word(*flag(peer, stage, rank())).store(base_ + static_cast<uint64_t>(chunk) + 1, order);
  }
  __device__ char* slot(int rank, int64_t chunk) const {
    const uint64_t number = base_ + static_cast<uint64_t>(chunk);
    const auto cell =
        static_cast<uint32_t>(number) & static_cast<uint32_t>(group_.layout.slots - 1);
    return group_.regions[rank] + group_.layout.slot_offset(block_, cell);
  }

 private:
  __device__ uint64_t* word_at(int rank, int64_t offset) const {
    return reinterpret_cast<uint64_t*>(group_.regions[rank] + offset);
  }
  __device__ uint64_t* sequence() const {
    return word_at(group_.rank, group_.layout.sequence_offset(block_));
  }
  __device__ uint64_t* abort_word(int rank) const {
    return word_at(rank, group_.layout.abort_offset());
  }
  __device__ uint64_t* flag(int holder, Stage stage, int poster) const {
    return word_at(holder, group_.layout.flag_offset(block_, stage, poster));
  }
  __device__ static uint64_t peek(uint64_t* word) {
    return Word(*word).load(cuda::std::memory_order_relaxed);
  }

  // Until this thread's `peer`, if it is one, has posted; then all threads go on together.
  __device__ void wait(int peer, Stage stage, int64_t chunk, uint64_t expected) {
    if (!failed_) failed_ = !arrived(peer, stage, chunk, expected);
  }
  // A call rather than code at every wait, so that what it takes does not crowd out what the
  // algorithm keeps in registers. Not __noinline__: that is a macro, and would break GCC's headers
  // where the CPU runs this.
  __device__ __attribute__((noinline)) bool arrived(int peer, Stage stage, int64_t chunk,
                                                    uint64_t expected) const {
    bool good = true;
    if (peer < world_size() && peer != rank()) good = poll(peer, stage, chunk, expected);
    return !__syncthreads_or(!good);
  }
  __device__ bool poll(int peer, Stage stage, int64_t chunk, uint64_t expected) const {
    const Word word(*flag(rank(), stage, peer));
    for (uint64_t polls = 0;; ++polls) {
      const uint64_t seen = word.load(cuda::std::memory_order_acquire);
      if (seen >= expected) return true;
      const uint64_t aborted = polls % kPollsPerAbort == 0 ? peek(abort_word(rank())) : 0;
      if (aborted != 0 || polls >= group_.most_polls) {
        PeerStatus report = aborted_by(aborted);
        if (aborted == 0) {
          report.state = PeerStatus::kTimedOut;
          report.peer = peer;
        }
        report.stage = stage;
        report.chunk = static_cast<uint64_t>(chunk);
        report.expected = expected;
        report.seen = seen;
        give_up(report);
        return false;
      }
      __nanosleep(kPollNanoseconds);
    }
  }
  __device__ void give_up(const PeerStatus& report) const {
    PeerStatus& status = *group_.status;
    if (Counter(status.claimed).exchange(1, cuda::std::memory_order_relaxed) == 0) {
      status.rank = report.rank;
      status.peer = report.peer;
      status.block = report.block;
      status.stage = report.stage;
      status.chunk = report.chunk;
      status.expected = report.expected;
      status.seen = report.seen;
      Counter(status.state).store(report.state, cuda::std::memory_order_release);
    }
    // Who was told by a peer need not tell: it told everybody.
    if (report.state == PeerStatus::kAborted && report.peer >= 0) return;
    for (int peer = 0; peer < world_size(); ++peer)
      Word(*abort_word(peer))
          .store(static_cast<uint64_t>(rank()) + kAbortedByFirst, cuda::std::memory_order_relaxed);
  }
  // By what an abort word says.
  __device__ PeerStatus aborted_by(uint64_t word) const {
    PeerStatus report{};
    report.state = PeerStatus::kAborted;
    report.rank = rank();
    report.peer = static_cast<int>(word) - static_cast<int>(kAbortedByFirst);
    report.block = block_;
    return report;
  }

  static constexpr uint64_t kPollsPerAbort = 16;

  const PeerGroup& group_;
  const int block_;
  const uint64_t base_;
  bool failed_;
};

}  // namespace pycomm
