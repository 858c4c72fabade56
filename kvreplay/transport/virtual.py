"""Runs a state machine in virtual time: on the event loop, over the bus."""

from collections.abc import Callable

from kvreplay.sim.bus import Bus
from kvreplay.sim.envelope import Envelope
from kvreplay.sim.event_loop import FOREVER_NS, Timer
from kvreplay.transport.machine import StateMachine


class VirtualDriver:
    """One state machine's connection to loop and bus.

    `on_report` is called once when the machine has something to fetch, and again after `report_fetched`, or when it has
    had nothing in between. `encode` changes what is sent, for instance into the bytes that a socket would carry.
    `reads_together`: the machine has all messages of one instant before it does what they make due.
    """

    def __init__(
        self,
        machine: StateMachine,
        bus: Bus,
        *,
        on_report: Callable[[], None] | None = None,
        encode: Callable[[Envelope], Envelope] | None = None,
        reads_together: bool = False,
    ) -> None:
        self._machine = machine
        self._bus = bus
        self._loop = bus.loop
        self._on_report = on_report
        self._encode = encode
        self._reads_together = reads_together
        self._timer: Timer | None = None
        self._told = False
        self._closed = False
        self._stalled_until_ns = 0

    def stall(self, duration_ns: int) -> None:
        """The machine's loop is busy: messages and timers wait for so long, in their order."""
        self._stalled_until_ns = self._loop.now_ns + duration_ns

    @property
    def stalled_until_ns(self) -> int:
        return self._stalled_until_ns

    def receive(self, envelope: Envelope) -> None:
        if self._stalled_until_ns > self._loop.now_ns:
            self._loop.call_at(self._stalled_until_ns, lambda: self.receive(envelope))
        elif not self._closed:
            self._machine.handle(envelope, self._loop.now_ns)
            self.pump(expects_more=self._reads_together)

    def refused(self, envelope: Envelope) -> None:
        if not self._closed:
            self._machine.on_refused(envelope, self._loop.now_ns)
            self.pump()

    def pump(self, *, expects_more: bool = False) -> None:
        """Send what the machine wants sent, set its timer, tell its owner. After every call of the machine.

        `expects_more`: what is due at this instant is left to the timer, which comes after the messages of the instant.
        """
        machine = self._machine
        now_ns = self._loop.now_ns
        deadline_ns = machine.next_deadline_ns
        while deadline_ns <= now_ns and self._stalled_until_ns <= now_ns and not expects_more:
            machine.on_deadline(now_ns)
            deadline_ns = machine.next_deadline_ns
        outbox = machine.outbox
        if outbox:
            post, encode = self._bus.post, self._encode
            for envelope in outbox:
                post(envelope if encode is None else encode(envelope))
            outbox.clear()
        self._set_timer(deadline_ns)
        if self._on_report is None:
            return
        if not machine.has_report:
            self._told = False  # what it had may have gone before anybody came for it
        elif not self._told:
            self._told = True
            self._on_report()

    def report_fetched(self) -> None:
        self._told = False

    def close(self) -> None:
        """The process is gone: nothing is heard, sent or timed any more."""
        self._closed = True
        self._loop.cancel(self._timer)
        self._timer = None

    def _set_timer(self, deadline_ns: int) -> None:
        # A timer that is early is left: it finds nothing due and sets the right one. It must not outlive the last
        # deadline, though, or it would keep the run alive.
        timer = self._timer
        if deadline_ns == FOREVER_NS:
            if timer is not None:
                self._loop.cancel(timer)
                self._timer = None
        elif timer is None or deadline_ns < timer.time_ns:
            self._loop.cancel(timer)
            self._timer = self._loop.call_at(max(deadline_ns, self._loop.now_ns), self._on_timer)

    def _on_timer(self) -> None:
        if self._stalled_until_ns > self._loop.now_ns:
            self._timer = self._loop.call_at(self._stalled_until_ns, self._on_timer)
            return
        self._timer = None
        self._machine.on_deadline(self._loop.now_ns)
        self.pump()
