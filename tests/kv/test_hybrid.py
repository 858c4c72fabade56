"""Several groups over one pool: joint hits, allocation, what gets a key (spec, 7 and 8)."""

from dataclasses import dataclass

import numpy as np
import pytest

from kvreplay.errors import ConfigError
from kvreplay.kv.attention_managers import make_cache_manager
from kvreplay.kv.block_pool import BlockPool
from kvreplay.kv.cache_manager import KVCacheManager, Slots
from kvreplay.kv.lookup import FoundPrefix
from kvreplay.kv.specs import FULL, MAMBA, MAMBA_ALIGN, MLA, SLIDING_WINDOW, SLIDING_WINDOW_MLA, KVCacheGroupSpec

KEYS = np.arange(1000, dtype=np.int64)


@dataclass
class Owner:
    request_id: str = "r"
    num_prompt_tokens: int = 34
    num_tokens: int = 34
    shared_prefix_boundary: int = 0


def full(block_size: int) -> KVCacheGroupSpec:
    return KVCacheGroupSpec(kind=FULL, block_size=block_size)


def window(block_size: int, sliding_window: int, kind: str = SLIDING_WINDOW) -> KVCacheGroupSpec:
    return KVCacheGroupSpec(kind=kind, block_size=block_size, sliding_window=sliding_window)


def mamba(block_size: int, num_speculative_blocks: int = 0) -> KVCacheGroupSpec:
    return KVCacheGroupSpec(
        kind=MAMBA,
        block_size=block_size,
        mamba_cache_mode=MAMBA_ALIGN,
        num_speculative_blocks=num_speculative_blocks,
    )


def manager(*groups: KVCacheGroupSpec, num_blocks: int = 100, retention: int | None = None) -> KVCacheManager:
    return make_cache_manager(
        groups, BlockPool(num_blocks), max_model_len=1024, max_in_flight_tokens=64, retention_interval=retention
    )


def compute(kv: KVCacheManager, owner: Owner, start: int, end: int) -> None:
    """Tokens [start, end) of the owner."""
    taken = kv.allocate_slots(
        owner.request_id, Slots(num_computed_tokens=start, num_tokens=owner.num_tokens, num_new_tokens=end - start)
    )
    assert taken is not None
    kv.cache_blocks(owner, KEYS, end)


def shown(found: FoundPrefix) -> tuple[int, tuple[list[int], ...]]:
    return found.num_tokens, tuple(blocks.tolist() for blocks in found.hit)


def keyed_ends(kv: KVCacheManager, group: int) -> list[int]:
    """Ends, in tokens, of the group's blocks that can be found."""
    of = kv.managers[group]
    found = kv.pool.find(of.pool_keys(of.block_keys(KEYS)))
    return [(int(index) + 1) * of.block_size for index in found.nonzero()[0]]


class TestJointHits:
    @pytest.fixture
    def kv(self) -> KVCacheManager:
        """Spec, 7.3: 34 tokens of full attention in blocks of 8, and a window of 8 in blocks of 4."""
        kv = manager(full(8), window(4, 8))
        compute(kv, Owner(), 0, 34)
        assert kv.get_block_ids("r") == ([1, 2, 3, 4, 5], list(range(6, 15)))
        return kv

    def test_all_groups_agree(self, kv: KVCacheManager) -> None:
        found = kv.get_computed_blocks(KEYS, 34)
        assert shown(found) == (32, ([1, 2, 3, 4], [0] * 6 + [12, 13]))
        assert found.uncached == 0

    def test_one_that_has_less_shortens_it_and_names_the_junction(self, kv: KVCacheManager) -> None:
        kv.evict_blocks([12])
        found = kv.get_computed_blocks(KEYS, 34)
        assert shown(found) == (24, ([1, 2, 3], [0] * 4 + [10, 11]))
        assert found.num_tokens + found.uncached == 32

    def test_what_fits_the_others_is_looked_for_again(self, kv: KVCacheManager) -> None:
        kv.evict_blocks([12, 2])
        assert shown(kv.get_computed_blocks(KEYS, 34)) == (8, ([1], [6, 7]))

    def test_a_free_request_gives_back_group_after_group(self, kv: KVCacheManager) -> None:
        """Spec, 5.4."""
        kv.free("r")
        queue = kv.pool.free_queue().tolist()
        assert queue[:3] == [14, 5, 15]
        assert queue[-12:] == [4, 3, 2, 1, 13, 12, 11, 10, 9, 8, 7, 6]


