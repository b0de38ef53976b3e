"""One torch rank: gloo, pycomm, pycomm's communicator, torch's fake backend and the memory bound."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import bound
import torch
import torch.distributed as dist
from cases import ROOT, Array, Buffers, Case
from names import BOUND, COMMUNICATOR, FLOOR, GLOO, PYCOMM, SHARED
from rank_loop import Call, Unsupported, serve

import pycomm

FLAG_PROBES = 5
FLOOR_BYTES = 64  # the dispatch floor is measured up to this size


def as_tensor(array: Array, dtype: str) -> torch.Tensor:
    """The same memory."""
    return torch.from_numpy(array).view(getattr(torch, dtype))


@dataclass(frozen=True)
class Side:
    """What one rank calls with: its place, and the case's buffers as tensors."""

    rank: int
    world_size: int
    source: torch.Tensor
    target: torch.Tensor

    def parts(self, tensor: torch.Tensor) -> list[torch.Tensor] | None:
        """The root's list for gather and scatter."""
        return list(tensor.chunk(self.world_size)) if self.rank == ROOT else None


def dispatched(op: str, side: Side, group: dist.ProcessGroup) -> Call:
    """torch.distributed's call, at the least cost that Python allows."""
    source, target = side.source, side.target
    match op:
        case "all_reduce":
            return partial(dist.all_reduce, target, group=group)
        case "broadcast":
            return partial(dist.broadcast, target, ROOT, group=group)
        case "all_gather":
            return partial(dist.all_gather_single, target, source, group=group)
        case "reduce_scatter":
            return partial(dist.reduce_scatter_single, target, source, group=group)
        case "reduce":
            return partial(dist.reduce, target, ROOT, group=group)
        case "gather":
            return partial(dist.gather, source, side.parts(target), ROOT, group=group)
        case "scatter":
            return partial(dist.scatter, target, side.parts(source), ROOT, group=group)
        case "all_to_all":
            return partial(dist.all_to_all_single, target, source, group=group)
        case "send_recv":
            return ping_pong(partial(dist.send, group=group), partial(dist.recv, group=group), side)
        case "barrier":
            return partial(dist.barrier, group=group)
    raise ValueError(f"unknown operation {op!r}")


DIRECT_METHODS = {  # of pycomm.Communicator
    "all_gather": "all_gather_single",
    "reduce_scatter": "reduce_scatter_single",
    "gather": "gather_single",
    "scatter": "scatter_single",
    "all_to_all": "all_to_all_single",
    "send_recv": "send",
}


def direct(op: str, side: Side, communicator: Any) -> Call | Unsupported:
    """The communicator's own call."""
    name = DIRECT_METHODS.get(op, op)
    method = getattr(communicator, name, None)
    if method is None:
        return Unsupported(f"pycomm.Communicator has no {name} yet")
    source, target, at_root = side.source, side.target, side.rank == ROOT
    match op:
        case "all_reduce":
            return partial(method, target)
        case "broadcast" | "reduce":
            return partial(method, target, ROOT)
        case "gather":
            return partial(method, target if at_root else None, source, ROOT)
        case "scatter":
            return partial(method, target, source if at_root else None, ROOT)
        case "send_recv":
            return ping_pong(method, communicator.recv, side)
        case "barrier":
            return partial(method)
    return partial(method, target, source)


def ping_pong(send: Callable[..., object], receive: Callable[..., object], side: Side) -> Call:
    """There and back between ranks 0 and 1; the others do nothing."""
    source, target = side.source, side.target

    def first() -> None:
        send(source, 1)
        receive(target, 1)

    def second() -> None:
        receive(target, 0)
        send(source, 0)

    return (first, second, lambda: None)[min(side.rank, 2)]


SHARED_OPS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "reduce")
SHARED_BYTES = 256 << 10  # smaller ones travel with their headers, wherever they lie


