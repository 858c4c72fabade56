"""The producer's half on one rank: keeps finished requests' blocks, and writes them to consumers that ask."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import msgspec

from kvreplay.behaviour import Behaviour
from kvreplay.connectors.mooncake import log
from kvreplay.connectors.mooncake.config import MooncakeConfig
from kvreplay.connectors.mooncake.entries import CopyPlanner, SendBlockMeta, Service, Write
from kvreplay.connectors.mooncake.identity import WorkerIdentity
from kvreplay.connectors.mooncake.layout import KVLayout, LayoutMatcher, LayoutMissError
from kvreplay.connectors.mooncake.log import LogSink
from kvreplay.connectors.mooncake.memory import RankMemory
from kvreplay.connectors.mooncake.plan import BrokenPlanError, HeadLayout, TransferPlan
from kvreplay.connectors.mooncake.ranks import target_ranks
from kvreplay.connectors.mooncake.regions import MisfitError
from kvreplay.connectors.mooncake.stats import MooncakeStats
from kvreplay.connectors.mooncake.structs import (
    CONNECTION_CLOSED,
    STRAY_FRAMES,
    MooncakeConnectorMetadata,
    MooncakeXferMetadata,
    MooncakeXferResponse,
    MooncakeXferResponseStatus,
    WriteDone,
    decode_request,
)
from kvreplay.connectors.mooncake.transfers import Transfers
from kvreplay.connectors.mooncake.write_source import WriteSource
from kvreplay.events import EventSink
from kvreplay.sim.envelope import PULL_REPLY, PULL_REQUEST, WRITE_DATA, WRITE_DONE, Envelope
from kvreplay.transport.machine import Deadlines

_FINISH = MooncakeXferResponseStatus.FINISH
_CONTINUE = MooncakeXferResponseStatus.CONTINUE
_ERROR = MooncakeXferResponseStatus.ERROR
_LAYOUT_MISS = MooncakeXferResponseStatus.LAYOUT_MISS

NOT_READY = "Timeout waiting for P side ready."
"""What it answers in the end to a pull of what it has never had ready: vLLM's text, as it is on the wire, in logs and
in recordings. A law (`checkers.progress`) knows such pulls by it."""
DROPPED = "P dropped the request"


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
        heads: HeadLayout,
        kernel_ratios: Sequence[int],
        state_groups: frozenset[int],
        memory: RankMemory,
        sink: EventSink,
        stats: MooncakeStats,
        log_line: LogSink | None = None,
    ) -> None:
        self.outbox: list[Envelope] = []
        self.layouts = LayoutMatcher(layout, identity.ranks, heads, log_line)
        self.num_stray_messages = 0
        self.on_change: Callable[[], None] | None = None
        """Told of every state that the transfers go through, for those who watch closely."""
        self._expires_placeholders = behaviour["mooncake_placeholder"] == "expire"
        self._fences = behaviour["transfer_fence"] == "attempt"
        self._releases_tasks = behaviour["mooncake_sender_tasks"] == "release"
        self._settles_broken = behaviour["mooncake_broken_send"] == "settle"
        self._survives_strays = behaviour["mooncake_listener"] == "survive"
        self._identity = identity
        self._ranks = identity.ranks
        self._sink = sink
        self._stats = stats
        self._log = log_line
        self._deadlines = Deadlines()
        self._woken: dict[Service, None] = {}
        """Pulls for which something is ready: they go on at the loop's next turn, when those that came with them have
        found their transfers, too (vLLM: asyncio.wait in send_kv_to_decode)."""
        self._planner = CopyPlanner(
            kernel_ratios=kernel_ratios,
            state_groups=state_groups,
            refuses_nulls=behaviour["mooncake_null_blocks"] == "refuse",
            log_line=log_line,
        )
        self._queue: deque[Envelope] = deque()
        self._services: dict[Service, None] = {}
        self._orphans: list[SendBlockMeta] = []
        """What waits are left of services that broke: vLLM's tasks that nobody cancels."""
        self._is_deaf = False
        self._writes = WriteSource(
            self.outbox,
            self._deadlines,
            identity,
            config=config,
            memory=memory,
            sink=sink,
            stats=stats,
            fences=self._fences,
            ended=self._end_batch,
            broke=self._break,
            log_line=log_line,
        )
        self._transfers = Transfers(
            identity.instance,
            behaviour=behaviour,
            deadlines=self._deadlines,
            sink=sink,
            stats=stats,
            wake=lambda entry: self._woken.update(entry.waiters),
            changed=self._changed,
            log_line=log_line,
        )
        self.configure(config)

    def configure(self, config: MooncakeConfig) -> None:
        """Settings of the environment are read when they are used: what has begun goes on with the old ones."""
        self._config = config
        self._abort_timeout_ns = config.abort_request_timeout_ns
        self._writes.timeout_ns = config.transfer_timeout_ns
        self._transfers.configure(config)

    @property
    def entries(self) -> dict[str, SendBlockMeta]:
        """Transfer id → transfer: `reqs_need_send`."""
        return self._transfers.entries

    # -- the state machine --------------------------------------------------------------------------------

    @property
    def next_deadline_ns(self) -> int:
        return 0 if self._woken else self._deadlines.next_ns

    @property
    def has_report(self) -> bool:
        return self._transfers.has_report

    def handle(self, envelope: Envelope, now_ns: int) -> None:
        kind = envelope.kind
        if kind == PULL_REQUEST:
            if not self._is_deaf:
                self._queue.append(envelope)
        elif kind == WRITE_DONE:
            self._writes.on_returned(envelope.payload, now_ns)
        elif kind == STRAY_FRAMES:
            self._on_stray(envelope)
        else:
            assert kind == CONNECTION_CLOSED, kind
            self._on_consumer_gone(envelope)
        self._start_queued(now_ns)

    def on_refused(self, envelope: Envelope, now_ns: int) -> None:
        if envelope.kind == WRITE_DATA:
            self._writes.on_returned(WriteDone(envelope.payload.write_id, -1), now_ns)
            self._start_queued(now_ns)

    def on_deadline(self, now_ns: int) -> None:
        woken, self._woken = self._woken, {}
        for service in woken:
            if service.write is None and service in self._services:
                self._advance(service, now_ns)
                self._start_queued(now_ns)  # a task that is done takes the next pull before anybody else goes on
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

    def tasks(self) -> dict[str, int]:
        """What runs on vLLM's sender loop, by name: its idle tasks, its listener, and waits for requests."""
        names: Counter[str] = Counter()
        if not self._is_deaf:
            names["_sender_worker"] = self._config.num_sender_tasks
            names["_mooncake_sender_listener"] = 1
        waits = [entry for service in self._services for entry in service.pending.values()]
        names["wait_and_ret"] = sum(not entry.is_over for entry in (*waits, *self._orphans))
        return dict(+names)

    def _on_stray(self, envelope: Envelope) -> None:
        """A message that no consumer of Mooncake's sends. The listener takes two frames, the identity among them."""
        self.num_stray_messages += 1
        frames: tuple[bytes, ...] = envelope.payload
        if len(frames) == 1:
            self._queue.append(replace(envelope, kind=PULL_REQUEST, payload=frames[0]))
        elif not self._survives_strays and not self._is_deaf:
            self._line(log.ERROR, log.LISTENER_DIED, "too many values to unpack (expected 2)")
            self._is_deaf = True
            for service in list(self._services):
                self._orphans += service.pending.values()
                self._end_service(service)

    # -- its scheduler ------------------------------------------------------------------------------------

    def record_send_reqs(self, metadata: MooncakeConnectorMetadata, now_ns: int) -> None:
        """Take the step's metadata."""
        self._transfers.record(metadata, now_ns)

    def note_overdue(self, now_ns: int) -> None:
        """A poll looks at the clock itself: it frees what has expired while the loop was busy."""
        self._transfers.note_overdue(now_ns)

    def take_finished(self, now_ns: int) -> list[str]:
        """Requests whose blocks may be freed: sent, or never asked for in time."""
        return self._transfers.take_finished(now_ns)

    def expire_now(self, transfer_ids: Iterable[str]) -> None:
        """Let the time of these be up already, as if their requests had finished long ago."""
        self._transfers.expire_now(transfer_ids)

    # -- servicing pulls ----------------------------------------------------------------------------------

    def _start_queued(self, now_ns: int) -> None:
        while self._queue and self._num_busy() < self._config.num_sender_tasks and not self._is_deaf:
            self._start_service(self._queue.popleft(), now_ns)

    def _num_busy(self) -> int:
        """Sender tasks that have a pull, waiting or not."""
        if not self._releases_tasks:
            return len(self._services)
        return sum(service.write is not None or service in self._woken for service in self._services)

    def _start_service(self, envelope: Envelope, now_ns: int) -> None:
        try:
            pull = _pull_of(envelope.payload)
            remote_ranks = target_ranks(self._ranks.tp_rank, self._ranks.tp_size, pull.remote_tp_size)
            plan = self._plan_for(pull, remote_ranks)
        except LayoutMissError as miss:
            self._refuse(envelope, _LAYOUT_MISS, str(miss))
        except MisfitError as misfit:
            self._refuse(envelope, _ERROR, str(misfit))
        except (msgspec.MsgspecError, ValueError, ZeroDivisionError, BrokenPlanError) as error:
            self._line(log.ERROR, log.PULL_BROKE, str(error))
            self._refuse(envelope, _ERROR, str(error))
        else:
            self._serve(envelope, pull, plan, remote_ranks, now_ns)

    def _plan_for(self, pull: MooncakeXferMetadata, remote_ranks: list[int]) -> TransferPlan:
        """What to copy for this pull. Raises what the consumer is told instead."""
        ranks = self._ranks
        problem = None
        if pull.remote_tp_rank not in remote_ranks:
            problem = (
                f"This D tp_rank {pull.remote_tp_rank} is not paired with P tp_rank {ranks.tp_rank}; "
                f"expected one of {remote_ranks}."
            )
        elif self.layouts.refuses_stages(pull):
            problem = (
                "Mooncake non-page-contiguous packed regions keep only the first layer name, so they cannot be "
                f"aligned across PP sizes {ranks.pp_size} and {pull.remote_pp_size}."
            )
        if problem is not None:
            self._line(log.ERROR, problem)
            raise MisfitError(problem)
        return self.layouts.plan_for(pull)

    def _serve(
        self, envelope: Envelope, pull: MooncakeXferMetadata, plan: TransferPlan, remote_ranks: list[int], now_ns: int
    ) -> None:
        pending = {
            d_req_id: self._transfers.for_pull(d_req_id, transfer_id, now_ns)
            for d_req_id, (transfer_id, _) in pull.req_blocks.items()
        }
        if not pending:
            return  # vLLM answers nothing
        service = Service(envelope, pull, plan, pending, remote_ranks, dict.fromkeys(envelope.request_ids))
        self._services[service] = None
        for entry in pending.values():
            if entry.is_over:
                self._woken[service] = None
            else:
                entry.waiters[service] = None
        if service not in self._woken:
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
        if service in self._woken:
            return  # something has become ready at this very instant
        pending = service.pending
        service.pending = {}
        self._line(log.WARNING, log.NOT_READY, list(pending))
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
        write = Write(service, f"{envelope.conversation}/write{service.num_writes}")
        service.num_writes += 1
        for d_req_id, entry in batch:
            del service.pending[d_req_id]
            entry.waiters.pop(service, None)
            if entry.dropped or self._transfers.is_anothers(entry, d_req_id):
                write.fail(d_req_id, DROPPED)
            elif self._transfers.may_be_read(entry):
                entry.sending += 1
                if not entry.need_send:
                    self._resolve_need_send(entry, service)
                write.batch.append((d_req_id, entry))
                self._changed()
            else:
                # It expired while something else was written, or has been served: it is in neither list of the reply.
                self._line(log.WARNING, log.EXPIRED_BEFORE_SENDING, d_req_id)
        write.is_last = not service.pending
        service.write = write
        try:
            self._planner.plan(write)
        except BrokenPlanError as error:
            self._break(write, str(error), now_ns)
            return
        if write.segments:
            self._writes.start(write, now_ns)
        else:
            self._end_batch(write, now_ns)

    def _resolve_need_send(self, entry: SendBlockMeta, service: Service) -> None:
        """How many consumer ranks will ask this rank for the request; the first of them tells."""
        entry.need_send = len(service.remote_ranks)
        remote_pp_size = service.pull.remote_pp_size
        if remote_pp_size > 1 and remote_pp_size != self._ranks.pp_size:
            entry.need_send *= remote_pp_size
        if self._log is not None and self._log.debug:
            self._line(log.DEBUG, log.SERVED_BY, entry.transfer_id, entry.need_send, service.remote_ranks)

    def _end_batch(self, write: Write, now_ns: int) -> None:
        """The engine has returned, or had nothing to do."""
        service = write.service
        if service not in self._services:
            return  # its task is gone: nothing is counted, nobody is told
        failed = set(write.err_reqs)
        ok_reqs: list[str] = []
        for d_req_id, entry in write.batch:
            entry.sending -= 1
            if d_req_id not in failed:
                ok_reqs.append(d_req_id)
                entry.sent += 1
            elif not self._fences:
                continue
            self._changed()
            self._complete(entry)
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

    def _break(self, write: Write, reason: str, now_ns: int) -> None:
        """An exception in the middle of the service ends it. vLLM then counts its transfers as being sent for ever."""
        service = write.service
        if service not in self._services:
            return
        self._line(log.ERROR, log.PULL_BROKE, reason)
        pending, service.pending = service.pending, {}
        self._reply(service, MooncakeXferResponse(_ERROR, err_msg=reason))
        if self._settles_broken:
            for _, entry in write.batch:
                entry.sending -= 1
                self._complete(entry)
            self._give_up(service, pending)
        else:
            self._orphans += pending.values()
            for entry in pending.values():
                entry.waiters.pop(service, None)
        self._end_service(service)

    def _complete(self, entry: SendBlockMeta) -> None:
        """Let go of a transfer that every consumer rank has. With fences, not while another write reads it still."""
        if self._fences:
            is_done = self._transfers.is_current(entry) and entry.sent >= entry.need_send and entry.sending == 0
        else:
            is_done = entry.sent == entry.need_send
        if is_done:
            self._transfers.let_go(entry)

    def _end_service(self, service: Service) -> None:
        self._deadlines.cancel(service.deadline)
        self._services.pop(service, None)

    def _give_up(self, service: Service, pending: dict[str, SendBlockMeta]) -> None:
        """Stop to wait for these. What only waiting pulls had made goes with the last of them, or never."""
        for entry in pending.values():
            entry.waiters.pop(service, None)
            if self._expires_placeholders and not (entry.announced_by or entry.is_over or entry.waiters):
                self._transfers.remove(entry.transfer_id)

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

    def _changed(self) -> None:
        if self.on_change is not None:
            self.on_change()

    def _line(self, level: str, template: str, *arguments: object) -> None:
        if self._log is not None:
            self._log(log.SENDER, level, template, *arguments)

    # -- replies ------------------------------------------------------------------------------------------

    def _refuse(self, envelope: Envelope, status: MooncakeXferResponseStatus, reason: str) -> None:
        response = MooncakeXferResponse(status, err_msg=reason)
        self._post_reply(envelope, response, envelope.request_ids, envelope.transfer_ids, 0)

    def _reply(self, service: Service, response: MooncakeXferResponse) -> None:
        """Answer. The last answer concerns every request that none has named."""
        unanswered = service.unanswered
        if response.status is _CONTINUE:
            covered = (*(response.ok_reqs or ()), *(response.err_reqs or ()))
        else:
            covered = tuple(unanswered)
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
