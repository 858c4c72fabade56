"""What is still wrong in vLLM 0.33.0, each beside what profile `ideal` does about it."""

from dataclasses import replace

import pytest

from kvreplay.behaviour import Behaviour, profile
from kvreplay.connectors.mooncake.producer import Producer
from kvreplay.connectors.mooncake.structs import (
    STRAY_FRAMES,
    MooncakeConnectorMetadata,
    MooncakeXferResponseStatus,
    WriteData,
)
from kvreplay.sim.envelope import Delivery, Envelope
from tests.connectors.mooncake.pair import Latency, Pair, behaviour, request_for

IDEAL = profile("ideal")
NOT_READY = "Timeout waiting for P side ready."
NO_REPLY = "transfer failed: Resource temporarily unavailable"


def producer_of(pair: Pair) -> Producer:
    assert pair.p.producer is not None
    return pair.p.producer


def stray(*frames: bytes) -> Envelope:
    return Envelope(kind=STRAY_FRAMES, source="stranger", destination="P0/mooncake/0", payload=frames)


def raising(envelope: Envelope) -> list[Envelope]:
    """The engine call raises, with nothing copied."""
    return [replace(envelope, payload=replace(envelope.payload, lands=slice(0, 0), raises="boom"))]


def finished(pair: Pair, instance: str) -> list[str]:
    return [name for _, names, _, _ in pair.reports_of(instance) for name in names]


class TestStrayMessages:
    def test_three_frames_kill_the_listener(self) -> None:
        pair = Pair()
        pair.pull(request_for("d0", "X0"))
        pair.run(1)
        pair.bus.post(stray(b"a", b"b"))
        pair.finish()
        pair.pull()
        pair.run(600)
        assert pair.settled() == [("d0", "failed", NO_REPLY), ("d1", "failed", NO_REPLY)]
        assert producer_of(pair).tasks() == {"wait_and_ret": 1}

    def test_its_blocks_expire(self) -> None:
        pair = Pair()
        pair.bus.post(stray(b"a", b"b"))
        pair.finish()
        pair.run()
        assert finished(pair, "P0") == ["p1"]

    def test_a_write_that_is_running_ends_unheard(self) -> None:
        pair = Pair()
        pair.wire.delays_s["write.data"] = 2
        pair.finish()
        pair.pull()
        pair.run(1)
        pair.bus.post(stray(b"a", b"b"))
        pair.run(600)
        assert pair.d_memory.block(5) == pair.p_memory.block(2)
        assert producer_of(pair).entries["X1"].sending == 1
        assert pair.settled() == [("d1", "failed", NO_REPLY)]

    def test_one_frame_is_answered_with_an_error(self) -> None:
        pair = Pair()
        pair.bus.post(stray(b"\x00"))
        pair.run()
        (reply,) = [envelope for envelope in pair.wire.sent if envelope.kind == "pull.reply"]
        assert (reply.destination, reply.payload.status) == ("stranger", MooncakeXferResponseStatus.ERROR)

    def test_ideally_it_is_counted(self) -> None:
        pair = Pair(IDEAL)
        pair.bus.post(stray(b"a", b"b"))
        pair.finish()
        pair.pull()
        pair.run(1)
        assert producer_of(pair).num_stray_messages == 1
        assert finished(pair, "D0") == ["d1"]


