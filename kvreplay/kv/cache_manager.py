"""Block tables of all requests over all groups (vLLM: v1/core/kv_cache_manager.py, kv_cache_coordinator.py)."""

from collections.abc import Iterable, Sequence

import numpy as np

from kvreplay.errors import ConfigError
from kvreplay.ids import NULL_BLOCK_ID
from kvreplay.kv.block_pool import BlockIds, BlockPool, Keys
from kvreplay.kv.block_table import BlockTable
from kvreplay.kv.managers import FullAttentionManager, Hashable, cdiv, make_manager
from kvreplay.kv.specs import FULL, KVCacheGroupSpec

Hit = tuple[BlockIds, ...]
"""A prefix-cache hit: per group, the block of each position."""


class BlocksOfRequest:
    """What a connector is shown of a request's blocks: all, or those of its first `num_tokens` tokens."""

    __slots__ = ("_manager", "_num_tokens", "_request_id")

    def __init__(self, manager: "KVCacheManager", request_id: str, num_tokens: int | None = None) -> None:
        self._manager = manager
        self._request_id = request_id
        self._num_tokens = num_tokens

    def get_block_ids(self) -> tuple[list[int], ...]:
        if self._num_tokens is None:
            return self._manager.get_block_ids(self._request_id)
        return self._manager.get_block_ids_for_computed_tokens(self._request_id, self._num_tokens)

    def get_unhashed_block_ids_all_groups(self) -> tuple[list[int], ...]:
        pool = self._manager.pool
        return tuple(
            ids[(ids != NULL_BLOCK_ID) & ~pool.is_cached(ids)].tolist()
            for ids in self._manager.block_arrays(self._request_id)
        )


def make_cache_manager(
    groups: Sequence[KVCacheGroupSpec],
    pool: BlockPool,
    *,
    max_model_len: int,
    max_in_flight_tokens: int,
    watermark: float = 0.0,
    retention_interval: int | None = 0,
) -> "KVCacheManager":
    """The manager for these groups; one group of full attention has a shorter way to the same blocks."""
    kind = FullAttentionCacheManager if len(groups) == 1 and groups[0].kind == FULL else KVCacheManager
    return kind(
        groups,
        pool,
        max_model_len=max_model_len,
        max_in_flight_tokens=max_in_flight_tokens,
        watermark=watermark,
        retention_interval=retention_interval,
    )


