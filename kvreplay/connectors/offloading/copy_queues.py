"""One rank's copy streams in virtual time: three queues, each first in, first out (vLLM: cpu/gpu_worker.py).

A copy starts when the one before it in its queue is over, and when the compute stream is past what had been launched at
its submission. It reads its source and writes its destination at the moment at which it ends; then a completion event
is on its way to the worker. A worker asks for the events from the head of a queue on, so that one that is late hides
those behind it.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvreplay.connectors.offloading.config import OffloadingConfig
from kvreplay.connectors.offloading.structs import TransferJob
from kvreplay.connectors.offloading.worker import QUEUES, STORES, CopyResult
from kvreplay.ids import NS_PER_S, nanoseconds
from kvreplay.sim.envelope import COPY_DONE, Corruption, Envelope
from kvreplay.sim.event_loop import FOREVER_NS
from kvreplay.transport.machine import Deadline, Deadlines

MoveWords = Callable[[TransferJob, Sequence[Corruption]], bool]
"""Carries a copy out. False: what arrived is not what was sent."""


class CopyOrder(NamedTuple):
    """Payload of `copy.job`. Faults have the copy engine refuse it, or not have it over when it says so."""

    queue: str
    job: TransferJob
    is_refused: bool = False
    escapes_waits: bool = False


@dataclass(slots=True)
class _Copy:
    job: TransferJob
    queue: str
    start_ns: int
    duration_ns: int
    """FOREVER_NS: it never ends."""
    size_bytes: int
    escapes_waits: bool = False
    corruptions: Sequence[Corruption] = ()
    has_moved: bool = False
    is_good: bool = True
    result: CopyResult | None = None
    deadlines: list[Deadline] = field(default_factory=list)

    @property
    def end_ns(self) -> int:
        """FOREVER_NS also if one before it never ends."""
        return min(self.start_ns + self.duration_ns, FOREVER_NS)


class CopyQueues:
    """A state machine. `bounds_copies`: one that takes too long is given up, and its queue goes on.

    `announces`: whether an end is a message, which somebody may want to lose or change.
    """

    def __init__(
        self,
        config: OffloadingConfig,
        *,
        address: str,
        size_of: Callable[[TransferJob], int],
        move: MoveWords,
        bounds_copies: bool = False,
        announces: Callable[[], bool] = lambda: True,
    ) -> None:
        self.outbox: list[Envelope] = []
        self.now_ns = 0
        self.num_bytes = dict.fromkeys(QUEUES, 0)
        self.busy_ns = dict.fromkeys(QUEUES, 0)
        """What each queue has moved, and how long it took."""
        self._config = config
        self._address = address
        self._size_of = size_of
        self._move = move
        self._announces = announces
        self._latency_ns = nanoseconds(config.copy_latency)
        self._timeout_ns = nanoseconds(config.copy_timeout) if bounds_copies else None
        self._deadlines = Deadlines()
        self._queues: dict[str, deque[_Copy]] = {queue: deque() for queue in QUEUES}
        self._in_order = tuple(self._queues.values())
        self._copies: dict[int, _Copy] = {}

    # -- the state machine ------------------------------------------------------------------------------------

    @property
    def next_deadline_ns(self) -> int:
        return self._deadlines.next_ns

    @property
    def has_report(self) -> bool:
        """Whether the head of some queue is over."""
        stores, loads, sync_loads = self._in_order
        return bool(
            (stores and stores[0].result is not None)
            or (loads and loads[0].result is not None)
            or (sync_loads and sync_loads[0].result is not None)
        )

    def handle(self, envelope: Envelope, now_ns: int) -> None:
        """A completion event arrives. That of a copy that has been given up comes too late."""
        self.now_ns = now_ns
        result: CopyResult = envelope.payload
        copy = self._copies.get(result.job_id)
        if copy is not None and copy.result is None:
            self._settle(copy, result)

    def on_refused(self, envelope: Envelope, now_ns: int) -> None:
        pass

    def on_deadline(self, now_ns: int) -> None:
        self.now_ns = now_ns
        self._deadlines.fire(now_ns)

    # -- what the worker asks for -----------------------------------------------------------------------------

    def submit(self, queue: str, job: TransferJob, *, not_before_ns: int, escapes_waits: bool = False) -> None:
        """Append a copy. `not_before_ns`: when the compute stream is done with what has been launched."""
        copies = self._queues[queue]
        start_ns = max(self.now_ns, not_before_ns, copies[-1].end_ns if copies else 0)
        size_bytes = self._size_of(job)
        copy = _Copy(job, queue, start_ns, self._duration_ns(queue, size_bytes), size_bytes, escapes_waits)
        copies.append(copy)
        self._copies[job.job_id] = copy
        self._schedule(copy)

    def prolong(self, job_id: int, extra_ns: int) -> None:
        """The last one submitted to its queue takes longer than it should; FOREVER_NS: it never ends."""
        copy = self._copies[job_id]
        copy.duration_ns = min(copy.duration_ns + extra_ns, FOREVER_NS)
        self._cancel(copy)
        self._schedule(copy)

    def corrupt(self, job_id: int, corruptions: Sequence[Corruption]) -> None:
        self._copies[job_id].corruptions = corruptions

    def wait(self, job_ids: Collection[int]) -> int:
        """Bring these to their end, and what is before them. Returns when that is; FOREVER_NS if it never is.

        The words move now: nothing else writes these blocks while the caller waits.
        """
        until_ns = self.now_ns
        for copies in self._queues.values():
            awaited = [index for index, copy in enumerate(copies) if copy.job.job_id in job_ids and not copy.result]
            free_ns = self.now_ns
            for copy in list(copies)[: awaited[-1] + 1] if awaited else ():
                free_ns = max(free_ns, self._bring_to_end(copy, free_ns))
            until_ns = max(until_ns, free_ns)
        return until_ns

    def _bring_to_end(self, copy: _Copy, free_ns: int) -> int:
        """When it is over, for whoever waits. `free_ns`: when the one before it is, or is given up."""
        if copy.escapes_waits:
            if self._timeout_ns is not None and not copy.has_moved:
                self._give_up(copy, "not read before its blocks were given away")
            return self.now_ns
        if copy.end_ns < FOREVER_NS:
            self._move_words(copy)
            return copy.end_ns
        if self._timeout_ns is None:
            return FOREVER_NS
        if copy.duration_ns == FOREVER_NS:
            return min(copy.start_ns, free_ns) + self._timeout_ns + self._duration_ns(copy.queue, copy.size_bytes)
        self._move_words(copy)
        return free_ns + copy.duration_ns

    def take_finished(self) -> list[CopyResult]:
        finished: list[CopyResult] = []
        for copies in self._queues.values():
            while copies and copies[0].result is not None:
                copy = copies.popleft()
                del self._copies[copy.job.job_id]
                assert copy.result is not None
                finished.append(copy.result)
        return finished

    # -- copies -----------------------------------------------------------------------------------------------

    def _duration_ns(self, queue: str, size_bytes: int) -> int:
        config = self._config
        speed = config.store_bytes_per_s if queue == STORES else config.load_bytes_per_s
        return self._latency_ns + -(-size_bytes * NS_PER_S // speed)

    def _schedule(self, copy: _Copy) -> None:
        copy.deadlines = []
        end_ns = copy.end_ns
        if end_ns < FOREVER_NS:
            copy.deadlines.append(self._deadlines.at(end_ns, self._on_end, copy))
        if self._timeout_ns is not None and copy.start_ns < FOREVER_NS:
            copy.deadlines.append(self._deadlines.at(self._limit_ns(copy), self._on_timeout, copy))

    def _limit_ns(self, copy: _Copy) -> int:
        """When it is given up."""
        assert self._timeout_ns is not None
        return min(copy.start_ns + self._timeout_ns + self._duration_ns(copy.queue, copy.size_bytes), FOREVER_NS)

    def _on_end(self, copy: _Copy, now_ns: int) -> None:
        self._move_words(copy)
        self.num_bytes[copy.queue] += copy.size_bytes
        self.busy_ns[copy.queue] += copy.end_ns - copy.start_ns
        job, result = copy.job, _outcome(copy)
        if not self._announces():
            self._settle(copy, result)
            return
        self.outbox.append(
            Envelope(
                kind=COPY_DONE,
                source=self._address,
                destination=self._address,
                payload=result,
                request_ids=(job.req_id,),
                conversation=conversation_of(self._address, job),
                reply_index=1,
            )
        )
        if job.is_sync and self._timeout_ns is not None:
            # The step that waits for it sees how it ended, whatever becomes of the event.
            copy.deadlines.append(self._deadlines.at(now_ns + 1, self._on_unheard, copy))

    def _on_unheard(self, copy: _Copy, now_ns: int) -> None:
        if copy.result is None:
            self._settle(copy, _outcome(copy))

    def _move_words(self, copy: _Copy) -> None:
        if not copy.has_moved:
            copy.has_moved = True
            copy.is_good = self._move(copy.job, copy.corruptions)

    def _on_timeout(self, copy: _Copy, now_ns: int) -> None:
        """Too long: it is given up before it has moved anything, or its completion event has been lost."""
        if copy.result is None:
            self._give_up(copy, "copy timed out")
            self._move_up(copy.queue, now_ns)

    def _give_up(self, copy: _Copy, cause: str) -> None:
        copy.has_moved = True
        self._settle(copy, CopyResult(copy.job.job_id, False, cause, copy.queue))

    def _move_up(self, queue: str, now_ns: int) -> None:
        """Those behind one that has been given up start now, one after another."""
        previous_ns = now_ns
        for copy in self._queues[queue]:
            if copy.result is None and copy.end_ns > now_ns:
                self._cancel(copy)
                copy.start_ns = previous_ns
                previous_ns = copy.end_ns
                self._schedule(copy)

    def _settle(self, copy: _Copy, result: CopyResult) -> None:
        copy.result = result
        self._cancel(copy)

    def _cancel(self, copy: _Copy) -> None:
        for deadline in copy.deadlines:
            self._deadlines.cancel(deadline)


def _outcome(copy: _Copy) -> CopyResult:
    """Of one that has moved its words."""
    return CopyResult(copy.job.job_id, copy.is_good, None if copy.is_good else "checksum mismatch", copy.queue)


def conversation_of(address: str, job: TransferJob) -> str:
    """A job on one rank is one conversation."""
    return f"{address}/job/{job.job_id}"
