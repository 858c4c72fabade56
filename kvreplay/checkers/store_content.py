"""STORE-CONTENT: what is offloaded under a key is what the tokens of that key have."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kvreplay.connectors.offloading.arrays import Keys
from kvreplay.connectors.offloading.keys import KeySpace
from kvreplay.connectors.offloading.layout import OffloadLayout
from kvreplay.connectors.offloading.structs import TransferJob
from kvreplay.kv.cache_manager import KVCacheManager
from kvreplay.kv.content import KeyArray
from kvreplay.kv.group_keys import group_key
from kvreplay.kv.prefix_cache import NO_KEY, BlockIds


class ForeignBlock(NamedTuple):
    block_id: int
    group: int


def foreign_blocks(
    job: TransferJob, keys: Keys, block_keys: KeyArray, layout: OffloadLayout, space: KeySpace, kv: KVCacheManager
) -> Iterator[ForeignBlock]:
    """Blocks of a store that have the hash of other tokens by now. `keys`: one per chunk; `block_keys`: the request's.

    Asked when the store is ordered and nothing waits for it: whoever has such a block writes to it first. Drafters'
    groups, whose keys reach further than their blocks, are not looked at.
    """
    if len(keys) == 1 == len(job.gpu.block_ids) and _is_own(job, keys.item(), layout, kv):
        return
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
            expected = of_group // len(layout.groups)
        else:
            # A chunk's key is that of its last block; those of the others come before it in the request.
            ends = (space.positions(of_group) // layout.tokens_per_hash)[:, np.newaxis]
            from_end = np.arange(size - 1, -1, -1) * (group.tokens_per_block // layout.tokens_per_hash)
            expected = block_keys[(ends - 1 - from_end).ravel()[skipped:]]
        if len(kv.groups) > 1:
            expected = group_key(expected, group.group_id, len(kv.groups))
        for block_id in _foreign(block_ids, expected, kv):
            yield ForeignBlock(block_id, group.group_id)


def _is_own(job: TransferJob, key: int, layout: OffloadLayout, kv: KVCacheManager) -> bool:
    """Whether one block that is stored under one key has that hash, or none."""
    found = kv.pool.keys.item(job.gpu.block_ids.item())
    if found == NO_KEY:
        return True
    group = layout.groups[job.gpu.group_sizes.index(1)]
    if group.blocks_per_chunk != 1 or group.is_drafter:
        return False
    expected = key // len(layout.groups)
    if len(kv.groups) > 1:
        expected = group_key(expected, group.group_id, len(kv.groups))
    return bool(found == expected)


def _foreign(block_ids: BlockIds, expected: KeyArray, kv: KVCacheManager) -> Iterator[int]:
    found = kv.pool.keys[block_ids]
    is_other = (found != expected) & (found != NO_KEY)
    if is_other.any():
        for place in is_other.nonzero()[0].tolist():
            block_id = int(block_ids[place])
            if not kv.pool.holds(block_id, int(expected[place])):
                yield block_id
