// Runs transcode_kernel unchanged on the CPU and compares it bit for bit with the CPU's driver:
// every format, block, dtype, count and number of ranks; lists of tensors at odd addresses;
// ordinary and special values; grids and orders of threads. Of the sums of squares only the value
// is compared, since they are added up in another order. tests/test_cuda_on_cpu.py builds and runs
// it; with the argument `quick`, a part of it, as ThreadSanitizer is slow.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "checks.h"
#include "cuda_on_cpu.h"
// The kernel needs the definitions above.
#include "../../csrc/kernels/codec_kernel.cuh"
#include "../../csrc/kernels/isa.h"

namespace {

using namespace pycomm;
using namespace checks;
using cuda_on_cpu::launch_blocks;
using cuda_on_cpu::Order;

constexpr int64_t kCounts[] = {0, 1, 15, 17, 63, 65, 255, 1025, 5000};
constexpr int kBlocks[] = {0, 64, 192, 256, 4096};
constexpr int kMostRanks = 4;

std::mt19937_64 generator(20250307);

unsigned below(unsigned limit) { return static_cast<unsigned>(generator() % limit); }

// ---- data ---------------------------------------------------------------------------------------

enum class Values { kTame, kAnyBits, kHuge, kTiny, kTies, kZeros, kOneInfinity };
constexpr int kKindsOfValues = 7;

float random_value(Values kind) {
  const auto word = static_cast<uint32_t>(generator() >> 32);
  const float tame = static_cast<float>(static_cast<int32_t>(word)) * 0x1p-29f;
  switch (kind) {
    case Values::kTame:
    case Values::kOneInfinity:
      return tame;
    case Values::kAnyBits:
      return word % 3 ? tame : bits_as<float>(static_cast<uint32_t>(generator()));
    case Values::kHuge:
      return tame * 0x1p125f;
    case Values::kTiny:
      return tame * std::ldexp(1.0f, -100 - static_cast<int>(word % 50));
    case Values::kTies:  // halfway between neighbours of some format, or whole
      return std::ldexp(static_cast<float>(word % 512), static_cast<int>(word >> 9) % 9 - 12) *
             (word >> 31 ? -1.0f : 1.0f);
    case Values::kZeros:
      return word % 2 ? 0.0f : -0.0f;
  }
  return 0;
}
template <class T>
T element_of(float value) {
  if constexpr (std::is_same_v<T, Half>)
    return T{cuda_on_cpu::Binary16::narrow(value)};
  else if constexpr (std::is_same_v<T, BFloat16>)
    return T{cuda_on_cpu::Brain16::narrow(value)};
  else
    return value;
}
template <class T>
void fill(T* to, int64_t count, Values kind) {
  for (int64_t at = 0; at < count; ++at) to[at] = element_of<T>(random_value(kind));
  if (kind == Values::kOneInfinity && count > 0)
    to[below(static_cast<unsigned>(count))] = element_of<T>(below(2) ? -INFINITY : NAN);
}

// Tensors one behind the other, each somewhere in memory of its own. `before`: elements ahead of
// them all that nobody reads or writes, so that numbers can be large.
template <class T>
class Tensors {
 public:
  Tensors(int64_t before, int64_t count, bool alone) {
    if (before > 0) spans_.push_back({nullptr, before});
    do {
      const int64_t size = alone ? count : std::min<int64_t>(count, below(600));
      const unsigned offset = below(3) ? below(8) : 0;
      memory_.emplace_back(size + offset);
      spans_.push_back({memory_.back().data() + offset, size});
      count -= size;
    } while (count > 0);
    if (!alone) spans_.push_back({nullptr, 0});
  }
  void fill_with(Values kind) {
    for (const Span& span : spans_)
      if (span.data) fill(static_cast<T*>(span.data), span.count, kind);
  }
  void assign(const Tensors& other) {
    for (size_t at = 0; at < spans_.size(); ++at)
      if (spans_[at].data && spans_[at].count > 0)
        std::memcpy(spans_[at].data, other.spans_[at].data,
                    static_cast<size_t>(spans_[at].count) * sizeof(T));
  }
  // Other memory with the same sizes and offsets as these.
  Tensors twin() const {
    Tensors result;
    for (const Span& span : spans_) {
      if (!span.data) {
        result.spans_.push_back(span);
        continue;
      }
      const auto offset =
          static_cast<int64_t>(reinterpret_cast<uintptr_t>(span.data) % 256 / sizeof(T));
      result.memory_.emplace_back(span.count + offset);
      result.spans_.push_back({result.memory_.back().data() + offset, span.count});
    }
    result.assign(*this);
    return result;
  }
  const Span* spans() const { return spans_.data(); }
  const ConstSpan* const_spans() {
    const_spans_.clear();
    for (const Span& span : spans_) const_spans_.push_back({span.data, span.count});
    return const_spans_.data();
  }
  DeviceSpans on_device() {
    if (spans_.size() == 1) return {1, spans_[0].data, nullptr};
    list_.resize(spans_.size() + 1);
    fill_device_spans(spans_.data(), static_cast<int>(spans_.size()), list_.data());
    return {static_cast<int>(spans_.size()), nullptr, list_.data()};
  }
  bool equals(const Tensors& other) const {
    for (size_t at = 0; at < spans_.size(); ++at)
      for (int64_t i = 0; spans_[at].data && i < spans_[at].count; ++i)
        if (!same(static_cast<T*>(spans_[at].data)[i], static_cast<T*>(other.spans_[at].data)[i]))
          return false;
    return true;
  }

