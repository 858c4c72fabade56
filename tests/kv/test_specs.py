"""Pages, pools, block sizes: how memory is cut for several groups (spec, 6.3 and 8)."""

import re
from typing import Any

import pytest

from kvreplay.errors import ConfigError
from kvreplay.kv.specs import (
    CHUNKED_LOCAL,
    CIRCULAR_BUFFER,
    FULL,
    MAMBA,
    MAMBA_ALIGN,
    MLA,
    SLIDING_WINDOW,
    SLIDING_WINDOW_MLA,
    KVCacheGroupSpec,
    block_bytes,
    hits_inside_blocks,
    resolve_block_sizes,
)


def full(block_size: int = 16, **fields: Any) -> KVCacheGroupSpec:  # noqa: ANN401
    return KVCacheGroupSpec(kind=FULL, block_size=block_size, **fields)


def window(block_size: int, sliding_window: int = 8) -> KVCacheGroupSpec:
    return KVCacheGroupSpec(kind=SLIDING_WINDOW, block_size=block_size, sliding_window=sliding_window)


def mamba(block_size: int, mode: str = MAMBA_ALIGN, **fields: Any) -> KVCacheGroupSpec:  # noqa: ANN401
    return KVCacheGroupSpec(kind=MAMBA, block_size=block_size, mamba_cache_mode=mode, **fields)


class TestPages:
    def test_attention_pages_grow_with_tokens(self) -> None:
        """Spec, 8.2: 8 heads of 128 in fp16, 16 tokens."""
        assert full(bytes_per_token=8 * 256 * 2).page_bytes == 65_536

    def test_state_pages_do_not(self) -> None:
        assert mamba(16, state_bytes=1000).page_bytes == mamba(512, state_bytes=1000).page_bytes == 1000

    @pytest.mark.parametrize(
        ("block_size", "bytes_per_token", "page"), [(256, 146, 37_440), (4, 8_192, 32_832), (64, 584, 37_440)]
    )
    def test_pages_are_padded(self, block_size: int, bytes_per_token: int, page: int) -> None:
        """Spec, 8.5."""
        spec = KVCacheGroupSpec(kind=MLA, block_size=block_size, bytes_per_token=bytes_per_token, page_alignment=576)
        assert spec.page_bytes == page

    def test_each_layer_is_padded_by_itself(self) -> None:
        assert full(1, bytes_per_token=30, num_layers=3, page_alignment=16).page_bytes == 3 * 16

    def test_a_block_costs_as_much_as_the_widest_group(self) -> None:
        """Spec, 8.3: pages of 3 x 512 and 2 x 640 bytes; 1 MiB."""
        groups = [full(1, bytes_per_token=1536, num_layers=3), full(1, bytes_per_token=1280, num_layers=2)]
        assert (1 << 20) // block_bytes(groups) == 682


class TestMostBlocks:
    @pytest.mark.parametrize(
        ("spec", "blocks"),
        [
            (full(4), 256),
            (window(4), 19),
            (KVCacheGroupSpec(kind=CHUNKED_LOCAL, block_size=4, attention_chunk_size=8), 18),
            (mamba(4, num_speculative_blocks=2), 4),
            (mamba(1024, "none", num_speculative_blocks=2), 3),
            (KVCacheGroupSpec(kind=CIRCULAR_BUFFER, block_size=4), 1),
        ],
    )
    def test_of_the_longest_request(self, spec: KVCacheGroupSpec, blocks: int) -> None:
        """Spec, 7.5 and 8.3: 1,024 tokens, 64 in flight."""
        assert spec.max_blocks(64, 1024) == blocks


class TestBlockSizes:
    def test_hits_align_to_all_groups_and_hashes_fit_into_all(self) -> None:
        """Spec, 6.3."""
        sizes = [KVCacheGroupSpec(kind=MLA, block_size=256), window(4), window(8), window(64), window(64)]
        assert resolve_block_sizes(sizes) == (256, 4)

    def test_scratch_groups_are_not_hashed(self) -> None:
        groups = [full(8), window(4), KVCacheGroupSpec(kind=CIRCULAR_BUFFER, block_size=12)]
        assert resolve_block_sizes(groups) == (24, 4)

    def test_states_that_are_not_aligned_are_hashed_at_the_common_size_only(self) -> None:
        assert resolve_block_sizes([full(4), mamba(16, "none")]) == (16, 16)

    def test_a_hash_must_fit_into_every_block(self) -> None:
        with pytest.raises(ConfigError, match=r"^cache.prefix_match_unit \(3\) must divide every group's block size"):
            resolve_block_sizes([full(8), window(4)], hash_block_size=3)

    def test_one_group_hashes_its_own_blocks(self) -> None:
        with pytest.raises(ConfigError, match=r"^cache.prefix_match_unit: one KV cache group hashes its blocks of 16"):
            resolve_block_sizes([full()], hash_block_size=8)

    def test_hits_do_not_cut_a_compressed_state(self) -> None:
        groups = [KVCacheGroupSpec(kind=MLA, block_size=12, tokens_per_state=128), window(4)]
        with pytest.raises(ConfigError, match=r"^model.groups: hits end on multiples of 12 tokens"):
            resolve_block_sizes(groups)

    @pytest.mark.parametrize(
        ("groups", "inside"),
        [
            ([full(8), mamba(8)], True),
            ([full(8), window(4), mamba(8)], True),
            ([full(8), window(8), mamba(8)], False),
            ([full(8), window(8)], False),
            ([full(8), mamba(8, "none")], False),
        ],
    )
    def test_a_hit_ends_inside_a_block_only_where_every_group_can(
        self, groups: list[KVCacheGroupSpec], inside: bool
    ) -> None:
        """Hashes of 4 tokens."""
        assert hits_inside_blocks(groups, 4) == inside


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "linear"}, "model.groups: kind must be one of full, mla, "),
        ({"kind": SLIDING_WINDOW}, "model.groups: sliding_window is needed by, and only by, kind 'sliding_window' or "),
        ({"kind": FULL, "attention_chunk_size": 8}, "model.groups: attention_chunk_size is needed by, and only by, "),
        ({"kind": MAMBA, "mamba_cache_mode": "all"}, "model.groups: mamba_cache_mode must be one of none, align, "),
        ({"kind": FULL, "bounded_replay": True}, "model.groups: bounded_replay is for kind 'sliding_window_mla'"),
        ({"kind": SLIDING_WINDOW_MLA, "sliding_window": 0}, "model.groups: sliding_window must be > 0, got 0"),
    ],
)
def test_what_no_group_can_be_is_one_line(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match="^" + re.escape(message)):
        KVCacheGroupSpec(**fields)
