#include "work.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <utility>

#include "../interrupt.h"
#include "errors.h"
#include "gpu.h"

namespace pycomm {

// ---- Observers

void Observers::set_completion_hook(CompletionHook hook) {
  std::lock_guard<std::mutex> lock(mutex_);
  completion_hook_ = std::move(hook);
  any_ = true;
}

void Observers::add_abort_hook(int64_t id, AbortHook hook) {
  std::lock_guard<std::mutex> lock(mutex_);
  abort_hooks_[id] = std::move(hook);
  any_ = true;
}

void Observers::remove_abort_hook(int64_t id) {
  std::lock_guard<std::mutex> lock(mutex_);
  abort_hooks_.erase(id);
}

void Observers::extend_timeouts(std::chrono::milliseconds time) {
  std::lock_guard<std::mutex> lock(mutex_);
  extensions_.push_back(std::make_shared<Extension>(Extension{time}));
  any_ = true;
}

std::chrono::milliseconds Observers::claim_extensions(Extensions* claimed) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::chrono::milliseconds total{0};
  for (const auto& extension : extensions_) {
    total += extension->time;
    if (!std::exchange(extension->claimed, true)) claimed->push_back(extension);
  }
  return total;
}

void Observers::release(const Extensions& claimed) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& extension : claimed)
    extensions_.erase(std::remove(extensions_.begin(), extensions_.end(), extension),
                      extensions_.end());
}

void Observers::completed(const std::shared_ptr<c10d::WorkInfo>& info) {
  CompletionHook hook;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    hook = completion_hook_;
  }
  if (hook) hook(info);
}

void Observers::aborted() {
  std::map<int64_t, AbortHook> hooks;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (std::exchange(abort_reported_, true)) return;
    hooks = abort_hooks_;
  }
  for (const auto& [id, hook] : hooks) hook();
}

// ---- C10dWork

C10dWork::C10dWork(const Description& description, const std::vector<at::Tensor>& profiled,
                   std::vector<at::Tensor> outputs, std::shared_ptr<Observers> observers)
    : Work(description.rank, description.type, at::hasCallbacks() ? description.title : nullptr,
           at::hasCallbacks() ? std::make_optional(profiled) : std::nullopt),
      outputs_(std::move(outputs)),
      sequence_(description.sequence),
      observers_(std::move(observers)) {
  if (observers_ && observers_->any()) started_ = Clock::now();
}

void C10dWork::complete(std::exception_ptr exception) {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    settled_ = true;
    failure_ = exception;
    future = future_;
  }
  if (observers_ && observers_->any()) tell_observers();
  finish(exception);
  if (future && !future->completed()) mark(*future);
  over_.store(true, std::memory_order_release);
}

namespace {
// Wrong arguments are refused before anything is sent; every other failure is the end.
bool ends_communicator(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const C10dError& error) {
    return error.kind != ErrorKind::kInvalidArgument;
  } catch (...) {
    return false;
  }
}
}  // namespace

// An observer's failure is its own: it must not end the thread that completes.
void C10dWork::tell_observers() {
  finished_ = Clock::now();
  try {
    observers_->release(extensions_);
    if (failure_) return ends_communicator(failure_) ? observers_->aborted() : void();
    observers_->completed(std::make_shared<c10d::WorkInfo>(opType_, sequence_, started_, finished_,
                                                           finished_ - started_));
  } catch (const std::exception& error) {
    TORCH_WARN("pycomm: rank ", rank_, ": a hook failed: ", error.what());
  }
}

void C10dWork::mark(c10::ivalue::Future& future) const {
  if (failure_)
    future.setError(failure_);
  else
    future.markCompleted(c10::IValue(outputs_));
}

c10::intrusive_ptr<c10::ivalue::Future> C10dWork::future_so_far() {
  std::lock_guard<std::mutex> lock(mutex_);
  return future_;
}

// A forked child has a copy of a work; one that was not over at the fork never will be there.
// Before any lock, which the child may have got locked.
void C10dWork::check_process() const {
  if (!pending_ || over_.load(std::memory_order_acquire)) return;
  translated([this] { pending_->check_process(); });
}

// Who finds the work done finds its future done too: complete() marks it right after finish(). Not
// before, since then a callback could not wait for the work.
bool C10dWork::isCompleted() {
  check_process();
  if (is_message_ || (on_gpu_ && pending_)) pending_->is_done();
  if (!Work::isCompleted()) return false;
  const auto future = future_so_far();
  return !future || future->completed();
}

// True when it is complete.
bool C10dWork::wait_a_while(std::chrono::milliseconds at_most) {
  if (is_message_ && !pending_->wait(at_most)) return false;
  std::unique_lock<std::mutex> lock(mutex_);
  return completed_ || cv_.wait_for(lock, at_most, [this] { return completed_; });
}

