"""The operations: their buffers, their calls, what must come out, and the factor from algorithm to bus bandwidth.

Bus factors, for n ranks. An all_reduce must move 2 (n-1)/n of the array into each rank: (n-1)/n of it as contributions
to what the rank sums, and as much again as other ranks' results. Those that end or begin with the whole array leave out
a rank's own part, (n-1)/n. A broadcast, a reduce and a message move all of it: 1. (As in nccl-tests' PERFORMANCE.md.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

import pycomm
from pycomm.backend import find_communicator
from pycomm.bench.ways import PLAIN, Way
from pycomm.errors import InvalidArgument

DTYPES: Final = {
    "float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16,
    "int8": torch.int8, "uint8": torch.uint8, "int32": torch.int32, "int64": torch.int64,
}  # fmt: skip
REDUCTIONS: Final = {
    "sum": dist.ReduceOp.SUM, "prod": dist.ReduceOp.PRODUCT, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX,
}  # fmt: skip
_COMBINE: Final[dict[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "sum": torch.add, "prod": torch.mul, "min": torch.minimum, "max": torch.maximum,
}  # fmt: skip
#: So few different values that even sums and products of many ranks are exact in 16-bit floats.
_PERIOD: Final = 7


@dataclass(frozen=True)
class Case:
    """One operation with all that makes it definite. count: elements of what one rank contributes or gets."""

    operation: str
    count: int
    dtype: str
    op: str
    root: int
    rank: int
    ranks: int

    @property
    def parts(self) -> int:
        """How many such pieces the whole array has."""
        return self.ranks if self.operation in WHOLE else 1

    @property
    def bytes(self) -> int:
        """Of the whole array."""
        return self.count * self.parts * DTYPES[self.dtype].itemsize

    @property
    def reduces(self) -> bool:
        """Whether `op` matters."""
        return self.operation in REDUCING

    @property
    def rooted(self) -> bool:
        """Whether `root` matters."""
        return self.operation in ROOTED


#: Whose size is that of all ranks' pieces together.
WHOLE: Final = ("all_gather", "reduce_scatter", "gather", "scatter", "all_to_all")
REDUCING: Final = ("all_reduce", "reduce", "reduce_scatter")
ROOTED: Final = ("broadcast", "reduce", "gather", "scatter")
OPERATIONS: Final = (
    "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather", "scatter", "all_to_all",
    "send_recv", "barrier",
)  # fmt: skip
#: Which are no operations of torch.distributed: see codecs.py and steps.py.
OTHERS: Final = ("compress", "ddp")
#: That torch.distributed can do with separate input and output, and in place.
OUT_OF_PLACE: Final = (
    "all_gather",
    "reduce_scatter",
    "gather",
    "scatter",
    "all_to_all",
    "send_recv",
    "barrier",
)
IN_PLACE: Final = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")


def bus_factor(operation: str, ranks: int) -> float:
    """From algorithm to bus bandwidth: see above."""
    if operation == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if operation in WHOLE:
        return (ranks - 1) / ranks
    return 0.0 if operation in ("barrier", "ddp") else 1.0


def count_for(operation: str, bytes: int, dtype: str, ranks: int) -> int:
    """Elements of a piece, of an array of so many bytes or a little less."""
    pieces = ranks if operation in WHOLE else 1
    return bytes // (pieces * DTYPES[dtype].itemsize)


# ---- contents


def contribution(case: Case, rank: int, pieces: int) -> Tensor:
    """What a rank puts in: other values at each place, piece and rank, the same in every run."""
    places = torch.arange(case.count * pieces)
    values = (places * 3 + rank * 5 + places // max(case.count, 1)) % _PERIOD
    if case.op == "prod":
        values = values % 2 + 1  # whose products stay exact
    return values.to(DTYPES[case.dtype])


def piece(tensor: Tensor, case: Case, index: int) -> Tensor:
    """One rank's."""
    return tensor[index * case.count : (index + 1) * case.count]


def reduced(case: Case, pieces: int) -> Tensor:
    """Of all ranks' contributions."""
    total = contribution(case, 0, pieces)
    for rank in range(1, case.ranks):
        total = _COMBINE[case.op](total, contribution(case, rank, pieces))
    return total


def expected(case: Case) -> Tensor | None:
    """What this rank has to have in the end; None where it gets nothing."""
    rank, ranks = case.rank, case.ranks
    match case.operation:
        case "all_reduce":
            return reduced(case, 1)
        case "reduce":
            return reduced(case, 1) if rank == case.root else None
        case "reduce_scatter":
            return piece(reduced(case, ranks), case, rank)
        case "broadcast":
            return contribution(case, case.root, 1)
        case "all_gather":
            return torch.cat([contribution(case, other, 1) for other in range(ranks)])
        case "gather":
            parts = [contribution(case, other, 1) for other in range(ranks)]
            return torch.cat(parts) if rank == case.root else None
        case "scatter":
            return piece(contribution(case, case.root, ranks), case, rank)
        case "all_to_all":
            return torch.cat(
                [piece(contribution(case, other, ranks), case, rank) for other in range(ranks)]
            )
        case "send_recv":
            return contribution(case, (rank - 1) % ranks, 1)
        case _:
            return None


