"""The producer's half alone: its resources, its entries, and what it does to writes that come late."""

from dataclasses import replace

import pytest

from kvreplay.connectors.mooncake.config import MooncakeConfig
from kvreplay.connectors.mooncake.plan import HeadLayout, WriteSegment, make_plan
from kvreplay.connectors.mooncake.producer import Producer
from kvreplay.connectors.mooncake.ranks import Ranks
from kvreplay.connectors.mooncake.regions import Region
from kvreplay.connectors.mooncake.structs import MooncakeXferMetadata
from kvreplay.ids import NS_PER_S
from kvreplay.sim.envelope import Envelope
from tests.connectors.mooncake.pair import Latency, Pair, behaviour, request_for

NOT_READY = "Timeout waiting for P side ready."


def producer_of(pair: Pair) -> Producer:
    assert pair.p.producer is not None
    return pair.p.producer


def pulled_after(pair: Pair, seconds: float, *names: str) -> None:
    for name in names:
        pair.pull(request_for(name, blocks=[[4]]))
    pair.run(seconds)


class TestResources:
    def test_stuck_pulls_hold_all_tasks(self) -> None:
        """With 1 thread there are 2 tasks; a third pull waits in the queue, though its request is ready."""
        pair = Pair(config=MooncakeConfig(num_workers=1))
        pulled_after(pair, 1, "d1", "d2")
        pair.run(99)
        pair.finish([3], p_req_id="p3", transfer_id="X3")
        pulled_after(pair, 300, "d3")
        assert pair.reports == []
        pair.run(100)
        assert pair.reports_of("D0") == [(480.0, ["d1", "d2"], [], [4]), (480.0, ["d3"], [], [])]

    def test_a_pull_that_queues_for_too_long_finds_its_request_expired(self) -> None:
        pair = Pair(config=MooncakeConfig(num_workers=1))
        pair.finish([3], p_req_id="p3", transfer_id="X3")
        pair.run(0.001)
        pulled_after(pair, 0.001, "d1", "d2", "d3")
        pair.run()
        assert pair.reports_of("P0") == [(480.0, ["p3"], [], [])]
        # The consumer has given up by the time at which it would be told.
        assert pair.settled()[-1] == ("d3", "failed", "transfer failed: Resource temporarily unavailable")

    def test_twenty_tasks_and_ten_threads_by_default(self) -> None:
        pair = Pair()
        for index in range(25):
            pair.finish([1], p_req_id=f"p{index}", transfer_id=f"X{index}")
        pair.wire.delays_s["write.data"] = 1
        pulled_after(pair, 0.5, *(f"d{index}" for index in range(25)))
        assert pair.wire.kinds_sent().count("write.data") == 10
        pair.run(1)
        assert pair.wire.kinds_sent().count("write.data") == 20
        pair.run()
        assert pair.reports_of("D0")[-1][0] == 3.0
        assert len({event.request_id for event in pair.events("pull.settled")}) == 25


class TestEngineDeadline:
    def test_a_write_that_takes_too_long_fails_and_may_land_later(self) -> None:
        pair = Pair()
        pair.wire.delays_s["write.data"] = 31
        pair.finish()
        pair.pull()
        pair.run(30.5)
        assert pair.settled() == [("d1", "failed", "Mooncake transfer engine returned -1")]
        assert pair.d_memory.blocks == {}
        pair.run(1)
        assert sorted(pair.d_memory.blocks) == [(0, 4), (0, 5), (0, 6)]
        assert [(doubt.transfer_id, doubt.request_id) for doubt in pair.d_memory.in_doubt] == [("X1", "d1")]

    def test_bytes_buy_time(self) -> None:
        pair = Pair(config=MooncakeConfig(transfer_timeout=0), network=Latency())
        pair.wire.transforms["write.data"] = lambda envelope: []
        pair.finish()
        pair.pull()
        pair.run()
        (started,), (finished,) = pair.events("send.started"), pair.events("send.finished")
        assert finished.time_ns - started.time_ns == 3 * 4 * 8

    def test_a_fenced_write_is_taken_back(self) -> None:
        pair = Pair(behaviour(transfer_fence="attempt"))
        pair.wire.delays_s["write.data"] = 31
        pair.finish()
        pair.pull()
        pair.run()
        assert pair.d_memory.blocks == {}

    def test_the_source_is_read_when_the_write_lands(self) -> None:
        pair = Pair()
        pair.wire.delays_s["write.data"] = 1
        pair.finish()
        pair.pull()
        pair.run(0.5)
        pair.p_memory.blocks[0, 2] = [7, 7, 7, 7]
        pair.run()
        assert pair.d_memory.block(5) == [7, 7, 7, 7]

    def test_a_late_write_hits_whoever_owns_the_blocks(self) -> None:
        """The consumer gives up before the producer is ready, and nobody tells the producer."""
        pair = Pair(config=MooncakeConfig(abort_request_timeout=5, receive_timeout=1))
        pair.pull()
        pair.run(2)
        pair.d_memory.blocks[0, 5] = [9, 9, 9, 9]
        pair.finish()
        pair.run()
        assert pair.d_memory.block(5) == pair.p_memory.block(2)
        assert pair.reports_of("P0") == [(2.0, ["p1"], [], [])]
        assert pair.d_memory.in_doubt


