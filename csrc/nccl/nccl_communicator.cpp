#include "nccl_communicator.h"

#include <algorithm>
#include <cstring>
#include <thread>

#include "../call_site.h"
#include "../interrupt.h"
#include "watchdog.h"
#include "wire.h"

namespace pycomm::nccl {
namespace {

using Clock = NcclWork::Clock;

// The groups that this thread has begun.
template <class Batch>
std::map<const NcclCommunicator*, Batch>& open_groups() {
  static thread_local std::map<const NcclCommunicator*, Batch> groups;
  return groups;
}

}  // namespace

NcclCommunicator::NcclCommunicator(Apis apis, std::shared_ptr<Board> board, int rank,
                                   int world_size, Milliseconds timeout, NcclSettings settings)
    : Communicator(rank, world_size, timeout),
      api_(std::move(apis.first)),
      cuda_(std::move(apis.second)),
      board_(std::move(board)),
      settings_(std::move(settings)),
      heard_(static_cast<size_t>(world_size)) {
  const int devices = cuda_->devices();
  PYCOMM_CHECK(settings_.device < devices, kInvalidArgument, "rank ", rank, ": there is no device ",
               settings_.device, "; this process sees ", devices);
  to_config(settings_, *api_);  // tells now what this NCCL cannot
  const int records = settings_.records;
  PYCOMM_CHECK(records >= 0 && (records & (records - 1)) == 0, kInvalidArgument, "rank ", rank,
               ": records must be a power of two or 0, not ", records);
  if (records > 0) {
    ring_.resize(static_cast<size_t>(RecordRing::bytes(records)) + kLineBytes);
    char* aligned =
        ring_.data() + kLineBytes - reinterpret_cast<uintptr_t>(ring_.data()) % kLineBytes;
    recorder_.use(RecordRing::at(aligned, records));
  }
  publish_state();
  Watchdog::instance().add(this, cuda_);
}

NcclCommunicator::~NcclCommunicator() {
  if (is_forked()) return;
  open_groups<Batch>().erase(this);  // another one may come to lie here
  closing_ = true;
  Watchdog::instance().remove(this);
  if (settings_.heartbeat.count() > 0) publish_state();
  end_lanes();
}

// ---- a call's way to NCCL

// What the base class cannot know.
void NcclCommunicator::check_gpu(const Request& request) const {
  const std::string what = concat("rank ", rank(), ": ", describe(request));
  PYCOMM_CHECK(!request.compression, kInvalidArgument, what,
               ": NCCL carries no encoded values by itself");
  PYCOMM_CHECK(request.algorithm == Algorithm::kAuto, kInvalidArgument, what,
               ": NCCL chooses its algorithm itself (NCCL_ALGO)");
  PYCOMM_CHECK(request.operation != Operation::kMonitoredBarrier &&
                   request.operation != Operation::kMeasureLatency,
               kInvalidArgument, what, ": is an operation of CPU tensors' communicators");
  if (request.reduces()) to_reduce(request.dtype, request.op, *api_, what);
}

// The device that all the memory is on.
int NcclCommunicator::device_of(const std::vector<const void*>& pointers,
                                const std::string& what) const {
  int device = -1;
  for (const void* pointer : pointers) {
    if (!pointer) continue;
    PointerAttributes attributes;
    const int result = cuda_->pointer_get_attributes(&attributes, pointer);
    if (result != kCudaSuccess) cuda_->get_last_error();
    PYCOMM_CHECK(result == kCudaSuccess && (attributes.type == MemoryType::kDevice ||
                                            attributes.type == MemoryType::kManaged),
                 kInvalidArgument, what,
                 ": a tensor is not in GPU memory; move it there, or use a CPU group");
    PYCOMM_CHECK(device < 0 || device == attributes.device, kInvalidArgument, what,
                 ": its tensors are on different devices, cuda:", device,
                 " and cuda:", attributes.device);
    device = attributes.device;
  }
  PYCOMM_CHECK(device < 0 || settings_.device < 0 || device == settings_.device, kInvalidArgument,
               what, ": a tensor is on cuda:", device,
               ", but this rank's group is bound to cuda:", settings_.device);
  return device < 0 ? default_device() : device;
}

int NcclCommunicator::default_device() const {
  if (settings_.device >= 0) return settings_.device;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (lanes_.size() == 1) return lanes_.begin()->first;
  }
  int device = 0;
  cuda_->check(cuda_->get_device(&device), "cudaGetDevice");
  return device;
}

namespace {

template <class Parts>
void add_parts(std::vector<const void*>& pointers, const Parts& parts) {
  for (const auto& part : parts)
    if (part.count > 0) pointers.push_back(part.data);
}

std::vector<const void*> pointers_of(const Request& request) {
  std::vector<const void*> pointers;
  if (request.count > 0) pointers = {request.input, request.output};
  if (!request.inputs.empty() && !request.outputs.empty()) pointers.clear();  // all_to_all
  add_parts(pointers, request.inputs);
  add_parts(pointers, request.outputs);
  return pointers;
}

}  // namespace

