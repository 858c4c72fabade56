"""Messages to addresses where nobody listens yet."""

from kvreplay.sim.bus import Bus
from kvreplay.sim.envelope import Envelope
from kvreplay.sim.event_loop import EventLoop
from kvreplay.transport.undelivered import Undelivered


def message(conversation: str = "c") -> Envelope:
    return Envelope(kind="pull.request", source="D", destination="P", payload=None, conversation=conversation)


class Kept:
    def __init__(self) -> None:
        self.loop = EventLoop()
        self.bus = Bus(self.loop)
        self.closed: set[str] = set()
        self.arrived: list[str] = []
        self.undelivered = Undelivered(self.bus, lambda envelope: envelope.conversation not in self.closed)

    def listen(self) -> None:
        self.bus.listen("P", lambda envelope: self.arrived.append(envelope.conversation))
        self.loop.run_until_quiescent()


def test_they_arrive_when_somebody_does() -> None:
    kept = Kept()
    for name in ("a", "b"):
        kept.undelivered.keep(message(name))
    kept.loop.run_until_quiescent()
    assert kept.arrived == []
    kept.listen()
    assert kept.arrived == ["a", "b"]
    assert len(kept.undelivered) == 0


def test_those_whose_socket_is_closed_do_not() -> None:
    kept = Kept()
    kept.undelivered.keep(message("a"))
    kept.closed.add("a")
    kept.listen()
    assert kept.arrived == []


def test_an_address_may_fall_silent_again() -> None:
    kept = Kept()
    kept.undelivered.keep(message("a"))
    kept.listen()
    kept.bus.silence("P")
    kept.undelivered.keep(message("b"))
    kept.listen()
    assert kept.arrived == ["a", "b"]


def test_closed_ones_do_not_pile_up() -> None:
    kept = Kept()
    for number in range(2000):
        kept.undelivered.keep(message(str(number)))
        kept.closed.add(str(number))
    assert len(kept.undelivered) < 200
