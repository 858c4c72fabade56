"""The bootstrap server of a prefill deployment: producers' ranks register, consumers ask where they are."""

import msgspec

from kvreplay.connectors.mooncake.addresses import bootstrap_address
from kvreplay.connectors.mooncake.structs import (
    BootstrapAnswer,
    BootstrapQuery,
    EngineEntry,
    RegisterWorkerPayload,
    encode_query_body,
)
from kvreplay.sim.bus import Bus
from kvreplay.sim.envelope import (
    BOOTSTRAP_ANSWER,
    BOOTSTRAP_QUERY,
    BOOTSTRAP_REGISTER,
    BOOTSTRAP_REGISTERED,
    Envelope,
)
from kvreplay.sim.event_loop import FOREVER_NS
from kvreplay.transport.virtual import VirtualDriver

_OK = b'{"status":"ok"}'


class BootstrapServer:
    """A state machine that answers at once. What has been registered stays until the server goes, or (`replaces`, the
    switch mooncake_registration) until another takes its place."""

    def __init__(self, *, replaces: bool = False) -> None:
        self.outbox: list[Envelope] = []
        self.workers: dict[int, EngineEntry] = {}
        """Data-parallel rank → engine."""
        self._replaces = replaces

    next_deadline_ns = FOREVER_NS
    has_report = False

    def handle(self, envelope: Envelope, now_ns: int) -> None:
        assert envelope.kind in (BOOTSTRAP_QUERY, BOOTSTRAP_REGISTER), envelope.kind
        self.outbox.append(
            Envelope(
                kind=BOOTSTRAP_ANSWER if envelope.kind == BOOTSTRAP_QUERY else BOOTSTRAP_REGISTERED,
                source=envelope.destination,
                destination=envelope.source,
                payload=self.answer(envelope.payload),
                request_ids=envelope.request_ids,
                transfer_ids=envelope.transfer_ids,
                conversation=envelope.conversation,
                attempt=envelope.attempt,
            )
        )

    def on_refused(self, envelope: Envelope, now_ns: int) -> None:
        pass

    def on_deadline(self, now_ns: int) -> None:
        pass

    def answer(self, query: BootstrapQuery) -> BootstrapAnswer:
        if query.path == "/query" and query.body is None:
            return BootstrapAnswer(body=encode_query_body(self.workers))
        if query.path == "/register" and query.body is not None:
            try:
                payload = msgspec.json.decode(query.body, type=RegisterWorkerPayload)
            except msgspec.MsgspecError as error:
                return BootstrapAnswer(422, _detail(str(error)))
            return self.register(payload)
        return BootstrapAnswer(404, _detail("Not Found"))

    def register(self, payload: RegisterWorkerPayload) -> BootstrapAnswer:
        """Take in one rank. The same again is no error: its first answer may have been lost."""
        entry = self.workers.setdefault(payload.dp_rank, EngineEntry(payload.engine_id))
        if self._replaces:
            if entry.engine_id != payload.engine_id:
                entry = self.workers[payload.dp_rank] = EngineEntry(payload.engine_id)
            entry.worker_addr.get(payload.tp_rank, {}).pop(payload.pp_rank, None)
        if entry.engine_id != payload.engine_id:
            return BootstrapAnswer(
                400,
                _detail(
                    f"Engine ID mismatch for dp_rank={payload.dp_rank}: "
                    f"expected {entry.engine_id}, got {payload.engine_id}"
                ),
            )
        by_pp_rank = entry.worker_addr.setdefault(payload.tp_rank, {})
        known = by_pp_rank.setdefault(payload.pp_rank, payload.addr)
        if known != payload.addr:
            return BootstrapAnswer(
                400,
                _detail(
                    f"Worker with dp_rank={payload.dp_rank}, tp_rank={payload.tp_rank}, "
                    f"pp_rank={payload.pp_rank} is already registered at {known}, "
                    f"but still want to register at {payload.addr}"
                ),
            )
        return BootstrapAnswer(body=_OK)


def serve(bus: Bus, host: str, *, replaces: bool) -> VirtualDriver:
    """Start a server at this host, which may be an instance's. To be closed, and its address silenced."""
    driver = VirtualDriver(BootstrapServer(replaces=replaces), bus)
    bus.listen(bootstrap_address(host), driver.receive)
    return driver


def _detail(text: str) -> bytes:
    return msgspec.json.encode({"detail": text})