std::shared_ptr<Pending> NcclCommunicator::submit(Request request, bool async,
                                                  std::shared_ptr<void> keep_alive) {
  check_process();
  check(request);
  check_gpu(request);
  const int device =
      device_of(pointers_of(request), concat("rank ", rank(), ": ", describe(request)));
  const Stream stream = request.stream;
  Call call;
  call.request = std::move(request);
  call.keep_alive = std::move(keep_alive);
  return add_or_launch(std::move(call), device, stream, async);
}

std::shared_ptr<Pending> NcclCommunicator::post(const Message& message,
                                                std::shared_ptr<void> keep_alive) {
  check_process();
  check(message);
  const std::string what = concat("rank ", rank(), ": ", describe(message));
  PYCOMM_CHECK(message.peer != kAnySource, kInvalidArgument, what,
               ": NCCL cannot receive from any rank; name it");
  PYCOMM_CHECK(message.tag == 0, kInvalidArgument, what,
               ": NCCL's messages have no tags; they arrive in the order in which they are sent, "
               "so leave the tag at 0");
  const int device = device_of({message.count > 0 ? message.data : nullptr}, what);
  Call call;
  call.message = message;
  call.keep_alive = std::move(keep_alive);
  return add_or_launch(std::move(call), device, message.stream, true);
}

std::shared_ptr<Pending> NcclCommunicator::add_or_launch(Call call, int device, Stream stream,
                                                         bool async) {
  auto& groups = open_groups<Batch>();
  const auto open = groups.find(this);
  if (open == groups.end()) {
    Batch batch;
    batch.calls.push_back(std::move(call));
    batch.device = device;
    batch.stream = stream;
    batch.async = async;
    return launch(batch);
  }
  Batch& batch = open->second;
  PYCOMM_CHECK(batch.calls.empty() || batch.device == device, kInvalidArgument, "rank ", rank(),
               ": one group of calls is on cuda:", batch.device, " and cuda:", device);
  PYCOMM_CHECK(batch.calls.empty() || batch.stream == stream, kInvalidArgument, "rank ", rank(),
               ": the calls of one group come from different streams");
  batch.device = device;
  batch.stream = stream;
  batch.calls.push_back(std::move(call));
  return nullptr;
}

void NcclCommunicator::begin_group() {
  check_process();
  const bool fresh = open_groups<Batch>().emplace(this, Batch()).second;
  PYCOMM_CHECK(fresh, kInvalidArgument, "rank ", rank(), ": a group of calls is open already");
}

std::shared_ptr<Pending> NcclCommunicator::end_group(bool async) {
  auto& groups = open_groups<Batch>();
  const auto open = groups.find(this);
  PYCOMM_CHECK(open != groups.end(), kInvalidArgument, "rank ", rank(),
               ": no group of calls is open on this thread");
  Batch batch = std::move(open->second);
  groups.erase(open);
  batch.async = async;
  batch.grouped = true;
  return batch.calls.empty() ? nullptr : launch(batch);
}

std::shared_ptr<Pending> NcclCommunicator::run_together(std::function<void()> work, bool async) {
  begin_group();
  try {
    work();
  } catch (...) {
    drop_group();
    throw;
  }
  return end_group(async);
}

void NcclCommunicator::drop_group() { open_groups<Batch>().erase(this); }

std::shared_ptr<Pending> NcclCommunicator::launch(Batch& batch) {
  std::shared_ptr<NcclWork> work;
  {
    std::lock_guard<std::recursive_mutex> lock(launching_);
    check_entry();
    const DeviceGuard guard(*cuda_, batch.device);
    try {
      Lane& lane = lane_on(batch.device);
      int capturing = kCaptureNone;
      cuda_->check(cuda_->stream_is_capturing(batch.stream, &capturing), "cudaStreamIsCapturing");
      work = enqueue(batch, lane, capturing != kCaptureNone);
    } catch (const Error& error) {
      if (error.kind() == ErrorKind::kInvalidArgument) throw;  // nothing was sent
      const Error told = fail(error);
      tell_failure(told.what());
      throw told;
    } catch (...) {
      fail_interrupted("a call to NCCL");
      throw;
    }
  }
  if (batch.async) return work;
  const auto is_barrier = [](const Call& call) {
    return call.request && call.request->operation == Operation::kBarrier;
  };
  // A barrier is for the host: it returns when all ranks have come.
  if (std::any_of(batch.calls.begin(), batch.calls.end(), is_barrier)) {
    while (!work->wait(kSleep)) check_interrupt();
    if (auto exception = work->exception()) std::rethrow_exception(exception);
  }
  return nullptr;
}

