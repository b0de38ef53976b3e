"""Runs any schedule: one interpreter of its actions, on the stages of this rank.

What a step does, in the order of the code: the ranks agree (agreement.py), then each goes through its program
(program.py, step.py): F takes what the stage before has handed on, by memory or a message (messages.py), B or I and W
go back (backward.py); behind a stage's last one its gradients are averaged over replicas, and tied ones are summed
(gradients.py). Receives are posted ahead of the computation before the one that needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pycomm.backend import find_communicator
from pycomm.errors import Error, InvalidArgument, MismatchError
from pycomm.pipeline.agreement import UNSEEN, Agreement, Rank, agree, digest, rows_of
from pycomm.pipeline.gradients import Replicas, Tied
from pycomm.pipeline.measure import measure
from pycomm.pipeline.messages import Mail
from pycomm.pipeline.program import Program
from pycomm.pipeline.schedules import Costs, Kind, Schedule, build, validate
from pycomm.pipeline.schedules.action import actions_of
from pycomm.pipeline.stage import PipelineStage
from pycomm.pipeline.step import Step
from pycomm.pipeline.teams import Teams, checksum
from pycomm.pipeline.values import Layout, tensors_of
from pycomm.tensor_parallel.group import GroupLike, group_of

LossFunction = Callable[..., Tensor]
#: Calls of so many kinds are remembered, with the layouts of their messages.
_MOST_KINDS = 16


class Evaluation(NamedTuple):
    """What evaluate() returns; on the last stage's rank, None elsewhere."""

    output: Any
    loss: Tensor | None