# ---- calls


@dataclass
class Call:
    """Prepared: `fill` makes the contents anew, `run` does it once, `result` is where it leaves what it gives.

    `wanted` says what that has to be, within `tolerance`; None: nothing. `finish` comes ahead of the comparison.
    """

    fill: Callable[[], object]
    run: Callable[[], object]
    result: Tensor
    wanted: Callable[[], Tensor | None]
    tolerance: float = 0.0
    finish: Callable[[], object] | None = None


def prepare(
    case: Case, group: dist.ProcessGroup, in_place: bool, offset: int, way: Way = PLAIN
) -> Call:
    """Buffers and the call; they begin `offset` bytes behind an aligned address."""
    own = _own_pieces(case)
    data = contribution(case, case.rank, own)
    op = REDUCTIONS[case.op]
    if in_place:
        return _prepare_in_place(case, group, op, data, offset, way)
    source, target = _buffer(case, own, offset), _buffer(case, _result_pieces(case), offset)
    sources = [piece(source, case, i) for i in range(own)]
    targets = [piece(target, case, i) for i in range(_result_pieces(case))]
    right, left = (case.rank + 1) % case.ranks, (case.rank - 1) % case.ranks
    at_root = case.rank == case.root
    world = {i: dist.get_global_rank(group, i) for i in range(case.ranks)}
    root = world[case.root]

    def exchange() -> None:
        works = [dist.isend(source, world[right], group), dist.irecv(target, world[left], group)]
        for work in works:
            if work is not None:
                work.wait()

    calls: dict[str, Callable[[], Any]] = {
        "all_gather": lambda: dist.all_gather_into_tensor(target, source, group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(target, source, op, group),
        "gather": lambda: dist.gather(source, targets if at_root else None, root, group),
        "scatter": lambda: dist.scatter(target, sources if at_root else None, root, group),
        "all_to_all": lambda: dist.all_to_all_single(target, source, group=group),
        "send_recv": exchange,
        "barrier": lambda: dist.barrier(group),
    }

    def fill() -> None:
        source.copy_(data)
        target.zero_()

    return Call(fill, calls[case.operation], target, lambda: expected(case))


def _prepare_in_place(
    case: Case, group: dist.ProcessGroup, op: Any, data: Tensor, offset: int, way: Way
) -> Call:
    pieces = max(_own_pieces(case), _result_pieces(case))
    whole = _buffer(case, pieces, offset)
    own = whole if pieces == 1 else piece(whole, case, case.rank)
    root = dist.get_global_rank(group, case.root)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": _all_reduce(case, group, whole, way),
        "broadcast": lambda: dist.broadcast(whole, root, group),
        "reduce": lambda: dist.reduce(whole, root, op, group),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, own, group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(own, whole, op, group),
    }

    def fill() -> None:
        whole.zero_()
        (own if case.operation == "all_gather" else whole).copy_(data)

    result = own if case.operation == "reduce_scatter" else whole
    call = Call(fill, calls[case.operation], result, lambda: expected(case))
    # Rounded once as this rank's own, and once as the sum, of all ranks' largest values.
    call.tolerance = 2.01 * way.rounding * (_PERIOD - 1) * case.ranks
    return call


def _all_reduce(
    case: Case, group: dist.ProcessGroup, whole: Tensor, way: Way
) -> Callable[[], object]:
    if way.compression:
        return lambda: pycomm.all_reduce(whole, case.op, group, compression=way.compression)
    if way.algorithm:
        communicator = find_communicator(group)
        if communicator is None:
            raise InvalidArgument(f"{way}: this group is not on pycomm's shared memory")
        return lambda: communicator.all_reduce(whole, case.op, algorithm=way.algorithm)
    op = REDUCTIONS[case.op]
    return lambda: dist.all_reduce(whole, op, group)


def _own_pieces(case: Case) -> int:
    return case.ranks if case.operation in ("reduce_scatter", "scatter", "all_to_all") else 1


def _result_pieces(case: Case) -> int:
    return case.ranks if case.operation in ("all_gather", "gather", "all_to_all") else 1


def _buffer(case: Case, pieces: int, offset: int) -> Tensor:
    item = DTYPES[case.dtype].itemsize
    if offset % item:
        raise InvalidArgument(f"-u {offset} is no multiple of {case.dtype}'s {item} bytes")
    whole = torch.zeros(case.count * pieces + offset // item, dtype=DTYPES[case.dtype])
    return whole[offset // item :]
