"""One rank's half of the Mooncake connector, on the event loop and the bus."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvreplay.behaviour import Behaviour
from kvreplay.connectors.mooncake import log
from kvreplay.connectors.mooncake.addresses import SCHEME, bootstrap_address, registration_address
from kvreplay.connectors.mooncake.bootstrap import serve
from kvreplay.connectors.mooncake.config import MooncakeConfig
from kvreplay.connectors.mooncake.consumer import Consumer
from kvreplay.connectors.mooncake.identity import WorkerIdentity
from kvreplay.connectors.mooncake.layout import KVLayout
from kvreplay.connectors.mooncake.log import LogSink
from kvreplay.connectors.mooncake.memory import RankMemory, RowMemory
from kvreplay.connectors.mooncake.plan import HeadLayout
from kvreplay.connectors.mooncake.producer import Producer
from kvreplay.connectors.mooncake.registration import Registration
from kvreplay.connectors.mooncake.scheduler import TransferGroup
from kvreplay.connectors.mooncake.sharding import Sharding
from kvreplay.connectors.mooncake.stats import MooncakeStats
from kvreplay.connectors.mooncake.structs import (
    CONNECTION_CLOSED,
    STRAY_FRAMES,
    MooncakeConnectorMetadata,
    MooncakeXferMetadata,
    MooncakeXferResponse,
    RegisterWorkerPayload,
    encode,
)
from kvreplay.engine.config import KV_ROLES
from kvreplay.engine.connector import KVConnectorOutput
from kvreplay.errors import EngineFatal
from kvreplay.events import EventSink
from kvreplay.kv.memory import KVMemory
from kvreplay.kv.specs import MAMBA, KVCacheGroupSpec
from kvreplay.sim.bus import Bus
from kvreplay.sim.envelope import BOOTSTRAP_ANSWER, PULL_REPLY, PULL_REQUEST, WRITE_DATA, WRITE_DONE, Envelope
from kvreplay.transport.undelivered import Undelivered
from kvreplay.transport.virtual import VirtualDriver


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredMemory:
    """A rank's KV memory as its transfer engine knows it.

    `kernel_ratio`: into how many blocks of the memory an attention block is cut.
    """

    contents: RankMemory
    layout: KVLayout
    heads: HeadLayout
    kernel_ratio: int = 1


def register_rows(
    memory: KVMemory,
    groups: Sequence[KVCacheGroupSpec],
    identity: WorkerIdentity,
    sharding: Sharding | None = None,
) -> RegisteredMemory:
    """One region per KV cache group and stage, in rows of words that all ranks of the engine share.

    A share of a row is as long as a block of the first group has tokens (`ShardedBuffers`).
    """
    sharding = sharding or Sharding()
    return RegisteredMemory(
        contents=RowMemory(memory, sharding.columns(groups, identity.ranks)),
        layout=sharding.layout(groups, identity.engine_id, identity.ranks),
        heads=sharding.heads,
    )


class MooncakeWorker:
    """Both halves that its role has, and on the first rank of a producer the bootstrap server, unless there is an
    external one.

    `on_report` is called when `get_finished` would return something, so that a parked instance can wake; also from
    within `start_load_kv`. `on_registered` is told once how the registration of a producer ended: what its engine dies
    of, or None; `registers` False: somebody else registers it. `encodes_messages`: send pulls and replies as the bytes
    of a socket.

    After `shutdown` the object is dead; a restart makes a new one, with the next incarnation in its identity.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        role: str,
        *,
        groups: Sequence[TransferGroup],
        config: MooncakeConfig,
        behaviour: Behaviour,
        bus: Bus,
        memory: RegisteredMemory,
        sink: EventSink,
        on_report: Callable[[], None],
        registers: bool = True,
        on_registered: Callable[[EngineFatal | None], None] | None = None,
        encodes_messages: bool = False,
        log_line: LogSink | None = None,
        starves: Callable[[], bool] | None = None,
    ) -> None:
        assert role in KV_ROLES, role
        self.identity = identity
        self.memory = memory
        self.stats = MooncakeStats()
        self.consumer: Consumer | None = None
        self.producer: Producer | None = None
        self._bus = bus
        self._loop = bus.loop
        self._log = log_line
        self._halves: list[VirtualDriver] = []
        self._bootstrap: VirtualDriver | None = None
        self._registering: VirtualDriver | None = None
        self._on_registered = on_registered
        self._by_kind: dict[str, VirtualDriver] = {}
        self._notifies_peers = behaviour["pull_wait"] == "bounded"
        state_groups = frozenset(index for index, group in enumerate(groups) if group.kind == MAMBA)
        kernel_ratios = [1 if index in state_groups else memory.kernel_ratio for index in range(len(groups))]
        encode_envelope = _encode_payload if encodes_messages else None

        def drive(machine: Consumer | Producer, *kinds: str, reads_together: bool = False) -> VirtualDriver:
            driver = VirtualDriver(
                machine, bus, on_report=on_report, encode=encode_envelope, reads_together=reads_together
            )
            self._halves.append(driver)
            self._by_kind.update(dict.fromkeys(kinds, driver))
            return driver

        if role != "kv_producer":
            self.consumer = Consumer(
                identity,
                config=config,
                behaviour=behaviour,
                layout=memory.layout,
                kernel_ratios=kernel_ratios,
                memory=memory.contents,
                sink=sink,
                stats=self.stats,
                log_line=log_line,
                starves=starves,
            )
            self._consumer_driver = drive(self.consumer, PULL_REPLY, BOOTSTRAP_ANSWER, WRITE_DATA)
            self._undelivered = Undelivered(bus, self._is_open)
            bus.listen(identity.memory_address, self._consumer_driver.receive)
        if role != "kv_consumer":
            self.producer = Producer(
                identity,
                config=config,
                behaviour=behaviour,
                layout=memory.layout,
                heads=memory.heads if behaviour["mooncake_heads"] == "distinct" else memory.heads.uncounted,
                kernel_ratios=kernel_ratios,
                state_groups=state_groups,
                memory=memory.contents,
                sink=sink,
                stats=self.stats,
                log_line=log_line,
            )
            # The listener takes all that is there; the tasks that it wakes run in the loop's next turn.
            self._producer_driver = drive(self.producer, PULL_REQUEST, WRITE_DONE, STRAY_FRAMES, reads_together=True)
            if registers:
                if config.bootstrap_server_address is None and identity.ranks.rank == 0:
                    replaces = behaviour["mooncake_registration"] == "replace"
                    self._bootstrap = serve(bus, identity.instance, replaces=replaces)
                self._register(config)
        bus.listen(identity.address, self._receive, refused=self._refused)

    def configure(self, config: MooncakeConfig) -> None:
        """Change the settings; vLLM reads those of its environment whenever it uses them."""
        for half in (self.consumer, self.producer):
            if half is not None:
                half.configure(config)

    def stall_sender(self, duration_ns: int) -> None:
        """The producer's loop is busy with something else for so long."""
        self._producer_driver.stall(duration_ns)

    @property
    def sender_stalled_until_ns(self) -> int:
        """When the producer's loop goes on; a time that has passed if it is not stalled."""
        return self._producer_driver.stalled_until_ns if self.producer is not None else 0

    # -- what the engine calls ----------------------------------------------------------------------------

    def handle_preemptions(self, metadata: MooncakeConnectorMetadata) -> None:
        """Nothing is written from blocks that could be given away."""

    def start_load_kv(self, metadata: MooncakeConnectorMetadata, compute_until_ns: int = 0) -> int:
        now_ns = self._loop.now_ns
        if self.consumer is not None and metadata.reqs_to_recv:
            self.consumer.start_load_kv(metadata.reqs_to_recv, now_ns)
            self._consumer_driver.pump()
        if self.producer is not None and (metadata.reqs_to_send or metadata.reqs_not_processed):
            self.producer.record_send_reqs(metadata, now_ns)
            self._producer_driver.pump()
        return now_ns  # no step waits for a pull

    def has_report(self) -> bool:
        return (self.consumer is not None and self.consumer.has_report) or (
            self.producer is not None and self.producer.has_report
        )

    def gives_back(self) -> bool:
        return self.producer is not None and self.producer.has_report

    def get_finished(self, finished_req_ids: Sequence[str]) -> KVConnectorOutput | None:
        if self.producer is not None and self.sender_stalled_until_ns > self._loop.now_ns:
            self.producer.note_overdue(self._loop.now_ns)
        if not self.has_report():
            return None
        output = KVConnectorOutput()
        if self.producer is not None:
            output.finished_sending = self.producer.take_finished(self._loop.now_ns)
            self._producer_driver.report_fetched()
            self._producer_driver.pump()
        if self.consumer is not None:
            self.consumer.reports.move_to(output)
            self._consumer_driver.report_fetched()
        if self._log is not None and self._log.debug and (output.finished_sending or output.finished_recving):
            counts = (len(output.finished_sending), len(output.finished_recving))
            self._log(log.MAIN, log.DEBUG, log.POLLED, self.identity.ranks.tp_rank, *counts)
        return output

    def failure_reason(self, request_id: str) -> str | None:
        """Why the pull of this request failed; asked once."""
        return self.consumer.failures.pop(request_id, None) if self.consumer is not None else None

    # -- life ---------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """The process dies: its addresses are silent, its timers and its state are gone."""
        identity, bus = self.identity, self._bus
        bus.silence(identity.address)
        if self.consumer is not None:
            bus.silence(identity.memory_address)
        if self.producer is not None:
            self.producer.shutdown()
        if self._bootstrap is not None:
            bus.silence(bootstrap_address(identity.instance))
            self._bootstrap.close()
        self._end_registration()
        for driver in self._halves:
            driver.close()
        if self._notifies_peers:
            for machine in (self.producer, self.consumer):
                if machine is not None:
                    self._close_connections(machine.open_pulls())

    def _close_connections(self, notices: list[Envelope]) -> None:
        """The operating system closes the sockets: no message of this worker's, and nothing that a fault can stop."""
        bus = self._bus
        for notice in notices:
            delay_ns = bus.network.transit_ns(notice, self._loop.now_ns)
            self._loop.call_later(delay_ns, lambda notice=notice: bus.deliver(notice))  # type: ignore[misc]

    # -- registration -------------------------------------------------------------------------------------

    def _register(self, config: MooncakeConfig) -> None:
        identity, ranks = self.identity, self.identity.ranks
        registration = Registration(
            RegisterWorkerPayload(
                engine_id=identity.engine_id,
                dp_rank=ranks.dp_rank,
                tp_rank=ranks.tp_rank,
                pp_rank=ranks.pp_rank,
                addr=SCHEME + identity.address,
            ),
            config.bootstrap_server_of(identity.instance),
            address=self._registers_at,
            config=config,
            log_line=self._log,
        )
        driver = self._registering = VirtualDriver(
            registration, self._bus, on_report=lambda: self._registered(registration.failure)
        )
        self._bus.listen(self._registers_at, driver.receive, refused=driver.refused)
        registration.start(self._loop.now_ns)
        driver.pump()

    @property
    def _registers_at(self) -> str:
        identity = self.identity
        return registration_address(identity.instance, identity.ranks.rank, identity.incarnation)

    def _registered(self, failure: EngineFatal | None) -> None:
        self._end_registration()
        if self._on_registered is not None:
            self._on_registered(failure)

    def _end_registration(self) -> None:
        if self._registering is not None:
            self._registering.close()
            self._registering = None
            self._bus.silence(self._registers_at)

    # -- messages -----------------------------------------------------------------------------------------

    def _receive(self, envelope: Envelope) -> None:
        kind = envelope.kind
        driver = self._by_kind.get(kind)
        if driver is not None:
            driver.receive(envelope)
            return
        assert kind == CONNECTION_CLOSED, kind
        for driver in self._halves:
            driver.receive(envelope)

    def _refused(self, envelope: Envelope) -> None:
        if envelope.kind == PULL_REQUEST:
            self._undelivered.keep(envelope)
        for driver in self._halves:
            driver.refused(envelope)

    def _is_open(self, envelope: Envelope) -> bool:
        assert self.consumer is not None
        return self.consumer.is_open(envelope.conversation, envelope.attempt)


def _encode_payload(envelope: Envelope) -> Envelope:
    """The envelope as a socket would carry it."""
    payload = envelope.payload
    if isinstance(payload, MooncakeXferMetadata | MooncakeXferResponse):
        envelope.payload = encode(payload)
    return envelope
