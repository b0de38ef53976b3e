"""Compression as a communication hook of torch's own DistributedDataParallel, and so of what is built on it."""

# Annotations stay objects here: torch looks at those of hooks.
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from pycomm.compression.background import Background
from pycomm.compression.carrier import ForeignCarrier, carrier_of
from pycomm.compression.codecs import Compressor
from pycomm.compression.lists import Averager
from pycomm.compression.reduced import Memory


class HookState:
    """What :func:`hook` keeps: ``model.register_comm_hook(HookState("int8", model), hook)``.

    The model's parameter names are those of the residuals in :meth:`state_dict`; where the state must be there before
    the model, as for Lightning's DDPStrategy, they are numbers. `group`: None is the default group; of any backend.
    `share`: this rank's weight by the sum of all, or None for the plain mean.

    Training that was resumed has the bits of training that was not as long as the same parameters share a bucket, for
    values of a bucket share blocks; torch forms its buckets anew after the first step.
    """

    def __init__(
        self,
        compression: str | Compressor,
        model: nn.Module | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        module = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        named = [] if module is None else [*module.named_parameters()]
        self._averager = Averager(compression, named)
        if module is not None:
            self._averager.prepare((n, p) for n, p in named if p.requires_grad)
        self.group = group
        self.share: float | None = None
        self._background = Background()
        self._problem: Exception | None = None  # of this step

    def residuals(self) -> dict[str, torch.Tensor]:
        """By parameter name; the tensors themselves."""
        return self._averager.residuals()

    def compression_residuals(self) -> dict[str, torch.Tensor]:
        """The same, as DistributedDataParallel calls it."""
        return self.residuals()

    def memory(self) -> Memory:
        """All that is kept from step to step."""
        return self._averager.memory()

    def state_dict(self) -> dict[str, Any]:
        """Collective; see pycomm.compression.state."""
        return self._averager.state_dict(self.group)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over a state, between two steps; see pycomm.compression.state."""
        self._averager.load_state_dict(state, self.group)

    def average(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """The hook. Between hosts the bucket travels while backward goes on, behind those before it."""
        carrier, share = carrier_of(self.group), self.share
        parameters, gradients, buffer = bucket.parameters(), bucket.gradients(), bucket.buffer()
        is_first, is_last = bucket.index() == 0, bucket.is_last()

        def average() -> torch.Tensor:
            if is_first:
                self._problem = None
            if self._problem is not None:
                raise self._problem  # the ranks are no longer at the same bucket
            try:
                self._averager.average(carrier, parameters, gradients, share)
            except Exception as error:
                self._problem = error
                raise
            if is_last:
                self._averager.step += 1
            return buffer

        if isinstance(carrier, ForeignCarrier):
            return self._background.submit(average)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(average())
        return future


# Of compressors that are a hook's state themselves.
_states = WeakIdKeyDictionary()


def hook(
    state: HookState | Compressor, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket's gradients, compressed; for ``register_comm_hook``, on a group of any backend.

    A compressor, such as ``pycomm.compression.FP16()``, serves as state for one model on the default group; a HookState
    says more, and can be saved.
    """
    if isinstance(state, Compressor):
        if state not in _states:
            _states[state] = HookState(replace(state))  # which must not keep the key alive
        state = _states[state]
    assert isinstance(state, HookState)
    return state.average(bucket)
