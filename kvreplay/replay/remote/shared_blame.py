"""Blame across processes: a finding in one may be the work of a fault that hit in another, or at the clients."""

from collections.abc import Callable, Iterable, Sequence

from kvreplay.events import Event, EventSink
from kvreplay.faults.blame import Blame, Hits
from kvreplay.faults.plan import FaultPlan


def handle_here(handle: int) -> int:
    """An event of the supervisor's, by its handle there, as an instance's process names it: its own count from 0."""
    return -1 - handle


def handle_there(handle: int, own: Sequence[int]) -> int:
    """And back: `own` are the supervisor's handles of the process's own events."""
    return -1 - handle if handle < 0 else own[handle]


class SharedBlame(Blame):
    """What the faults of a plan have hit anywhere, as the supervisor has told (`note`), with its handles.

    `local`: what they have hit in this process. Of that it has not been told at the same instant.
    """

    def __init__(self, plan: FaultPlan, local: Blame) -> None:
        super().__init__([Hits(fault) for fault in plan])
        self._local = local

    def of_request(self, request_id: str, targets: Sequence[str] = ()) -> int | None:
        handle = super().of_request(request_id, targets)
        return handle_here(handle) if handle is not None else self._local.of_request(request_id, targets)

    def lasting_at(self, instances: Iterable[str]) -> int | None:
        names = list(instances)
        handle = super().lasting_at(names)
        return handle_here(handle) if handle is not None else self._local.lasting_at(names)


class HitsToldSink:
    """Passes events on to another sink, and tells of every hit of a fault with its handle."""

    def __init__(self, sink: EventSink, tell: Callable[[Event, int], None]) -> None:
        self.detail = sink.detail
        self._sink = sink
        self._tell = tell

    def emit(self, event: Event) -> int:
        handle = self._sink.emit(event)
        if event.kind == "fault.injected":
            self._tell(event, handle)
        return handle
