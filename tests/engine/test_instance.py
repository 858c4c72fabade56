"""Instance: a scheduler under a clock. Steps take 10 ms, an empty one sleeps 1 ms."""

from collections.abc import Sequence
from typing import Any

import pytest

from kvreplay.connectors.scripted.connector import RequestScript
from kvreplay.engine.connector import KVConnectorOutput
from kvreplay.engine.instance import Instance
from kvreplay.engine.request import Request
from kvreplay.ids import NS_PER_MS
from kvreplay.sim.event_loop import EventLoop
from tests.engine.bench import Bench, load
from tests.scenarios.stage import TIMING, Play, play, request, role, single, workload


class ScriptedWorkers:
    """Reports what it is told to, when it is next asked."""

    def __init__(self) -> None:
        self.pending = KVConnectorOutput()

    def handle_preemptions(self, metadata: Any) -> None:  # noqa: ANN401 - opaque
        pass

    def start_load_kv(self, metadata: Any, compute_until_ns: int) -> int:  # noqa: ANN401 - opaque
        return 0

    def has_report(self) -> bool:
        return bool(self.pending)

    def gives_back(self) -> bool:
        return bool(self.pending.finished_sending)

    def get_finished(self, finished_req_ids: Sequence[str]) -> KVConnectorOutput | None:
        pending, self.pending = self.pending, KVConnectorOutput()
        return pending or None


class Stage:
    """One instance and its connector's workers, in virtual milliseconds."""

    def __init__(self, scripts: dict[str, RequestScript] | None = None, **settings: Any) -> None:  # noqa: ANN401
        self.loop = EventLoop()
        self.bench = Bench(scripts=scripts or {}, use_lockstep=True, **settings)
        self.workers = ScriptedWorkers()
        self.ended: list[tuple[float, str]] = []
        self.instance = Instance("E0", 1, self.loop, self.bench.scheduler, TIMING, self.bench.log, workers=self.workers)
        self.instance.on_finished = self._note_end

    def _note_end(self, request: Request) -> None:
        self.ended.append((self.now_ms, request.request_id))

    @property
    def now_ms(self) -> float:
        return self.loop.now_ns / NS_PER_MS

    def at(self, ms: float, action: Any, *arguments: Any, **settings: Any) -> None:  # noqa: ANN401 - any call
        self.loop.call_at(round(ms * NS_PER_MS), lambda: action(*arguments, **settings))

    def submit(self, name: str, prompt: int, **settings: Any) -> None:  # noqa: ANN401
        self.instance.submit(self.bench.make(name, prompt, **settings))

    def report(self, **reports: list[str]) -> None:
        self.workers.pending = KVConnectorOutput(**reports)  # type: ignore[arg-type]
        self.instance.poke()

    def run(self, until_ms: float | None = None) -> None:
        """To the end, or to that instant: what is done by then has been told."""
        self.loop.run_until_quiescent(None if until_ms is None else round(until_ms * NS_PER_MS))
        if until_ms is not None:
            self.loop.call_at(round(until_ms * NS_PER_MS), self.instance.catch_up)
            self.loop.run_until_quiescent(round(until_ms * NS_PER_MS))

    def log(self, *kinds: str) -> list[tuple[float, str, str | None]]:
        """(ms, kind, request) of the events of these kinds."""
        return [
            (event.time_ns / NS_PER_MS, event.kind.partition(".")[2] or event.kind, event.request_id)
            for event in self.bench.sink.events
            if event.kind in kinds
        ]


def circling(num_gpu_blocks: int, **scripts: RequestScript) -> Stage:
    """Whoever takes a part of what it needs while `a`, which has ended, holds its blocks is preempted for ever."""
    return Stage(
        {"a": RequestScript(delay_free=True), **scripts},
        num_gpu_blocks=num_gpu_blocks,
        enable_prefix_caching=False,
        max_num_batched_tokens=16,
        scheduler_reserve_full_isl=False,
    )


