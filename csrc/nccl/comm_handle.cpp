#include "comm_handle.h"

#include <algorithm>
#include <cstddef>
#include <thread>
#include <utility>

namespace pycomm::nccl {
namespace {

// Between two polls: at first none, then longer and longer ones.
constexpr int kSpins = 200;
// How long the end of a communicator waits for a call that uses it.
constexpr std::chrono::milliseconds kPatience{1000};
constexpr std::chrono::microseconds kShortPause{20}, kLongPause{1000};

// How much of Config a library of this version knows, and the version that it is told.
size_t config_bytes(int version) {
  if (version >= version_code(2, 27)) return sizeof(Config);
  if (version >= version_code(2, 25)) return offsetof(Config, comm_name);
  return offsetof(Config, traffic_class);
}

}  // namespace

Config to_config(const NcclSettings& settings, const NcclApi& api) {
  Config config;
  config.size = config_bytes(api.version());
  // Fields that came after the version told are not looked at: nobody set them.
  config.version = static_cast<unsigned>(std::min(api.version(), version_code(2, 27, 3)));
  const auto set = [](int& field, const std::optional<int>& value) {
    if (value) field = *value;
  };
  config.blocking = settings.blocking ? 1 : 0;
  set(config.cga_cluster_size, settings.cga_cluster_size);
  set(config.min_ctas, settings.min_ctas);
  set(config.max_ctas, settings.max_ctas);
  if (settings.net_name) config.net_name = settings.net_name->c_str();
  config.split_share = settings.split_share ? 1 : 0;
  if (settings.traffic_class) api.require(kTrafficClass, "the setting traffic_class");
  set(config.traffic_class, settings.traffic_class);
  // A name is for people: an older library goes without.
  if (settings.comm_name && api.has(kNamedComm)) config.comm_name = settings.comm_name->c_str();
  for (const auto& [name, value] :
       {std::pair{"cta_policy", settings.cta_policy}, std::pair{"nvls_ctas", settings.nvls_ctas},
        std::pair{"collnet_enable", settings.collnet_enable}})
    if (value) api.require(kPolicies, concat("the setting ", name));
  if (settings.shrink_share) {
    api.require(kPolicies, "the setting shrink_share");
    config.shrink_share = 1;
  }
  set(config.cta_policy, settings.cta_policy);
  set(config.nvls_ctas, settings.nvls_ctas);
  set(config.collnet_enable, settings.collnet_enable);
  return config;
}

CommHandle::~CommHandle() { abort(); }

void CommHandle::poll(const std::function<bool()>& done, const Watch& watch) {
  for (int polls = 0; !done(); ++polls) {
    if (polls < kSpins) {
      std::this_thread::yield();
      continue;
    }
    watch();
    std::this_thread::sleep_for(polls < 2 * kSpins ? kShortPause : kLongPause);
  }
}

bool CommHandle::make(const std::string& what, const Make& call, const Watch& watch,
                      const std::shared_ptr<CommHandle>& parent, bool shares) {
  const DeviceGuard guard(*cuda_, device_);
  // NCCL may write it from a thread of its own, also after this rank has given up.
  auto place = std::make_shared<std::atomic<Comm>>(nullptr);
  static_assert(sizeof(std::atomic<Comm>) == sizeof(Comm));
  const Result result = [&] {
    std::unique_lock<std::timed_mutex> use;
    if (parent) use = parent->use();
    if (parent && !parent->get()) watch();
    return call(reinterpret_cast<Comm*>(place.get()));
  }();
  try {
    if (parent) parent->settle(result, what, watch);
    if (!parent) api_->check(result, what, place->load());
    comm_.store(place->load());
    if (!comm_.load()) return false;
    settle(Result::kInProgress, what, watch);
  } catch (...) {
    comm_.store(place->load());
    if (!comm_.load()) new std::shared_ptr<std::atomic<Comm>>(place);  // NCCL may still write it
    abort();
    throw;
  }
  if (shares) parent_ = parent;
  return true;
}

void CommHandle::settle(Result result, const std::string& what, const Watch& watch) const {
  const Comm comm = comm_.load();
  if (__builtin_expect(result == Result::kSuccess, 1)) return;
  api_->check(result, what, comm);
  Result state = Result::kInProgress;
  poll(
      [&] {
        const auto in_use = use();
        if (state_.load() != State::kReady) return true;
        api_->check(api_->comm_get_async_error(comm, &state), what, comm);
        return state != Result::kInProgress;
      },
      watch);
  if (state == Result::kInProgress) watch();  // stopped meanwhile: it knows why
  api_->check(state, what, comm);
}

Result CommHandle::async_error() const {
  // A call that is in use of it says itself what is wrong.
  const std::unique_lock<std::timed_mutex> in_use(*using_, std::try_to_lock);
  const Comm comm = comm_.load();
  if (!in_use || !comm || state_.load() != State::kReady) return Result::kSuccess;
  Result state = Result::kSuccess;
  const Result result = api_->comm_get_async_error(comm, &state);
  return result != Result::kSuccess ? result : state;
}

Comm CommHandle::take() {
  const Comm comm = comm_.exchange(nullptr);
  if (comm) state_.store(State::kEnding);
  return comm;
}

void CommHandle::stop() {
  State ready = State::kReady;
  if (!api_->has(kRevoke) || !comm_.load()) return abort();
  const std::unique_lock<std::timed_mutex> in_use(*using_, kPatience);
  if (!in_use) return abort();
  if (!state_.compare_exchange_strong(ready, State::kRevoked)) return;
  const DeviceGuard guard(*cuda_, device_);
  const Result result = api_->comm_revoke(comm_.load(), kRevokeDefault);
  if (result != Result::kSuccess && result != Result::kInProgress) abort();  // takes no lock
}

void CommHandle::abort() {
  const Comm comm = take();
  if (!comm) return;
  std::thread([api = api_, cuda = cuda_, device = device_, ending = ending_, in_use = using_,
               parent = std::move(parent_), comm] {
    cuda->set_device(device);
    // A call that blocks is what is to be ended.
    const std::unique_lock<std::timed_mutex> use(*in_use, kPatience);
    api->comm_abort(comm);
    std::lock_guard<std::mutex> lock(ending->mutex);
    ending->over = true;
    ending->changed.notify_all();
  }).detach();
}

bool CommHandle::await_end(std::chrono::milliseconds limit) {
  if (state_.load() != State::kEnding) return true;
  std::unique_lock<std::mutex> lock(ending_->mutex);
  const bool over = ending_->changed.wait_for(lock, limit, [this] { return ending_->over; });
  state_.store(over ? State::kEnded : State::kAbandoned);
  return over;
}

void CommHandle::finalize(const std::string& what, const Watch& watch) {
  const Comm comm = comm_.load();
  if (!comm || state_.load() != State::kReady) return abort();
  const DeviceGuard guard(*cuda_, device_);
  settle(api_->comm_finalize(comm), what, watch);
  take();
  const Result result = api_->comm_destroy(comm);
  state_.store(State::kEnded);
  parent_.reset();
  api_->check(result, what);
}

void CommHandle::abandon() {
  comm_.store(nullptr);
  state_.store(State::kAbandoned);
}

}  // namespace pycomm::nccl
