// Chooses the CPU kernels by processor, once.
#include "elementwise.h"

#include <cstring>

#include "../error.h"
#include "isa.h"

namespace pycomm {
namespace {

struct Kernels {
  const char* name;
  void (*reduce)(const ReduceCall&);
  void (*copy)(void*, const void*, int64_t, bool);
  void (*transcode)(const TranscodeCall&);
  bool (*supported)();
};

const Kernels kKernels[] = {
#if defined(__x86_64__)
    {"avx512", avx512::reduce, avx512::copy, avx512::transcode,
     [] {
       return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
     }},
    {"avx2", avx2::reduce, avx2::copy, avx2::transcode,
     [] {
       return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
              __builtin_cpu_supports("f16c");
     }},
#endif
    {"generic", generic::reduce, generic::copy, generic::transcode, [] { return true; }},
};

const Kernels* best() {
#if defined(__x86_64__)
  __builtin_cpu_init();
#endif
  for (const Kernels& kernels : kKernels)
    if (kernels.supported()) return &kernels;
  return nullptr;  // not reached: generic always is
}

const Kernels* chosen = best();

// From this size on libc copies better on AMD's Zen: its `rep movsb` takes lines over without
// reading them first, which is 1.2 to 1.9 times as fast within caches, and 3 times into lines that
// a core without a common cache has read (Zen 5, glibc 2.36). On a Sapphire Rapids our loop wins by
// its prefetch of the source.
constexpr int64_t kLibraryCopyBytes = 8 << 10;

bool is_amd() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_is("amd");
#else
  return false;
#endif
}

bool library_copies = is_amd();

}  // namespace

void reduce(const ReduceCall& call) {
  PYCOMM_CHECK(accumulator_bytes(call.dtype, call.op) > 0, kInvalidArgument, "reduce: dtype ",
               name_of(call.dtype), " has no op ", name_of(call.op));
  PYCOMM_CHECK(call.op != ReduceOp::kPremulSum || call.scales, kInvalidArgument,
               "reduce: premul_sum needs a scale for each source");
  chosen->reduce(call);
}
void copy(void* destination, const void* source, int64_t bytes, bool stream) {
  if (library_copies && !stream && bytes >= kLibraryCopyBytes)
    std::memcpy(destination, source, static_cast<size_t>(bytes));
  else
    chosen->copy(destination, source, bytes, stream);
}
void check(const Codec& codec) {
  const bool unscaled = codec.block == 0;
  PYCOMM_CHECK(!unscaled || codec.format != WireFormat::kInt8, kInvalidArgument,
               "int8 needs a block, whose values share a scale");
  PYCOMM_CHECK(
      unscaled || (codec.block > 0 && codec.block <= kMaxBlock && codec.block % kBlockGranule == 0),
      kInvalidArgument, "a block is a multiple of ", kBlockGranule, " up to ", kMaxBlock, ", not ",
      codec.block);
  PYCOMM_CHECK(unscaled || codec.format != WireFormat::kFloat32, kInvalidArgument,
               "fp32 has no scales, so no block");
}
void transcode(const TranscodeCall& call) {
  check(call.codec);
  if (call.count == 0) return;  // of no elements, none is where they begin
  chosen->transcode(call);
}
const char* instruction_set() { return chosen->name; }
bool set_instruction_set(const char* name) {
  for (const Kernels& kernels : kKernels)
    if (std::strcmp(kernels.name, name) == 0 && kernels.supported()) {
      chosen = &kernels;
      library_copies = false;
      return true;
    }
  return false;
}

float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 0x1fu, mantissa = half & 0x3ffu;
  uint32_t bits;
  if (exponent == 0x1f) {
    bits = sign | 0x7f800000u | (mantissa << 13) | (mantissa ? 0x400000u : 0u);
  } else if (exponent != 0) {
    bits = sign | ((exponent + 112) << 23) | (mantissa << 13);
  } else {  // zero and subnormals: mantissa * 2^-24, exact in float
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    std::memcpy(&bits, &magnitude, sizeof bits);
    bits |= sign;
  }
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

uint16_t float_to_half(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | ((bits >> 13) & 0x3ffu));
  if (bits >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65536 and above
  if (bits <
      0x38800000u) {  // below the normals: adding 0.5 aligns the mantissa to 2^-24 and rounds it
    float magnitude;
    std::memcpy(&magnitude, &bits, sizeof magnitude);
    magnitude += 0.5f;
    uint32_t shifted;
    std::memcpy(&shifted, &magnitude, sizeof shifted);
    return static_cast<uint16_t>(sign | (shifted - 0x3f000000u));
  }
  const uint32_t rounded = bits + 0xfffu + ((bits >> 13) & 1u) - (112u << 23);
  return static_cast<uint16_t>(sign | (rounded >> 13));
}

}  // namespace pycomm
