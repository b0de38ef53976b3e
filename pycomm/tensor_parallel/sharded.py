"""What a parallel module's state_dict holds of a split parameter: this rank's part, and where it belongs."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from pycomm.tensor_parallel.layout import Layout, Piece


class ShardTensor(torch.Tensor):
    """A rank's part of a tensor, for torch.distributed.checkpoint: saved as pieces of the whole.

    So it loads into any other split. Operations give plain tensors, but for copies of the part; pickled, it is a plain
    tensor, too.
    """

    placement: Layout

    def __new__(cls, local: torch.Tensor, layout: Layout) -> ShardTensor:
        """Shares memory with ``local``."""
        shard: ShardTensor = torch.Tensor._make_subclass(cls, local.detach())
        shard.placement = layout
        return shard

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if func in _COPIES and isinstance(result, torch.Tensor):
            return cls(result, args[0].placement)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardTensor:
        return ShardTensor(self.plain().clone(), self.placement)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)

    def size(self, dim: int | None = None) -> Any:
        """Of the whole tensor, which is what DCP compares with a checkpoint's; ``shape`` is the part's."""
        whole = torch.Size(self.placement.shape)
        return whole if dim is None else whole[dim]

    def plain(self) -> torch.Tensor:
        """The same memory as an ordinary tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return torch.Tensor._make_subclass(torch.Tensor, self)

    # ---- what torch.distributed.checkpoint asks for -----------------------------------------------------------------

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        """One for each piece."""
        properties = TensorProperties.create_from_tensor(self.plain())
        size = torch.Size(self.placement.shape)
        items = []
        for chunk in self.__create_chunk_list__():
            data = TensorWriteData(chunk=chunk, properties=properties, size=size)
            index = MetadataIndex(fqn, chunk.offsets)
            items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        return items

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Where the pieces lie in the whole tensor."""
        return [self._chunk(piece) for piece in self.placement.own if piece.count]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """A view of the piece that begins there."""
        begin = 0
        for piece in self.placement.own:
            if piece.count and self._chunk(piece).offsets == index.offset:
                return self.plain().narrow(self.placement.dim, begin, piece.count)
            begin += piece.count
        raise ValueError(f"{index} is not on this rank, {self.placement.group}")

    def _chunk(self, piece: Piece) -> ChunkStorageMetadata:
        offsets, sizes = [0] * len(self.placement.shape), list(self.placement.shape)
        offsets[self.placement.dim], sizes[self.placement.dim] = piece.begin, piece.count
        return ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))


_COPIES = {
    torch.Tensor.detach,
    torch.Tensor.clone,
    torch.Tensor.cpu,
    torch.Tensor.to,
    torch.Tensor.contiguous,
    torch.empty_like,
    torch.zeros_like,
}
