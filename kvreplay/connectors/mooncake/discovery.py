"""The consumer's side of bootstrap: where the ranks of a producer's engine listen."""

import json
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from kvreplay.connectors.mooncake import log
from kvreplay.connectors.mooncake.addresses import bootstrap_target, instance_of, printable
from kvreplay.connectors.mooncake.config import BOOTSTRAP_ATTEMPTS, BOOTSTRAP_RETRY_NS, MooncakeConfig
from kvreplay.connectors.mooncake.log import LogSink
from kvreplay.connectors.mooncake.structs import BootstrapAnswer, BootstrapQuery, PullReqMeta
from kvreplay.events import Event, EventSink
from kvreplay.ids import NS_PER_S
from kvreplay.sim.envelope import BOOTSTRAP_QUERY, Envelope
from kvreplay.transport.machine import Deadline, Deadlines

REFUSED: Final = "refused"
CLOSED: Final = "closed"
TIMEOUT: Final = "timeout"
UNSUPPORTED: Final = "unsupported address"
_TRANSPORT_ERRORS: Final = {
    REFUSED: "ConnectError",
    CLOSED: "RemoteProtocolError",
    TIMEOUT: "ReadTimeout",
    UNSUPPORTED: "UnsupportedProtocol",
}
"""What went wrong with an exchange → what vLLM's HTTP client (httpx) calls it."""


_WITHOUT_BODY: Final = (204, 304)
"""Statuses after which an HTTP client takes no body, whatever the server sends."""


def exception_of(reason: str) -> str:
    return _TRANSPORT_ERRORS.get(reason, "ConnectError")


Addresses = dict[int, dict[int, str]]
"""Tensor-parallel rank → pipeline-parallel rank → address."""
Batch = tuple[str, dict[str, PullReqMeta]]
"""A producer's engine id, and what one step wants from it."""


class _Failure(NamedTuple):
    """Why a query is over, as an exception's type and text."""

    exception: str
    text: str


class Query:
    """One exchange with one bootstrap server, and the batches that wait for its end."""

    __slots__ = (
        "attempt",
        "conversation",
        "deadline",
        "handle",
        "is_asking",
        "request_ids",
        "transfer_ids",
        "url",
        "waiting",
    )

    def __init__(self, url: str, conversation: str, batch: Batch) -> None:
        self.url = url
        self.conversation = conversation
        self.request_ids = tuple(batch[1])
        self.transfer_ids = tuple(meta.transfer_id for meta in batch[1].values())
        self.waiting = [batch]
        self.attempt = 0
        self.is_asking = False
        """An answer to the current attempt is still wanted."""
        self.deadline: Deadline | None = None
        self.handle: int | None = None


def of_first(metas: dict[str, PullReqMeta]) -> list[tuple[object, dict[str, PullReqMeta]]]:
    """The server that a batch asks, and the batch: that which the first of its requests names, as vLLM does."""
    return [(next(iter(metas.values())).remote_bootstrap_addr, metas)]


def by_server(metas: dict[str, PullReqMeta]) -> list[tuple[object, dict[str, PullReqMeta]]]:
    """A batch by the servers that its requests name; these may be anything."""
    if len(metas) == 1:
        return of_first(metas)
    by_url: dict[str, tuple[object, dict[str, PullReqMeta]]] = {}
    for req_id, meta in metas.items():
        url: object = meta.remote_bootstrap_addr
        by_url.setdefault(repr(url), (url, {}))[1][req_id] = meta
    return list(by_url.values())