 private:
  Tensors() = default;
  std::vector<Array<T>> memory_;
  std::vector<Span> spans_;
  std::vector<ConstSpan> const_spans_;
  std::vector<DeviceSpan> list_;
};

// Encoded values in memory that ends with them.
template <class Value>
struct Encoded {
  Encoded(const Codec& codec, int64_t count) : values(count), scales(codec.scales(count)) {}
  Array<Value> values;
  Array<float> scales;
};

// ---- the comparison -----------------------------------------------------------------------------

enum class Way { kEncode, kReduce, kDecode, kSum };

struct Case {
  Codec codec;
  DType dtype;
  int64_t count;
  int ranks;
  Way way;

  std::string words() const {
    return concat_words(name_of(codec.format), " block ", codec.block, " ", name_of(dtype),
                        " count ", count, " ranks ", ranks, " way ", static_cast<int>(way));
  }
  template <class... Parts>
  static std::string concat_words(const Parts&... parts) {
    std::string result;
    const auto add = [&](const auto& part) {
      if constexpr (std::is_arithmetic_v<std::decay_t<decltype(part)>>)
        result += std::to_string(part);
      else
        result += part;
    };
    (add(parts), ...);
    return result;
  }
};

template <WireFormat kFormat, class T>
class Comparison {
 public:
  explicit Comparison(const Case& which)
      : case_(which),
        kind_(static_cast<Values>(below(kKindsOfValues))),
        first_(below(3) ? kFirst : kBehind32Bits - below(static_cast<unsigned>(which.count) + 1)),
        wire_tensors_(0, which.count, true),
        inputs_(first_ - kFirst, kFirst + which.count + below(20), below(3) == 0),
        outputs_(inputs_.twin()),
        device_outputs_(inputs_.twin()),
        residual_(residual_offset_ + which.count),
        device_residual_(residual_offset_ + which.count),
        expected_(which.codec, which.count),
        got_(which.codec, which.count) {}

  void run() {
    prepare();
    TranscodeCall call = host_call();
    transcode(call);
    DeviceTranscodeCall device = device_call(call);
    launch(device);
    compare();
  }

 private:
  using Value = typename FormatOf<kFormat>::Value;
  static constexpr int64_t kFirst = 37, kBehind32Bits = int64_t{1} << 32;

  bool owns() const { return case_.way != Way::kDecode; }
  bool encodes() const { return case_.way == Way::kEncode || case_.way == Way::kReduce; }

  void prepare() {
    inputs_.fill_with(kind_);
    outputs_.assign(inputs_);
    device_outputs_.assign(inputs_);
    fill(residual_.data(), residual_offset_ + case_.count, Values::kTame);
    device_residual_.assign(residual_);
    const int others = case_.way == Way::kEncode ? 0 : case_.ranks - (owns() ? 1 : 0);
    for (int rank = 0; rank < others; ++rank) {
      wire_tensors_.fill_with(below(4) ? Values::kTame : kind_);
      encoded_.emplace_back(case_.codec, case_.count);
      TranscodeCall call;
      call.codec = case_.codec;
      call.dtype = case_.dtype;
      call.count = case_.count;
      call.own = 0;
      call.inputs = wire_tensors_.const_spans();
      call.values = encoded_.back().values.data();
      call.scales = encoded_.back().scales.data();
      transcode(call);
    }
    for (auto& encoded : encoded_) wires_.push_back({encoded.values.data(), encoded.scales.data()});
  }

