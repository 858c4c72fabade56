"""What each kind of KV cache group looks up, allocates, hashes and gives back. Blocks of 4 tokens, window 8."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvreplay.kv.block_pool import BlockPool
from kvreplay.kv.managers import FullAttentionManager, make_manager
from kvreplay.kv.specs import FULL, SLIDING_WINDOW, KVCacheGroupSpec

BLOCK = 4
WINDOW = 8
KEYS = np.arange(100, dtype=np.int64)


@dataclass
class Owner:
    request_id: str = "r"
    num_prompt_tokens: int = 40
    num_tokens: int = 40


def manager(
    window: int | None = WINDOW,
    *,
    num_blocks: int = 50,
    retention: int | None = None,
    block_size: int = BLOCK,
    max_in_flight_tokens: int = 64,
) -> FullAttentionManager:
    spec = KVCacheGroupSpec(
        kind=FULL if window is None else SLIDING_WINDOW, block_size=block_size, sliding_window=window
    )
    return make_manager(
        spec,
        0,
        1,
        BlockPool(num_blocks),
        max_in_flight_tokens=max_in_flight_tokens,
        max_model_len=1024,
        retention_interval=retention,
    )


def table(of: FullAttentionManager, request_id: str = "r") -> list[int]:
    ids: list[int] = of.tables[request_id].ids.tolist()
    return ids


def cached_indices(of: FullAttentionManager) -> list[int]:
    """Places of the prompt whose block can be found."""
    found: list[int] = np.flatnonzero(of.pool.find(KEYS[:20])).tolist()
    return found


class TestFullAttention:
    def test_a_hit_is_the_longest_cached_prefix(self) -> None:
        full = manager(None)
        full.allocate_new_blocks("r", 40)
        full.cache_blocks(Owner(), KEYS, 40)
        full.pool.evict_blocks([6])
        assert full.find_longest_cache_hit(KEYS, 39).tolist() == [1, 2, 3, 4, 5]
        assert full.find_longest_cache_hit(KEYS, 11).tolist() == [1, 2]

    def test_only_full_blocks_are_hashed_and_each_once(self) -> None:
        full = manager(None)
        full.allocate_new_blocks("r", 10)
        owner = Owner(num_tokens=10)
        assert full.cache_blocks(owner, KEYS, 10).tolist() == [1, 2]
        assert full.cache_blocks(owner, KEYS, 11).tolist() == []
        owner.num_tokens = 12
        assert full.cache_blocks(owner, KEYS, 12).tolist() == [3]

    def test_tokens_that_do_not_exist_yet_are_not_hashed(self) -> None:
        """Slots may be allocated ahead, as for drafts."""
        full = manager(None)
        full.allocate_new_blocks("r", 12)
        assert full.cache_blocks(Owner(num_tokens=7), KEYS, 12).tolist() == [1]

    def test_new_slots_fill_up_the_last_block_first(self) -> None:
        full = manager(None)
        assert full.allocate_new_blocks("r", 6).tolist() == [1, 2]
        assert full.allocate_new_blocks("r", 8).tolist() == []
        assert full.allocate_new_blocks("r", 9).tolist() == [3]

    def test_a_hit_that_is_free_costs_capacity(self) -> None:
        """Spec, trap 22: a running request's hit does not, since nobody could take it."""
        full = manager(None)
        full.allocate_new_blocks("a", 12)
        full.cache_blocks(Owner("a"), KEYS, 12)
        hit = full.find_longest_cache_hit(KEYS, 12)
        none = np.empty(0, np.int64)
        assert full.num_blocks_to_allocate("b", 16, hit, 12) == 1
        full.pool.free_blocks(full.pop_blocks_for_free("a")[::-1])
        assert full.num_blocks_to_allocate("b", 16, hit, 12) == 1 + 3
        assert full.num_blocks_to_allocate("b", 16, none, 0) == 4

    def test_external_blocks_come_after_the_local_hit(self) -> None:
        full = manager(None)
        full.allocate_new_blocks("a", 8)
        full.cache_blocks(Owner("a"), KEYS, 8)
        full.add_local_computed_blocks("b", np.array([1, 2]), 16)
        assert full.allocate_external_computed_blocks("b", 8, 8).tolist() == [3, 4]
        assert table(full, "b") == [1, 2, 3, 4]

    def test_nothing_is_skipped(self) -> None:
        full = manager(None)
        full.allocate_new_blocks("r", 40)
        assert full.skipped_tokens(40) == 0
        assert full.remove_skipped_blocks("r", 40).tolist() == []


