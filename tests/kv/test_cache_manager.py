"""KVCacheManager: when a request gets its slots, what it adopts, and that the short way decides as the long one."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvreplay.kv.attention_managers import FullAttentionCacheManager, make_cache_manager
from kvreplay.kv.block_pool import BlockPool
from kvreplay.kv.cache_manager import BlocksOfRequest, KVCacheManager, Slots
from kvreplay.kv.specs import FULL, SLIDING_WINDOW, KVCacheGroupSpec

BLOCK = 4
KEYS = np.arange(100, dtype=np.int64)
FULL_GROUP = KVCacheGroupSpec(block_size=BLOCK)
WINDOW_GROUP = KVCacheGroupSpec(kind=SLIDING_WINDOW, block_size=BLOCK, sliding_window=8)


@dataclass
class Owner:
    request_id: str = "r"
    num_prompt_tokens: int = 40
    shared_prefix_boundary: int = 0
    num_tokens: int = 40


def cache_manager(num_blocks: int = 20, group: KVCacheGroupSpec = FULL_GROUP, **settings: Any) -> KVCacheManager:  # noqa: ANN401
    options: dict[str, Any] = {"max_model_len": 64, "max_in_flight_tokens": 64, **settings}
    return make_cache_manager([group], BlockPool(num_blocks), **options)


def allocate(kv: KVCacheManager, request_id: str, num_new_tokens: int, **settings: Any) -> list[int] | None:  # noqa: ANN401
    options: dict[str, Any] = {"num_computed_tokens": 0, "num_tokens": num_new_tokens, **settings}
    taken = kv.allocate_slots(request_id, Slots(num_new_tokens=num_new_tokens, **options))
    return None if taken is None else taken[0].tolist()


def cached_prompt(kv: KVCacheManager, request_id: str, num_tokens: int) -> None:
    """A request that has come and gone, and left its blocks in the cache."""
    allocate(kv, request_id, num_tokens)
    kv.cache_blocks(Owner(request_id, num_tokens, num_tokens), KEYS, num_tokens)
    kv.free(request_id)


class TestGates:
    """Spec, 2.8."""

    def test_a_request_gets_slots_for_its_tokens(self) -> None:
        kv = cache_manager()
        assert allocate(kv, "r", 10) == [1, 2, 3]
        assert allocate(kv, "r", 1, num_computed_tokens=10, num_tokens=11) == []
        assert allocate(kv, "r", 2, num_computed_tokens=11, num_tokens=13) == [4]
        assert kv.num_blocks_held("r") == 4

    def test_a_pool_too_small_gives_none_and_takes_nothing(self) -> None:
        kv = cache_manager(num_blocks=4)
        assert allocate(kv, "r", 13) is None
        assert (kv.pool.num_free, kv.num_blocks_held("r")) == (3, 0)

    def test_the_whole_sequence_must_fit_where_that_is_asked_for(self) -> None:
        kv = cache_manager(num_blocks=4)
        assert allocate(kv, "r", 4, num_tokens=13, full_sequence_must_fit=True) is None
        assert allocate(kv, "r", 4, num_tokens=13) == [1]

    def test_but_only_as_far_as_the_model_reaches(self) -> None:
        kv = cache_manager(num_blocks=4, max_model_len=12)
        assert allocate(kv, "r", 4, num_tokens=13, full_sequence_must_fit=True) == [1]

    def test_a_watermark_keeps_blocks_free_where_it_applies(self) -> None:
        kv = cache_manager(num_blocks=10, watermark=0.25)
        assert allocate(kv, "r", 32, apply_watermark=True) is None
        assert allocate(kv, "r", 28, apply_watermark=True) == [1, 2, 3, 4, 5, 6, 7]

    def test_reserved_blocks_are_left_to_others(self) -> None:
        kv = cache_manager(num_blocks=10)
        assert allocate(kv, "r", 0, num_external_tokens=16, num_tokens=16, reserved_blocks=6) is None
        assert allocate(kv, "r", 0, num_external_tokens=16, num_tokens=16, reserved_blocks=5) == [1, 2, 3, 4]

    def test_the_whole_sequence_gate_ignores_reservations(self) -> None:
        kv = cache_manager(num_blocks=10)
        taken = allocate(kv, "r", 4, num_tokens=36, full_sequence_must_fit=True, reserved_blocks=8)
        assert taken == [1]

    def test_evictable_hits_count_as_needed(self) -> None:
        """Spec, trap 22: two free blocks that are the request's own hit leave none for its third."""
        kv = cache_manager(num_blocks=3)
        cached_prompt(kv, "a", 8)
        hit, num_local, _ = kv.get_computed_blocks(KEYS, 9)
        assert num_local == 8
        assert allocate(kv, "b", 1, num_tokens=9, hit=hit, num_local_tokens=8) is None
        assert kv.pool.num_free == 2


