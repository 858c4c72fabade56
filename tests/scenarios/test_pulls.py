"""One prefill and one decode instance, and a pull that goes well or wrong.

The good pull, in ms: 1 both instances take the request in; D parks it and asks the bootstrap server, which answers
at 3; the pull is at P by 4. P computes from 1 to 11, its write arrives at 12, is acknowledged at 13, the reply is at
D at 14. D polls every ms: it hears of the load at 15 and promotes at 16. Its steps then end at 26, 36, 46.
"""

from pathlib import Path

import pytest

from kvreplay.ids import NS_PER_MS
from kvreplay.verdict.exit_status import ExitStatus
from tests.scenarios.stage import judge, pair, play, request, role, workload

ONE = workload(request("a"))
TWO = workload(request("a"), request("b"))
AT_ONCE = [
    "0 D0 a request.routed peer=P0",
    "1 D0 a bootstrap.queried peer=P0 tokens=1",
    "1 D0 a lookup tokens=8 blocks=0 status=async",
    "1 D0 a load.started tokens=8 blocks=2",
    "1 D0 a request.parked tokens=8 blocks=2",
    "1 P0 a lookup tokens=0 blocks=0 status=none",
]
ANSWERED = [
    "3 D0 a bootstrap.answered peer=P0 status=ok",
    "3 D0 a pull.sent peer=P0 blocks=2",
]
PREFILLED = [
    "11 P0 a request.first_token",
    "11 P0 a request.finished tokens=1 status=length",
]
SENT = [
    "11 P0 a send.started peer=D0 blocks=2",
    *PREFILLED,
    "13 P0 a send.finished peer=D0 blocks=2 status=ok",
]
SILENCE = "transfer failed: Resource temporarily unavailable"


def decoded(first_ms: int) -> list[str]:
    """Three tokens after a load that was promoted, or a prompt that was computed, in a step that began then."""
    return [
        f"{first_ms + 10} D0 a request.first_token",
        f"{first_ms + 30} D0 a request.finished tokens=3 status=length",
    ]


def failed(at_ms: int, cause: str) -> list[str]:
    """The scheduler hears of it, and fails the request with its 2 blocks, under policy fail."""
    return [
        f"{at_ms} D0 a load.failed tokens=8 status=blocks cause={cause} ids=[1, 2]",
        f"{at_ms} D0 a request.failed tokens=0 cause={cause}",
    ]


def recomputed(at_ms: int, cause: str) -> list[str]:
    """The same under recompute: at the next poll it is promoted, asks again and computes its prompt."""
    return [
        f"{at_ms} D0 a load.failed tokens=8 status=blocks cause={cause} ids=[1, 2]",
        f"{at_ms + 1} D0 a request.promoted tokens=0 status=failed",
        f"{at_ms + 1} D0 a lookup tokens=0 blocks=1 status=none",
        f"{at_ms + 1} D0 a tokens.recomputed tokens=8 cause=load-failure",
        *decoded(at_ms + 1),
    ]


def test_a_pull_that_goes_well() -> None:
    assert play(pair(), ONE).story() == [
        *AT_ONCE,
        *ANSWERED,
        *SENT,
        "14 D0 a pull.replied peer=P0 status=FINISH",
        "14 D0 a pull.settled peer=P0 status=ok",
        "15 D0 a load.finished tokens=8",
        "16 D0 a request.promoted tokens=7 status=ok",
        "16 D0 a tokens.recomputed tokens=1 cause=full-hit-last-token",
        *decoded(16),
    ]


