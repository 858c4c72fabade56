"""What a scheduler knows: its requests and queues, its counters, and what the last scan of the queues found."""

from collections.abc import Callable
from enum import Enum
from itertools import count
from typing import NamedTuple

from kvreplay.engine.accounts import RecomputeAccounts
from kvreplay.engine.chunks import chunk_rules
from kvreplay.engine.config import SchedulerConfig
from kvreplay.engine.connector import SchedulerConnector
from kvreplay.engine.fences import Fences
from kvreplay.engine.lockstep import EventLockstep, Lockstep
from kvreplay.engine.log import EngineLog
from kvreplay.engine.options import VLLM_0_33_OPTIONS, SchedulerOptions
from kvreplay.engine.output import RequestOutput, SchedulerOutput, Share
from kvreplay.engine.queues import PriorityQueue, RequestQueue
from kvreplay.engine.request import UNDECIDED, Request, RequestStatus
from kvreplay.engine.sampler import Sampler
from kvreplay.engine.sched.contents import ContentsModel
from kvreplay.kv.block_table import BlockTable
from kvreplay.kv.cache_manager import KVCacheManager
from kvreplay.kv.managers.mamba import BoundaryState
from kvreplay.kv.prefix_cache import BlockIds

LIVELOCK_ATTEMPTS = 1000
"""A request that has been parked or preempted so often without a token in between never gets anywhere."""


class Scan(Enum):
    """What the last scan of the queues says about the next."""

    UNKNOWN = "it may admit somebody"
    EXHAUSTED = "it passed everyone, and all who are left wait for a report"
    IN_VAIN = "it admitted nobody, and will not until blocks or lookups change; who is asked does not change them"
    BLOCKED = "it ended at a request that does not fit; giving back or caching blocks may change that"


class Misfit(NamedTuple):
    """The request that did not fit, and what may have changed for it since."""

    request: Request
    num_tokens: int
    least_blocks: int
    """Blocks it needs from the free queue even if all of its hits are in use."""
    num_inserted: int
    """Blocks that had ever been cached then: it cannot have gained more hits than have come since."""
    ignores_generated: bool = False
    """It can hit no block that ends in generated tokens; those, where they are counted, are left out of the above."""


