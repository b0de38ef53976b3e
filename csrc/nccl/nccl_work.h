// An operation on a stream, or several that were started together.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "../clock.h"
#include "../common.h"
#include "../worker.h"
#include "comm_handle.h"
#include "cuda_api.h"

namespace pycomm::nccl {

class NcclWork : public Pending {
 public:
  using Clock = std::chrono::steady_clock;
  struct Part {  // one operation or message
    Operation operation;
    int64_t bytes;
    uint32_t sequence;  // of a collective; 0: a message
    uint64_t record;
  };

  NcclWork(const Origin& origin, std::shared_ptr<const CudaApi> cuda, int device,
           std::vector<Part> parts, std::string call, std::chrono::milliseconds limit, int source);

  // On the stream, before and after the operation.
  void mark_start(Stream stream, std::shared_ptr<void> event);
  void mark_end(Stream stream, std::shared_ptr<void> event, std::shared_ptr<void> keep_alive,
                std::shared_ptr<CommHandle> comm);
  // It was captured into a graph, and runs when that does: nothing is to be waited for here.
  void set_captured();

  bool is_done() override { return has_finished() || poll(); }
  bool wait(std::chrono::milliseconds at_most) override;
  int source() const override { return source_; }
  int device() const override { return device_; }
  void order(void* stream) override;

  // Looks at the events; throws nothing, since what they say may be an error of the work.
  bool poll();
  // Ends it with an error, unless it has ended.
  void fail(std::exception_ptr exception) { end(exception); }
  // Whether the stream had come to it: its kernel may run.
  bool has_started();
  bool has_failed() const { return failed_.load(); }

  const std::vector<Part>& parts() const { return parts_; }
  const std::string& call() const { return call_; }  // for messages: "all_reduce(count=5, ...)"
  uint32_t sequence() const;                         // of its first collective; 0: none
  std::chrono::milliseconds limit() const { return limit_; }
  Clock::time_point since() const { return since_; }
  uint64_t finished() const { return finished_; }  // in ticks
  uint64_t enqueued() const { return enqueued_; }
  // For the one who keeps the records: each is true once.
  bool note_start() {
    return !std::exchange(start_noted_, start_noted_ || has_started()) && start_noted_;
  }
  bool note_end() { return is_settled() && !std::exchange(end_noted_, true); }
  bool is_settled() const { return ended_.load(); }

 private:
  void end(std::exception_ptr exception);

  const std::shared_ptr<const CudaApi> cuda_;
  const int device_, source_;
  const std::vector<Part> parts_;
  const std::string call_;
  const std::chrono::milliseconds limit_;
  const Clock::time_point since_ = Clock::now();
  std::shared_ptr<void> start_, end_;
  std::shared_ptr<void> keep_alive_;
  std::shared_ptr<CommHandle> comm_;  // that it ran on
  std::atomic<bool> launched_{false}, ended_{false}, failed_{false}, started_{false};
  std::atomic<uint64_t> finished_{0};
  const uint64_t enqueued_ = ticks();
  bool start_noted_ = false, end_noted_ = false;
};

}  // namespace pycomm::nccl
