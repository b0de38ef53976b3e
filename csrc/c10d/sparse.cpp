// all_reduce of sparse tensors: everybody's indices and values are gathered, and added in rank
// order.
#include <ATen/ATen.h>

#include <utility>
#include <vector>

#include "call.h"
#include "errors.h"

namespace pycomm {
namespace {

// Gathers one tensor from every rank, of any shape but equal dtype; shapes[r] is known here.
std::vector<at::Tensor> gather(Communicator& communicator, DType dtype, const at::Tensor& input,
                               const std::vector<std::vector<int64_t>>& shapes,
                               std::chrono::milliseconds timeout) {
  std::vector<at::Tensor> outputs;
  Request request;
  request.operation = Operation::kAllGather;
  request.dtype = dtype;
  request.count = input.numel();
  request.input = input.const_data_ptr();
  request.timeout = timeout;
  for (const auto& shape : shapes) {
    outputs.push_back(at::empty(shape, input.options()));
    request.outputs.push_back({outputs.back().data_ptr(), outputs.back().numel()});
  }
  communicator.submit(std::move(request), false, nullptr);
  return outputs;
}

// Shapes differ by the number of elements alone, or it is nobody's sum.
void check_sizes(const std::vector<at::Tensor>& heads, int rank) {
  for (size_t peer = 0; peer < heads.size(); ++peer)
    PYCOMM_CHECK(heads[peer].slice(0, 1).equal(heads[rank].slice(0, 1)), kMismatch, "rank ", rank,
                 ": all_reduce of sparse tensors: rank ", peer,
                 "'s shape or number of sparse "
                 "dimensions differs from this rank's; every rank must pass the same shape");
}

void add_up(Communicator& communicator, DType dtype, const at::Tensor& tensor, ReduceOp op,
            std::chrono::milliseconds timeout) {
  at::NoGradGuard no_grad;
  const int ranks = communicator.world_size(), rank = communicator.rank();
  const at::Tensor mine = tensor.coalesce();
  const at::Tensor indices = mine._indices().contiguous(), values = mine._values().contiguous();

  // nnz, number of sparse dimensions, number of dimensions, sizes (up to 16 of them).
  constexpr int64_t kHead = 19;
  PYCOMM_CHECK(tensor.dim() <= kHead - 3, kInvalidArgument, "rank ", rank,
               ": all_reduce of sparse tensors supports up to ", kHead - 3, " dimensions, not ",
               tensor.dim());
  at::Tensor head = at::zeros({kHead}, at::kLong);
  int64_t* words = head.data_ptr<int64_t>();
  words[0] = mine._nnz();
  words[1] = tensor.sparse_dim();
  words[2] = tensor.dim();
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) words[3 + dim] = tensor.size(dim);
  const auto heads =
      gather(communicator, DType::kInt64, head,
             std::vector<std::vector<int64_t>>(static_cast<size_t>(ranks), {kHead}), timeout);
  check_sizes(heads, rank);

  std::vector<std::vector<int64_t>> index_shapes, value_shapes;
  for (const at::Tensor& theirs : heads) {
    const int64_t nnz = theirs.data_ptr<int64_t>()[0];
    index_shapes.push_back({tensor.sparse_dim(), nnz});
    value_shapes.push_back(values.sizes().vec());
    value_shapes.back()[0] = nnz;
  }
  const auto all_indices = gather(communicator, DType::kInt64, indices, index_shapes, timeout);
  const auto all_values = gather(communicator, dtype, values, value_shapes, timeout);

  // Small floats are added in float32 and rounded once, like dense ones. Equal indices keep their
  // order, which is that of the ranks.
  at::Tensor all = at::cat(all_values, 0);
  const at::ScalarType type = all.scalar_type();
  const bool widen = at::isReducedFloatingType(type);
  at::Tensor sum = at::sparse_coo_tensor(at::cat(all_indices, 1), widen ? all.to(at::kFloat) : all,
                                         tensor.sizes())
                       .coalesce();
  if (op == ReduceOp::kAvg) {
    if (at::isIntegralType(type, false))
      sum = sum.div(ranks, "trunc");
    else
      sum = sum.div(ranks);
  }
  if (sum.scalar_type() != type) sum = sum.to(type);
  tensor.copy_(sum);
}

}  // namespace

c10::intrusive_ptr<C10dWork> sparse_all_reduce(const Target& target, Call call,
                                               const at::Tensor& tensor,
                                               const c10d::AllreduceOptions& options) {
  call.set_dtype(tensor);
  call.set_op(options.reduceOp);
  const Request request = call.request();
  PYCOMM_CHECK(!target.on_gpu(), kInvalidArgument, call.name(), ": a sparse tensor on ",
               tensor.device().str(),
               ", but sparse tensors work on the CPU only; pass "
               "tensor.to_dense()");
  PYCOMM_CHECK(request.op == ReduceOp::kSum || request.op == ReduceOp::kAvg, kInvalidArgument,
               call.name(), ": sparse tensors support sum and avg, not ", name_of(request.op));
  PYCOMM_CHECK(can_reduce(request.dtype, request.op), kInvalidArgument, call.name(), ": op '",
               name_of(request.op), "' is not defined for ", name_of(request.dtype));
  const auto timeout = options.timeout.count() > 0 ? options.timeout : std::chrono::milliseconds(0);
  return call.run_together(
      [communicator = target.communicator.get(), request, tensor, timeout] {
        add_up(*communicator, request.dtype, tensor, request.op, timeout);
      },
      options.asyncOp, {tensor});
}

}  // namespace pycomm
