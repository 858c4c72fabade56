"""Phase 2 of a step: who of the queues is admitted, to run or into a load."""

from dataclasses import dataclass
from enum import Enum

from kvreplay.engine.output import SchedulerOutput, Share
from kvreplay.engine.queues import RequestQueue
from kvreplay.engine.request import Request, RequestStatus
from kvreplay.engine.sched.running import RunningLayer
from kvreplay.engine.sched.state import LIVELOCK_ATTEMPTS, Misfit, Scan
from kvreplay.errors import EngineFatal
from kvreplay.kv.cache_manager import BlocksOfRequest, Slots
from kvreplay.kv.lookup import Hit, truncated
from kvreplay.kv.prefix_cache import BlockIds


class _Head(Enum):
    """What becomes of a queue's head that is not admitted."""

    SKIP = "let others pass"
    REQUEUE = "it holds nothing any more, and goes to the front of those who never did"
    STOP = "it stays, and the scan ends"
    NOT_NOW = "as STOP, but for a reason that is over with the step"


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


class AdmissionLayer(RunningLayer):
    """Who waits comes in."""

    def _schedule_waiting(self, out: SchedulerOutput, threshold: int, *, defer_prefills: bool) -> bool:
        """Phase 2: admit from the queues. Returns whether a prompt with more than its last token left was admitted."""
        if self._budget_left(out) <= 0 or not self.num_waiting or len(self.running) >= self.max_num_active:
            return False
        if self._decoding and not self._output_is_shared:  # else phase 1 has done so
            self._cache_filled_blocks()
        if self._still_does_not_fit():
            self._scan = Scan.BLOCKED
            return False
        skipped_waiting: list[Request] = []
        skipped_holding: list[Request] = []
        prefill_admitted = False
        self._scan = Scan.UNKNOWN
        may_settle = self._may_settle and not defer_prefills
        self._asks_hopefully = False
        scans_holding = self._must_scan_holding()
        while self._budget_left(out) > 0 and len(self.running) < self.max_num_active:
            queue = self._next_queue(scans_holding=scans_holding)
            if not queue:
                if may_settle and self._steps_are_alike:
                    self._scan = Scan.EXHAUSTED
                elif self._is_in_vain(out):
                    self._scan = Scan.IN_VAIN
                break
            request = queue.peek()
            if (
                request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
                and request.request_id not in self.finished_recving
            ):
                share: Share | _Head = _Head.SKIP
            else:
                share = self._admit(request, threshold, out, defer_prefills=defer_prefills)
            if share is _Head.NOT_NOW:
                break
            if share is _Head.STOP:
                if may_settle and self._steps_are_alike:
                    self._scan = Scan.BLOCKED
                elif self._is_in_vain(out) and self._is_asked_in_vain(request):
                    self._scan = Scan.IN_VAIN
                break
            queue.take()
            self._ready_holding.pop(request.request_id, None)
            if share is _Head.REQUEUE:
                self.deferred_waiting.pop(request.request_id, None)
                self.waiting.prepend(request)
                continue
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

    def _is_in_vain(self, out: SchedulerOutput) -> bool:
        """Whether this scan has changed nothing, nor would the next one get other answers of those it has passed."""
        if not self._asks_again or self._in_flight is not None:
            return False
        return self._steps_are_alike and not (self._asks_hopefully or out.shares or out.made_progress)

    def _is_asked_in_vain(self, request: Request) -> bool:
        assert self.connector is not None
        return self.connector.is_asked_in_vain(request.request_id, is_idle=not self.running)

    def _must_scan_holding(self) -> bool:
        """Parked requests without a report are passed over one by one, which changes nothing: leave them."""
        return bool(self.finished_recving or self._ready_holding)

    def _next_queue(self, *, scans_holding: bool) -> RequestQueue:
        return self.kv_holding_waiting if scans_holding and self.kv_holding_waiting else self.waiting

    def _waits_with_holders(self, request: Request) -> bool:
        """Whether a request that was passed over holds blocks: nobody without may stand in front of it."""
        return request.status is RequestStatus.WAITING_FOR_REMOTE_KVS or request.num_computed_tokens > 0

    def _admit(self, request: Request, threshold: int, out: SchedulerOutput, *, defer_prefills: bool) -> Share | _Head:
        """Admit the head of a queue, whose load is not under way, to run, or into a load, or not."""
        if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            self._promote(request)
            out.made_progress = True
            if self.rules.retries_afresh and not request.num_computed_tokens:
                return _Head.REQUEUE
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
            return _Head.NOT_NOW if self.kv.has_refused_state else _Head.STOP
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
            source = self.connector.get_load_source(request.request_id) if self.connector is not None else None
            self.log.load_started(request, num_external, -(-num_external // self.kv.block_size), source)
        if admission.is_async:
            self._park(request, computed, num_external)
            out.made_progress = True
            return _Head.SKIP
        if num_external:
            out.has_sync_kv_loads = True
        request.num_computed_tokens = request.admitted_at = computed
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

    def _look_up(self, admission: _Admission) -> bool:
        """What of the request is cached here, and what a connector has beyond. False: ask again in the next step."""
        request = admission.request
        diverged = self._find_local(admission)
        if self.connector is not None:
            unaligned = admission.num_local % self.kv.block_size
            external, is_async = self.connector.get_num_new_matched_tokens(request, admission.num_local - unaligned)
            if request.skip_reading_prefix_cache or request.is_never_loaded:
                external, is_async = 0, False
            if external and self.rules.tolerates_reports:
                external, is_async = self._at_most(
                    external, request.num_tokens - admission.num_local + unaligned, is_async
                )
            self.log.lookup(request, external, is_async=is_async)
            if external is None:
                if self.connector.is_going_in_circles(request.request_id):
                    self.livelocked[request.request_id] = request
                elif request.attempts < LIVELOCK_ATTEMPTS:
                    self.livelocked.pop(request.request_id, None)
                self._asks_hopefully |= not self._is_asked_in_vain(request)
                return False
            if self._replay_groups and not (external and self._load_brings_window(request)):
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

    def _at_most(self, external: int, rest: int, is_async: bool) -> tuple[int, bool]:  # noqa: FBT001 - a pair
        """What a connector offers, no more than the prompt's rest, and where its last token must be computed, less."""
        external = max(min(external, rest - (1 if self._stops_before_last_token or not is_async else 0)), 0)
        return external, is_async and external > 0

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

    def _load_brings_window(self, request: Request) -> bool:
        """Whether its load restores groups that no cache holds, as a transfer of the request's own blocks does."""
        return bool(self._replay_groups) and self._loads_every_group(request)

    def _loads_every_group(self, request: Request) -> bool:
        return self.connector is not None and self.connector.loads_every_group(request.request_id)

    def _leaves_drafter_out(self, request: Request) -> bool:
        return self.connector is not None and self.connector.leaves_drafter_out(request.request_id)

    def _compute_for_drafter(self, share: Share, out: SchedulerOutput) -> None:
        """What a load has brought, but not for the drafter; what follows it computes with the share."""
        request = share.request
        share.drafter_start, request.drafter_start = request.drafter_start, None
        out.num_drafter_tokens += request.num_external_tokens
        self.log.drafter_recomputes(request, request.num_external_tokens)

    def _brings_window(self, admission: _Admission) -> bool:
        return admission.num_external > 0 and self._load_brings_window(admission.request)

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
            return _Head.NOT_NOW
        if admission.hit is not None and not self._brings_window(admission):
            admission.num_replay = min(self.kv.prefix_replay_tokens, admission.computed)
            admission.computed -= admission.num_replay
        budget = self._budget_left(out)
        num_tokens = request.num_tokens - admission.computed
        is_padded = self._is_padded(admission, num_tokens, threshold, out)
        if is_padded:
            num_tokens = 1 + self._num_spec_tokens
            if num_tokens > budget:
                return _Head.NOT_NOW
        if 0 < threshold < num_tokens:
            num_tokens = threshold
        if not self.config.enable_chunked_prefill and num_tokens > budget:
            return _Head.NOT_NOW
        num_tokens = min(num_tokens, budget)
        if num_tokens <= 0:
            raise EngineFatal("AssertionError")
        wanted = num_tokens
        num_tokens = self._chunks.aligned(request, admission.computed, num_tokens)
        if not num_tokens:
            return _Head.NOT_NOW
        if is_padded and num_tokens != 1 + self._num_spec_tokens and self._chunks.block_size is not None:
            num_tokens, is_padded = 1, False
        num_tokens = self._chunks.outside_lookahead(request, admission.computed, num_tokens, wanted)
        if not num_tokens:
            return _Head.SKIP
        admission.num_tokens = num_tokens
        admission.num_drafts = self._num_spec_tokens if is_padded else 0
        return None

    def _is_padded(self, admission: _Admission, num_tokens: int, threshold: int, out: SchedulerOutput) -> bool:
        """Whether a request with one token left gets placeholders for drafts, so that the batch stays uniform."""
        padded = 1 + self._num_spec_tokens
        return (
            self._num_spec_tokens > 0
            and num_tokens == 1
            and not out.prefill_scheduled
            and (any(not share.admitted for share in out.shares) or admission.computed > 0)
            and admission.computed + padded + 1 <= self.config.max_model_len
            and not (self.rules.pads_whole_only and 0 < threshold < padded)
        )

    def _allocate_admission(self, admission: _Admission) -> tuple[BlockIds, ...] | None:
        """Blocks for what is computed now, or loaded.

        With exact estimates a request is let into a load where it can go on after it, at the latest when those that run
        are over. Else it may hold what it has loaded, wait for a block more, and keep those behind it from running.
        """
        request, hit = admission.request, admission.hit
        loaded: frozenset[int] = frozenset()
        if admission.is_async and self.kv.has_mamba and not self.zeroes_loads:
            loaded = (
                frozenset(range(len(self.kv.groups))) if self._loads_every_group(request) else self._cacheable_groups
            )
        reserved = self._reserved_blocks() + self._step_blocks if admission.is_async else 0
        must_go_on = admission.is_async and self.rules.exact_estimates
        wanted = Slots(
            num_computed_tokens=request.num_computed_tokens,
            num_tokens=request.num_tokens,
            num_new_tokens=max(admission.num_tokens - admission.num_replay, 0),
            hit=hit,
            num_local_tokens=admission.num_local,
            num_external_tokens=admission.num_external,
            num_lookahead_tokens=0 if admission.is_async else self._num_lookahead_tokens,
            num_in_flight_tokens=request.num_in_flight_tokens,
            full_sequence_must_fit=self.config.scheduler_reserve_full_isl or must_go_on,
            reserved_beside=reserved if must_go_on else 0,
            apply_watermark=bool(self.running),
            reserved_blocks=reserved,
            loaded_groups=loaded,
        )
        new_blocks = self.kv.allocate_slots(request.request_id, wanted)
        if new_blocks is None and must_go_on and self.running:
            beside = reserved - self._blocks_to_come()
            if self.config.scheduler_reserve_full_isl:
                beside = max(beside, 0)
            new_blocks = self.kv.allocate_slots(request.request_id, wanted._replace(reserved_beside=beside))
        if new_blocks is not None:
            self._note_allocated(request, new_blocks)
        elif hit is not None and self._may_settle and not admission.num_external:
            least = self.kv.least_blocks(request.num_tokens, hit, admission.num_local)
            if least is not None:
                # Its own output is generated, too.
                num_blocks = request.num_tokens // self.kv.rules.hash_block_size
                ignores = not request.num_output_tokens and request.content.first_output_block >= num_blocks
                inserted = self._num_inserted(ignores_generated=ignores)
                self._misfit = Misfit(request, request.num_tokens, least, inserted, ignores)
        return new_blocks

    def _reserved_blocks(self) -> int:
        """Blocks that prefills in flight still need: an async load must leave them, it cannot be preempted."""
        return sum(
            self.kv.num_blocks_to_finish(
                request.request_id, request.num_tokens, request.num_computed_tokens, self._num_step_slots
            )
            for request in self.inflight_prefills.values()
        )

    def _blocks_to_come(self) -> int:
        """Blocks that are free once those that run are over, or have been preempted. Not those that several hold."""
        return sum(self.kv.num_blocks_held_alone(request_id) for request_id in self.running)

    def _park(self, request: Request, computed: int, num_external: int) -> None:
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        request.num_computed_tokens = computed
        request.num_external_tokens = num_external
        self._count_attempt(request)
        self.inflight_prefills[request.request_id] = request
        self.log.parked(request, num_external, self.kv.num_blocks_held(request.request_id))
        if self.contents is not None:
            self.contents.on_parked(request)

    def _promote(self, request: Request) -> None:
        """Its load is over: hash what was loaded, or give up what was not (vLLM: _update_waiting_for_remote_kv)."""
        if self.contents is not None:
            self.contents.on_promoted(request)
        failed = request.request_id in self.failed_recving
        if failed:
            del self.failed_recving[request.request_id]
        if failed and not request.num_computed_tokens:
            self._free_blocks_of(request)
            if self.rules.retries_afresh:
                self.inflight_prefills.pop(request.request_id, None)
        else:
            self._cache_computed(request, request.num_computed_tokens)
            if not failed and self._has_drafters_group and self._leaves_drafter_out(request):
                request.drafter_start = request.num_computed_tokens - request.num_external_tokens
            if failed and self.kv.has_mamba:
                self.kv.zero_again(request.request_id, request.num_computed_tokens)
            self._rewind_loaded(request, brings_window=not failed and self._load_brings_window(request))
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
        if request.drafter_start is not None:
            self._compute_for_drafter(share, out)
        if share.end < request.num_tokens:
            self.inflight_prefills[request.request_id] = request
        self._add_share(out, share)
