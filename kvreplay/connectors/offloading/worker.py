"""One rank's half of the connector: when copies are started, waited for and reported (vLLM: offloading/worker.py).

Stores of a step start at the beginning of the next one, when the tokens they hold have been computed and sampled.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from kvreplay.connectors.offloading.reports import RankReport
from kvreplay.connectors.offloading.structs import OffloadingConnectorMetadata, TransferJob
from kvreplay.errors import EngineFatal

STORES: Final = "S"
LOADS: Final = "L"
SYNC_LOADS: Final = "Y"
QUEUES: Final = (STORES, LOADS, SYNC_LOADS)
"""In order of reporting. Copies of one queue start and end in the order of their submission."""
_PLACE_OF: Final = {queue: place for place, queue in enumerate(QUEUES)}


class CopyResult(NamedTuple):
    job_id: int
    success: bool = True
    cause: str | None = None
    """Why it failed."""
    queue: str = ""


class CopyEngine(Protocol):
    """What carries copies out."""

    def submit(self, queue: str, job: TransferJob) -> bool:
        """Append to a queue. False: it was not taken."""
        ...

    def wait(self, job_ids: Collection[int]) -> None:
        """Block until these are over, and with them whatever is before them in their queues. Unknown ones are."""
        ...

    def take_finished(self) -> list[CopyResult]:
        """What has ended since the last call, queue by queue; a copy that is not over hides those behind it."""
        ...


@dataclass(slots=True)
class WorkerReport:
    """What one rank says at the end of a step."""

    completed: list[int] = field(default_factory=list)
    finished_recving: list[str] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.completed)


class OffloadingWorker:
    """`is_store_writer`: False on ranks whose KV is a copy of another's; they acknowledge stores without copying.

    `survives_failures`: a failed copy is reported instead of killing the worker; `survives_refusals`: so is one that is
    not even taken. `drops_without_forward`: stores of a
    step that computes nothing are lost, as before vllm#41945.
    """

    def __init__(
        self,
        engine: CopyEngine,
        *,
        is_store_writer: bool = True,
        survives_failures: bool = False,
        survives_refusals: bool = False,
        drops_without_forward: bool = False,
    ) -> None:
        self._engine = engine
        self._is_store_writer = is_store_writer
        self._survives_failures = survives_failures
        self._survives_refusals = survives_refusals
        self._drops_without_forward = drops_without_forward
        self._loads: dict[int, str | None] = {}
        """Loads in flight → the request to report; None: it does not wait for a report."""
        self._unsubmitted: list[TransferJob] = []
        self._acknowledged: list[int] = []
        """Stores that this rank has nothing to do for."""
        self._failed: list[CopyResult] = []
        """Copies that were not even begun."""

    @property
    def is_busy(self) -> bool:
        """Whether a store waits for the next step."""
        return bool(self._unsubmitted)

    # -- in a step, in this order -----------------------------------------------------------------------------

    def handle_preemptions(self, metadata: OffloadingConnectorMetadata) -> None:
        """Before any block can be overwritten: start what the last step left, and finish what is to be flushed."""
        for job_id in metadata.jobs_to_flush:
            job = metadata.store_jobs.get(job_id)
            if job is not None:
                self._defer(job)
        for job in self._unsubmitted:
            self._submit(STORES, job)
        self._unsubmitted.clear()
        if metadata.jobs_to_flush:
            self._engine.wait(metadata.jobs_to_flush)

    def start_load_kv(self, metadata: OffloadingConnectorMetadata) -> None:
        awaited: list[int] = []
        for job_id, job in metadata.load_jobs.items():
            if job.is_sync and job.failure is None:
                awaited.append(job_id)
            # The request of a synchronous load runs in this step: nobody waits for a report.
            self._loads[job_id] = None if job.is_sync else job.req_id
            if job.failure is not None:
                self._failed.append(CopyResult(job_id, False, job.failure))
                continue
            self._submit(SYNC_LOADS if job.is_sync else LOADS, job)
        if awaited:
            self._engine.wait(awaited)

    def wait_for_save(self, metadata: OffloadingConnectorMetadata) -> None:
        """Keep this step's stores for the next; those that had to be flushed are over."""
        if self._drops_without_forward and not metadata.has_forward:
            return
        for job_id, job in metadata.store_jobs.items():
            if job_id not in metadata.jobs_to_flush:
                self._defer(job)

    def get_finished(self) -> WorkerReport:
        report = WorkerReport()
        report.completed, self._acknowledged = self._acknowledged, []
        failed, self._failed = self._failed, []
        for result in (*failed, *self._engine.take_finished()):
            self._note_result(result, report)
        return report

    def rank_reports(self, rank: int) -> list[RankReport]:
        """The same, as messages to the scheduler."""
        if not self._loads and not self._failed:  # nor any failure: as below, for stores only
            acknowledged, self._acknowledged = self._acknowledged, []
            results = self._engine.take_finished()
            if all(result.success for result in results):
                return [RankReport(rank, job_id, _PLACE_OF[STORES]) for job_id in acknowledged] + [
                    RankReport(rank, result.job_id, _PLACE_OF[STORES]) for result in results
                ]
            self._acknowledged, self._failed = acknowledged, results
        is_load = {job_id: req_id is not None for job_id, req_id in self._loads.items()}
        report = self.get_finished()
        return [
            RankReport(
                rank,
                job_id,
                _PLACE_OF[STORES if job_id not in is_load else LOADS if is_load[job_id] else SYNC_LOADS],
                report.failed.get(job_id),
            )
            for job_id in report.completed
        ]

    @property
    def has_report(self) -> bool:
        """Whether it knows of any end that no copy engine has to be asked for."""
        return bool(self._acknowledged or self._failed)

    def _note_result(self, result: CopyResult, report: WorkerReport) -> None:
        if not result.success:
            if not self._survives_failures:
                raise EngineFatal("AssertionError", "get_finished: transfer_result.success")
            report.failed[result.job_id] = result.cause or "copy failed"
        report.completed.append(result.job_id)
        req_id = self._loads.pop(result.job_id, None)
        if req_id is not None:
            report.finished_recving.append(req_id)

    def _defer(self, job: TransferJob) -> None:
        if self._is_store_writer:
            self._unsubmitted.append(job)
        else:
            self._acknowledged.append(job.job_id)

    def _submit(self, queue: str, job: TransferJob) -> None:
        if self._engine.submit(queue, job):
            return
        if not self._survives_refusals:
            raise EngineFatal("AssertionError", "start_kv_transfers: success")
        self._failed.append(CopyResult(job.job_id, False, "copy refused", queue))
