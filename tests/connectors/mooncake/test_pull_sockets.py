"""When the sockets of pulls are closed: never by the wall clock, and never while anything may be on its way."""

from collections import Counter

import pytest

from kvreplay.connectors.mooncake import pull_sockets
from kvreplay.connectors.mooncake.pull_sockets import PullSockets
from kvreplay.connectors.mooncake.structs import MooncakeXferResponse, MooncakeXferResponseStatus, encode
from kvreplay.sim.envelope import PULL_REQUEST, Envelope
from kvreplay.sim.event_loop import EventLoop
from kvreplay.transport.traffic import Traffic


class Dealers:
    """In the place of real sockets."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.replies: dict[str, object] = {}

    def dealer(self, endpoint: str, identity: str, max_bytes: int, on_frames: object) -> str:
        self.open.append(identity)
        self.replies[identity] = on_frames
        return identity

    def send(self, socket: str, frames: list[bytes]) -> bool:
        return socket in self.open

    def close(self, socket: str) -> None:
        self.open.remove(socket)


class Consumer:
    def __init__(self) -> None:
        self.loop = EventLoop()
        self.dealers = Dealers()
        self.waits_for: list[str] = []
        self.pulls = PullSockets(
            "D0",
            self.loop,
            self.dealers,  # type: ignore[arg-type]
            Traffic(),
            arrived=lambda envelope: None,
            is_open=lambda source, conversation, attempt: conversation in self.waits_for,
            malformed=Counter(),
        )

    def pull(self, name: str) -> None:
        envelope = Envelope(kind=PULL_REQUEST, source=name, destination="P0/mooncake/0", payload=b"", conversation=name)
        self.pulls.send(envelope, "tcp://x")

    def reply(self, status: MooncakeXferResponseStatus, socket: int = 0) -> None:
        frame = encode(MooncakeXferResponse(status=status))
        self.dealers.replies[self.dealers.open[socket]]([frame])  # type: ignore[operator]

    def open_at(self, time_ns: int) -> list[str]:
        self.loop.now_ns = time_ns
        self.pulls.tidy()
        return self.dealers.open


def test_what_is_sent_at_this_instant_may_be_on_its_way() -> None:
    consumer = Consumer()
    consumer.pull("stranger")
    consumer.reply(MooncakeXferResponseStatus.FINISH)
    assert consumer.open_at(0) == ["stranger!1"]
    assert consumer.open_at(1) == []


def test_a_pull_that_nobody_waits_for_stays_until_it_is_answered() -> None:
    """A stranger's, or one that was given up: its replies are counted as in virtual time."""
    consumer = Consumer()
    consumer.pull("stranger")
    assert consumer.open_at(10**12) == ["stranger!1"]
    consumer.reply(MooncakeXferResponseStatus.CONTINUE)
    assert consumer.open_at(2 * 10**12) == ["stranger!1"]
    consumer.reply(MooncakeXferResponseStatus.ERROR)
    assert consumer.open_at(3 * 10**12) == []


def test_one_that_is_waited_for_stays() -> None:
    consumer = Consumer()
    consumer.waits_for.append("a")
    consumer.pull("a")
    consumer.reply(MooncakeXferResponseStatus.FINISH)
    assert consumer.open_at(1) == ["a!1"]


def test_of_those_that_are_never_answered_the_oldest_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull_sockets, "_MAX_SILENT", 2)
    consumer = Consumer()
    for name in "abcd":
        consumer.pull(name)
    assert consumer.open_at(1) == ["c!3", "d!4"]