  TranscodeCall host_call() {
    TranscodeCall call;
    call.codec = case_.codec;
    call.dtype = case_.dtype;
    call.count = case_.count;
    call.wires = wires_.data();
    call.num_wires = static_cast<int>(wires_.size());
    call.own = owns() ? static_cast<int>(below(static_cast<unsigned>(call.num_wires) + 1)) : -1;
    call.first = first_;
    call.factor = below(2) ? 1.0f : below(8) ? 1.0f / 3 : INFINITY;
    call.divisor = below(2) ? 1.0f : below(4) ? 3.0f : below(2) ? -3.0f : INFINITY;
    if (owns() && below(4)) call.residual = residual_.data() + residual_offset_;
    if (encodes()) {
      call.values = expected_.values.data();
      call.scales = expected_.scales.data();
    }
    in_place_ = below(2) == 0;
    if (owns()) call.inputs = (in_place_ ? outputs_ : inputs_).const_spans();
    if (!encodes() || below(3)) call.outputs = outputs_.spans();
    call.infinite = below(2) == 0;
    call.stochastic = below(2) == 0;
    call.seed = generator();
    call.counts = &expected_counts_;
    return call;
  }

  DeviceTranscodeCall device_call(const TranscodeCall& call) {
    DeviceTranscodeCall device{};
    device.count = call.count;
    device.first = first_;
    std::copy(wires_.begin(), wires_.end(), device.wires);
    if (owns()) device.inputs = (in_place_ ? device_outputs_ : inputs_).on_device();
    if (call.outputs) device.outputs = device_outputs_.on_device();
    device.residual = call.residual ? device_residual_.data() + residual_offset_ : nullptr;
    device.values = encodes() ? got_.values.data() : nullptr;
    device.scales = encodes() ? got_.scales.data() : nullptr;
    device.counts = &got_counts_;
    device.seed = call.seed;
    device.factor = call.factor;
    device.divisor = call.divisor;
    device.block = call.codec.block;
    device.num_wires = call.num_wires;
    device.own = call.own;
    device.infinite = call.infinite;
    device.stochastic = call.stochastic;
    return device;
  }

  void launch(const DeviceTranscodeCall& device) {
    const int least = std::max(case_.codec.block, kBlockGranule) / kTranscodeLanes;
    const auto warps = static_cast<unsigned>((least + kWarpThreads - 1) / kWarpThreads);
    const unsigned most = kMostTranscodeThreads / kWarpThreads;
    const unsigned threads = std::min(warps + below(3), most) * kWarpThreads;
    const auto order = static_cast<Order>(below(3));
    launch_blocks(1 + below(3), threads, order, below(1000), transcode_kernel<kFormat, T>, device);
  }

  void compare() {
    const std::string words = case_.words();
    const auto differ = [&](bool equal, const char* what) {
      check(equal, "%s, values %d: %s", words.c_str(), static_cast<int>(kind_), what);
    };
    bool values = true, scales = true, residual = true;
    if (encodes()) {
      for (int64_t at = 0; at < case_.count; ++at)
        values = values && same(expected_.values[at], got_.values[at]);
      for (int64_t at = 0; at < case_.codec.scales(case_.count); ++at)
        scales = scales && same(expected_.scales[at], got_.scales[at]);
    }
    for (int64_t at = 0; at < residual_offset_ + case_.count; ++at)
      residual = residual && same(residual_[at], device_residual_[at]);
    differ(values, "wire");
    differ(scales, "scales");
    differ(residual, "residual");
    differ(outputs_.equals(device_outputs_), "outputs");
    differ(same_counts(), "counts");
  }
  bool same_counts() const {
    const CodecCounts &a = expected_counts_, &b = got_counts_;
    return a.values == b.values && a.overflows == b.overflows && a.underflows == b.underflows &&
           a.non_finite == b.non_finite && close(a.squares, b.squares) &&
           close(a.error_squares, b.error_squares);
  }
  // The CPU adds up in float, where large squares overflow and small ones vanish.
  static bool close(double host, double device) {
    if (!std::isfinite(host)) return device > 1e36;
    return std::fabs(host - device) <= 1e-3 * device + 1e-36;
  }

