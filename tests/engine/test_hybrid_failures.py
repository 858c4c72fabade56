"""Loads that fail with several KV cache groups: what each version does, and what should be done."""

import pytest

from kvreplay.engine.recovery import LONGEST_VALID_PREFIX, UNPACK_CRASH, WHOLE_REQUEST, FailureRules
from kvreplay.errors import EngineFatal
from kvreplay.kv.specs import CIRCULAR_BUFFER, FULL, MAMBA, MAMBA_ALIGN, MLA, SLIDING_WINDOW, KVCacheGroupSpec
from tests.engine.bench import Bench, load, sync_load

FULL_AND_MAMBA = (
    KVCacheGroupSpec(kind=FULL, block_size=16),
    KVCacheGroupSpec(kind=MAMBA, block_size=16, mamba_cache_mode=MAMBA_ALIGN),
)
FULL_AND_WINDOW = (
    KVCacheGroupSpec(kind=FULL, block_size=4),
    KVCacheGroupSpec(kind=SLIDING_WINDOW, block_size=4, sliding_window=8),
)
FULL_AND_RING = (
    KVCacheGroupSpec(kind=FULL, block_size=4),
    KVCacheGroupSpec(kind=CIRCULAR_BUFFER, block_size=8),
)
TWO_FULL = (KVCacheGroupSpec(kind=FULL, block_size=4), KVCacheGroupSpec(kind=MLA, block_size=8))


def loading(*, hybrid: str = "v0_33", recompute: bool = True, by_request: bool = True) -> Bench:
    """Spec, G13: 160 tokens, of which 144 load asynchronously."""
    bench = Bench(
        groups=FULL_AND_MAMBA,
        num_gpu_blocks=50,
        scripts={"r": load(144)},
        recompute=recompute,
        failure_rules=FailureRules(hybrid=hybrid, by_request=by_request),
        max_num_batched_tokens=256,
    )
    bench.add("r", 160)
    bench.schedule()
    assert bench.tables("r") == (list(range(1, 10)), [0] * 8 + [10])
    assert bench.num_free == 39
    return bench


class TestReportsByBlock:
    def test_0_33_dies_whoever_is_concerned(self) -> None:
        with pytest.raises(EngineFatal, match=r"^RuntimeError: A KV connector reported block-level load failures"):
            loading().update(invalid=[49])

    def test_before_50388_the_scan_dies_of_the_first_request_it_visits(self) -> None:
        with pytest.raises(EngineFatal, match=r"^ValueError: too many values to unpack \(expected 1\)$"):
            loading(hybrid=UNPACK_CRASH).update(invalid=[49])

    def test_before_50388_a_report_that_meets_nobody_is_harmless(self) -> None:
        bench = Bench(groups=FULL_AND_MAMBA, scripts={}, failure_rules=FailureRules(hybrid=UNPACK_CRASH))
        bench.step(invalid=[3])

    @pytest.mark.parametrize("block_id", [3, 10])
    def test_after_50388_the_whole_request_is_computed_again(self, block_id: int) -> None:
        """Spec, 4.5: a bad block of either group."""
        bench = loading(hybrid=WHOLE_REQUEST)
        bench.update(invalid=[block_id])
        assert bench.computed("r") == 0
        assert bench.status("r") == "WAITING_FOR_REMOTE_KVS"
        bench.step(finished=["r"])
        assert bench.step() == {"r": 144}

    def test_after_50388_a_report_of_the_null_block_concerns_nobody(self) -> None:
        """Spec, 4.5 and trap 13."""
        bench = loading(hybrid=WHOLE_REQUEST)
        bench.update(invalid=[0])
        assert bench.computed("r") == 144
        bench.step(finished=["r"])
        assert bench.step() == {"r": 16}
        assert bench.tables("r") == ([*range(1, 10), 11], [0] * 8 + [10, 12])

    def test_after_50388_under_fail_it_ends_at_once_and_frees_with_the_load(self) -> None:
        bench = loading(hybrid=WHOLE_REQUEST, recompute=False)
        assert bench.update(invalid=[3]) == {"r": "error"}
        assert bench.num_free == 39
        bench.step(finished=["r"])
        assert bench.num_free == 49

    def test_after_50388_a_running_request_keeps_its_null_blocks(self) -> None:
        """Spec, trap 16: 26 tokens, of which 24 load synchronously."""
        bench = Bench(
            groups=FULL_AND_WINDOW,
            scripts={"r": sync_load(24)},
            recompute=True,
            failure_rules=FailureRules(hybrid=WHOLE_REQUEST),
        )
        bench.add("r", 26)
        bench.schedule()
        tables = bench.tables("r")
        assert tables == ([1, 2, 3, 4, 5, 6, 9], [0, 0, 0, 0, 7, 8, 10])
        bench.update(invalid=[2])
        assert bench.computed("r") == 0
        assert bench.step() == {"r": 26}
        assert bench.tables("r") == tables


