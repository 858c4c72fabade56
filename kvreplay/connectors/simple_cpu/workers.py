"""The workers' half: on each rank one thread that starts copies, and a stream for either direction (vLLM: worker.py,
copy_backend.py). With a disk in the place of CPU memory either direction has a thread of its own, which waits for each
copy (disk_backend.py).

A stream's copies run one after another. Stores wait for the forward pass of the step that orders them. A copy's words
move when it is over.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from kvreplay.connectors.simple_cpu.config import SimpleCpuConfig
from kvreplay.connectors.simple_cpu.structs import CopyEvent, SimpleCpuMetadata, SimpleCpuOutput
from kvreplay.ids import NS_PER_S, nanoseconds
from kvreplay.kv.allocation import words_and_tensor
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
        self.is_dead = False
        """The thread that served it has met an exception."""


def copy_address(instance: str, rank: int) -> str:
    return f"{instance}/copies/{rank}"


class _Rank:
    """One rank's threads, its streams, and its share of the second pool.

    `num_words`: per group, of a block. `survives_errors`: an exception fails its copy, not the thread. `on_end` is told
    of each copy that is over, and of why it did not copy; `on_report` is called when that happens by itself.
    """

    def __init__(
        self,
        address: str,
        *,
        config: SimpleCpuConfig,
        block_bytes: int,
        num_blocks: int,
        num_words: Sequence[int],
        survives_errors: bool,
        bus: Bus,
        memory: KVMemory,
        on_end: Callable[[CopyEvent, str | None], None],
        on_report: Callable[[], None],
    ) -> None:
        self.streams = {True: _Stream(), False: _Stream()}
        """Stores (True) and loads."""
        self._config = config
        self._block_bytes = block_bytes
        self._survives_errors = survives_errors
        self._bus = bus
        self._memory = memory
        self._on_end = on_end
        self._on_report = on_report
        self._address = address
        self._num_words = num_words
        self._words: WordArray = np.zeros((num_blocks, 0), np.uint64)
        if max(num_words):
            self._words, _ = words_and_tensor(num_blocks, max(num_words))
        self._wrong: dict[int, History] = {}
        """CPU blocks that are known to hold wrong words."""
        bus.serve(address, lambda envelope: Answer(payload=envelope.payload.raises))

    def flush(self) -> None:
        """Whatever has been ordered ends now, as far as it ever does. Nobody waits for a disk's copies: they have no
        event before they are over."""
        for stream in self._awaited_streams:
            for waiting in list(stream.queue):
                if stream.is_dead or waiting.end_ns >= FOREVER_NS or not self._finish(waiting):
                    break

    @property
    def busy_until_ns(self) -> int:
        """When what a flush waits for is over."""
        return max((stream.free_at_ns for stream in self._awaited_streams), default=0)

    @property
    def _awaited_streams(self) -> list[_Stream]:
        """But for those whose thread is gone."""
        if self._config.is_on_disk:
            return []
        return [stream for stream in self.streams.values() if not stream.is_dead]

    def submit(self, event: CopyEvent, not_before_ns: int) -> None:
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
        duration_ns = nanoseconds(config.copy_latency) + -(-size * NS_PER_S // config.bytes_per_s)
        end_ns = FOREVER_NS if answer.never else min(start_ns + duration_ns + answer.delay_ns, FOREVER_NS)
        stream.free_at_ns = end_ns
        waiting = _Waiting(event, end_ns, bool(answer.payload), None)
        if end_ns < FOREVER_NS and not stream.is_dead:
            timer = loop.call_at(end_ns, lambda: self._finish_next(stream))
            waiting = waiting._replace(timer=timer)
            stream.num_bytes += size
            stream.busy_ns += duration_ns
        stream.queue.append(waiting)

    def shutdown(self) -> None:
        self._bus.silence(self._address)
        for stream in self.streams.values():
            stream.is_dead = True
            for waiting in stream.queue:
                self._bus.loop.cancel(waiting.timer)

    def _finish_next(self, stream: _Stream) -> None:
        if stream.queue and not stream.is_dead:
            self._finish(stream.queue[0])
            self._on_report()

    def _finish(self, waiting: _Waiting) -> bool:
        """The first of a stream is over. False if the thread has died of it, which nobody hears of."""
        event = waiting.event
        stream = self.streams[event.is_store]
        assert stream.queue[0] is waiting
        if waiting.raises and not self._survives_errors:
            for served in [stream] if self._config.is_on_disk else self.streams.values():
                served.is_dead = True
            return False
        stream.queue.popleft()
        self._bus.loop.cancel(waiting.timer)
        if not waiting.raises:
            self._move(event)
        self._on_end(event, _RAISED if waiting.raises else None)
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


@dataclass(slots=True)
class _Reported:
    """By how many ranks a copy is over, and why it failed on one of them."""

    num_ranks: int = 0
    failure: str | None = None


class SimpleCpuWorkers:
    """All ranks'. A copy is over for the scheduler when every rank has said so (vLLM: KVOutputAggregator for loads,
    update_connector_output for stores).

    `memories` and `num_words`: of each rank; the latter per group, of a block. `block_bytes`: of one block on a rank.
    """

    def __init__(
        self,
        instance: str,
        *,
        config: SimpleCpuConfig,
        block_bytes: int,
        num_blocks: int,
        num_words: Sequence[Sequence[int]],
        survives_errors: bool,
        bus: Bus,
        memories: Sequence[KVMemory],
        on_report: Callable[[], None],
    ) -> None:
        self._output = SimpleCpuOutput()
        self._reported: dict[tuple[bool, int], _Reported] = {}
        self._reasons: dict[str, str] = {}
        self.ranks = [
            _Rank(
                copy_address(instance, rank),
                config=config,
                block_bytes=block_bytes,
                num_blocks=num_blocks,
                num_words=words,
                survives_errors=survives_errors,
                bus=bus,
                memory=memory,
                on_end=self._note_end,
                on_report=on_report,
            )
            for rank, (memory, words) in enumerate(zip(memories, num_words, strict=True))
        ]

    def num_bytes(self, *, is_store: bool) -> int:
        """That have been copied one way."""
        return sum(rank.streams[is_store].num_bytes for rank in self.ranks)

    def busy_ns(self, *, is_store: bool) -> int:
        return sum(rank.streams[is_store].busy_ns for rank in self.ranks)

    # -- what the engine calls --------------------------------------------------------------------------------

    def handle_preemptions(self, metadata: SimpleCpuMetadata) -> None:
        """All copies that have been ordered end before blocks of a preempted request are written to."""
        if metadata.must_flush:
            for rank in self.ranks:
                rank.flush()

    def start_load_kv(self, metadata: SimpleCpuMetadata, compute_until_ns: int) -> int:
        held_up_ns = max(rank.busy_until_ns for rank in self.ranks) if metadata.must_flush else 0
        for rank in self.ranks:
            if metadata.load is not None:
                rank.submit(metadata.load, 0)
            if metadata.store is not None:
                rank.submit(metadata.store, compute_until_ns)
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
        for rank in self.ranks:
            rank.shutdown()

    # -- reports ----------------------------------------------------------------------------------------------

    def _note_end(self, event: CopyEvent, failure: str | None) -> None:
        name = (event.is_store, event.number)
        reported = self._reported.setdefault(name, _Reported())
        reported.num_ranks += 1
        reported.failure = reported.failure or failure
        if reported.num_ranks < len(self.ranks):
            return
        del self._reported[name]
        output = self._output
        if event.is_store:
            output.stored.append(event.number)
            if reported.failure is not None:
                output.failed[event.number] = reported.failure
            return
        output.finished_recving += event.req_ids
        if reported.failure is not None:
            output.failed_recving += event.req_ids
            self._reasons.update(dict.fromkeys(event.req_ids, reported.failure))
