"""One engine instance in virtual time, as the rest of a cluster sees it (vLLM: EngineCore).

While nothing but decoding goes on the instance *coasts*: many steps are one action. What touches it first brings it
up to date (`catch_up`), with the step then in progress in flight.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvreplay.engine.output import SchedulerOutput
from kvreplay.engine.request import Request, RequestStatus
from kvreplay.engine.stepping import POLL_NS, SteppingInstance
from kvreplay.errors import EngineFatal
from kvreplay.sim.event_loop import FOREVER_NS

_COAST_STEPS = 4096
_REPEATS_TOLD = 60
"""Samples in which nothing has changed: those of ten minutes, longer than any timeout's default."""


@dataclass(slots=True)
class _Coast:
    """Decode-only steps in one go: `num_steps` from `first_step` on, starting at `start_ns`."""

    first_step: int
    start_ns: int
    num_decodes: int
    num_kv_tokens: int
    num_steps: int


class Instance(SteppingInstance):
    """An instance that may be asked, commanded and poked at any time."""

    _coast: _Coast | None = None
    _evicted_reported: Sequence[int] = ()
    """By group."""
    _last_sample: Mapping[str, int] | None = None
    _num_repeats = 0
    """Samples since then that were the same."""

    # =========================================================================================================
    # From outside
    # =========================================================================================================

    @property
    def num_requests(self) -> int:
        """Unfinished requests, queued or running."""
        return len(self._arrivals) + len(self.scheduler.running) + self.scheduler.num_waiting

    @property
    def request_ids(self) -> list[str]:
        """Every request it knows, finished ones included whose blocks a connector keeps."""
        return [*self.scheduler.requests, *(request.request_id for request in self._arrivals)]

    @property
    def unfinished(self) -> list[Request]:
        """Those that it has taken in, and what is left in its input queue."""
        known = self.scheduler.requests.values()
        return [*(request for request in known if not request.status.is_finished), *self._arrivals]

    @property
    def reported_ns(self) -> int:
        """Every event of this instance before this instant has been emitted."""
        return min(self.unreported_from_ns, self._loop.now_ns)

    @property
    def unreported_from_ns(self) -> int:
        """Since when it may have events to emit, while it coasts; else never."""
        return self._coast.start_ns if self._coast is not None else FOREVER_NS

    def submit(self, request: Request) -> None:
        """A request reaches the instance's input queue."""
        assert not self.is_dead
        self._arrivals.append(request)
        self.poke()

    def refuse(self, request: Request, cause: str) -> None:
        """The API server answers with an error: the engine never has it."""
        self.catch_up()
        self._sync_clock()
        self._log.rejected(request, cause)
        self.scheduler.release_unseen(request)
        self._end_outside(request)
        self.poke()

    def forget(self, request: Request, *, is_known: bool) -> None:
        """Its client has gone before the engine had it. `is_known`: to the API server, which may hand it on all the
        same, so that a producer hears of it."""
        if is_known and self.scheduler.rules.releases_rejected:
            self.submit(request)
            self.abort(request.request_id)
            return
        self.catch_up()
        self._sync_clock()
        self._log.aborted(request)
        self._end_outside(request)

    def _end_outside(self, request: Request) -> None:
        assert not self.is_dead
        request.status = RequestStatus.FINISHED_ABORTED
        if self.on_finished is not None:
            self.on_finished(request)

    def abort(self, request_id: str) -> None:
        assert not self.is_dead
        self._aborts.append(request_id)
        self.poke()

    def poke(self) -> None:
        """Something is there for the instance: a message, or a report of its workers."""
        if self.is_dead:
            return
        if self._coast is not None:
            self._shorten_coast(self._coast)
        elif self._timer is not None and self._timer.daemon and (self._in_flight is None or self._circles_may_end):
            time_ns, action = self._timer.time_ns, self._timer.action
            assert action is not None
            self._loop.cancel(self._timer)
            self._set_timer(time_ns, action)
        elif self._in_flight is None and self._timer is None:
            now = self._loop.now_ns
            wake_ns = now
            if self._polls_from_ns is not None:
                wake_ns += (self._polls_from_ns - now) % POLL_NS
            self._set_timer(wake_ns, self._begin_step)

    def raise_in_next_step(self, exception: str, message: str) -> None:
        """An action fault: the next step's forward pass raises."""
        self._raise_next = EngineFatal(exception, message)
        self.poke()

    def preempt(self, request_id: str) -> bool:
        """An action fault: before the next step, take a running request's blocks as a shortage would. False if it does
        not run now."""
        if request_id not in self.scheduler.running:
            return False
        self._preemptions.append(request_id)
        self.poke()
        return True

    def reset_caches(self, *, gpu: bool = False, running: bool = False, connector: bool = False) -> None:
        """An action fault, or an operator: before the next step, forget what is cached in these places.

        `running`: requests are preempted first, so that the pool is empty (vLLM: reset_prefix_cache's flags).
        """
        self._resets.append((gpu, running, connector))
        self.poke()

    def evict(self, num_blocks: int) -> bool:
        """An action fault: before the next step, cached blocks that nobody holds lose their content, oldest first.
        False if there are none now."""
        self.catch_up()
        pool = self.scheduler.pool
        if not pool.is_cached(pool.free_queue()).any():
            return False
        self._num_to_evict += num_blocks
        self.poke()
        return True

    def has_unfinished(self, request_id: str) -> bool:
        request = self.scheduler.requests.get(request_id)
        if request is not None:
            return not request.status.is_finished
        return any(arrival.request_id == request_id for arrival in self._arrivals)

    # =========================================================================================================
    # Coasting
    # =========================================================================================================

    def _start_coast(self) -> bool:
        """Coast, or take the next step the short way, if all that happens in it is that a member finishes. False if
        the next step is neither."""
        scheduler = self.scheduler
        lockstep = scheduler.lockstep
        first = scheduler.step + 1
        num_decodes = len(lockstep)
        # The step in which a member finishes, or blocks could run out, is an ordinary one.
        until_finish = lockstep.next_finish() - first
        limit = scheduler.steps_until_shortage(first, max(1, min(until_finish, _COAST_STEPS)))
        if limit == 0:
            return False
        if until_finish == 0:
            self._take_uneventful_step(self._loop.now_ns)
            return True
        kv_tokens = lockstep.num_kv_tokens(first)
        now = self._loop.now_ns
        self._coast = _Coast(first, now, num_decodes, kv_tokens, limit)
        self._set_timer(now + self._timing.decode_run_ns(num_decodes, kv_tokens, limit), self._coast_over)
        return True

    def _shorten_coast(self, coast: _Coast) -> None:
        """Something is there for the instance: let the coast end with the step in progress."""
        num_steps = self._steps_done(coast) + 1
        if num_steps < coast.num_steps:
            coast.num_steps = num_steps
            self._loop.cancel(self._timer)
            duration_ns = self._timing.decode_run_ns(coast.num_decodes, coast.num_kv_tokens, num_steps)
            self._set_timer(coast.start_ns + duration_ns, self._coast_over)

    def _steps_done(self, coast: _Coast) -> int:
        """Steps that have ended. One that ends at this very instant has not: what happens now comes before its end."""
        span_ns = max(0, self._loop.now_ns - 1 - coast.start_ns)
        done = self._timing.num_decode_steps_within(coast.num_decodes, coast.num_kv_tokens, span_ns)
        return min(done, coast.num_steps - 1)

    def _coast_over(self) -> None:
        coast = self._coast
        assert coast is not None
        self._timer = None
        self._coast = None
        try:
            if self._is_awaited():
                self._end_coast_openly(coast)
            else:
                self._perform(coast, coast.num_steps, self._loop.now_ns)
            self._log.now_ns = self._loop.now_ns
            self._log.step = self.scheduler.step + 1
            self._step()
        except EngineFatal as death:
            self._die(death)

    def _is_awaited(self) -> bool:
        """Whether the end of a step has more to do than to count tokens."""
        return (
            bool(self._aborts)
            or self._raise_next is not None
            or (self._workers is not None and self._workers.has_report())
        )

    def _end_coast_openly(self, coast: _Coast) -> None:
        """The last step of a coast brings reports, or meets aborts."""
        timing = self._timing
        start_ns = coast.start_ns + timing.decode_run_ns(coast.num_decodes, coast.num_kv_tokens, coast.num_steps - 1)
        self._perform(coast, coast.num_steps - 1, start_ns)
        out = self._enter_uneventful_step(start_ns)
        self._log.now_ns = self._loop.now_ns
        self._in_flight = None
        self._end_step(out)

    def catch_up(self) -> None:
        """Bring a coasting instance to this instant: past steps done, the one in progress in flight."""
        coast = self._coast
        if coast is None:
            return
        self._coast = None
        self._loop.cancel(self._timer)
        done = self._steps_done(coast)
        start_ns = coast.start_ns + self._timing.decode_run_ns(coast.num_decodes, coast.num_kv_tokens, done)
        self._perform(coast, done, start_ns)
        self._take_uneventful_step(start_ns)

    def _take_uneventful_step(self, start_ns: int) -> None:
        """Put a step in flight that gives each member of lockstep its token and schedules nothing else."""
        out = self._enter_uneventful_step(start_ns)
        duration_ns = self._timing.step_ns(0, out.num_decodes, out.num_kv_tokens)
        self._set_timer(start_ns + duration_ns, self._finish_step)

    def _enter_uneventful_step(self, start_ns: int) -> SchedulerOutput:
        self._log.now_ns = start_ns
        self._log.step = self.scheduler.step + 1
        out = self._in_flight = self.scheduler.schedule_uneventful()
        self._note_blocks()
        if self._model is not None:
            self._model.execute(out)
        self._note_step(out, self._timing.step_ns(0, out.num_decodes, out.num_kv_tokens))
        return out

    def _perform(self, coast: _Coast, num_steps: int, end_ns: int) -> None:
        """What `num_steps` of the coast's steps did, the last of which ended at `end_ns`."""
        if not num_steps:
            return
        counters = self.counters
        if self._log.wants_steps:
            least_free = self._perform_openly(coast, num_steps)
        else:
            least_free = self.scheduler.coast(num_steps)
        counters.steps += num_steps
        counters.busy_ns += end_ns - coast.start_ns
        counters.computed_tokens += num_steps * coast.num_decodes
        counters.peak_blocks = max(counters.peak_blocks, self.scheduler.pool.num_blocks - 1 - least_free)

    def _perform_openly(self, coast: _Coast, num_steps: int) -> int:
        """With an event per step. Returns the least number of blocks that were free after one."""
        log = self._log
        start_ns = coast.start_ns
        least_free = self.scheduler.pool.num_blocks
        for index in range(num_steps):
            kv_tokens = coast.num_kv_tokens + index * coast.num_decodes
            duration_ns = self._timing.step_ns(0, coast.num_decodes, kv_tokens)
            log.now_ns, log.step = start_ns, coast.first_step + index
            least_free = min(least_free, self.scheduler.coast(1))
            self._log_step(coast.num_decodes, coast.num_decodes, duration_ns)
            start_ns += duration_ns
        return least_free

    # =========================================================================================================
    # Reports
    # =========================================================================================================

    def sample_again(self) -> bool:
        """`sample_usage` for the next of many samples, which is left out if nothing has changed for long. Returns
        whether it was told: idle time costs nothing."""
        values = self._usage()
        self._num_repeats = self._num_repeats + 1 if values == self._last_sample else 0
        if self._num_repeats > _REPEATS_TOLD:
            return False
        self._tell_usage(values)
        return True

    def sample_usage(self) -> None:
        """Emit the gauges and counters at this instant."""
        self._tell_usage(self._usage())

    def _usage(self) -> dict[str, int]:
        if not self.is_dead:
            self.catch_up()
        log, scheduler, counters = self._log, self.scheduler, self.counters
        log.now_ns = self._loop.now_ns
        pool = scheduler.pool
        values = {
            "running": len(scheduler.running),
            "waiting": scheduler.num_waiting + len(self._arrivals),
            "deferred": len(scheduler.deferred_waiting),
            "blocks": pool.num_blocks - 1 - pool.num_free,
            "peak_blocks": counters.peak_blocks,
            "steps": counters.steps,
            "busy_ns": counters.busy_ns,
            "computed_tokens": counters.computed_tokens,
            "loaded_tokens": counters.loaded_tokens,
            "preemptions": counters.preemptions + scheduler.num_preemptions,
            "num_gpu_blocks": pool.num_blocks,
        }
        if self._acceptance is not None:
            values.update(self._acceptance.counters.usage())
        if self.more_usage is not None:
            values.update(self.more_usage())
        return values

    def _tell_usage(self, values: Mapping[str, int]) -> None:
        self._last_sample = values
        for name, value in values.items():
            self._log.usage(name, value)
        self.tell_evictions()

    def tell_evictions(self) -> None:
        """Those since they were told last; an incarnation's last ones when another follows it."""
        log = self._log
        log.now_ns = self._loop.now_ns
        evicted = list(self.scheduler.pool.evicted_by_group)
        told = self._evicted_reported or [0] * len(evicted)
        log.evicted_by_group([now - before for now, before in zip(evicted, told, strict=True)], "capacity")
        self._evicted_reported = evicted
