"""Public incidents of class D: blocks that are given up while somebody still wants them.

NIXL's leases are shown as Mooncake's abort timeout: what a producer keeps for a puller, and no longer. Where a consumer
reads by itself, nobody asks whether the blocks are still there: that is the switch mooncake_late_pulls.
"""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from kvreplay.ids import NS_PER_MS
from kvreplay.replay.config import ReplayConfig
from tests.incidents import scripted
from tests.incidents.clusters import FULL, crashes, how, laws, producer_and_consumer
from tests.incidents.scripted import Outcome, engine
from tests.scenarios.offload_stage import offloading
from tests.scenarios.stage import Play, play, request, workload
from tests.scenarios.test_simple_cpu import simple

READ = "vllm-0.33 mooncake_late_pulls=read"


def late_pull(behaviour: str, *, lease: float, at: float, reused_at: float, recompute: bool = True) -> Play:
    """Seconds. P has 5 blocks of 16 tokens. r1, of 64 tokens, is computed at once and asked for `at`; r2 takes 3 of its
    blocks at `reused_at`, unless they are still kept."""
    config = producer_and_consumer(5, 12, abort_request_timeout=lease)
    clients = workload(
        request("r1", prompt_tokens=64), request("r2", reused_at * 1000, prompt_tokens=64, output_tokens=1)
    )
    fault = f"mooncake.p-expire-before-pull:request=r1,delay={at}s"
    return play(config, clients, fault, behaviour=behaviour, recompute=recompute)


def computed_again(played: Play) -> dict[str | None, int]:
    """Tokens that D computes after a load that failed."""
    again = [event for event in played.of("tokens.recomputed", instance="D0") if event.cause == "load-failure"]
    return {event.request_id: event.num_tokens or 0 for event in again}


def wrong_positions(played: Play) -> list[str | None]:
    assert laws(played) <= {"CONTENT"}
    assert {event.request_id for event in played.violations} <= {"r1"}
    return [event.cause for event in played.violations]


GARBAGE = [f"read wrong contents from position {start} on" for start in (16, 32, 48)]
"""Three of r1's four blocks are r2's by then."""


@pytest.mark.incident("D1")
class TestD1ExpiryAndTheLastNotificationInOnePoll:
    """vllm#24268, llm-d#187. Both orders of the two at a producer: `TestLatePulls` in test_pulls. Here the scheduler is
    told of both: the request's blocks are kept from step 0 on, and its time is up in step 10."""

    def outcome(self, second: int, *switches: str, behaviour: str = "vllm-0.33") -> Outcome:
        kept = scripted.request("R", 64, max_tokens=1, delay_free="always", send_after=10)
        other = scripted.request("S", 64, 9, max_tokens=6)
        events = [{"step": second, "finished_sending": ["R"]}]
        return Outcome(engine(12), [kept, other], *switches, behaviour=behaviour, events=events)

    @pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
    def test_in_one_step_it_is_one(self, behaviour: str) -> None:
        outcome = self.outcome(10, behaviour=behaviour)
        assert outcome.laws == set()
        assert (outcome.free[9], outcome.free[10], outcome.free[-1]) == (4, 7, 12)
        assert outcome.finished == ["R", "S"]

    @pytest.mark.parametrize(("notified", "last"), [(9, 10), (11, 11)])
    def test_one_after_the_other_the_second_is_fatal(self, notified: int, last: int) -> None:
        outcome = self.outcome(notified)
        assert outcome.laws == {"NO-FATAL"}
        assert outcome.error == "finished_sending of unknown request R"
        assert len(outcome.free) == last

    @pytest.mark.parametrize("second", [9, 11])
    @pytest.mark.parametrize(("switches", "behaviour"), [(("unexpected_reports=ignore",), "vllm-0.33"), ((), "ideal")])
    def test_or_nothing(self, switches: tuple[str, ...], behaviour: str, second: int) -> None:
        outcome = self.outcome(second, *switches, behaviour=behaviour)
        assert outcome.laws == set()
        assert outcome.finished == ["R", "S"]
        assert outcome.free[-1] == 12


