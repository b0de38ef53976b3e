"""DistributedDataParallel: torch's class, with pycomm's communication and without torch's silent divergences.

torch's Reducer keeps the autograd bookkeeping. What is added: gradients of a bucket are averaged in C++ by pycomm
(:func:`_use_average_hook`), and situations in which torch leaves gradients different on the ranks without a word are
refused (:mod:`pycomm.ddp_checks`).
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from pycomm.backend import find_communicator
from pycomm.compression.carrier import carrier_of
from pycomm.compression.codecs import Compressor
from pycomm.compression.ddp import DdpCompression, HookedCompression, compression_of
from pycomm.compression.hook import hook as compression_hook
from pycomm.compression.lists import share_of
from pycomm.compression.report import Layer
from pycomm.config import config
from pycomm.ddp_checks import (
    BackwardWatch,
    ParameterWatch,
    check_models_agree,
    check_replicated,
    refuse,
)
from pycomm.errors import InvalidArgument
from pycomm.extension import c10d

if TYPE_CHECKING:
    from pycomm._core import Communicator

log = logging.getLogger("pycomm")

_OWN_ARGUMENTS = ("self", "overlap", "compression", "error_feedback", "__class__")
_AVERAGED = {torch.float32, torch.float16, torch.bfloat16}  # dtypes that need no Reducer
_TORCH_ARGUMENTS = inspect.signature(TorchDistributedDataParallel.__init__).parameters


class DistributedDataParallel(TorchDistributedDataParallel):
    """Drop-in replacement of :class:`torch.nn.parallel.DistributedDataParallel`.

    Takes the same arguments in the same order, is a subclass, and accepts any process group; with backend pycomm and
    parameters on the CPU, gradients are averaged by pycomm (16-bit floats accumulate in float32, the mean is rounded
    once; all ranks get identical bits), unless a communication hook is registered before the first forward.

    Own keyword arguments:

    - ``overlap``: whether buckets travel on a thread of their own while backward goes on (True), or in the thread that
      runs backward (False); None decides by cores and ranks (``PYCOMM_DDP_OVERLAP``).
    - ``compression``: how gradients travel, "fp16", "bf16", "fp8" or "int8", or an object of pycomm.compression, which
      says more; ``error_feedback`` overrides its default. Over a group of any backend for tensors on the CPU, and of
      backend pycomm for those on GPUs. On the CPU, groups of backend pycomm do not overlap with backward in modes that
      need torch's Reducer, and with TopK and PowerSGD.

    Differences to torch's class, all of them where torch goes wrong in silence or hangs:

    - Models that differ between ranks (number, name, shape, strides, dtype or requires_grad of a parameter or buffer)
      raise MismatchError on every rank, naming what differs.
    - Where gradients would stay local, GradientError names the parameters: at the end of a backward that is the second
      one through its forward, has inputs= for a part of the parameters, or leaves out parameters that no later backward
      can reach; at the optimizer's step or the next forward if they could have been reached; at the next forward for
      parameters added, replaced, recast, moved, resized or unfrozen since the module was wrapped. Ranks that wait for
      the gradients of the one that raises get AbortedError with the same words, at once (with backend pycomm).
      ``PYCOMM_DDP_MISSING=step`` leaves the end of backward silent about unused parameters, as torch does.
    - After an error in the middle of a backward, the module goes on with
      ``model._update_process_group(dist.new_group())`` on every rank.
    - A forward without grad starts no communication.
    - ``delay_all_reduce_named_params`` is refused: torch's version gives wrong gradients unless the hooked parameter
      happens to be last.
    """

    _direct: Any = None  # the DirectReducer, once it is settled that gradients take it

    def __init__(
        self,
        module: nn.Module,
        device_ids: list[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: list[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[int] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        overlap: bool | None = None,
        compression: str | Compressor | None = None,
        error_feedback: bool | None = None,
    ) -> None:
        arguments = {k: v for k, v in locals().items() if k not in _OWN_ARGUMENTS}
        if delay_all_reduce_named_params is not None and param_to_hook_all_reduce is not None:
            raise InvalidArgument(
                "delay_all_reduce_named_params is not supported: torch's version does not wait for the gradients that "
                "it reduces; leave it out"
            )
        check_replicated(module, process_group, device_mesh)
        if init_sync:
            sync_buffers = forward_sync_buffers is not None or broadcast_buffers is not False
            check_models_agree(module, process_group, device_mesh, sync_buffers)
        super().__init__(**_for_this_torch(arguments))
        self._overlap = overlap
        self._compression = compression_of(compression, error_feedback, overlap)
        self._hook_is_settled = False
        self._hook_target: Any = None  # of the averaging hook, once it is in the Reducer
        self._parameter_watch = ParameterWatch(self.module, self.parameters_to_ignore)

    # ---- communication ----------------------------------------------------------------------------------------------

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """As torch's; the hook takes the place of pycomm's averaging."""
        if self._compression is not None:
            raise InvalidArgument("give either compression= or a communication hook")
        super().register_comm_hook(state, hook)
        self._hook_is_settled = True

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        super()._register_builtin_comm_hook(comm_hook_type)
        self._hook_is_settled = True

    def _register_fused_optim(self, *args: Any, **kwargs: Any) -> None:
        self._hook_is_settled = True
        super()._register_fused_optim(*args, **kwargs)

    def _use_average_hook(self) -> None:
        """Puts pycomm's averaging hook into the Reducer, if the group is pycomm's where the buckets are."""
        self._hook_is_settled = True
        try:
            self._choose_reduction()
        finally:
            if self._compression is not None and not self._compression.is_attached:
                self._hook_is_settled = False
                self._compression.refuse(self)

    def _choose_reduction(self) -> None:
        join_divides_by_active_ranks = self._join_config.enable and not getattr(
            self, "_divide_by_initial_world_size", True
        )
        if (
            self.device_type not in ("cpu", "cuda")
            or self._use_python_reducer
            or self.mixed_precision is not None
            or join_divides_by_active_ranks
            or any(self._build_params_for_reducer()[1])  # sparse gradients take torch's way
        ):
            return
        communicator = find_communicator(self.process_group, torch.device(self.device_type))
        may_go_direct = (
            communicator is not None and communicator.transport == "shm" and self._may_go_direct()
        )
        if isinstance(self._compression, DdpCompression) and not may_go_direct:
            self._compression = self._compression.hooked()
        if isinstance(self._compression, HookedCompression):
            if self._dtypes() <= _AVERAGED:
                super().register_comm_hook(self._compression.attach(self), compression_hook)
        elif communicator is not None:
            self._hook_target = c10d.HookTarget(communicator._address(), self._backward_watch.core)
            overlaps = self._overlaps(communicator.world_size)
            log.info(
                "rank %d of %d: DDP averages in C++, %s",
                *(communicator.rank, communicator.world_size),
                "beside backward" if overlaps else "in the thread that runs backward",
            )
            c10d.register_average_hook(self.reducer, self._hook_target, async_op=overlaps)
            if may_go_direct:
                self._direct = self._make_direct_reducer(communicator, overlaps)
                self._backward_watch.core.attach_direct(self._direct)
                if self._compression is not None:
                    self._compression.attach(self, communicator)

    def _may_go_direct(self) -> bool:
        """Whether dense gradients can be averaged where they lie, which the Reducer's rarer modes do not do."""
        return (
            config().ddp_buckets == "direct"
            and not self.find_unused_parameters
            and not self.static_graph
            and not self.gradient_as_bucket_view
            and self._dtypes() <= _AVERAGED
        )

    def _dtypes(self) -> set[torch.dtype]:
        return {parameter.dtype for parameter in self._parameters_of_reducer}

    def _make_direct_reducer(self, communicator: Communicator, overlaps: bool) -> Any:
        cap = self.bucket_bytes_cap
        first = dist._DEFAULT_FIRST_BUCKET_BYTES if self.bucket_bytes_cap_default else cap
        limits = [first, cap]
        if hasattr(self, "_bucket_config"):  # torch 2.14
            _, own = self._bucket_config.compute_bucket_size_limits(
                static_graph=False, find_unused_parameters=False
            )
            limits = own or limits
        limits = [max(limit, 0) for limit in limits]
        return c10d.DirectReducer(
            self._parameters_of_reducer, limits, communicator._address(), overlaps
        )

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """As torch's, for any group if no averaging hook is in place yet, else for another one of pycomm's."""
        if self._hook_target is not None:
            communicator = find_communicator(new_process_group, torch.device(self.device_type))
            if communicator is None:
                raise InvalidArgument(
                    "gradients are averaged by pycomm, so the new process group must be one of backend pycomm, not "
                    f"{dist.get_backend(new_process_group)}; wrap the module anew for another backend"
                )
            self._hook_target.replace(communicator._address())
            if self._direct is not None:
                self._direct.set_communicator(communicator._address())
        super()._update_process_group(new_process_group)

    def _overlaps(self, world_size: int) -> bool:
        if self._overlap is not None:
            return self._overlap
        if config().ddp_overlap != "auto":
            return config().ddp_overlap == "1"
        return len(os.sched_getaffinity(0)) >= 2 * world_size

    def communication(self) -> dict[str, float]:
        """What communication adds to the synchronised steps so far, on this rank.

        ``steps``; their ``seconds``, from forward to the end of backward, without the optimizer; of these
        ``seconds_backward``, from the module's outputs on, and ``seconds_exposed``, which are not hidden behind the
        computation of gradients: from the last gradient to the end of backward and, without overlap, averaging in the
        thread that runs backward. Ranks that wait for a slower one wait there too. ``share`` is
        seconds_exposed / seconds, 0 before the first step. With any backend; all zero with torch's mixed precision, or
        its Python reducer.
        """
        times: dict[str, float] = self._backward_watch.core.times()
        return {**times, "share": times["seconds_exposed"] / (times["seconds"] or 1.0)}

    def set_weight(self, weight: float | None) -> None:
        """Collective: gradients become the mean weighted by every rank's `weight`, such as its samples or tokens.

        Of the following backwards, until it is called again; None: the plain mean. Zero is allowed. Raises
        InvalidArgument, on every rank, if a weight is negative or all are zero; and where gradients take torch's way.
        """
        if not self._hook_is_settled:
            self._use_average_hook()
        hooked = self._compression if isinstance(self._compression, HookedCompression) else None
        if self._direct is None and hooked is None:
            raise InvalidArgument(
                "weights need gradients that pycomm averages itself: a group of backend pycomm, on the CPU, without "
                "find_unused_parameters, static_graph, gradient_as_bucket_view, hooks and sparse gradients; or "
                "compression="
            )
        share = None if weight is None else self._share_of(weight)
        if hooked is not None:
            hooked.set_share(self, share)
        else:
            self._direct.set_share(share)

    def _share_of(self, weight: float) -> float:
        device = torch.device(self.device_type)
        return share_of(weight, carrier_of(self.process_group, device), device)

    def compression_state_dict(self) -> dict[str, Any]:
        """Collective: what compression keeps, for a checkpoint of this rank; see pycomm.compression.state."""
        return self._compression_or_refuse().state_dict(self)

    def load_compression_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes it over, on any number of ranks; before the first step or between two."""
        self._compression_or_refuse().load_state_dict(self, state)

    def compression_residuals(self) -> dict[str, torch.Tensor]:
        """What error feedback keeps, by parameter name, in memory order; the tensors themselves."""
        return self._compression_or_refuse().residuals()

    def compression_report(self) -> list[Layer]:
        """What compression does to every layer's gradient as it is now; see pycomm.compression.report."""
        return self._compression_or_refuse().report(self)

    def _compression_or_refuse(self) -> DdpCompression | HookedCompression:
        if self._compression is None:
            raise InvalidArgument("this module was made without compression=")
        if not self._hook_is_settled:
            self._use_average_hook()
        return self._compression

    # ---- torch's hooks into the class -------------------------------------------------------------------------------

    def _ddp_init_helper(self, parameters: Any, *args: Any, **kwargs: Any) -> None:
        self._backward_watch = BackwardWatch(self, parameters)
        self._parameters_of_reducer = list(parameters)
        super()._ddp_init_helper(parameters, *args, **kwargs)
        self._backward_watch.attach()

    def _remove_autograd_hooks(self) -> None:
        super()._remove_autograd_hooks()
        self._backward_watch.stop()

    @contextmanager
    def _ignored_names_of_root(self) -> Iterator[None]:
        """torch looks for an ignored parameter ``w`` of the root module under the name ``.w``, and never finds it."""
        ignored = self.parameters_to_ignore
        self.parameters_to_ignore = ignored | {f".{name}" for name in ignored if "." not in name}
        try:
            yield
        finally:
            self.parameters_to_ignore = ignored

    def _build_params_for_reducer(self) -> Any:
        with self._ignored_names_of_root():
            return super()._build_params_for_reducer()

    def _build_debug_param_to_name_mapping(self, parameters: Any) -> Any:
        with self._ignored_names_of_root():
            return super()._build_debug_param_to_name_mapping(parameters)

    def _check_sync_bufs_pre_fwd(self) -> bool:
        return torch.is_grad_enabled() and super()._check_sync_bufs_pre_fwd()

    def _check_sync_bufs_post_fwd(self) -> bool:
        return torch.is_grad_enabled() and super()._check_sync_bufs_post_fwd()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the module; with grad enabled, after synchronising its buffers and before reducing gradients."""
        if torch.compiler.is_compiling():
            return super().forward(*inputs, **kwargs)
        if not torch.is_grad_enabled():
            # One rank may evaluate alone, so this forward must not change what the next one synchronises.
            sync = self.require_forward_param_sync
            output = super().forward(*inputs, **kwargs)
            self.require_forward_param_sync = sync
            return output
        if not self._hook_is_settled:
            self._use_average_hook()
        self._backward_watch.check_before_forward()
        if (problem := self._parameter_watch.problem()) is not None:
            refuse(self, problem)
        if not self.require_backward_grad_sync:
            return super().forward(*inputs, **kwargs)
        directly = self._direct is not None and not self._join_config.enable
        if self._compression is not None:
            self._compression.before_forward(self)
        self._backward_watch.forward_begins(directly)
        forward = self._forward_without_reducer if directly else super().forward
        output = forward(*inputs, **kwargs)
        self._backward_watch.forward_ended(output)
        return output

    def _forward_without_reducer(self, *inputs: Any, **kwargs: Any) -> Any:
        """torch's forward, buffers and all, that does not arm its Reducer."""
        self.require_backward_grad_sync = False
        try:
            output = super().forward(*inputs, **kwargs)
        finally:
            self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self._has_rebuilt_buckets = self._direct.has_rebuilt()
        return output

    def _set_static_graph(self) -> None:
        if self._direct is not None and self._direct.iteration() > 0:
            problem = "_set_static_graph() should be called before training loop starts, not in it"
            if self.logger is not None:
                self.logger.set_error_and_log(problem)
            raise RuntimeError(problem)
        super()._set_static_graph()

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """torch's, in which what its Reducer does not do is told for it."""
        data: dict[str, Any] = super()._get_ddp_logging_data()
        if self._direct is None:
            return data
        parameters = self._parameters_of_reducer
        sizes = [
            sum(parameters[index].nbytes for index in bucket) for bucket in self._direct.buckets()
        ]
        data["iteration"] = self._direct.iteration()
        data["has_rebuilt_buckets"] = int(self._direct.has_rebuilt())
        if self._direct.has_rebuilt():
            data["rebuilt_bucket_sizes"] = ", ".join(map(str, sizes))
        return data

    # ---- pickling ---------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        for name in ("_parameter_watch", "_backward_watch", "_parameters_of_reducer"):
            state.pop(name, None)
        state["_hook_is_settled"] = False
        state["_hook_target"] = state["_direct"] = None
        if self._compression is not None:  # residuals are compression_state_dict()'s
            state["_compression"] = self._compression.renewed()
            state["_comm_hooks"] = []
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._parameter_watch = ParameterWatch(self.module, self.parameters_to_ignore)


def _for_this_torch(arguments: dict[str, Any]) -> dict[str, Any]:
    """Only what was given a value: other torch versions have fewer arguments, and other defaults."""
    ours = inspect.signature(DistributedDataParallel.__init__).parameters
    given = {n: value for n, value in arguments.items() if value is not ours[n].default}
    if unknown := sorted(given.keys() - _TORCH_ARGUMENTS.keys()):
        raise InvalidArgument(f"torch {torch.__version__} has no DDP argument {', '.join(unknown)}")
    return given
