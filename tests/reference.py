"""Inputs of collectives, and what must come out: computed by torch in the process that compares.

Numbers are small integers, so that sums and products are exact and results must be equal to the last bit; they repeat
every PERIOD elements, a prime, so that an element that went to a wrong place is noticed. What is only moved are random
bytes.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final

import torch
import torch.distributed as dist
from harness import G

from pycomm.extension import core

#: Four slots of a page, and nothing that goes around them: for tests of chunks.
TINY_SLOTS: Final = {
    "PYCOMM_SLOT_BYTES": "4096",
    "PYCOMM_SLOTS": "4",
    "PYCOMM_SINGLE_COPY": "never",
}
PERIOD: Final = 1009
WORLDS: Final = (1, 2, 3, 4, 8)
ALGORITHMS: Final = ("auto", "one_shot", "two_shot", "ring")

INTS: Final = (
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
)
FLOATS: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FLOAT8S: Final = (torch.float8_e4m3fn, torch.float8_e5m2)
REALS: Final = INTS + FLOATS
COMPLEX: Final = (torch.complex64, torch.complex128)
DTYPES: Final = (*REALS, *COMPLEX, torch.bool, *FLOAT8S)

#: What each dtype can be reduced with, as the extension declares it.
OPS_OF: Final[dict[torch.dtype, list[str]]] = {
    getattr(torch, name): ops for name, ops in core.support_table().items()
}
#: Of premul_sum, one for each rank: few products with them are exact.
FACTORS: Final = (0.1, -1.7, 3.3, 1e-3, 0.7, -0.3, 2.1, 1 / 3)


def reduce_op(op: str, rank: int) -> Any:
    """torch's reduce op of that name, with this rank's factor if it takes one."""
    if op == "premul_sum":
        make: Any = dist._make_nccl_premul_sum
        return make(FACTORS[rank])
    return getattr(dist.ReduceOp, op.upper())


def factor(op: str, rank: int) -> dict[str, Any]:
    """The keyword that a Communicator's reduction with this op needs."""
    return {"factor": FACTORS[rank]} if op == "premul_sum" else {}


def all_gather_single(*args: Any, **kwargs: Any) -> Any:
    """torch's all-gather into one tensor, by the name that this torch has for it."""
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    return getattr(dist, name)(*args, **kwargs)


def reduce_scatter_single(*args: Any, **kwargs: Any) -> Any:
    """torch's reduce-scatter of one tensor, by the name that this torch has for it."""
    new = hasattr(dist, "reduce_scatter_single")
    return getattr(dist, "reduce_scatter_single" if new else "reduce_scatter_tensor")(
        *args, **kwargs
    )


# Numbers


def wide(dtype: torch.dtype) -> torch.dtype:
    """What a reference is computed in."""
    if dtype in INTS or dtype is torch.bool:
        return torch.int64
    return dtype if dtype in (torch.float64, *COMPLEX) else torch.float32


def pattern(rank: int, op: str, dtype: torch.dtype) -> torch.Tensor:
    """One period of a rank's input, in the wide type: integers whose sum over 8 ranks fits all dtypes."""
    i = torch.arange(PERIOD)
    if dtype is torch.bool:  # every combination of four neighbouring ranks, and all alike often
        return (i >> (rank % 4)) & 1
    if op in ("band", "bor", "bxor"):
        return (i * 7 + rank * 4) * 13 % 128
    values = torch.where((i + rank) % 3 == 0, 2, 1) if op == "product" else (i * 7 + rank * 4) % 15
    if dtype.is_signed:
        values = torch.where((i + 2 * rank) % 5 == 0, -values, values)
    if dtype.is_complex:
        return torch.complex(values.double(), values.flip(0).double()).to(dtype)
    return values.to(wide(dtype)).to(dtype).to(wide(dtype))


def scaled(values: torch.Tensor, by: float) -> torch.Tensor:
    """A product with a real number, which is taken in the type of the values."""
    if values.is_complex():
        return torch.view_as_complex(torch.view_as_real(values) * by)
    return values * by


def expected(n: int, op: str, dtype: torch.dtype) -> torch.Tensor:
    """One period of the result: in rank order, in the wide type, rounded once."""
    steps: Any = {
        "product": torch.mul,
        "min": torch.minimum,
        "max": torch.maximum,
        "band": torch.bitwise_and,
        "bor": torch.bitwise_or,
        "bxor": torch.bitwise_xor,
    }
    ranks = [pattern(rank, op, dtype) for rank in range(n)]
    if op == "premul_sum":
        ranks = [scaled(values, FACTORS[rank]) for rank, values in enumerate(ranks)]
    total = ranks[0].clone()
    for other in ranks[1:]:
        total = steps.get(op, torch.add)(total, other)
    if op == "avg":  # by parts: torch divides a complex number by n + 0i, which rounds otherwise
        parts = torch.view_as_real(total) if dtype.is_complex else total
        parts.div_(n, rounding_mode="trunc" if dtype in INTS else None)
    return total.to(dtype)


def spread(period: torch.Tensor, count: int) -> torch.Tensor:
    """`count` elements that repeat `period`."""
    wrapped = period.view(torch.uint8) if period.dtype in FLOAT8S else period
    return wrapped.repeat(count // PERIOD + 1)[:count].clone().view(period.dtype)


# Bytes


def edges(dtype: torch.dtype, share: int = 1) -> tuple[int, ...]:
    """Counts at which `share` parts just travel beside the header, and just do not."""
    limit = core.eager_bytes // dtype.itemsize // share
    return limit - 1, limit, limit + 1


def past_a_slot(dtype: torch.dtype) -> int:
    """A count of more than a slot of 128 KiB."""
    return 262_144 // dtype.itemsize + 5


def noise(ranks: int) -> list[torch.Tensor]:
    """Random bytes, other ones for each rank."""
    return [
        torch.randint(0, 256, (262_144 + 4096,), dtype=torch.uint8, generator=G(rank))
        for rank in range(ranks)
    ]


def payload(bank: torch.Tensor, count: int, dtype: torch.dtype, to: int = 0) -> torch.Tensor:
    """Random bits of any dtype, other ones for each receiver: they must arrive as they were."""
    begin = to * 7 * 16
    raw = bank[begin : begin + count * dtype.itemsize]
    return (raw & 1 if dtype is torch.bool else raw.clone()).view(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits."""
    alike = a.dtype == b.dtype and a.shape == b.shape
    return alike and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def digest(t: torch.Tensor) -> str:
    """The bits of a tensor in short, to compare them between ranks."""
    return hashlib.sha256(t.view(torch.uint8).numpy().tobytes()).hexdigest()


def finished(work: Any) -> None:
    """Wait for what a call with async_op=True returned, which must be something."""
    assert work is not None
    work.wait()
