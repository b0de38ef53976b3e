"""Products with a split weight, and the communication that belongs to them, overlapped with computing.

Shoeybi et al., 2019: the sum of input gradients travels while the weight's gradient is computed. Korthikanti et al.,
2022: in sequence parallel an all_gather before and a reduce_scatter behind take the place of the sums. Here these are
cut into chunks, so that one travels while another is multiplied (as Wang et al., "Overlap communication with dependent
computation via decomposition in large deep learning models", 2023).

Gradients that are to be differentiated again are computed by the regions, without overlap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import Function
from torch.nn import functional

from pycomm.tensor_parallel import regions
from pycomm.tensor_parallel.group import DONE, Group, Waitable
from pycomm.tensor_parallel.layout import split_counts


@dataclass(frozen=True)
class Way:
    """How a product communicates."""

    ranks: Group
    overlap: bool  # the input gradient's sum with the weight gradient
    chunks: int = 1
    dim: int = -2  # of the sequence
    counts: tuple[int, ...] | None = (
        None  # of the sequence's elements on each rank; None: not sequence parallel
    )
    regather: bool = False  # whether backward gathers the input again, in place of keeping it


# ---- without gradients ----------------------------------------------------------------------------------------------


def first(x: torch.Tensor, way: Way) -> torch.Tensor:
    """With the sequence first, in memory too: there every rank's elements, and every chunk's, lie together."""
    return x.movedim(way.dim, 0).contiguous()


def back(x: torch.Tensor, way: Way) -> torch.Tensor:
    """A view with the sequence where it belongs."""
    return x.movedim(0, way.dim)


def gather_matmul(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, way: Way
) -> tuple[torch.Tensor, torch.Tensor]:
    """Collective: ``linear`` of the gathered sequence, and the gathered sequence; with the sequence first, as ``x``."""
    assert way.counts is not None
    whole = x.new_empty(sum(way.counts), *x.shape[1:])
    chunks = _chunks(way)
    own = x.split([chunk[way.ranks.rank][1] for chunk in chunks])

    def start(index: int) -> Waitable:
        parts = [whole.narrow(0, begin, count) for begin, count in chunks[index]]
        return way.ranks.all_gather(parts, own[index], async_op=way.chunks > 1)

    pending = start(0)
    if way.chunks == 1:
        return functional.linear(whole, weight, bias), whole
    product = x.new_empty(*whole.shape[:-1], weight.shape[0])
    for index, chunk in enumerate(chunks):
        following = start(index + 1) if index + 1 < len(chunks) else DONE
        pending.wait()
        for begin, count in chunk:
            _multiply(whole, weight, product, begin, count)
        pending = following
    return product if bias is None else product.add_(bias), whole


def matmul_scatter(
    x: torch.Tensor, weight: torch.Tensor, way: Way
) -> tuple[torch.Tensor, list[Waitable]]:
    """Collective: this rank's part of the sum of the ranks' products with ``weight.t()``, after the waits.

    With the sequence first, as ``x``.
    """
    assert way.counts is not None
    product = (
        functional.linear(x, weight)
        if way.chunks == 1
        else x.new_empty(*x.shape[:-1], weight.shape[0])
    )
    part = product.new_empty(way.counts[way.ranks.rank], *product.shape[1:])
    chunks = _chunks(way)
    outputs = part.split([chunk[way.ranks.rank][1] for chunk in chunks])
    pending = []
    for chunk, output in zip(chunks, outputs, strict=True):
        for begin, count in chunk if way.chunks > 1 else ():
            _multiply(x, weight, product, begin, count)
        parts = [product.narrow(0, begin, count) for begin, count in chunk]
        overlap = way.overlap or way.chunks > 1
        pending.append(way.ranks.reduce_scatter(output, parts, async_op=overlap))
    return part, pending


def _wait(pending: list[Waitable]) -> None:
    for one in pending:
        one.wait()


def matmul_reduce(x: torch.Tensor, weight: torch.Tensor, way: Way) -> torch.Tensor:
    """Collective: the sum of the ranks' products with ``weight.t()``."""
    if way.chunks == 1:
        product = functional.linear(x, weight).contiguous()
        way.ranks.all_reduce(product).wait()
        return product
    rows = _rows(x)
    product = rows.new_empty(len(rows), weight.shape[0])
    pending, begin = [], 0
    for count in split_counts(len(rows), way.chunks):
        _multiply(rows, weight, product, begin, count)
        pending.append(way.ranks.all_reduce(product.narrow(0, begin, count), async_op=True))
        begin += count
    _wait(pending)
    return product.view(*x.shape[:-1], weight.shape[0])


def _chunks(way: Way) -> list[list[tuple[int, int]]]:
    """Of each chunk, begin and count of every rank's elements of the sequence."""
    assert way.counts is not None
    chunks: list[list[tuple[int, int]]] = [[] for _ in range(way.chunks)]
    begin = 0
    for of_rank in way.counts:
        for chunk, count in zip(chunks, split_counts(of_rank, way.chunks), strict=True):
            chunk.append((begin, count))
            begin += count
    return chunks


