"""Every way in which a pull can fail, in each generation, and replies that nobody has asked for."""

from dataclasses import replace

import pytest

from kvreplay.connectors.mooncake.config import MooncakeConfig
from kvreplay.connectors.mooncake.structs import (
    MooncakeXferResponse,
    MooncakeXferResponseStatus,
)
from kvreplay.ids import NS_PER_S
from kvreplay.sim.envelope import Envelope
from tests.connectors.mooncake.pair import GENERATIONS, Pair, behaviour, request_for

Reported = tuple[list[str], list[str], list[int]]
"""finished_recving, failed_recving, invalid_block_ids"""

NOT_READY = "Timeout waiting for P side ready."
NO_REPLY = "transfer failed: Resource temporarily unavailable"
OMITTED = "peer finished without reporting a transfer result"
BLOCKS = [4, 5, 6]
FAILED: Reported = (["d1"], [], BLOCKS)


def with_status(status: MooncakeXferResponseStatus, message: str | None = None) -> MooncakeXferResponse:
    return MooncakeXferResponse(status, err_msg=message)


def dropped(envelope: Envelope) -> list[Envelope]:
    return []


class TestFailures:
    """Reports of the consumer as (finished_recving, failed_recving, invalid_block_ids), and its failed receives."""

    def assert_outcome(
        self,
        pair: Pair,
        generation: str,
        *,
        seconds: float,
        cause: str,
        silent_count: int = 1,
        expected: Reported = FAILED,
    ) -> None:
        assert pair.settled() == [("d1", "failed", cause)]
        if generation == "silent":
            assert pair.reports_of("D0") == []
            assert pair.d.stats.num_failed_recvs == silent_count
        else:
            assert pair.reports_of("D0") == [(seconds, *expected)]
            assert pair.d.stats.num_failed_recvs == 1
        assert pair.d.failure_reason("d1") == cause

    @pytest.mark.parametrize("generation", GENERATIONS)
    def test_f1_f8_never_ready(self, generation: str) -> None:
        pair = Pair(behaviour(mooncake_failure=generation))
        pair.pull()
        pair.run()
        self.assert_outcome(pair, generation, seconds=480.0, cause=NOT_READY, silent_count=0)
        assert pair.p.producer is not None
        assert list(pair.p.producer.entries) == ["X1"], "the placeholder stays for ever"

    @pytest.mark.parametrize("generation", GENERATIONS)
    def test_f1_engine_write_fails(self, generation: str) -> None:
        pair = Pair(behaviour(mooncake_failure=generation))
        pair.wire.transforms["write.data"] = lambda envelope: [replace(envelope, write_result=-1)]
        pair.finish()
        pair.pull()
        pair.run()
        cause = "Mooncake transfer engine returned -1"
        self.assert_outcome(pair, generation, seconds=0.0, cause=cause, silent_count=0)
        assert pair.d_memory.blocks == {}
        assert pair.p.stats.num_failed_transfers == 1
        assert pair.reports_of("P0") == [(480.0, ["p1"], [], [])], "the blocks are held until they expire"
        assert [(event.status, event.cause) for event in pair.events("send.finished")] == [("failed", cause)]

    @pytest.mark.parametrize(
        ("have", "cause"), [([[1, 2]], "P num blocks less than D"), ([[1, 2, 3], [4]], "KV group count mismatch")]
    )
    def test_f1_blocks_do_not_fit(self, have: list[list[int]], cause: str) -> None:
        pair = Pair()
        pair.finish(*have)
        pair.pull()
        pair.run(1)
        self.assert_outcome(pair, "settle", seconds=0.0, cause=cause)
        assert pair.events("send.started") == []

    def test_f1_messages_of_one_batch_are_joined(self) -> None:
        pair = Pair()
        pair.wire.transforms["write.data"] = lambda envelope: [replace(envelope, write_result=5)]
        pair.finish([1], p_req_id="p1", transfer_id="X1")
        pair.finish([2], p_req_id="p2", transfer_id="X2")
        pair.pull(request_for("d1", blocks=[[4, 5]]), request_for("d2", blocks=[[6]]))
        pair.run(1)
        cause = "P num blocks less than D; Mooncake transfer engine returned 5"
        assert pair.settled() == [("d1", "failed", cause), ("d2", "failed", cause)]

    @pytest.mark.parametrize("generation", GENERATIONS)
    def test_f2_error_reply(self, generation: str) -> None:
        pair = Pair(behaviour(mooncake_failure=generation))
        error = with_status(MooncakeXferResponseStatus.ERROR)
        pair.wire.transforms["pull.reply"] = lambda envelope: [replace(envelope, payload=error)]
        pair.finish()
        pair.pull()
        pair.run()
        self.assert_outcome(pair, generation, seconds=0.0, cause="transfer error")

    @pytest.mark.parametrize("generation", GENERATIONS)
    def test_f2_error_after_continue(self, generation: str) -> None:
        """Only #50984 itself takes back what had been received."""
        pair = Pair(behaviour(mooncake_failure=generation))
        error = with_status(MooncakeXferResponseStatus.ERROR, "forced")
        pair.wire.transforms["pull.reply"] = lambda envelope: (
            [envelope] if envelope.reply_index == 0 else [replace(envelope, payload=error)]
        )
        pair.pull(request_for("d1", blocks=[[4]]), request_for("d2", blocks=[[5]]))
        pair.finish([1])
        pair.run(1)
        pair.finish([2], p_req_id="p2", transfer_id="X2")
        pair.run(1)
        later: dict[str, list[tuple[float, list[str], list[str], list[int]]]] = {
            "silent": [],
            "report": [(1.0, ["d1", "d2"], [], [4, 5])],
            "settle": [(1.0, ["d2"], [], [5])],
        }
        assert pair.reports_of("D0") == [(0.0, ["d1"], [], []), *later[generation]]
        assert pair.d.stats.num_failed_recvs == {"silent": 1, "report": 2, "settle": 1}[generation]

    @pytest.mark.parametrize("generation", GENERATIONS)
    def test_f3_f9_lost_reply(self, generation: str) -> None:
        pair = Pair(behaviour(mooncake_failure=generation))
        pair.wire.transforms["pull.reply"] = dropped
        pair.finish()
        pair.pull()
        pair.run()
        self.assert_outcome(pair, generation, seconds=540.0, cause=NO_REPLY)
        assert pair.reports_of("P0") == [(0.0, ["p1"], [], [])], "the producer knows nothing of it"

    @pytest.mark.parametrize(
        ("payload", "cause"),
        [
            (
                b"\xc1",
                "transfer failed: MessagePack data is malformed: invalid opcode '\\xc1' (byte 0)",
            ),
            (b"\x81\xa6status\x09", "transfer failed: Invalid enum value 9 - at `$.status`"),
            (MooncakeXferResponse(9), "transfer failed: Invalid enum value 9 - at `$.status`"),  # type: ignore[arg-type]
        ],
    )
    def test_f3_undecodable_reply(self, payload: object, cause: str) -> None:
        pair = Pair()
        pair.wire.transforms["pull.reply"] = lambda envelope: [replace(envelope, payload=payload)]
        pair.finish()
        pair.pull()
        pair.run()
        self.assert_outcome(pair, "settle", seconds=0.0, cause=cause)

    def test_f3_timeout_after_continue_fails_the_rest(self) -> None:
        pair = Pair()
        pair.wire.transforms["pull.reply"] = lambda envelope: [envelope] if envelope.reply_index == 0 else []
        pair.pull(request_for("d1", blocks=[[4]]), request_for("d2", blocks=[[5]]))
        pair.finish([1])
        pair.run(10)
        pair.finish([2], p_req_id="p2", transfer_id="X2")
        pair.run()
        assert pair.settled() == [("d1", "ok", None), ("d2", "failed", NO_REPLY)]
        assert pair.reports_of("D0") == [(0.0, ["d1"], [], []), (540.0, ["d2"], [], [5])]

    @pytest.mark.parametrize("generation", GENERATIONS)
    def test_f4_bootstrap_refuses(self, generation: str) -> None:
        pair = Pair(behaviour(mooncake_failure=generation))
        pair.pull(request_for("d1", bootstrap="http://nowhere:8998"))
        pair.run()
        cause = "remote engine_id P0#0 not found from bootstrap server http://nowhere:8998"
        self.assert_outcome(pair, generation, seconds=0.2, cause=cause, silent_count=0)
        asked = [(event.num_tokens, event.time_ns / NS_PER_S) for event in pair.events("bootstrap.queried")]
        assert asked == [(1, 0.0), (2, 0.1), (3, 0.2)]

    @pytest.mark.parametrize("generation", GENERATIONS)
    def test_f5_finish_omits_a_request(self, generation: str) -> None:
        pair = Pair(behaviour(mooncake_failure=generation))
        finish = with_status(MooncakeXferResponseStatus.FINISH)
        pair.wire.transforms["pull.reply"] = lambda envelope: [replace(envelope, payload=finish)]
        pair.finish()
        pair.pull()
        pair.run()
        if generation == "settle":
            self.assert_outcome(pair, generation, seconds=0.0, cause=OMITTED)
        else:
            assert (pair.settled(), pair.reports_of("D0"), pair.d.stats.num_failed_recvs) == ([], [], 0)

    def test_f5_a_request_that_expires_during_another_write_is_omitted(self) -> None:
        pair = Pair(config=MooncakeConfig(abort_request_timeout=1, receive_timeout=10))
        pair.wire.delays_s["write.done"] = 1.8
        pair.announce("p2", "X2")
        pair.finish([1])
        pair.pull(request_for("d1", blocks=[[4]]), request_for("d2", blocks=[[5]]))
        pair.run(0.1)
        pair.finish([2], p_req_id="p2", transfer_id="X2", announce=False)
        pair.run()
        assert pair.settled() == [("d1", "ok", None), ("d2", "failed", OMITTED)]
        assert pair.reports_of("P0") == [(1.1, ["p2"], [], []), (1.8, ["p1"], [], [])]
        assert pair.p.stats.num_kv_expired_reqs == 1

    @pytest.mark.parametrize("generation", GENERATIONS)
    def test_f7_release_only_pull_fails(self, generation: str) -> None:
        pair = Pair(behaviour(mooncake_failure=generation))
        pair.pull(request_for("d1", blocks=[]))
        pair.run()
        self.assert_outcome(pair, "silent", seconds=0, cause=NOT_READY, silent_count=generation != "silent")

    @pytest.mark.parametrize("blocks", [[], [[]]])
    @pytest.mark.parametrize("generation", GENERATIONS)
    def test_release_only_pull_succeeds(self, generation: str, blocks: list[list[int]]) -> None:
        """Before 0.33 the consumer reported a request that its scheduler does not wait for."""
        pair = Pair(behaviour(mooncake_failure=generation))
        pair.finish()
        pair.pull(request_for("d1", blocks=blocks))
        pair.run()
        assert pair.reports_of("P0") == [(0.0, ["p1"], [], [])]
        assert pair.reports_of("D0") == ([] if generation == "settle" else [(0.0, ["d1"], [], [])])
        assert pair.events("send.started") == []

    def test_f9_producer_dies(self) -> None:
        pair = Pair()
        pair.announce()
        pair.pull()
        pair.run(10)
        pair.p.shutdown()
        pair.run()
        self.assert_outcome(pair, "settle", seconds=540.0, cause=NO_REPLY)

    def test_f10_nobody_pulls(self) -> None:
        pair = Pair()
        pair.finish()
        pair.run()
        assert pair.reports == [("P0", 480.0, ["p1"], [], [])]
        (expired,) = pair.events("send.expired")
        assert (expired.request_id, expired.transfer_id, expired.num_blocks) == ("p1", "X1", 3)
        assert expired.time_ns == 480 * NS_PER_S + 1, "a poll at the very instant finds it not expired"

    def test_f11_pull_after_expiry(self) -> None:
        pair = Pair()
        pair.finish()
        pair.run(481)
        pair.pull()
        pair.run()
        self.assert_outcome(pair, "settle", seconds=961.0, cause=NOT_READY)
        assert pair.p.producer is not None
        assert list(pair.p.producer.entries) == ["X1"]

    def test_f8_producer_drops_a_request_that_is_waited_for(self) -> None:
        pair = Pair()
        pair.announce()
        pair.pull()
        pair.run(5)
        pair.drop("X1")
        pair.run(5)
        pair.finish(p_req_id="p2")
        pair.run()
        self.assert_outcome(pair, "settle", seconds=480.0, cause=NOT_READY)
        assert pair.reports_of("P0") == [(490.0, ["p2"], [], [])], "the old waiter is not woken by a new request"

    def test_f13_a_drop_of_an_unknown_transfer_loses_those_after_it(self) -> None:
        pair = Pair()
        pair.announce()
        pair.drop("unknown", "X1")
        assert pair.p.producer is not None
        assert list(pair.p.producer.entries) == ["X1"]

    def test_f13_a_finish_of_an_unknown_transfer_loses_those_after_it(self) -> None:
        pair = Pair()
        pair.announce("p2", "X2")
        pair.finish(announce=False)
        pair.pull()
        pair.run(1)
        assert pair.reports == []

    @pytest.mark.parametrize(("num_groups", "failed", "invalid"), [(1, [], [4, 5]), (2, ["d1"], [])])
    def test_several_groups_report_the_request(self, num_groups: int, failed: list[str], invalid: list[int]) -> None:
        pair = Pair(num_groups=num_groups)
        pair.pull(request_for("d1", blocks=[[4], [5]][:num_groups] if num_groups == 2 else [[4, 5]]))
        pair.run()
        assert pair.reports_of("D0") == [(480.0, ["d1"], failed, invalid)]

    def test_before_0_33_several_groups_report_blocks(self) -> None:
        """Which a scheduler that takes only requests from such a model does not survive."""
        pair = Pair(behaviour(mooncake_failure="report"), num_groups=2)
        pair.pull(request_for("d1", blocks=[[4], [5]]))
        pair.run()
        assert pair.reports_of("D0") == [(480.0, ["d1"], [], [4, 5])]

    def test_a_null_transfer_id_is_refused_by_the_producer(self) -> None:
        pair = Pair()
        request = request_for("d1")
        request.transfer_id = None  # type: ignore[assignment]
        pair.pull(request)
        pair.run()
        cause = "Expected `str`, got `None` - at `$.req_blocks[...][0]`"
        self.assert_outcome(pair, "settle", seconds=0.0, cause=cause)


