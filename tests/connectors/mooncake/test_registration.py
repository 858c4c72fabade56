"""Registration: a producer's rank finds its bootstrap server, waits for it, or does not come up."""

from collections.abc import Callable

import pytest

from kvreplay.connectors.mooncake.bootstrap import BootstrapServer
from kvreplay.connectors.mooncake.config import MooncakeConfig
from kvreplay.connectors.mooncake.registration import Registration
from kvreplay.connectors.mooncake.structs import BootstrapAnswer, RegisterWorkerPayload
from kvreplay.errors import EngineFatal
from kvreplay.ids import NS_PER_S
from kvreplay.sim.bus import Bus
from kvreplay.sim.envelope import Envelope
from kvreplay.sim.event_loop import EventLoop
from kvreplay.transport.virtual import VirtualDriver

PAYLOAD = RegisterWorkerPayload(engine_id="P", dp_rank=0, tp_rank=0, pp_rank=0, addr="tcp://P0")
DESCRIBED = "engine_id='P' dp_rank=0 tp_rank=0 pp_rank=0 addr='tcp://P0'"


class Boot:
    """One rank that comes up, and a server that may not be there."""

    def __init__(self, host: str = "boot:8998") -> None:
        self.loop = EventLoop()
        self.bus = Bus(self.loop)
        self.lines: list[tuple[object, ...]] = []
        self.registration = Registration(PAYLOAD, host, address="P0", config=MooncakeConfig(), log_line=self)
        self.driver = VirtualDriver(self.registration, self.bus)
        self.bus.listen("P0", self.driver.receive, refused=self.driver.refused)

    debug = False

    def __call__(self, thread: str, level: str, template: str, *arguments: object) -> None:
        self.lines.append((level, *arguments))

    def serve(self, answer: Callable[[Envelope], BootstrapAnswer | None]) -> None:
        def receive(envelope: Envelope) -> None:
            given = answer(envelope)
            if given is not None:
                self.bus.post(
                    Envelope(
                        kind="bootstrap.registered",
                        source=envelope.destination,
                        destination=envelope.source,
                        payload=given,
                        attempt=envelope.attempt,
                    )
                )

        self.bus.listen("boot/bootstrap", receive)

    def run(self) -> EngineFatal | None:
        self.registration.start(self.loop.now_ns)
        self.driver.pump()
        assert self.loop.run_until_quiescent()
        assert self.registration.is_over
        return self.registration.failure


def test_a_server_that_is_there_takes_it() -> None:
    boot, server = Boot(), BootstrapServer()
    boot.serve(lambda envelope: server.answer(envelope.payload))
    assert boot.run() is None
    assert server.workers[0].worker_addr == {0: {0: "tcp://P0"}}
    assert boot.lines == []


def test_nobody_there_is_tried_again_after_one_and_two_seconds() -> None:
    boot = Boot()
    failure = boot.run()
    assert failure is not None
    assert (failure.exception, failure.message) == (
        "RuntimeError",
        f"Failed to register {DESCRIBED} with the Mooncake bootstrap server at http://boot:8998/register "
        "after 3 attempts.",
    )
    assert boot.loop.now_ns == 3 * NS_PER_S
    assert boot.lines == [
        ("WARNING", 1, 3, DESCRIBED, "ConnectError", "refused", 1.0),
        ("WARNING", 2, 3, DESCRIBED, "ConnectError", "refused", 2.0),
    ]


def test_a_server_that_comes_late_is_found() -> None:
    boot, server = Boot(), BootstrapServer()
    boot.loop.call_later(NS_PER_S // 2, lambda: boot.serve(lambda envelope: server.answer(envelope.payload)))
    assert boot.run() is None
    assert boot.loop.now_ns == NS_PER_S


def test_silence_is_given_up_after_the_timeout() -> None:
    boot = Boot()
    boot.serve(lambda envelope: None)
    failure = boot.run()
    assert failure is not None
    assert failure.exception == "RuntimeError"
    assert boot.loop.now_ns == (3 * 30 + 1 + 2) * NS_PER_S
    assert [line[4] for line in boot.lines] == ["ReadTimeout", "ReadTimeout"]


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (400, "Client error '400 Bad Request' for url 'http://boot:8998/register'"),
        (404, "Client error '404 Not Found' for url 'http://boot:8998/register'"),
    ],
)
def test_a_refusal_is_final(status: int, message: str) -> None:
    boot = Boot()
    boot.serve(lambda envelope: BootstrapAnswer(status, b'{"detail":"taken"}'))
    failure = boot.run()
    assert failure is not None
    assert (failure.exception, failure.message) == ("HTTPStatusError", message)
    assert boot.lines == [("ERROR", DESCRIBED, '{"detail":"taken"}')]
    assert boot.loop.now_ns == 0


def test_an_answer_to_an_attempt_that_is_over_changes_nothing() -> None:
    boot, server = Boot(), BootstrapServer()

    def late(envelope: Envelope) -> BootstrapAnswer | None:
        if envelope.attempt == 1:
            old = Envelope(
                kind="bootstrap.registered", source="boot", destination="P0", payload=BootstrapAnswer(500), attempt=1
            )
            boot.loop.call_later(30 * NS_PER_S + 1, lambda: boot.bus.deliver(old))
            return None
        return server.answer(envelope.payload)

    boot.serve(late)
    assert boot.run() is None
