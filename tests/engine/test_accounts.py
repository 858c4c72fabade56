"""RecomputeAccounts: which computed tokens had been there before, one cause each. Blocks of 4 tokens."""

from itertools import groupby

import numpy as np
from hypothesis import given, settings

from kvreplay.kv.group_keys import group_of
from kvreplay.kv.prefix_cache import NO_KEY
from kvreplay.kv.specs import FULL, MAMBA, KVCacheGroupSpec
from tests.engine.bench import Bench, load, sync_load
from tests.scenarios.random_worlds import PAIR_FAULTS, World, worlds


class TestLoadFailure:
    def test_what_a_failed_load_had_promised(self) -> None:
        """16 of 18 were promised, 8 came: 8 are computed that had been promised, the last 2 never were."""
        bench = Bench(scripts={"r": load(16)}, recompute=True)
        bench.add("r", 18)
        bench.step(invalid=[3], finished=["r"])
        bench.step()
        assert bench.recomputed() == [("r", 8, "load-failure")]
        (event,) = bench.events("tokens.recomputed")
        assert event.cause_handle is not None
        cause = bench.sink.events[event.cause_handle]
        assert (cause.kind, cause.num_tokens, cause.block_ids) == ("load.failed", 8, [3])

    def test_in_chunks_each_step_counts_its_own(self) -> None:
        bench = Bench(scripts={"r": load(16)}, recompute=True, max_num_batched_tokens=7, max_num_seqs=7)
        bench.add("r", 18)
        bench.step(failed=["r"], finished=["r"])
        bench.steps(3)
        assert [tokens for _, tokens, _ in bench.recomputed()] == [7, 7, 2]

    def test_a_local_hit_spares_its_part(self) -> None:
        bench = Bench(scripts={"r": load(16)}, recompute=True)
        bench.add("first", range(8), max_tokens=1)
        bench.step()
        bench.add("r", range(18))
        bench.step()
        bench.step(failed=["r"], finished=["r"])
        assert bench.step() == {"r": 10}
        assert bench.recomputed() == [("r", 8, "load-failure")]

    def test_a_sync_load_loses_what_its_own_step_computed_too(self) -> None:
        """The step's 2 tokens are computed again, but had never been there as far as anybody knows."""
        bench = Bench(scripts={"r": sync_load(16)}, recompute=True)
        bench.add("r", 18)
        bench.schedule()
        bench.update(invalid=[1])
        assert bench.step() == {"r": 18}
        assert bench.recomputed() == [("r", 16, "load-failure")]


class TestPreemption:
    def test_what_was_computed_and_is_not_hit_again(self) -> None:
        """9 of 10 tokens were computed, 2 blocks are still cached: the ninth is computed again, the tenth is new."""
        bench = Bench(num_gpu_blocks=8)
        bench.add("1", 8, max_tokens=9)
        bench.add("2", 8)
        bench.steps(2)
        assert bench.scheduler.preempt("2")
        assert bench.step()["2"] == 2
        assert bench.recomputed() == [("2", 1, "preemption")]
        (event,) = bench.events("tokens.recomputed")
        assert event.cause_handle is not None
        assert bench.sink.events[event.cause_handle].kind == "request.preempted"

    def test_without_a_cache_it_is_everything(self) -> None:
        bench = Bench(enable_prefix_caching=False)
        bench.add("1", 8)
        bench.steps(2)
        bench.scheduler.preempt("1")
        bench.step()
        assert bench.recomputed() == [("1", 9, "preemption")]

    def test_twice_preempted_twice_counted(self) -> None:
        bench = Bench(enable_prefix_caching=False)
        bench.add("1", 8)
        bench.step()
        for _ in range(2):
            bench.scheduler.preempt("1")
            bench.step()
        assert bench.recomputed() == [("1", 8, "preemption"), ("1", 9, "preemption")]

    def test_a_failed_load_goes_before_it(self) -> None:
        """Of 20 computed tokens, 8 had been promised by the load that failed, and are the load's."""
        bench = Bench(scripts={"r": load(16)}, recompute=True, enable_prefix_caching=False)
        bench.add("r", 20)
        bench.step(invalid=[3], finished=["r"])
        bench.step()
        bench.scheduler.preempt("r")
        bench.step()
        assert bench.recomputed()[1:] == [("r", 16, "load-failure"), ("r", 4, "preemption")]


