// Runs all_reduce_kernel unchanged on the CPU, ranks as threads and as processes, and compares it
// bit for bit with the same algorithms on the CPU's own kernels. tests/test_cuda_on_cpu.py builds
// and runs it: `all` types and operations; `quick`, a part of it, for ThreadSanitizer; faults that
// these checks must find.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "checks.h"
#include "cuda_on_cpu.h"
#include "peer_world.h"
// The kernels need the definitions above.
#include "../../csrc/algorithms/math.h"
#include "../../csrc/algorithms/one_shot.h"
#include "../../csrc/algorithms/ring.h"
#include "../../csrc/algorithms/two_shot.h"
#include "../../csrc/error.h"
#include "../../csrc/p2p/all_reduce_kernel.cuh"
#include "random_element.h"

namespace {

using namespace pycomm;
using namespace checks;
using namespace peer_world;
using cuda_on_cpu::launch_resident;
using cuda_on_cpu::Order;

constexpr Algorithm kAlgorithms[] = {Algorithm::kOneShot, Algorithm::kTwoShot, Algorithm::kRing};
constexpr double kScales[kMostPeers] = {0.1, -1.7, 3.3, 1e-3};
constexpr uint64_t kPatient = uint64_t{1} << 40, kImpatient = 300;
// So small that a few thousand elements take every slot several times.
constexpr PeerLayout kLayout{2, 4, 1152};
constexpr unsigned kThreads = 32;

std::mt19937_64 generator(20261203);

struct Case {
  Algorithm algorithm = Algorithm::kTwoShot;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  int64_t count = 0;
  int64_t offset = 0;  // of the tensors, in elements
  bool in_place = false;
  unsigned blocks = 2, threads = kThreads;
  Order order = Order::kShuffled;
  unsigned seed = 0;

