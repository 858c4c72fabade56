"""Cache managers with a shorter way to the same blocks, and which one there is for which groups."""

from collections.abc import Sequence

from kvreplay.errors import EngineFatal
from kvreplay.kv.block_pool import BlockPool
from kvreplay.kv.block_table import UNTRACKED, BlockTable
from kvreplay.kv.cache_manager import NO_DRAFTS, DraftRules, KVCacheManager, Slots
from kvreplay.kv.lookup import FoundPrefix, Hit
from kvreplay.kv.managers.base import NO_BLOCKS, CachedRequest
from kvreplay.kv.prefix_cache import NO_KEY, BlockIds, Keys
from kvreplay.kv.specs import KVCacheGroupSpec, cdiv
from kvreplay.kv.uniform_manager import UniformAttentionCacheManager


class FullAttentionCacheManager(KVCacheManager):
    """One group of full attention: nothing leaves a table while its request lives, and hits hold no null blocks.

    The same decisions as `KVCacheManager` makes, without looking at what cannot be.
    """

    def block_arrays(self, request_id: str) -> list[BlockIds]:
        table = self.managers[0].tables.get(request_id)
        return [table.ids if table is not None else NO_BLOCKS]

    def _num_hashed(self, request_id: str) -> int | None:
        """So many of its blocks, the first ones, have a hash, and no others. None: that cannot be told from here."""
        table = self.managers[0].tables.get(request_id)
        if table is None or self.pool.num_dropped or self.caches_again or not self.pool.enable_caching:
            return None
        return max(table.num_cached, 0)

    def unhashed_blocks(self, request_id: str) -> list[BlockIds]:
        num_hashed = self._num_hashed(request_id)
        if num_hashed is None:
            return super().unhashed_blocks(request_id)
        return [ids[num_hashed:].copy() for ids in self.block_arrays(request_id)]

    def free(self, request_id: str) -> tuple[BlockIds, ...]:
        num_hashed = self._num_hashed(request_id)
        if num_hashed is None:
            return super().free(request_id)
        (blocks,) = self.pop_blocks_for_free(request_id)
        freed = blocks[::-1].copy()  # numpy is slow to index with an array that runs backwards
        self.pool.free_blocks(freed, len(freed) - num_hashed)
        return (freed,)

    def get_computed_blocks(self, keys: Keys, num_tokens: int) -> FoundPrefix:
        if not self.pool.enable_caching:
            return FoundPrefix(self.no_hit, 0)
        blocks = self.pool.find_prefix(keys[: (num_tokens - 1) // self.block_size])
        return FoundPrefix((blocks,), len(blocks) * self.block_size)

    def former_hit(self, keys: Keys, num_tokens: int, num_hit: int) -> int:
        first, end = num_hit // self.block_size, num_tokens // self.block_size
        if first == end or not self.pool.was_lost(int(keys[first])):
            return num_hit
        missing = self.pool.find_former(keys[first:end]) == 0
        return (first + (int(missing.argmax()) if missing.any() else end - first)) * self.block_size

    def least_blocks(self, num_tokens: int, hit: Hit, num_local: int) -> int | None:
        return cdiv(num_tokens, self.block_size) - len(hit[0])

    def num_blocks_to_finish(
        self, request_id: str, num_tokens: int, num_computed_tokens: int, num_draft_slots: int = 0
    ) -> int:
        table = self.managers[0].tables.get(request_id)
        held = table.num_blocks if table is not None else 0
        return max(cdiv(min(num_tokens, self.max_model_len) + num_draft_slots, self.block_size) - held, 0)

    def allocate_slots(self, request_id: str, wanted: Slots) -> tuple[BlockIds, ...] | None:
        assert wanted.num_new_tokens or wanted.num_local_tokens or wanted.num_external_tokens, request_id
        pool, block_size = self.pool, self.block_size
        tables = self.managers[0].tables
        table = tables.get(request_id)
        held = table.num_blocks if table is not None else 0
        found = wanted.hit[0] if wanted.hit is not None else self.no_hit[0]
        if len(found) and table is not None and table.num_cached != UNTRACKED:
            raise EngineFatal("AssertionError")
        leaving = pool.num_evictable(found) if len(found) else 0
        if wanted.apply_watermark:
            leaving += self.watermark_blocks
        have = held + len(found)
        if wanted.full_sequence_must_fit:
            needed = max(cdiv(min(wanted.num_tokens, self.max_model_len), block_size) - have, 0)
            if needed + leaving > pool.num_free - wanted.reserved_beside:
                return None
        computed = wanted.num_computed_tokens + wanted.num_local_tokens + wanted.num_external_tokens
        end = computed + wanted.num_new_tokens + wanted.num_lookahead_tokens
        required = cdiv(min(end, self.max_model_len), block_size)
        if max(required - have, 0) + leaving > pool.num_free - wanted.reserved_blocks:
            return None
        if table is None:
            table = tables[request_id] = BlockTable(max(required, have) + 1)
        if (len(found) or wanted.num_external_tokens) and table.num_cached == UNTRACKED:
            assert not held, request_id
            if len(found):
                pool.touch(found)
                table.extend(found)
            table.num_cached = table.num_blocks
        if required <= table.num_blocks:
            return self.no_hit
        taken = pool.get_new_blocks(required - table.num_blocks)
        table.extend(taken)
        return (taken,)

    def remove_skipped_blocks(self, request_id: str, num_processed_tokens: int) -> None:
        pass

    def cache_blocks(self, request: CachedRequest, keys: Keys, num_tokens: int) -> list[BlockIds]:
        if not self.pool.enable_caching:
            return []
        table = self.managers[0].table(request.request_id)
        start = max(table.num_cached, 0)
        end = min(num_tokens, request.num_tokens) // self.block_size
        if start >= end:
            return [NO_BLOCKS]
        table.num_cached = end
        block_ids, keys = table.ids[start:end], keys[start:end]
        if self.caches_again:
            is_new = self.pool.keys[block_ids] == NO_KEY
            block_ids, keys = block_ids[is_new], keys[is_new]
        self.pool.cache(block_ids, keys)
        return [block_ids]


def make_cache_manager(
    groups: Sequence[KVCacheGroupSpec],
    pool: BlockPool,
    *,
    max_model_len: int,
    max_in_flight_tokens: int,
    watermark: float = 0.0,
    retention_interval: int | None = 0,
    hash_block_size: int | None = None,
    drafts: DraftRules = NO_DRAFTS,
    exact_estimates: bool = False,
    looks_at_whole_chunks: bool = False,
    adopts_per_group: bool = False,
    keeps_state_below_mark: bool = False,
    has_connector: bool = False,
) -> "KVCacheManager":
    """The manager for these groups; some have a shorter way to the same blocks.

    `hash_block_size`: what one of the requests' prefix hashes covers, if not what the groups' sizes suggest.
    `adopts_per_group`, `keeps_state_below_mark`: as in `CacheRules`. `has_connector`: hashes are used even without a
    prefix cache.
    """
    kind = KVCacheManager if adopts_per_group else _kind_for(groups, drafts, retention_interval, hash_block_size)
    return kind(
        groups,
        pool,
        max_model_len=max_model_len,
        max_in_flight_tokens=max_in_flight_tokens,
        watermark=watermark,
        retention_interval=retention_interval,
        hash_block_size=hash_block_size,
        drafts=drafts,
        exact_estimates=exact_estimates,
        looks_at_whole_chunks=looks_at_whole_chunks,
        adopts_per_group=adopts_per_group,
        keeps_state_below_mark=keeps_state_below_mark,
        has_connector=has_connector,
    )


def _kind_for(
    groups: Sequence[KVCacheGroupSpec], drafts: DraftRules, retention_interval: int | None, hash_block_size: int | None
) -> type[KVCacheManager]:
    if drafts != NO_DRAFTS:
        return KVCacheManager
    if len(groups) == 1 and groups[0].is_full_attention:
        return FullAttentionCacheManager
    sizes = {group.block_size for group in groups}
    is_uniform = len(sizes) == 1 and hash_block_size in (None, *sizes) and retention_interval == 0
    if len(groups) > 1 and is_uniform and all(_is_plain(group) for group in groups):
        return UniformAttentionCacheManager
    return KVCacheManager


def _is_plain(group: KVCacheGroupSpec) -> bool:
    is_kind = group.is_full_attention or group.is_sliding_window
    return is_kind and group.prefix_cacheable and not group.is_eagle
