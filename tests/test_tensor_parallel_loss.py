"""Cross entropy of split logits against torch's of whole ones; labels out of range raise on every rank."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from harness import G, attempt, near, refused, run
from torch.nn import functional
from whole_modules import randn

import pycomm
from pycomm.errors import InvalidArgument, MismatchError
from pycomm.tensor_parallel import vocab_parallel_cross_entropy
from pycomm.tensor_parallel.layout import split_counts

IGNORED = -100


def part_of(logits: torch.Tensor, rank: int, n: int) -> torch.Tensor:
    """This rank's part of the vocabulary."""
    return logits.split(split_counts(logits.shape[-1], n), -1)[rank]


def reference(
    logits: torch.Tensor, labels: torch.Tensor, z_loss: float, **options: Any
) -> torch.Tensor:
    """torch's."""
    flat = logits.flatten(0, -2)
    loss = functional.cross_entropy(flat, labels.flatten(), reduction="none", **options)
    counted = labels.flatten() != options.get("ignore_index", IGNORED)
    return loss + z_loss * torch.where(counted, flat.logsumexp(-1) ** 2, 0.0)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_against_torch(n: int) -> None:
    """Loss and gradient: smoothing, ignored labels, z-loss, reductions, large logits, vocabularies of any size."""

    def worker(rank: int, n: int) -> None:
        for words in (8, 11, 3):
            for shape in ((5,), (2, 3)):
                labels = torch.randint(0, words, shape, generator=G(3))
                labels.view(-1)[1] = IGNORED
                for smoothing in (0.0, 0.1):
                    for z_loss in (0.0, 0.01):
                        whole = (randn(1, *shape, words) * 50).requires_grad_()
                        own = part_of(whole.detach(), rank, n).clone().requires_grad_()
                        wanted = reference(whole, labels, z_loss, label_smoothing=smoothing)
                        options: Any = {"label_smoothing": smoothing, "z_loss": z_loss}
                        each = vocab_parallel_cross_entropy(
                            own, labels, reduction="none", **options
                        )
                        assert near(each, wanted.view(shape), 1e-9)
                        total = vocab_parallel_cross_entropy(
                            own, labels, reduction="sum", **options
                        )
                        assert near(total, wanted.sum(), 1e-9)
                        mean = vocab_parallel_cross_entropy(own, labels, **options)
                        (wanted.sum() / (labels.numel() - 1)).backward()
                        mean.backward()
                        assert whole.grad is not None
                        assert own.grad is not None
                        assert near(own.grad, part_of(whole.grad, rank, n), 1e-9)

    run(n, worker)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype) -> None:
    """Computed in float32, whatever the logits are."""

    def worker(rank: int, n: int) -> None:
        labels = torch.randint(0, 9, (4,), generator=G(3))
        logits = randn(1, 4, 9, dtype=dtype)
        own = part_of(logits, rank, n).clone().requires_grad_()
        loss = vocab_parallel_cross_entropy(own, labels)
        assert loss.dtype == torch.float32
        assert near(loss, functional.cross_entropy(logits.float(), labels), 1e-5)
        loss.backward()
        assert own.grad is not None
        assert own.grad.dtype == dtype

    run(2, worker)


def test_labels_out_of_range() -> None:
    """Raise on every rank, whichever has them; also where a smaller ignore_index is another one's label."""

    def worker(rank: int, n: int) -> Any:
        logits = torch.zeros(3, 4)
        for bad in (8, 9, -1, 1000):
            labels = torch.tensor([0, bad, 7])
            words = attempt(
                functools.partial(vocab_parallel_cross_entropy, logits, labels), InvalidArgument
            )
            assert refused([words], f"rank {rank}", "0 to 7", str(bad))
        only_there = torch.tensor([0, 9 if rank == 1 else 1, 7])
        words = attempt(lambda: vocab_parallel_cross_entropy(logits, only_there), InvalidArgument)
        assert refused([words], "on rank 1", "0 to 9")
        differ = torch.tensor([0, rank, 7])
        words = attempt(lambda: vocab_parallel_cross_entropy(logits, differ), MismatchError)
        assert refused([words], "labels on rank 1")
        shape = attempt(lambda: vocab_parallel_cross_entropy(logits, labels[:2]), InvalidArgument)
        assert refused([shape], "(3, 4)", "(2,)")
        return float(vocab_parallel_cross_entropy(logits, torch.tensor([0, 1, 7])))

    assert run(2, worker) == [pytest.approx(torch.tensor(8.0).log().item())] * 2


def test_logits_never_travel() -> None:
    """Three numbers per label at most, however large the vocabulary is."""

    def worker(rank: int, n: int) -> None:
        labels = torch.arange(16)
        logits = torch.zeros(16, 1000, requires_grad=True)
        before = pycomm.stats()["bytes"]
        loss = vocab_parallel_cross_entropy(logits, labels, label_smoothing=0.1)
        forward = pycomm.stats()["bytes"] - before
        assert forward <= 16 * 4 * 4 + 40 * n
        loss.backward()
        assert pycomm.stats()["bytes"] == before + forward

    run(2, worker)


def test_all_ignored_and_twice() -> None:
    """A mean of none is NaN as torch's; a second derivative is refused."""

    def worker(rank: int, n: int) -> Any:
        logits = torch.zeros(2, 4, requires_grad=True)
        none = torch.full((2,), IGNORED)
        assert vocab_parallel_cross_entropy(logits, none).isnan()
        assert vocab_parallel_cross_entropy(logits, none, reduction="sum") == 0
        loss = vocab_parallel_cross_entropy(logits, torch.tensor([1, 5]))
        return attempt(lambda: torch.autograd.grad(loss, logits, create_graph=True), pycomm.Error)

    assert refused(run(2, worker), "cannot be differentiated twice")
