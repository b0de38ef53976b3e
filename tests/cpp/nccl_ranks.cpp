// NcclCommunicator under a sanitizer: ranks are processes, forked before anything else, over the
// fake NCCL. What is looked for are races between callers, the watchdog and the ends of operations,
// and memory that is used when it is no longer there.
//
// The scenarios named planted_... do what must be found; they run only if they are asked for.
//
//   nccl_ranks FAKE_LIBRARY [scenario ...]
#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "../../csrc/algorithms/choose.h"
#include "../../csrc/nccl/nccl_communicator.h"

namespace pycomm::nccl {
namespace {

using std::chrono::milliseconds;

std::atomic<int> checks{0};

void check(bool good, const char* what, int line) {
  ++checks;
  if (good) return;
  std::fprintf(stderr, "line %d: failed: %s\n", line, what);
  std::_Exit(1);
}
#define CHECK(condition) check(condition, #condition, __LINE__)

// The board of the ranks of a run: a table in memory that they share.
class SharedBoard : public Board {
 public:
  SharedBoard() : table_(map()) {
    pthread_mutexattr_t shared;
    pthread_mutexattr_init(&shared);
    pthread_mutexattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
    pthread_mutex_init(&table_->mutex, &shared);
  }
  void set(const std::string& key, const std::string& value) override {
    const Lock lock(table_->mutex);
    write(key, value);
  }
  std::optional<std::string> get(const std::string& key) override {
    const Lock lock(table_->mutex);
    const Entry* entry = find(key);
    if (!entry) return {};
    return std::string(entry->value);
  }
  std::string set_first(const std::string& key, const std::string& value) override {
    const Lock lock(table_->mutex);
    if (const Entry* entry = find(key)) return entry->value;
    write(key, value);
    return value;
  }

 private:
  struct Entry {
    char key[128], value[8192];
  };
  struct Table {
    pthread_mutex_t mutex;
    int entries;
    Entry entry[256];
  };
  struct Lock {
    explicit Lock(pthread_mutex_t& mutex) : mutex(mutex) { pthread_mutex_lock(&mutex); }
    ~Lock() { pthread_mutex_unlock(&mutex); }
    pthread_mutex_t& mutex;
  };
  static Table* map() {
    void* memory =
        mmap(nullptr, sizeof(Table), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) std::abort();
    return static_cast<Table*>(memory);
  }
  Entry* find(const std::string& key) const {
    for (int at = 0; at < table_->entries; ++at)
      if (key == table_->entry[at].key) return &table_->entry[at];
    return nullptr;
  }
  void write(const std::string& key, const std::string& value) {
    Entry* entry = find(key);
    if (!entry) entry = &table_->entry[table_->entries++];
    CHECK(table_->entries <= 256 && key.size() < sizeof entry->key &&
          value.size() < sizeof entry->value);
    std::strcpy(entry->key, key.c_str());
    std::strcpy(entry->value, value.c_str());
  }

  Table* const table_;
};

// A rank's fake.
struct Fake {
  explicit Fake(const char* path)
      : library(dlopen(path, RTLD_NOW)), apis(NcclApi::load(path, {}), CudaApi::load(path, {})) {
    CHECK(library);
    stream = reinterpret_cast<void* (*)()>(dlsym(library, "fake_stream"))();
  }
  // Holds the stream until the word is not zero.
  void block(const int& word) const {
    reinterpret_cast<void (*)(void*, const int*)>(dlsym(library, "fake_block"))(stream, &word);
  }
  void fault(const char* what) const {
    reinterpret_cast<void (*)(const char*, int, int)>(dlsym(library, "fake_fault"))(what, 0, 0);
  }
  void synchronize() const {
    reinterpret_cast<void (*)(void*)>(dlsym(library, "fake_synchronize"))(stream);
  }
  void* library;
  NcclCommunicator::Apis apis;
  void* stream = nullptr;
};

struct Rank {
  Fake& fake;
  std::shared_ptr<Board> board;
  int rank, world_size;

