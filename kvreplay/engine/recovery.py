"""What the scheduler does when an external load has failed (vLLM: Scheduler._handle_failed_recving,
_handle_invalid_blocks, _update_requests_with_invalid_blocks).

Reports by request work for any number of KV cache groups; reports by block are for one group only in vLLM 0.33.0. What
other versions did with them is in `engine.history.hybrid_failures`, what should be done in `engine.ideal_recovery`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from kvreplay.behaviour import Behaviour
from kvreplay.engine.accounts import RecomputeAccounts
from kvreplay.engine.history.hybrid_failures import unpack_crash, whole_request
from kvreplay.engine.ideal_recovery import longest_valid_prefix
from kvreplay.engine.output import SchedulerOutput
from kvreplay.engine.request import Request, RequestStatus
from kvreplay.errors import EngineFatal
from kvreplay.kv.prefix_cache import BlockIds

if TYPE_CHECKING:
    from kvreplay.engine.scheduler import Scheduler

UNPACK_CRASH: Final = "unpack_crash"
WHOLE_REQUEST: Final = "whole_request"
REJECT: Final = "v0_33"
LONGEST_VALID_PREFIX: Final = "ideal"
FIRST_MARKER: Final = "first_marker"
EVERY_HOLDER: Final = "every_holder"


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRules:
    """What a report by block does where there are several groups, and with one. `by_request`: whether the scheduler
    knows reports by request."""

    hybrid: str = REJECT
    single: str = FIRST_MARKER
    by_request: bool = True

    @classmethod
    def of(cls, behaviour: Behaviour) -> FailureRules:
        return cls(
            hybrid=behaviour["hybrid_failure"],
            single=behaviour["invalid_block_scan"],
            by_request=behaviour["request_level_failures"] == "on",
        )


VLLM_0_33_FAILURES: Final = FailureRules()


class _Scan(Protocol):
    """Cuts requests back that hold bad blocks. Returns their ids, and the blocks to evict under policy `fail`."""

    def __call__(
        self, recovery: Recovery, requests: Iterable[Request], invalid: BlockIds, scheduled: Mapping[str, int]
    ) -> tuple[list[str], list[int]]: ...


_HYBRID_SCANS: Final[Mapping[str, _Scan]] = {
    UNPACK_CRASH: unpack_crash,
    WHOLE_REQUEST: whole_request,
    LONGEST_VALID_PREFIX: longest_valid_prefix,
}


class Recovery:
    """Both handlers return the ids whose output of this step is skipped; under policy `fail` they then end with
    FINISHED_ERROR."""

    def __init__(self, scheduler: Scheduler, *, recompute: bool, rules: FailureRules = VLLM_0_33_FAILURES) -> None:
        self.recompute = recompute
        self.scheduler = scheduler
        self._rules = rules
        is_hybrid = len(scheduler.kv.groups) > 1
        self._rejects_blocks = is_hybrid and rules.hybrid == REJECT
        if is_hybrid:
            self._scan: _Scan = _HYBRID_SCANS.get(rules.hybrid, truncate_at_invalid)
        else:
            self._scan = longest_valid_prefix if rules.single == EVERY_HOLDER else truncate_at_invalid
        self._sees_every_holder = self._scan is longest_valid_prefix

    def handle_failed_recving(self, request_ids: Sequence[str]) -> list[str]:
        """Whole requests failed to load. Only parked ones count: a running request's report is ignored."""
        scheduler = self.scheduler
        affected: list[str] = []
        for request_id in request_ids if self._rules.by_request else ():
            request = scheduler.requests.get(request_id)
            if request is None or request.status is not RequestStatus.WAITING_FOR_REMOTE_KVS:
                continue
            affected.append(request_id)
            self.note_failed_load(request, request.num_computed_tokens, 0, "request", None)
            connector = scheduler.connector
            if scheduler.rules.tolerates_reports and connector is not None and not connector.completes_failed_loads:
                scheduler.finished_recving[request_id] = None
                request.is_never_loaded = True
            if self.recompute:
                request.num_computed_tokens = 0
                scheduler.failed_recving[request_id] = None
        return [] if self.recompute else affected

    def handle_invalid_blocks(self, block_ids: Sequence[int], out: SchedulerOutput) -> list[str]:
        """Blocks failed to load. Parked requests are scanned first, then running ones, each with marks of its own."""
        scheduler = self.scheduler
        invalid = np.array(sorted(set(block_ids)), np.int64)
        if scheduler.log.wants_blocks:
            scheduler.log.blocks("block.invalidated", None, 0, invalid)
        if self._rejects_blocks:
            raise EngineFatal(
                "RuntimeError",
                "A KV connector reported block-level load failures (invalid_block_ids) which is not supported for "
                "models with multiple KV cache groups. Connectors must report failed requests via "
                "KVConnectorTransferResults.failed_recving instead.",
            )
        scheduler.materialise_lockstep(out, holding=invalid)
        scheduled = {share.request.request_id: share.num_tokens for share in out.shares}
        failed_parked, _ = self._scan(self, self._parked(), invalid, scheduled)
        running = [request for request in scheduler.running.values() if request.lockstep_since is None]
        failed_running, to_evict = self._scan(self, running, invalid, scheduled)
        if scheduler.rules.rolls_back_dropped:
            failed_running += self._preempted_since(out, invalid)
            for request_id in failed_running:
                scheduler.drop_in_flight(scheduler.requests[request_id])
        if self.recompute:
            parked = [name for name in failed_parked if scheduler.requests[name].status.is_parked]
            scheduler.failed_recving.update(dict.fromkeys(parked))
            return failed_running
        if to_evict:
            self.evict(to_evict)
        return failed_parked + [request_id for request_id in failed_running if request_id not in failed_parked]

    def _preempted_since(self, out: SchedulerOutput, invalid: BlockIds) -> list[str]:
        """Who has been preempted while the step was in flight, and in it has sampled from a bad block of its own."""
        is_invalid = self.scheduler.pool.membership(invalid)
        return [
            share.request.request_id
            for share in out.shares
            if share.request.status is RequestStatus.PREEMPTED
            and any(is_invalid[block_ids].any() for block_ids in share.new_blocks)
        ]

    def _parked(self) -> list[Request]:
        """Or, with every holder, also those whose load is over, and who wait for room to go on."""
        return [
            request
            for request in self.scheduler.kv_holding_waiting
            if request.status.is_parked or self._sees_every_holder
        ]

    def evict(self, block_ids: list[int]) -> None:
        scheduler = self.scheduler
        before = scheduler.pool.count_by_group(np.array(sorted(set(block_ids)), np.int64))
        evicted = scheduler.kv.evict_blocks(block_ids)
        scheduler.log.evicted_by_group(before, "load-failure")
        if scheduler.on_invalid_evicted is not None:
            scheduler.on_invalid_evicted(evicted)

    def note_failed_load(
        self, request: Request, promised: int, kept: int, level: str, block_ids: list[int] | None
    ) -> None:
        scheduler = self.scheduler
        if scheduler.failure_reason is not None:
            request.load_error = scheduler.failure_reason(request.request_id) or request.load_error
        request.failed_load_handle = scheduler.log.load_failed(request, promised - kept, level, block_ids)
        request.failed_load_end = max(request.failed_load_end, promised)
        RecomputeAccounts.refresh(request)


