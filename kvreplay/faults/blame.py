"""Which of a run's faults is most likely behind a finding: what each has hit, by request and by instance."""

from collections.abc import Iterable, Sequence

from kvreplay.faults.spec import Fault


class Hits:
    """The last `fault.injected` event of one fault for each request that it named, and at each instance."""

    def __init__(self, fault: Fault) -> None:
        self.target = fault.row.target
        self.lasts = fault.row.lasts
        self.of_request: dict[str, int] = {}
        self.at_instance: dict[str, int] = {}

    def add(self, handle: int, request_id: str | None, instances: Iterable[str | None]) -> None:
        if request_id is not None:
            self.of_request[request_id] = handle
        self.at_instance.update({instance: handle for instance in instances if instance is not None})


class Blame:
    """All faults of a plan, in its order. It knows nothing of the run but their events."""

    def __init__(self, faults: Sequence[Hits]) -> None:
        self._faults = faults

    def note(self, place: int, handle: int, request_id: str | None, instances: Iterable[str | None]) -> None:
        """An event that somebody else has emitted for the fault at this place of the plan."""
        self._faults[place].add(handle, request_id, instances)

    def of_request(self, request_id: str, targets: Sequence[str] = ()) -> int | None:
        """The handle of the last event that names this request: of a fault on the first of these kinds of message that
        has one, else of any."""
        named = [
            (fault.target, handle) for fault in self._faults if (handle := fault.of_request.get(request_id)) is not None
        ]
        for target in targets:
            if of_kind := [handle for of, handle in named if of == target]:
                return max(of_kind)
        return max((handle for _, handle in named), default=None)

    def lasting_at(self, instances: Iterable[str]) -> int | None:
        """The handle of an event at one of these instances: of the plan's first fault whose harm there lasts."""
        for fault in self._faults:
            for instance in instances if fault.lasts else ():
                if instance in fault.at_instance:
                    return fault.at_instance[instance]
        return None
