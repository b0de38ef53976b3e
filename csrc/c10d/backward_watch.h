// Notices gradients of a DDP module that its Reducer does not reduce.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <array>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "direct_reducer.h"
#include "reduction.h"
#include "step_times.h"

namespace pycomm {

// A Reduction is armed by a synchronised forward and expects one gradient of each parameter (with
// static_graph: as many as in the first iteration) until all buckets are reduced. It ignores those
// that come later, and waits for ever for those that do not come. This class sees every gradient
// just before the Reduction does, and looks at it when a backward has ended.
//
// A gradient that comes too late is a mistake only if it belongs to a synchronised forward. That is
// known by the forward's outputs, and by the numbers of the graph's nodes for outputs that nobody
// finds. One that is missing can still come as long as some graph holds its accumulator.
class BackwardWatch : public std::enable_shared_from_this<BackwardWatch> {
 public:
  // Hears of a problem and the parameters that have it, by index, and throws.
  using Report = std::function<void(const char* problem, const std::vector<size_t>& indices)>;

  // Before the Reducer of these parameters is made, so that gradients are seen here first.
  // With `late`, gradients that are missing are no problem at the end of a backward.
  BackwardWatch(const std::vector<at::Tensor>& parameters, bool late, Report report);
  ~BackwardWatch() { stop(); }
  void attach(std::shared_ptr<c10d::Reducer> reducer);
  void attach_direct(std::shared_ptr<DirectReducer> direct) { direct_ = std::move(direct); }
  void stop();

  // Around a synchronised forward; not called for others, or when the Reducer is armed by others.
  // `directly`: gradients are reduced by the DirectReducer, which is armed when the forward has
  // ended.
  void forward_begins(bool directly);
  void forward_ended(const std::vector<at::Tensor>& outputs);

  // What is amiss if no gradients come any more before the next forward, or null; and where.
  const char* unfinished() const;
  std::vector<size_t> unfinished_indices() const;
  // Whether the caller is neither in a backward nor in another thread than the last forward.
  bool is_between_backwards() const;

  const std::shared_ptr<StepTimes>& times() const { return times_; }

 private:
  using Accumulator = decltype(torch::autograd::impl::grad_accumulator(at::Tensor()));
  struct Watched {
    Accumulator accumulator;
    uintptr_t hook;
  };
  struct Forward {  // the numbers of the nodes that it made
    uint64_t thread = 0, begin = 0, end = 0;
  };
  enum class Came : uint8_t { kNo, kYes, kIsUnused };  // what the Reduction knows of a gradient
  static constexpr int64_t kNone = -1;

  void output_reached();
  void accumulated(size_t index, bool defined);
  void begin(int64_t task);
  const char* problem_of_extra(size_t index);
  bool belongs_to_forward() const;
  void backward_ended();
  void check_late(std::unique_lock<std::mutex>& lock, bool reached);
  void check_missing(std::unique_lock<std::mutex>& lock, bool reached);
  bool armed() const;
  bool waits() const;
  bool is_first_static() const;

  const bool late_reports_;
  const Report report_;
  const std::shared_ptr<StepTimes> times_ = std::make_shared<StepTimes>();
  std::vector<Watched> watched_;
  int64_t own_references_ = 0;  // to an accumulator, by this class and the Reducer
  std::shared_ptr<Reduction> torch_;
  std::shared_ptr<DirectReducer> direct_;
  Reduction* reduction_ = nullptr;  // the one of the two that the last forward armed

  std::array<Forward, 4> forwards_;  // the last ones
  size_t forward_ = 0;
  int64_t armed_iteration_ = kNone;  // the Reduction's number of it

  mutable std::mutex mutex_;  // of what follows, in a backward: devices have threads of their own
  int64_t task_ = kNone;      // the backward whose end is awaited
  bool reached_ = false;      // it goes through a synchronised forward
  bool began_armed_ = false;  // the Reduction expected gradients when it began
  bool restricted_ = false;   // it has the argument inputs=
  std::vector<Came> came_;    // since forward_ended()
  bool any_came_ = false;     // likewise
  std::vector<size_t> late_;  // in this backward, after all buckets were reduced
};

}  // namespace pycomm
