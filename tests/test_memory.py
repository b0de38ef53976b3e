"""Shared tensors and windows: collectives that work in place, allocation, one-sided access."""

from __future__ import annotations

import gc
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from harness import run

import pycomm

#: Below and above the eager limit of 16 KiB, not divisible by the ranks, and more than a slot.
COUNTS: Final = (5, 4097, 100_003, 1 << 20)
#: The names that this torch has for the forms with one tensor.
GATHER: Final = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
SCATTER: Final = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

windows = pytest.mark.skipif(
    not hasattr(dist.ProcessGroup, "new_window"), reason="this torch has no windows"
)


def world() -> Any:
    """The default group."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def filled(count: int, rank: int, dtype: torch.dtype, shared: bool) -> torch.Tensor:
    """Integers that every dtype holds and whose sum over 4 ranks does not overflow."""
    tensor = pycomm.empty(count, dtype=dtype, shared=shared)
    return tensor.copy_(torch.arange(count) % 13 + rank)


def check_in_place(r: int, n: int, count: int, dtype: torch.dtype) -> None:
    """Every operation on shared tensors equals the same one on private tensors, bit by bit."""
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.AVG):
        shared, private = filled(count, r, dtype, True), filled(count, r, dtype, False)
        dist.all_reduce(shared, op)
        dist.all_reduce(private, op)
        assert torch.equal(shared, private)
    for root in range(n):
        shared, private = filled(count, r, dtype, True), filled(count, r, dtype, False)
        dist.reduce(shared, root)
        dist.reduce(private, root)
        assert torch.equal(shared, private), "also that other ranks' tensors stay as they are"
        dist.broadcast(shared, root)
        dist.broadcast(private, root)
        assert torch.equal(shared, private)
        source = filled(count, r, dtype, True)
        parts = [torch.empty(count, dtype=dtype) for _ in range(n)] if r == root else None
        dist.gather(source, parts, root)
        for rank, part in enumerate(parts or ()):
            assert torch.equal(part, filled(count, rank, dtype, False))
    whole = torch.empty(n * count, dtype=dtype)
    GATHER(whole, filled(count, r, dtype, True))
    assert torch.equal(whole, torch.cat([filled(count, k, dtype, False) for k in range(n)]))
    output = torch.empty(count, dtype=dtype)
    SCATTER(output, filled(n * count, r, dtype, True))
    ranks = [filled(n * count, k, torch.float64, False) for k in range(n)]
    expected = torch.stack(ranks).sum(0)
    assert torch.equal(output, expected[r * count : (r + 1) * count].to(dtype))


def in_place(r: int, n: int) -> None:
    for count in COUNTS:
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.complex64):
            if dtype.is_complex:
                shared = pycomm.empty(count, dtype=dtype, shared=True).fill_(complex(r, 1))
                dist.all_reduce(shared)
                assert (shared == complex(sum(range(n)), n)).all()
            else:
                check_in_place(r, n, count, dtype)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_collectives_on_shared_tensors(n: int) -> None:
    run(n, in_place)


def mixed(r: int, n: int) -> None:
    """One rank's private tensor among shared ones, views, and a shared tensor of another group."""
    tensor = filled(100_003, r, torch.float32, shared=r != 0)
    dist.all_reduce(tensor)
    expected = torch.arange(100_003) % 13 * n + sum(range(n))
    assert torch.equal(tensor, expected.float())

    base = pycomm.empty(3, 50_001, shared=True).fill_(-1.0)
    base[1] = r + 1.0
    dist.all_reduce(base[1])
    assert (base[1] == n * (n + 1) / 2).all()
    assert (base[0] == -1).all()
    assert (base[2] == -1).all()

    other: Any = dist.new_group(list(range(n)), backend="pycomm")
    guest = pycomm.empty(50_001, shared=True).fill_(r + 1.0)
    dist.all_reduce(guest, group=other)
    assert (guest == n * (n + 1) / 2).all()
    own = pycomm.empty(50_001, shared=True, group=other).fill_(r + 1.0)
    dist.destroy_process_group(other)
    assert (own == r + 1.0).all(), "memory outlives its group"


def test_shared_private_and_foreign_tensors_mix() -> None:
    run(3, mixed)


