#include "direct_reducer.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "call.h"
#include "errors.h"

namespace pycomm {
namespace {

DType dtype_of(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf       ? DType::kFloat16
         : tensor.scalar_type() == at::kBFloat16 ? DType::kBFloat16
                                                 : DType::kFloat32;
}

}  // namespace

DirectReducer::DirectReducer(std::vector<at::Tensor> parameters, std::vector<size_t> limits,
                             std::shared_ptr<Communicator> communicator, bool async)
    : parameters_(std::move(parameters)),
      buckets_(std::get<0>(
          c10d::compute_bucket_assignment_by_size(parameters_, {std::numeric_limits<int>::max()}))),
      limits_(std::move(limits)),
      communicator_(std::move(communicator)),
      async_(async),
      wiring_of_(parameters_.size(), 0),
      bucket_of_(parameters_.size(), 0) {
  form_parts();
}

void DirectReducer::set_communicator(std::shared_ptr<Communicator> communicator) {
  communicator_ = std::move(communicator);
  works_.clear();
  copied_.clear();
  expects_ = false;  // what was under way is over
}

void DirectReducer::set_wirings(std::vector<Wiring> wirings, std::vector<size_t> of_parameter) {
  PYCOMM_CHECK(of_parameter.size() == parameters_.size(), kInvalidArgument, "wirings of ",
               of_parameter.size(), " parameters for ", parameters_.size());
  for (const size_t wiring : of_parameter)
    PYCOMM_CHECK(wiring < wirings.size(), kInvalidArgument, "there is no wiring ", wiring);
  wirings_ = std::move(wirings);
  wiring_of_ = std::move(of_parameter);
  form_parts();
}

// ---- buckets

// Residuals stay with their parameters.
void DirectReducer::form_parts() {
  const std::vector<at::Tensor> before = residuals();
  states_.assign(buckets_.size(), Bucket());
  for (size_t b = 0; b < buckets_.size(); ++b) {
    std::vector<Part>& parts = states_[b].parts;
    for (const size_t index : buckets_[b]) {
      bucket_of_[index] = b;
      auto part = std::find_if(parts.begin(), parts.end(),
                               [&](const Part& one) { return one.wiring == wiring_of_[index]; });
      if (part == parts.end()) part = parts.insert(parts.end(), Part{wiring_of_[index], {}, {}});
      part->parameters.push_back(index);
    }
    for (Part& part : parts) {
      if (!wirings_[part.wiring].feedback) continue;
      int64_t count = 0;
      for (const size_t index : part.parameters) count += parameters_[index].numel();
      part.residual = at::zeros({count}, at::kFloat);
    }
  }
  for (size_t index = 0; index < before.size(); ++index)
    if (before[index].defined()) set_residual(index, before[index]);
}

std::vector<at::Tensor> DirectReducer::residuals() const {
  std::vector<at::Tensor> all(parameters_.size());
  for (size_t index = 0; index < all.size(); ++index) all[index] = residual(index);
  return all;
}

at::Tensor DirectReducer::residual(size_t index) const {
  if (states_.empty()) return {};
  for (const Part& part : states_[bucket_of_[index]].parts) {
    if (part.wiring != wiring_of_[index] || !part.residual.defined()) continue;
    int64_t begin = 0;
    for (const size_t other : part.parameters) {
      if (other == index) return part.residual.narrow(0, begin, parameters_[index].numel());
      begin += parameters_[other].numel();
    }
  }
  return {};
}

void DirectReducer::set_residual(size_t index, const at::Tensor& residual) {
  const at::Tensor mine = this->residual(index);
  if (mine.defined()) mine.copy_(residual);
}

// So that each bucket can travel while the next one is computed.
void DirectReducer::follow_arrival() {
  const at::Tensor order =
      at::from_blob(arrived_.data(), {static_cast<int64_t>(arrived_.size())}, at::kLong);
  const Target target{communicator_, nullptr};
  Call call(target, Operation::kBroadcast, c10d::OpType::BROADCAST);
  call.set_dtype(order);
  call.request().input = call.request().output = order.data_ptr();
  call.submit(false, {order});
  std::vector<at::Tensor> in_order;
  for (const int64_t index : arrived_) in_order.push_back(parameters_.at(index));
  buckets_ = std::get<0>(c10d::compute_bucket_assignment_by_size(in_order, limits_, {}, arrived_));
  form_parts();
  has_rebuilt_ = true;
}

// ---- one iteration

void DirectReducer::arm() {
  const std::lock_guard<std::mutex> lock(mutex_);
  expects_ = true;
  ++iteration_;
  launched_ = 0;
  works_.clear();
  copied_.clear();
  arrived_.clear();
  for (size_t b = 0; b < states_.size(); ++b) states_[b].missing = buckets_[b].size();
}

// A bucket that this gradient completes is launched with the next one: until its hooks have run,
// autograd holds what it has accumulated, so its memory seems to be shared (see reducible).
void DirectReducer::ready(size_t index) {
  const std::lock_guard<std::mutex> lock(mutex_);
  launch_complete();
  --states_[bucket_of_[index]].missing;
  arrived_.push_back(static_cast<int64_t>(index));
}

// In the same order on all ranks.
void DirectReducer::launch_complete() {
  while (launched_ < states_.size() && states_[launched_].missing == 0)
    launch(states_[launched_++]);
}

void DirectReducer::launch(Bucket& bucket) {
  const Target target{communicator_, nullptr};
  translated([&] {
    for (const Part& part : bucket.parts) {
      std::vector<at::Tensor> gradients;
      for (const size_t index : part.parameters) gradients.push_back(reducible(index));
      Call call(target, Operation::kAllReduce, c10d::OpType::ALLREDUCE);
      call.set_dtype(gradients[0]);
      Request& request = call.request();
      request.compression = compression_of(part, gradients);
      request.count = request.compression->count();
      if (gradients.size() > 1) request.shape = Shape();
      works_.push_back(call.submit(async_, gradients));
    }
  });
}

std::shared_ptr<Compression> DirectReducer::compression_of(
    const Part& part, const std::vector<at::Tensor>& gradients) {
  const Wiring& wiring = wirings_[part.wiring];
  auto compression = std::make_shared<Compression>();
  compression->codec = wiring.codec;
  for (const at::Tensor& gradient : gradients)
    compression->tensors.push_back({gradient.data_ptr(), gradient.numel(), dtype_of(gradient)});
  // Divided before they are rounded, gradients do not overflow; exact ones are divided afterwards,
  // once, as an average is.
  const auto ranks = static_cast<float>(communicator_->world_size());
  if (share_)
    compression->factor = static_cast<float>(*share_);
  else if (wiring.codec.format == WireFormat::kFloat32)
    compression->divisor = ranks;
  else
    compression->factor = 1 / ranks;
  if (part.residual.defined()) compression->residual = part.residual.data_ptr<float>();
  compression->infinite = wiring.infinite;
  compression->stochastic = wiring.stochastic;
  // Another one for each rank, iteration and part.
  compression->seed = seed_ + UINT64_C(0x9e3779b97f4a7c15) *
                                  (static_cast<uint64_t>(iteration_) << 20 | part.parameters[0]);
  compression->counts = &counts_;
  return compression;
}

// The gradient, or a copy of it that becomes it at the end of backward: if its elements do not lie
// as the parameter's do, on which ranks agree; or if backward may still read it, through another
// tensor on the same memory.
at::Tensor DirectReducer::reducible(size_t index) {
  const at::Tensor& parameter = parameters_[index];
  const at::Tensor gradient = parameter.grad();
  const bool in_place = gradient.scalar_type() == parameter.scalar_type() &&
                        gradient.is_non_overlapping_and_dense() &&
                        gradient.strides() == parameter.strides() &&
                        gradient.storage().use_count() == 1;
  if (in_place) return gradient;
  const at::NoGradGuard no_grad;
  at::Tensor copy = at::empty_strided(parameter.sizes(), parameter.strides(), parameter.options());
  copy.copy_(gradient);
  copied_.push_back({gradient, copy});
  ++copies_;
  return copy;
}

void DirectReducer::backward_ended() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!expects_) return;
  launch_complete();
  if (launched_ < states_.size()) return;
  translated([&] {
    for (const auto& work : works_) work->wait();
    const at::NoGradGuard no_grad;
    for (const Copied& copied : copied_) at::Tensor(copied.gradient).copy_(copied.copy);
    if (!has_rebuilt_) follow_arrival();
  });
  works_.clear();
  copied_.clear();
  expects_ = false;
}

}  // namespace pycomm
