"""A convolution whose channels are split over ranks."""

from __future__ import annotations

from typing import Any, Final, Literal

import torch
from torch import nn

from pycomm.errors import InvalidArgument
from pycomm.tensor_parallel import regions
from pycomm.tensor_parallel.group import Group, GroupLike, group_of
from pycomm.tensor_parallel.layout import Layout, split_counts
from pycomm.tensor_parallel.module import ParallelModule, autocast

Split = Literal["output", "input", "groups"]
_CHANNELS: Final = -3


class ParallelConv2d(ParallelModule):
    """:class:`torch.nn.Conv2d` of which each rank has some channels.

    Takes torch's arguments, and ``group``. ``split``:

    - "output": each rank computes some output channels; with ``gather_output`` all ranks get all.
    - "input": each rank takes some input channels, already its own with ``input_is_parallel``; the sum is the output,
      the bias added once.
    - "groups": each rank has some of the convolution's groups (a depthwise one's channels), so nothing is summed;
      ``input_is_parallel`` and ``gather_output`` say what comes in and goes out.

    Initial weights are those of nn.Conv2d for the same seed.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        *args: Any,
        split: Split = "output",
        group: GroupLike | Group = None,
        gather_output: bool = True,
        input_is_parallel: bool = False,
        source: nn.Conv2d | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(group_of(group))
        self._new = lambda: nn.Conv2d(in_channels, out_channels, kernel_size, *args, **kwargs)
        source = source if source is not None else self._new()
        if split not in ("output", "input", "groups") or (source.groups > 1) != (split == "groups"):
            raise InvalidArgument(
                f'split="{split}" of a convolution of {source.groups} groups: "output" and "input" are for one group, '
                '"groups" is for several'
            )
        self.split = split
        self.gather_output = gather_output and split != "input"
        self.input_is_parallel = input_is_parallel and split != "output"
        self.channels = source.in_channels, source.out_channels
        groups = split_counts(source.groups, self.group.world_size)
        if split == "groups":
            self.input_counts = [count * source.in_channels // source.groups for count in groups]
            self.output_counts = [count * source.out_channels // source.groups for count in groups]
        else:
            self.input_counts = split_counts(source.in_channels, self.group.world_size)
            self.output_counts = split_counts(source.out_channels, self.group.world_size)
        self._take(source, groups[self.group.rank] if split == "groups" else 1)

    def _take(self, source: nn.Conv2d, groups: int) -> None:
        dim, counts = (1, self.input_counts) if self.split == "input" else (0, self.output_counts)
        if min(counts) == 0:
            raise InvalidArgument(
                f"a convolution of {self.channels} channels and {source.groups} groups, split by {self.split}, is too "
                f"small for {self.group.world_size} ranks"
            )
        layouts = {"weight": Layout.of_counts(self.group, source.weight.shape, dim, counts)}
        if source.bias is None:
            self.register_parameter("bias", None)
        elif dim == 0:
            layouts["bias"] = Layout.of_counts(self.group, source.bias.shape, 0, counts)
        self.adopt(source, layouts)
        ways: tuple[Any, ...] = (source.kernel_size, source.stride, source.padding, source.dilation)
        make: Any = nn.Conv2d
        convolution = make(groups, groups, *ways, groups, False, source.padding_mode, "meta")
        self._convolution = (
            convolution,
        )  # its ways, not its weight; in a tuple it is no submodule

    @classmethod
    def from_conv(cls, source: nn.Conv2d, **options: Any) -> ParallelConv2d:
        """This rank's part of an ordinary one, which is the same on all ranks."""
        arguments: tuple[Any, ...] = (
            *(source.in_channels, source.out_channels, source.kernel_size, source.stride),
            *(source.padding, source.dilation, source.groups, source.bias is not None),
            source.padding_mode,
        )
        return cls(*arguments, source=source, **options)

    def reset_parameters(self) -> None:
        """As torch's: the values are those of the whole layer, drawn from the same random numbers on all ranks."""
        self.refill(self._new())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., channels, height, width], or this rank's part of the channels, to the same."""
        group = self.group
        if self.input_is_parallel:
            own = self.input_counts[group.rank]
            self.check_width(x, own, "it takes this rank's part of the channels", _CHANNELS)
        else:
            self.check_width(x, self.channels[0], "it takes all channels, on all ranks", _CHANNELS)
            if self.split == "output":
                x = regions.copy(x, group)
            else:
                x = regions.scatter(x, group, _CHANNELS, self.input_counts)
        x, weight, bias = autocast(x, self.weight, self.bias)
        convolve = self._convolution[0]._conv_forward
        if self.split != "input":
            y = convolve(x, weight, bias)
            return (
                regions.gather(y, group, _CHANNELS, self.output_counts) if self.gather_output else y
            )
        y = regions.reduce(convolve(x, weight, None), group)
        return y if bias is None else y + bias.view(-1, 1, 1)

    def extra_repr(self) -> str:
        """Channels, how they are split, and which rank of how many."""
        return f"{self.channels[0]}, {self.channels[1]}, split={self.split}, {self.group}"