def allocation(r: int, n: int) -> None:
    """Shapes and dtypes as torch.empty; freed memory is used again; a full heap says so."""
    assert pycomm.empty(2, 3, shared=True).shape == (2, 3)
    assert pycomm.empty((2, 3), shared=True, dtype=torch.int8).dtype == torch.int8
    assert pycomm.empty(0, shared=True).numel() == 0
    assert pycomm.empty((), shared=True).shape == ()
    assert pycomm.empty(5).shape == (5,)
    first = pycomm.empty(1 << 20, shared=True)
    where = first.data_ptr()
    del first
    gc.collect()
    assert pycomm.empty(1 << 20, shared=True).data_ptr() == where
    pieces = [pycomm.empty(1000 * k + 1, shared=True).fill_(k) for k in range(50)]
    del pieces[::2]
    gc.collect()
    pieces += [pycomm.empty(777 * k + 1, shared=True).fill_(-k) for k in range(50)]
    assert [int(p[-1]) for p in pieces] == [*range(1, 50, 2), *(-k for k in range(50))]
    with pytest.raises(pycomm.Error, match="PYCOMM_HEAP_BYTES"):
        pycomm.empty(1 << 34, dtype=torch.int8, shared=True)
    storage = (
        world()
        ._get_backend(torch.device("cpu"))
        .allocate_tensor(7, dtype=torch.float64, device=torch.device("cpu"))
    )
    assert storage.shape == (7,)
    assert storage.dtype == torch.float64


def test_allocation() -> None:
    run(2, allocation, env={"PYCOMM_HEAP_BYTES": str(64 << 20)})


def test_shared_memory_needs_a_group() -> None:
    with pytest.raises(pycomm.InvalidArgument, match="init_process_group"):
        pycomm.empty(3, shared=True)


def new_window(tensor: torch.Tensor | None = None) -> Any:
    """torch's window of the default group."""
    return world().new_window(tensor)


def one_sided(r: int, n: int) -> None:
    """Puts around a ring, announced by signals, also asynchronous ones."""
    tensor = pycomm.empty(10, shared=True).fill_(r)
    window = new_window(tensor)
    right, left = (r + 1) % n, (r - 1) % n
    for turn in range(50):
        value = float(100 * turn + r)
        window.put(torch.full((3,), value), right, 2, False).wait()
        window.signal(right, False).wait()
        window.wait_signal(left, False).wait()
        assert tensor[2:5].tolist() == [100.0 * turn + left] * 3
        window.signal(left, True).wait()  # the slot may be written again
        window.wait_signal(right, True).wait()
    assert tensor[:2].tolist() == [r, r]
    assert tensor[5:].tolist() == [r] * 5
    assert window.map_remote_tensor(left)[0] == left
    assert window.get_attr(left).access_type.name == "UNIFIED"
    dist.barrier()
    window.map_remote_tensor(right)[9] = -1.0 - r
    dist.barrier()
    assert tensor[9] == -1.0 - left
    window.tensor_deregister()
    again = pycomm.empty(n, dtype=torch.int64, shared=True)
    window.tensor_register(again, True)
    for peer in range(n):
        window.put(torch.tensor([r]), peer, r, True).wait()
    dist.barrier()
    assert again.tolist() == list(range(n))
    window.tensor_deregister()


@windows
@pytest.mark.parametrize("n", [1, 2, 3])
def test_windows(n: int) -> None:
    run(n, one_sided)


def wrong_windows(r: int, n: int) -> None:
    """What is refused, on all ranks, and that the group works afterwards."""
    with pytest.raises(pycomm.InvalidArgument, match="rank 0's tensor is not"):
        new_window(torch.ones(3) if r == 0 else pycomm.empty(3, shared=True))
    with pytest.raises(pycomm.InvalidArgument, match="another dtype"):
        new_window(pycomm.empty(3, dtype=(torch.int32, torch.int64)[r % 2], shared=True))
    window = new_window()
    with pytest.raises(pycomm.InvalidArgument, match="no tensor is registered"):
        window.signal(0, False)
    window.tensor_register(pycomm.empty(3 + r, shared=True), True)
    with pytest.raises(pycomm.InvalidArgument, match="registered already"):
        window.tensor_register(pycomm.empty(3, shared=True), True)
    with pytest.raises(pycomm.InvalidArgument, match=r"do not fit into rank 0's window of 3"):
        window.put(torch.ones(2), 0, 2, False)
    with pytest.raises(pycomm.InvalidArgument, match="offset -1"):
        window.put(torch.ones(2), 0, -1, False)
    with pytest.raises(pycomm.InvalidArgument, match="dtype"):
        window.put(torch.ones(1, dtype=torch.int8), 0, 0, False)
    with pytest.raises(pycomm.InvalidArgument, match="not in a world"):
        window.wait_signal(n, False)
    ones = torch.ones(3)
    dist.all_reduce(ones)
    assert ones.tolist() == [n] * 3


@windows
def test_wrong_windows() -> None:
    run(2, wrong_windows)


def unanswered(r: int, n: int) -> None:
    """A signal that does not come ends the wait."""
    window = new_window(pycomm.empty(3, shared=True))
    if r == 0:
        with pytest.raises(pycomm.TimeoutError, match="waiting for a signal of rank 1"):
            window.wait_signal(1, False)
    store = dist.distributed_c10d._get_default_store()
    store.set("done", "yes") if r == 0 else store.wait(["done"])


@windows
def test_a_signal_that_does_not_come() -> None:
    run(2, unanswered, group_timeout=1)
