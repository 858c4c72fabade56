"""P0 and D0 as `pair.Pair` has them, but with a bus each, and real sockets between the two."""

from collections.abc import Mapping
from time import monotonic

from kvreplay.behaviour import Behaviour
from kvreplay.connectors.mooncake.config import MooncakeConfig
from kvreplay.connectors.mooncake.socket_bus import SocketBus
from kvreplay.connectors.mooncake.worker import MooncakeWorker
from kvreplay.connectors.mooncake.write_frames import TargetMemory
from kvreplay.ids import NS_PER_S
from kvreplay.kv.specs import KVCacheGroupSpec
from kvreplay.sim.bus import Bus
from kvreplay.sim.event_loop import EventLoop
from kvreplay.transport.held import HeldClock
from kvreplay.transport.paced import PacedLoop
from tests.connectors.mooncake.pair import WORDS, FakeMemory, Pair, Report, Wire, behaviour
from tests.list_sink import ListSink

NUM_BLOCKS = 64


class SocketPair(Pair):
    """Its time jumps as that of the virtual pair, but waits for what is on its way. To be closed.

    `strangers_s`: real seconds that `run` listens to others than the two, whose messages nobody counts.
    """

    def __init__(
        self, switches: Behaviour | None = None, *, num_groups: int = 1, config: MooncakeConfig | None = None
    ) -> None:
        self.loop = EventLoop()
        self.paced = PacedLoop(self.loop)
        self.clock = HeldClock(self.paced, lambda: [bus.traffic for bus in self.buses.values()])
        self.strangers_s = 0.0
        self.wire = Wire(self.loop)
        self.sink = ListSink()
        self.reports: list[Report] = []
        self.buses: dict[str, SocketBus] = {}
        self._workers: dict[str, MooncakeWorker] = {}
        self._endpoints: dict[str, Mapping[str, str]] = {}
        self._switches = switches or behaviour()
        self._groups = [KVCacheGroupSpec(block_size=WORDS, bytes_per_token=8)] * num_groups
        self._config = config or MooncakeConfig()
        self._encodes = False
        self.p_memory = FakeMemory(filled=True)
        self.d_memory = FakeMemory(filled=False)
        self.p = self.start("P0", "kv_producer", self.p_memory)
        self.d = self.start("D0", "kv_consumer", self.d_memory)

    def start(self, instance: str, role: str, memory: FakeMemory, incarnation: int = 0) -> MooncakeWorker:
        worker = self._workers[instance] = super().start(instance, role, memory, incarnation)
        self._tell(instance)
        self.clock.settle()  # until it has registered
        return worker

    def bus_of(self, instance: str) -> Bus:
        bus = self.buses.get(instance)
        if bus is None:
            bus = self.buses[instance] = SocketBus(
                instance,
                self.paced,
                announce=lambda endpoints: self._endpoints.update({instance: dict(endpoints)}),
                is_open=lambda source, conversation, attempt: self._is_open(instance, conversation, attempt),
                find_target=lambda address: self._target(instance),
                tells_of_gone_peers=self._switches["pull_wait"] == "bounded",
            )
            if instance == "D0":
                bus.interceptor = self.wire
        return bus

    def _is_open(self, instance: str, conversation: str, attempt: int) -> bool:
        consumer = self._workers[instance].consumer
        return consumer is not None and consumer.is_open(conversation, attempt)

    def _target(self, instance: str) -> TargetMemory:
        memory = self._workers[instance].memory
        return TargetMemory(memory.contents, memory.layout.regions, NUM_BLOCKS)

    def _tell(self, instance: str) -> None:
        for name, bus in self.buses.items():
            for other, endpoints in self._endpoints.items():
                if other != name:
                    bus.update_directory(endpoints)

    def kill(self, instance: str) -> None:
        """Its process dies."""
        self._workers[instance].shutdown()
        for name, bus in self.buses.items():
            if name != instance:
                bus.update_directory({}, instance)

    def run(self, seconds: float | None = None) -> None:
        """Until nothing is left, or for so long in virtual time."""
        self._listen_to_strangers()
        if seconds is not None:
            self.clock.run_until(self.loop.now_ns + round(seconds * NS_PER_S))
        else:
            self.clock.run_until_quiescent()
        for bus in self.buses.values():
            bus.tidy()

    def _listen_to_strangers(self) -> None:
        end_s = monotonic() + self.strangers_s
        while monotonic() < end_s:
            self.listen()

    def listen(self) -> None:
        """Take what has come, whoever sent it."""
        self.paced.listen(0.01)
        self.clock.settle()

    def close(self) -> None:
        for bus in self.buses.values():
            bus.close()
