// What a plain all_reduce computes with in a kernel: as algorithms/math.h, by all threads of a
// block together.
//
// Slots are aligned to 16 bytes, and so is whatever part of a tensor a block works on, if the
// tensor is. One that is not is moved and reduced element by element.
#pragma once

#include <cstdint>

#include "../kernels/device_types.cuh"
#include "peer_layout.h"

namespace pycomm {

template <class T, int kCount>
struct alignas(sizeof(T) * kCount < kPackBytes ? sizeof(T) * kCount : kPackBytes) DeviceLanes {
  T lanes[kCount];
};

__device__ PYCOMM_ALWAYS_INLINE bool is_pack_aligned(const void* at) {
  return reinterpret_cast<uintptr_t>(at) % kPackBytes == 0;
}

// Calls step(at) for every kLanes elements of [begin, end), by the block's threads in turn.
template <int kLanes, class Step>
__device__ PYCOMM_ALWAYS_INLINE void for_block(int64_t begin, int64_t end, Step&& step) {
  for (int64_t at = begin + int64_t{threadIdx.x} * kLanes; at < end;
       at += int64_t{blockDim.x} * kLanes)
    step(at);
}
// A copy of elements of type T.
template <class T>
__device__ PYCOMM_ALWAYS_INLINE void copy_by_block(char* to, const char* from, int64_t count) {
  constexpr int kLanes = kPackBytes / sizeof(T), kAtOnce = 4;
  using Pack = DeviceLanes<T, kLanes>;
  const auto* source = reinterpret_cast<const T*>(from);
  auto* target = reinterpret_cast<T*>(to);
  int64_t whole = 0;
  if (is_pack_aligned(from) && is_pack_aligned(to)) {
    whole = count / kLanes * kLanes;
    const int64_t packs = whole / kLanes, threads = blockDim.x;
    // Several are under way at a time.
    for (int64_t first = threadIdx.x; first < packs; first += kAtOnce * threads) {
      Pack moved[kAtOnce];
#pragma unroll
      for (int part = 0; part < kAtOnce; ++part)
        if (first + part * threads < packs)
          moved[part] = reinterpret_cast<const Pack*>(from)[first + part * threads];
#pragma unroll
      for (int part = 0; part < kAtOnce; ++part)
        if (first + part * threads < packs)
          reinterpret_cast<Pack*>(to)[first + part * threads] = moved[part];
    }
  }
  for_block<1>(whole, count, [&](int64_t at) { target[at] = source[at]; });
}

// A part of one rank's reduction; see elementwise.h: ReduceCall.
struct PeerReduction {
  ReduceOp op;
  const char* const* sources;
  const double* scales;  // of kPremulSum: of each source that is not a partial
  char* slot;            // may be null
  char* output;          // may be null
  int64_t count;
  int num_sources;
  int divisor;
  bool first_is_partial;
  bool leave_partial;
};

// T: how kDType is stored. One accumulator serves all operations: integers keep 64 bits, of which
// those that are stored are the same whatever lies above them. The operation is looked up for every
// pack: it is the same for all threads, and a loop of its own for each would take nvcc minutes.
template <DType kDType, class T>
class PeerReducer {
 public:
  using Acc = typename Accumulator<T, ReduceOp::kAvg>::type;

  // All threads of the block call this.
  __device__ PYCOMM_ALWAYS_INLINE static void run(const PeerReduction& call) {
    constexpr int kLanes = kPackBytes / sizeof(T);
    bool aligned = is_pack_aligned(call.output);
    for (int source = 0; source < call.num_sources; ++source)
      aligned = aligned && is_pack_aligned(call.sources[source]);
    const int64_t whole = aligned ? call.count / kLanes * kLanes : 0;
    for_block<kLanes>(0, whole, [&](int64_t at) { reduce<kLanes>(call, at); });
    for_block<1>(whole, call.count, [&](int64_t at) { reduce<1>(call, at); });
  }

 private:
  // Of bytes there are 16 accumulators a source.
  static constexpr int kAtOnce = sizeof(T) == 1 ? 1 : 4;

  template <int kLanes>
  __device__ PYCOMM_ALWAYS_INLINE static void reduce(const PeerReduction& call, int64_t at) {
    DeviceLanes<Acc, kLanes> value;
    if (call.first_is_partial)
      value = *lanes_at<Acc, kLanes>(call.sources[0], at);
    else
      value = contribution(*lanes_at<T, kLanes>(call.sources[0], at), call, 0);
    // Several are loaded before the first is used.
#pragma unroll 1
    for (int first = 1; first < call.num_sources; first += kAtOnce) {
      DeviceLanes<T, kLanes> others[kAtOnce];
#pragma unroll
      for (int part = 0; part < kAtOnce; ++part)
        if (first + part < call.num_sources)
          others[part] = *lanes_at<T, kLanes>(call.sources[first + part], at);
#pragma unroll
      for (int part = 0; part < kAtOnce; ++part)
        if (first + part < call.num_sources)
          combine(call.op, value, contribution(others[part], call, first + part));
    }
    finish(value, call, at);
  }

