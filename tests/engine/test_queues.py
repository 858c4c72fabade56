"""The waiting queues: who comes first, and who is taken out."""

from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from kvreplay.engine.queues import PriorityQueue, RequestQueue, urgency
from kvreplay.engine.request import Request
from kvreplay.kv.content import Content


def a_request(number: int, priority: int = 0) -> Request:
    return Request(f"r{number}", cast(Content, None), num_prompt_tokens=8, max_tokens=1, priority=priority)


@given(st.lists(st.integers(0, 3), max_size=8), st.permutations(range(8)))
def test_who_is_taken_out_leaves_the_others_in_their_order(priorities: list[int], order: list[int]) -> None:
    requests = [a_request(number, priority) for number, priority in enumerate(priorities)]
    plain, urgent = RequestQueue(), PriorityQueue()
    plain.add_all(requests)
    urgent.add_all(requests)
    left = list(requests)
    for number in order:
        gone = requests[number] if number < len(requests) else a_request(number)  # the last were never in
        left = [request for request in left if request is not gone]
        plain.discard(gone)
        urgent.discard(gone)
        assert list(plain) == left
        assert list(urgent) == sorted(left, key=urgency)