def _multiply(
    x: torch.Tensor, weight: torch.Tensor, product: torch.Tensor, begin: int, count: int
) -> None:
    """Some rows of the first dimension."""
    rows = _rows(x.narrow(0, begin, count))
    torch.mm(rows, weight.t(), out=_rows(product.narrow(0, begin, count)))


def _rows(x: torch.Tensor) -> torch.Tensor:
    """As a matrix; also of nothing, which has no width of its own."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _weight_gradient(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return _rows(grad).t() @ _rows(x)


def _bias_gradient(grad: torch.Tensor) -> torch.Tensor:
    return _rows(grad).sum(0)


# ---- with gradients -------------------------------------------------------------------------------------------------


class _Column(Function):
    """The same input on all ranks, outputs of its own on each."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, way: Way) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.way = way
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x, weight), way = ctx.saved_tensors, ctx.way
        needs = ctx.needs_input_grad
        dx, pending = None, DONE
        if needs[0] and torch.is_grad_enabled():
            dx = regions.reduce(grad @ weight, way.ranks)
        elif needs[0]:
            dx = (grad @ weight).contiguous()
            pending = way.ranks.all_reduce(dx, async_op=way.overlap)
        dw = _weight_gradient(grad, x) if needs[1] else None
        db = _bias_gradient(grad) if needs[2] else None
        pending.wait()
        return dx, dw, db, None


class _ColumnOfSequence(Function):
    """This rank's part of the sequence comes in, all of it goes out."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, way: Way) -> torch.Tensor:
        y, whole = gather_matmul(first(x, way), weight, bias, way)
        ctx.save_for_backward(x if way.regather else whole, weight)
        ctx.way = way
        return back(y, way)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x, weight), way, needs = ctx.saved_tensors, ctx.way, ctx.needs_input_grad
        again = torch.is_grad_enabled()
        if again and not way.regather and needs[1]:
            raise RuntimeError(
                "a sequence parallel layer can be differentiated twice only with regather=True"
            )
        grad = first(grad, way)
        dx = dw = None
        pending: list[Waitable] = []
        if needs[0] and again:
            dx = regions.reduce_scatter(back(grad @ weight, way), way.ranks, way.dim, way.counts)
        elif needs[0]:
            part, pending = matmul_scatter(grad, weight.t(), way)
            dx = back(part, way)
        if needs[1]:
            if way.regather:
                x = first(regions.all_gather(x, way.ranks, way.dim, way.counts), way)
            dw = _weight_gradient(grad, x)
        db = _bias_gradient(grad) if needs[2] else None
        _wait(pending)
        return dx, dw, db, None


class _Row(Function):
    """A part of the input's width on each rank, the sum goes out."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, way: Way) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.way = way
        y = matmul_reduce(x, weight, way)
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x, weight), needs = ctx.saved_tensors, ctx.needs_input_grad
        db = _bias_gradient(grad) if needs[2] else None
        if torch.is_grad_enabled():
            grad = regions.copy(grad, ctx.way.ranks)
        dx = grad @ weight if needs[0] else None
        dw = _weight_gradient(grad, x) if needs[1] else None
        return dx, dw, db, None


class _RowOfSequence(Function):
    """A part of the input's width on each rank, this rank's part of the sequence goes out."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, way: Way) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.way = way
        part, pending = matmul_scatter(first(x, way), weight, way)
        _wait(pending)
        return back(part if bias is None else part.add_(bias), way)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x, weight), way, needs = ctx.saved_tensors, ctx.way, ctx.needs_input_grad
        db = _bias_gradient(grad) if needs[2] else None
        dx = None
        if torch.is_grad_enabled():
            whole = first(regions.all_gather(grad, way.ranks, way.dim, way.counts), way)
            dx = whole @ weight
        elif needs[0]:
            dx, whole = gather_matmul(first(grad, way), weight.t(), None, way)
        else:
            whole = first(regions.gathered(grad, way.ranks, way.dim, way.counts), way)
        dw = _weight_gradient(whole, first(x, way)) if needs[1] else None
        return None if dx is None else back(dx, way), dw, db, None


@torch.compiler.disable(reason=regions.REASON)
def column(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, way: Way
) -> torch.Tensor:
    """``linear(x, weight, bias)`` with this rank's rows of the weight."""
    kind = _Column if way.counts is None else _ColumnOfSequence
    return kind.apply(x, weight, bias, way)


@torch.compiler.disable(reason=regions.REASON)
def row(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, way: Way) -> torch.Tensor:
    """The sum over ranks of ``linear(x, weight)`` with this rank's columns of the weight, and once the bias.

    In sequence parallel the bias's gradient is of this rank's part of the sequence.
    """
    kind = _Row if way.counts is None else _RowOfSequence
    return kind.apply(x, weight, bias, way)
