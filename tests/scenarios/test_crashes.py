"""An instance that dies, for ever or for a while, and what its peers make of it. Times as in test_pulls."""

from pathlib import Path

import pytest

from kvreplay.verdict.exit_status import ExitStatus
from tests.scenarios.stage import judge, pair, play, request, single, workload

ONE = workload(request("a"))
GONE = "transfer failed: connection closed by peer"
SILENCE = "transfer failed: Resource temporarily unavailable"


class TestProducer:
    """P dies at 5, in the middle of a's prefill; D has asked it for a's blocks."""

    def test_nobody_tells_the_consumer(self) -> None:
        played = play(pair(), ONE, "peer-crash:at=5ms")
        assert played.ends() == {"a": ("failed", "D0", 540_003)}
        assert played.log("request.failed", columns=["cause"]) == [
            (5, "request.failed", "P0", "a", "instance crashed"),
            (540_003, "request.failed", "D0", "a", SILENCE),
        ]

    def test_under_recompute_it_computes_the_prompt_itself(self) -> None:
        played = play(pair(), ONE, "peer-crash:at=5ms", recompute=True)
        assert played.ends() == {"a": ("finished", "D0", 540_034)}

    @pytest.mark.parametrize(("recompute", "end"), [(False, ("failed", "D0", 6)), (True, ("finished", "D0", 37))])
    def test_ideal_notices_at_once(self, recompute: bool, end: tuple[str, str, float]) -> None:
        played = play(pair(), ONE, "peer-crash:at=5ms", behaviour="ideal", recompute=recompute)
        assert played.ends() == {"a": end}
        assert played.of("pull.settled")[0].cause == GONE

    def test_before_50984_the_request_stalls_and_healing_does_not_help(self, tmp_path: Path) -> None:
        summary = judge(tmp_path, pair(), ONE, "peer-crash:at=5ms", behaviour="pre-50984")
        assert summary.exit_status == ExitStatus.STALLED
        assert (summary.requests.stalled, summary.requests.lost, summary.requests.held_up) == (1, 1, 0)

    def test_while_it_is_away_its_bootstrap_server_refuses(self) -> None:
        """b comes at 500: three queries, refused as they arrive, at 502, 603 and 704."""
        played = play(pair(), workload(request("b", 500)), "peer-crash:at=5ms,down=1s")
        assert played.ends() == {"b": ("failed", "D0", 704)}
        assert [event.num_tokens for event in played.of("bootstrap.queried")] == [1, 2, 3]

    def test_who_knows_its_address_already_waits_for_an_answer(self) -> None:
        """a has found the way; b's pull at 501 goes nowhere, silently."""
        played = play(pair(), workload(request("a"), request("b", 500)), "peer-crash:at=5ms,down=1s")
        assert played.ends()["b"] == ("failed", "D0", 540_501)
        assert played.of("bootstrap.queried", request_id="b") == []

    def test_it_comes_back_with_a_new_identity_and_serves(self) -> None:
        played = play(pair(), workload(request("a"), request("b", 2_000)), "peer-crash:at=5ms,down=1s")
        assert played.ends()["b"] == ("finished", "D0", 2_046)
        (node,) = (node for node in played.cluster.nodes if node.name == "P0")
        assert node.engine_id == "P0#1"

    @pytest.mark.parametrize(
        ("behaviour", "end"), [("vllm-0.33", ("failed", "D0", 542_001)), ("ideal", ("failed", "D0", 2_002))]
    )
    def test_under_the_same_identity_peers_go_on_to_its_old_ports(
        self, behaviour: str, end: tuple[str, str, float]
    ) -> None:
        """With a configured engine id D goes on with the address that it has cached: 540 s for each request. Ideally
        D forgets it once it gets no answer there, and the next request asks again."""
        comes_back = "engine.restart:at=500ms,down=1s,instance=P0,identity={}"
        three = workload(request("a"), request("b", 2_000), request("c", 600_000))
        ends = play(pair(), three, comes_back.format("same"), behaviour=behaviour).ends()
        assert ends["a"][0] == "finished"
        assert ends["b"] == end
        assert ends["c"][0] == ("finished" if behaviour == "ideal" else "failed")
        new = play(pair(), three, comes_back.format("new"), behaviour=behaviour)
        assert {kind for kind, _, _ in new.ends().values()} == {"finished"}

    def test_the_engine_id_stays_or_changes_and_the_ports_change(self) -> None:
        for identity, engine_id in (("same", "P0#0"), ("new", "P0#1")):
            played = play(pair(), ONE, f"engine.restart:at=500ms,down=1s,instance=P0,identity={identity}")
            (node,) = (node for node in played.cluster.nodes if node.name == "P0")
            assert (node.engine_id, node.incarnation) == (engine_id, 1)

    def test_a_crash_after_the_write_harms_nobody(self) -> None:
        """The bytes are at D at 12; P dies at 13.5, when it has told so: the reply was sent at 13."""
        played = play(pair(), ONE, "peer-crash:at=14500us")
        assert played.ends() == {"a": ("finished", "D0", 46)}

    def test_what_is_on_its_way_dies_with_it(self) -> None:
        """The write was sent at 11, P dies at 11.5: nothing arrives at 12."""
        played = play(pair(), ONE, "peer-crash:at=11500us")
        assert played.ends() == {"a": ("failed", "D0", 540_003)}
        assert played.of("send.finished") == []