class TestAdoption:
    def test_a_hit_never_covers_the_last_token(self) -> None:
        """Spec, trap 6: of 8 cached tokens a prompt of 8 hits 4."""
        kv = cache_manager()
        cached_prompt(kv, "a", 8)
        assert kv.get_computed_blocks(KEYS, 8)[1] == 4
        assert kv.get_computed_blocks(KEYS, 9)[1] == 8

    def test_without_prefix_caching_nothing_is_hit_or_hashed(self) -> None:
        kv = make_cache_manager(
            [FULL_GROUP], BlockPool(20, enable_caching=False), max_model_len=64, max_in_flight_tokens=64
        )
        cached_prompt(kv, "a", 8)
        assert kv.get_computed_blocks(KEYS, 9) == (kv.no_hit, 0, 0)
        assert kv.pool.num_cached_keys == 0

    def test_hits_are_touched_before_external_blocks_are_taken(self) -> None:
        """Spec, trap 28: the free queue's head is the hit."""
        kv = cache_manager(num_blocks=6)
        cached_prompt(kv, "a", 8)
        allocate(kv, "filler", 12)
        assert kv.pool.free_queue().tolist() == [2, 1]
        kv.free("filler")
        hit, _, _ = kv.get_computed_blocks(KEYS, 17)
        taken = allocate(kv, "b", 0, num_tokens=17, hit=hit, num_local_tokens=8, num_external_tokens=8)
        assert taken == [5, 4]
        assert kv.get_block_ids("b") == ([1, 2, 5, 4],)

    def test_external_blocks_are_not_hashed_by_being_allocated(self) -> None:
        kv = cache_manager()
        cached_prompt(kv, "a", 8)
        hit, _, _ = kv.get_computed_blocks(KEYS, 18)
        allocate(kv, "b", 0, num_tokens=18, hit=hit, num_local_tokens=8, num_external_tokens=8)
        assert BlocksOfRequest(kv, "b").get_unhashed_block_ids_all_groups() == ([3, 4],)

    def test_a_connector_sees_the_blocks_of_computed_tokens(self) -> None:
        """Spec, 3.2: a request that failed at block 2 of 4 hands over two."""
        kv = cache_manager()
        allocate(kv, "r", 0, num_tokens=16, num_external_tokens=16)
        assert BlocksOfRequest(kv, "r", 8).get_block_ids() == ([1, 2],)
        assert BlocksOfRequest(kv, "r").get_block_ids() == ([1, 2, 3, 4],)

    def test_what_a_request_still_needs(self) -> None:
        """Spec, 2.8: A of 64 tokens holds one of its blocks of 16."""
        kv = cache_manager(group=KVCacheGroupSpec(block_size=16))
        allocate(kv, "a", 0, num_tokens=64, num_external_tokens=16)
        assert kv.num_blocks_to_finish("a", 64, 16) == 3


class TestFreeing:
    def test_tail_first(self) -> None:
        kv = cache_manager(num_blocks=8)
        allocate(kv, "r", 10)
        kv.cache_blocks(Owner(num_tokens=10), KEYS, 10)
        assert [ids.tolist() for ids in kv.free("r")] == [[3, 2, 1]]
        assert kv.pool.free_queue().tolist() == [3, 4, 5, 6, 7, 2, 1]

    def test_a_request_without_blocks(self) -> None:
        assert [ids.tolist() for ids in cache_manager().free("stranger")] == [[]]

    def test_a_windows_skipped_blocks_go_even_if_the_request_then_gets_none(self) -> None:
        """Spec, trap 30."""
        kv = cache_manager(num_blocks=8, group=WINDOW_GROUP)
        allocate(kv, "r", 24)
        assert kv.pool.num_free == 1
        assert allocate(kv, "r", 40, num_computed_tokens=24, num_tokens=64) is None
        assert kv.get_block_ids("r") == ([0, 0, 0, 0, 5, 6],)
        assert kv.pool.num_free == 5


