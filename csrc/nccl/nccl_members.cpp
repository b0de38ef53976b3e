// NCCL's communicators: how ranks meet, part, become fewer and more.
#include <algorithm>
#include <cstring>
#include <thread>

#include "../hex.h"
#include "../interrupt.h"
#include "nccl_communicator.h"
#include "watchdog.h"

namespace pycomm::nccl {
namespace {

using Clock = NcclWork::Clock;

constexpr std::chrono::milliseconds kLook{5};  // between two looks at the board for NCCL's id

}  // namespace

void NcclCommunicator::connect(int device) {
  check_process();
  std::lock_guard<std::recursive_mutex> lock(launching_);
  check_entry();
  const int on = device < 0 ? default_device() : device;
  const DeviceGuard guard(*cuda_, on);
  try {
    lane_on(on);
  } catch (const Error& error) {
    throw fail(error);
  } catch (...) {
    fail_interrupted("making its NCCL communicator");
    throw;
  }
}

NcclCommunicator::Lane& NcclCommunicator::lane_on(int device) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto known = lanes_.find(device);
    if (known != lanes_.end()) return known->second;
  }
  return add_lane(device, rendezvous(device));
}

NcclCommunicator::Lane& NcclCommunicator::add_lane(int device, std::shared_ptr<CommHandle> comm) {
  Lane lane;
  lane.comm = std::move(comm);
  lane.device = device;
  lane.events = std::make_shared<EventPool>(cuda_);
  int least = 0, greatest = 0;
  cuda_->check(cuda_->stream_priority_range(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
  cuda_->check(cuda_->stream_create_with_priority(&lane.stream, kStreamNonBlocking,
                                                  settings_.high_priority ? greatest : least),
               "cudaStreamCreateWithPriority");
  const size_t bytes = kLineBytes * static_cast<size_t>(world_size());
  void* memory = nullptr;
  cuda_->check(cuda_->malloc(&memory, bytes), "cudaMalloc");
  lane.scratch = static_cast<char*>(memory);
  cuda_->check(cuda_->malloc_host(&memory, bytes), "cudaMallocHost");
  lane.host_scratch = static_cast<char*>(memory);
  std::lock_guard<std::mutex> lock(mutex_);
  return lanes_.emplace(device, std::move(lane)).first->second;
}

// ---- how ranks meet

// All ranks come here for their first, second, ... device, so they count alike.
std::shared_ptr<CommHandle> NcclCommunicator::rendezvous(int device) {
  const int lane = lanes_begun_++;
  publish_state();  // now the others know that this rank is there
  const std::string what = concat("rank ", rank(), ": making NCCL communicator ", lane,
                                  group_text(), " of ", world_size(), " ranks on cuda:", device);
  const Watch watch = [this, look = Clock::now(),
                       until = watch_until(Clock::now() + timeout(), [this, lane, what] {
                         throw_missing(lane, what);
                       })]() mutable {
    if (Clock::now() >= look) {
      look = Clock::now() + settings_.heartbeat;
      read_failure();
    }
    until();
  };
  UniqueId id = exchange_id(concat("lane/", lane, "/"), watch);
  Config config = to_config(settings_, *api_);
  auto comm = std::make_shared<CommHandle>(api_, cuda_, device);
  comm->make(
      what,
      [&](Comm* place) {
        return api_->comm_init_rank_config(place, world_size(), id, rank(), &config);
      },
      watch);
  return comm;
}

// Rank 0's, with its version: NCCL of different versions do not understand each other.
UniqueId NcclCommunicator::exchange_id(const std::string& prefix, const Watch& watch) {
  UniqueId id{};
  const std::string version = version_text(api_->version());
  if (rank() == 0) {
    api_->check(api_->get_unique_id(&id), concat("rank 0: asking NCCL for an id"));
    board_->set(prefix + "id", version + " " + to_hex(id.internal, kUniqueIdBytes));
    return id;
  }
  std::optional<std::string> text;
  while (!(text = board_->get(prefix + "id"))) {
    watch();
    std::this_thread::sleep_for(kLook);
  }
  const size_t space = text->find(' ');
  PYCOMM_CHECK(
      space != std::string::npos && from_hex(text->substr(space + 1), id.internal, kUniqueIdBytes),
      kError, "rank ", rank(), ": the Store holds no id of NCCL's where rank 0 writes it: '",
      text->substr(0, 40), "'");
  PYCOMM_CHECK(text->substr(0, space) == version, kMismatch, "rank ", rank(), ": has NCCL ",
               version, " (", api_->path(), "), but rank 0 has ", text->substr(0, space),
               ". Install the same on all ranks.");
  return id;
}

// A lane below 0: of an exchange within an operation.
void NcclCommunicator::throw_missing(int lane, const std::string& text) const {
  std::string missing;
  int first = -1;
  for (int peer = 0; peer < world_size(); ++peer) {
    const std::optional<PeerState> state = peer_state(peer);
    const bool is_here = state && (lane < 0 ? state->entered >= sequence_ : state->lanes > lane);
    if (peer == rank() || is_here) continue;
    if (first < 0) first = peer;
    missing += concat(
        missing.empty() ? "rank " : ", rank ", peer,
        state ? concat(" (pid ", state->pid, ", which has called ", state->entered, " operations)")
              : " (which has not made its communicator yet)");
  }
  throw Error(ErrorKind::kTimeout,
              concat(text, " exceeded its timeout of ", timeout().count(), " ms; ",
                     missing.empty() ? "all ranks have come, so NCCL itself does not get on: look "
                                       "at the network and at NCCL_DEBUG=INFO"
                                     : "not there yet: " + missing,
                     "."),
              {Cause::kTimeout, first});
}

// ---- how they part

std::shared_ptr<NcclCommunicator> NcclCommunicator::child(const std::string& prefix, int rank,
                                                          int world_size) {
  auto made = std::make_shared<NcclCommunicator>(Apis{api_, cuda_},
                                                 std::make_shared<PrefixBoard>(board_, prefix),
                                                 rank, world_size, timeout(), settings_);
  return made;
}

std::shared_ptr<NcclCommunicator> NcclCommunicator::split(int color, int key, int device) {
  check_process();
  std::lock_guard<std::recursive_mutex> lock(launching_);
  check_entry();
  const int on = device < 0 ? default_device() : device;
  const std::string what =
      concat("rank ", rank(), ": splitting", group_text(), " by color ", color);
  const Watch watch =
      watch_until(Clock::now() + timeout(), [this, what] { throw_missing(-1, what); });
  try {
    const DeviceGuard guard(*cuda_, on);
    Lane& lane = lane_on(on);
    const int number = ++children_;
    Config config = to_config(settings_, *api_);
    auto comm = std::make_shared<CommHandle>(api_, cuda_, on);
    const auto call = [&](Comm* place) {
      return api_->comm_split(lane.comm->get(), color < 0 ? kNoColor : color, key, place, &config);
    };
    if (!comm->make(what, call, watch, lane.comm, settings_.split_share)) return nullptr;
    int new_rank = 0, new_world = 0;
    api_->check(api_->comm_user_rank(comm->get(), &new_rank), what);
    api_->check(api_->comm_count(comm->get(), &new_world), what);
    auto made = child(concat("split/", number, "/", color, "/"), new_rank, new_world);
    made->lanes_begun_ = 1;
    made->add_lane(on, std::move(comm));
    return made;
  } catch (const Error& error) {
    throw fail(error);
  } catch (...) {
    fail_interrupted("a split");
    throw;
  }
}

std::shared_ptr<NcclCommunicator> NcclCommunicator::shrink(const std::vector<int>& excluded,
                                                           int device) {
  check_process();
  std::lock_guard<std::recursive_mutex> lock(launching_);
  const auto is_out = [&](int rank) {
    return std::find(excluded.begin(), excluded.end(), rank) != excluded.end();
  };
  PYCOMM_CHECK(!is_out(rank()), kInvalidArgument, "rank ", rank(),
               ": is itself among the ranks to be left out");
  int new_rank = 0, new_world = 0;
  std::string prefix = concat("shrink/", ++children_);
  for (int peer = 0; peer < world_size(); ++peer) {
    if (is_out(peer)) prefix += concat("-", peer);
    if (peer < rank() && !is_out(peer)) ++new_rank;
    if (!is_out(peer)) ++new_world;
  }
  PYCOMM_CHECK(new_world + static_cast<int>(excluded.size()) == world_size(), kInvalidArgument,
               "rank ", rank(), ": a rank to be left out is not below the world size ",
               world_size(), ", or is there twice");
  const int on = device < 0 ? default_device() : device;
  const DeviceGuard guard(*cuda_, on);
  auto made = child(prefix + "/", new_rank, new_world);
  std::shared_ptr<CommHandle> old;
  {
    std::lock_guard<std::mutex> hold(mutex_);
    const auto known = lanes_.find(on);
    if (known != lanes_.end()) old = known->second.comm;
  }
  // Where NCCL cannot do it, or has given the old communicator up, the survivors meet afresh with
  // their first operation.
  if (!api_->has(kShrink) || !old || !old->get()) return made;
  const std::string what =
      concat("rank ", rank(), ": shrinking", group_text(), " to ", new_world, " ranks");
  const Watch watch =
      made->watch_until(Clock::now() + timeout(), [&] { made->throw_missing(0, what); });
  Config config = to_config(settings_, *api_);
  std::vector<int> list = excluded;
  made->lanes_begun_ = 1;
  made->publish_state();
  auto comm = std::make_shared<CommHandle>(api_, cuda_, on);
  comm->make(
      what,
      [&](Comm* place) {
        return api_->comm_shrink(old->get(), list.data(), static_cast<int>(list.size()), place,
                                 &config, failed_ ? kShrinkAbort : kShrinkDefault);
      },
      watch, failed_ ? nullptr : old, settings_.shrink_share && !failed_);
  made->add_lane(on, std::move(comm));
  return made;
}

std::shared_ptr<NcclCommunicator> NcclCommunicator::grow(int world_size, int device) {
  check_process();
  std::lock_guard<std::recursive_mutex> lock(launching_);
  check_entry();
  PYCOMM_CHECK(world_size > this->world_size(), kInvalidArgument, "rank ", rank(),
               ": cannot grow from ", this->world_size(), " to ", world_size, " ranks");
  const int on = device < 0 ? default_device() : device;
  const DeviceGuard guard(*cuda_, on);
  const std::string prefix = concat("grow/", ++children_, "/");
  const auto made = child(prefix, rank(), world_size);
  if (!api_->has(kGrow)) return made;  // all meet afresh
  const std::string what =
      concat("rank ", rank(), ": growing", group_text(), " to ", world_size, " ranks");
  Lane& lane = lane_on(on);
  made->lanes_begun_ = 1;
  made->publish_state();
  const Watch watch =
      made->watch_until(Clock::now() + timeout(), [&] { made->throw_missing(0, what); });
  UniqueId id{};
  if (rank() == 0) {
    lane.comm->settle(api_->comm_get_unique_id(lane.comm->get(), &id), what, watch);
    made->board_->set("lane/0/id",
                      version_text(api_->version()) + " " + to_hex(id.internal, kUniqueIdBytes));
  }
  Config config = to_config(settings_, *api_);
  auto comm = std::make_shared<CommHandle>(api_, cuda_, on);
  comm->make(
      what,
      [&](Comm* place) {
        return api_->comm_grow(lane.comm->get(), world_size, rank() == 0 ? &id : nullptr, -1, place,
                               &config);
      },
      watch, lane.comm);
  made->add_lane(on, std::move(comm));
  return made;
}

std::shared_ptr<NcclCommunicator> NcclCommunicator::join(Apis apis, std::shared_ptr<Board> board,
                                                         int rank, int world_size,
                                                         Milliseconds timeout,
                                                         NcclSettings settings, int device,
                                                         int growth) {
  auto made = std::make_shared<NcclCommunicator>(
      apis, std::make_shared<PrefixBoard>(std::move(board), concat("grow/", growth, "/")), rank,
      world_size, timeout, std::move(settings));
  if (!apis.first->has(kGrow)) return made;
  const int on = device < 0 ? made->default_device() : device;
  const DeviceGuard guard(*made->cuda_, on);
  made->lanes_begun_ = 1;
  made->publish_state();
  const std::string what = concat("rank ", rank, ": joining a group of ", world_size, " ranks");
  const Watch watch =
      made->watch_until(Clock::now() + timeout, [&] { made->throw_missing(0, what); });
  UniqueId id = made->exchange_id("lane/0/", watch);
  Config config = to_config(made->settings_, *apis.first);
  auto comm = std::make_shared<CommHandle>(made->api_, made->cuda_, on);
  comm->make(
      what,
      [&](Comm* place) {
        return apis.first->comm_grow(nullptr, world_size, &id, rank, place, &config);
      },
      watch);
  made->add_lane(on, std::move(comm));
  return made;
}

// ---- how they end

void NcclCommunicator::stop_lanes() {
  std::vector<std::shared_ptr<CommHandle>> comms;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [device, lane] : lanes_) comms.push_back(lane.comm);
  }
  for (const auto& comm : comms) comm->stop();
}

