"""KV buffers of an engine with several ranks: every rank's shares of every block, next to each other."""

from collections.abc import Sequence
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from kvreplay.kv.buffers import GROUPS_PER_SHARE, KVBuffers
from kvreplay.kv.content import Content, WordArray
from kvreplay.kv.memory import BlockIds as AnyBlockIds
from kvreplay.kv.prefix_cache import BlockIds
from kvreplay.kv.specs import KVCacheGroupSpec


class ShardedBuffers(KVBuffers):
    """One word per token slot and share, in rows of all shares (`Sharding.row_shares`).

    All ranks compute the same, each its own shares. A position is right if every share of it is: one that a transfer
    has left out, or put in another's place, makes it wrong. `sizes`: how many blocks each share really has; the first
    has all.
    """

    def __init__(
        self,
        num_blocks: int,
        blocks: int | Sequence[KVCacheGroupSpec],
        shares: Sequence[int],
        sizes: Sequence[int] | None = None,
    ) -> None:
        super().__init__(num_blocks, blocks)
        assert shares
        self._groups = [share * GROUPS_PER_SHARE for share in shares]
        self._others = [
            KVBuffers(num_blocks, blocks) if size >= num_blocks else ShortBuffers(size, blocks)
            for size in (sizes or [num_blocks] * len(shares))[1:]
        ]

    def write(self, table: BlockIds, content: Content, group: int, start: int, end: int, taint: int = 0) -> bool:
        hits_null = super().write(table, content, group + self._groups[0], start, end, taint)
        for plane, offset in zip(self._others, self._groups[1:], strict=True):
            plane.write(table, content, group + offset, start, end, taint)
        return hits_null

    def write_rejected(self, table: BlockIds, group: int, start: int, end: int) -> None:
        super().write_rejected(table, group, start, end)
        for plane in self._others:
            plane.write_rejected(table, group, start, end)

    def wrong_positions(
        self, table: BlockIds, content: Content, group: int, start: int, end: int
    ) -> NDArray[np.int64] | None:
        found = [super().wrong_positions(table, content, group + self._groups[0], start, end)]
        found += [
            plane.wrong_positions(table, content, group + offset, start, end)
            for plane, offset in zip(self._others, self._groups[1:], strict=True)
        ]
        wrong = [positions for positions in found if positions is not None]
        return reduce(np.union1d, wrong) if wrong else None

    def taint_of(self, table: BlockIds, positions: NDArray[np.int64], group: int = 0) -> int:
        taint = super().taint_of(table, positions, group)
        for place, plane in enumerate(self._others, 2):
            taint ^= plane.taint_of(table, positions, group) * place
        return taint | 1

    def read_blocks(self, group: int, block_ids: AnyBlockIds) -> WordArray:
        """The blocks' rows now, as a copy of shape [number of blocks, number of shares * block size]."""
        rows = [super().read_blocks(group, block_ids), *(plane.read_blocks(group, block_ids) for plane in self._others)]
        whole: WordArray = np.concatenate(rows, axis=1)
        return whole

    def write_blocks(self, group: int, block_ids: AnyBlockIds, words: WordArray) -> None:
        """Most writes bring one rank's part of each row: what is known to be wrong with the rest stays known."""
        ids = np.asarray(block_ids, np.int64)
        parts = np.split(words, len(self._groups), axis=1)
        self._put(group, ids, parts[0])
        for plane, part in zip(self._others, parts[1:], strict=True):
            plane._put(group, ids, part)

    def zero(self, block_ids: AnyBlockIds) -> None:
        super().zero(block_ids)
        for plane in self._others:
            plane.zero(block_ids)

    def copy_block(self, source: int, target: int) -> None:
        super().copy_block(source, target)
        for plane in self._others:
            plane.copy_block(source, target)


class ShortBuffers(KVBuffers):
    """Of a rank that has fewer blocks than its engine's pool: an address behind its last block is one of another."""

    def write(self, table: BlockIds, content: Content, group: int, start: int, end: int, taint: int = 0) -> bool:
        return super().write(self._really(table), content, group, start, end, taint)

    def write_rejected(self, table: BlockIds, group: int, start: int, end: int) -> None:
        super().write_rejected(self._really(table), group, start, end)

    def wrong_positions(
        self, table: BlockIds, content: Content, group: int, start: int, end: int
    ) -> NDArray[np.int64] | None:
        return super().wrong_positions(self._really(table), content, group, start, end)

    def taint_of(self, table: BlockIds, positions: NDArray[np.int64], group: int = 0) -> int:
        return super().taint_of(self._really(table), positions, group)

    def read_blocks(self, group: int, block_ids: AnyBlockIds) -> WordArray:
        return super().read_blocks(group, self._really(block_ids))

    def _put(self, group: int, block_ids: BlockIds, words: WordArray) -> None:
        super()._put(group, self._really(block_ids), words)

    def zero(self, block_ids: AnyBlockIds) -> None:
        super().zero(self._really(block_ids))

    def copy_block(self, source: int, target: int) -> None:
        ids = self._really([source, target])
        super().copy_block(int(ids[0]), int(ids[1]))

    def _really(self, block_ids: AnyBlockIds) -> BlockIds:
        """Where these blocks are; the null block is itself."""
        ids = np.asarray(block_ids, np.int64)
        return np.where(ids > 0, (ids - 1) % (self.num_blocks - 1) + 1, 0)


def make_buffers(
    num_blocks: int,
    blocks: int | Sequence[KVCacheGroupSpec],
    shares: Sequence[int],
    sizes: Sequence[int] | None = None,
) -> KVBuffers:
    """Buffers for rows of these shares (`Sharding.row_shares`). `sizes`: as `ShardedBuffers` has them."""
    return KVBuffers(num_blocks, blocks) if shares == (0,) else ShardedBuffers(num_blocks, blocks, shares, sizes)