@pytest.mark.parametrize(("group", "kind"), [(FULL_GROUP, FullAttentionCacheManager), (WINDOW_GROUP, KVCacheManager)])
def test_full_attention_alone_takes_the_short_way(group: KVCacheGroupSpec, kind: type[KVCacheManager]) -> None:
    assert type(cache_manager(group=group)) is kind
    assert FULL_GROUP.kind == FULL


class Life:
    """One manager, and what requests do to it; prompts share the first `shared` blocks."""

    def __init__(self, kind: type[KVCacheManager], num_blocks: int, watermark: float) -> None:
        self.kv = kind(
            [FULL_GROUP], BlockPool(num_blocks), max_model_len=48, max_in_flight_tokens=64, watermark=watermark
        )
        self.owners: dict[str, Owner] = {}
        self.log: list[object] = []

    def do(self, action: tuple[str, int, int, int, dict[str, Any]]) -> None:
        name, request, shared, num_tokens, options = action
        request_id = f"r{request}"
        keys = np.concatenate([KEYS[:shared], 100 + 20 * request + KEYS[: 20 - shared]])
        match name:
            case "admit" if request_id not in self.owners:
                self.admit(request_id, keys, num_tokens, options)
            case "grow" if request_id in self.owners:
                self.grow(request_id, keys, num_tokens, options)
            case "free":
                self.owners.pop(request_id, None)
                self.log.append([ids.tolist() for ids in self.kv.free(request_id)])
        self.log.append((self.kv.pool.free_queue().tolist(), self.kv.pool.keys.tolist()))

    def admit(self, request_id: str, keys: Any, num_tokens: int, options: dict[str, Any]) -> None:  # noqa: ANN401
        hit, num_local, _ = self.kv.get_computed_blocks(keys, num_tokens)
        external = min(options["external"], num_tokens - num_local)
        new = min(options["chunk"], num_tokens - num_local - external) if not options["delay"] else 0
        if not num_local + external + new:
            return
        taken = self.kv.allocate_slots(
            request_id,
            Slots(
                num_computed_tokens=0,
                num_tokens=num_tokens,
                num_new_tokens=new,
                hit=hit,
                num_local_tokens=num_local,
                num_external_tokens=external,
                full_sequence_must_fit=options["gate"],
                apply_watermark=options["gate"],
                reserved_blocks=options["reserved"],
            ),
        )
        self.log.append((num_local, None if taken is None else [ids.tolist() for ids in taken]))
        if taken is not None:
            owner = self.owners[request_id] = Owner(request_id, num_tokens, num_tokens)
            self.log.append(self.kv.num_blocks_to_finish(request_id, 48, num_local))
            self.kv.cache_blocks(owner, keys, num_local + external + new)
            owner.num_tokens = num_local + external + new

    def grow(self, request_id: str, keys: Any, num_tokens: int, options: dict[str, Any]) -> None:  # noqa: ANN401
        owner = self.owners[request_id]
        new = min(options["chunk"], 48 - owner.num_tokens)
        if new <= 0:
            return
        taken = self.kv.allocate_slots(
            request_id,
            Slots(
                num_computed_tokens=owner.num_tokens,
                num_tokens=owner.num_tokens + new,
                num_new_tokens=new,
                reserved_blocks=options["reserved"],
            ),
        )
        self.log.append(None if taken is None else [ids.tolist() for ids in taken])
        if taken is not None:
            owner.num_tokens += new
            self.kv.cache_blocks(owner, keys, owner.num_tokens)


ACTIONS = st.tuples(
    st.sampled_from(["admit", "admit", "grow", "grow", "free"]),
    st.integers(0, 3),
    st.integers(0, 6),
    st.integers(1, 40),
    st.fixed_dictionaries(
        {
            "external": st.sampled_from([0, 0, 4, 9]),
            "chunk": st.integers(1, 12),
            "delay": st.booleans(),
            "gate": st.booleans(),
            "reserved": st.sampled_from([0, 0, 2]),
        }
    ),
)


@settings(deadline=None)
@given(st.lists(ACTIONS, max_size=25), st.integers(4, 16), st.sampled_from([0.0, 0.2]))
def test_the_short_way_decides_as_the_long_one(actions: list[Any], num_blocks: int, watermark: float) -> None:
    lives = [Life(kind, num_blocks, watermark) for kind in (KVCacheManager, FullAttentionCacheManager)]
    for life in lives:
        for action in actions:
            life.do(action)
    assert lives[0].log == lives[1].log
