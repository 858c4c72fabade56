"""What an engine should do about blocks that failed to load, with any number of KV cache groups.

Stands in for `Recovery.truncate_at_invalid`: each request that holds a bad block goes back to the longest prefix that
is valid in every group. Nothing that was built on a bad block stays in the cache, whatever the policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvreplay.engine.request import Request, RequestStatus
from kvreplay.ids import NULL_BLOCK_ID
from kvreplay.kv.cache_manager import KVCacheManager
from kvreplay.kv.managers.base import NO_BLOCKS, KVGroupManager, Mask
from kvreplay.kv.prefix_cache import BlockIds
from kvreplay.kv.specs import CIRCULAR_BUFFER, cdiv

if TYPE_CHECKING:
    from kvreplay.engine.recovery import Recovery


def longest_valid_prefix(
    recovery: Recovery, requests: Iterable[Request], invalid: BlockIds, scheduled: Mapping[str, int]
) -> tuple[list[str], list[int]]:
    scheduler = recovery.scheduler
    is_bad = scheduler.pool.membership(invalid[invalid != NULL_BLOCK_ID])
    built_on_bad = scheduler.pool.membership(invalid[:0])
    affected: list[str] = []
    for request in list(requests):
        tables = scheduler.kv.block_arrays(request.request_id)
        computed_before = request.num_computed_tokens - scheduled.get(request.request_id, 0)
        is_bad |= built_on_bad
        is_bad[NULL_BLOCK_ID] = False
        held_bad = _bad_blocks(scheduler.kv, tables, is_bad, computed_before)
        if not held_bad:
            continue
        limit = computed_from = computed_before
        if request.status is RequestStatus.RUNNING and computed_before > request.admitted_at:
            # It has computed on what it read there, also what no window reaches back from any more.
            limit = _first_bad(scheduler.kv, tables, is_bad, limit)
            computed_from = max(limit, request.admitted_at)
        if request.status is RequestStatus.RUNNING:
            # Whoever came later may have hit what it has computed, and not the block that was bad to begin with.
            for ids, manager in zip(tables, scheduler.kv.managers, strict=True):
                if manager.spec.prefix_cacheable:
                    built_on_bad |= scheduler.pool.membership(ids[computed_from // manager.block_size :])
        kept = _valid_tokens(scheduler.kv, request, is_bad, computed_before, limit)
        affected.append(request.request_id)
        recovery.note_failed_load(request, computed_before, kept, "blocks", held_bad)
        request.forget_taint()
        if scheduler.connector is not None:
            scheduler.connector.note_invalid(request, kept)
        recovery.evict(_forget_from(scheduler.kv, request, kept))
        request.num_computed_tokens = kept
        if kept or request.status.is_parked or not recovery.recompute:
            continue
        # What its windows have left behind is gone: it starts afresh, from what is still in the cache.
        if request.status is RequestStatus.RUNNING:
            scheduler.preempt_for_recovery(request)
        else:
            scheduler.give_up_blocks(request)
    return affected, []


def _bad_blocks(kv: KVCacheManager, tables: Sequence[BlockIds], is_bad: Mask, computed: int) -> list[int]:
    """Those of a request's blocks that hold what it had computed before this step. Others it writes anew anyway."""
    held = [
        ids[: cdiv(computed, manager.block_size)] if manager.spec.is_attention else ids
        for ids, manager in zip(tables, kv.managers, strict=True)
    ]
    return [block_id for ids in held for block_id in ids[is_bad[ids]].tolist()]


def _first_bad(kv: KVCacheManager, tables: Sequence[BlockIds], is_bad: Mask, computed: int) -> int:
    """Where the first bad block of any group begins."""
    for ids, manager in zip(tables, kv.managers, strict=True):
        places = is_bad[ids].nonzero()[0]
        if len(places):
            computed = min(computed, int(places[0]) * manager.block_size)
    return computed


def _valid_tokens(kv: KVCacheManager, request: Request, is_bad: Mask, computed: int, limit: int) -> int:
    """The longest prefix of `computed` tokens, no longer than `limit`, that the request can go on from."""
    columns = [
        _Column(manager, request, is_bad)
        for manager in kv.managers
        if manager.spec.prefix_cacheable  # the others are computed again, or empty at such a place
    ]
    can_go_on = computed % kv.rules.hit_alignment == 0 or not _bad_ring(kv, request, is_bad)
    if limit == computed and can_go_on and all(column.is_valid(computed, is_cut=False) for column in columns):
        return computed
    longest = min([limit, *(column.longest for column in columns)])
    for num_tokens in range(longest // kv.block_size * kv.block_size, 0, -kv.block_size):
        if all(column.is_valid(num_tokens, is_cut=num_tokens < computed) for column in columns):
            return num_tokens
    return 0


def _bad_ring(kv: KVCacheManager, request: Request, is_bad: Mask) -> bool:
    """Whether what is not compressed yet is lost. Where hits may end, nothing is open."""
    tables = kv.block_arrays(request.request_id)
    return any(spec.kind == CIRCULAR_BUFFER and is_bad[ids].any() for spec, ids in zip(kv.groups, tables, strict=True))


class _Column:
    """One group's blocks of a request, and how many of them cannot be gone on from, counted from the start."""

    def __init__(self, manager: KVGroupManager, request: Request, is_bad: Mask) -> None:
        table = manager.tables.get(request.request_id)
        ids = table.ids if table is not None else NO_BLOCKS
        is_unusable = is_bad[ids] | (ids == NULL_BLOCK_ID)
        self._manager = manager
        self._num_unusable = np.concatenate([[0], np.cumsum(is_unusable)])
        self._num_blocks = len(ids)
        self._is_attention = manager.spec.is_attention

    @property
    def longest(self) -> int:
        """No longer prefix is valid: a group that keeps every block needs all of them."""
        if not self._manager.spec.is_full_attention:
            return self._num_blocks * self._manager.block_size
        return int(np.searchsorted(self._num_unusable, 0, side="right") - 1) * self._manager.block_size

    def is_valid(self, num_tokens: int, *, is_cut: bool) -> bool:
        if num_tokens <= 0 or (is_cut and not self._is_attention):
            return False  # a table of states does not go back
        manager = self._manager
        first = max(manager.skipped_tokens(num_tokens), 0) // manager.block_size
        last = cdiv(num_tokens, manager.block_size)
        return last <= self._num_blocks and bool(self._num_unusable[last] == self._num_unusable[first])


def _forget_from(kv: KVCacheManager, request: Request, num_tokens: int) -> list[int]:
    """The request's blocks behind the prefix, which it will offer to the cache again."""
    kv.caches_again = True
    behind: dict[int, None] = {}
    for manager in kv.managers:
        table = manager.tables.get(request.request_id)
        if table is None:
            continue
        first = num_tokens // manager.block_size
        table.num_cached = min(table.num_cached, first)
        behind.update(dict.fromkeys(table.ids[first:].tolist()))
    behind.pop(NULL_BLOCK_ID, None)
    return sorted(behind)
