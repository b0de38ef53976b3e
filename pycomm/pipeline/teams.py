"""Teams: the ranks of one place in a pipeline, as replicas of its stages and as shards of their layers.

    teams = Teams([(2, 1), (1, 2)])     # of 4 ranks, 2 are replicas, and the other 2 share one stage's layers
    part = split(model, 2)[teams.team]
    if teams.team == 1:
        parallelize(part, plan, teams.shard_group)
    Pipeline("1f1b", PipelineStage(part, teams.team, 2), microbatches=8, teams=teams)

Replicas take rows of each microbatch, as even as can be; between teams with different numbers of replicas each rank
sends the rows to those that go on with them. Shards all have whole values at a stage's ends, so the receiving team's
shard t takes them from the sending team's shard t modulo its number.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pycomm.errors import InvalidArgument, MismatchError
from pycomm.tensor_parallel.group import Group, GroupLike, group_of


class Size(NamedTuple):
    """Of a team."""

    replicas: int
    shards: int

    @property
    def ranks(self) -> int:
        """Its number of ranks."""
        return self.replicas * self.shards


class Piece(NamedTuple):
    """What two ranks exchange of one message."""

    peer: int
    #: Of this rank's tensors; None: they go as they are, whatever their shapes, since both have the same rows.
    rows: slice | None


def share_of(rows: int, replicas: int, replica: int) -> tuple[int, int]:
    """Where a replica's part of so many rows begins and ends; numbers differ by one at most."""
    small, more = divmod(rows, replicas)
    begin = small * replica + min(replica, more)
    return begin, begin + small + (replica < more)


def checksum(tensors: Sequence[Tensor]) -> int:
    """Of their bits."""
    found = 0
    for tensor in tensors:
        flat = tensor.detach().contiguous().reshape(-1)
        if flat.numel():
            found = zlib.crc32(flat.view(torch.uint8).cpu().numpy().tobytes(), found)
    return found


class Teams:
    """Collective: divides a group's ranks into teams, one for each of the schedule's ranks.

    sizes: of each team (replicas, shards). Ranks are numbered by team, then replica, then shard, so that shards, which
    communicate most, are neighbours. group: the pipeline's ranks; the default group if None.

    `team`, `replica` and `shard` say where this rank is. `replica_group` are the ranks that average its gradients,
    `shard_group` those that share its layers, for parallelize(); both may be this rank alone.

    Raises InvalidArgument if the sizes are not those of the group.
    """

    def __init__(self, sizes: Sequence[tuple[int, int]], group: GroupLike = None) -> None:
        self._set(sizes, group_of(group))
        if self.group.process_group is None:
            self.replica_group: dist.ProcessGroup | None = None
            self.shard_group: dist.ProcessGroup | None = None
            return
        here = self.sizes[self.team]
        self.replica_group = self._make(
            self.rank_of(self.team, replica, self.shard) for replica in range(here.replicas)
        )
        self.shard_group = self._make(
            self.rank_of(self.team, self.replica, shard) for shard in range(here.shards)
        )

    @classmethod
    def of_one(cls, group: Group) -> Teams:
        """Not collective: each rank a team of its own."""
        teams = cls.__new__(cls)
        teams._set([(1, 1)] * group.world_size, group)
        teams.replica_group = teams.shard_group = None
        return teams

    def _set(self, sizes: Sequence[tuple[int, int]], group: Group) -> None:
        self.group = group
        self.sizes = tuple(Size(*size) for size in sizes)
        if not self.sizes or any(min(size) < 1 for size in self.sizes):
            raise InvalidArgument(f"teams have 1 replica and 1 shard at least: {list(sizes)}")
        ends = [0]
        for size in self.sizes:
            ends.append(ends[-1] + size.ranks)
        if ends[-1] != group.world_size:
            raise InvalidArgument(
                f"teams of {' + '.join(str(s.ranks) for s in self.sizes)} = {ends[-1]} ranks, but the group has "
                f"{group.world_size}"
            )
        self._begins = ends
        self._pieces: dict[tuple[int, int, bool], list[Piece]] = {}
        self.team = next(team for team, end in enumerate(ends[1:]) if group.rank < end)
        inside = group.rank - ends[self.team]
        self.replica, self.shard = divmod(inside, self.sizes[self.team].shards)

    def _make(self, members: Iterable[int]) -> dist.ProcessGroup:
        whole = self.group.process_group
        assert whole is not None
        ranks = [dist.get_global_rank(whole, rank) for rank in members]
        made = dist.new_group(
            ranks, backend=dist.get_backend(whole), use_local_synchronization=True
        )
        assert isinstance(made, dist.ProcessGroup)  # this rank is a member
        return made

    def __repr__(self) -> str:
        return f"teams of {[tuple(size) for size in self.sizes]}"

    @property
    def replicas(self) -> int:
        """Of this rank's team."""
        return self.sizes[self.team].replicas

    @property
    def shards(self) -> int:
        """Of this rank's team."""
        return self.sizes[self.team].shards

    def rank_of(self, team: int, replica: int = 0, shard: int = 0) -> int:
        """In the pipeline's group."""
        return self._begins[team] + replica * self.sizes[team].shards + shard

    def ranks_of(self, team: int) -> range:
        """In the pipeline's group, all of a team."""
        return range(self._begins[team], self._begins[team + 1])

    def share(self, rows: int) -> tuple[int, int]:
        """Of a microbatch's rows, where this replica's begin and end."""
        return share_of(rows, self.replicas, self.replica)

    def pieces(self, team: int, rows: int, sends: bool) -> list[Piece]:
        """Of a message of so many rows to, or from, another team: those of this rank, in order of their rows."""
        found = self._pieces.get((team, rows, sends))
        if found is None:
            found = self._pieces[team, rows, sends] = self._find_pieces(team, rows, sends)
        return found

    def _find_pieces(self, team: int, rows: int, sends: bool) -> list[Piece]:
        here, there = self.sizes[self.team], self.sizes[team]
        begin, end = self.share(rows)
        if sends:
            shards = range(self.shard, there.shards, here.shards)
        else:
            shards = range(self.shard % there.shards, there.shards)[:1]
        found = []
        for replica in range(there.replicas):
            low, high = share_of(rows, there.replicas, replica)
            low, high = max(low, begin), min(high, end)
            if low < high:
                part = slice(low - begin, high - begin) if self.splits(team) else None
                found += [Piece(self.rank_of(team, replica, shard), part) for shard in shards]
        return found

    def check_alike(self, tensors: Sequence[Tensor], what: str) -> None:
        """Collective over shards; raises MismatchError, on all of them, unless they have the same bits."""
        alike = group_of(self.shard_group).gather_numbers([checksum(tensors)])
        if others := [shard for shard, (seen,) in enumerate(alike) if seen != alike[0][0]]:
            raise MismatchError(
                f"{what} differs between shards 0 and {others[0]} of team {self.team}, rank "
                f"{self.group.rank} of the pipeline; a stage's ends are whole on all shards where its neighbour has "
                "another number of them"
            )

    def splits(self, team: int) -> bool:
        """Whether messages between this team and that one are divided by rows."""
        return self.sizes[team].replicas != self.replicas
