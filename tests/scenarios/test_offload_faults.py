"""Each fault of the offloading connector: what comes of it in 0.33.0, and what should."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvreplay.faults.catalogue import catalogue
from kvreplay.faults.injector import Injector
from kvreplay.ids import NS_PER_S
from kvreplay.replay.config import ReplayConfig
from kvreplay.sim.envelope import Delivery, Envelope
from kvreplay.trace.workload import Workload
from kvreplay.verdict.model import Summary
from tests.scenarios.offload_stage import offloading, there_and_back
from tests.scenarios.stage import judge, play, request, workload

TIERED: dict[str, Any] = {"spec_name": "TieringOffloadingSpec", "cpu_chunks": 15}
"""`f` drives the chunks of `a` out of the CPU tier too: what `b` finds is in storage."""


class Case(NamedTuple):
    inject: tuple[str, ...]
    symptom: str
    """Of 0.33.0: the verdict, and a word of what is said."""
    config: ReplayConfig
    workload: Workload
    loses: str = ""
    """Under `ideal`: the tier of whose contents `b` gets nothing."""


def case(*inject: str, symptom: str, config: ReplayConfig | None = None, f_ms: float = 100, loses: str = "CPU") -> Case:
    return Case(inject, symptom, config or offloading(), there_and_back(f_ms=f_ms, b_ms=1500), loses)


CASES = {
    "load-dma-fail": case(
        "offload.load-dma-fail", symptom="crashed: AssertionError get_finished: transfer_result.success"
    ),
    "store-dma-fail": case(
        "offload.store-dma-fail:request=a",
        symptom="crashed: AssertionError get_finished: transfer_result.success",
    ),
    "submit-refused": case(
        "offload.submit-refused:request=b", symptom="crashed: AssertionError start_kv_transfers: success"
    ),
    "load-slow": case("offload.load-slow", symptom="passed", loses=""),
    "store-slow": case("offload.store-slow:request=a,delay=200ms", symptom="passed", loses=""),
    "copy-hang": case("offload.copy-hang:request=b", symptom="stalled: remote KV"),
    "late-read": case("offload.late-read:request=a", symptom="violated: CONTENT", f_ms=15),
    "load-corrupt": case("offload.load-corrupt", symptom="violated: CONTENT"),
    "store-corrupt": case("offload.store-corrupt:request=a", symptom="violated: CONTENT"),
    "done-lost": case("offload.done-lost:request=b", symptom="stalled: remote KV"),
    "ack-lost": case("offload.ack-lost:request=b,nth=1", symptom="stalled: remote KV", loses=""),
    "ack-late": case("offload.ack-late:request=b", symptom="passed", loses=""),
    "ack-duplicate": case("offload.ack-duplicate:request=a", symptom="crashed: AssertionError job_status", loses=""),
    "alloc-fail": case("offload.alloc-fail:request=a,nth=1", symptom="passed", loses=""),
    "evict-between": case(
        "offload.evict-between:request=b,nth=1", symptom="crashed: AssertionError chunk not found in cache"
    ),
    "not-ready-hit": case(
        "offload.store-slow:request=a,delay=9s",
        "offload.not-ready-hit:request=b",
        symptom="crashed: AssertionError chunk is not ready for reading",
        config=offloading(num_gpu_blocks=21),
        loses="",  # it asks again, and waits for the store
    ),
    "lookup-pending-forever": case("offload.lookup-pending-forever:request=b", symptom="stalled: an undecided lookup"),
    "promotion-fail": case("offload.promotion-fail:count=1", symptom="passed", config=offloading(**TIERED), loses=""),
    "tier-store-fail": case(
        "offload.tier-store-fail:request=a", symptom="passed", config=offloading(**TIERED), loses="STORAGE"
    ),
    "tier-slow": case("offload.tier-slow:request=b", symptom="passed", config=offloading(**TIERED), loses=""),
}


def told(summary: Summary) -> str:
    """The verdict, and what it says of the worst that happened."""
    if summary.crashes:
        return f"{summary.verdict}: {summary.crashes[0].exception} {summary.crashes[0].message}"
    if summary.stalled:
        return f"{summary.verdict}: {summary.stalled[0].waiting_on}"
    if summary.violations:
        return f"{summary.verdict}: {summary.violations[0].checker}"
    return summary.verdict


def test_every_row_has_a_case() -> None:
    rows = {name for name in catalogue() if name.startswith("offload.")}
    assert {f"offload.{name}" for name in CASES} == rows


@pytest.mark.parametrize("name", CASES)
def test_what_0_33_does(name: str, tmp_path: Path) -> None:
    inject, symptom, config, requests, _ = CASES[name]
    summary = judge(tmp_path, config, requests, *inject)
    assert told(summary).startswith(symptom)
    assert all(fault.fired for fault in summary.faults)
    if name.endswith("corrupt"):
        assert {violation.fault for violation in summary.violations} == set(inject)


@pytest.mark.parametrize("name", CASES)
def test_what_ideal_does(name: str, tmp_path: Path) -> None:
    """Nobody fails, stalls or reads anything wrong, and nothing is held for ever."""
    inject, _, config, requests, loses = CASES[name]
    summary = judge(tmp_path, config, requests, *inject, behaviour="ideal", policy="recompute")
    assert told(summary) == "passed"
    assert summary.requests.finished == 3
    assert all(fault.fired for fault in summary.faults)
    assert summary.tiers is not None
    found = summary.tiers.hit_tokens.keys() & {"CPU", "STORAGE"}
    assert bool(summary.tiers.saved_tokens) == (not loses), found


@pytest.mark.parametrize("name", ["load-dma-fail", "copy-hang", "load-corrupt", "done-lost"])
def test_under_policy_fail_only_the_loading_request_fails(name: str, tmp_path: Path) -> None:
    inject, _, config, requests, _ = CASES[name]
    summary = judge(tmp_path, config, requests, *inject, behaviour="ideal", policy="fail")
    assert summary.verdict == "passed"
    assert (summary.requests.finished, summary.requests.failed) == (2, 1)
    assert summary.loads.failed == 1


@pytest.mark.parametrize("fault", ["promotion-fail", "copy-hang", "done-lost", "load-dma-fail", "load-corrupt"])
def test_ideally_a_tier_that_fails_again_and_again_is_not_asked_for_ever(fault: str, tmp_path: Path) -> None:
    """What fails on its way to the GPU is in storage all the same, and would be found there each time."""
    inject = f"offload.{fault}:request=b"
    summary = judge(tmp_path, offloading(**TIERED), there_and_back(), inject, behaviour="ideal", policy="recompute")
    assert told(summary) == "passed"
    assert (summary.requests.finished, summary.loads.failed) == (3, 0 if fault == "promotion-fail" else 2)


def test_whose_lookup_goes_in_circles_is_told_so(tmp_path: Path) -> None:
    """What it finds in the storage tier never comes, and it asks for it again."""
    inject, config = ("offload.promotion-fail",), offloading(**TIERED)
    summary = judge(tmp_path, config, there_and_back(b_ms=1500), *inject)
    (stall,) = summary.stalled
    assert (stall.request_id, stall.fault) == ("b", *inject)
    assert stall.waiting_on == "progress: its lookup keeps the connector busy, and is never decided"


def test_who_waits_for_what_another_asks_for_in_circles_goes_in_circles_too(tmp_path: Path) -> None:
    """`c` has the prompt of `b` and more, for which `b` leaves the tier no room: it orders nothing, again and again."""
    config = offloading(**TIERED | {"cpu_chunks": 4}, scheduler={"max_num_batched_tokens": 16})
    requests = workload(
        request("a", prompt_tokens=24, text="abcdef"),
        request("f", 500, prompt_tokens=60),
        request("b", 1500, prompt_tokens=16, text="abcd"),
        request("c", 1500, prompt_tokens=24, text="abcdef"),
    )
    summary = judge(tmp_path, config, requests, "offload.promotion-fail")
    in_circles = "progress: its lookup keeps the connector busy, and is never decided"
    assert [(stall.request_id, stall.waiting_on) for stall in summary.stalled] == [("b", in_circles), ("c", in_circles)]


@pytest.mark.parametrize("overlaps", [False, True])
def test_who_comes_to_an_engine_that_hangs_stalls_with_it(overlaps: bool, tmp_path: Path) -> None:
    """f gets the blocks of a, whose store must first be over, and never is. b only reaches the input queue."""
    config = offloading(scheduler={"async_scheduling": overlaps})
    summary = judge(tmp_path, config, there_and_back(), "offload.copy-hang:request=a")
    assert (summary.requests.finished, summary.requests.stalled, summary.requests.unfinished) == (1, 2, 0)
    assert [(stall.request_id, stall.status, stall.since_s) for stall in summary.stalled] == [
        ("f", "RUNNING", 0.101),
        ("b", "WAITING", 0.401),
    ]
    assert {stall.waiting_on for stall in summary.stalled} == {"a step that never ends"}
    assert {stall.fault for stall in summary.stalled} == {"offload.copy-hang:request=a"}
    assert summary.violations == []
    assert summary.faults[0].followed == {"stalled": 2}


class TestRanks:
    """Two ranks, each with its own copies: both must have done their part."""

    @staticmethod
    def config(tp: int = 2, pp: int = 1, **model: Any) -> ReplayConfig:  # noqa: ANN401 - fields of ModelConfig
        base = offloading(cpu_chunks=256)
        return replace(base, topology=replace(base.topology, tp=tp, pp=pp), model=replace(base.model, **model))

    @pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
    def test_all_parts_come_back(self, behaviour: str, tmp_path: Path) -> None:
        summary = judge(tmp_path, self.config(), there_and_back(), behaviour=behaviour)
        assert summary.verdict == "passed"
        assert summary.tiers is not None
        assert summary.tiers.saved_tokens == 16

    @pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (2, 2)], ids=str)
    @pytest.mark.parametrize("model", [{"use_mla": True}, {"num_kv_heads": 1}, {"num_kv_heads": 4}], ids=str)
    def test_however_the_model_is_cut(self, sizes: tuple[int, int], model: dict[str, Any], tmp_path: Path) -> None:
        """Of latents the first rank stores those of its stage only: with several stages each has to keep its own."""
        summary = judge(tmp_path, self.config(*sizes, **model), there_and_back())
        assert summary.verdict == "passed"
        assert summary.tiers is not None
        assert summary.tiers.saved_tokens == 16

    def test_what_one_rank_loads_wrong_is_seen(self, tmp_path: Path) -> None:
        summary = judge(tmp_path, self.config(), there_and_back(), "offload.load-corrupt:rank=1")
        assert told(summary) == "violated: CONTENT"

    def test_one_ranks_lost_report_keeps_the_load_open(self, tmp_path: Path) -> None:
        fault = "offload.ack-lost:request=b,rank=1,nth=1"
        summary = judge(tmp_path, self.config(), there_and_back(), fault)
        assert told(summary) == "stalled: remote KV"
        summary = judge(tmp_path, self.config(), there_and_back(), fault, behaviour="ideal")
        assert told(summary) == "passed"


def test_a_lookup_that_is_never_decided_is_lost_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request is passed over in every step, and asks for each of its chunks each time: in vain, as is known."""
    dropped: list[str] = []
    real = Injector.intercept

    def intercept(self: Injector, envelope: Envelope, now_ns: int) -> list[Delivery] | None:
        deliveries = real(self, envelope, now_ns)
        if deliveries == []:
            dropped.append(envelope.conversation)
        return deliveries

    monkeypatch.setattr(Injector, "intercept", intercept)
    played = play(offloading(), there_and_back(), "offload.lookup-pending-forever:request=b")
    assert played.ends()["b"][0] == "stalled"
    assert dropped == ["E0/manager/lookup.query/b"]