@pytest.mark.incident("D2")
class TestD2BlocksAreReadAfterTheirLease:
    """aws-do-eks#84: a lease of 30 s, and D comes after 51."""

    def play(self, behaviour: str, *, recompute: bool = True) -> Play:
        return late_pull(behaviour, lease=30, at=51, reused_at=31, recompute=recompute)

    @pytest.mark.parametrize("recompute", [False, True])
    def test_the_answer_is_200_and_wrong(self, *, recompute: bool) -> None:
        played = self.play(READ, recompute=recompute)
        assert how(played) == {"r1": "finished", "r2": "finished"}
        assert wrong_positions(played) == GARBAGE

    @pytest.mark.parametrize(("behaviour", "seconds"), [("vllm-0.33", 81), ("ideal", 51)])
    def test_refused_it_is_computed_on_the_consumer(self, behaviour: str, seconds: int) -> None:
        """0.33.0 waits another lease in vain for what it no longer knows."""
        played = self.play(behaviour)
        assert how(played) == {"r1": "finished", "r2": "finished"}
        assert computed_again(played) == {"r1": 64}
        assert played.ends()["r1"][2] // 1000 == seconds
        assert laws(played) == set()

    @pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
    def test_or_fails(self, behaviour: str) -> None:
        played = self.play(behaviour, recompute=False)
        assert how(played) == {"r1": "failed", "r2": "finished"}
        assert laws(played) == set()

    def test_with_a_lease_that_lasts_nothing_is_lost(self) -> None:
        """What renewing it would come to: r2 waits for P's blocks instead."""
        played = late_pull("vllm-0.33", lease=60, at=51, reused_at=31)
        assert how(played) == {"r1": "finished", "r2": "finished"}
        assert computed_again(played) == {}
        assert played.ends()["r2"][2] > 51_000
        assert laws(played) == set()


@pytest.mark.incident("D3")
class TestD3ASecondTurnReadsAfterTheTime:
    """vllm#47021: the blocks are kept for 48 s, and read after 44, 47 and 49. There D keeps them and P reads them, here
    it is the other way round. With Mooncake who keeps them is asked, and decides by its own clock: no offset between
    two clocks matters, no margin for it is needed, and 47 is early enough."""

    def play(self, behaviour: str, at: int) -> Play:
        return late_pull(behaviour, lease=48, at=at, reused_at=48.5)

    @pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal", READ])
    @pytest.mark.parametrize("at", [44, 47])
    def test_in_time(self, at: int, behaviour: str) -> None:
        played = self.play(behaviour, at)
        assert (computed_again(played), laws(played)) == ({}, set())

    def test_too_late_it_reads_garbage(self) -> None:
        assert wrong_positions(self.play(READ, 49)) == GARBAGE

    @pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
    def test_too_late_it_is_refused(self, behaviour: str) -> None:
        played = self.play(behaviour, 49)
        assert how(played)["r1"] == "finished"
        assert (computed_again(played), laws(played)) == ({"r1": 64}, set())


@pytest.mark.incident("D6")
class TestD6ForcedFreeAndALateDone:
    """vllm-ascend#6570, vllm-ascend#7140: 10 s, which another connector's variable had set, where D's queue takes 14; P
    gives the blocks to r2 at 11."""

    def play(self, behaviour: str, lease: float = 10) -> Play:
        return late_pull(behaviour, lease=lease, at=14, reused_at=11)

    def test_the_read_is_of_another_requests_blocks_and_the_done_of_nobody(self) -> None:
        """P hears that r1 has been read, when r1 is long gone there: nothing is freed twice, nothing dies."""
        played = self.play(READ)
        assert wrong_positions(played) == GARBAGE
        assert [event.status for event in played.of("send.finished", request_id="r1")] == ["ok"]
        assert len(played.of("block.freed", instance="P0", request_id="r1")) == 1
        assert (crashes(played), played.num_free("P0")) == ([], 5)

    @pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
    def test_the_consumer_computes_it(self, behaviour: str) -> None:
        played = self.play(behaviour)
        assert how(played) == {"r1": "finished", "r2": "finished"}
        assert (computed_again(played), laws(played), crashes(played)) == ({"r1": 64}, set(), [])

    def test_with_the_right_variable_there_is_nothing_to_compute(self) -> None:
        played = self.play(READ, lease=480)
        assert (computed_again(played), laws(played)) == ({}, set())


