"""The sending end of engine writes: a producer's threads, each blocked in one call of its transfer engine."""

from collections import deque
from collections.abc import Callable
from itertools import count

from kvreplay.connectors.mooncake import log
from kvreplay.connectors.mooncake.addresses import instance_of, memory_address
from kvreplay.connectors.mooncake.config import MooncakeConfig
from kvreplay.connectors.mooncake.entries import Write
from kvreplay.connectors.mooncake.identity import WorkerIdentity
from kvreplay.connectors.mooncake.log import LogSink
from kvreplay.connectors.mooncake.memory import Contents, RankMemory
from kvreplay.connectors.mooncake.plan import Piece
from kvreplay.connectors.mooncake.stats import MooncakeStats
from kvreplay.connectors.mooncake.structs import SourceReader, WriteData, WriteDone
from kvreplay.events import Event, EventSink
from kvreplay.ids import NS_PER_S
from kvreplay.sim.envelope import WRITE_DATA, Envelope
from kvreplay.transport.machine import Deadlines


class WriteSource:
    """Runs engine calls, as many at a time as there are threads; `ended` gets each back with its outcome in it.

    `broke` gets those that raised, with the text. A call ends with the word of the other side, or at the engine's own
    deadline, whatever lands later. `fences`: the switch transfer_fence; a call that has ended is then not read from
    any more.
    """

    def __init__(
        self,
        outbox: list[Envelope],
        deadlines: Deadlines,
        identity: WorkerIdentity,
        *,
        config: MooncakeConfig,
        memory: RankMemory,
        sink: EventSink,
        stats: MooncakeStats,
        fences: bool,
        ended: Callable[[Write, int], None],
        broke: Callable[[Write, str, int], None],
        log_line: LogSink | None,
    ) -> None:
        self._outbox = outbox
        self._deadlines = deadlines
        self._identity = identity
        self._num_threads = config.num_workers
        self.timeout_ns = config.transfer_timeout_ns
        self._memory = memory
        self._sink = sink
        self._stats = stats
        self._fences = fences
        self._ended = ended
        self._broke = broke
        self._log = log_line
        self._queue: deque[Write] = deque()
        self._running: dict[int, Write] = {}
        self._ids = count()
        self._is_dead = False

    def start(self, write: Write, now_ns: int) -> None:
        """Run this call, as soon as a thread is free."""
        if len(self._running) < self._num_threads:
            self._run(write, now_ns)
        else:
            self._queue.append(write)

    def on_returned(self, done: WriteDone, now_ns: int) -> None:
        write = self._running.get(done.write_id)
        if write is not None:
            self._end(write, done.ret, done.raised, now_ns)

    def shutdown(self) -> None:
        """From now on nothing can be read from this memory."""
        self._is_dead = True

    def _run(self, write: Write, now_ns: int) -> None:
        envelope, pull = write.service.envelope, write.service.pull
        write.write_id = next(self._ids)
        write.start_ns = now_ns
        self._running[write.write_id] = write
        requests = self._emit_started(write, now_ns)
        self._outbox.append(
            Envelope(
                kind=WRITE_DATA,
                source=self._identity.address,
                destination=memory_address(pull.remote_hostname, pull.remote_port),
                payload=WriteData(
                    session=f"{pull.remote_hostname}:{pull.remote_port}",
                    pull=envelope.conversation,
                    attempt=envelope.attempt,
                    write_id=write.write_id,
                    segments=write.segments,
                    num_blocks=write.num_blocks,
                    plan=write.service.plan,
                    owed=tuple(write.service.unanswered),
                    read=self._reader(write.write_id),
                ),
                request_ids=tuple(requests),
                transfer_ids=tuple(requests.values()),
                conversation=write.conversation,
                attempt=envelope.attempt,
                peer_index=envelope.peer_index,
                num_peers=envelope.num_peers,
                size_bytes=write.size_bytes,
            )
        )
        # 1 ns per byte on top: a link of 1 GB/s is still good enough.
        write.deadline = self._deadlines.at(now_ns + self.timeout_ns + write.size_bytes, self._on_timeout, write)

    def _reader(self, write_id: int) -> SourceReader:
        """Reads the source when the write lands: whatever is there then, unless the write is fenced off."""

        def read(piece: Piece) -> Contents | None:
            if self._is_dead or (self._fences and write_id not in self._running):
                return None
            part = piece.copy.part
            return self._memory.read(piece.copy.local, piece.source_block_ids, part.source_offset, part.length)

        return read

    def _on_timeout(self, write: Write, now_ns: int) -> None:
        self._end(write, -1, None, now_ns)

    def _end(self, write: Write, ret: int, raised: str | None, now_ns: int) -> None:
        del self._running[write.write_id]
        self._deadlines.cancel(write.deadline)
        reason = raised
        if raised is None:
            reason = self._note_result(write, ret, now_ns)
        self._emit_finished(write, reason, now_ns)
        if self._queue:
            self._run(self._queue.popleft(), now_ns)
        if raised is None:
            self._ended(write, now_ns)
        else:
            self._broke(write, raised, now_ns)

    def _note_result(self, write: Write, ret: int, now_ns: int) -> str | None:
        """Count a call that returned. The reason of its failure, which its requests then have, or None."""
        session = f"{write.service.pull.remote_hostname}:{write.service.pull.remote_port}"
        num_descriptors = write.service.plan.num_descriptors(write.segments)
        duration_ns = now_ns - write.start_ns
        if ret == 0:
            self._stats.record_transfer(
                duration_ns=duration_ns, num_bytes=write.size_bytes, num_descriptors=num_descriptors
            )
            if self._log is not None and self._log.debug:
                self._log(log.POOL, log.DEBUG, log.SEND_DONE, session, duration_ns / NS_PER_S)
            return None
        self._stats.num_failed_transfers += 1
        if self._log is not None:
            failed = (session, ret, duration_ns / NS_PER_S, num_descriptors, write.size_bytes)
            self._log(log.POOL, log.WARNING, log.SEND_FAILED, *failed)
        reason = f"Mooncake transfer engine returned {ret}"
        write.fail_rest(reason)
        return reason

    def _emit_started(self, write: Write, now_ns: int) -> dict[str, str]:
        """Returns the consumer's requests that are written for → their transfers."""
        num_blocks: dict[str, int] = {}
        for segment in write.segments:
            num_blocks[segment.request_id] = num_blocks.get(segment.request_id, 0) + len(segment.block_ids)
        requests: dict[str, str] = {}
        for d_req_id, entry in write.batch:
            if d_req_id in num_blocks:
                requests[d_req_id] = entry.transfer_id
                write.handles[d_req_id] = self._sink.emit(
                    Event(
                        "send.started",
                        now_ns,
                        self._identity.instance,
                        request_id=entry.p_req_id,
                        transfer_id=entry.transfer_id,
                        peer=instance_of(write.service.envelope.source),
                        num_blocks=num_blocks[d_req_id],
                    )
                )
        write.blocks_written = num_blocks
        return requests

    def _emit_finished(self, write: Write, reason: str | None, now_ns: int) -> None:
        for d_req_id, entry in write.batch:
            handle = write.handles.get(d_req_id)
            if handle is not None:
                self._sink.emit(
                    Event(
                        "send.finished",
                        now_ns,
                        self._identity.instance,
                        request_id=entry.p_req_id,
                        transfer_id=entry.transfer_id,
                        peer=instance_of(write.service.envelope.source),
                        num_blocks=write.blocks_written[d_req_id],
                        status="ok" if reason is None else "failed",
                        cause=reason,
                        cause_handle=handle,
                    )
                )
