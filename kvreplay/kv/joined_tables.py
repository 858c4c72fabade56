"""One request's block tables in several groups that grow alike, as one array."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvreplay.kv.block_table import UNTRACKED, BlockTable
from kvreplay.kv.prefix_cache import BlockIds


class JoinedTable:
    """`array` has shape [groups, capacity], of which `num_blocks` columns are filled; `view` is it flat: the block of
    group g at place p is `view[g * capacity + p]`.

    `num_cached` is what `BlockTable` has, if all groups agree; else `_uneven` has each group's.
    """

    __slots__ = ("_num_cached", "_uneven", "array", "capacity", "hashed_from", "hashed_until", "num_blocks", "view")

    def __init__(self, num_groups: int, capacity: int) -> None:
        self.array: NDArray[np.int64] = np.zeros((num_groups, capacity), np.int64)
        self.view = self.array.reshape(-1).data
        self.capacity = capacity
        self.num_blocks = 0
        self.hashed_from = self.hashed_until = 0
        """Between these places blocks of windows may have, or have had, a hash."""
        self._num_cached = UNTRACKED
        self._uneven: list[int] | None = None

    @property
    def ids(self) -> NDArray[np.int64]:
        """The filled part, of shape [groups, blocks]."""
        return self.array[:, : self.num_blocks]

    def reserve(self, capacity: int) -> None:
        if capacity > self.capacity:
            grown = np.zeros((len(self.array), max(capacity, self.capacity + self.capacity // 2 + 8)), np.int64)
            grown[:, : self.num_blocks] = self.ids
            self.array = grown
            self.view = grown.reshape(-1).data
            self.capacity = grown.shape[1]

    def extend(self, columns: NDArray[np.int64]) -> None:
        """`columns` has shape [groups, new blocks]."""
        end = self.num_blocks + columns.shape[1]
        self.reserve(end)
        self.array[:, self.num_blocks : end] = columns
        self.num_blocks = end

    def note_hashed(self, start: int, end: int) -> None:
        """Blocks of windows at places [start, end) have a hash."""
        if start < end:
            is_first = self.hashed_from == self.hashed_until
            self.hashed_from = start if is_first else min(self.hashed_from, start)
            self.hashed_until = max(self.hashed_until, end)

    @property
    def is_tracked(self) -> bool:
        return self._uneven is not None or self._num_cached != UNTRACKED

    @property
    def num_cached(self) -> int | None:
        """None where groups differ."""
        return self._num_cached if self._uneven is None else None

    @num_cached.setter
    def num_cached(self, num_cached: int) -> None:
        self._num_cached = num_cached
        self._uneven = None

    def num_cached_in(self, group: int) -> int:
        return self._num_cached if self._uneven is None else self._uneven[group]

    def set_num_cached_in(self, group: int, num_cached: int) -> None:
        if self._uneven is None:
            if num_cached == self._num_cached:
                return
            self._uneven = [self._num_cached] * len(self.array)
        self._uneven[group] = num_cached
        if self._uneven.count(num_cached) == len(self._uneven):
            self.num_cached = num_cached

    def rows(self) -> "Iterator[RowOfTable]":
        return (RowOfTable(self, group) for group in range(len(self.array)))


class RowOfTable(BlockTable):
    """One group's row, for those who know single tables. It grows with all others only."""

    __slots__ = ("_group", "_joined")

    def __init__(self, joined: JoinedTable, group: int) -> None:
        self._joined = joined
        self._group = group

    @property
    def ids(self) -> BlockIds:
        return self._joined.array[self._group, : self._joined.num_blocks]

    @property
    def num_blocks(self) -> int:  # type: ignore[override]
        return self._joined.num_blocks

    @property
    def num_cached(self) -> int:
        return self._joined.num_cached_in(self._group)

    @num_cached.setter
    def num_cached(self, num_cached: int) -> None:
        self._joined.set_num_cached_in(self._group, num_cached)

    def extend(self, block_ids: BlockIds) -> None:
        raise AssertionError("a row grows with its table")

    def append(self, block_id: int) -> None:
        raise AssertionError("a row grows with its table")
