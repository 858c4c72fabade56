"""What the scheduler does when an external load has failed (vLLM: Scheduler._handle_failed_recving,
_handle_invalid_blocks, _update_requests_with_invalid_blocks; one KV cache group).

Both return the ids whose output of this step is skipped; under policy `fail` they then end with FINISHED_ERROR.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvreplay.engine.accounts import RecomputeAccounts
from kvreplay.engine.output import SchedulerOutput
from kvreplay.engine.request import Request, RequestStatus
from kvreplay.kv.block_pool import BlockIds

if TYPE_CHECKING:
    from kvreplay.engine.scheduler import Scheduler


def handle_failed_recving(scheduler: Scheduler, request_ids: Sequence[str]) -> list[str]:
    """Whole requests failed to load. Only parked ones count: a running request's report is ignored."""
    affected = []
    for request_id in request_ids:
        request = scheduler.requests.get(request_id)
        if request is None or request.status is not RequestStatus.WAITING_FOR_REMOTE_KVS:
            continue
        affected.append(request_id)
        _note_failed_load(scheduler, request, request.num_computed_tokens, 0, "request", None)
        if scheduler.recompute_load_failures:
            request.num_computed_tokens = 0
            scheduler.failed_recving[request_id] = None
    return [] if scheduler.recompute_load_failures else affected


def handle_invalid_blocks(scheduler: Scheduler, block_ids: Sequence[int], out: SchedulerOutput) -> list[str]:
    """Blocks failed to load. Parked requests are scanned first, then running ones, each with marks of its own."""
    invalid = np.array(sorted(set(block_ids)), np.int64)
    if scheduler.log.wants_blocks:
        scheduler.log.blocks("block.invalidated", None, 0, invalid)
    scheduler.materialise_lockstep(out, holding=invalid)
    scheduled = {share.request.request_id: share.num_tokens for share in out.shares}
    parked = [
        request for request in scheduler.kv_holding_waiting if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    ]
    running = [request for request in scheduler.running.values() if request.lockstep_since is None]
    failed_parked, _ = _truncate_at_invalid(scheduler, parked, invalid, scheduled)
    failed_running, to_evict = _truncate_at_invalid(scheduler, running, invalid, scheduled)
    if scheduler.recompute_load_failures:
        scheduler.failed_recving.update(dict.fromkeys(failed_parked))
        return failed_running
    if to_evict:
        if scheduler.accounts is not None:
            for request in running:
                scheduler.accounts.remember_cached(request, scheduler.kv.num_cached_tokens(request.request_id))
        evicted = scheduler.kv.evict_blocks(to_evict)
        scheduler.log.evicted(len(evicted), 0, "load-failure")
        if scheduler.on_invalid_evicted is not None:
            scheduler.on_invalid_evicted(evicted)
    return failed_parked + failed_running


def _truncate_at_invalid(
    scheduler: Scheduler,
    requests: Iterable[Request],
    invalid: BlockIds,
    scheduled: dict[str, int],
) -> tuple[list[str], list[int]]:
    """Cut each affected request back to its longest valid prefix.

    Returns the affected ids, and the blocks from each cut on (bad ones and what was built on them). A bad block that
    an earlier request of the scan has claimed is left to that one to recompute.
    """
    block_size = scheduler.kv.block_size
    marked: set[int] = set()
    affected: list[str] = []
    downstream: dict[int, None] = {}
    for request in requests:
        ids = scheduler.kv.block_arrays(request.request_id)[0]
        computed_before = request.num_computed_tokens - scheduled.get(request.request_id, 0)
        bad_places = np.isin(ids[: -(-computed_before // block_size)], invalid).nonzero()[0]
        if not len(bad_places):
            continue
        affected.append(request.request_id)
        request.taint = 0
        request.tainted_by = None
        bad = ids[bad_places].tolist()
        mine = [place for place, block_id in zip(bad_places.tolist(), bad, strict=True) if block_id not in marked]
        marked.update(bad)
        if not mine:
            request.num_computed_tokens = computed_before
            continue
        kept = mine[0] * block_size
        _note_failed_load(scheduler, request, computed_before, kept, "blocks", bad)
        request.num_computed_tokens = kept
        downstream.update(dict.fromkeys(ids[mine[0] :].tolist()))
    return affected, sorted(downstream)


def _note_failed_load(
    scheduler: Scheduler, request: Request, promised: int, kept: int, level: str, block_ids: list[int] | None
) -> None:
    if scheduler.failure_reason is not None:
        request.load_error = scheduler.failure_reason(request.request_id) or request.load_error
    request.failed_load_handle = scheduler.log.load_failed(request, promised - kept, level, block_ids)
    request.failed_load_end = max(request.failed_load_end, promised)
    RecomputeAccounts.refresh(request)
