"""Public incidents in which nobody says that a pull has failed (kind B): each request has an end, and soon.

Times are ticks; see `ticks`. Incidents of other engines are shown with the Mooncake connector, where the same goes
wrong: its pull is their receiver's transfer, its bootstrap query their handshake.
"""

from dataclasses import replace

import pytest

from kvreplay.connectors.multi.config import MultiConfig
from kvreplay.connectors.offloading.config import OffloadingConfig
from kvreplay.replay.config import ConnectorConfig
from tests.incidents.clusters import how
from tests.incidents.ticks import about, at, clients, ends, engines, laws, ticks_of, usable
from tests.scenarios.offload_stage import SLOT
from tests.scenarios.stage import Play, play

STALL = {"stall", "CONSERVATION"}
"""Requests that never end keep their blocks."""
SLOW = usable(64, step_ms=2_000)
"""A producer whose prefills last two ticks."""
BOTH_POLICIES = pytest.mark.parametrize("recompute", [False, True], ids=["fail", "recompute"])


def recomputed(played: Play) -> int:
    """Tokens, because loads failed."""
    return sum(event.num_tokens or 0 for event in played.of("tokens.recomputed") if event.cause == "load-failure")


@pytest.mark.incident("B1")
class TestB1AProducerDiesInTheMiddleOfPulls:
    """vllm#35943: 8 blocks on D, of which R1 and R2 have 4 each; P dies at 2 and is back at 7. R3 comes at 13."""

    CONFIG = engines(usable(64, step_ms=3_000), 8, receive_timeout=10)
    REQUESTS = clients(at(1, "R1", 60, 4), at(1, "R2", 60, 4), at(13, "R3", 60, 4))

    def play(self, behaviour: str, *, recompute: bool) -> Play:
        fault = "peer-crash:at=2s,down=5s"
        return play(self.CONFIG, self.REQUESTS, fault, behaviour=behaviour, recompute=recompute)

    @BOTH_POLICIES
    def test_where_failures_are_only_logged_the_pool_is_lost_and_so_is_who_comes_later(self, recompute: bool) -> None:
        played = self.play("pre-50984", recompute=recompute)
        assert how(played) == {"R1": "stalled", "R2": "stalled", "R3": "stalled"}
        assert laws(played) == STALL
        assert played.num_free("D0") == 0
        assert played.of("load.started", instance="D0", request_id="R3") == []

    @BOTH_POLICIES
    @pytest.mark.parametrize(("behaviour", "by"), [("vllm-0.33", 12.0), ("ideal", 3.0)])
    def test_both_end_by_their_deadline_and_the_third_is_served(
        self, behaviour: str, by: float, recompute: bool
    ) -> None:
        """Ideally the closed connection ends them, not the deadline of 10 ticks."""
        played = self.play(behaviour, recompute=recompute)
        kind = "finished" if recompute else "failed"
        assert how(played) == {"R1": kind, "R2": kind, "R3": "finished"}
        assert laws(played) == set()
        last = max(end for name, (_, end) in ends(played).items() if name != "R3")
        assert by - 1 < last < by
        assert played.num_free("D0") == 8
        assert recomputed(played) == (120 if recompute else 0)


@pytest.mark.incident("B2")
class TestB2AnErrorThatNamesNobody:
    """vllm#50719, vllm#50984: four requests of 48 tokens in one pull, 12 of D's 16 blocks; P answers ERROR."""

    CONFIG = engines(64, 16)
    REQUESTS = clients(*(at(0, f"R{place}", 48) for place in range(4)))

    @BOTH_POLICIES
    def test_before_the_fix_the_policy_is_not_even_asked(self, recompute: bool) -> None:
        played = play(self.CONFIG, self.REQUESTS, "error-response", behaviour="pre-50984", recompute=recompute)
        assert set(how(played).values()) == {"stalled"}
        assert laws(played) == STALL
        assert (played.num_free("D0"), recomputed(played)) == (4, 0)

    @BOTH_POLICIES
    @pytest.mark.parametrize("behaviour", ["post-50984", "vllm-0.33", "ideal"])
    def test_all_four_are_told_at_once(self, behaviour: str, recompute: bool) -> None:
        played = play(self.CONFIG, self.REQUESTS, "error-response", behaviour=behaviour, recompute=recompute)
        assert len({event.transfer_id for event in played.of("pull.replied")}) == 4
        assert len({event.time_ns for event in played.of("pull.replied")}) == 1, "one pull"
        assert sorted(event.request_id or "" for event in played.of("load.failed")) == ["R0", "R1", "R2", "R3"]
        assert list(how(played).values()) == ["finished" if recompute else "failed"] * 4
        assert max(end for _, end in ends(played).values()) < 0.1
        assert (laws(played), played.num_free("D0")) == (set(), 16)
        assert recomputed(played) == (192 if recompute else 0)

    @pytest.mark.parametrize("fault", ["bootstrap-failure", "mooncake.p-never-ready"])
    def test_so_are_they_of_its_other_causes(self, fault: str) -> None:
        before = play(self.CONFIG, self.REQUESTS, fault, behaviour="pre-50984")
        after = play(self.CONFIG, self.REQUESTS, fault)
        assert (set(how(before).values()), set(how(after).values())) == ({"stalled"}, {"failed"})
        assert after.num_free("D0") == 16


