"""What optimizers need in parallel training: one loss scale, the whole model's norm, and rates of stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pycomm.clipping import clip_grad_norm_
from pycomm.errors import InvalidArgument
from pycomm.stage_lr import GradientNorm, OwnLoss, Schedule, StageLR, UpdateRatio

__all__ = [
    "GradScaler",
    "GradientNorm",
    "OwnLoss",
    "Schedule",
    "StageLR",
    "UpdateRatio",
    "clip_grad_norm_",
]


class GradScaler(torch.amp.GradScaler):
    """torch's GradScaler, whose steps are taken or skipped by all ranks of some groups together.

    Takes torch's arguments, and ``groups``: the ranks that hold parts of the model, or copies of it, such as those of
    data, tensor and pipeline parallelism; None is the default group. If a rank finds an infinity or NaN in its
    gradients, no rank of its groups steps, and all lower their scale: otherwise pipeline stages, or ranks whose
    gradients are not averaged, would go apart without a word. Costs one all_reduce of 4 bytes per group and step.

    ``keepers``: DistributedDataParallel modules with compression, or HookStates, whose residuals are in the unit of the
    scaled loss and are rescaled with it.
    """

    def __init__(
        self,
        device: str = "cpu",
        *args: Any,
        groups: Sequence[dist.ProcessGroup] | None = None,
        keepers: Iterable[Any] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(device, *args, **kwargs)
        self._groups = groups
        self._keepers = list(keepers)
        for keeper in self._keepers:
            if not hasattr(keeper, "compression_residuals"):
                raise InvalidArgument(f"{type(keeper).__name__} keeps no residuals")

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Collective: divides the gradients by the scale, and learns whether any rank found an infinity or NaN."""
        super().unscale_(optimizer)
        if self._enabled:
            self._agree(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Collective: steps, unless any rank found an infinity or NaN."""
        if self._enabled and not self._is_unscaled(optimizer):
            self.unscale_(optimizer)
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """As torch's; residuals follow the scale."""
        before = self.get_scale()
        super().update(new_scale)
        factor = self.get_scale() / before
        if not self._enabled or factor == 1:
            return
        for keeper in self._keepers:
            for residual in keeper.compression_residuals().values():
                residual.mul_(factor)

    def _is_unscaled(self, optimizer: torch.optim.Optimizer) -> bool:
        return self._per_optimizer_states[id(optimizer)]["stage"] is not _READY

    def _agree(self, optimizer: torch.optim.Optimizer) -> None:
        found: dict[Any, torch.Tensor] = self._per_optimizer_states[id(optimizer)][
            "found_inf_per_device"
        ]
        if not found:  # a rank without gradients must take part, too
            found[torch.device("cpu")] = torch.zeros(1)
        worst = torch.stack([one.cpu().reshape(()) for one in found.values()]).max().reshape(1)
        groups: Sequence[dist.ProcessGroup | None] = self._groups or [None]
        for group in groups:
            dist.all_reduce(worst, dist.ReduceOp.MAX, group=group)
        for one in found.values():
            one.fill_(float(worst))


_READY = torch.amp.grad_scaler.OptState.READY
