"""Messages between a pipeline's ranks: tagged by stage, microbatch and direction, received where they were posted."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from pycomm.errors import InvalidArgument, MismatchError
from pycomm.pipeline.schedules.action import Action, Kind
from pycomm.pipeline.teams import Piece
from pycomm.pipeline.values import Layout, Meta

#: Of one message of the schedule: its tensors, then the length of its layout, and the layout.
TENSORS: Final = 62
_LENGTH, _LAYOUT, _TAGS = TENSORS, TENSORS + 1, TENSORS + 2
_MOST_TAG: Final = 2**31 - 1


def tag_of(action: Action, microbatches: int) -> int:
    """The first one of a message's; the same for its send and its receive."""
    stage, kind, microbatch = action
    is_forward = kind in (Kind.SEND_F, Kind.RECV_F)
    boundary = stage if kind in (Kind.SEND_F, Kind.RECV_B) else stage - 1
    return ((boundary * microbatches + microbatch) * 2 + is_forward) * _TAGS


class Posted:
    """A message that is expected."""

    def __init__(self, tensors: list[Tensor], works: list[Any]) -> None:
        self.tensors, self._works = tensors, works

    def wait(self) -> list[Tensor]:
        """Its tensors, once they are there; raises what the group says of a rank that is gone or late."""
        for work in self._works:
            work.wait()
        return self.tensors


class Mail:
    """What one rank sends and receives in its group; sends are waited for at the end, and keep their tensors."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, stages: int, microbatches: int
    ) -> None:
        self.group, self.device = group, device
        self.end = stages * microbatches * 2 * _TAGS
        if self.end + _TAGS * stages > _MOST_TAG:
            raise InvalidArgument(
                f"{stages} stages x {microbatches} microbatches are more messages than there are tags"
            )
        self._sending: deque[tuple[Any, Tensor]] = deque()

    def send(self, tensors: Sequence[Tensor], pieces: Sequence[Piece], tag: int) -> None:
        """Starts it, to each piece's rank; the tensors are left alone until flush()."""
        if len(tensors) > TENSORS:
            raise InvalidArgument(
                f"a stage hands on {len(tensors)} tensors, but a message has {TENSORS} at most"
            )
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()[0].wait()
        for index, tensor in enumerate(tensors):
            whole = tensor.contiguous()
            for peer, rows in pieces:
                part = whole if rows is None else whole[rows]
                self._sending.append((self.group.send([part], peer, tag + index), part))

    def post(self, metas: Sequence[Meta], pieces: Sequence[Piece], tag: int) -> Posted:
        """Expects tensors like these, each piece from its rank."""
        tensors = [meta.empty(self.device) for meta in metas]
        works = [
            self.group.recv([t if rows is None else t[rows]], peer, tag + i)
            for i, t in enumerate(tensors)
            for peer, rows in pieces
        ]
        return Posted(tensors, works)

    def send_layout(self, layout: Layout, pieces: Sequence[Piece], tag: int) -> None:
        """Ahead of a message whose receivers do not know it."""
        for peer, rows in pieces:
            part = layout if rows is None else layout.with_rows(rows.stop - rows.start)
            self._send_layout(part, peer, tag)

    def _send_layout(self, layout: Layout, peer: int, tag: int) -> None:
        text = torch.frombuffer(bytearray(pickle.dumps(layout)), dtype=torch.uint8).to(self.device)
        length = torch.tensor([len(text)], device=self.device)
        for part, offset in ((length, _LENGTH), (text, _LAYOUT)):
            self._sending.append((self.group.send([part], peer, tag + offset), part))

    def receive_layout(self, pieces: Sequence[Piece], tag: int) -> Layout:
        """Waits for it; raises MismatchError where the pieces' senders have different ones."""
        layouts = [self._receive_layout(piece.peer, tag) for piece in pieces]
        if (rows := pieces[-1].rows) is not None:
            layouts = [layout.with_rows(rows.stop) for layout in layouts]
        for piece, layout in zip(pieces, layouts, strict=True):
            if layout != layouts[0]:
                raise MismatchError(
                    f"rank {pieces[0].peer} of the pipeline hands on {layouts[0]}, but rank {piece.peer}, which has "
                    f"other rows of the same microbatch, {layout}"
                )
        return layouts[0]

    def _receive_layout(self, peer: int, tag: int) -> Layout:
        length = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.group.recv([length], peer, tag + _LENGTH).wait()
        text = torch.empty(int(length), dtype=torch.uint8, device=self.device)
        self.group.recv([text], peer, tag + _LAYOUT).wait()
        layout: Layout = pickle.loads(text.cpu().numpy().tobytes())
        return layout

    def flush(self) -> None:
        """Waits until all that was sent is out of this rank's hands."""
        while self._sending:
            self._sending.popleft()[0].wait()