class TestConsumer:
    """D dies at 20, in a's first step."""

    def test_its_clients_requests_fail(self) -> None:
        played = play(pair(), ONE, "peer-crash:at=20ms,instance=D0")
        assert played.ends() == {"a": ("failed", "D0", 20)}
        assert played.num_free("P0") == 32

    def test_who_comes_later_is_refused(self) -> None:
        played = play(pair(), workload(request("a"), request("b", 100)), "peer-crash:at=20ms,instance=D0")
        assert played.ends()["b"] == ("rejected", "D0", 101)
        assert played.log("request.finished") == [
            (11, "request.finished", "P0", "a"),
            (111, "request.finished", "P0", "b"),
        ]

    def test_the_producers_blocks_for_it_expire(self) -> None:
        """b's prefill is done at 111; nobody asks for it, and it goes 480 s later."""
        played = play(pair(), workload(request("a"), request("b", 100)), "peer-crash:at=20ms,instance=D0")
        (expired,) = played.of("send.expired")
        assert (expired.request_id, expired.num_blocks) == ("b", 2)
        assert expired.time_ns // 1_000_000 in (480_111, 480_112)
        assert played.num_free("P0") == 32

    def test_it_comes_back_empty(self) -> None:
        text = "same"
        again = workload(request("a", text=text), request("b", 1_000, text=text))
        played = play(pair(), again, "peer-crash:at=60ms,instance=D0,down=100ms")
        (lookup, *_) = played.of("lookup", instance="D0", request_id="b")
        assert lookup.num_tokens == 8, "nothing is cached any more"
        assert played.ends()["b"] == ("finished", "D0", 1_046)

    def test_a_death_before_the_pull_leaves_the_write_without_a_target(self) -> None:
        """D dies at 11.5, with the write on its way; P's engine is told and keeps the blocks until they expire."""
        played = play(pair(), ONE, "peer-crash:at=11500us,instance=D0")
        assert [event.status for event in played.of("send.finished")] == ["failed"]
        assert played.num_free("P0") == 32


class TestEngineDeath:
    def test_an_exception_in_a_step_is_a_crash(self, tmp_path: Path) -> None:
        """At 15 the step of 11 to 21 is doomed."""
        summary = judge(tmp_path, single(), ONE, "engine.step-raises:at=15ms")
        assert summary.exit_status == ExitStatus.CRASHED
        (crash,) = summary.crashes
        assert (crash.instance, crash.time_s, crash.exception) == ("E0", 0.021, "RuntimeError")
        assert summary.requests.failed == 1

    def test_it_is_not_a_crash_that_a_fault_commands(self, tmp_path: Path) -> None:
        """A killed process is a condition of the test; an engine that dies of an exception is a finding."""
        summary = judge(tmp_path, single(), ONE, "peer-crash:at=15ms")
        assert summary.exit_status == ExitStatus.PASSED
        assert summary.crashes == []

    def test_a_release_without_its_producer_kills_the_consumer(self) -> None:
        """The request lacks remote_engine_id, and is aborted in the queue: the pull that frees P's blocks names it."""
        faults = ("mooncake.missing-params:key=remote_engine_id,instance=D0", "abort:when=queued")
        played = play(pair(), ONE, *faults)
        (crash,) = played.of("engine.crashed")
        assert (crash.instance, crash.status, crash.cause) == ("D0", "KeyError", "'remote_engine_id'")

    @pytest.mark.parametrize("key", ["transfer_id", "remote_engine_id", "remote_bootstrap_addr"])
    def test_a_request_without_a_parameter_is_parked_for_ever(self, key: str) -> None:
        """[trap 38]"""
        played = play(pair(), ONE, f"mooncake.missing-params:instance=D0,key={key}")
        assert played.ends()["a"][0] == "stalled"
        assert played.of("pull.sent") == []

    def test_ideal_computes_it_where_it_is(self) -> None:
        played = play(pair(), ONE, "mooncake.missing-params:instance=D0", behaviour="ideal")
        assert played.ends()["a"] == ("finished", "D0", 31)
        assert played.violations == []