class Pipeline:
    """The stages of this rank, and the schedule by which all ranks train.

        pipeline = Pipeline("1f1b", PipelineStage(part, rank, 4), microbatches=8, loss_fn=cross_entropy)
        loss = pipeline.step(x, target=y)    # gradients are in .grad, as after loss.backward()

    schedule: a name for build(), or a Schedule. stages: all of this rank, in any order.
    loss_fn: takes the last stage's output and, if there is one, the target; returns the mean over a microbatch's rows.
    None: the output is the loss.
    data_group: ranks that have the same stages of other replicas; gradients are averaged over them in every step().
    teams: how many ranks have each of the schedule's places, as replicas and as shards: see Teams. Then all ranks of
    the first team pass the same whole inputs, those of the last one the same targets, and all of the last one have
    losses and outputs.
    dynamic: layouts travel with every message. For models whose outputs' shapes depend on more than their inputs'
    shapes; else a change raises MismatchError.

    Every rank makes the same calls. Raises InvalidArgument for stages that are not the schedule's, before anything is
    sent. CPU tensors over any backend, and others over those that take them; only CPU tensors have been tried.
    """

    def __init__(
        self,
        schedule: str | Schedule,
        stages: PipelineStage | Sequence[PipelineStage],
        microbatches: int | None = None,
        *,
        loss_fn: LossFunction | None = None,
        data_group: GroupLike = None,
        dynamic: bool = False,
        teams: Teams | None = None,
    ) -> None:
        own = [stages] if isinstance(stages, PipelineStage) else list(stages)
        if not own:
            raise InvalidArgument("a pipeline needs a stage on every rank")
        self.stages = {stage.index: stage for stage in own}
        self.group = group_of(own[0].group)
        self.loss_fn, self.dynamic = loss_fn, dynamic
        if teams is not None and data_group is not None:
            raise InvalidArgument("teams have replicas of their own: data_group= goes without them")
        self.teams = teams or Teams.of_one(self.group)
        places = len(self.teams.sizes)
        if isinstance(schedule, str):
            count = microbatches or 2 * places
            schedule = build(schedule, places, count, own[0].num_stages // places or 1)
        elif microbatches not in (None, schedule.microbatches):
            raise InvalidArgument(
                f"the schedule is for {schedule.microbatches} microbatches, not {microbatches}"
            )
        self.schedule = schedule
        self._check_stages(own)
        validate(schedule)
        forwards = tuple(
            tuple(a for a in actions_of(program) if a.kind == Kind.F)
            for program in schedule.programs
        )
        rank = self.teams.team
        self._training = Program.of(schedule, rank)
        self._evaluating = Program.of(replace(schedule, programs=forwards), rank)
        self._parameters = [p for stage in own for _, p in stage.named_parameters()]
        device = self._parameters[0].device if self._parameters else torch.device("cpu")
        process_group = self.group.process_group
        self.mail: Mail | None = None
        if process_group is not None:
            self.mail = Mail(process_group, device, schedule.stages, schedule.microbatches)
        replicas = None if data_group is None else group_of(data_group).process_group
        self.replicas = Replicas(replicas if teams is None else teams.replica_group)
        self.averages = True
        self.tied: Tied | None = None
        self._layouts: dict[Any, dict[tuple[int, int], Layout]] = {}
        self._broken = ""
        #: Of the last step on this rank: the most activations that it held at once.
        self.peak_activations = 0

    def _check_stages(self, own: Sequence[PipelineStage]) -> None:
        schedule, rank = self.schedule, self.teams.team
        if self.teams.group.process_group is not self.group.process_group:
            raise InvalidArgument(f"the {self.teams} are of another group than the stages")
        if schedule.ranks != len(self.teams.sizes):
            raise InvalidArgument(
                f"the schedule is for {schedule.ranks} ranks, the group has {len(self.teams.sizes)}"
            )
        wanted = schedule.stages_of(rank)
        if sorted(stage.index for stage in own) != wanted or own[0].num_stages != schedule.stages:
            raise InvalidArgument(
                f"rank {rank}: {schedule.name} has stages {wanted} of {schedule.stages} here, not "
                f"{sorted(stage.index for stage in own)} of {own[0].num_stages}"
            )

    @property
    def counted_elsewhere(self) -> list[torch.nn.Parameter]:
        """Tied parameters that an earlier rank has, too: clip_grad_norm_() wants them."""
        return self.tied.counted_elsewhere if self.tied else []

    def step(
        self,
        *inputs: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        everywhere: bool = False,
        loss_scale: float = 1.0,
    ) -> Tensor | None:
        """Collective: forward and backward of a batch, in microbatches; adds to the parameters' `.grad`.

        inputs: of stage 0; target: of the last stage; other ranks' are ignored. Tensors are split along dimension 0 as
        evenly as can be, other values go to every microbatch. The gradients are those of the batch's mean loss: of
        microbatches the losses count by their rows. Calls add up, as those of backward() do.

        losses: gets the microbatches' on the last stage's rank. loss_scale: the loss is multiplied by it for backward;
        of a GradScaler, float(scaler.scale(torch.ones(()))) on every rank. Returns the mean loss (float32 or wider,
        without a graph), on the rank of the last stage, or on all with `everywhere`; None elsewhere.

        Raises InvalidArgument or MismatchError, on all ranks, before anything is sent; what a stage raises on its rank,
        and AbortedError in its words on the others where the group is pycomm's. The pipeline cannot be used after that.
        """
        found = self.run(self._training, inputs, target, everywhere, loss_scale)
        if losses is not None:
            losses += found.losses
        return found.loss

    def evaluate(self, *inputs: Any, target: Any = None, everywhere: bool = False) -> Evaluation:
        """Collective: forward alone, without gradients. Modules stay in the mode in which they are.

        Returns the output of the whole batch and, if there is a target, the loss, on the last stage's rank; with
        `everywhere` all ranks get the loss.
        """
        with torch.no_grad():
            found = self.run(self._evaluating, inputs, target, everywhere)
        return Evaluation(found.output(), found.loss)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Steps within leave gradients of the replicas as they are; the next step outside averages all of them."""
        before, self.averages = self.averages, False
        try:
            yield
        finally:
            self.averages = before

    def run(
        self,
        program: Program,
        inputs: Any,
        target: Any,
        everywhere: bool = False,
        loss_scale: float = 1.0,
        make: Callable[..., Step] = Step,
    ) -> Step:
        """Collective: what step(), evaluate() and measure() have in common."""
        if self._broken:
            raise Error(f"rank {self.group.rank}: an earlier step failed: {self._broken}")
        agreed = self._agree(program, inputs, target, everywhere)
        if self.tied is None and self.mail is not None:
            tied = Tied(self.mail, self.teams)
            tied.meet(list(self.stages.values()))
            self.tied = tied
        step = make(self, program, agreed, inputs, target, loss_scale)
        try:
            step.play()
            if everywhere:
                self._tell_loss(step)
        except BaseException as error:
            self._give_up(step, error)
            raise
        if program.trains:
            self.peak_activations = step.peak
        return step

    def _agree(self, program: Program, inputs: Any, target: Any, everywhere: bool) -> Agreement:
        """Collective."""
        schedule, rank = self.schedule, self.teams.team
        seen: list[Any] = []
        size, problem = UNSEEN, None
        try:
            if rank == schedule.placement[0]:
                seen.append(inputs)
                size = rows_of(inputs, "inputs")
                if size == UNSEEN:
                    raise InvalidArgument(f"rank {self.group.rank} has stage 0, which needs inputs")
            if rank == schedule.placement[-1]:
                seen.append(target)
                rows = rows_of(target, "targets")
                if size not in (UNSEEN, rows) and rows != UNSEEN:
                    raise InvalidArgument(f"inputs of {size} rows, but targets of {rows}")
                size = size if size != UNSEEN else rows
        except Error as error:
            problem = error
        shapes = [(tuple(t.shape), t.dtype) for t in tensors_of(seen)]
        trained = sum(p.requires_grad for p in self._parameters)
        modes = [stage.module.training for stage in self.stages.values()]
        is_first_of_several = self.tied is None and self.teams.sizes[rank].ranks > 1
        mine = Rank(
            program=program.digest ^ digest(self.teams.sizes),
            mode=int(everywhere),
            sight=digest((shapes, trained, modes)),
            size=size,
            is_wrong=problem is not None,
            content=checksum(tensors_of(seen)) if is_first_of_several else 0,
        )
        return agree(self.teams, mine, schedule, problem)

    def _tell_loss(self, step: Step) -> None:
        """Collective: from the last stage's rank to all."""
        if self.group.process_group is None:
            return
        there = step.loss is not None
        told = torch.tensor([there, step.loss if there else 0.0], dtype=torch.float64)
        last = self.teams.rank_of(self.schedule.placement[-1])
        source = dist.get_global_rank(self.group.process_group, last)
        dist.broadcast(told, source, group=self.group.process_group)
        if told[0] and not there:
            step.loss = told[1]

    def _give_up(self, step: Step, error: BaseException) -> None:
        """So that nobody waits for what will not come."""
        self._broken = f"{step.where}: {type(error).__name__}: {error}"
        self._abort(self.replicas.group, self.teams.shard_group)
        if isinstance(error, Error) and not isinstance(error, (InvalidArgument, MismatchError)):
            return  # the group has told all of its ranks
        self._abort(self.group.process_group)

    def _abort(self, *groups: dist.ProcessGroup | None) -> None:
        for group in groups:
            communicator = None if group is None else find_communicator(group)
            if communicator is not None:
                communicator.abort(self._broken)

    def measure(self, *inputs: Any, target: Any = None, steps: int = 3) -> Costs:
        """Collective: what the stages' F, B, I and W take in seconds, and activations in bytes: see measure.py."""
        return measure(self, inputs, target, steps)

    def layouts_of(self, agreed: Agreement) -> tuple[dict[tuple[int, int], Layout], bool]:
        """Of such a call's messages, by receiving stage and microbatch; and whether they still have to travel."""
        known = None if self.dynamic else self._layouts.get(agreed.key)
        if known is None:
            known = self._layouts[agreed.key] = {}
            if len(self._layouts) > _MOST_KINDS:
                del self._layouts[next(iter(self._layouts))]
            return known, True
        return known, False
