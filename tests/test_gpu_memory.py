"""Memory from ncclMemAlloc for torch's pools, and its registration, over the fake NCCL.

A pool itself needs a driver: a stand-in says which segments are its own, and the two functions that torch would call
are called by name.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_nccl import Fake, build
from harness import Refused, attempt, run

import pycomm
from pycomm.extension import c10d, core
from pycomm.gpu_memory import RegisteredPool, failure, register_segments, segments_of

UNHANDLED_CUDA_ERROR = 1


class Pool:
    """What torch's MemPool is to pycomm; its tensors live as long as it does, or until `empty`."""

    def __init__(self, api: Any) -> None:
        core.serve_nccl_pools(api)
        library = ctypes.CDLL(core.__file__)
        allocate, free = (getattr(library, name) for name in core.nccl_pool_functions)
        allocate.restype = ctypes.c_void_p
        allocate.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        self.allocate, self.free = allocate, free
        self.held: dict[int, int] = {}

    def tensor(self, count: int) -> torch.Tensor:
        """Of so many ones, float32, in a segment of its own on device 1."""
        address = self.allocate(4 * count, 1, None)
        assert address is not None
        self.held[address] = 4 * count
        array = (ctypes.c_float * count).from_address(address)
        return torch.frombuffer(array, dtype=torch.float32).fill_(1)

    def empty(self) -> None:
        for address, count in self.held.items():
            self.free(address, count, 1, None)
        self.held.clear()

    def snapshot(self) -> list[dict[str, Any]]:
        return [{"address": address} for address in sorted(self.held)]


def on_gpus(n: int, worker: Any, folder: Path, *args: Any, timeout: float = 8.0) -> list[Any]:
    """The results of worker(fake, communicator, *args) on n ranks."""
    library = build()

    def main(rank: int, world_size: int) -> Any:
        fake = Fake(library, str(folder), rank, world_size)
        return worker(fake, fake.communicator(timeout), *args)

    return run(n, main, init=False)


def register(comm: Any, pool: Any, windows: bool) -> RegisteredPool:
    return register_segments(comm, segments_of(pool), windows)


@pytest.mark.parametrize("end", ["close", "free", "shutdown"])
@pytest.mark.parametrize("windows", [False, True])
def test_a_pool_is_registered_until_whatever_ends_first(
    windows: bool, end: str, tmp_path: Path
) -> None:
    """NCCL refuses to end while memory is registered, so shutdown() says whether that was undone, and once."""

    def worker(fake: Fake, comm: Any) -> Any:
        pool = Pool(fake.api())
        tensors = [pool.tensor(count) for count in (1000, 5000, 3)]
        sizes = [(count, device) for _, count, device in core.nccl_segments()]
        registered = register(comm, pool, windows)
        number = len(registered)
        for t in tensors:
            comm.all_reduce(t)
        fake.synchronize()
        values = [t.unique().tolist() for t in tensors]
        if end == "close":
            registered.close()
            registered.close()
        if end == "free":
            del tensors, t
            pool.empty()
        comm.shutdown()
        registered.close()
        pool.empty()
        return sizes, number, values, core.nccl_segments()

    for sizes, number, values, left in on_gpus(2, worker, tmp_path):
        assert sizes == [(4000, 1), (20000, 1), (12, 1)]
        assert number == 3
        assert values == [[2.0]] * 3
        assert left == []


def test_windows_that_differ(tmp_path: Path) -> None:
    """All ranks are told which sizes there are, nothing stays registered, and the group goes on."""

    def worker(fake: Fake, comm: Any) -> Any:
        pool = Pool(fake.api())
        pool.tensor(100)
        pool.tensor(100 + fake.rank)
        refused = attempt(lambda: register(comm, pool, True))
        t = torch.ones(3)
        comm.all_reduce(t)
        fake.synchronize()
        comm.shutdown()
        return refused, t.tolist()

    for refused, values in on_gpus(3, worker, tmp_path):
        assert isinstance(refused, Refused)
        assert "MismatchError" in refused.kinds
        assert "rank 0: 400 bytes, symmetric, rank 1: 404 bytes, symmetric" in refused.message
        assert values == [3.0] * 3


def test_a_rank_without_its_window(tmp_path: Path) -> None:
    """Those who wait name it."""

    def worker(fake: Fake, comm: Any) -> Any:
        pool = Pool(fake.api())
        pool.tensor(100)
        if fake.rank == 1:
            return fake.store.get("over")
        refused = attempt(lambda: register(comm, pool, True))
        fake.store.set("over", "yes")
        return refused

    refused = on_gpus(2, worker, tmp_path, timeout=1.0)[0]
    assert isinstance(refused, Refused)
    assert "TimeoutError" in refused.kinds
    assert "not there yet: rank 1." in refused.message


def test_memory_that_is_not_nccls(tmp_path: Path) -> None:
    fake = Fake(build(), str(tmp_path), 0, 1)
    pool = Pool(fake.api())
    pool.tensor(100)
    pool.held[4096] = 4096
    with pytest.raises(pycomm.InvalidArgument, match=r"1 of the pool's 2 segments are not from"):
        segments_of(pool)  # type: ignore[arg-type]
    del pool.held[4096]
    pool.empty()


def test_no_memory(tmp_path: Path) -> None:
    """torch is given none, as it wants it, and pycomm keeps NCCL's words."""
    fake = Fake(build(), str(tmp_path), 0, 1)
    pool = Pool(fake.api())
    fake.fault("alloc_error", value=UNHANDLED_CUDA_ERROR)
    assert pool.allocate(1 << 20, 0, None) is None
    fake.calls.fake_clear_faults()
    assert "allocating 1048576 bytes on cuda:0 with ncclMemAlloc" in failure()
    assert "ncclUnhandledCudaError" in failure()
    assert pool.allocate(64, 7, None) is None  # there is no such device
    assert "cudaSetDevice" in failure()


def test_tensors_that_the_communicator_allocates(tmp_path: Path) -> None:
    """allocate_tensor registers nothing, and what is registered of it ends with it."""

    def worker(fake: Fake, comm: Any) -> Any:
        backend = c10d.C10dBackend(comm._address())
        memory = backend.allocate_tensor(1024, dtype=torch.float32, device=torch.device("cpu"))
        (address, count, _), *more = core.nccl_segments()
        kept = comm.register_buffer(address + 64, 128)
        del memory
        comm.shutdown()
        kept.close()
        return count, more, core.nccl_segments()

    assert on_gpus(1, worker, tmp_path) == [(4096, [], [])]


def test_torch_takes_the_functions() -> None:
    """By their names, from the compiled module; and without a GPU a pool is refused in words."""
    if not hasattr(torch._C, "_cuda_customAllocator"):
        pytest.skip("this torch was built without CUDA")
    allocator = torch.cuda.memory.CUDAPluggableAllocator(
        str(core.__file__), *core.nccl_pool_functions
    )
    assert "Allocator" in type(allocator.allocator()).__name__
    if not torch.cuda.is_available():
        with pytest.raises(pycomm.Error, match=r"driver|device"):
            pycomm.gpu_pool()
