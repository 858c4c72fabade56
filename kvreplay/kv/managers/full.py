"""Full attention and MLA: every block stays until the request ends (vLLM: FullAttentionManager)."""

from collections.abc import Sequence

import numpy as np

from kvreplay.ids import NULL_BLOCK_ID
from kvreplay.kv.managers.base import CachedRequest, JointLookup, KVGroupManager
from kvreplay.kv.prefix_cache import BlockIds, Keys
from kvreplay.kv.specs import cdiv


class FullAttentionManager(KVGroupManager):
    finds_inside_blocks = True

    def find_longest_cache_hit(
        self, group: JointLookup, keys: Keys, max_length: int, *, drop_eagle_block: bool
    ) -> tuple[list[BlockIds], int]:
        block_size, alignment = self.block_size, self.rules.hit_alignment
        blocks = group.find_prefix(self.block_keys(keys)[: max_length // block_size])
        num_blocks = len(blocks[0])
        hit_length = num_blocks * block_size
        tail: list[BlockIds] = []
        if alignment < block_size:
            tail, hit_length = self._extend_inside_block(group, keys, max_length, hit_length)
        if drop_eagle_block and hit_length > 0:
            hit_length -= min(alignment, block_size)
        hit_length -= hit_length % alignment
        if tail:
            blocks = [np.concatenate(pair) for pair in zip(blocks, tail, strict=True)]
        return [ids[: cdiv(hit_length, block_size)] for ids in blocks], hit_length

    def _extend_inside_block(
        self, group: JointLookup, keys: Keys, max_length: int, hit_length: int
    ) -> tuple[list[BlockIds], int]:
        """The longest prefix that ends inside the first block that is not a hit."""
        unit = self.rules.hit_alignment
        first = hit_length // unit
        last = min(first + self._hashes_per_block - 1, max_length // unit, len(keys))
        for index in range(last - 1, first - 1, -1):
            tail = group.find(keys[index : index + 1])
            if tail[0][0]:
                return tail, (index + 1) * unit
        return [], hit_length

    def cache_blocks(self, request: CachedRequest, keys: Keys, num_tokens: int, boundaries: Sequence[int]) -> BlockIds:
        cached = super().cache_blocks(request, keys, num_tokens, boundaries)
        if self._hashes_per_block > 1:
            self._cache_prompt_tail(request, keys, num_tokens)
        return cached

    def _cache_prompt_tail(self, request: CachedRequest, keys: Keys, num_tokens: int) -> None:
        """The prompt's last hash boundary, where it lies inside a block (vLLM: _cache_partial_tail_block)."""
        unit = self.rules.hash_block_size
        limit = request.num_prompt_tokens - (0 if self.drops_eagle_block else 1)
        num_hashes = (request.num_tokens - self.rules.num_hash_lookahead_tokens) // unit
        boundary = min(limit // unit, num_hashes) * unit
        if boundary <= 0 or boundary > num_tokens or boundary % self.block_size == 0:
            return
        table = self.table(request.request_id)
        index = boundary // self.block_size
        if index < table.num_blocks and table.ids[index] != NULL_BLOCK_ID:
            key = int(self.pool_keys(keys[boundary // unit - 1 : boundary // unit])[0])
            self.pool.cache_partial(int(table.ids[index]), key, boundary)
