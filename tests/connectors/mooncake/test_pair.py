"""A producer and a consumer over the bus: the successful pull, bootstrap, both roles at once, and restarts."""

from dataclasses import replace

import pytest

from kvreplay.behaviour import profile
from kvreplay.connectors.mooncake.structs import (
    BootstrapAnswer,
)
from kvreplay.sim.envelope import Envelope
from tests.connectors.mooncake.pair import Latency, Pair, request_for

NO_REPLY = "transfer failed: Resource temporarily unavailable"
BLOCKS = [4, 5, 6]


def dropped(envelope: Envelope) -> list[Envelope]:
    return []


class TestSuccess:
    def test_the_pull_waits_for_the_request(self) -> None:
        pair = Pair()
        pair.announce()
        pair.pull()
        pair.run(5)
        assert pair.reports == []
        pair.finish(announce=False)
        pair.run()

        assert pair.reports == [("P0", 5.0, ["p1"], [], []), ("D0", 5.0, ["d1"], [], [])]
        assert [pair.d_memory.block(block) for block in BLOCKS] == [pair.p_memory.block(b) for b in (1, 2, 3)]
        assert pair.p.producer is not None
        assert pair.p.producer.entries == {}

    def test_messages_and_events_of_one_pull(self) -> None:
        pair = Pair(network=Latency())
        pair.finish()
        pair.pull()
        pair.run()

        assert pair.wire.kinds_sent() == [
            "bootstrap.query",
            "bootstrap.answer",
            "pull.request",
            "write.data",
            "write.done",
            "pull.reply",
        ]
        assert [(event.kind, event.instance, event.request_id, event.peer) for event in pair.sink.events] == [
            ("bootstrap.queried", "D0", "d1", "P0"),
            ("bootstrap.answered", "D0", "d1", "P0"),
            ("pull.sent", "D0", "d1", "P0"),
            ("send.started", "P0", "p1", "D0"),
            ("send.finished", "P0", "p1", "D0"),
            ("pull.replied", "D0", "d1", "P0"),
            ("pull.settled", "D0", "d1", "P0"),
        ]
        assert pair.settled() == [("d1", "ok", None)]
        write = pair.wire.sent[3]
        assert write.size_bytes == 3 * 4 * 8
        assert (write.destination, write.payload.num_blocks) == ("D0/memory/0", 3)

    @pytest.mark.parametrize("order", ["consumer first", "producer first"])
    def test_either_side_may_be_first(self, order: str) -> None:
        pair = Pair()
        if order == "consumer first":
            pair.pull()
            pair.run(1)
        pair.finish()
        pair.run(1)
        if order == "producer first":
            pair.pull()
        pair.run()
        assert [report[2] for report in pair.reports] == [["p1"], ["d1"]]

    def test_a_consumer_with_a_prefix_gets_the_last_blocks(self) -> None:
        pair = Pair()
        pair.finish([1, 2, 3, 4, 7])
        pair.pull(request_for("d1", blocks=[[9, 8]]))
        pair.run()
        assert pair.d_memory.blocks == {(0, 9): pair.p_memory.block(4), (0, 8): pair.p_memory.block(7)}

    def test_groups_are_written_apart(self) -> None:
        pair = Pair(num_groups=2)
        pair.finish([1, 2, 3], [4, 5])
        pair.pull(request_for("d1", blocks=[[6, 7, 8], [9]]))
        pair.run()
        assert [report[2] for report in pair.reports] == [["p1"], ["d1"]]
        assert sorted(pair.d_memory.blocks) == [(0, 6), (0, 7), (0, 8), (1, 9)]
        assert pair.d_memory.block(9, group=1) == pair.p_memory.block(5)

    def test_requests_of_one_pull_are_answered_as_they_become_ready(self) -> None:
        pair = Pair()
        pair.pull(*(request_for(name, blocks=[[block]]) for name, block in (("d1", 4), ("d2", 5), ("d3", 6))))
        for index in (2, 3, 1):
            pair.run(400)
            pair.finish([index], p_req_id=f"p{index}", transfer_id=f"X{index}")
        pair.run()
        replies = [envelope for envelope in pair.wire.sent if envelope.kind == "pull.reply"]
        assert [(reply.payload.status.name, reply.payload.ok_reqs, reply.reply_index) for reply in replies] == [
            ("CONTINUE", ["d2"], 0),
            ("CONTINUE", ["d3"], 1),
            ("FINISH", ["d1"], 2),
        ]
        assert [reply.request_ids for reply in replies] == [("d2",), ("d3",), ("d1",)]
        # 1,200 s after the pull: the time to wait starts again with each batch, on both sides.
        assert pair.reports_of("D0")[-1][:2] == (1200.0, ["d1"])

    def test_two_requests_for_one_transfer_free_it_once(self) -> None:
        pair = Pair()
        pair.finish()
        pair.pull(request_for("d1", "X1"), request_for("d2", "X1", [[7, 8, 9]]))
        pair.run()
        assert [report[2] for report in pair.reports] == [["p1"], ["d1", "d2"]]

    def test_bytes_on_the_wire_change_nothing(self) -> None:
        as_structs, as_bytes = Pair(), Pair(encodes_messages=True)
        for pair in (as_structs, as_bytes):
            pair.pull(request_for("d1"), request_for("d2", blocks=[[7]]))
            pair.finish()
            pair.run()
        assert as_bytes.sink.events == as_structs.sink.events
        assert as_bytes.reports == as_structs.reports
        assert as_bytes.d_memory.blocks == as_structs.d_memory.blocks

    def test_the_layout_is_sent_until_it_is_acknowledged(self) -> None:
        pair = Pair()
        for index in (1, 2):
            pair.finish(p_req_id=f"p{index}", transfer_id=f"X{index}")
            pair.pull(request_for(f"d{index}"))
            pair.run()
        pulls = [envelope.payload for envelope in pair.wire.sent if envelope.kind == "pull.request"]
        assert [pull.registered_layer_names for pull in pulls] == [["model.layers.0.attn"], []]
        assert pulls[0].layout_id == pulls[1].layout_id != 0
        assert pulls[0].layout_id % 2 == 1

    def test_a_lost_layout_is_sent_again(self) -> None:
        pair = Pair()
        for index in (1, 2):
            pair.finish(p_req_id=f"p{index}", transfer_id=f"X{index}")
            pair.pull(request_for(f"d{index}"))
            pair.run()
            assert pair.p.producer is not None
            pair.p.producer.layouts.forget()
        pulls = [envelope for envelope in pair.wire.sent if envelope.kind == "pull.request"]
        assert [pull.attempt for pull in pulls] == [0, 0, 1]
        assert [status for _, status, _ in pair.settled()] == ["ok", "ok"]


