"""Deliveries that are held back until an event."""

from collections.abc import Callable, Mapping

from kvreplay.events import Event
from kvreplay.faults.patterns import SELF, EventPattern

Release = Callable[[], None]


class Holding:
    """What waits for one pattern. With `#self` each delivery waits for its own requests, else all go at once."""

    def __init__(self, pattern: EventPattern) -> None:
        self.pattern = pattern
        self._waiting: dict[int, Release] = {}
        self._of_request: dict[str, list[int]] = {}
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request_ids: tuple[str, ...], release: Release) -> None:
        self._waiting[self._num_added] = release
        if self.pattern.request == SELF:
            for request_id in request_ids:
                self._of_request.setdefault(request_id, []).append(self._num_added)
        self._num_added += 1

    def take(self, event: Event, serving: Mapping[str, str]) -> list[Release]:
        """Those that have waited for this event, in the order in which they came."""
        if not self.pattern.matches(event, serving=serving, own=self._of_request):
            return []
        if self.pattern.request != SELF:
            return self.take_all()
        numbers = self._of_request.pop(event.request_id or "", [])
        return [self._waiting.pop(number) for number in numbers if number in self._waiting]

    def take_all(self) -> list[Release]:
        released = list(self._waiting.values())
        self._waiting.clear()
        self._of_request.clear()
        return released
