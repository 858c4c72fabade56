"""HIT-ATTAINABLE: what a CPU tier stores of a prompt suffices for the prompt to hit it."""

from typing import NamedTuple

from kvreplay.connectors.offloading.layout import OffloadLayout
from kvreplay.connectors.offloading.lookup import ChunkLookup
from kvreplay.connectors.offloading.manager import LookupResult
from kvreplay.connectors.offloading.reachable import Horizon, StoreMask
from kvreplay.connectors.offloading.request_state import RequestState


class ShortWindow(NamedTuple):
    """A hit that failed for chunks of a window that no store would ever have kept."""

    group: int
    end: int
    """Tokens that every other group has."""
    num_chunks: int
    """So many are asked for before that end."""
    num_kept: int


def short_window(
    state: RequestState, hit: int, layout: OffloadLayout, masks: tuple[StoreMask, ...], lookup: ChunkLookup
) -> ShortWindow | None:
    """Why a lookup found `hit` tokens and not all up to the last aligned end that full attention has.

    Only where hits end on one grid, and a lookup changes nothing.
    """
    alignment, local = layout.alignment_tokens, state.num_local_tokens
    if alignment is None or not lookup.manager.lookup_is_pure:
        return None
    end = state.request.num_tokens - 1
    for group_state in state.groups:
        if not group_state.group.is_windowed:
            size = group_state.group.tokens_per_chunk
            num_hits = lookup.leading_hits(group_state.keys[local // size : end // size], state)
            end = min(end, (local // size + (num_hits or 0)) * size)
    end -= end % alignment
    if end <= local + hit:
        return None
    for index, mask in enumerate(masks):
        if mask.is_short:
            found = _missing_at(state, index, end, mask, lookup)
            if found is not None:
                return found
    return None


def _missing_at(state: RequestState, index: int, end: int, mask: StoreMask, lookup: ChunkLookup) -> ShortWindow | None:
    group_state = state.groups[index]
    group = group_state.group
    last = end // group.tokens_per_chunk
    first = max(last - group.window_chunks, 0)
    size = group.blocks_per_chunk
    kept = mask.blocks(first * size, last * size, Horizon(None))
    if kept is None:
        return None
    is_kept = kept.reshape(-1, size).any(axis=1)
    is_missing = lookup.manager.lookup_many(group_state.keys[first:last], state.context) == int(LookupResult.MISS)
    if not is_missing.any() or (is_missing & is_kept).any():
        return None  # it has been evicted, or was never offered
    return ShortWindow(group.group_id, end, last - first, int(is_kept.sum()))
