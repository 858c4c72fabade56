"""Public incidents of the scheduler itself: their scenarios, with a scripted connector, KV buffers and checkers.

Each test is named after the incident's right outcome; the version that had it wrong is one switch away.
"""

import json
from pathlib import Path

import pytest

from kvreplay.behaviour import profile
from kvreplay.conformance.checked_run import CheckedDriver
from kvreplay.conformance.workload import read_workload
from tests.incidents.scripted import Outcome, engine, load, request

VECTORS = Path(__file__).parents[1] / "conformance" / "scheduler"


class TestPressure:
    """Class A: deadlock and livelock when blocks are short."""

    @pytest.mark.incident("A1")
    def test_a1_lookahead_slots_are_counted_when_a_load_is_let_in(self) -> None:
        """vllm#57104."""
        spec = engine(7, spec={"tokens": 3, "method": "eagle"})
        outcome = Outcome(spec, [request("A", 64, **load(64, after=2)), request("B", 48, **load(48, after=3))])
        assert outcome.laws == set()
        assert outcome.finished == ["A", "B"]

    @pytest.mark.incident("A2")
    def test_a2_a_load_leaves_what_loads_before_it_still_need(self) -> None:
        """vllm#45388: B's load begins when A is through."""
        requests = [
            request("A", 256, **load(80, after=2), max_tokens=2),
            request("B", 192, **load(112, after=2), max_tokens=2),
        ]
        outcome = Outcome(engine(20), requests)
        assert outcome.laws == set()
        assert outcome.finished == ["A", "B"]
        allocated = {row[0]: step["k"] for step in outcome.steps for row in step.get("alloc", ())}
        ended = next(step["k"] for step in outcome.steps for row in step.get("out", ()) if row[0] == "A" and row[2])
        assert allocated["B"] > ended

    @pytest.mark.incident("A3")
    @pytest.mark.parametrize(
        ("switches", "laws", "finished"),
        [((), set(), ["L", "H"]), (("waiting_model=skipped_waiting",), {"PROGRESS"}, [])],
        ids=["0.33.0", "before kv_holding_waiting"],
    )
    def test_a3_a_finished_load_is_not_stranded_behind_a_more_urgent_head(
        self, switches: tuple[str, ...], laws: set[str], finished: list[str]
    ) -> None:
        """vllm#45406."""
        requests = [
            request("L", 64, priority=5, max_tokens=2, **load(64, after=2)),
            request("H", 312, arrive=1, priority=0, max_tokens=8),
        ]
        outcome = Outcome(engine(20, policy="priority"), requests, *switches)
        assert outcome.laws == laws
        assert outcome.finished == finished
        assert outcome.num_preempted() == 0

    @pytest.mark.incident("A4")
    @pytest.mark.parametrize(
        ("switches", "laws"),
        [((), set()), (("waiting_model=skipped_waiting",), {"PROGRESS"})],
        ids=["0.33.0", "before kv_holding_waiting"],
    )
    def test_a4_nobody_without_blocks_waits_in_front_of_who_holds_some(
        self, switches: tuple[str, ...], laws: set[str]
    ) -> None:
        """vllm#57841."""
        requests = [
            request("H", 160, external={"tokens": 0, "defer": 1}, max_tokens=2),
            request("L", 416, **load(400, after=2), max_tokens=2),
            request("W", 16, max_tokens=2),
        ]
        outcome = Outcome(engine(27), requests, *switches)
        assert outcome.laws == laws
        assert (sorted(outcome.finished) == ["H", "L", "W"]) == (not laws)

    @pytest.mark.incident("A5")
    def test_a5_a_victim_whose_blocks_do_not_come_back_at_once_costs_no_other(self) -> None:
        """vllm#49674: three decodes cross a block boundary in one step, with steps that overlap."""
        spec = engine(12, async_scheduling=True, connector=True, kv_role="kv_consumer")
        outcome = Outcome(spec, [request(name, 63, max_tokens=20) for name in ("R1", "R2", "R3")])
        assert outcome.laws == set()
        assert max(len(step.get("preempted", ())) for step in outcome.steps) <= 1
        assert sorted(outcome.finished) == ["R1", "R2", "R3"]

    @pytest.mark.incident("A11")
    @pytest.mark.parametrize("kind", ["swa", "mamba"])
    def test_a11_a_hybrid_model_without_a_connector_goes_on(self, kind: str) -> None:
        """vllm#45414, the control."""
        group = {"type": "swa", "sliding_window": 48} if kind == "swa" else {"type": "mamba", "mode": "align"}
        spec = engine(14, groups=[{"type": "full"}, group], mamba_cache_mode="align" if kind == "mamba" else "none")
        outcome = Outcome(spec, [request(f"r{place}", 100, max_tokens=30) for place in range(6)])
        assert outcome.laws == set()
        assert len(outcome.finished) == 6


