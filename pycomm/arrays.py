"""Arrays of other libraries (NumPy, CuPy, JAX, Numba, ...) as tensors on the same memory."""

from __future__ import annotations

from typing import Any

import torch

from pycomm.errors import InvalidArgument


def as_tensor(array: Any) -> torch.Tensor:
    """The tensor itself, or one on the memory of whatever has ``__dlpack__`` or ``__cuda_array_interface__``.

    Nothing is copied. Memory on a GPU is in the order of torch's current stream from then on: what the other library
    has under way is waited for there, and what it does next has to come after that stream, for which CuPy takes
    ``cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)``.

    Raises InvalidArgument for anything else, for memory that must not be written, and for what DLPack cannot say.
    """
    if isinstance(array, torch.Tensor):
        return array
    kind = f"{type(array).__module__}.{type(array).__qualname__}"
    if _is_read_only(array):
        raise InvalidArgument(
            f"a {kind} cannot be used as a tensor: its memory must not be written"
        )
    try:
        if hasattr(array, "__dlpack__"):
            return torch.from_dlpack(array)
        if hasattr(array, "__cuda_array_interface__"):
            return torch.as_tensor(array, device="cuda")
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidArgument(f"a {kind} cannot be used as a tensor: {error}") from error
    raise InvalidArgument(
        f"expected a tensor, or an array with __dlpack__ or __cuda_array_interface__, not a {kind}"
    )


def _is_read_only(array: Any) -> bool:
    """By the array interfaces; not every DLPack says it, and torch does not ask."""
    for name in ("__array_interface__", "__cuda_array_interface__"):
        data = getattr(array, name, {}).get("data")
        if isinstance(data, tuple) and data[1]:
            return True
    return False
