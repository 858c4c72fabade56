"""What the offloading vectors simulate below the connector: a copy engine and second tiers with scripted delays."""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

from kvreplay.conformance.offload_workload import Delay, OffloadRequestSpec, OffloadSpec, TierSpec
from kvreplay.connectors.offloading.arrays import Keys
from kvreplay.connectors.offloading.context import OffloadPolicy, RequestContext
from kvreplay.connectors.offloading.manager import LookupResult
from kvreplay.connectors.offloading.structs import TransferJob
from kvreplay.connectors.offloading.tiering import TierJob, TierResult
from kvreplay.connectors.offloading.worker import QUEUES, STORES, CopyResult

Record = dict[str, Any]


class StepClock:
    """The step in progress, and its record."""

    def __init__(self) -> None:
        self.step = 0
        self.record: Record = {}

    def note(self, field: str, row: object) -> None:
        self.record.setdefault(field, []).append(row)


class Delays:
    """How many steps each job takes: as the vector says for the job, its request, or all."""

    def __init__(self, offload: OffloadSpec, requests: Sequence[OffloadRequestSpec]) -> None:
        self._offload = offload
        self._requests = {spec.id: spec for spec in requests}
        self._num_jobs: dict[tuple[str, bool], int] = {}
        self._jobs: dict[int, tuple[str, int]] = {}
        """Job → its request, and how many of its kind that had before."""

    def note(self, job: TransferJob) -> None:
        kind = (job.req_id, job.is_store)
        ordinal = self._num_jobs.get(kind, 0)
        self._num_jobs[kind] = ordinal + 1
        self._jobs[job.job_id] = (job.req_id, ordinal)

    def of(self, queue: str, job_id: int, rank: int) -> int:
        rank_delays = self._offload.rank_delay
        return self._job_delay(queue, job_id, rank) + (rank_delays[rank] if rank < len(rank_delays) else 0)

    def _job_delay(self, queue: str, job_id: int, rank: int) -> int:
        offload = self._offload
        own = offload.job_delay.get(str(job_id))
        if own is not None:
            return _nth(own, rank)
        req_id, ordinal = self._jobs[job_id]
        spec = self._requests[req_id]
        of_request = spec.store_delay if queue == STORES else spec.load_delay
        if of_request is not None:
            return _nth(of_request, ordinal)
        return _nth(offload.store_delay if queue == STORES else offload.load_delay, rank)


def _nth(delay: Delay, index: int) -> int:
    return delay[min(index, len(delay) - 1)] if isinstance(delay, list) else delay


class StepCopyEngine:
    """Three queues, first in, first out: a job is over `delay` steps after its submission, and not before the last."""

    def __init__(self, clock: StepClock, delays: Delays, rank: int) -> None:
        self._clock = clock
        self._delays = delays
        self._rank = rank
        self._queues: dict[str, deque[list[int]]] = {queue: deque() for queue in QUEUES}

    @property
    def is_busy(self) -> bool:
        return any(self._queues.values())

    @property
    def in_flight(self) -> set[int]:
        """Jobs that are not over in this step."""
        return {job_id for jobs in self._queues.values() for job_id, ready in jobs if ready > self._clock.step}

    def submit(self, queue: str, job: TransferJob) -> bool:
        jobs = self._queues[queue]
        ready = self._clock.step + self._delays.of(queue, job.job_id, self._rank)
        if jobs:
            ready = max(ready, jobs[-1][1])
        jobs.append([job.job_id, ready])
        if self._rank == 0:
            self._clock.note("submit", [job.job_id, queue, ready])
        return True

    def wait(self, job_ids: Collection[int]) -> None:
        for jobs in self._queues.values():
            last = max((index for index, (job_id, _) in enumerate(jobs) if job_id in job_ids), default=-1)
            for index in range(last + 1):
                jobs[index][1] = min(jobs[index][1], self._clock.step)

    def take_finished(self) -> list[CopyResult]:
        finished = []
        for jobs in self._queues.values():
            while jobs and jobs[0][1] <= self._clock.step:
                finished.append(CopyResult(jobs.popleft()[0]))
        return finished


class StepTier:
    """A second tier with room for everything."""

    medium: str | None = None
    locality: str | None = None

    def __init__(self, index: int, spec: TierSpec, clock: StepClock, names: Callable[[Keys], list[str]]) -> None:
        self.name = f"sim{index}"
        self.keys: dict[int, None] = {}
        self._index = index
        self._spec = spec
        self._clock = clock
        self._names = names
        self._jobs: list[tuple[int, TierJob, bool]] = []
        self._num_loads = 0
        self._num_stores = 0
        self._retries: dict[tuple[str, int], int] = {}

    @property
    def is_busy(self) -> bool:
        return bool(self._jobs)

    def on_new_request(self, context: RequestContext) -> OffloadPolicy:
        return OffloadPolicy.REQUEST_LEVEL if self._spec.request_level else OffloadPolicy.CHUNK_LEVEL

    def lookup(self, key: int, context: RequestContext) -> LookupResult:
        if key not in self.keys:
            return LookupResult.MISS
        left = self._retries.get((context.req_id, key), self._spec.retries)
        if left > 0:
            self._retries[context.req_id, key] = left - 1
            return LookupResult.RETRY
        return LookupResult.HIT

    def submit_store(self, job: TierJob) -> None:
        self._submit("cascade", job, self._spec.store_delay, fails=self._num_stores in self._spec.fail_stores)
        self._num_stores += 1

    def submit_load(self, job: TierJob) -> None:
        self._submit("promote", job, self._spec.load_delay, fails=self._num_loads in self._spec.fail_loads)
        self._num_loads += 1

    def _submit(self, kind: str, job: TierJob, delay: int, *, fails: bool) -> None:
        self._jobs.append((self._clock.step + delay, job, not fails))
        row = [self._index, kind, job.job_id, job.context.req_id, sorted(self._names(job.keys))]
        self._clock.note("tier", row)

    def get_finished_jobs(self) -> list[TierResult]:
        due = [entry for entry in self._jobs if entry[0] <= self._clock.step]
        self._jobs = [entry for entry in self._jobs if entry[0] > self._clock.step]
        for _, job, success in due:
            if success and not job.is_promotion:
                self.keys.update(dict.fromkeys(job.keys.tolist()))
            kind = "promote" if job.is_promotion else "cascade"
            self._clock.note("tier_done", [self._index, kind, job.job_id, success])
        return [TierResult(job.job_id, success) for _, job, success in due]

    def accepts_store(self, num_chunks: int) -> bool:
        return True

    def on_request_finished(self, context: RequestContext) -> None:
        pass

    def drain_jobs(self) -> None:
        self._jobs = [(min(ready, self._clock.step), job, success) for ready, job, success in self._jobs]

    def has_pending_work(self) -> bool:
        return False