class TestSlidingWindow:
    @pytest.mark.parametrize(("computed", "skipped"), [(7, 0), (8, 1), (11, 4), (12, 5), (15, 8), (40, 33)])
    def test_skipped_tokens(self, computed: int, skipped: int) -> None:
        """Spec, 7.5."""
        assert manager().skipped_tokens(computed) == skipped

    def test_a_hit_needs_the_windows_blocks_only(self) -> None:
        """Spec, 7.2: all of a 40-token prompt is cached, at most 39 tokens may be hit."""
        window = manager()
        window.allocate_new_blocks("r", 40)
        window.cache_blocks(Owner(), KEYS, 40)
        assert window.find_longest_cache_hit(KEYS, 39).tolist() == [0, 0, 0, 0, 0, 0, 0, 8, 9]

    def test_a_prompt_in_chunks(self) -> None:
        """Spec, 7.5: chunks of 12, 12, 12, 4 tokens, then a decode."""
        window = manager(num_blocks=30)
        tables = []
        owner = Owner()
        for start, end in ((0, 12), (12, 24), (24, 36), (36, 40), (40, 41)):
            window.remove_skipped_blocks("r", start)
            window.allocate_new_blocks("r", end)
            owner.num_tokens = max(40, end)
            window.cache_blocks(owner, KEYS, end)
            tables.append(table(window))
        assert tables == [
            [1, 2, 3],
            [0, 2, 3, 4, 5, 6],
            [0, 0, 0, 0, 5, 6, 7, 8, 9],
            [0] * 7 + [8, 9, 10],
            [0] * 8 + [9, 10, 11],
        ]

    def test_blocks_that_leave_the_window_go_back_from_the_windows_edge(self) -> None:
        window = manager(num_blocks=9, retention=0)
        window.allocate_new_blocks("r", 24)
        assert window.remove_skipped_blocks("r", 23).tolist() == [4, 3, 2, 1]
        assert window.pool.free_queue().tolist() == [4, 3, 2, 1, 7, 8]
        assert window.remove_skipped_blocks("r", 23).tolist() == []
        assert window.remove_skipped_blocks("r", 27).tolist() == [5]

    def test_an_external_load_gets_blocks_inside_the_window_only(self) -> None:
        """Spec, 7.5 and trap 29: 48 of 50 tokens, then the rest."""
        window = manager()
        none = np.empty(0, np.int64)
        assert window.num_blocks_to_allocate("r", 48, none, 48) == 2
        window.add_local_computed_blocks("r", none, 48)
        window.allocate_external_computed_blocks("r", 0, 48)
        assert table(window) == [0] * 10 + [1, 2]
        window.allocate_new_blocks("r", 50)
        assert table(window) == [0] * 10 + [1, 2, 3]

    def test_hits_before_the_window_are_not_touched(self) -> None:
        window = manager()
        window.allocate_new_blocks("a", 40)
        window.cache_blocks(Owner("a"), KEYS, 40)
        hit = window.find_longest_cache_hit(KEYS, 20)
        assert hit.tolist() == [0, 0, 0, 4, 5]
        window.add_local_computed_blocks("b", hit, 32)  # 20 local, 12 external: the window has moved on
        assert table(window, "b") == [0] * 6
        window.add_local_computed_blocks("c", hit, 20)
        assert table(window, "c") == [0, 0, 0, 4, 5]
        assert window.pool.ref_counts[1:6].tolist() == [1, 1, 1, 2, 2]

    def test_leading_null_blocks_are_not_freed(self) -> None:
        window = manager()
        window.allocate_new_blocks("r", 40)
        window.remove_skipped_blocks("r", 40)
        assert window.pop_blocks_for_free("r").tolist() == [9, 10]
        assert window.pop_blocks_for_free("r").tolist() == []

    @pytest.mark.parametrize(("in_flight", "cap"), [(64, 19), (1, 3)])
    def test_admission_counts_what_is_held_at_once(self, in_flight: int, cap: int) -> None:
        """Spec, 7.5."""
        window = manager(max_in_flight_tokens=in_flight)
        none = np.empty(0, np.int64)
        assert window.num_blocks_to_allocate("r", 400, none, 0, apply_cap=True) == cap
        assert window.num_blocks_to_allocate("r", 400, none, 0) == 100
        assert window.num_blocks_to_allocate("r", 8, none, 0, apply_cap=True) == 2

    @pytest.mark.parametrize(
        ("retention", "ends"),
        [
            (None, list(range(4, 72, 4))),
            (16, [12, 16, 28, 32, 44, 48, 60, 64, 68]),
            (32, [28, 32, 60, 64, 68]),
            (0, [64, 68]),
        ],
    )
    def test_what_is_retained_of_a_prompt(self, retention: int | None, ends: list[int]) -> None:
        """Spec, 7.7, for one group: the tails of segments, and of what a resend of the prompt can hit (68 of 70)."""
        window = manager(retention=retention)
        window.allocate_new_blocks("r", 70)
        window.cache_blocks(Owner(num_prompt_tokens=70, num_tokens=70), KEYS, 70)
        assert [4 * (index + 1) for index in cached_indices(window)] == ends

    def test_a_block_that_was_not_worth_a_hash_is_never_offered_again(self) -> None:
        window = manager(retention=0)
        window.allocate_new_blocks("r", 40)
        assert window.cache_blocks(Owner(), KEYS, 20).tolist() == []
        assert window.cache_blocks(Owner(num_prompt_tokens=17), KEYS, 40).tolist() == []

    def test_null_blocks_get_no_hash(self) -> None:
        window = manager()
        window.allocate_new_blocks("r", 40)
        window.remove_skipped_blocks("r", 40)
        assert window.cache_blocks(Owner(), KEYS, 40).tolist() == [9, 10]


