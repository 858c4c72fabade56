"""The producer's half on one rank: keeps finished requests' blocks, and writes them to consumers that ask."""

from collections import OrderedDict, deque
from collections.abc import Iterable

import msgspec

from kvreplay.behaviour import Behaviour
from kvreplay.connectors.mooncake.config import MooncakeConfig
from kvreplay.connectors.mooncake.entries import SendBlockMeta, Service, Write, plan_copies
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
    WriteDone,
    decode_request,
)
from kvreplay.connectors.mooncake.write_source import WriteSource
from kvreplay.events import Event, EventSink
from kvreplay.kv.memory import KVMemory
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
    """A state machine: a queue of pulls, and sender tasks that wait for requests and have them written.

    A sender task takes one pull and keeps it until its last reply. There are twice as many as threads.
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
        self._answers_drops = behaviour["mooncake_producer_drop"] == "answer"
        self._expires_placeholders = behaviour["mooncake_placeholder"] == "expire"
        self._fences = behaviour["transfer_fence"] == "attempt"
        self._identity = identity
        self._ranks = identity.ranks
        self._config = config
        self._abort_timeout_ns = config.abort_request_timeout_ns
        self._layout = layout
        self._page_bytes, num_regions = layout.totals(num_groups)
        self._sink = sink
        self._stats = stats
        self._peer_layouts = PeerLayouts()
        self._deadlines = Deadlines()

        self._queue: deque[Envelope] = deque()
        self._services: dict[Service, None] = {}
        self._writes = WriteSource(
            self.outbox,
            self._deadlines,
            identity,
            config=config,
            num_regions=num_regions,
            memory=memory,
            sink=sink,
            stats=stats,
            fences=self._fences,
            ended=self._end_batch,
        )
        self._finished_sending: dict[str, None] = {}
        self._overdue: dict[str, SendBlockMeta] = {}
        """Transfers whose time is up: the next poll frees those that are not being sent."""
        self._gone: OrderedDict[str, None] = OrderedDict()

    # -- the state machine --------------------------------------------------------------------------------

    @property
    def next_deadline_ns(self) -> int:
        return self._deadlines.next_ns

    @property
    def has_report(self) -> bool:
        if self._overdue and any(entry.sending == 0 for entry in self._overdue.values()):
            return True
        return bool(self._finished_sending)

    def handle(self, envelope: Envelope, now_ns: int) -> None:
        kind = envelope.kind
        if kind == PULL_REQUEST:
            self._queue.append(envelope)
        elif kind == WRITE_DONE:
            self._writes.on_returned(envelope.payload, now_ns)
        else:
            assert kind == CONNECTION_CLOSED, kind
            self._on_consumer_gone(envelope)
        self._start_queued(now_ns)

    def on_refused(self, envelope: Envelope, now_ns: int) -> None:
        if envelope.kind == WRITE_DATA:
            self._writes.on_returned(WriteDone(envelope.payload.write_id, -1), now_ns)
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
        self._writes.shutdown()

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
        write = Write(service, conversation)
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
        if write.segments:
            self._writes.start(write, now_ns)
        else:
            self._end_batch(write, now_ns)

    def _end_batch(self, write: Write, now_ns: int) -> None:
        """The engine has returned, or had nothing to do."""
        failed = set(write.err_reqs)
        ok_reqs: list[str] = []
        for d_req_id, entry in write.batch:
            entry.sending -= 1
            if d_req_id not in failed:
                ok_reqs.append(d_req_id)
                entry.sent += 1
            elif not self._fences:
                continue
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
        """Let go of a transfer that every consumer rank has. With fences, not while another write reads it still."""
        if self._fences:
            is_current = self.entries.get(entry.transfer_id) is entry
            is_done = is_current and entry.sent >= entry.need_send and entry.sending == 0
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


def _pull_of(payload: MooncakeXferMetadata | bytes) -> MooncakeXferMetadata:
    return payload if isinstance(payload, MooncakeXferMetadata) else decode_request(payload)
