"""Chunked local attention: a token attends to its own chunk only (vLLM: ChunkedLocalAttentionManager)."""

import numpy as np

from kvreplay.errors import EngineFatal
from kvreplay.ids import NULL_BLOCK_ID
from kvreplay.kv.block_pool import BlockPool
from kvreplay.kv.managers.base import CacheRules, DecodeEvent, JointLookup, KVGroupManager
from kvreplay.kv.prefix_cache import BlockIds, Keys
from kvreplay.kv.specs import KVCacheGroupSpec, cdiv


class ChunkedLocalManager(KVGroupManager):
    def __init__(self, spec: KVCacheGroupSpec, group: int, pool: BlockPool, rules: CacheRules) -> None:
        super().__init__(spec, group, pool, rules)
        assert spec.attention_chunk_size is not None
        self.chunk = spec.attention_chunk_size

    def skipped_tokens(self, num_computed_tokens: int) -> int:
        return num_computed_tokens // self.chunk * self.chunk

    def decode_events(self, caching_unit: int) -> list[DecodeEvent]:
        gives = cdiv(self.chunk, self.block_size)
        return [*super().decode_events(caching_unit), DecodeEvent(self.chunk, 0, gives=gives)]

    def find_longest_cache_hit(
        self, group: JointLookup, keys: Keys, max_length: int, *, drop_eagle_block: bool
    ) -> tuple[list[BlockIds], int]:
        """Earlier chunks count as computed without a look at the cache: any prompt "hits" them."""
        block_size = self.block_size
        if drop_eagle_block:
            raise EngineFatal("AssertionError", "Hybrid KV cache is not supported for eagle + chunked local attention.")
        if self.rules.hit_alignment != block_size:
            raise EngineFatal(
                "AssertionError",
                "KV cache groups with different block sizes are not compatible with chunked local attention now",
            )
        if self.rules.looks_at_whole_chunks:
            return self._find_whole_chunk(group, keys, max_length)
        num_outside = max(max_length, 0) // self.chunk * self.chunk // block_size
        found = group.find(self.block_keys(keys)[num_outside : max_length // block_size])
        missing = (found[0] == NULL_BLOCK_ID).nonzero()[0]
        num_inside = int(missing[0]) if len(missing) else len(found[0])
        outside = np.zeros(num_outside, np.int64)
        blocks = [np.concatenate([outside, ids[:num_inside]]) for ids in found]
        return blocks, (num_outside + num_inside) * block_size

    def _find_whole_chunk(self, group: JointLookup, keys: Keys, max_length: int) -> tuple[list[BlockIds], int]:
        """The longest prefix after which the next token finds all of its chunk."""
        size = self.block_size
        found = group.find(self.block_keys(keys)[: max(max_length, 0) // size])
        for length in range(len(found[0]), 0, -1):
            first = length * size // self.chunk * self.chunk // size
            if found[0][first:length].all():
                outside = np.zeros(first, np.int64)
                return [np.concatenate([outside, ids[first:length]]) for ids in found], length * size
        return group.none()
