"""Public incidents of engines that sleep though there is something to do (kinds B and C).

Times are ticks; see `ticks`.
"""

import pytest

from tests.incidents.clusters import how
from tests.incidents.ticks import about, at, clients, ends, engines, laws, ticks_of, usable
from tests.scenarios.stage import Play, play

CURRENT = pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])


@pytest.mark.incident("B13")
class TestB13NobodyWakesAnEngineForARecovery:
    """local-inference-lab/vllm#191, with Mooncake for LMCache: one request of 64 tokens, whose 4 blocks fail at 2; the
    next comes at 100."""

    CONFIG = engines(usable(16, step_ms=2_000), 16)
    ALONE = clients(at(0, "R1", 64))
    FAULT = "mooncake.engine-ret:request=R1"
    SLEEPS = "vllm-0.33 idle_engine=sleeps_after_failed_load"

    def play(self, behaviour: str) -> Play:
        followed = clients(at(0, "R1", 64), at(100, "R2", 64))
        return play(self.CONFIG, followed, self.FAULT, behaviour=behaviour, recompute=True)

    def test_it_sleeps_until_another_request_comes(self) -> None:
        played = self.play(self.SLEEPS)
        assert ticks_of(played, "load.failed") == {"R1": pytest.approx(2, abs=0.1)}
        assert ends(played)["R1"] == about("finished", 100)

    def test_or_for_ever(self) -> None:
        played = play(self.CONFIG, self.ALONE, self.FAULT, behaviour=self.SLEEPS, recompute=True)
        assert how(played) == {"R1": "stalled"}
        assert [event.cause for event in played.of("request.stalled")] == ["an engine that sleeps"]
        assert (laws(played), played.num_free("D0")) == ({"stall", "CONSERVATION"}, 12)

    def test_not_while_it_has_something_else_to_do(self) -> None:
        """`other` decodes when R1's load fails."""
        both = clients(at(0, "other", 16, 60), at(1.9, "R1", 64))
        config = engines(usable(16), usable(16, step_ms=100))
        faulted = "mooncake.engine-ret:request=R1"
        played = play(config, both, faulted, behaviour=self.SLEEPS, recompute=True)
        assert how(played) == {"other": "finished", "R1": "finished"}
        assert ends(played)["R1"][1] < ends(played)["other"][1]

    @CURRENT
    def test_it_goes_on_stepping(self, behaviour: str) -> None:
        played = self.play(behaviour)
        assert ends(played)["R1"] == about("finished", 2)
        assert [event.num_tokens for event in played.of("tokens.recomputed", request_id="R1")] == [64]
        assert laws(played) == set()


@pytest.mark.incident("C8")
class TestC8AnEngineSleepsWhileBlocksAreKept:
    """vllm#43433, vllm#46579, vllm#46502, vllm#37160, vllm#45595. R1's prefill is done at 3 and sent at 9, and nothing
    else comes until 100. The store that frees its blocks is the write to D."""

    CONFIG = engines(6, 64)
    FAULT = "slow:delay=6s,request=R1"
    SLEEPS = "vllm-0.33 idle_engine=sleeps_on_frees"

    def play(self, behaviour: str, *, second: float = 100) -> Play:
        requests = clients(at(3, "R1", 64), at(second, "R2", 32))
        return play(self.CONFIG, requests, self.FAULT, behaviour=behaviour)

    def test_they_stay_taken_until_the_next_request(self) -> None:
        played = self.play(self.SLEEPS)
        assert ticks_of(played, "send.finished")["R1"] == pytest.approx(9, abs=0.1)
        assert ticks_of(played, "block.freed", "P0")["R1"] == pytest.approx(100, abs=0.1)

    def test_or_for_ever(self) -> None:
        played = play(self.CONFIG, clients(at(3, "R1", 64)), self.FAULT, behaviour=self.SLEEPS)
        assert (laws(played), played.num_free("P0")) == ({"CONSERVATION"}, 2)

    @CURRENT
    def test_it_steps_until_they_are_back(self, behaviour: str) -> None:
        played = self.play(behaviour)
        assert ticks_of(played, "block.freed", "P0")["R1"] == pytest.approx(9, abs=0.1)
        assert (laws(played), played.num_free("P0")) == (set(), 6)

    @CURRENT
    def test_who_comes_meanwhile_need_not_wait_for_that(self, behaviour: str) -> None:
        played = self.play(behaviour, second=5)
        assert ticks_of(played, "request.first_token", "P0")["R2"] == pytest.approx(5, abs=0.1)
        assert ends(played)["R2"] == about("finished", 5)
