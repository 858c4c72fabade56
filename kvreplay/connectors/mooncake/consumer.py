"""The consumer's half on one rank: asks producers for blocks, takes their writes, settles what they answer."""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import msgspec

from kvreplay.behaviour import Behaviour
from kvreplay.connectors.mooncake import log
from kvreplay.connectors.mooncake.addresses import SCHEME, instance_of, printable, refusal_of
from kvreplay.connectors.mooncake.config import MooncakeConfig
from kvreplay.connectors.mooncake.coverage import Coverage
from kvreplay.connectors.mooncake.discovery import Discovery, Query, by_server, of_first
from kvreplay.connectors.mooncake.identity import WorkerIdentity
from kvreplay.connectors.mooncake.layout import KVLayout
from kvreplay.connectors.mooncake.log import LogSink
from kvreplay.connectors.mooncake.memory import RankMemory
from kvreplay.connectors.mooncake.ranks import select_peers
from kvreplay.connectors.mooncake.settlement import Pull, Reports, make_settlement
from kvreplay.connectors.mooncake.stats import MooncakeStats
from kvreplay.connectors.mooncake.structs import (
    CONNECTION_CLOSED,
    MooncakeXferMetadata,
    MooncakeXferResponse,
    MooncakeXferResponseStatus,
    PullReqMeta,
    WriteData,
    WriteDone,
    decode_response,
    encode,
)
from kvreplay.connectors.mooncake.write_target import WriteTarget
from kvreplay.events import Event, EventSink
from kvreplay.ids import NS_PER_S
from kvreplay.sim.envelope import (
    BOOTSTRAP_ANSWER,
    BOOTSTRAP_QUERY,
    PULL_REPLY,
    PULL_REQUEST,
    WRITE_DATA,
    WRITE_DONE,
    Envelope,
)
from kvreplay.transport.machine import Deadlines

_FINISH = MooncakeXferResponseStatus.FINISH
_CONTINUE = MooncakeXferResponseStatus.CONTINUE
_ERROR = MooncakeXferResponseStatus.ERROR
_LAYOUT_MISS = MooncakeXferResponseStatus.LAYOUT_MISS


GAVE_WAY: Final = "gave way to requests that wait for room"
_PATIENCE_NS: Final = 10 * NS_PER_S


