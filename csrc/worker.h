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

#include "forks.h"

namespace pycomm {

// An operation in progress: finished, failed, or still to come. In a forked child it stays what it
// was: what would wait for more, or drive it, throws there. What pycomm._c10d calls is virtual,
// since that module is not linked with this one.
class Pending {
 public:
  explicit Pending(const Origin& origin) : origin_(origin) {}
  virtual ~Pending() = default;

  // Throws in a forked child, where nothing can finish it.
  virtual void check_process() const { origin_.check(); }
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
  // Of an operation on a GPU its device; else -1.
  virtual int device() const { return -1; }
  // Of one on a GPU: what goes to this CUDA stream from now on runs after it.
  virtual void order(void* /*stream*/) {}

 protected:
  // Once, without locks that a callback could need.
  void finish(std::exception_ptr exception);
  // Without a lock, which a fork may have left locked in the child for ever.
  bool has_finished() const { return done_.load(std::memory_order_acquire); }

 private:
  const Origin origin_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::function<void(std::exception_ptr)>> callbacks_;
  std::exception_ptr exception_;
  std::atomic<bool> done_{false};
};

// One that the worker runs.
class Task : public Pending {
 public:
  Task(const Origin& origin, std::function<void()> work)
      : Pending(origin), work_(std::move(work)) {}
  void run();

 private:
  std::function<void()> work_;
};

class Worker {
 public:
  Worker() : state_(std::make_shared<State>()) {}
  ~Worker();
  std::shared_ptr<Pending> enqueue(const Origin& origin, std::function<void()> work);
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
