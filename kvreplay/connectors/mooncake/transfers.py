"""What a producer rank knows of each transfer: announced, ready, overdue, sent; and what it tells its scheduler."""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from kvreplay.behaviour import Behaviour
from kvreplay.connectors.mooncake import log
from kvreplay.connectors.mooncake.config import ORPHAN_TIMEOUT_NS, MooncakeConfig
from kvreplay.connectors.mooncake.entries import SendBlockMeta
from kvreplay.connectors.mooncake.log import LogSink
from kvreplay.connectors.mooncake.stats import MooncakeStats
from kvreplay.connectors.mooncake.structs import MooncakeConnectorMetadata
from kvreplay.events import Event, EventSink
from kvreplay.sim.recent import Recent
from kvreplay.transport.machine import Deadlines

_MAX_GONE: Final = 4096
"""Transfers that ended unsent and are remembered, so that a late pull can be told."""


class Transfers:
    """`reqs_need_send`. `wake` is told of transfers for which pulls need not wait any longer, `changed` of every state
    that one goes through.
    """

    def __init__(
        self,
        instance: str,
        *,
        behaviour: Behaviour,
        deadlines: Deadlines,
        sink: EventSink,
        stats: MooncakeStats,
        wake: Callable[[SendBlockMeta], None],
        changed: Callable[[], None],
        log_line: LogSink | None,
    ) -> None:
        self.entries: dict[str, SendBlockMeta] = {}
        """By transfer id."""
        self._answers_drops = behaviour["mooncake_producer_drop"] == "answer"
        self._accepts_unknown = behaviour["mooncake_unknown_transfer"] == "accept"
        self._times_orphans = behaviour["mooncake_placeholder"] == "orphan-timeout"
        self._reads_late = behaviour["mooncake_late_pulls"] == "read"
        self._instance = instance
        self._deadlines = deadlines
        self._sink = sink
        self._stats = stats
        self._wake = wake
        self._changed = changed
        self._log = log_line
        self._abort_timeout_s = 0.0
        self._abort_timeout_ns = 0
        self._finished_sending: dict[str, None] = {}
        self._overdue: dict[str, SendBlockMeta] = {}
        """Transfers whose time is up: the next poll frees those that are not being sent."""
        self._shared: Recent[str, None] = Recent(_MAX_GONE)
        """Transfer ids that two requests have claimed: nobody can tell whose blocks a pull means."""
        self._gone: Recent[str, None] = Recent(_MAX_GONE)
        self._given_up: Recent[str, SendBlockMeta] = Recent(_MAX_GONE)
        """Transfers whose blocks are gone, where late pulls read what is there instead."""

    def configure(self, config: MooncakeConfig) -> None:
        self._abort_timeout_s = config.abort_request_timeout
        self._abort_timeout_ns = config.abort_request_timeout_ns

    @property
    def has_report(self) -> bool:
        if self._overdue and any(entry.sending == 0 for entry in self._overdue.values()):
            return True
        return bool(self._finished_sending)

    # -- what the scheduler says --------------------------------------------------------------------------

    def record(self, metadata: MooncakeConnectorMetadata, now_ns: int) -> None:
        """Take the step's metadata. What vLLM does not expect ends it there, unheard: the rest is lost."""
        for p_req_id, (transfer_id, block_ids) in metadata.reqs_to_send.items():
            if isinstance(transfer_id, (list, dict)):
                # A parameter that is no string, and cannot be looked up.
                if not self._accepts_unknown:
                    break
                if block_ids:
                    self._finished_sending[p_req_id] = None
            elif not block_ids:
                self._announce(p_req_id, transfer_id)
            elif not self._finish(p_req_id, transfer_id, block_ids, now_ns):
                break
            self._changed()
        else:
            self._drop(metadata.reqs_not_processed)
        self._changed()

    def _announce(self, p_req_id: str, transfer_id: str) -> None:
        self._gone.pop(transfer_id, None)
        entry = self.entries.get(transfer_id)
        if entry is None:
            self.entries[transfer_id] = SendBlockMeta(p_req_id, transfer_id, announced_by=p_req_id)
        elif entry.announced_by is None:
            entry.announced_by = p_req_id
            self._deadlines.cancel(entry.expiry)  # that of an orphan
        elif self._accepts_unknown and entry.owner != p_req_id and not entry.sending:
            self._refuse_shared(entry)

    def _refuse_shared(self, entry: SendBlockMeta) -> None:
        """Two live requests have one transfer id: neither is sent, rather than one to the other's consumer."""
        self._shared[entry.transfer_id] = None
        if self.remove(entry.transfer_id) is not None and entry.ready:
            self._finished_sending[entry.p_req_id] = None
        entry.dropped = True
        self._wake(entry)

    def _finish(self, p_req_id: str, transfer_id: str, block_ids: Sequence[Sequence[int]], now_ns: int) -> bool:
        """The request's blocks are there to be sent. False: nobody knows the transfer, and the step's rest is lost."""
        entry = self.entries.get(transfer_id)
        if self._accepts_unknown:
            if transfer_id in self._shared:
                self._finished_sending[p_req_id] = None
                return True
            if entry is None:
                self._gone.pop(transfer_id, None)
                entry = self.entries[transfer_id] = SendBlockMeta(p_req_id, transfer_id)
            elif entry.owner not in ("", p_req_id):
                # Two requests with one transfer id: consumers will get the first one's blocks.
                self._finished_sending[p_req_id] = None
                return True
            entry.announced_by = p_req_id  # whoever announces the transfer from now on is another
        if entry is None:
            return False
        self._make_ready(entry, p_req_id, block_ids, now_ns)
        self._wake(entry)
        return True

    def _make_ready(self, entry: SendBlockMeta, p_req_id: str, block_ids: Sequence[Sequence[int]], now_ns: int) -> None:
        entry.p_req_id = p_req_id
        entry.local_block_ids = block_ids
        entry.ready = True
        self._deadlines.cancel(entry.expiry)
        self._overdue.pop(entry.transfer_id, None)
        # A poll frees what expired before it, not what expires in that very instant.
        entry.expiry = self._deadlines.at(now_ns + self._abort_timeout_ns + 1, self._on_overdue, entry)

    def _drop(self, transfer_ids: Iterable[str]) -> None:
        for transfer_id in transfer_ids:
            entry = self.entries.get(transfer_id)
            if self._accepts_unknown and entry is not None and entry.ready:
                continue  # another request's
            self.remove(transfer_id)
            if not self._accepts_unknown and (entry is None or entry.ready):
                return
            if self._answers_drops:
                self._remember_gone(transfer_id)
                if entry is not None:
                    entry.dropped = True
                    self._wake(entry)

    def remove(self, transfer_id: str) -> SendBlockMeta | None:
        entry = self.entries.pop(transfer_id, None)
        if entry is not None:
            self._deadlines.cancel(entry.expiry)
            self._overdue.pop(transfer_id, None)
        return entry

    def _remember_gone(self, transfer_id: str) -> None:
        self._gone[transfer_id] = None

    # -- what the scheduler hears -------------------------------------------------------------------------

    def note_overdue(self, now_ns: int) -> None:
        """A poll looks at the clock itself: it frees what has expired while the loop was busy."""
        for entry in self.entries.values():
            expiry = entry.expiry if entry.ready else None
            if expiry is not None and expiry.action is not None and expiry.time_ns <= now_ns:
                self._deadlines.cancel(entry.expiry)
                self._overdue[entry.transfer_id] = entry

    def take_finished(self, now_ns: int) -> list[str]:
        """Requests whose blocks may be freed: sent, or never asked for in time."""
        finished = self._finished_sending
        if self._overdue:
            for entry in [entry for entry in self._overdue_in_order() if entry.sending == 0]:
                self._expire(entry, now_ns)
                finished[entry.p_req_id] = None
        self._finished_sending = {}
        return list(finished)

    def _overdue_in_order(self) -> Iterable[SendBlockMeta]:
        """In the order in which they became known: vLLM's poll goes through all it knows."""
        overdue = self._overdue
        if len(overdue) < 2:
            return overdue.values()
        return (entry for transfer_id, entry in self.entries.items() if transfer_id in overdue)

    def _on_overdue(self, entry: SendBlockMeta, now_ns: int) -> None:
        self._overdue[entry.transfer_id] = entry

    def expire_now(self, transfer_ids: Iterable[str]) -> None:
        """Let the time of these be up already, as if their requests had finished long ago."""
        for transfer_id in transfer_ids:
            entry = self.entries.get(transfer_id)
            if entry is not None and entry.ready:
                self._deadlines.cancel(entry.expiry)
                self._overdue[transfer_id] = entry

    def _expire(self, entry: SendBlockMeta, now_ns: int) -> None:
        self.remove(entry.transfer_id)
        if self._answers_drops:
            self._remember_gone(entry.transfer_id)
        if self._reads_late:
            self._given_up[entry.transfer_id] = entry
        self._stats.num_kv_expired_reqs += 1
        if self._log is not None:
            self._log(log.SENDER, log.WARNING, log.EXPIRED, entry.p_req_id, self._abort_timeout_s)
        self._sink.emit(
            Event(
                "send.expired",
                now_ns,
                self._instance,
                request_id=entry.p_req_id,
                transfer_id=entry.transfer_id,
                num_blocks=entry.num_blocks,
                cause=f"timed out after {self._abort_timeout_s:g} seconds without being sent",
            )
        )

    # -- what pulls do ------------------------------------------------------------------------------------

    def for_pull(self, d_req_id: str, transfer_id: str, now_ns: int) -> SendBlockMeta:
        """What a pull means: a placeholder, if nobody has announced it yet."""
        entry = self.entries.get(transfer_id) or self._given_up.get(transfer_id)
        if entry is not None and self.is_anothers(entry, d_req_id):
            return SendBlockMeta("", transfer_id, dropped=True)  # its own consumer may still come
        if entry is None:
            entry = SendBlockMeta("", transfer_id)
            if transfer_id in self._gone or transfer_id in self._shared:
                entry.dropped = True
            else:
                self.entries[transfer_id] = entry
                if self._times_orphans:
                    entry.expiry = self._deadlines.at(now_ns + ORPHAN_TIMEOUT_NS, self._on_orphan, entry)
        return entry

    def _on_orphan(self, entry: SendBlockMeta, now_ns: int) -> None:
        """Nobody has announced it."""
        self.remove(entry.transfer_id)
        entry.dropped = True
        self._wake(entry)

    def is_anothers(self, entry: SendBlockMeta, d_req_id: str) -> bool:
        """Whether it is known that the blocks are not those of this consumer's request, though the transfer id is the
        same. The proxy gives both legs of a request one name."""
        return self._accepts_unknown and entry.owner not in ("", d_req_id)

    def may_be_read(self, entry: SendBlockMeta) -> bool:
        """Of one that is ready: whether its blocks are still there for the pull, or pass for it."""
        return entry.transfer_id in self.entries or entry.transfer_id in self._given_up

    def is_current(self, entry: SendBlockMeta) -> bool:
        return self.entries.get(entry.transfer_id) is entry

    def let_go(self, entry: SendBlockMeta) -> None:
        """Every consumer rank has it."""
        if self.remove(entry.transfer_id) is not None:
            self._finished_sending[entry.p_req_id] = None
