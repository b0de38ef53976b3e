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
#include <optional>
#include <string>
#include <vector>

#include "algorithms/encoder.h"
#include "common.h"
#include "error.h"
#include "forks.h"
#include "recorder.h"
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
  void* stream = nullptr;                // of tensors on a GPU: the caller's CUDA stream
  // Of an all_reduce of encoded values: its tensors, in place of input and output.
  std::shared_ptr<const Compression> compression;
  Shape shape;          // for people, while it is called
  uint64_t record = 0;  // of the flight recorder, if it was queued

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
  Shape shape;                           // for people
  void* stream = nullptr;                // of tensors on a GPU: the caller's CUDA stream

  int64_t bytes() const { return count * bytes_of(dtype); }
};

// "all_reduce(count=5, dtype=float32, op=sum)": how error messages name a call.
std::string describe(const Request& request);
std::string describe(const Message& message);

// Why a communicator has ended, if it has.
enum class Failure { kNone, kTimeout, kHere, kElsewhere };

// What was done so far, of one operation or message.
struct Tally {
  uint64_t operations = 0;
  uint64_t bytes = 0;       // of user tensors: count * element size
  double seconds = 0;       // from start to end; of short ones that had not to wait, none
  double seconds_wait = 0;  // of them, until all ranks had entered
};

// The state of a rank, as far as another one can tell.
struct RankState {
  int pid = 0;
  bool alive = true;
  bool stopped = false;   // by a signal or a debugger
  bool left = false;      // the group
  uint32_t sequence = 0;  // the last collective that it entered
  std::string farewell;   // what it left with, if that was an exception
};

class Communicator {
 public:
  Communicator(int rank, int world_size, std::chrono::milliseconds timeout);
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // How error messages name the group (empty: they do not), and its ranks in the whole job. Before
  // the first operation.
  void set_group(const std::string& name, const std::vector<int>& global_ranks);
  const std::string& name() const { return name_; }
  const std::vector<int>& global_ranks() const { return global_ranks_; }
  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  std::chrono::milliseconds timeout() const { return timeout_.load(); }
  virtual void set_timeout(std::chrono::milliseconds timeout);
  virtual const char* transport() const = 0;
  // Whether its tensors lie on a GPU; then a synchronous call returns when its stream knows of it.
  virtual bool works_on_gpu() const { return false; }

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
  // On a GPU: from now on this thread's calls are collected, and return null; then all of them
  // start together, and are one piece of work. Null if there were none.
  virtual void begin_group() {}
  virtual std::shared_ptr<Pending> end_group(bool /*async*/) { return nullptr; }
  virtual void drop_group() {}  // and what was collected
  // Returns when nothing is under way.
  virtual void drain() {
    run_together([] {}, false);
  }
  // submit() without the choice.
  void run(Request request) { submit(std::move(request), false, nullptr); }

  // Ends every operation of every rank with AbortedError, now and in the future. From any thread.
  virtual void abort(const std::string& reason, Cause cause = Cause::kAborted) = 0;
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

  // Which one an all_reduce of so many bytes takes; kAuto where that is not decided here.
  virtual Algorithm all_reduce_algorithm(int64_t) const { return Algorithm::kAuto; }

  Tally tally(Operation operation) const;
  Tally tally() const;  // of all
  virtual uint64_t sequence() const = 0;
  // What the flight recorder holds of any rank, oldest first; in ticks of `scale()`.
  virtual std::vector<RecordView> records(int rank) const = 0;
  virtual RankState state_of(int rank) const = 0;
  virtual std::vector<int> living_ranks() const = 0;  // that have neither died nor left
  // The first failure of any rank, as it was thrown there, or nothing.
  virtual std::optional<Error> failure_report() const = 0;
  TickScale::Now scale() const { return scale_.now(); }

  // What peers are told when this rank leaves because of an exception.
  virtual void set_farewell(const std::string& reason) = 0;
  // Whether this process was forked off from the one that made the communicator.
  bool is_forked() const { return !origin_.is_here(); }

 protected:
  virtual void execute(const Request& request) = 0;
  // Throws in a forked process, where its threads are not.
  void check_process() const { origin_.check(); }
  const Origin& origin() const { return origin_; }
  // Of an operation or message that is done; `started`, `met` and `finished` in ticks.
  void count(Operation operation, int64_t bytes, uint64_t started, uint64_t met, uint64_t finished);
  void check(const Request& request) const;
  void check(const Message& message) const;
  void stop_worker() { worker_.stop(); }
  std::string group_text() const;  // " of group dp (global ranks 1, 3)"

 private:
  void check_compression(const Request& request) const;
  void check_parts(const Request& request) const;
  void check_overlap(const Request& request) const;
  bool runs_at_once(bool async) const;
  std::shared_ptr<Pending> queue(std::function<void()> work, bool async);
  void execute_in_turn(const Request& request);

  const int rank_;
  const int world_size_;
  const Origin origin_;
  std::string name_;
  std::vector<int> global_ranks_;
  std::atomic<std::chrono::milliseconds> timeout_;
  std::mutex turn_;  // held while an operation executes: there is one at a time
  // Per operation, in ticks.
  struct Counters {
    std::atomic<uint64_t> operations{0}, bytes{0}, ticks{0}, ticks_wait{0};
  };
  Counters counters_[kOperations];
  const TickScale scale_;
  Worker worker_;

 protected:
  mutable Recorder recorder_;
};

}  // namespace pycomm
