"""Small clusters of models with several KV cache groups, by chance.

Mamba blocks of a budget's multiple, windows and chunks of a few blocks, groups with other block sizes over one pool.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from hypothesis import strategies as st

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
)
from kvreplay.replay.config import ReplayConfig, RoleConfig
from tests.scenarios.random_worlds import ENGINE_FAULTS, World, pair_configs, workloads
from tests.scenarios.stage import MAX_MODEL_LEN, TIMING, UNEVEN_TIMING, role, single

Groups = tuple[KVCacheGroupSpec, ...]

_FULL = KVCacheGroupSpec(kind=FULL, block_size=4, bytes_per_token=2)
_WINDOW = KVCacheGroupSpec(kind=SLIDING_WINDOW, block_size=4, sliding_window=10, bytes_per_token=2)
_SMALL_BLOCKS = KVCacheGroupSpec(kind=SLIDING_WINDOW, block_size=2, sliding_window=6, bytes_per_token=4)
_RING = KVCacheGroupSpec(kind=CIRCULAR_BUFFER, block_size=8, bytes_per_token=1)
_STATE = KVCacheGroupSpec(kind=MAMBA, block_size=4, mamba_cache_mode=MAMBA_ALIGN, state_bytes=8)

LAYOUTS: Final[dict[str, Groups]] = {
    "full and windows": (_FULL, _WINDOW, _WINDOW),
    "windows only": (_WINDOW, KVCacheGroupSpec(kind=SLIDING_WINDOW, block_size=4, sliding_window=6, bytes_per_token=2)),
    "full and small blocks": (_FULL, _SMALL_BLOCKS),
    "full and states": (_FULL, _STATE, _STATE),
    "full and chunks": (
        _FULL,
        KVCacheGroupSpec(kind=CHUNKED_LOCAL, block_size=4, attention_chunk_size=8, bytes_per_token=2),
    ),
    "full, windows and states": (_FULL, _WINDOW, _STATE),
    "full and a ring": (_FULL, _RING),
    "a small ring, windows and states": (
        KVCacheGroupSpec(kind=CIRCULAR_BUFFER, block_size=2, bytes_per_token=4),
        _FULL,
        _WINDOW,
        _STATE,
    ),
    "a window that is never cached, and a ring": (
        KVCacheGroupSpec(kind=MLA, block_size=8, tokens_per_state=4, bytes_per_token=1),
        KVCacheGroupSpec(
            kind=SLIDING_WINDOW_MLA, block_size=4, sliding_window=8, bounded_replay=True, bytes_per_token=2
        ),
        KVCacheGroupSpec(kind=CIRCULAR_BUFFER, block_size=4, bytes_per_token=2),
    ),
    "compressed": (
        KVCacheGroupSpec(kind=MLA, block_size=8, tokens_per_state=4, bytes_per_token=1),
        KVCacheGroupSpec(kind=SLIDING_WINDOW_MLA, block_size=2, sliding_window=4, bytes_per_token=4),
        KVCacheGroupSpec(kind=SLIDING_WINDOW_MLA, block_size=4, sliding_window=8, bytes_per_token=2),
    ),
}


def with_groups(config: ReplayConfig, groups: Groups) -> ReplayConfig:
    return replace(config, model=replace(config.model, groups=groups))


@st.composite
def roomy(draw: st.DrawFn, groups: Groups, *, overlaps: bool = False) -> RoleConfig:
    """A pool that holds the longest request, and little more."""
    budget = draw(st.sampled_from([8, 16, 32]))
    needed = sum(group.max_blocks(budget * (2 if overlaps else 1), MAX_MODEL_LEN) for group in groups)
    return role(
        num_gpu_blocks=needed + 1 + draw(st.sampled_from([0, 2, 5, 12, 40])),
        timing=draw(st.sampled_from([TIMING, UNEVEN_TIMING])),
        max_num_batched_tokens=budget,
        max_num_seqs=draw(st.sampled_from([2, 4, 8])),
        async_scheduling=overlaps,
    )


@st.composite
def hybrid_worlds(
    draw: st.DrawFn,
    *,
    is_pair: bool = False,
    faults: tuple[str, ...] = ENGINE_FAULTS,
    behaviours: tuple[str, ...] = ("vllm-0.33",),
    max_faults: int = 3,
    layouts: Sequence[Groups] = tuple(LAYOUTS.values()),
    overlaps: bool = False,
) -> World:
    """`overlaps`: steps do (async scheduling)."""
    groups = draw(st.sampled_from(layouts))
    config = draw(pair_configs()) if is_pair else single()
    roles = {name: draw(roomy(groups, overlaps=overlaps)) for name in config.roles}
    return World(
        replace(config, model=replace(config.model, groups=groups), roles=roles),
        draw(workloads()),
        tuple(draw(st.lists(st.sampled_from(faults), max_size=max_faults, unique=True))),
        draw(st.sampled_from(behaviours)),
        draw(st.booleans()),
        draw(st.integers(0, 3)),
    )
