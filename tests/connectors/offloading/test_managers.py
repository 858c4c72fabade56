"""The CPU tier: states, pins, room, thresholds and events; and both orders of eviction, against plain references."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvreplay.connectors.offloading.arc import ARCPolicy
from kvreplay.connectors.offloading.arrays import Keys
from kvreplay.connectors.offloading.context import RequestContext
from kvreplay.connectors.offloading.cpu_manager import CPUOffloadingManager
from kvreplay.connectors.offloading.keys import KeySpace
from kvreplay.connectors.offloading.lru import LRUPolicy
from kvreplay.connectors.offloading.manager import LookupResult
from kvreplay.connectors.offloading.threshold import OfferCounts
from kvreplay.errors import EngineFatal
from tests.connectors.offloading.desk import Settings

BLOCK = 16


def keys(*numbers: int) -> Keys:
    return np.array(numbers, np.int64)


class Tier:
    """A manager whose key n is the prefix that ends with the (n % 10)-th block, if `has_positions`."""

    def __init__(self, num_chunks: int, *, has_positions: bool = True, **settings: Settings) -> None:
        space = KeySpace(1)
        if has_positions:
            numbers = np.arange(1, 1000)
            space.note(numbers, numbers % 10 * BLOCK)
        self.manager = CPUOffloadingManager(num_chunks, space, enable_events=True, **settings)
        self.contexts: dict[str, RequestContext] = {}

    def context(self, req_id: str) -> RequestContext:
        if req_id not in self.contexts:
            self.contexts[req_id] = RequestContext(req_id)
            self.manager.on_new_request(self.contexts[req_id])
        return self.contexts[req_id]

    def store(self, req_id: str, *numbers: int, is_complete: bool = True) -> list[int] | None:
        """Offer; whom it displaced, or None if there was no room."""
        plan = self.manager.prepare_store(keys(*numbers), self.context(req_id))
        if plan is None:
            return None
        if is_complete:
            self.complete(req_id, *numbers)
        evicted: list[int] = plan.evicted.tolist()
        return evicted

    def complete(self, req_id: str, *numbers: int, success: bool = True) -> None:
        self.manager.complete_store(keys(*numbers), self.context(req_id), success=success)

    def load(self, req_id: str, *numbers: int) -> None:
        self.manager.prepare_load(keys(*numbers), self.context(req_id))

    def loaded(self, req_id: str, *numbers: int) -> None:
        self.manager.complete_load(keys(*numbers), self.context(req_id))

    def finish(self, *req_ids: str) -> None:
        for req_id in req_ids:
            self.manager.on_request_finished(self.context(req_id))

    def states(self, *numbers: int) -> list[LookupResult]:
        return [self.manager.lookup(number, RequestContext("probe")) for number in numbers]

    def events(self) -> list[tuple[str, list[int], bool]]:
        return [
            ("removed" if event.is_removal else "stored", event.keys.tolist(), event.metadata_only)
            for event in self.manager.take_events()
        ]

    @property
    def lru(self) -> LRUPolicy:
        assert isinstance(self.manager.policy, LRUPolicy)
        return self.manager.policy

    @property
    def arc(self) -> ARCPolicy:
        assert isinstance(self.manager.policy, ARCPolicy)
        return self.manager.policy


class TestStates:
    def test_a_chunk_is_pending_until_its_store_is_over(self) -> None:
        tier = Tier(4)
        tier.store("r", 1, is_complete=False)
        assert tier.states(1, 2) == [LookupResult.HIT_PENDING, LookupResult.MISS]
        tier.complete("r", 1)
        assert tier.states(1) == [LookupResult.HIT]

    def test_both_ways_of_asking_agree(self) -> None:
        tier = Tier(4)
        tier.store("r", 1)
        tier.store("r", 2, is_complete=False)
        many = tier.manager.lookup_many(keys(1, 2, 3), RequestContext("probe"))
        assert many.tolist() == tier.states(1, 2, 3)

    def test_a_pending_chunk_cannot_be_loaded(self) -> None:
        tier = Tier(4)
        tier.store("r", 1, is_complete=False)
        with pytest.raises(EngineFatal, match="not ready for reading"):
            tier.load("s", 1)
        assert not tier.manager.can_load(keys(1))

    def test_nor_one_that_is_not_there(self) -> None:
        with pytest.raises(EngineFatal, match="not found in cache"):
            Tier(4).load("s", 1)

    def test_a_load_that_was_never_begun_cannot_end(self) -> None:
        tier = Tier(4)
        tier.store("r", 1)
        with pytest.raises(EngineFatal, match="not being read"):
            tier.loaded("s", 1)

    def test_several_may_read_one_chunk(self) -> None:
        tier = Tier(1)
        tier.store("r", 1)
        tier.load("s", 1)
        tier.load("t", 1)
        tier.loaded("s", 1)
        assert tier.store("u", 2) is None
        tier.loaded("t", 1)
        assert tier.store("u", 2) == [1]

    def test_a_failed_store_leaves_nothing(self) -> None:
        tier = Tier(2)
        tier.store("r", 1, is_complete=False)
        tier.complete("r", 1, success=False)
        assert tier.states(1) == [LookupResult.MISS]
        assert tier.manager.chunks.num_free == 2

    def test_the_end_of_a_store_that_nobody_waits_for_changes_nothing(self) -> None:
        tier = Tier(2)
        tier.store("r", 1)
        tier.complete("r", 1, 2, success=False)
        assert tier.states(1) == [LookupResult.HIT]

    def test_a_reset_forgets_pins_too(self) -> None:
        tier = Tier(2)
        tier.store("r", 1)
        tier.load("s", 1)
        tier.manager.reset_cache()
        assert tier.states(1) == [LookupResult.MISS]
        assert tier.manager.chunks.num_free == 2
        assert tier.store("s", 1) == []


class TestRoom:
    def test_all_or_nothing(self) -> None:
        tier = Tier(3)
        tier.store("r", 1, 2, 3)
        tier.load("s", 1)
        assert tier.store("t", 4, 5, 6) is None
        assert tier.states(2, 3) == [LookupResult.HIT, LookupResult.HIT]

    def test_what_is_offered_is_not_evicted_for_the_rest_of_the_offer(self) -> None:
        tier = Tier(3)
        tier.store("r", 1, 2)
        tier.store("s", 11)
        assert tier.store("t", 1, 2, 3) == [11]

    def test_nor_where_nothing_else_could_go(self) -> None:
        tier = Tier(2)
        tier.store("r", 1, 2)
        assert tier.store("t", 1, 2, 3) is None

    def test_slots_are_given_out_in_order_and_then_the_last_one_back_first(self) -> None:
        tier = Tier(4)
        context = tier.context("r")
        plan = tier.manager.prepare_store(keys(1, 2, 3), context)
        assert plan is not None
        assert plan.chunk_ids.tolist() == [0, 1, 2]
        tier.complete("r", 1, 2, success=False)
        plan = tier.manager.prepare_store(keys(4, 5, 6), context)
        assert plan is not None
        assert plan.chunk_ids.tolist() == [3, 1, 0]

    def test_a_tier_without_room_refuses_everything(self) -> None:
        tier = Tier(0)
        assert tier.store("r", 1) is None
        assert tier.states(1) == [LookupResult.MISS]


class TestLeastRecentlyUsed:
    def test_within_a_request_the_tail_goes_first(self) -> None:
        """k1 at 16 tokens, k2 at 32, k3 at 48: evicted k3, k2, k1; an older request's all before them."""
        tier = Tier(5)
        tier.store("older", 11, 12)
        tier.store("r", 1)
        tier.store("r", 2, 3)
        tier.finish("older", "r")
        assert tier.store("s", 21, 22, 23, 24, 25) == [12, 11, 3, 2, 1]

    def test_a_running_requests_chunks_share_its_place(self) -> None:
        tier = Tier(4)
        tier.store("r", 1)
        tier.store("s", 11, 12)
        tier.store("r", 2)
        assert tier.store("t", 21, 22) == [2, 1]

    def test_a_loaded_chunk_rises_with_its_reader(self) -> None:
        tier = Tier(3)
        tier.store("r", 1)
        tier.store("s", 11)
        tier.store("t", 21)
        tier.load("u", 1)
        tier.loaded("u", 1)
        assert tier.store("v", 31) == [11]

    def test_but_never_sinks(self) -> None:
        """A second look of an older request leaves it where the younger one has put it."""
        tier = Tier(2)
        tier.store("r", 1)
        tier.context("s")
        tier.store("s", 11)
        tier.store("s", 1)
        tier.store("r", 1, 11)
        assert tier.lru.ranking().tolist() == [0, 1]

    def test_at_its_end_all_that_a_request_has_seen_is_fresh(self) -> None:
        tier = Tier(3)
        tier.store("r", 1, 2)
        tier.store("s", 11)
        tier.finish("r")
        assert tier.store("t", 21) == [11]

    def test_a_key_without_a_position_gets_a_place_of_its_own(self) -> None:
        tier = Tier(3, has_positions=False)
        tier.store("r", 1, 2, 3)
        assert tier.store("s", 4) == [1]

    def test_touching_makes_fresh(self) -> None:
        tier = Tier(2)
        tier.store("r", 1)
        tier.store("s", 11)
        tier.manager.touch(keys(1), tier.context("r"))
        assert tier.store("t", 21) == [11]