class TestEntries:
    def test_states(self) -> None:
        pair = Pair()
        pair.pull()
        pair.run(1)
        entry = producer_of(pair).entries["X1"]
        assert (entry.p_req_id, entry.ready) == ("", False)
        pair.announce()
        assert (entry.p_req_id, entry.ready) == ("", False), "a placeholder stays nameless until it is ready"
        pair.wire.delays_s["write.data"] = 1
        pair.finish(announce=False)
        pair.run(0)
        assert (entry.p_req_id, entry.ready, entry.sending, entry.sent) == ("p1", True, 1, 0)
        pair.run()
        assert (entry.sending, entry.sent) == (0, 1)
        assert producer_of(pair).entries == {}

    def test_a_write_in_progress_keeps_the_blocks(self) -> None:
        pair = Pair(config=MooncakeConfig(abort_request_timeout=1, receive_timeout=100))
        pair.wire.delays_s["write.data"] = 20
        pair.finish()
        pair.pull()
        pair.run(10)
        assert pair.reports == []
        pair.run()
        assert pair.reports_of("P0") == [(20.0, ["p1"], [], [])]
        assert pair.p.stats.num_kv_expired_reqs == 0

    def test_blocks_expire_right_after_a_slow_write_has_failed(self) -> None:
        pair = Pair(config=MooncakeConfig(abort_request_timeout=1, receive_timeout=100))
        pair.wire.delays_s["write.data"] = 20
        pair.wire.transforms["write.data"] = lambda envelope: [replace(envelope, write_result=-1)]
        pair.finish()
        pair.pull()
        pair.run()
        assert pair.reports_of("P0") == [(20.0, ["p1"], [], [])]
        assert pair.p.stats.num_kv_expired_reqs == 1

    def test_f15_two_finished_requests_with_one_id(self) -> None:
        pair = Pair()
        pair.finish([1, 2, 3], p_req_id="p1")
        pair.finish([7, 8, 9], p_req_id="p2", announce=False)
        pair.pull()
        pair.run()
        assert pair.reports_of("P0") == [(0.0, ["p2"], [], [])], "the first one's blocks are never given back"
        assert pair.d_memory.block(4) == pair.p_memory.block(7)

    def test_a_dropped_request_that_was_ready_is_lost(self) -> None:
        pair = Pair()
        pair.finish()
        pair.drop("X1")
        pair.run()
        assert (pair.reports, producer_of(pair).entries) == ([], {})


class TestAnsweringDrops:
    def test_a_waiting_pull_is_told(self) -> None:
        pair = Pair(behaviour(mooncake_producer_drop="answer"))
        pair.announce()
        pair.pull(request_for("d1"), request_for("d2", blocks=[[7]]))
        pair.run(5)
        pair.drop("X1")
        pair.run(1)
        assert pair.reports_of("D0") == [(5.0, ["d1"], [], [4, 5, 6])]
        pair.finish([1], p_req_id="p2", transfer_id="X2")
        pair.run()
        assert pair.settled() == [("d1", "failed", "P dropped the request"), ("d2", "ok", None)]

    def test_so_is_one_that_comes_later(self) -> None:
        pair = Pair(behaviour(mooncake_producer_drop="answer", mooncake_unknown_transfer="accept"))
        pair.announce()
        pair.drop("unknown", "X1")
        pair.pull()
        pair.run()
        assert pair.reports_of("D0") == [(0.0, ["d1"], [], [4, 5, 6])]
        assert producer_of(pair).entries == {}

    def test_and_one_that_comes_after_expiry(self) -> None:
        pair = Pair(behaviour(mooncake_producer_drop="answer"))
        pair.finish()
        pair.run()
        pair.pull()
        pair.run()
        assert pair.reports_of("D0") == [(480.0, ["d1"], [], [4, 5, 6])]

    def test_a_new_request_of_that_id_counts(self) -> None:
        pair = Pair(behaviour(mooncake_producer_drop="answer"))
        pair.drop("X1")
        pair.finish()
        pair.pull()
        pair.run()
        assert pair.settled() == [("d1", "ok", None)]