class Consumer:
    """A state machine: one pull conversation per step, producer and peer rank.

    Nothing here times a request: a lost reply is noticed when the receive timeout, which starts again with each
    reply, has passed.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        *,
        config: MooncakeConfig,
        behaviour: Behaviour,
        layout: KVLayout,
        kernel_ratios: Sequence[int],
        memory: RankMemory,
        sink: EventSink,
        stats: MooncakeStats,
        log_line: LogSink | None = None,
        starves: Callable[[], bool] | None = None,
    ) -> None:
        """`starves`: whether nothing runs and somebody waits for room; None: no pull gives way to anybody."""
        self._starves = starves
        self.outbox: list[Envelope] = []
        self.reports = Reports()
        self.failures: dict[str, str] = {}
        """Why each failed request failed, until its owner asks."""
        self._identity = identity
        self._ranks = identity.ranks
        self._rank = identity.ranks.rank
        self._layout = layout
        self._kernel_ratios = kernel_ratios
        self._block_bytes = [
            num_bytes * ratio
            for num_bytes, ratio in zip(layout.block_bytes(len(kernel_ratios)), kernel_ratios, strict=True)
        ]
        self._sink = sink
        self._log = log_line
        self._now_ns = 0
        self._deadlines = Deadlines()
        self._pulls: dict[str, Pull] = {}
        self._acked_layout_peers: set[str] = set()
        self._settlement = make_settlement(
            behaviour["mooncake_failure"],
            self.reports,
            stats,
            self._settled,
            log_line,
            num_groups=len(kernel_ratios),
        )
        self._hears_exceptions = behaviour["mooncake_lost_pulls"] == "fail"
        self._bounds_waits = behaviour["pull_wait"] == "bounded"
        self._times_transfers = behaviour["pull_wait"] != "first-reply"
        self._verifies = behaviour["transfer_integrity"] == "checksum"
        self._target = WriteTarget(
            memory=memory,
            session=identity.session,
            verifies=self._verifies,
            fences=behaviour["transfer_fence"] == "attempt",
            find_pull=self._find_pull,
        )
        self._discovery = Discovery(
            self.outbox,
            self._deadlines,
            sink,
            instance=identity.instance,
            address=identity.address,
            origin=identity.origin,
            config=config,
            resolved=self._on_resolved,
            log_line=log_line,
        )
        self.configure(config)

    def configure(self, config: MooncakeConfig) -> None:
        """Settings of the environment are read when they are used: what has begun goes on with the old ones."""
        self._receive_timeout_ns = config.receive_timeout_ns
        self._discovery.timeout_ns = config.connector_timeout_ns

    # -- the state machine --------------------------------------------------------------------------------

    @property
    def next_deadline_ns(self) -> int:
        return self._deadlines.next_ns

    @property
    def has_report(self) -> bool:
        return bool(self.reports)

    def handle(self, envelope: Envelope, now_ns: int) -> None:
        self._now_ns = now_ns
        kind = envelope.kind
        if kind == PULL_REPLY:
            self._on_reply(envelope, now_ns)
        elif kind == WRITE_DATA:
            self._on_write(envelope)
        elif kind == BOOTSTRAP_ANSWER:
            self._discovery.on_answer(envelope, now_ns)
        else:
            assert kind == CONNECTION_CLOSED, kind
            self._on_gone(envelope, "connection closed by peer")

    def on_refused(self, envelope: Envelope, now_ns: int) -> None:
        self._now_ns = now_ns
        if envelope.kind == BOOTSTRAP_QUERY:
            self._discovery.on_refused(envelope, now_ns)
        elif envelope.kind == PULL_REQUEST:
            # A DEALER socket keeps trying to connect, and says nothing.
            self._on_gone(envelope, "connection refused")

    def on_deadline(self, now_ns: int) -> None:
        self._now_ns = now_ns
        self._deadlines.fire(now_ns)

    # -- what can be seen of it ---------------------------------------------------------------------------

    @property
    def known_engines(self) -> list[str]:
        return sorted(self._discovery.known_engines)

    @property
    def acked_layout_peers(self) -> list[str]:
        """Producers that have said that they know this rank's layout."""
        return sorted(self._acked_layout_peers)

    def is_open(self, conversation: str, attempt: int) -> bool:
        """Whether the socket of this pull is still there to receive a reply."""
        return self._find_pull(conversation, attempt) is not None

    def tasks(self) -> dict[str, int]:
        """What runs on vLLM's receiver loop, by name."""
        counts = {
            "receive_kv_from_single_worker": len(self._pulls),
            "handle_new_engine_id": self._discovery.num_waiting,
        }
        return {name: count for name, count in counts.items() if count}

    # -- pulls --------------------------------------------------------------------------------------------

    def start_load_kv(self, reqs_to_recv: dict[str, dict[str, PullReqMeta]], now_ns: int) -> None:
        """Start to pull. An exception for one producer loses those after it, as it does in vLLM."""
        self._now_ns = now_ns
        pulls: list[Pull] = []
        for engine_id, wanted in reqs_to_recv.items():
            metas = {req_id: meta.copy(self._coverage(meta)) for req_id, meta in wanted.items()}
            if self._discovery.addresses(engine_id) is None:
                self._ask_bootstrap(engine_id, metas, now_ns)
            elif not self._plan_pulls(engine_id, metas, pulls) and not self._hears_exceptions:
                break
        self._start_pulls(pulls, now_ns)

    def _coverage(self, meta: PullReqMeta) -> Coverage | None:
        if self._verifies and meta.has_blocks:
            return Coverage(meta.local_block_ids, self._block_bytes, self._kernel_ratios)
        return None

    def open_pulls(self) -> list[Envelope]:
        """For each open pull, the notice to its peer that this worker is gone."""
        return [
            Envelope(
                kind=CONNECTION_CLOSED,
                source=self._identity.address,
                destination=pull.address.removeprefix(SCHEME),
                payload=None,
                conversation=pull.conversation,
                attempt=pull.attempt,
            )
            for pull in self._pulls.values()
        ]

    def _ask_bootstrap(self, engine_id: str, metas: dict[str, PullReqMeta], now_ns: int) -> None:
        for url, of_url in by_server(metas) if self._hears_exceptions else of_first(metas):
            if isinstance(url, str):
                self._discovery.ask(url, (engine_id, of_url), now_ns)
            elif self._hears_exceptions:
                self._fail_unasked(engine_id, of_url, f"no bootstrap server at {url!r}")

    def _on_resolved(self, query: Query, now_ns: int) -> None:
        pulls: list[Pull] = []
        for engine_id, metas in query.waiting:
            if self._discovery.addresses(engine_id) is None:
                self._fail_unasked(
                    engine_id, metas, f"remote engine_id {engine_id} not found from bootstrap server {query.url}"
                )
            else:
                self._plan_pulls(engine_id, metas, pulls)
        self._start_pulls(pulls, now_ns)

    def _fail_unasked(self, engine_id: str, metas: dict[str, PullReqMeta], reason: str) -> None:
        self._settlement.fail_all(Pull("", metas, peer=instance_of(printable(engine_id))), reason)

    def _plan_pulls(self, engine_id: str, metas: dict[str, PullReqMeta], pulls: list[Pull]) -> bool:
        """One pull per peer rank, onto `pulls`. False if the known addresses do not cover the ranks that are needed.

        In vLLM that is an exception that nobody hears: the requests wait for ever.
        """
        try:
            addresses = self._peer_addresses(engine_id)
        except (KeyError, ValueError, ZeroDivisionError) as error:
            if self._hears_exceptions:
                self._fail_uncovered(engine_id, metas, error)
            return False
        if not addresses and self._hears_exceptions:
            self._fail_uncovered(engine_id, metas, "no address")
        for meta in metas.values():
            meta.pull_tasks_count = len(addresses)
        conversation = f"pull/{self._identity.origin}/{next(iter(metas))}"
        for index, address in enumerate(addresses):
            pulls.append(
                Pull(
                    conversation if len(addresses) == 1 else f"{conversation}/{index}",
                    metas,
                    peer=instance_of(printable(address)),
                    address=address,
                    peer_index=index,
                    num_peers=len(addresses),
                    place=self._rank * len(addresses) + index,
                )
            )
        return True

    def _fail_uncovered(self, engine_id: str, metas: dict[str, PullReqMeta], what: object) -> None:
        self._discovery.forget(engine_id)
        self._fail_unasked(engine_id, metas, f"remote engine_id {engine_id} lacks a rank: {what}")

    def _start_pulls(self, pulls: Iterable[Pull], now_ns: int) -> None:
        """Each is a task in vLLM: none begins before all of a step, or all that waited for one answer, are planned."""
        for pull in pulls:
            try:
                pull.include_layout = pull.address not in self._acked_layout_peers
            except TypeError as error:  # an address that is no string, and cannot be looked for: nobody hears of it
                if self._hears_exceptions:
                    self._settlement.fail_all(pull, f"transfer failed: {error}")
                continue
            self._pulls[pull.conversation] = pull
            self._send(pull, now_ns)

    def _peer_addresses(self, engine_id: str) -> list[str]:
        """Every producer rank that holds a part of what this rank needs."""
        by_tp_rank = self._discovery.addresses(engine_id)
        assert by_tp_rank is not None
        selected = select_peers(self._ranks, by_tp_rank, self._discovery.tp_size(engine_id))
        if self._log is not None and self._log.debug:
            self._line(log.DEBUG, log.PULL_STARTED, engine_id, list(selected), selected)
        return [by_tp_rank[tp_rank][pp_rank] for tp_rank, pp_ranks in selected.items() for pp_rank in pp_ranks]

    def _send(self, pull: Pull, now_ns: int) -> None:
        identity, ranks = self._identity, self._ranks
        metadata = MooncakeXferMetadata(
            remote_hostname=identity.hostname,
            remote_port=identity.rpc_port,
            remote_tp_size=ranks.tp_size,
            remote_tp_rank=ranks.tp_rank,
            req_blocks={
                req_id: (pull.metas[req_id].transfer_id, pull.metas[req_id].local_block_ids) for req_id in pull.open
            },
            kv_caches_base_addr=[],
            block_lens=[],
            kv_block_lens=[],
            remote_pp_size=ranks.pp_size,
            layout_id=self._layout.layout_id,
        )
        if pull.include_layout:
            self._layout.describe(metadata)
        pull.timeout_ns = self._receive_timeout_ns
        transfer_ids = tuple(transfer_id for transfer_id, _ in metadata.req_blocks.values())
        is_typed = all(type(transfer_id) is str for transfer_id in transfer_ids)
        if self._log is not None and self._log.debug:
            what = "layout" if pull.include_layout else "blocks"
            self._line(log.DEBUG, log.PULL_SIZE, pull.address, len(encode(metadata)), what)
            self._line(log.DEBUG, log.PULL_SENT, list(pull.open), pull.address)
        refusal = refusal_of(pull.address)
        if refusal is not None:
            self._give_up(pull, f"transfer failed: {refusal}")
            return
        self.outbox.append(
            Envelope(
                kind=PULL_REQUEST,
                source=identity.address,
                destination=pull.address.removeprefix(SCHEME),
                # Parameters of the wrong type are for the producer's decoder to refuse.
                payload=metadata if is_typed else encode(metadata),
                request_ids=tuple(pull.open),
                transfer_ids=transfer_ids,
                conversation=pull.conversation,
                attempt=pull.attempt,
                peer_index=pull.peer_index,
                num_peers=pull.num_peers,
            )
        )
        for req_id in pull.open:
            meta = pull.metas[req_id]
            pull.open[req_id] = self._sink.emit(
                Event(
                    "pull.sent",
                    now_ns,
                    identity.instance,
                    request_id=req_id,
                    transfer_id=meta.transfer_id,
                    peer=pull.peer,
                    rank=pull.place,
                    num_blocks=meta.num_blocks,
                    cause_handle=pull.open[req_id],
                )
            )
        self._expect_reply(pull, now_ns)
        if self._starves is not None and any(meta.has_blocks for meta in pull.metas.values()):
            self._deadlines.at(now_ns + _PATIENCE_NS, self._give_way, pull)

    def _give_way(self, pull: Pull, now_ns: int) -> None:
        """Others may need its blocks more than a producer that has not begun. That is told to keep nothing for it."""
        assert self._starves is not None
        if self._pulls.get(pull.conversation) is not pull or any(pull.metas[name].has_begun for name in pull.open):
            return
        if not self._starves():
            self._deadlines.at(now_ns + _PATIENCE_NS, self._give_way, pull)
            return
        release = pull.release()
        self._give_up(pull, GAVE_WAY)
        self._start_pulls([release], now_ns)

    def _expect_reply(self, pull: Pull, now_ns: int) -> None:
        self._deadlines.cancel(pull.deadline)
        pull.deadline = self._deadlines.at(now_ns + pull.timeout_ns, self._on_receive_timeout, pull)

    def _on_receive_timeout(self, pull: Pull, now_ns: int) -> None:
        if self._bounds_waits:
            self._forget_peer(pull)
        self._give_up(pull, "transfer failed: Resource temporarily unavailable")

    def _on_gone(self, envelope: Envelope, how: str) -> None:
        pull = self._find_pull(envelope.conversation, envelope.attempt)
        if pull is not None and self._bounds_waits:
            self._forget_peer(pull)
            self._give_up(pull, f"transfer failed: {how}")

    def _forget_peer(self, pull: Pull) -> None:
        for meta in pull.metas.values():
            self._discovery.forget(meta.remote_engine_id)

    def _give_up(self, pull: Pull, reason: str) -> None:
        self._close(pull)
        self._settlement.fail_all(pull, reason)

    def _close(self, pull: Pull) -> None:
        self._deadlines.cancel(pull.deadline)
        del self._pulls[pull.conversation]

    def _find_pull(self, conversation: str, attempt: int) -> Pull | None:
        pull = self._pulls.get(conversation)
        return pull if pull is not None and pull.attempt == attempt else None

    # -- replies ------------------------------------------------------------------------------------------

    def _on_reply(self, envelope: Envelope, now_ns: int) -> None:
        pull = self._find_pull(envelope.conversation, envelope.attempt)
        if pull is None:
            return  # its socket is closed
        try:
            response = _response_of(envelope.payload)
        except msgspec.MsgspecError as error:
            self._give_up(pull, f"transfer failed: {error}")
            return
        if response.status is _LAYOUT_MISS:
            self._acked_layout_peers.discard(pull.address)
            if not pull.include_layout:
                self._line(log.INFO, log.LAYOUT_LOST, pull.address)
                self._replied(pull, response, pull.open, now_ns)
                pull.include_layout = True
                pull.attempt += 1
                self._send(pull, now_ns)
                return
        if response.status is _ERROR or response.status is _LAYOUT_MISS:
            self._replied(pull, response, pull.open, now_ns)
            self._give_up(pull, response.err_msg or "transfer error")
            return
        if response.layout_id == self._layout.layout_id:
            self._acked_layout_peers.add(pull.address)
        self._on_results(pull, response, now_ns)

    def _on_results(self, pull: Pull, response: MooncakeXferResponse, now_ns: int) -> None:
        is_last = response.status is _FINISH
        named = pull.open if is_last else [*(response.err_reqs or ()), *(response.ok_reqs or ())]
        self._replied(pull, response, named, now_ns)
        num_open = len(pull.open)
        if self._verifies:
            response = self._refuse_bad_blocks(pull, response)
        finished = response.ok_reqs
        try:
            self._settlement.reply(pull, response)
        except KeyError as error:
            self._give_up(pull, f"transfer failed: {error}")
            return
        if finished and self._log is not None and self._log.debug:
            self._line(log.DEBUG, log.PULL_FINISHED, finished)
        if is_last:
            self._close(pull)
            self._settlement.finish(pull)
        elif not self._times_transfers:
            self._deadlines.cancel(pull.deadline)
        elif len(pull.open) < num_open or not self._bounds_waits:
            self._expect_reply(pull, now_ns)

    def _refuse_bad_blocks(self, pull: Pull, response: MooncakeXferResponse) -> MooncakeXferResponse:
        """Turn the success of a request whose bytes are not all there, or not right, into its failure.

        Several peers bring parts of every block: the last of them to settle answers for all.
        """
        bad: dict[str, None] = {}
        for req_id in response.ok_reqs or ():
            meta = pull.metas.get(req_id)
            if meta is None or meta.coverage is None or meta.failed or meta.pull_tasks_count > 1:
                continue
            missing = meta.coverage.missing_blocks() if req_id in pull.open else []
            if missing:
                bad[req_id] = None
                reason = f"wrong or missing bytes in {len(missing)} of {meta.num_blocks} blocks"
                self._settlement.fail(pull, [req_id], reason, missing)
                self._distrust(pull, meta, missing)
        if not bad:
            return response
        good = [req_id for req_id in response.ok_reqs or () if req_id not in bad]
        return msgspec.structs.replace(response, ok_reqs=good)

    def _distrust(self, pull: Pull, meta: PullReqMeta, missing: list[int]) -> None:
        """Nothing arrived whole: the addresses may lack ranks of the producer."""
        if self._hears_exceptions and len(missing) == meta.num_blocks:
            self._forget_peer(pull)

    def _replied(self, pull: Pull, response: MooncakeXferResponse, req_ids: Iterable[str], now_ns: int) -> None:
        for req_id in req_ids:
            if req_id in pull.open:
                pull.open[req_id] = self._sink.emit(
                    Event(
                        "pull.replied",
                        now_ns,
                        self._identity.instance,
                        request_id=req_id,
                        transfer_id=pull.metas[req_id].transfer_id,
                        peer=pull.peer,
                        rank=pull.place,
                        status=response.status.name,
                        cause=response.err_msg,
                        cause_handle=pull.open[req_id],
                    )
                )

    def _settled(self, pull: Pull, req_id: str, reason: str | None) -> None:
        if req_id not in pull.open:
            return
        last = pull.open.pop(req_id)
        self._sink.emit(
            Event(
                "pull.settled",
                self._now_ns,
                self._identity.instance,
                request_id=req_id,
                transfer_id=pull.metas[req_id].transfer_id,
                peer=pull.peer,
                rank=pull.place,
                status="ok" if reason is None else "failed",
                cause=reason,
                num_blocks=pull.metas[req_id].num_blocks if last is None else None,
                cause_handle=last,
            )
        )
        if reason is not None:
            self.failures.setdefault(req_id, reason)

    def _line(self, level: str, template: str, *arguments: object) -> None:
        if self._log is not None:
            self._log(log.RECEIVER, level, template, *arguments)

    # -- writes -------------------------------------------------------------------------------------------

    def _on_write(self, envelope: Envelope) -> None:
        data: WriteData = envelope.payload
        result = self._target.write(envelope)
        if not data.returns:
            return
        self.outbox.append(
            Envelope(
                kind=WRITE_DONE,
                source=envelope.destination,
                destination=envelope.source,
                payload=WriteDone(data.write_id, result, data.raises),
                request_ids=envelope.request_ids,
                transfer_ids=envelope.transfer_ids,
                conversation=envelope.conversation,
                attempt=envelope.attempt,
                peer_index=envelope.peer_index,
                num_peers=envelope.num_peers,
            )
        )


def _response_of(payload: MooncakeXferResponse | bytes) -> MooncakeXferResponse:
    """Raises msgspec.MsgspecError for what the wire would not let through."""
    if isinstance(payload, MooncakeXferResponse):
        if type(payload.status) is MooncakeXferResponseStatus:
            return payload
        payload = encode(payload)
    return decode_response(payload)
