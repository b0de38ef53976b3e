"""One call of a pipeline: what there is of every microbatch, and what each kind of action does with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from pycomm.errors import InvalidArgument, MismatchError
from pycomm.pipeline import backward
from pycomm.pipeline.agreement import Agreement
from pycomm.pipeline.messages import Posted
from pycomm.pipeline.program import Program
from pycomm.pipeline.schedules import Action, Kind
from pycomm.pipeline.stage import Forwarded, Handed
from pycomm.pipeline.teams import Piece, share_of
from pycomm.pipeline.values import map_tensors, split_rows, take_apart, tensors_of

if TYPE_CHECKING:
    from pycomm.pipeline.runtime import Pipeline


class Step:
    """One call: what there is of every microbatch, and the actions that change it."""

    def __init__(
        self,
        pipeline: Pipeline,
        program: Program,
        agreed: Agreement,
        inputs: Any,
        target: Any,
        loss_scale: float,
    ) -> None:
        self.pipeline, self.program, self.mail = pipeline, program, pipeline.mail
        self.has_target, self.loss_scale = target is not None, loss_scale
        self.teams, self.rows, self.size = pipeline.teams, agreed.rows, agreed.size
        #: Of each microbatch, this replica's.
        self.own_rows: list[tuple[int, int]] = []
        for begin, end in self.rows:
            first, last = self.teams.share(end - begin)
            self.own_rows.append((begin + first, begin + last))
        stages = pipeline.stages.values()
        if any(stage.is_first for stage in stages):
            self.inputs = split_rows(inputs, self.own_rows)
        if any(stage.is_last for stage in stages):
            self.targets = split_rows(target, self.own_rows)
        self.layouts, self.fresh = pipeline.layouts_of(agreed)
        self.losses: list[Tensor] = []
        self.outputs: list[Any] = []
        self.loss: Tensor | None = None
        self.action: Action | None = None
        self.peak = 0
        self._handed: dict[tuple[int, int], Handed] = {}
        self._going: dict[tuple[int, int], Handed] = {}
        self._forwarded: dict[tuple[int, int], Forwarded] = {}
        self._gradients: dict[tuple[int, int], list[Tensor | None]] = {}
        self._returning: dict[tuple[int, int], list[Tensor]] = {}
        self._weights: dict[tuple[int, int], backward.WeightPart] = {}
        self._posted: dict[Action, Posted] = {}
        self.act: dict[Kind, Callable[[Action], None]] = {
            Kind.F: self.forward,
            Kind.B: self.backward,
            Kind.I: self.backward_input,
            Kind.W: self.backward_weight,
            Kind.SEND_F: self.send_forward,
            Kind.RECV_F: self.receive_forward,
            Kind.SEND_B: self.send_backward,
            Kind.RECV_B: self.receive_backward,
        }

    @property
    def where(self) -> str:
        """How far it has come, in words."""
        return f"rank {self.pipeline.group.rank}, {self.action or 'behind the last action'}"

    def play(self) -> None:
        """All of it."""
        program, tied = self.program, self.pipeline.tied if self.program.trains else None
        if tied:
            tied.set_aside()
        for index, action in enumerate(program.actions):
            if not self.fresh:
                for message in program.posts[index]:
                    self.post(message)
            self.action = action
            self.act[action.kind](action)
            if index in program.ends:
                self.average(action.stage)
        self.action = None
        if tied:
            tied.sum()
            if self.pipeline.averages:
                self.pipeline.replicas.start(tied.parameters)
        if program.trains:
            self.pipeline.replicas.finish()
        if self.mail is not None:
            self.mail.flush()
        self.conclude()

    def average(self, stage: int) -> None:
        """Starts what replicas have to do with a stage's gradients, but for tied ones, which are summed first."""
        if not self.pipeline.averages or self.pipeline.replicas.world_size == 1:
            return
        tied = {id(p) for p in self.pipeline.tied.parameters} if self.pipeline.tied else set()
        own = self.pipeline.stages[stage].module.parameters()
        self.pipeline.replicas.start(p for p in own if id(p) not in tied)

    # ---- forward

    def forward(self, action: Action) -> None:
        """F."""
        stage, place = self.pipeline.stages[action.stage], (action.stage, action.microbatch)
        leaves: list[Tensor] = []
        if stage.is_first:
            output, skips = stage.forward(self.inputs[action.microbatch], {})
        else:
            arguments, skips, leaves = self._handed.pop(place).as_leaves(self.program.trains)
            output, skips = stage.forward(arguments, skips)
        if stage.is_last:
            outputs = self.finish_output(action.microbatch, output, skips)
            self._forwarded[place] = Forwarded(leaves, outputs)
        else:
            handed, outputs = Handed.of(output, skips)
            self._forwarded[place] = Forwarded(leaves, outputs)
            if (action.stage + 1) in self.pipeline.stages:
                self._handed[action.stage + 1, action.microbatch] = handed
            else:
                self._going[place] = handed
        if not self.program.trains:
            del self._forwarded[place]
        self.peak = max(self.peak, len(self._forwarded) + len(self._weights))

    def finish_output(self, microbatch: int, output: Any, skips: dict[str, Tensor]) -> list[Tensor]:
        """Of the last stage: notes the loss, and returns what backward begins with."""
        if skips:
            raise InvalidArgument(f"put aside, and never taken out: {sorted(skips)}")
        if not self.program.trains:
            self.outputs.append(output)
        if not self.program.trains and not self.has_target:
            return []
        target = (self.targets[microbatch],) if self.has_target else ()
        loss = output
        if self.pipeline.loss_fn:
            device = next((t.device.type for t in tensors_of(output)), "cpu")
            with self.pipeline.stages[self.pipeline.schedule.stages - 1].precision(device):
                loss = self.pipeline.loss_fn(output, *target)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise InvalidArgument(
                f"the loss of a microbatch must be a tensor of one element, not {take_apart(loss)[1]}"
            )
        begin, end = self.own_rows[microbatch]
        self.losses.append(loss.detach())
        # Replicas' gradients are averaged, so each has as many times its part of the sum as there are replicas.
        weight = (end - begin) / self.size * self.teams.replicas
        return [loss * (weight * self.loss_scale)] if loss.requires_grad else []

    # ---- backward

    def backward(self, action: Action) -> None:
        """B."""
        place = (action.stage, action.microbatch)
        record = self._forwarded.pop(place)
        gradients = self._gradients.pop(place, [None] * len(record.outputs))
        found = backward.full(record.outputs, gradients, record.inputs) if record.outputs else []
        self.hand_back(place, record.inputs, found)

    def backward_input(self, action: Action) -> None:
        """I."""
        place = (action.stage, action.microbatch)
        record = self._forwarded.pop(place)
        gradients = self._gradients.pop(place, [None] * len(record.outputs))
        found: list[Tensor | None] = []
        if record.outputs and self.pipeline.stages[action.stage].checkpoint:
            found = backward.full(record.outputs, gradients, record.inputs)
        elif record.outputs:
            found, left = backward.input_part(record.outputs, gradients, record.inputs)
            if left.branches or left.roots:
                self._weights[place] = left
        self.hand_back(place, record.inputs, found)

    def backward_weight(self, action: Action) -> None:
        """W."""
        left = self._weights.pop((action.stage, action.microbatch), None)
        if left:
            backward.weight_part(left)

    def hand_back(
        self, place: tuple[int, int], leaves: list[Tensor], gradients: list[Tensor | None]
    ) -> None:
        """The gradients of a stage's input, zeros where backward found none, to the stage before."""
        stage, microbatch = place
        if stage == 0:
            return
        padded = [*gradients, *[None] * (len(leaves) - len(gradients))]
        whole = [
            torch.zeros_like(leaf) if gradient is None else gradient
            for leaf, gradient in zip(leaves, padded, strict=True)
        ]
        if stage - 1 in self.pipeline.stages:
            self._gradients[stage - 1, microbatch] = list(whole)
        else:
            self._returning[place] = whole

    # ---- messages

    def pieces(self, action: Action) -> tuple[list[Piece], int]:
        """Of a message: what this rank exchanges with which others, and its first tag."""
        team, tag = self.program.routes[action]
        begin, end = self.rows[action.microbatch]
        sends = action.kind in (Kind.SEND_F, Kind.SEND_B)
        return self.teams.pieces(team, end - begin, sends), tag

    def post(self, action: Action) -> None:
        """Expects a message of a known layout."""
        assert self.mail is not None
        if action.kind == Kind.RECV_F:
            metas = self.layouts[action.stage, action.microbatch].tensors
        else:
            metas = self.layouts[action.stage + 1, action.microbatch].gradients
        self._posted[action] = self.mail.post(metas, *self.pieces(action))

    def send_forward(self, action: Action) -> None:
        """SEND_F."""
        assert self.mail is not None
        handed = self._going.pop((action.stage, action.microbatch))
        pieces, tag = self.pieces(action)
        place = (action.stage + 1, action.microbatch)
        if self.fresh:
            self.check_handed(handed, action)
            self.mail.send_layout(handed.layout, pieces, tag)
            self.layouts[place] = handed.layout
        elif handed.layout is not self.layouts[place] and handed.layout != self.layouts[place]:
            raise MismatchError(
                f"stage {action.stage} hands on {handed.layout} as microbatch {action.microbatch}, but "
                f"{self.layouts[place]} in an earlier step with the same inputs' shapes; Pipeline(dynamic=True) "
                "lets it"
            )
        self.mail.send(handed.tensors, pieces, tag)

    def check_handed(self, handed: Handed, action: Action) -> None:
        """Raises where the next stage's ranks would take it for something else."""
        team, _ = self.program.routes[action]
        begin, end = self.own_rows[action.microbatch]
        if self.teams.splits(team):
            for meta in handed.layout.tensors:
                if meta.shape[:1] != (end - begin,):
                    raise InvalidArgument(
                        f"stage {action.stage} hands on {meta} to a team with another number of replicas, which "
                        f"divides it by rows: its first dimension must be the microbatch's, here {end - begin}"
                    )
        if self.teams.sizes[team].shards != self.teams.shards:
            self.teams.check_alike(handed.tensors, f"what stage {action.stage} hands on")

    def receive_forward(self, action: Action) -> None:
        """RECV_F."""
        assert self.mail is not None
        place = (action.stage, action.microbatch)
        if self.fresh:
            self.layouts[place] = self.mail.receive_layout(*self.pieces(action))
            self.post(action)
        self._handed[place] = Handed(self._posted.pop(action).wait(), self.layouts[place])

    def send_backward(self, action: Action) -> None:
        """SEND_B."""
        assert self.mail is not None
        gradients = self._returning.pop((action.stage, action.microbatch))
        self.mail.send(gradients, *self.pieces(action))

    def receive_backward(self, action: Action) -> None:
        """RECV_B."""
        if self.fresh:
            self.post(action)
        arrived = self._posted.pop(action).wait()
        team, _ = self.program.routes[action]
        if self.teams.splits(team):  # see finish_output
            for gradient in arrived:
                gradient *= self.teams.replicas / self.teams.sizes[team].replicas
        self._gradients[action.stage, action.microbatch] = list(arrived)

    # ---- results

    def conclude(self) -> None:
        """The losses, of all replicas, and their mean."""
        if not self.losses:
            return
        wide = torch.stack([loss.reshape(()) for loss in self.losses])
        wide = wide.to(torch.promote_types(wide.dtype, torch.float32))
        if self.teams.replicas > 1:
            wide *= wide.new_tensor([end - begin for begin, end in self.own_rows])
            dist.all_reduce(wide, group=self.teams.replica_group)
            wide /= wide.new_tensor([end - begin for begin, end in self.rows])
            self.losses = list(wide)
        self.loss = (wide * wide.new_tensor([(e - b) / self.size for b, e in self.rows])).sum()

    def output(self) -> Any:
        """Of all microbatches, one behind the other; None where the last stage is elsewhere."""
        if not self.outputs:
            return None
        parts = [tensors_of(output) for output in self.outputs]
        joined = iter([torch.cat(self.of_replicas(rows)) for rows in zip(*parts, strict=True)])
        return map_tensors(lambda _: next(joined), self.outputs[0])

    def of_replicas(self, own: Sequence[Tensor]) -> list[Tensor]:
        """Collective over replicas: the outputs of whole microbatches, each replica's rows in their place."""
        if self.teams.replicas == 1:
            return list(own)
        group, found = self.teams.replica_group, []
        assert group is not None
        for tensor, (begin, end) in zip(own, self.rows, strict=True):
            parts = []
            for replica in range(self.teams.replicas):
                first, last = share_of(end - begin, self.teams.replicas, replica)
                is_mine = replica == self.teams.replica
                shape = (last - first, *tensor.shape[1:])
                part = tensor.contiguous() if is_mine else tensor.new_empty(shape)
                if is_mine and part.shape != shape:
                    raise InvalidArgument(
                        f"the output of {last - first} rows has the shape {tuple(part.shape)}: with replicas, its "
                        "first dimension must be the batch's"
                    )
                dist.broadcast(part, dist.get_global_rank(group, replica), group=group)
                parts.append(part)
            found.append(torch.cat(parts))
        return found
