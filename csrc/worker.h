// The communicator's own thread, for asynchronous operations: one queue, first in first out. It
// starts with the first operation handed to it, so a communicator that is only used synchronously
// costs no thread.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace pycomm {

// An operation handed to the worker: finished, failed, or still to come. What pycomm._c10d calls is
// virtual, since that module is not linked with this one.
class Pending {
 public:
  explicit Pending(std::function<void()> work) : work_(std::move(work)) {}
  virtual ~Pending() = default;

  bool is_done() const;
  // The failure, or null; also null while it is not done.
  std::exception_ptr exception() const;
  // False if the time ran out first. Does not throw what the operation threw. Zero or less: no
  // limit.
  bool wait(std::chrono::milliseconds at_most) const;
  // Called when the operation is done, on the worker, or at once if it is already.
  virtual void on_done(std::function<void(std::exception_ptr)> callback);

 private:
  friend class Worker;
  void run();
  void finish(std::exception_ptr exception);

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::function<void()> work_;
  std::vector<std::function<void(std::exception_ptr)>> callbacks_;
  std::exception_ptr exception_;
  bool done_ = false;
};

class Worker {
 public:
  Worker() : state_(std::make_shared<State>()) {}
  ~Worker();
  std::shared_ptr<Pending> enqueue(std::function<void()> work);
  // Operations that are queued or running.
  int64_t depth() const { return state_->depth.load(std::memory_order_acquire); }
  // Runs what is queued, then ends the thread. Further work is refused.
  void stop();
  // Whether the caller is some communicator's worker.
  static bool is_current_thread();
  bool is_mine() const { return thread_.get_id() == std::this_thread::get_id(); }

 private:
  // Shared with the thread, which may outlive the Worker if its own work destroys it.
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::shared_ptr<Pending>> queue;
    std::atomic<int64_t> depth{0};
    bool stopping = false;
  };
  static void loop(const std::shared_ptr<State>& state);

  std::shared_ptr<State> state_;
  std::thread thread_;
};

}  // namespace pycomm
