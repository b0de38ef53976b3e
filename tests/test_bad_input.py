"""Wrong calls, absent peers and dead ones: every rank raises, in words, and no process dies of it."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from harness import DIED, Refused, attempt, run, td

import pycomm

CPU: Final = torch.device("cpu")
#: What "in time" means for something that should take `seconds`, on a busy machine.
SLACK: Final = 1.5


def backend() -> Any:
    """The c10d backend under the default group."""
    group: Any = dist.group.WORLD
    return group._get_backend(CPU)


def gather_into_one(*args: Any) -> Any:
    """torch's all-gather into one tensor, by the name that this torch has for it."""
    return (getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)(*args)


def scatter_one(*args: Any) -> Any:
    """torch's reduce-scatter of one tensor, by the name that this torch has for it."""
    return (getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor)(*args)


def fresh(label: str, rank: int, n: int, seconds: float = 8) -> Any:
    """A communicator of its own, so that what ends it ends nothing else."""
    store = dist.distributed_c10d._get_default_store()
    return pycomm.create_communicator(dist.PrefixStore(label, store), rank, n, td(seconds))


def timed(step: Callable[[], Any]) -> tuple[Any, float]:
    """What a step returned or how it was refused, and the seconds that it took."""
    began = time.monotonic()
    return attempt(step), time.monotonic() - began


def is_a(result: Any, kind: str) -> bool:
    """Whether a step was refused with an error of this class (or of one derived from it)."""
    return isinstance(result, Refused) and kind in result.kinds


# ---- InvalidArgument ----------------------------------------------------------------------------