@given(
    cached=st.lists(st.booleans(), max_size=12),
    window=st.integers(1, 20),
    max_length=st.integers(0, 60),
)
def test_a_window_hit_is_the_longest_whose_last_tokens_are_all_there(
    cached: list[bool], window: int, max_length: int
) -> None:
    """By definition: a prefix can be used if every block that its next token attends to is cached."""
    sliding = manager(window)
    block_ids = sliding.pool.get_new_blocks(len(cached))
    chosen = np.array(cached, np.bool_)
    sliding.pool.cache(block_ids[chosen], KEYS[: len(cached)][chosen])

    def is_usable(length: int) -> bool:
        needed = max(1, -(-(window - 1) // BLOCK))
        return all(index < len(cached) and cached[index] for index in range(max(0, length - needed), length))

    longest = max(length for length in range(max_length // BLOCK + 1) if is_usable(length))
    hit = sliding.find_longest_cache_hit(KEYS, max_length)
    assert len(hit) == longest
    first_needed = max(0, longest - max(1, -(-(window - 1) // BLOCK)))
    assert hit.tolist() == [0] * first_needed + block_ids[first_needed:longest].tolist()


@given(
    prompt=st.integers(1, 80),
    window=st.integers(2, 20),
    retention=st.sampled_from([None, 0, 4, 8, 16, 32]),
    chunks=st.lists(st.integers(1, 40), min_size=1, max_size=5),
)
def test_retained_blocks_are_those_that_some_hit_ends_on(
    prompt: int, window: int, retention: int | None, chunks: list[int]
) -> None:
    sliding = manager(window, retention=retention, num_blocks=100)
    length = 0
    for chunk in chunks:
        length = min(length + chunk, 80)
        sliding.allocate_new_blocks("r", length)
        sliding.cache_blocks(Owner(num_prompt_tokens=prompt, num_tokens=length), KEYS, length)

    needed = -(-(window - 1) // BLOCK) * BLOCK
    segment = BLOCK if retention is None else retention
    ends = set(range(segment, 200, segment)) if segment else set()
    if retention is not None:
        ends.add((prompt - 1) // BLOCK * BLOCK)
    expected = [
        index for index in range(length // BLOCK) if any(end - needed < (index + 1) * BLOCK <= end for end in ends)
    ]
    assert cached_indices(sliding) == expected
