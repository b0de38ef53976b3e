"""Clipping gradients by their norm, where each rank holds some parameters, parts of others, and copies of the rest."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from pycomm.errors import Error, InvalidArgument, MismatchError

if TYPE_CHECKING:
    from pycomm.pipeline.teams import Teams
    from pycomm.tensor_parallel.group import Group, GroupLike

_TOLERANCE = 1e-3  # between data parallel ranks, whose processors may round differently
_WIDE = {torch.float64, torch.complex128}


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    pipeline_group: GroupLike | Teams = None,
    data_group: GroupLike = None,
    counted_elsewhere: Collection[torch.Tensor] = (),
) -> torch.Tensor:
    """Collective: as :func:`torch.nn.utils.clip_grad_norm_` of the whole model; returns the norm before.

    Parts of a parameter, those of pycomm.tensor_parallel and of DTensors (FSDP2), count over all ranks that hold them,
    what is replicated counts once; both are known from the parameters. Besides, where given:

    - ``pipeline_group``: ranks each of which has parameters of its own, as a pipeline's stages have, or the pipeline's
      Teams. One that several have, such as a tied embedding, must be in ``counted_elsewhere`` of all but one of them.
    - ``data_group``: ranks that have averaged their gradients. Their norms are compared: MismatchError if they differ,
      as after a backward under no_sync. Not for FSDP's ranks, which the parameters know.

    Norms of 16-bit floats are computed in float32. ``norm_type`` is positive or infinity. All ranks get the same norm,
    and all raise pycomm.Error if it is infinite or NaN and ``error_if_nonfinite``. A few numbers travel.
    """
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    order = float(norm_type)
    if not order > 0:
        raise InvalidArgument(f"norm_type must be positive or infinity, not {norm_type}")
    skipped = {id(parameter) for parameter in counted_elsewhere}
    device = given[0].device if given else torch.device("cpu")
    gradients: list[torch.Tensor] = []
    norms = [torch.zeros((), dtype=torch.float64, device=device)]
    for groups, members in _by_groups(given):
        own = [(parameter, _own_gradient(parameter)) for parameter in members]
        gradients += [gradient for _, gradient in own if gradient is not None]
        counted = [g for parameter, g in own if g is not None and id(parameter) not in skipped]
        norms.append(_over(groups, _norm(counted, order, foreach, device), order))
    total = _over_model(_combined(torch.stack(norms), order), order, pipeline_group, data_group)
    if error_if_nonfinite and not total.isfinite():
        raise Error(
            f"the gradients' norm of order {order}, over all ranks, is {float(total)}, so they cannot be clipped; "
            "error_if_nonfinite=False scales them all the same"
        )
    total = total.to(torch.float64 if {g.dtype for g in gradients} & _WIDE else torch.float32)
    _scale(gradients, (max_norm / (total + 1e-6)).clamp(max=1.0), foreach)
    return total


# ---- which gradients count over which ranks -------------------------------------------------------------------------


def _by_groups(
    parameters: Sequence[torch.Tensor],
) -> list[tuple[tuple[Group, ...], list[torch.Tensor]]]:
    """The parameters by the groups whose ranks hold parts of them, in the same order on these ranks."""
    from pycomm.tensor_parallel.group import group_of  # here, since it takes a second
    from pycomm.tensor_parallel.layout import layout_of

    known: dict[tuple[int, ...], tuple[tuple[Group, ...], list[torch.Tensor]]] = {}
    for parameter in parameters:
        layout = layout_of(parameter)
        groups = [] if layout is None else [layout.group]
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            shards = [dim for dim, p in enumerate(parameter.placements) if p.is_shard()]
            groups += [group_of(mesh.get_group(dim)) for dim in shards]
        split = tuple(group for group in groups if group.world_size > 1)
        key = tuple(id(group.process_group) for group in split)
        known.setdefault(key, (split, []))[1].append(parameter)
    return list(known.values())


def _own_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """What this rank holds of it, in memory that it shares with the gradient."""
    gradient = parameter.grad
    if gradient is None:
        return None
    if isinstance(gradient, DTensor):
        assert isinstance(parameter, DTensor)
        if (
            gradient.placements != parameter.placements
        ):  # sums that are still to be made, for example
            gradient = parameter.grad = gradient.redistribute(placements=parameter.placements)
        return gradient.to_local()
    if gradient.is_sparse:
        parameter.grad = gradient.coalesce()
        return parameter.grad.values()
    return gradient


# ---- norms ----------------------------------------------------------------------------------------------------------


def _lists(
    tensors: Iterable[torch.Tensor],
) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    lists: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        lists.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return lists


def _norm(
    tensors: Sequence[torch.Tensor], order: float, foreach: bool | None, device: torch.device
) -> torch.Tensor:
    """Of all together, in float64."""
    norms = [torch.zeros((), dtype=torch.float64, device=device)]
    for (_, dtype), some in _lists(t for t in tensors if t.numel()).items():
        wide = torch.promote_types(dtype, torch.float32)
        if foreach is False:
            found = [torch.linalg.vector_norm(tensor, order, dtype=wide) for tensor in some]
        else:
            found = list(torch._foreach_norm(some, order, dtype=wide))
        norms += [norm.to(device, torch.float64) for norm in found]
    return _combined(torch.stack(norms), order)


def _combined(norms: torch.Tensor, order: float) -> torch.Tensor:
    """The norm of several parts, from theirs. By their ratios to the largest, whose powers do not overflow."""
    largest = norms.max()  # NaN, if one is
    if order == math.inf:
        return largest
    ratios = torch.where(largest.isfinite() & (largest > 0), norms / largest, 0.0)
    return torch.where(ratios.any(), largest * ratios.pow(order).sum().pow(1 / order), largest)


def _gathered(norm: torch.Tensor, group: Group) -> torch.Tensor:
    """Collective: every rank's."""
    everyone = norm.new_empty(group.world_size)
    group.all_gather(everyone.split(1), norm.reshape(1)).wait()
    return everyone