@pytest.mark.incident("B3")
class TestB3OneColdBootstrapQueryThatFails:
    """vllm#55870: a pool connector beside Mooncake. P keeps blocks for 48 ticks, D waits for 54, the client for 90; the
    bootstrap server is well again at 1."""

    REQUESTS = clients(at(0, "R", 64), leave=[("R", 90)])

    def play(self, behaviour: str, *, recompute: bool) -> Play:
        pulls = engines(16, 16, abort_request_timeout=48, receive_timeout=54)
        options = MultiConfig(
            connectors="mooncake,offloading",
            mooncake=pulls.connector.mooncake,
            offloading=OffloadingConfig(cpu_bytes_to_use=64 * SLOT, copy_latency=1e-6),
        )
        config = replace(pulls, connector=ConnectorConfig(kind="multi", options=options))
        return play(config, self.REQUESTS, "bootstrap-failure:until=1s", behaviour=behaviour, recompute=recompute)

    @BOTH_POLICIES
    def test_before_the_fix_the_client_gives_up_and_the_blocks_are_lost(self, recompute: bool) -> None:
        played = self.play("pre-50984", recompute=recompute)
        assert ends(played) == {"R": ("aborted", 90.001)}
        assert (laws(played), played.num_free("D0")) == ({"CONSERVATION"}, 12)

    @BOTH_POLICIES
    @pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
    def test_the_policy_decides_at_once(self, behaviour: str, recompute: bool) -> None:
        """Three tries, 0.1 ticks apart. P's blocks go once, when their time is up."""
        played = self.play(behaviour, recompute=recompute)
        assert ends(played) == {"R": ("finished", 0.235) if recompute else ("failed", 0.204)}
        assert ticks_of(played, "send.expired") == {"R": 48.012}
        assert (laws(played), played.num_free("D0"), played.num_free("P0")) == (set(), 16, 16)


@pytest.mark.incident("B7")
class TestB7AFailedHandshakeIsTheRequestsThatWaitForIt:
    """vllm#26171: three requests of 48 tokens to a P that D does not know yet; who comes at 9 asks anew."""

    REQUESTS = clients(*(at(1, name, 48) for name in ("R1", "R2", "R3")), at(9, "later", 48))
    FAULT = "bootstrap-failure:until=2s"

    def test_before_the_fix_nobody_told_them(self) -> None:
        played = play(engines(), self.REQUESTS, self.FAULT, behaviour="pre-50984", recompute=True)
        assert how(played) == {"R1": "stalled", "R2": "stalled", "R3": "stalled", "later": "finished"}

    @pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
    def test_all_three_are_computed_and_the_failure_is_not_remembered(self, behaviour: str) -> None:
        played = play(engines(), self.REQUESTS, self.FAULT, behaviour=behaviour, recompute=True)
        assert set(how(played).values()) == {"finished"}
        assert recomputed(played) == 144
        assert [event.num_tokens for event in played.of("bootstrap.queried")] == [1, 2, 3, 1], "tries"
        assert [event.request_id for event in played.of("load.finished")] == ["later"]
        assert laws(played) == set()