class TestReportsByRequest:
    def test_the_request_starts_afresh(self) -> None:
        """Spec, G14."""
        bench = loading()
        bench.update(failed=["r"], finished=["r"])
        assert bench.computed("r") == 0
        assert bench.step() == {"r": 144}
        assert bench.tables("r") == (list(range(10, 1, -1)), [0] * 8 + [1])
        assert bench.num_free == 39

    def test_versions_without_them_never_hear(self) -> None:
        bench = loading(by_request=False)
        bench.update(failed=["r"], finished=["r"])
        assert bench.step() == {"r": 16}


class TestIdeal:
    def test_the_longest_prefix_that_all_groups_hold_is_kept(self) -> None:
        bench = Bench(
            groups=TWO_FULL,
            scripts={"r": load(24)},
            recompute=True,
            failure_rules=FailureRules(hybrid=LONGEST_VALID_PREFIX),
        )
        bench.add("r", 26)
        bench.schedule()
        assert bench.tables("r") == ([1, 2, 3, 4, 5, 6], [7, 8, 9])
        bench.update(invalid=[4], finished=["r"])  # tokens 12 to 15
        assert bench.computed("r") == 8
        assert bench.step() == {"r": 18}

    def test_a_bad_block_that_nobody_needs_any_more_costs_nothing(self) -> None:
        bench = Bench(
            groups=FULL_AND_WINDOW, recompute=True, failure_rules=FailureRules(hybrid=LONGEST_VALID_PREFIX), scripts={}
        )
        bench.add("r", 26)
        bench.step()
        bench.schedule()
        bench.update(invalid=[0])
        assert bench.computed("r") == 27

    @pytest.mark.parametrize(("loaded", "kept"), [(24, 24), (23, 16), (7, 0)])
    def test_a_ring_that_is_lost_costs_what_came_since_the_last_place_where_hits_end(
        self, loaded: int, kept: int
    ) -> None:
        """There nothing is left that is not compressed yet, and the ring may be empty."""
        bench = Bench(
            groups=FULL_AND_RING,
            scripts={"r": load(loaded)},
            recompute=True,
            failure_rules=FailureRules(hybrid=LONGEST_VALID_PREFIX),
        )
        bench.add("r", 26)
        bench.schedule()
        (ring,) = bench.tables("r")[1]
        bench.update(invalid=[ring])
        assert bench.computed("r") == kept

    def test_a_state_that_is_lost_costs_the_whole_load(self) -> None:
        bench = loading(hybrid=LONGEST_VALID_PREFIX)
        bench.update(invalid=[10], finished=["r"])
        assert bench.computed("r") == 0
        assert bench.step() == {"r": 144}

    def test_a_running_request_starts_afresh_and_what_was_built_on_bad_blocks_is_not_hit(self) -> None:
        bench = Bench(
            groups=FULL_AND_WINDOW,
            scripts={"r": sync_load(24)},
            recompute=True,
            failure_rules=FailureRules(hybrid=LONGEST_VALID_PREFIX),
        )
        bench.add("r", 26)
        bench.schedule()
        bench.update(invalid=[2])
        assert bench.status("r") == "PREEMPTED"
        assert bench.hashed == []
        assert bench.step() == {"r": 26}
        assert bench.lookups == [["r", 0, 0, False]]
