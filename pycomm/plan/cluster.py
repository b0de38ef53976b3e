"""What a plan is about: links, the groups of ranks that they connect, and the cluster that those belong to."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pycomm.errors import InvalidArgument


@dataclass(frozen=True)
class Link:
    """What a rank, or a host, has to send and receive by.

    bandwidth: bytes per second that one end sends. latency: seconds from the call to the first byte's arrival: alpha.
    gap: what each further message that is sent at the same time costs; the latency if None, which is Hockney's
    alpha-beta model (1994); less is LogGP's (Alexandrov et al. 1995), 0 is memory that all can read at once. duplex:
    whether it receives as much while it sends; else both share the bandwidth.
    """

    bandwidth: float
    latency: float
    gap: float | None = None
    duplex: bool = True

    def __post_init__(self) -> None:
        if not self.bandwidth > 0:
            raise InvalidArgument(
                f"a link's bandwidth must be positive, in bytes/s: {self.bandwidth}"
            )
        if not 0 <= self.latency < math.inf:
            raise InvalidArgument(f"a link's latency must be 0 or more, in seconds: {self.latency}")
        if not 0 <= self.each_further <= self.latency:
            raise InvalidArgument(f"a link's gap must lie between 0 and its latency: {self.gap}")

    @property
    def each_further(self) -> float:
        """Seconds per message after the first one."""
        return self.latency if self.gap is None else self.gap


#: Links by name. Of this project's measurements: "shm" (README's all-reduce of two ranks). All others are round figures
#: of the makers' data sheets with common latencies: for first guesses, until somebody measures.
LINKS = {
    "shm": Link(16e9, 1e-6, 5e-8),
    "nvlink4": Link(360e9, 3e-6, 3e-7),  # 450 GB/s a way, of which NCCL reaches 0.8
    "pcie4": Link(22e9, 5e-6, 1e-6),
    "ib400": Link(48e9, 4e-6, 1e-6),  # one port of 400 Gbit/s
    "8xib400": Link(8 * 48e9, 4e-6, 1e-6),  # a host of eight such ports
    "eth100": Link(11.8e9, 15e-6, 3e-6),
    "eth25": Link(2.95e9, 20e-6, 4e-6),
    "eth10": Link(1.18e9, 30e-6, 5e-6),
    "eth1": Link(0.1195e9, 60e-6, 10e-6),
}

_SHARED_MEMORY = LINKS["shm"]


@dataclass(frozen=True)
class Group:
    """Ranks that call a collective: `local` on each of `hosts` hosts.

    inside: the link of every rank to others of its host. between: the link of every host to the others, which its ranks
    share. neighbours: groups like this one that use the hosts' links at the same time.
    """

    hosts: int
    local: int
    inside: Link
    between: Link
    neighbours: int = 1

    def __post_init__(self) -> None:
        if min(self.hosts, self.local, self.neighbours) < 1:
            raise InvalidArgument(
                f"hosts ({self.hosts}), ranks per host ({self.local}) and groups ({self.neighbours}) must be positive"
            )

    @property
    def world_size(self) -> int:
        """Of both levels."""
        return self.hosts * self.local

    @property
    def of_a_host(self) -> Group:
        """The ranks of one host alone."""
        return replace(self, hosts=1)

    @property
    def across(self) -> Group:
        """One rank of each host; the others of the host do the same at the same time."""
        return replace(self, local=1, neighbours=self.neighbours * self.local)


@dataclass(frozen=True)
class Cluster:
    """Hosts with the same number of ranks each, and what connects them.

    memory: bytes per second, read and written, at which a rank's kernels sum and encode; infinite: they cost nothing,
    or the links' bandwidths were measured with them.
    """

    hosts: int = 1
    ranks_per_host: int = 1
    inside: Link = _SHARED_MEMORY
    between: Link = LINKS["eth25"]
    memory: float = math.inf

    def __post_init__(self) -> None:
        if min(self.hosts, self.ranks_per_host) < 1:
            raise InvalidArgument(
                f"hosts ({self.hosts}) and ranks per host ({self.ranks_per_host}) must be positive"
            )
        if not self.memory > 0:
            raise InvalidArgument(f"memory must be positive, in bytes/s: {self.memory}")

    @property
    def world_size(self) -> int:
        """Of all hosts."""
        return self.hosts * self.ranks_per_host

    @property
    def everybody(self) -> Group:
        """All ranks."""
        return Group(self.hosts, self.ranks_per_host, self.inside, self.between)

    def group(self, size: int, stride: int) -> Group:
        """Ranks r, r + stride, ... of consecutive ranks that fill host by host.

        Raises InvalidArgument if such groups would not lie on all hosts alike.
        """
        span = size * stride
        here = self.ranks_per_host
        if stride >= here:
            if stride % here and size > 1:
                raise self._uneven(size, stride)
            return Group(size, 1, self.inside, self.between, here)
        if here % stride:
            raise self._uneven(size, stride)
        if span <= here:
            return Group(1, size, self.inside, self.between)
        local = here // stride
        if size % local:
            raise self._uneven(size, stride)
        return Group(size // local, local, self.inside, self.between, stride)

    def _uneven(self, size: int, stride: int) -> InvalidArgument:
        return InvalidArgument(
            f"groups of {size} ranks at a stride of {stride} do not lie alike on hosts of {self.ranks_per_host} "
            "ranks; choose degrees that divide each other"
        )
