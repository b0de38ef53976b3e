"""all_reduce over peer memory on a device: ranks as streams of this process, and as two processes over CUDA IPC.

What comes out is compared bit by bit with the CPU's kernels. Plain sums have the same bits whatever the algorithm;
of compressed ones the expected bits follow the algorithm's own steps, with the CPU's codec at each.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
from gpu_cases import Encoded, numbers, same
from gpu_device import Gpu, StandIn, load_core

WORLDS: Final = (1, 2, 4)
ALGORITHMS: Final = ("one_shot", "two_shot", "ring")
COUNTS: Final = (0, 1, 17, 4099, 300_001)
CODECS: Final = (("fp16", 64), ("fp8_e4m3", 256), ("int8", 256), ("bf16", 0), ("int8", 2048))
BLOCKS, SLOT_BYTES = 8, 65536
BLOCK_VALUES: Final = 16384  # csrc/p2p/compressed_cuda.cu: kBlockValues
TIMEOUT: Final = timedelta(seconds=10)


# ---- what must come out -------------------------------------------------------------------------


@dataclass(frozen=True)
class Compressed:
    """A compressed all_reduce: every rank's tensor and residual."""

    codec: Any
    algorithm: str
    divisor: float
    tensors: tuple[torch.Tensor, ...]
    residuals: tuple[torch.Tensor, ...]

    @property
    def count(self) -> int:
        """Values of each rank."""
        return self.tensors[0].numel()


def shard(count: int, parts: int, part: int, granule: int) -> tuple[int, int]:
    """csrc/slots.h: shard_of, as begin and end."""
    even = (count + parts - 1) // parts
    even = (even + granule - 1) // granule * granule
    return min(even * part, count), min(even * (part + 1), count)


def granule(codec: Any) -> int:
    """csrc/kernels/codec.h: Codec::granule."""
    return int(codec.block) or 64


def capacity(codec: Any, size: int) -> int:
    """The most values whose encoding fits."""
    step = granule(codec)
    count = size // int(codec.value_bytes) // step * step
    while codec.wire_bytes(count) > size:
        count -= step
    return count