class TestThreeKinds:
    @pytest.mark.parametrize(("evicted", "hit"), [(None, 64), ((2, 48), 32), ((1, 32), 64)])
    def test_the_hit_is_where_all_meet(self, evicted: tuple[int, int] | None, hit: int) -> None:
        """Spec, 7.3: a shorter candidate may not fit those that accepted the longer one."""
        kv = manager(full(16), window(4, 8), window(8, 32))
        compute(kv, Owner(num_prompt_tokens=70, num_tokens=70), 0, 70)
        if evicted is not None:
            group, end = evicted
            index = end // kv.managers[group].block_size - 1
            kv.evict_blocks([kv.get_block_ids("r")[group][index]])
        assert kv.get_computed_blocks(KEYS, 70).num_tokens == hit


class TestRetention:
    @pytest.mark.parametrize(
        ("retention", "ends"),
        [
            (None, [12, 16, 28, 32, 44, 48, 60, 64]),
            (16, [12, 16, 28, 32, 44, 48, 60, 64]),
            (32, [28, 32, 60, 64]),
            (0, [60, 64]),
        ],
    )
    def test_a_window_keeps_what_a_hit_can_end_on(self, retention: int | None, ends: list[int]) -> None:
        """Spec, 7.7."""
        kv = manager(full(16), window(4, 8), retention=retention)
        compute(kv, Owner(num_prompt_tokens=70, num_tokens=70), 0, 70)
        assert keyed_ends(kv, 1) == ends
        assert keyed_ends(kv, 0) == [16, 32, 48, 64]

    def test_a_junction_is_kept_for_the_next_who_shares_it(self) -> None:
        kv = manager(full(16), window(4, 8), retention=0)
        compute(kv, Owner(num_prompt_tokens=70, num_tokens=70, shared_prefix_boundary=32), 0, 70)
        assert keyed_ends(kv, 1) == [28, 32, 60, 64]

    def test_intervals_end_where_hits_can(self) -> None:
        with pytest.raises(
            ConfigError, match=r"^cache.prefix_cache_retention_interval must be a multiple of 16, got 24$"
        ):
            manager(full(16), window(4, 8), retention=24)

    def test_full_attention_alone_has_nothing_to_retain(self) -> None:
        with pytest.raises(ConfigError, match=r"^cache.prefix_cache_retention_interval is 32, but only sliding-window"):
            manager(full(16), full(8), retention=32)