  template <class Element, int kLanes>
  __device__ PYCOMM_ALWAYS_INLINE static const DeviceLanes<Element, kLanes>* lanes_at(
      const char* source, int64_t at) {
    return reinterpret_cast<const DeviceLanes<Element, kLanes>*>(
        source + at * static_cast<int64_t>(sizeof(Element)));
  }
  template <int kLanes>
  __device__ PYCOMM_ALWAYS_INLINE static DeviceLanes<Acc, kLanes> contribution(
      const DeviceLanes<T, kLanes>& elements, const PeerReduction& call, int source) {
    DeviceLanes<Acc, kLanes> value;
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane)
      value.lanes[lane] = static_cast<Acc>(to_accumulator(elements.lanes[lane]));
    if constexpr (can_reduce(kDType, ReduceOp::kPremulSum)) {
      if (call.op != ReduceOp::kPremulSum) return value;
      const Acc scale = static_cast<Acc>(call.scales[source]);
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane)
        value.lanes[lane] = scaled(value.lanes[lane], scale);
    }
    return value;
  }
  template <int kLanes>
  __device__ PYCOMM_ALWAYS_INLINE static void combine(ReduceOp op, DeviceLanes<Acc, kLanes>& value,
                                                      const DeviceLanes<Acc, kLanes>& other) {
    switch (op) {
      case ReduceOp::kAvg:
      case ReduceOp::kPremulSum:
      case ReduceOp::kSum:
        return apply<ReduceOp::kSum>(value, other);
      case ReduceOp::kMin:
        return apply<ReduceOp::kMin>(value, other);
      case ReduceOp::kMax:
        return apply<ReduceOp::kMax>(value, other);
      case ReduceOp::kProduct:
        return apply<ReduceOp::kProduct>(value, other);
      case ReduceOp::kBand:
        return apply<ReduceOp::kBand>(value, other);
      case ReduceOp::kBor:
        return apply<ReduceOp::kBor>(value, other);
      case ReduceOp::kBxor:
        return apply<ReduceOp::kBxor>(value, other);
    }
  }
  template <ReduceOp kOp, int kLanes>
  __device__ PYCOMM_ALWAYS_INLINE static void apply(DeviceLanes<Acc, kLanes>& value,
                                                    const DeviceLanes<Acc, kLanes>& other) {
    if constexpr (can_reduce(kDType, kOp)) {
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane)
        value.lanes[lane] = FunctorOf<T, kOp>::apply(value.lanes[lane], other.lanes[lane]);
    }
  }
  template <int kLanes>
  __device__ PYCOMM_ALWAYS_INLINE static void finish(DeviceLanes<Acc, kLanes>& value,
                                                     const PeerReduction& call, int64_t at) {
    if (call.leave_partial) {
      reinterpret_cast<DeviceLanes<Acc, kLanes>*>(call.slot)[at / kLanes] = value;
      return;
    }
    if constexpr (can_reduce(kDType, ReduceOp::kAvg)) {
      if (call.op == ReduceOp::kAvg) {
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane)
          value.lanes[lane] = value.lanes[lane] / static_cast<Acc>(call.divisor);
      }
    }
    DeviceLanes<T, kLanes> result;
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane)
      result.lanes[lane] = from_accumulator<T>(value.lanes[lane]);
    if (call.slot) reinterpret_cast<DeviceLanes<T, kLanes>*>(call.slot)[at / kLanes] = result;
    if (call.output) reinterpret_cast<DeviceLanes<T, kLanes>*>(call.output)[at / kLanes] = result;
  }
};

// What a collective computes, of pairs that can_reduce allows.
struct PeerReductionType {
  ReduceOp op;
  double scales[kMostPeers];  // of kPremulSum: every rank's
};

template <DType kDType, class T, class Slots>
class PeerMath {
 public:
  __device__ PeerMath(const Slots& slots, const PeerReductionType& type)
      : slots_(slots), type_(type) {}

  __device__ static constexpr int64_t element_bytes() { return sizeof(T); }
  __device__ static constexpr int64_t partial_bytes() {
    return sizeof(typename PeerReducer<kDType, T>::Acc);
  }
  __device__ static constexpr int64_t granule() { return int64_t{kLineBytes} / element_bytes(); }

  __device__ void copy_to_slot(char* slot, const char* source, int64_t count) const {
    if (!slots_.failed()) copy_by_block<T>(slot, source, count);
  }
  __device__ void copy_to_output(char* output, const char* source, int64_t count) const {
    copy_to_slot(output, source, count);
  }
  __device__ void reduce_all(const char* const* sources, char* slot, char* output,
                             int64_t count) const {
    reduce({type_.op, sources, type_.scales, slot, output, count, slots_.world_size(),
            slots_.world_size(), false, false});
  }
  // The steps of a ring.
  __device__ void reduce_partial(const char* partial, const char* contribution, char* next_partial,
                                 int64_t count) const {
    step(partial, contribution, next_partial, nullptr, true, count);
  }
  __device__ void reduce_final(const char* partial, const char* contribution, char* slot,
                               char* output, int64_t count) const {
    step(partial, contribution, slot, output, false, count);
  }

 private:
  __device__ void step(const char* partial, const char* contribution, char* slot, char* output,
                       bool leave_partial, int64_t count) const {
    const char* sources[2] = {partial ? partial : contribution, contribution};
    const double own = type_.scales[slots_.rank()];
    const double scales[2] = {own, own};  // the first counts only if it is not a partial
    reduce({type_.op, sources, scales, slot, output, count, partial ? 2 : 1, slots_.world_size(),
            partial != nullptr, leave_partial});
  }
  __device__ void reduce(const PeerReduction& call) const {
    if (!slots_.failed()) PeerReducer<kDType, T>::run(call);
  }

  const Slots& slots_;
  const PeerReductionType& type_;
};

}  // namespace pycomm
