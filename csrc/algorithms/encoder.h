// What a compressed all_reduce computes with: a list of tensors and how they are encoded, bound to
// the codec's kernels.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "../common.h"
#include "../kernels/codec.h"
#include "../kernels/elementwise.h"
#include "compression.h"

namespace pycomm {

class Encoder {
 public:
  using Run = std::function<void(const TranscodeCall&)>;
  // `stream`: write slots past the caches. `run` executes calls, or sees to it that a device does.
  Encoder(const Compression& compression, bool stream, Run run = &transcode)
      : compression_(compression), stream_(stream), run_(std::move(run)) {}

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
    run_(call);
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
    run_(call);
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
    run_(call);
  }
  TranscodeCall base(int64_t first, int64_t count) const {
    TranscodeCall call;
    call.codec = codec();
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
    call.inputs = compression_.tensors.data();
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
  const Run run_;
};

}  // namespace pycomm
