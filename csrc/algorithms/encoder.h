// What a compressed all_reduce computes with: a list of tensors and how they are encoded, bound to
// the codec's kernels. Values are numbered through the list.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "../common.h"
#include "../kernels/codec.h"
#include "../kernels/elementwise.h"

namespace pycomm {

// One rank's part of it. All but `factor`, `residual` and the list's division into tensors must be
// the same on all ranks.
struct Compression {
  Codec codec;
  DType dtype = DType::kFloat32;
  std::vector<Span> tensors;                  // read, and overwritten with the result
  float factor = 1;                           // this rank's values are multiplied by it
  float divisor = 1;                          // of the sum
  float* residual = nullptr;                  // one per value: what encoding has left out so far
  bool infinite = false, stochastic = false;  // see TranscodeCall
  uint64_t seed = 0;
  CodecCounts* counts = nullptr;

  int64_t count() const {
    int64_t total = 0;
    for (const Span& tensor : tensors) total += tensor.count;
    return total;
  }
};

class Encoder {
 public:
  // `stream`: write slots past the caches.
  Encoder(const Compression& compression, bool stream)
      : compression_(compression), stream_(stream) {
    for (const Span& tensor : compression.tensors) inputs_.push_back({tensor.data, tensor.count});
  }

  const Codec& codec() const { return compression_.codec; }
  // The most values whose encoding fits into so many bytes.
  int64_t capacity(int64_t bytes) const { return codec().capacity(bytes); }
  // To be filled with the others' contributions, by rank.
  std::vector<Wire> wires() const { return {}; }
  // As place_of.
  Place place(char* memory, int64_t capacity, int64_t begin) const {
    return place_of(codec(), memory, capacity, begin);
  }
  Wire wire(const char* memory, int64_t capacity, int64_t begin) const {
    const Place there = place(const_cast<char*>(memory), capacity, begin);
    return {there.values, there.scales};
  }

  // This rank's values [first, first + count) -> `to`.
  void encode(int64_t first, int64_t count, const Place& to) const {
    TranscodeCall call = base(first, count);
    add_own(call, 0);
    set_encoded(call, to);
    transcode(call);
  }
  // The sum of others' and, after `own` of them, this rank's values -> `to` and, if `finished`, the
  // tensors.
  void reduce(const std::vector<Wire>& others, int own, int64_t first, int64_t count,
              const Place& to, bool finished) const {
    TranscodeCall call = base(first, count);
    set_others(call, others);
    add_own(call, own);
    set_encoded(call, to);
    if (finished) {
      call.outputs = compression_.tensors.data();
      call.divisor = compression_.divisor;
    }
    transcode(call);
  }
  // An encoded result -> the tensors.
  void decode(const Wire& wire, int64_t first, int64_t count) const {
    sum({wire}, 1, first, count);
  }
  // The sum of all contributions -> the tensors.
  void sum(const std::vector<Wire>& wires, int64_t first, int64_t count) const {
    sum(wires, compression_.divisor, first, count);
  }
  // The first `count` values of an encoding, as they are.
  void pass_on(const char* from, char* to, int64_t capacity, int64_t count) const {
    const int64_t scales = codec().scales_offset(capacity);
    copy(to, from, count * codec().value_bytes(), stream_);
    copy(to + scales, from + scales, codec().scales(count) * static_cast<int64_t>(sizeof(float)),
         stream_);
  }

 private:
  void sum(const std::vector<Wire>& wires, float divisor, int64_t first, int64_t count) const {
    TranscodeCall call = base(first, count);
    set_others(call, wires);
    call.divisor = divisor;
    call.outputs = compression_.tensors.data();
    transcode(call);
  }
  TranscodeCall base(int64_t first, int64_t count) const {
    TranscodeCall call;
    call.codec = codec();
    call.dtype = compression_.dtype;
    call.first = first;
    call.count = count;
    call.infinite = compression_.infinite;
    call.stochastic = compression_.stochastic;
    call.seed = compression_.seed;
    call.counts = compression_.counts;
    return call;
  }
  void add_own(TranscodeCall& call, int own) const {
    call.own = own;
    call.inputs = inputs_.data();
    call.factor = compression_.factor;
    if (compression_.residual) call.residual = compression_.residual + call.first;
  }
  void set_encoded(TranscodeCall& call, const Place& to) const {
    call.values = to.values;
    call.scales = to.scales;
    call.stream = stream_;
  }
  static void set_others(TranscodeCall& call, const std::vector<Wire>& wires) {
    call.wires = wires.data();
    call.num_wires = static_cast<int>(wires.size());
  }

  const Compression& compression_;
  const bool stream_;
  std::vector<ConstSpan> inputs_;
};

}  // namespace pycomm