  std::string text(int world_size) const {
    return concat(name_of(algorithm), " ", name_of(dtype), " ", name_of(op), ", ", world_size,
                  " ranks, count ", count, ", offset ", offset, in_place ? ", in place" : "",
                  ", grid ", blocks, "x", threads, ", order ", static_cast<int>(order), ", seed ",
                  seed);
  }
};

template <class Slots, class T, DType kDType>
void launch(const Case& c, const PeerReduceCall& call) {
  const auto run = [&](auto kernel) {
    launch_resident(c.blocks, c.threads, c.order,
                    c.seed + 7u * static_cast<unsigned>(call.group.rank), kernel, call);
  };
  switch (c.algorithm) {
    case Algorithm::kOneShot:
      return run(all_reduce_kernel<Algorithm::kOneShot, kDType, T, Slots>);
    case Algorithm::kRing:
      return run(all_reduce_kernel<Algorithm::kRing, kDType, T, Slots>);
    default:
      return run(all_reduce_kernel<Algorithm::kTwoShot, kDType, T, Slots>);
  }
}

PeerReduceCall call_of(const Case& c, const PeerGroup& group, const void* input, void* output) {
  PeerReduceCall call{};
  call.group = group;
  call.type.op = c.op;
  std::copy(kScales, kScales + kMostPeers, call.type.scales);
  call.input = static_cast<const char*>(input);
  call.output = static_cast<char*>(output);
  call.count = c.count;
  return call;
}

// What the algorithm gives on the CPU, the same on all ranks.
template <class T>
std::vector<T> reference(const Case& c, std::vector<Array<T>>& inputs) {
  const int world_size = static_cast<int>(inputs.size());
  HostMemory memory(world_size, kLayout.slot_bytes * 4, 4);
  std::vector<std::vector<T>> outputs(inputs.size(), std::vector<T>(static_cast<size_t>(c.count)));
  on_threads(world_size, [&](int rank) {
    HostSlots slots(memory, rank);
    const Math math(c.dtype, c.op, world_size, false,
                    c.op == ReduceOp::kPremulSum ? kScales : nullptr, rank);
    const char* input =
        reinterpret_cast<const char*>(inputs[static_cast<size_t>(rank)].data() + c.offset);
    char* output = reinterpret_cast<char*>(outputs[static_cast<size_t>(rank)].data());
    if (c.algorithm == Algorithm::kOneShot)
      one_shot_all_reduce(slots, math, input, output, c.count);
    else if (c.algorithm == Algorithm::kRing)
      ring_all_reduce(slots, math, input, output, c.count);
    else
      two_shot_all_reduce(slots, math, input, output, c.count);
  });
  return outputs[0];
}

template <class T>
std::vector<Array<T>> random_inputs(int world_size, int64_t count) {
  std::vector<Array<T>> inputs;
  for (int rank = 0; rank < world_size; ++rank) {
    inputs.emplace_back(count);
    for (int64_t at = 0; at < count; ++at) inputs.back()[at] = random_element<T>(generator);
  }
  return inputs;
}

// How many elements are wrong or differ between ranks.
template <class T>
int64_t wrong_elements(std::vector<Array<T>>& outputs, int64_t offset,
                       const std::vector<T>& expected) {
  int64_t wrong = 0;
  for (auto& output : outputs)
    for (size_t at = 0; at < expected.size(); ++at) {
      const T value = output[offset + static_cast<int64_t>(at)];
      wrong += !same(value, expected[at]) ||
               std::memcmp(&value, outputs[0].data() + offset + at, sizeof value) != 0;
    }
  return wrong;
}

template <class Slots, class T, DType kDType>
int64_t run_on_threads(World& world, const Case& c) {
  auto inputs = random_inputs<T>(world.size(), c.count + c.offset);
  auto outputs = random_inputs<T>(world.size(), c.count + c.offset);
  const std::vector<T> expected = reference(c, inputs);
  on_threads(world.size(), [&](int rank) {
    auto& output = outputs[static_cast<size_t>(rank)];
    if (c.in_place) output.assign(inputs[static_cast<size_t>(rank)]);
    auto& input = c.in_place ? output : inputs[static_cast<size_t>(rank)];
    launch<Slots, T, kDType>(
        c, call_of(c, world.group(rank), input.data() + c.offset, output.data() + c.offset));
  });
  return wrong_elements(outputs, c.offset, expected);
}

template <class T, DType kDType>
void compare(World& world, const Case& c) {
  const int64_t wrong = run_on_threads<PeerSlots, T, kDType>(world, c);
  check(wrong == 0, "%s: %lld elements", c.text(world.size()).c_str(),
        static_cast<long long>(wrong));
  for (int rank = 0; rank < world.size(); ++rank)
    check(world.status(rank).state == PeerStatus::kGood, "%s: status of rank %d",
          c.text(world.size()).c_str(), rank);
}

// The same regions serve all calls, of whatever type, one after the other.
template <class T, DType kDType>
void every_operation(World& world) {
  Case c;
  c.dtype = kDType;
  for (int op = 0; op <= static_cast<int>(ReduceOp::kPremulSum); ++op) {
    c.op = static_cast<ReduceOp>(op);
    if (!can_reduce(kDType, c.op)) continue;
    for (const Algorithm algorithm : kAlgorithms) {
      c.algorithm = algorithm;
      ++c.seed;
      c.order = static_cast<Order>(c.seed % 3);
      c.in_place = c.seed % 2 == 0;
      c.offset = c.seed % 5 == 0 ? 1 : 0;
      c.count = 4097 / static_cast<int64_t>(sizeof(T)) + c.seed % 3;
      compare<T, kDType>(world, c);
    }
  }
}
template <class T, DType kDType>
void every_count(World& world, std::vector<int64_t> counts) {
  Case c;
  c.dtype = kDType;
  for (const int64_t count : counts)
    for (const Algorithm algorithm : kAlgorithms)
      for (int64_t offset = 0; offset < 2; ++offset) {
        c.algorithm = algorithm;
        c.count = count;
        c.offset = offset;
        c.in_place = offset == 1;
        c.blocks = 1 + ++c.seed % 2;
        c.threads = kThreads << c.seed % 2;
        c.order = static_cast<Order>(c.seed % 3);
        compare<T, kDType>(world, c);
      }
}

[[maybe_unused]] void all() {
  for (int world_size = 1; world_size <= 4; ++world_size) {
    World world(world_size, kLayout, kPatient);
    // The counters pass 32 bits on the way.
    if (world_size == 3) world.begin_at((uint64_t{1} << 32) - 5);
#define PYCOMM_CASE(enumerator, T) every_operation<T, DType::enumerator>(world);
    PYCOMM_REDUCED_TYPES(PYCOMM_CASE)
#undef PYCOMM_CASE
    every_count<float, DType::kFloat32>(world, {0, 1, 3, 15, 16, 17, 287, 288, 289, 5001});
    every_count<BFloat16, DType::kBFloat16>(world, {0, 1, 7, 33, 575, 577, 9001});
  }
}
void quick() {
  for (int world_size = 1; world_size <= 3; ++world_size) {
    World world(world_size, kLayout, kPatient);
    every_count<float, DType::kFloat32>(world, {0, 1, 289, 2601});
    every_count<BFloat16, DType::kBFloat16>(world, {17, 3001});
  }
}

// ---- processes ----------------------------------------------------------------------------------

[[maybe_unused]] void processes() {
  using T = float;
  for (int world_size = 1; world_size <= 4; ++world_size) {
    std::vector<std::unique_ptr<Shared>> files;
    for (int rank = 0; rank < world_size; ++rank)
      files.push_back(std::make_unique<Shared>(kLayout.region_bytes()));
    Case c;
    std::vector<std::vector<Array<T>>> inputs;
    std::vector<Case> cases;
    const int64_t most = 3000;
    for (const Algorithm algorithm : kAlgorithms)
      for (const int64_t count : {int64_t{0}, int64_t{1}, int64_t{289}, most}) {
        c.algorithm = algorithm;
        c.count = count;
        ++c.seed;
        cases.push_back(c);
        inputs.push_back(random_inputs<T>(world_size, count));
      }
    const auto cases_count = static_cast<int64_t>(cases.size());
    const Shared results(world_size * cases_count * most * static_cast<int64_t>(sizeof(T)));
    const Shared statuses(world_size * static_cast<int64_t>(sizeof(PeerStatus)));
    const bool ended = on_processes(world_size, [&](int rank) {
      PeerGroup group{};
      group.rank = rank;
      group.world_size = world_size;
      group.layout = kLayout;
      group.most_polls = kPatient;
      // Other addresses in every process.
      for (int spare = 0; spare <= rank; ++spare) Shared(4096 * (1 + spare)).map();
      for (int peer = 0; peer < world_size; ++peer)
        group.regions[peer] = files[static_cast<size_t>((peer + rank) % world_size)]->map();
      std::rotate(group.regions, group.regions + (world_size - rank) % world_size,
                  group.regions + world_size);
      group.status = reinterpret_cast<PeerStatus*>(statuses.map()) + rank;
      T* output = reinterpret_cast<T*>(results.map()) + rank * cases_count * most;
      for (size_t at = 0; at < cases.size(); ++at, output += most)
        launch<PeerSlots, T, DType::kFloat32>(
            cases[at],
            call_of(cases[at], group, inputs[at][static_cast<size_t>(rank)].data(), output));
    });
    check(ended, "%d processes did not all end well", world_size);
    const T* output = reinterpret_cast<const T*>(results.map());
    for (int rank = 0; rank < world_size; ++rank)
      for (size_t at = 0; at < cases.size(); ++at, output += most) {
        const std::vector<T> expected = reference(cases[at], inputs[at]);
        bool good = true;
        for (size_t i = 0; i < expected.size(); ++i) good = good && same(output[i], expected[i]);
        check(good, "%s, as process %d", cases[at].text(world_size).c_str(), rank);
      }
    for (int rank = 0; rank < world_size; ++rank)
      check(reinterpret_cast<const PeerStatus*>(statuses.map())[rank].state == PeerStatus::kGood,
            "status of process %d", rank);
  }
}

// ---- peers that do not come
// -----------------------------------------------------------------------

void missing_peer(const Case& c, Stage stage) {
  constexpr int kWorldSize = 3, kLate = 2;
  World world(kWorldSize, kLayout, kImpatient);
  world.begin_at(40);
  auto inputs = random_inputs<float>(kWorldSize, c.count),
       outputs = random_inputs<float>(kWorldSize, c.count);
  const auto start = [&](int rank) {
    launch<PeerSlots, float, DType::kFloat32>(
        c, call_of(c, world.group(rank), inputs[static_cast<size_t>(rank)].data(),
                   outputs[static_cast<size_t>(rank)].data()));
  };
  on_threads(kLate, start);
  int timed_out = 0;
  for (int rank = 0; rank < kLate; ++rank) {
    const PeerStatus& status = world.status(rank);
    const bool by_time = status.state == PeerStatus::kTimedOut;
    const bool by_peer = status.state == PeerStatus::kAborted && status.peer == 1 - rank;
    const std::string text = c.text(kWorldSize);
    check(by_time || by_peer, "%s: rank %d ends in state %u, peer %d", text.c_str(), rank,
          status.state, status.peer);
    check(status.rank == rank && status.block < kLayout.blocks, "%s: who reports", text.c_str());
    if (!by_time) continue;
    ++timed_out;
    // A rank may also wait for one that waits for the late one.
    if (status.peer != kLate) continue;
    check(status.stage == stage && status.chunk == 0 && status.expected == 41 && status.seen == 40,
          "%s: stage %d, chunk %llu, expected %llu, seen %llu", text.c_str(),
          static_cast<int>(status.stage), static_cast<unsigned long long>(status.chunk),
          static_cast<unsigned long long>(status.expected),
          static_cast<unsigned long long>(status.seen));
  }
  check(timed_out > 0, "%s: nobody's time was up", c.text(kWorldSize).c_str());

  // The one that comes after all is told, and changes nothing; nor does any later call.
  const auto untouched = random_inputs<float>(1, c.count);
  for (int turn = 0; turn < 2; ++turn)
    for (int rank = kWorldSize - 1; rank >= 0; --rank) {
      Array<float> before(c.count);
      before.assign(outputs[static_cast<size_t>(rank)]);
      start(rank);
      check(std::memcmp(before.data(), outputs[static_cast<size_t>(rank)].data(),
                        static_cast<size_t>(c.count) * sizeof(float)) == 0,
            "%s: rank %d writes after the end", c.text(kWorldSize).c_str(), rank);
      check(world.status(rank).state != PeerStatus::kGood, "a late rank %d sees no error", rank);
    }
  check(world.status(kLate).state == PeerStatus::kAborted && world.status(kLate).peer < kLate &&
            world.status(kLate).peer >= 0,
        "%s: the late rank's report", c.text(kWorldSize).c_str());
}

// The host ends a wait that has no bound.
void host_aborts() {
  World world(2, kLayout, kPatient);
  auto data = random_inputs<float>(2, 100);
  Case c;
  c.count = 100;
  std::thread rank([&] {
    launch<PeerSlots, float, DType::kFloat32>(
        c, call_of(c, world.group(0), data[0].data(), data[0].data()));
  });
  auto* word = reinterpret_cast<uint64_t*>(world.region(0) + kLayout.abort_offset());
  __atomic_store_n(word, kAbortedByHost, __ATOMIC_RELAXED);
  rank.join();
  check(world.status(0).state == PeerStatus::kAborted && world.status(0).peer == -1,
        "state %u by %d after the host's abort", world.status(0).state, world.status(0).peer);
  uint64_t passed_on = 0;
  std::memcpy(&passed_on, world.region(1) + kLayout.abort_offset(), sizeof passed_on);
  check(passed_on == kAbortedByFirst + 0, "the peer was told %llu",
        static_cast<unsigned long long>(passed_on));
}

void missing() {
  Case c;
  for (const int64_t count : {int64_t{1}, int64_t{3000}}) {
    c.count = count;
    c.algorithm = Algorithm::kOneShot;
    missing_peer(c, Stage::kFilled);
    c.algorithm = Algorithm::kTwoShot;
    missing_peer(c, Stage::kFilled);
    c.algorithm = Algorithm::kRing;  // rank 0 waits for the result of the last
    missing_peer(c, Stage::kReduced);
  }
  host_aborts();
}

// ---- planted faults -----------------------------------------------------------------------------

// Rank 1 forgets to post a stage of one chunk.
struct ForgetsFlag : PeerSlots {
  using PeerSlots::PeerSlots;
  void post(Stage stage, int64_t chunk) {
    if (rank() != 1 || stage != Stage::kReduced || chunk < 2)
      PeerSlots::post(stage, chunk);
    else
      __syncthreads();
  }
};
struct WrongSlot : PeerSlots {
  using PeerSlots::PeerSlots;
  char* mine(int64_t chunk) { return slot(rank(), rank() == 1 && chunk == 2 ? chunk + 1 : chunk); }
};
// One slot further than there are.
struct BeyondTheSlots : PeerSlots {
  using PeerSlots::PeerSlots;
  char* mine(int64_t chunk) {
    char* at = PeerSlots::mine(chunk);
    return rank() == 1 && blockIdx.x == 1 && chunk % slots() == slots() - 1 ? at + slot_bytes()
                                                                            : at;
  }
};
struct ForgetsRelease : PeerSlots {
  using PeerSlots::PeerSlots;
  void post(Stage stage, int64_t chunk) {
    PeerSlots::post(stage, chunk, cuda::std::memory_order_relaxed);
  }
};
struct ForgetsToAcquire : PeerSlots {
  using PeerSlots::PeerSlots;
  void acquire(int64_t) { __syncthreads(); }
};
struct ForgetsToAwait : PeerSlots {
  using PeerSlots::PeerSlots;
  void await(int peer, Stage stage, int64_t chunk) {
    if (stage != Stage::kReduced) PeerSlots::await(peer, stage, chunk);
  }
};

template <class Slots>
int64_t planted(World& world) {
  Case c;
  c.count = 5000;
  return run_on_threads<Slots, float, DType::kFloat32>(world, c);
}

// The checks above find the faults that show in the results or in the status.
void faults() {
  {
    World world(3, kLayout, 5000);
    world.set_patient(1);
    planted<ForgetsFlag>(world);
    int blamed = 0;
    for (int rank = 0; rank < 3; ++rank) {
      const PeerStatus& status = world.status(rank);
      check(status.state != PeerStatus::kGood, "a missing flag: rank %d is content", rank);
      blamed += status.state == PeerStatus::kTimedOut && status.peer == 1 &&
                status.stage == Stage::kReduced && status.chunk == 2 && status.expected == 3 &&
                status.seen == 2;
    }
    check(blamed > 0, "a missing flag: nobody blames rank %d", 1);
  }
  World wrong_slot(3, kLayout, kPatient);
  check(planted<WrongSlot>(wrong_slot) > 0, "a wrong slot: %s", "no wrong element");
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "all";
#if !defined(QUICK)
  if (what == "all") all();
  if (what == "processes") processes();
#endif
  if (what == "quick") quick();
  if (what == "missing") missing();
  if (what == "faults") faults();
  World world(3, kLayout, kPatient);
  // For AddressSanitizer.
  if (what == "outside") planted<BeyondTheSlots>(world);
  // For ThreadSanitizer: each is a race.
  if (what == "no_release") planted<ForgetsRelease>(world);
  if (what == "no_acquire") planted<ForgetsToAcquire>(world);
  if (what == "no_await") planted<ForgetsToAwait>(world);
  return report();
}
