// The collective seam: what c10d and Python call, and what a transport implements.
//
// A call is data (Request). The base class checks it, before anything is sent, and decides which
// thread runs it; a transport (shm/, later nccl/, p2p/, hier/) executes it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common.h"
#include "worker.h"

namespace pycomm {

// One collective operation on one rank. Input and output may be the same memory, but not overlap
// otherwise.
struct Request {
  Operation operation = Operation::kBarrier;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  Algorithm algorithm = Algorithm::kAuto;
  int root = 0;
  // Elements: of the tensor (all_reduce, broadcast), of one rank's input (all_gather) or output
  // (reduce_scatter).
  int64_t count = 0;
  const void* input = nullptr;
  void* output = nullptr;
  // The list forms, one pointer per rank, in place of one contiguous buffer of world_size * count
  // elements.
  std::vector<const void*> inputs;       // reduce_scatter
  std::vector<void*> outputs;            // all_gather
  std::chrono::milliseconds timeout{0};  // 0: the communicator's

  int64_t bytes() const { return count * bytes_of(dtype); }
};

// "all_reduce(count=5, dtype=float32, op=sum)": how error messages name a call.
std::string describe(const Request& request);

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
  // submit() without the choice.
  void run(Request request) { submit(std::move(request), false, nullptr); }

  // Ends every operation of every rank with AbortedError, now and in the future. From any thread.
  virtual void abort(const std::string& reason) = 0;
  // Finishes what is queued and leaves; peers that still wait for this rank are told.
  virtual void shutdown() = 0;
  // Half a round trip of a flag between rank 0 and the farthest rank, in nanoseconds. Collective.
  virtual double flag_latency_ns() = 0;

  Stats stats() const { return {operations_.load(), bytes_.load()}; }
  virtual uint64_t sequence() const = 0;

 protected:
  virtual void execute(const Request& request) = 0;
  void check(const Request& request) const;
  void check_overlap(const Request& request) const;
  void stop_worker() { worker_.stop(); }

 private:
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