class TestUnaskedReplies:
    @pytest.mark.parametrize("generation", GENERATIONS)
    def test_an_unknown_id(self, generation: str) -> None:
        pair = Pair(behaviour(mooncake_failure=generation))

        def name_stranger(envelope: Envelope) -> list[Envelope]:
            reply = MooncakeXferResponse(MooncakeXferResponseStatus.FINISH, ok_reqs=["stranger", "d1"])
            return [replace(envelope, payload=reply)]

        pair.wire.transforms["pull.reply"] = name_stranger
        pair.finish()
        pair.pull()
        pair.run()
        expected: dict[str, list[tuple[float, list[str], list[str], list[int]]]] = {
            "silent": [],
            "report": [(0.0, ["d1"], [], BLOCKS)],
            "settle": [(0.0, ["d1"], [], [])],
        }
        assert pair.reports_of("D0") == expected[generation]
        if generation != "settle":
            assert pair.settled() == [("d1", "failed", "transfer failed: 'stranger'")]

    def test_a_result_named_twice_counts_once(self) -> None:
        pair = Pair()
        again = MooncakeXferResponse(MooncakeXferResponseStatus.CONTINUE, ok_reqs=["d1"])
        pair.wire.transforms["pull.reply"] = lambda envelope: [
            replace(envelope, payload=again),
            replace(envelope, payload=again),
            envelope,
            envelope,
        ]
        pair.finish()
        pair.pull()
        pair.run()
        assert pair.settled() == [("d1", "ok", None)]
        assert pair.reports_of("D0") == [(0.0, ["d1"], [], [])]

    def test_in_both_lists_the_error_wins(self) -> None:
        pair = Pair()
        both = MooncakeXferResponse(MooncakeXferResponseStatus.FINISH, ok_reqs=["d1"], err_reqs=["d1"])
        pair.wire.transforms["pull.reply"] = lambda envelope: [replace(envelope, payload=both)]
        pair.finish()
        pair.pull()
        pair.run()
        assert pair.settled() == [("d1", "failed", "unknown error")]