def test_nobody_polls_for_a_lookup_that_is_asked_in_vain() -> None:
    """A real engine asks every millisecond; as long as nothing changes, neither does the answer."""
    requests = there_and_back(b_ms=1500)
    late = replace(requests.arrivals[-1], request_id="late", time_ns=300 * NS_PER_S)
    both = replace(requests, arrivals=(*requests.arrivals, late))
    played = play(offloading(), both, "offload.lookup-pending-forever:request=b")
    assert [(event.request_id, event.cause) for event in played.of("request.stalled")] == [("b", "an undecided lookup")]
    ends = {event.request_id: event.step or 0 for event in played.of("request.finished")}
    assert 0 < ends["late"] < 1_000


def test_nor_for_its_own_stores_to_end() -> None:
    """One that has been preempted is not let in again before what it stores is out."""
    played = play(
        offloading(),
        workload(request("a", 0, prompt_tokens=16, output_tokens=4)),
        "offload.ack-late:request=a,delay=40s",
        "scheduler.preempt:request=a,at=request.first_token",
        "offload.not-ready-hit:nth=9",  # lookups are watched: how often they are asked could matter
    )
    (end,) = played.of("request.finished")
    assert end.time_ns > 40 * NS_PER_S
    assert 0 < (end.step or 0) < 100


@pytest.mark.parametrize("interval", [1, 2])
def test_nor_where_prefills_keep_their_distance(interval: int) -> None:
    """While nobody runs there is nothing to keep it from."""
    config = offloading(scheduler={"prefill_schedule_interval": interval})
    played = play(config, there_and_back(b_ms=1500), "offload.load-slow:request=b,delay=40s")
    ends = {event.request_id: event for event in played.of("request.finished")}
    assert ends["b"].time_ns > 40 * NS_PER_S
    assert 0 < (ends["b"].step or 0) < 100
