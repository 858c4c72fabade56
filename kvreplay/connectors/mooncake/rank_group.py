"""All worker ranks of one engine, which its scheduler hears as one."""

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from kvreplay.behaviour import Behaviour
from kvreplay.connectors.mooncake.config import MooncakeConfig
from kvreplay.connectors.mooncake.identity import WorkerIdentity
from kvreplay.connectors.mooncake.ranks import all_ranks
from kvreplay.connectors.mooncake.sharding import Sharding
from kvreplay.connectors.mooncake.structs import MooncakeConnectorMetadata
from kvreplay.connectors.mooncake.worker import MooncakeWorker, register_rows
from kvreplay.engine.aggregator import KVOutputAggregator
from kvreplay.engine.connector import KVConnectorOutput
from kvreplay.errors import EngineFatal
from kvreplay.events import EventSink
from kvreplay.ids import NS_PER_S, InstanceId
from kvreplay.kv.memory import KVMemory
from kvreplay.kv.specs import KVCacheGroupSpec
from kvreplay.sim.bus import Bus
from kvreplay.sim.envelope import RANK_REPORT, Envelope
from kvreplay.sim.event_loop import Timer
from kvreplay.transport.handover import hand_over

_RETRY_NS: Final = NS_PER_S
_MAX_RETRIES: Final = 600


class MooncakeWorkers(Protocol):
    """The worker side of one engine, of one rank or of many (`engine.connector.WorkerConnector`)."""

    def handle_preemptions(self, metadata: MooncakeConnectorMetadata) -> None: ...
    def start_load_kv(self, metadata: MooncakeConnectorMetadata, compute_until_ns: int = 0) -> int: ...
    def has_report(self) -> bool: ...
    def gives_back(self) -> bool: ...
    def get_finished(self, finished_req_ids: Sequence[str]) -> KVConnectorOutput | None: ...
    def failure_reason(self, request_id: str) -> str | None:
        """Why the pull of this request failed; asked once."""
        ...

    def shutdown(self) -> None: ...


class RankReport:
    """What one rank brings to one step. `number` counts the reports of its rank."""

    __slots__ = ("number", "output", "rank")

    def __init__(self, rank: int, number: int, output: KVConnectorOutput) -> None:
        self.rank = rank
        self.number = number
        self.output = output


