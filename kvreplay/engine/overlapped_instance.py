"""An instance whose steps overlap (vLLM: EngineCore.step_with_batch_queue; `async_scheduling`).

While one step's forward pass runs, the next is already scheduled; it runs when that one is over. Then the first one's
output is taken in, and the one after the next scheduled. A step's work, connector work included, starts when its
forward pass does.
"""

from collections import deque
from typing import Any

from kvreplay.engine.agreement import beyond_known
from kvreplay.engine.instance import Instance
from kvreplay.engine.output import SchedulerOutput
from kvreplay.errors import EngineFatal


class OverlappedInstance(Instance):
    """Scheduled steps are in `_pipeline`, the one that runs first. It never coasts: there is always a step to come."""

    def __init__(self, *args: Any, **settings: Any) -> None:  # noqa: ANN401 - those of Instance
        super().__init__(*args, **settings)
        self._pipeline: deque[SchedulerOutput] = deque()
        self._disagreed: dict[str, None] = {}

    def kill(self, cause: str) -> None:
        self._pipeline.clear()
        super().kill(cause)

    def _step(self) -> None:
        """Schedule until enough steps are in flight. What then ends first goes on from there."""
        scheduler = self.scheduler
        while len(self._pipeline) < scheduler.config.max_concurrent_batches:
            self._drain_input()
            if not scheduler.has_requests:
                if not self._pipeline:
                    self._block_on_input()
                return
            self._log.step = scheduler.step + 1
            out = scheduler.schedule()
            self._note_blocks()
            self._pipeline.append(out)
            if self._model is not None:
                self._model.capture(out)
            if self._in_flight is None:
                self._run_first(progress=out.made_progress)
                if self._in_flight is None:
                    return  # a step without work: it is over, and the loop sleeps
            if not out.total_num_scheduled_tokens:
                return

    def _run_first(self, *, progress: bool) -> None:
        """The first step in the pipeline starts. `progress`: what comes after it may be another than it was."""
        out = self._in_flight = self._pipeline[0]
        duration_ns = self._run(out)
        if duration_ns is None:
            return
        if not duration_ns and not out.total_num_scheduled_tokens and len(self._pipeline) == 1:
            progress |= self._end_step(out)
            self._pipeline.clear()
            self._in_flight = None
            self._after_empty_step(progress=progress)
            return
        self._set_timer(self._loop.now_ns + duration_ns, self._finish_step)

    def _finish_step(self) -> None:
        self._timer = None
        out = self._in_flight
        assert out is not None
        assert out is self._pipeline[0]
        self._log.now_ns = self._loop.now_ns
        self._log.step = out.step
        try:
            self._end_step(out)
            self._pipeline.popleft()
            self._in_flight = None
            self._go_on()
        except EngineFatal as death:
            self._die(death)

    def _go_on(self) -> None:
        """The next step has been waiting for this one to end; the one after it is scheduled."""
        if self._pipeline:
            self._log.step = self._pipeline[0].step
            self._run_first(progress=True)
            if self._in_flight is None:
                return
        self._step()

    def _end_step(self, out: SchedulerOutput) -> bool:
        if self._findings is not None:
            for share in beyond_known(out, self.scheduler):
                if share.request.request_id not in self._disagreed:
                    self._disagreed[share.request.request_id] = None
                    self._findings.disagreement(self, share)
        return super()._end_step(out)
