"""The cache manager of groups of full attention and windows over blocks of one size, whose tables grow alike."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvreplay.errors import EngineFatal
from kvreplay.ids import NULL_BLOCK_ID
from kvreplay.kv.cache_manager import KVCacheManager, Slots
from kvreplay.kv.group_keys import group_key, group_steps
from kvreplay.kv.joined_tables import JoinedTable
from kvreplay.kv.lookup import Hit
from kvreplay.kv.managers.base import NO_BLOCKS, CachedRequest, KVGroupManager, Need
from kvreplay.kv.managers.sliding_window import SlidingWindowManager
from kvreplay.kv.prefix_cache import BlockIds, Keys
from kvreplay.kv.specs import cdiv


class _Run(NamedTuple):
    """Neighbouring groups [first, end) of one spec: what happens to one's blocks happens to the others' too."""

    first: int
    end: int
    manager: KVGroupManager
    """The first group's."""
    reach: int | None
    """Of windows: tokens before the next one that are kept. None: all are."""

    @property
    def rows(self) -> slice:
        return slice(self.first, self.end)

    @property
    def num_groups(self) -> int:
        return self.end - self.first


class UniformAttentionCacheManager(KVCacheManager):
    """Groups of full attention and windows over blocks of one size, of which no hit needs generated blocks in windows.

    The same decisions as `KVCacheManager` makes; what it does group by group is done for all groups together, and a
    decoding request's take a few operations instead of arrays.
    """

    counts_filled = True
    leaves_unseen = True

    def __init__(self, *args: Any, **settings: Any) -> None:  # noqa: ANN401 - those of KVCacheManager
        super().__init__(*args, **settings)
        self._num_groups = len(self.managers)
        self._joined: dict[str, JoinedTable] = {}
        self._runs = _runs_of(self.managers)
        self._windows = [(run, run.reach) for run in self._runs if run.reach is not None]
        self._full_groups = [group for group, spec in enumerate(self.groups) if spec.is_full_attention]
        self._nothing_cached = [NO_BLOCKS for _ in self.managers]
        self._key_steps = group_steps(range(self._num_groups), self._num_groups)

    def _join(self, request_id: str, capacity: int) -> JoinedTable:
        joined = self._joined[request_id] = JoinedTable(self._num_groups, capacity)
        for manager, row in zip(self.managers, joined.rows(), strict=True):
            manager.tables[request_id] = row
        return joined

    # -- looking ----------------------------------------------------------------------------------------------

    def block_arrays(self, request_id: str) -> list[BlockIds]:
        joined = self._joined.get(request_id)
        return self._nothing_cached if joined is None else list(joined.ids)

    def num_blocks_held(self, request_id: str) -> int:
        joined = self._joined.get(request_id)
        return 0 if joined is None else int(np.count_nonzero(joined.ids))

    # -- allocation -------------------------------------------------------------------------------------------

    def allocate_slots(self, request_id: str, wanted: Slots) -> tuple[BlockIds, ...] | None:
        assert wanted.num_new_tokens or wanted.num_local_tokens or wanted.num_external_tokens, request_id
        pool, size = self.pool, self.block_size
        joined = self._joined.get(request_id)
        local = wanted.num_computed_tokens + wanted.num_local_tokens
        total = min(local + wanted.num_external_tokens, self.max_model_len)
        watermark = self.watermark_blocks if wanted.apply_watermark else 0
        found = None if wanted.hit is None or not any(len(blocks) for blocks in wanted.hit) else wanted.hit
        if wanted.full_sequence_must_fit:
            whole = min(wanted.num_tokens, self.max_model_len)
            needed = self._needed(request_id, found, Need(whole, total, local, whole, apply_cap=True))
            if needed + watermark > pool.num_free - wanted.reserved_beside:
                return None
        end = min(total + wanted.num_new_tokens + wanted.num_lookahead_tokens, self.max_model_len)
        self.remove_skipped_blocks(request_id, max(0, total - wanted.num_in_flight_tokens))
        need = Need(end, local + wanted.num_external_tokens, local, total + wanted.num_new_tokens)
        if self._needed(request_id, found, need) + watermark > pool.num_free - wanted.reserved_blocks:
            return None
        required = cdiv(end, size)
        if joined is None:
            joined = self._join(request_id, required + 1)
        if found is not None or wanted.num_external_tokens:
            if not joined.is_tracked:
                joined.reserve(required)
                lengths = self._adopt_hit(joined, found or self.no_hit, total)
                if wanted.num_external_tokens:
                    return self._extend_for_load(joined, lengths, total, wanted.num_external_tokens, required)
                assert lengths.count(lengths[0]) == self._num_groups, "groups hit together"
                joined.num_blocks = joined.num_cached = lengths[0]
            elif found is not None:
                raise EngineFatal("AssertionError")
        count = required - joined.num_blocks
        if count <= 0:
            return self.no_hit
        columns = pool.get_new_blocks(count * self._num_groups).reshape(self._num_groups, count)
        joined.extend(columns)
        return tuple(columns)

    def _needed(self, request_id: str, hit: Hit | None, need: Need) -> int:
        """What `num_blocks_to_allocate` of all groups comes to."""
        if self.rules.exact_estimates:
            return self._blocks_to_allocate(request_id, hit or self.no_hit, need)
        joined = self._joined.get(request_id)
        held = joined.num_blocks if joined is not None else 0
        is_tracked = joined is not None and joined.is_tracked
        if is_tracked and hit is not None:
            raise EngineFatal("AssertionError")
        whole = cdiv(need.num_tokens, self.block_size)
        needed = 0
        touched: list[BlockIds] = []
        for run in self._runs:
            cap = run.manager.admission_cap
            required = min(whole, cap) if need.apply_cap and cap is not None else whole
            have = held
            if not is_tracked:
                skipped = run.manager.skipped_tokens(need.total_computed) // self.block_size
                have = max(skipped, held + (len(hit[run.first]) if hit is not None else 0))
                if hit is not None:
                    touched += [blocks[max(0, skipped - held) :] for blocks in hit[run.rows]]
            needed += max(required - have, 0) * run.num_groups
        return needed + self.pool.num_evictable(np.concatenate(touched)) if touched else needed

    def _adopt_hit(self, joined: JoinedTable, hit: Hit, total: int) -> list[int]:
        """Put the hit's blocks in their places, null where a window leaves them behind. Returns how many places that
        fills in each group."""
        assert not joined.num_blocks
        lengths: list[int] = []
        for run in self._runs:
            skipped = max(run.manager.skipped_tokens(total) // self.block_size, 0)
            for group in range(run.first, run.end):
                row, blocks = joined.array[group], hit[group]
                lengths.append(max(skipped, len(blocks)))
                row[: lengths[-1]] = NULL_BLOCK_ID
                row[skipped : len(blocks)] = blocks[skipped:]
            if run.reach is not None:
                joined.note_hashed(skipped, len(hit[run.first]))
        touched = joined.array[:, : max(lengths)]
        kept = touched[touched != NULL_BLOCK_ID]
        if len(kept):
            self.pool.touch(kept)
        return lengths

    def _extend_for_load(
        self, joined: JoinedTable, lengths: list[int], total: int, num_external: int, required: int
    ) -> tuple[BlockIds, ...]:
        """Blocks for what a connector will write, inside the window only, of all groups; then those behind them."""
        num_loaded = [self._num_for_load(group, start, total, num_external) for group, start in enumerate(lengths)]
        loaded = [self.pool.get_new_blocks(count) for count in num_loaded]
        new = [
            self.pool.get_new_blocks(required - start - count) for start, count in zip(lengths, num_loaded, strict=True)
        ]
        for group, start in enumerate(lengths):
            joined.set_num_cached_in(group, start)
            joined.array[group, start : start + num_loaded[group]] = loaded[group]
            joined.array[group, start + num_loaded[group] : required] = new[group]
        joined.num_blocks = required
        return tuple(np.concatenate(pair) for pair in zip(loaded, new, strict=True))

    def _num_for_load(self, group: int, start: int, total: int, num_external: int) -> int:
        skipped = self.managers[group].skipped_tokens(total)
        if skipped > 0:
            num_external = min(total - skipped, num_external)
        return max(cdiv(total, self.block_size) - start, 0) if num_external > 0 else 0

    # -- caching ----------------------------------------------------------------------------------------------

    def cache_blocks(self, request: CachedRequest, keys: Keys, num_tokens: int) -> list[BlockIds]:
        if not self.pool.enable_caching:
            return []
        joined = self._joined.get(request.request_id)
        if joined is None:
            joined = self._join(request.request_id, 16)
        num_cached = joined.num_cached
        if num_cached is None or self.caches_again:
            joined.note_hashed(0, joined.num_blocks)
            return super().cache_blocks(request, keys, num_tokens)
        start, end = max(num_cached, 0), min(num_tokens, request.num_tokens) // self.block_size
        if start >= end:
            return self._nothing_cached
        joined.num_cached = end
        boundaries = self._replay_boundaries(request.num_prompt_tokens)
        if request.shared_prefix_boundary:
            boundaries = [*boundaries, request.shared_prefix_boundary]
        found: list[BlockIds] = []
        found_keys: list[Keys] = []
        cached = [*self._nothing_cached]
        for run in self._runs:
            places: slice | NDArray[np.int64] = slice(start, end)
            if run.reach is not None:
                kept = self._retained(run, joined, start, end, boundaries)
                if not kept:
                    continue
                places = slice(*kept[0]) if len(kept) == 1 else np.concatenate([np.arange(*part) for part in kept])
            ids = joined.array[run.rows, places]
            found.append(ids.ravel())
            found_keys.append(self._keys_of(run, keys[places]).ravel())
            cached[run.rows] = list(ids)
        if len(found) == 1:
            self.pool.cache(found[0], found_keys[0])
        elif found:
            self.pool.cache(np.concatenate(found), np.concatenate(found_keys))
        return cached

    def _retained(
        self, run: _Run, joined: JoinedTable, start: int, end: int, boundaries: Sequence[int]
    ) -> list[tuple[int, int]]:
        """The places in [start, end) whose blocks a window's groups keep for hits to come."""
        assert isinstance(run.manager, SlidingWindowManager)
        assert self.rules.retention_interval == 0
        kept = run.manager.retained_places(start, end, boundaries)
        if not kept:
            return []
        if len(kept) > 1:  # in order of place, each once
            kept = _joined_ranges(kept)
        row = joined.array[run.first]
        if not row[kept[0][0]]:
            # What the window has left behind is null, and comes first.
            nulls = joined.num_blocks - int(np.count_nonzero(row[: joined.num_blocks]))
            kept = [(max(first, nulls), last) for first, last in kept if last > nulls]
        for first, last in kept:
            joined.note_hashed(first, last)
        return kept

    def may_have_hash(self, request_id: str, first: int, last: int) -> bool:
        joined = self._joined[request_id]
        return first < joined.hashed_until and joined.hashed_from < last

    def _keys_of(self, run: _Run, keys: Keys) -> NDArray[np.int64]:
        """The pool's keys in each group of the run."""
        first = group_key(keys, run.first, self._num_groups)
        if run.num_groups == 1:
            return first[None]
        return first + self._key_steps[: run.num_groups]

    # -- freeing ----------------------------------------------------------------------------------------------

    def remove_skipped_blocks(self, request_id: str, num_processed_tokens: int) -> None:
        joined = self._joined.get(request_id)
        if joined is None:
            return
        left: list[BlockIds] = []
        are_clean = True
        for run, reach in self._windows:
            skipped = min((num_processed_tokens - reach) // self.block_size, joined.num_blocks)
            if skipped <= 0 or not joined.array[run.first, skipped - 1]:
                continue
            # What has been left before is null, and comes first.
            first = int((joined.array[run.first, :skipped] != NULL_BLOCK_ID).argmax())
            behind = joined.array[run.rows, first:skipped]
            left += list(behind[:, ::-1].copy())
            are_clean &= skipped <= joined.hashed_from or first >= joined.hashed_until
            self._tell_left_behind(request_id, run.first, behind)
            behind[:] = NULL_BLOCK_ID
        if left:
            self.pool.free_in_turns(left, are_clean=are_clean)

    def _tell_left_behind(self, request_id: str, first_group: int, behind: NDArray[np.int64]) -> None:
        for manager, block_ids in zip(self.managers[first_group:], behind, strict=False):
            if manager.on_left_behind is not None:
                manager.on_left_behind(request_id, manager.group, block_ids[::-1].copy())

    def free(self, request_id: str) -> tuple[BlockIds, ...]:
        freed = tuple(blocks[::-1] for blocks in self.pop_blocks_for_free(request_id))
        self.pool.free_in_turns(freed)
        return freed

    def pop_blocks_for_free(self, request_id: str) -> tuple[BlockIds, ...]:
        joined = self._joined.pop(request_id, None)
        if joined is None:
            return self.no_hit
        for manager in self.managers:
            del manager.tables[request_id]
        found: list[BlockIds] = []
        for run in self._runs:
            ids = joined.ids[run.rows]
            if run.reach is not None and ids.shape[1] and not ids[0, 0]:
                is_real = ids[0] != NULL_BLOCK_ID
                ids = ids[:, int(is_real.argmax()) if is_real.any() else ids.shape[1] :]
            found += list(ids)
        return tuple(found)

    # -- decoding ---------------------------------------------------------------------------------------------

    def must_flush(self, request_id: str, num_computed: int, *, loads: bool) -> bool:
        """What windows leave behind of generated tokens has no hash: nobody will read it, but where a load into that
        block falls short and leaves it there."""
        return loads and any(
            num_computed > reach and not (num_computed - reach) % self.block_size for _, reach in self._windows
        )

    def decode_step(self, request: CachedRequest, keys: Keys, num_computed: int) -> bool:
        pool, size, num_groups = self.pool, self.block_size, self._num_groups
        joined = self._joined[request.request_id]
        for run, reach in self._windows:
            left, rest = divmod(num_computed - reach, size)
            if not rest and left > 0:
                capacity = joined.capacity
                pool.free_column(joined.view, run.first * capacity + left - 1, capacity, run.end - run.first)
        index, offset = divmod(num_computed, size)
        if not offset:
            if pool.num_free < num_groups:
                return False
            if index >= joined.capacity:
                joined.reserve(index + 1)
            pool.take_column(joined.view, index, joined.capacity, num_groups)
            joined.num_blocks = index + 1
        if offset == size - 1 and pool.enable_caching:
            if joined.num_cached != index:
                self.cache_blocks(request, np.asarray(keys), num_computed + 1)
                return True
            # What windows keep is what a replay of the prompt needs.
            joined.num_cached = index + 1
            view, capacity, key = joined.view, joined.capacity, int(keys[index])
            for group in self._full_groups:
                self.num_filled += 1
                pool.cache_one(view[group * capacity + index], group_key(key, group, num_groups))
        return True

    def least_blocks(self, num_tokens: int, hit: Hit, num_local: int) -> int | None:
        whole = cdiv(min(num_tokens, self.max_model_len), self.block_size)
        least = 0
        for manager, blocks in zip(self.managers, hit, strict=True):
            required = whole if manager.admission_cap is None else min(whole, manager.admission_cap)
            skipped = manager.skipped_tokens(num_local) // self.block_size
            least += max(required - max(skipped, len(blocks)), 0)
        return least


def _joined_ranges(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same places, in order, each in one range only."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if joined and first <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], last))
        else:
            joined.append((first, last))
    return joined


def _runs_of(managers: Sequence[KVGroupManager]) -> list[_Run]:
    runs: list[_Run] = []
    for group, manager in enumerate(managers):
        spec = manager.spec
        reach = None if spec.sliding_window is None else spec.sliding_window - 1 + spec.extra_retained_tokens
        last = runs[-1] if runs else None
        if last is not None and last.manager.spec.lookup_identity == spec.lookup_identity:
            runs[-1] = last._replace(end=group + 1)
        else:
            runs.append(_Run(group, group + 1, manager, reach))
    return runs
