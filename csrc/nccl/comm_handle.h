// One ncclComm_t: how it is made without blocking, and how it ends without hanging.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "cuda_api.h"
#include "nccl_api.h"
#include "nccl_settings.h"

namespace pycomm::nccl {

// Called between two polls of something that is in progress; ends the wait by throwing.
using Watch = std::function<void()>;

// The settings as NCCL takes them. Throws InvalidArgument for one that this library does not know.
// It points into `settings`.
Config to_config(const NcclSettings& settings, const NcclApi& api);

class CommHandle : public std::enable_shared_from_this<CommHandle> {
 public:
  enum class State { kReady, kRevoked, kEnding, kEnded, kAbandoned };

  CommHandle(std::shared_ptr<const NcclApi> api, std::shared_ptr<const CudaApi> cuda, int device)
      : api_(std::move(api)), cuda_(std::move(cuda)), device_(device) {}
  // Aborts it, in the background, unless it has ended.
  ~CommHandle();
  CommHandle(const CommHandle&) = delete;
  CommHandle& operator=(const CommHandle&) = delete;

  // Each runs a call that makes this communicator, and waits until it is there. `parent` is the
  // one that is in progress meanwhile, if any. False: this rank is in no new communicator.
  using Make = std::function<Result(Comm*)>;
  bool make(const std::string& what, const Make& call, const Watch& watch,
            const std::shared_ptr<CommHandle>& parent = nullptr, bool shares = false);

  // For calls on it, while it is in use(): then nobody ends it meanwhile.
  Comm get() const { return comm_.load(); }
  std::unique_lock<std::timed_mutex> use() const {
    return std::unique_lock<std::timed_mutex>(*using_);
  }
  int device() const { return device_; }
  State state() const { return state_.load(); }
  // Waits until a call has been taken in; throws what became of it.
  void settle(Result result, const std::string& what, const Watch& watch) const;
  // What NCCL has noticed meanwhile; kSuccess where there is no communicator any more.
  Result async_error() const;

  // Stops its operations so that it can still be shrunk, where NCCL can do that; else aborts it.
  void stop();
  // Ends it at once, with what it does, in a thread of its own.
  void abort();
  // Whether that has come to its end within the time; a communicator that does not is given up.
  bool await_end(std::chrono::milliseconds limit);
  // Ends it together with the other ranks.
  void finalize(const std::string& what, const Watch& watch);
  // Leaves it to the process's end.
  void abandon();

 private:
  static void poll(const std::function<bool()>& done, const Watch& watch);
  Comm take();  // so that one thread ends it

  const std::shared_ptr<const NcclApi> api_;
  const std::shared_ptr<const CudaApi> cuda_;
  const int device_;
  std::atomic<Comm> comm_{nullptr};
  std::atomic<State> state_{State::kReady};
  std::shared_ptr<CommHandle> parent_;  // whose resources it shares, so that it ends first
  const std::shared_ptr<std::timed_mutex> using_ = std::make_shared<std::timed_mutex>();
  struct Ending {
    std::mutex mutex;
    std::condition_variable changed;
    bool over = false;
  };
  const std::shared_ptr<Ending> ending_ = std::make_shared<Ending>();
};

}  // namespace pycomm::nccl
