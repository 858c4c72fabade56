"""Engines of several ranks on one bus, with real KV buffers, driven as their schedulers would."""

from dataclasses import dataclass, field

import numpy as np

from kvreplay.behaviour import Behaviour
from kvreplay.connectors.mooncake.config import MooncakeConfig
from kvreplay.connectors.mooncake.plan import HeadLayout
from kvreplay.connectors.mooncake.rank_group import MooncakeWorkers, RankGroup, start_workers
from kvreplay.connectors.mooncake.sharded_buffers import ShardedBuffers
from kvreplay.connectors.mooncake.sharding import Sharding
from kvreplay.connectors.mooncake.structs import MooncakeConnectorMetadata, PullReqMeta
from kvreplay.connectors.mooncake.worker import MooncakeWorker
from kvreplay.engine.connector import KVConnectorOutput
from kvreplay.ids import NS_PER_S
from kvreplay.kv.content import WordArray
from kvreplay.kv.content_index import TokenIndex
from kvreplay.kv.memory import BlockIds, NullMemory, Provenance
from kvreplay.kv.specs import KVCacheGroupSpec
from kvreplay.sim.bus import Bus
from kvreplay.sim.event_loop import EventLoop
from tests.connectors.mooncake.pair import Wire, behaviour, leg_name, request_for
from tests.list_sink import ListSink

BLOCK_SIZE = 4
NUM_BLOCKS = 32
GROUP = KVCacheGroupSpec(block_size=BLOCK_SIZE, bytes_per_token=64)
PROMPT = TokenIndex(BLOCK_SIZE).content(range(1, 13))
"""Twelve tokens: three blocks."""

Sizes = tuple[int, int]
"""tensor parallel size, pipeline parallel size"""


class Memory(NullMemory):
    """An engine's buffers, as its connector sees them (`kv.memory.KVMemory`)."""

    def __init__(self, shares: tuple[int, ...]) -> None:
        self.buffers = ShardedBuffers(NUM_BLOCKS, BLOCK_SIZE, shares)
        self.in_doubt: list[Provenance] = []

    def read_blocks(self, group: int, block_ids: BlockIds) -> WordArray:
        return self.buffers.read_blocks(group, block_ids)

    def write_blocks(self, group: int, block_ids: BlockIds, words: WordArray, *, provenance: Provenance | None) -> None:
        self.buffers.write_blocks(group, block_ids, words)
        if provenance is not None and not provenance.asked_for:
            self.in_doubt.append(provenance)

    def mark_corrupted(self, block_id: int, provenance: Provenance) -> None:
        self.buffers.provenance[block_id] = provenance

    def compute(self, *block_ids: int) -> None:
        """The prompt is computed into these blocks, by every rank."""
        self.buffers.write(np.array(block_ids, np.int64), PROMPT, 0, 0, len(block_ids) * BLOCK_SIZE)

    def wrong_tokens(self, *block_ids: int) -> list[int]:
        """Positions of the prompt that are not right in these blocks."""
        table = np.array(block_ids, np.int64)
        wrong = self.buffers.wrong_positions(table, PROMPT, 0, 0, len(block_ids) * BLOCK_SIZE)
        return [] if wrong is None else wrong.tolist()


@dataclass
class Engine:
    workers: MooncakeWorkers
    memory: Memory
    reports: list[KVConnectorOutput] = field(default_factory=list)
    reports_at: list[int] = field(default_factory=list)
    """When each of them came, ns."""

    @property
    def ranks(self) -> list[MooncakeWorker]:
        if isinstance(self.workers, RankGroup):
            return list(self.workers.workers)
        assert isinstance(self.workers, MooncakeWorker)
        return [self.workers]

    def finished(self) -> list[str]:
        return [name for report in self.reports for name in (*report.finished_sending, *report.finished_recving)]

    def invalid(self) -> list[list[int]]:
        return [report.invalid_block_ids for report in self.reports if report.invalid_block_ids]


class Engines:
    """P0 and D0 of given sizes. Blocks 1, 2, 3 of P0 hold the prompt; each engine polls when it has something."""

    def __init__(
        self,
        producer: Sizes = (1, 1),
        consumer: Sizes = (1, 1),
        *,
        heads: HeadLayout | None = None,
        switches: Behaviour | None = None,
        config: MooncakeConfig | None = None,
    ) -> None:
        self.loop = EventLoop()
        self.bus = Bus(self.loop)
        self.wire = Wire(self.loop)
        self.bus.interceptor = self.wire
        self.sink = ListSink()
        self._sharding = Sharding.of(heads or HeadLayout(num_kv_heads=8), [producer, consumer])
        self._switches = switches or behaviour()
        self._config = config or MooncakeConfig()
        self.p = self._start("P0", "kv_producer", producer)
        self.d = self._start("D0", "kv_consumer", consumer)
        self.p.memory.compute(1, 2, 3)

    def _start(self, name: str, role: str, sizes: Sizes) -> Engine:
        tp_size, pp_size = sizes
        memory = Memory(self._sharding.row_shares(tp_size, pp_size))
        engines: list[Engine] = []

        def poll() -> None:
            for engine in engines:
                output = engine.workers.get_finished(())
                if output is not None:
                    engine.reports.append(output)
                    engine.reports_at.append(self.loop.now_ns)

        def on_report() -> None:
            self.loop.call_later(0, poll)

        workers = start_workers(
            name,
            0,
            role,
            tp_size=tp_size,
            pp_size=pp_size,
            sharding=self._sharding,
            groups=[GROUP],
            config=self._config,
            behaviour=self._switches,
            bus=self.bus,
            memory=memory,
            sink=self.sink,
            on_report=on_report,
        )
        engines.append(Engine(workers, memory))
        return engines[0]

    def finish(self, *, p_req_id: str = "p1", transfer_id: str = "X1") -> None:
        """The producer has computed the prompt."""
        name = leg_name(p_req_id, self._switches)
        for blocks in ([], [[1, 2, 3]]):
            self.p.workers.start_load_kv(MooncakeConnectorMetadata(reqs_to_send={name: (transfer_id, blocks)}))

    def pull(self, request: PullReqMeta | None = None) -> None:
        request = request or request_for("d1")
        wanted = {request.remote_engine_id: {request.d_req_id: request}}
        self.d.workers.start_load_kv(MooncakeConnectorMetadata(reqs_to_recv=wanted))

    def run(self, seconds: float | None = None) -> None:
        """Until nothing is left, or for so long."""
        if seconds is None:
            assert self.loop.run_until_quiescent()
            return
        end_ns = self.loop.now_ns + round(seconds * NS_PER_S)
        self.loop.run_until_quiescent(end_ns)
        self.loop.now_ns = max(self.loop.now_ns, end_ns)