class RankGroup:
    """One worker per rank, the first of which starts a producer's bootstrap server, and their aggregator.

    A rank's report is a message that a fault can lose, double or delay. `reports`, the switch rank_reports:
    acknowledged, each counts once and in its order, a lost one is sent again, and none counts but the rank's own.
    """

    def __init__(
        self, workers: Sequence[MooncakeWorker], *, bus: Bus, reports: str, on_report: Callable[[], None]
    ) -> None:
        assert workers
        self.workers = workers
        self._bus = bus
        self._acknowledges = reports == "acknowledged"
        self._on_report = on_report
        self._instance = workers[0].identity.instance
        self._aggregator = KVOutputAggregator(1 if reports == "any" else len(workers))
        self._numbers = [0] * len(workers)
        self._num_taken = [0] * len(workers)
        self._early: list[dict[int, RankReport]] = [{} for _ in workers]
        """Reports that wait for an earlier one of their rank."""
        self._arrived: list[RankReport] = []
        self._loading: dict[str, Sequence[Sequence[int]]] = {}
        """Requests that are being loaded → their blocks: a report of wrong blocks does not say whose they are."""
        self._unacknowledged: dict[tuple[int, int], tuple[RankReport, int]] = {}
        """(rank, number) → the report, and how often it was sent before."""
        self._retry: Timer | None = None
        self._is_collecting = False
        self._is_dead = False

    def handle_preemptions(self, metadata: MooncakeConnectorMetadata) -> None:
        """Nothing is written from blocks that could be given away."""

    def start_load_kv(self, metadata: MooncakeConnectorMetadata, compute_until_ns: int = 0) -> int:
        for wanted in metadata.reqs_to_recv.values():
            self._loading.update({req_id: meta.local_block_ids for req_id, meta in wanted.items() if meta.has_blocks})
        return max(worker.start_load_kv(metadata, compute_until_ns) for worker in self.workers)

    def has_report(self) -> bool:
        return bool(self._arrived) or any(worker.has_report() for worker in self.workers)

    def gives_back(self) -> bool:
        return any(report.output.finished_sending for report in self._arrived) or any(
            worker.gives_back() for worker in self.workers
        )

    def get_finished(self, finished_req_ids: Sequence[str]) -> KVConnectorOutput | None:
        self._is_collecting = True
        for rank, worker in enumerate(self.workers):
            output = worker.get_finished(finished_req_ids)
            if output is not None:
                self._send(self._next_report(rank, output), 0)
        self._is_collecting = False
        self._retry_later()
        arrived, self._arrived = self._arrived, []
        if not arrived:
            return None
        output = self._aggregator.aggregate([report.output for report in arrived])
        for req_id in output.finished_recving:
            self._loading.pop(req_id, None)
        return output or None

    def failure_reason(self, request_id: str) -> str | None:
        reasons = [worker.failure_reason(request_id) for worker in self.workers]
        return next((reason for reason in reasons if reason is not None), None)

    def shutdown(self) -> None:
        self._is_dead = True
        self._bus.loop.cancel(self._retry)
        for worker in self.workers:
            worker.shutdown()

    # -- reports ------------------------------------------------------------------------------------------

    def _next_report(self, rank: int, output: KVConnectorOutput) -> RankReport:
        self._numbers[rank] += 1
        report = RankReport(rank, self._numbers[rank], output)
        if self._acknowledges:
            self._unacknowledged[rank, report.number] = (report, 0)
        return report

    def _send(self, report: RankReport, attempt: int) -> None:
        envelope = Envelope(
            kind=RANK_REPORT,
            source=f"{self._instance}/rank/{report.rank}",
            destination=f"{self._instance}/scheduler",
            payload=report,
            request_ids=self._named_in(report.output),
            conversation=f"rank/{self.workers[0].identity.engine_id}/{report.rank}/{report.number}",
            attempt=attempt,
            peer_index=report.rank,
            num_peers=len(self.workers),
        )
        hand_over(self._bus, envelope, self._receive)

    def _named_in(self, output: KVConnectorOutput) -> tuple[str, ...]:
        names = dict.fromkeys((*output.finished_sending, *output.finished_recving, *output.failed_recving))
        wrong = frozenset(output.invalid_block_ids)
        for req_id, of_groups in self._loading.items() if wrong else ():
            if not all(wrong.isdisjoint(block_ids) for block_ids in of_groups):
                names[req_id] = None
        return tuple(names)

    def _send_again(self) -> None:
        """What has been lost on its way; for a while only, so that a run with a rank that is cut off ends."""
        self._retry = None
        for key, (report, attempt) in list(self._unacknowledged.items()):
            if attempt < _MAX_RETRIES:
                self._unacknowledged[key] = (report, attempt + 1)
                self._send(report, attempt + 1)
        self._retry_later()

    def _retry_later(self) -> None:
        if self._retry is None and any(attempt < _MAX_RETRIES for _, attempt in self._unacknowledged.values()):
            self._retry = self._bus.loop.call_later(_RETRY_NS, self._send_again)

    def _receive(self, envelope: Envelope) -> None:
        report: RankReport = envelope.payload
        if self._is_dead:
            return
        if not self._acknowledges:
            self._arrived.append(report)
        elif self._is_expected(report):
            self._acknowledge(report)
        else:
            return  # counted before, or not this rank's word
        if self._arrived and not self._is_collecting:
            self._on_report()

    def _is_expected(self, report: RankReport) -> bool:
        expected = self._unacknowledged.get((report.rank, report.number))
        return expected is not None and expected[0] is report

    def _acknowledge(self, report: RankReport) -> None:
        """Take it once those before it are there: a completion must not overtake its failure."""
        del self._unacknowledged[report.rank, report.number]
        if not self._unacknowledged:
            self._bus.loop.cancel(self._retry)
            self._retry = None
        early = self._early[report.rank]
        early[report.number] = report
        while (due := early.pop(self._num_taken[report.rank] + 1, None)) is not None:
            self._num_taken[report.rank] += 1
            self._arrived.append(due)


def start_workers(
    instance: InstanceId,
    incarnation: int,
    role: str,
    *,
    engine_id: str | None = None,
    tp_size: int = 1,
    pp_size: int = 1,
    sharding: Sharding | None = None,
    groups: Sequence[KVCacheGroupSpec],
    config: MooncakeConfig,
    behaviour: Behaviour,
    bus: Bus,
    memory: KVMemory,
    sink: EventSink,
    on_report: Callable[[], None],
    dp_rank: int = 0,
    on_registered: Callable[[EngineFatal | None], None] | None = None,
    starves: Callable[[], bool] | None = None,
) -> MooncakeWorkers:
    """The workers of one engine. `memory`: its rows, in which the ranks' shares follow each other (`Sharding`).

    `engine_id`: None gives each incarnation its own. `on_registered` is told once: when every rank of a producer has
    registered, or of the first that could not.
    """
    workers: list[MooncakeWorker] = []
    left = tp_size * pp_size

    def registered(failure: EngineFatal | None) -> None:
        nonlocal left
        left -= 1
        if on_registered is not None and (left == 0 or failure is not None):
            on_registered(failure)

    for ranks in all_ranks(tp_size, pp_size, dp_rank):
        identity = WorkerIdentity(instance, incarnation, ranks, engine_id)
        workers.append(
            MooncakeWorker(
                identity,
                role,
                groups=groups,
                config=config,
                behaviour=behaviour,
                bus=bus,
                memory=register_rows(memory, groups, identity, sharding),
                sink=sink,
                on_report=on_report,
                on_registered=registered,
                starves=starves,
            )
        )
    if len(workers) == 1:
        return workers[0]
    return RankGroup(workers, bus=bus, reports=behaviour["rank_reports"], on_report=on_report)