void NcclCommunicator::end_lanes() {
  std::vector<std::shared_ptr<NcclWork>> works;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    works = works_;
  }
  for (const auto& work : works)
    work->fail(std::make_exception_ptr(
        Error(ErrorKind::kAborted, where(*work) + " ended: its process group was destroyed",
              {Cause::kLeft, rank()})));
  bool over = true;
  for (auto& [device, lane] : lanes_) {
    lane.comm->abort();
    over = lane.comm->await_end(settings_.abort_limit) && over;
  }
  for (auto& [device, lane] : lanes_) {
    // Memory that a kernel may still use, since NCCL did not come to its end, is left alone.
    if (lane.comm->state() == CommHandle::State::kEnded) free_lane(lane);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  lanes_.clear();
  if (over)
    works_.clear();
  else
    new std::vector<std::shared_ptr<NcclWork>>(std::move(works_));
}

void NcclCommunicator::free_lane(Lane& lane) {
  lane.last_end.reset();
  cuda_->set_device(lane.device);
  cuda_->stream_destroy(lane.stream);
  cuda_->free(lane.scratch);
  cuda_->free_host(lane.host_scratch);
}

std::string NcclCommunicator::comm_state(int device) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto lane = lanes_.find(device);
  if (lane == lanes_.end()) return "none";
  static constexpr const char* kNames[] = {"ready", "revoked", "ending", "ended", "abandoned"};
  return kNames[static_cast<int>(lane->second.comm->state())];
}

