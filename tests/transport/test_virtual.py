"""Deadlines of a state machine, and the driver that runs one in virtual time."""

import gc
import weakref

import pytest

from kvreplay.sim.bus import Bus
from kvreplay.sim.envelope import Envelope
from kvreplay.sim.event_loop import FOREVER_NS, EventLoop
from kvreplay.transport.machine import Deadlines
from kvreplay.transport.virtual import VirtualDriver


class TestDeadlines:
    def test_they_fire_in_order_of_time_then_setting(self) -> None:
        deadlines, log = Deadlines(), []
        for time_ns, name in ((20, "b"), (10, "a"), (20, "c")):
            deadlines.at(time_ns, lambda name, now_ns: log.append((now_ns, name)), name)
        assert deadlines.next_ns == 10
        deadlines.fire(15)
        assert (log, deadlines.next_ns) == ([(15, "a")], 20)
        deadlines.fire(20)
        assert (log, deadlines.next_ns) == ([(15, "a"), (20, "b"), (20, "c")], FOREVER_NS)

    def test_a_cancelled_one_does_not_count(self) -> None:
        deadlines, log = Deadlines(), []
        first = deadlines.at(10, lambda name, now_ns: log.append(name), "first")
        deadlines.at(20, lambda name, now_ns: log.append(name), "second")
        deadlines.cancel(first)
        deadlines.cancel(first)
        deadlines.cancel(None)
        assert (deadlines.next_ns, len(deadlines)) == (20, 1)
        deadlines.fire(30)
        assert (log, len(deadlines)) == (["second"], 0)

    def test_one_that_makes_another_due_runs_it_too(self) -> None:
        deadlines, log = Deadlines(), []

        def again(left: int, now_ns: int) -> None:
            log.append(left)
            if left:
                deadlines.at(now_ns, again, left - 1)

        deadlines.at(10, again, 2)
        deadlines.fire(10)
        assert log == [2, 1, 0]

    def test_one_that_has_passed_keeps_nothing_alive(self) -> None:
        """Not even in a circle: what it was about may know its deadlines."""
        deadlines = Deadlines()

        class Copy:
            def __init__(self) -> None:
                self.deadline = deadlines.at(10, lambda copy, now_ns: None, self)

        copy = weakref.ref(Copy())
        assert copy() is not None
        gc.disable()
        try:
            deadlines.fire(10)
            assert copy() is None
        finally:
            gc.enable()


class Echo:
    """Answers each message after 5 ns, and reports how many it has had."""

    def __init__(self) -> None:
        self.outbox: list[Envelope] = []
        self.deadlines = Deadlines()
        self.has_report = False
        self.refused: list[str] = []

    @property
    def next_deadline_ns(self) -> int:
        return self.deadlines.next_ns

    def handle(self, envelope: Envelope, now_ns: int) -> None:
        self.deadlines.at(now_ns + 5, self._answer, envelope)

    def on_refused(self, envelope: Envelope, now_ns: int) -> None:
        self.refused.append(envelope.destination)

    def on_deadline(self, now_ns: int) -> None:
        self.deadlines.fire(now_ns)

    def _answer(self, envelope: Envelope, now_ns: int) -> None:
        self.has_report = True
        self.outbox.append(message(envelope.destination, envelope.source, f"{envelope.payload}!"))


class Reader(Echo):
    """Notes each message, and then, at the same instant, that it has gone on."""

    def __init__(self, log: list[tuple[int, str]]) -> None:
        super().__init__()
        self._log = log

    def handle(self, envelope: Envelope, now_ns: int) -> None:
        self._log.append((now_ns, envelope.payload))
        self.deadlines.at(now_ns, lambda log, now_ns: log.append((now_ns, "then")), self._log)


def message(source: str, destination: str, payload: str) -> Envelope:
    return Envelope(kind="k", source=source, destination=destination, payload=payload)


