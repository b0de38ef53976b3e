"""A small simulation of collectives, message by message over links; it shares nothing with pycomm.plan but Link.

A message leaves when all it waits for has arrived and its sender's and receiver's ports are free. It takes the link's
latency until its first byte arrives, then its bytes by the bandwidth. A port is taken for the gap and the bytes.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from pycomm.plan import Link


@dataclass
class Traffic:
    """Messages, each of which waits for earlier ones."""

    inside: Link
    between: Link | None = None
    local: int = 1 << 30  # ranks of a host
    messages: list[tuple[int, int, float, list[int]]] = field(default_factory=list)
    _free: dict[tuple[str, int], float] = field(default_factory=dict)  # ports, and since when
    _moments: list[float] = field(default_factory=list)  # at which something may begin

    def send(self, source: int, target: int, bytes: float, after: list[int] | None = None) -> int:
        """Returns the message's number."""
        self.messages.append((source, target, bytes, after or []))
        return len(self.messages) - 1

    def seconds(self) -> float:
        """Until the last one has arrived."""
        missing = [len(after) for *_, after in self.messages]
        heirs: dict[int, list[int]] = {}
        for i, (*_, after) in enumerate(self.messages):
            for before in after:
                heirs.setdefault(before, []).append(i)
        arrivals: list[tuple[float, int]] = []
        queues: dict[tuple[int, int], list[int]] = {}  # from rank to rank, in order
        for i, count in enumerate(missing):
            if count == 0:
                queues.setdefault(self.messages[i][:2], []).append(i)
        now, self._moments = 0.0, [0.0]
        left = len(self.messages)
        while left:
            assert self._moments, "messages wait for each other"
            now = heapq.heappop(self._moments)
            while arrivals and arrivals[0][0] <= now:
                left -= 1
                for heir in heirs.get(heapq.heappop(arrivals)[1], ()):
                    missing[heir] -= 1
                    if missing[heir] == 0:
                        heapq.heappush(queues.setdefault(self.messages[heir][:2], []), heir)
            for head, pair in sorted((queue[0], pair) for pair, queue in queues.items() if queue):
                end = self._try_to_send(head, now)
                if end is not None:
                    heapq.heappop(queues[pair])
                    heapq.heappush(arrivals, (end, head))
        return now

    def _try_to_send(self, i: int, now: float) -> float | None:
        """When it arrives, if all ports are free for it now."""
        source, target, bytes, _ = self.messages[i]
        homes = source // self.local, target // self.local
        far = homes[0] != homes[1]
        link = self.between if far else self.inside
        assert link is not None
        kind, (here, there) = ("host", homes) if far else ("rank", (source, target))
        names = (f"{kind} out", f"{kind} in") if link.duplex else (kind, kind)
        out, into, sender = (names[0], here), (names[1], there), ("sender", source)
        wire, latency = bytes / link.bandwidth, link.latency
        gap = latency if link.gap is None else link.gap
        late = now * (1 + 1e-12)
        if max(self._free.get(port, 0.0) for port in (out, sender)) > late:
            return None
        if self._free.get(into, 0.0) - latency > late:
            return None
        self._free[out] = now + wire + (0.0 if far else gap)
        self._free[sender] = now + gap  # its own part, where ranks share a host's link
        self._free[into] = now + latency + wire
        for moment in (now + gap, self._free[out], now + wire, now + latency + wire):
            heapq.heappush(self._moments, moment)
        return now + latency + wire


# ---- algorithms -----------------------------------------------------------------------------------------------------


def everybody(
    traffic: Traffic, ranks: list[int], bytes: float, after: list[list[int]]
) -> list[list[int]]:
    """Every rank sends to every other; what arrives at each. `after`: by rank."""
    got: list[list[int]] = [[] for _ in ranks]
    for distance in range(1, len(ranks)):
        for i, source in enumerate(ranks):
            j = (i + distance) % len(ranks)
            got[j].append(traffic.send(source, ranks[j], bytes, after[i]))
    return got


def ring(traffic: Traffic, ranks: list[int], steps: int, bytes: float) -> list[list[int]]:
    """Every rank hands on what it got in the step before."""
    p = len(ranks)
    got: list[list[int]] = [[] for _ in ranks]
    for _ in range(steps):
        sent = [traffic.send(ranks[i], ranks[(i + 1) % p], bytes, got[i]) for i in range(p)]
        got = [[sent[i - 1]] for i in range(p)]
    return got


def swaps(
    traffic: Traffic, p: int, sizes: list[tuple[int, float]], after: list[list[int]]
) -> list[list[int]]:
    """Swaps with the ranks at some distances."""
    got = after
    for distance, bytes in sizes:
        sent = [traffic.send(i, i ^ distance, bytes, got[i]) for i in range(p)]
        got = [[*got[i], sent[i ^ distance]] for i in range(p)]
    return got


def folded(
    traffic: Traffic, p: int, sizes: list[tuple[int, float]], first: float, last: float
) -> None:
    """Swaps of a power of two; the others hand over before, and get the result after."""
    power = 1 << (p.bit_length() - 1)
    got: list[list[int]] = [[] for _ in range(power)]
    for extra in range(power, p):
        got[extra - power] = [traffic.send(extra, extra - power, first)]
    got = swaps(traffic, power, sizes, got)
    for extra in range(power, p):
        traffic.send(extra - power, extra, last, got[extra - power])


def two_trees(traffic: Traffic, p: int, bytes: float, chunks: int) -> None:
    """Half of the bytes up and down each of two trees, one of which counts ranks backwards: its leaves are the other's
    parents."""
    piece = bytes / 2 / chunks
    for _ in range(chunks):
        for ranks in (range(p), range(p - 1, -1, -1)):
            arrived: list[list[int]] = [[] for _ in range(p)]
            for i in range(p - 1, 0, -1):
                up = (i - 1) // 2
                arrived[up].append(traffic.send(ranks[i], ranks[up], piece, arrived[i]))
            for i in range(1, p):
                up = (i - 1) // 2
                arrived[i] = [traffic.send(ranks[up], ranks[i], piece, arrived[up])]


def binomial(traffic: Traffic, ranks: list[int], bytes: float) -> dict[int, list[int]]:
    """From ranks[0] to all; what arrives at each. The longest way goes first."""
    got: dict[int, list[int]] = {0: []}
    distance = 1 << (len(ranks) - 1).bit_length()
    while (distance := distance // 2) >= 1:
        for i in list(got):
            if i + distance < len(ranks):
                got[i + distance] = [traffic.send(ranks[i], ranks[i + distance], bytes, got[i])]
    return got
