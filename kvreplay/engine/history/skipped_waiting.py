"""The waiting queues before requests that hold blocks had one of their own (vLLM before `kv_holding_waiting`).

Whoever is passed over goes to the front of one queue, with blocks or without, and that queue comes first: a request
that then does not fit stops the scan in front of loads that have finished.
"""

from kvreplay.behaviour import Behaviour
from kvreplay.engine.queues import RequestQueue, urgency
from kvreplay.engine.request import Request
from kvreplay.engine.scheduler import Scheduler


class SkippedWaitingScheduler(Scheduler):
    """`kv_holding_waiting` is `skipped_waiting` here."""

    def _must_scan_holding(self) -> bool:
        return bool(self.kv_holding_waiting)

    def _next_queue(self, *, scans_holding: bool) -> RequestQueue:
        skipped, waiting = self.kv_holding_waiting, self.waiting
        if not self._by_priority or not skipped or not waiting:
            return skipped or waiting
        return skipped if urgency(skipped.peek()) <= urgency(waiting.peek()) else waiting

    def _waits_with_holders(self, request: Request) -> bool:
        return True


def scheduler_kind(behaviour: Behaviour) -> type[Scheduler]:
    return SkippedWaitingScheduler if behaviour["waiting_model"] == "skipped_waiting" else Scheduler
