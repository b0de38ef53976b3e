"""Compression in pycomm's DistributedDataParallel.

Encodings travel in C++ (csrc/c10d/direct_reducer.h), if the group is of backend pycomm. Over other backends, in modes
that need torch's Reducer, and with compressors that leave values out, compression is a communication hook of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from pycomm.backend import find_communicator
from pycomm.compression import state as _state
from pycomm.compression.codecs import Compressor, Encoding, compressor_of
from pycomm.compression.hook import HookState
from pycomm.compression.report import Layer, report
from pycomm.errors import InvalidArgument

if TYPE_CHECKING:
    from pycomm._core import Communicator
    from pycomm.ddp import DistributedDataParallel


def compression_of(
    compression: str | Compressor | None, error_feedback: bool | None, overlap: bool | None
) -> DdpCompression | HookedCompression | None:
    """By the arguments of DistributedDataParallel."""
    if compression is None:
        if error_feedback is not None:
            raise InvalidArgument("error_feedback needs compression")
        return None
    compressor = compressor_of(compression)
    if error_feedback is not None:
        compressor = replace(compressor, error_feedback=error_feedback)
    if isinstance(compressor, Encoding):
        return DdpCompression(compressor)
    if overlap:
        raise InvalidArgument(
            f"{type(compressor).__name__} works in the thread that runs backward; leave out overlap=True"
        )
    return HookedCompression(compressor)


class DdpCompression:
    """Tells a DirectReducer how gradients travel, and reads and writes its residuals by parameter name."""

    def __init__(self, encoding: Encoding) -> None:
        self.encoding = encoding
        self._named: list[tuple[str, torch.Tensor]] = []
        self._direct: Any = None
        self._step = 0
        self._world_size = 1
        self._warms_up: bool | None = None

    def renewed(self) -> DdpCompression:
        """The same for another Reducer, with nothing kept."""
        return DdpCompression(self.encoding)

    @property
    def is_attached(self) -> bool:
        """Whether gradients take this way."""
        return self._direct is not None

    def hooked(self) -> HookedCompression:
        """The same by torch's Reducer."""
        return HookedCompression(self.encoding)

    def refuse(self, ddp: DistributedDataParallel) -> NoReturn:
        """Where gradients would take torch's way, uncompressed."""
        _refuse_modes(self.encoding)

    def attach(self, ddp: DistributedDataParallel, communicator: Communicator) -> None:
        """To be called when the DirectReducer is there."""
        names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
        self._named = [(names[id(p)], p) for p in ddp._parameters_of_reducer]
        self._direct = ddp._direct
        self._world_size = communicator.world_size
        self._direct.set_seed((self.encoding.seed + communicator.rank) % 2**64)
        self._wire()

    def before_forward(self, ddp: DistributedDataParallel) -> None:
        """To be called before every synchronised forward."""
        _refuse_join(ddp)
        if not self.is_attached:
            self.refuse(ddp)
        if self._warms_up is not (self._step < self.encoding.warmup_steps):
            self._wire()
        self._step += 1

    def _wire(self) -> None:
        self._warms_up = self._step < self.encoding.warmup_steps
        kinds, of_parameter = self.encoding.wirings(self._named, self._step, self._world_size)
        self._direct.set_wirings(kinds, of_parameter)

    # ---- state

    def residuals(self) -> dict[str, torch.Tensor]:
        """By parameter name; the tensors themselves."""
        found = ((name, self._direct.residual(i)) for i, (name, _) in enumerate(self._named))
        return {name: residual for name, residual in found if residual is not None}

    def state_dict(self, ddp: DistributedDataParallel) -> dict[str, Any]:
        """Collective."""
        return _state.state_dict(self, _communicator_of(ddp), self._step)

    def load_state_dict(self, ddp: DistributedDataParallel, state: Mapping[str, Any]) -> None:
        """See pycomm.compression.state."""
        _state.check(state)
        self._step = int(state["step"])
        self._wire()
        _state.load_state_dict(self, _communicator_of(ddp), state)

    def report(self, ddp: DistributedDataParallel) -> list[Layer]:
        """See pycomm.compression.report."""
        return report(self.encoding, self._named, self.residuals(), self._world_size)


class HookedCompression:
    """Lets compressors that are Python average the buckets of torch's Reducer."""

    def __init__(self, compressor: Compressor) -> None:
        self.compressor = compressor
        self._state: HookState | None = None

    def renewed(self) -> DdpCompression | HookedCompression:
        """The same for another Reducer, with nothing kept."""
        if isinstance(self.compressor, Encoding):
            return DdpCompression(self.compressor)
        return HookedCompression(self.compressor)

    @property
    def is_attached(self) -> bool:
        """Whether gradients take this way."""
        return self._state is not None

    def refuse(self, ddp: DistributedDataParallel) -> NoReturn:
        """Where gradients would take torch's way, uncompressed."""
        _refuse_modes(self.compressor)

    def attach(self, ddp: DistributedDataParallel) -> HookState:
        """The state of the hook that is to be put into the Reducer."""
        self._state = HookState(self.compressor, ddp, ddp.process_group)
        return self._state

    def before_forward(self, ddp: DistributedDataParallel) -> None:
        """To be called before every synchronised forward."""
        _refuse_join(ddp)
        self._attached(ddp)

    def set_share(self, ddp: DistributedDataParallel, share: float | None) -> None:
        """This rank's weight by the sum of all; None: the plain mean."""
        self._attached(ddp).share = share

    def residuals(self) -> dict[str, torch.Tensor]:
        """By parameter name; the tensors themselves."""
        return {} if self._state is None else self._state.residuals()

    def state_dict(self, ddp: DistributedDataParallel) -> dict[str, Any]:
        """Collective."""
        return self._attached(ddp).state_dict()

    def load_state_dict(self, ddp: DistributedDataParallel, state: Mapping[str, Any]) -> None:
        """See pycomm.compression.state."""
        self._attached(ddp).load_state_dict(state)

    def report(self, ddp: DistributedDataParallel) -> list[Layer]:
        """See pycomm.compression.report."""
        named = [(n, p) for n, p in ddp.module.named_parameters() if p.requires_grad]
        kept = self._attached(ddp)
        world_size = dist.get_world_size(ddp.process_group)
        return report(self.compressor, named, kept.residuals(), world_size, kept.memory())

    def _attached(self, ddp: DistributedDataParallel) -> HookState:
        if self._state is None:
            self.refuse(ddp)
        self._state.group = ddp.process_group  # it may have been replaced
        return self._state


def _refuse_modes(compressor: Compressor) -> NoReturn:
    raise InvalidArgument(
        f"{type(compressor).__name__} is for float32, float16 and bfloat16 parameters on the CPU, without "
        "mixed_precision, sparse gradients, join() and torch's fused optimizers. Leave these or compression= out"
    )


def _refuse_join(ddp: DistributedDataParallel) -> None:
    if ddp._join_config.enable:
        raise InvalidArgument("compression does not go together with join()")


def _communicator_of(ddp: DistributedDataParallel) -> Communicator:
    communicator = find_communicator(ddp.process_group)
    assert communicator is not None
    return communicator
