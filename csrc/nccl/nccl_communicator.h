// Collectives and messages on GPU memory, through NCCL, with pycomm's checks, deadlines and errors.
//
// An operation is enqueued on a stream and returns at once; a watchdog (watchdog.h) sees how it
// ends. The first failure of any rank is written to the job's Store, where all ranks find it: each
// then stops NCCL and raises it. Nothing here waits without an end, and nothing ends the process.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../board.h"
#include "../communicator.h"
#include "comm_handle.h"
#include "cuda_api.h"
#include "nccl_api.h"
#include "nccl_settings.h"
#include "nccl_work.h"

namespace pycomm::nccl {

// What a rank tells the others about itself, on the board.
struct PeerState {
  int pid = 0;
  uint64_t start_time = 0;  // of the process, so that another one with its pid is told apart
  std::string host;
  uint64_t beat = 0;     // grows as long as it lives
  uint32_t entered = 0;  // the last collective that it called
  uint32_t waiting = 0;  // the first that is not done; 0: none
  int lanes = 0;         // NCCL communicators that it has begun to make
  bool left = false;
  std::string call;      // of `waiting`
  std::string farewell;  // what it left with, if that was an exception

  std::string encode() const;
  static std::optional<PeerState> decode(const std::string& text);
};

class NcclCommunicator : public Communicator {
 public:
  using Milliseconds = std::chrono::milliseconds;
  using Apis = std::pair<std::shared_ptr<const NcclApi>, std::shared_ptr<const CudaApi>>;

  // NCCL's own communicator is made with the first operation on a device. `board` is the group's.
  NcclCommunicator(Apis apis, std::shared_ptr<Board> board, int rank, int world_size,
                   Milliseconds timeout, NcclSettings settings);
  ~NcclCommunicator() override;

  const char* transport() const override { return "nccl"; }
  bool works_on_gpu() const override { return true; }
  std::shared_ptr<Pending> submit(Request request, bool async,
                                  std::shared_ptr<void> keep_alive) override;
  std::shared_ptr<Pending> post(const Message& message, std::shared_ptr<void> keep_alive) override;
  // One NCCL group: all starts together, and is one piece of work.
  std::shared_ptr<Pending> run_together(std::function<void()> work, bool async) override;
  void begin_group() override;
  std::shared_ptr<Pending> end_group(bool async) override;
  void drop_group() override;
  void drain() override;

  void abort(const std::string& reason, Cause cause = Cause::kAborted) override;
  Failure failure() const override;
  void shutdown() override;
  // At the interpreter's end: tells the others, and leaves NCCL to the process's end.
  void abandon();

  std::shared_ptr<void> allocate(int64_t bytes) override;  // by ncclMemAlloc
  int64_t shared_offset(const void*, int64_t) const override { return -1; }
  void* shared_address(int rank, int64_t offset) const override;
  void raise_signal(void* signal) override;
  void await_signal(void* signal, uint32_t target, int peer, Milliseconds timeout) override;
  double flag_latency_ns() override;
  uint64_t sequence() const override { return sequence_.load(); }
  std::vector<RecordView> records(int rank) const override;  // this rank's; none of others
  RankState state_of(int rank) const override;
  std::vector<int> living_ranks() const override;
  std::optional<Error> failure_report() const override;
  void set_farewell(const std::string& reason) override;

  // Collective: makes NCCL's communicator on the device now, rather than with its first operation.
  void connect(int device);
  // Collective over all ranks: those of one color become a communicator, ordered by key; null for
  // a negative color.
  std::shared_ptr<NcclCommunicator> split(int color, int key, int device);
  // Collective over the ranks that are not excluded; this one may have failed.
  std::shared_ptr<NcclCommunicator> shrink(const std::vector<int>& excluded, int device);
  // Collective over all ranks and the new ones, which call `join`: they come after the old ones.
  std::shared_ptr<NcclCommunicator> grow(int world_size, int device);
  static std::shared_ptr<NcclCommunicator> join(Apis apis, std::shared_ptr<Board> board, int rank,
                                                int world_size, Milliseconds timeout,
                                                NcclSettings settings, int device, int growth);

  // Memory that NCCL may use in place. What is returned undoes it.
  std::shared_ptr<void> register_buffer(void* data, int64_t bytes, int device);
  // Collective: a window, which all ranks register with equal sizes.
  std::shared_ptr<void> register_window(void* data, int64_t bytes, int device, bool symmetric);

  // Called by the watchdog. Returns when it wants to be called again.
  NcclWork::Clock::time_point tick();
  // For tests: of the device's communicator.
  std::string comm_state(int device) const;

 protected:
  void execute(const Request& request) override { submit(request, false, nullptr); }

