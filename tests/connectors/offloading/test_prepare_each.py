"""Offers of one key each that are made in one go: what comes of them is what comes of one after the other."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvreplay.connectors.offloading.arrays import Keys
from kvreplay.connectors.offloading.context import RequestContext
from kvreplay.connectors.offloading.cpu_manager import CPUOffloadingManager
from kvreplay.connectors.offloading.keys import KeySpace
from kvreplay.connectors.offloading.lru import LRUPolicy

NUM_GROUPS, BLOCK = 3, 16


class Tier:
    """Three groups. Two requests each share a prompt, of which each group has a key at every boundary."""

    def __init__(self, num_chunks: int) -> None:
        self.space = KeySpace(NUM_GROUPS)
        self.manager = CPUOffloadingManager(num_chunks, self.space)
        self.contexts = [RequestContext(f"r{number}") for number in range(6)]
        for context in self.contexts:
            self.manager.on_new_request(context)

    def keys(self, who: int, boundary: int, groups: list[int]) -> Keys:
        block_key = who // 2 * 10 + boundary
        return np.array([self.space.make_one(block_key, group, boundary * BLOCK) for group in groups], np.int64)

    def store_one_by_one(self, who: int, keys: Keys) -> list[int | None]:
        plans = [self.manager.prepare_store(keys[index : index + 1], self.contexts[who]) for index in range(len(keys))]
        return [None if plan is None else (plan.chunk_ids.tolist() or [-1])[0] for plan in plans]

    def store_at_once(self, who: int, keys: Keys) -> list[int | None] | None:
        chunk_ids = self.manager.prepare_each(keys, self.contexts[who])
        return None if chunk_ids is None else chunk_ids.tolist()

    def situation(self) -> dict[str, Any]:
        manager = self.manager
        assert isinstance(manager.policy, LRUPolicy)
        return {
            "keys": manager.chunks.keys.tolist(),
            "users": manager.chunks.ref_counts.tolist(),
            "free": manager.chunks.free_list.tolist(),
            "order": manager.policy.ranking().tolist(),
            "numbers": (manager.num_evicted, manager.chunks.num_free, manager.chunks.num_evictable),
            "seen": [context.access.seen.tolist() for context in self.contexts if context.access is not None],
        }


class TestAtOnce:
    def test_new_keys_get_a_chunk_each_in_their_order(self) -> None:
        tier = Tier(4)
        assert tier.store_at_once(0, tier.keys(0, 1, [2, 0, 1])) == [0, 1, 2]

    def test_each_displaces_the_next_victim(self) -> None:
        tier = Tier(3)
        first = tier.keys(0, 1, [0, 1, 2])
        tier.store_at_once(0, first)
        tier.manager.complete_store(first, tier.contexts[0])
        assert tier.store_at_once(2, tier.keys(2, 1, [0, 1, 2])) == [0, 1, 2]
        assert tier.manager.num_evicted == 3

    def test_nothing_happens_where_some_are_there(self) -> None:
        tier = Tier(4)
        tier.store_one_by_one(0, tier.keys(0, 1, [1]))
        before = tier.situation()
        assert tier.store_at_once(0, tier.keys(0, 1, [0, 1])) is None
        assert tier.situation() == before

    def test_nor_where_there_is_room_for_some_only(self) -> None:
        tier = Tier(4)
        tier.store_one_by_one(0, tier.keys(0, 1, [0, 1, 2]))
        before = tier.situation()
        assert tier.store_at_once(2, tier.keys(2, 1, [0, 1])) is None
        assert tier.situation() == before

    def test_nor_where_two_are_of_one_group(self) -> None:
        tier = Tier(4)
        both = np.concatenate([tier.keys(0, 1, [0]), tier.keys(0, 2, [0])])
        assert tier.store_at_once(0, both) is None

    def test_nor_where_a_request_goes_back(self) -> None:
        tier = Tier(8)
        tier.store_one_by_one(0, tier.keys(0, 3, [0]))
        assert tier.store_at_once(0, tier.keys(0, 2, [0, 1])) is None


_ACTIONS = st.tuples(
    st.sampled_from(["store", "store", "store", "complete", "load", "unload", "finish"]),
    st.integers(0, 5),
    st.integers(1, 6),
    st.lists(st.integers(0, NUM_GROUPS - 1), min_size=1, max_size=NUM_GROUPS, unique=True),
)


@settings(max_examples=200)
@given(st.lists(_ACTIONS, max_size=60), st.integers(3, 12))
def test_it_is_as_one_after_the_other(actions: list[tuple[str, int, int, list[int]]], num_chunks: int) -> None:
    both, plain = tiers = Tier(num_chunks), Tier(num_chunks)
    stored: list[tuple[int, Keys]] = []
    loading: list[tuple[int, Keys]] = []
    ended: set[int] = set()
    for action, who, boundary, groups in actions:
        keys = both.keys(who, boundary, groups)
        assert keys.tolist() == plain.keys(who, boundary, groups).tolist()
        if action == "complete" and stored:
            owner, done = stored.pop(boundary % len(stored))
            for tier in tiers:
                tier.manager.complete_store(done, tier.contexts[owner])
        elif action == "unload" and loading:
            owner, held = loading.pop(boundary % len(loading))
            for tier in tiers:
                tier.manager.complete_load(held, tier.contexts[owner])
        elif who in ended:
            continue
        elif action == "store":
            expected = plain.store_one_by_one(who, keys)
            found = both.store_at_once(who, keys)
            assert (both.store_one_by_one(who, keys) if found is None else found) == expected
            accepted = [index for index, chunk in enumerate(expected) if chunk is not None and chunk >= 0]
            stored += [(who, keys[index : index + 1]) for index in accepted]
        elif action == "load" and plain.manager.can_load(keys):
            for tier in tiers:
                tier.manager.prepare_load(keys, tier.contexts[who])
            loading.append((who, keys))
        elif action == "finish" and all(owner != who for owner, _ in stored + loading):
            ended.add(who)
            for tier in tiers:
                tier.manager.on_request_finished(tier.contexts[who])
        assert both.situation() == plain.situation()
