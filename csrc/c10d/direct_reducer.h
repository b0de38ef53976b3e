// Averages a DDP module's dense gradients where they lie: a bucket is a list of tensors that count
// as one, so nothing is copied into buckets and back. torch's Reducer does the rarer modes.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "../communicator.h"
#include "reduction.h"
#include "work.h"

namespace pycomm {

class DirectReducer : public Reduction {
 public:
  // How some of the parameters' gradients travel.
  struct Wiring {
    Codec codec{WireFormat::kFloat32, 0};
    bool feedback = false;  // what encoding leaves out is added to the next gradient
    bool infinite = false, stochastic = false;  // see TranscodeCall
  };
  using Buckets = std::vector<std::vector<size_t>>;  // parameters, by index

  // `async`: on the communicator's worker while backward goes on, else in the thread that runs it.
  // In the first iteration all parameters of a dtype are one bucket, as with torch; then buckets
  // follow the order in which rank 0's gradients came, each up to its limit in bytes, the last
  // limit repeated.
  DirectReducer(std::vector<at::Tensor> parameters, std::vector<size_t> limits,
                std::shared_ptr<Communicator> communicator, bool async);

  bool expects() const override { return expects_; }
  int64_t iteration() const override { return iteration_; }
  const std::vector<size_t>& unused() const override { return unused_; }

  // After a forward whose gradients are to be reduced.
  void arm();
  // A gradient has been accumulated, since arm() for the first time.
  void ready(size_t index);
  // At the end of a backward: if all gradients have come, waits until they are reduced.
  void backward_ended();

  // Not while a backward runs.
  void set_communicator(std::shared_ptr<Communicator> communicator);
  void set_wirings(std::vector<Wiring> wirings, std::vector<size_t> of_parameter);
  // This rank's weight by the sum of all ranks' weights; none: the mean over ranks.
  void set_share(std::optional<double> share) { share_ = share; }
  void set_seed(uint64_t seed) { seed_ = seed; }
  // Of a parameter, in the order of its memory; undefined if there is none.
  at::Tensor residual(size_t index) const;
  void set_residual(size_t index, const at::Tensor& residual);
  const CodecCounts& counts() const { return counts_; }
  const Buckets& buckets() const { return buckets_; }
  bool has_rebuilt() const { return has_rebuilt_; }

 private:
  // The parameters of a bucket that travel alike.
  struct Part {
    size_t wiring;
    std::vector<size_t> parameters;
    at::Tensor residual;  // of all of them, or undefined
  };
  struct Bucket {
    std::vector<Part> parts;
    size_t missing = 0;
  };
  // A gradient that cannot be reduced in place, and what is.
  struct Copied {
    at::Tensor gradient, copy;
  };

  void form_parts();
  std::vector<at::Tensor> residuals() const;
  void launch(Bucket& bucket);
  std::shared_ptr<Compression> compression_of(const Part& part,
                                              const std::vector<at::Tensor>& gradients);
  at::Tensor reducible(size_t index);
  void follow_arrival();

  const std::vector<at::Tensor> parameters_;
  Buckets buckets_;
  const std::vector<size_t> limits_;
  std::shared_ptr<Communicator> communicator_;
  const bool async_;
  std::vector<Wiring> wirings_{Wiring()};
  std::vector<size_t> wiring_of_;  // by parameter
  std::optional<double> share_;
  uint64_t seed_ = 0;

  std::vector<Bucket> states_;
  std::vector<size_t> bucket_of_;  // by parameter
  const std::vector<size_t> unused_;
  std::mutex mutex_;
  bool expects_ = false;
  int64_t iteration_ = 0;
  size_t launched_ = 0;  // buckets
  std::vector<c10::intrusive_ptr<C10dWork>> works_;
  std::vector<Copied> copied_;
  std::vector<int64_t> arrived_;  // parameters, in order, in the first iteration
  bool has_rebuilt_ = false;
  CodecCounts counts_;
};

}  // namespace pycomm
