"""What each kind of KV cache group looks up, allocates, hashes and gives back. Blocks of 4 tokens, window 8."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvreplay.kv.block_pool import BlockPool
from kvreplay.kv.managers.base import CacheRules, JointLookup, KVGroupManager, Need
from kvreplay.kv.managers.factory import make_manager
from kvreplay.kv.specs import FULL, SLIDING_WINDOW, KVCacheGroupSpec

BLOCK = 4
WINDOW = 8
KEYS = np.arange(100, dtype=np.int64)


@dataclass
class Owner:
    request_id: str = "r"
    num_prompt_tokens: int = 40
    num_tokens: int = 40
    shared_prefix_boundary: int = 0


def manager(
    window: int | None = WINDOW,
    *,
    num_blocks: int = 50,
    retention: int | None = None,
    block_size: int = BLOCK,
    max_in_flight_tokens: int = 64,
) -> KVGroupManager:
    spec = KVCacheGroupSpec(
        kind=FULL if window is None else SLIDING_WINDOW, block_size=block_size, sliding_window=window
    )
    rules = CacheRules(
        num_groups=1,
        scheduler_block_size=block_size,
        hash_block_size=block_size,
        hit_alignment=block_size,
        max_in_flight_tokens=max_in_flight_tokens,
        max_model_len=1024,
        retention_interval=retention,
    )
    return make_manager(spec, 0, BlockPool(num_blocks), rules)


def found(of: KVGroupManager, max_length: int) -> list[int]:
    """The longest hit of at most so many tokens."""
    (blocks,), length = of.find_longest_cache_hit(JointLookup([of]), KEYS, max_length, drop_eagle_block=False)
    assert length == len(blocks) * of.block_size
    ids: list[int] = blocks.tolist()
    return ids


def needed(
    of: KVGroupManager, request_id: str, num_tokens: int, hit: list[int], computed: int, cap: bool = False
) -> int:
    need = Need(num_tokens, computed, len(hit) * of.block_size, num_tokens, cap)
    return of.num_blocks_to_allocate(request_id, np.array(hit, np.int64), need)


def allocate(of: KVGroupManager, request_id: str, num_tokens: int) -> list[int]:
    ids: list[int] = of.allocate_new_blocks(request_id, num_tokens, num_tokens).tolist()
    return ids


def cached(of: KVGroupManager, owner: Owner, num_tokens: int) -> list[int]:
    """Blocks that get a hash when so many tokens are computed."""
    ids: list[int] = of.cache_blocks(owner, KEYS, num_tokens, [owner.num_prompt_tokens - 1]).tolist()
    return ids


def dropped(of: KVGroupManager, computed: int) -> list[int]:
    """Blocks that go back when so many tokens are computed, next to be reused first."""
    before = set(of.pool.free_queue().tolist())
    of.remove_skipped_blocks("r", computed)
    return [block_id for block_id in of.pool.free_queue().tolist() if block_id not in before]


def table(of: KVGroupManager, request_id: str = "r") -> list[int]:
    ids: list[int] = of.tables[request_id].ids.tolist()
    return ids


def cached_indices(of: KVGroupManager) -> list[int]:
    """Places of the prompt whose block can be found."""
    found: list[int] = np.flatnonzero(of.pool.find(KEYS[:20])).tolist()
    return found


class TestFullAttention:
    def test_a_hit_is_the_longest_cached_prefix(self) -> None:
        full = manager(None)
        allocate(full, "r", 40)
        cached(full, Owner(), 40)
        full.pool.evict_blocks([6])
        assert found(full, 39) == [1, 2, 3, 4, 5]
        assert found(full, 11) == [1, 2]

    def test_only_full_blocks_are_hashed_and_each_once(self) -> None:
        full = manager(None)
        allocate(full, "r", 10)
        owner = Owner(num_tokens=10)
        assert cached(full, owner, 10) == [1, 2]
        assert cached(full, owner, 11) == []
        owner.num_tokens = 12
        assert cached(full, owner, 12) == [3]

    def test_tokens_that_do_not_exist_yet_are_not_hashed(self) -> None:
        """Slots may be allocated ahead, as for drafts."""
        full = manager(None)
        allocate(full, "r", 12)
        assert cached(full, Owner(num_tokens=7), 12) == [1]

    def test_new_slots_fill_up_the_last_block_first(self) -> None:
        full = manager(None)
        assert allocate(full, "r", 6) == [1, 2]
        assert allocate(full, "r", 8) == []
        assert allocate(full, "r", 9) == [3]

    def test_a_hit_that_is_free_costs_capacity(self) -> None:
        """Spec, trap 22: a running request's hit does not, since nobody could take it."""
        full = manager(None)
        allocate(full, "a", 12)
        cached(full, Owner("a"), 12)
        hit = found(full, 12)
        assert needed(full, "b", 16, hit, 12) == 1
        full.pool.free_blocks(full.pop_blocks_for_free("a")[::-1])
        assert needed(full, "b", 16, hit, 12) == 1 + 3
        assert needed(full, "b", 16, [], 0) == 4

    def test_external_blocks_come_after_the_local_hit(self) -> None:
        full = manager(None)
        allocate(full, "a", 8)
        cached(full, Owner("a"), 8)
        full.add_local_computed_blocks("b", np.array([1, 2]), 8, 8)
        assert full.allocate_external_computed_blocks("b", 8, 8, zero=True).tolist() == [3, 4]
        assert table(full, "b") == [1, 2, 3, 4]

    def test_nothing_is_skipped(self) -> None:
        full = manager(None)
        allocate(full, "r", 40)
        assert full.skipped_tokens(40) == 0
        assert dropped(full, 40) == []


