"""Public incidents of one leg of a request that goes on without the other (kinds B and C).

Times are ticks; see `ticks`.
"""

from pathlib import Path

import pytest

from kvreplay.ids import NS_PER_S
from tests.incidents.clusters import how
from tests.incidents.ticks import about, at, clients, ends, engines, laws, ticks_of, usable
from tests.scenarios.stage import Play, judge, play


@pytest.mark.incident("B12")
class TestB12ThePrefillHasFailedAndTheProxyDropsThat:
    """aibrix#2289, sglang#9726: both legs go out at 0, P answers its own with an error at 1; D has 6 blocks for it, and
    would wait for 300."""

    CONFIG = engines(usable(64, step_ms=5_000), 64, abort_request_timeout=300)
    REQUESTS = clients(at(0, "R", 96))
    FAULT = "mooncake.p-refused:delay=1s"

    def test_the_consumers_leg_waits_to_the_end_of_its_time(self) -> None:
        played = play(self.CONFIG, self.REQUESTS, self.FAULT)
        assert ends(played) == {"R": ("failed", 300.005)}
        assert [event.num_blocks for event in played.of("request.parked", instance="D0")] == [6]

    @pytest.mark.parametrize(("behaviour", "orphaned"), [("vllm-0.33", True), ("ideal", False)])
    def test_which_is_told_as_a_wait_for_nothing(self, behaviour: str, orphaned: bool, tmp_path: Path) -> None:
        summary = judge(tmp_path, self.CONFIG, self.REQUESTS, self.FAULT, behaviour=behaviour)
        assert [(found.checker, found.request_id, found.detail, found.fault) for found in summary.violations] == (
            [("PROGRESS", "R", "waited 299 s for blocks that P0 had given up", self.FAULT)] if orphaned else []
        )

    def test_before_50984_it_waits_for_ever(self) -> None:
        assert how(play(self.CONFIG, self.REQUESTS, self.FAULT, behaviour="pre-50984")) == {"R": "stalled"}

    @pytest.mark.parametrize("fault", [FAULT, "peer-crash:at=1s"], ids=["500", "connection lost"])
    @pytest.mark.parametrize("behaviour", ["pre-50984", "vllm-0.33", "ideal"])
    def test_a_proxy_that_listens_cancels_it(self, behaviour: str, fault: str) -> None:
        played = play(self.CONFIG, self.REQUESTS, fault, behaviour=f"{behaviour} proxy_failed_prefill=cancel")
        assert ends(played) == {"R": about("aborted", 1)}

    def test_it_gives_its_blocks_back_with_its_pull(self) -> None:
        """Which has been asked for all the same: they are P's to write until it answers, at 300."""
        played = play(self.CONFIG, self.REQUESTS, self.FAULT, behaviour="vllm-0.33 proxy_failed_prefill=cancel")
        assert (laws(played), played.num_free("D0")) == (set(), 64)
        (freed,) = played.of("block.freed", instance="D0")
        assert freed.time_ns == 300_005_000_000

    def test_a_producer_that_is_not_there_is_another_failure(self) -> None:
        """Its connection is refused."""
        config = engines(64, 64)
        behaviour = "vllm-0.33 proxy_failed_prefill=cancel"
        played = play(config, clients(at(1, "R", 96)), "peer-crash:at=500ms", behaviour=behaviour)
        assert ends(played) == {"R": about("aborted", 1)}

    @pytest.mark.parametrize(("recompute", "end"), [(False, "failed"), (True, "finished")])
    def test_ideally_the_producer_answers_and_the_policy_decides(self, recompute: bool, end: str) -> None:
        played = play(self.CONFIG, self.REQUESTS, self.FAULT, behaviour="ideal", recompute=recompute)
        assert ends(played) == {"R": about(end, 1)}
        assert (laws(played), played.num_free("D0")) == (set(), 64)


@pytest.mark.incident("C2")
class TestC2TheClientLeavesBeforeTheConsumersEngineKnows:
    """vllm#50425, llm-d#1138: 16 blocks on P, a request of 2 blocks per tick, and every fourth client leaves."""

    CONFIG = engines(16, 64, abort_request_timeout=480)
    REQUESTS = clients(*(at(place, f"{'gone' if place % 4 == 3 else 'r'}{place}", 32) for place in range(36)))
    FORGETS = "vllm-0.33 rejected_requests=forget"

    def play(self, where: str, behaviour: str) -> Play:
        return play(
            self.CONFIG, self.REQUESTS, f"mooncake.d-left-early:where={where},request=gone*", behaviour=behaviour
        )

    @pytest.mark.parametrize(("where", "behaviour"), [("api", FORGETS), ("gateway", "vllm-0.33"), ("gateway", "ideal")])
    def test_nobody_tells_the_producer_and_it_is_full_after_eight(self, where: str, behaviour: str) -> None:
        """The eighth leaves at 31, and the request of 32 waits until the first one's time is up. A request that has
        never been at D is the gateway's to tell of, which no engine can mend."""
        played = self.play(where, behaviour)
        orphans = [f"gone{place}" for place in range(3, 36, 4)]
        assert set(ticks_of(played, "send.expired")) == set(orphans)
        prefilled = ticks_of(played, "request.first_token", "P0")
        assert prefilled["r30"] < 31
        assert prefilled["r32"] == pytest.approx(3 + 480, abs=0.1)
        assert (laws(played), played.num_free("P0")) == (set(), 16)

    @pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
    def test_where_the_api_server_knows_it_does(self, behaviour: str) -> None:
        """By the pull of no blocks of a request that is aborted before it is scheduled."""
        played = self.play("api", behaviour)
        assert played.of("send.expired") == []
        assert {name for name, kind in how(played).items() if kind == "aborted"} == {
            f"gone{place}" for place in range(3, 36, 4)
        }
        assert max(event.num_tokens or 0 for event in played.of("usage") if event.status == "peak_blocks") <= 4
        assert ends(played)["r34"] == about("finished", 34)
        assert (laws(played), played.num_free("P0")) == (set(), 16)

    @pytest.mark.parametrize(("behaviour", "tick"), [(FORGETS, 480), ("vllm-0.33", 0), ("ideal", 0)])
    def test_so_it_is_of_what_it_refuses(self, behaviour: str, tick: float) -> None:
        """A prompt that is too long for D, and not for P."""
        config = engines(16, usable(16, max_model_len=64), abort_request_timeout=480)
        played = play(config, clients(at(0, "long", 100)), behaviour=behaviour)
        assert how(played) == {"long": "rejected"}
        freed = max(event.time_ns for event in played.of("block.freed", instance="P0")) / NS_PER_S
        assert freed == pytest.approx(tick, abs=0.1)
        assert played.num_free("P0") == 16
