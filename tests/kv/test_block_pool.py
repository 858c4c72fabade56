"""BlockPool: references, reuse order, the prefix cache."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

from kvreplay.errors import EngineFatal
from kvreplay.kv.block_pool import BlockPool
from kvreplay.kv.group_keys import group_key
from kvreplay.kv.prefix_cache import NO_KEY
from tests.kv.reference_pool import ReferencePool


def ids(*block_ids: int) -> NDArray[np.int64]:
    return np.array(block_ids, np.int64)


def keys(*values: int) -> NDArray[np.int64]:
    return np.array(values, np.int64)


def freed(pool: BlockPool, *block_ids: int) -> list[int]:
    """The free queue after freeing these."""
    pool.free_blocks(ids(*block_ids))
    queue: list[int] = pool.free_queue().tolist()
    return queue


class TestReuse:
    def test_a_new_pool_gives_blocks_in_order_and_never_the_null_block(self) -> None:
        pool = BlockPool(5)
        assert pool.get_new_blocks(4).tolist() == [1, 2, 3, 4]
        assert pool.num_free == 0

    def test_running_short_kills_the_engine(self) -> None:
        pool = BlockPool(5)
        with pytest.raises(EngineFatal, match=r"^ValueError: Cannot get 5 free blocks from the pool$"):
            pool.get_new_blocks(5)

    def test_unhashed_blocks_are_reused_first_hashed_ones_last_and_tails_before_heads(self) -> None:
        """Spec, 5.4: blocks of 4, 7 usable; a request of 10 tokens, then one of 12 others."""
        pool = BlockPool(8)
        first = pool.get_new_blocks(3)
        pool.cache(first[:2], keys(10, 11))
        assert freed(pool, 3, 2, 1) == [3, 4, 5, 6, 7, 2, 1]
        pool.touch(ids(1, 2))
        assert pool.get_new_blocks(1).tolist() == [3]
        third = pool.get_new_blocks(3)
        assert third.tolist() == [4, 5, 6]
        pool.cache(third, keys(20, 21, 22))
        assert freed(pool, 3, 2, 1) == [3, 7, 2, 1]
        assert freed(pool, 6, 5, 4) == [3, 7, 2, 1, 6, 5, 4]

    def test_null_blocks_are_not_freed(self) -> None:
        pool = BlockPool(4)
        pool.get_new_blocks(3)
        assert freed(pool, 0, 2, 0) == [2]

    @pytest.mark.parametrize("again", [(1,), (2, 1)])
    def test_freeing_twice_is_a_bug_in_the_caller(self, again: tuple[int, ...]) -> None:
        pool = BlockPool(4)
        pool.get_new_blocks(3)
        pool.free_blocks(ids(1))
        with pytest.raises(AssertionError, match=r"^block freed twice$"):
            pool.free_blocks(ids(*again))

    def test_a_shared_block_is_freed_with_its_last_holder(self) -> None:
        pool = BlockPool(3)
        pool.get_new_blocks(1)
        pool.touch(ids(1))
        assert freed(pool, 1) == [2]
        assert freed(pool, 1) == [1, 2]

    def test_without_prefix_caching_every_block_goes_to_the_head(self) -> None:
        pool = BlockPool(4, enable_caching=False)
        pool.get_new_blocks(2)
        assert freed(pool, 2, 1) == [2, 1, 3]

    def test_cached_blocks_that_nobody_holds_count_as_free(self) -> None:
        """Spec, 5.7: 7 usable, 3 in use."""
        pool = BlockPool(8)
        taken = pool.get_new_blocks(5)
        pool.cache(taken, keys(1, 2, 3, 4, 5))
        pool.free_blocks(taken[3:])
        assert pool.num_free == 7 - 3

    def test_the_queue_goes_on_for_ever(self) -> None:
        """It is a log that is moved back to its middle now and then."""
        pool = BlockPool(6)
        for _ in range(201):
            pool.free_blocks(pool.get_new_blocks(5)[::-1])
        assert pool.free_queue().tolist() == [5, 4, 3, 2, 1]
        for step in range(200):
            taken = pool.get_new_blocks(5)
            pool.cache(taken, keys(*range(5 * step, 5 * step + 5)))
            pool.free_blocks(taken)
        assert sorted(pool.free_queue().tolist()) == [1, 2, 3, 4, 5]
        assert pool.num_evicted == 199 * 5

    @pytest.mark.parametrize("held", [[], [2], [5], [2, 5], [4, 5, 6]])
    def test_whoever_knows_what_has_a_hash_gives_back_in_the_same_order(self, held: list[int]) -> None:
        """Blocks 1 to 4 have one, 5 and 6 have not; somebody else holds some of them."""
        queues = []
        for num_unhashed in (None, 2):
            pool = BlockPool(10, num_keys=8)
            taken = pool.get_new_blocks(6)
            pool.cache(taken[:4], np.arange(4))
            pool.touch(np.array(held, np.int64))
            pool.free_blocks(taken[::-1].copy(), num_unhashed)
            queues.append((pool.free_queue().tolist(), pool.num_free))
        assert queues[0] == queues[1]


class TestPrefixCache:
    def test_same_content_twice_is_two_blocks_and_the_first_one_is_hit(self) -> None:
        """Spec, 5.5: two requests of 9 tokens in one step; then block 1 goes."""
        pool = BlockPool(10)
        for _ in range(2):
            pool.cache(pool.get_new_blocks(3)[:2], keys(10, 11))
        assert pool.num_cached_keys == 2
        assert pool.find_prefix(keys(10, 11)).tolist() == [1, 2]
        pool.evict_blocks([1])
        assert pool.find_prefix(keys(10, 11)).tolist() == [4, 2]

    def test_a_prefix_ends_at_the_first_miss(self) -> None:
        pool = BlockPool(10)
        pool.cache(pool.get_new_blocks(3), keys(0, 1, 3))
        assert pool.find_prefix(keys(0, 1, 2, 3)).tolist() == [1, 2]
        assert pool.find_prefix(keys(2, 3)).tolist() == []
        assert pool.find_prefix(keys()).tolist() == []

    def test_unknown_keys_are_looked_up_without_harm(self) -> None:
        pool = BlockPool(4, num_keys=2)
        assert pool.find(keys(1, 1000)).tolist() == [0, 0]

    def test_reuse_evicts_and_tells_in_order(self) -> None:
        pool = BlockPool(5)
        told: list[int] = []
        pool.on_evict = lambda block_ids: told.extend(block_ids.tolist())
        taken = pool.get_new_blocks(4)
        pool.cache(taken[:3], keys(7, 8, 9))
        pool.free_blocks(taken[::-1])
        assert pool.get_new_blocks(3).tolist() == [4, 3, 2]
        assert pool.take_one() == 1
        assert told == [3, 2, 1]
        assert (pool.num_evicted, pool.num_cached_keys) == (3, 0)

    def test_several_groups_evictions_are_counted_apart(self) -> None:
        """Whichever way blocks are taken."""
        pool = BlockPool(8)
        pool.count_groups(3)
        taken = pool.get_new_blocks(7)
        pool.cache(taken, keys(*(group_key(key, group, 3) for key, group in enumerate((0, 1, 2, 1, 2, 2, 2)))))
        assert pool.count_by_group(taken) == [1, 2, 4]
        pool.free_blocks(taken)
        pool.get_new_blocks(3)
        assert (pool.evicted_by_group, pool.num_evicted) == ([1, 1, 1], 3)
        pool.take_one()
        pool.take_column(np.zeros(3, np.int64).data, 0, 1, 3)
        assert (pool.evicted_by_group, pool.num_evicted) == ([1, 2, 4], 7)

    def test_what_was_evicted_is_found_among_what_there_ever_was(self) -> None:
        """Reused, evicted and reset; not what was never cached, nor a part of a block that is full now."""
        pool = BlockPool(6)
        taken = pool.get_new_blocks(5)
        pool.cache_partial(5, 9, 2)
        pool.cache(taken, keys(1, 2, 3, 4, 5), np.full(5, 4))
        assert not pool.has_lost
        pool.evict_blocks([1])
        pool.free_blocks(taken[1:])
        pool.take_one()
        pool.get_new_blocks(1)
        assert pool.find(keys(1, 2, 3, 4, 5, 6, 9)).tolist() == [0, 0, 0, 4, 5, 0, 0]
        assert (pool.find_former(keys(1, 2, 3, 4, 5, 6, 9)) != 0).tolist() == [True] * 5 + [False] * 2

    def test_evicting_moves_no_block(self) -> None:
        """Spec, 5.6: in use it stays in use, free it stays where it is."""
        pool = BlockPool(5)
        taken = pool.get_new_blocks(4)
        pool.cache(taken, keys(1, 2, 3, 4))
        pool.free_blocks(ids(2, 3))
        assert pool.evict_blocks([1, 3, 3, 0]) == [1, 3]
        assert pool.free_queue().tolist() == [2, 3]
        assert pool.ref_counts.tolist()[1:] == [1, 0, 0, 1]
        assert pool.find(keys(1, 2, 3, 4)).tolist() == [0, 2, 0, 4]
        assert pool.num_evicted == 0, "evicted for a reason of its own"

    def test_evicting_a_block_that_is_none_kills_the_engine(self) -> None:
        with pytest.raises(EngineFatal, match=r"^AssertionError: Invalid block_id 5$"):
            BlockPool(5).evict_blocks([5])

    def test_a_reset_needs_an_idle_pool_and_keeps_the_order(self) -> None:
        pool = BlockPool(4)
        taken = pool.get_new_blocks(2)
        pool.cache(taken, keys(1, 2))
        assert not pool.reset()
        assert pool.num_cached_keys == 2
        pool.free_blocks(taken)
        assert pool.reset()
        assert pool.find(keys(1, 2)).tolist() == [0, 0]
        assert pool.free_queue().tolist() == [3, 1, 2]
        assert pool.num_cached_keys == 0

    def test_hits_that_are_free_have_to_leave_the_queue(self) -> None:
        pool = BlockPool(5)
        taken = pool.get_new_blocks(3)
        pool.cache(taken, keys(1, 2, 3))
        pool.free_blocks(ids(3, 2))
        assert pool.num_evictable(ids(0, 1, 2, 3)) == 2

    def test_what_is_cached_stays_so_when_the_memory_of_gone_keys_is_given_back(self) -> None:
        """Twins, partial keys and the order of insertion too."""
        pool = BlockPool(6, 1000)
        kept = pool.get_new_blocks(3)
        pool.cache(kept[:2], keys(900, 901), keys(4, 4))
        pool.cache(kept[2:], keys(900), keys(4))
        pool.cache_partial(int(kept[1]), 950, 2)
        memory = pool._first
        for round_ in range(20):
            block = pool.get_new_blocks(1)
            pool.cache(block, keys(round_))
            pool.free_blocks(block)
        assert pool._first is not memory, "it has been replaced"
        assert pool.find(keys(900, 901, 950)).tolist() == [1, 2, 2]
        assert pool.find(keys(*range(20))).tolist() == [0] * 18 + [4, 5]
        assert pool.num_cached_keys == 5
        pool.evict_blocks([1])
        assert pool.find(keys(900)).tolist() == [3]

    def test_members_by_block(self) -> None:
        """Whoever reports blocks may name some that do not exist."""
        assert BlockPool(4).membership(ids(2, 7, -1)).tolist() == [False, False, True, False]

    def test_which_blocks_have_a_hash(self) -> None:
        pool = BlockPool(4)
        pool.cache(pool.get_new_blocks(2)[1:], keys(1))
        assert pool.is_cached(ids(0, 1, 2, 3)).tolist() == [False, False, True, False]


NUM_KEYS = 4
"""Few, so that several blocks come to hold one key."""


class PoolMachine(RuleBasedStateMachine):
    """Whatever is done, the pool and the obvious one agree in everything that can be seen."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[int] = []
        self.tables: list[list[int]] = []
        """What the callers hold, one reference per entry."""

    @initialize(num_blocks=st.integers(2, 9), enable_caching=st.sampled_from([True, True, True, False]))
    def start(self, num_blocks: int, enable_caching: bool) -> None:
        self.pool = BlockPool(num_blocks, num_keys=3, enable_caching=enable_caching)
        self.pool.on_evict = lambda block_ids: self.told.extend(block_ids.tolist())
        self.reference = ReferencePool(num_blocks, enable_caching=enable_caching)

    # -- what a caller may do ----------------------------------------------------------------------------

    @rule(share=st.integers(0, 9))
    def take(self, share: int) -> None:
        count = min(share, self.pool.num_free)
        expected = self.reference.get_new_blocks(count)
        assert self.pool.get_new_blocks(count).tolist() == expected
        self.tables.append(expected)

    @precondition(lambda self: self.pool.num_free)
    @rule()
    def take_one(self) -> None:
        (expected,) = self.reference.get_new_blocks(1)
        assert self.pool.take_one() == expected
        self.tables.append([expected])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        """A whole table in any order, with null blocks in it."""
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        ordered = data.draw(st.permutations(table + [0] * data.draw(st.integers(0, 2))))
        self.pool.free_blocks(ids(*ordered))
        self.reference.free_blocks(ordered)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def give_back_in_turns(self, data: st.DataObject) -> None:
        """As a request that has its blocks in several groups."""
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        cut = data.draw(st.integers(0, len(table)))
        are_clean = all(self.reference.ref_counts[b] == 1 and b not in self.reference.key_of for b in table)
        self.pool.free_in_turns([ids(*table[:cut]), ids(*table[cut:])], are_clean=are_clean)
        self.reference.free_blocks(table[:cut])
        self.reference.free_blocks(table[cut:])

    @rule(groups=st.integers(1, 4))
    def take_column(self, groups: int) -> None:
        """A block in the third place of each group, of five places."""
        count = min(groups, self.pool.num_free)
        view = np.zeros(5 * max(count, 1), np.int64).data
        self.pool.take_column(view, 2, 5, count)
        expected = self.reference.get_new_blocks(count)
        assert view.tolist()[2::5][:count] == expected
        self.tables.append(expected)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def give_back_column(self, data: st.DataObject) -> None:
        """With a null block between them."""
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        place = data.draw(st.integers(0, len(table)))
        column = [*table[:place], 0, *table[place:]]
        view = ids(*(entry for block_id in column for entry in (7, block_id))).data
        self.pool.free_column(view, 1, 2, len(column))
        assert view.tolist() == [7, 0] * len(column)
        for block_id in table:
            self.reference.free_blocks([block_id])

    @precondition(lambda self: self.pool.enable_caching)
    @rule(data=st.data())
    def cache(self, data: st.DataObject) -> None:
        uncached = sorted({block_id for table in self.tables for block_id in table} - set(self.reference.key_of))
        if uncached:
            block_ids = data.draw(st.lists(st.sampled_from(uncached), unique=True, min_size=1))
            chosen = data.draw(st.permutations(range(NUM_KEYS)))[: len(block_ids)]
            block_ids = block_ids[: len(chosen)]
            self.pool.cache(ids(*block_ids), keys(*chosen))
            self.reference.cache(block_ids, chosen)

    @precondition(lambda self: self.pool.enable_caching)
    @rule(data=st.data(), key=st.integers(0, NUM_KEYS - 1), takes=st.booleans())
    def cache_one(self, data: st.DataObject, key: int, takes: bool) -> None:
        uncached = sorted({block_id for table in self.tables for block_id in table} - set(self.reference.key_of))
        if uncached:
            block_id = data.draw(st.sampled_from(uncached))
            self.reference.cache([block_id], [key])
            if takes and self.reference.free:
                (expected,) = self.reference.get_new_blocks(1)
                assert self.pool.cache_and_take_one(block_id, key) == expected
                self.tables.append([expected])
            else:
                self.pool.cache_one(block_id, key)

    @rule(wanted=st.lists(st.integers(0, NUM_KEYS), unique=True))
    def hit(self, wanted: list[int]) -> None:
        expected = self.reference.find_prefix(wanted)
        found = self.pool.find_prefix(keys(*wanted))
        assert found.tolist() == expected
        if expected:
            assert self.pool.num_evictable(found) == sum(not self.reference.ref_counts[b] for b in expected)
            self.pool.touch(found)
            self.reference.touch(expected)
            self.tables.append(expected)

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        block_ids = data.draw(st.lists(st.integers(0, self.pool.num_blocks - 1)))
        assert self.pool.evict_blocks(block_ids) == self.reference.evict_blocks(block_ids)

    @precondition(lambda self: self.reference.free)
    @rule(data=st.data(), count=st.integers(0, 9))
    def look_behind(self, data: st.DataObject, count: int) -> None:
        free = self.reference.free
        place = data.draw(st.integers(0, len(free) - 1))
        assert self.pool.free_after(free[place], count).tolist() == free[place + 1 :][:count]
        assert self.pool.free_after(None, count).tolist() == free[:count]

    @rule()
    def reset(self) -> None:
        assert self.pool.reset() == self.reference.reset()

    @rule()
    def give_back_everything(self) -> None:
        for table in self.tables:
            self.pool.free_blocks(ids(*table))
            self.reference.free_blocks(table)
        self.tables.clear()

    # -- what is then seen -------------------------------------------------------------------------------

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool, reference = self.pool, self.reference
        every_block = range(1, pool.num_blocks)
        assert pool.free_queue().tolist() == reference.free
        assert pool.num_free == len(reference.free)
        assert pool.ref_counts.tolist()[1:] == [reference.ref_counts[block_id] for block_id in every_block]
        assert pool.keys.tolist() == [NO_KEY] + [reference.key_of.get(block_id, NO_KEY) for block_id in every_block]
        assert pool.is_cached(ids(*every_block)).tolist() == [block_id in reference.key_of for block_id in every_block]
        assert pool.num_cached_keys == len(reference.holders)
        assert pool.find(keys(*range(NUM_KEYS + 2))).tolist() == reference.find(range(NUM_KEYS + 2))
        assert self.told == reference.evicted
        assert pool.num_evicted == len(reference.evicted)


TestAgainstTheObviousPool = PoolMachine.TestCase
TestAgainstTheObviousPool.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