class TestRaisingEngine:
    def test_the_consumer_hears_it_and_the_producer_never_frees(self) -> None:
        pair = Pair()
        pair.wire.transforms["write.data"] = raising
        pair.finish()
        pair.pull()
        pair.run()
        assert pair.settled() == [("d1", "failed", "boom")]
        assert finished(pair, "P0") == []
        assert producer_of(pair).entries["X1"].sending == 1

    def test_a_second_pull_is_served_and_frees(self) -> None:
        pair = Pair()
        pair.wire.transforms["write.data"] = raising
        pair.finish()
        pair.pull()
        pair.run(1)
        pair.wire.transforms.clear()
        pair.pull(request_for("d2", "X1"))
        pair.run()
        assert finished(pair, "P0") == ["p1"]

    def test_waits_for_the_pulls_other_requests_are_left_over(self) -> None:
        pair = Pair()
        pair.wire.transforms["write.data"] = raising
        pair.finish()
        pair.announce("p2", "X2")
        pair.pull(request_for("d1"), request_for("d2"))
        pair.run()
        assert producer_of(pair).tasks()["wait_and_ret"] == 1
        assert [status for _, status, _ in pair.settled()] == ["failed", "failed"]

    def test_ideally_it_expires(self) -> None:
        pair = Pair(behaviour(mooncake_broken_send="settle"))
        pair.wire.transforms["write.data"] = raising
        pair.finish()
        pair.pull()
        pair.run()
        assert finished(pair, "P0") == ["p1"]
        assert "wait_and_ret" not in producer_of(pair).tasks()


class TestUnknownTransfers:
    def test_a_finish_that_nobody_announced_loses_the_rest_of_the_step(self) -> None:
        pair = Pair()
        pair.announce("p1", "X1")
        ready = {"p9": ("X9", [[7]]), "p1": ("X1", [[1]])}
        pair.p.start_load_kv(MooncakeConnectorMetadata(reqs_to_send=dict(ready)))
        assert not producer_of(pair).entries["X1"].ready
        assert "X9" not in producer_of(pair).entries

    def test_ideally_each_is_taken_for_itself(self) -> None:
        pair = Pair(behaviour(mooncake_unknown_transfer="accept"))
        pair.announce("p1", "X1")
        ready = {"d9": ("X9", [[7]]), "d1": ("X1", [[1]])}
        pair.p.start_load_kv(MooncakeConnectorMetadata(reqs_to_send=dict(ready)))
        assert [entry.ready for entry in producer_of(pair).entries.values()] == [True, True]

    def test_a_drop_of_a_stranger_keeps_the_others_announced(self) -> None:
        pair = Pair()
        pair.announce("p1", "X1")
        pair.drop("X9", "X1")
        assert list(producer_of(pair).entries) == ["X1"]

    def test_ideally_they_are_dropped(self) -> None:
        pair = Pair(behaviour(mooncake_unknown_transfer="accept"))
        pair.announce("p1", "X1")
        pair.drop("X9", "X1")
        assert producer_of(pair).entries == {}


class TestTwoRequestsOfOneTransfer:
    def two(self, switches: Behaviour) -> Pair:
        pair = Pair(switches)
        pair.announce("p1", "X1")
        pair.announce("p2", "X1")
        pair.finish([1, 2, 3], p_req_id="p1", announce=False)
        return pair

    def test_the_second_ones_blocks_are_sent_and_the_first_is_held_for_ever(self) -> None:
        pair = self.two(behaviour())
        pair.finish([7, 8, 9], p_req_id="p2", announce=False)
        pair.pull()
        pair.run()
        assert finished(pair, "P0") == ["p2"]
        assert pair.d_memory.block(4) == pair.p_memory.block(7)

    def test_after_the_first_was_served_the_second_is_held_for_ever(self) -> None:
        pair = self.two(behaviour())
        pair.pull()
        pair.run()
        pair.finish([7, 8, 9], p_req_id="p2", announce=False)
        pair.run()
        assert finished(pair, "P0") == ["p1"]

    @pytest.mark.parametrize("served", [False, True])
    def test_ideally_both_are_freed(self, served: bool) -> None:
        pair = self.two(IDEAL)
        if served:
            pair.pull()
            pair.run(1)
        pair.finish([7, 8, 9], p_req_id="p2", announce=False)
        pair.run()
        assert sorted(finished(pair, "P0")) == ["p1", "p2"]

    def test_ideally_nobody_gets_the_others_blocks(self) -> None:
        """The second one's producer has not begun: what is there is the first one's, whose consumer comes later."""
        pair = Pair(IDEAL)
        pair.finish([1, 2, 3], p_req_id="p1")
        pair.pull(request_for("d2", "X1"))
        pair.run(1)
        assert pair.d_memory.blocks == {}
        pair.pull(request_for("d1", "X1"))
        pair.run(1)
        assert pair.settled() == [("d2", "failed", "P dropped the request"), ("d1", "ok", None)]

    def test_ideally_not_even_who_has_asked_first(self) -> None:
        pair = Pair(IDEAL)
        pair.pull(request_for("d2", "X1"))
        pair.run(1)
        pair.finish([1, 2, 3], p_req_id="p1")
        pair.run(1)
        assert (pair.settled(), pair.d_memory.blocks) == ([("d2", "failed", "P dropped the request")], {})
        pair.run()
        assert finished(pair, "P0") == ["p1"]

    def test_ideally_nor_who_is_announced_when_the_other_is_ready(self) -> None:
        """The first one's transfer was over when the second was ready, so that nobody had announced that."""
        pair = Pair(IDEAL)
        pair.finish([1, 2, 3], p_req_id="p2", announce=False)
        pair.announce("p1", "X1")
        pair.pull(request_for("d1", "X1"))
        pair.finish([7, 8, 9], p_req_id="p1", announce=False)
        pair.run()
        assert (pair.settled(), pair.d_memory.blocks) == ([("d1", "failed", "P dropped the request")], {})
        assert sorted(finished(pair, "P0")) == ["p1", "p2"]

    def test_ideally_the_second_ones_abort_leaves_the_first(self) -> None:
        pair = self.two(IDEAL)
        pair.drop("X1")
        pair.pull()
        pair.run(1)
        assert finished(pair, "D0") == ["d1"]
        assert finished(pair, "P0") == ["p1"]


