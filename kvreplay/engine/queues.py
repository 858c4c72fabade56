"""The waiting queues (vLLM: v1/core/sched/request_queue.py)."""

from bisect import insort
from collections import deque
from contextlib import suppress

from kvreplay.engine.request import Request


class RequestQueue(deque[Request]):
    """First come, first served."""

    def add(self, request: Request) -> None:
        self.append(request)

    def add_all(self, requests: list[Request]) -> None:
        self.extend(requests)

    def peek(self) -> Request:
        return self[0]

    def take(self) -> Request:
        return self.popleft()

    def prepend(self, request: Request) -> None:
        self.appendleft(request)

    def prepend_all(self, requests: list[Request]) -> None:
        """Put requests in front, in their given order."""
        self.extendleft(reversed(requests))

    def discard(self, request: Request) -> None:
        """Take it out from wherever it stands, if it is there. Whoever ends in order of arrival is found in front."""
        with suppress(ValueError):
            self.remove(request)


class PriorityQueue(RequestQueue):
    """Smaller priorities first, then earlier arrivals, then ids. Nothing stays in front by being put there."""

    def add(self, request: Request) -> None:
        insort(self, request, key=urgency)

    def add_all(self, requests: list[Request]) -> None:
        for request in requests:
            self.add(request)

    def prepend(self, request: Request) -> None:
        self.add(request)

    def prepend_all(self, requests: list[Request]) -> None:
        self.add_all(requests)


def urgency(request: Request) -> tuple[int, int, str]:
    return request.priority, request.arrival_ns, request.request_id
