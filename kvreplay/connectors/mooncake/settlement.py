"""What a consumer makes of the end of a pull: three generations of vLLM's connector, and another's, one class each."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, Protocol

from kvreplay.connectors.mooncake import log
from kvreplay.connectors.mooncake.log import LogSink
from kvreplay.connectors.mooncake.stats import MooncakeStats
from kvreplay.connectors.mooncake.structs import MooncakeXferResponse, PullReqMeta
from kvreplay.engine.connector import KVConnectorOutput
from kvreplay.transport.machine import Deadline

OMITTED: Final = "peer finished without reporting a transfer result"


class Pull:
    """One pull conversation with one peer; with no peer at all where none was found to ask."""

    __slots__ = (
        "address",
        "attempt",
        "conversation",
        "deadline",
        "include_layout",
        "metas",
        "num_peers",
        "open",
        "peer",
        "peer_index",
        "place",
        "timeout_ns",
    )

    def __init__(
        self,
        conversation: str,
        metas: Mapping[str, PullReqMeta],
        *,
        peer: str,
        address: str = "",
        peer_index: int = 0,
        num_peers: int = 0,
        place: int = 0,
    ) -> None:
        self.conversation = conversation
        self.metas = metas
        """Requests of the pull; the peers of one request share its meta."""
        self.open: dict[str, int | None] = dict.fromkeys(metas)
        """Requests whose result this peer still owes → the event that asked for it."""
        self.peer = peer
        self.address = address
        self.peer_index = peer_index
        self.num_peers = num_peers
        self.place = place
        """Its number among the pulls of all ranks of its engine for the same requests."""
        self.attempt = 0
        self.timeout_ns = 0
        """How long to wait for each reply: an option of its socket, set when that is made."""
        self.include_layout = True
        self.deadline: Deadline | None = None

    def release(self) -> "Pull":
        """A pull of nothing, so that the peer lets go of what is still open."""
        return Pull(
            f"{self.conversation}/release",
            {name: replace(self.metas[name], local_block_ids=[], coverage=None) for name in self.open},
            peer=self.peer,
            address=self.address,
            peer_index=self.peer_index,
            num_peers=self.num_peers,
            place=self.place,
        )


class Reports:
    """What a consumer's next poll returns; each id and block once."""

    __slots__ = ("failed_recving", "finished_recving", "invalid_block_ids")

    def __init__(self) -> None:
        self.finished_recving: dict[str, None] = {}
        self.failed_recving: dict[str, None] = {}
        self.invalid_block_ids: dict[int, None] = {}

    def __bool__(self) -> bool:
        return bool(self.finished_recving or self.failed_recving or self.invalid_block_ids)

    def move_to(self, output: KVConnectorOutput) -> None:
        output.finished_recving = list(self.finished_recving)
        output.failed_recving = list(self.failed_recving)
        output.invalid_block_ids = list(self.invalid_block_ids)
        self.finished_recving.clear()
        self.failed_recving.clear()
        self.invalid_block_ids.clear()


Settled = Callable[[Pull, str, str | None], None]
"""(pull, request id, reason of the failure or None): the pull with this peer is over for this request."""


class Settlement(Protocol):
    """How results of a pull become reports. `reply` and `fail` may be called for requests settled before."""

    def reply(self, pull: Pull, response: MooncakeXferResponse) -> None:
        """A FINISH or CONTINUE. KeyError: it broke the receiver, as the real one, and the pull with it."""
        ...

    def finish(self, pull: Pull) -> None:
        """The FINISH has been processed; some requests may be left open."""
        ...

    def fail(self, pull: Pull, req_ids: Iterable[str], reason: str, block_ids: Sequence[int] | None = None) -> None:
        """These requests cannot be had from this peer. Of their blocks only `block_ids` are wrong; None: all."""
        ...

    def fail_all(self, pull: Pull, reason: str) -> None:
        """The conversation is over, and with it whatever it has not settled."""
        ...


class SilentSettlement:
    """Before #50984: a failure is logged, and its request waits for ever."""

    def __init__(
        self, reports: Reports, stats: MooncakeStats, settled: Settled, log_line: LogSink | None = None
    ) -> None:
        self._reports = reports
        self._stats = stats
        self._settled = settled
        self._log = log_line

    def reply(self, pull: Pull, response: MooncakeXferResponse) -> None:
        for req_id in response.ok_reqs or ():
            meta = pull.metas[req_id]
            self._settled(pull, req_id, None)
            meta.pull_tasks_count -= 1
            if meta.pull_tasks_count == 0:
                self._reports.finished_recving[req_id] = None
        if response.err_reqs:
            self.fail(pull, response.err_reqs, response.err_msg or "unknown error")

    def finish(self, pull: Pull) -> None:
        pass

    def fail(self, pull: Pull, req_ids: Iterable[str], reason: str, block_ids: Sequence[int] | None = None) -> None:
        failed = list(req_ids)
        for req_id in failed:
            self._settled(pull, req_id, reason)
        _log_failed(self._log, failed, reason)

    def fail_all(self, pull: Pull, reason: str) -> None:
        if pull.num_peers:
            self._stats.num_failed_recvs += 1
        self.fail(pull, pull.metas, reason)


