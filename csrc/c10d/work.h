// Results of operations for torch, and who hears of their end.
#pragma once

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "../communicator.h"

namespace pycomm {

// What a process group's user has asked to be told or granted; shared by the backend and its works.
class Observers {
 public:
  using CompletionHook = std::function<void(std::shared_ptr<c10d::WorkInfo>)>;
  using AbortHook = std::function<void()>;

  // More time for all operations from now on, until the first of them is done.
  struct Extension {
    std::chrono::milliseconds time;
    bool claimed = false;
  };
  using Extensions = std::vector<std::shared_ptr<Extension>>;

  explicit Observers(const std::string& group) : group_(group) {}
  const std::string& group() const { return group_; }  // its name; the default group has none

  // False, and cheap, as long as nothing below was ever called.
  bool any() const { return any_.load(std::memory_order_acquire); }

  void set_completion_hook(CompletionHook hook);
  void set_timing() { any_ = true; }
  void add_abort_hook(int64_t id, AbortHook hook);
  void remove_abort_hook(int64_t id);
  void extend_timeouts(std::chrono::milliseconds time);

  // The extra time of an operation that starts now; `claimed` receives what ends with it.
  std::chrono::milliseconds claim_extensions(Extensions* claimed);
  void release(const Extensions& claimed);
  void completed(const std::shared_ptr<c10d::WorkInfo>& info);
  // Runs the abort hooks, the first time that the communicator has ended.
  void aborted();

 private:
  const std::string group_;
  std::atomic<bool> any_{false};
  std::mutex mutex_;
  CompletionHook completion_hook_;
  std::map<int64_t, AbortHook> abort_hooks_;
  bool abort_reported_ = false;
  Extensions extensions_;
};

// An operation for torch. Complete at once if the operation ran synchronously.
class C10dWork : public c10d::Work {
 public:
  struct Description {
    int rank;
    c10d::OpType type;
    const char* title;  // in profiles: "pycomm:all_reduce"; null for none
    uint64_t sequence;
  };
  C10dWork(const Description& description, const std::vector<at::Tensor>& profiled,
           std::vector<at::Tensor> outputs, std::shared_ptr<Observers> observers);

  bool isCompleted() override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override { wait(); }
  void abort() override;
  std::vector<at::Tensor> result() override { return outputs_; }
  int sourceRank() const override;
  uint64_t getSequencenumber() const override { return sequence_; }
  float getDuration() const override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

  // What it is the end of, if that did not end at once. Waiting for a message drives it.
  void set_pending(std::shared_ptr<Pending> pending, bool is_message) {
    pending_ = std::move(pending);
    is_message_ = is_message;
  }
  // It is one of a communicator of GPUs: waits order streams, and the host goes on.
  void set_device(c10::Device device) {
    device_ = device;
    on_gpu_ = true;
  }
  void set_extensions(Observers::Extensions extensions) { extensions_ = std::move(extensions); }
  // Called once: by the submitter, or by the thread that finishes the operation.
  void complete(std::exception_ptr exception);

 private:
  using Clock = std::chrono::steady_clock;
  void check_process() const;
  bool wait_a_while(std::chrono::milliseconds at_most);
  bool wait_on_host(std::chrono::milliseconds timeout);
  c10::intrusive_ptr<c10::ivalue::Future> make_future() const;
  // Null if nobody has asked for it.
  c10::intrusive_ptr<c10::ivalue::Future> future_so_far();
  void mark(c10::ivalue::Future& future) const;
  void tell_observers();

  std::vector<at::Tensor> outputs_;
  const uint64_t sequence_;
  std::shared_ptr<Observers> observers_;
  Observers::Extensions extensions_;
  std::shared_ptr<Pending> pending_;
  bool is_message_ = false;
  bool on_gpu_ = false;
  c10::Device device_ = at::kCPU;
  Clock::time_point started_, finished_;            // if somebody observes
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // made when asked for
  bool settled_ = false;  // complete() has taken over: a future asked for later is marked at once
  std::exception_ptr failure_;
  std::atomic<bool> over_{false};  // complete() has done all
};

// Several works as one: done when all are.
c10::intrusive_ptr<c10d::Work> join(int rank, std::vector<c10::intrusive_ptr<c10d::Work>> works);

}  // namespace pycomm
