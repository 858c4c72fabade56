"""Public incidents of class E: aborts and signals that come twice, late, or for nobody, and the engine that dies of it.

Each class is an incident; what 0.33.0 still has wrong is told by its own profile, what was mended before by a switch.
"""

from dataclasses import replace

import pytest

from kvreplay.conformance.vector import Json
from tests.incidents.clusters import crashes, how, laws, producer_and_consumer
from tests.incidents.scripted import Outcome, engine, request
from tests.scenarios import stage
from tests.scenarios.stage import Play, pair, play, workload
from tests.scenarios.test_multi import both

IGNORED = "unexpected_reports=ignore"


@pytest.mark.incident("E1")
class TestE1AbortedAndReportedAsReceivedAndAsSentInOneStep:
    """vllm#46240, vllm#46304, vllm#47499: the first signal frees the request, the second finds it gone."""

    def outcome(self, *switches: str, behaviour: str = "vllm-0.33") -> Outcome:
        """R is parked for 64 tokens; aborted in step 2; both signals come in step 4."""
        never_by_itself: dict[str, Json] = {"external": {"tokens": 64, "async": True}}
        events = [{"step": 2, "abort": ["R"]}, {"step": 4, "finished_recving": ["R"], "finished_sending": ["R"]}]
        return Outcome(engine(12), [request("R", 64, **never_by_itself)], *switches, behaviour=behaviour, events=events)

    def test_the_second_one_is_fatal(self) -> None:
        outcome = self.outcome()
        assert outcome.laws == {"NO-FATAL"}
        assert outcome.error == "finished_sending of unknown request R"
        assert outcome.free == [8, 8, 8, 8]

    @pytest.mark.parametrize(("switches", "behaviour"), [((IGNORED,), "vllm-0.33"), ((), "ideal")])
    def test_it_is_skipped_and_the_blocks_come_back_once(self, switches: tuple[str, ...], behaviour: str) -> None:
        outcome = self.outcome(*switches, behaviour=behaviour)
        assert outcome.laws == set()
        assert outcome.free == [8, 8, 8, 8, 12]


@pytest.mark.incident("E2")
class TestE2CompletionForARequestThatIsGone:
    """vllm#43226, vllm#45628, vllm#43265, vllm#37837: R is freed in step 5, S has its blocks when the signals come."""

    REQUESTS = (request("R", 64, max_tokens=5), request("S", 96, 6, max_tokens=6))

    def outcome(self, *kinds: str, behaviour: str = "vllm-0.33") -> Outcome:
        events = [{"step": 8 + place, kind: ["R"]} for place, kind in enumerate(kinds)]
        return Outcome(engine(8), [*self.REQUESTS], behaviour=behaviour, events=events)

    @pytest.mark.parametrize("kind", ["finished_sending", "finished_recving"])
    def test_it_is_fatal(self, kind: str) -> None:
        outcome = self.outcome(kind)
        assert outcome.laws == {"NO-FATAL"}
        assert outcome.error == f"{kind} of unknown request R"
        assert outcome.finished == ["R"]

    def test_it_is_dropped(self) -> None:
        """Both, in turn: S keeps what it has, and ends as it would have."""
        outcome = self.outcome("finished_sending", "finished_recving", behaviour="ideal")
        assert outcome.laws == set()
        assert outcome.finished == ["R", "S"]
        assert outcome.free == self.outcome(behaviour="ideal").free

    def test_over_mooncake_before_0_33_a_pull_of_nothing_reports_such_a_one(self) -> None:
        """Its client is gone before D's engine has it: the pull that only frees P's blocks is heard of as a load."""
        two = workload(stage.request("a"), stage.request("b"))
        played = play(pair(), two, "abort:when=queued,request=a", behaviour="post-50984")
        assert crashes(played) == [("D0", "finished_recving of unknown request a")]
        mended = play(pair(), two, "abort:when=queued,request=a", behaviour=f"post-50984 {IGNORED}")
        assert how(mended) == {"a": "aborted", "b": "finished"}
        assert laws(mended) == set()


