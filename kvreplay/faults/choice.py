"""Which conversations (for an action: requests) one fault hits."""

from collections.abc import Mapping

from kvreplay.events import Event
from kvreplay.faults.patterns import EventPattern, Moment
from kvreplay.faults.spec import Fault
from kvreplay.sim.rng import decides, stable_hash


class Choice:
    """Decides key after key. The luck of a key is a hash: it depends on no other fault and on no other key."""

    def __init__(self, fault: Fault, seed: int) -> None:
        self._p = fault.p
        self._nth = fault.nth
        self._left = fault.count
        self._identity = (seed, fault.name, fault.id)
        self._num_seen = 0

    def decide(self, key: str, occurrence: int = 0) -> bool:
        """To be asked once per key and occurrence, in the order in which they come."""
        self._num_seen += 1
        if self._left == 0 or (self._nth is not None and self._num_seen not in self._nth):
            return False
        if self._p is not None and not decides(self._p, *self._identity, key, occurrence):
            return False
        if self._left is not None:
            self._left -= 1
        return True

    def draw(self, key: str, occurrence: int = 0) -> int:
        """64 random bits for what the fault does to this key."""
        return stable_hash(*self._identity, key, occurrence, "draw")


class Window:
    """The time from `after` to `until` in which a fault begins to hit. Events open and close it."""

    __slots__ = ("_after", "_from_ns", "_until", "_until_ns")

    def __init__(self, after: Moment | None, until: Moment | None) -> None:
        self._after = after if isinstance(after, EventPattern) else None
        self._until = until if isinstance(until, EventPattern) else None
        self._from_ns = after if isinstance(after, int) else (0 if after is None else None)
        self._until_ns = until if isinstance(until, int) else None

    @property
    def patterns(self) -> list[EventPattern]:
        return [pattern for pattern in (self._after, self._until) if pattern is not None]

    def __contains__(self, now_ns: object) -> bool:
        assert isinstance(now_ns, int)
        return (
            self._from_ns is not None
            and self._from_ns <= now_ns
            and (self._until_ns is None or now_ns < self._until_ns)
        )

    def observe(self, event: Event, serving: Mapping[str, str]) -> None:
        if self._from_ns is None and self._after is not None and self._after.matches(event, serving=serving):
            self._from_ns = event.time_ns
        if self._until_ns is None and self._until is not None and self._until.matches(event, serving=serving):
            self._until_ns = event.time_ns
