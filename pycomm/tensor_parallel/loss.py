"""Cross entropy of logits whose vocabulary is split over ranks, which are never gathered (Shoeybi et al., 2019)."""

from __future__ import annotations

import zlib
from typing import Any, Literal

import torch
from torch.autograd import Function
from torch.nn import functional

from pycomm.errors import Error, InvalidArgument, MismatchError
from pycomm.tensor_parallel import regions
from pycomm.tensor_parallel.group import Group, GroupLike, group_of


@torch.compiler.disable(reason=regions.REASON)
def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    group: GroupLike | Group = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> torch.Tensor:
    """Collective: cross entropy of [..., this rank's part of the vocabulary] and [...] labels, the same on all ranks.

    As :func:`torch.nn.functional.cross_entropy` of the gathered logits, with the vocabulary last. Computed in float32
    at least, which is also the result's dtype. ``z_loss`` adds that times the square of the logarithm of the softmax's
    sum (Chowdhery et al., "PaLM", 2022). Three values per label travel, and one maximum; before them 40 bytes, by which
    all ranks learn of labels that are out of range (InvalidArgument on every rank) or differ (MismatchError).
    """
    ranks = group_of(group)
    if logits.shape[:-1] != labels.shape:
        raise InvalidArgument(
            f"rank {ranks.rank}: logits of shape {tuple(logits.shape)} need labels of shape "
            f"{tuple(logits.shape[:-1])}, not {tuple(labels.shape)}"
        )
    if reduction not in ("mean", "sum", "none"):
        raise InvalidArgument(f'reduction is "mean", "sum" or "none", not {reduction!r}')
    begin, total = _agree(logits, labels, ranks, ignore_index)
    losses = _CrossEntropy.apply(
        logits, labels, ranks, begin, total, ignore_index, label_smoothing, z_loss
    )
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / (labels != ignore_index).sum()


class CausalLmLoss:
    """transformers' loss of a language model, of logits that stay split: ``model.loss_function = CausalLmLoss(group)``.

    Takes its arguments: labels are shifted by one, and -100 is ignored; with ``num_items_in_batch`` the sum is divided
    by that.
    """

    def __init__(self, group: GroupLike | Group = None) -> None:
        self.group = group_of(group)

    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Collective: the loss."""
        if shift_labels is None:
            shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()
        total = vocab_parallel_cross_entropy(
            logits,
            shift_labels.view(logits.shape[:-1]),
            group=self.group,
            ignore_index=ignore_index,
            reduction="mean" if num_items_in_batch is None else "sum",
        )
        return total if num_items_in_batch is None else total / num_items_in_batch


def _agree(
    logits: torch.Tensor, labels: torch.Tensor, ranks: Group, ignore_index: int
) -> tuple[int, int]:
    """Collective: where this rank's part begins, and the vocabulary's size; after all have found the labels right."""
    counted = labels[labels != ignore_index]
    low, high = (int(v) for v in counted.aminmax()) if counted.numel() else (0, 0)
    digest = zlib.crc32(labels.detach().cpu().contiguous().numpy().tobytes())
    own = [logits.shape[-1], low, high, digest, labels.numel()]
    everyone = ranks.gather_numbers(own)
    widths = [numbers[0] for numbers in everyone]
    total = sum(widths)
    for rank, (_, low, high, *_) in enumerate(everyone):
        if low < 0 or high >= total:
            raise InvalidArgument(
                f"rank {ranks.rank}: labels on rank {rank} are from {low} to {high}, but the vocabulary is 0 to "
                f"{total - 1} (ignore_index is {ignore_index})"
            )
    for rank, numbers in enumerate(everyone):
        if numbers[3:] != everyone[0][3:]:
            raise MismatchError(
                f"rank {ranks.rank}: labels on rank {rank} are not those on rank 0; all ranks of a tensor parallel "
                "group take the same batch"
            )
    return sum(widths[: ranks.rank]), total


class _CrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        labels: torch.Tensor,
        ranks: Group,
        begin: int,
        total: int,
        ignore_index: int,
        smoothing: float,
        z_loss: float,
    ) -> torch.Tensor:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        has_words = wide.shape[-1] > 0  # there may be more ranks than words
        largest = wide.amax(-1) if has_words else wide.new_full(labels.shape, float("-inf"))
        ranks.all_reduce(largest, "max").wait()
        wide -= largest.unsqueeze(-1)

        is_own = (labels >= begin) & (labels < begin + wide.shape[-1])
        position = torch.where(is_own, labels - begin, 0)
        sums = wide.new_zeros(3 if smoothing else 2, *labels.shape)
        if has_words:
            target = wide.gather(-1, position.unsqueeze(-1)).squeeze(-1)
            sums[1] = torch.where(is_own, target, 0.0)
        if smoothing:
            sums[2] = wide.sum(-1)
        wide.exp_()
        sums[0] = wide.sum(-1)
        ranks.all_reduce(sums).wait()

        wide /= sums[0].unsqueeze(-1)
        log_sum = sums[0].log()
        losses = log_sum - sums[1]
        if smoothing:
            losses = (1 - smoothing) * losses + smoothing * (log_sum - sums[2] / total)
        log_sum += largest
        if z_loss:
            losses = losses + z_loss * log_sum.square()
        is_counted = labels != ignore_index
        ctx.save_for_backward(wide, position, is_own, is_counted, log_sum)
        ctx.call = (logits.dtype, total, smoothing, z_loss)
        return torch.where(is_counted, losses, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise Error(
                "vocab_parallel_cross_entropy cannot be differentiated twice (create_graph=True); gather the logits "
                "and take torch's cross_entropy"
            )
        softmax, position, is_own, is_counted, log_sum = ctx.saved_tensors
        dtype, total, smoothing, z_loss = ctx.call
        grad = torch.where(is_counted, grad, 0.0)
        factor = grad * (1 + 2 * z_loss * log_sum) if z_loss else grad
        given = softmax * factor.unsqueeze(-1)
        if smoothing:
            given -= (grad * (smoothing / total)).unsqueeze(-1)
        if given.shape[-1]:
            hit = torch.where(is_own, grad * (smoothing - 1), 0.0)
            given.scatter_add_(-1, position.unsqueeze(-1), hit.unsqueeze(-1))
        return given.to(dtype), *[None] * 7
