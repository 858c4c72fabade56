"""A producer and a consumer on one bus, driven as their schedulers would, with memories that remember."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvreplay.behaviour import Behaviour, profile
from kvreplay.connectors.mooncake.addresses import bootstrap_url
from kvreplay.connectors.mooncake.config import MooncakeConfig
from kvreplay.connectors.mooncake.identity import WorkerIdentity
from kvreplay.connectors.mooncake.structs import MooncakeConnectorMetadata, PullReqMeta
from kvreplay.connectors.mooncake.worker import MooncakeWorker, register_rows
from kvreplay.engine.connector import KVConnectorOutput
from kvreplay.events import Event
from kvreplay.ids import NS_PER_MS, NS_PER_S
from kvreplay.kv.content import WordArray
from kvreplay.kv.memory import BlockIds, NullMemory, Provenance
from kvreplay.kv.specs import KVCacheGroupSpec
from kvreplay.sim.bus import Bus, Network
from kvreplay.sim.envelope import Delivery, Envelope
from kvreplay.sim.event_loop import EventLoop
from tests.list_sink import ListSink

WORDS = 4
GENERATIONS = ("silent", "report", "settle")

ALL_KINDS = frozenset({"pull.request", "pull.reply", "write.data", "write.done", "bootstrap.query", "bootstrap.answer"})

Transform = Callable[[Envelope], list[Envelope]]


def behaviour(**switches: str) -> Behaviour:
    result = profile("vllm-0.33")
    for name, value in switches.items():
        result = result.with_switch(f"{name}={value}")
    return result


class FakeMemory(NullMemory):
    """Block b of the producer holds the words 1000 * b, 1000 * b + 1, ...; unwritten blocks elsewhere hold 0."""

    def __init__(self, *, filled: bool) -> None:
        self.filled = filled
        self.blocks: dict[tuple[int, int], list[int]] = {}
        self.in_doubt: list[Provenance] = []
        self.corrupted: dict[int, Provenance] = {}

    def block(self, block_id: int, group: int = 0) -> list[int]:
        default = [1000 * block_id + place for place in range(WORDS)] if self.filled else [0] * WORDS
        return self.blocks.get((group, block_id), default)

    def read_blocks(self, group: int, block_ids: BlockIds) -> WordArray:
        return np.array([self.block(int(block_id), group) for block_id in block_ids], dtype=np.uint64)

    def write_blocks(self, group: int, block_ids: BlockIds, words: WordArray, *, provenance: Provenance | None) -> None:
        for block_id, row in zip(block_ids, words.tolist(), strict=True):
            self.blocks[group, int(block_id)] = row
        if provenance is not None and not provenance.asked_for:
            self.in_doubt.append(provenance)

    def mark_corrupted(self, block_id: int, provenance: Provenance) -> None:
        self.corrupted[block_id] = provenance


@dataclass
class Wire:
    """Faults by kind of message, and a log of what was sent: (seconds, kind, destination)."""

    loop: EventLoop
    transforms: dict[str, Transform] = field(default_factory=dict)
    delays_s: dict[str, float | list[float]] = field(default_factory=dict)
    """How much longer messages of a kind take; a list: the first so long, the second so long, ..."""
    sent: list[Envelope] = field(default_factory=list)
    kinds: frozenset[str] = ALL_KINDS

    def intercept(self, envelope: Envelope, now_ns: int) -> list[Delivery] | None:
        self.sent.append(envelope)
        transform = self.transforms.get(envelope.kind)
        envelopes = [envelope] if transform is None else transform(envelope)
        delay_s = self.delays_s.get(envelope.kind, 0)
        if isinstance(delay_s, list):
            delay_s = delay_s.pop(0)
        return [Delivery(each, round(delay_s * NS_PER_S)) for each in envelopes]

    def has_passed(self, kind: str, conversation: str) -> bool:
        return False

    def swallows(self, kind: str, conversation: str) -> bool:
        return False

    def hold(self, delivery: Delivery, release: Callable[[], None]) -> None:
        raise AssertionError("nothing waits for events here")

    def kinds_sent(self) -> list[str]:
        return [envelope.kind for envelope in self.sent]


Report = tuple[str, float, list[str], list[str], list[int]]
"""(instance, seconds, finished, failed_recving, invalid_block_ids)"""


def shares_names(switches: Behaviour) -> bool:
    """Whether p1 and d1, one request, have to be told by one name, as vLLM's proxy does: who looks whose transfer it is
    knows them by that."""
    return switches["mooncake_unknown_transfer"] == "accept"


def leg_name(p_req_id: str, switches: Behaviour) -> str:
    """What the producer is told that a request is called."""
    return p_req_id.replace("p", "d", 1) if shares_names(switches) else p_req_id


class Pair:
    """P0 and D0. Each polls at once when it has something to report."""

    def __init__(
        self,
        switches: Behaviour | None = None,
        *,
        num_groups: int = 1,
        config: MooncakeConfig | None = None,
        network: Network | None = None,
        encodes_messages: bool = False,
    ) -> None:
        self.loop = EventLoop()
        self.bus = Bus(self.loop, network)
        self.wire = Wire(self.loop)
        self.bus.interceptor = self.wire
        self.sink = ListSink()
        self.reports: list[Report] = []
        self._switches = switches or behaviour()
        self._groups = [KVCacheGroupSpec(block_size=WORDS, bytes_per_token=8)] * num_groups
        self._config = config or MooncakeConfig()
        self._encodes = encodes_messages
        self.p_memory = FakeMemory(filled=True)
        self.d_memory = FakeMemory(filled=False)
        self.p = self.start("P0", "kv_producer", self.p_memory)
        self.d = self.start("D0", "kv_consumer", self.d_memory)

    def bus_of(self, instance: str) -> Bus:
        return self.bus

    def start(self, instance: str, role: str, memory: FakeMemory, incarnation: int = 0) -> MooncakeWorker:
        worker: MooncakeWorker | None = None

        def on_report() -> None:
            self.loop.call_later(0, poll)

        def poll() -> None:
            if worker is not None and (output := worker.get_finished(())) is not None:
                self._note(instance, output)

        identity = WorkerIdentity(instance, incarnation)
        worker = MooncakeWorker(
            identity,
            role,
            groups=self._groups,
            config=self._config,
            behaviour=self._switches,
            bus=self.bus_of(instance),
            memory=register_rows(memory, self._groups, identity),
            sink=self.sink,
            on_report=on_report,
            encodes_messages=self._encodes,
        )
        return worker

    def _note(self, instance: str, output: KVConnectorOutput) -> None:
        sent = output.finished_sending
        if shares_names(self._switches):
            sent = [name.replace("d", "p", 1) for name in sent]
        finished = [*sent, *output.finished_recving]
        self.reports.append((instance, self.seconds, finished, output.failed_recving, output.invalid_block_ids))

    # -- what schedulers do -------------------------------------------------------------------------------

    def announce(self, p_req_id: str = "p1", transfer_id: str = "X1") -> None:
        self._tell_producer(p_req_id, transfer_id, [])

    def finish(
        self, *block_ids: list[int], p_req_id: str = "p1", transfer_id: str = "X1", announce: bool = True
    ) -> None:
        if announce:
            self.announce(p_req_id, transfer_id)
        self._tell_producer(p_req_id, transfer_id, list(block_ids) or [[1, 2, 3]])

    def _tell_producer(self, p_req_id: str, transfer_id: str, blocks: list[list[int]]) -> None:
        name = leg_name(p_req_id, self._switches)
        self.p.start_load_kv(MooncakeConnectorMetadata(reqs_to_send={name: (transfer_id, blocks)}))

    def drop(self, *transfer_ids: str) -> None:
        self.p.start_load_kv(MooncakeConnectorMetadata(reqs_not_processed=dict.fromkeys(transfer_ids)))

    def pull(self, *requests: "PullReqMeta") -> None:
        wanted: dict[str, dict[str, PullReqMeta]] = {}
        for request in requests or (request_for("d1"),):
            wanted.setdefault(request.remote_engine_id, {})[request.d_req_id] = request
        self.d.start_load_kv(MooncakeConnectorMetadata(reqs_to_recv=wanted))

    # -- time ---------------------------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        return round(self.loop.now_ns / NS_PER_S, 3)

    def run(self, seconds: float | None = None) -> None:
        """Until nothing is left, or for so long."""
        if seconds is None:
            assert self.loop.run_until_quiescent()
            return
        end_ns = self.loop.now_ns + round(seconds * NS_PER_S)
        timer = self.loop.call_at(end_ns + 1, lambda: None)
        self.loop.run_until_quiescent(end_ns)
        self.loop.cancel(timer)
        self.loop.now_ns = end_ns

    # -- what happened ------------------------------------------------------------------------------------

    def reports_of(self, instance: str) -> list[tuple[float, list[str], list[str], list[int]]]:
        return [report[1:] for report in self.reports if report[0] == instance]

    def events(self, kind: str) -> list[Event]:
        return [event for event in self.sink.events if event.kind == kind]

    def settled(self) -> list[tuple[str | None, str | None, str | None]]:
        return [(event.request_id, event.status, event.cause) for event in self.events("pull.settled")]


def request_for(
    d_req_id: str,
    transfer_id: str | None = None,
    blocks: list[list[int]] | None = None,
    *,
    engine_id: str = "P0#0",
    bootstrap: str = bootstrap_url("P0"),
) -> PullReqMeta:
    """What a consumer's scheduler asks for: by default blocks 4, 5, 6 of transfer X1 for d1, X2 for d2, ..."""
    return PullReqMeta(
        d_req_id=d_req_id,
        transfer_id=transfer_id or f"X{d_req_id[1:]}",
        local_block_ids=[[4, 5, 6]] if blocks is None else blocks,
        remote_engine_id=engine_id,
        remote_bootstrap_addr=bootstrap,
    )


class Latency:
    """Every message takes 1 ms, and 1 ns for each of its bytes."""

    def transit_ns(self, envelope: Envelope, now_ns: int) -> int:
        return NS_PER_MS + envelope.size_bytes
