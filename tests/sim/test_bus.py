"""Bus: delivery, interception, and what a crash takes with it."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from kvreplay.sim.bus import Bus, owner_of
from kvreplay.sim.envelope import Answer, Command, Delivery, Envelope
from kvreplay.sim.event_loop import EventLoop

Log = list[tuple[int, str]]


class FixedNetwork:
    def transit_ns(self, envelope: Envelope, now_ns: int) -> int:
        return 10


@dataclass
class ScriptedInterceptor:
    """Answers every message of kind `hit` with the same deliveries."""

    script: Callable[[Envelope], list[Delivery] | None]
    kinds: frozenset[str] = frozenset({"hit"})
    held: list[Callable[[], None]] = field(default_factory=list)

    def intercept(self, envelope: Envelope, now_ns: int) -> list[Delivery] | None:
        return self.script(envelope)

    def has_passed(self, kind: str, conversation: str) -> bool:
        return False

    def swallows(self, kind: str, conversation: str) -> bool:
        return False

    def hold(self, delivery: Delivery, release: Callable[[], None]) -> None:
        self.held.append(release)


def message(text: str, kind: str = "hit", source: str = "A/x", destination: str = "B/x") -> Envelope:
    return Envelope(kind=kind, source=source, destination=destination, payload=text)


@pytest.fixture
def bus() -> Bus:
    return Bus(EventLoop(), FixedNetwork())


@pytest.fixture
def log(bus: Bus) -> Log:
    arrived: Log = []
    bus.listen("B/x", lambda envelope: arrived.append((bus.loop.now_ns, envelope.payload)))
    return arrived


def test_a_message_arrives_after_the_networks_time(bus: Bus, log: Log) -> None:
    bus.post(message("hello"))
    bus.loop.run_until_quiescent()
    assert log == [(10, "hello")]


def test_an_address_that_nobody_listens_to_swallows_messages(bus: Bus, log: Log) -> None:
    bus.post(message("lost", destination="C/x"))
    bus.post(message("late"))
    bus.silence("B/x")
    bus.loop.run_until_quiescent()
    assert log == []


def test_an_address_has_one_listener(bus: Bus, log: Log) -> None:
    with pytest.raises(AssertionError, match=r"^address B/x is taken"):
        bus.listen("B/x", lambda envelope: None)


@pytest.mark.parametrize(
    ("deliveries", "arrivals"),
    [
        (lambda envelope: None, [(10, "a")]),
        (lambda envelope: [], []),
        (lambda envelope: [Delivery(envelope, 5)], [(15, "a")]),
        (lambda envelope: [Delivery(envelope), Delivery(envelope, 5)], [(10, "a"), (15, "a")]),
        (lambda envelope: [Delivery(message("b"))], [(10, "b")]),
    ],
    ids=["as usual", "dropped", "delayed", "duplicated", "replaced"],
)
def test_the_interceptor_decides_what_arrives(
    bus: Bus, log: Log, deliveries: Callable[[Envelope], list[Delivery] | None], arrivals: Log
) -> None:
    bus.interceptor = ScriptedInterceptor(deliveries)
    bus.post(message("a"))
    bus.loop.run_until_quiescent()
    assert log == arrivals


def test_kinds_that_no_fault_matches_bypass_the_interceptor(bus: Bus, log: Log) -> None:
    bus.interceptor = ScriptedInterceptor(lambda envelope: [])
    bus.post(message("a", kind="other"))
    bus.loop.run_until_quiescent()
    assert log == [(10, "a")]


@pytest.mark.parametrize(("released_ns", "arrives_ns"), [(3, 10), (30, 30)])
def test_a_held_message_arrives_when_released_but_not_before_its_bytes(
    bus: Bus, log: Log, released_ns: int, arrives_ns: int
) -> None:
    bus.interceptor = holder = ScriptedInterceptor(lambda envelope: [Delivery(envelope, 0, "some.event")])
    bus.post(message("a"))
    bus.loop.run_until_quiescent()
    assert log == []
    bus.loop.call_at(released_ns, holder.held[0])
    bus.loop.run_until_quiescent()
    assert log == [(arrives_ns, "a")]


@pytest.mark.parametrize("victim", ["A", "B"])
def test_a_cut_loses_what_is_on_the_way_and_nothing_sent_after_it(bus: Bus, log: Log, victim: str) -> None:
    bus.post(message("before"))
    bus.post(message("of others", source="C/x"))
    bus.cut(victim)
    bus.post(message("after"))
    bus.loop.run_until_quiescent()
    survivors = ["of others", "after"] if victim == "A" else ["after"]
    assert [text for _, text in log] == survivors


def test_a_cut_loses_a_held_message_of_the_old_connection(bus: Bus, log: Log) -> None:
    bus.interceptor = holder = ScriptedInterceptor(lambda envelope: [Delivery(envelope, 0, "some.event")])
    bus.post(message("a"))
    bus.cut("B")
    holder.held[0]()
    bus.loop.run_until_quiescent()
    assert log == []


def test_a_question_is_answered_late_or_never_as_faults_say(bus: Bus) -> None:
    bus.serve("B/ask", lambda envelope: Answer(payload=envelope.payload, delay_ns=1))
    question = message("q", destination="B/ask")
    assert bus.ask(question) == Answer("q", 1)
    bus.interceptor = ScriptedInterceptor(lambda envelope: [Delivery(envelope, 5)])
    assert bus.ask(question) == Answer("q", 6)
    bus.interceptor = ScriptedInterceptor(lambda envelope: [])
    assert bus.ask(question).never
    bus.interceptor = ScriptedInterceptor(lambda envelope: [Delivery(question, 0, "some.event")])
    assert bus.ask(question).never
    assert bus.ask(message("q", kind="other", destination="C/ask")).never


def test_a_command_says_whether_it_was_carried_out(bus: Bus) -> None:
    bus.control("B", lambda command: None)
    bus.control("C", lambda command: False)
    assert [bus.command(address, Command("crash")) for address in "ABC"] == [False, True, False]


def test_an_address_names_its_owner_first() -> None:
    assert [owner_of(address) for address in ("P0/mooncake/1", "client", "")] == ["P0", "client", ""]