  std::shared_ptr<NcclCommunicator> communicator(milliseconds timeout = milliseconds(30000)) const {
    NcclSettings settings;
    settings.heartbeat = milliseconds(50);
    settings.codec_on_host = true;
    settings.wire_chunk_bytes = 4096;
    settings.abort_limit = milliseconds(1000);
    return std::make_shared<NcclCommunicator>(fake.apis, board, rank, world_size, timeout,
                                              settings);
  }
  Request all_reduce(std::vector<float>& values) const {
    Request request;
    request.operation = Operation::kAllReduce;
    request.count = static_cast<int64_t>(values.size());
    request.input = request.output = values.data();
    request.stream = fake.stream;
    return request;
  }
};

// ---- scenarios

// Asynchronous operations, whose ends are waited for, polled and told to callbacks at once.
void under_way(const Rank& self) {
  const auto communicator = self.communicator();
  std::atomic<int> told{0};
  std::vector<std::vector<float>> values;
  for (int index = 0; index < 40; ++index)
    values.emplace_back(1 + index * 7, static_cast<float>(self.rank + index));
  std::vector<std::shared_ptr<Pending>> works;
  for (auto& one : values) {
    works.push_back(communicator->submit(self.all_reduce(one), true, nullptr));
    works.back()->on_done([&](std::exception_ptr) { ++told; });
  }
  std::thread poller([&] {
    for (const auto& work : works)
      while (!work->is_done()) std::this_thread::yield();
  });
  for (const auto& work : works) {
    work->order(self.fake.stream);
    work->wait(milliseconds(0));
    CHECK(!work->exception());
  }
  poller.join();
  self.fake.synchronize();
  const int ranks = self.world_size;
  for (size_t index = 0; index < values.size(); ++index)
    for (const float value : values[index])
      CHECK(value == static_cast<float>(ranks * (ranks - 1) / 2 + ranks * static_cast<int>(index)));
  while (told != 40) std::this_thread::yield();
  CHECK(communicator->sequence() == 40);
  communicator->shutdown();
}

// Encoded values on two streams, other operations between them.
void compress(const Rank& self, Algorithm algorithm, bool in_order = true) {
  const auto communicator = self.communicator();
  for (const int count : {1, 100, 3000, 20000}) {
    std::vector<float> values(static_cast<size_t>(count), static_cast<float>(self.rank + 1));
    std::vector<float> plain(10, 1.0f);
    Request request = self.all_reduce(values);
    request.input = request.output = nullptr;
    request.algorithm = algorithm;
    auto compression = std::make_shared<Compression>();
    compression->codec = {WireFormat::kFloat16, 64};
    compression->tensors.push_back({values.data(), count});
    request.compression = compression;
    const auto work = communicator->submit(request, true, nullptr);
    const auto other = communicator->submit(self.all_reduce(plain), true, nullptr);
    for (const auto& one : {work, other}) one->wait(milliseconds(0));
    if (!in_order) continue;
    const int ranks = self.world_size;
    for (const float value : values) CHECK(value == static_cast<float>(ranks * (ranks + 1) / 2));
    for (const float value : plain) CHECK(value == static_cast<float>(ranks));
  }
  communicator->shutdown();
}
void one_shot(const Rank& self) { compress(self, Algorithm::kOneShot); }
void two_shot(const Rank& self) { compress(self, Algorithm::kTwoShot); }
void ring(const Rank& self) { compress(self, Algorithm::kRing); }

// What is asked for is taken; else larger tensors never go back to one_shot, and none by the ring.
void choice(const Rank& self) {
  for (const Algorithm asked : {Algorithm::kOneShot, Algorithm::kTwoShot, Algorithm::kRing})
    CHECK(choose_nccl_compressed(asked, self.world_size, 1000) == asked);
  for (const int ranks : {2, 3, 8, 9, 64, 65, 10000}) {
    bool ended = false;
    for (int64_t bytes = 1; bytes < int64_t{1} << 40; bytes *= 2) {
      const Algorithm chosen = choose_nccl_compressed(Algorithm::kAuto, ranks, bytes);
      CHECK(chosen == Algorithm::kTwoShot || (chosen == Algorithm::kOneShot && !ended));
      ended = chosen == Algorithm::kTwoShot;
      CHECK(!ended || bytes > 1024);
    }
    CHECK(ended);
  }
}

// The caller drops what an operation works on while that waits for its turn.
void drop_while_under_way(const Rank& self, bool kept) {
  const auto communicator = self.communicator();
  int may_run = 0;
  self.fake.block(may_run);
  auto values = std::make_shared<std::vector<float>>(100, 1.0f);
  const auto work = communicator->submit(self.all_reduce(*values), true, kept ? values : nullptr);
  const std::weak_ptr<std::vector<float>> watched = values;
  values.reset();
  CHECK(watched.expired() != kept);
  __atomic_store_n(&may_run, 1, __ATOMIC_RELEASE);
  CHECK(work->wait(milliseconds(0)) && !work->exception());
  self.fake.synchronize();
  while (!watched.expired()) std::this_thread::yield();  // the watchdog may be dropping it
  communicator->shutdown();
}
void dropped(const Rank& self) { drop_while_under_way(self, true); }
void planted_early_end(const Rank& self) { drop_while_under_way(self, false); }

// Streams that do not wait for each other: kernels and transfers use the same memory at once.
void planted_disorder(const Rank& self) {
  const auto cuda = std::make_shared<CudaApi>(*self.fake.apis.second);
  cuda->stream_wait_event = [](Stream, Event, unsigned) { return kCudaSuccess; };
  self.fake.apis.second = cuda;
  compress(self, Algorithm::kTwoShot, false);
}

// One rank ends it from another thread while all wait. What a failed operation works on stays.
void aborted(const Rank& self) {
  const auto communicator = self.communicator();
  const auto values = std::make_shared<std::vector<float>>(100, 1.0f);
  if (self.rank == self.world_size - 1) {
    communicator->connect(0);
    std::thread([&] { communicator->abort("enough"); }).join();
  } else {
    try {
      while (true) {
        const auto work = communicator->submit(self.all_reduce(*values), true, values);
        work->wait(milliseconds(0));
        if (auto exception = work->exception()) std::rethrow_exception(exception);
      }
    } catch (const Error& error) {
      CHECK(error.kind() == ErrorKind::kAborted);
      CHECK(error.blame().culprit == self.world_size - 1);
    }
  }
  CHECK(communicator->failure_report().has_value());
  CHECK(communicator->failure() != Failure::kNone);
}

// A rank that does not come.
void late(const Rank& self) {
  const auto communicator = self.communicator(milliseconds(400));
  communicator->connect(0);
  if (self.rank == 0) {
    const auto values = std::make_shared<std::vector<float>>(100, 1.0f);
    const auto work = communicator->submit(self.all_reduce(*values), true, values);
    work->wait(milliseconds(0));
    bool named = false;
    try {
      if (auto exception = work->exception()) std::rethrow_exception(exception);
    } catch (const Error& error) {
      named = error.kind() == ErrorKind::kTimeout;
    }
    CHECK(named);
    self.board->set("over", "yes");
  }
  while (!self.board->get("over")) std::this_thread::sleep_for(milliseconds(5));
}

// An operation that does not end, and NCCL that does not, either: what they may still use stays.
void stuck(const Rank& self) {
  auto communicator = self.communicator();
  communicator->connect(0);
  self.fake.fault("kernel_hang");
  self.fake.fault("abort_hang");
  auto values = std::make_shared<std::vector<float>>(100, 1.0f);
  const auto work = communicator->submit(self.all_reduce(*values), true, values);
  const std::weak_ptr<std::vector<float>> watched = values;
  values.reset();
  communicator.reset();
  CHECK(work->wait(milliseconds(0)) && work->exception());
  CHECK(!watched.expired());
}

// Groups of calls in several communicators, one of which is split off; threads come and go.
void groups(const Rank& self) {
  const auto communicator = self.communicator();
  const auto part = communicator->split(0, self.rank, 0);
  std::vector<std::vector<float>> values(6, std::vector<float>(50, 1.0f));
  for (const auto& one : {communicator, part}) {
    one->begin_group();
    for (auto& tensor : values) one->submit(self.all_reduce(tensor), true, nullptr);
    const auto work = one->end_group(true);
    std::thread([&] { work->wait(milliseconds(0)); }).join();
    CHECK(!work->exception());
  }
  const int ranks = self.world_size;
  for (const auto& tensor : values)
    for (const float value : tensor) CHECK(value == static_cast<float>(ranks * ranks));
  communicator->drain();
  part->shutdown();
  communicator->shutdown();
}

const std::map<std::string, std::function<void(const Rank&)>> kScenarios = {
    {"under_way", under_way},
    {"choice", choice},
    {"one_shot", one_shot},
    {"two_shot", two_shot},
    {"ring", ring},
    {"dropped", dropped},
    {"planted_early_end", planted_early_end},
    {"planted_disorder", planted_disorder},
    {"aborted", aborted},
    {"late", late},
    {"stuck", stuck},
    {"groups", groups}};

// True if all ranks end well.
bool run(const std::string& name, const char* library, int world_size) {
  char folder[] = "/tmp/pycomm-nccl-XXXXXX";
  if (!mkdtemp(folder)) return false;
  setenv("FAKE_NCCL_DIR", folder, 1);
  const auto board = std::make_shared<SharedBoard>();
  std::vector<pid_t> ranks;
  for (int rank = 0; rank < world_size; ++rank) {
    const pid_t child = fork();
    if (child == 0) {
      {
        Fake fake(library);
        kScenarios.at(name)(Rank{fake, board, rank, world_size});
      }
      std::printf("%s, rank %d of %d: %d checks\n", name.c_str(), rank, world_size, checks.load());
      std::fflush(stdout);
      std::exit(0);
    }
    ranks.push_back(child);
  }
  bool good = true;
  for (const pid_t child : ranks) {
    int status = 0;
    good &= waitpid(child, &status, 0) == child && status == 0;
    if (status != 0) std::fprintf(stderr, "%s: a rank ended with %x\n", name.c_str(), status);
  }
  std::filesystem::remove_all(folder);
  return good;
}

int main_of(int count, char** words) {
  if (count < 2) {
    std::fprintf(stderr, "usage: %s FAKE_LIBRARY [scenario ...]\n", words[0]);
    return 2;
  }
  std::vector<std::string> names(words + 2, words + count);
  if (names.empty())
    for (const auto& [name, scenario] : kScenarios)
      if (name.rfind("planted_", 0) != 0) names.push_back(name);
  bool good = true;
  for (const std::string& name : names)
    for (const int world_size : {2, 3}) good &= run(name, words[1], world_size);
  std::puts(good ? "nccl: all good" : "nccl: FAILED");
  return good ? 0 : 1;
}

}  // namespace
}  // namespace pycomm::nccl

int main(int count, char** words) { return pycomm::nccl::main_of(count, words); }