class KVCacheManager:
    """One pool, one table per request and group.

    `max_in_flight_tokens`: the most tokens that steps in flight can hold (batches times token budget).
    """

    def __init__(
        self,
        groups: Sequence[KVCacheGroupSpec],
        pool: BlockPool,
        *,
        max_model_len: int,
        max_in_flight_tokens: int,
        watermark: float = 0.0,
        retention_interval: int | None = 0,
    ) -> None:
        if len(groups) != 1:
            raise ConfigError(f"model.groups: one KV cache group is supported, got {len(groups)}")
        self.groups = tuple(groups)
        self.pool = pool
        self.max_model_len = max_model_len
        self.watermark_blocks = int(watermark * pool.num_blocks)
        self.managers: list[FullAttentionManager] = [
            make_manager(
                spec,
                group,
                len(groups),
                pool,
                max_in_flight_tokens=max_in_flight_tokens,
                max_model_len=max_model_len,
                retention_interval=retention_interval,
            )
            for group, spec in enumerate(groups)
        ]
        self.block_size = groups[0].block_size
        """The scheduler's block size: with several groups, the least common multiple."""
        self.no_hit: Hit = tuple(np.empty(0, np.int64) for _ in groups)

    # -- looking ----------------------------------------------------------------------------------------------

    def get_computed_blocks(self, keys: Keys, num_tokens: int) -> tuple[Hit, int]:
        """The longest cached prefix, never the last token: it must be computed to sample from it."""
        if not self.pool.enable_caching:
            return self.no_hit, 0
        hit = self.managers[0].find_longest_cache_hit(keys, num_tokens - 1)
        return (hit,), len(hit) * self.block_size

    def block_arrays(self, request_id: str) -> list[BlockIds]:
        return [
            manager.tables[request_id].ids if request_id in manager.tables else self.no_hit[0]
            for manager in self.managers
        ]

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        return tuple(ids.tolist() for ids in self.block_arrays(request_id))

    def get_block_ids_for_computed_tokens(self, request_id: str, num_computed_tokens: int) -> tuple[list[int], ...]:
        return tuple(
            ids[: -(-num_computed_tokens // manager.block_size)].tolist()
            for ids, manager in zip(self.block_arrays(request_id), self.managers, strict=True)
        )

    def num_blocks_to_finish(self, request_id: str, num_tokens: int, num_computed_tokens: int) -> int:
        """Blocks the request still needs to hold all its tokens."""
        return self._blocks_to_allocate(
            request_id, min(num_tokens, self.max_model_len), self.no_hit, num_computed_tokens, apply_cap=True
        )

    def num_cached_tokens(self, request_id: str) -> int:
        """Leading tokens whose blocks have been offered to the prefix cache, in the group with the fewest."""
        return min(
            max(manager.tables[request_id].num_cached, 0) * manager.block_size if request_id in manager.tables else 0
            for manager in self.managers
        )

    def num_blocks_held(self, request_id: str) -> int:
        return sum(int(np.count_nonzero(ids)) for ids in self.block_arrays(request_id))

    # -- allocation -------------------------------------------------------------------------------------------

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
        num_in_flight_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        apply_watermark: bool = False,
        reserved_blocks: int = 0,
    ) -> tuple[BlockIds, ...] | None:
        """Slots for `num_new_tokens` more, or None if the pool is too small now.

        `num_local_tokens` were just found in the prefix cache (`hit`), `num_external_tokens` will be written by a
        connector. Returns the blocks taken for both, per group. The caller caches afterwards.
        """
        assert num_new_tokens or num_local_tokens or num_external_tokens, request_id
        local = num_computed_tokens + num_local_tokens
        total = min(local + num_external_tokens, self.max_model_len)
        found = self.no_hit if hit is None else hit
        watermark = self.watermark_blocks if apply_watermark else 0
        if full_sequence_must_fit:
            whole = min(num_tokens, self.max_model_len)
            needed = self._blocks_to_allocate(request_id, whole, found, total, apply_cap=True)
            if needed + watermark > self.pool.num_free:
                return None
        need_slot = min(total + num_new_tokens, self.max_model_len)
        # Also when the request then fails to get its blocks: what has left the window is not needed.
        for manager in self.managers:
            manager.remove_skipped_blocks(request_id, max(0, total - num_in_flight_tokens))
        needed = self._blocks_to_allocate(request_id, need_slot, found, local + num_external_tokens)
        if needed + watermark > self.pool.num_free - reserved_blocks:
            return None
        external = self.no_hit
        if num_external_tokens or any(len(blocks) for blocks in found):
            external = self._adopt(request_id, found, local, num_external_tokens)
        new = tuple(manager.allocate_new_blocks(request_id, need_slot) for manager in self.managers)
        if external is self.no_hit:
            return new
        return tuple(np.concatenate(pair) for pair in zip(external, new, strict=True))

    def _blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        hit: Hit,
        total_computed_tokens: int,
        *,
        apply_cap: bool = False,
    ) -> int:
        return sum(
            manager.num_blocks_to_allocate(request_id, num_tokens, blocks, total_computed_tokens, apply_cap=apply_cap)
            for manager, blocks in zip(self.managers, hit, strict=True)
        )

    def _adopt(self, request_id: str, hit: Hit, num_local_tokens: int, num_external_tokens: int) -> Hit:
        """All groups' hits are touched before any external block is taken: one group must not evict another's hit."""
        for manager, blocks in zip(self.managers, hit, strict=True):
            manager.add_local_computed_blocks(request_id, blocks, num_local_tokens + num_external_tokens)
        if not num_external_tokens:
            return self.no_hit
        return tuple(
            manager.allocate_external_computed_blocks(request_id, num_local_tokens, num_external_tokens)
            for manager in self.managers
        )

    # -- caching ----------------------------------------------------------------------------------------------

    def cache_blocks(self, request: Hashable, keys: Keys, num_tokens: int) -> list[BlockIds]:
        """Returns the blocks that got a hash, per group."""
        if not self.pool.enable_caching:
            return []
        return [manager.cache_blocks(request, keys, num_tokens) for manager in self.managers]

    def evict_blocks(self, block_ids: Iterable[int]) -> list[int]:
        return self.pool.evict_blocks(block_ids)

    def reset_prefix_cache(self) -> bool:
        return self.pool.reset()

    # -- freeing ----------------------------------------------------------------------------------------------

    def remove_skipped_blocks(self, request_id: str, num_processed_tokens: int) -> None:
        for manager in self.managers:
            manager.remove_skipped_blocks(request_id, num_processed_tokens)

    def free(self, request_id: str) -> tuple[BlockIds, ...]:
        """Free all its blocks: groups in order, within a group the tail first. Returns them in that order."""
        # Copied, because numpy is slow to index with an array that runs backwards.
        freed = tuple(manager.pop_blocks_for_free(request_id)[::-1].copy() for manager in self.managers)
        for block_ids in freed:
            if len(block_ids):
                self.pool.free_blocks(block_ids)
        return freed


class FullAttentionCacheManager(KVCacheManager):
    """One group of full attention: nothing leaves a table while its request lives, and hits hold no null blocks.

    The same decisions as `KVCacheManager` makes, without looking at what cannot be.
    """

    def num_blocks_to_finish(self, request_id: str, num_tokens: int, num_computed_tokens: int) -> int:
        table = self.managers[0].tables.get(request_id)
        held = table.num_blocks if table is not None else 0
        return max(cdiv(min(num_tokens, self.max_model_len), self.block_size) - held, 0)

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
        num_in_flight_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        apply_watermark: bool = False,
        reserved_blocks: int = 0,
    ) -> tuple[BlockIds, ...] | None:
        assert num_new_tokens or num_local_tokens or num_external_tokens, request_id
        pool, block_size = self.pool, self.block_size
        tables = self.managers[0].tables
        table = tables.get(request_id)
        held = table.num_blocks if table is not None else 0
        found = hit[0] if hit is not None else self.no_hit[0]
        leaving = pool.num_evictable(found) if len(found) else 0
        if apply_watermark:
            leaving += self.watermark_blocks
        have = held + len(found)
        if full_sequence_must_fit:
            needed = max(cdiv(min(num_tokens, self.max_model_len), block_size) - have, 0)
            if needed + leaving > pool.num_free:
                return None
        end = num_computed_tokens + num_local_tokens + num_external_tokens + num_new_tokens
        required = cdiv(min(end, self.max_model_len), block_size)
        if max(required - have, 0) + leaving > pool.num_free - reserved_blocks:
            return None
        if table is None:
            table = tables[request_id] = BlockTable(max(required, have) + 1)
        if len(found) or num_external_tokens:
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
