"""What the styles of torch.distributed.tensor.parallel mean here, where tensors are plain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.distributed.tensor.parallel.style import ParallelStyle

from pycomm.errors import InvalidArgument
from pycomm.tensor_parallel.boundary import Move
from pycomm.tensor_parallel.style import Style


def style_of(torch_style: ParallelStyle, module: nn.Module) -> Style:
    """The same for a module. Raises InvalidArgument for what has no meaning here."""
    kind = type(torch_style)
    if kind is ColwiseParallel:
        return _column(torch_style, module)
    if kind is RowwiseParallel:
        return _embedding(torch_style) if isinstance(module, nn.Embedding) else _row(torch_style)
    if kind is SequenceParallel:
        return Style("shared")
    if kind is PrepareModuleInput:
        return Style("boundary", **_inputs(torch_style))
    if kind is PrepareModuleOutput:
        return Style("boundary", **_outputs(torch_style))
    if kind is PrepareModuleInputOutput:
        both: Any = torch_style
        return Style(
            "boundary", **_inputs(both.prepare_module_input), **_outputs(both.prepare_module_output)
        )
    raise InvalidArgument(
        f"torch's {kind.__name__} has no form here; take pycomm.tensor_parallel.Style"
    )


def _sequence(placement: Any, whole: Any) -> dict[str, Any]:
    """Options of a layer one side of which is ``whole`` or split along the sequence."""
    if placement == whole:
        return {}
    if type(placement) is Shard and placement.dim != -1:
        return {"sequence_parallel": True, "sequence_dim": placement.dim}
    raise InvalidArgument(
        f"a layout of {placement!r} has no form here, but {whole!r} or Shard(<sequence>)"
    )


def _column(style: Any, module: nn.Module) -> Style:
    if isinstance(module, nn.Embedding):
        raise InvalidArgument(
            "ColwiseParallel of an embedding has no form here: RowwiseParallel(input_layouts=Replicate()) splits it by "
            "its rows"
        )
    _check_local(style)
    options = _sequence(style.input_layouts[0], Replicate())
    (output,) = style.output_layouts
    if output not in (Shard(-1), Replicate()):
        raise InvalidArgument(
            f"ColwiseParallel(output_layouts={output!r}) has no form here, but Shard(-1) and Replicate()"
        )
    return Style("column", gather_output=output == Replicate(), **options)


def _row(style: Any) -> Style:
    _check_local(style)
    (entry,) = style.input_layouts
    if entry not in (Shard(-1), Replicate()):
        raise InvalidArgument(
            f"RowwiseParallel(input_layouts={entry!r}) has no form here, but Shard(-1) and Replicate()"
        )
    options = _sequence(style.output_layouts[0], Replicate())
    return Style("row", input_is_parallel=entry == Shard(-1), **options)


def _embedding(style: Any) -> Style:
    _check_local(style)
    (entry,) = style.input_layouts
    if entry != Replicate():
        raise InvalidArgument(
            f"input_layouts={entry!r} of an embedding has no form here; say RowwiseParallel(input_layouts=Replicate())"
        )
    return Style("vocab", **_sequence(style.output_layouts[0], Replicate()))


def _check_local(style: Any) -> None:
    if not style.use_local_output:
        raise InvalidArgument(
            "use_local_output=False has no form here, since no DTensors come out; for logits that stay split there is "
            "pycomm.tensor_parallel.vocab_parallel_cross_entropy"
        )


# ---- around modules -------------------------------------------------------------------------------------------------


def _move(given: Any, wanted: Any) -> Move | None:
    if given is None or wanted is None or given == wanted:
        return None
    if isinstance(given, Shard) and wanted == Replicate():
        return Move(split=False, dim=given.dim)
    if given == Replicate() and isinstance(wanted, Shard):
        return Move(split=True, dim=wanted.dim)
    raise InvalidArgument(
        f"from {given!r} to {wanted!r} is no move known here, but from Shard to Replicate and back"
    )


def _moves(given: Sequence[Any] | None, wanted: Sequence[Any] | None) -> list[Move | None]:
    return [_move(a, b) for a, b in zip(given or (), wanted or (), strict=True)]


def _inputs(style: Any) -> dict[str, Any]:
    keywords = {
        name: _move(given, style.desired_input_kwarg_layouts.get(name))
        for name, given in (style.input_kwarg_layouts or {}).items()
    }
    return {
        "inputs": _moves(style.input_layouts, style.desired_input_layouts),
        "keywords": {name: move for name, move in keywords.items() if move is not None},
    }


def _outputs(style: Any) -> dict[str, Any]:
    return {"outputs": _moves(style.output_layouts, style.desired_output_layouts)}
