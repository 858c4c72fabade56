"""STORE-CONTENT: what is offloaded under a key is what the tokens of that key have."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from kvreplay.connectors.offloading.arrays import Keys
from kvreplay.connectors.offloading.keys import KeySpace
from kvreplay.connectors.offloading.layout import OffloadLayout
from kvreplay.connectors.offloading.structs import TransferJob
from kvreplay.kv.cache_manager import KVCacheManager
from kvreplay.kv.content import Content, KeyArray
from kvreplay.kv.group_keys import group_key
from kvreplay.kv.prefix_cache import NO_KEY, BlockIds

_Key = TypeVar("_Key", int, KeyArray)


class ForeignBlock(NamedTuple):
    block_id: int
    group: int


class StoreContent:
    """Of one engine's connector."""

    def __init__(self, layout: OffloadLayout, space: KeySpace, kv: KVCacheManager) -> None:
        self._layout = layout
        self._space = space
        self._kv = kv
        self._num_groups = len(layout.groups)
        self._num_kv_groups = len(kv.groups)

    def foreign_blocks(self, job: TransferJob, keys: Keys, content: Content) -> Iterable[ForeignBlock]:
        """Blocks of a store that have the hash of other tokens by now. `keys`: one per chunk; `content`: the request's.

        Asked when the store is ordered and nothing waits for it: whoever has such a block writes to it first. Drafters'
        groups, whose keys reach further than their blocks, are not looked at.
        """
        block_ids = job.gpu.block_ids
        if len(keys) == 1 == len(block_ids) and self._is_own(block_ids.item(), job.gpu.group_sizes, keys):
            return ()
        return self._look_closer(job, keys, content)

    def _is_own(self, block_id: int, group_sizes: Sequence[int], keys: Keys) -> bool:
        """Whether one block that is stored under one key has that hash, or none."""
        found = self._kv.pool.keys.item(block_id)
        if found == NO_KEY:
            return True
        group = self._layout.groups[group_sizes.index(1)]
        if group.blocks_per_chunk != 1 or group.is_drafter:
            return False
        return bool(found == self._expected(keys.item() // self._num_groups, group.group_id))

    def _expected(self, block_key: _Key, group_id: int) -> _Key:
        """The hash of blocks of that group: of the engine's, which may have more than the connector's."""
        return block_key if self._num_kv_groups == 1 else group_key(block_key, group_id, self._num_kv_groups)

    def _look_closer(self, job: TransferJob, keys: Keys, content: Content) -> Iterator[ForeignBlock]:
        layout = self._layout
        next_key = next_block = 0
        for group, num_blocks, first in zip(layout.groups, job.gpu.group_sizes, job.gpu.block_indices, strict=True):
            if not num_blocks:
                continue
            size = group.blocks_per_chunk
            skipped = first % size
            num_chunks = -(-(num_blocks + skipped) // size)
            block_ids = job.gpu.block_ids[next_block : next_block + num_blocks]
            of_group = keys[next_key : next_key + num_chunks]
            next_block, next_key = next_block + num_blocks, next_key + num_chunks
            if group.is_drafter or num_chunks * size - skipped != num_blocks:
                continue  # of blocks that do not fill their chunks the copy engine dies
            if size == 1:
                block_keys = of_group // self._num_groups
            else:
                # A chunk's key is that of its last block; those of the others come before it in the request.
                ends = (self._space.positions(of_group) // layout.tokens_per_hash)[:, np.newaxis]
                from_end = np.arange(size - 1, -1, -1) * (group.tokens_per_block // layout.tokens_per_hash)
                block_keys = content.block_keys[(ends - 1 - from_end).ravel()[skipped:]]
            for block_id in self._foreign(block_ids, self._expected(block_keys, group.group_id)):
                yield ForeignBlock(block_id, group.group_id)

    def _foreign(self, block_ids: BlockIds, expected: KeyArray) -> Iterator[int]:
        pool = self._kv.pool
        found = pool.keys[block_ids]
        is_other = (found != expected) & (found != NO_KEY)
        if is_other.any():
            for place in is_other.nonzero()[0].tolist():
                block_id = int(block_ids[place])
                if not pool.holds(block_id, int(expected[place])):
                    yield block_id