class ReportSettlement:
    """#50984: the first failure reports blocks and completion at once; nothing that follows changes it.

    An ERROR or an exception fails every request of the pull, completed ones too; one that a FINISH omits is
    stranded as before.
    """

    def __init__(
        self, reports: Reports, stats: MooncakeStats, settled: Settled, log_line: LogSink | None = None
    ) -> None:
        self._reports = reports
        self._stats = stats
        self._settled = settled
        self._log = log_line

    def reply(self, pull: Pull, response: MooncakeXferResponse) -> None:
        if response.err_reqs:
            self.fail(pull, response.err_reqs, response.err_msg or "unknown error")
        for req_id in response.ok_reqs or ():
            meta = pull.metas[req_id]
            self._settled(pull, req_id, None)
            if not meta.failed:
                meta.pull_tasks_count -= 1
                if meta.pull_tasks_count == 0:
                    self._reports.finished_recving[req_id] = None

    def finish(self, pull: Pull) -> None:
        pass

    def fail(self, pull: Pull, req_ids: Iterable[str], reason: str, block_ids: Sequence[int] | None = None) -> None:
        failed: list[str] = []
        for req_id in req_ids:
            meta = pull.metas.get(req_id)
            if meta is None:
                continue
            self._settled(pull, req_id, reason)
            if meta.failed:
                continue
            meta.failed = True
            failed.append(req_id)
            self._stats.num_failed_recvs += 1
            if meta.has_blocks:
                invalid = meta.all_block_ids if block_ids is None else block_ids
                self._reports.invalid_block_ids.update(dict.fromkeys(invalid))
                self._reports.finished_recving[req_id] = None
        _log_failed(self._log, failed, reason)

    def fail_all(self, pull: Pull, reason: str) -> None:
        self.fail(pull, pull.metas, reason)


class SettleSettlement:
    """0.33.0: a failure is reported at once and sticks, completion waits until every peer has settled.

    Each peer settles each of its requests once; a FINISH that omits one fails it. A model with several KV cache
    groups reports the request, one with a single group its blocks. Nothing is reported of a pull without blocks.
    """

    def __init__(
        self,
        reports: Reports,
        stats: MooncakeStats,
        settled: Settled,
        log_line: LogSink | None = None,
        *,
        reports_requests: bool,
    ) -> None:
        self._reports = reports
        self._stats = stats
        self._settled = settled
        self._log = log_line
        self._reports_requests = reports_requests

    def reply(self, pull: Pull, response: MooncakeXferResponse) -> None:
        if response.err_reqs:
            self.fail(pull, response.err_reqs, response.err_msg or "unknown error")
        for req_id in response.ok_reqs or ():
            if req_id in pull.open:
                self._settled(pull, req_id, None)
                self._complete(pull.metas[req_id])

    def finish(self, pull: Pull) -> None:
        self.fail(pull, list(pull.open), OMITTED)

    def fail(self, pull: Pull, req_ids: Iterable[str], reason: str, block_ids: Sequence[int] | None = None) -> None:
        failed: list[str] = []
        for req_id in req_ids:
            if req_id not in pull.open:
                continue
            self._settled(pull, req_id, reason)
            meta = pull.metas[req_id]
            if not meta.failed:
                meta.failed = True
                failed.append(req_id)
                self._stats.num_failed_recvs += 1
                if meta.has_blocks:
                    self._report_failure(meta, block_ids)
            self._complete(meta)
        _log_failed(self._log, failed, reason)

    def fail_all(self, pull: Pull, reason: str) -> None:
        self.fail(pull, list(pull.open), reason)

    def _report_failure(self, meta: PullReqMeta, block_ids: Sequence[int] | None) -> None:
        if self._reports_requests:
            self._reports.failed_recving[meta.d_req_id] = None
        else:
            invalid = meta.all_block_ids if block_ids is None else block_ids
            self._reports.invalid_block_ids.update(dict.fromkeys(invalid))

    def _complete(self, meta: PullReqMeta) -> None:
        if meta.pull_tasks_count > 0:
            meta.pull_tasks_count -= 1
        if meta.pull_tasks_count == 0 and meta.has_blocks:
            self._reports.finished_recving[meta.d_req_id] = None


class ReceivedSettlement(SettleSettlement):
    """As another connector had it before #33745: what failed is among what is done, and nobody looks twice."""

    def _report_failure(self, meta: PullReqMeta, block_ids: Sequence[int] | None) -> None:
        """Its completion is all that is reported."""


def _log_failed(log_line: LogSink | None, req_ids: list[str], reason: str) -> None:
    if req_ids and log_line is not None:
        log_line(log.RECEIVER, log.ERROR, log.PULL_FAILED, req_ids, reason)


def make_settlement(
    generation: str,
    reports: Reports,
    stats: MooncakeStats,
    settled: Settled,
    log_line: LogSink | None = None,
    *,
    num_groups: int,
) -> Settlement:
    """The settlement for a value of the switch `mooncake_failure`."""
    if generation == "silent":
        return SilentSettlement(reports, stats, settled, log_line)
    if generation == "report":
        return ReportSettlement(reports, stats, settled, log_line)
    assert generation in ("received", "settle"), generation
    kind = ReceivedSettlement if generation == "received" else SettleSettlement
    return kind(reports, stats, settled, log_line, reports_requests=num_groups > 1)