class TestTimeout:
    """Every reply is lost. D has waited since 3 ms, and gives up after 480 + 60 s."""

    SETTLED = f"540003 D0 a pull.settled peer=P0 status=failed cause={SILENCE}"
    LOST = "13 D0 a fault.injected peer=P0 status=timeout cause=timeout"

    def before(self) -> list[str]:
        return [*AT_ONCE, *ANSWERED, *SENT[:3], self.LOST, SENT[3]]

    def test_under_fail_the_request_fails(self) -> None:
        assert play(pair(), ONE, "timeout").story() == [*self.before(), self.SETTLED, *failed(540_003, SILENCE)]

    def test_under_recompute_it_is_computed_where_it_is(self) -> None:
        played = play(pair(), ONE, "timeout", recompute=True)
        assert played.story() == [*self.before(), self.SETTLED, *recomputed(540_003, SILENCE)]

    @pytest.mark.parametrize("recompute", [False, True])
    def test_before_50984_it_waits_for_ever_whatever_the_policy(self, recompute: bool) -> None:
        played = play(pair(), ONE, "timeout", behaviour="pre-50984", recompute=recompute)
        assert played.story() == [
            *self.before(),
            self.SETTLED,
            "540003 D0 a violation status=CONSERVATION cause=2 blocks still held at the end ids=[1]",
            "540003 D0 a request.stalled peer=P0 tokens=1000000 blocks=2 status=WAITING_FOR_REMOTE_KVS cause=remote KV",
        ]
        assert (played.num_free("D0"), played.num_free("P0")) == (30, 32)

    def test_exactly_50984_fails_it_at_once_too(self) -> None:
        played = play(pair(), ONE, "timeout", behaviour="post-50984")
        assert played.story() == [*self.before(), self.SETTLED, *failed(540_003, SILENCE)]

    def test_ideal_waits_as_long_and_then_recovers(self) -> None:
        played = play(pair(), ONE, "timeout", behaviour="ideal", recompute=True)
        assert played.ends() == {"a": ("finished", "D0", 540_034)}
        assert played.violations == []

    def test_the_producers_blocks_are_free_all_the_same(self) -> None:
        """It has sent them: the reply only tells so."""
        played = play(pair(), ONE, "timeout")
        assert played.log("block.freed", instance="P0") == [(14, "block.freed", "P0", "a")]

    def test_a_shorter_timer(self) -> None:
        played = play(pair(receive_timeout=2.0), ONE, "timeout")
        assert played.ends() == {"a": ("failed", "D0", 2_003)}

    def test_only_the_faulted_one_of_two(self) -> None:
        """They are pulled together, so a reply's loss is both requests'; a later one has a pull of its own."""
        together = play(pair(), TWO, "timeout")
        assert {name: end[0] for name, end in together.ends().items()} == {"a": "failed", "b": "failed"}
        apart = play(pair(), workload(request("a"), request("b", 20)), "timeout:request=b")
        assert {name: end[0] for name, end in apart.ends().items()} == {"a": "finished", "b": "failed"}

    def test_the_verdicts(self, tmp_path: Path) -> None:
        runs = {
            name: judge(tmp_path, pair(), ONE, "timeout", behaviour=name)
            for name in ("vllm-0.33", "pre-50984", "post-50984", "ideal")
        }
        assert {name: run.exit_status for name, run in runs.items()} == {
            "vllm-0.33": ExitStatus.PASSED,
            "pre-50984": ExitStatus.STALLED,
            "post-50984": ExitStatus.PASSED,
            "ideal": ExitStatus.PASSED,
        }
        (stall,) = runs["pre-50984"].stalled
        assert (stall.request_id, stall.instance, stall.since_s, stall.waiting_on) == ("a", "D0", 0.001, "remote KV")
        assert stall.blocks_held == 2
        assert stall.block_seconds == pytest.approx(2 * 540.002)
        assert (stall.fault, stall.ended, stall.implied) == ("timeout", None, {"CONSERVATION": 1, "PROGRESS": 1})
        assert runs["pre-50984"].violations == []

    def test_recomputed_tokens_in_the_summary(self, tmp_path: Path) -> None:
        summary = judge(tmp_path, pair(), ONE, "timeout", policy="recompute")
        assert summary.recomputed_tokens.by_cause == {"load-failure": 8}
        assert (summary.computed_tokens, summary.loaded_tokens) == (8 + 8 + 2, 0)
        assert (summary.loads.started, summary.loads.failed, summary.loads.failed_tokens) == (1, 1, 8)
        assert summary.loads.failed_by_cause == {SILENCE: 1}


class TestErrorResponse:
    """P's answer to the pull is ERROR, and P never serves it: D hears at 5, P's blocks expire 480 s after 11 ms."""

    BEFORE = (*AT_ONCE, ANSWERED[0], "3 D0 a fault.injected peer=P0 status=error-response cause=error-response")
    SETTLED = (
        "3 D0 a pull.sent peer=P0 blocks=2",
        "4 D0 a pull.replied peer=P0 status=ERROR cause=injected error",
        "4 D0 a pull.settled peer=P0 status=failed cause=injected error",
    )
    EXPIRED = "480012 P0 a send.expired blocks=2 cause=timed out after 480 seconds without being sent"

    def test_under_fail(self) -> None:
        played = play(pair(), ONE, "error-response")
        assert sorted(played.story()) == sorted(
            [*self.BEFORE, *self.SETTLED, *failed(4, "injected error"), *PREFILLED, self.EXPIRED]
        )

    def test_under_recompute(self) -> None:
        played = play(pair(), ONE, "error-response", recompute=True)
        assert sorted(played.story()) == sorted(
            [*self.BEFORE, *self.SETTLED, *recomputed(4, "injected error"), *PREFILLED, self.EXPIRED]
        )

    def test_what_d_held_for_the_load_is_the_most_it_held(self) -> None:
        """Though it computes nothing in the step that takes the blocks, nor in any other."""
        played = play(pair(), TWO, "error-response")
        (peak,) = {event.num_tokens for event in played.of("usage", instance="D0") if event.status == "peak_blocks"}
        assert peak == 4

    def test_before_50984_it_stalls_and_the_producers_blocks_expire(self) -> None:
        played = play(pair(), ONE, "error-response", behaviour="pre-50984")
        assert played.ends() == {"a": ("stalled", "D0", 480_012)}
        assert (played.num_free("D0"), played.num_free("P0")) == (30, 32)