class TestVirtualDriver:
    @pytest.fixture
    def bus(self) -> Bus:
        return Bus(EventLoop())

    def test_what_goes_in_comes_out_later(self, bus: Bus) -> None:
        machine, log, told = Echo(), [], []
        driver = VirtualDriver(machine, bus, on_report=lambda: told.append(bus.loop.now_ns))
        bus.listen("B/x", driver.receive)
        bus.listen("A/x", lambda envelope: log.append((bus.loop.now_ns, envelope.payload)))
        bus.post(message("A/x", "B/x", "one"))
        bus.loop.call_at(3, lambda: bus.post(message("A/x", "B/x", "two")))
        assert bus.loop.run_until_quiescent()
        assert log == [(5, "one!"), (8, "two!")]
        assert told == [5], "told once until the report is fetched"
        driver.report_fetched()
        driver.pump()
        assert told == [5, 8]

    def test_a_report_that_goes_before_it_is_fetched_does_not_silence_the_next(self, bus: Bus) -> None:
        machine, told = Echo(), []
        driver = VirtualDriver(machine, bus, on_report=lambda: told.append(bus.loop.now_ns))
        machine.has_report = True
        driver.pump()
        machine.has_report = False
        driver.pump()
        bus.loop.call_at(5, lambda: driver.receive(message("A/x", "B/x", "one")))
        bus.loop.run_until_quiescent()
        assert told == [0, 10]

    def test_a_timer_that_is_not_needed_any_more_keeps_nothing_alive(self, bus: Bus) -> None:
        machine = Echo()
        driver = VirtualDriver(machine, bus)
        deadline = machine.deadlines.at(100, lambda name, now_ns: None, "never")
        driver.pump()
        assert bus.loop.num_live == 1
        machine.deadlines.cancel(deadline)
        driver.pump()
        assert bus.loop.num_live == 0

    def test_what_nobody_takes_comes_back(self, bus: Bus) -> None:
        machine = Echo()
        driver = VirtualDriver(machine, bus)
        bus.listen("B/x", driver.receive, refused=driver.refused)
        bus.post(message("B/x", "nobody/x", "hello"))
        bus.loop.run_until_quiescent()
        assert machine.refused == ["nobody/x"]

    def test_a_closed_driver_is_deaf_and_dumb(self, bus: Bus) -> None:
        machine, log = Echo(), list[Envelope]()
        driver = VirtualDriver(machine, bus)
        bus.listen("A/x", log.append)
        driver.receive(message("A/x", "B/x", "one"))
        driver.close()
        driver.receive(message("A/x", "B/x", "two"))
        assert (bus.loop.num_live, log) == (0, [])

    def test_what_a_message_makes_due_at_once_is_done_at_once(self, bus: Bus) -> None:
        machine, log = Echo(), list[str]()
        driver = VirtualDriver(machine, bus)
        bus.listen("A/x", lambda envelope: log.append(envelope.payload))
        machine.deadlines.at(0, machine._answer, message("A/x", "B/x", "now"))
        driver.pump()
        bus.loop.run_until_quiescent()
        assert (log, bus.loop.now_ns) == (["now!"], 0)

    def test_one_that_reads_together_has_all_of_an_instant_before_it_goes_on(self, bus: Bus) -> None:
        log = list[tuple[int, str]]()
        driver = VirtualDriver(Reader(log), bus, reads_together=True)
        bus.listen("B/x", driver.receive)
        for time_ns, text in ((7, "one"), (7, "two"), (9, "three")):
            bus.loop.call_at(time_ns, lambda text=text: bus.post(message("A/x", "B/x", text)))  # type: ignore[misc]
        bus.loop.run_until_quiescent()
        assert log == [(7, "one"), (7, "two"), (7, "then"), (7, "then"), (9, "three"), (9, "then")]

    def test_a_stalled_machine_takes_up_where_it_was_in_order(self, bus: Bus) -> None:
        machine, log = Echo(), list[tuple[int, str]]()
        driver = VirtualDriver(machine, bus)
        bus.listen("A/x", lambda envelope: log.append((bus.loop.now_ns, envelope.payload)))
        driver.receive(message("A/x", "B/x", "before"))
        driver.stall(100)
        assert driver.stalled_until_ns == 100
        for time_ns, text in ((10, "one"), (20, "two")):
            bus.loop.call_at(time_ns, lambda text=text: driver.receive(message("A/x", "B/x", text)))  # type: ignore[misc]
        bus.loop.run_until_quiescent()
        assert log == [(100, "before!"), (105, "one!"), (105, "two!")]