@pytest.mark.incident("E4")
class TestE4FinishedWithoutHavingBeenScheduled:
    """vllm#56841: R2 waits for R1's slot, and is aborted there. A connector that did not expect it is
    `TestAbortedBeforeItHadBlocks` in test_offload_hazards (vllm#49146)."""

    @pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
    def test_the_scheduler(self, behaviour: str) -> None:
        spec = engine(12, max_num_seqs=1, connector=True)
        requests = [request("R1", 32, max_tokens=9), request("R2", 32)]
        outcome = Outcome(spec, requests, behaviour=behaviour, events=[{"step": 2, "abort": ["R2"]}])
        assert outcome.laws == set()
        assert outcome.finished == ["R1"]
        assert outcome.computed("R2") == []

    @pytest.mark.parametrize("instance", ["P0", "D0"])
    @pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
    def test_over_mooncake(self, behaviour: str, instance: str) -> None:
        """On either side, with a CPU tier beside: the connectors have seen nothing of it but its end."""
        base = both("mooncake,offloading")
        roles = {
            name: replace(own, scheduler=replace(own.scheduler, max_num_seqs=1, max_num_batched_tokens=8))
            for name, own in base.roles.items()
        }
        clients = workload(
            stage.request("r1", prompt_tokens=40, output_tokens=9), stage.request("r2", 1, prompt_tokens=16)
        )
        fault = "abort:when=queued,request=r2" if instance == "D0" else "mooncake.p-abort-while-waiting:request=r2"
        played = play(replace(base, roles=roles), clients, fault, behaviour=behaviour, recompute=True)
        assert how(played) == {"r1": "finished", "r2": "aborted" if instance == "D0" else "finished"}
        assert not played.of("request.scheduled", instance=instance, request_id="r2")
        assert (laws(played), crashes(played)) == (set(), [])


@pytest.mark.incident("E5")
class TestE5AbortAtEveryPointOfATransfer:
    """dynamo#8624: 64 tokens go from P to D, and the client leaves at some point of that. `b` shares their steps."""

    def play(self, at_ms: float, behaviour: str, *faults: str) -> Play:
        clients = workload(
            *(stage.request(name, at, prompt_tokens=64) for name, at in (("a", 0), ("b", 0.5))), aborts=[("a", at_ms)]
        )
        return play(producer_and_consumer(), clients, *faults, behaviour=behaviour)

    @pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
    @pytest.mark.parametrize("point", range(13))
    def test_it_is_safe(self, point: int, behaviour: str) -> None:
        """Every 4 ms, from its way to D (0) through pull, write (12) and promotion (16) to its last token (46)."""
        played = self.play(4 * point, behaviour)
        assert how(played) == {"a": "aborted" if point < 12 else "finished", "b": "finished"}
        assert (laws(played), crashes(played)) == (set(), [])
        assert played.num_free("P0") == played.num_free("D0") == 12

    def test_before_0_33_the_first_point_is_fatal(self) -> None:
        played = self.play(0, "pre-50984")
        assert crashes(played) == [("D0", "finished_recving of unknown request a")]
        assert how(played)["b"] == "failed"


@pytest.mark.incident("E7")
class TestE7OfTwoConnectorsBothReportALoad:
    """vllm#53049: Mooncake and a CPU tier; the load of R is Mooncake's, and is reported once more when R has ended. Who
    says so the second time makes no difference to the scheduler: here it is said by the ranks of D, each of which
    reports twice, as the children of a MultiConnector are not told apart."""

    def play(self, behaviour: str) -> Play:
        """R ends at 26 ms, the second report comes at 75: s is in the middle of its output."""
        base = both("mooncake,offloading")
        config = replace(base, topology=replace(base.topology, decode_tp=2))
        clients = workload(
            stage.request("r", prompt_tokens=16, output_tokens=1),
            stage.request("s", 30, prompt_tokens=16, output_tokens=8),
        )
        return play(config, clients, "mooncake.rank-duplicate:request=r,instance=D0,delay=60ms", behaviour=behaviour)

    def test_it_is_fatal(self) -> None:
        played = self.play("vllm-0.33")
        assert crashes(played) == [("D0", "finished_recving of unknown request r")]
        assert how(played) == {"r": "finished", "s": "failed"}

    @pytest.mark.parametrize("behaviour", [f"vllm-0.33 {IGNORED}", "ideal"])
    def test_it_is_ignored(self, behaviour: str) -> None:
        played = self.play(behaviour)
        assert how(played) == {"r": "finished", "s": "finished"}
        assert (laws(played), crashes(played)) == (set(), [])
        assert [event.request_id for event in played.of("load.finished", instance="D0")] == ["r", "s"]
