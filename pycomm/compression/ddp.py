"""Compression in pycomm's DistributedDataParallel, whose gradients travel in C++ (csrc/c10d/direct_reducer.h)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from pycomm.backend import find_communicator
from pycomm.compression import state as _state
from pycomm.compression.codecs import Encoding, encoding_of
from pycomm.compression.report import Layer, report
from pycomm.errors import InvalidArgument

if TYPE_CHECKING:
    from pycomm._core import Communicator
    from pycomm.ddp import DistributedDataParallel


class DdpCompression:
    """Tells a DirectReducer how gradients travel, and reads and writes its residuals by parameter name."""

    def __init__(self, encoding: Encoding) -> None:
        self.encoding = encoding
        self._named: list[tuple[str, torch.Tensor]] = []
        self._direct: Any = None
        self._step = 0
        self._warms_up: bool | None = None

    @staticmethod
    def of(
        compression: str | Encoding | None, error_feedback: bool | None
    ) -> DdpCompression | None:
        """By the arguments of DistributedDataParallel."""
        if compression is None:
            if error_feedback is not None:
                raise InvalidArgument("error_feedback needs compression")
            return None
        encoding = encoding_of(compression)
        if error_feedback is not None:
            encoding = replace(encoding, error_feedback=error_feedback)
        return DdpCompression(encoding)

    def refuse(self, ddp: DistributedDataParallel) -> NoReturn:
        """Where gradients would take torch's way, uncompressed."""
        raise InvalidArgument(
            f"compression={self.encoding.format!r} is for float32, float16 and bfloat16 parameters on the CPU and a "
            "group of backend pycomm, without find_unused_parameters, static_graph, gradient_as_bucket_view, "
            "mixed_precision, sparse gradients and PYCOMM_DDP_BUCKETS=torch. For these use "
            "register_comm_hook(pycomm.compression.HookState(...), pycomm.compression.hook)"
        )

    def attach(self, ddp: DistributedDataParallel, communicator: Communicator) -> None:
        """To be called when the DirectReducer is there."""
        names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
        self._named = [(names[id(p)], p) for p in ddp._parameters_of_reducer]
        self._direct = ddp._direct
        self._direct.set_seed((self.encoding.seed + communicator.rank) % 2**64)
        self._wire()

    def before_forward(self, directly: bool) -> None:
        """To be called before every synchronised forward."""
        if not directly:
            raise InvalidArgument("compression does not go together with join()")
        if self._warms_up is not (self._step < self.encoding.warmup_steps):
            self._wire()
        self._step += 1

    def _wire(self) -> None:
        self._warms_up = self._step < self.encoding.warmup_steps
        kinds, of_parameter = self.encoding.wirings(self._named, self._step)
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
        return report(self.encoding, self._named, self.residuals())


def _communicator_of(ddp: DistributedDataParallel) -> Communicator:
    communicator = find_communicator(ddp.process_group)
    assert communicator is not None
    return communicator
