"""What carries compressed gradients: pycomm's communicator or, between hosts, another backend such as Gloo."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from pycomm.backend import find_communicator
from pycomm.errors import Error, InvalidArgument
from pycomm.extension import core

if TYPE_CHECKING:
    from pycomm._core import Codec

_LINE = 64  # bytes; where one rank's encoding begins
_PIECE = 1 << 20  # bytes of a message, at most
_TAG = 31_000  # of the first piece; MPI knows tags to 32767
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Ranks(Protocol):
    """The ranks between which gradients travel; the communicator's methods of these names say more."""

    @property
    def rank(self) -> int:
        """This one."""

    @property
    def world_size(self) -> int:
        """How many."""

    def all_reduce(
        self, tensor: torch.Tensor, op: str = "sum", *, timeout: timedelta | None = None
    ) -> Any:
        """In place."""

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor) -> Any:
        """Equal parts, in rank order."""


class Carrier(Ranks, Protocol):
    """What also carries encoded values."""

    def compressed_all_reduce(
        self,
        tensors: Sequence[torch.Tensor],
        codec: Codec,
        *,
        factor: float = 1.0,
        divisor: float = 1.0,
        residual: torch.Tensor | None = None,
        infinite: bool = False,
        stochastic: bool = False,
        seed: int = 0,
        timeout: timedelta | None = None,
    ) -> Any:
        """Sums a list of contiguous tensors of one dtype, in place, encoded on the way."""


def carrier_of(group: dist.ProcessGroup | None = None) -> Carrier:
    """Of a group (the default group if None). Raises InvalidArgument if it has no backend for tensors on the CPU."""
    group = group or dist.group.WORLD
    if group is None:
        raise InvalidArgument("there is no default process group; call init_process_group")
    communicator = find_communicator(group)
    return communicator if communicator is not None else ForeignCarrier(group)


class ForeignCarrier:
    """Compression over a backend that is not pycomm's, by messages of bytes: to whom sums them, and back.

    Values are cut into a shard per rank. Every rank sends the others what it has for their shards, encoded, sums what
    it got in rank order, its own values among them as they are, and sends the sum, encoded, to all. So contributions
    are rounded once and sums once, at any world size, and all ranks decode the same bytes, as in
    csrc/algorithms/compressed.h. Each rank sends 2 * (world_size - 1) / world_size of the encoded bytes.

    Why not all_to_all and all_gather: Gloo tells a sender through the same connection that a receive waits, so there
    that notice stands behind the data of the other direction, and both take turns. Receives that are posted first, and
    messages in pieces, use both directions of a link at once (benchmarks/advise.py). And messages, unlike collectives,
    may be under way in another thread while backward calls collectives of its own; so float32 sums go this way, too.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        try:
            group._get_backend(torch.device("cpu"))
        except RuntimeError:
            raise InvalidArgument(
                f"compression is for tensors on the CPU, and the group's backend is {dist.get_backend(group)}; use "
                "init_process_group('cpu:gloo,cuda:nccl') or a group of backend pycomm or gloo"
            ) from None
        self.group = group

    @property
    def rank(self) -> int:
        """In the group."""
        return self.group.rank()

    @property
    def world_size(self) -> int:
        """Of the group."""
        return self.group.size()

    def all_reduce(
        self, tensor: torch.Tensor, op: str = "sum", *, timeout: timedelta | None = None
    ) -> None:
        """In place."""
        if op == "sum" and tensor.dtype == torch.float32:
            self.compressed_all_reduce([tensor], core.Codec("fp32"), timeout=timeout)
            return
        self._refuse_timeout(timeout)
        dist.all_reduce(tensor, getattr(dist.ReduceOp, op.upper()), group=self.group)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """Equal parts, in rank order."""
        rows = output.view(self.world_size, -1)
        rows[self.rank].copy_(input.view(-1))
        exchange = Exchange(self.group, rows, f"all_gather of {rows[0].nbytes} bytes")
        for peer in exchange.peers:
            exchange.send(peer, rows[self.rank])
        exchange.wait()

    def compressed_all_reduce(
        self,
        tensors: Sequence[torch.Tensor],
        codec: Codec,
        *,
        factor: float = 1.0,
        divisor: float = 1.0,
        residual: torch.Tensor | None = None,
        infinite: bool = False,
        stochastic: bool = False,
        seed: int = 0,
        timeout: timedelta | None = None,
    ) -> None:
        """See Carrier. Raises InvalidArgument before anything is sent, else what the backend raises."""
        self._refuse_timeout(timeout)
        _check(tensors, codec, residual)
        if residual is not None and divisor != 1:
            raise InvalidArgument(
                "a residual is kept in the unit of the sum, so use a factor and no divisor"
            )
        how = {"infinite": infinite, "stochastic": stochastic, "seed": seed}
        _Compressed(self, tensors, codec, how).run(factor, divisor, residual)

    def _refuse_timeout(self, timeout: timedelta | None) -> None:
        if timeout is not None:
            raise InvalidArgument(
                f"a timeout of one call is for groups of backend pycomm, not {dist.get_backend(self.group)}; "
                "give it to new_group"
            )


class Exchange:
    """Bytes from each rank to each other: receives into `rows`, a row per rank, are posted at once.

    Raises Error, which names the rank and `what` it does, where the backend does.
    """

    def __init__(self, group: dist.ProcessGroup, rows: torch.Tensor, what: str) -> None:
        self._group, self._what = group, what
        rank, world_size = group.rank(), group.size()
        self.peers = [(rank + step) % world_size for step in range(1, world_size)]
        self._works: list[Any] = []
        with self._in_words():
            for peer in self.peers:
                for tag, piece in _pieces(rows[peer]):
                    self._works.append(dist.irecv(piece, group_src=peer, group=group, tag=tag))

    def send(self, peer: int, row: torch.Tensor) -> None:
        """Of as many bytes as a row; it must stay as it is until wait() returns."""
        with self._in_words():
            for tag, piece in _pieces(row):
                self._works.append(dist.isend(piece, group_dst=peer, group=self._group, tag=tag))

    def wait(self) -> None:
        """Until all has come and gone, or the group's timeout is over."""
        with self._in_words():
            for work in self._works:
                work.wait()

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            rank, backend = self._group.rank(), dist.get_backend(self._group)
            raise Error(
                f"rank {rank}: {self._what} with ranks {self.peers} of a group of backend {backend} failed: {error}. "
                "See the other ranks' own output; then make the group anew."
            ) from error


