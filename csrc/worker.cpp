#include "worker.h"

#include <utility>

#include "error.h"

namespace pycomm {
namespace {
thread_local bool on_worker_thread = false;
}

bool Pending::is_done() {
  if (has_finished()) return true;
  origin_.check();
  return false;
}

std::exception_ptr Pending::exception() const { return has_finished() ? exception_ : nullptr; }

bool Pending::wait(std::chrono::milliseconds at_most) {
  if (has_finished()) return true;
  origin_.check();
  std::unique_lock<std::mutex> lock(mutex_);
  const auto done = [this] { return has_finished(); };
  if (at_most.count() > 0) return changed_.wait_for(lock, at_most, done);
  changed_.wait(lock, done);
  return true;
}

void Pending::on_done(std::function<void(std::exception_ptr)> callback) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!has_finished()) {
      callbacks_.push_back(std::move(callback));
      return;
    }
  }
  callback(exception_);
}

void Task::run() {
  std::exception_ptr exception;
  try {
    work_();
  } catch (...) {
    exception = std::current_exception();
  }
  work_ = nullptr;  // drops what it kept alive
  finish(exception);
}

void Pending::finish(std::exception_ptr exception) {
  std::vector<std::function<void(std::exception_ptr)>> callbacks;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    exception_ = exception;
    done_.store(true, std::memory_order_release);
    callbacks.swap(callbacks_);
  }
  changed_.notify_all();
  for (const auto& callback : callbacks) callback(exception);
}

Worker::~Worker() { stop(); }

std::shared_ptr<Pending> Worker::enqueue(const Origin& origin, std::function<void()> work) {
  auto pending = std::make_shared<Task>(origin, std::move(work));
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    PYCOMM_CHECK(!state_->stopping, kAborted, "the communicator has been shut down");
    if (!thread_.joinable()) thread_ = std::thread([state = state_] { loop(state); });
    state_->queue.push_back(pending);
    state_->depth.fetch_add(1, std::memory_order_release);
  }
  state_->changed.notify_one();
  return pending;
}

void Worker::stop() {
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    state_->stopping = true;
  }
  state_->changed.notify_one();
  if (!thread_.joinable()) return;
  if (is_mine())
    thread_.detach();
  else
    thread_.join();
}

bool Worker::is_current_thread() { return on_worker_thread; }

void Worker::loop(const std::shared_ptr<State>& state) {
  on_worker_thread = true;
  for (;;) {
    std::shared_ptr<Task> next;
    {
      std::unique_lock<std::mutex> lock(state->mutex);
      state->changed.wait(lock, [&] { return state->stopping || !state->queue.empty(); });
      if (state->queue.empty()) return;
      next = std::move(state->queue.front());
      state->queue.pop_front();
    }
    next->run();
    state->depth.fetch_sub(1, std::memory_order_release);
  }
}

}  // namespace pycomm
