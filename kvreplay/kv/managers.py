"""How one group's blocks are found, allocated, cached and freed (vLLM: v1/core/single_type_kv_cache_manager.py)."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvreplay.ids import NULL_BLOCK_ID
from kvreplay.kv.block_pool import BlockIds, BlockPool, Keys
from kvreplay.kv.block_table import UNTRACKED, BlockTable
from kvreplay.kv.specs import SLIDING_WINDOW, KVCacheGroupSpec

Mask = NDArray[np.bool_]

_NO_BLOCKS: BlockIds = np.empty(0, np.int64)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


class Hashable(Protocol):
    """What a manager needs to know of a request to cache its blocks."""

    request_id: str
    num_prompt_tokens: int
    num_tokens: int


class FullAttentionManager:
    """Keeps every block until the request ends."""

    def __init__(
        self,
        spec: KVCacheGroupSpec,
        group: int,
        num_groups: int,
        pool: BlockPool,
        max_in_flight_tokens: int,
        max_model_len: int,
        retention_interval: int | None,
    ) -> None:
        self.spec = spec
        self.group = group
        self.num_groups = num_groups
        self.block_size = spec.block_size
        self.pool = pool
        self.tables: dict[str, BlockTable] = {}
        self.retention_interval = retention_interval
        self.admission_cap: int | None = None
        """Most blocks a request holds at once, where blocks are recycled while it runs."""

    def skipped_tokens(self, num_computed_tokens: int) -> int:
        """Leading tokens that the next token does not attend to."""
        return 0

    def pool_keys(self, keys: Keys) -> Keys:
        """Same content in different groups shares the hash, not the key."""
        return keys if self.num_groups == 1 else keys * self.num_groups + self.group

    # -- lookup -----------------------------------------------------------------------------------------------

    def find_longest_cache_hit(self, keys: Keys, max_length: int) -> BlockIds:
        """Block per position of the longest usable prefix of at most `max_length` tokens; 0 where none is needed."""
        return self.pool.find_prefix(self.pool_keys(keys[: max_length // self.block_size]))

    # -- allocation -------------------------------------------------------------------------------------------

    def num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        hit: BlockIds,
        total_computed_tokens: int,
        *,
        apply_cap: bool = False,
    ) -> int:
        """Blocks to take from the free queue so that `num_tokens` have slots, evictable hits included."""
        required = cdiv(num_tokens, self.block_size)
        if apply_cap and self.admission_cap is not None:
            required = min(required, self.admission_cap)
        table = self.tables.get(request_id)
        held = table.num_blocks if table is not None else 0
        if table is not None and table.num_cached != UNTRACKED:
            assert not len(hit)
            return max(required - held, 0)
        skipped = self.skipped_tokens(total_computed_tokens) // self.block_size
        new = max(required - max(skipped, len(hit) + held), 0)
        if not len(hit):
            return new
        return new + self.pool.num_evictable(hit[max(0, skipped - held) :])

    def add_local_computed_blocks(self, request_id: str, hit: BlockIds, total_computed_tokens: int) -> None:
        """Adopt prefix-cache hits: positions before the window become null blocks and are not touched."""
        table = self._table(request_id, cdiv(total_computed_tokens, self.block_size) + 1)
        assert table.num_blocks == 0
        skipped = self.skipped_tokens(total_computed_tokens) // self.block_size
        if skipped:
            hit = hit[skipped:]
            table.extend_nulls(skipped)
        if len(hit):
            self.pool.touch(hit if hit.all() else hit[hit != NULL_BLOCK_ID])
            table.extend(hit)
        table.num_cached = table.num_blocks

    def allocate_external_computed_blocks(
        self, request_id: str, num_local_tokens: int, num_external_tokens: int
    ) -> BlockIds:
        """Blocks for what a connector will write, inside the window only."""
        total = num_local_tokens + num_external_tokens
        skipped = self.skipped_tokens(total)
        if skipped > 0:
            num_external_tokens = min(total - skipped, num_external_tokens)
        if num_external_tokens <= 0:
            return _NO_BLOCKS
        table = self._table(request_id)
        block_ids = self.pool.get_new_blocks(max(0, cdiv(total, self.block_size) - table.num_blocks))
        table.extend(block_ids)
        return block_ids

    def allocate_new_blocks(self, request_id: str, num_tokens: int) -> BlockIds:
        table = self._table(request_id, cdiv(num_tokens, self.block_size) + 1)
        needed = cdiv(num_tokens, self.block_size) - table.num_blocks
        if needed <= 0:
            return _NO_BLOCKS
        block_ids = self.pool.get_new_blocks(needed)
        table.extend(block_ids)
        return block_ids

    def _table(self, request_id: str, capacity: int = 16) -> BlockTable:
        table = self.tables.get(request_id)
        if table is None:
            table = self.tables[request_id] = BlockTable(capacity)
        return table

    # -- caching ----------------------------------------------------------------------------------------------

    def cache_blocks(self, request: Hashable, keys: Keys, num_tokens: int) -> BlockIds:
        """Enter the full blocks of the first `num_tokens` tokens that have not been offered yet."""
        table = self._table(request.request_id)
        start = max(table.num_cached, 0)
        end = min(num_tokens, request.num_tokens) // self.block_size
        if start >= end:
            return _NO_BLOCKS
        table.num_cached = end
        block_ids, new_keys = table.ids[start:end], self.pool_keys(keys[start:end])
        chosen = self._cacheable(request, start, end, block_ids)
        if chosen is not None:
            block_ids, new_keys = block_ids[chosen], new_keys[chosen]
            if not len(block_ids):
                return _NO_BLOCKS
        self.pool.cache(block_ids, new_keys)
        return block_ids

    def _cacheable(self, request: Hashable, start: int, end: int, block_ids: BlockIds) -> Mask | None:
        """Which of the blocks [start, end) are worth a hash; None for all."""
        return None

    # -- freeing ----------------------------------------------------------------------------------------------

    def remove_skipped_blocks(self, request_id: str, num_computed_tokens: int) -> BlockIds:
        return _NO_BLOCKS

    def pop_blocks_for_free(self, request_id: str) -> BlockIds:
        """The request's blocks in table order, leading nulls dropped; its table is gone."""
        table = self.tables.pop(request_id, None)
        if table is None or not table.num_blocks:
            return _NO_BLOCKS
        ids = table.ids
        return ids if ids[0] else ids[int((ids != NULL_BLOCK_ID).argmax()) :] if ids.any() else _NO_BLOCKS


