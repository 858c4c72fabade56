"""P0 and D0 as `pair.Pair` has them, but with a bus each, and real sockets between the two."""

from collections.abc import Mapping
from time import monotonic

from kvreplay.behaviour import Behaviour
from kvreplay.connectors.mooncake.config import MooncakeConfig
from kvreplay.connectors.mooncake.socket_bus import SocketBus
from kvreplay.connectors.mooncake.structs import PullReqMeta
from kvreplay.connectors.mooncake.worker import MooncakeWorker
from kvreplay.connectors.mooncake.write_frames import TargetMemory
from kvreplay.events import ListSink
from kvreplay.ids import NS_PER_S
from kvreplay.kv.specs import KVCacheGroupSpec
from kvreplay.sim.bus import Bus
from kvreplay.sim.event_loop import EventLoop
from kvreplay.transport.paced import PacedLoop
from tests.connectors.mooncake.pair import WORDS, FakeMemory, Pair, Report, Wire, behaviour

SCALE = 200
_QUIET_S = 0.1
_LONGEST_S = 20.0
NUM_BLOCKS = 64


class SocketPair(Pair):
    """Times are only roughly those of the virtual pair. To be closed."""

    def __init__(
        self, switches: Behaviour | None = None, *, num_groups: int = 1, config: MooncakeConfig | None = None
    ) -> None:
        self.loop = EventLoop()
        self.paced = PacedLoop(self.loop, SCALE)
        self.paced.start(monotonic())
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

    # A scheduler acts in an action of the loop, at an instant of its own; a test acts now.

    def announce(self, p_req_id: str = "p1", transfer_id: str = "X1") -> None:
        self._catch_up()
        super().announce(p_req_id, transfer_id)

    def finish(
        self, *block_ids: list[int], p_req_id: str = "p1", transfer_id: str = "X1", announce: bool = True
    ) -> None:
        self._catch_up()
        super().finish(*block_ids, p_req_id=p_req_id, transfer_id=transfer_id, announce=announce)

    def pull(self, *requests: PullReqMeta) -> None:
        self._catch_up()
        super().pull(*requests)

    def _catch_up(self) -> None:
        clock_ns = self.paced.clock_ns
        if self.loop.peek_ns() > clock_ns > self.loop.now_ns:
            self.loop.now_ns = clock_ns

    def run(self, seconds: float | None = None) -> None:
        """Until nothing is left and nothing has come for a while, or for so long in virtual time."""
        if seconds is not None:
            end_ns = self.paced.clock_ns + round(seconds * NS_PER_S)
            while self.paced.clock_ns < end_ns:
                self._turn()
            return
        end_s, quiet_s, num_run = monotonic() + _LONGEST_S, monotonic(), -1
        while monotonic() - quiet_s < _QUIET_S:
            assert monotonic() < end_s, "it does not end"
            self._turn()
            if self.loop.num_live or self.loop.num_run != num_run:
                quiet_s, num_run = monotonic(), self.loop.num_run

    def _turn(self) -> None:
        self.paced.turn(0.01)
        for bus in self.buses.values():
            bus.tidy()

    def close(self) -> None:
        for bus in self.buses.values():
            bus.close()
