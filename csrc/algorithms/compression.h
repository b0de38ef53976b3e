// What a rank contributes to a compressed all_reduce: a list of tensors, and how they are encoded.
// Values are numbered through the list.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "../kernels/codec.h"

namespace pycomm {

// One rank's part. All but `factor`, `residual` and the list's division into tensors must be the
// same on all ranks, the dtype of each value included.
struct Compression {
  Codec codec;
  std::vector<FloatSpan> tensors;             // read, and overwritten with the result
  float factor = 1;                           // this rank's values are multiplied by it
  float divisor = 1;                          // of the sum
  float* residual = nullptr;                  // one per value: what encoding has left out so far
  bool infinite = false, stochastic = false;  // see TranscodeCall
  uint64_t seed = 0;
  CodecCounts* counts = nullptr;

  int64_t count() const {
    int64_t total = 0;
    for (const FloatSpan& tensor : tensors) total += tensor.count;
    return total;
  }
  // Of the first value.
  DType dtype() const {
    for (const FloatSpan& tensor : tensors)
      if (tensor.count > 0) return tensor.dtype;
    return tensors.empty() ? DType::kFloat32 : tensors.front().dtype;
  }
  bool is_mixed() const {
    return std::any_of(tensors.begin(), tensors.end(), [first = dtype()](const FloatSpan& tensor) {
      return tensor.count > 0 && tensor.dtype != first;
    });
  }
  // "float32" or, of several, "12 float32, 3 bfloat16".
  std::string dtypes() const {
    if (!is_mixed()) return name_of(dtype());
    std::string text;
    DType last = dtype();
    int64_t run = 0;
    const auto tell = [&] {
      text += (text.empty() ? "" : ", ") + std::to_string(run) + " " + name_of(last);
    };
    for (const FloatSpan& tensor : tensors) {
      if (tensor.count > 0 && tensor.dtype != last) {
        tell();
        last = tensor.dtype;
        run = 0;
      }
      run += tensor.count;
    }
    tell();
    return text;
  }
  // Whereby ranks compare the dtypes of their values: 0 unless they are mixed.
  uint32_t mixture() const {
    if (!is_mixed()) return 0;
    uint32_t hash = 2166136261u;  // FNV-1a, by Fowler, Noll and Vo
    for (const char letter : dtypes()) hash = (hash ^ static_cast<uint8_t>(letter)) * 16777619u;
    return hash | 1;
  }
};

}  // namespace pycomm
