"""EventLoop: order, cancelling, and what keeps a run alive."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvreplay.sim.event_loop import FOREVER_NS, EventLoop

Log = list[tuple[int, str]]


def note(loop: EventLoop, log: Log, what: str) -> Callable[[], None]:
    return lambda: log.append((loop.now_ns, what))


@pytest.fixture
def loop() -> EventLoop:
    return EventLoop()


def test_actions_run_by_time_and_at_one_instant_by_order_of_scheduling(loop: EventLoop) -> None:
    log: Log = []
    for time_ns, name in [(5, "c"), (1, "a"), (5, "d"), (3, "b")]:
        loop.call_at(time_ns, note(loop, log, name))
    assert loop.run_until_quiescent()
    assert log == [(1, "a"), (3, "b"), (5, "c"), (5, "d")]


def test_an_action_scheduled_for_now_runs_after_those_of_this_instant(loop: EventLoop) -> None:
    log: Log = []

    def schedule() -> None:
        loop.call_later(0, note(loop, log, "later"))

    loop.call_at(2, schedule)
    loop.call_at(2, note(loop, log, "sooner"))
    loop.run_until_quiescent()
    assert log == [(2, "sooner"), (2, "later")]


def test_a_cancelled_action_never_runs_and_does_not_keep_the_run_alive(loop: EventLoop) -> None:
    log: Log = []
    timer = loop.call_later(7, note(loop, log, "never"))
    loop.cancel(timer)
    loop.cancel(timer)
    loop.cancel(None)
    assert loop.num_live == 0
    assert loop.peek_ns() == FOREVER_NS
    assert loop.run_until_quiescent()
    assert (log, loop.now_ns) == ([], 0)


def test_daemons_run_only_as_long_as_something_else_is_pending(loop: EventLoop) -> None:
    log: Log = []

    def beat() -> None:
        log.append((loop.now_ns, "beat"))
        loop.call_later(10, beat, daemon=True)

    loop.call_later(10, beat, daemon=True)
    loop.call_at(25, note(loop, log, "work"))
    assert loop.run_until_quiescent()
    assert log == [(10, "beat"), (20, "beat"), (25, "work")]


def test_a_bounded_run_stops_before_what_lies_behind_the_bound(loop: EventLoop) -> None:
    log: Log = []
    for time_ns in (10, 20, 30):
        loop.call_at(time_ns, note(loop, log, "x"))
    assert not loop.run_until_quiescent(20)
    assert log == [(10, "x"), (20, "x")]
    assert loop.run_until_quiescent()


def test_scheduling_in_the_past_is_a_bug_of_the_caller(loop: EventLoop) -> None:
    loop.call_at(5, lambda: None)
    loop.run_until_quiescent()
    with pytest.raises(AssertionError, match=r"^cannot schedule 2 ns in the past"):
        loop.call_at(3, lambda: None)


@given(st.lists(st.tuples(st.integers(0, 50), st.booleans()), max_size=40))
def test_whatever_is_not_cancelled_runs_once_in_stable_order(plan: list[tuple[int, bool]]) -> None:
    loop = EventLoop()
    log: Log = []
    timers = [loop.call_at(time_ns, note(loop, log, f"{index:02}")) for index, (time_ns, _) in enumerate(plan)]
    for timer, (_, keep) in zip(timers, plan, strict=True):
        if not keep:
            loop.cancel(timer)
    assert loop.run_until_quiescent()
    assert log == sorted((time_ns, f"{index:02}") for index, (time_ns, keep) in enumerate(plan) if keep)
    assert loop.num_live == 0
