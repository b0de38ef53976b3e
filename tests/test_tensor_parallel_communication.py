"""What parallel layers send, against theory; and that it travels while they compute, by the flight recorder."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run, td
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import pycomm
from pycomm import tensor_parallel as tp
from pycomm.tensor_parallel.group import Group

# ---- how much -------------------------------------------------------------------------------------------------------

Counts = dict[str, tuple[int, int]]  # by kind: operations, and bytes of this rank's tensors


def sent(action: Callable[[], Any]) -> Counts:
    """What a call makes the default group do."""
    before = pycomm.stats()["kinds"]
    action()
    found = {}
    for kind, now in pycomm.stats()["kinds"].items():
        then = before.get(kind, {"operations": 0, "bytes": 0})
        if now["operations"] > then["operations"]:
            operations = now["operations"] - then["operations"]
            found[kind] = (operations, now["bytes"] - then["bytes"])
    return found


def travelled(counts: Counts, n: int) -> float:
    """Bytes that each rank must send at least; gathers and reduce_scatters are counted by one rank's part."""
    factors = {"all_reduce": 2 * (n - 1) / n, "all_gather": n - 1, "reduce_scatter": n - 1}
    return sum(factors[kind] * bytes for kind, (_, bytes) in counts.items())


class Both:
    """Forward and backward of a module, one after the other."""

    def __init__(self, module: nn.Module, x: torch.Tensor) -> None:
        self.module, self.x = module, x

    def forward(self) -> None:
        """To a number."""
        self.y = self.module(self.x).sum()

    def counts(self) -> tuple[Counts, Counts]:
        """Of each."""
        return sent(self.forward), sent(self.y_backward)

    def y_backward(self) -> None:
        """From it."""
        self.y.backward()


def pair(bias: bool = False, **options: Any) -> nn.Sequential:
    """A column and a row parallel layer."""
    return nn.Sequential(
        tp.ColumnParallelLinear(16, 32, gather_output=False, **options),
        tp.RowParallelLinear(32, 16, bias=bias, input_is_parallel=True, **options),
    )


TOKENS, VOLUME = 24, 24 * 16 * 4