class TestMambaTables:
    @pytest.mark.parametrize(
        ("num_drafts", "tables"),
        [
            (0, [[0, 3], [0, 3, 0, 6], [0, 0, 0, 6, 0, 9], [0] * 5 + [9, 11]]),
            (2, [[0, 3, 4, 5], [0, 3, 0, 5, 4, 8], [0, 0, 0, 5, 0, 8, 4, 11], [0] * 5 + [8, 4, 11, 13]]),
        ],
    )
    def test_a_prompt_in_chunks(self, num_drafts: int, tables: list[list[int]]) -> None:
        """Spec, 7.9: chunks of 32, 32, 32, 4 tokens; the blocks of drafts move along."""
        kv = manager(full(16), mamba(16, num_drafts), num_blocks=50)
        owner = Owner(num_prompt_tokens=100, num_tokens=100)
        seen = []
        for start, end in ((0, 32), (32, 64), (64, 96), (96, 100)):
            compute(kv, owner, start, end)
            seen.append(kv.get_block_ids("r")[1])
        assert seen == tables

    def test_a_state_of_this_step_serves_nobody_in_it(self) -> None:
        """Spec, 7.9: more blocks are asked for than there are, so that the sibling waits."""
        kv = manager(full(16), mamba(16))
        compute(kv, Owner(num_prompt_tokens=40, num_tokens=40), 0, 32)
        found = kv.get_computed_blocks(KEYS, 40)
        assert found.num_tokens == 32

        def admitted() -> bool:
            taken = kv.allocate_slots(
                "s", Slots(num_computed_tokens=0, num_tokens=40, num_new_tokens=8, hit=found.hit, num_local_tokens=32)
            )
            return taken is not None

        assert not admitted()
        kv.start_step()
        assert admitted()

    def test_one_external_state_is_all_that_a_load_needs(self) -> None:
        """Spec, 7.9."""
        kv = manager(full(16), mamba(16), num_blocks=50)
        assert (
            kv.allocate_slots(
                "r", Slots(num_computed_tokens=0, num_tokens=160, num_new_tokens=0, num_external_tokens=144)
            )
            is not None
        )
        assert kv.get_block_ids("r") == (list(range(1, 10)), [0] * 8 + [10])
        assert kv.pool.num_free == 39


class TestFiveGroups:
    def test_a_load_takes_what_each_groups_window_holds(self) -> None:
        """Spec, 8.5: 512 of 600 tokens."""
        kv = manager(
            KVCacheGroupSpec(kind=MLA, block_size=256, tokens_per_state=4),
            window(4, 8, SLIDING_WINDOW_MLA),
            window(8, 128, SLIDING_WINDOW_MLA),
            window(64, 128, SLIDING_WINDOW_MLA),
            window(64, 128, SLIDING_WINDOW_MLA),
            num_blocks=200,
        )
        assert (kv.block_size, kv.rules.hash_block_size) == (256, 4)
        owner = Owner(num_prompt_tokens=600, num_tokens=600)
        kv.allocate_slots("r", Slots(num_computed_tokens=0, num_tokens=600, num_new_tokens=0, num_external_tokens=512))
        assert kv.get_block_ids("r") == (
            [1, 2],
            [0] * 126 + [3, 4],
            [0] * 48 + list(range(5, 21)),
            [0] * 6 + [21, 22],
            [0] * 6 + [23, 24],
        )
        kv.cache_blocks(owner, KEYS, 512)
        assert [keyed_ends(kv, group) for group in range(5)] == [
            [256, 512],
            [508, 512],
            list(range(392, 513, 8)),
            [448, 512],
            [448, 512],
        ]
        before = kv.pool.num_free
        compute(kv, owner, 512, 600)
        assert before - kv.pool.num_free == 38
        assert [len(ids) for ids in kv.get_block_ids("r")] == [3, 150, 75, 10, 10]
        assert kv.get_computed_blocks(KEYS, 600).num_tokens == 512
        other = kv.get_computed_blocks(np.concatenate([KEYS[:75], KEYS[500:600]]), 600)
        assert (other.num_tokens, other.uncached) == (0, 256)


@pytest.mark.parametrize(
    ("has_connector", "enable_caching", "hashing"), [(False, False, 32), (True, False, 4), (False, True, 4)]
)
def test_hashes_are_as_fine_as_anybody_needs(has_connector: bool, enable_caching: bool, hashing: int) -> None:
    """A connector stores and finds blocks of every group by them, with or without a prefix cache."""
    kv = make_cache_manager(
        (full(32), window(4, 16)),
        BlockPool(100, enable_caching=enable_caching),
        max_model_len=1024,
        max_in_flight_tokens=64,
        has_connector=has_connector,
    )
    assert (kv.rules.scheduler_block_size, kv.rules.hash_block_size) == (32, hashing)
