"""What a plan says about a module: how it is split."""

from __future__ import annotations

from typing import Any, Final

from pycomm.errors import InvalidArgument

#: What a plan can say, and of which modules.
KINDS: Final = {
    "column": "each rank computes some outputs, which stay split: nn.Linear, Conv1D, nn.Conv2d",
    "row": "each rank takes some inputs, and the sum is the output: nn.Linear, Conv1D, nn.Conv2d",
    "qkv": "a column layer of queries, keys and values, one after the other: nn.Linear, Conv1D",
    "vocab": "each rank has some rows of the vocabulary, and all get all: nn.Embedding, nn.Linear, Conv1D",
    "groups": "each rank has some groups, whose channels come and go split: nn.Conv2d, nn.BatchNorm2d",
    "attention": "each rank computes some heads: nn.MultiheadAttention",
    "shared": "each rank computes its part of the data: norms, dropout, what has parameters of its own",
    "boundary": "what is split or gathered at a module's inputs and outputs: any module",
    "whole": "all ranks compute the same, as before: any module",
}


class Style:
    """One of KINDS, with options of the layer that takes the module's place.

    ``Style("column", gather_output=True)``; in a plan ``"column"`` is short for ``Style("column")``. With ``optional``
    no module needs to match.
    """

    def __init__(self, kind: str, *, optional: bool = False, **options: Any) -> None:
        if kind not in KINDS:
            known = "; ".join(f'"{name}": {words}' for name, words in KINDS.items())
            raise InvalidArgument(f"a plan says nothing like {kind!r}, but {known}")
        self.kind = kind
        self.optional = optional
        self.options = options

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Style) and (self.kind, self.options) == (other.kind, other.options)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        if not self.options:
            return f'"{self.kind}"'
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f'Style("{self.kind}", {options})'
