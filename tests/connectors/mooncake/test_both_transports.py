"""One contract, two transports: the virtual bus, and real sockets on the loopback interface."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from kvreplay.connectors.mooncake.config import MooncakeConfig
from kvreplay.connectors.mooncake.structs import MooncakeXferResponse, MooncakeXferResponseStatus, encode
from kvreplay.sim.envelope import Envelope
from tests.connectors.mooncake.pair import GENERATIONS, Pair, behaviour, request_for
from tests.connectors.mooncake.socket_pair import SocketPair

QUICK = MooncakeConfig(abort_request_timeout=20, receive_timeout=40, connector_timeout=10, transfer_timeout=10)
BLOCKS = [4, 5, 6]
NO_REPLY = "transfer failed: Resource temporarily unavailable"
BOUNDED = behaviour(pull_wait="bounded", mooncake_lost_pulls="fail")

MakePair = Callable[..., Pair]


@pytest.fixture(params=["virtual", "zmq"])
def make_pair(request: pytest.FixtureRequest) -> Iterator[MakePair]:
    made: list[Pair] = []

    def make(*arguments: Any, **settings: Any) -> Pair:  # noqa: ANN401 - those of a pair
        kind = Pair if request.param == "virtual" else SocketPair
        made.append(kind(*arguments, **{"config": QUICK, **settings}))
        return made[-1]

    yield make
    for pair in made:
        if isinstance(pair, SocketPair):
            pair.close()


def kill(pair: Pair, instance: str) -> None:
    if isinstance(pair, SocketPair):
        pair.kill(instance)
    else:
        (pair.p if instance == "P0" else pair.d).shutdown()


def outcomes(pair: Pair, instance: str) -> list[tuple[list[str], list[str], list[int]]]:
    return [report[1:] for report in pair.reports_of(instance)]


def answering(status: MooncakeXferResponseStatus, message: str | None = None) -> Callable[[Envelope], list[Envelope]]:
    return lambda envelope: [replace(envelope, payload=encode(MooncakeXferResponse(status, err_msg=message)))]


def test_a_good_pull(make_pair: MakePair) -> None:
    pair = make_pair()
    pair.finish()
    pair.pull()
    pair.run()
    assert outcomes(pair, "P0") == [(["p1"], [], [])]
    assert outcomes(pair, "D0") == [(["d1"], [], [])]
    assert [pair.d_memory.block(block) for block in BLOCKS] == [pair.p_memory.block(block) for block in (1, 2, 3)]
    assert [event.kind for event in pair.sink.events] == [
        "bootstrap.queried",
        "bootstrap.answered",
        "pull.sent",
        "send.started",
        "send.finished",
        "pull.replied",
        "pull.settled",
    ]


def test_a_pull_waits_until_its_request_is_ready(make_pair: MakePair) -> None:
    pair = make_pair()
    pair.announce()
    pair.pull()
    pair.run(5)
    assert pair.reports == []
    pair.finish(announce=False)
    pair.run()
    assert outcomes(pair, "D0") == [(["d1"], [], [])]


def test_several_requests_in_one_pull_each_with_its_blocks(make_pair: MakePair) -> None:
    pair = make_pair()
    pair.finish([1, 2, 3])
    pair.announce("p2", "X2")
    pair.pull(request_for("d1"), request_for("d2", blocks=[[7, 8]]))
    pair.run(5)
    assert outcomes(pair, "D0") == [(["d1"], [], [])]
    pair.finish([9, 10], p_req_id="p2", transfer_id="X2", announce=False)
    pair.run()
    assert outcomes(pair, "D0") == [(["d1"], [], []), (["d2"], [], [])]
    assert [pair.d_memory.block(block) for block in (7, 8)] == [pair.p_memory.block(block) for block in (9, 10)]
    assert [event.status for event in pair.events("pull.replied")] == ["CONTINUE", "FINISH"]


def test_the_second_pull_knows_the_address_and_needs_no_layout(make_pair: MakePair) -> None:
    pair = make_pair()
    for number in (1, 2):
        pair.finish(p_req_id=f"p{number}", transfer_id=f"X{number}")
        pair.pull(request_for(f"d{number}"))
        pair.run()
    assert len(pair.events("bootstrap.queried")) == 1
    assert outcomes(pair, "D0") == [(["d1"], [], []), (["d2"], [], [])]


def test_a_forgotten_layout_is_sent_again(make_pair: MakePair) -> None:
    pair = make_pair()
    for number in (1, 2):
        pair.finish(p_req_id=f"p{number}", transfer_id=f"X{number}")
        pair.pull(request_for(f"d{number}"))
        pair.run()
        assert pair.p.producer is not None
        pair.p.producer.layouts.forget()
    assert outcomes(pair, "D0") == [(["d1"], [], []), (["d2"], [], [])]
    assert [event.status for event in pair.events("pull.replied")] == ["FINISH", "LAYOUT_MISS", "FINISH"]


def test_a_pull_without_blocks_releases_the_producers(make_pair: MakePair) -> None:
    pair = make_pair()
    pair.finish()
    pair.pull(request_for("d1", blocks=[]))
    pair.run()
    assert outcomes(pair, "P0") == [(["p1"], [], [])]
    assert outcomes(pair, "D0") == []


def test_a_request_that_never_becomes_ready(make_pair: MakePair) -> None:
    pair = make_pair()
    pair.announce()
    pair.pull()
    pair.run()
    assert pair.settled() == [("d1", "failed", "Timeout waiting for P side ready.")]
    assert outcomes(pair, "D0") == [(["d1"], [], BLOCKS)]


def test_blocks_that_nobody_asks_for_expire(make_pair: MakePair) -> None:
    pair = make_pair()
    pair.finish()
    pair.run()
    assert outcomes(pair, "P0") == [(["p1"], [], [])]
    assert len(pair.events("send.expired")) == 1


@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_lost_reply(make_pair: MakePair, generation: str) -> None:
    pair = make_pair(behaviour(mooncake_failure=generation))
    pair.wire.transforms["pull.reply"] = lambda envelope: []
    pair.finish()
    pair.pull()
    pair.run()
    assert pair.settled() == [("d1", "failed", NO_REPLY)]
    assert outcomes(pair, "D0") == ([] if generation == "silent" else [(["d1"], [], BLOCKS)])


@pytest.mark.parametrize("generation", GENERATIONS)
def test_an_error_reply(make_pair: MakePair, generation: str) -> None:
    pair = make_pair(behaviour(mooncake_failure=generation))
    pair.wire.transforms["pull.reply"] = answering(MooncakeXferResponseStatus.ERROR, "out of luck")
    pair.finish()
    pair.pull()
    pair.run()
    assert pair.settled() == [("d1", "failed", "out of luck")]
    assert outcomes(pair, "D0") == ([] if generation == "silent" else [(["d1"], [], BLOCKS)])


def test_a_reply_that_cannot_be_decoded(make_pair: MakePair) -> None:
    pair = make_pair()
    pair.wire.transforms["pull.reply"] = lambda envelope: [replace(envelope, payload=b"\xc1")]
    pair.finish()
    pair.pull()
    pair.run()
    ((_, status, cause),) = pair.settled()
    assert (status, str(cause).startswith("transfer failed: MessagePack data is malformed")) == ("failed", True)


def test_a_write_that_is_lost_ends_at_the_engines_deadline(make_pair: MakePair) -> None:
    pair = make_pair()
    pair.wire.transforms["write.data"] = lambda envelope: []
    pair.finish()
    pair.pull()
    pair.run()
    assert pair.settled() == [("d1", "failed", "Mooncake transfer engine returned -1")]
    assert [event.status for event in pair.events("send.finished")] == ["failed"]


def test_a_producer_registers_over_http() -> None:
    pair = SocketPair(config=QUICK)
    try:
        pair.run()
        assert pair.buses["P0"].num_exchanges == 1
        assert pair.buses["D0"].num_exchanges == 0
    finally:
        pair.close()


def test_nobody_at_the_bootstrap_address(make_pair: MakePair) -> None:
    pair = make_pair()
    pair.pull(request_for("d1", bootstrap="http://nowhere:8998"))
    pair.run()
    assert len(pair.events("bootstrap.queried")) == 3
    assert outcomes(pair, "D0") == [(["d1"], [], BLOCKS)]


def test_an_engine_that_the_bootstrap_server_does_not_know(make_pair: MakePair) -> None:
    pair = make_pair()
    pair.pull(request_for("d1", engine_id="P0#7"))
    pair.run()
    ((_, status, cause),) = pair.settled()
    assert (status, "P0#7 not found from bootstrap server" in str(cause)) == ("failed", True)


@pytest.mark.parametrize(("switches", "reason"), [(None, NO_REPLY), (BOUNDED, "transfer failed: connection")])
def test_a_producer_that_dies_under_a_pull(make_pair: MakePair, switches: Any, reason: str) -> None:  # noqa: ANN401
    pair = make_pair(switches)
    pair.announce()
    pair.pull()
    pair.run(5)
    kill(pair, "P0")
    pair.run()
    ((_, status, cause),) = pair.settled()
    assert status == "failed"
    assert str(cause).startswith(reason)


def test_a_stray_message_ends_the_listener_or_is_counted(make_pair: MakePair) -> None:
    for switches, replies in ((behaviour(), 0), (behaviour(mooncake_listener="survive"), 1)):
        pair = make_pair(switches)

        def stray(envelope: Envelope) -> list[Envelope]:
            return [replace(envelope, kind="stray.frames", payload=(b"", b""), request_ids=()), envelope]

        pair.wire.transforms["pull.request"] = stray
        pair.finish()
        pair.pull()
        pair.run()
        assert len(pair.events("pull.replied")) == replies


def test_two_groups_move_by_their_own_tables(make_pair: MakePair) -> None:
    pair = make_pair(num_groups=2)
    pair.finish([1, 2], [3])
    pair.pull(request_for("d1", blocks=[[4, 5], [6]]))
    pair.run()
    assert outcomes(pair, "D0") == [(["d1"], [], [])]
    assert pair.d_memory.block(4) == pair.p_memory.block(1)
    assert pair.d_memory.block(6, group=1) == pair.p_memory.block(3, group=1)