@pytest.mark.incident("D1")
class TestLatePulls:
    """`late` waits behind `first`, and its pull reaches P at 107. P's blocks are ready at 42: their time may be up."""

    REQUESTS = workload(request("first", output_tokens=9), request("late", 30))
    GENERATIONS = ("pre-50984", "vllm-0.33", "ideal")

    @pytest.mark.parametrize("behaviour", GENERATIONS)
    @pytest.mark.parametrize(
        ("seconds", "end"), [(0.063, "send.expired"), (0.064, "send.expired"), (0.065, "sent"), (0.066, "sent")]
    )
    def test_blocks_are_given_back_once_whatever_comes_first(self, seconds: float, end: str, behaviour: str) -> None:
        """At 65 ms their time is up a nanosecond before P polls, and in between the pull comes: they are being sent."""
        config = pair(decode=role(max_num_seqs=1), abort_request_timeout=seconds)
        played = play(config, self.REQUESTS, behaviour=behaviour)
        sent = [event for event in played.of("send.finished", request_id="late") if event.status == "ok"]
        assert (len(sent), len(played.of("send.expired"))) == ((1, 0) if end == "sent" else (0, 1))
        assert played.num_free("P0") == 32
        assert played.of("violation", instance="P0") == []

    @pytest.mark.parametrize("behaviour", GENERATIONS)
    def test_also_after_a_write_that_fails(self, behaviour: str) -> None:
        """The write ends at 109; their time is up, and nobody else will come for them: P polls at once."""
        config = pair(decode=role(max_num_seqs=1), abort_request_timeout=0.065)
        played = play(config, self.REQUESTS, "mooncake.engine-ret:request=late", behaviour=behaviour)
        assert [event.status for event in played.of("send.finished", request_id="late")] == ["failed"]
        (expired,) = played.of("send.expired")
        assert (expired.time_ns / NS_PER_MS, played.num_free("P0")) == (110, 32)


class TestPartialError:
    """One of two requests of a pull comes back in err_reqs."""

    def test_only_that_one_fails(self) -> None:
        played = play(pair(), TWO, "partial-error:request=b")
        assert played.ends() == {"a": ("finished", "D0", 46), "b": ("failed", "D0", 15)}
        assert [event.request_id for event in played.of("fault.injected")] == ["b"]

    def test_or_is_computed(self) -> None:
        """At 16 both are promoted: one token of a, 8 of b."""
        played = play(pair(), TWO, "partial-error:request=b", recompute=True)
        assert played.ends() == {"a": ("finished", "D0", 46), "b": ("finished", "D0", 46)}
        assert played.log("tokens.recomputed", columns=["num_tokens", "cause"], instance="D0") == [
            (16, "tokens.recomputed", "D0", "a", 1, "full-hit-last-token"),
            (16, "tokens.recomputed", "D0", "b", 8, "load-failure"),
        ]

    def test_before_50984_only_that_one_stalls(self) -> None:
        played = play(pair(), TWO, "partial-error:request=b", behaviour="pre-50984")
        assert {name: end[0] for name, end in played.ends().items()} == {"a": "finished", "b": "stalled"}
        assert played.num_free("D0") == 30

    def test_a_share_of_them(self) -> None:
        four = workload(*(request(name) for name in "abcd"))
        played = play(pair(), four, "partial-error:share=0.5")
        ends = [end[0] for end in played.ends().values()]
        assert (ends.count("failed"), ends.count("finished")) == (2, 2)
        assert len(played.of("fault.injected")) == 2


