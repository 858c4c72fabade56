"""A secondary tier in virtual time: storage behind the CPU tier (vLLM: v1/kv_offload/tiering/fs/manager.py).

Jobs run one after another at the storage's speed. Their ends are messages, so that faults can make them fail, late or
never come. Chunks are kept in order of their last use and leave from the other end when the tier is full. The end of a
promotion for a lookup that is left alone is no news: it has only gone in circles, and something else must wake it.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvreplay.connectors.offloading.config import OffloadingConfig
from kvreplay.connectors.offloading.context import OffloadPolicy, RequestContext
from kvreplay.connectors.offloading.cpu_buffers import ChunkContents
from kvreplay.connectors.offloading.manager import LookupResult
from kvreplay.connectors.offloading.tiering import TierJob, TierResult
from kvreplay.ids import NS_PER_S, nanoseconds
from kvreplay.sim.bus import Bus
from kvreplay.sim.envelope import COPY_DONE, COPY_JOB, Answer, Envelope
from kvreplay.sim.event_loop import Timer


class ChunkMemory(Protocol):
    """The CPU tier's memory, chunk by chunk, over all ranks."""

    def take_chunk(self, chunk_id: int) -> Sequence[ChunkContents]: ...

    def put_chunk(self, chunk_id: int, contents: Sequence[ChunkContents]) -> None: ...


@dataclass(slots=True)
class _Running:
    job: TierJob
    timer: Timer | None


class StorageTier:
    """Implements `tiering.SecondaryTier`. `chunk_bytes`: of one chunk over all ranks. `on_report`: a job has ended; its
    argument is whether that was a promotion."""

    medium: str | None = "STORAGE"
    locality: str | None = "LOCAL"

    def __init__(
        self,
        instance: str,
        index: int,
        *,
        config: OffloadingConfig,
        chunk_bytes: int,
        memory: ChunkMemory,
        bus: Bus,
        on_report: Callable[[bool], None],
    ) -> None:
        self.name = f"tier{index}"
        self.address = f"{instance}/tier/{index}"
        self.chunks: OrderedDict[int, Sequence[ChunkContents]] = OrderedDict()
        """Key → what each rank has of it; least recently used first."""
        self.num_evicted = 0
        self._order_address = f"{self.address}/orders"
        self._capacity = None if config.tier_bytes is None else config.tier_bytes // chunk_bytes
        self._chunk_ns = -(-chunk_bytes * NS_PER_S // config.tier_bytes_per_s)
        self._latency_ns = nanoseconds(config.tier_latency)
        self._memory = memory
        self._bus = bus
        self._on_report = on_report
        self._free_at_ns = 0
        self._jobs: dict[int, _Running] = {}
        self._finished: list[TierResult] = []
        bus.listen(self.address, self._receive)
        bus.serve(self._order_address, lambda envelope: Answer(payload=True))

    # -- SecondaryTier ----------------------------------------------------------------------------------------

    def on_new_request(self, context: RequestContext) -> OffloadPolicy:
        return OffloadPolicy.CHUNK_LEVEL

    def lookup(self, key: int, context: RequestContext) -> LookupResult:
        if key not in self.chunks:
            return LookupResult.MISS
        self.chunks.move_to_end(key)
        return LookupResult.HIT

    def submit_store(self, job: TierJob) -> None:
        self._submit(job)

    def submit_load(self, job: TierJob) -> None:
        self._submit(job)

    def get_finished_jobs(self) -> Sequence[TierResult]:
        finished, self._finished = self._finished, []
        return finished

    def accepts_store(self, num_chunks: int) -> bool:
        return True

    def on_request_finished(self, context: RequestContext) -> None:
        pass

    def drain_jobs(self) -> None:
        """The caller blocks until all are over; what never ends is given up."""
        for running in list(self._jobs.values()):
            self._bus.loop.cancel(running.timer)
            self._end(TierResult(running.job.job_id, running.timer is not None))

    def has_pending_work(self) -> bool:
        return bool(self._finished)

    def close(self) -> None:
        self._bus.silence(self.address)
        self._bus.silence(self._order_address)
        for running in self._jobs.values():
            self._bus.loop.cancel(running.timer)
        self._jobs.clear()

    # -- jobs -------------------------------------------------------------------------------------------------

    def _submit(self, job: TierJob) -> None:
        answer = self._bus.ask(self._envelope(COPY_JOB, job, self._order_address))
        running = self._jobs[job.job_id] = _Running(job, None)
        if answer.never:
            return
        now_ns = self._bus.loop.now_ns
        start_ns = max(now_ns, self._free_at_ns)
        self._free_at_ns = start_ns + self._latency_ns + self._chunk_ns * len(job.keys) + answer.delay_ns
        # What only goes in circles keeps no run alive.
        running.timer = self._bus.loop.call_at(
            self._free_at_ns, lambda: self._announce(job), daemon=job.context.is_going_in_circles
        )

    def _announce(self, job: TierJob) -> None:
        envelope = self._envelope(COPY_DONE, job, self.address)
        envelope.payload = TierResult(job.job_id, is_promotion=job.is_promotion)
        envelope.reply_index = 1
        self._bus.post(envelope)

    def _envelope(self, kind: str, job: TierJob, destination: str) -> Envelope:
        return Envelope(
            kind=kind,
            source=self.address,
            destination=destination,
            payload=job,
            request_ids=(job.context.req_id,),
            conversation=f"{self.address}/job/{job.job_id}",
        )

    def _receive(self, envelope: Envelope) -> None:
        running = self._jobs.get(envelope.payload.job_id)
        self._end(envelope.payload)
        is_promotion = running is not None and running.job.is_promotion
        if running is None or not is_promotion or running.job.context.left_alone_in is None:
            self._on_report(is_promotion)

    def _end(self, result: TierResult) -> None:
        running = self._jobs.pop(result.job_id, None)
        if running is None:
            return
        if result.success:
            result = self._promoted(running.job) if running.job.is_promotion else self._stored(running.job)
        self._finished.append(result)

    def _promoted(self, job: TierJob) -> TierResult:
        """What has left the tier since it was found cannot be brought."""
        is_there = np.array([key in self.chunks for key in job.keys.tolist()], np.bool_)
        for key, chunk_id in zip(job.keys[is_there].tolist(), job.chunk_ids[is_there].tolist(), strict=True):
            self._memory.put_chunk(chunk_id, self.chunks[key])
        return TierResult(job.job_id, bool(is_there.all()), job.keys[is_there])

    def _stored(self, job: TierJob) -> TierResult:
        for key, chunk_id in zip(job.keys.tolist(), job.chunk_ids.tolist(), strict=True):
            self.chunks[key] = self._memory.take_chunk(chunk_id)
            self.chunks.move_to_end(key)
        while self._capacity is not None and len(self.chunks) > self._capacity:
            self.chunks.popitem(last=False)
            self.num_evicted += 1
        return TierResult(job.job_id)