class TestRecovery:
    """Class G: what a failed load is recovered to."""

    @pytest.mark.incident("G1")
    @pytest.mark.parametrize(
        ("behaviour", "laws", "begins"),
        [
            ("pre-50388", {"NO-FATAL"}, []),
            ("post-50388", set(), [0]),
            ("vllm-0.33", {"NO-FATAL"}, []),
            ("ideal", set(), [64]),
        ],
    )
    def test_g1_a_bad_block_of_one_group_costs_what_no_group_can_go_on_without(
        self, behaviour: str, laws: set[str], begins: list[int]
    ) -> None:
        """vllm#45474, vllm#50687: block sizes 16, 32 and 64; the block at token 96 of the first is bad."""
        one = request("R", 129, max_tokens=1, **load(128, after=1, invalid=[[0, 6]]))
        one["external"]["times"] = 1
        groups = [{"type": "full", "block_size": size} for size in (16, 32, 64)]
        outcome = Outcome(engine(60, groups=groups), [one], behaviour=behaviour)
        assert outcome.laws == laws
        assert outcome.computed("R") == begins

    @pytest.mark.incident("G2")
    @pytest.mark.parametrize(("behaviour", "laws"), [("vllm-0.33", {"CONTENT"}), ("ideal", set())])
    def test_g2_who_shares_a_bad_block_does_not_decode_on_it(self, behaviour: str, laws: set[str]) -> None:
        """vllm#49250: R1 computes it again in chunks, R2 trusts it meanwhile."""
        spec = engine(40, long_prefill_token_threshold=32)
        script = load(64, invalid=[[0, 0], [0, 3]])
        shared = [request("R1", 65, first=1, max_tokens=4, **script), request("R2", 65, first=1, max_tokens=4)]
        outcome = Outcome(spec, shared, behaviour=behaviour)
        assert outcome.laws == laws

    @pytest.mark.incident("G7")
    @pytest.mark.parametrize("policy", ["fail", "recompute"])
    def test_g7_nobody_hits_what_was_built_on_a_bad_block(self, policy: str) -> None:
        """vllm#26813: R2 comes three steps later with the same prompt."""
        bad = request("R1", 65, first=1, max_tokens=4, **load(64, invalid=[[0, 1]]))
        outcome = Outcome(engine(40, kv_load_failure_policy=policy), [bad, request("R2", 65, 3, first=1, max_tokens=1)])
        assert outcome.laws == set()
        assert outcome.computed("R2") == ([16] if policy == "fail" else [64])

    @pytest.mark.incident("G9")
    @pytest.mark.parametrize(
        ("switches", "laws"), [((), set()), (("request_level_failures=off",), {"CONTENT"})], ids=["0.33.0", "unheard"]
    )
    def test_g9_a_failure_that_is_only_logged_is_wrong_contents(
        self, switches: tuple[str, ...], laws: set[str]
    ) -> None:
        """vllm-ascend#9701."""
        groups = [{"type": "full"}, {"type": "mamba", "mode": "align"}]
        one = request("R", 70, max_tokens=2, **load(64, after=2, failed_after=1))
        spec = engine(40, groups=groups, mamba_cache_mode="align")
        assert Outcome(spec, [one], *switches).laws == laws


class TestHybrids:
    """Class J: windows, states and the null block."""

    @pytest.mark.incident("J1")
    @pytest.mark.parametrize("tokens", [128, 130])
    def test_j1_an_external_hit_is_never_fatal_where_states_are_aligned(self, tokens: int) -> None:
        """vllm#43508."""
        groups = [{"type": "full", "block_size": 16}, {"type": "mamba", "mode": "align", "block_size": 64}]
        spec = engine(60, groups=groups, mamba_cache_mode="align")
        outcome = Outcome(spec, [request("R", 200, max_tokens=3, **load(tokens, after=1))])
        assert outcome.laws == set()
        assert outcome.finished == ["R"]

    @pytest.mark.parametrize(("behaviour", "laws"), [("post-50388", {"NULL-BLOCK"}), ("ideal", set())])
    def test_a_window_that_is_computed_again_is_not_computed_into_the_null_block(
        self, behaviour: str, laws: set[str]
    ) -> None:
        """vllm#50388: of 26 tokens 24 were loaded, and the window has no blocks for the first of them."""
        groups = [{"type": "full"}, {"type": "swa", "sliding_window": 8}]
        one = request("R", 26, max_tokens=2, **load(24, invalid=[[0, 1]]))
        assert Outcome(engine(30, 4, groups=groups), [one], behaviour=behaviour).laws == laws


