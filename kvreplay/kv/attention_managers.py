"""Cache managers with a shorter way to the same blocks, and which one there is for which groups."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvreplay.errors import EngineFatal
from kvreplay.ids import NULL_BLOCK_ID
from kvreplay.kv.block_pool import NO_KEY, BlockIds, BlockPool, Keys
from kvreplay.kv.block_table import UNTRACKED, BlockTable
from kvreplay.kv.cache_manager import NO_DRAFTS, DraftRules, KVCacheManager
from kvreplay.kv.lookup import FoundPrefix, Hit
from kvreplay.kv.managers.base import NO_BLOCKS, Hashable, KVGroupManager, Mask
from kvreplay.kv.specs import KVCacheGroupSpec, cdiv


class FullAttentionCacheManager(KVCacheManager):
    """One group of full attention: nothing leaves a table while its request lives, and hits hold no null blocks.

    The same decisions as `KVCacheManager` makes, without looking at what cannot be.
    """

    def block_arrays(self, request_id: str) -> list[BlockIds]:
        table = self.managers[0].tables.get(request_id)
        return [table.ids if table is not None else NO_BLOCKS]

    def get_computed_blocks(self, keys: Keys, num_tokens: int) -> FoundPrefix:
        if not self.pool.enable_caching:
            return FoundPrefix(self.no_hit, 0)
        blocks = self.pool.find_prefix(keys[: (num_tokens - 1) // self.block_size])
        return FoundPrefix((blocks,), len(blocks) * self.block_size)

    def least_blocks(self, num_tokens: int, hit: Hit, num_local: int) -> int | None:
        return cdiv(num_tokens, self.block_size) - len(hit[0])

    def num_blocks_to_finish(
        self, request_id: str, num_tokens: int, num_computed_tokens: int, num_draft_slots: int = 0
    ) -> int:
        table = self.managers[0].tables.get(request_id)
        held = table.num_blocks if table is not None else 0
        return max(cdiv(min(num_tokens, self.max_model_len) + num_draft_slots, self.block_size) - held, 0)

    def allocate_slots(
        self,
        request_id: str,
        *,
        num_computed_tokens: int,
        num_tokens: int,
        num_new_tokens: int,
        hit: Hit | None = None,
        num_local_tokens: int = 0,
        num_external_tokens: int = 0,
        num_lookahead_tokens: int = 0,
        num_in_flight_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        apply_watermark: bool = False,
        reserved_blocks: int = 0,
        loaded_groups: frozenset[int] = frozenset(),
    ) -> tuple[BlockIds, ...] | None:
        assert num_new_tokens or num_local_tokens or num_external_tokens, request_id
        pool, block_size = self.pool, self.block_size
        tables = self.managers[0].tables
        table = tables.get(request_id)
        held = table.num_blocks if table is not None else 0
        found = hit[0] if hit is not None else self.no_hit[0]
        if len(found) and table is not None and table.num_cached != UNTRACKED:
            raise EngineFatal("AssertionError")
        leaving = pool.num_evictable(found) if len(found) else 0
        if apply_watermark:
            leaving += self.watermark_blocks
        have = held + len(found)
        if full_sequence_must_fit:
            needed = max(cdiv(min(num_tokens, self.max_model_len), block_size) - have, 0)
            if needed + leaving > pool.num_free:
                return None
        end = num_computed_tokens + num_local_tokens + num_external_tokens + num_new_tokens + num_lookahead_tokens
        required = cdiv(min(end, self.max_model_len), block_size)
        if max(required - have, 0) + leaving > pool.num_free - reserved_blocks:
            return None
        if table is None:
            table = tables[request_id] = BlockTable(max(required, have) + 1)
        if (len(found) or num_external_tokens) and table.num_cached == UNTRACKED:
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

    def cache_blocks(self, request: Hashable, keys: Keys, num_tokens: int) -> list[BlockIds]:
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


class UniformAttentionCacheManager(KVCacheManager):
    """Groups of full attention and windows over blocks of one size, of which no hit needs generated blocks in windows.

    The same decisions as `KVCacheManager` makes; a decoding request's take a few operations instead of arrays.
    """

    counts_filled = True

    def __init__(self, *args: Any, **settings: Any) -> None:  # noqa: ANN401 - those of KVCacheManager
        super().__init__(*args, **settings)
        self._windows = [
            (manager, manager.spec.sliding_window - 1 + manager.spec.extra_retained_tokens)
            for manager in self.managers
            if manager.spec.sliding_window is not None
        ]
        self._all_tables = [manager.tables for manager in self.managers]
        by_reach: list[tuple[int, list[dict[str, BlockTable]]]] = []
        for manager, reach in self._windows:
            # In the order of groups: only neighbours go together.
            if not by_reach or by_reach[-1][0] != reach:
                by_reach.append((reach, []))
            by_reach[-1][1].append(manager.tables)
        self._tables_by_reach = by_reach
        self._full_groups = [group for group, spec in enumerate(self.groups) if spec.is_full_attention]
        self._nothing_cached = [NO_BLOCKS for _ in self.managers]

    def allocate_slots(
        self,
        request_id: str,
        *,
        num_computed_tokens: int,
        num_tokens: int,
        num_new_tokens: int,
        hit: Hit | None = None,
        num_local_tokens: int = 0,
        num_external_tokens: int = 0,
        num_lookahead_tokens: int = 0,
        num_in_flight_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        apply_watermark: bool = False,
        reserved_blocks: int = 0,
        loaded_groups: frozenset[int] = frozenset(),
    ) -> tuple[BlockIds, ...] | None:
        table = self.managers[0].tables.get(request_id)
        if table is None or hit is not None or num_external_tokens or full_sequence_must_fit or apply_watermark:
            return super().allocate_slots(
                request_id,
                num_computed_tokens=num_computed_tokens,
                num_tokens=num_tokens,
                num_new_tokens=num_new_tokens,
                hit=hit,
                num_local_tokens=num_local_tokens,
                num_external_tokens=num_external_tokens,
                num_lookahead_tokens=num_lookahead_tokens,
                num_in_flight_tokens=num_in_flight_tokens,
                full_sequence_must_fit=full_sequence_must_fit,
                apply_watermark=apply_watermark,
                reserved_blocks=reserved_blocks,
                loaded_groups=loaded_groups,
            )
        # A running request goes on: every group takes as many blocks as every other.
        self.remove_skipped_blocks(request_id, max(0, num_computed_tokens - num_in_flight_tokens))
        end = min(num_computed_tokens + num_new_tokens + num_lookahead_tokens, self.max_model_len)
        count = max(cdiv(end, self.block_size) - table.num_blocks, 0)
        if count * len(self.managers) > self.pool.num_free - reserved_blocks:
            return None
        if not count:
            return self.no_hit
        taken = self.pool.get_new_blocks(count * len(self.managers))
        new = tuple(taken[place : place + count] for place in range(0, len(taken), count))
        for manager, block_ids in zip(self.managers, new, strict=True):
            manager.tables[request_id].extend(block_ids)
        return new

    def remove_skipped_blocks(self, request_id: str, num_processed_tokens: int) -> None:
        left: list[BlockIds] = []
        for manager, reach in self._windows:
            table = manager.tables.get(request_id)
            skipped = (num_processed_tokens - reach) // self.block_size
            if skipped <= 0 or table is None:
                continue
            ids = table.ids[:skipped]
            if len(ids) and ids[-1]:  # what has been left before is null, and comes first
                first = int((ids != NULL_BLOCK_ID).argmax())
                left.append(ids[first:][::-1].copy())
                ids[first:] = NULL_BLOCK_ID
        if not left:
            return
        together = np.concatenate(left[::-1])
        if (self.pool.keys[together] == NO_KEY).all():
            # What has no hash goes to the front: the last group's blocks end up first.
            self.pool.free_blocks(together)
        else:
            for block_ids in left:
                self.pool.free_blocks(block_ids)

    def cache_blocks(self, request: Hashable, keys: Keys, num_tokens: int) -> list[BlockIds]:
        if not self.pool.enable_caching or self.caches_again:
            return super().cache_blocks(request, keys, num_tokens)
        tables = [manager.table(request.request_id) for manager in self.managers]
        num_cached = tables[0].num_cached
        if any(table.num_cached != num_cached for table in tables):
            return super().cache_blocks(request, keys, num_tokens)
        start, end = max(num_cached, 0), min(num_tokens, request.num_tokens) // self.block_size
        if start >= end:
            return self._nothing_cached
        boundaries = self._replay_boundaries(request.num_prompt_tokens)
        if request.shared_prefix_boundary:
            boundaries = [*boundaries, request.shared_prefix_boundary]
        masks: dict[int, Mask | None] = {}
        return [
            self._enter(manager, table, keys, start, end, boundaries, masks)
            for manager, table in zip(self.managers, tables, strict=True)
        ]

    def _enter(
        self,
        manager: KVGroupManager,
        table: BlockTable,
        keys: Keys,
        start: int,
        end: int,
        boundaries: Sequence[int],
        masks: dict[int, Mask | None],
    ) -> BlockIds:
        """`masks`: of windows that have been asked already, what they keep of these blocks."""
        table.num_cached = end
        block_ids, block_keys = table.ids[start:end], keys[start:end]
        if not manager.spec.is_full_attention:
            if max(boundaries) // self.block_size <= start:
                return NO_BLOCKS  # no window before a boundary reaches this far
            window = manager.spec.sliding_window or 0
            if window not in masks:
                masks[window] = manager.retained(start, end, boundaries)
            retained = masks[window]
            chosen = block_ids != NULL_BLOCK_ID
            if retained is not None:
                chosen &= retained
            block_ids, block_keys = block_ids[chosen], block_keys[chosen]
            if not len(block_ids):
                return NO_BLOCKS
        self.pool.cache(block_ids, manager.pool_keys(block_keys))
        return block_ids

    def must_flush(self, request_id: str, num_computed: int, *, loads: bool) -> bool:
        """What windows leave behind of generated tokens has no hash: nobody will read it, but where a load into that
        block falls short and leaves it there."""
        return loads and any(
            num_computed > reach and not (num_computed - reach) % self.block_size for reach, _ in self._tables_by_reach
        )

    def decode_step(self, request: Hashable, keys: Keys, num_computed: int) -> bool:
        pool, size, request_id = self.pool, self.block_size, request.request_id
        for reach, all_tables in self._tables_by_reach:
            left, rest = divmod(num_computed - reach, size)
            if not rest and left > 0:
                for tables in all_tables:
                    view = tables[request_id].view
                    block_id = view[left - 1]
                    if block_id:
                        view[left - 1] = NULL_BLOCK_ID
                        pool.free_one(block_id)
        index, offset = divmod(num_computed, size)
        if not offset:
            if pool.num_free < len(self._all_tables):
                return False
            take_one = pool.take_one
            for tables in self._all_tables:
                tables[request_id].append(take_one())
        if offset == size - 1 and pool.enable_caching:
            self._cache_filled(request, keys, index)
        return True

    def _cache_filled(self, request: Hashable, keys: Keys, index: int) -> None:
        """The step fills this block of each group. What windows keep is what a replay of the prompt needs."""
        request_id = request.request_id
        of_request = [tables[request_id] for tables in self._all_tables]
        for table in of_request:
            if table.num_cached != index:
                self.cache_blocks(request, keys, (index + 1) * self.block_size)
                return
        for table in of_request:
            table.num_cached = index + 1
        key = int(keys[index]) * len(of_request)
        for group in self._full_groups:
            self.num_filled += 1
            self.pool.cache_one(of_request[group].view[index], key + group)

    def least_blocks(self, num_tokens: int, hit: Hit, num_local: int) -> int | None:
        whole = cdiv(min(num_tokens, self.max_model_len), self.block_size)
        least = 0
        for manager, blocks in zip(self.managers, hit, strict=True):
            required = whole if manager.admission_cap is None else min(whole, manager.admission_cap)
            skipped = manager.skipped_tokens(num_local) // self.block_size
            least += max(required - max(skipped, len(blocks)), 0)
        return least


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
    keeps_state_below_mark: bool = False,
) -> "KVCacheManager":
    """The manager for these groups; some have a shorter way to the same blocks.

    `hash_block_size`: what one of the requests' prefix hashes covers, if not what the groups' sizes suggest.
    `keeps_state_below_mark`: as in `CacheRules`.
    """
    return _kind_for(groups, drafts, retention_interval, hash_block_size)(
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
        keeps_state_below_mark=keeps_state_below_mark,
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
