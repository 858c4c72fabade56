"""Over what the parties to a scenario talk: one virtual bus, or real sockets between producer, proxies and consumer."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from kvreplay.sim.bus import Bus, Network
from kvreplay.sim.envelope import Envelope
from kvreplay.sim.event_loop import EventLoop

if TYPE_CHECKING:
    from kvreplay.conformance.mooncake_side import Worker
    from kvreplay.connectors.mooncake.socket_bus import SocketBus
    from kvreplay.connectors.mooncake.write_frames import TargetMemory

WIRE: Final = "WIRE"
"""The party that proxies and the bootstrap server's front are."""

WorkersOf = Callable[[str], "Sequence[Worker]"]
"""Party → its workers, as far as they have started."""


class World(Protocol):
    loop: EventLoop
    holds_writes: bool
    """Whether a write takes its time before the engine's script sees it."""

    def bus_of(self, party: str) -> Bus: ...

    def as_asked(self, pull: Envelope) -> Envelope | None:
        """A pull that a proxy has, as its consumer knows it."""
        ...

    def run_until(self, time_ns: int, after: Callable[[], None]) -> None:
        """Let happen what happens up to that instant. `after` is called whenever something has."""
        ...

    def close(self) -> None: ...


class VirtualWorld:
    holds_writes = False

    def __init__(self, network: Network) -> None:
        self.loop = EventLoop()
        self._bus = Bus(self.loop, network)

    def bus_of(self, party: str) -> Bus:
        return self._bus

    def as_asked(self, pull: Envelope) -> Envelope | None:
        return pull

    def run_until(self, time_ns: int, after: Callable[[], None]) -> None:
        loop = self.loop
        while loop.peek_ns() <= time_ns:
            loop.step()
            after()
        loop.now_ns = max(loop.now_ns, time_ns)

    def close(self) -> None:
        pass


class SocketWorld:
    """Each party has sockets of its own. Time jumps, but not past a message on its way: what takes how long is as
    virtual as ever, what arrives has come over a socket."""

    holds_writes = True

    def __init__(self, network: Network, workers_of: WorkersOf) -> None:
        # Imported where sockets live: a scenario on the virtual bus needs none.
        from kvreplay.transport.held import HeldClock
        from kvreplay.transport.paced import PacedLoop

        self.loop = EventLoop()
        self._network = network
        self._workers_of = workers_of
        self._paced = PacedLoop(self.loop)
        self._clock = HeldClock(self._paced, lambda: [bus.traffic for bus in self._buses.values()])
        self._buses: dict[str, SocketBus] = {}

    def bus_of(self, party: str) -> Bus:
        from kvreplay.connectors.mooncake.socket_bus import SocketBus

        bus = self._buses.get(party)
        if bus is None:
            bus = self._buses[party] = SocketBus(
                party,
                self._paced,
                announce=lambda endpoints: self._announce(party, endpoints),
                is_open=lambda source, conversation, attempt: self._is_open(party, source, conversation, attempt),
                find_target=lambda address: self._find_target(party, address),
                tells_of_gone_peers=False,
                relays=party == WIRE,
                network=self._network,
            )
        return bus

    def as_asked(self, pull: Envelope) -> Envelope | None:
        known = (bus.asked_as(pull.conversation) for party, bus in self._buses.items() if party != WIRE)
        return next((asked for asked in known if asked is not None), None)

    def run_until(self, time_ns: int, after: Callable[[], None]) -> None:
        self._clock.run_until(time_ns, after)

    def close(self) -> None:
        for bus in self._buses.values():
            bus.close()

    def _announce(self, party: str, endpoints: Mapping[str, str]) -> None:
        for other, bus in self._buses.items():
            if other != party:
                bus.update_directory(endpoints)

    def _is_open(self, party: str, source: str, conversation: str, attempt: int) -> bool:
        if party == WIRE:
            return True
        return any(
            worker.connector.consumer.is_open(conversation, attempt)
            for worker in self._workers_of(party)
            if worker.connector.identity.address == source and worker.connector.consumer is not None
        )

    def _find_target(self, party: str, address: str) -> "TargetMemory | None":
        from kvreplay.connectors.mooncake.write_frames import TargetMemory

        for worker in self._workers_of(party):
            if worker.connector.identity.memory_address == address:
                memory = worker.connector.memory
                num_blocks = max(len(tensor.rows) for tensor in worker.memory.tensors)
                return TargetMemory(memory.contents, memory.layout.regions, num_blocks)
        return None
