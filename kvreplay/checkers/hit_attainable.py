"""HIT-ATTAINABLE: what a CPU tier stores of a prompt suffices for the prompt to hit it."""

from collections.abc import Collection
from math import lcm
from typing import Final, NamedTuple

from kvreplay.connectors.offloading.layout import OffloadLayout
from kvreplay.connectors.offloading.lookup import ChunkLookup
from kvreplay.connectors.offloading.manager import LookupResult
from kvreplay.connectors.offloading.reachable import Horizon, StoreMask
from kvreplay.connectors.offloading.request_state import GroupState, RequestState


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
    if end < _least_end(state, hit):
        return None
    for index, mask in enumerate(masks):
        if mask.is_short:
            found = _missing_at(state, index, end, mask, lookup)
            if found is not None:
                return found
    return None


class WithheldHit(NamedTuple):
    """A hit shorter than what is there less one chunk of the drafter's."""

    hit: int
    """Tokens beyond those that the GPU holds."""
    attainable: int


_MOST_BOUNDARIES: Final = 64


def withheld_hit(state: RequestState, hit: int, drafters: Collection[int], lookup: ChunkLookup) -> WithheldHit | None:
    """What a drafter must not cost: of what every group has, more than a chunk of the drafter's group.

    `drafters`: groups that are marked as the drafter's; where none is, it may be any, and the best case counts.
    """
    if not lookup.manager.lookup_is_pure or state.max_load_tokens is not None:
        return None
    local, end = state.num_local_tokens, state.request.num_tokens - 1
    stored: dict[int, int] = {}
    windowed = []
    for group_state in state.groups:
        group, size = group_state.group, group_state.group.tokens_per_chunk
        if group.is_windowed:
            windowed.append(group_state)
            if group.group_id in drafters:
                return None
            continue
        num_hits = lookup.leading_hits(group_state.keys[local // size : end // size], state)
        if num_hits is None:
            return None
        stored[group.group_id] = (local // size + num_hits) * size
    if not stored:
        return None
    sizes = {group_state.group.group_id: group_state.group.tokens_per_chunk for group_state in state.groups}
    if drafters:
        end = min(tokens - (sizes[group] if group in drafters else 0) for group, tokens in stored.items())
    else:
        end = max(
            min(tokens - (sizes[group] if group == drafter else 0) for group, tokens in stored.items())
            for drafter in stored
        )
    unit = lcm(*sizes.values())
    end -= end % unit
    for boundary in range(end, max(_least_end(state, hit) - 1, end - _MOST_BOUNDARIES * unit), -unit):
        if all(_has_window(group_state, boundary, state, lookup) for group_state in windowed):
            return WithheldHit(hit, boundary - local)
    return None


def _least_end(state: RequestState, hit: int) -> int:
    """Where a longer hit would end at least. Less than a chunk of any group is not worth a load, also where the GPU
    holds the beginning of one."""
    least_load = max(group_state.group.tokens_per_chunk for group_state in state.groups)
    return state.num_local_tokens + max(hit + 1, least_load)


def _has_window(group_state: GroupState, end: int, state: RequestState, lookup: ChunkLookup) -> bool:
    group = group_state.group
    last = end // group.tokens_per_chunk
    keys = group_state.keys[max(last - group.load_window_chunks(end), 0) : last]
    return bool((lookup.manager.lookup_many(keys, state.context) == int(LookupResult.HIT)).all())


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
