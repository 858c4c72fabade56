"""Phase 1 of a step: tokens and blocks for requests that run, at the expense of the last if need be."""

from kvreplay.engine.output import SchedulerOutput, Share
from kvreplay.engine.request import Request, RequestStatus
from kvreplay.engine.sched.ends import EndsLayer
from kvreplay.kv.cache_manager import Slots
from kvreplay.kv.prefix_cache import BlockIds

_GROWS, _FILLS, _IS_EXPLICIT = range(3)
"""What there is to do for a running request, in this order where it is more than one thing."""


class RunningLayer(EndsLayer):
    """Who runs goes on."""

    def _schedule_running(self, out: SchedulerOutput, threshold: int, *, defer_prefills: bool) -> None:
        """Phase 1, in order of admission."""
        lockstep = self.lockstep
        growing = lockstep.needing_blocks(self.step) if self._decoding else []
        if not self._explicit:
            if len(growing) * self._most_taken <= self.pool.num_free:
                self._grow_all(growing)
                return
            for request in growing:
                if request.lockstep_since is not None and not self._grow(request, out):
                    break
            return
        # Whose block is hashed first matters where two may hold the same output.
        filling = lockstep.filling_blocks(self.step) if self._decoding and self._output_is_shared else []
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
        todo = [(request.lockstep_order, _GROWS, request) for request in growing]
        todo += [(request.lockstep_order, _FILLS, request) for request in filling]
        todo += [(request.lockstep_order, _IS_EXPLICIT, request) for request in self._explicit.values()]
        todo.sort()  # by order of admission and what there is to do, which no two have in common
        for _, what, request in todo:
            if request.status is not RequestStatus.RUNNING:
                continue
            if what == _GROWS:
                if not self._grow(request, out):
                    break
            elif what == _FILLS:
                self._cache_filled(request, self._table(request))
            elif self._budget_left(out) <= 0 or not self._schedule_running_one(
                request, out, threshold, defer_prefills=defer_prefills
            ):
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
            aligned = self._chunks.aligned(request, start, num_tokens)
            num_tokens = self._chunks.outside_lookahead(request, start, aligned, num_tokens)
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

    def _allocate_or_preempt(
        self, request: Request, num_tokens: int, out: SchedulerOutput
    ) -> tuple[BlockIds, ...] | None:
        """Slots for a running request, at the expense of the least urgent ones if need be."""
        while True:
            new_blocks = self.kv.allocate_slots(
                request.request_id,
                Slots(
                    num_computed_tokens=request.num_computed_tokens,
                    num_tokens=request.num_tokens,
                    num_new_tokens=num_tokens,
                    num_lookahead_tokens=self._num_lookahead_tokens,
                    num_in_flight_tokens=request.num_in_flight_tokens,
                ),
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
            self._leave_lockstep(victim, is_over=True)
        for index, share in enumerate(out.shares if self._by_priority else ()):
            if share.request is victim:
                del out.shares[index]
                out.total_num_scheduled_tokens -= share.num_tokens
                break
        drops = self.connector is not None and self.connector.requires_kv_delivery
        self._preempt(victim, drop_stale_output=drops)
        out.preempted.append(victim.request_id)

    def _grow(self, request: Request, out: SchedulerOutput) -> bool:
        """The same for one, at the expense of the last admitted if need be. False if it had to give up itself."""
        while not self._can_grow(request):
            victim = self._victim()
            self._take_back(victim, out)
            if victim is request:
                return False
        if self._decode_events is None:
            self._grow_all([request])
        return True
