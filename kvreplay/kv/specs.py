"""What a KV cache group needs, and how a pool is cut into blocks (vLLM: v1/kv_cache_interface.py)."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, lcm
from typing import Final, NamedTuple

from kvreplay.errors import ConfigError

FULL: Final = "full"
MLA: Final = "mla"
SLIDING_WINDOW: Final = "sliding_window"
SLIDING_WINDOW_MLA: Final = "sliding_window_mla"
CHUNKED_LOCAL: Final = "chunked_local"
MAMBA: Final = "mamba"
CIRCULAR_BUFFER: Final = "circular_buffer"

GROUP_KINDS: Final = (FULL, MLA, SLIDING_WINDOW, SLIDING_WINDOW_MLA, CHUNKED_LOCAL, MAMBA, CIRCULAR_BUFFER)
MAMBA_NONE: Final = "none"
MAMBA_ALIGN: Final = "align"
MAMBA_MODES: Final = (MAMBA_NONE, MAMBA_ALIGN)

_FULL_KINDS: Final = (FULL, MLA)
_WINDOW_KINDS: Final = (SLIDING_WINDOW, SLIDING_WINDOW_MLA)
_PACKED_KINDS: Final = (MLA, SLIDING_WINDOW_MLA, CIRCULAR_BUFFER)


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheGroupSpec:
    """Layers that share one spec and one block table.

    Sizes in tokens. `bytes_per_token` is summed over the group's layers on one rank; of a Mamba group, whose pages do
    not depend on tokens, `state_bytes` instead. A layer's page is padded to a multiple of `page_alignment` bytes.
    """

    kind: str = FULL
    block_size: int = 16
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    mamba_cache_mode: str = MAMBA_NONE
    num_speculative_blocks: int = 0
    """Mamba: state blocks for drafts, beside the running state."""
    tokens_per_state: int = 1
    """MLA: tokens that one stored state compresses."""
    extra_retained_tokens: int = 0
    """Sliding window: tokens behind the window that are kept, though never attended."""
    bounded_replay: bool = False
    """Sliding-window MLA: never cached; what a hit needs of it is computed again."""
    is_eagle: bool = False
    """Its blocks are the drafter's, too."""
    drafter_only: bool = False
    """They are nobody else's: what is in them decides which drafts are right, and nothing that is output."""
    bytes_per_token: int = 0
    state_bytes: int = 0
    num_layers: int = 1
    page_alignment: int = 1

    def __post_init__(self) -> None:
        if self.kind not in GROUP_KINDS:
            raise ConfigError(f"model.groups: kind must be one of {', '.join(GROUP_KINDS)}, got {self.kind!r}")
        for name in ("block_size", "tokens_per_state", "num_layers", "page_alignment"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"model.groups: {name} must be > 0, got {getattr(self, name)}")
        for name in ("num_speculative_blocks", "extra_retained_tokens", "bytes_per_token", "state_bytes"):
            if getattr(self, name) < 0:
                raise ConfigError(f"model.groups: {name} must be >= 0, got {getattr(self, name)}")
        self._check_reach("sliding_window", *_WINDOW_KINDS)
        self._check_reach("attention_chunk_size", CHUNKED_LOCAL)
        if self.mamba_cache_mode not in MAMBA_MODES:
            raise ConfigError(
                f"model.groups: mamba_cache_mode must be one of {', '.join(MAMBA_MODES)}, got {self.mamba_cache_mode!r}"
            )
        if self.bounded_replay and self.kind != SLIDING_WINDOW_MLA:
            raise ConfigError("model.groups: bounded_replay is for kind 'sliding_window_mla'")
        if self.drafter_only and not self.is_eagle:
            raise ConfigError("model.groups: drafter_only needs is_eagle")

    def _check_reach(self, name: str, *kinds: str) -> None:
        value = getattr(self, name)
        if (self.kind in kinds) != (value is not None):
            raise ConfigError(f"model.groups: {name} is needed by, and only by, kind {' or '.join(map(repr, kinds))}")
        if value is not None and value <= 0:
            raise ConfigError(f"model.groups: {name} must be > 0, got {value}")

    @property
    def is_full_attention(self) -> bool:
        """Whether it keeps every block, so that its hits are prefixes."""
        return self.kind in _FULL_KINDS

    @property
    def is_sliding_window(self) -> bool:
        return self.kind in _WINDOW_KINDS

    @property
    def is_attention(self) -> bool:
        """Whether its table grows with tokens, rather than with states."""
        return self.kind != MAMBA

    @property
    def is_aligned_mamba(self) -> bool:
        return self.kind == MAMBA and self.mamba_cache_mode == MAMBA_ALIGN

    @property
    def prefix_cacheable(self) -> bool:
        return self.kind != CIRCULAR_BUFFER and not self.bounded_replay

    @property
    def prefix_replay_tokens(self) -> int:
        """Last tokens of a hit that are computed again, because no cache holds their window."""
        return self.sliding_window if self.bounded_replay and self.sliding_window is not None else 0

    @property
    def lookup_identity(self) -> tuple[object, ...]:
        """Groups of equal identity have equal specs, and hit together or not at all."""
        return (
            self.kind,
            self.block_size,
            self.sliding_window,
            self.attention_chunk_size,
            self.mamba_cache_mode,
            self.num_speculative_blocks,
            self.tokens_per_state,
            self.extra_retained_tokens,
            self.bounded_replay,
            self.bytes_per_token // self.num_layers,
            self.state_bytes // self.num_layers,
        )

    @property
    def page_bytes(self) -> int:
        """Bytes of one block, over the group's layers."""
        content = self.state_bytes if self.kind == MAMBA else self.block_size * self.bytes_per_token
        per_layer = cdiv(content, self.num_layers)
        return cdiv(per_layer, self.page_alignment) * self.page_alignment * self.num_layers

    def max_admission_blocks(self, max_in_flight_tokens: int, max_model_len: int) -> int | None:
        """Most blocks that a request holds at once where blocks are recycled while it runs, else None."""
        if self.sliding_window is not None:
            reach = self.sliding_window - 1 + self.extra_retained_tokens + max_in_flight_tokens
            # A window that does not start at a block's start needs one more.
            return cdiv(min(reach, max_model_len), self.block_size) + 1
        if self.attention_chunk_size is not None:
            return cdiv(min(self.attention_chunk_size + max_in_flight_tokens, max_model_len), self.block_size)
        return None

    def max_blocks(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        """Blocks that the longest request needs at once (vLLM: max_memory_usage_bytes)."""
        if self.kind == CIRCULAR_BUFFER:
            return 1
        if self.kind == MAMBA:
            return (2 if self.mamba_cache_mode == MAMBA_ALIGN else 1) + self.num_speculative_blocks
        capped = self.max_admission_blocks(max_in_flight_tokens, max_model_len)
        return cdiv(max_model_len, self.block_size) if capped is None else capped


class BlockSizes(NamedTuple):
    """`scheduler`: what hits are aligned to, unless they may be finer. `hashing`: what one prefix hash covers."""

    scheduler: int
    hashing: int


def resolve_block_sizes(
    groups: Sequence[KVCacheGroupSpec], *, hash_block_size: int | None = None, hashes_are_used: bool = True
) -> BlockSizes:
    """Block sizes over all groups (vLLM: kv_cache_utils.py, resolve_kv_cache_block_sizes).

    `hash_block_size`: as configured (vLLM: `prefix_match_unit`). `hashes_are_used`: by a prefix cache or a connector.
    """
    sizes = [group.block_size for group in groups]
    if len(groups) == 1:
        if hashes_are_used and hash_block_size not in (None, sizes[0]):
            raise ConfigError(f"cache.prefix_match_unit: one KV cache group hashes its blocks of {sizes[0]} tokens")
        return BlockSizes(sizes[0], sizes[0])
    common = lcm(*sizes)
    if not hashes_are_used or any(group.kind == MAMBA and not group.is_aligned_mamba for group in groups):
        return BlockSizes(common, common)
    hashed = [group.block_size for group in groups if group.prefix_cacheable] or sizes
    unit = gcd(*hashed) if hash_block_size is None else hash_block_size
    if any(size % unit for size in hashed):
        raise ConfigError(f"cache.prefix_match_unit ({unit}) must divide every group's block size, got {hashed}")
    alignment = unit if hits_inside_blocks(groups, unit) else common
    for group in groups:
        if group.prefix_cacheable and alignment % group.tokens_per_state:
            raise ConfigError(
                f"model.groups: hits end on multiples of {alignment} tokens, which would cut a state of "
                f"{group.tokens_per_state} tokens"
            )
    return BlockSizes(common, unit)


def hits_inside_blocks(groups: Sequence[KVCacheGroupSpec], hash_block_size: int) -> bool:
    """Whether a hit may end inside a block: some Mamba state is cached there, and every group can look there.

    (vLLM: kv_cache_utils.py, partial_hash_hits_enabled)
    """
    if not any(group.is_aligned_mamba and group.block_size > hash_block_size for group in groups):
        return False
    return all(
        group.is_full_attention or group.kind == MAMBA or group.block_size == hash_block_size
        for group in groups
        if group.prefix_cacheable
    )


def check_pages(groups: Sequence[KVCacheGroupSpec]) -> None:
    """All groups' blocks are pages of one pool: raises ConfigError where those have no size in common.

    A smaller page can be made as large as the widest by more tokens in it, if it divides it (vLLM: kv_cache_utils.py,
    unify_kv_cache_spec_page_size). MLA of any kind is packed into rows, and padded.
    """
    widest = max(groups, key=lambda group: group.page_bytes)
    for index, group in enumerate(groups):
        is_packed = group.kind in _PACKED_KINDS and widest.kind in _PACKED_KINDS
        if not is_packed and group.page_bytes and widest.page_bytes % group.page_bytes:
            raise ConfigError(
                f"model.groups[{index}]: a block of {group.page_bytes:,} bytes has no page in common with the widest, "
                f"of {widest.page_bytes:,} bytes, which must be a multiple of it: change block_size or page_alignment"
            )


def block_bytes(groups: Sequence[KVCacheGroupSpec]) -> int:
    """Of a block, which any group may have: the widest group's page (vLLM: kv_cache_planning.py)."""
    return max(group.page_bytes for group in groups)


def rank_block_bytes(groups: Sequence[KVCacheGroupSpec], num_parts: int) -> int:
    """The same on one rank, of which each has one of `num_parts` parts."""
    return cdiv(block_bytes(groups), num_parts)