class Discovery:
    """Asks bootstrap servers, each at most once at a time, and remembers what they say for good.

    What a server does not say, or does not answer, is not remembered: the next batch asks again.
    """

    def __init__(
        self,
        outbox: list[Envelope],
        deadlines: Deadlines,
        sink: EventSink,
        *,
        instance: str,
        address: str,
        origin: str,
        config: MooncakeConfig,
        resolved: Callable[[Query, int], None],
        log_line: LogSink | None,
    ) -> None:
        self._outbox = outbox
        self._deadlines = deadlines
        self._sink = sink
        self._instance = instance
        self._address = address
        self._origin = origin
        self.timeout_ns = config.connector_timeout_ns
        self._resolved = resolved
        self._log = log_line
        self._queries: dict[str, Query] = {}
        self._by_conversation: dict[str, Query] = {}
        self._engines: dict[str, Addresses] = {}
        self._tp_sizes: dict[str, int] = {}

    def addresses(self, engine_id: str) -> Addresses | None:
        return self._engines.get(engine_id)

    def tp_size(self, engine_id: str) -> int:
        """Ranks that the server has named, though it may have named one twice."""
        return self._tp_sizes[engine_id]

    @property
    def known_engines(self) -> list[str]:
        return list(self._engines)

    @property
    def num_waiting(self) -> int:
        """Batches that wait for an answer."""
        return sum(len(query.waiting) for query in self._queries.values())

    def forget(self, engine_id: str) -> None:
        self._engines.pop(engine_id, None)

    def ask(self, url: str, batch: Batch, now_ns: int) -> None:
        """Ask the server at `url`, or wait for an answer that is due already; `resolved` tells when it is over."""
        query = self._queries.get(url)
        if query is not None:
            query.waiting.append(batch)
            return
        query = Query(url, f"bootstrap/{self._origin}/{next(iter(batch[1]))}", batch)
        self._queries[url] = self._by_conversation[query.conversation] = query
        self._send(query, now_ns)

    def on_answer(self, envelope: Envelope, now_ns: int) -> None:
        query = self._asking(envelope)
        if query is None:
            return
        answer: BootstrapAnswer = envelope.payload
        if answer.error is not None:
            self._attempt_failed(query, answer.error, now_ns)
        elif not 200 <= answer.status < 300:
            self._over(query, _Failure("HTTPStatusError", f"HTTP status {answer.status}"), now_ns)
        else:
            try:
                self._remember(answer.body if answer.status not in _WITHOUT_BODY else None)
            except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
                self._over(query, _Failure(type(error).__name__, printable(error)), now_ns)
            else:
                self._over(query, None, now_ns)

    def on_refused(self, envelope: Envelope, now_ns: int) -> None:
        query = self._asking(envelope)
        if query is not None:
            self._attempt_failed(query, REFUSED, now_ns)

    def _asking(self, envelope: Envelope) -> Query | None:
        query = self._by_conversation.get(envelope.conversation)
        return query if query is not None and query.is_asking and query.attempt == envelope.attempt else None

    def _send(self, query: Query, now_ns: int) -> None:
        query.is_asking = True
        query.handle = self._sink.emit(
            Event(
                "bootstrap.queried",
                now_ns,
                self._instance,
                request_id=query.request_ids[0],
                transfer_id=query.transfer_ids[0],
                peer=instance_of(printable(query.waiting[0][0])),
                num_tokens=query.attempt + 1,
            )
        )
        target = bootstrap_target(query.url)
        if target is None:
            # An address that no HTTP client takes fails like one where nobody listens, and is tried as often.
            self._attempt_failed(query, UNSUPPORTED, now_ns)
            return
        server, path = target
        self._outbox.append(
            Envelope(
                kind=BOOTSTRAP_QUERY,
                source=self._address,
                destination=server,
                payload=BootstrapQuery(path),
                request_ids=query.request_ids,
                transfer_ids=query.transfer_ids,
                conversation=query.conversation,
                attempt=query.attempt,
            )
        )
        query.deadline = self._deadlines.at(now_ns + self.timeout_ns, self._on_timeout, query)

    def _on_timeout(self, query: Query, now_ns: int) -> None:
        self._attempt_failed(query, TIMEOUT, now_ns)

    def _attempt_failed(self, query: Query, reason: str, now_ns: int) -> None:
        """The transport has failed: that is worth another try."""
        failure = _Failure(exception_of(reason), reason)
        if query.attempt + 1 == BOOTSTRAP_ATTEMPTS:
            self._over(query, failure, now_ns)
            return
        self._answered(query, reason, now_ns)
        query.attempt += 1
        if self._log is not None:
            delay_s = BOOTSTRAP_RETRY_NS / NS_PER_S
            attempts = (query.attempt, BOOTSTRAP_ATTEMPTS)
            self._log(log.RECEIVER, log.WARNING, log.QUERY_RETRIED, query.url, *attempts, *failure, delay_s)
        query.deadline = self._deadlines.at(now_ns + BOOTSTRAP_RETRY_NS, self._send, query)

    def _over(self, query: Query, failure: _Failure | None, now_ns: int) -> None:
        if failure is not None and self._log is not None:
            self._log(log.RECEIVER, log.ERROR, log.QUERY_FAILED, query.url, *failure)
        self._answered(query, failure.text if failure is not None else None, now_ns)
        del self._queries[query.url], self._by_conversation[query.conversation]
        self._resolved(query, now_ns)

    def _answered(self, query: Query, failure: str | None, now_ns: int) -> None:
        query.is_asking = False
        self._deadlines.cancel(query.deadline)
        self._sink.emit(
            Event(
                "bootstrap.answered",
                now_ns,
                self._instance,
                request_id=query.request_ids[0],
                transfer_id=query.transfer_ids[0],
                peer=instance_of(printable(query.waiting[0][0])),
                status="ok" if failure is None else "failed",
                cause=failure,
                cause_handle=query.handle,
            )
        )

    def _remember(self, body: bytes | None) -> None:
        """Engine by engine, so that those before a malformed one are known."""
        workers: Any = json.loads(body or b"")  # as patient as vLLM's HTTP client
        for entry in workers.values():
            engine_id = entry["engine_id"]
            self._engines[engine_id] = {
                int(tp_rank): {int(pp_rank): address for pp_rank, address in by_pp_rank.items()}
                for tp_rank, by_pp_rank in entry["worker_addr"].items()
            }
            self._tp_sizes[engine_id] = len(entry["worker_addr"])