@pytest.mark.incident("D8")
class TestD8FoundAndDeletedBeforeItIsFetched:
    """Mooncake#730: A's query has an object marked for deletion, where it should have had a lease; B finds it, and it
    goes before B fetches it. The object is a prompt in a CPU tier, which A and B, 400 ms apart, both want."""

    def play(self, config: ReplayConfig, behaviour: str, fault: str) -> Play:
        text = "abcd"
        clients = workload(
            request("x", 0, prompt_tokens=16, text=text),
            request("f1", 100, prompt_tokens=60),
            request("A", 400, prompt_tokens=16, text=text),
            request("f2", 500, prompt_tokens=60),
            request("B", 800, prompt_tokens=16, text=text),
        )
        return play(config, clients, fault, behaviour=behaviour, recompute=True)

    @pytest.mark.parametrize(
        ("tier", "behaviour", "message"),
        [
            ("offload", "vllm-0.33", "chunk not found in cache"),
            ("simple-cpu", "vllm-0.33 simple_cpu_lookup=again", "Expected 12 hit tokens, got 0"),
        ],
    )
    def test_the_engine_dies(self, tier: str, behaviour: str, message: str) -> None:
        config = offloading() if tier == "offload" else simple()
        played = self.play(config, behaviour, f"{tier}.evict-between:request=B,nth=1")
        assert crashes(played) == [("E0", message)]
        assert (how(played)["A"], how(played)["B"]) == ("finished", "failed")

    @pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
    def test_with_a_pin_b_is_served(self, behaviour: str) -> None:
        """SimpleCPUOffload holds what a lookup has found."""
        played = self.play(simple(), behaviour, "simple-cpu.evict-between:request=B,nth=1")
        loads = [(event.request_id, event.num_tokens) for event in played.of("load.finished")]
        assert loads == [("A", 12), ("B", 12)]
        assert laws(played) == set()

    def test_or_it_is_a_miss(self) -> None:
        played = self.play(offloading(), "ideal", "offload.evict-between:request=B,nth=1")
        assert set(how(played).values()) == {"finished"}
        again = [event for event in played.of("tokens.recomputed") if event.cause == "load-failure"]
        assert [(event.request_id, event.num_tokens) for event in again] == [("B", 16)]
        assert laws(played) == set()


@pytest.mark.incident("D9")
class TestD9TheProducersDeadlineMeasuresTheConsumersQueue:
    """tokenspeed#1427, sglang#10110: D has room for 4 of 32 requests, each of which decodes for 35 ticks; P keeps what
    it has computed for 120. A tick is 10 ms, a request one block of 64 tokens. The fifth wave comes at 140 ticks."""

    WINDOW, TICK_MS = 4, 10

    def play(self, behaviour: str, *, recompute: bool) -> Play:
        config = producer_and_consumer(
            64,
            self.WINDOW,
            max_model_len=64,
            groups=[replace(FULL, block_size=64)],
            scheduler={"prefill": {"max_num_seqs": 64, "max_num_batched_tokens": 32 * 29}},
            abort_request_timeout=1.2,
            receive_timeout=3.0,
        )
        clients = workload(*(request(f"r{n:02}", prompt_tokens=29, output_tokens=35) for n in range(32)))
        return play(config, clients, behaviour=behaviour, recompute=recompute)

    def makespan(self, played: Play) -> float:
        """Ticks."""
        return max(ms for _, _, ms in played.ends().values()) / self.TICK_MS

    def test_waves_of_the_windows_size_fail_and_hold_the_window_meanwhile(self) -> None:
        """Four waves are served in time. Each of the others waits for P's answer, for 120 ticks."""
        played = self.play("vllm-0.33", recompute=False)
        assert Counter(how(played).values()) == {"finished": 16, "failed": 16}
        assert {event.cause for event in played.of("request.failed")} == {"Timeout waiting for P side ready."}
        failed_ms = Counter(event.time_ns // NS_PER_MS for event in played.of("request.failed"))
        assert list(failed_ms.values()) == [self.WINDOW] * 4
        waves = sorted(failed_ms)
        assert {later - earlier for earlier, later in pairwise(waves)} == {1203}
        assert self.makespan(played) > 600

    def test_before_50984_the_window_is_held_for_ever(self) -> None:
        played = self.play("pre-50984", recompute=False)
        assert Counter(how(played).values()) == {"finished": 16, "stalled": 16}

    def test_ideally_a_failure_frees_the_window_at_once(self) -> None:
        played = self.play("ideal", recompute=False)
        assert Counter(how(played).values()) == {"finished": 16, "failed": 16}
        assert self.makespan(played) < 150
        assert laws(played) == set()

    def test_and_nobody_fails_where_the_consumer_may_compute(self) -> None:
        """8 waves of 35 ticks are 280; half of the prompts are computed by D."""
        played = self.play("ideal", recompute=True)
        assert set(how(played).values()) == {"finished"}
        assert 280 < self.makespan(played) < 290
        assert sum(computed_again(played).values()) == 16 * 29
        assert laws(played) == set()
