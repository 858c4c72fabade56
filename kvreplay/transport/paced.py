"""An event loop in paced real time, beside sockets and pipes: `scale` virtual seconds pass in a real one.

The only place, with the processes' supervisor, where the wall clock is read. Timers run at their own virtual instant,
however late the process is; what comes from outside arrives at the clock's, once every earlier timer has run.
"""

from collections.abc import Callable
from time import monotonic
from typing import Any, Final, TypeAlias

from kvreplay.ids import NS_PER_S
from kvreplay.sim.event_loop import FOREVER_NS, Action, EventLoop

Source: TypeAlias = Any
"""A ZeroMQ socket, a file descriptor, or what has a `fileno`."""

_MAX_STEPS: Final = 2000
"""Actions between two looks at the sockets."""


class PacedLoop:
    """Drives an `EventLoop`. Every process of a run has one, and all have the same start."""

    def __init__(self, loop: EventLoop, scale: float) -> None:
        # Imported where sockets live: a run in virtual time needs none.
        import zmq

        assert scale > 0
        self.loop = loop
        self.scale = scale
        self.num_arrived = 0
        """What has come from outside so far."""
        self._marked_s = monotonic()
        self._start_s: float | None = None
        self._poller = zmq.Poller()
        self._in, self._out = int(zmq.POLLIN), int(zmq.POLLOUT)
        self._handlers: dict[Source, Callable[[], None]] = {}
        self._writers: dict[Source, Callable[[], None]] = {}

    def start(self, start_s: float) -> None:
        """Virtual time is 0 at this reading of `monotonic`, which all processes of a machine share."""
        self._start_s = start_s

    @property
    def clock_ns(self) -> int:
        """Virtual time by the clock; 0 before the start."""
        if self._start_s is None:
            return 0
        return max(0, round((monotonic() - self._start_s) * self.scale * NS_PER_S))

    def seconds_until(self, time_ns: int) -> float:
        """Real seconds until that virtual instant."""
        return (time_ns - self.clock_ns) / (self.scale * NS_PER_S)

    def arrive(self, action: Action) -> None:
        """Something has come from outside: `action` takes it, as the next thing that happens at this instant."""
        loop = self.loop
        self.num_arrived += 1
        loop.call_at(max(loop.now_ns, self.clock_ns), action)

    def has_passed(self, seconds: float) -> bool:
        """Whether so many real seconds have passed since this was last true."""
        now_s = monotonic()
        if now_s - self._marked_s < seconds:
            return False
        self._marked_s = now_s
        return True

    # -- sockets ------------------------------------------------------------------------------------------

    def watch(self, source: Source, on_readable: Callable[[], None]) -> None:
        self._handlers[source] = on_readable
        self._register(source)

    def watch_writable(self, source: Source, on_writable: Callable[[], None] | None) -> None:
        """Call it whenever `source` takes more; None: it need not be asked any more."""
        if on_writable is None:
            self._writers.pop(source, None)
        else:
            self._writers[source] = on_writable
        self._register(source)

    def unwatch(self, source: Source) -> None:
        self._handlers.pop(source, None)
        self._writers.pop(source, None)
        self._register(source)

    def _register(self, source: Source) -> None:
        events = (self._in if source in self._handlers else 0) | (self._out if source in self._writers else 0)
        if events:
            self._poller.register(source, events)
        elif source in self._poller:
            self._poller.unregister(source)

    # -- running ------------------------------------------------------------------------------------------

    def turn(self, max_wait_s: float) -> None:
        """Run what is due, then wait for sockets or the next timer, but no longer than that."""
        is_behind = self._run_due()
        wait_s = max_wait_s
        if is_behind:
            wait_s = 0.0
        elif (next_ns := self.loop.peek_ns()) < FOREVER_NS and self._start_s is not None:
            wait_s = min(wait_s, max(0.0, self.seconds_until(next_ns)))
        self.listen(wait_s)

    def listen(self, wait_s: float) -> None:
        """Take what has come to the sockets; wait for it so long. Timers wait."""
        # Rounded up to whole ms: a timer that is late keeps its own instant.
        for source, events in self._poller.poll(int(wait_s * 1000) + (wait_s > 0)):
            if events & ~self._out and (handler := self._handlers.get(source)) is not None:
                handler()
            if events & self._out and (writer := self._writers.get(source)) is not None:
                writer()

    def _run_due(self) -> bool:
        """Whether there is more."""
        loop, clock_ns = self.loop, self.clock_ns
        for _ in range(_MAX_STEPS):
            if loop.peek_ns() > clock_ns:
                return False
            loop.step()
        return True
