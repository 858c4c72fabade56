"""Holding: who is let go by which event."""

from functools import partial

from kvreplay.events import Event
from kvreplay.faults.holding import Holding
from kvreplay.faults.patterns import parse_event_pattern


def settled(request_id: str) -> Event:
    return Event("pull.settled", 0, request_id=request_id)


def held(pattern: str, *deliveries: tuple[str, ...]) -> tuple[Holding, list[int]]:
    """A holding with these deliveries, by the requests that each names, and the log of what it lets go."""
    holding = Holding(parse_event_pattern(pattern))
    log: list[int] = []
    for number, request_ids in enumerate(deliveries):
        holding.add(request_ids, partial(log.append, number))
    return holding, log


def let_go(holding: Holding, event: Event) -> None:
    for release in holding.take(event, {}):
        release()


def test_an_event_lets_go_all_that_wait_for_it_in_order() -> None:
    holding, log = held("pull.settled", ("a",), ("b",), ())
    let_go(holding, Event("pull.sent", 0))
    assert len(holding) == 3
    let_go(holding, settled("x"))
    assert (log, len(holding)) == ([0, 1, 2], 0)


def test_self_lets_go_what_names_the_events_request_once() -> None:
    holding, log = held("pull.settled#self", ("a", "b"), ("b",), ("c",))
    let_go(holding, settled("b"))
    let_go(holding, settled("a"))
    let_go(holding, settled("x"))
    assert (log, len(holding)) == ([0, 1], 1)


def test_all_can_be_let_go_at_once() -> None:
    holding, _ = held("pull.settled#self", ("a",), ("b",))
    assert len(holding.take_all()) == 2
    assert holding.take(settled("a"), {}) == []