def _over(groups: Iterable[Group], norm: torch.Tensor, order: float) -> torch.Tensor:
    """Collective: of the parts that the groups' ranks have."""
    for group in groups:
        norm = _combined(_gathered(norm, group), order)
    return norm


def _over_model(
    norm: torch.Tensor, order: float, pipeline_group: GroupLike | Teams, data_group: GroupLike
) -> torch.Tensor:
    """Collective: of all stages, and the same on all replicas."""
    from pycomm.pipeline.teams import Teams
    from pycomm.tensor_parallel.group import group_of

    if isinstance(pipeline_group, Teams):
        norm = _over_teams(norm, order, pipeline_group)
    elif pipeline_group is not None:
        norm = _over([group_of(pipeline_group)], norm, order)
    if data_group is None:
        return norm
    replicas = group_of(data_group)
    everyone = _gathered(norm, replicas)
    _check_average(everyone, range(replicas.world_size), replicas, "the data parallel group")
    return everyone.max()


def _over_teams(norm: torch.Tensor, order: float, teams: Teams) -> torch.Tensor:
    """Collective: each team counts once; its replicas have averaged their gradients."""
    everyone = _gathered(norm, teams.group)
    own = []
    for team in range(len(teams.sizes)):
        members = teams.ranks_of(team)
        _check_average(everyone, members, teams.group, "the pipeline")
        own.append(everyone[members[0] : members[-1] + 1].max())
    return _combined(torch.stack(own), order)


def _check_average(norms: torch.Tensor, members: Sequence[int], group: Group, where: str) -> None:
    """Raises MismatchError if the members' norms are not the same."""
    found = norms.tolist()
    first = found[members[0]]
    for rank in members[1:]:
        other = found[rank]
        finite = math.isfinite(first), math.isfinite(other)
        if finite[0] != finite[1] or (all(finite) and abs(other - first) > _TOLERANCE * first):
            raise MismatchError(
                f"rank {group.rank}: the gradients' norm is {first:.6g} on rank {members[0]} of {where} and "
                f"{other:.6g} on rank {rank}; average the gradients before they are clipped"
            )


def _scale(gradients: Iterable[torch.Tensor], factor: torch.Tensor, foreach: bool | None) -> None:
    for (device, _), some in _lists(gradients).items():
        if foreach is False:
            for gradient in some:
                gradient.mul_(factor.to(device))
        else:
            torch._foreach_mul_(some, factor.to(device))