std::shared_ptr<NcclWork> NcclCommunicator::make_work(const Batch& batch, int device) {
  std::vector<NcclWork::Part> parts;
  std::string text;
  Milliseconds limit{0};
  int source = -1;
  for (const Call& call : batch.calls) {
    const std::string line = find_call_site();
    NcclWork::Part part;
    text += text.empty() ? "" : " with ";
    if (call.request) {
      part = {call.request->operation, call.request->bytes(), static_cast<uint32_t>(++sequence_),
              0};
      if (settings_.records > 0) part.record = recorder_.schedule(*call.request, line);
      limit = std::max(limit, call.request->timeout);
      text += describe(*call.request);
    } else {
      const Message& message = *call.message;
      part = {message.operation, message.bytes(), 0, 0};
      if (settings_.records > 0) part.record = recorder_.start(message, 0, ticks(), line);
      limit = std::max(limit, message.timeout);
      text += describe(message);
      source = message.operation == Operation::kRecv ? message.peer : source;
    }
    if (!line.empty()) text += " at " + line;
    parts.push_back(part);
  }
  if (limit.count() == 0) limit = timeout();
  return std::make_shared<NcclWork>(origin(), cuda_, device, std::move(parts), std::move(text),
                                    limit, batch.calls.size() == 1 ? source : -1);
}

// What is on the caller's stream comes first, and so does the operation before this one.
void NcclCommunicator::order_before(Lane& lane, Stream stream, Stream callers, bool capturing) {
  if (stream != callers) {
    const std::shared_ptr<void> event = lane.events->take();
    cuda_->check(cuda_->event_record(event.get(), callers), "cudaEventRecord");
    cuda_->check(cuda_->stream_wait_event(stream, event.get(), 0), "cudaStreamWaitEvent");
  }
  // A graph orders what is in it; it cannot wait for what is not.
  if (!capturing && lane.last_end && lane.last_stream != stream)
    cuda_->check(cuda_->stream_wait_event(stream, lane.last_end.get(), 0), "cudaStreamWaitEvent");
}

std::shared_ptr<NcclWork> NcclCommunicator::enqueue(Batch& batch, Lane& lane, bool capturing) {
  const std::shared_ptr<NcclWork> work = make_work(batch, lane.device);
  if (settings_.check == CheckLevel::kFull && !capturing && work->sequence() != 0)
    check_headers(batch, lane, work->sequence());
  const Stream stream = batch.async ? lane.stream : batch.stream;
  order_before(lane, stream, batch.stream, capturing);
  work->mark_start(stream, lane.events->take());

  const std::string what = where(*work);
  const auto late = [this, work] { throw diagnose(*work); };
  const Watch watch = watch_until(work->since() + work->limit(), late);
  std::vector<RedOp> made;
  std::shared_ptr<void> kept;
  auto use = lane.comm->use();
  if (!lane.comm->get()) watch();
  api_->check(api_->group_start(), what);
  try {
    for (const Call& call : batch.calls) {
      if (call.request)
        issue(*call.request, lane, stream, made);
      else
        issue(*call.message, lane, stream);
    }
  } catch (...) {
    api_->group_end();
    throw;
  }
  const Result result = api_->group_end();
  use.unlock();
  lane.comm->settle(result, what, watch);
  for (const RedOp op : made) api_->check(api_->red_op_destroy(op, lane.comm->get()), what);

  std::vector<std::shared_ptr<void>> keep;
  for (Call& call : batch.calls)
    if (call.keep_alive) keep.push_back(std::move(call.keep_alive));
  if (!keep.empty()) kept = std::make_shared<std::vector<std::shared_ptr<void>>>(std::move(keep));
  std::shared_ptr<void> end = lane.events->take();
  work->mark_end(stream, end, std::move(kept), lane.comm);
  if (capturing) {
    lane.last_end = nullptr;
    work->set_captured();
  } else {
    lane.last_end = std::move(end);
    lane.last_stream = stream;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    works_.push_back(work);
    // It came after those that the failure has ended: its kernel is stopped with theirs.
    if (failure_)
      work->fail(std::make_exception_ptr(Error(
          failure_->kind(), concat(what, " ended, since ", failure_->what()), failure_->blame())));
  }
  Watchdog::instance().wake();
  return work;
}

std::string NcclCommunicator::where(const std::string& call) const {
  return concat("rank ", rank(), ": ", call);
}

std::string NcclCommunicator::where(const NcclWork& work) const {
  const std::string group = group_text();
  if (work.sequence() == 0)
    return concat(where(work.call()), group.empty() ? "" : " (", group, group.empty() ? "" : ")");
  return concat(where(work.call()), " (operation ", work.sequence(), group, ")");
}