class TestSlidingWindow:
    @pytest.mark.parametrize(("computed", "skipped"), [(7, 0), (8, 1), (11, 4), (12, 5), (15, 8), (40, 33)])
    def test_skipped_tokens(self, computed: int, skipped: int) -> None:
        """Spec, 7.5."""
        assert manager().skipped_tokens(computed) == skipped

    def test_a_hit_needs_the_windows_blocks_only(self) -> None:
        """Spec, 7.2: all of a 40-token prompt is cached, at most 39 tokens may be hit."""
        window = manager()
        allocate(window, "r", 40)
        cached(window, Owner(), 40)
        assert found(window, 39) == [0, 0, 0, 0, 0, 0, 0, 8, 9]

    def test_a_prompt_in_chunks(self) -> None:
        """Spec, 7.5: chunks of 12, 12, 12, 4 tokens, then a decode."""
        window = manager(num_blocks=30)
        tables = []
        owner = Owner()
        for start, end in ((0, 12), (12, 24), (24, 36), (36, 40), (40, 41)):
            window.remove_skipped_blocks("r", start)
            allocate(window, "r", end)
            owner.num_tokens = max(40, end)
            cached(window, owner, end)
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
        allocate(window, "r", 24)
        assert dropped(window, 23) == [4, 3, 2, 1]
        assert window.pool.free_queue().tolist() == [4, 3, 2, 1, 7, 8]
        assert dropped(window, 23) == []
        assert dropped(window, 27) == [5]

    def test_an_external_load_gets_blocks_inside_the_window_only(self) -> None:
        """Spec, 7.5 and trap 29: 48 of 50 tokens, then the rest."""
        window = manager()
        none = np.empty(0, np.int64)
        assert needed(window, "r", 48, [], 48) == 2
        window.add_local_computed_blocks("r", none, 0, 48)
        window.allocate_external_computed_blocks("r", 0, 48, zero=True)
        assert table(window) == [0] * 10 + [1, 2]
        allocate(window, "r", 50)
        assert table(window) == [0] * 10 + [1, 2, 3]

    def test_hits_before_the_window_are_not_touched(self) -> None:
        window = manager()
        allocate(window, "a", 40)
        cached(window, Owner("a"), 40)
        hit = found(window, 20)
        assert hit == [0, 0, 0, 4, 5]
        window.add_local_computed_blocks(
            "b", np.array(hit, np.int64), 20, 12
        )  # 20 local, 12 external: the window has moved on
        assert table(window, "b") == [0] * 6
        window.add_local_computed_blocks("c", np.array(hit, np.int64), 20, 0)
        assert table(window, "c") == [0, 0, 0, 4, 5]
        assert window.pool.ref_counts[1:6].tolist() == [1, 1, 1, 2, 2]

    def test_leading_null_blocks_are_not_freed(self) -> None:
        window = manager()
        allocate(window, "r", 40)
        window.remove_skipped_blocks("r", 40)
        assert window.pop_blocks_for_free("r").tolist() == [9, 10]
        assert window.pop_blocks_for_free("r").tolist() == []

    @pytest.mark.parametrize(("in_flight", "cap"), [(64, 19), (1, 3)])
    def test_admission_counts_what_is_held_at_once(self, in_flight: int, cap: int) -> None:
        """Spec, 7.5."""
        window = manager(max_in_flight_tokens=in_flight)
        np.empty(0, np.int64)
        assert needed(window, "r", 400, [], 0, cap=True) == cap
        assert needed(window, "r", 400, [], 0) == 100
        assert needed(window, "r", 8, [], 0, cap=True) == 2

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
        allocate(window, "r", 70)
        cached(window, Owner(num_prompt_tokens=70, num_tokens=70), 70)
        assert [4 * (index + 1) for index in cached_indices(window)] == ends

    def test_a_block_that_was_not_worth_a_hash_is_never_offered_again(self) -> None:
        window = manager(retention=0)
        allocate(window, "r", 40)
        assert cached(window, Owner(), 20) == []
        assert cached(window, Owner(num_prompt_tokens=17), 40) == []

    def test_null_blocks_get_no_hash(self) -> None:
        window = manager()
        allocate(window, "r", 40)
        window.remove_skipped_blocks("r", 40)
        assert cached(window, Owner(), 40) == [9, 10]


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
        tail = max(1, -(-(window - 1) // BLOCK))
        return all(index < len(cached) and cached[index] for index in range(max(0, length - tail), length))

    longest = max(length for length in range(max_length // BLOCK + 1) if is_usable(length))
    hit = found(sliding, max_length)
    assert len(hit) == longest
    first_needed = max(0, longest - max(1, -(-(window - 1) // BLOCK)))
    assert hit == [0] * first_needed + block_ids[first_needed:longest].tolist()


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
        allocate(sliding, "r", length)
        cached(sliding, Owner(num_prompt_tokens=prompt, num_tokens=length), length)

    tail = -(-(window - 1) // BLOCK) * BLOCK
    segment = BLOCK if retention is None else retention
    ends = set(range(segment, 200, segment)) if segment else set()
    if retention is not None:
        ends.add((prompt - 1) // BLOCK * BLOCK)
    expected = [
        index for index in range(length // BLOCK) if any(end - tail < (index + 1) * BLOCK <= end for end in ends)
    ]
    assert cached_indices(sliding) == expected
