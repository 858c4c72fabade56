"""An event sink for tests."""

from kvreplay.events import DETAIL_BLOCKS, KINDS, Event


class ListSink:
    """Keeps events in a list, in the order in which they were reported."""

    def __init__(self, detail: int = DETAIL_BLOCKS) -> None:
        self.detail = detail
        self.events: list[Event] = []

    def emit(self, event: Event) -> int:
        assert event.kind in KINDS, event.kind
        self.events.append(event)
        return len(self.events) - 1
