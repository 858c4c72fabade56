"""HTTP/1.1 in its simplest form, beside an event loop: one request per connection, bounded in every way.

A server never waits for a client, nor a client for a server: both take what has come. What is not understood is
counted and answered with 400; a client that is too slow, or one too many, is hung up on.
"""

import socket
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from http.client import responses
from time import monotonic
from typing import Final

from kvreplay.transport.paced import PacedLoop

LOOPBACK: Final = "127.0.0.1"
MAX_REQUEST_BYTES: Final = 1 << 16
MAX_ANSWER_BYTES: Final = 1 << 22
MAX_CONNECTIONS: Final = 256
_IDLE_S: Final = 10.0
"""A client that has not asked anything by then has gone."""
_CHUNK: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class HttpRequest:
    method: str
    path: str
    body: bytes


class Exchange:
    """One request that waits for its answer. `client`: its end of the connection."""

    def __init__(self, server: "HttpServer", connection: "_Connection", request: HttpRequest) -> None:
        self.request = request
        self.client = connection.client
        self._server = server
        self._connection = connection

    def answer(self, status: int, body: bytes) -> None:
        self._server._answer(self._connection, status, body)

    def hang_up(self) -> None:
        """Give no answer."""
        self._server._hang_up(self._connection)


@dataclass(slots=True, eq=False)
class _Connection:
    socket: socket.socket
    client: str
    since_s: float
    received: bytearray
    unsent: bytes = b""
    is_asking: bool = True


class HttpServer:
    """Binds a free port of the loopback interface. `on_request` must see to it that each exchange is answered."""

    def __init__(self, paced: PacedLoop, on_request: Callable[[Exchange], None]) -> None:
        self._paced = paced
        self._on_request = on_request
        self._connections: dict[_Connection, None] = {}
        self.num_refused = 0
        """Requests that were none, and connections too many."""
        self._listener = socket.create_server((LOOPBACK, 0), backlog=128)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        paced.watch(self._listener.fileno(), self._accept)

    @property
    def endpoint(self) -> str:
        return f"{LOOPBACK}:{self.port}"

    def close(self) -> None:
        self._paced.unwatch(self._listener.fileno())
        self._listener.close()
        for connection in list(self._connections):
            self._hang_up(connection)

    def _accept(self) -> None:
        for _ in range(64):
            try:
                client, (host, port) = self._listener.accept()
            except OSError:
                return
            self._hang_up_on_idle()
            if len(self._connections) >= MAX_CONNECTIONS:
                self.num_refused += 1
                client.close()
                continue
            client.setblocking(False)
            connection = _Connection(client, f"{host}:{port}", monotonic(), bytearray())
            self._connections[connection] = None
            self._paced.watch(client.fileno(), lambda connection=connection: self._receive(connection))  # type: ignore[misc]

    def _hang_up_on_idle(self) -> None:
        for connection in list(self._connections):
            # Who has asked waits for an answer, which may take what time it wants.
            if connection.is_asking and monotonic() - connection.since_s > _IDLE_S:
                self._hang_up(connection)

    def _receive(self, connection: _Connection) -> None:
        try:
            data = connection.socket.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._hang_up(connection)
            return
        if not connection.is_asking:
            return
        connection.received += data
        try:
            request = _parse_request(connection.received)
        except ValueError:
            self.num_refused += 1
            connection.is_asking = False
            self._answer(connection, HTTPStatus.BAD_REQUEST, b'{"detail":"Bad Request"}')
            return
        if request is not None:
            connection.is_asking = False
            self._on_request(Exchange(self, connection, request))

    def _answer(self, connection: _Connection, status: int, body: bytes) -> None:
        if connection not in self._connections:
            return
        phrase = responses.get(status, "")
        head = (
            f"HTTP/1.1 {status} {phrase}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        connection.unsent = head.encode() + body
        self._send(connection)

    def _send(self, connection: _Connection) -> None:
        try:
            connection.unsent = connection.unsent[connection.socket.send(connection.unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            connection.unsent = b""
        if connection.unsent:
            self._paced.watch_writable(connection.socket.fileno(), lambda: self._send(connection))
        else:
            self._hang_up(connection)

    def _hang_up(self, connection: _Connection) -> None:
        if connection in self._connections:
            del self._connections[connection]
            self._paced.unwatch(connection.socket.fileno())
            connection.socket.close()


def _parse_request(received: bytearray) -> HttpRequest | None:
    """None: it is not complete. Raises ValueError for what can be none."""
    head, separator, body = bytes(received).partition(b"\r\n\r\n")
    if not separator:
        if len(received) > MAX_REQUEST_BYTES:
            raise ValueError("too long")
        return None
    lines = head.decode("ascii").split("\r\n")
    method, path, version = lines[0].split(" ")
    if method not in ("GET", "POST") or not path.startswith("/") or not version.startswith("HTTP/1."):
        raise ValueError(lines[0])
    length = _content_length(lines[1:])
    if length > MAX_REQUEST_BYTES:
        raise ValueError("too long")
    return HttpRequest(method, path, body[:length]) if len(body) >= length else None


def _content_length(lines: list[str]) -> int:
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-length":
            if not value.strip().isdecimal():
                raise ValueError(line)
            return int(value)
    return 0


def _parse_answer(received: bytearray) -> tuple[int, bytes]:
    """Raises ValueError or IndexError for what is none."""
    head, separator, body = bytes(received).partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    if not separator or len(body) < _content_length(lines[1:]):
        raise ValueError("cut off")
    return int(lines[0].split(" ")[1]), body


def _request(endpoint: str, path: str, body: bytes | None) -> bytes:
    head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: {endpoint}\r\nConnection: close\r\n"
    if body is not None:
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"\r\n" + (body or b"")


class HttpCall:
    """One request to a loopback server: GET, or POST where there is a body.

    `on_answer` gets the status and the body, or an error and neither.
    """

    def __init__(
        self,
        paced: PacedLoop,
        endpoint: str,
        path: str,
        body: bytes | None,
        on_answer: Callable[[int, bytes, str | None], None],
    ) -> None:
        self._paced = paced
        self._on_answer = on_answer
        self._unsent = _request(endpoint, path, body)
        self._received = bytearray()
        self._is_over = False
        host, _, port = endpoint.rpartition(":")
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._socket.connect_ex((host, int(port)))
        own_host, own_port = self._socket.getsockname()
        self.client = f"{own_host}:{own_port}"
        """As the server knows it."""
        paced.watch(self._socket.fileno(), self._receive)
        paced.watch_writable(self._socket.fileno(), self._send)

    def cancel(self) -> None:
        """Hang up, and never tell."""
        if not self._is_over:
            self._is_over = True
            self._paced.unwatch(self._socket.fileno())
            self._socket.close()

    def _send(self) -> None:
        error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            self._end(0, b"", "refused")
            return
        try:
            self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:
            return
        except OSError:
            self._end(0, b"", "refused")
            return
        if not self._unsent:
            self._paced.watch_writable(self._socket.fileno(), None)

    def _receive(self) -> None:
        try:
            data = self._socket.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            self._end(0, b"", "refused" if self._unsent else "closed")
            return
        self._received += data
        if len(self._received) > MAX_ANSWER_BYTES:
            self._end(0, b"", "closed")
        elif not data:
            self._finish()

    def _finish(self) -> None:
        try:
            status, body = _parse_answer(self._received)
        except (ValueError, IndexError):
            self._end(0, b"", "closed")
        else:
            self._end(status, body, None)

    def _end(self, status: int, body: bytes, error: str | None) -> None:
        if not self._is_over:
            self.cancel()
            self._on_answer(status, body, error)
