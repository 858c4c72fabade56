"""The bus: every message between parts passes here, and every fault acts here."""

from typing import Protocol

from kvreplay.sim.envelope import Answer, Asker, Command, Controller, Delivery, Envelope, Handler, Interceptor
from kvreplay.sim.event_loop import Action, EventLoop


def owner_of(address: str) -> str:
    """The instance (or `client`, `proxy`) that an address belongs to: `P0` of `P0/mooncake/1`."""
    return address.partition("/")[0]


class Network(Protocol):
    """How long a message takes."""

    def transit_ns(self, envelope: Envelope, now_ns: int) -> int:
        """Time on the way, queueing behind earlier bytes of its link included. Called once per sending."""
        ...


class InstantNetwork:
    def transit_ns(self, envelope: Envelope, now_ns: int) -> int:
        return 0


class Bus:
    """Delivers envelopes to addresses, in virtual time.

    An address that nobody listens to swallows what is sent to it, as a dead process does.
    """

    def __init__(self, loop: EventLoop, network: Network | None = None) -> None:
        self.loop = loop
        self.network: Network = network or InstantNetwork()
        self.interceptor: Interceptor | None = None
        self._handlers: dict[str, Handler] = {}
        self._askers: dict[str, Asker] = {}
        self._refused: dict[str, Handler] = {}
        self._awaited: dict[str, list[Action]] = {}
        self._controllers: dict[str, Controller] = {}
        self._num_cuts = 0
        self._cuts: dict[str, int] = {}

    # -- addresses ---------------------------------------------------------------------------------------

    def listen(self, address: str, handler: Handler, *, refused: Handler | None = None) -> None:
        """Take what is sent to `address`; `refused` gets back what it sends and nobody takes."""
        assert address not in self._handlers, f"address {address} is taken"
        self._handlers[address] = handler
        if refused is not None:
            self._refused[address] = refused
        for action in self._awaited.pop(address, ()):
            self.loop.call_later(0, action)

    def hears(self, address: str) -> bool:
        """Whether somebody listens there."""
        return address in self._handlers

    def call_when_heard(self, address: str, action: Action) -> None:
        """Run `action` once somebody listens to `address`."""
        self._awaited.setdefault(address, []).append(action)

    def serve(self, address: str, asker: Asker) -> None:
        assert address not in self._askers, f"address {address} is taken"
        self._askers[address] = asker

    def silence(self, address: str) -> None:
        """Stop listening: the process behind the address is gone."""
        self._handlers.pop(address, None)
        self._askers.pop(address, None)
        self._refused.pop(address, None)

    def control(self, address: str, controller: Controller) -> None:
        self._controllers[address] = controller

    def command(self, address: str, command: Command) -> bool:
        """Carry out an action fault. False if nobody is there, or there was nothing to act on."""
        controller = self._controllers.get(address)
        return controller is not None and controller(command) is not False

    # -- messages ----------------------------------------------------------------------------------------

    def post(self, envelope: Envelope) -> None:
        """Send; what arrives, and when, is the network's and the faults' business."""
        loop = self.loop
        transit_ns = self.network.transit_ns(envelope, loop.now_ns)
        num_cuts = self._num_cuts
        interceptor = self.interceptor
        if interceptor is not None and envelope.kind in interceptor.kinds:
            deliveries = interceptor.intercept(envelope, loop.now_ns)
            if deliveries is not None:
                for delivery in deliveries:
                    self._send(interceptor, delivery, transit_ns)
                return
        loop.call_later(transit_ns, lambda: self._arrive(envelope, num_cuts))

    def _send(self, interceptor: Interceptor, delivery: Delivery, transit_ns: int) -> None:
        loop, envelope, num_cuts = self.loop, delivery.envelope, self._num_cuts
        ready_ns = loop.now_ns + transit_ns + delivery.delay_ns

        def arrive() -> None:
            self._arrive(envelope, num_cuts)

        def release() -> None:
            loop.call_at(max(ready_ns, loop.now_ns), arrive)

        if delivery.waits_for:
            interceptor.hold(delivery, release)
        else:
            release()

    def cut(self, owner: str) -> None:
        """Lose everything on its way to or from an instance: it died, and its connections with it."""
        self._num_cuts += 1
        self._cuts[owner] = self._num_cuts

    def _arrive(self, envelope: Envelope, num_cuts: int) -> None:
        """Deliver, unless an end was cut off after the sending, when `num_cuts` cuts had been made."""
        if num_cuts != self._num_cuts and num_cuts < max(
            self._cuts.get(owner_of(envelope.source), 0), self._cuts.get(owner_of(envelope.destination), 0)
        ):
            self._refuse(envelope)
            return
        self.deliver(envelope)

    def deliver(self, envelope: Envelope) -> None:
        handler = self._handlers.get(envelope.destination)
        if handler is None:
            self._refuse(envelope)
            return
        handler(envelope)

    def _refuse(self, envelope: Envelope) -> None:
        refused = self._refused.get(envelope.source)
        if refused is not None:
            refused(envelope)

    def ask(self, envelope: Envelope) -> Answer:
        """A synchronous question: an answer, an answer after a delay that the caller's step pays, or never.

        A question has one answer: of several deliveries the first counts, and one that is held never comes.
        """
        delay_ns = 0
        interceptor = self.interceptor
        if interceptor is not None and envelope.kind in interceptor.kinds:
            deliveries = interceptor.intercept(envelope, self.loop.now_ns)
            if deliveries is not None:
                if not deliveries or deliveries[0].waits_for:
                    return Answer(never=True)
                envelope, delay_ns = deliveries[0].envelope, deliveries[0].delay_ns
        asker = self._askers.get(envelope.destination)
        if asker is None:
            return Answer(never=True)
        answer = asker(envelope)
        answer.delay_ns += delay_ns
        return answer