class TestClock:
    def test_steps_follow_each_other_without_a_gap(self) -> None:
        stage = Stage()
        stage.at(3, stage.submit, "a", 8)
        stage.run(45)
        assert [ms for ms, _, _ in stage.log("step")] == [3, 13, 23, 33, 43]
        assert stage.log("request.first_token") == [(13, "first_token", "a")]

    def test_who_arrives_during_a_step_is_in_the_next(self) -> None:
        stage = Stage()
        stage.at(0, stage.submit, "a", 8)
        stage.at(5, stage.submit, "b", 8)
        stage.at(10, stage.submit, "c", 8)
        stage.run(12)
        assert [row for row in stage.log("request.scheduled") if row[0] == 10] == [
            (10, "scheduled", "b"),
            (10, "scheduled", "c"),
        ], "what arrives as the step ends has arrived"

    def test_an_instance_without_requests_does_nothing_until_one_comes(self) -> None:
        stage = Stage()
        stage.at(0, stage.submit, "a", 8, max_tokens=1)
        stage.run()
        assert (stage.now_ms, stage.instance.num_requests) == (10, 0)
        stage.at(12.3, stage.submit, "b", 8)
        stage.run(13)
        assert stage.log("step")[-1] == (12.3, "step", None), "it was blocked on its queue: no grid to wait for"

    @pytest.mark.parametrize("gives_back", [True, False])
    def test_who_goes_in_circles_gets_on_when_an_ended_request_gives_its_blocks_back(self, gives_back: bool) -> None:
        """`b` takes half of what it needs and is preempted, again and again: only `a` can end that, or nobody."""
        stage = circling(11)
        stage.at(0, stage.submit, "a", 20, max_tokens=1)
        stage.at(30, stage.submit, "b", 32, max_tokens=1)
        stage.at(60_001, stage.report, finished_sending=["a"] if gives_back else [])
        stage.run()
        assert stage.now_ms >= 60_001
        assert [name for _, name in stage.ended] == (["a", "b"] if gives_back else ["a"])
        assert list(stage.bench.scheduler.livelocked) == ([] if gives_back else ["b"])

    @pytest.mark.parametrize(
        ("report", "ended"),
        [
            ({}, ["a"]),
            ({"finished_sending": ["a"]}, ["a", "b", "c"]),
            ({"finished_recving": ["d"]}, ["a", "d", "b", "c"]),
        ],
        ids=["nothing", "blocks of an ended request", "a load"],
    )
    def test_who_waits_behind_a_circle_keeps_it_from_no_end(
        self, report: dict[str, list[str]], ended: list[str]
    ) -> None:
        """`c` is never looked at while `b` goes in circles, and `d` is parked for a load."""
        stage = circling(17 if "d" in ended else 15, d=RequestScript(tokens=16, is_async=True))
        stage.at(0, stage.submit, "a", 20, max_tokens=1)
        stage.at(25, stage.submit, "d", 17, max_tokens=1)
        stage.at(40, stage.submit, "b", 44 if "d" in ended else 32, max_tokens=1)
        stage.at(40, stage.submit, "c", 40, max_tokens=1)
        if report:
            stage.at(60_001, stage.report, **report)
        stage.run()
        assert [name for _, name in stage.ended] == ended
        assert list(stage.bench.scheduler.livelocked) == ([] if report else ["b"])

    def test_an_abort_ends_a_circle(self) -> None:
        stage = circling(11)
        stage.at(0, stage.submit, "a", 20, max_tokens=1)
        stage.at(30, stage.submit, "b", 32, max_tokens=1)
        stage.at(40, stage.submit, "c", 8, max_tokens=1)
        stage.at(60_001, stage.instance.abort, "b")
        stage.run()
        assert [name for _, name in stage.ended] == ["a", "b", "c"]

    def test_a_prompt_beyond_the_models_length_is_rejected(self) -> None:
        stage = Stage(max_model_len=16)
        stage.at(0, stage.submit, "a", 16)
        stage.run()
        assert stage.log("request.rejected") == [(0, "rejected", "a")]
        assert stage.ended == [(0, "a")]

    def test_ends_are_told_when_their_step_ends(self) -> None:
        stage = Stage()
        stage.at(0, stage.submit, "a", 8, max_tokens=3)
        stage.run()
        assert stage.ended == [(30, "a")]


