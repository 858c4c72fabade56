"""STORE-CONTENT: what is offloaded under a key is what the tokens of that key have."""

from collections.abc import Iterator
from typing import NamedTuple

from kvreplay.connectors.offloading.arrays import Keys
from kvreplay.connectors.offloading.layout import OffloadLayout
from kvreplay.connectors.offloading.structs import TransferJob
from kvreplay.kv.block_pool import NO_KEY
from kvreplay.kv.cache_manager import KVCacheManager


class ForeignBlock(NamedTuple):
    block_id: int
    group: int


def foreign_blocks(job: TransferJob, keys: Keys, layout: OffloadLayout, kv: KVCacheManager) -> Iterator[ForeignBlock]:
    """Blocks of a store that have the hash of other tokens by now. `keys`: one per block.

    Asked when the store is ordered and nothing waits for it: whoever has such a block writes to it first. Chunks of
    several blocks, and drafters' groups, whose keys reach further than their blocks, are not looked at.
    """
    if layout.blocks_per_chunk != 1 or len(keys) != len(job.gpu.block_ids):
        return
    pool, num_groups = kv.pool, len(kv.groups)
    for block_id, key in zip(job.gpu.block_ids.tolist(), keys.tolist(), strict=True):
        block_key, index = divmod(key, len(layout.groups))
        group = layout.groups[index]
        expected = block_key if num_groups == 1 else block_key * num_groups + group.group_id
        found = int(pool.keys[block_id])
        if found not in (NO_KEY, expected) and not group.is_drafter and not pool.holds(block_id, expected):
            yield ForeignBlock(block_id, group.group_id)
