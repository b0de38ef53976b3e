// The collective seam: what c10d and Python call, and what a transport implements.
//
// A call is data (Request). The base class checks it, before anything is sent, and decides which
// thread runs it; a transport (shm/, later nccl/, p2p/, hier/) executes it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common.h"
#include "worker.h"

namespace pycomm {

// Memory for one rank's part of an operation.
struct ConstSpan {
  const void* data = nullptr;
  int64_t count = 0;  // elements
};
struct Span {
  void* data = nullptr;
  int64_t count = 0;
};

// One collective operation on one rank. Input and output may be the same memory, but not overlap
// otherwise.
struct Request {
  Operation operation = Operation::kBarrier;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  Algorithm algorithm = Algorithm::kAuto;
  int root = 0;
  double factor = 1;  // of premul_sum: this rank's contribution is multiplied by it
  // Elements: of the tensor (all_reduce, reduce, broadcast), of this rank's input (gather,
  // all_gather, all_to_all) or output (scatter, reduce_scatter).
  int64_t count = 0;
  const void* input = nullptr;
  void* output = nullptr;  // null where this rank gets no result (reduce)
  // One part per rank, in place of one contiguous buffer of world_size * count elements.
  std::vector<ConstSpan> inputs;  // reduce_scatter, all_to_all; scatter on the root
  std::vector<Span> outputs;      // all_gather, all_to_all; gather on the root
  bool wait_all_ranks = false;    // monitored_barrier: name every missing rank, not just the first
  std::chrono::milliseconds timeout{0};  // 0: the communicator's

  int64_t bytes() const { return count * bytes_of(dtype); }
  bool reduces() const {
    return operation == Operation::kAllReduce || operation == Operation::kReduce ||
           operation == Operation::kReduceScatter;
  }
  bool has_root() const {
    return operation == Operation::kBroadcast || operation == Operation::kReduce ||
           operation == Operation::kGather || operation == Operation::kScatter;
  }
  // Whether ranks tell each other every part's count: where one cannot know the others', or they
  // differ.
  bool needs_table() const;
};

inline constexpr int64_t kSignalBytes = kSeparationBytes;

// One message of one rank to another.
inline constexpr int kAnySource = -1;
struct Message {
  Operation operation = Operation::kSend;  // or kRecv
  DType dtype = DType::kFloat32;
  int peer = 0;  // for kRecv also kAnySource
  int32_t tag = 0;
  int64_t count = 0;
  void* data = nullptr;                  // read only by kSend
  std::chrono::milliseconds timeout{0};  // 0: the communicator's

  int64_t bytes() const { return count * bytes_of(dtype); }
};

// "all_reduce(count=5, dtype=float32, op=sum)": how error messages name a call.
std::string describe(const Request& request);
std::string describe(const Message& message);

// Why a communicator has ended, if it has.
enum class Failure { kNone, kTimeout, kHere, kElsewhere };

struct Stats {
  uint64_t operations;
  uint64_t bytes;  // of user tensors: count * element size
};

class Communicator {
 public:
  Communicator(int rank, int world_size, std::chrono::milliseconds timeout);
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  std::chrono::milliseconds timeout() const { return timeout_.load(); }
  virtual void set_timeout(std::chrono::milliseconds timeout);
  virtual const char* transport() const = 0;

  // Runs the request, on the calling thread if it is synchronous and nothing is queued: then null
  // is returned. An asynchronous one goes to the worker, behind everything queued before it;
  // `keep_alive` is dropped when it is done. Throws InvalidArgument before anything is sent,
  // otherwise what the operation throws (see error.h).
  virtual std::shared_ptr<Pending> submit(Request request, bool async,
                                          std::shared_ptr<void> keep_alive);
  // Starts to send or receive a message; several may be under way, also beside collectives.
  // Messages of one sender and tag arrive in the order in which they were sent; receives take them
  // in the order in which they were posted. The memory must stay valid until the message is done:
  // `keep_alive` is dropped then. A send that is complete at once gives null; what is returned may
  // be done already. Throws InvalidArgument before anything is sent.
  virtual std::shared_ptr<Pending> post(const Message& message,
                                        std::shared_ptr<void> keep_alive) = 0;

  // Runs work made of several operations, as submit() runs one: what it calls of this communicator
  // runs at once.
  virtual std::shared_ptr<Pending> run_together(std::function<void()> work, bool async);
  // submit() without the choice.
  void run(Request request) { submit(std::move(request), false, nullptr); }

  // Ends every operation of every rank with AbortedError, now and in the future. From any thread.
  virtual void abort(const std::string& reason) = 0;
  virtual Failure failure() const = 0;
  // Finishes what is queued and leaves; peers that still wait for this rank are told.
  virtual void shutdown() = 0;
  // Memory that all ranks can use in place: operations on tensors in it copy less. It stays valid
  // as long as the pointer lives. Throws Error when there is no room.
  virtual std::shared_ptr<void> allocate(int64_t bytes) = 0;
  // Where such memory of this rank lies (-1: elsewhere), and how another rank's is reached.
  virtual int64_t shared_offset(const void* data, int64_t bytes) const = 0;
  virtual void* shared_address(int rank, int64_t offset) const = 0;
  // Signals: counters of kSignalBytes in such memory, zero at first. One rank raises each, and sees
  // to it that what it wrote before is visible to the rank that has awaited it.
  virtual void raise_signal(void* signal) = 0;
  virtual void await_signal(void* signal, uint32_t target, int peer,
                            std::chrono::milliseconds timeout) = 0;

  // Half a round trip of a flag between rank 0 and the farthest rank, in nanoseconds. Collective.
  virtual double flag_latency_ns() = 0;

  Stats stats() const { return {operations_.load(), bytes_.load()}; }
  virtual uint64_t sequence() const = 0;

 protected:
  virtual void execute(const Request& request) = 0;
  void check(const Request& request) const;
  void check(const Message& message) const;
  void stop_worker() { worker_.stop(); }

 private:
  void check_parts(const Request& request) const;
  void check_overlap(const Request& request) const;
  bool runs_at_once(bool async) const;
  std::shared_ptr<Pending> queue(std::function<void()> work, bool async);
  void execute_in_turn(const Request& request);

  const int rank_;
  const int world_size_;
  std::atomic<std::chrono::milliseconds> timeout_;
  std::mutex turn_;  // held while an operation executes: there is one at a time
  std::atomic<uint64_t> operations_{0};
  std::atomic<uint64_t> bytes_{0};
  Worker worker_;
};

}  // namespace pycomm
