"""A CPU tier with slower tiers behind it (vLLM: v1/kv_offload/tiering/manager.py).

All data passes the CPU tier, the *primary*. A chunk that has been stored there *cascades* to every secondary tier; one
that only a secondary tier has is *promoted*: a slot is taken at once, the copy is ordered at the end of the step. Both
pin the slot while they last.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from kvreplay.connectors.offloading.arrays import NO_KEYS, ChunkIds, Keys
from kvreplay.connectors.offloading.context import OffloadPolicy, RequestContext
from kvreplay.connectors.offloading.cpu_manager import CPUOffloadingManager
from kvreplay.connectors.offloading.manager import LookupResult, LookupResults, OffloadingEvent, StorePlan


class TierJob(NamedTuple):
    """A copy between the primary's chunks and a secondary tier."""

    job_id: int
    keys: Keys
    chunk_ids: ChunkIds
    is_promotion: bool
    context: RequestContext


class TierResult(NamedTuple):
    job_id: int
    success: bool = True
    successful_keys: Keys | None = None
    """Of a job that failed in part."""
    is_promotion: bool = False


class SecondaryTier(Protocol):
    """Storage behind the CPU tier. `medium`, `locality`: what `kv_load_tiers` selects by; None: unknown."""

    name: str
    medium: str | None
    locality: str | None

    def on_new_request(self, context: RequestContext) -> OffloadPolicy: ...

    def lookup(self, key: int, context: RequestContext) -> LookupResult: ...

    def submit_store(self, job: TierJob) -> None: ...

    def submit_load(self, job: TierJob) -> None: ...

    def get_finished_jobs(self) -> Sequence[TierResult]:
        """Jobs that have ended since the last call."""
        ...

    def accepts_store(self, num_chunks: int) -> bool:
        """False under back-pressure: the cascade is left out."""
        ...

    def on_request_finished(self, context: RequestContext) -> None: ...

    def drain_jobs(self) -> None:
        """End all jobs, by waiting for them."""
        ...

    def has_pending_work(self) -> bool: ...


@dataclass(slots=True)
class _Promotion:
    """Chunks to be promoted for one request from one tier at the end of the step."""

    context: RequestContext
    keys: list[int] = field(default_factory=list)
    chunk_ids: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _RequestInTiers:
    context: RequestContext
    request_level_tiers: list[int]
    num_pending_stores: int = 0
    is_finished: bool = False
    parked: list[Keys] = field(default_factory=list)
    """Chunks to cascade once their own store is over."""
    found: dict[int, None] = field(default_factory=dict)
    """Keys that its lookups of this step have found, or have had promoted."""
    sources: dict[int, int] = field(default_factory=dict)
    """Promoted keys → the tier that they came from."""


