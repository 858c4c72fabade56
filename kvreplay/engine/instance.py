"""One engine instance in virtual time: scheduler, worker model and connector under one clock (vLLM: EngineCore).

A step schedules at t0, its connector work starts at t0, and its end collects the workers' reports, applies aborts
that came meanwhile and updates the scheduler. A step without tokens takes no time, and then the loop sleeps 1 ms; when
its schedule changed nothing the instance parks, and wakes on that grid when something is there for it.

While nothing but decoding goes on the instance *coasts*: many steps are one action. What touches it first brings it
up to date (`catch_up`), with the step then in progress in flight.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvreplay.engine.connector import WorkerConnector
from kvreplay.engine.log import EngineLog
from kvreplay.engine.output import ModelRunnerOutput, RequestOutput, SchedulerOutput, Share
from kvreplay.engine.request import Request, RequestStatus
from kvreplay.engine.scheduler import Scheduler
from kvreplay.engine.suspects import WrongBlock
from kvreplay.engine.worker import LateWrite, WorkerModel
from kvreplay.errors import EngineFatal
from kvreplay.events import DETAIL_STEPS, Event
from kvreplay.ids import NS_PER_MS
from kvreplay.sim.event_loop import FOREVER_NS, EventLoop, Timer

POLL_NS = NS_PER_MS
"""The real loop sleeps this long after a step without tokens."""
_COAST_STEPS = 4096


class Timing(Protocol):
    """What a forward pass costs."""

    def step_ns(self, num_prefill_tokens: int, num_decodes: int, num_kv_tokens: int) -> int: ...

    def decode_run_ns(self, num_decodes: int, num_kv_tokens: int, num_steps: int) -> int: ...

    def num_decode_steps_within(self, num_decodes: int, num_kv_tokens: int, span_ns: int) -> int: ...


class Findings(Protocol):
    """Who is told what the worker model finds."""

    def wrong_block(self, instance: "Instance", wrong: WrongBlock) -> None: ...

    def late_write(self, instance: "Instance", late: LateWrite) -> None: ...

    def disagreement(self, instance: "Instance", share: Share) -> None:
        """The scheduler has given a request more tokens to compute than it has."""
        ...

    def idle(self, instance: "Instance") -> None:
        """The instance has nothing to do: a good moment to recount its pool."""
        ...


@dataclass(slots=True)
class Counters:
    """What an instance has done so far."""

    steps: int = 0
    busy_ns: int = 0
    computed_tokens: int = 0
    loaded_tokens: int = 0
    peak_blocks: int = 0
    preemptions: int = 0
    """Of earlier incarnations; the scheduler counts its own."""


@dataclass(slots=True)
class _Coast:
    """Decode-only steps in one go: `num_steps` from `first_step` on, starting at `start_ns`."""

    first_step: int
    start_ns: int
    num_decodes: int
    num_kv_tokens: int
    num_steps: int


class Instance:
    """`rank` orders instances that end a step at the same instant. `single_steps`: never coast (for tests).

    `counters`: those of the process that it replaces, to go on from.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        loop: EventLoop,
        scheduler: Scheduler,
        timing: Timing,
        log: EngineLog,
        *,
        workers: WorkerConnector | None = None,
        model: WorkerModel | None = None,
        findings: Findings | None = None,
        counters: Counters | None = None,
        single_steps: bool = False,
    ) -> None:
        assert rank > 0, "rank 0 is for messages"
        self.name = name
        self.scheduler = scheduler
        self.counters = counters if counters is not None else Counters()
        self.is_dead = False
        self.on_finished: Callable[[Request], None] | None = None
        self.on_death: Callable[[], None] | None = None
        self.more_usage: Callable[[], dict[str, int]] | None = None
        """What else is sampled with the instance's own gauges and counters."""
        self._rank = rank
        self._loop = loop
        self._timing = timing
        self._log = log
        self._workers = workers
        self._model = model
        if model is not None:
            model.on_late_write = self.catch_up
        self._findings = findings
        self._single_steps = single_steps
        self._arrivals: list[Request] = []
        self._aborts: list[str] = []
        self._preemptions: list[str] = []
        self._num_to_evict = 0
        self._resets: list[tuple[bool, bool, bool]] = []
        self._in_flight: SchedulerOutput | None = None
        self._coast: _Coast | None = None
        self._timer: Timer | None = None
        self._polls_from_ns: int | None = None
        """Start of the grid on which a parked instance polls; None: it is blocked on its input queue, or busy."""
        self._evicted_reported = 0
        self._raise_next: EngineFatal | None = None

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
    def reported_ns(self) -> int:
        """Every event of this instance before this instant has been emitted."""
        return self._coast.start_ns if self._coast is not None else self._loop.now_ns

    @property
    def is_idle(self) -> bool:
        return not self.num_requests and self._in_flight is None and self._coast is None

    def submit(self, request: Request) -> None:
        """A request reaches the instance's input queue."""
        assert not self.is_dead
        self._arrivals.append(request)
        self.poke()

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
        elif self._in_flight is None and self._timer is not None and self._timer.daemon:
            time_ns = self._timer.time_ns
            self._loop.cancel(self._timer)
            self._set_timer(time_ns, self._begin_step)
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

    def evict(self, num_blocks: int) -> None:
        """An action fault: before the next step, cached blocks that nobody holds lose their content, oldest first."""
        self._num_to_evict += num_blocks
        self.poke()

    def has_unfinished(self, request_id: str) -> bool:
        request = self.scheduler.requests.get(request_id)
        if request is not None:
            return not request.status.is_finished
        return any(arrival.request_id == request_id for arrival in self._arrivals)

    def die(self, death: EngineFatal) -> None:
        """An exception outside its steps ends the engine core."""
        if not self.is_dead:
            self._die(death)

    def kill(self, cause: str) -> None:
        """The process is gone: every live request on it fails, nothing is sent any more."""
        if self.is_dead:
            return
        self.catch_up()
        self._sync_clock()
        self.is_dead = True
        self._loop.cancel(self._timer)
        self._timer = None
        self._in_flight = None
        scheduler = self.scheduler
        live = [request for request in scheduler.requests.values() if not request.status.is_finished]
        # Who finished in the step that killed it never hears of that.
        unheard = [output.request for output in scheduler.unsent if output.finish_reason is not None]
        for request in [*unheard, *live, *self._arrivals]:
            if request.lockstep_since is not None:
                scheduler.lockstep.leave(request, scheduler.next_output_step)
            request.status = RequestStatus.FINISHED_ERROR
            self._log.failed(request, cause)
        self._arrivals.clear()
        if self.on_death is not None:
            self.on_death()

    # =========================================================================================================
    # Steps
    # =========================================================================================================

    def _set_timer(self, time_ns: int, action: Callable[[], None], *, daemon: bool = False) -> None:
        # Circles, and polls that only ask again, keep no run alive: nothing comes of them by themselves.
        self._timer = self._loop.call_at(
            time_ns, action, rank=self._rank, daemon=daemon or self.scheduler.is_livelocked
        )

    def _sync_clock(self) -> None:
        self._log.now_ns = self._loop.now_ns
        self._log.step = self.scheduler.step

    def _begin_step(self) -> None:
        self._timer = None
        self._polls_from_ns = None
        self._log.now_ns = self._loop.now_ns
        self._log.step = self.scheduler.step + 1
        try:
            self._step()
        except EngineFatal as death:
            self._die(death)

    def _step(self) -> None:
        scheduler = self.scheduler
        self._drain_input()
        if not scheduler.has_requests:
            self._block_on_input()
            return
        if not self._must_single_step and scheduler.can_coast and self._start_coast():
            return
        out = scheduler.schedule()
        self._in_flight = out  # a report that comes of the work itself must not wake whoever is awake
        duration_ns = 0
        if out.total_num_scheduled_tokens:
            duration_ns = self._timing.step_ns(out.num_prefill_tokens, out.num_decodes, out.num_kv_tokens)
        held_up_ns = self._start_work(out, duration_ns)
        if held_up_ns >= FOREVER_NS:
            return  # for good: it waits for a copy that never ends
        if not out.total_num_scheduled_tokens and not held_up_ns:
            progress = out.made_progress
            progress |= self._end_step(out)
            self._in_flight = None
            self._after_empty_step(progress=progress)
            return
        duration_ns += held_up_ns
        if out.total_num_scheduled_tokens:
            self._note_step(out, duration_ns)
        self._set_timer(self._loop.now_ns + duration_ns, self._finish_step)

    @property
    def _must_single_step(self) -> bool:
        return self._single_steps or (self._model is not None and self._model.must_recheck)

    def _drain_input(self) -> None:
        scheduler = self.scheduler
        if self._arrivals:
            arrivals, self._arrivals = self._arrivals, []
            for request in arrivals:
                if request.num_prompt_tokens >= scheduler.config.max_model_len:
                    self._log.rejected(request, f"prompt of {request.num_prompt_tokens} tokens: max_model_len exceeded")
                    if self.on_finished is not None:
                        self.on_finished(request)
                else:
                    scheduler.add_request(request)
        self._apply_aborts()
        if self._preemptions:
            preemptions, self._preemptions = self._preemptions, []
            for request_id in preemptions:
                scheduler.preempt(request_id)
        if self._num_to_evict:
            scheduler.evict_free(self._num_to_evict)
            self._num_to_evict = 0
        while self._resets:
            gpu, running, connector = self._resets.pop(0)
            if gpu:
                scheduler.reset_prefix_cache(reset_running=running, reset_connector=connector)
            elif connector:
                scheduler.reset_connector_cache()

    def _apply_aborts(self) -> None:
        if self._aborts:
            # Who is still in the input queue is aborted when it has been taken in (vLLM puts aborts into both queues).
            queued = {request.request_id for request in self._arrivals}
            aborts, self._aborts = self._aborts, [name for name in self._aborts if name in queued]
            for request in self.scheduler.finish_requests(aborts, RequestStatus.FINISHED_ABORTED):
                if self.on_finished is not None:
                    self.on_finished(request)

    def _start_work(self, out: SchedulerOutput, duration_ns: int) -> int:
        """Connector work starts with the step; what its shares compute is written at once. Returns how long the
        connector holds up the step; FOREVER_NS or more: for good."""
        held_up_ns = 0
        workers = self._workers if out.kv_connector_metadata is not None else None
        if workers is not None:
            workers.handle_preemptions(out.kv_connector_metadata)
        if self._model is not None:
            self._model.prepare(out)
        if workers is not None:
            now = self._loop.now_ns
            until_ns = workers.start_load_kv(out.kv_connector_metadata, now + duration_ns)
            held_up_ns = FOREVER_NS if until_ns >= FOREVER_NS else max(0, until_ns - now)
        if self._model is not None:
            self._model.execute(out)
        return held_up_ns

    def _note_step(self, out: SchedulerOutput, duration_ns: int) -> None:
        counters = self.counters
        counters.steps += 1
        counters.busy_ns += duration_ns
        counters.computed_tokens += out.total_num_scheduled_tokens
        pool = self.scheduler.pool
        counters.peak_blocks = max(counters.peak_blocks, pool.num_blocks - 1 - pool.num_free)
        if self._log.sink.detail >= DETAIL_STEPS:
            self._log_step(out.total_num_scheduled_tokens, len(out.shares) + out.num_lockstep, duration_ns)
            for share in out.shares:
                self._log.scheduled(share.request, share.num_tokens, share.start)

    def _log_step(self, num_tokens: int, num_requests: int, duration_ns: int) -> None:
        log = self._log
        log.sink.emit(
            Event(
                "step",
                log.now_ns,
                log.instance,
                log.step,
                num_tokens=num_tokens,
                num_blocks=num_requests,
                status=str(duration_ns),
            )
        )

    def _finish_step(self) -> None:
        self._timer = None
        out = self._in_flight
        assert out is not None
        self._in_flight = None
        self._log.now_ns = self._loop.now_ns
        self._log.step = out.step
        try:
            self._end_step(out)
            # The next step starts where this one ends, in the same action: what lands at this instant has landed.
            self._log.step = self.scheduler.step + 1
            self._step()
        except EngineFatal as death:
            self._die(death)

    def _end_step(self, out: SchedulerOutput) -> bool:
        """Collect, abort, update. Returns whether a report came in."""
        if self._raise_next is not None:
            raise self._raise_next
        reports = self._workers.get_finished(out.finished_req_ids) if self._workers is not None else None
        self._apply_aborts()
        outputs = self.scheduler.update_from_output(out, ModelRunnerOutput(reports))
        if reports is not None:
            self._note_loaded(reports.finished_recving)
        if out.has_sync_kv_loads:
            skipped = self.scheduler.skipped
            self.counters.loaded_tokens += sum(
                share.num_external_tokens for share in out.shares if share.request.request_id not in skipped
            )
        if self._model is not None:
            self._report_findings(out, outputs)
        if self.on_finished is not None:
            for output in outputs:
                if output.finish_reason is not None:
                    self.on_finished(output.request)
        return reports is not None

    def _note_loaded(self, finished_recving: list[str]) -> None:
        for request_id in finished_recving:
            request = self.scheduler.requests.get(request_id)
            if request is not None and request_id not in self.scheduler.failed_recving:
                self.counters.loaded_tokens += request.num_external_tokens

    def _report_findings(self, out: SchedulerOutput, outputs: list[RequestOutput]) -> None:
        model, findings = self._model, self._findings
        assert model is not None
        if findings is None or not model.has_findings:
            return
        emitted = [output.request.request_id for output in outputs if output.token_ids]
        wrong = model.commit(out.step, emitted, self.scheduler.skipped)
        for block in wrong:
            findings.wrong_block(self, block)
        if model.late_writes:
            late, model.late_writes = model.late_writes, []
            for write in late:
                findings.late_write(self, write)

    def _after_empty_step(self, *, progress: bool) -> None:
        """Sleep and poll again, or park until there is something to poll for."""
        if not self.scheduler.has_requests and not self._arrivals:
            self._block_on_input()
            return
        now = self._loop.now_ns
        # What is known to find nothing need not poll: the grid stays the same.
        progress = progress and not self.scheduler.has_nothing_to_do
        if progress or self._arrivals or self._aborts or (self._workers is not None and self._workers.has_report()):
            self._set_timer(now + POLL_NS, self._begin_step)
        elif self.scheduler.must_ask_again:
            self._set_timer(now + POLL_NS, self._begin_step, daemon=True)
        else:
            self._polls_from_ns = now

    def _block_on_input(self) -> None:
        self._polls_from_ns = None
        if self._findings is not None:
            self._findings.idle(self)

    def _die(self, death: EngineFatal) -> None:
        """The engine core dies of an exception, and takes every request with it."""
        self._sync_clock()
        self._log.crashed(death.exception, death.message)
        self.kill(f"engine dead: {death.exception}")

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

    def sample_usage(self) -> None:
        """Emit the gauges and counters at this instant."""
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
        if self.more_usage is not None:
            values.update(self.more_usage())
        for name, value in values.items():
            log.usage(name, value)
        log.evicted(pool.num_evicted - self._evicted_reported, 0, "capacity")
        self._evicted_reported = pool.num_evicted