class TestNullBlocks:
    def test_a_block_that_the_window_has_left_is_sent_as_the_null_block(self) -> None:
        pair = Pair()
        pair.finish([0, 5, 6])
        pair.pull()
        pair.run()
        assert pair.d_memory.block(4) == pair.p_memory.block(0)
        assert finished(pair, "D0") == ["d1"]

    def test_ideally_the_request_fails(self) -> None:
        pair = Pair(behaviour(mooncake_null_blocks="refuse"))
        pair.finish([0, 5, 6])
        pair.pull()
        pair.run()
        assert pair.settled() == [("d1", "failed", "P has freed a block that D wants")]
        assert pair.d_memory.blocks == {}

    def test_what_nobody_asks_for_may_be_null(self) -> None:
        pair = Pair(behaviour(mooncake_null_blocks="refuse"))
        pair.finish([0, 5, 6])
        pair.pull(request_for("d1", blocks=[[4, 7]]))
        pair.run()
        assert pair.settled() == [("d1", "ok", None)]


class TestLateAndPartialWrites:
    def split(self, pair: Pair, *, ret: int, first: int, late_s: float | None) -> None:
        """The engine copies so many descriptors and returns; the others land later, or never."""

        def intercept(envelope: Envelope, now_ns: int) -> list[Delivery] | None:
            pair.wire.sent.append(envelope)
            if envelope.kind != "write.data":
                return None
            data: WriteData = envelope.payload
            at_once = replace(data, lands=slice(0, first))
            deliveries = [Delivery(replace(envelope, payload=at_once, write_result=ret))]
            if late_s is not None:
                rest = replace(data, lands=slice(first, None), returns=False)
                deliveries.append(Delivery(replace(envelope, payload=rest), round(late_s * 1e9)))
            return deliveries

        pair.wire.intercept = intercept  # type: ignore[method-assign]

    def pair(self, switches: Behaviour, *, ret: int, first: int, late_s: float | None) -> Pair:
        """Source blocks that are apart: a descriptor for each."""
        pair = Pair(switches, network=Latency())
        self.split(pair, ret=ret, first=first, late_s=late_s)
        pair.finish([1, 3, 5])
        pair.pull()
        return pair

    def written(self, pair: Pair) -> list[int]:
        return sorted(block for _, block in pair.d_memory.blocks)

    def test_a_failed_write_may_have_written_a_part(self) -> None:
        pair = self.pair(behaviour(), ret=-1, first=1, late_s=None)
        pair.run(1)
        assert self.written(pair) == [4]
        assert pair.reports_of("D0")[0][3] == [4, 5, 6]

    def test_bytes_land_after_the_failure(self) -> None:
        pair = self.pair(behaviour(), ret=-1, first=0, late_s=5)
        pair.run(1)
        assert (self.written(pair), finished(pair, "D0")) == ([], ["d1"])
        pair.run(5)
        assert self.written(pair) == [4, 5, 6]
        assert {provenance.request_id for provenance in pair.d_memory.in_doubt} == {"d1"}

    def test_a_part_is_taken_for_the_whole(self) -> None:
        pair = self.pair(behaviour(), ret=0, first=2, late_s=None)
        pair.run(1)
        assert (self.written(pair), pair.settled()) == ([4, 5], [("d1", "ok", None)])

    def test_ideally_the_missing_part_is_noticed(self) -> None:
        pair = self.pair(IDEAL, ret=0, first=2, late_s=None)
        pair.run(1)
        assert pair.settled() == [("d1", "failed", "wrong or missing bytes in 1 of 3 blocks")]
        assert pair.reports_of("D0")[0][3] == [6]

    def test_ideally_late_bytes_are_refused(self) -> None:
        pair = self.pair(IDEAL, ret=-1, first=0, late_s=5)
        pair.run(10)
        assert self.written(pair) == []

    def test_ideally_bytes_that_follow_in_time_count(self) -> None:
        pair = self.pair(IDEAL, ret=0, first=3, late_s=0.1)
        pair.run(1)
        assert pair.settled() == [("d1", "ok", None)]

    def test_a_write_that_is_delivered_twice_counts_once(self) -> None:
        pair = Pair(IDEAL)

        def part_twice(envelope: Envelope) -> list[Envelope]:
            part = replace(envelope, payload=replace(envelope.payload, lands=slice(0, 2), returns=False))
            return [part, part, replace(envelope, payload=replace(envelope.payload, lands=slice(0, 0)))]

        pair.wire.transforms["write.data"] = part_twice
        pair.finish([1, 3, 5])
        pair.pull()
        pair.run(1)
        assert pair.settled() == [("d1", "failed", "wrong or missing bytes in 1 of 3 blocks")]


