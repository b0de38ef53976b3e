#include "device_codec.h"

#include <utility>

#ifdef PYCOMM_WITH_CUDA
#include "../kernels/codec_cuda.h"
#endif

namespace pycomm::nccl {
namespace {

#ifdef PYCOMM_WITH_CUDA
class KernelCodec : public DeviceCodec {
 public:
  void run(const TranscodeCall& call, const std::vector<FloatSpan>& tensors,
           Stream stream) override {
    const std::vector<FloatSpan> none;
    launch_transcode(call, call.inputs ? tensors : none, call.outputs ? tensors : none, stream);
  }
};
#endif

class HostCodec : public DeviceCodec {
 public:
  explicit HostCodec(std::shared_ptr<const CudaApi> cuda) : cuda_(std::move(cuda)) {}

  void run(const TranscodeCall& call, const std::vector<FloatSpan>& tensors,
           Stream stream) override {
    auto* job = new Job{call, {call.wires, call.wires + call.num_wires}, tensors, nullptr};
    int capturing = kCaptureNone;
    cuda_->check(cuda_->stream_is_capturing(stream, &capturing), "cudaStreamIsCapturing");
    if (capturing == kCaptureNone) job->once.reset(job);
    cuda_->check(cuda_->launch_host_func(stream, &run_job, job), "cudaLaunchHostFunc");
  }

 private:
  struct Job {  // what the call points to may go before it runs
    TranscodeCall call;
    std::vector<Wire> wires;
    std::vector<FloatSpan> tensors;
    std::unique_ptr<Job> once;  // itself; a graph's job is run again and again, and stays
  };
  static void run_job(void* pointer) {
    auto* const job = static_cast<Job*>(pointer);
    const std::unique_ptr<Job> once = std::move(job->once);
    job->call.wires = job->wires.data();
    if (job->call.inputs) job->call.inputs = job->tensors.data();
    if (job->call.outputs) job->call.outputs = job->tensors.data();
    transcode(job->call);
  }

  const std::shared_ptr<const CudaApi> cuda_;
};

}  // namespace

std::shared_ptr<DeviceCodec> kernel_codec() {
#ifdef PYCOMM_WITH_CUDA
  return std::make_shared<KernelCodec>();
#else
  return nullptr;
#endif
}

std::shared_ptr<DeviceCodec> host_codec(std::shared_ptr<const CudaApi> cuda) {
  return std::make_shared<HostCodec>(std::move(cuda));
}

}  // namespace pycomm::nccl