@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_pair_of_linear_layers(n: int) -> None:
    """One sum forward and one backward, or as many bytes in sequence parallel; an input without gradient needs none."""

    def worker(rank: int, n: int) -> None:
        x = torch.ones(TOKENS, 16, requires_grad=True)
        once = {"all_reduce": (1, VOLUME)}
        assert Both(pair(), x).counts() == (once, once)
        assert Both(pair(bias=True), x).counts() == (once, once)
        assert Both(pair(), x.detach()).counts() == (once, {})
        assert Both(pair(overlap=True), x).counts() == (once, once)
        chunks = {"all_reduce": (3, VOLUME)}
        assert Both(pair(overlap_chunks=3), x).counts() == (chunks, once)
        part = torch.ones(TOKENS // n, 16, requires_grad=True)
        for parts in (1, 2):
            both = {"all_gather": (parts, VOLUME // n), "reduce_scatter": (parts, VOLUME // n)}
            sequence = pair(sequence_parallel=True, overlap_chunks=parts)
            assert Both(sequence, part).counts() == (both, both)
            assert travelled(both, n) == travelled(once, n)

    run(n, worker)


class Gpt(nn.Module):
    """An embedding, a block and logits that stay split."""

    def __init__(self) -> None:
        super().__init__()
        self.words = tp.VocabParallelEmbedding(10, 16)
        self.qkv = tp.ColumnParallelLinear(16, 48, gather_output=False, parts=[16] * 3, unit=4)
        self.out = tp.RowParallelLinear(16, 16, input_is_parallel=True, unit=4)
        self.mlp, self.head = pair(), tp.ColumnParallelLinear(16, 10, gather_output=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The loss of the ids as their own labels."""
        x = self.words(ids)
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, 4)).permute(1, 2, 0, 3)
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1)
        x = x + self.out(mixed)
        loss: torch.Tensor = tp.vocab_parallel_cross_entropy(self.head(x + self.mlp(x)), ids)
        return loss


def test_a_whole_model() -> None:
    """Embedding 1 forward; attention, perceptron 1 each way; logits 1 backward; the loss three numbers a label."""

    def worker(rank: int, n: int) -> None:
        forward, backward = Both(Gpt(), torch.arange(TOKENS) % 10).counts()
        assert forward == {
            "all_reduce": (3 + 2, 3 * VOLUME + 3 * TOKENS * 4),
            "all_gather": (1, 40),
        }
        assert backward == {"all_reduce": (3, 3 * VOLUME)}

    run(4, worker)


# ---- when -----------------------------------------------------------------------------------------------------------


class Products(TorchDispatchMode):
    """Watches matrix products; within some of them a collective of this rank must come to its end.

    ``within[p]`` is a collective, counted from 0, for which the other ranks are let in only when product ``p`` has
    begun. The product does not end before the flight recorder has the collective's end. If the layer waited for the
    collective before the product, no rank would go on, and the test would end by a timeout.
    """

    def __init__(self, within: dict[int, int], shows: bool) -> None:
        super().__init__()
        self.within, self.shows = within, shows
        self.store: Any = dist.distributed_c10d._get_default_store()
        self.communicator = pycomm.get_communicator()
        self.before = len(self.communicator.records(dist.get_rank()))
        self.products = self.collectives = 0
        self.seen: dict[
            int, tuple[str, str]
        ] = {}  # collectives' states as their products begin and end

    def record(self, number: int) -> dict[str, Any]:
        """Of the flight recorder; AssertionError if the collective has not been called."""
        records = self.communicator.records(dist.get_rank())[self.before :]
        assert len(records) > number, f"only {len(records)} collectives have been called"
        return records[number]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        number = None
        if str(func.overloadpacket) in ("aten.mm", "aten.addmm"):
            number = self.within.get(self.products) if self.shows else None
            self.products += 1
        if number is None:
            return func(*args, **(kwargs or {}))
        record = self.record(number)
        assert record["met_ns"] is None, "all ranks are there before the product has begun"
        self.store.set(f"let in {number}", "")
        result = func(*args, **(kwargs or {}))
        self.until_done(number)
        self.seen[number] = record["state"], self.record(number)["state"]
        return result

    def until_done(self, number: int) -> None:
        """Returns when the recorder has the collective's end, or after a while."""
        deadline = time.monotonic() + 6
        while self.record(number)["state"] != "completed" and time.monotonic() < deadline:
            pass

    def enter_collective(self) -> None:
        """Called before each; ranks that do not show wait until they are let in."""
        number = self.collectives
        self.collectives += 1
        if not self.shows and number in self.within.values():
            self.store.wait([f"let in {number}"], td(6))


@dataclass(frozen=True)
class Case:
    """A layer, which part of its work is watched, and which collective runs within which product."""

    make: Callable[[], nn.Module]
    shape: Callable[[int], tuple[int, ...]]
    backward: bool
    within: Callable[
        [int], dict[int, int]
    ]  # by the number of ranks: each multiplies every rank's part of a chunk


def column(**options: Any) -> nn.Module:
    return tp.ColumnParallelLinear(64, 96, gather_output=False, **options)


def row(**options: Any) -> nn.Module:
    return tp.RowParallelLinear(96, 64, bias=False, input_is_parallel=True, **options)


SEQUENCE: dict[str, Any] = {"sequence_parallel": True, "overlap_chunks": 3}
CASES = {
    # Product 0 is the input's gradient; its sum travels within product 1, the weight's.
    "column, backward": Case(
        lambda: column(overlap=True), lambda n: (192, 64), True, lambda n: {1: 0}
    ),
    # While a chunk is multiplied the next one is gathered.
    "column of a sequence, forward": Case(
        lambda: column(**SEQUENCE), lambda n: (192 // n, 64), False, lambda n: {0: 1, n: 2}
    ),
    # While a chunk is multiplied the one before is summed; the last one while the weight's gradient is computed.
    "column of a sequence, backward": Case(
        lambda: column(**SEQUENCE), lambda n: (192 // n, 64), True, lambda n: {n: 0, 2 * n: 1, 3 * n: 2}
    ),
    "row, forward": Case(
        lambda: row(overlap_chunks=3), lambda n: (192, 96 // n), False, lambda n: {1: 0, 2: 1}
    ),
    "row of a sequence, forward": Case(
        lambda: row(**SEQUENCE), lambda n: (192, 96 // n), False, lambda n: {n: 0, 2 * n: 1}
    ),
    "row of a sequence, backward": Case(
        lambda: row(**SEQUENCE), lambda n: (192, 96 // n), True, lambda n: {0: 1, n: 2}
    ),
}  # fmt: skip


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_communication_runs_within_products(name: str, n: int) -> None:
    """By the recorder's states: called before a product, all ranks meet and the data arrive while it is computed."""

    def worker(rank: int, n: int) -> None:
        case = CASES[name]
        for shows in range(n):
            torch.manual_seed(0)
            layer, x = case.make(), torch.ones(case.shape(n), requires_grad=True)
            y = layer(x) if case.backward else None
            dist.barrier()
            products = Products(case.within(n), rank == shows)
            with pytest.MonkeyPatch.context() as patch:
                for kind in ("all_reduce", "all_gather", "reduce_scatter"):
                    watch(patch, kind, products)
                with products:
                    if y is None:
                        layer(x)
                    else:
                        y.sum().backward()
            if rank == shows:
                assert sorted(products.seen) == sorted(case.within(n).values())
                for begin, end in products.seen.values():
                    assert begin in ("scheduled", "started")
                    assert end == "completed"
            dist.barrier()
            for number in case.within(n).values():
                products.store.delete_key(f"let in {number}")
            dist.barrier()

    run(n, worker, group_timeout=8, wall=60)


def watch(patch: pytest.MonkeyPatch, kind: str, products: Products) -> None:
    """Tells of a layer's collectives before they are called."""
    plain = getattr(Group, kind)

    def told(*args: Any, **kwargs: Any) -> Any:
        products.enter_collective()
        return plain(*args, **kwargs)

    patch.setattr(Group, kind, told)
