"""A client that goes away: while its request is queued, loading or running. Times as in test_pulls."""

from pathlib import Path

import pytest

from kvreplay.events import DETAIL_BLOCKS
from kvreplay.verdict.exit_status import ExitStatus
from tests.scenarios.stage import judge, pair, play, request, role, single, workload

ONE = workload(request("a"))
TWO = workload(request("a"), request("b"))


class TestWhileQueued:
    """D learns of the abort as the request arrives, and asks P for nothing: that frees P's blocks."""

    def test_a_pull_without_blocks_frees_the_producers(self) -> None:
        played = play(pair(), ONE, "abort:when=queued")
        assert played.ends() == {"a": ("aborted", "D0", 1)}
        assert played.log("pull.sent", "pull.settled", columns=["num_blocks", "status"]) == [
            (3, "pull.sent", "D0", "a", 0, None),
            (12, "pull.settled", "D0", "a", None, "ok"),
        ]
        assert played.log("block.freed") == [(11, "block.freed", "P0", "a")]
        assert played.num_free("P0") == played.num_free("D0") == 32

    @pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
    def test_nobody_else_notices(self, behaviour: str) -> None:
        played = play(pair(), TWO, "abort:when=queued,request=a", behaviour=behaviour)
        assert played.ends() == {"a": ("aborted", "D0", 1), "b": ("finished", "D0", 46)}
        assert played.violations == []

    @pytest.mark.parametrize("behaviour", ["pre-50984", "post-50984"])
    def test_before_0_33_the_success_of_that_pull_kills_the_engine(self, behaviour: str, tmp_path: Path) -> None:
        """Both are pulled at once; at 15 D hears that a, which it has forgotten, is there."""
        played = play(pair(), TWO, "abort:when=queued,request=a", behaviour=behaviour)
        (crash,) = played.of("engine.crashed")
        assert (crash.time_ns, crash.instance, crash.status) == (15_000_000, "D0", "AssertionError")
        assert crash.cause == "finished_recving of unknown request a"
        assert played.ends()["b"] == ("failed", "D0", 15)
        summary = judge(tmp_path, pair(), TWO, "abort:when=queued,request=a", behaviour=behaviour)
        assert summary.exit_status == ExitStatus.CRASHED
        assert [(crash.instance, crash.exception) for crash in summary.crashes] == [("D0", "AssertionError")]

    def test_before_the_engine_has_taken_it_in(self) -> None:
        """b and its abort arrive at 18 and 21, in a's first step: both are taken in when that ends."""
        later = workload(request("a", output_tokens=20), request("b", 17), aborts=[("b", 20)])
        played = play(pair(), later)
        assert played.ends() == {"a": ("finished", "D0", 216), "b": ("aborted", "D0", 26)}
        assert played.of("lookup", instance="D0", request_id="b") == []

    def test_while_every_slot_is_taken(self) -> None:
        config = pair(decode=role(max_num_seqs=1))
        later = workload(request("a", output_tokens=20), request("b", 17), aborts=[("b", 100)])
        played = play(config, later)
        assert played.ends() == {"a": ("finished", "D0", 216), "b": ("aborted", "D0", 106)}


class TestWhileLoading:
    def test_its_blocks_come_back_with_the_load(self) -> None:
        played = play(pair(), ONE, "abort")
        assert played.ends() == {"a": ("aborted", "D0", 4)}
        assert played.log("block.freed", instance="D0") == [(15, "block.freed", "D0", "a")]
        assert played.num_free("P0") == played.num_free("D0") == 32

    def test_or_with_its_failure(self) -> None:
        played = play(pair(), ONE, "abort", "timeout")
        assert played.ends() == {"a": ("aborted", "D0", 4)}
        assert played.log("block.freed", instance="D0") == [(540_003, "block.freed", "D0", "a")]

    def test_before_50984_never_if_the_load_fails(self, tmp_path: Path) -> None:
        """The client is gone, the request counts as aborted, and two blocks are lost for the life of the process."""
        played = play(pair(), ONE, "abort", "timeout", behaviour="pre-50984")
        assert played.ends() == {"a": ("aborted", "D0", 4)}
        assert played.num_free("D0") == 30
        assert [event.cause for event in played.violations] == ["2 blocks still held at the end"]
        summary = judge(tmp_path, pair(), ONE, "abort", "timeout", behaviour="pre-50984")
        assert summary.exit_status == ExitStatus.VIOLATED

    def test_between_the_report_and_its_promotion(self) -> None:
        """D hears of the load at 15 and of the abort at 15.5: there is nothing to wait for any more."""
        played = play(pair(), workload(request("a"), aborts=[("a", 14.5)]))
        assert played.ends() == {"a": ("aborted", "D0", 16)}
        assert played.log("block.freed", instance="D0") == [(16, "block.freed", "D0", "a")]


class TestWhileRunning:
    def test_the_step_in_progress_loses_its_token(self) -> None:
        """Its first token is out at 26, the abort there at 27, applied at 36."""
        played = play(pair(), ONE, "abort:when=running")
        (aborted,) = (event for event in played.of("request.aborted") if event.instance == "D0")
        assert (aborted.time_ns, aborted.num_tokens) == (36_000_000, 1)

    def test_its_blocks_are_hashed_as_far_as_they_are_full(self) -> None:
        """8 prompt tokens of 10 computed: the same prompt once more hits one block, the last must be computed."""
        text = "same"
        again = workload(request("a", text=text, output_tokens=9), request("b", 100, text=text), aborts=[("a", 24)])
        played = play(single(), again)
        assert played.ends()["a"] == ("aborted", "E0", 31)
        assert [line for line in played.story("b", detail=DETAIL_BLOCKS) if "scheduled" in line] == [
            "101 E0 b request.scheduled tokens=4 blocks=4"
        ]

    def test_twice_is_once(self) -> None:
        played = play(single(), workload(request("a", output_tokens=20), aborts=[("a", 15), ("a", 16)]))
        assert len([event for event in played.of("request.aborted") if event.instance == "E0"]) == 1

    def test_after_the_end_it_is_nothing(self) -> None:
        played = play(single(), workload(request("a"), aborts=[("a", 50)]))
        assert played.ends() == {"a": ("finished", "E0", 31)}
        assert played.of("request.aborted") == []

    def test_the_others_get_what_it_had(self) -> None:
        """17 usable blocks; a and b grow until b would be preempted, but a's client leaves in time."""
        config = single(role(num_gpu_blocks=18))
        both = (request("a", prompt_tokens=30, output_tokens=30), request("b", prompt_tokens=30, output_tokens=30))
        assert play(config, workload(*both)).of("request.preempted")
        assert not play(config, workload(*both, aborts=[("a", 20)])).of("request.preempted")
