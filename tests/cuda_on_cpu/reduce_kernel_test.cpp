// Runs reduce_kernel unchanged on the CPU and compares it bit for bit with the CPU's own kernels:
// every dtype and op, counts around the pack, grids, orders of threads, numbers of sources. Also
// the steps of a ring (algorithms/math.h), whose partial results stay in accumulators.
// tests/test_cuda_on_cpu.py builds and runs it.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "checks.h"
#include "cuda_on_cpu.h"
// The kernel needs the definitions above.
#include "../../csrc/algorithms/math.h"
#include "../../csrc/kernels/elementwise.h"
#include "../../csrc/kernels/elementwise_kernel.cuh"
#include "../../csrc/kernels/isa.h"
#include "random_element.h"

namespace {

using namespace pycomm;
using namespace checks;
using cuda_on_cpu::Order;

constexpr int64_t kCounts[] = {0, 1, 15, 16, 17, 1000, 4097};
constexpr int kMostSources = 8;
constexpr double kScales[kMostSources] = {0.1, -1.7, 3.3, 1e-3, 0.7, -0.3, 2.1, 1.0 / 3};

// A tail has up to 15 elements, one thread each, so a launch has at least 16 threads.
struct Shape {
  unsigned blocks, threads;
};
constexpr Shape kShapes[] = {{1, 16}, {1, 256}, {2, 32}, {3, 96}, {7, 33}, {40, 64}};

// ---- data ---------------------------------------------------------------------------------------

std::mt19937_64 generator(20240521);

// ---- the comparison -----------------------------------------------------------------------------

template <class T, ReduceOp kOp>
void compare(DType dtype, int64_t count, int num_sources) {
  std::vector<Array<T>> sources;
  const void* pointers[kMostSources];
  for (int s = 0; s < num_sources; ++s) {
    sources.emplace_back(count);
    for (int64_t at = 0; at < count; ++at) sources.back()[at] = random_element<T>(generator);
    pointers[s] = sources.back().data();
  }
  Array<T> expected(count);
  ReduceCall reference;
  reference.dtype = dtype;
  reference.op = kOp;
  reference.divisor = num_sources;
  reference.count = count;
  reference.sources = pointers;
  reference.num_sources = num_sources;
  reference.scales = kScales;
  reference.output = expected.data();
  reduce(reference);

  unsigned seed = 0;
  for (const Shape shape : kShapes) {
    // The output is one of the sources in every second launch.
    const bool in_place = seed % 2 == 1;
    Array<T> output(count);
    DeviceReduceCall call{};
    for (int s = 0; s < num_sources; ++s) call.sources[s] = pointers[s];
    std::copy(kScales, kScales + kMostSources, call.scales);
    if (in_place) {
      output.assign(sources[seed % num_sources]);
      call.sources[seed % num_sources] = output.data();
    }
    call.output = output.data();
    call.count = count;
    call.num_sources = num_sources;
    call.divisor = num_sources;
    const Order order = static_cast<Order>((seed + static_cast<unsigned>(num_sources)) % 3);
    cuda_on_cpu::launch(shape.blocks, shape.threads, order, seed, reduce_kernel<T, kOp>, call);
    int64_t wrong = -1;
    for (int64_t at = 0; at < count && wrong < 0; ++at)
      if (!same(output[at], expected[at])) wrong = at;
    check(wrong < 0, "%s %s of %d sources, count %lld, grid %ux%u, order %d%s: element %lld",
          name_of(dtype), name_of(kOp), num_sources, static_cast<long long>(count), shape.blocks,
          shape.threads, static_cast<int>(order), in_place ? ", in place" : "",
          static_cast<long long>(wrong));
    ++seed;
  }
}

// A ring's steps, from rank to rank, against the reduction of all contributions at once.
template <class T, ReduceOp kOp>
void ring(DType dtype, int64_t count, int world_size) {
  std::vector<Array<T>> contributions;
  const char* pointers[kMostSources];
  for (int rank = 0; rank < world_size; ++rank) {
    contributions.emplace_back(count);
    for (int64_t at = 0; at < count; ++at) contributions.back()[at] = random_element<T>(generator);
    pointers[rank] = reinterpret_cast<const char*>(contributions.back().data());
  }
  const double* scales = kOp == ReduceOp::kPremulSum ? kScales : nullptr;
  Array<T> expected(count), output(count);
  const auto bytes_of_array = [](auto& array) { return reinterpret_cast<char*>(array.data()); };
  Math(dtype, kOp, world_size, false, scales)
      .reduce_all(pointers, nullptr, bytes_of_array(expected), count);
  using Acc = typename Accumulator<T, kOp>::type;
  Array<Acc> partials[2] = {Array<Acc>(count), Array<Acc>(count)};
  for (int rank = 0; rank < world_size; ++rank) {
    const Math math(dtype, kOp, world_size, false, scales, rank);
    const char* partial = rank > 0 ? bytes_of_array(partials[rank % 2]) : nullptr;
    if (rank < world_size - 1)
      math.reduce_partial(partial, pointers[rank], bytes_of_array(partials[(rank + 1) % 2]), count);
    else
      math.reduce_final(partial, pointers[rank], nullptr, bytes_of_array(output), count);
  }
  bool all = true;
  for (int64_t at = 0; at < count; ++at) all = all && same(output[at], expected[at]);
  check(all, "%s %s along a ring of %d, count %lld", name_of(dtype), name_of(kOp), world_size,
        static_cast<long long>(count));
}

// The host execution header's conversions against the product's own, which were written
// independently.
void conversions() {
  bool same_floats = true, same_halves = true, same_brains = true;
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const Half half{static_cast<uint16_t>(bits)};
    same_floats = same_floats && same(half_to_float(half.bits), to_accumulator(half));
  }
  for (int turn = 0; turn < 1000000; ++turn) {
    const uint32_t word = static_cast<uint32_t>(generator());
    float value;
    std::memcpy(&value, &word, sizeof value);
    if (turn % 2) value = std::ldexp(1 + static_cast<float>(word % 65536) / 65536, turn % 50 - 30);
    const Half half{float_to_half(value)};
    same_halves = same_halves && same(half, from_accumulator<Half>(value));
    const BFloat16 brain = from_accumulator<BFloat16>(value);
    uint32_t exact;
    std::memcpy(&exact, &value, sizeof exact);
    exact += 0x7fff + ((exact >> 16) & 1);
    same_brains =
        same_brains && same(brain, is_nan(value) ? BFloat16{0x7fff}
                                                 : BFloat16{static_cast<uint16_t>(exact >> 16)});
  }
  check(same_floats, "half -> float");
  check(same_halves, "float -> half");
  check(same_brains, "float -> bfloat16");
}

