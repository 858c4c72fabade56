"""Messages within one process: instant, unless a fault has it otherwise."""

from collections.abc import Callable

from kvreplay.sim.bus import Bus
from kvreplay.sim.envelope import RANK_REPORT, Delivery, Envelope
from kvreplay.sim.event_loop import EventLoop
from kvreplay.transport.handover import hand_over


class Faults:
    kinds = frozenset({RANK_REPORT})

    def __init__(self, *deliveries: Delivery) -> None:
        self.deliveries: list[Delivery] | None = list(deliveries)
        self.releases: list[Callable[[], None]] = []

    def intercept(self, envelope: Envelope, now_ns: int) -> list[Delivery] | None:
        return self.deliveries

    def has_passed(self, kind: str, conversation: str) -> bool:
        return False

    def swallows(self, kind: str, conversation: str) -> bool:
        return False

    def hold(self, delivery: Delivery, release: Callable[[], None]) -> None:
        self.releases.append(release)


REPORT = Envelope(kind=RANK_REPORT, source="D0/rank/1", destination="D0/scheduler", payload=None)


def handed(faults: Faults | None) -> tuple[EventLoop, list[int]]:
    loop = EventLoop()
    bus = Bus(loop)
    bus.interceptor = faults
    arrived: list[int] = []
    hand_over(bus, REPORT, lambda envelope: arrived.append(loop.now_ns))
    return loop, arrived


def test_without_faults_it_is_there_at_once() -> None:
    assert handed(None)[1] == [0]


def test_so_it_is_when_the_faults_let_it_pass() -> None:
    faults = Faults()
    faults.deliveries = None
    assert handed(faults)[1] == [0]


def test_a_lost_one_never_comes() -> None:
    loop, arrived = handed(Faults())
    loop.run_until_quiescent()
    assert arrived == []


def test_a_doubled_and_delayed_one() -> None:
    loop, arrived = handed(Faults(Delivery(REPORT), Delivery(REPORT, 5)))
    assert arrived == [0]
    loop.run_until_quiescent()
    assert arrived == [0, 5]


def test_one_that_is_held_comes_when_it_is_let_go() -> None:
    faults = Faults(Delivery(REPORT, waits_for="pull.settled"))
    loop, arrived = handed(faults)
    loop.run_until_quiescent()
    assert arrived == []
    faults.releases[0]()
    assert arrived == [0]
