"""The manager of each kind of group (vLLM: register_all_kvcache_specs)."""

from collections.abc import Mapping
from typing import Final

from kvreplay.kv.block_pool import BlockPool
from kvreplay.kv.managers.base import CacheRules, KVGroupManager
from kvreplay.kv.managers.chunked_local import ChunkedLocalManager
from kvreplay.kv.managers.circular_buffer import CircularBufferManager
from kvreplay.kv.managers.full import FullAttentionManager
from kvreplay.kv.managers.mamba import AlignedMambaManager, MambaManager
from kvreplay.kv.managers.sliding_window import SlidingWindowManager
from kvreplay.kv.specs import (
    CHUNKED_LOCAL,
    CIRCULAR_BUFFER,
    FULL,
    MAMBA,
    MLA,
    SLIDING_WINDOW,
    SLIDING_WINDOW_MLA,
    KVCacheGroupSpec,
)

_MANAGERS: Final[Mapping[str, type[KVGroupManager]]] = {
    FULL: FullAttentionManager,
    MLA: FullAttentionManager,
    SLIDING_WINDOW: SlidingWindowManager,
    SLIDING_WINDOW_MLA: SlidingWindowManager,
    CHUNKED_LOCAL: ChunkedLocalManager,
    MAMBA: MambaManager,
    CIRCULAR_BUFFER: CircularBufferManager,
}


def make_manager(spec: KVCacheGroupSpec, group: int, pool: BlockPool, rules: CacheRules) -> KVGroupManager:
    kind = AlignedMambaManager if spec.is_aligned_mamba else _MANAGERS[spec.kind]
    return kind(spec, group, pool, rules)
