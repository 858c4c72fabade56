"""A protocol as a state machine without input or output, and its timers.

Messages and time go in, messages and the next deadline come out. What moves them is a driver's business.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Any, Protocol

from kvreplay.sim.envelope import Envelope
from kvreplay.sim.event_loop import FOREVER_NS


class StateMachine(Protocol):
    """One party to a protocol. Its driver sends `outbox` after every call, and empties it."""

    outbox: list[Envelope]

    @property
    def next_deadline_ns(self) -> int:
        """When `on_deadline` wants to be called next; `FOREVER_NS`: nothing is waited for."""
        ...

    @property
    def has_report(self) -> bool:
        """Something is ready to be fetched by its owner."""
        ...

    def handle(self, envelope: Envelope, now_ns: int) -> None:
        """Take a message that has arrived."""
        ...

    def on_refused(self, envelope: Envelope, now_ns: int) -> None:
        """A message of its own found nobody at its destination."""
        ...

    def on_deadline(self, now_ns: int) -> None:
        """Do what has become due; too early a call does nothing."""
        ...


class Deadline:
    """One timer of a state machine."""

    __slots__ = ("action", "argument", "time_ns")

    def __init__(self, time_ns: int, action: Callable[[Any, int], None], argument: object) -> None:
        self.time_ns = time_ns
        self.action: Callable[[Any, int], None] | None = action
        self.argument = argument


class Deadlines:
    """The timers of one state machine, in order of (time, order of setting)."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Deadline]] = []
        self._sequence = count()
        self._num_live = 0

    def __len__(self) -> int:
        return self._num_live

    def at(self, time_ns: int, action: Callable[[Any, int], None], argument: object) -> Deadline:
        """Call `action(argument, now_ns)` at that time, unless cancelled."""
        deadline = Deadline(time_ns, action, argument)
        heappush(self._heap, (time_ns, next(self._sequence), deadline))
        self._num_live += 1
        return deadline

    def cancel(self, deadline: Deadline | None) -> None:
        """Take back `deadline`; nothing happens if it is None, has passed or was cancelled before."""
        if deadline is not None and deadline.action is not None:
            deadline.action = None
            deadline.argument = None  # it stays in the heap until its time comes, and must not keep things alive
            self._num_live -= 1

    @property
    def next_ns(self) -> int:
        heap = self._heap
        if not self._num_live:
            heap.clear()
            return FOREVER_NS
        while heap[0][2].action is None:
            heappop(heap)
        return heap[0][0]

    def fire(self, now_ns: int) -> None:
        """Run what is due, also what that makes due at once."""
        heap = self._heap
        while heap and heap[0][0] <= now_ns:
            deadline = heappop(heap)[2]
            action, argument = deadline.action, deadline.argument
            if action is not None:
                deadline.action = deadline.argument = None  # which may know its deadlines: no cycle is left behind
                self._num_live -= 1
                action(argument, now_ns)

    def clear(self) -> None:
        self._heap.clear()
        self._num_live = 0
