"""One request's block table in one KV cache group."""

import numpy as np

from kvreplay.kv.prefix_cache import BlockIds

UNTRACKED = -1


class BlockTable:
    """A growing list of block ids; `ids` is the filled part of the array behind it.

    `num_cached` counts leading blocks that have been offered to the prefix cache. UNTRACKED until the request has
    adopted or cached blocks for the first time: vLLM's "request_id in num_cached_block".
    """

    __slots__ = ("_array", "num_blocks", "num_cached", "view")

    def __init__(self, capacity: int = 16) -> None:
        self._array = np.empty(capacity, np.int64)
        self.view = self._array.data
        self.num_blocks = 0
        self.num_cached = UNTRACKED

    def __len__(self) -> int:
        return self.num_blocks

    @property
    def ids(self) -> BlockIds:
        return self._array[: self.num_blocks]

    def extend(self, block_ids: BlockIds) -> None:
        end = self.num_blocks + len(block_ids)
        if end > len(self._array):
            self._grow(end)
        self._array[self.num_blocks : end] = block_ids
        self.num_blocks = end

    def append(self, block_id: int) -> None:
        if self.num_blocks == len(self._array):
            self._grow(self.num_blocks + 1)
        self.view[self.num_blocks] = block_id
        self.num_blocks += 1

    def extend_nulls(self, count: int) -> None:
        self.extend(np.zeros(count, np.int64))

    def _grow(self, needed: int) -> None:
        grown = np.empty(max(needed, len(self._array) + len(self._array) // 2 + 8), np.int64)
        grown[: self.num_blocks] = self.ids
        self._array = grown
        self.view = grown.data
