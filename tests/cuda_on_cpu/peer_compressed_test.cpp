// Runs compressed_kernel unchanged on the CPU, ranks as threads and as processes, and compares
// results, residuals and counts with the same algorithms on the CPU's own kernels, strip by strip.
// tests/test_cuda_on_cpu.py builds and runs it: `all` formats and dtypes; `quick`, a part of it,
// for ThreadSanitizer; `processes`; `missing`: a rank that does not come; `early`: a fault that
// ThreadSanitizer must find.
#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "checks.h"
#include "cuda_on_cpu.h"
#include "peer_world.h"
// The kernels need the definitions above.
#include "../../csrc/algorithms/compressed.h"
#include "../../csrc/algorithms/encoder.h"
#include "../../csrc/error.h"
#include "../../csrc/p2p/compressed_kernel.cuh"

namespace {

using namespace pycomm;
using namespace checks;
using namespace peer_world;
using cuda_on_cpu::launch_resident;
using cuda_on_cpu::Order;

constexpr Algorithm kAlgorithms[] = {Algorithm::kOneShot, Algorithm::kTwoShot, Algorithm::kRing};
constexpr uint64_t kPatient = uint64_t{1} << 40, kImpatient = 300;
// A few hundred values take every slot several times; and one for the longest codec block.
constexpr PeerLayout kSmall{2, 4, 1152}, kLarge{2, 4, 4608};

std::mt19937_64 generator(20261204);
unsigned below(unsigned limit) { return static_cast<unsigned>(generator() % limit); }

template <class T>
T random_element(bool tame) {
  const auto word = static_cast<uint32_t>(generator() >> 32);
  float value = static_cast<float>(static_cast<int32_t>(word)) * 0x1p-29f;
  if (!tame && word % 5 == 0) value = bits_as<float>(static_cast<uint32_t>(generator()));
  if constexpr (std::is_same_v<T, Half>)
    return T{cuda_on_cpu::Binary16::narrow(value)};
  else if constexpr (std::is_same_v<T, BFloat16>)
    return T{cuda_on_cpu::Brain16::narrow(value)};
  else
    return value;
}

struct Case {
  Codec codec;
  DType dtype = DType::kFloat32;
  Algorithm algorithm = Algorithm::kTwoShot;
  int64_t count = 0;
  unsigned blocks = 2, threads = 32;
  bool split = false, with_residual = false, infinite = false, stochastic = false, tame = true;
  Order order = Order::kShuffled;
  unsigned seed = 0;

  std::string text(int world_size) const {
    return concat(name_of(algorithm), " ", name_of(codec.format), " block ", codec.block, " of ",
                  name_of(dtype), ", ", world_size, " ranks, count ", count, ", grid ", blocks, "x",
                  threads, split ? ", split" : "", with_residual ? ", residual" : "",
                  stochastic ? ", stochastic" : "", ", seed ", seed);
  }
};

// What one rank works on.
template <class T>
struct Data {
  Data(const Case& c, int rank) : factor(rank % 2 ? 1.0f / 3 : 1.0f), seed(c.seed + 77u * rank) {
    for (int64_t left = c.count; left > 0;) {
      const int64_t size = c.split ? std::min<int64_t>(left, 1 + below(200)) : left;
      const unsigned offset = c.split ? below(3) : 0;
      memory.emplace_back(size + offset);
      for (int64_t at = 0; at < size + offset; ++at) memory.back()[at] = random_element<T>(c.tame);
      spans.push_back({memory.back().data() + offset, size});
      left -= size;
    }
    if (spans.empty()) spans.push_back({nullptr, 0});
    residual.reset(new Array<float>(c.count));
    for (int64_t at = 0; at < c.count; ++at) (*residual)[at] = random_element<float>(true) / 16;
  }
  Data(const Data& other)
      : spans(other.spans), counts(other.counts), factor(other.factor), seed(other.seed) {
    for (Span& span : spans) {
      if (!span.data) continue;
      const auto offset = static_cast<int64_t>(reinterpret_cast<uintptr_t>(span.data) % 256);
      memory.emplace_back(span.count + offset / static_cast<int64_t>(sizeof(T)));
      char* const data = reinterpret_cast<char*>(memory.back().data()) + offset;
      std::memcpy(data, span.data, static_cast<size_t>(span.count) * sizeof(T));
      span.data = data;
    }
    const int64_t count = total();
    residual.reset(new Array<float>(count));
    for (int64_t at = 0; at < count; ++at) (*residual)[at] = (*other.residual)[at];
  }
  int64_t total() const {
    int64_t sum = 0;
    for (const Span& span : spans) sum += span.count;
    return sum;
  }
  DeviceSpans on_device() {
    if (spans.size() == 1) return {1, spans[0].data, nullptr};
    list.resize(spans.size() + 1);
    fill_device_spans(spans.data(), static_cast<int>(spans.size()), list.data());
    return {static_cast<int>(spans.size()), nullptr, list.data()};
  }
  std::vector<T> elements() const {
    std::vector<T> all;
    for (const Span& span : spans)
      all.insert(all.end(), static_cast<T*>(span.data), static_cast<T*>(span.data) + span.count);
    return all;
  }