 private:
  // NCCL's communicator on one device, and the streams that it works on.
  struct Lane {
    std::shared_ptr<CommHandle> comm;
    std::shared_ptr<EventPool> events;
    Stream stream = nullptr;  // of asynchronous operations
    Stream last_stream = nullptr;
    std::shared_ptr<void> last_end;  // the event after the last operation
    char* scratch = nullptr;         // on the device: headers, a barrier's element
    char* host_scratch = nullptr;
    int device = 0;
  };
  struct Call {  // exactly one of them
    std::optional<Request> request;
    std::optional<Message> message;
    std::shared_ptr<void> keep_alive;
  };
  struct Batch {
    std::vector<Call> calls;
    int device = -1;
    Stream stream = nullptr;  // the caller's
    bool async = false;
    bool grouped = false;
  };

  // nccl_communicator.cpp: a call's way to NCCL
  void check_gpu(const Request& request) const;
  int device_of(const std::vector<const void*>& pointers, const std::string& what) const;
  int default_device() const;
  std::shared_ptr<Pending> add_or_launch(Call call, int device, Stream stream, bool async);
  std::shared_ptr<Pending> launch(Batch& batch);
  std::shared_ptr<NcclWork> enqueue(Batch& batch, Lane& lane, bool capturing);
  std::shared_ptr<NcclWork> make_work(const Batch& batch, int device);
  void order_before(Lane& lane, Stream stream, Stream callers, bool capturing);
  std::string where(const NcclWork& work) const;
  std::string where(const std::string& call) const;
  Watch watch_until(NcclWork::Clock::time_point deadline, std::function<void()> late) const;

  // nccl_launch.cpp: one call as NCCL's
  void issue(const Request& request, const Lane& lane, Stream stream, std::vector<RedOp>& made);
  void issue(const Message& message, const Lane& lane, Stream stream);
  void issue_parts(const Request& request, const Lane& lane, Stream stream);
  void issue_reduction(const Request& request, const Lane& lane, Stream stream,
                       std::vector<RedOp>& made);
  void check_headers(const Batch& batch, Lane& lane, uint32_t first);

  // nccl_members.cpp: NCCL's communicators
  Lane& lane_on(int device);
  Lane& add_lane(int device, std::shared_ptr<CommHandle> comm);
  std::shared_ptr<CommHandle> rendezvous(int device);
  UniqueId exchange_id(const std::string& prefix, const Watch& watch);
  [[noreturn]] void throw_missing(int lane, const std::string& text) const;
  std::shared_ptr<NcclCommunicator> child(const std::string& prefix, int rank, int world_size);
  void stop_lanes();
  void end_lanes();
  void free_lane(Lane& lane);

  // nccl_diagnosis.cpp: what became of an operation
  void check_entry();
  Error fail(const Error& error);           // the first counts; returns it
  void take_failure(const Error& error);    // as fail(), of another rank's
  void fail_interrupted(const char* what);  // by Ctrl-C, or another signal whose handler raised
  bool read_failure();                      // from the board
  void publish_state();
  std::optional<PeerState> peer_state(int rank) const;
  void reap();
  void check_async_errors();
  void check_deadlines();
  void look_for_lost(bool always);
  Error diagnose(const NcclWork& work);
  std::string standing(const PeerState& state, uint32_t sequence) const;
  std::shared_ptr<NcclWork> oldest() const;

  const std::shared_ptr<const NcclApi> api_;
  const std::shared_ptr<const CudaApi> cuda_;
  const std::shared_ptr<Board> board_;
  const NcclSettings settings_;

  std::recursive_mutex launching_;  // one call at a time goes to NCCL
  mutable std::mutex mutex_;        // of what follows
  std::map<int, Lane> lanes_;       // by device; pointers to them stay valid
  std::vector<std::shared_ptr<NcclWork>> works_;
  std::optional<Error> failure_;
  bool failed_here_ = false, failure_told_ = false;
  std::atomic<bool> failed_{false}, closing_{false};
  std::atomic<uint64_t> sequence_{0};
  std::atomic<int> lanes_begun_{0};
  int children_ = 0;  // splits, shrinks and growths so far, equal on all ranks
  std::vector<char> ring_;
  std::string farewell_;

  // The watchdog's.
  uint64_t beat_ = 0;
  NcclWork::Clock::time_point next_beat_{}, judge_at_{};
  bool suspicious_ = false;
  std::optional<Error> suspected_;  // an asynchronous error that another rank may explain
  struct Heard {
    uint64_t beat = 0;
    NcclWork::Clock::time_point at{};
  };
  std::vector<Heard> heard_;
};

}  // namespace pycomm::nccl
