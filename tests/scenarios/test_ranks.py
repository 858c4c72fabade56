"""Instances of several ranks that are cut differently on either side: runs, faults of single ranks, what comes late.

A request of a tp 2 consumer is pulled from a tp 4 producer by two ranks, each from two peers: four pulls.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvreplay.replay.config import Policy, ReplayConfig
from tests.scenarios.random_worlds import PAIR_FAULTS, World, worlds
from tests.scenarios.stage import Sizes, judge, pair, play, request, workload

ONE = workload(request("a"))
FOUR_TO_TWO: tuple[Sizes, Sizes] = ((4, 1), (2, 1))
GENERATIONS = ("pre-50984", "post-50984", "vllm-0.33", "ideal")


def ranked(**settings: float) -> ReplayConfig:
    return pair(ranks=FOUR_TO_TWO, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "ranks",
    [FOUR_TO_TWO, ((2, 1), (4, 1)), ((1, 1), (4, 1)), ((4, 1), (1, 1)), ((2, 2), (2, 1)), ((1, 2), (2, 2))],
    ids=str,
)
@pytest.mark.parametrize("check", ["on", "off"])
def test_a_run_of_any_cut_ends_as_that_of_single_ranks(ranks: tuple[Sizes, Sizes], check: str) -> None:
    requests = workload(*(request(f"r{place}", place * 3, prompt_tokens=10 + place) for place in range(4)))
    cut = play(pair(ranks=ranks, check=check), requests)  # type: ignore[arg-type]
    assert cut.ends() == play(pair(), requests).ends()
    assert cut.violations == []
    assert len(cut.of("request.finished", instance="D0")) == 4


@pytest.mark.parametrize(
    ("fault", "ends", "recomputed_ms"),
    [
        ("mooncake.peer-one-of-k:order=first", ["stalled", "failed", "failed"], 46),
        ("mooncake.peer-one-of-k:order=last", ["stalled", "failed", "failed"], 5035),
        ("mooncake.peer-silent-one-of-k", ["stalled", "failed", "failed"], 540_034),
        ("mooncake.rank-silent:rank=1", ["stalled", "stalled", "stalled"], 1046),
        ("mooncake.bootstrap-partial-ranks:which=first", ["stalled", "stalled", "stalled"], 34),
        ("mooncake.bootstrap-partial-ranks:which=last", ["stalled", "stalled", "stalled"], 34),
    ],
)
def test_a_fault_of_one_rank_in_each_generation(fault: str, ends: list[str], recomputed_ms: int) -> None:
    found = [play(ranked(), ONE, fault, behaviour=name).ends()["a"][0] for name in GENERATIONS[:3]]
    assert found == ends
    ideal = play(ranked(), ONE, fault, behaviour="ideal", recompute=True)
    assert ideal.ends() == {"a": ("finished", "D0", recomputed_ms)}
    assert ideal.violations == []
    assert {node.instance.scheduler.pool.num_free for node in ideal.cluster.nodes} == {32}


@pytest.mark.incident("L3")
class TestReportsOfRanks:
    """A report that counts twice, or for another rank, completes a load that a rank has not received."""

    @pytest.mark.parametrize(
        ("faults", "open_pulls"),
        [
            (("mooncake.rank-duplicate:rank=0", "mooncake.peer-silent-one-of-k:rank=1"), [3]),
            (("mooncake.rank-early:rank=0", "mooncake.resp-delayed:rank=1,delay=20s"), [2, 3]),
        ],
    )
    def test_a_load_is_complete_though_pulls_are_open(
        self, tmp_path: Path, faults: tuple[str, ...], open_pulls: list[int]
    ) -> None:
        summary = judge(tmp_path, ranked(), ONE, *faults)
        assert [(found.checker, found.detail, found.fault) for found in summary.violations] == [
            ("RANK-AGREE", f"complete though pull {place} of it is still open", faults[0]) for place in open_pulls
        ]

    @pytest.mark.parametrize("fault", ["rank-duplicate:rank=0", "rank-early:rank=0", "rank-late:rank=1"])
    @pytest.mark.parametrize("policy", ["fail", "recompute"])
    def test_ideally_each_rank_counts_once(self, tmp_path: Path, fault: str, policy: Policy) -> None:
        faults = (f"mooncake.{fault}", "mooncake.resp-delayed:rank=1,delay=20s")
        summary = judge(tmp_path, ranked(), ONE, *faults, behaviour="ideal", policy=policy)
        assert summary.verdict == "passed"
        assert summary.requests.finished == 1


class TestLateBytes:
    """The client of `a` goes away while one rank's write is still to land; `b` then gets its blocks."""

    REQUESTS = workload(
        request("a", prompt_tokens=40), request("b", 60, prompt_tokens=40, output_tokens=8), aborts=[("a", 30)]
    )
    FAULT = "mooncake.engine-late:nth=2,request=a,delay=75ms"

    def test_a_late_part_of_a_row_lands_in_anothers_blocks_and_names_its_fault(self, tmp_path: Path) -> None:
        config = pair(ranks=FOUR_TO_TWO)
        summary = judge(tmp_path, config, self.REQUESTS, self.FAULT)
        assert {(found.checker, found.fault) for found in summary.violations} >= {("FENCE", self.FAULT)}
        assert {found.fault for found in summary.violations} == {self.FAULT}

    def test_ideally_it_is_refused(self, tmp_path: Path) -> None:
        summary = judge(tmp_path, pair(ranks=FOUR_TO_TWO), self.REQUESTS, self.FAULT, behaviour="ideal")
        assert summary.violations == []