class TestParking:
    """A load is under way and nothing else: the real loop polls every millisecond."""

    @staticmethod
    def parked() -> Stage:
        stage = Stage({"r": load(16)})
        stage.at(0.25, stage.submit, "r", 18)
        return stage

    def test_polls_that_find_nothing_are_left_out(self) -> None:
        stage = self.parked()
        stage.run()
        assert stage.now_ms <= 2
        assert stage.loop.num_live == 0

    @pytest.mark.parametrize(("reported", "seen"), [(5.25, 5.25), (5.26, 6.25), (6.2, 6.25)])
    def test_a_report_is_seen_by_the_next_poll(self, reported: float, seen: float) -> None:
        stage = self.parked()
        stage.at(reported, lambda: stage.report(finished_recving=["r"]))
        stage.run(20)
        assert stage.log("load.finished") == [(seen, "finished", "r")]
        assert stage.log("request.promoted") == [(seen + 1, "promoted", "r")], "by the scan of the poll after it"

    def test_a_request_is_taken_in_by_the_next_poll_too(self) -> None:
        stage = self.parked()
        stage.at(5.5, stage.submit, "a", 8)
        stage.run(7)
        assert stage.log("request.scheduled") == [(6.25, "scheduled", "a")]

    def test_an_abort_waits_for_the_poll_and_the_blocks_for_the_load(self) -> None:
        stage = self.parked()
        stage.at(5.5, stage.instance.abort, "r")
        stage.at(9, lambda: stage.report(finished_recving=["r"]))
        stage.run(7)
        assert stage.log("request.aborted") == [(6.25, "aborted", "r")]
        assert stage.bench.num_free == 15
        stage.run()
        assert stage.bench.num_free == 19
        assert stage.instance.num_requests == 0


class TestWithinAStep:
    def test_an_abort_takes_the_steps_token_with_it(self) -> None:
        stage = Stage()
        stage.at(0, stage.submit, "a", 8)
        stage.at(0, stage.submit, "b", 8)
        stage.at(25, stage.instance.abort, "a")
        stage.run(35)
        (aborted,) = stage.bench.events("request.aborted")
        assert (aborted.time_ns, aborted.num_tokens) == (30 * NS_PER_MS, 2), "the third is dropped"

    def test_an_abort_of_a_last_token_comes_first(self) -> None:
        stage = Stage()
        stage.at(0, stage.submit, "a", 8, max_tokens=2)
        stage.at(20, stage.instance.abort, "a")
        stage.run()
        assert stage.log("request.aborted", "request.finished") == [(20, "aborted", "a")]

    def test_a_report_counts_with_the_step_that_ends_after_it(self) -> None:
        stage = Stage({"r": load(16)})
        stage.at(0, stage.submit, "a", 8)
        stage.at(0, stage.submit, "r", 18)
        stage.at(13, lambda: stage.report(finished_recving=["r"]))
        stage.run(25)
        assert stage.log("load.finished", "request.promoted") == [(20, "finished", "r"), (20, "promoted", "r")]

    def test_a_preemption_from_outside_waits_for_the_step(self) -> None:
        stage = Stage()
        stage.at(0, stage.submit, "a", 8)
        stage.at(15, stage.instance.preempt, "a")
        stage.run(25)
        (preempted,) = stage.bench.events("request.preempted")
        assert (preempted.time_ns, preempted.num_tokens) == (20 * NS_PER_MS, 9)
        assert not stage.instance.preempt("stranger")


