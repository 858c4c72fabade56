"""Settings, and what of an engine's groups is offloaded."""

from collections.abc import Mapping

import pytest

from kvreplay.behaviour import profile
from kvreplay.connectors.offloading.behaviour import VLLM_0_33, offload_behaviour
from kvreplay.connectors.offloading.config import MAX_CHUNKS, OffloadingConfig
from kvreplay.connectors.offloading.groups import drafting, engine_layout, offload_groups
from kvreplay.connectors.offloading.layout import OffloadGroup, OffloadLayout
from kvreplay.errors import ConfigError
from kvreplay.kv import specs
from kvreplay.kv.attention_managers import make_cache_manager
from kvreplay.kv.block_pool import BlockPool
from kvreplay.kv.specs import KVCacheGroupSpec
from tests.connectors.offloading.desk import Settings, full, state, window

FULL = KVCacheGroupSpec(block_size=16, bytes_per_token=100)
WINDOW = KVCacheGroupSpec(kind=specs.SLIDING_WINDOW, block_size=16, sliding_window=40, bytes_per_token=50)
STATE = KVCacheGroupSpec(kind=specs.MAMBA, block_size=16, mamba_cache_mode=specs.MAMBA_ALIGN, state_bytes=3200)
RING = KVCacheGroupSpec(kind=specs.CIRCULAR_BUFFER, block_size=16, bytes_per_token=10)


def config(**settings: Settings) -> OffloadingConfig:
    return OffloadingConfig(**{"cpu_bytes_to_use": 1 << 20, **settings})


def test_what_it_does_by_default_is_the_default_profile() -> None:
    assert offload_behaviour(profile("vllm-0.33").switches) == VLLM_0_33


class TestSettings:
    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"cpu_bytes_to_use": 0}, "connector.cpu_bytes_to_use must be > 0, got 0"),
            ({"load_bytes_per_s": 0}, "connector.load_bytes_per_s must be > 0, got 0"),
            ({"store_threshold": -1}, "connector.store_threshold must be >= 0, got -1"),
            ({"copy_latency": -0.5}, "connector.copy_latency must be >= 0, got -0.5"),
            ({"copy_timeout": 0.0}, "connector.copy_timeout must be > 0, got 0.0"),
            ({"blocks_per_chunk": 0}, "connector.blocks_per_chunk must be > 0, got 0"),
            ({"blocks_per_chunk": 2, "block_size": 32}, "specify only one of block_size and blocks_per_chunk"),
            (
                {"store_threshold": 2, "spec_name": "TieringOffloadingSpec"},
                "store_threshold >= 2 is not supported with TieringOffloadingSpec",
            ),
        ],
    )
    def test_what_is_refused(self, settings: Mapping[str, object], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            config(**settings)


class TestChunks:
    def test_a_chunk_is_a_block_unless_said_otherwise(self) -> None:
        assert config().chunk_blocks([16, 32]) == 1
        assert config(blocks_per_chunk=3).chunk_blocks([16, 32]) == 3

    def test_or_so_many_tokens(self) -> None:
        assert config(block_size=64).chunk_blocks([16, 16]) == 4

    def test_which_must_be_whole_blocks_of_one_size(self) -> None:
        with pytest.raises(ConfigError, match="must be a multiple of the KV cache block size"):
            config(block_size=40).chunk_blocks([16])
        with pytest.raises(ConfigError, match="all KV cache groups must have the same block size"):
            config(block_size=64).chunk_blocks([16, 32])

    def test_how_many_fit_in_whole_memory_pages(self) -> None:
        assert config(cpu_bytes_to_use=40960).num_chunks([full(bytes_per_block=4096)], 1) == 10
        assert config(cpu_bytes_to_use=40960).num_chunks([full(bytes_per_block=4097)], 1) == 5
        assert config(cpu_bytes_to_use=40960).num_chunks([full(bytes_per_block=2048)], 2) == 10

    def test_the_widest_group_decides(self) -> None:
        groups = [full(bytes_per_block=4096), state(1, bytes_per_block=8192)]
        assert config(cpu_bytes_to_use=40960).num_chunks(groups, 1) == 5

    def test_more_than_can_be_kept_track_of_are_refused(self) -> None:
        groups = [full(bytes_per_block=4096)]
        assert config(cpu_bytes_to_use=MAX_CHUNKS * 4096).num_chunks(groups, 1) == MAX_CHUNKS
        with pytest.raises(ConfigError, match=r"connector.cpu_bytes_to_use: 68719480832 bytes are 16777217 chunks"):
            config(cpu_bytes_to_use=(MAX_CHUNKS + 1) * 4096).num_chunks(groups, 1)

    def test_groups_without_a_size_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="bytes_per_token or state_bytes is needed"):
            config().num_chunks([full(bytes_per_block=0)], 1)

    def test_a_sync_load_budget_is_in_tokens_of_all_groups(self) -> None:
        groups = [full(bytes_per_block=400), window(1, 4, bytes_per_block=200)]
        assert config(sync_load_budget_bytes=3000).sync_load_budget(groups) == 20