class SharedCall:
    """A call on tensors that all ranks share; the first one takes from and gives to the case's own."""

    def __init__(self, op: str, side: Side, communicator: Any, group: dist.ProcessGroup) -> None:
        self.private = side
        source, target = (
            pycomm.empty(it.numel(), dtype=it.dtype, shared=True, group=group)
            for it in (side.source, side.target)
        )
        self.shared = Side(side.rank, side.world_size, source, target)
        call = direct(op, self.shared, communicator)
        assert not isinstance(call, Unsupported)
        self.call = call
        self.is_first = True

    def __call__(self) -> None:
        if not self.is_first:
            self.call()
            return
        self.is_first = False
        self.shared.source.copy_(self.private.source)
        self.shared.target.copy_(self.private.target)
        self.call()
        self.private.target.copy_(self.shared.target)
        dist.barrier()  # sums of zeros stay zeros, but not while others still read
        self.shared.source.zero_()
        self.shared.target.zero_()
        dist.barrier()


class TorchEngine:
    """All variants that live in a torch process."""

    def __init__(self, groups: dict[str, dist.ProcessGroup], variants: list[str]) -> None:
        self.groups, self.variants = groups, variants
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.communicator = pycomm.get_communicator(groups[PYCOMM])

    def make_calls(self, case: Case, buffers: Buffers) -> dict[str, Call | Unsupported]:
        source, target = (as_tensor(it, case.dtype) for it in (buffers.input, buffers.output))
        side = Side(self.rank, self.world_size, source, target)
        calls: dict[str, Call | Unsupported] = {}
        for name in self.variants:
            if name == BOUND:
                if case.size_bytes >= bound.MIN_BYTES:
                    calls[name] = bound.make_call(case)
            elif name == SHARED:
                if case.op in SHARED_OPS and case.size_bytes >= SHARED_BYTES:
                    group = self.groups[PYCOMM]
                    calls[name] = SharedCall(case.op, side, self.communicator, group)
            elif name == COMMUNICATOR:
                calls[name] = direct(case.op, side, self.communicator)
            elif name != FLOOR or case.size_bytes <= FLOOR_BYTES:
                calls[name] = dispatched(case.op, side, self.groups[name])
        return calls

    def checks_results(self, variant: str) -> bool:
        return variant not in (FLOOR, BOUND)

    def barrier(self) -> None:
        dist.barrier()

    def flag_latency_ns(self) -> float:
        """The best of a few probes, as one that was preempted says nothing; 0 without a peer."""
        if self.world_size == 1:
            return 0.0
        return min(self.communicator.flag_latency_ns() for _ in range(FLAG_PROBES))


def new_group(backend: str) -> dist.ProcessGroup:
    group = dist.new_group(backend=backend)
    assert isinstance(group, dist.ProcessGroup)
    return group


def open_groups(rank: int, world_size: int, store: str) -> dict[str, dist.ProcessGroup]:
    """Gloo's is the default group; the fake backend is not public, and left out where missing."""
    dist.init_process_group(
        GLOO,
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(minutes=5),
    )
    assert dist.group.WORLD is not None
    groups = {GLOO: dist.group.WORLD, PYCOMM: new_group(PYCOMM)}
    try:
        import torch.testing._internal.distributed.fake_pg  # noqa: F401
    except ImportError:
        return groups
    return {**groups, FLOOR: new_group("fake")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("socket", help="of the driver")
    parser.add_argument("store", help="file for the rendezvous")
    parser.add_argument("rank", type=int)
    parser.add_argument("world_size", type=int)
    parser.add_argument("--bound", action="store_true", help="measure the memory bound too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    groups = open_groups(args.rank, args.world_size, args.store)
    floor = [FLOOR] * (FLOOR in groups)
    variants = [GLOO, PYCOMM, COMMUNICATOR, SHARED, *floor, *[BOUND] * args.bound]
    serve(TorchEngine(groups, variants), args.socket)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
