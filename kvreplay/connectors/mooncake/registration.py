"""A producer's rank registers with its deployment's bootstrap server before its engine comes up."""

from typing import Final

from kvreplay.connectors.mooncake import log
from kvreplay.connectors.mooncake.addresses import bootstrap_address
from kvreplay.connectors.mooncake.config import BOOTSTRAP_ATTEMPTS, MooncakeConfig
from kvreplay.connectors.mooncake.discovery import REFUSED, TIMEOUT, exception_of
from kvreplay.connectors.mooncake.log import LogSink
from kvreplay.connectors.mooncake.structs import (
    BootstrapAnswer,
    BootstrapQuery,
    RegisterWorkerPayload,
    encode_registration,
)
from kvreplay.errors import EngineFatal
from kvreplay.ids import nanoseconds
from kvreplay.sim.envelope import BOOTSTRAP_REGISTER, BOOTSTRAP_REGISTERED, Envelope
from kvreplay.transport.machine import Deadlines

_FIRST_BACKOFF_S: Final = 1.0
_MAX_BACKOFF_S: Final = 10.0


class Registration:
    """A state machine: POST /register until the server has answered, or enough attempts have failed.

    `host`: the server's, with a port or without. vLLM's engine waits for the outcome; a failure is its end.
    """

    def __init__(
        self,
        payload: RegisterWorkerPayload,
        host: str,
        *,
        address: str,
        config: MooncakeConfig,
        log_line: LogSink | None = None,
    ) -> None:
        self.outbox: list[Envelope] = []
        self.is_over = False
        self.failure: EngineFatal | None = None
        """What the engine dies of; None: nothing, or nothing yet."""
        self._payload = payload
        self._host = host
        self._address = address
        self._timeout_ns = config.connector_timeout_ns
        self._log = log_line
        self._deadlines = Deadlines()
        self._attempt = 0
        self._is_asking = False
        """An answer to the current attempt is still wanted."""
        self._backoff_s = _FIRST_BACKOFF_S

    @property
    def next_deadline_ns(self) -> int:
        return self._deadlines.next_ns

    @property
    def has_report(self) -> bool:
        return self.is_over

    def start(self, now_ns: int) -> None:
        self._send(None, now_ns)

    def handle(self, envelope: Envelope, now_ns: int) -> None:
        assert envelope.kind == BOOTSTRAP_REGISTERED, envelope.kind
        answer: BootstrapAnswer = envelope.payload
        if not self._is_wanted(envelope):
            return
        if answer.error is not None:
            self._attempt_failed(answer.error, now_ns)
        elif 200 <= answer.status < 300:
            self._end(None)
        else:
            self._refused_by_server(answer)

    def on_refused(self, envelope: Envelope, now_ns: int) -> None:
        if self._is_wanted(envelope):
            self._attempt_failed(REFUSED, now_ns)

    def on_deadline(self, now_ns: int) -> None:
        self._deadlines.fire(now_ns)

    def _is_wanted(self, envelope: Envelope) -> bool:
        return self._is_asking and envelope.attempt == self._attempt

    def _send(self, _: object, now_ns: int) -> None:
        self._attempt += 1
        self._is_asking = True
        self.outbox.append(
            Envelope(
                kind=BOOTSTRAP_REGISTER,
                source=self._address,
                destination=bootstrap_address(self._host.partition(":")[0]),
                payload=BootstrapQuery("/register", encode_registration(self._payload)),
                conversation=f"register/{self._payload.engine_id}/{self._payload.addr}",
                attempt=self._attempt,
            )
        )
        self._deadlines.at(now_ns + self._timeout_ns, self._on_timeout, None)

    def _on_timeout(self, _: object, now_ns: int) -> None:
        self._attempt_failed(TIMEOUT, now_ns)

    def _attempt_failed(self, reason: str, now_ns: int) -> None:
        self._deadlines.clear()
        self._is_asking = False
        if self._attempt == BOOTSTRAP_ATTEMPTS:
            self._end(
                EngineFatal(
                    "RuntimeError",
                    f"Failed to register {self._described()} with the Mooncake bootstrap server at "
                    f"http://{self._host}/register after {BOOTSTRAP_ATTEMPTS} attempts.",
                )
            )
            return
        attempts = (self._attempt, BOOTSTRAP_ATTEMPTS)
        failure = (exception_of(reason), reason)
        self._line(log.WARNING, log.REGISTER_RETRIED, *attempts, self._described(), *failure, self._backoff_s)
        self._deadlines.at(now_ns + nanoseconds(self._backoff_s), self._send, None)
        self._backoff_s = min(self._backoff_s * 2, _MAX_BACKOFF_S)

    def _refused_by_server(self, answer: BootstrapAnswer) -> None:
        """Somebody else is registered in its place: another attempt would not help."""
        self._line(log.ERROR, log.REGISTER_FAILED, self._described(), (answer.body or b"").decode(errors="replace"))
        who = "Client" if answer.status < 500 else "Server"
        reason = {400: "Bad Request", 404: "Not Found", 422: "Unprocessable Entity"}.get(answer.status, "")
        url = f"http://{self._host}/register"
        self._end(EngineFatal("HTTPStatusError", f"{who} error '{answer.status} {reason}' for url '{url}'"))

    def _end(self, failure: EngineFatal | None) -> None:
        self.is_over = True
        self._is_asking = False
        self.failure = failure
        self._deadlines.clear()

    def _described(self) -> str:
        payload = self._payload
        return (
            f"engine_id={payload.engine_id!r} dp_rank={payload.dp_rank} tp_rank={payload.tp_rank} "
            f"pp_rank={payload.pp_rank} addr={payload.addr!r}"
        )

    def _line(self, level: str, template: str, *arguments: object) -> None:
        if self._log is not None:
            self._log(log.SENDER, level, template, *arguments)