// ---- memory

std::shared_ptr<void> NcclCommunicator::allocate(int64_t bytes) {
  check_process();
  void* data = nullptr;
  api_->check(api_->mem_alloc(&data, static_cast<size_t>(bytes)),
              concat("rank ", rank(), ": allocating ", bytes, " bytes with ncclMemAlloc"));
  return {data, [api = api_](void* used) { api->mem_free(used); }};
}

std::shared_ptr<void> NcclCommunicator::register_buffer(void* data, int64_t bytes, int device) {
  check_process();
  std::lock_guard<std::recursive_mutex> lock(launching_);
  check_entry();
  const int on = device < 0 ? default_device() : device;
  const DeviceGuard guard(*cuda_, on);
  const auto comm = lane_on(on).comm;
  void* handle = nullptr;
  api_->check(api_->comm_register(comm->get(), data, static_cast<size_t>(bytes), &handle),
              concat("rank ", rank(), ": registering ", bytes, " bytes"), comm->get());
  return {handle, [api = api_, comm](void* registered) {
            if (comm->get()) api->comm_deregister(comm->get(), registered);
          }};
}

std::shared_ptr<void> NcclCommunicator::register_window(void* data, int64_t bytes, int device,
                                                        bool symmetric) {
  check_process();
  std::lock_guard<std::recursive_mutex> lock(launching_);
  check_entry();
  const std::string what = concat("rank ", rank(), ": registering a window of ", bytes, " bytes");
  api_->require(kWindows, what);
  PYCOMM_CHECK(reinterpret_cast<uintptr_t>(data) % kWindowAlignment == 0, kInvalidArgument, what,
               ": its address must be a multiple of ", kWindowAlignment,
               "; allocate it by ncclMemAlloc");
  const int on = device < 0 ? default_device() : device;
  const DeviceGuard guard(*cuda_, on);
  const auto comm = lane_on(on).comm;
  const auto place = std::make_shared<Window>(nullptr);
  const Watch watch =
      watch_until(Clock::now() + timeout(), [this, what] { throw_missing(-1, what); });
  comm->settle(
      api_->comm_window_register(comm->get(), data, static_cast<size_t>(bytes), place.get(),
                                 symmetric ? kWindowSymmetric : kWindowDefault),
      what, watch);
  return {*place, [api = api_, comm](Window window) {
            if (comm->get()) api->comm_window_deregister(comm->get(), window);
          }};
}

}  // namespace pycomm::nccl