class TestGroups:
    def test_each_kind_becomes_its_own(self) -> None:
        first, second, third = offload_groups([FULL, WINDOW, STATE], config())
        assert (first.kind, first.bytes_per_block) == ("full", 1600)
        assert (second.kind, second.window, second.bytes_per_block) == ("sliding_window", 40, 800)
        assert (third.kind, third.is_aligned_state, third.bytes_per_block) == ("mamba", True, 3200)

    def test_what_no_prefix_cache_could_hold_stays_out(self) -> None:
        replayed = KVCacheGroupSpec(
            kind=specs.SLIDING_WINDOW_MLA, block_size=16, sliding_window=32, bounded_replay=True, bytes_per_token=1
        )
        assert [group.group_id for group in offload_groups([RING, FULL, replayed, WINDOW], config())] == [1, 3]

    def test_if_nothing_is_left_that_is_an_error(self) -> None:
        assert offload_groups([RING], config()) == ()
        with pytest.raises(ConfigError, match="no eligible cache groups"):
            OffloadLayout(groups=(), tokens_per_hash=16)

    def test_before_52771_all_were_drafters_where_none_was_marked(self) -> None:
        assert all(group.is_drafter for group in drafting([full(0), full(1)]))
        assert [group.is_drafter for group in drafting([full(0), full(1, is_drafter=True)])] == [False, True]

    def test_the_layout_of_an_engine(self) -> None:
        pool = BlockPool(20)
        kv = make_cache_manager([FULL, STATE], pool, max_model_len=64, max_in_flight_tokens=64, retention_interval=None)
        layout = engine_layout(kv, config(blocks_per_chunk=2), num_workers=4)
        assert (layout.tokens_per_hash, layout.num_workers, layout.blocks_per_chunk) == (16, 4, 2)
        assert layout.state_size == 32


class TestLayout:
    @pytest.mark.parametrize(
        ("size", "tokens_per_chunk", "chunks", "load_chunks_at_18"),
        [(4, 4, 1, 2), (5, 4, 2, 2), (8, 4, 2, 3), (9, 4, 3, 3)],
    )
    def test_how_many_chunks_a_window_needs(
        self, size: int, tokens_per_chunk: int, chunks: int, load_chunks_at_18: int
    ) -> None:
        """A hit that ends inside a chunk may need one more."""
        group = window(0, size, tokens_per_block=tokens_per_chunk)
        assert (group.window_chunks, group.load_window_chunks(18)) == (chunks, load_chunks_at_18)

    def test_full_attention_first_then_the_widest_window(self) -> None:
        groups = (window(0, 4), full(1), window(2, 12), state(3))
        assert OffloadLayout(groups=groups, tokens_per_hash=4).lookup_order == (1, 2, 0, 3)

    @pytest.mark.parametrize(
        ("sizes", "alignment"), [((4,), 4), ((4, 4), 4), ((4, 8), None)], ids=["one", "equal", "different"]
    )
    def test_hits_end_on_the_grid_of_full_attention(self, sizes: tuple[int, ...], alignment: int | None) -> None:
        groups = tuple(full(index, tokens_per_block=size) for index, size in enumerate(sizes))
        assert OffloadLayout(groups=groups, tokens_per_hash=4).alignment_tokens == alignment

    def test_without_it_on_the_largest_chunks(self) -> None:
        groups = (window(0, 4), window(1, 16, tokens_per_block=8))
        assert OffloadLayout(groups=groups, tokens_per_hash=4).alignment_tokens == 8

    def test_retention_must_fit_chunks_of_windows(self) -> None:
        with pytest.raises(ConfigError, match=r"must be a multiple of tokens_per_chunk \(12\)"):
            OffloadLayout(groups=(window(0, 4, blocks_per_chunk=3),), tokens_per_hash=4, retention_interval=8)

    def test_states_of_different_sizes_cannot_be_offloaded_together(self) -> None:
        groups = tuple(state(index, tokens_per_block=4 * (index + 1), is_aligned_state=True) for index in range(2))
        with pytest.raises(ConfigError, match="recurrent groups of different sizes"):
            OffloadLayout(groups=groups, tokens_per_hash=4)

    def test_tails_inside_blocks_need_finer_hashes_and_one_block_size(self) -> None:
        groups = (full(0), state(1, is_aligned_state=True))
        assert OffloadLayout(groups=groups, tokens_per_hash=2).supports_partial_tail
        assert not OffloadLayout(groups=groups, tokens_per_hash=4).supports_partial_tail
        with_window = (*groups, window(2, 4))
        assert not OffloadLayout(groups=with_window, tokens_per_hash=2).supports_partial_tail

    def test_a_group_says_what_it_is(self) -> None:
        with pytest.raises(AssertionError):
            OffloadGroup(group_id=0, kind="sliding_window")
        with pytest.raises(AssertionError):
            OffloadGroup(group_id=0, is_aligned_state=True)