def _pieces(row: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """At least two of long ones, so that none waits for a whole row of the other direction."""
    size = row.view(torch.uint8).numel()
    number = 1 if size < _PIECE // 16 else max(2, -(-size // _PIECE))
    return [(_TAG + i % 1000, piece) for i, piece in enumerate(row.chunk(number)) if piece.numel()]


def _check(tensors: Sequence[torch.Tensor], codec: Codec, residual: torch.Tensor | None) -> None:
    """Before anything is sent."""
    core.transcode(codec, 0, inputs=tensors)  # refuses what lies in pieces, or elsewhere
    count = sum(tensor.numel() for tensor in tensors)
    for tensor in tensors:
        if tensor.dtype not in _DTYPES:
            raise InvalidArgument(
                f"only float32, float16 and bfloat16 are compressed, not {tensor.dtype}"
            )
    if residual is not None and (residual.dtype, residual.numel()) != (torch.float32, count):
        raise InvalidArgument(
            f"the residual of {count} values is as many of float32, not {residual.numel()} of {residual.dtype}"
        )


def _lines(size: int) -> int:
    """Bytes, rounded up."""
    return -(-size // _LINE) * _LINE


class _Compressed:
    """One compressed all_reduce: who sums which values, and where their encodings lie."""

    def __init__(
        self,
        carrier: ForeignCarrier,
        tensors: Sequence[torch.Tensor],
        codec: Codec,
        how: dict[str, Any],
    ) -> None:
        self._carrier, self._codec, self._how = carrier, codec, how
        self._tensors = [tensor.detach() for tensor in tensors]
        count, world_size = sum(tensor.numel() for tensor in tensors), carrier.world_size
        granule = codec.block or _LINE
        longest = -(-count // world_size // granule) * granule
        self._bounds = [min(i * longest, count) for i in range(world_size + 1)]
        self._scales = _lines(longest * codec.value_bytes)  # where they begin in a row
        self._width = self._scales + _lines(4 * codec.scales(longest))

    def run(self, factor: float, divisor: float, residual: torch.Tensor | None) -> None:
        """Encode for the others, sum the own shard, decode those of the others."""
        if self._bounds[-1] == 0:
            return
        mine, group = self._carrier.rank, self._carrier.group
        sent, received = self._rows(), self._rows()
        own = {"inputs": self._tensors, "factor": factor}
        what = f"all_reduce(count={self._bounds[-1]}, wire={self._codec.format})"
        contributions = Exchange(group, received, what)
        for peer in contributions.peers:
            self._transcode(peer, residual, **own, encoded=self._wire(sent, peer, peer))
            contributions.send(peer, sent[peer])
        contributions.wait()
        others = sorted(contributions.peers)
        wires = [self._wire(received, peer, mine) for peer in others]
        where = {"encoded": self._wire(sent, mine, mine), "outputs": self._tensors}
        self._transcode(mine, residual, **own, **where, wires=wires, own=mine, divisor=divisor)
        sums = Exchange(group, received, what)
        for peer in sums.peers:
            sums.send(peer, sent[mine])
        sums.wait()
        for peer in others:
            wires = [self._wire(received, peer, peer)]
            self._transcode(peer, None, wires=wires, outputs=self._tensors)

    def _rows(self) -> torch.Tensor:
        """Room for an encoded shard of every rank."""
        return torch.empty(self._carrier.world_size, self._width, dtype=torch.uint8)

    def _wire(self, rows: torch.Tensor, row: int, shard: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The values and scales of a shard that is encoded in a row."""
        count = self._bounds[shard + 1] - self._bounds[shard]
        values = count * self._codec.value_bytes
        scales = self._codec.scales(count)
        if scales == 0:
            return rows[row][:values], torch.empty(0)
        end = self._scales + 4 * scales
        return rows[row][:values], rows[row][self._scales : end].view(torch.float32)

    def _transcode(self, shard: int, residual: torch.Tensor | None, **what: Any) -> None:
        first, end = self._bounds[shard], self._bounds[shard + 1]
        if end <= first:
            return
        if residual is not None:
            what["residual"] = residual.view(-1)[first:end]
        core.transcode(self._codec, end - first, first=first, **what, **self._how)
