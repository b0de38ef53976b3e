"""Compressed all_reduce over NCCL: the bits, residuals and counts of a reference made of the CPU's codec, call by call.

The fake NCCL moves the bytes and the CPU encodes, in the order of the fake's streams.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from fake_nccl import Fake, build
from harness import Refused, attempt, run

from pycomm.extension import core

CHUNK: Final = 4096  # bytes of a chunk, encoded
CODECS: Final = (("fp32", 0), ("fp16", 0), ("bf16", 64), ("fp8_e4m3", 128), ("int8", 256))


def on_gpus(n: int, worker: Callable[..., Any], folder: Path, *args: Any, **settings: Any) -> Any:
    """The results of worker(fake, communicator, *args) on n ranks."""
    library = build()
    settings = {"codec_on_host": True, "wire_chunk_bytes": CHUNK, **settings}

    def main(rank: int, world_size: int) -> Any:
        fake = Fake(library, str(folder), rank, world_size)
        communicator = fake.communicator(20.0, **settings)
        result = worker(fake, communicator, *args)
        communicator.shutdown()
        return result

    return run(n, main, init=False)


# ---- the reference -------------------------------------------------------------------------------


@dataclass
class Options:
    """What a call says beside its tensors."""

    factor: float = 1.0
    divisor: float = 1.0
    infinite: bool = False
    stochastic: bool = False
    seed: int = 0


@dataclass
class Rank:
    """One rank's values, as floats, and what it keeps."""

    values: torch.Tensor
    residual: torch.Tensor | None

    def encode(
        self, codec: Any, begin: int, count: int, options: Options, wires: Sequence[Any] = (),
        own: int = 0, divisor: float = 1.0, outputs: list[torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """What transcode makes of the values [begin, begin + count), and of others' wires."""
        wire = empty_wire(codec, count)
        residual = None if self.residual is None else self.residual[begin : begin + count]
        core.transcode(
            codec, count, wires=wires, inputs=[self.values], own=own, first=begin,
            factor=options.factor, divisor=divisor, residual=residual, encoded=wire, outputs=outputs,
            infinite=options.infinite, stochastic=options.stochastic, seed=options.seed,
        )  # fmt: skip
        return wire


def empty_wire(codec: Any, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for so many values."""
    values = torch.empty(count * codec.value_bytes, dtype=torch.uint8)
    return values, torch.empty(codec.scales(count))


def shards(count: int, n: int, granule: int) -> list[tuple[int, int]]:
    """(begin, length) of each rank's."""
    even = (-(-count // n) + granule - 1) // granule * granule
    begins = [min(even * owner, count) for owner in range(n + 1)]
    return [(a, b - a) for a, b in pairwise(begins)]


def capacity(codec: Any, granule: int) -> int:
    """Values of a chunk."""
    count = CHUNK // codec.value_bytes // granule * granule
    while codec.wire_bytes(count) > CHUNK:
        count -= granule
    return max(count, granule)


def two_shot(ranks: list[Rank], codec: Any, granule: int, options: Options) -> torch.Tensor:
    """All ranks' result; their residuals are brought forward."""
    count, n = ranks[0].values.numel(), len(ranks)
    result = torch.zeros_like(ranks[0].values)
    chunk = capacity(codec, granule)
    for start in range(0, count, chunk):
        for owner, (begin, length) in enumerate(shards(min(chunk, count - start), n, granule)):
            if length == 0:
                continue
            wires = [
                rank.encode(codec, start + begin, length, options)
                for peer, rank in enumerate(ranks)
                if peer != owner
            ]
            ranks[owner].encode(
                codec, start + begin, length, options, wires, owner, options.divisor, [result]
            )
    return result


def one_shot(ranks: list[Rank], codec: Any, options: Options) -> torch.Tensor:
    """All ranks' result; their residuals are brought forward."""
    count = ranks[0].values.numel()
    wires = [rank.encode(codec, 0, count, options) for rank in ranks]
    result = torch.zeros_like(ranks[0].values)
    core.transcode(codec, count, wires=wires, outputs=[result], divisor=options.divisor)
    return result


def ring(ranks: list[Rank], codec: Any, options: Options) -> torch.Tensor:
    """All ranks' result; their residuals are brought forward."""
    count = ranks[0].values.numel()
    result = torch.zeros_like(ranks[0].values)
    wires: list[Any] = []
    for number, rank in enumerate(ranks):
        is_last = number == len(ranks) - 1
        wire = rank.encode(
            codec, 0, count, options, wires, own=len(wires),
            divisor=options.divisor if is_last else 1.0, outputs=[result] if is_last else None,
        )  # fmt: skip
        wires = [wire]
    return result


def reference(
    algorithm: str, ranks: list[Rank], codec: Any, granule: int, options: Options
) -> torch.Tensor:
    """What all ranks are to have."""
    if algorithm == "one_shot":
        return one_shot(ranks, codec, options)
    if algorithm == "ring":
        return ring(ranks, codec, options)
    return two_shot(ranks, codec, granule, options)


# ---- the sweep -----------------------------------------------------------------------------------


def inputs_of(rank: int, count: int) -> torch.Tensor:
    """The same wherever it is asked for."""
    return torch.randn(count, generator=torch.Generator().manual_seed(100 * count + rank))


def options_of(step: int, index: int) -> Options:
    """Of the codec's first and second call; only without a residual may the sum be divided."""
    return Options(0.5, 3.0 if step and index % 2 else 1.0, bool(step), bool(step), 7 + step)


def reduce_twice(
    fake: Fake, comm: Any, count: int, algorithm: str, dtype: torch.dtype
) -> dict[str, Any]:
    """Two steps of each codec, with residuals kept in between, tensors in pieces."""
    results: dict[str, Any] = {}
    for index, (name, block) in enumerate(CODECS):
        codec = core.Codec(name, block)
        residual = torch.zeros(count)
        counts = torch.zeros(6, dtype=torch.int64)
        steps = []
        for step in range(2):
            options = options_of(step, index)
            values = (inputs_of(fake.rank, count) + step).to(dtype)
            pieces = list(values.split(max(count // 3, 1))) if count else [values]
            kept = None if index % 2 else residual
            comm.compressed_all_reduce(
                pieces, codec, residual=kept, counts=counts, algorithm=algorithm, **vars(options)
            )
            fake.synchronize()
            steps.append((values, residual.clone()))
        results[name] = steps, core.codec_counts(counts).values
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot", "ring"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_bits_are_those_of_the_reference(
    n: int, algorithm: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Sizes below a granule, beside it, of several chunks; results are alike on all ranks."""
    check_bits(n, algorithm, dtype, (0, 1, 63, 64, 65, 1000, 9001), tmp_path)


@pytest.mark.parametrize("algorithm", ["two_shot", "ring"])
def test_more_ranks_than_chunks_and_fewer(algorithm: str, tmp_path: Path) -> None:
    """Of five ranks some have no shard of a small tensor, and a ring is never full."""
    check_bits(5, algorithm, torch.float32, (65, 9001), tmp_path)


def check_bits(
    n: int, algorithm: str, dtype: torch.dtype, counts: Sequence[int], tmp_path: Path
) -> None:
    """Each rank's results and residuals against the reference's."""
    for count in counts:
        folder = tmp_path / str(count)
        folder.mkdir()
        everybody = on_gpus(n, reduce_twice, folder, count, algorithm, dtype)
        for index, (name, block) in enumerate(CODECS):
            codec = core.Codec(name, block)
            ranks = [
                Rank(torch.empty(0), None if index % 2 else torch.zeros(count)) for _ in range(n)
            ]
            for step in range(2):
                options = options_of(step, index)
                for number, rank in enumerate(ranks):
                    rank.values = (inputs_of(number, count) + step).to(dtype)
                right = reference(algorithm, ranks, codec, block or 64, options)
                for number, found in enumerate(everybody):
                    steps, _ = found[name]
                    values, residual = steps[step]
                    assert torch.equal(values, right), (name, count, number, step)
                    kept = ranks[number].residual
                    if kept is not None:
                        assert torch.equal(residual, kept), (name, count, number, step)


def test_counts_lie_on_the_device(tmp_path: Path) -> None:
    """Every value that a rank encodes is counted once: n - 1 shards of all ranks and the sum of its own."""

    def worker(fake: Fake, comm: Any) -> Any:
        counts, values = torch.zeros(6, dtype=torch.int64), inputs_of(fake.rank, 5000)
        comm.compressed_all_reduce(
            [values],
            core.Codec("int8", 256),
            counts=counts,
            algorithm="two_shot",
        )
        fake.synchronize()
        wrong = attempt(
            lambda: comm.compressed_all_reduce(
                [torch.ones(4)], core.Codec("fp16"), counts=torch.zeros(5, dtype=torch.int64)
            )
        )
        return core.codec_counts(counts).values, wrong

    for values, wrong in on_gpus(2, worker, tmp_path):
        assert values == 5000
        assert isinstance(wrong, Refused)
        assert "counts on a GPU are 6 int64" in wrong.message


def test_asynchronous_ones_and_others_take_turns(tmp_path: Path) -> None:
    """Several under way, plain ones between them; waits order the caller's stream."""

    def worker(fake: Fake, comm: Any) -> Any:
        codec = core.Codec("fp16")
        tensors = [torch.full((3000,), float(fake.rank + index)) for index in range(6)]
        works = [
            comm.compressed_all_reduce([t], codec, async_op=True)
            if index % 2
            else comm.all_reduce(t, async_op=True)
            for index, t in enumerate(tensors)
        ]
        for work in works:
            work.wait()
        fake.synchronize()
        return tensors

    for tensors in on_gpus(2, worker, tmp_path):
        for index, t in enumerate(tensors):
            assert torch.equal(t, torch.full((3000,), 1.0 + 2 * index))


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot", "ring"])
def test_graphs(algorithm: str, tmp_path: Path) -> None:
    """Captured on both kinds of stream; a larger one in between, which takes new memory, disturbs no graph."""

    def worker(fake: Fake, comm: Any) -> Any:
        comm.connect()
        codec, stream = core.Codec("fp32"), ctypes.c_void_p(fake.stream)
        t, u, larger = torch.ones(3000), torch.full((5000,), 0.5), torch.ones(9000)
        options = {"algorithm": algorithm}
        fake.calls.fake_begin_capture(stream)
        comm.compressed_all_reduce([t], codec, **options)
        comm.compressed_all_reduce([u], codec, async_op=True, **options).wait()
        listed = attempt(lambda: comm.compressed_all_reduce([t, u], codec, **options))
        graph = ctypes.c_void_p(fake.calls.fake_end_capture(stream))
        captured = t[0].item(), u[0].item()
        for _ in range(3):
            fake.calls.fake_launch_graph(graph, stream)
            comm.compressed_all_reduce([larger], codec, **options)
        fake.synchronize()
        return captured, [x.unique().tolist() for x in (t, u, larger)], listed

    for captured, values, listed in on_gpus(2, worker, tmp_path):
        assert captured == (1.0, 0.5)
        assert values == [[8.0], [4.0], [8.0]]
        assert isinstance(listed, Refused)
        assert "cannot be captured into a graph" in listed.message


@pytest.mark.parametrize("check", ["off", "late", "full"])
def test_levels_of_checks(check: str, tmp_path: Path) -> None:
    """With "full" ranks that disagree on the codec are told so, with both calls."""

    def worker(fake: Fake, comm: Any) -> Any:
        t = torch.ones(500)
        comm.compressed_all_reduce([t], core.Codec("fp16"))
        fake.synchronize()
        if check != "full":
            return t, None
        other = core.Codec("int8", 64) if fake.rank else core.Codec("fp16")
        return t, attempt(lambda: comm.compressed_all_reduce([torch.ones(500)], other))

    library = build()

    def main(rank: int, world_size: int) -> Any:
        fake = Fake(library, str(tmp_path), rank, world_size)
        return worker(fake, fake.communicator(20.0, codec_on_host=True, check=check))

    for t, refused in run(2, main, init=False):
        assert torch.equal(t, torch.full((500,), 2.0))
        if check == "full":
            assert isinstance(refused, Refused)
            assert "MismatchError" in refused.kinds
            for words in ("wire=fp16", "wire=int8"):
                assert words in refused.message


def test_what_is_refused(tmp_path: Path) -> None:
    """A group of calls, a build without CUDA; then the communicator goes on."""

    def worker(fake: Fake, comm: Any) -> Any:
        codec, t = core.Codec("fp16"), torch.ones(10)
        comm.begin_group()
        grouped = attempt(lambda: comm.compressed_all_reduce([t], codec))
        comm.end_group()
        plain = fake.communicator(20.0)
        without = (
            attempt(lambda: plain.compressed_all_reduce([t], codec)) if core.cuda is None else None
        )
        comm.compressed_all_reduce([t], codec)
        fake.synchronize()
        return grouped, without, t

    for grouped, without, t in on_gpus(1, worker, tmp_path):
        assert isinstance(grouped, Refused)
        assert "one of a group" in grouped.message
        if core.cuda is None:
            assert isinstance(without, Refused)
            assert "built without CUDA" in without.message
        assert torch.equal(t, torch.ones(10))
