"""The bus: every message between parts passes here, and every fault acts here."""

from typing import Protocol

from kvreplay.sim.envelope import Answer, Asker, Command, Controller, Delivery, Envelope, Handler, Interceptor
from kvreplay.sim.event_loop import EventLoop


class Network(Protocol):
    """How long a message takes."""

    def transit_ns(self, envelope: Envelope, now_ns: int) -> int:
        """Time on the way, queueing behind earlier bytes of the same link included. Called once per sending."""
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
        self._controllers: dict[str, Controller] = {}
        self.num_undeliverable = 0

    # -- addresses --------------------------------------------------------------------------------------------

    def listen(self, address: str, handler: Handler) -> None:
        assert address not in self._handlers, f"address {address} is taken"
        self._handlers[address] = handler

    def serve(self, address: str, asker: Asker) -> None:
        assert address not in self._askers, f"address {address} is taken"
        self._askers[address] = asker

    def silence(self, address: str) -> None:
        """Stop listening: the process behind the address is gone."""
        self._handlers.pop(address, None)
        self._askers.pop(address, None)

    def control(self, address: str, controller: Controller) -> None:
        self._controllers[address] = controller

    def command(self, address: str, command: Command) -> bool:
        """Carry out an action fault. False if nobody is there to be commanded."""
        controller = self._controllers.get(address)
        if controller is None:
            return False
        controller(command)
        return True

    @property
    def control_addresses(self) -> list[str]:
        return list(self._controllers)

    # -- messages ---------------------------------------------------------------------------------------------

    def post(self, envelope: Envelope) -> None:
        """Send; what arrives, and when, is the network's and the faults' business."""
        loop = self.loop
        transit_ns = self.network.transit_ns(envelope, loop.now_ns)
        interceptor = self.interceptor
        if interceptor is not None and envelope.kind in interceptor.kinds:
            deliveries = interceptor.intercept(envelope, loop.now_ns)
            if deliveries is not None:
                for delivery in deliveries:
                    if not delivery.held:
                        self.deliver_later(delivery, transit_ns)
                return
        loop.call_later(transit_ns, lambda: self.deliver(envelope))

    def deliver_later(self, delivery: Delivery, transit_ns: int = 0) -> None:
        """Schedule one delivery; the injector calls this itself for those it has held back."""
        envelope = delivery.envelope
        self.loop.call_later(transit_ns + delivery.delay_ns, lambda: self.deliver(envelope))

    def deliver(self, envelope: Envelope) -> None:
        handler = self._handlers.get(envelope.destination)
        if handler is None:
            self.num_undeliverable += 1
            return
        handler(envelope)

    def ask(self, envelope: Envelope) -> Answer:
        """A synchronous question: an answer, an answer after a delay that the caller's step pays, or never."""
        delay_ns = 0
        interceptor = self.interceptor
        if interceptor is not None and envelope.kind in interceptor.kinds:
            deliveries = interceptor.intercept(envelope, self.loop.now_ns)
            if deliveries is not None:
                if not deliveries:
                    return Answer(never=True)
                envelope, delay_ns = deliveries[0].envelope, deliveries[0].delay_ns
        asker = self._askers.get(envelope.destination)
        if asker is None:
            return Answer(never=True)
        answer = asker(envelope)
        answer.delay_ns += delay_ns
        return answer
