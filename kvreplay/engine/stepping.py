"""The steps of one engine instance: scheduler, worker model and connector under one clock (vLLM: EngineCore.step).

A step schedules at t0, its connector work starts at t0, and its end collects the workers' reports, applies aborts
that came meanwhile and updates the scheduler. A step without tokens takes no time, and then the loop sleeps 1 ms; when
its schedule changed nothing the instance parks, and wakes on that grid when something is there for it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvreplay.engine.acceptance import SyntheticAcceptance
from kvreplay.engine.connector import WorkerConnector
from kvreplay.engine.connector_memory import LateWrite
from kvreplay.engine.log import EngineLog
from kvreplay.engine.output import ModelRunnerOutput, RequestOutput, SchedulerOutput, Share
from kvreplay.engine.request import Request, RequestStatus
from kvreplay.engine.scheduler import Scheduler
from kvreplay.engine.suspects import WrongBlock
from kvreplay.engine.worker import WorkerModel
from kvreplay.errors import EngineFatal
from kvreplay.events import DETAIL_STEPS, Event
from kvreplay.ids import NS_PER_MS
from kvreplay.sim.event_loop import FOREVER_NS, EventLoop, Timer

POLL_NS = NS_PER_MS
"""The real loop sleeps this long after a step without tokens."""


class Timing(Protocol):
    """What a forward pass costs."""

    def step_ns(self, num_prefill_tokens: int, num_decodes: int, num_kv_tokens: int) -> int: ...

    def decode_run_ns(self, num_decodes: int, num_kv_tokens: int, num_steps: int) -> int: ...

    def num_decode_steps_within(self, num_decodes: int, num_kv_tokens: int, span_ns: int) -> int: ...


class Findings(Protocol):
    """Who is told what the worker model finds."""

    def wrong_block(self, instance: "SteppingInstance", wrong: WrongBlock) -> None: ...

    def late_write(self, instance: "SteppingInstance", late: LateWrite) -> None: ...

    def disagreement(self, instance: "SteppingInstance", share: Share) -> None:
        """The scheduler has given a request more tokens to compute than it has."""
        ...

    def idle(self, instance: "SteppingInstance") -> None:
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


class SteppingInstance:
    """Takes one step after the other. `Instance` builds on it what others call, and takes many steps at once.

    `rank` orders instances that end a step at the same instant. `single_steps`: never coast (for tests).
    `counters`: those of the process that it replaces, to go on from. `acceptance`: what becomes of drafts, where the
    scheduler speculates.
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
        acceptance: SyntheticAcceptance | None = None,
        single_steps: bool = False,
    ) -> None:
        assert rank > 0, "rank 0 is for messages"
        self.name = name
        self.scheduler = scheduler
        self.counters = counters if counters is not None else Counters()
        self.is_dead = False
        self.is_hung = False
        """Its step waits for a copy that never ends: it takes nothing in any more."""
        self.is_asleep = False
        """It has overlooked that there is something to do, and will until something comes."""
        self.on_finished: Callable[[Request], None] | None = None
        self.on_lost: Callable[[Request], None] | None = None
        """Told of each request that goes down with the process."""
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
        self._acceptance = acceptance
        self._drafting_ns = scheduler.speculation.drafting_ns if scheduler.speculation is not None else 0
        self._single_steps = single_steps
        self._arrivals: list[Request] = []
        self._aborts: list[str] = []
        self._preemptions: list[str] = []
        self._num_to_evict = 0
        self._resets: list[tuple[bool, bool, bool]] = []
        self._in_flight: SchedulerOutput | None = None
        self._timer: Timer | None = None
        self._polls_from_ns: int | None = None
        """Start of the grid on which a parked instance polls; None: it is blocked on its input queue, or busy."""
        self._raise_next: EngineFatal | None = None

    def catch_up(self) -> None:
        """Bring the instance to this instant: step by step it is there already."""

    def _start_coast(self) -> bool:
        """Take the next steps in one go. False: the next one is to be taken by itself."""
        return False

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
            if self.on_lost is not None:
                self.on_lost(request)
        self._arrivals.clear()
        if self.on_death is not None:
            self.on_death()

    # =========================================================================================================
    # Steps
    # =========================================================================================================

    def _set_timer(self, time_ns: int, action: Callable[[], None], *, daemon: bool = False) -> None:
        # Circles, and polls that only ask again, keep no run alive: nothing comes of them by themselves.
        daemon |= self.scheduler.is_livelocked and not self._circles_may_end
        self._timer = self._loop.call_at(time_ns, action, rank=self._rank, daemon=daemon)

    @property
    def _circles_may_end(self) -> bool:
        """Whether something has come from outside: requests, aborts, or a report that gives blocks back, or brings what
        somebody else is parked for."""
        if self._arrivals or self._aborts or self._preemptions or self._resets:
            return True
        workers = self._workers
        if workers is None:
            return False
        return workers.gives_back() or (workers.has_report() and self.scheduler.may_hear_of_bystanders)

    def _sync_clock(self) -> None:
        self._log.now_ns = self._loop.now_ns
        self._log.step = self.scheduler.step

    def _begin_step(self) -> None:
        self._timer = None
        self.is_asleep = False
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
        self._note_blocks()
        self._in_flight = out  # a report that comes of the work itself must not wake whoever is awake
        duration_ns = self._run(out)
        if duration_ns is None:
            return
        if not duration_ns and not out.total_num_scheduled_tokens:
            progress = out.made_progress
            progress |= self._end_step(out)
            self._in_flight = None
            self._after_empty_step(progress=progress)
            return
        self._set_timer(self._loop.now_ns + duration_ns, self._finish_step)

    def _run(self, out: SchedulerOutput) -> int | None:
        """The step begins. Returns how long it takes, 0 if there is nothing to compute or to wait for; None: it never
        ends."""
        duration_ns = 0
        if out.total_num_scheduled_tokens:
            duration_ns = self._forward_pass_ns(out)
        held_up_ns = self._start_work(out, duration_ns)
        if held_up_ns >= FOREVER_NS:
            self.is_hung = True
            return None
        duration_ns += held_up_ns
        if out.total_num_scheduled_tokens:
            self._note_step(out, duration_ns)
        return duration_ns

    @property
    def _must_single_step(self) -> bool:
        return self._single_steps or (self._model is not None and self._model.must_recheck)

    def _drain_input(self) -> None:
        scheduler = self.scheduler
        if self._arrivals:
            arrivals, self._arrivals = self._arrivals, []
            for request in arrivals:
                if request.num_prompt_tokens >= scheduler.config.max_model_len:
                    self._log.rejected(request, f"max_model_len of {scheduler.config.max_model_len} exceeded")
                    scheduler.release_unseen(request)
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

    def _forward_pass_ns(self, out: SchedulerOutput) -> int:
        """What the model computes, and its drafter."""
        model_ns = self._timing.step_ns(out.num_prefill_tokens, out.num_decodes, out.num_kv_tokens)
        if out.num_drafter_tokens:
            model_ns += self._drafter_prefill_ns(out.num_drafter_tokens)
        return model_ns if out.skip_drafts else model_ns + self._drafting_ns

    def _drafter_prefill_ns(self, num_tokens: int) -> int:
        """A pass of the drafter over prompts: per token as much less than the model's as its KV takes less room."""
        speculation, groups = self.scheduler.speculation, self.scheduler.kv.groups
        assert speculation is not None
        own = sum(group.bytes_per_token for group in groups if group.drafter_only)
        models = sum(group.bytes_per_token for group in groups) - own
        model_ns = self._timing.step_ns(num_tokens, 0, 0) - self._timing.step_ns(0, 0, 0)
        return speculation.draft_pass_ns + model_ns * own // max(models, 1)

    def _start_work(self, out: SchedulerOutput, duration_ns: int) -> int:
        """Connector work starts with the step; what its shares compute is written at once. Returns how long the
        connector holds up the step; FOREVER_NS or more: for good."""
        held_up_ns = 0
        if self._acceptance is not None:
            out.num_accepted = self._acceptance.verify(out.shares)
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

    def _note_blocks(self) -> None:
        """Most blocks are in use when a step has been scheduled, also one that only takes them for a load."""
        pool, counters = self.scheduler.pool, self.counters
        in_use = pool.num_blocks - 1 - pool.num_free
        if in_use > counters.peak_blocks:
            counters.peak_blocks = in_use

    def _note_step(self, out: SchedulerOutput, duration_ns: int) -> None:
        counters = self.counters
        counters.steps += 1
        counters.busy_ns += duration_ns
        counters.computed_tokens += out.total_num_scheduled_tokens
        if self._log.sink.detail >= DETAIL_STEPS:
            self._log_step(out.total_num_scheduled_tokens, len(out.shares) + out.num_lockstep, duration_ns)
            for share in out.shares:
                self._log.scheduled(share)

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
        loaded = [] if reports is None else self._newly_loaded(reports.finished_recving)
        outputs = self.scheduler.update_from_output(out, ModelRunnerOutput(reports, out.num_accepted))
        if self._acceptance is not None and not self.scheduler.config.async_scheduling:
            self.scheduler.take_drafts(out)
        if loaded:
            self._note_loaded(loaded)
        if self.scheduler.rules.sleeps_after_failed_load:
            self.is_asleep = reports is not None and bool(reports.failed_recving or reports.invalid_block_ids)
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

    def _newly_loaded(self, finished_recving: list[str]) -> list[str]:
        """Without those who have been reported before, by another child of a MultiConnector."""
        return [request_id for request_id in finished_recving if request_id not in self.scheduler.finished_recving]

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
        if (not self.scheduler.has_requests or self.is_asleep) and not self._arrivals:
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
