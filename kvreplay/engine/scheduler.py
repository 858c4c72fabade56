"""The scheduler: who computes which tokens in the next step (vLLM: v1/core/sched/scheduler.py).

There is no prefill or decode phase: a step gives each request tokens so that its computed tokens catch up with
its tokens. Requests that only decode can be kept in `Lockstep`, where they are not touched while nothing happens
to them; the decisions are the same, and everything that looks at such a request first takes it out.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import count
from typing import NamedTuple

import numpy as np

from kvreplay.engine.accounts import RecomputeAccounts
from kvreplay.engine.chunks import chunk_rules
from kvreplay.engine.config import SchedulerConfig, SpeculativeConfig
from kvreplay.engine.connector import KVConnectorOutput, SchedulerConnector
from kvreplay.engine.fences import Fences
from kvreplay.engine.lockstep import Lockstep
from kvreplay.engine.log import EngineLog
from kvreplay.engine.output import ModelRunnerOutput, RequestOutput, SchedulerOutput, Share
from kvreplay.engine.queues import PriorityQueue, RequestQueue
from kvreplay.engine.recovery import VLLM_0_33_FAILURES, FailureRules, Recovery
from kvreplay.engine.request import Request, RequestStatus
from kvreplay.engine.sampler import Sampler
from kvreplay.errors import EngineFatal
from kvreplay.kv.block_pool import BlockIds
from kvreplay.kv.block_table import BlockTable
from kvreplay.kv.cache_manager import BlocksOfRequest, KVCacheManager
from kvreplay.kv.lookup import Hit, truncated
from kvreplay.kv.managers.mamba import BoundaryState

LIVELOCK_ATTEMPTS = 1000
"""A request that has been parked or preempted so often without a token in between never gets anywhere."""

_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_IGNORED: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_ERROR: "error",
}


class _Head(Enum):
    """What becomes of a queue's head that is not admitted."""

    SKIP = "let others pass"
    STOP = "it stays, and the scan ends"


class _Scan(Enum):
    """What the last scan of the queues says about the next."""

    UNKNOWN = "it may admit somebody"
    EXHAUSTED = "it passed everyone, and all who are left wait for a report"
    BLOCKED = "it ended at a request that does not fit; giving back or caching blocks may change that"


class _Misfit(NamedTuple):
    """The request that did not fit, and what may have changed for it since."""

    request: Request
    num_tokens: int
    least_blocks: int
    """Blocks it needs from the free queue even if all of its hits are in use."""
    num_inserted: int
    """Blocks that had ever been cached then: it cannot have gained more hits than have come since."""


@dataclass(slots=True)
class _Admission:
    """What a queue's head would be admitted with."""

    request: Request
    hit: Hit | None = None
    """None where nothing was looked up: it goes on from what it holds."""
    num_local: int = 0
    num_external: int = 0
    is_async: bool = False
    computed: int = 0
    """Tokens whose KV is there, or will be: the first that is scheduled comes after them."""
    num_tokens: int = 0
    num_replay: int = 0
    """Tokens of the hit that are computed again, because nothing holds their window."""
    num_drafts: int = 0


