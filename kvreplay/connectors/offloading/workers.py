"""All ranks' halves of the connector in virtual time, on the event loop and the bus.

A rank orders each copy by a message to its copy engine (`copy.job`: refused, late, damaged or lost by faults), hears of
its end by another (`copy.done`), and passes that on to the scheduler by a third (`rank.report`). The engine collects at
the end of a step what has arrived by then; where no fault wants the reports, they are made only then.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial

from kvreplay.connectors.offloading import copies
from kvreplay.connectors.offloading.behaviour import OffloadBehaviour
from kvreplay.connectors.offloading.config import OffloadingConfig
from kvreplay.connectors.offloading.copy_queues import CopyOrder, CopyQueues, conversation_of
from kvreplay.connectors.offloading.cpu_buffers import ChunkContents, CpuBuffers
from kvreplay.connectors.offloading.layout import OffloadLayout
from kvreplay.connectors.offloading.manager_bus import is_watched
from kvreplay.connectors.offloading.reports import RankReport, ReportBox
from kvreplay.connectors.offloading.structs import OffloadingConnectorMetadata, OffloadingOutput, TransferJob
from kvreplay.connectors.offloading.worker import CopyResult, OffloadingWorker
from kvreplay.ids import nanoseconds
from kvreplay.kv.memory import KVMemory
from kvreplay.sim.bus import Bus
from kvreplay.sim.envelope import COPY_DONE, COPY_JOB, RANK_REPORT, Answer, Corruption, Envelope
from kvreplay.sim.event_loop import FOREVER_NS
from kvreplay.transport.handover import hand_over
from kvreplay.transport.virtual import VirtualDriver


def worker_address(instance: str, rank: int) -> str:
    return f"{instance}/offload/{rank}"


def copy_address(instance: str, rank: int) -> str:
    return f"{instance}/copies/{rank}"


def report_address(instance: str) -> str:
    return f"{instance}/offload"


class _Rank:
    """One rank: its worker, and its copy engine behind the bus. Implements `worker.CopyEngine`."""

    def __init__(
        self,
        rank: int,
        instance: str,
        config: OffloadingConfig,
        layout: OffloadLayout,
        behaviour: OffloadBehaviour,
        bus: Bus,
        memory: KVMemory,
        buffers: CpuBuffers,
        *,
        is_store_writer: bool,
        on_report: Callable[[], None],
    ) -> None:
        self.rank = rank
        self.address = worker_address(instance, rank)
        self.blocked_until_ns = 0
        self.compute_until_ns = 0
        """When the compute stream is done with what has been launched."""
        self._bus = bus
        self._copy_address = copy_address(instance, rank)
        self._size_of = partial(copies.size_bytes, layout=layout)
        verifies = behaviour.integrity == "checksum"

        def move(job: TransferJob, corruptions: Sequence[Corruption]) -> bool:
            copy = copies.store if job.is_store else copies.load
            return copy(job, layout, memory, buffers, corruptions, verifies=verifies)

        self.buffers = buffers
        self.queues = CopyQueues(
            config,
            address=self.address,
            size_of=self._size_of,
            move=move,
            bounds_copies=behaviour.acknowledgements == "checked",
            announces=lambda: is_watched(bus, COPY_DONE),
        )
        self.driver = VirtualDriver(self.queues, bus, on_report=on_report)
        # Failures are judged where the engine collects reports.
        self.worker = OffloadingWorker(
            self,
            is_store_writer=is_store_writer,
            survives_failures=True,
            survives_refusals=behaviour.failed_copy == "request",
            drops_without_forward=behaviour.no_forward == "drop",
        )
        bus.listen(self.address, self.driver.receive)
        bus.serve(self._copy_address, self._take_order)

    # -- the copy engine --------------------------------------------------------------------------------------

    def submit(self, queue: str, job: TransferJob) -> bool:
        self.queues.now_ns = self._bus.loop.now_ns
        if not is_watched(self._bus, COPY_JOB):
            self.queues.submit(queue, job, not_before_ns=self.compute_until_ns)
            return True
        answer = self._bus.ask(
            Envelope(
                kind=COPY_JOB,
                source=self.address,
                destination=self._copy_address,
                payload=CopyOrder(queue, job),
                request_ids=(job.req_id,),
                conversation=conversation_of(self.address, job),
                size_bytes=self._size_of(job),
            )
        )
        if answer.never:
            # It is in the queue, and stays there.
            self.queues.submit(queue, job, not_before_ns=self.compute_until_ns)
            self.queues.prolong(job.job_id, FOREVER_NS)
        elif answer.payload is False:
            return False
        elif answer.delay_ns:
            self.queues.prolong(job.job_id, answer.delay_ns)
        return True

    def _take_order(self, envelope: Envelope) -> Answer:
        order: CopyOrder = envelope.payload
        if order.is_refused:
            return Answer(payload=False)
        self.queues.submit(
            order.queue, order.job, not_before_ns=self.compute_until_ns, escapes_waits=order.escapes_waits
        )
        if envelope.corruptions:
            self.queues.corrupt(order.job.job_id, envelope.corruptions)
        return Answer(payload=True)

    def wait(self, job_ids: Collection[int]) -> None:
        self.queues.now_ns = self._bus.loop.now_ns
        self.blocked_until_ns = max(self.blocked_until_ns, self.queues.wait(job_ids))

    def take_finished(self) -> list[CopyResult]:
        return self.queues.take_finished()

    # -- reports ----------------------------------------------------------------------------------------------

    @property
    def has_report(self) -> bool:
        return self.queues.has_report or self.worker.has_report

    def take_reports(self) -> list[RankReport]:
        reports = self.worker.rank_reports(self.rank)
        self.driver.report_fetched()
        return reports

    def close(self) -> None:
        self._bus.silence(self.address)
        self._bus.silence(self._copy_address)
        self.driver.close()


class OffloadingWorkers:
    """The workers' half as the engine sees it (`engine.connector.WorkerConnector`).

    `memories`: one per rank. `is_replicated`: all ranks hold the same KV, and the first writes for all. `on_report` is
    called when a report has arrived, so that a parked instance can wake.
    """

    def __init__(
        self,
        instance: str,
        *,
        config: OffloadingConfig,
        layout: OffloadLayout,
        behaviour: OffloadBehaviour,
        bus: Bus,
        memories: Sequence[KVMemory],
        num_words: int,
        on_report: Callable[[], None],
        is_replicated: bool = False,
    ) -> None:
        self._bus = bus
        self._address = report_address(instance)
        self._repeats = behaviour.acknowledgements == "checked"
        self._repeat_ns = nanoseconds(config.report_timeout)
        self.box = ReportBox(
            len(memories), survives_failures=behaviour.failed_copy == "request", ignores_repeats=self._repeats
        )
        self._on_report = on_report
        self._is_closed = False
        num_chunks = config.num_chunks(layout.groups, 1 if is_replicated else len(memories))

        def buffers() -> CpuBuffers:
            keeps_sums = behaviour.integrity == "checksum"
            return CpuBuffers(num_chunks, layout.blocks_per_chunk, num_words, keeps_sums=keeps_sums)

        shared = buffers() if is_replicated else None
        self.ranks = [
            _Rank(
                rank,
                instance,
                config,
                layout,
                behaviour,
                bus,
                memory,
                shared or buffers(),
                is_store_writer=not is_replicated or rank == 0,
                on_report=partial(self._report, rank),
            )
            for rank, memory in enumerate(memories)
        ]

    # -- what the engine calls --------------------------------------------------------------------------------

    def handle_preemptions(self, metadata: OffloadingConnectorMetadata) -> None:
        """Flush, and start what the last step left."""
        self.box.expect((*metadata.load_jobs.values(), *metadata.store_jobs.values()))
        for rank in self.ranks:
            rank.blocked_until_ns = rank.compute_until_ns = 0
            rank.worker.handle_preemptions(metadata)
            rank.driver.pump()

    def start_load_kv(self, metadata: OffloadingConnectorMetadata, compute_until_ns: int = 0) -> int:
        """The rest of what a step does before its forward pass. `handle_preemptions` comes first.

        Returns until when the step is blocked; FOREVER_NS: for good. `compute_until_ns`: when the forward pass is
        over that is launched before its asynchronous loads; they wait for it.
        """
        until_ns = self._bus.loop.now_ns
        has_loads = bool(metadata.load_jobs)
        has_sync_load = has_loads and any(job.is_sync for job in metadata.load_jobs.values())
        for rank in self.ranks:
            rank.compute_until_ns = 0 if has_sync_load else compute_until_ns
            if has_loads:
                rank.worker.start_load_kv(metadata)
            if metadata.store_jobs:
                rank.worker.wait_for_save(metadata)
            if has_loads:
                rank.driver.pump()
            until_ns = max(until_ns, rank.blocked_until_ns)
            if rank.has_report:
                self._report(rank.rank)
        return until_ns

    def has_report(self) -> bool:
        if self.box.has_news:
            return True
        return not is_watched(self._bus, RANK_REPORT) and any(rank.has_report for rank in self.ranks)

    def gives_back(self) -> bool:
        return False  # nobody waits for a copy to free blocks

    def get_finished(self, finished_req_ids: Sequence[str]) -> OffloadingOutput | None:
        """Raises EngineFatal where a copy has failed and the worker dies of it."""
        if not is_watched(self._bus, RANK_REPORT):
            for rank in self.ranks:
                if rank.has_report:
                    self.box.put_all(rank.take_reports())
        return self.box.collect() if self.box.has_news else None

    def failure_reason(self, request_id: str) -> str | None:
        """Why a load of this request failed; asked once."""
        return self.box.causes.pop(request_id, None)

    def shutdown(self) -> None:
        """The process dies: nothing is heard, sent, copied or timed any more."""
        self._is_closed = True
        for rank in self.ranks:
            rank.close()

    # -- the tier's memory, for secondary tiers ---------------------------------------------------------------

    def take_chunk(self, chunk_id: int) -> Sequence[ChunkContents]:
        return [rank.buffers.take_chunk(chunk_id) for rank in self.ranks]

    def put_chunk(self, chunk_id: int, contents: Sequence[ChunkContents]) -> None:
        for rank, of_rank in zip(self.ranks, contents, strict=True):
            rank.buffers.put_chunk(chunk_id, of_rank)

    # -- reports ----------------------------------------------------------------------------------------------

    def _report(self, rank: int) -> None:
        """Some of the rank's copies are over."""
        if not is_watched(self._bus, RANK_REPORT):
            if not self._is_closed:
                self._on_report()
            return
        for report in self.ranks[rank].take_reports():
            self._send(report, attempt=0)

    def _send(self, report: RankReport, *, attempt: int) -> None:
        if self._is_closed:
            return
        if not is_watched(self._bus, RANK_REPORT):
            self._take(report)
            return
        job = self.box.job(report.job_id)
        if self._repeats and job is not None and job.is_sync and report.failure is not None:
            # The step waits for this copy, and sees itself how it ends.
            self._take(report)
        envelope = Envelope(
            kind=RANK_REPORT,
            source=self.ranks[report.rank].address,
            destination=self._address,
            payload=report,
            request_ids=(job.req_id,) if job is not None else (),
            conversation=f"{self._address}/job/{report.job_id}",
            attempt=attempt,
            peer_index=report.rank,
            num_peers=len(self.ranks),
            reply_index=attempt,
        )
        hand_over(self._bus, envelope, self._receive)
        if self._repeats:
            self._bus.loop.call_later(self._repeat_ns, lambda: self._repeat(report, attempt + 1))

    def _repeat(self, report: RankReport, attempt: int) -> None:
        if not self.box.has_arrived(report):
            self._send(report, attempt=attempt)

    def _receive(self, envelope: Envelope) -> None:
        self._take(envelope.payload)

    def _take(self, report: RankReport) -> None:
        if self._is_closed:
            return
        self.box.put_all((report,))
        self._on_report()