class TestBootstrap:
    def test_batches_share_one_query(self) -> None:
        pair = Pair(network=Latency())
        for index in (1, 2):
            pair.finish(p_req_id=f"p{index}", transfer_id=f"X{index}")
            pair.pull(request_for(f"d{index}"))
        pair.run()
        assert pair.wire.kinds_sent().count("bootstrap.query") == 1
        assert [status for _, status, _ in pair.settled()] == ["ok", "ok"]

    def test_only_the_first_address_of_a_batch_is_asked(self) -> None:
        pair = Pair()
        pair.pull(request_for("d1", bootstrap="http://nowhere:1"), request_for("d2"))
        pair.run()
        cause = "remote engine_id P0#0 not found from bootstrap server http://nowhere:1"
        assert pair.settled() == [("d1", "failed", cause), ("d2", "failed", cause)]

    def test_a_failure_is_not_remembered(self) -> None:
        pair = Pair()
        pair.wire.transforms["bootstrap.answer"] = lambda envelope: [
            replace(envelope, payload=BootstrapAnswer(body=b"{}"))
        ]
        pair.pull()
        pair.run()
        pair.wire.transforms.clear()
        pair.finish(p_req_id="p2", transfer_id="X2")
        pair.pull(request_for("d2"))
        pair.run()
        assert [status for _, status, _ in pair.settled()] == ["failed", "ok"]

    @pytest.mark.parametrize(
        ("answer", "attempts"),
        [
            (BootstrapAnswer(404), 1),
            (BootstrapAnswer(500, b"no"), 1),
            (BootstrapAnswer(200, b"<html>"), 1),
            (BootstrapAnswer(200, b"[]"), 1),
            (BootstrapAnswer(200, b'{"0": {"engine_id": "P0#0"}}'), 1),
            (BootstrapAnswer(0, error="refused"), 3),
        ],
    )
    def test_only_a_broken_transport_is_tried_again(self, answer: BootstrapAnswer, attempts: int) -> None:
        pair = Pair()
        pair.wire.transforms["bootstrap.answer"] = lambda envelope: [replace(envelope, payload=answer)]
        pair.pull()
        pair.run()
        assert pair.wire.kinds_sent().count("bootstrap.query") == attempts
        assert [status for _, status, _ in pair.settled()] == ["failed"]

    def test_a_hanging_server_costs_three_timeouts(self) -> None:
        pair = Pair()
        pair.wire.transforms["bootstrap.query"] = dropped
        pair.pull()
        pair.run()
        assert pair.reports_of("D0")[0][0] == pytest.approx(90.2)

    @pytest.mark.parametrize(("url", "cause"), [("http://P0:8998/", "HTTP status 404"), ("P0:8998", "unsupported")])
    def test_an_address_that_is_not_quite_right(self, url: str, cause: str) -> None:
        pair = Pair()
        pair.pull(request_for("d1", bootstrap=url))
        pair.run()
        assert (pair.events("bootstrap.answered")[-1].cause or "").startswith(cause)
        assert pair.settled()[0][2] == f"remote engine_id P0#0 not found from bootstrap server {url}"

    @pytest.mark.parametrize("worker_addr", ["{}", '{"1": {"0": "tcp://P0/mooncake/0"}}'])
    def test_f12_a_missing_rank_parks_the_request(self, worker_addr: str) -> None:
        pair = Pair()
        body = f'{{"0": {{"engine_id": "P0#0", "worker_addr": {worker_addr}}}}}'.encode()
        pair.wire.transforms["bootstrap.answer"] = lambda envelope: [
            replace(envelope, payload=BootstrapAnswer(body=body))
        ]
        pair.pull()
        pair.run()
        assert (pair.settled(), pair.reports) == ([], [])

    @pytest.mark.parametrize(
        ("address", "reason"),
        [
            ('"nonsense"', "Invalid zmq path: nonsense"),
            ("null", "Invalid zmq path: None"),
            ("5", "expected string or bytes-like object, got 'int'"),
            (r'"\ud800"', r"Invalid zmq path: \ud800"),
        ],
    )
    def test_an_address_of_no_endpoint_fails_the_pull(self, address: str, reason: str) -> None:
        pair = Pair()
        _answer(pair, f'{{"0": {address}}}')
        pair.pull()
        pair.run()
        assert pair.settled() == [("d1", "failed", f"transfer failed: {reason}")]

    @pytest.mark.parametrize("by_pp_rank", ['{"0": ["x"]}', '{"0": {"a": 1}}', "{}"])
    def test_what_cannot_be_looked_for_parks_the_request_but_not_under_ideal(self, by_pp_rank: str) -> None:
        pair = Pair()
        _answer(pair, by_pp_rank)
        pair.pull()
        pair.run()
        assert (pair.settled(), pair.reports) == ([], [])
        pair = Pair(profile("ideal"))
        _answer(pair, by_pp_rank)
        pair.pull()
        pair.run()
        assert [(name, status) for name, status, _ in pair.settled()] == [("d1", "failed")]


