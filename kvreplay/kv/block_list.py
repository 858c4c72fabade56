"""Block ids on their way through structures that say `list`."""

from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray

from kvreplay.kv.prefix_cache import BlockIds


class BlockList(Sequence[int]):
    """Block ids that look like a list of integers, and are an array for those who compute with them.

    A prompt has hundreds of blocks, and most of what is told about them is handed on unread. `array` must not change.
    """

    __slots__ = ("array",)

    def __init__(self, array: BlockIds) -> None:
        self.array = array

    def __len__(self) -> int:
        return len(self.array)

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> "BlockList": ...
    def __getitem__(self, place: int | slice) -> "int | BlockList":
        return BlockList(self.array[place]) if isinstance(place, slice) else int(self.array[place])

    def __iter__(self) -> Iterator[int]:
        ids: list[int] = self.array.tolist()
        return iter(ids)

    def __contains__(self, block_id: object) -> bool:
        return bool(np.count_nonzero(self.array == block_id))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BlockList | list):
            return NotImplemented
        return len(self) == len(other) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:  # noqa: FBT001 - numpy's
        return np.array(self.array, dtype, copy=copy)
