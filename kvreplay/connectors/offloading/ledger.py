"""Jobs in flight, and the GPU blocks that they still read (vLLM: offloading/scheduler.py, _jobs and its indices)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvreplay.connectors.offloading.arrays import Keys
from kvreplay.errors import EngineFatal
from kvreplay.kv.prefix_cache import BlockIds


@dataclass(slots=True)
class Job:
    """`fenced`: source blocks that may be given away from the start. `deferred_fence`: those that only can be once the
    request has ended; until then its reference protects them."""

    req_id: str
    pending: int
    """Workers that have not reported it."""
    keys: Keys
    is_store: bool
    num_blocks: int
    is_sync_load: bool = False
    fenced: Sequence[int] | BlockIds = ()
    deferred_fence: Sequence[int] | BlockIds = ()
    failure: str | None = None
    """Why its copy failed on some worker."""

    @property
    def tolerates_others(self) -> bool:
        """Whether its request may have other jobs beside it."""
        return self.is_store or self.is_sync_load


class JobLedger:
    """Numbers jobs, loads and stores alike, and knows which blocks are fenced by which."""

    def __init__(self) -> None:
        self.jobs: dict[int, Job] = {}
        self.fences: dict[int, dict[int, None]] = {}
        """Block → jobs that must be over before it is overwritten."""
        self.reset_fence: dict[int, int] = {}
        """Jobs in flight at a reset → reports still due."""
        self._next_id = 0
        self._num_stale = 0
        """Jobs below belong to the time before a reset."""

    def open(self, job: Job) -> int:
        job_id = self._next_id
        self._next_id += 1
        self.jobs[job_id] = job
        if len(job.fenced):
            self.fence(job_id, job.fenced)
        return job_id

    @property
    def next_id(self) -> int:
        return self._next_id

    def is_stale(self, job_id: int) -> bool:
        return job_id < self._num_stale

    def fence(self, job_id: int, block_ids: Sequence[int] | BlockIds) -> None:
        for block_id in listed(block_ids):
            self.fences.setdefault(block_id, {})[job_id] = None

    def fenced_by(self, block_ids: Iterable[int]) -> set[int]:
        """Jobs that still read any of these blocks."""
        fences = self.fences
        if not fences:
            return set()
        return {job_id for block_id in block_ids if block_id in fences for job_id in fences[block_id]}

    def close(self, job_id: int, *, request_has_ended: bool) -> Job:
        """The job's last report is in."""
        job = self.jobs.pop(job_id)
        if self.fences:
            self._lift(job_id, job.fenced)
            if request_has_ended:
                self._lift(job_id, job.deferred_fence)
        return job

    def _lift(self, job_id: int, block_ids: Sequence[int] | BlockIds) -> None:
        """A block that a job names twice is not there the second time: the real ledger dies of it."""
        for block_id in listed(block_ids):
            fencing = self.fences.get(block_id)
            if fencing is None:
                raise EngineFatal("KeyError", str(block_id))
            if job_id not in fencing:
                raise EngineFatal("KeyError", str(job_id))
            del fencing[job_id]
            if not fencing:
                del self.fences[block_id]

    def reset(self) -> None:
        """Disown all jobs; their reports are still counted."""
        self._num_stale = self._next_id
        self.reset_fence.update((job_id, job.pending) for job_id, job in self.jobs.items())
        self.jobs.clear()
        self.fences.clear()

    def note_stale_report(self, job_id: int, count: int) -> bool:
        """One more report of a disowned job. True if no other is due."""
        if job_id not in self.reset_fence:
            return False
        self.reset_fence[job_id] -= count
        if self.reset_fence[job_id] > 0:
            return False
        del self.reset_fence[job_id]
        return not self.reset_fence


def listed(block_ids: Sequence[int] | BlockIds) -> Sequence[int]:
    return block_ids.tolist() if isinstance(block_ids, np.ndarray) else block_ids
