"""Messages between parts of one process: instant, but faults act on them like on any other."""

from collections.abc import Callable

from kvreplay.sim.bus import Bus
from kvreplay.sim.envelope import Delivery, Envelope


def hand_over(bus: Bus, envelope: Envelope, receive: Callable[[Envelope], None]) -> None:
    """Give `envelope` to `receive`, before this returns unless a fault has it otherwise: later, twice, never."""
    interceptor, loop = bus.interceptor, bus.loop
    deliveries: list[Delivery] | None = None
    if interceptor is not None and envelope.kind in interceptor.kinds:
        deliveries = interceptor.intercept(envelope, loop.now_ns)
    if deliveries is None:
        receive(envelope)
        return
    assert interceptor is not None
    for delivery in deliveries:
        _deliver(bus, delivery, receive)


def _deliver(bus: Bus, delivery: Delivery, receive: Callable[[Envelope], None]) -> None:
    loop, envelope = bus.loop, delivery.envelope
    ready_ns = loop.now_ns + delivery.delay_ns

    def release() -> None:
        if ready_ns > loop.now_ns:
            loop.call_at(ready_ns, lambda: receive(envelope))
        else:
            receive(envelope)

    if delivery.waits_for:
        assert bus.interceptor is not None
        bus.interceptor.hold(delivery, release)
    else:
        release()
