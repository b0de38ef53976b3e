"""Compression as a communication hook of torch's own DistributedDataParallel, and so of what is built on it."""

# Annotations stay objects here: torch looks at those of hooks.
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pycomm.backend import get_communicator
from pycomm.compression import state as _state
from pycomm.compression.codecs import Encoding, encoding_of
from pycomm.compression.lists import Averager


class HookState:
    """What :func:`hook` needs: ``model.register_comm_hook(HookState("int8", model), hook)``.

    The model's parameter names are those of the residuals in :meth:`state_dict`. `group`: None is the default group.
    """

    def __init__(
        self,
        compression: str | Encoding,
        model: nn.Module,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        module = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._averager = Averager(encoding_of(compression), lambda parameter: names[id(parameter)])
        self._group = group

    def residuals(self) -> dict[str, torch.Tensor]:
        """By parameter name; the tensors themselves."""
        return self._averager.residuals()

    def compression_residuals(self) -> dict[str, torch.Tensor]:
        """The same, as DistributedDataParallel calls it."""
        return self.residuals()

    def state_dict(self) -> dict[str, Any]:
        """Collective; see pycomm.compression.state."""
        return _state.state_dict(self, get_communicator(self._group), self._averager.step)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over a state before the first step; see pycomm.compression.state."""
        communicator = get_communicator(self._group)
        for name, saved in state["residuals"].items():
            self._averager.residuals().setdefault(name, torch.zeros(saved.numel()))
        self._averager.step = _state.load_state_dict(self, communicator, state)

    def average(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """The hook."""
        self._averager.average(
            get_communicator(self._group), bucket.parameters(), bucket.gradients()
        )
        if bucket.is_last():
            self._averager.step += 1
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future


def hook(state: HookState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket's gradients, compressed; for ``register_comm_hook``, on a group of backend pycomm."""
    return state.average(bucket)