class PlainLRU:
    """The same order, by sorting everything each time."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier

    def victims(self, count: int, spared: set[int]) -> list[int] | None:
        chunks = self.tier.manager.chunks
        order = [chunk for chunk in self.tier.lru.ranking().tolist() if chunks.ref_counts[chunk] == 0]
        allowed = [int(chunks.keys[chunk]) for chunk in order if int(chunks.keys[chunk]) not in spared]
        return allowed[:count] if len(allowed) >= count else None


_ACTIONS = st.tuples(
    st.sampled_from(["store", "store", "store", "load", "unload", "finish", "touch"]),
    st.integers(0, 5),
    st.integers(0, 5),
    st.integers(1, 6),
)


class TestTheRunOfVictims:
    """Victims are read from a sorted run and a heap of latecomers: the same as sorting anew each time."""

    @settings(max_examples=300)
    @given(st.lists(_ACTIONS, max_size=60), st.integers(2, 9))
    def test_they_come_in_the_plain_order(self, actions: list[tuple[str, int, int, int]], num_chunks: int) -> None:
        tier = Tier(num_chunks)
        plain = PlainLRU(tier)
        loading: list[tuple[str, list[int]]] = []
        ended: set[str] = set()
        for action, who, what, count in actions:
            # A request's keys are prefixes of one prompt; two requests share each prompt.
            req_id = f"r{who}"
            numbers = [who // 2 * 10 + index for index in range(1, count + 1)]
            if req_id in ended and action != "unload":
                continue
            if action == "store":
                chunks = tier.manager.chunks
                present = {n for n in numbers if chunks.find_one(n) >= 0}
                missing = len(numbers) - len(present) - chunks.num_free
                expected = plain.victims(missing, present) if missing > 0 else []
                assert tier.store(req_id, *numbers) == ([] if len(present) == len(numbers) else expected)
            elif action == "load" and tier.manager.can_load(keys(*numbers)):
                tier.load(req_id, *numbers)
                loading.append((req_id, numbers))
            elif action == "unload" and loading:
                owner, held = loading.pop(what % len(loading))
                tier.loaded(owner, *held)
            elif action == "finish" and all(owner != req_id for owner, _ in loading):
                tier.finish(req_id)
                ended.add(req_id)
            elif action == "touch":
                tier.manager.touch(keys(*numbers), tier.context(req_id))


class TestAdaptiveReplacement:
    def arc(self, num_chunks: int = 3) -> Tier:
        return Tier(num_chunks, eviction_policy="arc")

    def test_the_first_eviction_takes_the_oldest_of_t1(self) -> None:
        """Capacity 3, target 0, T1 = [a, b, c]; storing d evicts a, which B1 remembers."""
        tier = self.arc()
        for number in (1, 2, 3):
            tier.store(f"r{number}", number)
        assert tier.store("r4", 4) == [1]
        assert list(tier.arc.b1) == [1]

    def test_a_key_that_b1_remembers_raises_the_target_and_comes_back_into_t1(self) -> None:
        tier = self.arc()
        for number in (1, 2, 3, 4):
            tier.store(f"r{number}", number)
        assert tier.store("again", 1) == [2]
        assert tier.arc.target_t1_size == 1
        assert list(tier.arc.t1) == [3, 4, 1]

    def test_below_its_target_t1_is_spared(self) -> None:
        tier = self.arc(4)
        tier.store("r", 1, 2)
        tier.load("s", 1, 2)
        tier.loaded("s", 1, 2)
        tier.finish("s")
        assert list(tier.arc.t2) == [2, 1]
        tier.store("t", 3)
        tier.store("u", 4)
        tier.arc.target_t1_size = 3
        assert tier.store("v", 5) == [2]

    def test_a_store_is_no_second_access(self) -> None:
        tier = self.arc()
        tier.store("r", 1)
        tier.load("r", 1)
        tier.loaded("r", 1)
        tier.finish("r")
        assert list(tier.arc.t1) == [1]

    def test_a_pending_chunk_counts_but_is_no_victim(self) -> None:
        tier = self.arc(2)
        tier.store("r", 1, is_complete=False)
        tier.store("s", 2)
        assert tier.store("t", 3) == [2]
        assert tier.store("u", 4, 5) is None

    def test_ghosts_are_no_more_than_slots(self) -> None:
        tier = self.arc(2)
        for number in range(1, 9):
            tier.store(f"r{number}", number)
        assert list(tier.arc.b1) == [5, 6]

    def test_a_miss_counts_once_per_request(self) -> None:
        tier = self.arc(1)
        tier.store("a", 1)
        tier.store("b", 2)
        tier.load("pin", 2)
        assert tier.store("r", 1) is None
        assert tier.store("r", 1) is None
        assert tier.arc.target_t1_size == 1


class TestThreshold:
    def test_the_second_offer_is_stored(self) -> None:
        tier = Tier(4, store_threshold=2)
        assert tier.store("r", 1, 2) == []
        assert tier.states(1, 2) == [LookupResult.MISS, LookupResult.MISS]
        tier.store("s", 1, 3)
        assert tier.states(1, 3) == [LookupResult.HIT, LookupResult.MISS]

    def test_counts_outlive_a_reset(self) -> None:
        tier = Tier(4, store_threshold=2)
        tier.store("r", 1)
        tier.manager.reset_cache()
        tier.store("s", 1)
        assert tier.states(1) == [LookupResult.HIT]

    def test_a_full_tracker_forgets_what_was_offered_longest_ago(self) -> None:
        counts = OfferCounts(2, 2)
        counts.note(keys(1, 2))
        counts.note(keys(1))
        counts.note(keys(3))
        assert list(counts.counts) == [1, 3]

    def test_an_offer_never_displaces_its_own_keys(self) -> None:
        counts = OfferCounts(2, 2)
        counts.note(keys(1, 2, 3))
        assert list(counts.counts) == [1, 2]


class TestEvents:
    def test_stored_when_the_store_is_over_and_removed_when_evicted(self) -> None:
        tier = Tier(1)
        tier.store("r", 1, is_complete=False)
        assert tier.events() == []
        tier.complete("r", 1)
        tier.store("s", 2)
        assert tier.events() == [("stored", [1], False), ("removed", [1], False), ("stored", [2], False)]
        assert tier.events() == []

    def test_a_failed_store_was_never_announced(self) -> None:
        tier = Tier(1)
        tier.store("r", 1, is_complete=False)
        tier.complete("r", 1, success=False)
        assert tier.events() == [("removed", [1], True)]

    def test_unless_it_has_been_stored_again_by_then(self) -> None:
        tier = Tier(1)
        tier.store("r", 1, is_complete=False)
        tier.complete("r", 1, success=False)
        tier.store("r", 1)
        assert tier.events() == [("stored", [1], False)]

    def test_discarded_chunks_are_removed(self) -> None:
        tier = Tier(2)
        tier.store("r", 1, 2)
        tier.load("s", 2)
        tier.events()
        tier.manager.discard(keys(1, 2, 3))
        assert tier.events() == [("removed", [1], False)]
        assert tier.states(1, 2) == [LookupResult.MISS, LookupResult.HIT]


class TestKeySpace:
    def test_keys_of_groups_differ_and_name_their_group(self) -> None:
        space = KeySpace(3)
        made = [space.make(np.array([7]), group, np.array([16])) for group in range(3)]
        assert len({int(key[0]) for key in made}) == 3
        assert [int(space.groups(key)[0]) for key in made] == [0, 1, 2]

    def test_prefix_order_is_by_position_then_group(self) -> None:
        space = KeySpace(2)
        late, early = (space.make(np.array([block]), 1, np.array([end])) for block, end in ((8, 32), (7, 16)))
        first = space.make(np.array([7]), 0, np.array([16]))
        shuffled = np.concatenate([late, early, first])
        assert space.in_prefix_order(shuffled).tolist() == [*first, *early, *late]

    def test_without_positions_each_group_keeps_its_order(self) -> None:
        assert KeySpace(2).in_prefix_order(keys(4, 9, 2)).tolist() == [4, 2, 9]

    @pytest.mark.parametrize("size", [1, 1024, 5000])
    def test_it_grows_with_its_keys(self, size: int) -> None:
        space = KeySpace(1, size)
        far = keys(70_000)
        assert space.positions(far).tolist() == [0]
        space.note(far, np.array([48]))
        assert space.positions(far).tolist() == [48]
        assert space.not_among(keys(3, 90_000), far).tolist() == [True, True]


def _all_methods(tier: Tier) -> list[Callable[[], object]]:
    manager, context = tier.manager, tier.context("r")
    return [manager.on_schedule_end, manager.on_reset_flushed, lambda: manager.get_load_source(1, context)]


def test_the_cpu_tier_has_nothing_to_do_between_steps() -> None:
    tier = Tier(1)
    for method in _all_methods(tier):
        method()
    assert not tier.manager.has_pending_work()
    assert tier.manager.get_load_source(1, tier.context("r")) == "CPU"
