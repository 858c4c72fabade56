"""What ranks have reported, and what it comes to for the engine (vLLM: KVOutputAggregator)."""

from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, NamedTuple

from kvreplay.connectors.offloading.structs import OffloadingOutput, TransferJob
from kvreplay.errors import EngineFatal


class RankReport(NamedTuple):
    """One rank says that a job is over. `order`: of two that arrive in one step the lower one counts first."""

    rank: int
    job_id: int
    order: int
    failure: str | None = None


_RANK_AND_ORDER: Final = attrgetter("rank", "order")


@dataclass(slots=True)
class _Expected:
    job: TransferJob
    reported: int = 0
    """Ranks that have, a bit for each."""
    failure: str | None = None

    def is_reported_by(self, rank: int) -> bool:
        return bool(self.reported >> rank & 1)


class ReportBox:
    """Gathers reports until the engine collects them.

    A load is over for its request when every rank has said so; a failed one then fails the request. The blocks of one
    that the step waited for are invalid at once. `survives_failures`: else the worker dies of a failed copy.
    `ignores_repeats`: else a rank that reports a job twice is counted twice.
    """

    def __init__(self, num_ranks: int, *, survives_failures: bool, ignores_repeats: bool) -> None:
        self.causes: dict[str, str] = {}
        """Why each failed request failed, until its owner asks."""
        self._all_ranks = (1 << num_ranks) - 1
        self._survives_failures = survives_failures
        self._ignores_repeats = ignores_repeats
        self._jobs: dict[int, _Expected] = {}
        self._news: list[RankReport] = []

    @property
    def has_news(self) -> bool:
        return bool(self._news)

    def expect(self, jobs: Iterable[TransferJob]) -> None:
        for job in jobs:
            self._jobs[job.job_id] = _Expected(job)

    def job(self, job_id: int) -> TransferJob | None:
        """None once every rank has reported it."""
        expected = self._jobs.get(job_id)
        return None if expected is None else expected.job

    def has_arrived(self, report: RankReport) -> bool:
        expected = self._jobs.get(report.job_id)
        is_news = any(news[:2] == report[:2] for news in self._news)
        return is_news or expected is None or expected.is_reported_by(report.rank)

    def put_all(self, reports: Iterable[RankReport]) -> None:
        for report in reports:
            if not (self._ignores_repeats and self.has_arrived(report)):
                self._news.append(report)

    def collect(self) -> OffloadingOutput:
        """Everything since the last time. Raises EngineFatal if a worker has died of it."""
        news, self._news = self._news, []
        if len(news) > 1:
            news.sort(key=_RANK_AND_ORDER)
        output = OffloadingOutput()
        for report in news:
            if report.failure is not None and not self._survives_failures:
                raise EngineFatal("AssertionError", "get_finished: transfer_result.success")
            output.completed_jobs[report.job_id] = output.completed_jobs.get(report.job_id, 0) + 1
            expected = self._jobs.get(report.job_id)
            if expected is not None and not expected.is_reported_by(report.rank):
                self._note(expected, report, output)
        return output

    def _note(self, expected: _Expected, report: RankReport, output: OffloadingOutput) -> None:
        job = expected.job
        expected.reported |= 1 << report.rank
        if report.failure is not None:
            expected.failure = expected.failure or report.failure
            output.failed_jobs[job.job_id] = expected.failure
            if job.is_sync:
                output.invalid_block_ids += [block_id for block_id in job.gpu.block_ids.tolist() if block_id]
        if expected.reported != self._all_ranks:
            return
        del self._jobs[job.job_id]
        if job.is_store or job.is_sync:
            return
        output.finished_recving.append(job.req_id)
        if expected.failure is not None:
            output.failed_recving.append(job.req_id)
            self.causes[job.req_id] = expected.failure
