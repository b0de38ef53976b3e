#include "backward_watch.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

namespace pycomm {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

// Called by an accumulator after it has accumulated.
class AccumulatedHook : public torch::autograd::FunctionPostHook {
 public:
  explicit AccumulatedHook(std::function<void(bool)> hear) : hear_(std::move(hear)) {}
  variable_list operator()(const variable_list& outputs, const variable_list& inputs) override {
    hear_(!inputs.empty() && inputs[0].defined());
    return outputs;
  }

 private:
  const std::function<void(bool defined)> hear_;
};

}  // namespace

BackwardWatch::BackwardWatch(const std::vector<at::Tensor>& parameters, bool late, Report report)
    : late_reports_(late), report_(std::move(report)), came_(parameters.size(), Came::kNo) {
  for (size_t index = 0; index < parameters.size(); ++index) {
    auto accumulator = torch::autograd::impl::grad_accumulator(parameters[index]);
    auto hook = std::make_unique<AccumulatedHook>(
        [this, index](bool defined) { accumulated(index, defined); });
    const uintptr_t key = accumulator->add_post_hook(std::move(hook));
    watched_.push_back({std::move(accumulator), key});
  }
  if (!watched_.empty()) own_references_ = 1 - int64_t(watched_[0].accumulator.use_count());
}

void BackwardWatch::attach(std::shared_ptr<c10d::Reducer> reducer) {
  if (!watched_.empty()) own_references_ += watched_[0].accumulator.use_count();
  torch_ = std::make_shared<TorchReduction>(std::move(reducer));
  reduction_ = torch_.get();
}

void BackwardWatch::stop() {
  reduction_ = nullptr;
  torch_ = nullptr;
  direct_ = nullptr;
  for (Watched& watched : watched_) watched.accumulator->del_post_hook(watched.hook);
  watched_.clear();
}

void BackwardWatch::forward_begins(bool directly) {
  task_ = kNone;
  if (torch_) reduction_ = directly ? static_cast<Reduction*>(direct_.get()) : torch_.get();
  times_->forward_begins();
  forwards_[forward_] = {at::RecordFunction::currentThreadId(), at::sequence_number::peek(), 0};
}

void BackwardWatch::forward_ended(const std::vector<at::Tensor>& outputs) {
  if (!reduction_) return;
  if (reduction_ == direct_.get()) direct_->arm();
  forwards_[forward_].end = at::sequence_number::peek();
  forward_ = (forward_ + 1) % forwards_.size();
  armed_iteration_ = reduction_->iteration();
  any_came_ = false;
  std::fill(came_.begin(), came_.end(), Came::kNo);
  if (reduction_->finds_unused() && !reduction_->is_static())
    for (const size_t index : reduction_->unused()) came_[index] = Came::kIsUnused;
  for (const at::Tensor& output : outputs) {
    if (!output.defined() || !output.requires_grad() || output.is_leaf()) continue;
    output.register_hook([weak = weak_from_this()](const at::Tensor&) {
      if (const auto self = weak.lock()) self->output_reached();
    });
  }
}

bool BackwardWatch::armed() const { return reduction_->iteration() == armed_iteration_; }

// Whether the Reducer has begun with the gradients of this iteration and not ended.
bool BackwardWatch::waits() const { return armed() && any_came_ && reduction_->expects(); }

// Then the Reducer only counts, until a backward has gone through an output of the forward.
bool BackwardWatch::is_first_static() const {
  return reduction_->is_static() && reduction_->is_first_backward();
}

const char* BackwardWatch::unfinished() const {
  if (!reduction_ || !waits()) return nullptr;
  if (task_ != kNone) return "interrupted";
  if (is_first_static()) return "unreached";
  return reduction_->is_static() ? "fewer" : "missing";
}

std::vector<size_t> BackwardWatch::unfinished_indices() const {
  const bool is_static = reduction_->is_static(), is_first = is_first_static();
  const auto is_unfinished = [&](size_t index) {
    if (is_first) return came_[index] == Came::kYes;
    return is_static ? reduction_->expected(index) > 0 : came_[index] == Came::kNo;
  };
  std::vector<size_t> indices;
  for (size_t index = 0; index < watched_.size(); ++index)
    if (is_unfinished(index)) indices.push_back(index);
  return indices;
}

bool BackwardWatch::is_between_backwards() const {
  const Forward& last = forwards_[(forward_ + forwards_.size() - 1) % forwards_.size()];
  return torch::autograd::get_current_graph_task_id() == -1 &&
         at::RecordFunction::currentThreadId() == last.thread;
}

