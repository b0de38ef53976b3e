#include "window.h"

#include <ATen/ATen.h>
#include <c10/core/Allocator.h>

#include <cstring>
#include <utility>

#include "errors.h"

namespace pycomm {

// ---- shared memory for tensors

namespace {

class SharedAllocator : public c10::Allocator {
 public:
  explicit SharedAllocator(std::shared_ptr<Communicator> communicator)
      : communicator_(std::move(communicator)) {}

  c10::DataPtr allocate(size_t bytes) override {
    return translated([&] {
      auto* memory =
          new std::shared_ptr<void>(communicator_->allocate(static_cast<int64_t>(bytes)));
      return c10::DataPtr(memory->get(), memory, &release, c10::Device(c10::kCPU));
    });
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  static void release(void* memory) { delete static_cast<std::shared_ptr<void>*>(memory); }
  const std::shared_ptr<Communicator> communicator_;
};

}  // namespace

std::shared_ptr<c10::Allocator> shared_allocator(std::shared_ptr<Communicator> communicator) {
  return std::make_shared<SharedAllocator>(std::move(communicator));
}

at::Tensor shared_tensor(const std::shared_ptr<Communicator>& communicator, int64_t count,
                         const at::TensorOptions& options) {
  return translated([&] {
    PYCOMM_CHECK(count >= 0 && (options.device().is_cpu() || communicator->works_on_gpu()),
                 kInvalidArgument, "rank ", communicator->rank(), ": a shared tensor of ", count,
                 " elements on device ", options.device().str(),
                 "; it must be on the CPU or on a GPU");
    const auto bytes = count * static_cast<int64_t>(options.dtype().itemsize());
    auto memory = communicator->allocate(bytes);
    void* data = memory.get();
    return at::from_blob(data, {count}, [memory](void*) {}, options);
  });
}

#ifdef C10D_BACKEND_HAS_WINDOW
// ---- windows

namespace {

// What each rank tells the others of its tensor, in 64-bit words; sizes follow.
enum Word { kOffset, kType, kDimensions, kSignals, kSizes };
constexpr int64_t kMaxDimensions = 16;
constexpr int64_t kWords = kSizes + kMaxDimensions;

// Every rank's words, one rank after another.
std::vector<int64_t> tell_all(Communicator& communicator, const std::vector<int64_t>& mine) {
  std::vector<int64_t> all(mine.size() * communicator.world_size());
  Request request;
  request.operation = Operation::kAllGather;
  request.dtype = DType::kInt64;
  request.count = static_cast<int64_t>(mine.size());
  request.input = mine.data();
  request.output = all.data();
  communicator.submit(std::move(request), false, nullptr);
  return all;
}

}  // namespace

SharedWindow::SharedWindow(const Target& target) : target_(target) {}

std::string SharedWindow::name(const char* call) const {
  return concat("rank ", target_.communicator->rank(), ": window.", call);
}

const SharedWindow::Registered& SharedWindow::registered(int64_t rank, const char* call) const {
  PYCOMM_CHECK(!tensors_.empty(), kInvalidArgument, name(call),
               ": no tensor is registered; call tensor_register on all ranks first");
  PYCOMM_CHECK(rank >= 0 && rank < target_.communicator->world_size(), kInvalidArgument, name(call),
               ": rank ", rank, " is not in a world of ", target_.communicator->world_size());
  return tensors_[static_cast<size_t>(rank)];
}

// Ranks first tell each other what they have, so that all of them refuse what any cannot share.
void SharedWindow::tensor_register(const at::Tensor& tensor, bool owning) {
  translated([&] {
    Communicator& communicator = *target_.communicator;
    const int ranks = communicator.world_size();
    const auto what = name("tensor_register");
    PYCOMM_CHECK(tensors_.empty(), kInvalidArgument, what, ": a tensor is registered already");
    own_signals_ = communicator.allocate(ranks * kSignalBytes);
    std::memset(own_signals_.get(), 0, static_cast<size_t>(ranks * kSignalBytes));

    const bool fits = tensor.is_cpu() && tensor.is_contiguous() && tensor.dim() <= kMaxDimensions;
    std::vector<int64_t> mine(kWords);
    mine[kOffset] =
        fits ? communicator.shared_offset(tensor.data_ptr(), static_cast<int64_t>(tensor.nbytes()))
             : -1;
    mine[kType] = static_cast<int64_t>(tensor.scalar_type());
    mine[kDimensions] = fits ? tensor.dim() : 0;
    mine[kSignals] = communicator.shared_offset(own_signals_.get(), ranks * kSignalBytes);
    for (int64_t dim = 0; dim < mine[kDimensions]; ++dim) mine[kSizes + dim] = tensor.size(dim);
    const std::vector<int64_t> all = tell_all(communicator, mine);

    std::vector<Registered> tensors;
    std::vector<void*> signals;
    for (int rank = 0; rank < ranks; ++rank) {
      const int64_t* words = all.data() + rank * kWords;
      PYCOMM_CHECK(words[kOffset] >= 0, kInvalidArgument, what, ": rank ", rank,
                   "'s tensor is not a contiguous CPU tensor in shared memory; make it with "
                   "pycomm.empty(..., shared=True)");
      PYCOMM_CHECK(words[kType] == mine[kType], kInvalidArgument, what, ": rank ", rank,
                   "'s tensor has another dtype than this rank's ", tensor.scalar_type());
      Registered entry;
      entry.data = communicator.shared_address(rank, words[kOffset]);
      entry.sizes.assign(words + kSizes, words + kSizes + words[kDimensions]);
      entry.count = c10::multiply_integers(entry.sizes);
      tensors.push_back(std::move(entry));
      signals.push_back(static_cast<char*>(communicator.shared_address(rank, words[kSignals])) +
                        communicator.rank() * kSignalBytes);
    }
    dtype_ = tensor.scalar_type();
    tensors_ = std::move(tensors);
    signals_ = std::move(signals);
    taken_.assign(static_cast<size_t>(ranks), 0);
    if (owning) owned_ = tensor;
  });
}

// All ranks leave together, so that nobody still writes into a tensor that is given up.
void SharedWindow::tensor_deregister() {
  translated([&] {
    PYCOMM_CHECK(!tensors_.empty(), kInvalidArgument, name("tensor_deregister"),
                 ": no tensor is registered");
    target_.communicator->submit(Request{}, false, nullptr);
    tensors_.clear();
    signals_.clear();
    own_signals_.reset();
    owned_.reset();
  });
}

c10::intrusive_ptr<c10d::Work> SharedWindow::run(std::function<void()> work, bool async) {
  return translated([&] {
    Call call(target_, Operation::kBarrier, c10d::OpType::UNKNOWN);
    return call.run_together(std::move(work), async, {});
  });
}

c10::intrusive_ptr<c10d::Work> SharedWindow::put(const at::Tensor& tensor, int64_t destination,
                                                 int64_t offset, bool async,
                                                 const c10d::PutOptions&) {
  const Registered* target = translated([&] {
    const Registered& target = registered(destination, "put");
    PYCOMM_CHECK(tensor.is_cpu() && tensor.scalar_type() == dtype_, kInvalidArgument, name("put"),
                 ": needs a CPU tensor of the window's dtype ", c10::toString(dtype_), ", not ",
                 tensor.toString());
    PYCOMM_CHECK(offset >= 0 && tensor.numel() <= target.count - offset, kInvalidArgument,
                 name("put"), ": ", tensor.numel(), " elements at offset ", offset,
                 " do not fit into rank ", destination, "'s window of ", target.count);
    return &target;
  });
  char* to = static_cast<char*>(target->data) + offset * tensor.element_size();
  const at::Tensor source = tensor.contiguous();
  return run([to, source] { std::memcpy(to, source.const_data_ptr(), source.nbytes()); }, async);
}

at::Tensor SharedWindow::map_remote_tensor(int64_t rank) {
  return translated([&] {
    const Registered& tensor = registered(rank, "map_remote_tensor");
    return at::from_blob(
        tensor.data, tensor.sizes, [communicator = target_.communicator](void*) {},
        at::TensorOptions().dtype(dtype_));
  });
}

c10::intrusive_ptr<c10d::Work> SharedWindow::signal(int64_t peer, bool async,
                                                    const c10d::SignalOptions&) {
  translated([&] { registered(peer, "signal"); });
  return run([communicator = target_.communicator.get(),
              signal = signals_[static_cast<size_t>(peer)]] { communicator->raise_signal(signal); },
             async);
}

c10::intrusive_ptr<c10d::Work> SharedWindow::wait_signal(int64_t peer, bool async,
                                                         const c10d::WaitSignalOptions& options) {
  translated([&] { registered(peer, "wait_signal"); });
  const uint32_t target = ++taken_[static_cast<size_t>(peer)];
  void* signal = static_cast<char*>(own_signals_.get()) + peer * kSignalBytes;
  const auto timeout = options.timeout.count() > 0 ? options.timeout : std::chrono::milliseconds(0);
  return run(
      [communicator = target_.communicator.get(), signal, target, peer = static_cast<int>(peer),
       timeout] { communicator->await_signal(signal, target, peer, timeout); },
      async);
}

c10d::WindowAttr SharedWindow::get_attr(int64_t peer) {
  translated([&] { registered(peer, "get_attr"); });
  return {c10d::WindowAccessType::UNIFIED};
}
#endif

}  // namespace pycomm