  const Case case_;
  const Values kind_;
  const int64_t first_;
  const int64_t residual_offset_ = below(4) ? 0 : 3;
  bool in_place_ = false;
  Tensors<T> wire_tensors_, inputs_, outputs_, device_outputs_;
  Array<float> residual_, device_residual_;
  std::vector<Encoded<Value>> encoded_;
  std::vector<Wire> wires_;
  Encoded<Value> expected_, got_;
  CodecCounts expected_counts_, got_counts_;
};

template <WireFormat kFormat, class T>
void compare(DType dtype, bool quick) {
  for (const int block : kBlocks) {
    if (block == 0 ? kFormat == WireFormat::kInt8 : kFormat == WireFormat::kFloat32) continue;
    for (const int64_t count : kCounts) {
      if (quick && count != 65 && count != 1025) continue;
      for (int ranks = 1; ranks <= kMostRanks; ++ranks)
        for (const Way way : {Way::kEncode, Way::kReduce, Way::kDecode, Way::kSum}) {
          if (quick ? ranks != 2 : way == Way::kEncode && ranks > 1) continue;
          Comparison<kFormat, T>({{kFormat, block}, dtype, count, ranks, way}).run();
        }
    }
  }
}
template <WireFormat kFormat>
void compare(bool quick) {
  compare<kFormat, float>(DType::kFloat32, quick);
  if (quick) return;
  compare<kFormat, Half>(DType::kFloat16, false);
  compare<kFormat, BFloat16>(DType::kBFloat16, false);
}

// ---- the host execution header itself -----------------------------------------------------------

struct Probe {
  uint32_t* results;
  int variant;
};
bool right_half(unsigned thread) { return thread % 32 >= 16; }
// Sums over the warp and the block, a ballot, and counts of all blocks.
void working_kernel(Probe probe) {
  __shared__ uint32_t of_warps[4];
  uint32_t sum = threadIdx.x;
  for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
  const unsigned odd = __ballot_sync(~0u, threadIdx.x % 2);
  const uint32_t neighbour = __shfl_down_sync(~0u, threadIdx.x, 1);
  const uint32_t first = __shfl_sync(~0u, threadIdx.x, 0);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sum;
  __syncthreads();
  uint32_t total = 0;
  for (const uint32_t of_warp : of_warps) total += of_warp;
  const bool right = total == 127 * 128 / 2 && odd == 0xaaaaaaaau &&
                     neighbour == threadIdx.x + (threadIdx.x % 32 < 31) &&
                     first == threadIdx.x / 32 * 32 && __any_sync(~0u, right_half(threadIdx.x)) &&
                     !__all_sync(~0u, right_half(threadIdx.x));
  if (right) atomicAdd(&probe.results[0], 1u);
  atomicMax(&probe.results[1], threadIdx.x);
}
// Mistakes that a device may forgive, or hang in.
void broken_kernel(Probe probe) {
  switch (probe.variant) {
    case 0:  // a barrier that one thread does not reach
      if (threadIdx.x != 5) __syncthreads();
      break;
    case 1:  // one that is not reached by a warp which waits for another operation
      if (threadIdx.x < 32) __syncthreads();
      __ballot_sync(~0u, 1);
      break;
    case 2:  // a lane that has left
      if (threadIdx.x != 3) __shfl_xor_sync(~0u, threadIdx.x, 1);
      break;
    case 3:  // a lane outside the mask
      __ballot_sync(0xffffu, 1);
      break;
    default:  // lanes in different operations
      if (threadIdx.x % 2)
        __ballot_sync(~0u, 1);
      else
        __shfl_xor_sync(~0u, threadIdx.x, 1);
  }
}
// Each thread reads what its neighbour wrote, with or without the barrier between.
void neighbours_kernel(Probe probe) {
  __shared__ uint32_t values[64];
  values[threadIdx.x] = threadIdx.x + 1;
  if (probe.variant) __syncthreads();
  const uint32_t value = values[(threadIdx.x + 1) % 64];
  probe.results[threadIdx.x] = value;
  __syncthreads();
  values[threadIdx.x] = 0;
}

void host_execution() {
  for (const Order order : {Order::kForward, Order::kBackward, Order::kShuffled}) {
    uint32_t results[2] = {};
    launch_blocks(3, 128, order, 7, working_kernel, Probe{results, 0});
    check(results[0] == 3 * 128 && results[1] == 127, "shuffles, barriers and atomics");
    for (int variant = 0; variant < 5; ++variant) {
      std::string words;
      try {
        launch_blocks(1, 64, order, 7, broken_kernel, Probe{results, variant});
      } catch (const std::runtime_error& error) {
        words = error.what();
      }
      check(words.find("CUDA kernel, block 0") == 0, "broken kernel %d was not noticed", variant);
    }
  }
  uint32_t results[64] = {};
  const auto all_there = [&] {
    for (uint32_t at = 0; at < 64; ++at)
      if (results[at] != (at + 1) % 64 + 1) return false;
    return true;
  };
  launch_blocks(1, 64, Order::kForward, 0, neighbours_kernel, Probe{results, 1});
  check(all_there(), "a barrier between writing and reading");
#if !defined(__SANITIZE_THREAD__)  // which would report it
  launch_blocks(1, 64, Order::kForward, 0, neighbours_kernel, Probe{results, 0});
  check(!all_there(), "a missing barrier was not noticed");
#endif
}

}  // namespace

int main(int count, char** arguments) {
  const std::string what = count > 1 ? arguments[1] : "";
  if (what == "race") {  // for ThreadSanitizer to find
    uint32_t results[64] = {};
    launch_blocks(1, 64, Order::kForward, 0, neighbours_kernel, Probe{results, 0});
    return 0;
  }
  host_execution();
#define PYCOMM_CASE(enumerator, ...) compare<WireFormat::enumerator>(what == "quick");
  PYCOMM_WIRE_FORMATS(PYCOMM_CASE)
#undef PYCOMM_CASE
  return report();
}
