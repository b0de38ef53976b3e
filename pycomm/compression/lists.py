"""Lists of gradients that are averaged together, with residuals: for code without pycomm's DDP."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils.weak import WeakTensorKeyDictionary

from pycomm.arrays import as_tensor
from pycomm.backend import CPU
from pycomm.compression import state as _state
from pycomm.compression.carrier import carrier_of
from pycomm.compression.codecs import Compressor, Encoding, compressor_of, encoding_of
from pycomm.compression.reduced import Memory, Reduced
from pycomm.errors import InvalidArgument
from pycomm.extension import core

if TYPE_CHECKING:
    from pycomm.compression.carrier import Carrier

A = TypeVar("A")

_GOLDEN = 0x9E3779B97F4A7C15


def all_reduce(
    tensor: A,
    op: str = "sum",
    group: dist.ProcessGroup | None = None,
    *,
    compression: str | Compressor | None = None,
    residual: torch.Tensor | None = None,
    timeout: timedelta | None = None,
) -> A:
    """Reduces a tensor over the group's ranks, in place, and returns it.

    tensor: a tensor, or an array of a library that shares its memory by DLPack or CUDA's array interface (NumPy, CuPy,
    ...; see :func:`pycomm.arrays.as_tensor`); any shape, contiguous. On the CPU, over a group of any backend, or on a
    GPU over one of pycomm's; there it returns when the operation is enqueued on torch's current stream. With
    `compression` float32, float16 or bfloat16 and `op` sum or avg, and encoded on the way: two roundings at any world
    size, the same bits on all ranks. `residual` (float32, as many elements) then keeps what rounding leaves out, and
    adds it the next time. Raises InvalidArgument before anything is sent, otherwise as every operation does.
    """
    values = as_tensor(tensor)
    carrier = carrier_of(group, values.device)
    if compression is None:
        if residual is not None:
            raise InvalidArgument("a residual needs compression")
        carrier.all_reduce(values, op, timeout=timeout)
        return tensor
    if op not in ("sum", "avg"):
        raise InvalidArgument(f"only sum and avg can be compressed, not {op}")
    encoding = encoding_of(compression)
    carrier.compressed_all_reduce(
        [values],
        encoding.codec,
        factor=1.0 if op == "sum" else 1 / carrier.world_size,
        residual=residual,
        infinite=encoding.infinite,
        stochastic=encoding.stochastic,
        seed=encoding.seed + carrier.rank,
        timeout=timeout,
    )
    return tensor


class Averager:
    """Averages lists of gradients, and keeps their residuals by name.

    `named`: parameters and their names; others are called by the order in which they appear, "0", "1" and so on, which
    is the same in every run of a model. The lists may change from call to call, as buckets do when they are rebuilt.
    """

    def __init__(
        self,
        compression: str | Compressor,
        named: Iterable[tuple[str, torch.Tensor]] = (),
    ) -> None:
        self.compressor = compressor_of(compression)
        self.step = 0
        self._names = WeakTensorKeyDictionary((parameter, name) for name, parameter in named)
        self._unnamed = 0
        self._memory = Memory()
        self._flat: dict[tuple[str, ...], torch.Tensor] = {}  # residuals are views of these
        self._is_prepared = False

    def prepare(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Begins with zero residuals of these, which are all parameters that there will be."""
        self._is_prepared = True
        for name, parameter in named:
            if self.compressor.error_feedback and self.compressor.compresses(name, parameter):
                self._memory.residual(name, parameter.numel(), parameter.device)

    def residuals(self) -> dict[str, torch.Tensor]:
        """By name; the tensors themselves."""
        return self._memory.residuals

    def memory(self) -> Memory:
        """All that is kept."""
        return self._memory

    def device(self) -> torch.device:
        """Where residuals are."""
        return next((residual.device for residual in self.residuals().values()), CPU)

    def state_dict(self, group: dist.ProcessGroup | None = None) -> dict[str, Any]:
        """Collective; see pycomm.compression.state."""
        state = _state.state_dict(self, carrier_of(group, self.device()), self.step)
        bases = {name: basis.clone() for name, basis in self._memory.bases.items()}
        return {**state, "bases": bases} if bases else state

    def load_state_dict(
        self, state: Mapping[str, Any], group: dist.ProcessGroup | None = None
    ) -> None:
        """Takes over a state, between two steps; see pycomm.compression.state."""
        _state.check(state)
        if not self._is_prepared:
            for name, saved in state["residuals"].items():
                self._memory.residual(name, saved.numel(), saved.device)
        device = self.device()
        self.step = _state.load_state_dict(self, carrier_of(group, device), state)
        bases = state.get("bases", {})
        self._memory.bases = {name: basis.clone().to(device) for name, basis in bases.items()}

    def average(
        self,
        carrier: Carrier,
        parameters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        share: float | None = None,
    ) -> None:
        """Collective: averages the gradients of these parameters, in place. `share` is this rank's weight by all."""
        names = [self._name_of(parameter) for parameter in parameters]
        named = zip(names, parameters, strict=True)
        chosen = self.compressor.choose(named, self.step, carrier.world_size)
        # In this order whatever the bucket's: torch forms others after the first step, also of a resumed training.
        order = sorted(range(len(names)), key=names.__getitem__)
        plain = [i for i in order if not chosen[i]]
        rest = [i for i in order if chosen[i]]
        rest_names, rest_gradients = [names[i] for i in rest], [gradients[i] for i in rest]
        if plain:
            self._average_plain(carrier, [gradients[i] for i in plain], share)
        if rest and isinstance(self.compressor, Encoding):
            self._average_encoded(
                carrier, self.compressor, tuple(rest_names), rest_gradients, share
            )
        elif isinstance(self.compressor, Reduced):
            self.compressor.average(carrier, rest_names, rest_gradients, share, self._memory)

    def _name_of(self, parameter: torch.Tensor) -> str:
        if (name := self._names.get(parameter)) is None:
            name = self._names[parameter] = str(self._unnamed)
            self._unnamed += 1
        return name

    def _average_plain(
        self, carrier: Carrier, gradients: list[torch.Tensor], share: float | None
    ) -> None:
        carrier.compressed_all_reduce(
            gradients,
            core.Codec("fp32"),
            factor=1.0 if share is None else share,
            divisor=carrier.world_size if share is None else 1.0,
        )

    def _average_encoded(
        self,
        carrier: Carrier,
        encoding: Encoding,
        names: tuple[str, ...],
        gradients: list[torch.Tensor],
        share: float | None,
    ) -> None:
        residual = self._residual_of(names, gradients) if encoding.error_feedback else None
        withheld = [] if residual is None else self._withhold(names, gradients)
        carrier.compressed_all_reduce(
            gradients,
            encoding.codec,
            factor=1 / carrier.world_size if share is None else share,
            residual=residual,
            infinite=encoding.infinite,
            stochastic=encoding.stochastic,
            seed=(encoding.seed + carrier.rank + self.step * _GOLDEN) % 2**64,
        )
        for part, kept in withheld:
            part.add_(kept)

    def _withhold(
        self, names: Sequence[str], gradients: Sequence[torch.Tensor]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Residuals of gradients that are zero, as of parameters that were not used: they wait, and are zero meanwhile.

        torch's Reducer drops what arrives for a parameter that no rank used.
        """
        withheld = []
        for name, gradient in zip(names, gradients, strict=True):
            if gradient.is_cuda:
                part = self._memory.residuals[name]
                withheld.append((part, set_aside(part, gradient)))
            elif gradient.numel() and not gradient.flatten()[0] and not gradient.any():
                part = self._memory.residuals[name]
                withheld.append((part, part.clone()))
                part.zero_()
        return withheld

    def _residual_of(
        self, names: tuple[str, ...], gradients: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """One tensor for a list that travels together; residuals move into it with their parameters."""
        flat = self._flat.get(names)
        if flat is not None and flat.device == gradients[0].device:
            return flat
        sizes = [gradient.numel() for gradient in gradients]
        flat = torch.zeros(sum(sizes), device=gradients[0].device)
        for name, view in zip(names, flat.split(sizes), strict=True):
            view.copy_(self._memory.residual(name, view.numel(), flat.device))
            self._memory.residuals[name] = view
        moved = set(names)
        self._flat = {others: one for others, one in self._flat.items() if not moved & set(others)}
        self._flat[names] = flat
        return flat


def set_aside(residual: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Moves the residual of a gradient that is zero into what is returned, zeros of any other; waits for no device."""
    is_used = gradient.any()
    kept = residual.masked_fill(is_used, 0)
    residual.masked_fill_(~is_used, 0)
    return kept


def share_of(weight: float, carrier: Carrier, device: torch.device = CPU) -> float:
    """Collective: this rank's weight by the sum of all. Raises InvalidArgument, on every rank, for a sum of 0.

    `device`: of the tensors that the carrier takes.
    """
    if not weight >= 0:
        weight = float("nan")  # all ranks hear of it
    total = torch.tensor([weight], dtype=torch.float64, device=device)
    carrier.all_reduce(total)
    if not 0 < float(total) < float("inf"):
        raise InvalidArgument(
            f"rank {carrier.rank}: weights must not be negative, and their sum over the ranks must be positive, "
            f"not {float(total)}"
        )
    return weight / float(total)


def sync_gradients(
    parameters: Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    group: dist.ProcessGroup | None = None,
    *,
    compression: str | Compressor | Averager | None = None,
    weight: float | None = None,
    bucket_bytes: int = 25 << 20,
) -> None:
    """Collective: averages the gradients of parameters over a group, in place; for code without DDP.

    Parameters, or (name, parameter) pairs, in the same order on all ranks; those without a gradient count as zero where
    another rank has one, and stay without where none has. `compression`: residuals are kept as long as the first
    parameter lives; an Averager, the same in every step, keeps them where you can save them. `weight`: of this rank's
    gradients, such as its number of samples or tokens; zero is allowed. Buckets of about `bucket_bytes` travel one
    after the other. Any backend for the CPU, pycomm's for GPUs. Raises InvalidArgument for gradients that are sparse,
    of other dtypes than float32, float16 and bfloat16, or on several devices, before anything is sent; and on every
    rank if the weights' sum is not positive.
    """
    named = [
        entry if isinstance(entry, tuple) else (str(i), entry) for i, entry in enumerate(parameters)
    ]
    chosen = [parameter for _, parameter in named]
    device = chosen[0].device if chosen else CPU
    carrier = carrier_of(group, device)
    for parameter in chosen:
        _check(parameter, device)
    share = None if weight is None else share_of(weight, carrier, device)
    present = torch.tensor(
        [parameter.grad is not None for parameter in chosen], dtype=torch.uint8, device=device
    )
    carrier.all_reduce(present, "max")
    used = [p for p, there in zip(chosen, present.tolist(), strict=True) if there]
    averager = _averager_of(compression, named)
    bucket: list[torch.Tensor] = []
    for parameter in used:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        bucket.append(parameter)
        if sum(p.nbytes for p in bucket) >= bucket_bytes:
            _average_bucket(averager, carrier, bucket, share)
            bucket = []
    _average_bucket(averager, carrier, bucket, share)
    averager.step += 1


# What sync_gradients keeps for its callers: by a list's first parameter.
_kept = WeakTensorKeyDictionary()


def _averager_of(
    compression: str | Compressor | Averager | None, named: Sequence[tuple[str, torch.Tensor]]
) -> Averager:
    if isinstance(compression, Averager):
        return compression
    if compression is None or not named:
        return Averager(compressor_of("fp16", never_compress=[""]))
    compressor = compressor_of(compression)
    _, first = named[0]
    averager: Averager | None = _kept.get(first)
    if averager is None or averager.compressor != compressor:
        averager = _kept[first] = Averager(compressor, named)
    return averager


def _check(parameter: torch.Tensor, device: torch.device) -> None:
    if parameter.device != device:
        raise InvalidArgument(
            f"a parameter of shape {list(parameter.shape)} is on {parameter.device}, the first one on {device}; "
            "average those of each device by a call of its own"
        )
    gradient = parameter.grad
    if gradient is None:
        return
    if gradient.layout != torch.strided:
        raise InvalidArgument(f"a gradient of shape {list(gradient.shape)} is {gradient.layout}")
    if gradient.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise InvalidArgument(
            f"a gradient of shape {list(gradient.shape)} is {gradient.dtype}, not float32, float16 or bfloat16"
        )


def _average_bucket(
    averager: Averager,
    carrier: Carrier,
    bucket: Sequence[torch.Tensor],
    share: float | None,
) -> None:
    if not bucket:
        return
    gradients = []
    for parameter in bucket:
        assert parameter.grad is not None
        gradients.append(parameter.grad.contiguous())
    averager.average(carrier, bucket, gradients, share)
    for parameter, averaged in zip(bucket, gradients, strict=True):
        if averaged is not parameter.grad:
            assert parameter.grad is not None
            parameter.grad.copy_(averaged)