def truncate_at_invalid(
    recovery: Recovery, requests: Iterable[Request], invalid: BlockIds, scheduled: Mapping[str, int]
) -> tuple[list[str], list[int]]:
    """One group: cut each affected request back to its longest valid prefix.

    To be evicted are the blocks from each cut on: bad ones and what was built on them. A bad block that an earlier
    request of the scan has claimed is left to that one to recompute.
    """
    kv = recovery.scheduler.kv
    block_size = kv.block_size
    is_invalid = kv.pool.membership(invalid)
    marked: set[int] = set()
    affected: list[str] = []
    downstream: dict[int, None] = {}
    for request in requests:
        ids = kv.block_arrays(request.request_id)[0]
        computed_before = request.num_computed_tokens - scheduled.get(request.request_id, 0)
        bad_places = is_invalid[ids[: max(-(-computed_before // block_size), 0)]].nonzero()[0]
        if not len(bad_places):
            continue
        affected.append(request.request_id)
        request.forget_taint()
        bad = ids[bad_places].tolist()
        mine = [place for place, block_id in zip(bad_places.tolist(), bad, strict=True) if block_id not in marked]
        marked.update(bad)
        if not mine:
            request.num_computed_tokens = computed_before
            continue
        kept = mine[0] * block_size
        recovery.note_failed_load(request, computed_before, kept, "blocks", bad)
        request.num_computed_tokens = kept
        downstream.update(dict.fromkeys(ids[mine[0] :].tolist()))
    return affected, sorted(downstream)