Watch NcclCommunicator::watch_until(Clock::time_point deadline, std::function<void()> late) const {
  return [this, deadline, late = std::move(late), polls = 0]() mutable {
    if (failed_) {
      std::lock_guard<std::mutex> lock(mutex_);
      throw Error(failure_->kind(),
                  concat("rank ", rank(), ": NCCL was given up, since ", failure_->what()),
                  failure_->blame());
    }
    if (closing_)
      throw Error(ErrorKind::kAborted,
                  concat("rank ", rank(), ": the group was destroyed meanwhile"),
                  {Cause::kLeft, rank()});
    if (Clock::now() >= deadline) late();
    if (++polls % 16 == 0) check_interrupt();
  };
}

// ---- its end

void NcclCommunicator::abort(const std::string& reason, Cause cause) {
  check_process();
  fail(Error(ErrorKind::kAborted, concat("rank ", rank(), " aborted: ", reason), {cause, rank()}));
}

void NcclCommunicator::set_farewell(const std::string& reason) {
  std::lock_guard<std::mutex> lock(mutex_);
  farewell_ = reason;
}

void NcclCommunicator::shutdown() {
  if (is_forked() || closing_) return;
  std::lock_guard<std::recursive_mutex> lock(launching_);
  const auto deadline = Clock::now() + timeout();
  const auto late = [this] {
    throw Error(ErrorKind::kTimeout,
                concat("rank ", rank(), ": the other ranks did not leave the group", group_text(),
                       " within ", timeout().count(), " ms"),
                {Cause::kTimeout});
  };
  try {
    const Watch watch = watch_until(deadline, late);
    while (const auto work = oldest()) {
      if (!work->wait(Milliseconds(1))) watch();
      reap();
    }
    // In the order of their making, which is the same on all ranks.
    if (!failed_)
      for (auto& [device, lane] : lanes_)
        lane.comm->finalize(concat("rank ", rank(), ": leaving the group"), watch);
  } catch (const Error& error) {
    fail(error);
    closing_ = true;
    Watchdog::instance().remove(this);
    publish_state();
    end_lanes();
    throw;
  }
  closing_ = true;
  Watchdog::instance().remove(this);
  publish_state();
  end_lanes();
}

void NcclCommunicator::drain() {
  while (const auto work = oldest()) {
    while (!work->wait(kSleep)) check_interrupt();
    if (auto exception = work->exception()) std::rethrow_exception(exception);
    reap();
  }
}

void NcclCommunicator::abandon() {
  if (is_forked() || closing_.exchange(true)) return;
  Watchdog::instance().remove(this);
  publish_state();
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& [device, lane] : lanes_) {
    lane.comm->abandon();
    lane.events->abandon();
  }
}

// ---- what only shared memory has

void* NcclCommunicator::shared_address(int, int64_t) const {
  throw Error(ErrorKind::kInvalidArgument, "other ranks' GPU memory is not mapped here");
}
void NcclCommunicator::raise_signal(void*) { shared_address(0, 0); }
void NcclCommunicator::await_signal(void*, uint32_t, int, Milliseconds) { shared_address(0, 0); }
double NcclCommunicator::flag_latency_ns() {
  throw Error(ErrorKind::kInvalidArgument, "the latency of flags is one of shared memory's");
}

// ---- what can be known of a rank

std::vector<RecordView> NcclCommunicator::records(int rank) const {
  if (rank != this->rank() || ring_.empty()) return {};
  const_cast<NcclCommunicator*>(this)->reap();
  char* aligned = const_cast<char*>(ring_.data()) + kLineBytes -
                  reinterpret_cast<uintptr_t>(ring_.data()) % kLineBytes;
  return Recorder::read_all(RecordRing::at(aligned, settings_.records));
}

RankState NcclCommunicator::state_of(int rank) const {
  RankState state;
  const std::optional<PeerState> peer = peer_state(rank);
  if (!peer) return state;
  state.pid = peer->pid;
  state.left = peer->left;
  state.sequence = peer->entered;
  state.farewell = peer->farewell;
  return state;
}

std::vector<int> NcclCommunicator::living_ranks() const {
  std::vector<int> ranks;
  for (int peer = 0; peer < world_size(); ++peer) {
    const RankState state = state_of(peer);
    if (state.alive && !state.left) ranks.push_back(peer);
  }
  return ranks;
}

Failure NcclCommunicator::failure() const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!failure_) return Failure::kNone;
  if (failure_->kind() == ErrorKind::kTimeout) return Failure::kTimeout;
  return failed_here_ ? Failure::kHere : Failure::kElsewhere;
}

std::optional<Error> NcclCommunicator::failure_report() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

}  // namespace pycomm::nccl
