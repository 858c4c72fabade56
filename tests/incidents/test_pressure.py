"""Public incidents of pools that are short of blocks, as whole runs: a step takes 10 ms, a message 1 ms."""

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from kvreplay.connectors.offloading.scheduler import OffloadingScheduler
from kvreplay.engine.request import Request
from kvreplay.replay.config import Policy
from kvreplay.report.terminal import print_report
from kvreplay.verdict.model import CircularWait, Summary
from tests.incidents.scripted import Outcome, engine, load
from tests.incidents.scripted import request as scripted
from tests.scenarios.stage import Play, Sizes, judge, pair, play, request, role, workload
from tests.scenarios.test_multi import both
from tests.scenarios.test_simple_cpu import simple


@pytest.mark.incident("A9")
class TestA9FoundInEveryStepAndNeverScheduled:
    """vllm-ascend#6512: 32 of a prompt's 40 tokens are in a tier, and the pool is full of what another has left.

    The producer of a pair has the tier; it keeps the 9 blocks of `f` of its 16 until they are pulled, which happens 5 s
    later. `r` needs 10. (The record: 8 of 10 blocks are found, of 12 one request keeps 8.)
    """

    FAULTS = ("cache.reset:at=180ms,what=gpu,instance=P0", "mooncake.p-expire-before-pull:request=f,delay=5s")

    @pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
    def test_it_is_looked_up_when_something_has_changed(self, monkeypatch: pytest.MonkeyPatch, behaviour: str) -> None:
        asked: list[str] = []
        real = OffloadingScheduler.get_num_new_matched_tokens

        def count(self: OffloadingScheduler, of: Request, num_computed: int) -> tuple[int | None, bool]:
            if of.request_id == "r" and of.max_tokens == 1:  # the producer's leg
                asked.append(of.request_id)
            return real(self, of, num_computed)

        monkeypatch.setattr(OffloadingScheduler, "get_num_new_matched_tokens", count)
        clients = workload(
            request("s", 0, prompt_tokens=32, text="abcdefgh"),
            request("f", 200, prompt_tokens=36),
            request("r", 260, prompt_tokens=40, text="abcdefghij"),
        )
        played = play(both("mooncake,offloading"), clients, *self.FAULTS, behaviour=behaviour)
        assert not played.violations
        assert {kind for kind, _, _ in played.ends().values()} == {"finished"}
        assert [event.num_tokens for event in played.of("lookup", instance="P0", request_id="r")] == [32]
        (sent,) = played.of("send.finished", instance="P0", request_id="f")
        (begun,) = played.of("load.started", instance="P0", request_id="r")
        assert 5000 * 10**6 < sent.time_ns < begun.time_ns < sent.time_ns + 10 * 10**6
        assert len(asked) == 2  # at its arrival, and when `f` gives its blocks back: not in the 5 s between


@pytest.mark.incident("A10")
class TestA10AllOfThePoolCouldBeEvictedAndNothingIs:
    """sglang#30532, with a pool of CPU blocks: each device block is held by a copy that never ends.

    `a` has ended and its 8 of 16 blocks are cached; `b` needs a ninth of the 8 that are left.
    """

    CLIENTS = workload(
        request("a", 0, prompt_tokens=32), request("b", 0, prompt_tokens=32), request("c", 400, prompt_tokens=16)
    )

    def play(self, behaviour: str) -> Play:
        config = simple(num_gpu_blocks=17, cpu_blocks=17)
        return play(config, self.CLIENTS, "simple-cpu.copy-raises:nth=1", behaviour=behaviour)

    def test_where_the_copy_is_never_given_up_all_who_come_wait_for_ever(self) -> None:
        """And it is said who holds the blocks: nobody's table."""
        played = self.play("vllm-0.33")
        stalled = played.of("request.stalled")
        assert [(event.request_id, event.cause) for event in stalled] == [("b", "free blocks"), ("c", "free blocks")]
        assert {(event.status, event.cause) for event in played.violations} == {
            ("CONSERVATION", "reference count 1, but 0 tables hold it"),
            ("CONSERVATION", "0 times in the free queue, and 0 tables hold it"),
            ("CONSERVATION", "8 free + 0 held is not 16"),
        }

    def test_ideally_a_copy_that_fails_lets_go_of_its_blocks(self) -> None:
        played = self.play("ideal")
        assert not played.violations
        assert {kind for kind, _, _ in played.ends().values()} == {"finished"}
        assert [event.num_blocks for event in played.of("block.evicted", instance="E0")] == [5]
        assert played.num_free("E0") == 16


@pytest.mark.incident("I8")
class TestI8LoadedAndNoRoomInThatStep:
    """vllm#18631: R2's 64 tokens have arrived in 4 blocks at step 3, and for the fifth it has to wait for R1's end."""

    REQUESTS = (scripted("R1", 50, max_tokens=8), scripted("R2", 72, max_tokens=2, **load(64, after=2)))

    @pytest.mark.parametrize("behaviour", ["vllm-0.33", "vllm-2026-08", "ideal"])
    def test_what_was_loaded_is_remembered(self, behaviour: str) -> None:
        """Admitted for what is loaded alone, as it was then."""
        outcome = Outcome(engine(8, scheduler_reserve_full_isl=False), [*self.REQUESTS], behaviour=behaviour)
        assert outcome.laws == set()
        assert outcome.finished == ["R1", "R2"]
        assert [row for step in outcome.steps for row in step.get("lookup", ()) if row[0] == "R2"] == [
            ["R2", 0, 64, True]
        ]
        ended = next(step["k"] for step in outcome.steps for row in step.get("out", ()) if row[2] == "length")
        assert ended == 7
        assert [(step["k"], *row[:3]) for step in outcome.steps for row in step.get("new", ()) if row[0] == "R2"] == [
            (8, "R2", 64, 8)
        ]

    def test_today_it_begins_to_load_when_all_of_it_fits(self) -> None:
        """With the whole prompt reserved."""
        outcome = Outcome(engine(8), [*self.REQUESTS])
        assert outcome.laws == set()
        assert [step["k"] for step in outcome.steps for _ in step.get("alloc", ())] == [8]
        assert outcome.computed("R2") == [64, 72]