SINGLE_SWITCHES = [
    ("hybrid_failure=unpack_crash", "54_hybrid_invalid_blocks_error", {"NO-FATAL"}),
    ("hybrid_failure=v0_33", "54_hybrid_invalid_blocks_error", {"NO-FATAL"}),
    ("invalid_block_scan=first_marker", "80_hazard_fail_leaves_sharer_block", {"CONTENT"}),
    ("invalid_block_scan=first_marker", "81_hazard_recompute_hit_before_rewrite", {"CONTENT"}),
    ("invalid_block_scan=first_marker", "82_hazard_recompute_preempted", {"CONTENT"}),
    ("invalid_block_scan=first_marker", "31_null_block_swa_single", {"NULL-BLOCK"}),
    ("unexpected_reports=assert", "43_recv_unknown_id", {"NO-FATAL"}),
    ("unexpected_reports=assert", "39_failed_without_recv", {"PROGRESS"}),
    ("failed_load_retry=in_place", "85_hazard_async_retry_self_reservation", {"PROGRESS"}),
    ("dropped_samples=keep", "211_hazard_async_sched_sync_invalid_stuck", {"PROGRESS"}),
    ("aligned_lookahead=stuck", "212_hazard_mtp_mamba_align_stuck", {"PROGRESS"}),
    ("block_estimates=short", "210_hazard_mamba_sync_load_exact_pool", {"NO-FATAL"}),
    ("block_estimates=short", "213_hazard_async_loads_deadlock_swa", {"PROGRESS"}),
    ("block_estimates=short", "214_hazard_async_loads_deadlock_chunked", {"PROGRESS"}),
    ("block_estimates=short", "215_hazard_loads_without_reserve", {"PROGRESS"}),
    ("whole_prompt_load=go_back", "r002_mamba", {"CONTENT"}),
    ("chunked_local_hits=unseen", "121_chunked_local_unaligned", {"NULL-BLOCK"}),
    ("reset_while_loading=raise", "201_hazard_reset_running_parked_load", {"NO-FATAL"}),
    ("transfer_integrity=none", "r018_one", {"CONTENT"}),
]


@pytest.mark.parametrize(
    ("switch", "name", "laws"), SINGLE_SWITCHES, ids=[f"{row[0]} {row[1]}" for row in SINGLE_SWITCHES]
)
def test_one_switch_on_top_of_ideal_breaks_its_law_and_no_other(switch: str, name: str, laws: set[str]) -> None:
    document = json.loads((VECTORS / f"{name}.json").read_text())["workload"]
    driver = CheckedDriver(read_workload(document), profile("ideal").with_switch(switch))
    assert {finding.checker for finding in driver.check()} == laws


@pytest.mark.parametrize(
    ("switch", "name"),
    [
        ("failed_load_retry=afresh", "85_hazard_async_retry_self_reservation"),
        ("failed_load_retry=afresh", "88_hazard_blockless_head_in_kvhold"),
        ("dropped_samples=roll_back", "86_hazard_async_sched_sync_invalid"),
        ("dropped_samples=roll_back", "87_hazard_async_sched_sync_invalid_1tok"),
        ("dropped_samples=roll_back", "211_hazard_async_sched_sync_invalid_stuck"),
        ("block_estimates=exact", "213_hazard_async_loads_deadlock_swa"),
        ("block_estimates=exact", "215_hazard_loads_without_reserve"),
    ],
)
def test_one_switch_mends_what_0_33_breaks(switch: str, name: str) -> None:
    document = json.loads((VECTORS / f"{name}.json").read_text())["workload"]
    assert CheckedDriver(read_workload(document), profile("vllm-0.33")).check()
    assert CheckedDriver(read_workload(document), profile("vllm-0.33").with_switch(switch)).check() == []