void BackwardWatch::output_reached() {
  const std::lock_guard<std::mutex> lock(mutex_);
  const int task = torch::autograd::get_current_graph_task_id();
  if (reduction_ && task_ != task) begin(task);
  reached_ = true;
}

// Checkpoints run backwards within a backward; these end with the outer one, if it is known.
void BackwardWatch::begin(int64_t task) {
  task_ = task;
  began_armed_ = reduction_->expects();
  reached_ = restricted_ = false;
  late_.clear();
  times_->backward_begins();
  // Twice, so that it runs behind the Reducer's own, which is queued during backward.
  auto& engine = torch::autograd::Engine::get_default_engine();
  engine.queue_callback([&engine, self = shared_from_this()] {
    engine.queue_callback([self] { self->backward_ended(); });
  });
}

void BackwardWatch::accumulated(size_t index, bool defined) {
  if (!reduction_) return;
  const char* problem = nullptr;
  bool is_direct = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (task_ == kNone) begin(torch::autograd::get_current_graph_task_id());
    times_->gradient_came();
    if (reduction_->expects()) {
      problem = problem_of_extra(index);
      is_direct = reduction_ == direct_.get() && armed();
    } else if (defined) {
      if (late_.empty()) reached_ = reached_ || belongs_to_forward();
      late_.push_back(index);
    }
  }
  if (problem) report_(problem, {index});  // without the lock: it takes the GIL
  if (!is_direct) return;
  const uint64_t began = ticks();
  direct_->ready(index);
  times_->averaged(began);
}

// For a gradient that the Reducer takes: what is wrong with it, or null.
const char* BackwardWatch::problem_of_extra(size_t index) {
  if (!armed()) return nullptr;
  restricted_ = restricted_ || !torch::autograd::get_current_graph_task_exec_info()->empty();
  any_came_ = true;
  const Came before = std::exchange(came_[index], Came::kYes);
  if (is_first_static()) return nullptr;
  if (reduction_->is_static()) return reduction_->expected(index) == 0 ? "more" : nullptr;
  if (before == Came::kIsUnused) return "unseen";
  return before == Came::kYes ? "twice" : nullptr;
}

// Whether the running backward goes through nodes that a synchronised forward has made.
bool BackwardWatch::belongs_to_forward() const {
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  const auto made = [](const Node& node, const Forward& forward) {
    return node.thread_id() == forward.thread && node.sequence_nr() >= forward.begin &&
           node.sequence_nr() < forward.end;
  };
  return std::any_of(nodes->begin(), nodes->end(), [&](const Node* node) {
    return std::any_of(forwards_.begin(), forwards_.end(),
                       [&](const Forward& forward) { return made(*node, forward); });
  });
}

void BackwardWatch::backward_ended() {
  std::unique_lock<std::mutex> lock(mutex_);
  task_ = kNone;
  if (!reduction_) return;
  if (reduction_ == direct_.get()) direct_->backward_ended();
  if (armed() && !reduction_->expects()) times_->backward_ended();
  const bool reached = std::exchange(reached_, false);
  check_late(lock, reached);
  check_missing(lock, reached);
}

void BackwardWatch::check_late(std::unique_lock<std::mutex>& lock, bool reached) {
  if (late_.empty() || !reached) return;
  std::sort(late_.begin(), late_.end());
  late_.erase(std::unique(late_.begin(), late_.end()), late_.end());
  lock.unlock();  // the report takes the GIL
  report_(began_armed_ ? "twice" : "late", late_);
}

void BackwardWatch::check_missing(std::unique_lock<std::mutex>& lock, bool reached) {
  if (armed() && !reduction_->expects()) armed_iteration_ = kNone;  // done
  if (!waits()) return;
  std::vector<size_t> indices = unfinished_indices();
  const bool is_static = reduction_->is_static(), is_first = is_first_static();
  if (is_first && !reached) return;
  const bool is_final = restricted_ || (reached && (is_first || reduction_->finds_unused()));
  if (!is_final && late_reports_) return;
  if (!is_final) {
    // Another backward may follow: only what no graph can bring any more is missing.
    const auto can_come = [&](size_t index) {
      return int64_t(watched_[index].accumulator.use_count()) > own_references_;
    };
    indices.erase(std::remove_if(indices.begin(), indices.end(), can_come), indices.end());
    if (indices.empty()) return;
  }
  const char* const problem = is_first      ? "unreached"
                              : restricted_ ? "restricted"
                              : is_static   ? "fewer"
                                            : "missing";
  lock.unlock();
  report_(problem, indices);
}

}  // namespace pycomm
