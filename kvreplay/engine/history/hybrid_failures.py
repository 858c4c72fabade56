"""Reports by block with several KV cache groups, as versions before 0.33.0 took them (vllm#50388).

Both stand in for `Recovery.truncate_at_invalid`: the affected requests' ids, and the blocks to evict under policy
`fail`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from kvreplay.engine.request import Request
from kvreplay.errors import EngineFatal
from kvreplay.ids import NULL_BLOCK_ID
from kvreplay.kv.prefix_cache import BlockIds

if TYPE_CHECKING:
    from kvreplay.engine.recovery import Recovery


def unpack_crash(
    recovery: Recovery, requests: Iterable[Request], invalid: BlockIds, scheduled: Mapping[str, int]
) -> tuple[list[str], list[int]]:
    """Before #50388: the scan takes the tables of all groups for one. Whoever it visits first kills the engine."""
    for _ in requests:
        raise EngineFatal("ValueError", "too many values to unpack (expected 1)")
    return [], []


def whole_request(
    recovery: Recovery, requests: Iterable[Request], invalid: BlockIds, scheduled: Mapping[str, int]
) -> tuple[list[str], list[int]]:
    """After #50388: whoever holds a bad block computes everything again, sharers too; the null block is never bad.

    A running request keeps its tables, also where they have null blocks.
    """
    kv = recovery.scheduler.kv
    is_bad = recovery.scheduler.pool.membership(invalid[invalid != NULL_BLOCK_ID])
    affected: list[str] = []
    downstream: dict[int, None] = {}
    for request in requests:
        tables = kv.block_arrays(request.request_id)
        held_bad = [block_id for ids in tables for block_id in ids[is_bad[ids]].tolist()]
        if not held_bad:
            continue
        affected.append(request.request_id)
        computed_before = request.num_computed_tokens - scheduled.get(request.request_id, 0)
        recovery.note_failed_load(request, computed_before, 0, "blocks", held_bad)
        request.forget_taint()
        request.num_computed_tokens = 0
        for ids in tables:
            downstream.update(dict.fromkeys(ids[ids != NULL_BLOCK_ID].tolist()))
    return affected, sorted(downstream)