class TestDeath:
    def test_a_killed_instance_fails_what_it_has_and_stays_dead(self) -> None:
        stage = Stage()
        stage.at(0, stage.submit, "a", 8)
        stage.at(14, stage.submit, "b", 8)
        stage.at(15, stage.instance.kill, "instance crashed")
        stage.run()
        failed = stage.bench.events("request.failed")
        assert [(event.request_id, event.time_ns, event.num_tokens, event.cause) for event in failed] == [
            ("a", 15 * NS_PER_MS, 1, "instance crashed"),
            ("b", 15 * NS_PER_MS, 0, "instance crashed"),
        ]
        assert stage.instance.is_dead
        stage.instance.poke()
        stage.instance.kill("again")
        stage.run()
        assert len(stage.bench.events("request.failed")) == 2

    def test_what_ended_before_stays_ended(self) -> None:
        stage = Stage({"a": RequestScript(delay_free=True)})
        stage.at(0, stage.submit, "a", 8, max_tokens=1)
        stage.at(15, stage.instance.kill, "instance crashed")
        stage.run()
        assert stage.log("request.finished", "request.failed") == [(10, "finished", "a")]

    def test_an_exception_of_the_engine_is_its_death(self) -> None:
        died: list[float] = []
        stage = Stage({"r": load(16)})
        stage.instance.on_death = lambda: died.append(stage.now_ms)
        stage.at(0, stage.submit, "r", 18)
        stage.at(5, lambda: stage.report(finished_recving=["stranger"]))
        stage.run()
        (crash,) = stage.bench.events("engine.crashed")
        assert (crash.status, crash.cause) == ("AssertionError", "finished_recving of unknown request stranger")
        assert stage.log("request.failed") == [(5, "failed", "r")]
        assert stage.bench.events("request.failed")[0].cause == "engine dead: AssertionError"
        assert died == [5]

    def test_what_finished_in_its_last_step_is_not_heard_of(self) -> None:
        stage = Stage()
        stage.at(0, stage.submit, "a", 8, max_tokens=1)
        stage.at(0, stage.submit, "b", 8)
        stage.at(5, lambda: stage.report(finished_recving=["stranger"]))
        stage.run()
        assert stage.log("request.first_token", "request.finished", "request.failed") == [
            (10, "failed", "a"),
            (10, "failed", "b"),
        ]

    def test_a_raising_forward_pass_loses_its_step(self) -> None:
        stage = Stage()
        stage.at(0, stage.submit, "a", 8)
        stage.at(12, stage.instance.raise_in_next_step, "RuntimeError", "CUDA error")
        stage.run()
        (crash,) = stage.bench.events("engine.crashed")
        assert (crash.time_ns, crash.status, crash.cause) == (20 * NS_PER_MS, "RuntimeError", "CUDA error")
        assert stage.bench.events("request.failed")[0].num_tokens == 1


class TestCoasting:
    @staticmethod
    def steps(played: Play) -> list[tuple[float, int | None]]:
        return [(event.time_ns / NS_PER_MS, event.num_tokens) for event in played.of("step")]

    def test_a_decode_is_one_action_and_the_same_steps(self) -> None:
        played = play(single(), workload(request("a", output_tokens=50)))
        assert self.steps(played) == [(1, 8), *((1 + 10 * step, 1) for step in range(1, 50))]
        assert played.cluster.loop.num_run < 20

    def test_an_arrival_finds_the_step_in_progress(self) -> None:
        played = play(single(), workload(request("a", output_tokens=50), request("b", 234)))
        (first_of_b,) = played.of("request.first_token", request_id="b")
        assert first_of_b.time_ns == 251 * NS_PER_MS, "arrived at 235, scheduled at 241"

    def test_what_it_has_done_is_told_as_of_now(self) -> None:
        config = single(role(num_gpu_blocks=40))
        played = play(config, workload(request("a", prompt_tokens=8, output_tokens=50), request("b", 10_005)))
        sampled = {event.status: event.num_tokens for event in played.of("usage") if event.time_ns == 10**10}
        assert sampled["steps"] == 50
        assert (sampled["computed_tokens"], sampled["running"]) == (57, 0)
        assert (sampled["peak_blocks"], sampled["num_gpu_blocks"]) == (15, 40)

    def test_a_sample_in_the_middle_counts_what_has_begun(self) -> None:
        """At 10 s: steps began at 9,901, 9,911, ..., 9,991; the last is in progress, its 10 tokens are counted."""
        played = play(single(), workload(request("a", 9_900, output_tokens=30)))
        sampled = {event.status: event.num_tokens for event in played.of("usage") if event.time_ns == 10**10}
        assert (sampled["steps"], sampled["computed_tokens"], sampled["running"]) == (10, 17, 1)
        assert sampled["blocks"] == 5, "17 tokens"