def t5(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Five ones."""
    return torch.ones(5).to(dtype)


def wrong_root() -> Any:
    """Broadcast options with a root that is not there."""
    options = dist.BroadcastOptions()
    options.rootRank = 7
    return options


def parts_of_one(*bounds: tuple[int, int]) -> list[torch.Tensor]:
    """Slices of one tensor."""
    whole = torch.ones(20)
    return [whole[begin:end] for begin, end in bounds]


def call_in_parts(call: Callable[..., Any], whole: slice, part: slice, gather: bool) -> Any:
    """A gather or scatter whose two buffers are slices of one tensor."""
    x = torch.ones(20)
    return call(x[whole], x[part]) if gather else call(x[part], x[whole])


AVG, MAX, BAND = dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.BAND
UNKNOWN: Final = torch.float8_e4m3fnuz

#: name: (call of (communicator, rank), words that its message has besides the rank).
WRONG: Final[dict[str, tuple[Callable[[Any, int], Any], tuple[str, ...]]]] = {
    "meta, c10d": (
        lambda c, r: backend().allreduce([torch.empty(5, device="meta")]),
        ("all_reduce", "[5]", "meta", "CPU"),
    ),
    "meta, communicator": (
        lambda c, r: c.all_reduce(torch.empty(5, device="meta")),
        ("all_reduce", "meta"),
    ),
    "sparse, c10d": (  # torch's dispatcher refuses what comes from above
        lambda c, r: backend().broadcast([t5().to_sparse()], dist.BroadcastOptions()),
        ("broadcast", "[5]", "sparse", "to_dense"),
    ),
    "maximum of sparse, dist": (
        lambda c, r: dist.all_reduce(t5().to_sparse(), MAX),
        ("all_reduce", "sparse", "sum and avg, not max"),
    ),
    "sparse, communicator": (lambda c, r: c.all_reduce(t5().to_sparse()), ("all_reduce",)),
    "average of bool, dist": (
        lambda c, r: dist.all_reduce(t5(torch.bool), AVG),
        ("all_reduce(count=5, dtype=bool, op=avg)", "not defined for bool"),
    ),
    "average of bool, communicator": (
        lambda c, r: c.all_reduce(t5(torch.bool), "avg"),
        ("all_reduce(count=5, dtype=bool, op=avg)", "not defined for bool"),
    ),
    "max of complex, c10d": (
        lambda c, r: backend().allreduce([t5(torch.complex64)], MAX),
        ("all_reduce(count=5, dtype=complex64, op=max)", "not defined for complex64"),
    ),
    "product of complex, communicator": (
        lambda c, r: c.all_reduce(t5(torch.complex128), "product"),
        ("all_reduce(count=5, dtype=complex128, op=product)", "not defined for complex128"),
    ),
    "band of float8, communicator": (
        lambda c, r: c.reduce_scatter_single(
            t5(torch.float8_e5m2), torch.ones(10).to(torch.float8_e5m2), "band"
        ),
        ("reduce_scatter(count=5, dtype=float8_e5m2, op=band)", "not defined for float8_e5m2"),
    ),
    "band of float32, dist": (
        lambda c, r: dist.all_reduce(t5(), BAND),
        ("all_reduce(count=5, dtype=float32, op=band)", "not defined for float32"),
    ),
    "unknown dtype, dist": (
        lambda c, r: dist.broadcast(t5(UNKNOWN), 0),
        ("broadcast", "Float8_e4m3fnuz", "not supported"),
    ),
    "unknown dtype, communicator": (
        lambda c, r: c.broadcast(t5(UNKNOWN), 0),
        ("broadcast", "5 elements", "unsupported dtype"),
    ),
    "op with a typo": (
        lambda c, r: c.all_reduce(t5(), "summ"),
        ("all_reduce", "'summ'", "sum, avg, min, max, product"),
    ),
    "op with a typo, reduce_scatter": (
        lambda c, r: c.reduce_scatter_single(t5(), torch.ones(10), "mean"),
        ("reduce_scatter", "'mean'", "sum, avg, min, max, product"),
    ),
    "algorithm with a typo": (
        lambda c, r: c.all_reduce(t5(), algorithm="rings"),
        ("all_reduce", "'rings'", "auto, one_shot, two_shot, ring"),
    ),
    "expanded, dist": (
        lambda c, r: dist.all_reduce(torch.ones(1).expand(5)),
        ("all_reduce", "[5]", "share memory", "contiguous()"),
    ),
    "expanded, communicator": (
        lambda c, r: c.all_reduce(torch.ones(1).expand(5)),
        ("all_reduce", "5 float32 elements", "not contiguous"),
    ),
    "overlapping rows, dist": (
        lambda c, r: dist.broadcast(torch.ones(10).as_strided((4, 3), (1, 1)), 0),
        ("broadcast", "[4, 3]", "share memory"),
    ),
    "column, communicator": (
        lambda c, r: c.all_reduce(torch.ones(5, 2)[:, 0]),
        ("all_reduce", "5 float32 elements", "not contiguous", "x.contiguous()"),
    ),
    "two tensors, c10d": (
        lambda c, r: backend().allreduce([t5(), t5()]),
        ("all_reduce", "one tensor, not 2"),
    ),
    "no tensor": (lambda c, r: c.all_reduce([1, 2]), ("all_reduce", "tensor", "list")),
    "short list, dist": (
        lambda c, r: dist.all_gather([t5()], t5()),
        ("all_gather", "2 ranks", "not 1"),
    ),
    "short list, communicator": (
        lambda c, r: c.all_gather([t5()], t5()),
        ("all_gather(count=5, dtype=float32)", "2 outputs", "one per rank, not 1"),
    ),
    "long list, communicator": (
        lambda c, r: c.all_gather([t5(), t5(), t5()], t5()),
        ("all_gather(count=5, dtype=float32)", "2 outputs", "one per rank, not 3"),
    ),
    "short list, reduce_scatter, dist": (
        lambda c, r: dist.reduce_scatter(t5(), [t5()]),
        ("reduce_scatter", "2 ranks", "not 1"),
    ),
    "short list, reduce_scatter, communicator": (
        lambda c, r: c.reduce_scatter(t5(), [t5()]),
        ("reduce_scatter(count=5", "2 inputs", "one per rank, not 1"),
    ),
    "own part of another size, dist": (
        lambda c, r: dist.all_gather([torch.ones(4), torch.ones(4)], t5()),
        ("all_gather(count=5, dtype=float32)", "own part has 5 elements", "but 4 as output"),
    ),
    "own part of another size, communicator": (
        lambda c, r: c.all_gather([torch.ones(4), torch.ones(4)], t5()),
        ("all_gather(count=5, dtype=float32)", "own part has 5 elements", "but 4 as output"),
    ),
    "list of other dtypes, communicator": (
        lambda c, r: c.all_gather([t5(), t5(torch.float64)], t5()),
        ("all_gather", "dtypes differ: float32 and float64"),
    ),
    "output too small, dist": (
        lambda c, r: gather_into_one(torch.ones(9), t5()),
        ("all_gather", "[9]", "holds 9", "needs 10"),
    ),
    "output too small, communicator": (
        lambda c, r: c.all_gather_single(torch.ones(9), t5()),
        ("all_gather", "9 elements", "need 10"),
    ),
    "input too small, dist": (
        lambda c, r: scatter_one(t5(), torch.ones(9)),
        ("reduce_scatter", "[9]", "holds 9", "needs 10"),
    ),
    "input too small, communicator": (
        lambda c, r: c.reduce_scatter_single(t5(), torch.ones(9)),
        ("reduce_scatter", "9 elements", "need 10"),
    ),
    "input across output, dist": (
        lambda c, r: call_in_parts(gather_into_one, slice(0, 10), slice(2, 7), True),
        ("all_gather(count=5, dtype=float32)", "input and output overlap"),
    ),
    "input in another rank's part, communicator": (
        lambda c, r: call_in_parts(
            c.all_gather_single, slice(0, 10), slice(5 - 5 * r, 10 - 5 * r), True
        ),
        ("all_gather(count=5, dtype=float32)", "input and output overlap"),
    ),
    "output across input, communicator": (
        lambda c, r: call_in_parts(c.reduce_scatter_single, slice(0, 10), slice(3, 8), False),
        ("reduce_scatter(count=5, dtype=float32, op=sum)", "input and output overlap"),
    ),
    "overlapping outputs, communicator": (
        lambda c, r: c.all_gather(parts_of_one((0, 5), (4, 9)), t5()),
        ("all_gather(count=5, dtype=float32)", "outputs of ranks 0 and 1 overlap"),
    ),
    "the same output twice, dist": (
        lambda c, r: dist.all_gather(parts_of_one((0, 5)) * 2, t5()),
        ("all_gather(count=5, dtype=float32)", "outputs of ranks 0 and 1 overlap"),
    ),
    "the same column twice, dist": (
        lambda c, r: dist.all_gather([torch.zeros(10).view(5, 2)[:, 0]] * 2, t5()),
        ("all_gather", "overlap"),
    ),
    "wrong root, c10d": (
        lambda c, r: backend().broadcast([t5()], wrong_root()),
        ("broadcast(count=5, dtype=float32, root=7)", "world size 2"),
    ),
    "wrong root, communicator": (
        lambda c, r: c.broadcast(t5(), 2),
        ("broadcast(count=5, dtype=float32, root=2)", "world size 2"),
    ),
    "negative root, communicator": (
        lambda c, r: c.broadcast(t5(), -1),
        ("broadcast(count=5, dtype=float32, root=-1)", "world size 2"),
    ),
    "negative timeout": (
        lambda c, r: c.all_reduce(t5(), timeout=td(-1)),
        ("all_reduce(count=5", "timeout is negative", "-1000 ms"),
    ),
}


@pytest.fixture(scope="module")
def refusals() -> list[dict[str, Any]]:
    """What became of each wrong call, per rank; then, as "after", a right one's result."""

    def worker(rank: int, n: int) -> dict[str, Any]:
        comm = pycomm.get_communicator()
        found = {}
        for name, (call, _) in WRONG.items():
            outcome = attempt(lambda call=call: call(comm, rank), Exception)  # type: ignore[misc]
            found[name] = outcome if isinstance(outcome, Refused) else "accepted"
        t = torch.full((5,), rank + 1.0)
        dist.all_reduce(t)
        comm.all_reduce(t)
        return found | {"after": t.tolist()}

    return run(2, worker)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls_are_refused_in_words(refusals: list[dict[str, Any]], name: str) -> None:
    """InvalidArgument, also a ValueError, names rank, operation, sizes and what is wrong."""
    for rank, found in enumerate(refusals):
        refusal = found[name]
        assert isinstance(refusal, Refused), refusal
        assert refusal.kinds[:1] == ("InvalidArgument",)
        assert "ValueError" in refusal.kinds
        assert "RuntimeError" in refusal.kinds
        missing = [w for w in (f"rank {rank}", *WRONG[name][1]) if w not in refusal.message]
        assert not missing, refusal.message


def test_wrong_calls_leave_the_communicator_usable(refusals: list[dict[str, Any]]) -> None:
    """A call that is refused before anything was sent costs nothing: the next one is right."""
    assert [found["after"] for found in refusals] == [[6.0] * 5] * 2


@pytest.mark.parametrize("name", ["meta, communicator", "sparse, communicator"])
def test_refusals_are_written_for_users(refusals: list[dict[str, Any]], name: str) -> None:
    """A message names the size and has no C++ stack trace in it."""
    message = refusals[0][name].message
    assert "frame #" not in message
    assert "5" in message


@pytest.mark.parametrize("form", ["all_gather", "reduce_scatter"])
def test_an_empty_list_is_refused(form: str) -> None:
    """A list of no tensors is as wrong as a short one, and nobody dies of it."""

    def worker(rank: int, n: int) -> Any:
        comm = pycomm.get_communicator()
        if form == "all_gather":
            return attempt(lambda: comm.all_gather([], t5()))
        return attempt(lambda: comm.reduce_scatter(t5(), []))

    assert all(is_a(r, "InvalidArgument") for r in run(2, worker))


def test_a_timeout_must_be_positive() -> None:
    """The communicator's limit cannot be set to what would end every wait at once."""

    def worker(rank: int, n: int) -> Any:
        comm = pycomm.get_communicator()
        return attempt(lambda: setattr(comm, "timeout", td(-1)))

    assert all(is_a(r, "InvalidArgument") for r in run(1, worker))


# ---- Unusual tensors that are right -------------------------------------------------------------


def test_different_strides_on_different_ranks() -> None:
    """Logical elements are reduced and sent, also if one rank's matrix is a transposed one."""

    def worker(rank: int, n: int) -> list[bool]:
        right = torch.arange(12.0).reshape(3, 4)
        results = []
        for _ in range(2):
            m = right.clone() if rank == 0 else right.t().contiguous().t()
            assert m.is_contiguous() == (rank == 0)
            dist.all_reduce(m)
            results.append(torch.equal(m, right * n))
        m = right.clone() if rank == 0 else torch.zeros(4, 3).t()
        dist.broadcast(m, 0)
        gathered = [torch.zeros(4, 3).t() for _ in range(n)]
        dist.all_gather(gathered, m)
        return [*results, torch.equal(m, right), all(torch.equal(g, right) for g in gathered)]

    assert run(2, worker) == [[True] * 4] * 2


def test_expanded_inputs_that_are_only_read() -> None:
    """Elements that share memory may be sent; only writing to them has no meaning."""

    def worker(rank: int, n: int) -> list[list[float]]:
        gathered = [torch.zeros(5) for _ in range(n)]
        dist.all_gather(gathered, torch.tensor([rank + 1.0]).expand(5))
        return [g.tolist() for g in gathered]

    assert run(2, worker) == [[[1.0] * 5, [2.0] * 5]] * 2


def conj_of(rank: int) -> torch.Tensor:
    """A lazily conjugated view whose value is 1 + (rank + 1)i."""
    return torch.full((5,), complex(1, -(rank + 1.0)), dtype=torch.complex64).conj()


def test_conjugate_and_negative_views_through_the_backend() -> None:
    """Lazy views travel by value.

    Straight to the backend: torch's wrappers refuse conjugated tensors, and its dispatcher reduces
    a negated tensor's copy.
    """

    def worker(rank: int, n: int) -> list[Any]:
        z, w, x = conj_of(rank), conj_of(rank), torch._neg_view(torch.full((3,), rank + 1.0))
        backend().allreduce([z]).wait()
        if rank == 1:  # a plain tensor receives from a lazy one
            w = torch.zeros(5, dtype=torch.complex64)
        backend().broadcast([w], dist.BroadcastOptions()).wait()
        backend().allreduce([x]).wait()
        return [z.tolist(), w.tolist(), x.tolist()]

    assert run(2, worker) == [[[complex(2, 3)] * 5, [complex(1, 1)] * 5, [-3.0] * 3]] * 2


@pytest.mark.parametrize("view", ["conj", "neg"])
def test_conjugate_and_negative_views_through_a_communicator(view: str) -> None:
    """A lazy view is sent by value or refused, but its memory is not mistaken for its value."""

    def worker(rank: int, n: int) -> Any:
        comm = pycomm.get_communicator()
        x = conj_of(0) if view == "conj" else torch._neg_view(torch.full((5,), 1.0))
        right = x.resolve_conj().resolve_neg()
        out = torch.zeros(5 * n, dtype=x.dtype)
        result = attempt(lambda: comm.all_gather_single(out, x))
        return "refused" if is_a(result, "InvalidArgument") else torch.equal(out[:5], right)

    assert all(result in ("refused", True) for result in run(2, worker))


# ---- MismatchError ------------------------------------------------------------------------------

Call = Callable[[Any], Any]
BIG: Final = 100_000


def ones(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """So many ones."""
    return torch.ones(count, dtype=dtype)


#: name: (call, its name in messages, the odd rank's call, its name).
DIFFERENT: Final[dict[str, tuple[Call, str, Call, str]]] = {
    "counts, small": (
        lambda c: c.all_reduce(ones(5)),
        "all_reduce(count=5, dtype=float32, op=sum)",
        lambda c: c.all_reduce(ones(6)),
        "all_reduce(count=6, dtype=float32, op=sum)",
    ),
    "counts, large": (
        lambda c: c.all_reduce(ones(BIG)),
        f"all_reduce(count={BIG}, dtype=float32, op=sum)",
        lambda c: c.all_reduce(ones(BIG + 1)),
        f"all_reduce(count={BIG + 1}, dtype=float32, op=sum)",
    ),
    "counts, small and large": (
        lambda c: c.all_reduce(ones(5)),
        "all_reduce(count=5, dtype=float32, op=sum)",
        lambda c: c.all_reduce(ones(BIG)),
        f"all_reduce(count={BIG}, dtype=float32, op=sum)",
    ),
    "counts, one is 0": (
        lambda c: c.all_gather_single(ones(0), ones(0)),
        "all_gather(count=0, dtype=float32)",
        lambda c: c.all_gather_single(ones(5 * c.world_size), ones(5)),
        "all_gather(count=5, dtype=float32)",
    ),
    "dtypes, small": (
        lambda c: c.all_reduce(ones(5)),
        "all_reduce(count=5, dtype=float32, op=sum)",
        lambda c: c.all_reduce(ones(5, torch.int32)),
        "all_reduce(count=5, dtype=int32, op=sum)",
    ),
    "dtypes, large": (
        lambda c: c.broadcast(ones(BIG), 0),
        f"broadcast(count={BIG}, dtype=float32, root=0)",
        lambda c: c.broadcast(ones(BIG, torch.int32), 0),
        f"broadcast(count={BIG}, dtype=int32, root=0)",
    ),
    "ops, small": (
        lambda c: c.all_reduce(ones(5)),
        "all_reduce(count=5, dtype=float32, op=sum)",
        lambda c: c.all_reduce(ones(5), "max"),
        "all_reduce(count=5, dtype=float32, op=max)",
    ),
    "ops, large": (
        lambda c: c.reduce_scatter_single(ones(BIG), ones(BIG * c.world_size)),
        f"reduce_scatter(count={BIG}, dtype=float32, op=sum)",
        lambda c: c.reduce_scatter_single(ones(BIG), ones(BIG * c.world_size), "avg"),
        f"reduce_scatter(count={BIG}, dtype=float32, op=avg)",
    ),
    "algorithms": (
        lambda c: c.all_reduce(ones(BIG), algorithm="ring"),
        f"all_reduce(count={BIG}, dtype=float32, op=sum, algorithm=ring)",
        lambda c: c.all_reduce(ones(BIG), algorithm="two_shot"),
        f"all_reduce(count={BIG}, dtype=float32, op=sum, algorithm=two_shot)",
    ),
    "roots": (
        lambda c: c.broadcast(ones(5), 0),
        "broadcast(count=5, dtype=float32, root=0)",
        lambda c: c.broadcast(ones(5), 1),
        "broadcast(count=5, dtype=float32, root=1)",
    ),
    "order, small": (
        lambda c: c.all_reduce(ones(5)),
        "all_reduce(count=5, dtype=float32, op=sum)",
        lambda c: c.broadcast(ones(5), 0),
        "broadcast(count=5, dtype=float32, root=0)",
    ),
    "order, large": (
        lambda c: c.all_gather_single(ones(BIG * c.world_size), ones(BIG)),
        f"all_gather(count={BIG}, dtype=float32)",
        lambda c: c.reduce_scatter_single(ones(BIG), ones(BIG * c.world_size)),
        f"reduce_scatter(count={BIG}, dtype=float32, op=sum)",
    ),
    "order, with a barrier": (
        lambda c: c.barrier(),
        "barrier()",
        lambda c: c.all_reduce(ones(BIG)),
        f"all_reduce(count={BIG}, dtype=float32, op=sum)",
    ),
    "order, in the background": (
        lambda c: c.all_reduce(ones(5), async_op=True).wait(),
        "all_reduce(count=5, dtype=float32, op=sum)",
        lambda c: c.broadcast(ones(BIG), 0, async_op=True).wait(),
        f"broadcast(count={BIG}, dtype=float32, root=0)",
    ),
}


@pytest.mark.parametrize("n", [2, 3])
def test_different_calls_are_noticed_on_every_rank(n: int) -> None:
    """MismatchError on every rank names both calls; later calls raise AbortedError."""

    def worker(rank: int, n: int) -> dict[str, tuple[Any, Any, Any]]:
        found = {}
        for name, (usual, _, odd, _) in DIFFERENT.items():
            for odd_rank in (0, n - 1):
                label = f"{name}, rank {odd_rank} is odd"
                comm = fresh(label, rank, n)
                comm.barrier()
                call = odd if rank == odd_rank else usual
                first = attempt(lambda call=call, comm=comm: call(comm))  # type: ignore[misc]
                later = attempt(lambda comm=comm: comm.barrier())  # type: ignore[misc]
                last = attempt(lambda comm=comm: comm.all_reduce(ones(5)))  # type: ignore[misc]
                found[label] = first, later, last
        return found

    results = run(n, worker, wall=60)
    for rank, found in enumerate(results):
        for label, (first, later, last) in found.items():
            _, one, _, other = DIFFERENT[label.rpartition(", rank")[0]]
            assert is_a(first, "MismatchError"), (rank, label, first)
            assert f"called {one}" in first.message, (rank, label)
            assert f"called {other}" in first.message, (rank, label)
            assert f"rank {rank}" in first.message, (rank, label, first.message)
            assert is_a(later, "AbortedError"), (rank, label, later)
            assert is_a(last, "AbortedError"), (rank, label, last)


@pytest.mark.parametrize("count", [5, BIG])
def test_different_calls_through_dist_and_a_new_group(count: int, tmp_path: Path) -> None:
    """After a MismatchError, destroy_process_group and a new init work in the same process."""

    def worker(rank: int, n: int) -> tuple[Any, Any, float]:
        def init(name: str) -> None:
            method = f"file://{tmp_path}/{name}"
            dist.init_process_group("pycomm", init_method=method, rank=rank, world_size=n)

        init("first")
        t = ones(count)
        first = attempt(lambda: dist.all_reduce(t) if rank else dist.broadcast(t, 0))
        later = attempt(lambda: dist.all_reduce(t))
        dist.destroy_process_group()
        init("second")
        t = ones(count)
        dist.all_reduce(t)
        return first, later, t[-1].item()

    for first, later, total in run(2, worker, init=False):
        assert is_a(first, "MismatchError")
        assert f"rank 0 called broadcast(count={count}, dtype=float32, root=0)" in first.message
        assert f"rank 1 called all_reduce(count={count}, dtype=float32, op=sum)" in first.message
        assert is_a(later, "AbortedError")
        assert total == 2


def test_a_wrong_call_of_one_rank_only_can_be_repaired() -> None:
    """InvalidArgument on one rank sends nothing: its next, right call meets its peers."""

    def worker(rank: int, n: int) -> tuple[Any, float]:
        comm = pycomm.get_communicator()
        refusal = attempt(lambda: comm.all_reduce(ones(5), "summ")) if rank == 1 else None
        t = ones(5)
        comm.all_reduce(t)
        return refusal, t[0].item()

    results = run(2, worker)
    assert results[0] == (None, 2.0)
    assert is_a(results[1][0], "InvalidArgument")
    assert results[1][1] == 2


# ---- TimeoutError -------------------------------------------------------------------------------


def broadcast_within(comm: Any, seconds: float) -> None:
    """A broadcast under the communicator's own limit."""
    comm.timeout = td(seconds)
    comm.broadcast(ones(5), 1)


WAYS: Final[dict[str, Callable[[Any], Any]]] = {
    "per call": lambda c: c.all_reduce(ones(5), timeout=td(0.3)),
    "per call, large": lambda c: c.all_reduce(ones(BIG), timeout=td(0.3)),
    "per call, in the background": lambda c: c.all_reduce(
        ones(BIG), timeout=td(0.3), async_op=True
    ).wait(),
    "per barrier": lambda c: c.barrier(timeout=td(0.3)),
    "of the communicator": lambda c: broadcast_within(c, 0.3),
}


def test_a_rank_that_never_arrives() -> None:
    """TimeoutError, also the builtin, after about the limit, says who is here and who is not.

    The late rank, when it does call, gets the error too; after that all get AbortedError.
    """

    def worker(rank: int, n: int) -> dict[str, tuple[Any, float, Any]]:
        store = dist.distributed_c10d._get_default_store()
        found = {}
        for name, way in WAYS.items():
            comm = fresh(name, rank, n)
            if rank == 1:
                store.wait([f"{name} {peer}" for peer in range(n) if peer != 1], td(10))
            result, took = timed(lambda way=way, comm=comm: way(comm))  # type: ignore[misc]
            store.set(f"{name} {rank}", "over")
            later = attempt(lambda comm=comm: comm.barrier())  # type: ignore[misc]
            found[name] = result, took, later
        return found

    results = run(3, worker, wall=60)
    for name in WAYS:
        operation = {"per barrier": "barrier()", "of the communicator": "broadcast(count=5"}
        for rank in (0, 2):
            result, took, later = results[rank][name]
            assert is_a(result, "TimeoutError"), (name, rank, result)
            assert result.kinds.count("TimeoutError") == 2
            assert 0.25 < took < 0.3 + SLACK, (name, took)
            for words in (f"rank {rank}", operation.get(name, "all_reduce(count="), "not yet: 1"):
                assert words in result.message, (name, rank, words)
            assert "300 ms" in result.message
            assert is_a(later, "AbortedError"), (name, rank, later)
        late, took, later = results[1][name]
        assert is_a(late, "TimeoutError"), (name, late)
        assert "rank 1" in late.message
        assert took < SLACK
        assert is_a(later, "AbortedError")


DIST_WAYS: Final = ("init_process_group", "barrier", "options")


@pytest.mark.parametrize("way", DIST_WAYS)
def test_a_rank_that_never_arrives_at_a_dist_call(way: str) -> None:
    """The limits of init_process_group, of barrier and of a call's options all count."""
    limit = 1.5 if way == "init_process_group" else 0.3

    def call() -> None:
        if way == "barrier":
            dist.barrier(timeout=td(limit))
        elif way == "options":
            options = dist.AllreduceOptions()
            options.timeout = td(limit)
            backend().allreduce([ones(5)], options).wait()
        else:
            dist.all_reduce(ones(5))

    def worker(rank: int, n: int) -> tuple[Any, float]:
        store = dist.distributed_c10d._get_default_store()
        if rank == 1:
            store.wait(["over"], td(10))
            return attempt(lambda: dist.all_reduce(ones(5))), 0
        found = timed(call)
        store.set("over", "")
        return found

    group_timeout = limit if way == "init_process_group" else 8
    (early, took), (late, _) = run(2, worker, group_timeout=group_timeout)
    assert is_a(early, "TimeoutError"), early
    assert f"{limit * 1000:.0f} ms" in early.message
    assert "not yet: 1" in early.message
    assert limit - 0.05 < took < limit + SLACK
    assert is_a(late, "TimeoutError"), late


@pytest.mark.parametrize("limit", [0, 0.0005])
def test_a_tiny_limit_is_not_taken_for_no_limit(limit: float) -> None:
    """A limit below a millisecond ends the wait at once or is refused; it is not the default."""

    def worker(rank: int, n: int) -> Any:
        store = dist.distributed_c10d._get_default_store()
        if rank == 1:
            store.wait(["over"], td(10))
            return None
        comm = pycomm.get_communicator()
        comm.timeout = td(1.5)
        found = attempt(lambda: comm.barrier(timeout=td(limit)))
        store.set("over", "")
        return found

    found = run(2, worker)[0]
    assert is_a(found, "TimeoutError") or is_a(found, "InvalidArgument")
    assert "1500 ms" not in found.message


def test_a_wait_may_have_its_own_limit() -> None:
    """work.wait(timeout) raises TimeoutError, but the operation goes on and can be waited for."""

    def worker(rank: int, n: int) -> tuple[Any, float]:
        store = dist.distributed_c10d._get_default_store()
        t = torch.full((5,), rank + 1.0)
        if rank == 1:
            store.wait(["go"], td(10))
            dist.all_reduce(t)
            return None, t[0].item()
        work: Any = dist.all_reduce(t, async_op=True)
        found = attempt(lambda: work.wait(td(0.1)))
        store.set("go", "")
        work.wait()
        return found, t[0].item()

    (found, a), (_, b) = run(2, worker)
    assert is_a(found, "TimeoutError")
    assert "rank 0" in found.message
    assert "100 ms" in found.message
    assert (a, b) == (3, 3)


def test_rendezvous_without_the_others() -> None:
    """create_communicator names the ranks that did not come, on rank 0 and on another."""

    def worker(rank: int, n: int) -> list[tuple[Any, float]]:
        def create(rank: int) -> Any:
            return pycomm.create_communicator(dist.HashStore(), rank, 3, td(0.3))

        return [timed(lambda: create(0)), timed(lambda: create(1)), timed(lambda: create(3))]

    [(offered, took), (joined, waited), (outside, _)] = run(1, worker, init=False)[0]
    assert is_a(offered, "TimeoutError"), offered
    assert "1" in offered.message
    assert "2" in offered.message
    assert is_a(joined, "TimeoutError"), joined
    assert "rank 1" in joined.message
    assert "rank 0" in joined.message
    assert max(took, waited) < 0.3 + SLACK
    assert is_a(outside, "InvalidArgument")
    assert "rank 3" in outside.message


# ---- PeerDiedError ------------------------------------------------------------------------------

LAST_WORDS: Final[dict[str, Callable[[Any], Any]]] = {
    "before a call": lambda c: None,
    "inside a small call": lambda c: c.all_reduce(ones(5), async_op=True),
    "inside a large call": lambda c: c.all_reduce(ones(4_000_000), async_op=True),
}


def wait_for_end(pid: int) -> None:
    """Return when that process has ended."""
    handle = os.pidfd_open(pid)
    ended, _, _ = select.select([handle], [], [], 10)
    os.close(handle)
    assert ended


def pids_of_all(comm: Any, n: int) -> list[int]:
    """The process of each rank."""
    outs = torch.zeros(n, dtype=torch.int64)
    comm.all_gather_single(outs, torch.tensor([os.getpid()]))
    pids: list[int] = outs.tolist()
    return pids


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("count", [5, 4_000_000])
@pytest.mark.parametrize("when", LAST_WORDS)
def test_a_killed_peer(when: str, count: int, known: bool, tmp_path: Path) -> None:
    """PeerDiedError within 2 s on all survivors names its rank and pid; a new group works.

    `known`: the survivors call only once the peer is dead; otherwise they may already wait.
    """
    if when.startswith("inside"):
        count = 5 if "small" in when else 4_000_000

    def worker(rank: int, n: int) -> tuple[Any, float, int, float]:
        comm = pycomm.get_communicator()
        pid = pids_of_all(comm, n)[1]
        if rank == 1:
            LAST_WORDS[when](comm)
            os.kill(pid, signal.SIGKILL)
        if known or when.startswith("inside"):
            wait_for_end(pid)
        began = time.monotonic()

        def calls() -> None:
            comm.all_reduce(ones(count))
            comm.all_reduce(ones(count))  # all that the peer sent may have arrived: but no more

        found = attempt(calls)
        took = time.monotonic() - began
        dist.destroy_process_group()
        method = f"file://{tmp_path}/again"
        dist.init_process_group("pycomm", init_method=method, rank=rank // 2, world_size=2)
        t = ones(5)
        dist.all_reduce(t)
        return found, took, pid, t[0].item()

    results = run(3, worker, may_die={1})
    assert results[1] is DIED
    for rank in (0, 2):
        found, took, pid, total = results[rank]
        assert is_a(found, "PeerDiedError"), found
        assert took < 2
        words = (f"rank {rank}", "rank 1", f"pid {pid}", "died", f"all_reduce(count={count}")
        missing = [w for w in words if w not in found.message]
        assert not missing, found.message
        assert total == 2


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize(
    "call", ["all_reduce", "broadcast", "all_gather", "barrier", "large", "queued"]
)
def test_a_peer_that_left(n: int, call: str) -> None:
    """One call more than the others, who destroy their group in good order: MismatchError on every rank.

    Those that leave are free of the group all the same.
    """

    def extra(comm: Any) -> Any:
        if call == "barrier":
            return comm.barrier()
        if call == "broadcast":
            return comm.broadcast(ones(5), root=0)
        if call == "all_gather":
            return comm.all_gather([ones(5) for _ in range(comm.world_size)], ones(5))
        if call == "queued":
            return comm.all_reduce(ones(5), async_op=True).wait()
        return comm.all_reduce(ones(300_000 if call == "large" else 5))

    def worker(rank: int, n: int) -> tuple[Any, float, Any]:
        comm, store = fresh("left", rank, n), dist.distributed_c10d._get_default_store()
        comm.all_reduce(ones(3))
        if rank == 0:
            store.set("calls", "one more")
            return *timed(lambda: extra(comm)), None
        store.wait(["calls"])  # those that leave look at the others for a moment only
        found, took = timed(comm.shutdown)
        comm.shutdown()  # again, in peace
        return found, took, attempt(lambda: comm.all_reduce(ones(5), async_op=True))

    (found, took, _), *leavers = run(n, worker)
    name = "all_reduce" if call in ("large", "queued") else call
    assert is_a(found, "MismatchError"), found
    for words in (name, "has destroyed the group", "a call too many", "operation 2"):
        assert words in found.message, found.message
    assert took < 2
    for rank, (left, took, after) in enumerate(leavers, start=1):
        assert is_a(left, "MismatchError"), left
        for words in (f"rank {rank}: destroys", "rank 0", name, "after operation 2"):
            assert words in left.message, left.message
        assert took < 2
        assert is_a(after, "AbortedError"), after


def test_one_that_works_on_while_others_leave() -> None:
    """Leaving earlier than others is no mistake: no error, and no long wait for them."""

    def worker(rank: int, n: int) -> float:
        comm = fresh("early", rank, n)
        comm.all_reduce(ones(3))
        store = dist.distributed_c10d._get_default_store()
        if rank == 0:
            store.wait(["others have left"])
        began = time.monotonic()
        comm.shutdown()
        took = time.monotonic() - began
        if rank == 1:
            store.set("others have left", "")
        return took

    assert max(run(2, worker)) < 0.25 + SLACK


# ---- AbortedError -------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [5, BIG])
def test_abort_from_another_thread_frees_a_waiter(count: int) -> None:
    """abort() ends the wait in which this rank's main thread is, and all ranks' later calls."""

    def worker(rank: int, n: int) -> tuple[Any, Any, float]:
        comm = pycomm.get_communicator()
        store = dist.distributed_c10d._get_default_store()
        comm.barrier()
        if rank == 1:
            store.wait(["over"], td(10))
            found = attempt(lambda: comm.all_reduce(ones(count)))
            return found, attempt(comm.barrier), 0
        before = comm.sequence

        def abort() -> None:
            while comm.sequence == before:  # until the main thread is in its call
                time.sleep(0)
            comm.abort("enough of it")

        thread = threading.Thread(target=abort)
        thread.start()
        found, took = timed(lambda: comm.all_reduce(ones(count)))
        thread.join()
        store.set("over", "")
        return found, attempt(comm.barrier), took

    for rank, (found, later, took) in enumerate(run(2, worker)):
        assert is_a(found, "AbortedError"), found
        assert f"rank {rank}" in found.message
        assert "rank 0 aborted: enough of it" in found.message
        assert took < SLACK
        assert is_a(later, "AbortedError")


def test_abort_of_the_process_group_frees_background_work() -> None:
    """The backend's abort() ends an operation that nobody else has entered; its future says so."""

    def worker(rank: int, n: int) -> list[Any]:
        store = dist.distributed_c10d._get_default_store()
        if rank == 1:
            store.wait(["over"], td(10))
            return [attempt(lambda: dist.all_reduce(ones(5)))]
        work: Any = dist.all_reduce(ones(BIG), async_op=True)
        future = work.get_future()
        backend().abort()
        found = [attempt(work.wait), attempt(future.wait)]
        store.set("over", "")
        return found

    outcomes = [found for of_rank in run(2, worker) for found in of_rank]
    assert len(outcomes) == 3
    assert all(is_a(found, "AbortedError") for found in outcomes), outcomes


def test_get_communicator_of_another_backend() -> None:
    """A group on Gloo has no communicator: InvalidArgument says so."""

    def worker(rank: int, n: int) -> Any:
        return attempt(pycomm.get_communicator)

    found = run(1, worker, backend="gloo")[0]
    assert is_a(found, "InvalidArgument")
    assert "gloo" in found.message
