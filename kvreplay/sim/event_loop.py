"""The clock and the event queue: all of kvreplay's time passes here."""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import TypeAlias

Action: TypeAlias = Callable[[], None]

FOREVER_NS = 1 << 62
"""Later than any instant of a run."""


class Timer:
    """A scheduled action that can be taken back."""

    __slots__ = ("action", "daemon", "time_ns")

    def __init__(self, time_ns: int, action: Action | None, daemon: bool) -> None:  # noqa: FBT001 - internal
        self.time_ns = time_ns
        self.action = action
        self.daemon = daemon


class EventLoop:
    """Runs actions in order of (time, rank, order of scheduling). Never waits, never reads a clock.

    *Daemon* actions (heartbeats, polls, endless retries) do not keep a run alive: when nothing else is left,
    nothing can change any more, and whatever is unfinished has stalled.
    """

    def __init__(self) -> None:
        self.now_ns = 0
        self._queue: list[tuple[int, int, int, Timer]] = []
        self._sequence = count()
        self._num_live = 0
        self.num_run = 0

    @property
    def num_live(self) -> int:
        """Pending actions that are no daemons."""
        return self._num_live

    def call_at(self, time_ns: int, action: Action, *, daemon: bool = False, rank: int = 0) -> Timer:
        """Run `action` at that time. Among actions of one instant a lower `rank` goes first, whenever it was set:
        what lands while a step ends is seen by that step, however the step came to be scheduled."""
        assert time_ns >= self.now_ns, f"cannot schedule {self.now_ns - time_ns} ns in the past"
        timer = Timer(time_ns, action, daemon)
        heappush(self._queue, (time_ns, rank, next(self._sequence), timer))
        if not daemon:
            self._num_live += 1
        return timer

    def call_later(self, delay_ns: int, action: Action, *, daemon: bool = False) -> Timer:
        return self.call_at(self.now_ns + delay_ns, action, daemon=daemon)

    def cancel(self, timer: Timer | None) -> None:
        """Take back `timer`; nothing happens if it is None, has run or was cancelled before."""
        if timer is not None and timer.action is not None:
            timer.action = None
            if not timer.daemon:
                self._num_live -= 1

    def peek_ns(self) -> int:
        """When the next action runs; `FOREVER_NS` if there is none."""
        queue = self._queue
        while queue and queue[0][3].action is None:
            heappop(queue)
        return queue[0][0] if queue else FOREVER_NS

    def peek(self) -> tuple[int, int]:
        """(time, rank) of the next action; later than any if there is none."""
        time_ns = self.peek_ns()
        return (time_ns, self._queue[0][1]) if self._queue else (time_ns, 0)

    def step(self) -> None:
        """Jump to the next action's time, and run it."""
        while True:
            time_ns, _, _, timer = heappop(self._queue)
            action = timer.action
            if action is not None:
                break
        timer.action = None
        if not timer.daemon:
            self._num_live -= 1
        self.now_ns = time_ns
        self.num_run += 1
        action()

    def run_until_quiescent(self, until_ns: int | None = None, *, max_actions: int | None = None) -> bool:
        """Run until only daemons are left; True then. False if the next action lies after `until_ns`, or after
        `max_actions` actions."""
        queue = self._queue
        budget = max_actions if max_actions is not None else FOREVER_NS
        while self._num_live:
            if not budget or (until_ns is not None and self.peek_ns() > until_ns):
                return False
            budget -= 1
            # `step` without a call, which is most of what it does.
            while True:
                time_ns, _, _, timer = heappop(queue)
                action = timer.action
                if action is not None:
                    break
            timer.action = None
            if not timer.daemon:
                self._num_live -= 1
            self.now_ns = time_ns
            self.num_run += 1
            action()
        return True