class TieringOffloadingManager:
    """`protects_found`: a promotion does not evict what the same request's lookups have just found; the real one
    protects nothing but the key that it promotes."""

    lookup_is_pure = False

    def __init__(
        self, primary: CPUOffloadingManager, tiers: Sequence[SecondaryTier], *, protects_found: bool = False
    ) -> None:
        assert primary.counts is None, "store_threshold >= 2 is refused together with secondary tiers"
        self.primary = primary
        self.tiers = tuple(tiers)
        self.promotions_held = False
        """Since a reset, until its jobs are over: a late copy may still write a slot that a promotion would get."""
        self.num_promotion_failures = 0
        """Promotions for which the primary had no room."""
        self.on_promote: Callable[[int, RequestContext, StorePlan | None], None] | None = None
        self._protects_found = protects_found
        self._next_job_id = 0
        self._jobs: dict[int, tuple[TierJob, int]] = {}
        self._promotions: dict[int, dict[str, _Promotion]] = {}
        self._refused: dict[str, RequestContext] = {}
        """Who was refused a promotion in this step."""
        self._requests: dict[str, _RequestInTiers] = {}
        self._has_polled = False
        """In this step."""

    def lookup_is_pure_for(self, context: RequestContext) -> bool:
        return False

    def never_answers(self, context: RequestContext) -> bool:
        return False

    def may_interfere(self, context: RequestContext, *, has_found: bool) -> bool:
        return False

    def may_end_circles(self, context: RequestContext) -> bool:
        return False

    # -- requests ---------------------------------------------------------------------------------------------

    def on_new_request(self, context: RequestContext) -> OffloadPolicy:
        whole = [
            index
            for index, tier in enumerate(self.tiers)
            if tier.on_new_request(context) is OffloadPolicy.REQUEST_LEVEL
        ]
        self._requests[context.req_id] = _RequestInTiers(context, whole)
        return OffloadPolicy.REQUEST_LEVEL if whole else OffloadPolicy.CHUNK_LEVEL

    def on_request_finished(self, context: RequestContext) -> None:
        self.primary.on_request_finished(context)
        self._requests[context.req_id].is_finished = True
        self._finalize(context.req_id)

    def _finalize(self, req_id: str) -> None:
        """Tell the tiers of a request's end once nothing of it can cascade any more."""
        request = self._requests[req_id]
        if not request.is_finished or request.num_pending_stores or request.parked:
            return
        for tier in self.tiers:
            tier.on_request_finished(request.context)
        del self._requests[req_id]

    # -- looking ----------------------------------------------------------------------------------------------

    def lookup(self, key: int, context: RequestContext) -> LookupResult:
        self._poll_once()
        result = self.primary.lookup(key, context)
        if result is LookupResult.MISS and not self.promotions_held:
            result = self._lookup_behind(key, context)
        if result in (LookupResult.HIT, LookupResult.HIT_PENDING):
            self._requests[context.req_id].found[key] = None
        return result

    def lookup_many(self, keys: Keys, context: RequestContext) -> LookupResults:
        raise AssertionError("a lookup may start a promotion")

    def _lookup_behind(self, key: int, context: RequestContext) -> LookupResult:
        is_unknown = False
        for index, tier in enumerate(self.tiers):
            if not context.load_tiers.allows(tier.medium, tier.locality):
                continue
            result = tier.lookup(key, context)
            if result is LookupResult.HIT:
                return LookupResult.HIT_PENDING if self._promote(index, key, context) else LookupResult.MISS
            is_unknown |= result is LookupResult.RETRY
        return LookupResult.RETRY if is_unknown else LookupResult.MISS

    def _promote(self, index: int, key: int, context: RequestContext) -> bool:
        """Take a slot for it now, so that it is asked for only once. False: the primary is full."""
        context.num_orders += 1
        plan = self.primary.prepare_write(np.array([key], np.int64), context, protected=self._protected(key, context))
        if self.on_promote is not None:
            self.on_promote(key, context, plan)
        if plan is None:
            self.num_promotion_failures += 1
            self._refused[context.req_id] = context
            return False
        promotion = self._promotions.setdefault(index, {}).setdefault(context.req_id, _Promotion(context))
        promotion.keys += plan.keys.tolist()
        promotion.chunk_ids += plan.chunk_ids.tolist()
        self._requests[context.req_id].sources.update(dict.fromkeys(plan.keys.tolist(), index))
        return True

    def _protected(self, key: int, context: RequestContext) -> Keys:
        if not self._protects_found:
            return np.array([key], np.int64)
        return np.array([*self._requests[context.req_id].found, key], np.int64)

    def get_load_source(self, key: int, context: RequestContext) -> str:
        request = self._requests.get(context.req_id)
        index = None if request is None else request.sources.get(key)
        return self.primary.get_load_source(key, context) if index is None else self.tiers[index].medium or "STORAGE"

    # -- loads and stores -------------------------------------------------------------------------------------

    def prepare_load(self, keys: Keys, context: RequestContext) -> ChunkIds:
        return self.primary.prepare_load(keys, context)

    def can_load(self, keys: Keys) -> bool:
        return self.primary.can_load(keys)

    def can_discard(self, key: int) -> bool:
        return self.primary.can_discard(key)

    def discard(self, keys: Keys) -> None:
        self.primary.discard(keys)

    def complete_load(self, keys: Keys, context: RequestContext) -> None:
        self.primary.complete_load(keys, context)

    def prepare_store(self, keys: Keys, context: RequestContext) -> StorePlan | None:
        # Always, and not once a step: what has ended makes room.
        self._has_polled = True
        self._poll()
        plan = self.primary.prepare_store(keys, context)
        if plan is None:
            return None
        request = self._requests[context.req_id]
        request.num_pending_stores += bool(len(plan.keys))
        if request.request_level_tiers:
            present = keys[~np.isin(keys, plan.keys)]
            if len(present):
                self._cascade_present(present, request)
        return plan

    def prepare_each(self, keys: Keys, context: RequestContext) -> ChunkIds | None:
        return None  # with each offer tiers are polled, which may make room

    def complete_store(self, keys: Keys, context: RequestContext, *, success: bool = True) -> None:
        self.primary.complete_store(keys, context, success=success)
        if success:
            for index in range(len(self.tiers)):
                self._cascade(index, keys, context)
        request = self._requests[context.req_id]
        assert request.num_pending_stores > 0
        request.num_pending_stores -= 1
        self._finalize(context.req_id)

    def _cascade_present(self, keys: Keys, request: _RequestInTiers) -> None:
        """For tiers that want whole requests: what the primary has already, as soon as it is ready."""
        results = np.array([self.primary.lookup(key, request.context) for key in keys.tolist()])
        pending = keys[results == LookupResult.HIT_PENDING]
        if len(pending):
            request.parked.append(pending)
        ready = keys[results == LookupResult.HIT]
        if len(ready):
            for index in request.request_level_tiers:
                self._cascade(index, ready, request.context)

    def _cascade(self, index: int, keys: Keys, context: RequestContext) -> None:
        tier = self.tiers[index]
        if tier.accepts_store(len(keys)):
            tier.submit_store(self._open(index, keys, self.primary.prepare_read(keys), context, is_promotion=False))

    def _open(
        self, index: int, keys: Keys, chunk_ids: ChunkIds, context: RequestContext, *, is_promotion: bool
    ) -> TierJob:
        job = TierJob(self._next_job_id, keys, chunk_ids, is_promotion, context)
        self._next_job_id += 1
        self._jobs[job.job_id] = (job, index)
        return job

    def touch(self, keys: Keys, context: RequestContext) -> None:
        self.primary.touch(keys, context)

    # -- what has ended ---------------------------------------------------------------------------------------

    def _poll_once(self) -> None:
        if not self._has_polled:
            self._has_polled = True
            self._poll()

    def _poll(self) -> None:
        for tier in self.tiers:
            for result in tier.get_finished_jobs():
                job, _ = self._jobs.pop(result.job_id)
                if job.is_promotion:
                    self._complete_promotion(job, result)
                else:
                    self.primary.complete_read(job.keys, job.context)

    def _complete_promotion(self, job: TierJob, result: TierResult) -> None:
        """What has failed is gone again: the next lookup asks the tiers anew."""
        arrived = job.keys if result.success else result.successful_keys
        if arrived is None:
            arrived = NO_KEYS
        if len(arrived):
            self.primary.complete_store(arrived, job.context)
        failed = job.keys[~np.isin(job.keys, arrived)]
        if len(failed):
            self.primary.complete_store(failed, job.context, success=False)
            request = self._requests.get(job.context.req_id)
            if request is not None:
                for key in failed.tolist():
                    request.sources.pop(key, None)

    # -- the end of a step, and of the cache ------------------------------------------------------------------

    def on_schedule_end(self) -> None:
        self._poll_once()
        self._has_polled = False
        for index, promotions in self._promotions.items():
            for promotion in promotions.values():
                keys, chunk_ids = np.array(promotion.keys, np.int64), np.array(promotion.chunk_ids, np.int64)
                promotion.context.num_attempts += 1
                self._refused.pop(promotion.context.req_id, None)
                self.tiers[index].submit_load(self._open(index, keys, chunk_ids, promotion.context, is_promotion=True))
        self._promotions.clear()
        for context in self._refused.values():
            context.num_attempts += 1
        self._refused.clear()
        for req_id, request in list(self._requests.items()):
            request.found.clear()
            if request.parked:
                parked, request.parked = np.concatenate(request.parked), []
                self._cascade_present(parked, request)
                self._finalize(req_id)

    def has_pending_work(self) -> bool:
        return (
            bool(self._jobs)
            or any(request.parked for request in self._requests.values())
            or any(tier.has_pending_work() for tier in self.tiers)
        )

    def take_events(self) -> Sequence[OffloadingEvent]:
        return self.primary.take_events()

    def reset_cache(self) -> None:
        """The tiers keep what they have; their jobs are waited for, as they use the primary's memory."""
        for tier in self.tiers:
            tier.drain_jobs()
        self._poll()
        assert not self._jobs
        self._promotions.clear()
        finished = []
        for req_id, request in self._requests.items():
            request.num_pending_stores = 0
            request.parked.clear()
            request.sources.clear()
            if request.is_finished:
                finished.append(req_id)
        for req_id in finished:
            for tier in self.tiers:
                tier.on_request_finished(self._requests[req_id].context)
            del self._requests[req_id]
        self.primary.reset_cache()
        self._has_polled = False
        self.promotions_held = bool(self.tiers)

    def on_reset_flushed(self) -> None:
        self.promotions_held = False
