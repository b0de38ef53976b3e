// Who reduces a DDP module's gradients, as BackwardWatch sees it: torch's Reducer or DirectReducer.
#pragma once

#include <cstdint>
#include <memory>
#include <torch/csrc/distributed/c10d/reducer.hpp>
#include <utility>
#include <vector>

namespace pycomm {

class Reduction {
 public:
  virtual ~Reduction() = default;
  // Whether gradients of the last forward have still to come.
  virtual bool expects() const = 0;
  // Of the last forward whose gradients are reduced.
  virtual int64_t iteration() const = 0;
  virtual bool finds_unused() const { return false; }
  virtual const std::vector<size_t>& unused() const = 0;  // then: which
  virtual bool is_static() const { return false; }
  // With a static graph: whether no backward of an earlier iteration has run, and how many
  // gradients of a parameter must still come in this one.
  virtual bool is_first_backward() const { return false; }
  virtual int expected(size_t) const { return 0; }
};

// What the Reducer knows about its iteration; its own names for it.
class TorchReduction : public Reduction {
 public:
  explicit TorchReduction(std::shared_ptr<c10d::Reducer> reducer) : reducer_(std::move(reducer)) {}

  bool expects() const override { return get(&State::expect_autograd_hooks_); }
  int64_t iteration() const override { return get(&State::num_iterations_); }
  bool finds_unused() const override { return get(&State::find_unused_parameters_); }
  const std::vector<size_t>& unused() const override { return get(&State::unused_parameters_); }
  bool is_static() const override { return get(&State::static_graph_); }
  // Backwards are counted when all is reduced.
  bool is_first_backward() const override {
    return get(&State::num_bwd_calls_) + (get(&State::first_autograd_hook_called_) ? 0 : 1) == 1;
  }
  int expected(size_t index) const override {
    const auto& left = get(&State::numGradHooksTriggeredMapPerIteration_);
    const auto found = left.find(index);
    return found == left.end() ? 0 : found->second;
  }

 private:
  // Opens what is protected there.
  struct State : c10d::Reducer {
    using Reducer::expect_autograd_hooks_;
    using Reducer::find_unused_parameters_;
    using Reducer::first_autograd_hook_called_;
    using Reducer::num_bwd_calls_;
    using Reducer::num_iterations_;
    using Reducer::numGradHooksTriggeredMapPerIteration_;
    using Reducer::static_graph_;
    using Reducer::unused_parameters_;
  };
  template <class T>
  const T& get(T c10d::Reducer::* member) const {
    return (*reducer_).*member;
  }

  const std::shared_ptr<c10d::Reducer> reducer_;
};

}  // namespace pycomm
