"""The workers' half: one thread that starts copies, and a stream for either direction (vLLM: worker.py,
copy_backend.py).

A stream's copies run one after another. Stores wait for the forward pass of the step that orders them. A copy's words
move when it is over.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np

from kvreplay.connectors.simple_cpu.config import SimpleCpuConfig
from kvreplay.connectors.simple_cpu.structs import CopyEvent, SimpleCpuMetadata, SimpleCpuOutput
from kvreplay.ids import NS_PER_S, nanoseconds
from kvreplay.kv.content import WordArray
from kvreplay.kv.memory import History, KVMemory
from kvreplay.sim.bus import Bus
from kvreplay.sim.envelope import COPY_JOB, Answer, Envelope
from kvreplay.sim.event_loop import FOREVER_NS, Timer


class CopyTask(NamedTuple):
    """Payload of `copy.job`. `raises`: the copy thread meets an exception in it."""

    event: CopyEvent
    raises: bool = False


_RAISED: Final = "the copy raised an exception"


class _Waiting(NamedTuple):
    event: CopyEvent
    end_ns: int
    raises: bool
    timer: Timer | None


class _Stream:
    """What is to be copied one way, in order."""

    def __init__(self) -> None:
        self.queue: deque[_Waiting] = deque()
        self.free_at_ns = 0
        self.num_bytes = 0
        self.busy_ns = 0


class SimpleCpuWorkers:
    """`block_bytes`: of one block on this rank; `num_words`: per group, of a block. `survives_errors`: an exception
    fails its copy, not the thread."""

    def __init__(
        self,
        instance: str,
        *,
        config: SimpleCpuConfig,
        block_bytes: int,
        num_blocks: int,
        num_words: Sequence[int],
        survives_errors: bool,
        bus: Bus,
        memory: KVMemory,
        on_report: Callable[[], None],
    ) -> None:
        self.streams = {True: _Stream(), False: _Stream()}
        """Stores (True) and loads."""
        self._config = config
        self._block_bytes = block_bytes
        self._survives_errors = survives_errors
        self._bus = bus
        self._memory = memory
        self._on_report = on_report
        self._address = f"{instance}/copies"
        self._num_words = num_words
        self._words: WordArray = np.zeros((num_blocks, max(num_words)), np.uint64)
        self._wrong: dict[int, History] = {}
        """CPU blocks that are known to hold wrong words."""
        self._is_dead = False
        self._output = SimpleCpuOutput()
        self._reasons: dict[str, str] = {}
        bus.serve(self._address, lambda envelope: Answer(payload=envelope.payload.raises))

    # -- what the engine calls --------------------------------------------------------------------------------

    def handle_preemptions(self, metadata: SimpleCpuMetadata) -> None:
        """All copies that have been ordered end before blocks of a preempted request are written to."""
        if not metadata.must_flush:
            return
        for stream in self.streams.values():
            for waiting in list(stream.queue):
                if self._is_dead or waiting.end_ns >= FOREVER_NS or not self._finish(waiting):
                    break

    def start_load_kv(self, metadata: SimpleCpuMetadata, compute_until_ns: int) -> int:
        held_up_ns = 0
        if metadata.must_flush and not self._is_dead:
            held_up_ns = max(stream.free_at_ns for stream in self.streams.values())
        if metadata.load is not None:
            self._submit(metadata.load, 0)
        if metadata.store is not None:
            self._submit(metadata.store, compute_until_ns)
        return held_up_ns

    def has_report(self) -> bool:
        return bool(self._output)

    def gives_back(self) -> bool:
        return False  # nobody waits for a copy to free blocks

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
        for stream in self.streams.values():
            for waiting in stream.queue:
                self._bus.loop.cancel(waiting.timer)

    # -- the thread and its streams ---------------------------------------------------------------------------

    def _submit(self, event: CopyEvent, not_before_ns: int) -> None:
        loop, config = self._bus.loop, self._config
        stream = self.streams[event.is_store]
        size = len(event.pairs) * self._block_bytes
        answer = self._bus.ask(
            Envelope(
                kind=COPY_JOB,
                source=self._address,
                destination=self._address,
                payload=CopyTask(event),
                request_ids=event.req_ids,
                conversation=f"{self._address}/{'store' if event.is_store else 'load'}/{event.number}",
                size_bytes=size,
            )
        )
        start_ns = max(loop.now_ns, not_before_ns, stream.free_at_ns)
        duration_ns = nanoseconds(config.copy_latency) + -(-size * NS_PER_S // config.copy_bytes_per_s)
        end_ns = FOREVER_NS if answer.never else min(start_ns + duration_ns + answer.delay_ns, FOREVER_NS)
        stream.free_at_ns = end_ns
        waiting = _Waiting(event, end_ns, bool(answer.payload), None)
        if end_ns < FOREVER_NS and not self._is_dead:
            timer = loop.call_at(end_ns, lambda: self._finish_next(stream))
            waiting = waiting._replace(timer=timer)
            stream.num_bytes += size
            stream.busy_ns += duration_ns
        stream.queue.append(waiting)

    def _finish_next(self, stream: _Stream) -> None:
        if stream.queue and not self._is_dead:
            self._finish(stream.queue[0])
            self._on_report()

    def _finish(self, waiting: _Waiting) -> bool:
        """The first of a stream is over. False if the thread has died of it, which nobody hears of."""
        event = waiting.event
        queue = self.streams[event.is_store].queue
        assert queue[0] is waiting
        if waiting.raises and not self._survives_errors:
            self._is_dead = True
            return False
        queue.popleft()
        self._bus.loop.cancel(waiting.timer)
        output = self._output
        if not waiting.raises:
            self._move(event)
        if event.is_store:
            output.stored.append(event.number)
            if waiting.raises:
                output.failed[event.number] = _RAISED
            return True
        output.finished_recving += event.req_ids
        if waiting.raises:
            output.failed_recving += event.req_ids
            self._reasons.update(dict.fromkeys(event.req_ids, _RAISED))
        return True

    def _move(self, event: CopyEvent) -> None:
        memory = self._memory
        for group, gpu_blocks, cpu_blocks in event.pairs.by_group():
            width = self._num_words[group]
            if event.is_store:
                self._words[cpu_blocks, :width] = memory.read_blocks(group, gpu_blocks)
                known = memory.histories(gpu_blocks)
                for gpu_block, cpu_block in zip(gpu_blocks.tolist(), cpu_blocks.tolist(), strict=True):
                    self._wrong.pop(cpu_block, None)
                    if gpu_block in known:
                        self._wrong[cpu_block] = known[gpu_block]
                continue
            memory.write_blocks(group, gpu_blocks, self._words[cpu_blocks, :width], provenance=None)
            if self._wrong:
                for gpu_block, cpu_block in zip(gpu_blocks.tolist(), cpu_blocks.tolist(), strict=True):
                    if cpu_block in self._wrong:
                        memory.set_history(gpu_block, self._wrong[cpu_block])
