"""The producer's half on one rank: keeps finished requests' blocks, and writes them to consumers that ask."""

from collections import OrderedDict, deque
from collections.abc import Iterable
from itertools import count

import msgspec

from kvreplay.behaviour import Behaviour
from kvreplay.connectors.mooncake.addresses import instance_of, memory_address
from kvreplay.connectors.mooncake.config import MooncakeConfig
from kvreplay.connectors.mooncake.entries import SendBlockMeta, Service, Write, num_descriptors, plan_copies
from kvreplay.connectors.mooncake.identity import WorkerIdentity
from kvreplay.connectors.mooncake.layout import KVLayout, PeerLayouts, misfit
from kvreplay.connectors.mooncake.ranks import target_ranks
from kvreplay.connectors.mooncake.stats import MooncakeStats
from kvreplay.connectors.mooncake.structs import (
    CONNECTION_CLOSED,
    MooncakeConnectorMetadata,
    MooncakeXferMetadata,
    MooncakeXferResponse,
    MooncakeXferResponseStatus,
    SourceReader,
    WriteData,
    WriteDone,
    decode_request,
)
from kvreplay.events import Event, EventSink
from kvreplay.kv.content import WordArray
from kvreplay.kv.memory import BlockIds, KVMemory
from kvreplay.sim.envelope import PULL_REPLY, PULL_REQUEST, WRITE_DATA, WRITE_DONE, Envelope
from kvreplay.transport.machine import Deadlines

_FINISH = MooncakeXferResponseStatus.FINISH
_CONTINUE = MooncakeXferResponseStatus.CONTINUE
_ERROR = MooncakeXferResponseStatus.ERROR
_LAYOUT_MISS = MooncakeXferResponseStatus.LAYOUT_MISS

NOT_READY = "Timeout waiting for P side ready."
DROPPED = "P dropped the request"
_MAX_GONE = 4096
"""Transfers that ended unsent and are remembered, so that a late pull can be told."""


