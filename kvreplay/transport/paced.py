"""An event loop beside sockets and pipes, and the pace at which its virtual time goes on.

Time goes as far as it is granted, and nobody grants more while a message is on its way (`transport.traffic`): timers
run at their own instant, and what comes from outside arrives at that of the grant, however slow the machine is. Where
several processes share a clock they take turns: what comes to one waits for its next turn, and then arrives in an order
that does not depend on which socket was faster.
The wall clock is read here, by the processes' supervisor, and by what hangs up on strangers; nowhere else.
"""

from collections.abc import Callable
from mmap import mmap
from operator import itemgetter
from time import monotonic
from typing import Any, Final, Protocol, TypeAlias

from kvreplay.ids import NS_PER_S
from kvreplay.sim.event_loop import Action, EventLoop

Place: TypeAlias = tuple[int, str, int, str, bytes] | tuple[()]
"""Among what arrives together; () goes first."""
Source: TypeAlias = Any
"""A ZeroMQ socket, a file descriptor, or what has a `fileno`."""

INSTANT_BYTES: Final = 8
ANY_RANK: Final = 1 << 62
"""As low as an action of an instant can be ranked."""
_MAX_STEPS: Final = 2000
"""Actions between two looks at the sockets."""


class Pace:
    """`scale` virtual seconds pass in a real one, at least: what is late does not wait."""

    def __init__(self, scale: float) -> None:
        assert scale > 0
        self._scale = scale
        self._start_s = monotonic()

    def seconds_until(self, time_ns: int) -> float:
        """Real seconds until that virtual instant; none if it has passed."""
        return max(0.0, self._start_s + time_ns / (self._scale * NS_PER_S) - monotonic())


class Instant(Protocol):
    """One number, at index 0."""

    def __getitem__(self, index: int, /) -> int: ...
    def __setitem__(self, index: int, value: int, /) -> None: ...


def shared_instant(fd: int) -> Instant:
    """The instant in this file, of which a process that maps it, too, sees every change at once."""
    return memoryview(mmap(fd, INSTANT_BYTES)).cast("q")


class PacedLoop:
    """Drives an `EventLoop` as far as it is granted, and the sockets beside it.

    `clock`: what time it is, which several loops may share. `takes_turns`: it runs nothing before its `take_turn`, and
    keeps what comes meanwhile.
    """

    def __init__(self, loop: EventLoop, clock: Instant | None = None, *, takes_turns: bool = False) -> None:
        # Imported where sockets live: a run in virtual time needs none.
        import zmq

        self.loop = loop
        self._clock: Instant = [0] if clock is None else clock
        self._limit = (-1, 0) if takes_turns else (self._clock[0], ANY_RANK)
        """(time, rank) of the last action that may run."""
        self._kept: list[tuple[Place, Action]] | None = [] if takes_turns else None
        self._poller = zmq.Poller()
        self._in, self._out = int(zmq.POLLIN), int(zmq.POLLOUT)
        self._handlers: dict[Source, Callable[[], None]] = {}
        self._writers: dict[Source, Callable[[], None]] = {}

    def grant(self, time_ns: int, rank: int = ANY_RANK) -> None:
        """Let timers run up to this instant, and in it those that rank no lower than that."""
        self._clock[0] = max(self._clock[0], time_ns)
        self._limit = (self._clock[0], rank)

    def take_turn(self, rank: int) -> None:
        """The clock's instant has been granted by another loop that shares it. What has come since the last turn
        arrives."""
        self._limit = (self.clock_ns, rank)
        kept, self._kept = self._kept, []
        assert kept is not None
        kept.sort(key=itemgetter(0))  # of one place in order of arrival: one socket keeps it
        for _, action in kept:
            self.loop.call_at(self.clock_ns, action)

    @property
    def clock_ns(self) -> int:
        """Virtual time, at which what comes from outside arrives."""
        return self._clock[0]

    @property
    def is_due(self) -> bool:
        """There is something to run before anything else can come."""
        return self.loop.peek() <= self._limit

    @property
    def has_kept(self) -> bool:
        """Something has come that waits for the next turn."""
        return bool(self._kept)

    def arrive(self, action: Action, place: "Place" = ()) -> None:
        """Something has come from outside: `action` takes it, as the next thing that happens at this instant. Of what
        arrives together, the lower `place` goes first."""
        if self._kept is not None:
            self._kept.append((place, action))
            return
        loop = self.loop
        loop.call_at(max(loop.now_ns, self.clock_ns), action)

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

    def run_due(self) -> None:
        """Run what is due, but look at the sockets now and then (`is_due`: there is more)."""
        loop, limit = self.loop, self._limit
        for _ in range(_MAX_STEPS):
            if loop.peek() > limit:
                return
            loop.step()

    def turn(self, max_wait_s: float) -> None:
        """Run what is due, then take what has come, waiting for it no longer than that."""
        self.run_due()
        self.listen(0.0 if self.is_due else max_wait_s)

    def listen(self, wait_s: float) -> None:
        """Take what has come to the sockets; wait for it so long. Timers wait."""
        # Rounded up to whole ms: a little late is no harm.
        found = self._poller.poll(int(wait_s * 1000) + (wait_s > 0))
        # Whatever comes, it comes now.
        self.loop.now_ns = max(self.loop.now_ns, self.clock_ns)
        for source, events in found:
            if events & ~self._out and (handler := self._handlers.get(source)) is not None:
                handler()
            if events & self._out and (writer := self._writers.get(source)) is not None:
                writer()
