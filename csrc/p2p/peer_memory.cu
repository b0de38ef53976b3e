#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>

#include "../kernels/cuda_check.cuh"
#include "../kernels/cuda_device.h"
#include "peer_memory.h"

namespace pycomm {
namespace {

// A look at a flag and the sleep before the next take about a microsecond.
constexpr uint64_t kPollsPerMillisecond = 1000;

const char* name_of(Stage stage) {
  switch (stage) {
    case Stage::kFilled:
      return "its contribution";
    case Stage::kReduced:
      return "its result";
    default:
      return "it to have read";
  }
}

PeerGroup group_of(int rank, int world_size, const PeerLayout& layout, PeerStatus* status,
                   std::chrono::milliseconds timeout) {
  PeerGroup group{};
  group.rank = rank;
  group.world_size = world_size;
  group.layout = layout;
  group.status = status;
  group.most_polls =
      static_cast<uint64_t>(std::max<int64_t>(timeout.count(), 1)) * kPollsPerMillisecond;
  return group;
}

}  // namespace

void throw_peer_status(const PeerStatus& status, std::chrono::milliseconds timeout) {
  const std::string who = concat("rank ", status.rank, ", all_reduce in peer memory");
  const std::string where = concat("block ", status.block, ", chunk ", status.chunk, ": expected ",
                                   status.expected, ", seen ", status.seen);
  if (status.state == PeerStatus::kTimedOut)
    throw Error(ErrorKind::kTimeout,
                concat(who, ": waited about ", timeout.count(), " ms for rank ", status.peer,
                       ", for ", name_of(status.stage), " (", where,
                       "). Has it ended, or does it call something else? The group cannot be used "
                       "any more; destroy it and initialise again."),
                {Cause::kTimeout, status.peer});
  throw Error(ErrorKind::kAborted,
              status.peer < 0 ? concat(who, ": ended by abort() (", where, ")")
                              : concat(who, ": ended because rank ", status.peer, " gave up (",
                                       where, "); its own error says why"),
              {Cause::kAborted, status.peer});
}

PeerMemory::PeerMemory(int device, int rank, int world_size, const PeerLayout& layout,
                       std::chrono::milliseconds timeout)
    : device_(device), timeout_(timeout) {
  PeerStatus none{};
  check_peer_group(group_of(rank, world_size, layout, &none, timeout));
  const UseDevice use(device);
  const auto bytes = static_cast<size_t>(layout.region_bytes());
  void *region = nullptr, *status = nullptr;
  check_cuda(cudaMalloc(&region, bytes), "memory for peers");
  try {
    check_cuda(cudaMemset(region, 0, bytes), "cudaMemset of peer memory");
    check_cuda(
        cudaHostAlloc(&status, sizeof(PeerStatus), cudaHostAllocPortable | cudaHostAllocMapped),
        "memory for the status of peer memory");
    std::memset(status, 0, sizeof(PeerStatus));
    group_ = group_of(rank, world_size, layout, static_cast<PeerStatus*>(status), timeout);
    group_.regions[rank] = static_cast<char*>(region);
    handle_ = PeerHandle::here();
    handle_.address = reinterpret_cast<uintptr_t>(region);
    handle_.layout = layout;
    char bus[64] = {};
    check_cuda(cudaDeviceGetPCIBusId(bus, sizeof bus, device), "cudaDeviceGetPCIBusId");
    handle_.device = bus;
    cudaIpcMemHandle_t ipc{};
    static_assert(sizeof ipc == PeerHandle::kIpcBytes);
    // Not every system has it (WSL, some containers); ranks of this process do without.
    if (cudaIpcGetMemHandle(&ipc, region) == cudaSuccess)
      std::memcpy(handle_.ipc, &ipc, sizeof ipc);
    else
      cudaGetLastError();
    cudaStream_t stream = nullptr;
    check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "a stream");
    side_stream_ = stream;
    check_cuda(cudaDeviceSynchronize(), "cudaMemset of peer memory");
  } catch (...) {
    cudaFree(region);
    if (status) cudaFreeHost(status);
    throw;
  }
}

PeerMemory::~PeerMemory() {
  try {
    const UseDevice use(device_);
    cudaDeviceSynchronize();
    for (void* memory : opened_) cudaIpcCloseMemHandle(memory);
    cudaStreamDestroy(static_cast<cudaStream_t>(side_stream_));
    cudaFree(group_.regions[group_.rank]);
    cudaFreeHost(group_.status);
  } catch (const Error&) {
    // The device is gone, and its memory with it.
  }
}

