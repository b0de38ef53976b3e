// Notices parameters of a DDP module that are no longer what they were.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

namespace pycomm {

// Compares what decides where a gradient goes: dtype, device, sizes, and whether there is one.
class ParameterWatch {
 public:
  explicit ParameterWatch(std::vector<at::Tensor> parameters) : parameters_(std::move(parameters)) {
    for (const at::Tensor& p : parameters_)
      before_.push_back({p.scalar_type(), p.device(), p.requires_grad(), p.sizes().vec()});
  }

  // The indices of parameters that were recast, moved, resized or unfrozen. Freezing is no harm.
  std::vector<size_t> changed() const {
    std::vector<size_t> indices;
    for (size_t index = 0; index < parameters_.size(); ++index)
      if (differs(parameters_[index], before_[index])) indices.push_back(index);
    return indices;
  }

 private:
  struct Traits {
    at::ScalarType dtype;
    at::Device device;
    bool requires_grad;
    std::vector<int64_t> sizes;
  };

  static bool differs(const at::Tensor& now, const Traits& before) {
    return now.scalar_type() != before.dtype || now.device() != before.device ||
           (now.requires_grad() && !before.requires_grad) || now.sizes() != before.sizes;
  }

  const std::vector<at::Tensor> parameters_;
  std::vector<Traits> before_;
};

}  // namespace pycomm
