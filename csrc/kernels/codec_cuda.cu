#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "codec_cuda.h"
#include "codec_kernel.cuh"
#include "cuda_launch.cuh"
#include "lists_on_stream.cuh"

namespace pycomm {
namespace {

template <WireFormat kFormat>
auto kernel_for(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return transcode_kernel<kFormat, Half>;
    case DType::kBFloat16:
      return transcode_kernel<kFormat, BFloat16>;
    default:
      return transcode_kernel<kFormat, float>;
  }
}
auto kernel_for(WireFormat format, DType dtype) {
  switch (format) {
#define PYCOMM_CASE(enumerator, ...) \
  case WireFormat::enumerator:       \
    return kernel_for<WireFormat::enumerator>(dtype);
    PYCOMM_WIRE_FORMATS(PYCOMM_CASE)
#undef PYCOMM_CASE
  }
  return kernel_for<WireFormat::kFloat16>(dtype);  // not reached: check(codec) knows all formats
}

DeviceTranscodeCall device_call(const TranscodeCall& call, const DeviceSpans& inputs,
                                const DeviceSpans& outputs) {
  DeviceTranscodeCall result{};
  result.count = call.count;
  result.first = call.first;
  std::copy(call.wires, call.wires + call.num_wires, result.wires);
  result.inputs = inputs;
  result.outputs = outputs;
  result.residual = call.residual;
  result.values = call.values;
  result.scales = call.scales;
  result.counts = call.counts;
  result.seed = call.seed;
  result.factor = call.factor;
  result.divisor = call.divisor;
  result.block = call.codec.block;
  result.num_wires = call.num_wires;
  result.own = std::max(call.own, -1);
  result.infinite = call.infinite;
  result.stochastic = call.stochastic;
  return result;
}

}  // namespace

void check_launch(const TranscodeCall& call) {
  check(call.codec);
  PYCOMM_CHECK(can_transcode(call.dtype), kInvalidArgument,
               "only float32, float16 and bfloat16 are compressed, not ", name_of(call.dtype));
  PYCOMM_CHECK(call.num_wires >= 0 && call.num_wires <= kMostDeviceWires, kInvalidArgument,
               "transcode on CUDA sums the wires of up to ", kMostDeviceWires, " others, not ",
               call.num_wires);
  PYCOMM_CHECK(call.own <= call.num_wires && (call.own >= 0 || call.num_wires > 0),
               kInvalidArgument, "transcode on CUDA: own = ", call.own, " among ", call.num_wires,
               " wires");
  const auto check_values = [](const char* whose, const void* values) {
    PYCOMM_CHECK(is_aligned_pack(values), kInvalidArgument, "transcode on CUDA: the values of ",
                 whose, " must be aligned to ", kPackBytes, " bytes, not at ", values);
  };
  for (int wire = 0; wire < call.num_wires; ++wire) check_values("a wire", call.wires[wire].values);
  check_values("the result", call.values);
}

void launch_transcode(const TranscodeCall& call, const DeviceSpans& inputs,
                      const DeviceSpans& outputs, void* stream) {
  check_launch(call);
  if (call.count == 0) return;
  PYCOMM_CHECK(call.own < 0 || inputs.count > 0, kInvalidArgument,
               "transcode on CUDA: a rank that contributes needs inputs");
  PYCOMM_CHECK(call.values || outputs.count > 0, kInvalidArgument,
               "transcode on CUDA: neither values nor outputs to write");
  // Half as many threads where that still has lanes for a codec block: more blocks to share out.
  const int threads =
      call.codec.block > kMaxBlock / 2 ? kMostTranscodeThreads : kMostTranscodeThreads / 2;
  const int64_t length = std::max<int64_t>(call.codec.block, kBlockGranule);
  const int64_t tile = threads * int64_t{kTranscodeLanes} / length * length;
  const int64_t resident = int64_t{processors()} * (kTranscodeThreadsPerProcessor / threads);
  const int64_t blocks = std::min((call.count + tile - 1) / tile, resident);
  kernel_for(
      call.codec.format,
      call.dtype)<<<static_cast<unsigned>(blocks), threads, 0, static_cast<cudaStream_t>(stream)>>>(
      device_call(call, inputs, outputs));
  check_cuda(cudaGetLastError(), "launch of transcode_kernel");
}

void launch_transcode(const TranscodeCall& call, const std::vector<Span>& inputs,
                      const std::vector<Span>& outputs, void* stream) {
  if (call.count == 0) return check_launch(call);
  const ListsOnStream lists(inputs, outputs, static_cast<cudaStream_t>(stream));
  launch_transcode(call, lists.inputs(), lists.outputs(), stream);
}

}  // namespace pycomm