class TestExpiringPlaceholders:
    def test_a_placeholder_goes_with_its_last_waiter(self) -> None:
        pair = Pair(behaviour(mooncake_placeholder="expire"))
        pair.pull()
        pair.run(10)
        pair.pull(request_for("d2", "X1"))
        pair.run(475)
        assert list(producer_of(pair).entries) == ["X1"]
        pair.run()
        assert producer_of(pair).entries == {}

    def test_one_that_was_announced_stays_for_its_request(self) -> None:
        pair = Pair(behaviour(mooncake_placeholder="expire"))
        pair.pull()
        pair.run(1)
        pair.announce()
        pair.run()
        pair.finish(announce=False)
        pair.run()
        assert pair.reports_of("P0") == [(960.0, ["p1"], [], [])]


class TestRefusals:
    @pytest.mark.parametrize(
        ("change", "status", "message"),
        [
            (
                {"remote_tp_size": 1, "remote_tp_rank": 3},
                "ERROR",
                "This D tp_rank 3 is not paired with P tp_rank 0; expected one of [0].",
            ),
            (
                {"registered_layer_names": ["model.layers.7.attn"]},
                "ERROR",
                "Mooncake producer registered layer has no matching consumer occurrence: "
                "model.layers.0.attn occurrence 0.",
            ),
            (
                {"registered_group_indices": [1]},
                "ERROR",
                "Mooncake registered group index mismatch for model.layers.0.attn: producer=0, consumer=1.",
            ),
            (
                {"kv_block_lens": [1024]},
                "ERROR",
                "Mooncake KV region length mismatch for homogeneous TP at region 0: local=32, remote=1024.",
            ),
            (
                {"kv_caches_base_addr": [], "layout_id": 255},
                "LAYOUT_MISS",
                "Mooncake KV layout 0xff from D0:17100 is not cached.",
            ),
        ],
    )
    def test_a_pull_that_does_not_fit(self, change: dict[str, object], status: str, message: str) -> None:
        pair = Pair()

        def edit(envelope: Envelope) -> list[Envelope]:
            pull: MooncakeXferMetadata = envelope.payload
            for name, value in change.items():
                setattr(pull, name, value)
            return [envelope]

        pair.wire.transforms["pull.request"] = edit
        pair.finish()
        pair.pull()
        pair.run(1)
        reply = next(envelope for envelope in pair.wire.sent if envelope.kind == "pull.reply")
        assert (reply.payload.status.name, reply.payload.err_msg) == (status, message)
        assert reply.request_ids == ("d1",)
        assert pair.settled() == [("d1", "failed", message)]

    def test_an_undecodable_pull(self) -> None:
        pair = Pair()
        pair.wire.transforms["pull.request"] = lambda envelope: [replace(envelope, payload=b"\xc1")]
        pair.pull()
        pair.run()
        cause = "MessagePack data is malformed: invalid opcode '\\xc1' (byte 0)"
        assert pair.settled() == [("d1", "failed", cause)]


def test_adjacent_blocks_are_one_descriptor_per_region() -> None:
    def count(source: list[int], target: list[int]) -> int:
        regions = [Region(f"model.layers.{layer}.attn", layer, 0, 512, 512) for layer in (0, 1)]
        plan = make_plan(list(zip(regions, regions, strict=True)), Ranks(), 0, 1, HeadLayout())
        segment = WriteSegment("d1", "X1", 0, source, target)
        assert len(list(plan.descriptors([segment]))) == plan.num_descriptors([segment])
        return plan.num_descriptors([segment])

    assert count([1, 2, 3], [4, 5, 6]) == 2
    assert count([1, 2, 4], [4, 5, 6]) == 4
    assert count([1, 2, 3], [6, 5, 4]) == 6


def test_statistics_have_vllms_names() -> None:
    pair = Pair(network=Latency())
    pair.finish()
    pair.pull()
    pair.run()
    assert pair.p.stats.drain().reduce() == {
        "Num successful transfers": 1,
        "Avg xfer time (ms)": 2.0,
        "P90 xfer time (ms)": 2.0,
        "Avg MB per transfer": 0.0,
        "Throughput (MB/s)": 0.046,
        "Avg number of descriptors": 1.0,
        "Num failed transfers": 0,
        "Num failed recvs": 0,
        "Num KV expired reqs": 0,
    }
    assert pair.p.stats.num_successful_transfers == 0
    assert pair.d.stats.reduce()["Num successful transfers"] == 0
    assert pair.loop.now_ns < NS_PER_S