class SlidingWindowManager(FullAttentionManager):
    """Gives back blocks as the window leaves them behind, and caches only what a hit can use."""

    def __init__(
        self,
        spec: KVCacheGroupSpec,
        group: int,
        num_groups: int,
        pool: BlockPool,
        max_in_flight_tokens: int,
        max_model_len: int,
        retention_interval: int | None,
    ) -> None:
        super().__init__(spec, group, num_groups, pool, max_in_flight_tokens, max_model_len, retention_interval)
        assert spec.sliding_window is not None
        self.window = spec.sliding_window
        self.admission_cap = cdiv(min(self.window - 1 + max_in_flight_tokens, max_model_len), self.block_size) + 1
        self.blocks_for_hit = cdiv(self.window - 1, self.block_size)
        self.alignment_tokens = self.block_size

    def skipped_tokens(self, num_computed_tokens: int) -> int:
        return max(0, num_computed_tokens - self.window + 1)

    def find_longest_cache_hit(self, keys: Keys, max_length: int) -> BlockIds:
        """The rightmost run of `blocks_for_hit` cached blocks, or a shorter one that reaches block 0."""
        found = self.pool.find(self.pool_keys(keys[: max_length // self.block_size]))
        run = 0
        for index in range(len(found) - 1, -1, -1):
            run = run + 1 if found[index] else 0
            # A window of one token needs no block, but vLLM checks the run only after counting a hit.
            if run and run >= self.blocks_for_hit:
                hit = found[: index + run].copy()
                hit[:index] = NULL_BLOCK_ID
                return hit
        return found[:run]

    def _cacheable(self, request: Hashable, start: int, end: int, block_ids: BlockIds) -> Mask | None:
        mask: Mask = block_ids != NULL_BLOCK_ID
        retained = self._retained(request, start, end)
        return mask if retained is None else mask & retained

    def _retained(self, request: Hashable, start: int, end: int) -> Mask | None:
        """Blocks that some hit can end on (vLLM: reachable_block_mask). None: every one."""
        interval = self.retention_interval
        need = self.blocks_for_hit
        index = np.arange(start, end)
        mask: Mask = np.zeros(end - start, np.bool_)
        segment_tokens = self.alignment_tokens if interval is None else interval
        if segment_tokens:
            per_segment = segment_tokens // self.block_size
            if need >= per_segment:
                return None
            mask |= index % per_segment >= per_segment - need
        if interval is not None:
            boundary = (request.num_prompt_tokens - 1) // self.alignment_tokens * self.alignment_tokens
            tail_end = boundary // self.block_size
            mask |= (index >= tail_end - need) & (index < tail_end)
        return mask

    def remove_skipped_blocks(self, request_id: str, num_computed_tokens: int) -> BlockIds:
        """Free what lies before the window, walking back from it to the first null block."""
        skipped = self.skipped_tokens(num_computed_tokens) // self.block_size
        table = self.tables.get(request_id)
        if not skipped or table is None:
            return _NO_BLOCKS
        ids = table.ids[:skipped]
        nulls = (ids == NULL_BLOCK_ID).nonzero()[0]
        first = int(nulls[-1]) + 1 if len(nulls) else 0
        if first >= len(ids):
            return _NO_BLOCKS
        freed = ids[first:][::-1].copy()
        ids[first:] = NULL_BLOCK_ID
        self.pool.free_blocks(freed)
        return freed


def make_manager(
    spec: KVCacheGroupSpec,
    group: int,
    num_groups: int,
    pool: BlockPool,
    *,
    max_in_flight_tokens: int,
    max_model_len: int,
    retention_interval: int | None,
) -> FullAttentionManager:
    kind = SlidingWindowManager if spec.kind == SLIDING_WINDOW else FullAttentionManager
    return kind(spec, group, num_groups, pool, max_in_flight_tokens, max_model_len, retention_interval)
