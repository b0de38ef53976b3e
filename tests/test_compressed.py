"""all_reduce of encoded values: every codec and algorithm, against what the codec kernels and float64 say."""

from __future__ import annotations

import functools
from typing import Any, Final

import pytest
import torch
from harness import G, attempt, run

from pycomm.errors import MismatchError
from pycomm.extension import core

CODECS: Final = [
    ("fp32", 0),
    ("fp16", 0),
    ("fp16", 1024),
    ("bf16", 0),
    ("fp8_e4m3", 256),
    ("fp8_e5m2", 64),
    ("int8", 256),
]
#: Half the distance of neighbours at 1, or for int8 of a block's largest.
PRECISION: Final = {
    "fp32": 2**-24,
    "fp16": 2**-11,
    "bf16": 2**-8,
    "fp8_e4m3": 2**-4,
    "fp8_e5m2": 2**-3,
    "int8": 1 / 254,
}
ALGORITHMS: Final = ("auto", "one_shot", "two_shot", "ring")
COUNTS: Final = (0, 1, 3, 17, 64, 1000, 4097, 16384, 70_001, 300_003)


def communicator() -> Any:
    """The default group's."""
    from pycomm.backend import get_communicator

    return get_communicator()


def integers(count: int, rank: int) -> torch.Tensor:
    """Small ones, of which any sum of a few ranks is exact in fp16 and bf16."""
    return torch.randint(-8, 9, (count,), generator=G(31 * rank + count)).float()


def gradients(count: int, rank: int) -> torch.Tensor:
    """Of many magnitudes."""
    values = torch.randn(count, generator=G(rank + 5)) * 10.0 ** torch.randint(
        -4, 3, (count,), generator=G(rank + 6)
    )
    return values.float()


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_exact_values(n: int) -> None:
    """What every format holds is summed exactly, whatever the algorithm, count and residual; nothing stays behind."""

    def worker(rank: int, n: int) -> None:
        for name, block in CODECS[:4]:
            codec = core.Codec(name, block)
            for algorithm in ALGORITHMS:
                for count in COUNTS:
                    value, residual = integers(count, rank), torch.zeros(count)
                    communicator().compressed_all_reduce(
                        [value], codec, residual=residual, algorithm=algorithm
                    )
                    expected = sum((integers(count, r) for r in range(n)), torch.zeros(count))
                    assert torch.equal(value, expected), (name, algorithm, count)
                    assert not residual.any()

    run(n, worker, wall=60)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("stochastic", [False, True])
def test_conservation_and_equal_bits(n: int, stochastic: bool) -> None:
    """Decoded values and all residuals add up to what came in; all ranks get the same bits; errors are bounded."""

    def worker(rank: int, n: int) -> None:
        for name, block in CODECS:
            codec = core.Codec(name, block)
            for algorithm, roundings in (("one_shot", 1), ("two_shot", 2), ("ring", n)):
                for count in (17, 4097, 70_001):
                    value, residual = gradients(count, rank), gradients(count, rank + 50) * 2**-9
                    counts = core.CodecCounts()
                    own = value * torch.tensor(1 / n) + residual
                    communicator().compressed_all_reduce(
                        [value], codec, factor=1 / n, residual=residual, algorithm=algorithm, counts=counts,
                        stochastic=stochastic, seed=rank,
                    )  # fmt: skip
                    largest = own.abs()
                    if block:  # the distance of neighbours follows the block's largest
                        padded = torch.zeros(codec.scales(count) * block)
                        padded[:count] = largest
                        largest = padded.view(-1, block).amax(1).repeat_interleave(block)[:count]
                    parts = torch.stack([own, residual, own.abs(), largest]).double()
                    communicator().all_reduce(parts)
                    came, kept, magnitude, limit = parts
                    what = (name, block, algorithm, count)
                    assert ((value + kept - came).abs() <= 1e-6 * (n + 1) * limit).all(), what
                    bound = (2 if stochastic else 1) * 1.02 * roundings * PRECISION[name] * limit
                    if block or name in (
                        "fp32",
                        "bf16",
                    ):  # the others also vanish, or are saturated
                        assert ((value - came).abs() <= bound + 1e-6 * magnitude).all(), what
                    assert counts.values == count
                    everyone = torch.empty(n * count)
                    communicator().all_gather_single(everyone, value)
                    assert (everyone.view(n, count) == value).all(), what

    run(n, worker, wall=100)