def test_bytes_that_never_arrive_name_their_fault(tmp_path: Path) -> None:
    """Status 0 and half of one rank's part missing: nobody notices, but what is read is wrong."""
    fault = "mooncake.engine-partial:nth=1"
    summary = judge(tmp_path, ranked(), ONE, fault)
    assert {(found.checker, found.fault) for found in summary.violations} == {("CONTENT", fault)}
    assert judge(tmp_path, ranked(), ONE, fault, behaviour="ideal", policy="recompute").verdict == "passed"


def test_one_corrupted_part_of_a_row_names_its_fault_though_others_land_after_it(tmp_path: Path) -> None:
    summary = judge(tmp_path, ranked(), ONE, "corrupt:nth=1")
    assert [(found.checker, found.fault) for found in summary.violations] == [("CONTENT", "corrupt:nth=1")]


RANK_FAULTS = (
    *PAIR_FAULTS,
    "mooncake.peer-one-of-k:p=0.5",
    "mooncake.peer-one-of-k:order=last,p=0.5",
    "mooncake.peer-silent-one-of-k:p=0.3",
    "mooncake.bootstrap-partial-ranks:p=0.5",
    "mooncake.bootstrap-partial-ranks:which=first,p=0.5",
    "mooncake.rank-silent:p=0.3",
    "mooncake.rank-duplicate:p=0.5",
    "mooncake.rank-early:p=0.5",
    "mooncake.engine-late:p=0.5,delay=200ms",
    "mooncake.engine-raise:p=0.3",
    "mooncake.p-abort-while-waiting:p=0.5",
    "mooncake.queue-saturation:p=0.3",
)
SIZES: tuple[Sizes, ...] = ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2))


@settings(max_examples=80, deadline=None)
@given(
    worlds(is_pair=True, faults=RANK_FAULTS, behaviours=("ideal",), max_faults=4),
    st.sampled_from(SIZES),
    st.sampled_from(SIZES),
)
def test_ideally_ranks_break_no_law_under_any_mix_of_faults(world: World, prefill: Sizes, decode: Sizes) -> None:
    topology = replace(
        world.config.topology,
        prefill_tp=prefill[0],
        prefill_pp=prefill[1],
        decode_tp=decode[0],
        decode_pp=decode[1],
    )
    played = replace(world, config=replace(world.config, topology=topology)).play()
    assert played.violations == []
    assert played.of("engine.crashed", "request.stalled") == []
