"""What becomes of a stage's gradients behind its last backward: sums of tied parameters, averages over replicas."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pycomm.errors import InvalidArgument
from pycomm.pipeline.messages import Mail
from pycomm.pipeline.stage import PipelineStage
from pycomm.pipeline.teams import Piece, Teams
from pycomm.pipeline.values import Meta

_BUCKET_BYTES = 25 << 20


class Replicas:
    """Averages gradients over the ranks that have the same stage, beside what the pipeline still has to do."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.world_size = 1 if group is None else dist.get_world_size(group)
        self._started: list[tuple[Any, Tensor, list[Tensor]]] = []

    def start(self, parameters: Iterable[nn.Parameter]) -> None:
        """Collective, in buckets of one dtype each; a gradient that another replica has counts as zero here."""
        chosen = [parameter for parameter in parameters if parameter.requires_grad]
        if self.world_size == 1 or not chosen:
            return
        there = torch.tensor(
            [p.grad is not None for p in chosen], dtype=torch.uint8, device=chosen[0].device
        )
        dist.all_reduce(there, dist.ReduceOp.MAX, group=self.group)
        for parameter, is_there in zip(chosen, there.tolist(), strict=True):
            if is_there and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for bucket in _buckets([p.grad for p in chosen if p.grad is not None]):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            work = dist.all_reduce(flat, group=self.group, async_op=True)
            self._started.append((work, flat, bucket))

    def finish(self) -> None:
        """Waits for all that was started."""
        for work, flat, bucket in self._started:
            work.wait()
            flat /= self.world_size
            parts = flat.split([gradient.numel() for gradient in bucket])
            for gradient, part in zip(bucket, parts, strict=True):
                gradient.copy_(part.view_as(gradient))
        self._started = []


def _buckets(gradients: Sequence[Tensor]) -> list[list[Tensor]]:
    """Of one dtype each, and not much larger than they should be."""
    found: list[list[Tensor]] = []
    sizes: dict[torch.dtype, tuple[list[Tensor], int]] = {}
    for gradient in gradients:
        bucket, size = sizes.get(gradient.dtype, ([], _BUCKET_BYTES))
        if size >= _BUCKET_BYTES:
            bucket, size = [], 0
            found.append(bucket)
        bucket.append(gradient)
        sizes[gradient.dtype] = bucket, size + gradient.nbytes
    return found


class Tied:
    """Parameters that several ranks' stages have: every step's gradients are summed over them, once."""

    def __init__(self, mail: Mail, teams: Teams) -> None:
        self.mail, self.teams, self.rank = mail, teams, teams.group.rank
        self._owners: dict[str, list[int]] = {}
        self._own: dict[str, nn.Parameter] = {}
        self._before: dict[str, Tensor | None] = {}

    def meet(self, stages: Sequence[PipelineStage]) -> None:
        """Collective: learns who else has them; raises InvalidArgument, on all ranks, where that cannot be summed."""
        teams = self.teams
        mine = {name: parameter for stage in stages for name, parameter in stage.tied.items()}
        everyone: list[list[str]] = [[] for _ in range(teams.group.world_size)]
        dist.all_gather_object(everyone, sorted(mine), group=self.mail.group)
        for name in sorted({name for names in everyone for name in names}):
            owners = [
                team
                for team in range(len(teams.sizes))
                if any(name in everyone[rank] for rank in teams.ranks_of(team))
            ]
            if len({teams.sizes[team] for team in owners}) > 1:
                sizes = [tuple(teams.sizes[team]) for team in owners]
                raise InvalidArgument(
                    f"rank {self.rank}: {name} is tied between teams {owners} of (replicas, shards) {sizes}; they "
                    "must have the same sizes"
                )
            if len(owners) > 1 and teams.team in owners:
                self._owners[name] = [
                    teams.rank_of(owner, teams.replica, teams.shard) for owner in owners
                ]
            elif len(owners) > 1:
                self._owners[name] = []
        self._own = {name: mine[name] for name in self._owners if name in mine}

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those of this rank."""
        return list(self._own.values())

    @property
    def counted_elsewhere(self) -> list[nn.Parameter]:
        """Those of this rank that an earlier one has, too: see clip_grad_norm_()."""
        return [p for name, p in self._own.items() if self._owners[name][0] != self.rank]

    def set_aside(self) -> None:
        """Ahead of a step: what earlier steps have left is summed already."""
        for name, parameter in self._own.items():
            self._before[name], parameter.grad = parameter.grad, None

    @torch.no_grad()
    def sum(self) -> None:
        """Behind a step, on all owners: by the same order of addition, so to the same bits."""
        expected = []
        for index, (name, owners) in enumerate(self._owners.items()):
            if self.rank not in owners:
                continue
            parameter = self._own[name]
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            tag = self.mail.end + index
            meta = [Meta(tuple(own.shape), own.dtype, False)]
            others = [owner for owner in owners if owner != self.rank]
            posted = {owner: self.mail.post(meta, [Piece(owner, None)], tag) for owner in others}
            self.mail.send([own], [Piece(owner, None) for owner in others], tag)
            expected.append((name, own, posted))
        for name, own, posted in expected:
            parts = [
                own if owner == self.rank else posted[owner].wait()[0]
                for owner in self._owners[name]
            ]
            total = torch.stack(parts).sum(0) if len(parts) > 2 else parts[0] + parts[1]
            before = self._before.pop(name)
            self._own[name].grad = total if before is None else before + total
