// Runs reduce_kernel unchanged on the CPU and compares it bit for bit with the CPU's own kernels:
// every dtype and op, counts around the pack, grids, orders of threads, numbers of sources.
// tests/test_cuda_on_cpu.py builds and runs it.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "cuda_on_cpu.h"
// The kernel needs the definitions above.
#include "../../csrc/kernels/elementwise.h"
#include "../../csrc/kernels/elementwise_host.h"
#include "../../csrc/kernels/elementwise_kernel.cuh"

namespace {

using namespace pycomm;
using cuda_on_cpu::Order;

constexpr int64_t kCounts[] = {0, 1, 15, 16, 17, 1000, 4097};
constexpr int kMostSources = 8;

// A tail has up to 15 elements, one thread each, so a launch has at least 16 threads.
struct Shape {
  unsigned blocks, threads;
};
constexpr Shape kShapes[] = {{1, 16}, {1, 256}, {2, 32}, {3, 96}, {7, 33}, {40, 64}};

int64_t checks = 0, failures = 0;

template <class... Arguments>
void check(bool condition, const char* format, Arguments... arguments) {
  ++checks;
  if (condition) return;
  std::fprintf(stderr, "FAILED: ");
  std::fprintf(stderr, format, arguments...);
  std::fprintf(stderr, "\n");
  if (++failures >= 20) std::exit(1);
}

// Exactly as large as asked, so that AddressSanitizer sees the first byte past the end; aligned
// like device memory.
template <class T>
class Array {
 public:
  explicit Array(int64_t count) : count_(count) {
    void* memory = nullptr;
    if (posix_memalign(&memory, 256, static_cast<size_t>(count) * sizeof(T)) != 0) std::abort();
    data_.reset(static_cast<T*>(memory));
    std::memset(memory, 0x55, static_cast<size_t>(count) * sizeof(T));
  }
  T* data() { return data_.get(); }
  T& operator[](int64_t at) { return data_.get()[at]; }
  void assign(Array& other) {
    std::memcpy(data(), other.data(), static_cast<size_t>(count_) * sizeof(T));
  }

 private:
  int64_t count_;
  std::unique_ptr<T, decltype(&std::free)> data_{nullptr, std::free};
};

// ---- data ---------------------------------------------------------------------------------------

std::mt19937_64 generator(20240521);

// Any bits at all: integers that wrap; among floats NaNs, infinities, subnormals and -0, mixed with
// tame values.
template <class T>
T random_element() {
  const uint64_t word = generator();
  if constexpr (kIs16BitFloat<T>) {
    const float tame = static_cast<float>(static_cast<int>(word >> 32) % 1000) / 64;
    if (word % 4 == 0) return T{static_cast<uint16_t>(word >> 16)};
    if constexpr (std::is_same_v<T, Half>)
      return T{cuda_on_cpu::Binary16::narrow(tame)};
    else
      return T{cuda_on_cpu::Brain16::narrow(tame)};
  } else if constexpr (std::is_floating_point_v<T>) {
    T value = static_cast<T>(static_cast<int64_t>(word)) / static_cast<T>(1 << 30);
    if (word % 4 == 0) std::memcpy(&value, &word, sizeof value);
    return value;
  } else {
    return static_cast<T>(word);
  }
}

template <class T>
bool is_nan(T value) {
  if constexpr (std::is_same_v<T, Half>)
    return (value.bits & 0x7fff) > 0x7c00;
  else if constexpr (std::is_same_v<T, BFloat16>)
    return (value.bits & 0x7fff) > 0x7f80;
  else
    return value != value;
}

// Bit for bit, but that any NaN stands for any other: the processors differ in which one an
// operation gives.
template <class T>
bool same(T a, T b) {
  return std::memcmp(&a, &b, sizeof a) == 0 || (is_nan(a) && is_nan(b));
}

// ---- the comparison -----------------------------------------------------------------------------

template <class T, ReduceOp kOp>
void compare(DType dtype, int64_t count, int num_sources) {
  std::vector<Array<T>> sources;
  const void* pointers[kMostSources];
  for (int s = 0; s < num_sources; ++s) {
    sources.emplace_back(count);
    for (int64_t at = 0; at < count; ++at) sources.back()[at] = random_element<T>();
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
  reference.output = expected.data();
  reduce(reference);

  unsigned seed = 0;
  for (const Shape shape : kShapes) {
    // The output is one of the sources in every second launch.
    const bool in_place = seed % 2 == 1;
    Array<T> output(count);
    DeviceReduceCall call{};
    for (int s = 0; s < num_sources; ++s) call.sources[s] = pointers[s];
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

}  // namespace

int main() {
  conversions();
  for (const char* set : {"generic", "avx2", "avx512"}) {
    if (!set_instruction_set(set)) continue;
    for (int dtype = 0; dtype <= static_cast<int>(DType::kFloat8E5M2); ++dtype)
      for (int op = 0; op <= static_cast<int>(ReduceOp::kProduct); ++op)
        visit_reduction(
            static_cast<DType>(dtype), static_cast<ReduceOp>(op), [&](auto type, auto reduction) {
              using T = typename decltype(type)::type;
              for (const int64_t count : kCounts)
                for (int sources = 1; sources <= kMostSources; ++sources)
                  compare<T, decltype(reduction)::op>(static_cast<DType>(dtype), count, sources);
            });
  }
  if (failures > 0) return 1;
  std::printf("%lld checks passed\n", static_cast<long long>(checks));
  return 0;
}