class Scheduler:
    """One engine instance's scheduler. `schedule` and `update_from_output` alternate, first in, first out; with
    overlapping steps the next is scheduled before the output of the last is taken in.

    `recompute_load_failures`: `kv_load_failure_policy` is `recompute`; else it is `fail`.
    `output_is_shared`: some request could hit blocks that hold another one's output.
    `cache_block_size`: what chunks are aligned to for Mamba, if not its group's block size.
    `divergent_hits`: the connector can bring a Mamba state that is missing at the end of full attention's hit.
    `defer_async_loads`: loads, too, wait for steps in flight.
    `loads_every_group`: a load brings all of a request's own blocks, also those that no prefix cache could hold.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        connector: SchedulerConnector | None,
        sampler: Sampler,
        log: EngineLog,
        *,
        recompute_load_failures: bool = False,
        failure_rules: FailureRules = VLLM_0_33_FAILURES,
        accounts: RecomputeAccounts | None = None,
        use_lockstep: bool = False,
        output_is_shared: bool = False,
        kv_role: str = "",
        speculation: SpeculativeConfig | None = None,
        cache_block_size: int | None = None,
        divergent_hits: bool = False,
        defer_async_loads: bool = False,
        loads_every_group: bool = False,
    ) -> None:
        self.config = config
        self.kv = kv
        self.pool = kv.pool
        self.connector = connector
        self.sampler = sampler
        self.log = log
        self.accounts = accounts
        self.recovery = Recovery(self, recompute=recompute_load_failures, rules=failure_rules)
        self.speculation = speculation
        self._num_spec_tokens = speculation.num_speculative_tokens if speculation is not None else 0
        self._num_lookahead_tokens = speculation.num_lookahead_tokens if speculation is not None else 0
        self._num_draft_slots = speculation.num_draft_slots if speculation is not None else 0
        self._chunks = chunk_rules(config, kv, speculation, cache_block_size)
        self._num_step_slots = 1 + self._num_spec_tokens + self._num_lookahead_tokens if self._num_spec_tokens else 0
        self._step_blocks = kv.blocks_of_tokens(self._num_step_slots)
        self._is_async = config.async_scheduling
        self._by_priority = config.policy == "priority"
        self._is_producer = kv_role in ("kv_producer", "kv_both")
        is_consumer = kv_role in ("kv_consumer", "kv_both")
        self.fences = Fences(enabled=connector is not None and self._is_async and is_consumer)
        self._defer_async_loads = self.fences.enabled and defer_async_loads
        self._divergent_hits = divergent_hits
        self._loads_every_group = loads_every_group
        self._replay_groups = frozenset(group for group, spec in enumerate(kv.groups) if spec.prefix_replay_tokens)
        self._cacheable_groups = frozenset(group for group, spec in enumerate(kv.groups) if spec.prefix_cacheable)
        self._output_is_shared = output_is_shared
        self.max_num_active = min(config.max_num_active_seqs or config.max_num_seqs, config.max_num_seqs)

        self.requests: dict[str, Request] = {}
        self.running: dict[str, Request] = {}
        """In order of admission."""
        self.waiting = PriorityQueue() if self._by_priority else RequestQueue()
        self.kv_holding_waiting = PriorityQueue() if self._by_priority else RequestQueue()
        self.deferred_waiting: dict[str, Request] = {}
        self.inflight_prefills: dict[str, Request] = {}
        self.finished_recving: dict[str, None] = {}
        self.failed_recving: dict[str, None] = {}
        self.finished_req_ids: list[str] = []
        self.livelocked: dict[str, Request] = {}
        """Requests that go round in circles: counted as stalled, though something keeps happening to them."""
        self.on_blocks_freed: Callable[[Request, Sequence[BlockIds]], None] | None = None
        self.on_leave_lockstep: Callable[[Request], None] | None = None
        self.on_invalid_evicted: Callable[[list[int]], None] | None = None
        self.on_parked: Callable[[Request], None] | None = None
        self.on_promoted: Callable[[Request], None] | None = None
        self.failure_reason: Callable[[str], str | None] | None = None
        """What the connector says of a request's failed load."""
        self.on_partial_tails: Callable[[Request, list[BoundaryState]], bool] | None = None
        """A producer's request ends in a state inside a block: whether its blocks must be kept for it."""
        self.skipped: list[str] = []
        """Requests whose output of the last processed step was dropped."""
        self.unsent: list[RequestOutput] = []
        """Of a step in which the engine died before it could send them."""

        self.step = -1
        self.next_output_step = 0
        """Every step before it has had its output taken in."""
        self.num_preemptions = 0
        self._in_flight: SchedulerOutput | None = None
        """Scheduled, and its output not yet taken in."""
        self._in_step = False
        """Between the start of schedule() and the end of update_from_output()."""
        self._arrivals = count()
        self._admissions = count()
        self._preempted_since: list[str] = []

        self.lockstep = Lockstep(kv.block_size, config.max_model_len)
        self._can_lockstep = (
            use_lockstep
            and len(kv.groups) == 1
            and kv.groups[0].is_full_attention
            and speculation is None
            and not self._is_async
            and not self._by_priority
            and config.long_prefill_token_threshold == 0
            and config.prefill_schedule_interval == 1
            and config.token_budget >= config.max_num_seqs
        )
        self._scan = _Scan.UNKNOWN
        self._full_sequence_must_fit = (
            config.scheduler_reserve_full_isl and len(kv.groups) == 1 and kv.groups[0].is_full_attention
        )
        self._misfit: _Misfit | None = None
        self._ready_holding: dict[str, None] = {}
        """Requests in `kv_holding_waiting` that are not parked: their load is over, and they did not fit yet."""
        self._lookup_version = -1
        self._may_settle = (
            (connector is None or connector.lookup_is_pure)
            and config.prefill_schedule_interval == 1
            and speculation is None
            and not self._is_async
        )
        self._explicit: dict[str, Request] = {}
        """Running requests that are not in lockstep, in order of admission."""

        self._prefill_capacity_bound = False
        self._last_prefill_step = -config.prefill_schedule_interval
        self._num_executed_steps = 0

    # =========================================================================================================
    # What is there to do
    # =========================================================================================================

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.kv_holding_waiting)

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self.running) or self.num_waiting > 0

    @property
    def has_requests(self) -> bool:
        """Whether the engine keeps stepping: unfinished work, ids to announce, or blocks a connector must release."""
        if self.has_unfinished_requests or self.finished_req_ids:
            return True
        return self.connector is not None and (bool(self.requests) or self.connector.has_pending_push_work())

    def add_request(self, request: Request) -> None:
        assert request.request_id not in self.requests, f"duplicate request id {request.request_id}"
        request.arrival_order = next(self._arrivals)
        self._scan = _Scan.UNKNOWN
        self.waiting.add(request)
        self.requests[request.request_id] = request
        if self.connector is not None:
            self.connector.on_new_request(request)

    # =========================================================================================================
    # schedule()
    # =========================================================================================================

    def schedule(self) -> SchedulerOutput:
        """Decide the next step, and count its tokens as computed.

        Raises EngineFatal where the real scheduler dies.
        """
        assert self._in_flight is None or self._is_async, "one step at a time"
        self.step += 1
        self._in_step = True
        out = SchedulerOutput(self.step, skip_drafts=self._num_lookahead_tokens > 0)
        self.kv.start_step()
        if self.connector is not None and self.connector.lookup_version != self._lookup_version:
            self._lookup_version = self.connector.lookup_version
            self._scan = _Scan.UNKNOWN
        if self.lockstep and not self._lockstep_is_exact():
            self._dissolve_lockstep()
        defer_prefills = self._defers_prefills()
        threshold = self._long_prefill_threshold()
        self._schedule_running(out, threshold, defer_prefills=defer_prefills)
        prefill_admitted = False
        if out.shares:
            self._blocks_changed()
        if self._output_is_shared and self.lockstep:
            self._cache_filled_blocks()  # what this step fills may be what the first in the queue waits to hit
        if not out.preempted and self._scan is _Scan.UNKNOWN:
            prefill_admitted = self._schedule_waiting(out, threshold, defer_prefills=defer_prefills)
            if not defer_prefills:
                self._prefill_capacity_bound = self.num_waiting > len(self.deferred_waiting)
        self._finish_schedule(out, prefill_admitted=prefill_admitted)
        return out

    def schedule_uneventful(self) -> SchedulerOutput:
        """`schedule()` for a step of which `can_coast` and `steps_until_shortage` have told what it does."""
        assert self._in_flight is None, "one step at a time"
        self.step += 1
        self._in_step = True
        lockstep = self.lockstep
        if lockstep.num_needing_blocks(self.step):
            self._grow_all(lockstep.needing_blocks(self.step))
        if self._output_is_shared:
            self._cache_filled_blocks()
        out = SchedulerOutput(self.step)
        out.num_lockstep = out.num_decodes = out.total_num_scheduled_tokens = len(lockstep)
        out.num_kv_tokens = lockstep.num_kv_tokens(self.step)
        self._in_flight = out
        self._num_executed_steps += 1
        return out

    def _long_prefill_threshold(self) -> int:
        config = self.config
        if not config.long_prefill_token_threshold:
            return 0
        eligible = len(self.running) + self.num_waiting
        if eligible <= 1:
            return 0
        threshold = config.long_prefill_token_threshold
        if config.long_prefill_token_threshold_adaptive:
            threshold = max(threshold, config.max_num_batched_tokens // eligible)
        return threshold

    def _defers_prefills(self) -> bool:
        """Whether prefills are held back in this step so that decodes run uninterrupted."""
        interval = self.config.prefill_schedule_interval
        return (
            interval > 1
            and not self._prefill_capacity_bound
            and self._num_executed_steps + 1 - self._last_prefill_step < interval
            and any(not request.is_prefill_chunk for request in self.running.values())
        )

    def _budget_left(self, out: SchedulerOutput) -> int:
        """Tokens that one more request may get in this step."""
        used = out.total_num_scheduled_tokens + len(self.lockstep)
        left = self.config.token_budget - used
        if not self._num_draft_slots:
            return left
        rows = used + self._num_draft_slots * (len(out.shares) + 1)
        return min(left, self.config.max_num_batched_tokens - rows)

    # -- running requests -------------------------------------------------------------------------------------

    def _schedule_running(self, out: SchedulerOutput, threshold: int, *, defer_prefills: bool) -> None:
        """Phase 1, in order of admission."""
        lockstep = self.lockstep
        growing = lockstep.needing_blocks(self.step) if lockstep else []
        if not self._explicit:
            if len(growing) <= self.pool.num_free:
                self._grow_all(growing)
                return
            for request in growing:
                if request.lockstep_since is not None and not self._grow(request, out):
                    break
            return
        # Whose block is hashed first matters where two may hold the same output.
        filling = lockstep.filling_blocks(self.step) if lockstep and self._output_is_shared else []
        if growing or filling:
            self._schedule_running_merged(out, growing, filling, threshold, defer_prefills=defer_prefills)
            return
        for request in list(self._explicit.values()):
            if self._budget_left(out) <= 0:
                break
            if request.status is not RequestStatus.RUNNING:
                continue
            if not self._schedule_running_one(request, out, threshold, defer_prefills=defer_prefills):
                break

    def _schedule_running_merged(
        self,
        out: SchedulerOutput,
        growing: list[Request],
        filling: list[Request],
        threshold: int,
        *,
        defer_prefills: bool,
    ) -> None:
        """Phase 1 where both kinds want blocks, or hash them: in order of admission."""
        todo = dict.fromkeys([*growing, *filling, *self._explicit.values()])
        for request in sorted(todo, key=lambda request: request.lockstep_order):
            if request.status is not RequestStatus.RUNNING:
                continue
            if request.lockstep_since is not None:
                if request in growing and not self._grow(request, out):
                    break
                if request in filling:
                    self._cache_filled(request, self._table(request))
                continue
            if self._budget_left(out) <= 0:
                break
            if not self._schedule_running_one(request, out, threshold, defer_prefills=defer_prefills):
                break

    def _schedule_running_one(
        self, request: Request, out: SchedulerOutput, threshold: int, *, defer_prefills: bool
    ) -> bool:
        """Give one running request its tokens, or none. False ends the phase."""
        if defer_prefills and request.is_prefill_chunk:
            return True
        if request.num_output_placeholders and self._reaches_max_tokens(request):
            return True
        start = request.num_computed_tokens
        wanted = request.num_tokens + request.num_draft_tokens + request.num_output_placeholders - start
        if 0 < threshold < wanted:
            wanted = threshold
        num_tokens = min(wanted, self._budget_left(out), self.config.max_model_len - start - 1)
        if num_tokens > 0:
            num_tokens = self._chunks.aligned(request, start, num_tokens)
            num_tokens = self._chunks.outside_lookahead(request, start, num_tokens)
        if num_tokens <= 0:
            return True
        new_blocks = self._allocate_or_preempt(request, num_tokens, out)
        if new_blocks is None:
            # By priority, one that gave way to the others leaves room for those behind it.
            return self._by_priority and request.status is RequestStatus.PREEMPTED
        self._cache_computed(request, start + num_tokens)
        share = Share(request, start, num_tokens, False, False, new_blocks)
        out.prefill_scheduled |= request.is_prefill_chunk
        self._note_drafts(share, out)
        self._add_share(out, share)
        return True

    @staticmethod
    def _reaches_max_tokens(request: Request) -> bool:
        """Whether steps in flight reach `max_tokens` even if all of their drafts are wrong."""
        sure = request.num_computed_tokens + 2 - request.num_output_placeholders
        return sure >= request.num_prompt_tokens + request.max_tokens

    def _note_drafts(self, share: Share, out: SchedulerOutput) -> None:
        """The share's drafts are verified in this step; new ones may be proposed after it."""
        request = share.request
        if request.num_draft_tokens:
            beyond = share.end - request.num_tokens - request.num_output_placeholders
            share.num_drafts = max(0, min(beyond, request.num_draft_tokens))
            request.num_draft_tokens = 0
        out.skip_drafts = out.skip_drafts and self._drafts_go_unused(share)

    @staticmethod
    def _drafts_go_unused(share: Share) -> bool:
        """Whether no step can verify what would be drafted after this one (vLLM: _drafts_unused)."""
        request = share.request
        if share.end < request.num_tokens:
            return True
        sure = request.num_output_tokens + 1 + (1 if request.num_output_placeholders else 0)
        return sure >= request.max_tokens

    def _allocate_or_preempt(
        self, request: Request, num_tokens: int, out: SchedulerOutput
    ) -> tuple[BlockIds, ...] | None:
        """Slots for a running request, at the expense of the least urgent ones if need be."""
        while True:
            new_blocks = self.kv.allocate_slots(
                request.request_id,
                num_computed_tokens=request.num_computed_tokens,
                num_tokens=request.num_tokens,
                num_new_tokens=num_tokens,
                num_lookahead_tokens=self._num_lookahead_tokens,
                num_in_flight_tokens=request.num_in_flight_tokens,
            )
            if new_blocks is not None:
                self._note_allocated(request, new_blocks)
                return new_blocks
            if self.connector is not None and self.connector.has_pending_block_frees():
                return None
            victim = self._victim()
            if not self.fences.has_passed(victim.last_scheduled_seq):
                return None  # its blocks would not come back now
            self._take_back(victim, out)
            if victim is request:
                return None

    def _victim(self) -> Request:
        if not self._by_priority:
            return next(reversed(self.running.values()))
        return max(self.running.values(), key=lambda request: (request.priority, request.arrival_ns))

    def _take_back(self, victim: Request, out: SchedulerOutput) -> None:
        """Preempt a running request within schedule(), and undo what the step has given it."""
        if victim.lockstep_since is not None:
            self._leave_lockstep(victim)
        for index, share in enumerate(out.shares if self._by_priority else ()):
            if share.request is victim:
                del out.shares[index]
                out.total_num_scheduled_tokens -= share.num_tokens
                break
        drops = self.connector is not None and self.connector.requires_kv_delivery
        self._preempt(victim, drop_stale_output=drops)
        out.preempted.append(victim.request_id)

    def _preempt(self, victim: Request, *, drop_stale_output: bool = False) -> None:
        """Take back everything a running request holds; it will be looked up afresh.

        What steps in flight bring is delivered all the same, unless `drop_stale_output`.
        """
        assert victim.status is RequestStatus.RUNNING, victim
        del self.running[victim.request_id]
        self._explicit.pop(victim.request_id, None)
        computed = victim.num_computed_tokens
        freed = self._free_blocks_of(victim)
        self.inflight_prefills.pop(victim.request_id, None)
        victim.lost_computed_handle = self.log.preempted(victim, computed, sum(len(ids) for ids in freed))
        victim.lost_computed_end = max(victim.lost_computed_end, computed)
        victim.status = RequestStatus.PREEMPTED
        victim.num_computed_tokens = 0
        victim.is_prefill_chunk = False
        victim.num_draft_tokens = 0
        # A share that is being dropped stays dropped: its positions have been sampled again.
        victim.drop_stale_output = drop_stale_output or (
            victim.drop_stale_output and victim.num_stale_output_tokens > 0
        )
        victim.num_stale_output_tokens = victim.num_in_flight_tokens
        victim.num_output_placeholders = 0
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self._count_attempt(victim)
        self.waiting.prepend(victim)
        self._scan = _Scan.UNKNOWN
        self._preempted_since.append(victim.request_id)

    # -- waiting requests -------------------------------------------------------------------------------------

    def _schedule_waiting(self, out: SchedulerOutput, threshold: int, *, defer_prefills: bool) -> bool:
        """Phase 2: admit from the queues. Returns whether a prompt with more than its last token left was admitted."""
        if self._budget_left(out) <= 0 or not self.num_waiting or len(self.running) >= self.max_num_active:
            return False
        if self.lockstep:
            self._cache_filled_blocks()
        if self._still_does_not_fit():
            self._scan = _Scan.BLOCKED
            return False
        skipped_waiting: list[Request] = []
        skipped_holding: list[Request] = []
        prefill_admitted = False
        self._scan = _Scan.UNKNOWN
        may_settle = self._may_settle and not defer_prefills
        scans_holding = self._must_scan_holding()
        while self._budget_left(out) > 0 and len(self.running) < self.max_num_active:
            queue = self._next_queue(scans_holding=scans_holding)
            if not queue:
                if may_settle:
                    self._scan = _Scan.EXHAUSTED
                break
            request = queue.peek()
            share = self._admit(request, threshold, out, defer_prefills=defer_prefills)
            if share is _Head.STOP:
                if may_settle:
                    self._scan = _Scan.BLOCKED
                break
            queue.pop()
            self._ready_holding.pop(request.request_id, None)
            if share is _Head.SKIP:
                self.deferred_waiting[request.request_id] = request
                if self._waits_with_holders(request):
                    skipped_holding.append(request)
                    if request.status is not RequestStatus.WAITING_FOR_REMOTE_KVS:
                        self._ready_holding[request.request_id] = None
                else:
                    skipped_waiting.append(request)
                continue
            assert isinstance(share, Share)
            prefill_admitted |= share.start < request.num_tokens - 1
            self._start_running(request, share, out)
        if scans_holding:
            self.kv_holding_waiting.prepend_all(skipped_holding)
        else:
            self.kv_holding_waiting.add_all(skipped_holding)
        self.waiting.prepend_all(skipped_waiting)
        return prefill_admitted

    def _must_scan_holding(self) -> bool:
        """Parked requests without a report are passed over one by one, which changes nothing: leave them."""
        return bool(self.finished_recving or self._ready_holding)

    def _next_queue(self, *, scans_holding: bool) -> RequestQueue:
        return self.kv_holding_waiting if scans_holding and self.kv_holding_waiting else self.waiting

    def _waits_with_holders(self, request: Request) -> bool:
        """Whether a request that was passed over holds blocks: nobody without may stand in front of it."""
        return request.status is RequestStatus.WAITING_FOR_REMOTE_KVS or request.num_computed_tokens > 0

    def _still_does_not_fit(self) -> bool:
        """Whether the first in the queue cannot have come to fit, whatever a lookup would find."""
        misfit = self._misfit
        if misfit is None or self.kv_holding_waiting or not self._full_sequence_must_fit:
            return False
        request = misfit.request
        if not self.waiting or self.waiting.peek() is not request or request.num_tokens != misfit.num_tokens:
            self._misfit = None
            return False
        return misfit.least_blocks - (self.pool.num_inserted - misfit.num_inserted) > self.pool.num_free

    def _admit(self, request: Request, threshold: int, out: SchedulerOutput, *, defer_prefills: bool) -> Share | _Head:
        """Admit the head of a queue to run, or into a load, or not."""
        if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            if request.request_id not in self.finished_recving:
                return _Head.SKIP
            self._promote(request)
            out.made_progress = True
        if request.num_stale_output_tokens and not request.drop_stale_output:
            return _Head.SKIP  # what it resumed with could sample again what is still to be delivered
        admission = _Admission(request, computed=request.num_computed_tokens)
        if request.num_computed_tokens == 0 and not self._look_up(admission):
            return _Head.SKIP
        refused = self._size_chunk(admission, threshold, out, defer_prefills=defer_prefills)
        if refused is not None:
            return refused
        new_blocks = self._allocate_admission(admission)
        if new_blocks is None:
            return _Head.STOP
        computed, num_external = admission.computed, admission.num_external
        if admission.hit is not None and self.accounts is not None:
            self.accounts.note_admission(request, admission.num_local, self.kv)
        if not admission.is_async:
            past_hit = max(admission.num_tokens - admission.num_replay, 0)
            self._cache_computed(request, computed + admission.num_replay + past_hit)
        if self.connector is not None:
            if admission.is_async and self._defer_async_loads and not self.fences.has_passed(self.fences.scheduled):
                request.last_scheduled_seq = self.fences.scheduled
                self.fences.load_later(request.request_id, num_external)
            else:
                self._tell_connector(request, num_external)
        if num_external:
            self.log.load_started(request, num_external, -(-num_external // self.kv.block_size))
        if admission.is_async:
            self._park(request, computed, num_external)
            out.made_progress = True
            return _Head.SKIP
        if num_external:
            out.has_sync_kv_loads = True
        request.num_computed_tokens = computed
        was_preempted = request.status is RequestStatus.PREEMPTED
        if admission.num_drafts and admission.num_tokens != 1 + admission.num_drafts:
            raise EngineFatal("AssertionError")
        return Share(
            request,
            computed,
            admission.num_tokens,
            True,
            was_preempted,
            new_blocks,
            admission.num_local,
            num_external,
            admission.num_drafts,
        )

    def _tell_connector(self, request: Request, num_external: int) -> None:
        assert self.connector is not None
        self.connector.update_state_after_alloc(request, BlocksOfRequest(self.kv, request.request_id), num_external)
        if num_external:
            self.log.allocated(request, num_external)

    def _look_up(self, admission: _Admission) -> bool:
        """What of the request is cached here, and what a connector has beyond. False: ask again in the next step."""
        request = admission.request
        diverged = self._find_local(admission)
        if self.connector is not None:
            unaligned = admission.num_local % self.kv.block_size
            external, is_async = self.connector.get_num_new_matched_tokens(request, admission.num_local - unaligned)
            if request.skip_reading_prefix_cache:
                external, is_async = 0, False
            self.log.lookup(request, external, is_async=is_async)
            if external is None:
                assert not self._may_settle, "a pure lookup has an answer"
                return False
            if self._replay_groups and not (external and self._load_brings_window):
                # What is computed again starts at a block's start.
                external -= external % self.kv.block_size
                is_async = is_async and external > 0
            self._combine(admission, external, unaligned, is_async=is_async)
            if diverged and not admission.num_external:
                self._find_local(admission, reconciled=True)
        admission.computed = admission.num_local + admission.num_external
        if admission.computed > request.num_tokens:
            raise EngineFatal("AssertionError")
        if not self._brings_window(admission) and 0 < admission.computed <= self.kv.prefix_replay_tokens:
            # All of it would be computed again.
            admission.hit = self.kv.no_hit
            admission.num_local = admission.num_external = admission.computed = 0
            admission.is_async = False
        return True

    def _find_local(self, admission: _Admission, *, reconciled: bool = False) -> bool:
        """The hit in this instance's cache. Returns whether it is full attention's alone."""
        request = admission.request
        if request.skip_reading_prefix_cache:
            admission.hit, admission.num_local, request.shared_prefix_boundary = self.kv.no_hit, 0, 0
            return False
        keys = request.content.block_keys
        diverged = False
        if self._divergent_hits and self.connector is not None and not reconciled:
            found, diverged = self.kv.get_computed_blocks_for_connector(keys, request.num_tokens)
        else:
            found = self.kv.get_computed_blocks(keys, request.num_tokens)
        admission.hit, admission.num_local = found.hit, found.num_tokens
        request.shared_prefix_boundary = found.num_tokens + found.uncached if found.uncached else 0
        return diverged

    def _combine(self, admission: _Admission, external: int, unaligned: int, *, is_async: bool) -> None:
        """A hit that ends inside a block is kept unless the connector has more than its rest."""
        admission.num_external, admission.is_async = external, is_async
        if not unaligned:
            return
        if external > unaligned:
            assert admission.hit is not None
            admission.num_local -= unaligned
            admission.hit = truncated(admission.hit, self.kv.managers, admission.num_local)
        else:
            admission.num_external, admission.is_async = 0, False

    @property
    def _load_brings_window(self) -> bool:
        """Whether a load restores groups that no cache holds, as a transfer of the request's own blocks does."""
        return bool(self._replay_groups) and self._loads_every_group

    def _brings_window(self, admission: _Admission) -> bool:
        return admission.num_external > 0 and self._load_brings_window

    def _size_chunk(
        self, admission: _Admission, threshold: int, out: SchedulerOutput, *, defer_prefills: bool
    ) -> _Head | None:
        """How many tokens the request would compute in this step; what becomes of it if none."""
        request = admission.request
        if admission.is_async:
            if admission.num_external <= 0:
                raise EngineFatal("AssertionError")
            return None
        if defer_prefills and admission.computed < request.num_tokens - 1:
            return _Head.STOP
        if admission.hit is not None and not self._brings_window(admission):
            admission.num_replay = min(self.kv.prefix_replay_tokens, admission.computed)
            admission.computed -= admission.num_replay
        budget = self._budget_left(out)
        num_tokens = request.num_tokens - admission.computed
        is_padded = self._is_padded(admission, num_tokens, out)
        if is_padded:
            num_tokens = 1 + self._num_spec_tokens
            if num_tokens > budget:
                return _Head.STOP
        if 0 < threshold < num_tokens:
            num_tokens = threshold
        if not self.config.enable_chunked_prefill and num_tokens > budget:
            return _Head.STOP
        num_tokens = min(num_tokens, budget)
        if num_tokens <= 0:
            raise EngineFatal("AssertionError")
        num_tokens = self._chunks.aligned(request, admission.computed, num_tokens)
        if not num_tokens:
            return _Head.STOP
        if is_padded and num_tokens != 1 + self._num_spec_tokens and self._chunks.block_size is not None:
            num_tokens, is_padded = 1, False
        num_tokens = self._chunks.outside_lookahead(request, admission.computed, num_tokens)
        if not num_tokens:
            return _Head.SKIP
        admission.num_tokens = num_tokens
        admission.num_drafts = self._num_spec_tokens if is_padded else 0
        return None

    def _is_padded(self, admission: _Admission, num_tokens: int, out: SchedulerOutput) -> bool:
        """Whether a request with one token left gets placeholders for drafts, so that the batch stays uniform."""
        padded = 1 + self._num_spec_tokens
        return (
            self._num_spec_tokens > 0
            and num_tokens == 1
            and not out.prefill_scheduled
            and (any(not share.admitted for share in out.shares) or admission.computed > 0)
            and admission.computed + padded + 1 <= self.config.max_model_len
        )

    def _allocate_admission(self, admission: _Admission) -> tuple[BlockIds, ...] | None:
        request, hit = admission.request, admission.hit
        loaded: frozenset[int] = frozenset()
        if admission.is_async and self.kv.has_mamba:
            loaded = frozenset(range(len(self.kv.groups))) if self._loads_every_group else self._cacheable_groups
        new_blocks = self.kv.allocate_slots(
            request.request_id,
            num_computed_tokens=request.num_computed_tokens,
            num_tokens=request.num_tokens,
            num_new_tokens=max(admission.num_tokens - admission.num_replay, 0),
            hit=hit,
            num_local_tokens=admission.num_local,
            num_external_tokens=admission.num_external,
            num_lookahead_tokens=0 if admission.is_async else self._num_lookahead_tokens,
            num_in_flight_tokens=request.num_in_flight_tokens,
            full_sequence_must_fit=self.config.scheduler_reserve_full_isl,
            apply_watermark=bool(self.running),
            reserved_blocks=self._reserved_blocks() + self._step_blocks if admission.is_async else 0,
            loaded_groups=loaded,
        )
        if new_blocks is not None:
            self._note_allocated(request, new_blocks)
        elif hit is not None and self._may_settle and not admission.num_external:
            least = -(-request.num_tokens // self.kv.block_size) - sum(len(blocks) for blocks in hit)
            self._misfit = _Misfit(request, request.num_tokens, least, self.pool.num_inserted)
        return new_blocks

    def _reserved_blocks(self) -> int:
        """Blocks that prefills in flight still need: an async load must leave them, it cannot be preempted."""
        return sum(
            self.kv.num_blocks_to_finish(
                request.request_id, request.num_tokens, request.num_computed_tokens, self._num_step_slots
            )
            for request in self.inflight_prefills.values()
        )

    def _park(self, request: Request, computed: int, num_external: int) -> None:
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        request.num_computed_tokens = computed
        request.num_external_tokens = num_external
        self._count_attempt(request)
        self.inflight_prefills[request.request_id] = request
        self.log.parked(request, num_external, self.kv.num_blocks_held(request.request_id))
        if self.on_parked is not None:
            self.on_parked(request)

    def _promote(self, request: Request) -> None:
        """Its load is over: hash what was loaded, or give up what was not (vLLM: _update_waiting_for_remote_kv)."""
        if self.on_promoted is not None:
            self.on_promoted(request)
        failed = request.request_id in self.failed_recving
        if failed:
            del self.failed_recving[request.request_id]
        if failed and not request.num_computed_tokens:
            self._free_blocks_of(request)
        else:
            self._cache_computed(request, request.num_computed_tokens)
            if failed and self.kv.has_mamba:
                self.kv.zero_again(request.request_id, request.num_computed_tokens)
            self._rewind_loaded(request, brings_window=not failed and self._load_brings_window)
        del self.finished_recving[request.request_id]
        self._ready_holding[request.request_id] = None
        self.log.promoted(request, failed=failed)
        request.status = RequestStatus.PREEMPTED if request.num_preemptions else RequestStatus.WAITING

    def _rewind_loaded(self, request: Request, *, brings_window: bool) -> None:
        """What of a load must be computed all the same: a window that it does not bring, or the last token."""
        replay = 0 if brings_window else min(self.kv.prefix_replay_tokens, request.num_computed_tokens)
        if replay:
            request.num_computed_tokens -= replay
        elif request.num_computed_tokens == request.num_tokens:
            request.num_computed_tokens = request.num_tokens - 1
            if self.accounts is not None:
                self.accounts.note_full_load(request)

    def _start_running(self, request: Request, share: Share, out: SchedulerOutput) -> None:
        self.deferred_waiting.pop(request.request_id, None)
        request.lockstep_order = next(self._admissions)
        request.status = RequestStatus.RUNNING
        self.running[request.request_id] = request
        self._explicit[request.request_id] = request
        out.skip_drafts = out.skip_drafts and self._drafts_go_unused(share)
        if share.end < request.num_tokens:
            self.inflight_prefills[request.request_id] = request
        self._add_share(out, share)

    # -- the end of schedule() --------------------------------------------------------------------------------

    def _add_share(self, out: SchedulerOutput, share: Share) -> None:
        out.shares.append(share)
        out.total_num_scheduled_tokens += share.num_tokens

    def _finish_schedule(self, out: SchedulerOutput, *, prefill_admitted: bool) -> None:
        lockstep = self.lockstep
        out.num_lockstep = out.num_decodes = len(lockstep)
        out.total_num_scheduled_tokens += len(lockstep)
        out.num_kv_tokens = lockstep.num_kv_tokens(self.step) if lockstep else 0
        out.finished_req_ids = self.finished_req_ids
        self.finished_req_ids = []
        out.preempted = self._preempted_since
        self._preempted_since = []
        if len(self.kv.groups) > 1:
            self._take_block_work(out)
        if self.connector is not None:
            out.kv_connector_metadata = self.connector.build_connector_meta(out)
        if self.fences.enabled and out.total_num_scheduled_tokens:
            self.fences.scheduled += 1
        for share in out.shares:
            self._advance(share, out)
        self._in_flight = out
        if out.total_num_scheduled_tokens:
            self._num_executed_steps += 1
        if out.prefill_scheduled or prefill_admitted:
            self._last_prefill_step = self._num_executed_steps
        out.made_progress |= bool(
            out.total_num_scheduled_tokens
            or out.preempted
            or out.finished_req_ids
            or out.kv_connector_metadata is not None
        )

    def _take_block_work(self, out: SchedulerOutput) -> None:
        """What the workers do with whole blocks before they compute."""
        out.boundary_states = self.kv.take_boundary_states()
        out.block_copies = self.kv.take_block_copies()
        out.blocks_to_zero = self.kv.take_blocks_to_zero()
        if out.block_copies:
            retained = [block_id for copy in out.block_copies for block_id in copy]
            fence = self.fences.scheduled + 1  # the copies run with the next step that has tokens
            if self.fences.has_passed(fence):
                self._blocks_changed()
                self.pool.free_each(retained)
            else:
                self.fences.free_later(np.array(retained, np.int64), fence)

    def _advance(self, share: Share, out: SchedulerOutput) -> None:
        """Count the share's tokens as computed (vLLM: _update_after_schedule)."""
        request = share.request
        if share.num_tokens == 1:
            out.num_decodes += 1
            out.num_kv_tokens += share.end
        else:
            out.num_prefill_tokens += share.num_tokens
        request.num_computed_tokens += share.num_tokens
        request.num_in_flight_tokens += share.num_tokens
        request.last_scheduled_seq = self.fences.scheduled
        is_chunk = request.num_computed_tokens < request.num_tokens + request.num_output_placeholders
        request.is_prefill_chunk = is_chunk
        share.samples = not is_chunk
        if not is_chunk:
            self.inflight_prefills.pop(request.request_id, None)
            if self._is_async:
                request.num_output_placeholders += 1 + share.num_drafts
                request.num_draft_tokens = self._num_spec_tokens
        if self.accounts is not None:
            self.accounts.note_computed(request, share.start, share.end)

    # =========================================================================================================
    # update_from_output()
    # =========================================================================================================

    def update_from_output(self, out: SchedulerOutput, model_output: ModelRunnerOutput) -> list[RequestOutput]:
        """Take in what a step brought. Raises EngineFatal where the real scheduler dies."""
        if self._in_flight is out:
            self._in_flight = None
        if self.fences.enabled and out.total_num_scheduled_tokens:
            self._pass_fence()
        reports = model_output.kv_connector_output
        if reports is None and not out.shares and self.lockstep.next_finish() != out.step:
            self.skipped = []
            self.next_output_step = out.step + 1
            self._in_step = False
            return []
        skip: dict[str, None] = {}
        if reports is not None:
            self._scan = _Scan.UNKNOWN
            if reports.failed_recving:
                skip.update(dict.fromkeys(self.recovery.handle_failed_recving(reports.failed_recving)))
            if reports.invalid_block_ids:
                skip.update(dict.fromkeys(self.recovery.handle_invalid_blocks(reports.invalid_block_ids, out)))
        self.skipped = list(skip)
        outputs: list[RequestOutput] = []
        for request, share in self._ending_shares(out):
            if share is not None and not self._takes_output(request, share, skip):
                continue
            num_accepted = model_output.num_accepted.get(request.request_id, 0) if share is not None else 0
            output = self._process_sampled(request, share, num_accepted)
            if output is not None:
                outputs.append(output)
        self.next_output_step = out.step + 1
        failed: list[Request] = []
        if skip and not self.recovery.recompute:
            failed = self.finish_requests(skip, RequestStatus.FINISHED_ERROR)
        if reports is not None:
            self.unsent = outputs
            self._update_from_kv_xfer_finished(reports)
            self.unsent = []
        for output in outputs:
            self._send(output)
        self._in_step = False
        return [*outputs, *(RequestOutput(request, [], "error") for request in failed)] if failed else outputs

    def _send(self, output: RequestOutput) -> None:
        """The step is over without the engine having died of it: its outputs get out."""
        request = output.request
        if request.first_token_ns is None:
            request.first_token_ns = self.log.now_ns
            self.log.first_token(request)
        if output.finish_reason is not None:
            self.log.finished(request, output.finish_reason, output.output_hash)

    def _pass_fence(self) -> None:
        """A step has been processed: what waited for it may go on."""
        self.fences.processed += 1
        for blocks in self.fences.take_freeable():
            self._blocks_changed()
            self.pool.free_blocks(blocks)
        for request_id, num_external in self.fences.take_startable_loads():
            self._tell_connector(self.requests[request_id], num_external)

    def _takes_output(self, request: Request, share: Share, skip: Container[str]) -> bool:
        """Count the share as processed. Returns whether what it sampled is for the request as it is now."""
        if self.requests.get(request.request_id) is not request:
            return False
        request.num_in_flight_tokens -= share.num_tokens
        share.is_stale = request.num_stale_output_tokens > 0
        if share.is_stale:
            request.num_stale_output_tokens -= share.num_tokens
        if request.request_id in skip or request.status.is_finished:
            return False
        return not (share.is_stale and request.drop_stale_output)

    def _ending_shares(self, out: SchedulerOutput) -> list[tuple[Request, Share | None]]:
        """Requests whose output must be looked at, in running order: those with a share, and lockstep's last tokens."""
        explicit: list[tuple[Request, Share | None]] = [(share.request, share) for share in out.shares]
        if not out.num_lockstep:
            return explicit
        finishing = self.lockstep.finishing_in(out.step)
        if not finishing:
            return explicit
        for request in finishing:
            # Up to date as of this step's schedule(): its token is computed, its output not yet appended.
            self._leave_lockstep(request, in_flight=True)
            request.num_in_flight_tokens = 0
        return sorted([*explicit, *((request, None) for request in finishing)], key=lambda pair: pair[0].lockstep_order)

    def _process_sampled(self, request: Request, share: Share | None, num_accepted: int) -> RequestOutput | None:
        """Append what the step has sampled, stop or go on; a prefill chunk samples nothing."""
        is_stale = False
        num_drafts = 0
        if share is not None:
            if not share.samples:
                return None
            is_stale, num_drafts = share.is_stale, share.num_drafts
        if num_drafts and not is_stale:
            self._roll_back(request, num_drafts - num_accepted)
        was_running = request.status is RequestStatus.RUNNING
        had_placeholders = request.num_output_placeholders > 0
        tokens = self._append_tokens(request, share, 1 + num_accepted)
        if not is_stale:
            # Tokens behind a stop are given up.
            request.num_computed_tokens -= 1 + num_accepted - len(tokens)
            if had_placeholders:
                request.num_output_placeholders -= 1 + num_accepted
                if request.num_output_placeholders < 0:
                    raise EngineFatal("AssertionError")
            if was_running and (had_placeholders or self._num_spec_tokens):
                self._cache_computed(request, request.num_computed_tokens - request.num_in_flight_tokens)
        if not request.status.is_finished:
            if self._can_lockstep and not request.stop_token_ids and not self._must_be_shown(request):
                self._join_lockstep(request)
            return RequestOutput(request, tokens, None)
        self._remove_from_queues(request, was_running=was_running)
        output_hash = self.sampler.output_hash(request)
        self._free_request(request)
        return RequestOutput(request, tokens, _FINISH_REASONS[request.status], output_hash)

    @staticmethod
    def _roll_back(request: Request, num_rejected: int) -> None:
        """Drafts that were wrong have not been computed after all."""
        if request.num_computed_tokens > 0:
            request.num_computed_tokens -= num_rejected
        if request.num_output_placeholders > 0:
            request.num_output_placeholders -= num_rejected

    def _append_tokens(self, request: Request, share: Share | None, count: int) -> list[int]:
        """Sample up to `count` tokens, as far as the request does not stop."""
        if request.attempts:
            self._forget_attempts(request)
        if request.taint and not request.output_taint:
            request.output_taint = request.taint
        tokens: list[int] = []
        for _ in range(count):
            position = request.num_tokens if self._num_spec_tokens or share is None else share.end
            token = self.sampler.sample(request, position)
            tokens.append(token)
            request.num_tokens += 1
            request.num_output_tokens += 1
            if token in request.stop_token_ids:
                request.status = RequestStatus.FINISHED_STOPPED
            elif request.num_tokens >= self.config.max_model_len or request.num_output_tokens >= request.max_tokens:
                request.status = RequestStatus.FINISHED_LENGTH_CAPPED
            if request.status.is_finished:
                break
        return tokens

    def _remove_from_queues(self, request: Request, *, was_running: bool) -> None:
        if was_running:
            del self.running[request.request_id]
            self._explicit.pop(request.request_id, None)
            return
        # Preempted, and finished by what was in flight.
        self.waiting.remove_all([request])
        self.kv_holding_waiting.remove_all([request])
        self.deferred_waiting.pop(request.request_id, None)

    def take_drafts(self, out: SchedulerOutput) -> None:
        """Without overlapping steps: the drafter has proposed what the next step verifies (vLLM: post_step)."""
        if not out.total_num_scheduled_tokens or out.skip_drafts:
            return
        for share in out.shares:
            request = share.request
            if self.requests.get(request.request_id) is request and not request.status.is_finished:
                request.num_draft_tokens = 0 if request.is_prefill_chunk else self._num_spec_tokens

    def _update_from_kv_xfer_finished(self, reports: KVConnectorOutput) -> None:
        if self.connector is not None:
            self.connector.update_connector_output(reports)
        for request_id in reports.finished_recving:
            request = self.requests.get(request_id)
            if request is None:
                raise EngineFatal("AssertionError", f"finished_recving of unknown request {request_id}")
            if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
                self.finished_recving[request_id] = None
                if request_id not in self.failed_recving:
                    self.log.load_finished(request, request.num_computed_tokens)
            elif request.status.is_finished:
                self._release(request)
            else:
                raise EngineFatal("AssertionError", f"finished_recving of {request_id}, which is {request.status.name}")
        for request_id in reports.finished_sending:
            request = self.requests.get(request_id)
            if request is None:
                raise EngineFatal("AssertionError", f"finished_sending of unknown request {request_id}")
            if not request.status.is_finished:
                raise EngineFatal("AssertionError", f"finished_sending of {request_id}, which is {request.status.name}")
            self._release(request)

    # =========================================================================================================
    # Ends
    # =========================================================================================================

    def finish_requests(self, request_ids: Iterable[str], status: RequestStatus) -> list[Request]:
        """End requests from outside: a client's abort, a failed load. Unknown and finished ids are ignored.

        They go in order of arrival (the real one iterates a set).
        """
        wanted = dict.fromkeys(request_ids)  # a client may ask twice
        found = [self.requests[request_id] for request_id in wanted if request_id in self.requests]
        requests = sorted(
            (request for request in found if not request.status.is_finished),
            key=lambda request: request.arrival_order,
        )
        # One after another, each with both of vLLM's passes, so that the order of frees is that of arrival.
        for request in requests:
            self._finish(request, status)
        return requests

    def _finish(self, request: Request, status: RequestStatus) -> None:
        request_id = request.request_id
        self._blocks_changed()
        self._ready_holding.pop(request_id, None)
        self.livelocked.pop(request_id, None)
        if request.lockstep_since is not None:
            self._leave_lockstep(request, in_flight=self._in_flight is not None)
        if self.running.pop(request_id, None) is None:
            self.waiting.remove_all([request])
            self.kv_holding_waiting.remove_all([request])
            self.deferred_waiting.pop(request_id, None)
        self._explicit.pop(request_id, None)
        delay_free = False
        if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            # A load that has not started yet will not be reported.
            never_started = self.fences.cancel_load(request_id)
            delay_free = not never_started and request_id not in self.finished_recving
            self.finished_recving.pop(request_id, None)
            self.failed_recving.pop(request_id, None)
        request.status = status
        if status is RequestStatus.FINISHED_ABORTED:
            self.log.aborted(request)
        else:
            self.log.failed(request, request.load_error or "KV load failure")
        self._free_request(request, delay_free=delay_free)

    def _free_request(self, request: Request, *, delay_free: bool = False) -> None:
        self.inflight_prefills.pop(request.request_id, None)
        if self.connector is not None:
            computed, in_flight = request.num_computed_tokens, request.num_in_flight_tokens
            tails = self.kv.take_finished_tails(request.request_id, computed, in_flight) if self._is_producer else []
            self.kv.remove_skipped_blocks(request.request_id, max(0, computed - in_flight))
            if tails and self.on_partial_tails is not None:
                delay_free |= self.on_partial_tails(request, tails)
            blocks = BlocksOfRequest(self.kv, request.request_id, computed)
            delay_free |= self.connector.request_finished(request, blocks)
        self.finished_req_ids.append(request.request_id)
        if not delay_free:
            self._release(request)

    def _release(self, request: Request) -> None:
        self._free_blocks_of(request)
        del self.requests[request.request_id]

    def _free_blocks_of(self, request: Request) -> tuple[BlockIds, ...]:
        self._blocks_changed()
        if self.accounts is not None:
            self.accounts.remember_cached(request, self.kv.num_cached_tokens(request.request_id))
        freed = self._give_back(request)
        if self.on_blocks_freed is not None:
            self.on_blocks_freed(request, freed)
        if self.log.wants_blocks:
            for group, block_ids in enumerate(freed):
                self.log.blocks("block.freed", request, group, block_ids)
        return freed

    def _give_back(self, request: Request) -> tuple[BlockIds, ...]:
        """Free its blocks, or let them wait for steps in flight that may still write into them."""
        if self.fences.has_passed(request.last_scheduled_seq):
            return self.kv.free(request.request_id)
        freed = self.kv.pop_blocks_for_free(request.request_id)
        # All groups as one list, backwards: the last group's blocks come back first.
        self.fences.free_later(np.concatenate(freed)[::-1].copy(), self.fences.scheduled)
        return freed

    def reset_prefix_cache(self, *, reset_running: bool = False, reset_connector: bool = False) -> bool:
        """Forget all hashes; only possible while no block is in use, which `reset_running` tries to bring about.

        `reset_connector`: what a connector has cached goes too, whether or not the hashes could be forgotten.
        """
        if reset_running:
            self._dissolve_lockstep()
            for request in reversed(list(self.running.values())):
                self._preempt(request, drop_stale_output=True)
        cached = int(np.count_nonzero(self.pool.keys >= 0))
        done = self.kv.reset_prefix_cache()
        if reset_running and not done:
            raise EngineFatal(
                "RuntimeError",
                "Failed to reset KV cache even when all the running requests are preempted and moved to the waiting "
                "queue.",
            )
        if done:
            self.log.evicted(cached, 0, "reset")
        if reset_connector and self.connector is not None:
            return self.connector.reset_cache() and done
        return done

    def preempt(self, request_id: str) -> bool:
        """Preempt one running request from outside, between steps. False if it does not run."""
        request = self.running.get(request_id)
        if request is None:
            return False
        if request.lockstep_since is not None:
            self._leave_lockstep(request)
        self._preempt(request)
        return True

    def preempt_for_recovery(self, request: Request) -> None:
        """A running request has lost what it needs to go on; nothing of the step in progress is for it."""
        self._preempt(request, drop_stale_output=True)

    def _count_attempt(self, request: Request) -> None:
        request.attempts += 1
        if request.attempts == LIVELOCK_ATTEMPTS:
            self.livelocked[request.request_id] = request

    def _forget_attempts(self, request: Request) -> None:
        request.attempts = 0
        self.livelocked.pop(request.request_id, None)

    @property
    def is_livelocked(self) -> bool:
        """Whether all that is left to do is done in vain."""
        return bool(self.livelocked) and len(self.livelocked) == len(self.running) + self.num_waiting

    # =========================================================================================================
    # Caching
    # =========================================================================================================

    def _cache_computed(self, request: Request, num_tokens: int) -> None:
        """Hash what is full of the first `num_tokens` tokens; drafts are not known to be right."""
        cached = self.kv.cache_blocks(request, request.content.block_keys, min(num_tokens, request.num_tokens))
        if self.log.wants_blocks:
            for group, block_ids in enumerate(cached):
                self.log.blocks("block.cached", request, group, block_ids)

    def _note_allocated(self, request: Request, new_blocks: tuple[BlockIds, ...]) -> None:
        if self.log.wants_blocks:
            for group, block_ids in enumerate(new_blocks):
                self.log.blocks("block.allocated", request, group, block_ids)

    # =========================================================================================================
    # Lockstep
    # =========================================================================================================

    def _lockstep_is_exact(self) -> bool:
        """Whether its members all get their token, whatever the order: the budget covers everyone who runs, or
        those who take more than a token come last; and nobody can be told to wait for blocks."""
        explicit = self._explicit
        if not explicit:
            return self.connector is None or not self.connector.has_pending_block_frees()
        if self.connector is not None and self.connector.has_pending_block_frees():
            return False
        wanted = sum(request.num_tokens - request.num_computed_tokens for request in explicit.values())
        if wanted + len(self.lockstep) <= self.config.token_budget:
            return True
        first = next(iter(explicit.values()))
        last_member = next(request for request in reversed(self.running.values()) if request.lockstep_since is not None)
        return first.lockstep_order > last_member.lockstep_order

    @property
    def can_coast(self) -> bool:
        """Whether the next steps give every member of lockstep one token and do nothing else.

        Until a member finishes, blocks run short, or something comes from outside.
        """
        return (
            bool(self.lockstep)
            and not self._explicit
            and not self.finished_req_ids
            and not self._preempted_since
            and not self._must_step
            and self._scan_is_futile
            and self._lockstep_is_exact()
        )

    @property
    def _must_step(self) -> bool:
        """Whether the connector has to see each step."""
        return self.connector is not None and self.connector.needs_every_step

    def _must_be_shown(self, request: Request) -> bool:
        """Whether the connector has to see each of this request's steps."""
        return self.connector is not None and self.connector.needs_share(request.request_id)

    @property
    def has_nothing_to_do(self) -> bool:
        """Whether `schedule()` would change nothing until something comes from outside."""
        if self.running or self.finished_req_ids or self._preempted_since:
            return False
        return self._scan_is_futile and not self._must_step

    @property
    def must_ask_again(self) -> bool:
        """Whether a queued request waits for a connector that may answer otherwise the next time it is asked."""
        return not self._may_settle and self.num_waiting > 0 and len(self.running) < self.max_num_active

    @property
    def _scan_is_futile(self) -> bool:
        """Whether another scan of the queues would admit nobody and change nothing."""
        if not self.num_waiting or len(self.running) >= self.max_num_active:
            return True
        # A block that fills while coasting could be what the request that does not fit was waiting to hit.
        return self._scan is _Scan.EXHAUSTED or (self._scan is _Scan.BLOCKED and not self._output_is_shared)

    def _blocks_changed(self) -> None:
        """Blocks were given back or got a hash: who did not fit may fit now."""
        if self._scan is _Scan.BLOCKED:
            self._scan = _Scan.UNKNOWN

    def steps_until_shortage(self, step: int, limit: int) -> int:
        """How many steps from `step` on, up to `limit`, lockstep can take without running out of free blocks."""
        block_size = self.kv.block_size
        rounds, free = divmod(self.pool.num_free, len(self.lockstep))
        steps = rounds * block_size
        if steps >= limit:
            return limit
        for offset in range(block_size):
            free -= self.lockstep.num_needing_blocks(step + offset)
            if free < 0:
                break
            steps += 1
        return min(steps, limit)

    def coast(self, num_steps: int) -> None:
        """Do `num_steps` steps of which `can_coast` and `steps_until_shortage` promised that they are uneventful."""
        first = self.step + 1
        self._in_step = True
        for step, members in self.lockstep.growth(first, num_steps):
            self.step = step
            self._grow_all(members)
        self.step = first + num_steps - 1
        if self._output_is_shared:
            # Who leaves next would hash its own block first, whatever the order of those that the last step filled.
            self._cache_filled_blocks()
        self.next_output_step = self.step + 1
        self._in_step = False
        self._num_executed_steps += num_steps

    def _join_lockstep(self, request: Request) -> None:
        del self._explicit[request.request_id]
        request.lockstep_keys = request.content.block_keys.data
        self.lockstep.join(request, self.step + 1)

    def _leave_lockstep(self, request: Request, *, in_flight: bool = False) -> None:
        """Out of lockstep, counters up to date: as at the start of a step, or, `in_flight`, with the current step's
        token computed and its output outstanding."""
        if in_flight and self._output_is_shared:
            # Whoever was admitted earlier has hashed what this step fills before.
            self._cache_filled_blocks()
        self.lockstep.leave(request, self.step if self._in_step else self.step + 1, in_flight=in_flight)
        request.is_prefill_chunk = False
        computed = request.num_computed_tokens
        self._cache_computed(request, computed)
        if self.on_leave_lockstep is not None:
            self.on_leave_lockstep(request)

    def materialise_member(self, request: Request, out: SchedulerOutput) -> None:
        """Give one member a share of its own in the step in flight."""
        self.materialise_lockstep(out, holding=self._table(request).ids)

    def materialise_lockstep(self, out: SchedulerOutput, *, holding: BlockIds) -> None:
        """Give members that hold any of these blocks a share of their own in the step in flight."""
        members = [request for request in self.lockstep if np.isin(self._table(request).ids, holding).any()]
        if not members:
            return
        for request in members:
            self._leave_lockstep(request, in_flight=True)
            self._explicit[request.request_id] = request
            out.shares.append(Share(request, request.num_computed_tokens - 1, 1, False, False, self.kv.no_hit))
        out.num_lockstep -= len(members)
        out.shares.sort(key=lambda share: share.request.lockstep_order)
        self._explicit = dict(sorted(self._explicit.items(), key=lambda item: item[1].lockstep_order))

    def _dissolve_lockstep(self) -> None:
        for request in list(self.lockstep):
            self._leave_lockstep(request)
        self._explicit = {
            request_id: request for request_id, request in self.running.items() if request.lockstep_since is None
        }

    def _grow_all(self, members: list[Request]) -> None:
        """One more block for each of these members, whose blocks are full. There are enough."""
        tables, pool = self.kv.managers[0].tables, self.pool
        if self.log.wants_blocks or not pool.enable_caching or self._must_step:
            self._grow_openly(members)
            return
        is_shared = self._output_is_shared
        for request in members:
            table = tables[request.request_id]
            index = table.num_blocks - 1
            if table.num_cached == index:
                if is_shared:
                    self._blocks_changed()
                block_id = pool.cache_and_take_one(table.view[index], request.lockstep_keys[index])
                table.num_cached = index + 1
            else:
                if table.num_cached < index:
                    self._cache_filled(request, table)
                block_id = pool.take_one()
            table.append(block_id)

    def _grow_openly(self, members: list[Request]) -> None:
        """The same, for those who must hear of each block."""
        for request in members:
            table = self._table(request)
            if table.num_cached < table.num_blocks:
                self._cache_filled(request, table)
            block_id = self.pool.take_one()
            table.append(block_id)
            if self.connector is not None:
                self.connector.note_allocated([block_id])
            if self.log.wants_blocks:
                self.log.blocks("block.allocated", request, 0, [block_id])

    def _grow(self, request: Request, out: SchedulerOutput) -> bool:
        """The same for one, at the expense of the last admitted if need be. False if it had to give up itself."""
        while not self.pool.num_free:
            victim = self._victim()
            self._take_back(victim, out)
            if victim is request:
                return False
        self._grow_all([request])
        return True

    def _cache_filled_blocks(self) -> None:
        """Hash the blocks that this step fills, before anyone is looked up in it."""
        for request in self.lockstep.filling_blocks(self.step):
            table = self._table(request)
            if table.num_cached < table.num_blocks:
                self._cache_filled(request, table)

    def _cache_filled(self, request: Request, table: BlockTable) -> None:
        """The last block of a member is full: enter it under its key."""
        if not self.pool.enable_caching:
            return
        if self._output_is_shared:
            self._blocks_changed()
        index = table.num_blocks - 1
        if max(table.num_cached, 0) != index:
            self._cache_computed(request, table.num_blocks * self.kv.block_size)
            return
        block_id = table.view[index]
        self.pool.cache_one(block_id, request.lockstep_keys[index])
        table.num_cached = index + 1
        if self.log.wants_blocks:
            self.log.blocks("block.cached", request, 0, [block_id])

    def _table(self, request: Request) -> BlockTable:
        return self.kv.managers[0].tables[request.request_id]
