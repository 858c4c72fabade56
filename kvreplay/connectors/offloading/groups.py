"""From an engine's KV cache groups to what is offloaded of them (vLLM: offloading/config.py)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from kvreplay.connectors.offloading.config import OffloadingConfig
from kvreplay.connectors.offloading.layout import OffloadGroup, OffloadLayout
from kvreplay.kv.cache_manager import KVCacheManager
from kvreplay.kv.specs import (
    CHUNKED_LOCAL,
    FULL,
    MAMBA,
    MLA,
    SLIDING_WINDOW,
    SLIDING_WINDOW_MLA,
    KVCacheGroupSpec,
)

_KINDS: Final[Mapping[str, str]] = {
    FULL: FULL,
    MLA: FULL,
    SLIDING_WINDOW: SLIDING_WINDOW,
    SLIDING_WINDOW_MLA: SLIDING_WINDOW,
    CHUNKED_LOCAL: CHUNKED_LOCAL,
    MAMBA: MAMBA,
}


def offload_groups(groups: Sequence[KVCacheGroupSpec], config: OffloadingConfig) -> tuple[OffloadGroup, ...]:
    """Those that a prefix cache could hold; the others live and die with their request."""
    offloaded = [(index, spec) for index, spec in enumerate(groups) if spec.prefix_cacheable]
    blocks_per_chunk = config.chunk_blocks([spec.block_size for _, spec in offloaded]) if offloaded else 1
    return tuple(_group(index, spec, blocks_per_chunk) for index, spec in offloaded)


def _group(index: int, spec: KVCacheGroupSpec, blocks_per_chunk: int) -> OffloadGroup:
    kind = _KINDS[spec.kind]
    windows = {SLIDING_WINDOW: spec.sliding_window, CHUNKED_LOCAL: spec.attention_chunk_size}
    return OffloadGroup(
        group_id=index,
        kind=kind,
        tokens_per_block=spec.block_size,
        blocks_per_chunk=blocks_per_chunk,
        window=windows.get(kind),
        extra_retained_tokens=spec.extra_retained_tokens,
        is_aligned_state=spec.is_aligned_mamba,
        is_drafter=spec.is_eagle,
        bytes_per_block=spec.page_bytes,
    )


def drafting(groups: Sequence[OffloadGroup]) -> tuple[OffloadGroup, ...]:
    """Groups of a model with a drafter of which none is marked as the drafter's, as before vllm#52771: all are."""
    if any(group.is_drafter for group in groups):
        return tuple(groups)
    return tuple(replace(group, is_drafter=True) for group in groups)


def engine_layout(
    kv: KVCacheManager, config: OffloadingConfig, *, num_workers: int = 1, every_group_drafts: bool = False
) -> OffloadLayout:
    """The layout for an engine with this cache. `every_group_drafts`: it has a drafter, and `drafting` applies."""
    groups = offload_groups(kv.groups, config)
    return config.layout(
        drafting(groups) if every_group_drafts else groups,
        tokens_per_hash=kv.rules.hash_block_size,
        num_workers=num_workers,
        retention_interval=kv.rules.retention_interval,
        enable_prefix_caching=kv.pool.enable_caching,
        fine_grained_hits=kv.hits_inside_blocks,
    )


def rank_layout(layout: OffloadLayout, num_parts: int) -> OffloadLayout:
    """What one rank copies: its own of `num_parts` parts of each block."""
    groups = [replace(group, bytes_per_block=-(-group.bytes_per_block // num_parts)) for group in layout.groups]
    return replace(layout, groups=tuple(groups))


def num_chunks(layout: OffloadLayout, config: OffloadingConfig, *, is_replicated: bool) -> int:
    """How many chunks the CPU tier holds; `layout`: a rank's. Raises ConfigError if they are too many."""
    return config.num_chunks(layout.groups, 1 if is_replicated else layout.num_workers)