@pytest.mark.incident("A7")
class TestA7ProducerAndConsumerHoldEachOthersRoom:
    """sglang#31473: each pool has room for one of two prompts, which the consumer takes up in the other order.

    The producer has computed `a`, and keeps it until it is pulled; the consumer has reserved its 14 of 16 blocks for
    `b`, which the producer has no room for. (The leg of `b` is 5 ms late on its way to the producer.)
    """

    FAULT = "mooncake.p-slow-prefill:request=b,delay=5ms"
    CLIENTS = workload(*(request(name, prompt_tokens=56, output_tokens=3) for name in "ba"))

    def judge(self, folder: Path, behaviour: str, policy: Policy = "recompute") -> Summary:
        small = role(num_gpu_blocks=17)
        config = pair(prefill=small, decode=small)
        return judge(folder, config, self.CLIENTS, self.FAULT, behaviour=behaviour, policy=policy)

    def test_until_a_timeout_nobody_goes_on(self, tmp_path: Path) -> None:
        """480 s after its pull `b` is given up, and a little later what is kept of `a`, which is then waited for."""
        summary = self.judge(tmp_path, "vllm-0.33")
        assert summary.requests.finished == 2
        assert summary.recomputed_tokens.by_cause["load-failure"] == 2 * 56
        assert summary.latency_s.e2e.p99 == pytest.approx(960, abs=0.2)

    def test_the_circle_is_reported(self, tmp_path: Path) -> None:
        summary = self.judge(tmp_path, "vllm-0.33")
        assert summary.circular_waits == [
            CircularWait(producer="P0", consumer="D0", kept="a", reserved="b", since_s=0.021, until_s=480.005)
        ]
        console = Console(width=400, file=StringIO())
        print_report(summary, console)
        assert isinstance(console.file, StringIO)
        assert (
            "! P0 and D0 waited for each other from 21.0 ms to 480.0 s: P0 kept a, for which D0 had no room, and D0 "
            "room for b, for which P0 had none"
        ) in console.file.getvalue()

    @pytest.mark.parametrize("ranks", [((1, 1), (1, 1)), ((2, 1), (2, 1))], ids=str)
    def test_ideally_one_gives_way(self, ranks: tuple[Sizes, Sizes]) -> None:
        """After 10 s, once it is clear that nothing else happens: `b` is computed where it is, and then `a` pulled.

        The producer, which computes `b` after that, keeps nothing of it.
        """
        small = role(num_gpu_blocks=17)
        config = pair(prefill=small, decode=small, ranks=ranks)
        played = play(config, self.CLIENTS, self.FAULT, behaviour="ideal", recompute=True)
        assert not played.violations
        assert played.ends() == {"b": ("finished", "D0", 10_044), "a": ("finished", "D0", 10_080)}
        assert {event.request_id for event in played.of("load.failed")} == {"b"}
        assert not played.of("send.expired")
        assert [played.num_free(name) for name in ("P0", "D0")] == [16, 16]

    def test_but_not_at_the_cost_of_a_request(self, tmp_path: Path) -> None:
        """Under the policy `fail` to give way would be to fail."""
        summary = self.judge(tmp_path, "ideal", "fail")
        assert (summary.requests.failed, summary.requests.finished) == (1, 1)
        assert [reason.cause for reason in summary.reasons] == ["Timeout waiting for P side ready."]
        assert summary.latency_s.e2e.p99 == pytest.approx(480, abs=0.2)

    @pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
    def test_with_one_order_both_are_served_at_once(self, tmp_path: Path, behaviour: str) -> None:
        """The consumer hears of each request when its prompt is ready: after 21 and 49 ms."""
        summary = self.judge(tmp_path, f"{behaviour} proxy_legs=in-turn")
        assert summary.verdict == "passed"
        assert summary.requests.finished == 2
        assert summary.circular_waits == []
        assert "load-failure" not in summary.recomputed_tokens.by_cause
        assert summary.latency_s.e2e.p99 == pytest.approx(0.096, abs=1e-6)

    def test_where_there_is_room_nobody_waits(self, tmp_path: Path) -> None:
        summary = judge(tmp_path, pair(), self.CLIENTS, self.FAULT)
        assert summary.circular_waits == []
        assert summary.requests.finished == 2


class TestLegsInTurn:
    """What becomes of a consumer's leg that is never sent."""

    IN_TURN = "vllm-0.33 proxy_legs=in-turn"
    ONE = workload(request("a", prompt_tokens=56))

    @pytest.mark.parametrize("fault", ["peer-crash:instance=P0,at=5ms", "mooncake.engine-init:instance=P0"])
    def test_without_a_prefill_it_is_refused(self, fault: str) -> None:
        played = play(pair(), self.ONE, fault, behaviour=self.IN_TURN)
        assert [(event.instance, event.cause) for event in played.of("request.rejected")] == [("D0", "prefill failed")]
        assert not played.of("pull.sent")

    def test_its_client_may_go_away(self) -> None:
        gone = workload(*self.ONE.arrivals, aborts=[("a", 5)])
        played = play(pair(), gone, behaviour=self.IN_TURN)
        assert played.ends()["a"] == ("aborted", "D0", 5.0)
        assert not played.of("pull.sent")
        assert not played.violations
