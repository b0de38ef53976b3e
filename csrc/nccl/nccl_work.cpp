#include "nccl_work.h"

#include <algorithm>
#include <thread>
#include <utility>

namespace pycomm::nccl {
namespace {
constexpr int kSpins = 1000;
constexpr std::chrono::microseconds kPause{50};
}  // namespace

NcclWork::NcclWork(const Origin& origin, std::shared_ptr<const CudaApi> cuda, int device,
                   std::vector<Part> parts, std::string call, std::chrono::milliseconds limit,
                   int source)
    : Pending(origin),
      cuda_(std::move(cuda)),
      device_(device),
      source_(source),
      parts_(std::move(parts)),
      call_(std::move(call)),
      limit_(limit) {}

void NcclWork::mark_start(Stream stream, std::shared_ptr<void> event) {
  cuda_->check(cuda_->event_record(event.get(), stream), "cudaEventRecord");
  start_ = std::move(event);
}

void NcclWork::mark_end(Stream stream, std::shared_ptr<void> event,
                        std::shared_ptr<void> keep_alive, std::shared_ptr<CommHandle> comm) {
  cuda_->check(cuda_->event_record(event.get(), stream), "cudaEventRecord");
  end_ = std::move(event);
  keep_alive_ = std::move(keep_alive);
  comm_ = std::move(comm);
  launched_.store(true);
}

void NcclWork::set_captured() { end(nullptr); }

uint32_t NcclWork::sequence() const {
  for (const Part& part : parts_)
    if (part.sequence != 0) return part.sequence;
  return 0;
}

bool NcclWork::poll() {
  if (has_finished()) return true;
  if (!launched_.load()) return false;
  const int result = cuda_->event_query(end_.get());
  if (result == kCudaErrorNotReady) return false;
  // A kernel may have ended because NCCL noticed an error; then the watchdog says which.
  const Result state = result == kCudaSuccess ? comm_->async_error() : Result::kSuccess;
  if (state != Result::kSuccess && state != Result::kInProgress) return false;
  try {
    cuda_->check(result, "an operation's kernel, or an earlier one,");
    end(nullptr);
  } catch (...) {
    end(std::current_exception());
  }
  return has_finished();
}

bool NcclWork::has_started() {
  if (started_.load()) return true;
  if (!start_ || cuda_->event_query(start_.get()) != kCudaSuccess) return false;
  started_.store(true);
  return true;
}

bool NcclWork::wait(std::chrono::milliseconds at_most) {
  check_process();
  const auto deadline = Clock::now() + at_most;
  for (int polls = 0; !is_done(); ++polls) {
    if (at_most.count() > 0 && Clock::now() >= deadline) return false;
    if (polls < kSpins)
      std::this_thread::yield();
    else
      std::this_thread::sleep_for(kPause);
  }
  return true;
}

void NcclWork::order(void* stream) {
  check_process();
  if (end_) cuda_->check(cuda_->stream_wait_event(stream, end_.get(), 0), "cudaStreamWaitEvent");
}

void NcclWork::end(std::exception_ptr exception) {
  if (ended_.exchange(true)) return;
  failed_.store(exception != nullptr);
  finished_.store(ticks());
  // Of a failed one the GPU may still use the memory: it stays until the communicator has ended.
  std::shared_ptr<void> kept = exception ? nullptr : std::move(keep_alive_);
  finish(exception);
}

}  // namespace pycomm::nccl
