"""The workers' half: one thread that copies, job after job (vLLM: worker.py, copy_backend.py).

Stores wait for the forward pass that computes what they copy. The thread moves a job's words when it is over.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np

from kvreplay.connectors.simple_cpu.config import SimpleCpuConfig
from kvreplay.connectors.simple_cpu.structs import CopyJob, SimpleCpuMetadata, SimpleCpuOutput
from kvreplay.ids import NS_PER_S
from kvreplay.kv.content import WordArray
from kvreplay.kv.memory import History, KVMemory
from kvreplay.sim.bus import Bus
from kvreplay.sim.envelope import COPY_JOB, Answer, Envelope
from kvreplay.sim.event_loop import FOREVER_NS, Timer


class CopyTask(NamedTuple):
    """Payload of `copy.job`. `raises`: the copy thread meets an exception in it."""

    job: CopyJob
    raises: bool = False


_RAISED: Final = "the copy raised an exception"


class _Waiting(NamedTuple):
    job: CopyJob
    end_ns: int
    raises: bool
    timer: Timer | None


class SimpleCpuWorkers:
    """`block_bytes`: of one block on this rank. `survives_errors`: an exception fails its job, not the thread."""

    def __init__(
        self,
        instance: str,
        *,
        config: SimpleCpuConfig,
        block_bytes: int,
        num_blocks: int,
        num_words: int,
        survives_errors: bool,
        bus: Bus,
        memory: KVMemory,
        on_report: Callable[[], None],
    ) -> None:
        self.num_bytes = {True: 0, False: 0}
        self.busy_ns = {True: 0, False: 0}
        """What stores (True) and loads have moved, and how long it took."""
        self._config = config
        self._block_bytes = block_bytes
        self._survives_errors = survives_errors
        self._bus = bus
        self._memory = memory
        self._on_report = on_report
        self._address = f"{instance}/copies"
        self._words: WordArray = np.zeros((num_blocks + 1, num_words), np.uint64)
        self._wrong: dict[int, History] = {}
        """CPU blocks that are known to hold wrong words."""
        self._queue: deque[_Waiting] = deque()
        self._free_at_ns = 0
        self._is_dead = False
        self._output = SimpleCpuOutput()
        self._reasons: dict[str, str] = {}
        bus.serve(self._address, lambda envelope: Answer(payload=envelope.payload.raises))

    # -- what the engine calls --------------------------------------------------------------------------------

    def handle_preemptions(self, metadata: SimpleCpuMetadata) -> None:
        """All copies that have been ordered end before blocks of a preempted request are written to."""
        if metadata.must_flush and not self._is_dead:
            for waiting in list(self._queue):
                if waiting.end_ns >= FOREVER_NS or not self._finish(waiting):
                    break

    def start_load_kv(self, metadata: SimpleCpuMetadata, compute_until_ns: int) -> int:
        held_up_ns = self._free_at_ns if metadata.must_flush and not self._is_dead else 0
        for job in metadata.loads:
            self._submit(job, 0)
        for job in metadata.stores:
            self._submit(job, compute_until_ns)
        return held_up_ns

    def has_report(self) -> bool:
        return bool(self._output)

    def get_finished(self, finished_req_ids: Sequence[str]) -> SimpleCpuOutput | None:
        if not self._output:
            return None
        output, self._output = self._output, SimpleCpuOutput()
        return output

    def failure_reason(self, request_id: str) -> str | None:
        return self._reasons.pop(request_id, None)

    def shutdown(self) -> None:
        self._is_dead = True
        self._bus.silence(self._address)
        for waiting in self._queue:
            self._bus.loop.cancel(waiting.timer)

    # -- the thread -------------------------------------------------------------------------------------------

    def _submit(self, job: CopyJob, not_before_ns: int) -> None:
        loop, config = self._bus.loop, self._config
        answer = self._bus.ask(
            Envelope(
                kind=COPY_JOB,
                source=self._address,
                destination=self._address,
                payload=CopyTask(job),
                request_ids=(job.req_id,),
                conversation=f"{self._address}/job/{job.number}",
                size_bytes=len(job.gpu_blocks) * self._block_bytes,
            )
        )
        start_ns = max(loop.now_ns, not_before_ns, self._free_at_ns)
        size = len(job.gpu_blocks) * self._block_bytes
        duration_ns = round(config.copy_latency * NS_PER_S) + -(-size * NS_PER_S // config.copy_bytes_per_s)
        end_ns = FOREVER_NS if answer.never else min(start_ns + duration_ns + answer.delay_ns, FOREVER_NS)
        self._free_at_ns = end_ns
        waiting = _Waiting(job, end_ns, bool(answer.payload), None)
        if end_ns < FOREVER_NS and not self._is_dead:
            timer = loop.call_at(end_ns, lambda: self._finish_next())
            waiting = waiting._replace(timer=timer)
            self.num_bytes[job.is_store] += size
            self.busy_ns[job.is_store] += duration_ns
        self._queue.append(waiting)

    def _finish_next(self) -> None:
        if self._queue and not self._is_dead:
            self._finish(self._queue[0])
            self._on_report()

    def _finish(self, waiting: _Waiting) -> bool:
        """The first of the queue is over. False if the thread has died of it, which nobody hears of."""
        assert self._queue[0] is waiting
        if waiting.raises and not self._survives_errors:
            self._is_dead = True
            return False
        self._queue.popleft()
        self._bus.loop.cancel(waiting.timer)
        job = waiting.job
        self._output.done.append(job.number)
        if waiting.raises:
            self._output.failed[job.number] = _RAISED
        else:
            self._move(job)
        if not job.is_store:
            self._output.finished_recving.append(job.req_id)
            if waiting.raises:
                self._output.failed_recving.append(job.req_id)
                self._reasons[job.req_id] = _RAISED
        return True

    def _move(self, job: CopyJob) -> None:
        if job.is_store:
            self._words[job.cpu_blocks] = self._memory.read_blocks(0, job.gpu_blocks)
            known = self._memory.histories(job.gpu_blocks)
            for gpu_block, cpu_block in zip(job.gpu_blocks.tolist(), job.cpu_blocks.tolist(), strict=True):
                self._wrong.pop(cpu_block, None)
                if gpu_block in known:
                    self._wrong[cpu_block] = known[gpu_block]
            return
        self._memory.write_blocks(0, job.gpu_blocks, self._words[job.cpu_blocks], provenance=None)
        if self._wrong:
            for gpu_block, cpu_block in zip(job.gpu_blocks.tolist(), job.cpu_blocks.tolist(), strict=True):
                if cpu_block in self._wrong:
                    self._memory.set_history(gpu_block, self._wrong[cpu_block])
