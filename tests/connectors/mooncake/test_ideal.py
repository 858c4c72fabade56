"""What profile `ideal` changes: wrong bytes are noticed, late writes are refused, every wait ends."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvreplay.behaviour import profile
from kvreplay.connectors.mooncake.structs import (
    BootstrapAnswer,
    MooncakeXferResponse,
    MooncakeXferResponseStatus,
    WriteData,
)
from kvreplay.sim.envelope import Corruption, Delivery, Envelope
from tests.connectors.mooncake.pair import Latency, Pair, behaviour, request_for

BLOCKS = [4, 5, 6]


def corrupted(envelope: Envelope, *blocks: int | None) -> Envelope:
    """A write of which these blocks arrive with other bytes; None: one that is drawn."""
    corruptions = tuple(
        Corruption(draw=12345 + index, fault_spec="corrupt", block=block, fault_handle=7)
        for index, block in enumerate(blocks)
    )
    return replace(envelope, corruptions=corruptions)


class TestChecksum:
    def test_without_it_wrong_bytes_are_taken_for_right(self) -> None:
        pair = Pair()
        pair.wire.transforms["write.data"] = lambda envelope: [corrupted(envelope, 1)]
        pair.finish()
        pair.pull()
        pair.run()
        assert pair.reports_of("D0") == [(0.0, ["d1"], [], [])]
        assert all(wrong != right for wrong, right in zip(pair.d_memory.block(5), pair.p_memory.block(2), strict=True))
        assert pair.p_memory.block(2) == [2000, 2001, 2002, 2003], "the source keeps the truth"
        assert {block: provenance.fault_handle for block, provenance in pair.d_memory.corrupted.items()} == {5: 7}

    @pytest.mark.parametrize(("num_groups", "failed", "invalid"), [(1, [], [5, 6]), (2, ["d1"], [])])
    def test_bad_blocks_fail_the_load(self, num_groups: int, failed: list[str], invalid: list[int]) -> None:
        pair = Pair(behaviour(transfer_integrity="checksum"), num_groups=num_groups)
        pair.wire.transforms["write.data"] = lambda envelope: [corrupted(envelope, 2, 1)]
        pair.finish(*[[1, 2, 3]] * num_groups)
        pair.pull(request_for("d1", blocks=[BLOCKS, [7, 8, 9]][:num_groups]))
        pair.run()
        assert pair.reports_of("D0") == [(0.0, ["d1"], failed, invalid)]
        assert pair.settled() == [("d1", "failed", f"wrong or missing bytes in 2 of {3 * num_groups} blocks")]
        assert pair.d_memory.corrupted == {}

    def test_only_its_own_request_fails(self) -> None:
        pair = Pair(behaviour(transfer_integrity="checksum"))
        pair.wire.transforms["write.data"] = lambda envelope: [corrupted(envelope, 0)]
        for index in (1, 2):
            pair.finish([index], p_req_id=f"p{index}", transfer_id=f"X{index}")
        pair.pull(request_for("d1", blocks=[[4]]), request_for("d2", blocks=[[5]]))
        pair.run()
        assert [(req_id, status) for req_id, status, _ in pair.settled()] == [("d1", "failed"), ("d2", "ok")]

    def test_blocks_that_never_came_are_bad(self) -> None:
        pair = Pair(behaviour(transfer_integrity="checksum"))

        def halve(envelope: Envelope) -> list[Envelope]:
            data: WriteData = envelope.payload
            (segment,) = data.segments
            short = segment._replace(source_block_ids=segment.source_block_ids[:1], block_ids=segment.block_ids[:1])
            return [replace(envelope, payload=replace(data, segments=(short,), num_blocks=1))]

        pair.wire.transforms["write.data"] = halve
        pair.finish()
        pair.pull()
        pair.run()
        assert pair.reports_of("D0") == [(0.0, ["d1"], [], [5, 6])]

    @pytest.mark.parametrize("generation", ["silent", "report"])
    def test_earlier_generations_fail_in_their_own_way(self, generation: str) -> None:
        pair = Pair(behaviour(transfer_integrity="checksum", mooncake_failure=generation))
        pair.wire.transforms["write.data"] = lambda envelope: [corrupted(envelope, None)]
        pair.finish()
        pair.pull()
        pair.run()
        assert [status for _, status, _ in pair.settled()] == ["failed"]
        assert [report[1] for report in pair.reports_of("D0")] == ([] if generation == "silent" else [["d1"]])


class TestFence:
    def test_a_write_whose_pull_is_over_is_refused(self) -> None:
        pair = Pair(behaviour(transfer_fence="attempt"))
        pair.wire.transforms["pull.reply"] = lambda envelope: []
        pair.finish()
        pair.pull()
        pair.run(541)
        write = next(envelope for envelope in pair.wire.sent if envelope.kind == "write.data")
        pair.d_memory.blocks.clear()
        pair.bus.deliver(write)
        assert pair.d_memory.blocks == {}

    @pytest.mark.parametrize(("fence", "freed_at_s"), [("none", 1.0), ("attempt", 5.0)])
    def test_blocks_that_another_write_still_reads_are_not_freed(self, fence: str, freed_at_s: float) -> None:
        pair = Pair(behaviour(transfer_fence=fence))
        pair.wire.transforms["pull.request"] = lambda envelope: [envelope, envelope]
        pair.wire.delays_s["write.data"] = [1, 5]
        pair.finish()
        pair.pull()
        pair.run()
        assert pair.reports_of("P0") == [(freed_at_s, ["p1"], [], [])]
        assert pair.settled() == [("d1", "ok", None)]


class TestBoundedWaits:
    def test_a_producer_that_dies_is_noticed(self) -> None:
        pair = Pair(behaviour(pull_wait="bounded"), network=Latency())
        pair.pull()
        pair.run(10)
        pair.p.shutdown()
        pair.run()
        assert pair.settled() == [("d1", "failed", "transfer failed: connection closed by peer")]
        assert pair.reports_of("D0")[0][0] == pytest.approx(10.001)

    def test_a_dead_address_is_asked_once_and_forgotten(self) -> None:
        pair = Pair(behaviour(pull_wait="bounded"))
        pair.finish()
        pair.pull()
        pair.run()
        pair.p.shutdown()
        pair.pull(request_for("d2"))
        pair.run()
        assert pair.settled()[1:] == [("d2", "failed", "transfer failed: connection refused")]
        pair.pull(request_for("d3"))
        pair.run()
        cause = "remote engine_id P0#0 not found from bootstrap server http://P0:8998"
        assert pair.settled()[2:] == [("d3", "failed", cause)]

    def test_a_consumer_that_dies_frees_the_producers_task(self) -> None:
        pair = Pair(behaviour(pull_wait="bounded", mooncake_placeholder="expire"))
        pair.pull()
        pair.run(1)
        assert pair.p.producer is not None
        assert list(pair.p.producer.entries) == ["X1"]
        pair.d.shutdown()
        pair.run(1)
        assert pair.p.producer.entries == {}
        assert pair.loop.num_live == 0

    def test_replies_without_results_do_not_prolong_the_wait(self) -> None:
        pair = Pair(behaviour(pull_wait="bounded"))
        nothing = MooncakeXferResponse(MooncakeXferResponseStatus.CONTINUE)
        pair.wire.transforms["pull.reply"] = lambda envelope: [replace(envelope, payload=nothing)]
        pair.announce()
        pair.pull()
        pair.run(300)
        pair.finish(announce=False)
        pair.run()
        assert [report[0] for report in pair.reports_of("D0")] == [540.0]

    def test_a_missing_rank_fails_and_is_asked_for_again(self) -> None:
        pair = Pair(behaviour(mooncake_lost_pulls="fail"))
        body = b'{"0": {"engine_id": "P0#0", "worker_addr": {}}}'
        pair.wire.transforms["bootstrap.answer"] = lambda envelope: [
            replace(envelope, payload=BootstrapAnswer(body=body))
        ]
        pair.pull()
        pair.run()
        assert [status for _, status, _ in pair.settled()] == ["failed"]
        pair.wire.transforms.clear()
        pair.finish(p_req_id="p2", transfer_id="X2")
        pair.pull(request_for("d2"))
        pair.run()
        assert [status for _, status, _ in pair.settled()] == ["failed", "ok"]


Fate = st.sampled_from(
    ["as usual"] * 4 + ["drop", "twice", "late", "very late", "error", "omit", "garbage", "corrupt", "-1"]
)


@st.composite
def fates(draw: st.DrawFn) -> list[str]:
    return draw(st.lists(Fate, min_size=1, max_size=12))


def suffered(envelope: Envelope, fate: str) -> list[Delivery]:
    is_reply, is_write = envelope.kind == "pull.reply", envelope.kind == "write.data"
    delay_ns = {"late": 35, "very late": 600}.get(fate, 0) * 10**9
    match fate:
        case "drop":
            return []
        case "twice":
            return [Delivery(envelope), Delivery(envelope, 50 * 10**9)]
        case "error" if is_reply:
            error = MooncakeXferResponse(MooncakeXferResponseStatus.ERROR, err_msg="forced")
            envelope = replace(envelope, payload=error)
        case "omit" if is_reply:
            nothing = MooncakeXferResponse(MooncakeXferResponseStatus.FINISH)
            envelope = replace(envelope, payload=nothing)
        case "garbage" if is_reply or envelope.kind == "pull.request":
            envelope = replace(envelope, payload=b"\xc1")
        case "corrupt" if is_write:
            envelope = corrupted(envelope, None)
        case "-1" if is_write:
            envelope = replace(envelope, write_result=-1)
    return [Delivery(envelope, delay_ns)]


@settings(max_examples=150, deadline=None)
@given(fates=fates(), producer_crashes_s=st.none() | st.integers(0, 100), order=st.permutations(range(4)))
def test_under_any_faults_each_request_ends_once_and_what_succeeds_is_right(
    fates: list[str], producer_crashes_s: int | None, order: list[int]
) -> None:
    pair = Pair(profile("ideal"), network=Latency())
    remaining = iter(fates)
    pair.wire.intercept = lambda envelope, now_ns: suffered(  # type: ignore[method-assign]
        envelope, next(remaining, "as usual")
    )
    names = [f"d{index}" for index in range(4)]
    pair.pull(*(request_for(name, blocks=[[10 + index]]) for index, name in enumerate(names[:2])))
    pair.run(1)
    for index in order:
        if index == 3:
            pair.announce("p3", "X3")
            pair.drop("X3")
        else:
            pair.finish([1 + index], p_req_id=f"p{index}", transfer_id=f"X{index}")
        pair.run(5)
    pair.pull(*(request_for(name, blocks=[[12 + index]]) for index, name in enumerate(names[2:])))
    if producer_crashes_s is not None:
        pair.run(producer_crashes_s)
        pair.bus.cut("P0")
        pair.p.shutdown()
    pair.run()

    assert sorted(name for name, _, _ in pair.settled() if name) == names
    assert sorted(name for report in pair.reports_of("D0") for name in report[1]) == names
    for index, (name, status) in enumerate(sorted((name or "", status) for name, status, _ in pair.settled())):
        if status == "ok":
            assert pair.d_memory.block(10 + index) == pair.p_memory.block(1 + index), name
    assert pair.d_memory.in_doubt == []
    if producer_crashes_s is None:
        assert sorted(name for report in pair.reports_of("P0") for name in report[1]) == ["p0", "p1", "p2"]
        assert pair.p.producer is not None
        assert pair.p.producer.entries == {}
