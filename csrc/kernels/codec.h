// Compression of floats for the wire: encode, decode, and the sum of what several ranks encoded, in
// one pass over memory. No waiting, no torch.
//
// A codec is a format of values and a block: so many values share one scale, a float. Scales of the
// floating formats are powers of two that bring the block's largest magnitude close to the format's
// own, so that nothing finite overflows, and nothing underflows that is not far smaller than its
// block's largest. int8's scale is that magnitude / 127. Without a block (0) there are no scales:
// values beyond the format's range are saturated or become infinities.
//
// fp32 is no compression, but the same way through the code: lists, factors, the sum by rank.
//
// A block with infinity or NaN in it decodes to NaN, all of it. Without scales only those values
// do.
#pragma once

#include <cstdint>

#include "../common.h"

namespace pycomm {

// X(enumerator, name, bytes of a value)
#define PYCOMM_WIRE_FORMATS(X)  \
  X(kFloat32, "fp32", 4)        \
  X(kFloat16, "fp16", 2)        \
  X(kBFloat16, "bf16", 2)       \
  X(kFloat8E4M3, "fp8_e4m3", 1) \
  X(kFloat8E5M2, "fp8_e5m2", 1) \
  X(kInt8, "int8", 1)

#define PYCOMM_ENUMERATOR(enumerator, ...) enumerator,
enum class WireFormat : uint8_t { PYCOMM_WIRE_FORMATS(PYCOMM_ENUMERATOR) };
#undef PYCOMM_ENUMERATOR

#define PYCOMM_CASE(enumerator, text, bytes) \
  case WireFormat::enumerator:               \
    return text;
inline const char* name_of(WireFormat value) {
  switch (value) { PYCOMM_WIRE_FORMATS(PYCOMM_CASE) }
  return "unknown format";
}
#undef PYCOMM_CASE

// Blocks are multiples of kBlockGranule and at most kMaxBlock long.
inline constexpr int kBlockGranule = 64;
inline constexpr int kMaxBlock = 4096;

struct Codec {
  WireFormat format = WireFormat::kFloat16;
  int32_t block = 0;

  PYCOMM_HOST_DEVICE int64_t value_bytes() const {
#define PYCOMM_CASE(enumerator, text, bytes) \
  case WireFormat::enumerator:               \
    return bytes;
    switch (format) { PYCOMM_WIRE_FORMATS(PYCOMM_CASE) }
#undef PYCOMM_CASE
    return 0;
  }
  PYCOMM_HOST_DEVICE int64_t scales(int64_t count) const {
    return block > 0 ? (count + block - 1) / block : 0;
  }
  // What `count` values take: the values, and their scales from the next cache line on.
  PYCOMM_HOST_DEVICE int64_t scales_offset(int64_t count) const {
    return round_up(count * value_bytes(), static_cast<int64_t>(kLineBytes));
  }
  PYCOMM_HOST_DEVICE int64_t wire_bytes(int64_t count) const {
    return scales_offset(count) + scales(count) * static_cast<int64_t>(sizeof(float));
  }
  // What a range of values must begin at a multiple of, to begin with a block and a cache line.
  PYCOMM_HOST_DEVICE int64_t granule() const { return block > 0 ? block : kBlockGranule; }
  // The most values, a multiple of the granule, whose encoding fits into so many bytes.
  PYCOMM_HOST_DEVICE int64_t capacity(int64_t bytes) const {
    const int64_t granule_bytes = granule() * value_bytes() + scales(granule()) * 4;
    int64_t count = bytes / granule_bytes * granule();
    while (wire_bytes(count) > bytes) count -= granule();  // once, for what is rounded to lines
    return count;
  }

  friend bool operator==(const Codec& a, const Codec& b) {
    return a.format == b.format && a.block == b.block;
  }
};
// Throws kInvalidArgument, in words, for a codec that there is not.
void check(const Codec& codec);

// Encoded values. `scales` belongs to the block that the first value is in the beginning of.
struct Wire {
  const void* values = nullptr;
  const float* scales = nullptr;
};

// Where encoded values are to lie.
struct Place {
  char* values = nullptr;
  float* scales = nullptr;
};
// Of values [begin, ...) in an encoding of `capacity` values at `memory`; begin is a multiple of
// the codec's granule.
PYCOMM_HOST_DEVICE inline Place place_of(const Codec& codec, char* memory, int64_t capacity,
                                         int64_t begin) {
  float* scales = reinterpret_cast<float*>(memory + codec.scales_offset(capacity));
  return {memory + begin * codec.value_bytes(), scales + codec.scales(begin)};
}

// What encoding did, of finite values; added up over calls.
struct CodecCounts {
  int64_t values = 0;
  int64_t overflows = 0;   // beyond the format's range, without scales
  int64_t underflows = 0;  // became zero
  int64_t non_finite = 0;  // infinities and NaNs that came in
  double squares = 0;      // the sum of the values' squares, and of their errors'
  double error_squares = 0;
};

// sum[i] = what rank 0 contributes + what rank 1 contributes ..., in float; one of them, this
// rank's own, is given by tensors, the others as they were encoded. The sum is encoded, or written,
// or both. So this is encode (own alone), decode (one wire alone) and reduce.
//
// own[i] = factor * input[i] + residual[i], and the sum / divisor, rounded after each step.
//
// Error feedback: residual[i] becomes the sum minus what it was encoded as, so nothing is lost
// between this call and the next. Of values that are marked as infinite or NaN, it stays.
struct TranscodeCall {
  Codec codec;
  int64_t count = 0;

  const Wire* wires = nullptr;  // the others', by rank
  int num_wires = 0;
  int own = -1;  // how many wires come before this rank's own; -1: it contributes nothing

  // This rank's tensors, one behind the other, of float32, float16 or bfloat16; of them, elements
  // [first, first + count).
  DType dtype = DType::kFloat32;
  const ConstSpan* inputs = nullptr;
  int64_t first = 0;
  float factor = 1;
  float* residual = nullptr;  // [count], may be null
  float divisor = 1;          // of the sum, before it is encoded or written

  // Results. `outputs` are tensors as `inputs` are, and may be the same; they receive what the
  // others will decode, if `values` is not null, else the sum itself.
  void* values = nullptr;  // 64-byte aligned
  float* scales = nullptr;
  bool stream = false;  // write `values` past the caches
  const Span* outputs = nullptr;

  bool infinite = false;  // without scales: what overflows becomes infinite, not the largest value
  bool stochastic = false;  // round up or down by chance, so that the mean is right
  uint64_t seed = 0;        // of that chance; value i of a call uses the number first + i
  CodecCounts* counts = nullptr;
};
void transcode(const TranscodeCall& call);
// Which tensors it takes.
inline bool can_transcode(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16;
}

}  // namespace pycomm
