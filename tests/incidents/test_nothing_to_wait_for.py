"""Public incidents in which a request is parked though nothing will come, or nobody writes any more (kind B)."""

import pytest

from kvreplay.kv.specs import MAMBA, MAMBA_ALIGN, KVCacheGroupSpec
from tests.incidents.clusters import BLOCK, how
from tests.incidents.scripted import Outcome, engine, load, request
from tests.incidents.ticks import about, at, clients, ends, engines, laws, ticks_of
from tests.scenarios.stage import play

STATES = (
    KVCacheGroupSpec(block_size=BLOCK, bytes_per_token=1),
    KVCacheGroupSpec(kind=MAMBA, mamba_cache_mode=MAMBA_ALIGN, block_size=BLOCK, state_bytes=16),
)
TEXT = [f"t{place}" for place in range(17)]
CURRENT = pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])


@pytest.mark.incident("B4")
class TestB4AllOfThePromptIsHereAlready:
    """vllm#56640, vllm#54714: R2 has the prompt of R1, of which D holds 4 blocks.

    Where a model has states the last token is left out of the pull: of 65 tokens D has 64, and nothing is to be pulled.
    P is told by a pull without blocks, which is the NIXL connector's notification.
    """

    CONFIG = engines(32, 24, *STATES, abort_request_timeout=30)
    REQUESTS = clients(at(0, "R1", 65, text=TEXT), at(4, "R2", 65, text=TEXT))

    @pytest.mark.parametrize(("after", "laws", "finished"), [(None, {"PROGRESS"}, ["R1"]), (0, set(), ["R1", "R2"])])
    def test_a_request_that_is_parked_for_a_load_of_nothing_waits_for_ever(
        self, after: int | None, laws: set[str], finished: list[str]
    ) -> None:
        """With 64 tokens in 12 blocks, and a connector that never says so (NIXL), or at once."""
        script = load(64, after=after or 0)
        if after is None:
            del script["load"]["recv_after"]
        prompts = [request("R1", 64, first=1, max_tokens=2), request("R2", 64, 4, first=1, max_tokens=2, **script)]
        outcome = Outcome(engine(12), prompts)
        assert outcome.laws == laws
        assert outcome.finished == finished

    @CURRENT
    @pytest.mark.parametrize("fault", ["mooncake.release-only-fail:request=R2", "mooncake.conn-refused:request=R2"])
    def test_it_is_not_parked_whatever_becomes_of_the_notification(self, fault: str, behaviour: str) -> None:
        played = play(self.CONFIG, self.REQUESTS, fault, behaviour=behaviour)
        assert [event.num_blocks for event in played.of("pull.sent", request_id="R2")] == [0]
        assert played.of("request.parked", request_id="R2") == []
        assert ends(played)["R2"] == ("finished", 4.031)
        assert ticks_of(played, "send.expired")["R2"] == pytest.approx(34, abs=0.1), "when P's time for it is up"
        assert (laws(played), played.num_free("D0"), played.num_free("P0")) == (set(), 24, 32)

    @CURRENT
    def test_with_the_notification_the_producer_need_not_wait(self, behaviour: str) -> None:
        played = play(self.CONFIG, self.REQUESTS, behaviour=behaviour)
        assert how(played) == {"R1": "finished", "R2": "finished"}
        assert played.of("send.expired") == []

    @pytest.mark.parametrize("behaviour", ["pre-50984", "post-50984"])
    def test_before_0_33_mooncake_reported_it_finished_to_a_scheduler_that_ran_it(self, behaviour: str) -> None:
        played = play(self.CONFIG, self.REQUESTS, behaviour=behaviour)
        (crash,) = played.of("engine.crashed")
        assert (crash.instance, crash.status) == ("D0", "AssertionError")
        assert crash.cause == "finished_recving of R2, which is RUNNING"


@pytest.mark.incident("B5")
class TestB5ParkedWithoutAReasonAndWrittenWithoutARight:
    """vllm#57705. R1 lacks what a pull needs; R2, which has all of its prompt, is B4's; R3's blocks have new owners on
    both sides when its write lands."""

    T = 9
    PULLS = engines(4, 4, abort_request_timeout=T, receive_timeout=T + 0.5, transfer_timeout=T)
    REUSED = clients(at(0, "R3", 60, 1), at(10, "R4", 60, 4))
    """P and D have 4 blocks each: R4 gets what R3 had."""

    @pytest.mark.parametrize(
        ("behaviour", "end"),
        [("vllm-0.33", "stalled"), ("vllm-0.33 mooncake_missing_params=prefill", "finished"), ("ideal", "finished")],
    )
    @pytest.mark.parametrize("key", ["remote_engine_id", "transfer_id"])
    def test_without_parameters_there_is_nothing_to_park_for(self, behaviour: str, end: str, key: str) -> None:
        fault = f"mooncake.missing-params:instance=D0,key={key}"
        played = play(engines(abort_request_timeout=10), clients(at(0, "R1", 48)), fault, behaviour=behaviour)
        assert how(played) == {"R1": end}
        assert bool(played.of("request.parked", instance="D0")) == (end == "stalled")

    @pytest.mark.parametrize(
        ("behaviour", "broken"), [("vllm-0.33", {"FENCE", "CONTENT"}), ("ideal", set())], ids=["0.33.0", "ideal"]
    )
    def test_no_write_outlasts_its_deadline(self, behaviour: str, broken: set[str]) -> None:
        """The engine gives up at 9, R3 is told so, and the bytes land in R4's blocks at 10."""
        roomy = engines(12, 4, abort_request_timeout=self.T, receive_timeout=self.T + 0.5, transfer_timeout=self.T)
        fault = "mooncake.engine-slow:request=R3,delay=10010ms"
        played = play(roomy, self.REUSED, fault, behaviour=behaviour)
        assert laws(played) == broken
        assert {event.request_id for event in played.violations} == ({"R4"} if broken else set())
        assert ends(played)["R3"] == about("failed", self.T)
        assert how(played)["R4"] == "finished"

    @CURRENT
    def test_who_allocates_too_late_is_told_so_and_gets_nothing(self, behaviour: str) -> None:
        """D's message comes at 11, P has given up at 9."""
        fault = "mooncake.p-expire-before-pull:request=R3,delay=11s"
        played = play(self.PULLS, self.REUSED, fault, behaviour=behaviour)
        assert ends(played)["R3"] == ("failed", 9.503)
        assert [event.request_id for event in played.of("send.started")] == ["R4"]
        assert (laws(played), how(played)["R4"]) == (set(), "finished")