class TestEviction:
    def test_what_had_been_cached_and_is_gone(self) -> None:
        """10 tokens leave 8 cached; another takes all blocks; the same prompt computes 8 again, 2 it never had."""
        bench = Bench(num_gpu_blocks=6)
        bench.add("a", range(10), max_tokens=1)
        bench.step()
        bench.add("filler", 17, max_tokens=1)
        bench.step()
        bench.add("b", range(10))
        bench.step()
        assert bench.recomputed() == [("b", 8, "eviction")]

    def test_tails_go_first(self) -> None:
        """3 blocks are taken: the unhashed one, a fresh one, and the last hashed one."""
        bench = Bench(num_gpu_blocks=5)
        bench.add("a", range(10), max_tokens=1)
        bench.step()
        bench.add("filler", 9, max_tokens=1)
        bench.step()
        bench.add("b", range(10))
        assert bench.step() == {"b": 6}
        assert bench.recomputed() == [("b", 4, "eviction")]

    def test_a_longer_prompt_counts_only_what_it_shares(self) -> None:
        bench = Bench(num_gpu_blocks=8)
        bench.add("a", range(10), max_tokens=1)
        bench.step()
        bench.add("filler", 25, max_tokens=1)
        bench.step()
        bench.add("b", [*range(6), *range(50, 62)])
        bench.step()
        assert bench.recomputed() == [("b", 4, "eviction")], "its block of two shared tokens could not be hit"

    def test_what_never_was_there_is_new(self) -> None:
        bench = Bench()
        bench.add("a", range(10))
        bench.steps(5)
        assert bench.recomputed() == []

    def test_what_no_block_could_keep_was_never_lost(self) -> None:
        """6 tokens are shared, of which a block covers 4."""
        bench = Bench()
        bench.add("a", range(10), max_tokens=1)
        bench.step()
        bench.add("b", [*range(6), *range(50, 62)])
        assert bench.step() == {"b": 14}
        assert bench.recomputed() == []

    def test_what_was_evicted_for_another_reason_is_gone_too(self) -> None:
        bench = Bench()
        bench.add("a", range(10), max_tokens=1)
        bench.step()
        bench.scheduler.evict_free(2)
        bench.add("b", range(10), max_tokens=1)
        bench.step()
        bench.scheduler.reset_prefix_cache()
        bench.add("c", range(10))
        bench.step()
        assert bench.recomputed() == [("b", 8, "eviction"), ("c", 8, "eviction")]


class TestEvictionInHybrids:
    """Full attention and Mamba states of 8 tokens: hits end where both have something."""

    def bench(self) -> Bench:
        groups = [
            KVCacheGroupSpec(kind=FULL, block_size=4),
            KVCacheGroupSpec(kind=MAMBA, block_size=8, mamba_cache_mode="align"),
        ]
        bench = Bench(groups=groups)
        bench.add("a", range(20), max_tokens=1)
        bench.steps(4)
        assert bench.pool.count_by_group(np.arange(bench.pool.num_blocks)) == [5, 1], "a state only at the end"
        return bench

    def test_a_prefix_without_a_state_at_its_end_was_never_there(self) -> None:
        """12 tokens are shared, which full attention has, or had."""
        bench = self.bench()
        bench.add("b", [*range(12), *range(50, 60)])
        bench.steps(4)
        bench.scheduler.evict_free(64)
        bench.add("c", [*range(4), *range(60, 70)])
        bench.steps(4)
        assert bench.recomputed() == []

    def test_it_is_lost_with_the_block_of_any_group(self) -> None:
        bench = self.bench()
        keys = enumerate(bench.pool.keys.tolist())
        bench.pool.evict_blocks(block_id for block_id, key in keys if key != NO_KEY and group_of(key, 2) == 1)
        bench.add("b", range(20))
        bench.steps(4)
        assert sum(tokens or 0 for _, tokens, _ in bench.recomputed()) == 16
        assert {cause for *_, cause in bench.recomputed()} == {"eviction"}

    def test_evicted_blocks_are_those_of_their_groups(self) -> None:
        bench = self.bench()
        bench.scheduler.evict_free(3)
        bench.scheduler.reset_prefix_cache()
        evicted = bench.events("block.evicted")
        by_group = [sum(event.num_blocks or 0 for event in evicted if event.group == group) for group in (0, 1)]
        assert by_group == [5, 1]
        assert {event.cause for event in evicted} == {"injected", "reset"}


class TestFullHit:
    def test_a_load_of_everything_computes_its_last_token_again(self) -> None:
        bench = Bench(block_size=16, scripts={"r": load(32)})
        bench.add("r", 32)
        bench.step(finished=["r"])
        bench.step()
        assert bench.recomputed() == [("r", 1, "full-hit-last-token")]

    def test_a_local_full_hit_computes_its_last_block_again(self) -> None:
        bench = Bench()
        bench.add("a", range(8), max_tokens=1)
        bench.step()
        bench.add("b", range(8))
        bench.step()
        assert bench.recomputed() == [("b", 4, "full-hit-last-token")]

    def test_a_prompt_that_ends_within_a_block_has_none(self) -> None:
        bench = Bench()
        bench.add("a", range(10), max_tokens=1)
        bench.step()
        bench.add("b", range(10))
        bench.step()
        assert bench.recomputed() == []


@settings(max_examples=60, deadline=None)
@given(worlds(is_pair=True, faults=PAIR_FAULTS))
def test_nothing_is_counted_twice_nor_without_being_computed(world: World) -> None:
    """In each step a request's recomputed tokens are at most its tokens, one row per cause."""
    played = world.play(single_steps=True, use_lockstep=False)

    def key(event: object) -> tuple[object, ...]:
        return tuple(getattr(event, name) for name in ("instance", "step", "request_id", "time_ns"))

    scheduled = {key(event): event.num_tokens or 0 for event in played.of("request.scheduled")}
    for place, rows in groupby(played.of("tokens.recomputed"), key):
        recomputed = list(rows)
        assert sum(row.num_tokens or 0 for row in recomputed) <= scheduled[place]
        assert len({row.cause for row in recomputed}) == len(recomputed)
        assert all(row.num_tokens for row in recomputed)