// What an 8-bit pattern without sign is worth, by its format's definition; beyond the finite ones,
// what the next one would be.
template <class T>
double worth(int pattern) {
  constexpr int kMantissaBits = std::is_same_v<T, Float8E4M3> ? 3 : 2;
  constexpr int kBias = std::is_same_v<T, Float8E4M3> ? 7 : 15;
  const int exponent = pattern >> kMantissaBits, mantissa = pattern % (1 << kMantissaBits);
  return exponent == 0
             ? std::ldexp(mantissa, 1 - kBias - kMantissaBits)
             : std::ldexp(mantissa + (1 << kMantissaBits), exponent - kBias - kMantissaBits);
}

// The shared conversions of 8-bit floats against the definition of the format: the nearest value,
// of two the one with an even pattern.
template <class T>
void float8_conversions(const char* name) {
  constexpr bool kSaturates = std::is_same_v<T, Float8E4M3>;
  constexpr int kLargest = kSaturates ? 0x7e : 0x7b, kOverflow = kSaturates ? 0x7e : 0x7c;
  bool widened = true;
  std::vector<double> values;
  for (int pattern = 0; pattern <= kLargest + 1; ++pattern) values.push_back(worth<T>(pattern));
  for (int bits = 0; bits < 256; ++bits) {
    const T element{static_cast<uint8_t>(bits)};
    const int pattern = bits & 0x7f;
    double expected = pattern <= kLargest ? values[pattern] : is_nan(element) ? NAN : INFINITY;
    if (bits & 0x80) expected = -expected;
    const float value = to_accumulator(element);
    widened = widened && same(value, static_cast<float>(expected)) &&
              std::signbit(value) == ((bits & 0x80) != 0);
  }
  check(widened, "%s -> float", name);

  const auto narrowed = [&](uint32_t word) {
    float value;
    std::memcpy(&value, &word, sizeof value);
    const double magnitude = std::fabs(static_cast<double>(value));
    int pattern = 0x7f;
    if (magnitude >= values.back()) {
      pattern = kOverflow;
    } else if (!std::isnan(value)) {
      const auto above = std::upper_bound(values.begin(), values.end(), magnitude);
      const int below = static_cast<int>(above - values.begin()) - 1;
      const double down = magnitude - values[below], up = *above - magnitude;
      pattern = below + (up < down || (up == down && below % 2 == 1));
      pattern = std::min(pattern, kOverflow);
    }
    return static_cast<uint8_t>(pattern | (std::signbit(value) ? 0x80 : 0));
  };
  int64_t wrong = -1;
  const auto compare_narrowing = [&](uint32_t word) {
    float value;
    std::memcpy(&value, &word, sizeof value);
    if (from_accumulator<T>(value).bits != narrowed(word)) wrong = word;
  };
  for (uint64_t word = 0; word < uint64_t{1} << 32; word += 4099)
    compare_narrowing(static_cast<uint32_t>(word));
  for (size_t at = 0; at + 1 < values.size(); ++at) {
    for (const double value : {values[at], (values[at] + values[at + 1]) / 2}) {  // a tie
      const float exact = static_cast<float>(value);
      uint32_t word;
      std::memcpy(&word, &exact, sizeof word);
      for (int step = -1; step <= 1; ++step) {
        compare_narrowing((word + step) & 0x7fffffff);
        compare_narrowing((word + step) | 0x80000000);
      }
    }
  }
  for (const uint32_t word : {0x7f800000u, 0xff800000u, 0x7fc00000u, 0xffc00000u, 0x7f800001u})
    compare_narrowing(word);
  check(wrong < 0, "float -> %s: bits %llx", name, static_cast<unsigned long long>(wrong));
}

}  // namespace

int main() {
  conversions();
  float8_conversions<Float8E4M3>("float8_e4m3fn");
  float8_conversions<Float8E5M2>("float8_e5m2");
  for (const char* set : {"generic", "avx2", "avx512"}) {
    if (!set_instruction_set(set)) continue;
    for (int dtype = 0; dtype <= static_cast<int>(DType::kFloat8E5M2); ++dtype)
      for (int op = 0; op <= static_cast<int>(ReduceOp::kPremulSum); ++op)
        visit_reduction(
            static_cast<DType>(dtype), static_cast<ReduceOp>(op), [&](auto type, auto reduction) {
              using T = typename decltype(type)::type;
              for (const int64_t count : kCounts)
                for (int sources = 1; sources <= kMostSources; ++sources) {
                  compare<T, decltype(reduction)::op>(static_cast<DType>(dtype), count, sources);
                  ring<T, decltype(reduction)::op>(static_cast<DType>(dtype), count, sources);
                }
            });
  }
  return report();
}