@pytest.mark.incident("B8")
class TestB8TheDeadlineEndsWhereTheTransferBegins:
    """sglang#31800. Five requests are pulled at once; P answers for r0, and what it says of the other four is lost. D
    waits for 20. What a transfer that hangs takes from others are blocks here, not slots: 16 of 20, and the fifth
    request, at 5, needs 6.
    """

    REQUESTS = clients(at(0, "r0", 48), *(at(0, f"r{place}", 64) for place in range(1, 5)), at(5, "fifth", 96))
    FAULTS = ("mooncake.p-slow-prefill:request=r[1-4],delay=1s", "mooncake.resp-lost:reply=last,request=r[0-4]")

    def play(self, behaviour: str) -> Play:
        config = engines(64, usable(20, max_model_len=128), receive_timeout=20)
        return play(config, self.REQUESTS, *self.FAULTS, behaviour=behaviour)

    @pytest.mark.parametrize("behaviour", ["pre-50984", "vllm-0.33 pull_wait=first-reply"])
    def test_after_the_first_reply_nobody_minds_the_time(self, behaviour: str) -> None:
        """Or, before vllm#50984, what becomes of it."""
        played = self.play(behaviour)
        assert how(played) == {"r0": "finished", **dict.fromkeys(("r1", "r2", "r3", "r4", "fifth"), "stalled")}
        assert ticks_of(played, "pull.settled", "D0")["r0"] < 1
        waits = {event.request_id: event.cause for event in played.of("request.stalled")}
        assert waits == {**dict.fromkeys(("r1", "r2", "r3", "r4"), "remote KV"), "fifth": "free blocks"}
        assert played.num_free("D0") == 4

    @pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
    def test_it_holds_in_every_state(self, behaviour: str) -> None:
        played = self.play(behaviour)
        assert how(played) == {
            "r0": "finished",
            **dict.fromkeys(("r1", "r2", "r3", "r4"), "failed"),
            "fifth": "finished",
        }
        assert ends(played)["r4"] == about("failed", 20)
        assert ends(played)["fifth"] == about("finished", 20)
        assert (laws(played), played.num_free("D0")) == (set(), 20)


@pytest.mark.incident("B9")
class TestB9WhatFailsOnTheProducerIsToldToTheConsumer:
    """sglang#36108, sglang#36033: the write raises an error when the prefill is done, at 2; D would wait for 300. An
    entry of P's for a transfer is SGLang's room."""

    CONFIG = engines(SLOW, 64, receive_timeout=300)
    REQUESTS = clients(at(0, "R1", 48), at(5, "R2", 48))

    @pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
    def test_at_once_and_once(self, behaviour: str) -> None:
        """It is told again at 8, when the transfer is long over."""
        faults = ("mooncake.engine-ret:request=R1", "mooncake.resp-duplicate:delay=6s,request=R1")
        played = play(self.CONFIG, self.REQUESTS, *faults, behaviour=behaviour)
        assert ends(played) == {"R1": ("failed", 2.005), "R2": ("finished", 7.036)}
        assert len(played.of("pull.settled", request_id="R1")) == 1
        assert (laws(played), played.num_free("D0"), played.num_free("P0")) == (set(), 64, 64)

    @pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
    def test_each_rank_of_the_consumer_is(self, behaviour: str) -> None:
        """Both must have said so before the request ends."""
        config = engines(SLOW, 64, ranks=((1, 1), (2, 1)), receive_timeout=300)
        played = play(config, self.REQUESTS, "mooncake.engine-ret:request=R1", behaviour=behaviour)
        told = [(event.rank, event.cause) for event in played.of("pull.settled", request_id="R1")]
        assert told == [(0, "Mooncake transfer engine returned -1"), (1, "Mooncake transfer engine returned -1")]
        assert how(played) == {"R1": "failed", "R2": "finished"}

    def test_a_message_that_makes_no_sense_ends_the_wait_too(self) -> None:
        played = play(self.CONFIG, self.REQUESTS, "mooncake.engine-ret:request=R1", "mooncake.resp-garbage:request=R1")
        assert ends(played)["R1"] == ("failed", 2.005)

    @pytest.mark.parametrize(("behaviour", "end"), [("pre-50984", "stalled"), ("vllm-0.33", "failed")])
    def test_where_it_is_not_told_the_deadline_is_all_there_is(self, behaviour: str, end: str) -> None:
        faults = ("mooncake.engine-ret:request=R1", "mooncake.resp-lost:request=R1")
        played = play(self.CONFIG, self.REQUESTS, *faults, behaviour=behaviour)
        assert how(played) == {"R1": end, "R2": "finished"}
        assert ticks_of(played, "pull.settled")["R1"] == 300.003

    @pytest.mark.parametrize(("behaviour", "at_tick"), [("vllm-0.33", 300.005), ("ideal", 2.002)])
    def test_a_request_that_ends_on_the_producer_is_another_such_failure(self, behaviour: str, at_tick: float) -> None:
        """0.33.0 forgets the pull that waits for it."""
        config = engines(usable(64, step_ms=2_000, budget=32), 64, abort_request_timeout=300)
        played = play(config, clients(at(0, "R1", 48)), "mooncake.p-abort-while-waiting", behaviour=behaviour)
        assert ends(played) == {"R1": ("failed", at_tick)}