  std::vector<Array<T>> memory;
  std::vector<Span> spans;
  std::vector<DeviceSpan> list;
  std::unique_ptr<Array<float>> residual;
  CodecCounts counts;
  float factor;
  uint64_t seed;
};

// ---- on the CPU's own kernels -------------------------------------------------------------------

// An Encoder that counts from a strip's first value.
struct StripEncoder {
  const Encoder& whole;
  int64_t begin;

  const Codec& codec() const { return whole.codec(); }
  int64_t capacity(int64_t bytes) const { return whole.capacity(bytes); }
  std::vector<Wire> wires() const { return {}; }
  Place place(char* memory, int64_t capacity, int64_t from) const {
    return whole.place(memory, capacity, from);
  }
  Wire wire(const char* memory, int64_t capacity, int64_t from) const {
    return whole.wire(memory, capacity, from);
  }
  void encode(int64_t first, int64_t count, const Place& to) const {
    if (count > 0) whole.encode(begin + first, count, to);
  }
  void reduce(const std::vector<Wire>& others, int own, int64_t first, int64_t count,
              const Place& to, bool finished) const {
    if (count > 0) whole.reduce(others, own, begin + first, count, to, finished);
  }
  void decode(const Wire& wire, int64_t first, int64_t count) const {
    if (count > 0) whole.decode(wire, begin + first, count);
  }
  void sum(const std::vector<Wire>& wires, int64_t first, int64_t count) const {
    if (count > 0) whole.sum(wires, begin + first, count);
  }
  void pass_on(const char* from, char* to, int64_t capacity, int64_t count) const {
    whole.pass_on(from, to, capacity, count);
  }
};

template <class T>
void reference(const Case& c, const PeerLayout& layout, std::vector<Data<T>>& ranks) {
  const int world_size = static_cast<int>(ranks.size());
  for (unsigned block = 0; block < c.blocks; ++block) {
    HostMemory memory(world_size, layout.slot_bytes, layout.slots);
    on_threads(world_size, [&](int rank) {
      Data<T>& data = ranks[static_cast<size_t>(rank)];
      HostSlots slots(memory, rank);
      Compression compression;
      compression.codec = c.codec;
      compression.dtype = c.dtype;
      compression.tensors = data.spans;
      compression.factor = data.factor;
      compression.divisor = static_cast<float>(world_size);
      if (c.with_residual) compression.residual = data.residual->data();
      compression.infinite = c.infinite;
      compression.stochastic = c.stochastic;
      compression.seed = data.seed;
      compression.counts = &data.counts;
      const Encoder whole(compression, false);
      const Shard strip =
          shard_of(c.count, static_cast<int>(c.blocks), static_cast<int>(block), c.codec.granule());
      const StripEncoder encoder{whole, strip.begin};
      if (c.algorithm == Algorithm::kOneShot)
        compressed_one_shot(slots, encoder, strip.count);
      else if (c.algorithm == Algorithm::kRing)
        compressed_ring(slots, encoder, strip.count);
      else
        compressed_two_shot(slots, encoder, strip.count);
    });
  }
}

// ---- in the kernel ------------------------------------------------------------------------------

template <class Slots, WireFormat kFormat, class T>
void launch(const Case& c, const PeerGroup& group, Data<T>& data) {
  PeerCompressedCall call{};
  call.group = group;
  call.count = c.count;
  call.compression.codec = c.codec;
  call.compression.tensors = data.on_device();
  call.compression.factor = data.factor;
  call.compression.divisor = static_cast<float>(group.world_size);
  call.compression.residual = c.with_residual ? data.residual->data() : nullptr;
  call.compression.counts = &data.counts;
  call.compression.seed = data.seed;
  call.compression.infinite = c.infinite;
  call.compression.stochastic = c.stochastic;
  const auto run = [&](auto kernel) {
    launch_resident(c.blocks, c.threads, c.order, c.seed + 7u * static_cast<unsigned>(group.rank),
                    kernel, call);
  };
  switch (c.algorithm) {
    case Algorithm::kOneShot:
      return run(compressed_kernel<Algorithm::kOneShot, kFormat, T, Slots>);
    case Algorithm::kRing:
      return run(compressed_kernel<Algorithm::kRing, kFormat, T, Slots>);
    default:
      return run(compressed_kernel<Algorithm::kTwoShot, kFormat, T, Slots>);
  }
}

template <class T>
std::vector<Data<T>> random_data(const Case& c, int world_size) {
  std::vector<Data<T>> ranks;
  ranks.reserve(static_cast<size_t>(world_size));
  for (int rank = 0; rank < world_size; ++rank) ranks.emplace_back(c, rank);
  return ranks;
}

template <class T>
void compare(const Case& c, const std::vector<Data<T>>& expected, const std::vector<Data<T>>& got) {
  const int world_size = static_cast<int>(got.size());
  const std::string text = c.text(world_size);
  const std::vector<T> first = got[0].elements();
  for (size_t rank = 0; rank < got.size(); ++rank) {
    const std::vector<T> wanted = expected[rank].elements(), have = got[rank].elements();
    int64_t wrong = 0, errors = 0, differ = 0;
    for (size_t at = 0; at < wanted.size(); ++at) {
      wrong += !same(wanted[at], have[at]);
      differ += std::memcmp(&have[at], &first[at], sizeof(T)) != 0;
      const auto place = static_cast<int64_t>(at);
      errors += !same((*expected[rank].residual)[place], (*got[rank].residual)[place]);
    }
    check(wrong == 0, "%s: %lld elements of rank %zu", text.c_str(), static_cast<long long>(wrong),
          rank);
    check(differ == 0, "%s: rank %zu has %lld other elements than rank 0", text.c_str(), rank,
          static_cast<long long>(differ));
    check(errors == 0, "%s: %lld residuals of rank %zu", text.c_str(),
          static_cast<long long>(errors), rank);
    const CodecCounts &want = expected[rank].counts, &have_counts = got[rank].counts;
    check(want.values == have_counts.values && want.overflows == have_counts.overflows &&
              want.underflows == have_counts.underflows &&
              want.non_finite == have_counts.non_finite,
          "%s: counts of rank %zu", text.c_str(), rank);
  }
}

template <WireFormat kFormat, class T>
void run_case(World& world, const Case& c) {
  std::vector<Data<T>> got = random_data<T>(c, world.size()), expected(got);
  reference(c, world.layout(), expected);
  on_threads(world.size(), [&](int rank) {
    launch<PeerSlots, kFormat, T>(c, world.group(rank), got[static_cast<size_t>(rank)]);
  });
  compare(c, expected, got);
  for (int rank = 0; rank < world.size(); ++rank)
    check(world.status(rank).state == PeerStatus::kGood, "%s: status of rank %d",
          c.text(world.size()).c_str(), rank);
}

template <WireFormat kFormat, class T, DType kDType>
void every_way(World& world, const std::vector<int>& blocks, const std::vector<int64_t>& counts) {
  static unsigned number = 0;
  Case c;
  c.dtype = kDType;
  for (const int block : blocks) {
    if (block > 0 ? kFormat == WireFormat::kFloat32 : kFormat == WireFormat::kInt8) continue;
    c.codec = {kFormat, block};
    for (const int64_t count : counts)
      for (const Algorithm algorithm : kAlgorithms) {
        c.algorithm = algorithm;
        c.count = count;
        c.seed = ++number;
        c.blocks = 1 + number % 2;
        c.threads = std::max(32u << number % 2, static_cast<unsigned>((block / 8 + 31) / 32 * 32));
        c.split = number % 3 == 0;
        c.with_residual = number % 4 != 0;
        c.stochastic = number % 5 == 0;
        c.infinite = number % 7 == 0;
        c.tame = number % 6 != 0;
        c.order = static_cast<Order>(number % 3);
        run_case<kFormat, T>(world, c);
      }
  }
}

[[maybe_unused]] void all() {
  for (int world_size = 1; world_size <= 4; ++world_size) {
    World world(world_size, kSmall, kPatient);
    if (world_size == 2) world.begin_at((uint64_t{1} << 32) - 5);
    const std::vector<int> blocks{0, 64, 192};
    const std::vector<int64_t> counts{0, 1, 65, 1501};
#define PYCOMM_CASE(enumerator, ...)                                                 \
  every_way<WireFormat::enumerator, float, DType::kFloat32>(world, blocks, counts);  \
  every_way<WireFormat::enumerator, Half, DType::kFloat16>(world, blocks, {7, 901}); \
  every_way<WireFormat::enumerator, BFloat16, DType::kBFloat16>(world, blocks, {129, 901});
    PYCOMM_WIRE_FORMATS(PYCOMM_CASE)
#undef PYCOMM_CASE
    World large(world_size, kLarge, kPatient);
    every_way<WireFormat::kInt8, float, DType::kFloat32>(large, {2048}, {2047, 20001});
    every_way<WireFormat::kFloat8E4M3, BFloat16, DType::kBFloat16>(large, {2048}, {9001});
  }
}
void quick() {
  for (int world_size = 1; world_size <= 3; ++world_size) {
    World world(world_size, kSmall, kPatient);
    every_way<WireFormat::kInt8, float, DType::kFloat32>(world, {64}, {1, 1501});
    every_way<WireFormat::kFloat16, BFloat16, DType::kBFloat16>(world, {0, 192}, {901});
  }
}

// ---- processes ----------------------------------------------------------------------------------

[[maybe_unused]] void processes() {
  constexpr int kWorldSize = 3;
  std::vector<std::unique_ptr<Shared>> files;
  for (int rank = 0; rank < kWorldSize; ++rank)
    files.push_back(std::make_unique<Shared>(kSmall.region_bytes()));
  Case c;
  c.codec = {WireFormat::kFloat8E4M3, 64};
  c.count = 1501;
  c.with_residual = true;
  std::vector<std::vector<Data<float>>> inputs;
  for (size_t at = 0; at < 3; ++at) inputs.push_back(random_data<float>(c, kWorldSize));
  const Shared results(kWorldSize * 3 * c.count * static_cast<int64_t>(sizeof(float)));
  const bool ended = on_processes(kWorldSize, [&](int rank) {
    PeerGroup group{};
    PeerStatus status{};
    group.rank = rank;
    group.world_size = kWorldSize;
    group.layout = kSmall;
    group.most_polls = kPatient;
    group.status = &status;
    for (int step = 0; step < kWorldSize; ++step) {
      const int peer = (step + rank) % kWorldSize;  // at other addresses in every process
      group.regions[peer] = files[static_cast<size_t>(peer)]->map();
    }
    float* output = reinterpret_cast<float*>(results.map()) + rank * 3 * c.count;
    Case mine = c;
    for (size_t at = 0; at < 3; ++at, output += c.count) {
      mine.algorithm = kAlgorithms[at];
      Data<float>& data = inputs[at][static_cast<size_t>(rank)];
      launch<PeerSlots, WireFormat::kFloat8E4M3, float>(mine, group, data);
      std::memcpy(output, data.elements().data(), static_cast<size_t>(c.count) * sizeof(float));
    }
    if (status.state != PeerStatus::kGood) _exit(2);
  });
  check(ended, "%d processes did not all end well", kWorldSize);
  const float* output = reinterpret_cast<const float*>(results.map());
  for (size_t at = 0; at < 3; ++at) {
    c.algorithm = kAlgorithms[at];
    reference(c, kSmall, inputs[at]);
    for (size_t rank = 0; rank < kWorldSize; ++rank) {
      const std::vector<float> expected = inputs[at][rank].elements();
      const float* got = output + (rank * 3 + at) * expected.size();
      int64_t wrong = 0;
      for (size_t i = 0; i < expected.size(); ++i) wrong += !same(got[i], expected[i]);
      check(wrong == 0, "%s, as process %zu: %lld elements", c.text(kWorldSize).c_str(), rank,
            static_cast<long long>(wrong));
    }
  }
}

// ---- faults -------------------------------------------------------------------------------------

// Tensors and residuals of what is not over stay as they are from the first wait that is in vain.
void missing() {
  for (const Algorithm algorithm : kAlgorithms) {
    World world(3, kSmall, kImpatient);
    Case c;
    c.algorithm = algorithm;
    c.codec = {WireFormat::kInt8, 64};
    c.count = 901;
    std::vector<Data<float>> ranks = random_data<float>(c, 3), before(ranks);
    on_threads(2, [&](int rank) {
      launch<PeerSlots, WireFormat::kInt8, float>(c, world.group(rank),
                                                  ranks[static_cast<size_t>(rank)]);
    });
    for (int rank = 0; rank < 2; ++rank) {
      const PeerStatus& status = world.status(rank);
      check(status.state != PeerStatus::kGood && status.rank == rank, "%s: rank %d is content",
            c.text(3).c_str(), rank);
      const auto number = static_cast<size_t>(rank);
      check(ranks[number].elements() == before[number].elements(), "%s: rank %d has results",
            c.text(3).c_str(), rank);
    }
  }
}

// Does not wait for the others' contributions.
struct Early : PeerSlots {
  using PeerSlots::PeerSlots;
  void await(int peer, Stage stage, int64_t chunk) {
    if (stage != Stage::kFilled) PeerSlots::await(peer, stage, chunk);
  }
};
void early() {
  World world(3, kSmall, kPatient);
  Case c;
  c.codec = {WireFormat::kInt8, 64};
  c.count = 1501;
  std::vector<Data<float>> ranks = random_data<float>(c, 3);
  on_threads(3, [&](int rank) {
    launch<Early, WireFormat::kInt8, float>(c, world.group(rank), ranks[static_cast<size_t>(rank)]);
  });
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
  if (what == "early") early();
  return report();
}