class TestBootstrapFailure:
    """D tries three times, 0.1 s apart; what is an answer at all is not tried again."""

    NOT_FOUND = "remote engine_id P0#0 not found from bootstrap server http://P0:8998"

    @pytest.mark.parametrize(
        ("how", "at_ms"),
        [("refused", 204), ("hang", 90_201), ("404", 2), ("500", 2), ("garbage", 2), ("missing-engine", 2)],
    )
    def test_the_request_fails_when_all_attempts_have(self, how: str, at_ms: int) -> None:
        played = play(pair(), ONE, f"bootstrap-failure:how={how}")
        assert played.ends() == {"a": ("failed", "D0", at_ms)}
        (settled,) = played.of("pull.settled")
        assert settled.cause == self.NOT_FOUND
        assert played.num_free("D0") == played.num_free("P0") == 32

    def test_each_attempt_is_told(self) -> None:
        played = play(pair(), ONE, "bootstrap-failure")
        queries = played.log("bootstrap.queried", columns=["num_tokens"])
        assert queries == [
            (1, "bootstrap.queried", "D0", "a", 1),
            (102, "bootstrap.queried", "D0", "a", 2),
            (203, "bootstrap.queried", "D0", "a", 3),
        ]

    def test_under_recompute(self) -> None:
        played = play(pair(), ONE, "bootstrap-failure", recompute=True)
        assert played.ends() == {"a": ("finished", "D0", 235)}

    def test_before_50984_it_stalls(self) -> None:
        assert play(pair(), ONE, "bootstrap-failure", behaviour="pre-50984").ends()["a"][0] == "stalled"

    def test_the_next_batch_asks_again(self) -> None:
        later = workload(request("a"), request("b", 300))
        played = play(pair(), later, "bootstrap-failure:nth=1")
        assert {name: end[0] for name, end in played.ends().items()} == {"a": "failed", "b": "finished"}


class TestSlow:
    B_LATER = workload(request("a"), request("b", 39_900, output_tokens=50))

    def test_the_load_is_late_and_nothing_else(self) -> None:
        """The write arrives at 12 + 5,000; D polls at 5,015."""
        played = play(pair(), ONE, "slow:delay=5s")
        assert played.ends() == {"a": ("finished", "D0", 5_046)}
        assert played.log("load.finished") == [(5_015, "load.finished", "D0", "a")]

    def test_past_the_engines_deadline_the_write_has_failed_and_lands_all_the_same(self) -> None:
        """Started at 11, given up after 30 s and 1 ns per byte: D has the reply at 30,012 and 8 ns. The bytes land at
        40,012, in blocks that are free by then."""
        played = play(pair(), ONE, "slow:delay=40s")
        assert played.ends() == {"a": ("failed", "D0", 30_013)}
        assert played.of("send.finished")[0].cause == "Mooncake transfer engine returned -1"
        assert played.violations == []

    def test_what_lands_in_a_block_with_another_owner_is_a_breach(self) -> None:
        """b gets a's two blocks at 39,901 and decodes from 39,916 on; a's bytes land at 40,012."""
        played = play(pair(), self.B_LATER, "slow:delay=40s,request=a")
        fences = [event for event in played.violations if event.status == "FENCE"]
        assert [(event.request_id, event.block_ids, event.transfer_id) for event in fences] == [
            ("b", [1], "xfer-a"),
            ("b", [2], "xfer-a"),
        ]
        assert {event.time_ns for event in fences} == {40_016 * NS_PER_MS}, "told at the end of the step"
        wrong = [event for event in played.violations if event.status == "CONTENT"]
        assert [(event.request_id, event.block_ids, event.transfer_id) for event in wrong] == [
            ("b", [2], "xfer-a"),
            ("b", [1], "xfer-a"),
        ]
        assert {event.time_ns for event in wrong} == {40_026 * NS_PER_MS}, "by the token of the next step"

    def test_ideal_refuses_it(self) -> None:
        played = play(pair(), self.B_LATER, "slow:delay=40s,request=a", behaviour="ideal")
        assert played.violations == []
        assert played.ends()["b"][0] == "finished"


class TestSharedFate:
    """What a fault on one request does to the others of its step and engine."""

    @pytest.mark.parametrize(("behaviour", "end"), [("vllm-0.33", "failed"), ("ideal", "finished")])
    def test_a_dead_bootstrap_address(self, behaviour: str, end: str) -> None:
        """vLLM asks one server for the batch. Ideally each is asked, and what one says serves both requests."""
        fault = "mooncake.mixed-bootstrap-addr:request=a,instance=D0"
        ends = play(pair(), TWO, fault, behaviour=behaviour).ends()
        assert {name: found[0] for name, found in ends.items()} == {"a": end, "b": end}

    @pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
    def test_an_engine_call_that_raises_is_told_of_all_that_its_pull_still_owes(self, behaviour: str) -> None:
        requests = workload(request("a", prompt_tokens=20), request("b", prompt_tokens=20))
        played = play(pair(), requests, "mooncake.engine-raise", behaviour=behaviour)
        assert {name: end[0] for name, end in played.ends().items()} == {"a": "failed", "b": "failed"}
        assert [event.request_id for event in played.of("fault.injected")] == ["a", "b"]
        assert len(played.of("send.started")) == 1