def owned(call: Compressed) -> Iterator[tuple[int, int, int]]:
    """Begin, end and owner of each piece that one rank of two_shot sums."""
    blocks = min(BLOCKS, -(-call.count // BLOCK_VALUES))
    step, chunk = granule(call.codec), capacity(call.codec, SLOT_BYTES)
    for block in range(blocks):
        strip, end = shard(call.count, blocks, block, step)
        while strip < end:
            length = min(chunk, end - strip)
            for owner in range(len(call.tensors)):
                low, high = shard(length, len(call.tensors), owner, step)
                if low < high:
                    yield strip + low, strip + high, owner
            strip += chunk


class Expected:
    """The CPU's codec, step by step; tensors and residuals are changed in place."""

    def __init__(self, core: Any, call: Compressed) -> None:
        self.core, self.call = core, call
        if call.algorithm == "one_shot":
            self._one_shot(0, call.count)
        elif call.algorithm == "ring":
            self._ring(0, call.count)
        else:
            for begin, end, owner in owned(call):
                self._two_shot(begin, end, owner)

    def _encode(
        self, begin: int, end: int, rank: int, wires: Sequence[Encoded], own: int, divisor: float
    ) -> Encoded:
        """What a rank makes of others' wires and its own values."""
        call, result = self.call, Encoded(self.call.codec, end - begin)
        self.core.transcode(
            call.codec, end - begin, wires=[wire.pair() for wire in wires],
            inputs=[call.tensors[rank]], own=own, first=begin, divisor=divisor,
            residual=call.residuals[rank][begin:end], encoded=result.pair(),
        )  # fmt: skip
        return result

    def _decode(self, begin: int, end: int, wires: Sequence[Encoded], divisor: float) -> None:
        """On all ranks."""
        for tensor in self.call.tensors:
            self.core.transcode(
                self.call.codec, end - begin, wires=[wire.pair() for wire in wires],
                first=begin, divisor=divisor, outputs=[tensor],
            )  # fmt: skip

    def _one_shot(self, begin: int, end: int) -> None:
        ranks = range(len(self.call.tensors))
        wires = [self._encode(begin, end, rank, [], 0, 1) for rank in ranks]
        self._decode(begin, end, wires, self.call.divisor)

    def _two_shot(self, begin: int, end: int, owner: int) -> None:
        others = [rank for rank in range(len(self.call.tensors)) if rank != owner]
        wires = [self._encode(begin, end, rank, [], 0, 1) for rank in others]
        result = self._encode(begin, end, owner, wires, owner, self.call.divisor)
        self._decode(begin, end, [result], 1)

    def _ring(self, begin: int, end: int) -> None:
        last = len(self.call.tensors) - 1
        wires: list[Encoded] = []
        for rank in range(last + 1):
            divisor = self.call.divisor if rank == last else 1
            wires = [self._encode(begin, end, rank, wires, len(wires), divisor)]
        self._decode(begin, end, wires, 1)


# ---- who does it --------------------------------------------------------------------------------


class StandInPeers:
    """Ranks on the CPU, in the device's place."""

    def __init__(self, device: StandIn, world_size: int) -> None:
        self.core, self.device, self.world_size = device.core, device, world_size

    def all_reduce(
        self, inputs: Sequence[torch.Tensor], op: str, algorithm: str, scales: list[float] | None
    ) -> list[torch.Tensor]:
        """Every rank's result."""
        outputs = [torch.zeros_like(part) for part in inputs]
        for output in outputs:
            self.core.reduce(output, inputs, op, scales)
        return outputs

    def compressed(self, call: Compressed) -> None:
        """In place."""
        Expected(self.core, call)

    def alone(self) -> str:
        """What rank 0 hears when rank 1 does not come."""
        return "rank 0: waited for rank 1"

    def replayed(self, inputs: Sequence[torch.Tensor], turns: int) -> list[torch.Tensor]:
        """Sums of float32 in place, so many times over."""
        for _ in range(turns):
            for part, result in zip(
                inputs, self.all_reduce(inputs, "sum", "two_shot", None), strict=True
            ):
                part.copy_(result)
        return list(inputs)

    def close(self) -> None:
        """Gives back what there is."""


class StreamPeers(StandInPeers):
    """Ranks as streams of one process on one device. Everything is in place before the first launch."""

    def __init__(self, device: Gpu, world_size: int, timeout: timedelta = TIMEOUT) -> None:
        super().__init__(device, world_size)
        index = device.torch_device.index
        self.memories = [
            self.core.PeerMemory(
                index, rank, world_size, timeout, blocks=BLOCKS, slot_bytes=SLOT_BYTES
            )
            for rank in range(world_size)
        ]
        handles = [memory.handle for memory in self.memories]
        for memory in self.memories:
            memory.connect(handles)
        self.streams = [torch.cuda.Stream() for _ in range(world_size)]

    def _finish(self) -> None:
        torch.cuda.synchronize()
        for memory in self.memories:
            memory.check()

    def all_reduce(
        self, inputs: Sequence[torch.Tensor], op: str, algorithm: str, scales: list[float] | None
    ) -> list[torch.Tensor]:
        """One launch a rank."""
        outputs = [torch.zeros_like(part) for part in inputs]
        torch.cuda.synchronize()
        for memory, stream, source, output in zip(
            self.memories, self.streams, inputs, outputs, strict=True
        ):
            memory.all_reduce(
                source, output, op, stream=stream.cuda_stream, algorithm=algorithm, scales=scales
            )
        self._finish()
        return outputs

    def compressed(self, call: Compressed) -> None:
        """One launch a rank."""
        torch.cuda.synchronize()
        for rank, memory in enumerate(self.memories):
            memory.compressed_all_reduce(
                [call.tensors[rank]], call.codec, stream=self.streams[rank].cuda_stream,
                algorithm=call.algorithm, divisor=call.divisor, residual=call.residuals[rank],
            )  # fmt: skip
        self._finish()

    def alone(self) -> str:
        """Rank 0 launches; its error is read afterwards."""
        tensor = torch.zeros(1000, device=self.device.torch_device)
        torch.cuda.synchronize()
        self.memories[0].all_reduce(tensor, tensor, stream=self.streams[0].cuda_stream)
        torch.cuda.synchronize()
        try:
            self.memories[0].check()
        except RuntimeError as error:
            return str(error)
        return "nothing"

    def replayed(self, inputs: Sequence[torch.Tensor], turns: int) -> list[torch.Tensor]:
        """From a CUDA graph of each rank."""
        graphs = []
        for memory, stream, part in zip(self.memories, self.streams, inputs, strict=True):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                memory.all_reduce(part, part, stream=stream.cuda_stream)
            graphs.append(graph)
        torch.cuda.synchronize()
        for _ in range(turns):
            for graph, stream in zip(graphs, self.streams, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
        self._finish()
        return list(inputs)

    def close(self) -> None:
        """All ranks are done."""
        torch.cuda.synchronize()
        for memory in self.memories:
            memory.close()


def peers_of(device: StandIn, world_size: int, timeout: timedelta = TIMEOUT) -> StandInPeers:
    """Ranks on a device, or in its place."""
    if isinstance(device, Gpu):
        return StreamPeers(device, world_size, timeout)
    return StandInPeers(device, world_size)


# ---- the comparison -----------------------------------------------------------------------------


def parts_of(dtype: torch.dtype, count: int, world_size: int, seed: int) -> list[torch.Tensor]:
    """Random bits, a tensor for each rank."""
    chance = torch.Generator().manual_seed(seed)
    parts = []
    for _ in range(world_size):
        bits = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=chance)
        parts.append(bits % 2 == 1 if dtype == torch.bool else bits.view(dtype))
    return parts


def plain_differences(
    peers: StandInPeers, dtype: str, op: str, algorithm: str, count: int
) -> list[str]:
    """An all_reduce of random bits on the device and on the CPU."""
    device, world_size = peers.device, peers.world_size
    parts = parts_of(getattr(torch, dtype), count, world_size, count + world_size)
    scales = [0.1 * (rank + 1) for rank in range(world_size)] if op == "premul_sum" else None
    expected = torch.zeros_like(parts[0])
    peers.core.reduce(expected, parts, op, scales)
    got = peers.all_reduce(
        [device.put(part, rank % 2) for rank, part in enumerate(parts)], op, algorithm, scales
    )
    return [
        f"peers: {algorithm} {op} of {world_size} x {count} {dtype}: rank {rank} differs"
        for rank, part in enumerate(got)
        if not same(expected, part.cpu())
    ]


def compressed_differences(
    peers: StandInPeers, codec: tuple[str, int], algorithm: str, dtype: torch.dtype, count: int
) -> list[str]:
    """The same with values that travel encoded."""
    device, ranks = peers.device, range(peers.world_size)
    kind = ("tame", "ties")[count % 2]
    tensors = [numbers(count, kind, 31 * rank + count).to(dtype) for rank in ranks]
    residuals = [numbers(count, "tame", 37 * rank + count) * 2**-4 for rank in ranks]
    there = Compressed(
        peers.core.Codec(*codec), algorithm, float(peers.world_size),
        tuple(device.put(tensor) for tensor in tensors), tuple(device.put(part) for part in residuals),
    )  # fmt: skip
    peers.compressed(there)
    here = Compressed(there.codec, algorithm, there.divisor, tuple(tensors), tuple(residuals))
    Expected(peers.core, here)
    return [
        f"peers: {algorithm} of {peers.world_size} x {count} {dtype} as {codec}: rank {rank}: {name} differ"
        for rank in ranks
        for name, want, got in (
            ("results", here.tensors[rank], there.tensors[rank]),
            ("residuals", here.residuals[rank], there.residuals[rank]),
        )
        if not same(want, got.cpu())
    ]


def replay_differences(peers: StandInPeers) -> list[str]:
    """Three replays of a graph."""
    parts = [torch.full((5001,), float(rank + 1)) for rank in range(peers.world_size)]
    factor = sum(range(1, peers.world_size + 1)) * peers.world_size**2
    got = peers.replayed([peers.device.put(part) for part in parts], 3)
    right = all(torch.equal(part.cpu(), torch.full((5001,), float(factor))) for part in got)
    return [] if right else [f"peers: a graph of {peers.world_size} ranks gives other sums"]


def absence_differences(device: StandIn) -> list[str]:
    """A rank that does not come is named, in time."""
    peers = peers_of(device, 2, timedelta(milliseconds=200))
    words = peers.alone()
    peers.close()
    named = "rank 0" in words and "for rank 1" in words
    return [] if named else [f"peers: a rank that does not come: {words}"]


def differences(device: StandIn, quick: bool) -> Iterator[list[str]]:
    """What is wrong, case by case."""
    counts = COUNTS[:4] if quick else COUNTS
    for world_size in WORLDS:
        peers = peers_of(device, world_size)
        for dtype, ops in device.core.support_table().items():
            for op in ops:
                for at, algorithm in enumerate(ALGORITHMS):
                    yield plain_differences(peers, dtype, op, algorithm, (17, 4099, 1)[at])
        for algorithm in ALGORITHMS:
            for count in counts:
                yield plain_differences(peers, "float32", "sum", algorithm, count)
                for codec in CODECS:
                    for dtype in (torch.float32, torch.bfloat16):
                        yield compressed_differences(peers, codec, algorithm, dtype, count)
        yield replay_differences(peers)
        peers.close()
    yield absence_differences(device)
    if isinstance(device, Gpu):
        yield process_differences()


# ---- two processes ------------------------------------------------------------------------------


def process_differences() -> list[str]:
    """Two processes over CUDA IPC, each with this file."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, str(rank), str(Path(folder, "store"))],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for rank in range(2)
        ]  # fmt: skip
        wrong = []
        for rank, process in enumerate(ranks):
            try:
                words = process.communicate(timeout=120)[0]
            except subprocess.TimeoutExpired:
                process.kill()
                words = process.communicate()[0]
            if process.returncode != 0:
                wrong.append(
                    f"peers: process {rank} ended with {process.returncode}: {words[-800:]}"
                )
        return wrong


def rank_process(rank: int, file: str) -> int:
    """One of the two."""
    core, store = load_core(), torch.distributed.FileStore(file, 2)

    def exchange(name: str, mine: str) -> list[str]:
        store.set(f"{name}{rank}", mine)
        return [store.get(f"{name}{peer}").decode() for peer in range(2)]

    memory = core.PeerMemory(
        torch.cuda.current_device(),
        rank,
        2,
        timedelta(seconds=60),
        blocks=BLOCKS,
        slot_bytes=SLOT_BYTES,
    )
    memory.connect(exchange("handle", memory.handle))
    wrong = 0
    for algorithm in ALGORITHMS:
        for count in (1, 4099, 100_003):
            parts = parts_of(torch.float32, count, 2, count)
            expected = torch.zeros(count)
            core.reduce(expected, parts, "sum")
            got = parts[rank].cuda()
            memory.all_reduce(
                got, got, stream=torch.cuda.current_stream().cuda_stream, algorithm=algorithm
            )
            torch.cuda.synchronize()
            memory.check()
            wrong += not same(expected, got.cpu())
    exchange("done", "yes")
    memory.close()
    print(f"{wrong} of 9 sums differ")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(rank_process(int(sys.argv[1]), sys.argv[2]))