def _answer(pair: Pair, by_pp_rank: str) -> None:
    """The bootstrap server says this of the producer's only tensor-parallel rank."""
    body = f'{{"0": {{"engine_id": "P0#0", "worker_addr": {{"0": {by_pp_rank}}}}}}}'.encode()
    pair.wire.transforms["bootstrap.answer"] = lambda envelope: [replace(envelope, payload=BootstrapAnswer(body=body))]


class TestBothRoles:
    def test_an_instance_produces_and_consumes(self) -> None:
        pair = Pair()
        pair.run()  # until it has registered
        pair.p.shutdown()
        pair.d.shutdown()
        pair.p = pair.start("P0", "kv_both", pair.p_memory, incarnation=1)
        pair.d = pair.start("D0", "kv_both", pair.d_memory, incarnation=1)
        pair.finish()
        pair.pull(request_for("d1", engine_id="P0#1"))
        pair.run()
        pair.p, pair.d = pair.d, pair.p
        pair.finish([6], p_req_id="p2", transfer_id="X2")
        pair.pull(request_for("d2", blocks=[[9]], engine_id="D0#1", bootstrap="http://D0:8998"))
        pair.run()
        assert [(report[0], report[2]) for report in pair.reports] == [
            ("P0", ["p1"]),
            ("D0", ["d1"]),
            ("D0", ["p2"]),
            ("P0", ["d2"]),
        ]
        assert pair.p_memory.block(9) == pair.p_memory.block(3), "there and back again"


class TestRestart:
    def test_a_restarted_producer_is_found_under_its_new_engine_id(self) -> None:
        pair = Pair()
        pair.finish()
        pair.pull()
        pair.run()
        pair.p.shutdown()
        pair.p = pair.start("P0", "kv_producer", pair.p_memory, incarnation=1)
        pair.finish(p_req_id="p2", transfer_id="X2")
        pair.pull(request_for("d2", engine_id="P0#1"))
        pair.run(1)
        assert [status for _, status, _ in pair.settled()] == ["ok", "ok"]

    def test_its_old_address_stays_dead(self) -> None:
        pair = Pair()
        pair.finish()
        pair.pull()
        pair.run()
        pair.p.shutdown()
        pair.p = pair.start("P0", "kv_producer", pair.p_memory, incarnation=1)
        pair.finish(p_req_id="p2", transfer_id="X2")
        pair.pull(request_for("d2"))
        pair.run()
        assert pair.settled()[-1] == ("d2", "failed", NO_REPLY)

    def test_a_write_does_not_reach_a_restarted_consumer(self) -> None:
        pair = Pair()
        pair.wire.delays_s["write.data"] = 1
        pair.finish()
        pair.pull()
        pair.run(0.5)
        pair.d.shutdown()
        pair.d = pair.start("D0", "kv_consumer", pair.d_memory, incarnation=1)
        pair.run(1)
        assert pair.d_memory.blocks == {}
        assert pair.p.stats.num_failed_transfers == 1

    def test_shutdown_leaves_nothing_pending(self) -> None:
        pair = Pair()
        pair.finish()
        pair.pull(request_for("d2"))
        pair.run(1)
        pair.p.shutdown()
        pair.d.shutdown()
        assert pair.loop.num_live == 0