// Like torch's NCCL: with a limit the host waits, too.
bool C10dWork::wait(std::chrono::milliseconds timeout) {
  check_process();
  if (!on_gpu_) return wait_on_host(timeout);
  if (Work::isCompleted() && exception()) std::rethrow_exception(exception());
  if (pending_) pending_->order(current_stream(device_));
  if (timeout <= kNoTimeout) return true;  // also within its group of calls, as in torch
  translated([&] {
    PYCOMM_CHECK(pending_ || Work::isCompleted(), kInvalidArgument, "rank ", rank_,
                 ": wait(timeout) for ", c10d::opTypeToString(opType_),
                 " within the group of calls that it starts with");
  });
  return wait_on_host(timeout);
}

bool C10dWork::wait_on_host(std::chrono::milliseconds timeout) {
  const bool limited = timeout > kNoTimeout;
  const auto deadline = limited ? Clock::now() + timeout : Clock::time_point::max();
  const auto slice = [&] {
    if (!limited) return kSleep;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
    return std::clamp(left, std::chrono::milliseconds(1), kSleep);
  };
  while (!wait_a_while(slice())) {
    if (limited && Clock::now() >= deadline)
      throw C10dError(Error(
          ErrorKind::kTimeout,
          concat(
              "rank ", rank_, ": wait(timeout=", timeout.count(), " ms) for ",
              c10d::opTypeToString(opType_),
              observers_ && !observers_->group().empty() ? " of group " + observers_->group() : "",
              " ended before the operation, which goes on")));
    check_interrupt();
  }
  if (const auto future = future_so_far()) future->wait();  // marked next, see isCompleted
  over_.store(true, std::memory_order_release);  // the thread that completes may not be so far
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

void C10dWork::abort() {
  throw C10dError(
      Error(ErrorKind::kError, "a single operation cannot be aborted; abort the process group"));
}

int C10dWork::sourceRank() const { return pending_ ? pending_->source() : -1; }

float C10dWork::getDuration() const {
  PYCOMM_CHECK(started_ != Clock::time_point() && finished_ != Clock::time_point(), kError, "rank ",
               rank_, ": no duration is known; call enableCollectivesTiming first, and wait");
  return std::chrono::duration<float, std::milli>(finished_ - started_).count();
}

c10::intrusive_ptr<c10::ivalue::Future> C10dWork::getFuture() {
  check_process();
  std::lock_guard<std::mutex> lock(mutex_);
  if (!future_) {
    future_ = make_future();
    if (settled_ && !future_->completed()) mark(*future_);
  }
  return future_;
}

c10::intrusive_ptr<c10::ivalue::Future> C10dWork::make_future() const {
  if (on_gpu_ && device_.is_cuda() && pending_ && !failure_)
    return future_on_stream(device_, *pending_, outputs_);
  std::vector<c10::Device> devices;
  if (device_.is_cuda()) devices.push_back(device_);
  return c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                  std::move(devices));
}

// ---- several works

namespace {

class JoinedWork : public c10d::Work {
 public:
  JoinedWork(int rank, std::vector<c10::intrusive_ptr<c10d::Work>> works)
      : Work(rank, c10d::OpType::COALESCED), works_(std::move(works)) {}

  bool isCompleted() override {
    return std::all_of(works_.begin(), works_.end(),
                       [](const auto& work) { return work->isCompleted(); });
  }
  bool isSuccess() const override {
    return std::all_of(works_.begin(), works_.end(),
                       [](const auto& work) { return work->isSuccess(); });
  }
  std::exception_ptr exception() const override {
    for (const auto& work : works_)
      if (auto exception = work->exception()) return exception;
    return nullptr;
  }
  // Waits for all, also when one fails, so that no memory is still in use afterwards.
  bool wait(std::chrono::milliseconds timeout) override {
    std::exception_ptr failure;
    for (const auto& work : works_) {
      try {
        work->wait(timeout);
      } catch (...) {
        if (!failure) failure = std::current_exception();
      }
    }
    if (failure) std::rethrow_exception(failure);
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  std::vector<at::Tensor> result() override {
    std::vector<at::Tensor> all;
    for (const auto& work : works_)
      for (const at::Tensor& tensor : work->result()) all.push_back(tensor);
    return all;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    c10::List<c10::intrusive_ptr<c10::ivalue::Future>> futures(
        c10::FutureType::create(c10::ListType::create(c10::TensorType::get())));
    for (const auto& work : works_) futures.push_back(work->getFuture());
    return c10::collectAll(futures)->then(
        [works = works_](c10::ivalue::Future&) {
          std::vector<at::Tensor> all;
          for (const auto& work : works)
            for (const at::Tensor& tensor : work->result()) all.push_back(tensor);
          return c10::IValue(all);
        },
        c10::ListType::create(c10::TensorType::get()));
  }

 private:
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

}  // namespace

c10::intrusive_ptr<c10d::Work> join(int rank, std::vector<c10::intrusive_ptr<c10d::Work>> works) {
  if (works.size() == 1) return works[0];
  return c10::make_intrusive<JoinedWork>(rank, std::move(works));
}

}  // namespace pycomm