def test_two_shot_by_the_kernels() -> None:
    """Bit by bit: contributions are encoded but for that of the rank that sums, sums once."""

    def worker(rank: int, n: int) -> None:
        count = 3 * 256
        codec = core.Codec("int8", 256)
        value = gradients(count, rank)
        communicator().compressed_all_reduce([value], codec, factor=0.3, algorithm="two_shot")
        for shard in range(n):
            part = slice(256 * shard, 256 * shard + 256)
            wires = []
            for r in range(n):
                wire = (torch.empty(256, dtype=torch.uint8), torch.empty(1))
                core.transcode(
                    codec, 256, inputs=[gradients(count, r)[part]], factor=0.3, encoded=wire
                )
                wires.append(wire)
            others = [wire for r, wire in enumerate(wires) if r != shard]
            expected, result = (
                torch.empty(256),
                (torch.empty(256, dtype=torch.uint8), torch.empty(1)),
            )
            core.transcode(codec, 256, wires=others, inputs=[gradients(count, shard)[part]], own=shard, factor=0.3,
                           encoded=result, outputs=[expected])  # fmt: skip
            assert torch.equal(value[part], expected)

    run(3, worker)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_lists_of_several_dtypes(algorithm: str) -> None:
    """In one call: what float32 copies of them would get, rounded to each tensor's own dtype."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float32, torch.bfloat16)

    def worker(rank: int, n: int) -> None:
        for name, block in CODECS:
            for lengths in ((0, 5, 0, 1, 3), (1, 70, 900, 64, 30_000), (0, 0, 0, 0, 0)):
                parts = gradients(sum(lengths), rank).split(list(lengths))
                tensors = [part.to(dtype) for part, dtype in zip(parts, dtypes, strict=True)]
                whole = torch.cat([tensor.float() for tensor in tensors])
                kept, residual = torch.zeros(len(whole)), torch.zeros(len(whole))
                codec = core.Codec(name, block)
                how: dict[str, Any] = {"factor": 0.5, "algorithm": algorithm}
                communicator().compressed_all_reduce([whole], codec, residual=kept, **how)
                communicator().compressed_all_reduce(tensors, codec, residual=residual, **how)
                for tensor, expected in zip(tensors, whole.split(list(lengths)), strict=True):
                    assert torch.equal(tensor, expected.to(tensor.dtype))
                assert torch.equal(residual, kept)

    run(3, worker)


def test_ranks_must_agree_on_the_dtypes() -> None:
    """Of every value: MismatchError on all ranks, which tells the lists; how they are divided does not matter."""

    def worker(rank: int, n: int) -> list[Any]:
        import torch.distributed as dist

        import pycomm

        def call(name: str, lists: list[list[torch.Tensor]]) -> Any:
            store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
            comm = pycomm.create_communicator(store, rank, n)
            tensors = [tensor.clone() for tensor in lists[rank]]
            return attempt(lambda: comm.compressed_all_reduce(tensors, core.Codec("fp16")))

        x = torch.ones(3)
        same = call("same", [[x, x, x.half()], [torch.ones(6), x[:0].bfloat16(), x.half()]])
        order = call("order", [[x, x.half(), x.bfloat16()], [x, x.bfloat16(), x.half()]])
        length = call("length", [[x[:2], torch.ones(4).half()], [x, x.half()]])
        mixed = call("mixed", [[x, x], [x, x.half()]])
        first = call("first", [[x, x.half()], [x.half(), x.half()]])
        assert same is None, same
        return [order, length, mixed, first]

    for found in run(2, worker):
        assert all(MismatchError.__name__ in error.kinds for error in found), found
        order, length, mixed, first = (error.message for error in found)
        assert "dtype=3 float32, 3 float16, 3 bfloat16" in order
        assert "dtype=3 float32, 3 bfloat16, 3 float16" in order
        assert "dtype=2 float32, 4 float16" in length
        assert "dtype=float32" in mixed
        assert "dtype=3 float32, 3 float16" in mixed
        assert "dtype=float16" in first


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_lists(dtype: torch.dtype) -> None:
    """Tensors of many lengths, differently cut on each rank, are one; shapes do not matter."""

    def worker(rank: int, n: int) -> None:
        lengths = [(0, 3, 50_000, 7, 1), (50_000, 11), (50_011,)][rank]
        for name, block in CODECS:
            whole = gradients(50_011, rank).to(dtype)
            tensors = [part.clone() for part in whole.split(list(lengths))]
            assert len(tensors) == len(lengths)
            if tensors[0].numel() == 50_000:
                tensors[0] = tensors[0].view(100, 500)
            single = whole.clone()
            communicator().compressed_all_reduce([single], core.Codec(name, block), factor=0.5)
            communicator().compressed_all_reduce(tensors, core.Codec(name, block), factor=0.5)
            assert torch.equal(torch.cat([t.flatten() for t in tensors]), single)

    run(3, worker)


def test_division_is_that_of_the_average() -> None:
    """Of an fp32 wire: the bits of all_reduce(avg), at any world size and algorithm."""

    def worker(rank: int, n: int) -> None:
        for count in (17, 70_001):
            plain = gradients(count, rank)
            communicator().all_reduce(plain, "avg")
            for algorithm in ALGORITHMS:
                value = gradients(count, rank)
                communicator().compressed_all_reduce(
                    [value], core.Codec("fp32"), divisor=n, algorithm=algorithm
                )
                assert torch.equal(value, plain)

    run(3, worker)


def test_weights() -> None:
    """Each rank's own factor; one of zero contributes nothing, not even its size."""

    def worker(rank: int, n: int) -> None:
        value = torch.full((1000,), 4.0 * (rank + 1))
        communicator().compressed_all_reduce(
            [value], core.Codec("fp16", 64), factor=[0.25, 0.0, 0.75][rank]
        )
        assert torch.equal(value, torch.full((1000,), 10.0))

    run(3, worker)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_error_feedback_keeps_what_rounding_takes(algorithm: str) -> None:
    """A constant far below a format's neighbours arrives on average, and only with a residual."""

    def worker(rank: int, n: int) -> tuple[float, float]:
        def mean(residual: torch.Tensor | None) -> float:
            total = 0.0
            for _ in range(64):
                value = torch.full((5000,), 0.05)
                value[::64] = 100.0  # in every block
                communicator().compressed_all_reduce([value], core.Codec("int8", 64), factor=0.5, residual=residual,
                                                     algorithm=algorithm)  # fmt: skip
                total += float(value[1::64].mean())
            return total / 64

        return mean(torch.zeros(5000)), mean(None)

    for with_feedback, without in run(2, worker):
        assert abs(with_feedback - 0.05) < 0.8 / 64  # at most two neighbours' distance is missing
        assert without == 0