class TestAnAddressThatComesAliveLate:
    def test_what_was_sent_to_it_is_delivered_then(self) -> None:
        pair = Pair()
        pair.bus.silence("P0/mooncake/0")
        pair.finish()
        pair.pull()
        pair.run(60)
        assert pair.settled() == []
        pair.bus.listen("P0/mooncake/0", pair.p._receive, refused=pair.p._refused)
        pair.run(1)
        assert pair.settled() == [("d1", "ok", None)]

    def test_unless_the_pull_has_ended_by_then(self) -> None:
        pair = Pair()
        pair.bus.silence("P0/mooncake/0")
        pair.pull()
        pair.run(600)
        assert pair.settled() == [("d1", "failed", NO_REPLY)]
        pair.bus.listen("P0/mooncake/0", pair.p._receive, refused=pair.p._refused)
        pair.run(1)
        assert producer_of(pair).entries == {}


def test_a_stalled_loop_finds_the_request_expired() -> None:
    """Its bookkeeping comes first, then the poll, then those who wait for the request."""
    pair = Pair()
    pair.pull()
    pair.run(1)
    pair.announce()
    pair.p.stall_sender(600 * 10**9)
    pair.finish(announce=False)
    pair.run(500)
    output = pair.p.get_finished(())
    assert output is not None
    assert output.finished_sending == ["p1"]
    pair.run(200)
    assert pair.settled()[0][1:] == ("failed", NO_REPLY)


def test_a_reply_that_nobody_waits_for_is_dropped() -> None:
    pair = Pair()
    pair.wire.delays_s["pull.reply"] = 600
    pair.finish()
    pair.pull()
    pair.run()
    assert pair.settled() == [("d1", "failed", NO_REPLY)]