void PeerMemory::connect(const std::vector<std::string>& texts) {
  PYCOMM_CHECK(!connected_, kInvalidArgument, "rank ", rank(), " is connected already");
  PYCOMM_CHECK(texts.size() == static_cast<size_t>(world_size()), kInvalidArgument, "rank ", rank(),
               " needs the handles of all ", world_size(), " ranks, not ", texts.size());
  std::vector<PeerHandle> handles;
  for (const std::string& text : texts) handles.push_back(PeerHandle::parse(text));
  const UseDevice use(device_);
  check_residents(handles);
  for (int peer = 0; peer < world_size(); ++peer)
    if (peer != rank()) map(peer, handles[static_cast<size_t>(peer)]);
  connected_ = true;
}

// Blocks of ranks that share a device wait for each other, so all must run at once.
void PeerMemory::check_residents(const std::vector<PeerHandle>& handles) const {
  const auto sharing =
      std::count_if(handles.begin(), handles.end(),
                    [this](const PeerHandle& other) { return other.device == handle_.device; });
  const int resident = resident_peer_blocks();
  PYCOMM_CHECK(layout().blocks * sharing <= resident, kError, "rank ", rank(), ": ", sharing,
               " ranks of ", layout().blocks, " blocks each share device ", handle_.device,
               ", which runs ", resident, " at once. Use fewer blocks, or NCCL.");
}

void PeerMemory::map(int peer, const PeerHandle& theirs) {
  std::string why = why_not_mapped(handle_, theirs);
  if (why.empty()) try {
      group_.regions[peer] = static_cast<char*>(open(theirs));
    } catch (const Error& error) {
      why = error.what();
    }
  PYCOMM_CHECK(why.empty(), kError, "rank ", rank(), " cannot map the memory of rank ", peer, ": ",
               why, ". Use NCCL.");
}

void* PeerMemory::open(const PeerHandle& theirs) {
  int other = -1;
  const bool is_visible = cudaDeviceGetByPCIBusId(&other, theirs.device.c_str()) == cudaSuccess;
  if (!is_visible) cudaGetLastError();
  if (is_visible && other != device_) {
    int can = 0;
    check_cuda(cudaDeviceCanAccessPeer(&can, device_, other), "cudaDeviceCanAccessPeer");
    PYCOMM_CHECK(can, kError, "device ", handle_.device, " cannot reach device ", theirs.device,
                 " (no NVLink, no PCIe peer access)");
  }
  if (theirs.process == handle_.process) {
    if (other != device_) {
      const cudaError_t status = cudaDeviceEnablePeerAccess(other, 0);
      if (status == cudaErrorPeerAccessAlreadyEnabled)
        cudaGetLastError();
      else
        check_cuda(status, "cudaDeviceEnablePeerAccess");
    }
    return reinterpret_cast<void*>(theirs.address);
  }
  static constexpr unsigned char kNone[PeerHandle::kIpcBytes] = {};
  PYCOMM_CHECK(std::memcmp(theirs.ipc, kNone, sizeof kNone) != 0, kError,
               "its process has no CUDA IPC");
  cudaIpcMemHandle_t ipc;
  std::memcpy(&ipc, theirs.ipc, sizeof ipc);
  void* memory = nullptr;
  check_cuda(cudaIpcOpenMemHandle(&memory, ipc, cudaIpcMemLazyEnablePeerAccess),
             "cudaIpcOpenMemHandle");
  opened_.push_back(memory);
  return memory;
}

void PeerMemory::check_connected() const {
  PYCOMM_CHECK(connected_, kInvalidArgument, "rank ", rank(),
               ": peer memory must be connected before it is used");
  check();
}

// A launch, whose errors name the rank.
template <class Launch>
void PeerMemory::launch(Launch&& start) {
  check_connected();
  const UseDevice use(device_);
  try {
    start();
  } catch (const Error& error) {
    throw Error(error.kind(), concat("rank ", rank(), ": ", error.what()), error.blame());
  }
}

void PeerMemory::all_reduce(Algorithm algorithm, DType dtype, ReduceOp op, const void* input,
                            void* output, int64_t count, void* stream, const double* scales) {
  launch([&] {
    launch_peer_all_reduce(group_, algorithm, dtype, op, input, output, count, stream, scales);
  });
}

void PeerMemory::compressed_all_reduce(Algorithm algorithm, const PeerCompressionCall& call,
                                       void* stream) {
  launch([&] { launch_peer_compressed(group_, algorithm, call, stream); });
}

void PeerMemory::check() const {
  const uint32_t state = __atomic_load_n(&group_.status->state, __ATOMIC_ACQUIRE);
  if (state != PeerStatus::kGood) throw_peer_status(*group_.status, timeout_);
}

void PeerMemory::abort() {
  const UseDevice use(device_);
  const auto stream = static_cast<cudaStream_t>(side_stream_);
  static const uint64_t kWord = kAbortedByHost;
  check_cuda(cudaMemcpyAsync(group_.regions[rank()] + layout().abort_offset(), &kWord, sizeof kWord,
                             cudaMemcpyHostToDevice, stream),
             "abort in peer memory");
  check_cuda(cudaStreamSynchronize(stream), "abort in peer memory");
}

}  // namespace pycomm
