"""Messages to addresses where nobody listens yet: a socket that connects keeps them, and tries again (zmq_connect)."""

from collections.abc import Callable

from kvreplay.sim.bus import Bus
from kvreplay.sim.envelope import Envelope


class Undelivered:
    """What one party has sent to silent addresses. `is_open` tells whether the socket of a message is still there."""

    def __init__(self, bus: Bus, is_open: Callable[[Envelope], bool]) -> None:
        self._bus = bus
        self._is_open = is_open
        self._kept: dict[str, list[Envelope]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))

    def keep(self, envelope: Envelope) -> None:
        """Deliver it once somebody listens at its destination, unless its socket is closed by then."""
        address = envelope.destination
        kept = self._kept.get(address)
        if kept is None:
            kept = self._kept[address] = []
            self._bus.call_when_heard(address, lambda: self._send(address))
        elif len(kept) > 64 and len(kept) & (len(kept) - 1) == 0:
            kept[:] = filter(self._is_open, kept)
        kept.append(envelope)

    def _send(self, address: str) -> None:
        for envelope in self._kept.pop(address):
            if self._is_open(envelope):
                self._bus.deliver(envelope)
