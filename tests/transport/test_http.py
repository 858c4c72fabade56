"""The small HTTP server of the bootstrap service, over the loopback interface."""

import socket
from collections.abc import Iterator

import pytest

from kvreplay.sim.event_loop import EventLoop
from kvreplay.transport import http
from kvreplay.transport.http import Exchange, HttpServer
from kvreplay.transport.paced import PacedLoop

ASK = b"GET /query HTTP/1.1\r\nHost: x\r\n\r\n"


class Service:
    """Keeps every exchange until it is answered."""

    def __init__(self) -> None:
        self.paced = PacedLoop(EventLoop())
        self.asked: list[Exchange] = []
        self.server = HttpServer(self.paced, self.asked.append)

    def connect(self, *, asks: bool) -> socket.socket:
        client = socket.create_connection(("127.0.0.1", self.server.port), timeout=5)
        if asks:
            client.sendall(ASK)
        self.listen()
        return client

    def listen(self) -> None:
        for _ in range(5):
            self.paced.listen(0.02)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setattr(http, "_IDLE_S", 0.05)
    service = Service()
    yield service
    service.server.close()


def test_who_waits_for_an_answer_is_not_idle(service: Service) -> None:
    """However long it takes: it comes with the producer's next turn."""
    with service.connect(asks=True) as patient:
        service.listen()
        with service.connect(asks=True):
            service.asked[0].answer(200, b"{}")
            service.listen()
            assert patient.recv(1000).endswith(b"\r\n\r\n{}")


def test_who_asks_nothing_is_hung_up_on_when_the_next_one_comes(service: Service) -> None:
    with service.connect(asks=True) as patient, service.connect(asks=False) as silent:
        service.listen()
        with service.connect(asks=True):
            assert silent.recv(1000) == b""
            assert len(service.asked) == 2
            patient.setblocking(False)
            with pytest.raises(BlockingIOError):
                patient.recv(1000)


def test_an_answer_may_have_a_status_that_has_no_name(service: Service) -> None:
    with service.connect(asks=True) as client:
        service.asked[0].answer(799, b"")
        service.listen()
        assert client.recv(1000).startswith(b"HTTP/1.1 799 \r\n")
