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

// An operation in progress: finished, failed, or still to come. What pycomm._c10d calls is virtual,
// since that module is not linked with this one.
class Pending {
 public:
  virtual ~Pending() = default;

  // May drive the operation (a message), so it is the way to poll.
  virtual bool is_done();
  // The failure, or null; also null while it is not done.
  virtual std::exception_ptr exception() const;
  // False if the time ran out first. Does not throw what the operation threw. Zero or less: no
  // limit.
  virtual bool wait(std::chrono::milliseconds at_most);
  // Called when the operation is done, by the thread that finishes it, or at once if it is already.
  virtual void on_done(std::function<void(std::exception_ptr)> callback);
  // The rank that a received message came from; -1 for everything else and before it is done.
  virtual int source() const { return -1; }

 protected:
  // Once, without locks that a callback could need.
  void finish(std::exception_ptr exception);

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::function<void(std::exception_ptr)>> callbacks_;
  std::exception_ptr exception_;
  bool done_ = false;
};

// One that the worker runs.
class Task : public Pending {
 public:
  explicit Task(std::function<void()> work) : work_(std::move(work)) {}
  void run();

 private:
  std::function<void()> work_;
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
    std::deque<std::shared_ptr<Task>> queue;
    std::atomic<int64_t> depth{0};
    bool stopping = false;
  };
  static void loop(const std::shared_ptr<State>& state);

  std::shared_ptr<State> state_;
  std::thread thread_;
};

}  // namespace pycomm
