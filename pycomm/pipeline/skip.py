"""Tensors for later stages than the next one: put aside in one module, taken out in another one, wherever that is.

    class Down(nn.Module):
        def forward(self, x):
            stash("skip", x)
            return self.conv(x)

    class Up(nn.Module):
        def forward(self, x):
            return self.conv(torch.cat([x, pop("skip")], 1))

Between two stages such tensors travel with the output, through all stages in between, and so do their gradients. In a
model that is not split the same modules work as they are. (The idea of named skips is torchgpipe's, arXiv 2004.09910.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

from pycomm.errors import InvalidArgument

_aside: ContextVar[dict[str, Tensor] | None] = ContextVar("pycomm_skips", default=None)
#: Of models that are not split.
_whole: dict[str, Tensor] = {}


def stash(name: str, tensor: Tensor) -> None:
    """Puts a tensor aside for one pop() of that name, in this stage or a later one; each microbatch has its own.

    Raises InvalidArgument if there is one of that name already, which nothing has taken.
    """
    here = _here()
    if name in here and here is not _whole:
        raise InvalidArgument(f"a tensor {name!r} is put aside already: pop({name!r}) comes first")
    here[name] = tensor


def pop(name: str) -> Tensor:
    """What stash() has put aside; raises InvalidArgument if there is nothing of that name."""
    here = _here()
    if name not in here:
        raise InvalidArgument(
            f"nothing is put aside as {name!r}, only {sorted(here)}: stash() runs in this stage or an earlier one"
        )
    return here.pop(name)


@contextmanager
def carrying(skips: dict[str, Tensor]) -> Iterator[None]:
    """stash() and pop() use these, within."""
    token = _aside.set(skips)
    try:
        yield
    finally:
        _aside.reset(token)


def _here() -> dict[str, Tensor]:
    inside = _aside.get()
    return _whole if inside is None else inside