def test_an_infinite_batch_is_heard_by_all_and_forgotten() -> None:
    """It reaches all ranks; the step after it is right again (CMP-01)."""

    def worker(rank: int, n: int) -> None:
        for name, block in CODECS:
            residual = torch.zeros(300)
            for bad in (torch.inf, torch.nan):
                value = torch.ones(300)
                if rank == 1:
                    value[7] = bad
                communicator().compressed_all_reduce(
                    [value], core.Codec(name, block), factor=0.25, residual=residual
                )
                assert not value.isfinite().all()
                assert residual.isfinite().all()
                value = torch.full((300,), 2.0)
                communicator().compressed_all_reduce(
                    [value], core.Codec(name, block), factor=0.25, residual=residual
                )
                assert ((value - 2).abs() < 0.1).all(), (name, value)

    run(4, worker)


def test_ranks_must_agree_on_the_wire() -> None:
    """Another codec, block or none: MismatchError on all ranks, naming both."""

    def worker(rank: int, n: int) -> list[Any]:
        import torch.distributed as dist

        import pycomm

        found = []
        for index, codecs in enumerate(((("fp16", 64), ("fp16", 128)), (("fp16", 0), ("bf16", 0)))):
            store = dist.PrefixStore(f"wire{index}", dist.distributed_c10d._get_default_store())
            comm = pycomm.create_communicator(store, rank, n)
            codec = core.Codec(*codecs[rank])
            call = functools.partial(comm.compressed_all_reduce, [torch.ones(9)], codec)
            found.append(attempt(call))
        store = dist.PrefixStore("plain", dist.distributed_c10d._get_default_store())
        comm = pycomm.create_communicator(store, rank, n)
        if rank == 0:
            found.append(attempt(lambda: comm.all_reduce(torch.ones(9))))
        else:
            found.append(
                attempt(lambda: comm.compressed_all_reduce([torch.ones(9)], core.Codec("fp16", 64)))
            )
        return found

    for found in run(2, worker):
        assert all(MismatchError.__name__ in error.kinds for error in found), found
        blocks, formats, plain = (error.message for error in found)
        assert "wire=fp16 in blocks of 64" in blocks
        assert "wire=fp16 in blocks of 128" in blocks
        assert "wire=bf16" in formats
        assert "op=sum) at" in plain


def test_bad_arguments() -> None:
    """Are refused before anything is sent."""

    def worker(rank: int, n: int) -> None:
        codec, x = core.Codec("fp16"), torch.ones(4)
        call = communicator().compressed_all_reduce
        cases: list[tuple[str, Any]] = [
            ("only float32, float16 and bfloat16", lambda: call([x.double()], codec)),
            ("bfloat16 are compressed, not int64", lambda: call([x, x.long()], codec)),
            ("residual must be 4 float32", lambda: call([x], codec, residual=torch.zeros(3))),
            (
                "no divisor",
                lambda: call([x], codec, residual=torch.zeros(4), divisor=2),
            ),
            ("contiguous", lambda: call([torch.ones(4, 4).t()[1:]], codec)),
        ]
        for words, wrong in cases:
            error = attempt(wrong)
            assert "InvalidArgument" in error.kinds, error
            assert words in error.message, error
        call([x], codec)
        assert float(x[0]) == n

    run(2, worker)


def test_asynchronous() -> None:
    """On the worker, in order, while the arguments stay alive."""

    def worker(rank: int, n: int) -> None:
        works, values = [], []
        for index in range(20):
            residual = torch.zeros(1000 * index + 3)
            values.append(
                [torch.full((1000 * index,), float(rank + index)), torch.full((3,), float(index))]
            )
            works.append(
                communicator().compressed_all_reduce(
                    values[-1], core.Codec("bf16"), factor=0.5, residual=residual, async_op=True
                )
            )
        for index, work in enumerate(works):
            work.wait()
            assert (values[index][0] == index + 0.5).all()
            assert (values[index][1] == index).all()

    run(2, worker)