class Producer:
    """A state machine: a queue of pulls, sender tasks that wait for requests, threads that write.

    A sender task takes one pull and keeps it until its last reply; 20 of them wait at most, 10 threads write.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        *,
        config: MooncakeConfig,
        behaviour: Behaviour,
        layout: KVLayout,
        num_groups: int,
        memory: KVMemory,
        sink: EventSink,
        stats: MooncakeStats,
    ) -> None:
        self.outbox: list[Envelope] = []
        self.entries: dict[str, SendBlockMeta] = {}
        """Transfer id → transfer: `reqs_need_send`."""
        self._identity = identity
        self._ranks = identity.ranks
        self._config = config
        self._abort_timeout_ns = config.abort_request_timeout_ns
        self._layout = layout
        self._page_bytes, self._num_regions = layout.totals(num_groups)
        self._memory = memory
        self._sink = sink
        self._stats = stats
        self._peer_layouts = PeerLayouts()
        self._deadlines = Deadlines()

        self._queue: deque[Envelope] = deque()
        self._services: dict[Service, None] = {}
        self._write_queue: deque[Write] = deque()
        self._writes: dict[int, Write] = {}
        self._write_ids = count()
        self._finished_sending: dict[str, None] = {}
        self._overdue: dict[str, SendBlockMeta] = {}
        """Transfers whose time is up: the next poll frees those that are not being sent."""
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._is_dead = False

        self._answers_drops = behaviour["mooncake_producer_drop"] == "answer"
        self._expires_placeholders = behaviour["mooncake_placeholder"] == "expire"
        self._fences = behaviour["transfer_fence"] == "attempt"

    # -- the state machine --------------------------------------------------------------------------------

    @property
    def next_deadline_ns(self) -> int:
        return self._deadlines.next_ns

    @property
    def has_report(self) -> bool:
        return bool(self._finished_sending) or any(entry.sending == 0 for entry in self._overdue.values())

    def handle(self, envelope: Envelope, now_ns: int) -> None:
        kind = envelope.kind
        if kind == PULL_REQUEST:
            self._queue.append(envelope)
        elif kind == WRITE_DONE:
            self._on_write_returned(envelope.payload, now_ns)
        else:
            assert kind == CONNECTION_CLOSED, kind
            self._on_consumer_gone(envelope)
        self._start_queued(now_ns)

    def on_refused(self, envelope: Envelope, now_ns: int) -> None:
        if envelope.kind == WRITE_DATA:
            self._on_write_returned(WriteDone(envelope.payload.write_id, -1), now_ns)
            self._start_queued(now_ns)

    def on_deadline(self, now_ns: int) -> None:
        self._deadlines.fire(now_ns)
        self._start_queued(now_ns)

    def open_pulls(self) -> list[Envelope]:
        """For each pull not answered yet, the notice to its consumer that this worker is gone."""
        asked = [*(service.envelope for service in self._services), *self._queue]
        return [
            Envelope(
                kind=CONNECTION_CLOSED,
                source=self._identity.address,
                destination=envelope.source,
                payload=None,
                conversation=envelope.conversation,
                attempt=envelope.attempt,
            )
            for envelope in asked
        ]

    def shutdown(self) -> None:
        """From now on nothing can be read from this worker's memory."""
        self._is_dead = True

    # -- what the scheduler says --------------------------------------------------------------------------

    def record_send_reqs(self, metadata: MooncakeConnectorMetadata, now_ns: int) -> None:
        """Take the step's metadata. What vLLM does not expect ends it there, unheard: the rest is lost."""
        woken: dict[Service, None] = {}
        for p_req_id, (transfer_id, block_ids) in metadata.reqs_to_send.items():
            entry = self.entries.get(transfer_id)
            if not block_ids:
                self._announce(p_req_id, transfer_id, entry)
            elif entry is not None:
                self._make_ready(entry, p_req_id, block_ids, now_ns)
                woken.update(entry.waiters)
            else:
                break
        else:
            self._drop(metadata.reqs_not_processed, woken)
        self._wake(woken, now_ns)
        self._start_queued(now_ns)

    def _announce(self, p_req_id: str, transfer_id: str, entry: SendBlockMeta | None) -> None:
        self._gone.pop(transfer_id, None)
        if entry is None:
            self.entries[transfer_id] = SendBlockMeta(p_req_id, transfer_id, announced=True)
        else:
            entry.announced = True

    def _make_ready(self, entry: SendBlockMeta, p_req_id: str, block_ids: list[list[int]], now_ns: int) -> None:
        entry.p_req_id = p_req_id
        entry.local_block_ids = block_ids
        entry.ready = True
        self._deadlines.cancel(entry.expiry)
        self._overdue.pop(entry.transfer_id, None)
        # A poll frees what expired before it, not what expires in that very instant.
        entry.expiry = self._deadlines.at(now_ns + self._abort_timeout_ns + 1, self._on_overdue, entry)

    def _drop(self, transfer_ids: Iterable[str], woken: dict[Service, None]) -> None:
        for transfer_id in transfer_ids:
            entry = self._remove(transfer_id)
            if self._answers_drops:
                self._remember_gone(transfer_id)
                if entry is not None:
                    entry.dropped = True
                    woken.update(entry.waiters)
            elif entry is None or entry.ready:
                return

    def _remove(self, transfer_id: str) -> SendBlockMeta | None:
        entry = self.entries.pop(transfer_id, None)
        if entry is not None:
            self._deadlines.cancel(entry.expiry)
            self._overdue.pop(transfer_id, None)
        return entry

    def _remember_gone(self, transfer_id: str) -> None:
        self._gone[transfer_id] = None
        if len(self._gone) > _MAX_GONE:
            self._gone.popitem(last=False)

    # -- what the scheduler hears -------------------------------------------------------------------------

    def take_finished(self, now_ns: int) -> list[str]:
        """Requests whose blocks may be freed: sent, or never asked for in time."""
        finished = self._finished_sending
        if self._overdue:
            for entry in [entry for entry in self._overdue.values() if entry.sending == 0]:
                self._expire(entry, now_ns)
                finished[entry.p_req_id] = None
        self._finished_sending = {}
        return list(finished)

    def _on_overdue(self, entry: SendBlockMeta, now_ns: int) -> None:
        self._overdue[entry.transfer_id] = entry

    def _expire(self, entry: SendBlockMeta, now_ns: int) -> None:
        self._remove(entry.transfer_id)
        if self._answers_drops:
            self._remember_gone(entry.transfer_id)
        self._stats.num_kv_expired_reqs += 1
        self._sink.emit(
            Event(
                "send.expired",
                now_ns,
                self._identity.instance,
                request_id=entry.p_req_id,
                transfer_id=entry.transfer_id,
                num_blocks=entry.num_blocks,
                cause=f"timed out after {self._config.abort_request_timeout:g} seconds without being sent",
            )
        )

    # -- servicing pulls ----------------------------------------------------------------------------------

    def _start_queued(self, now_ns: int) -> None:
        while self._queue and len(self._services) < self._config.num_sender_tasks:
            self._start_service(self._queue.popleft(), now_ns)

    def _start_service(self, envelope: Envelope, now_ns: int) -> None:
        unanswered = dict.fromkeys(envelope.request_ids)
        try:
            pull = _pull_of(envelope.payload)
            remote_ranks = target_ranks(self._ranks.tp_rank, self._ranks.tp_size, pull.remote_tp_size)
        except (msgspec.MsgspecError, ValueError) as error:
            self._refuse(envelope, _ERROR, str(error))
            return
        refusal = self._refusal(pull, remote_ranks)
        if refusal is not None:
            self._refuse(envelope, *refusal)
            return
        pending = {
            d_req_id: self._entry_for_pull(transfer_id) for d_req_id, (transfer_id, _) in pull.req_blocks.items()
        }
        if not pending:
            return  # vLLM answers nothing
        service = Service(envelope, pull, pending, self._num_expected(pull, remote_ranks), unanswered)
        self._services[service] = None
        for entry in pending.values():
            if not entry.is_over:
                entry.waiters[service] = None
        self._advance(service, now_ns)

    def _refusal(
        self, pull: MooncakeXferMetadata, remote_ranks: list[int]
    ) -> tuple[MooncakeXferResponseStatus, str] | None:
        if pull.remote_tp_rank not in remote_ranks:
            return _ERROR, (
                f"This D tp_rank {pull.remote_tp_rank} is not paired with P tp_rank {self._ranks.tp_rank}; "
                f"expected one of {remote_ranks}."
            )
        if pull.layout_id and not pull.kv_caches_base_addr:
            if self._peer_layouts.knows(pull):
                return None
            return _LAYOUT_MISS, (
                f"Mooncake KV layout {pull.layout_id:#x} from {pull.remote_hostname}:{pull.remote_port} is not cached."
            )
        problem = misfit(self._layout.regions, pull)
        if problem is not None:
            return _ERROR, problem
        self._peer_layouts.remember(pull)
        return None

    def _num_expected(self, pull: MooncakeXferMetadata, remote_ranks: list[int]) -> int:
        """Consumer ranks that will ask this rank for each request."""
        if pull.remote_pp_size > 1 and pull.remote_pp_size != self._ranks.pp_size:
            return len(remote_ranks) * pull.remote_pp_size
        return len(remote_ranks)

    def _entry_for_pull(self, transfer_id: str) -> SendBlockMeta:
        entry = self.entries.get(transfer_id)
        if entry is None:
            entry = SendBlockMeta("", transfer_id)
            if transfer_id in self._gone:
                entry.dropped = True
            else:
                self.entries[transfer_id] = entry
        return entry

    def _wake(self, services: Iterable[Service], now_ns: int) -> None:
        for service in services:
            if service.write is None and service in self._services:
                self._advance(service, now_ns)

    def _advance(self, service: Service, now_ns: int) -> None:
        """Start to write what is ready, or wait for something to be."""
        self._deadlines.cancel(service.deadline)
        batch = [(d_req_id, entry) for d_req_id, entry in service.pending.items() if entry.is_over]
        if batch:
            self._start_batch(service, batch, now_ns)
        else:
            # The time starts again after each batch.
            service.deadline = self._deadlines.at(now_ns + self._abort_timeout_ns, self._on_never_ready, service)

    def _on_never_ready(self, service: Service, now_ns: int) -> None:
        pending = service.pending
        service.pending = {}
        self._reply(
            service,
            MooncakeXferResponse(
                _FINISH,
                err_reqs=list(pending),
                err_msg=NOT_READY,
                layout_id=service.pull.layout_id,
            ),
        )
        self._give_up(service, pending)
        self._end_service(service)

    def _start_batch(self, service: Service, batch: list[tuple[str, SendBlockMeta]], now_ns: int) -> None:
        envelope = service.envelope
        conversation = f"{envelope.conversation}/write{service.num_writes}"
        write = Write(service, next(self._write_ids), conversation, [])
        service.num_writes += 1
        for d_req_id, entry in batch:
            del service.pending[d_req_id]
            entry.waiters.pop(service, None)
            if entry.dropped:
                write.fail(d_req_id, DROPPED)
            elif entry.transfer_id in self.entries:
                entry.sending += 1
                entry.need_send = entry.need_send or service.num_remote_ranks
                write.batch.append((d_req_id, entry))
            # else it expired while something else was written: it is in neither list of the reply
        write.is_last = not service.pending
        service.write = write
        plan_copies(write, service.pull, self._page_bytes)
        if not write.segments:
            self._end_batch(write, now_ns)
        elif len(self._writes) < self._config.num_workers:
            self._start_write(write, now_ns)
        else:
            self._write_queue.append(write)

    def _end_batch(self, write: Write, now_ns: int) -> None:
        failed = set(write.err_reqs)
        ok_reqs: list[str] = []
        for d_req_id, entry in write.batch:
            entry.sending -= 1
            if d_req_id in failed:
                continue
            ok_reqs.append(d_req_id)
            entry.sent += 1
            self._complete(entry)
        service = write.service
        service.write = None
        self._reply(
            service,
            MooncakeXferResponse(
                _FINISH if write.is_last else _CONTINUE,
                ok_reqs=ok_reqs or None,
                err_reqs=write.err_reqs or None,
                err_msg=write.err_msg,
                layout_id=service.pull.layout_id,
            ),
        )
        if write.is_last:
            self._end_service(service)
        else:
            self._advance(service, now_ns)

    def _complete(self, entry: SendBlockMeta) -> None:
        """Let go of a transfer that every consumer rank has. A fenced one must not be read by anybody else."""
        if self._fences:
            is_done = entry.sent >= entry.need_send and entry.sending == 0
        else:
            is_done = entry.sent == entry.need_send
        if is_done and self._remove(entry.transfer_id) is not None:
            self._finished_sending[entry.p_req_id] = None

    def _end_service(self, service: Service) -> None:
        self._deadlines.cancel(service.deadline)
        self._services.pop(service, None)

    def _give_up(self, service: Service, pending: dict[str, SendBlockMeta]) -> None:
        """Stop to wait for these. What only waiting pulls had made goes with the last of them, or never."""
        for entry in pending.values():
            entry.waiters.pop(service, None)
            if self._expires_placeholders and not (entry.announced or entry.is_over or entry.waiters):
                self._remove(entry.transfer_id)

    def _on_consumer_gone(self, envelope: Envelope) -> None:
        """Stop to wait on behalf of a consumer that has died; a write that is running goes on."""
        gone = (envelope.conversation, envelope.attempt)
        for service in list(self._services):
            if (service.envelope.conversation, service.envelope.attempt) == gone:
                pending, service.pending = service.pending, {}
                self._give_up(service, pending)
                if service.write is None:
                    self._end_service(service)
                else:
                    service.write.is_last = True
        self._queue = deque(asked for asked in self._queue if (asked.conversation, asked.attempt) != gone)

    # -- replies ------------------------------------------------------------------------------------------

    def _refuse(self, envelope: Envelope, status: MooncakeXferResponseStatus, reason: str) -> None:
        response = MooncakeXferResponse(status, err_msg=reason)
        self._post_reply(envelope, response, envelope.request_ids, envelope.transfer_ids, 0)

    def _reply(self, service: Service, response: MooncakeXferResponse) -> None:
        """Answer. The last answer concerns every request that none has named."""
        unanswered = service.unanswered
        if response.status is _FINISH:
            covered = tuple(unanswered)
        else:
            covered = (*(response.ok_reqs or ()), *(response.err_reqs or ()))
        for d_req_id in covered:
            unanswered.pop(d_req_id, None)
        transfers = service.pull.req_blocks
        transfer_ids = tuple(transfers[d_req_id][0] for d_req_id in covered if d_req_id in transfers)
        self._post_reply(service.envelope, response, covered, transfer_ids, service.num_replies)
        service.num_replies += 1

    def _post_reply(
        self,
        envelope: Envelope,
        response: MooncakeXferResponse,
        request_ids: tuple[str, ...],
        transfer_ids: tuple[str, ...],
        reply_index: int,
    ) -> None:
        self.outbox.append(
            Envelope(
                kind=PULL_REPLY,
                source=self._identity.address,
                destination=envelope.source,
                payload=response,
                request_ids=request_ids,
                transfer_ids=transfer_ids,
                conversation=envelope.conversation,
                attempt=envelope.attempt,
                peer_index=envelope.peer_index,
                num_peers=envelope.num_peers,
                reply_index=reply_index,
            )
        )

    # -- engine writes ------------------------------------------------------------------------------------

    def _start_write(self, write: Write, now_ns: int) -> None:
        service = write.service
        envelope, pull = service.envelope, service.pull
        write.is_open = True
        write.start_ns = now_ns
        self._writes[write.write_id] = write
        num_blocks: dict[str, int] = {}
        for segment in write.segments:
            num_blocks[segment.request_id] = num_blocks.get(segment.request_id, 0) + len(segment.block_ids)
        peer = instance_of(envelope.source)
        transfer_ids: list[str] = []
        for d_req_id, entry in write.batch:
            if d_req_id in num_blocks:
                transfer_ids.append(entry.transfer_id)
                write.handles[d_req_id] = self._sink.emit(
                    Event(
                        "send.started",
                        now_ns,
                        self._identity.instance,
                        request_id=entry.p_req_id,
                        transfer_id=entry.transfer_id,
                        peer=peer,
                        num_blocks=num_blocks[d_req_id],
                    )
                )
        self.outbox.append(
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
                    read=self._reader(write),
                ),
                request_ids=tuple(num_blocks),
                transfer_ids=tuple(transfer_ids),
                conversation=write.conversation,
                attempt=envelope.attempt,
                peer_index=envelope.peer_index,
                num_peers=envelope.num_peers,
                size_bytes=write.size_bytes,
            )
        )
        # The engine gives up after a fixed time and 1 ns per byte; its bytes may land later all the same.
        timeout_ns = self._config.transfer_timeout_ns + write.size_bytes
        write.deadline = self._deadlines.at(now_ns + timeout_ns, self._on_write_timeout, write)

    def _reader(self, write: Write) -> SourceReader:
        """Reads the source when the write lands: whatever is there then, unless the write is fenced off."""

        def read(group: int, block_ids: BlockIds) -> WordArray | None:
            if self._is_dead or (self._fences and not write.is_open):
                return None
            return self._memory.read_blocks(group, block_ids)

        return read

    def _on_write_returned(self, done: WriteDone, now_ns: int) -> None:
        write = self._writes.get(done.write_id)
        if write is not None:
            self._end_write(write, done.ret, now_ns)

    def _on_write_timeout(self, write: Write, now_ns: int) -> None:
        self._end_write(write, -1, now_ns)

    def _end_write(self, write: Write, ret: int, now_ns: int) -> None:
        del self._writes[write.write_id]
        write.is_open = False
        self._deadlines.cancel(write.deadline)
        reason = None
        if ret == 0:
            self._stats.record_transfer(
                duration_ns=now_ns - write.start_ns,
                num_bytes=write.size_bytes,
                num_descriptors=num_descriptors(write.segments, self._num_regions),
            )
        else:
            self._stats.num_failed_transfers += 1
            reason = f"Mooncake transfer engine returned {ret}"
            failed = set(write.err_reqs)
            write.err_reqs += [d_req_id for d_req_id, _ in write.batch if d_req_id not in failed]
            write.err_msg = reason if write.err_msg is None else f"{write.err_msg}; {reason}"
        self._emit_send_finished(write, reason, now_ns)
        if self._write_queue:
            self._start_write(self._write_queue.popleft(), now_ns)
        self._end_batch(write, now_ns)

    def _emit_send_finished(self, write: Write, reason: str | None, now_ns: int) -> None:
        peer = instance_of(write.service.envelope.source)
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
                        peer=peer,
                        num_blocks=entry.num_blocks,
                        status="ok" if reason is None else "failed",
                        cause=reason,
                        cause_handle=handle,
                    )
                )


def _pull_of(payload: MooncakeXferMetadata | bytes) -> MooncakeXferMetadata:
    return payload if isinstance(payload, MooncakeXferMetadata) else decode_request(payload)
