"""What one fault has done: its `fault.injected` events and its line in the report."""

from collections.abc import Sequence
from typing import NamedTuple

from kvreplay.events import Event, EventSink
from kvreplay.faults.blame import Hits
from kvreplay.faults.spec import Fault

_NO_INSTANCE = ("client", "proxy", "")


class FaultStatistics(NamedTuple):
    """One fault of the plan: how often it fired (conversations or actions), and the requests it named."""

    spec: str
    fired: int
    requests: list[str]


class Record:
    """Counts firings and reports them. A request is named once per key (conversation)."""

    def __init__(self, fault: Fault, sink: EventSink) -> None:
        self._fault = fault
        self._sink = sink
        self._named: dict[str, dict[str | None, int]] = {}
        self.hits = Hits(fault)

    def fire(
        self,
        key: str,
        time_ns: int,
        request_ids: Sequence[str],
        *,
        instance: str | None = None,
        peer: str | None = None,
        transfer_ids: Sequence[str] = (),
    ) -> int:
        """Report what is new; returns the handle of the key's first event."""
        named = self._named.setdefault(key, {})
        aligned = len(transfer_ids) == len(request_ids)
        for index, request_id in enumerate(request_ids or [None]):
            if request_id in named:
                continue
            named[request_id] = self._sink.emit(
                Event(
                    "fault.injected",
                    time_ns,
                    instance=None if instance in _NO_INSTANCE else instance,
                    peer=None if peer in _NO_INSTANCE else peer,
                    request_id=request_id,
                    transfer_id=transfer_ids[index] if aligned and transfer_ids else None,
                    status=self._fault.name,
                    cause=self._fault.spec,
                )
            )
            self.hits.add(named[request_id], request_id, (instance, peer))
        return next(iter(named.values()))

    @property
    def statistics(self) -> FaultStatistics:
        requests = {request for named in self._named.values() for request in named if request is not None}
        return FaultStatistics(self._fault.spec, len(self._named), sorted(requests))
