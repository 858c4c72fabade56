"""The waiting queues (vLLM: v1/core/sched/request_queue.py)."""

from bisect import insort
from collections import deque
from collections.abc import Iterable, Iterator

from kvreplay.engine.request import Request


class RequestQueue:
    """First come, first served."""

    def __init__(self) -> None:
        self._queue: deque[Request] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue)

    def add(self, request: Request) -> None:
        self._queue.append(request)

    def add_all(self, requests: list[Request]) -> None:
        self._queue.extend(requests)

    def peek(self) -> Request:
        return self._queue[0]

    def pop(self) -> Request:
        return self._queue.popleft()

    def prepend(self, request: Request) -> None:
        self._queue.appendleft(request)

    def prepend_all(self, requests: list[Request]) -> None:
        """Put requests in front, in their given order."""
        self._queue.extendleft(reversed(requests))

    def remove_all(self, requests: Iterable[Request]) -> None:
        gone = {request.request_id for request in requests}
        self._queue = deque(request for request in self._queue if request.request_id not in gone)


class PriorityQueue(RequestQueue):
    """Smaller priorities first, then earlier arrivals, then ids. Nothing stays in front by being put there."""

    def __init__(self) -> None:
        super().__init__()
        self._ordered: list[Request] = []

    def __len__(self) -> int:
        return len(self._ordered)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._ordered)

    def add(self, request: Request) -> None:
        insort(self._ordered, request, key=urgency)

    def add_all(self, requests: list[Request]) -> None:
        for request in requests:
            self.add(request)

    def peek(self) -> Request:
        return self._ordered[0]

    def pop(self) -> Request:
        return self._ordered.pop(0)

    def prepend(self, request: Request) -> None:
        self.add(request)

    def prepend_all(self, requests: list[Request]) -> None:
        self.add_all(requests)

    def remove_all(self, requests: Iterable[Request]) -> None:
        gone = {request.request_id for request in requests}
        self._ordered = [request for request in self._ordered if request.request_id not in gone]


def urgency(request: Request) -> tuple[int, int, str]:
    return request.priority, request.arrival_ns, request.request_id