class SchedulerState:
    """What all layers of the scheduler share."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        connector: SchedulerConnector | None,
        sampler: Sampler,
        log: EngineLog,
        options: SchedulerOptions = VLLM_0_33_OPTIONS,
        accounts: RecomputeAccounts | None = None,
    ) -> None:
        speculation, rules = options.speculation, options.rules
        self.config = config
        self._token_budget = config.token_budget
        self.kv = kv
        self.pool = kv.pool
        self.connector = connector
        self.sampler = sampler
        self.log = log
        self.accounts = accounts
        self.speculation = speculation
        self._num_spec_tokens = speculation.num_speculative_tokens if speculation is not None else 0
        self._num_lookahead_tokens = speculation.num_lookahead_tokens if speculation is not None else 0
        self._num_draft_slots = speculation.num_draft_slots if speculation is not None else 0
        self._chunks = chunk_rules(config, kv, speculation, options.cache_block_size, rules)
        reserves = speculation is not None and not rules.loads_ignore_drafts
        self._num_step_slots = speculation.num_step_slots if speculation is not None and reserves else 0
        self._step_blocks = kv.blocks_of_tokens(self._num_step_slots)
        self._is_async = config.async_scheduling
        self._by_priority = config.policy == "priority"
        self._is_producer = options.kv_role in ("kv_producer", "kv_both")
        is_consumer = options.kv_role in ("kv_consumer", "kv_both")
        self.fences = Fences(enabled=connector is not None and self._is_async and is_consumer)
        self._defer_async_loads = self.fences.enabled and options.defer_async_loads
        self._divergent_hits = options.divergent_hits
        self.rules = rules
        self.zeroes_loads = rules.zeroes_loads_late and self._is_async
        """Blocks for a load are zeroed, too, behind the step in progress."""
        is_full_only = all(group.is_full_attention for group in kv.groups)
        self._stops_before_last_token = rules.stops_before_last_token and not is_full_only
        self._has_drafters_group = any(spec.drafter_only for spec in kv.groups)
        self._replay_groups = frozenset(group for group, spec in enumerate(kv.groups) if spec.prefix_replay_tokens)
        self._cacheable_groups = frozenset(group for group, spec in enumerate(kv.groups) if spec.prefix_cacheable)
        self._output_is_shared = options.output_is_shared
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
        self._bystanders: tuple[object, ...] = ()
        """Those who waited when somebody had once more gone in circles so often; see `_look_at_bystanders`."""
        self._bystanders_stay = False
        """They had been the same the time before."""
        self._num_reports_since = 0
        """Steps that brought reports, since they were last seen to change."""
        self.contents: ContentsModel | None = None
        """Whoever models what is in the blocks; None: nobody does."""
        self.on_invalid_evicted: Callable[[list[int]], None] | None = None
        self.failure_reason: Callable[[str], str | None] | None = None
        """What the connector says of a request's failed load."""
        self.on_partial_tails: Callable[[Request, list[BoundaryState]], bool] | None = None
        """A producer's request ends in a state inside a block: whether its blocks must be kept for it."""
        self.skipped: list[str] = []
        """Requests whose output of the last processed step was dropped."""
        if log.wants_blocks:
            kv.tell_left_behind(self._note_left_behind)
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
        self._is_scheduling = False
        """In schedule(), whose output the workers prepare before they compute."""
        self._arrivals = count()
        self._admissions = count()
        self._preempted_since: list[str] = []

        self._is_simple = len(kv.groups) == 1 and kv.groups[0].is_full_attention
        is_followed = connector is not None and connector.follows_windows
        events = self._decode_events = None if self._is_simple or is_followed else kv.decode_events()
        self._most_taken = len(kv.groups)
        """Blocks that a decoding request takes in one step, at most."""
        self.lockstep = (
            Lockstep(kv.block_size, config.max_model_len)
            if events is None
            else EventLockstep(events.period, events.residues, config.max_model_len)
        )
        self._decoding = self.lockstep.members
        self._can_lockstep = (
            options.use_lockstep
            and (self._is_simple or events is not None)
            and speculation is None
            and not self._is_async
            and not self._by_priority
            and config.long_prefill_token_threshold == 0
            and config.prefill_schedule_interval == 1
            and self._token_budget >= config.max_num_seqs
        )
        self._scan = Scan.UNKNOWN
        self._full_sequence_must_fit = config.scheduler_reserve_full_isl
        self._misfit: Misfit | None = None
        self._ready_holding: dict[str, None] = {}
        """Requests in `kv_holding_waiting` that are not parked: their load is over, and they did not fit yet."""
        self._lookup_version = -1
        self._asks_again = connector is not None and not connector.lookup_is_pure
        # What a scan passes over may fit another step's drafts.
        self._may_settle = not self._asks_again and not self._is_async and speculation is None
        self._asks_hopefully = False
        """In this scan some lookup stayed undecided that may be decided the next time."""
        self._explicit: dict[str, Request] = {}
        """Running requests that are not in lockstep, in order of admission."""

        self._prefill_capacity_bound = False
        self._last_prefill_step = -config.prefill_schedule_interval
        self._num_executed_steps = 0

    def subscribe(
        self,
        *,
        contents: ContentsModel | None = None,
        failure_reason: Callable[[str], str | None] | None = None,
        on_invalid_evicted: Callable[[list[int]], None] | None = None,
        on_partial_tails: Callable[[Request, list[BoundaryState]], bool] | None = None,
    ) -> None:
        """Who is told, or asked. Each has one subscriber: a second one would take the first one's place unnoticed."""
        for name, subscriber in (
            ("contents", contents),
            ("failure_reason", failure_reason),
            ("on_invalid_evicted", on_invalid_evicted),
            ("on_partial_tails", on_partial_tails),
        ):
            if subscriber is not None:
                assert getattr(self, name) is None, f"{name} has a subscriber"
                setattr(self, name, subscriber)

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
        if not self.rules.keeps_stepping:
            return False
        return self.connector is not None and (bool(self.requests) or self.connector.has_pending_push_work())

    @property
    def is_livelocked(self) -> bool:
        """Whether all that is left to do is done in vain."""
        if not self.livelocked:
            return False
        if len(self.livelocked) == len(self.running) + self.num_waiting:
            return True
        if not self._bystanders_stay or not self.running.keys() <= self.livelocked.keys():
            return False
        if any(
            request.lookup_answer == UNDECIDED for request in self.waiting if request.request_id not in self.livelocked
        ):
            return False  # it may be answered without any report
        return self._look_at_bystanders() == self._bystanders

    @property
    def may_hear_of_bystanders(self) -> bool:
        """Whether the next report may be of somebody who is parked, and not of one more of the circle's own loads."""
        if self._num_reports_since >= LIVELOCK_ATTEMPTS:
            return False
        return any(
            request.status is RequestStatus.WAITING_FOR_REMOTE_KVS and request.request_id not in self.livelocked
            for request in self.kv_holding_waiting
        )

    def _look_at_bystanders(self) -> tuple[object, ...]:
        """What would show that those who wait, and do not go in circles, get on in between."""
        others = [
            (request.request_id, request.status, request.num_tokens, request.num_computed_tokens)
            for queue in (self.waiting, self.kv_holding_waiting)
            for request in queue
            if request.request_id not in self.livelocked
        ]
        return (*others, *self.finished_recving)

    def _budget_left(self, out: SchedulerOutput) -> int:
        """Tokens that one more request may get in this step."""
        used = out.total_num_scheduled_tokens + len(self._decoding)
        left = self._token_budget - used
        if not self._num_draft_slots:
            return left
        rows = used + self._num_draft_slots * (len(out.shares) + 1)
        return min(left, self.config.max_num_batched_tokens - rows)

    def _add_share(self, out: SchedulerOutput, share: Share) -> None:
        out.shares.append(share)
        out.total_num_scheduled_tokens += share.num_tokens

    @staticmethod
    def _drafts_go_unused(share: Share) -> bool:
        """Whether no step can verify what would be drafted after this one (vLLM: _drafts_unused)."""
        request = share.request
        if share.end < request.num_tokens:
            return True
        sure = request.num_output_tokens + 1 + (1 if request.num_output_placeholders else 0)
        return sure >= request.max_tokens

    def _cache_computed(self, request: Request, num_tokens: int) -> None:
        """Hash what is full of the first `num_tokens` tokens; drafts are not known to be right."""
        cached = self.kv.cache_blocks(request, request.content.block_keys, min(num_tokens, request.num_tokens))
        if self.log.wants_blocks:
            for group, block_ids in enumerate(cached):
                self.log.blocks("block.cached", request.request_id, group, block_ids)

    def _note_allocated(self, request: Request, new_blocks: tuple[BlockIds, ...]) -> None:
        if self.log.wants_blocks:
            for group, block_ids in enumerate(new_blocks):
                self.log.blocks("block.allocated", request.request_id, group, block_ids)

    def _note_left_behind(self, request_id: str, group: int, block_ids: BlockIds) -> None:
        self.log.blocks("block.freed", request_id, group, block_ids, "window")

    @property
    def _steps_are_alike(self) -> bool:
        """Whether who waits may come in at any step: prefills keep their distance only from those that run."""
        return self.config.prefill_schedule_interval == 1 or not self.running

    def _blocks_changed(self) -> None:
        """Blocks were given back or got a hash: who did not fit may fit now."""
        if self._scan is Scan.BLOCKED or self._scan is Scan.IN_VAIN:
            self._scan = Scan.UNKNOWN

    def _count_attempt(self, request: Request) -> None:
        request.attempts += 1
        if request.attempts % LIVELOCK_ATTEMPTS == 0:
            self.livelocked[request.request_id] = request
            bystanders = self._look_at_bystanders()
            self._bystanders_stay = bystanders == self._bystanders
            self._bystanders = bystanders
            if not self._bystanders_stay:
                self._num_reports_since = 0

    def _forget_attempts(self, request: Request) -> None:
        request.attempts = 0
        self.livelocked.pop(request.request_id, None)

    def _try_livelocked_again(self) -> None:
        """There is room that whoever went in circles had waited for."""
        for request in list(self.livelocked.values()):
            self._forget_attempts(request)

    def _table(self, request: Request) -> BlockTable:
        return self.kv.managers[0].tables[request.request_id]
