"""Mamba states: one block holds the state after a whole prefix (vLLM: MambaManager).

In mode `none` a request has one state, and one more for each draft. In mode `align` states are kept at block
boundaries, so that they can be hit: a table is indexed by position, but only the running state, the states of drafts
behind it, and for one more step the state before are real blocks. States that a backend could export in the middle of a
chunk (vLLM: num_prefill_checkpoint_blocks) are not modelled.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvreplay.errors import EngineFatal
from kvreplay.ids import NULL_BLOCK_ID
from kvreplay.kv.block_pool import BlockPool
from kvreplay.kv.block_table import BlockTable
from kvreplay.kv.managers.base import (
    NO_BLOCKS,
    CachedRequest,
    CacheRules,
    DecodeEvent,
    JointLookup,
    KVGroupManager,
    Mask,
    Need,
)
from kvreplay.kv.prefix_cache import NO_KEY, BlockIds, Keys
from kvreplay.kv.specs import KVCacheGroupSpec, cdiv


class BoundaryState(NamedTuple):
    """A state that stands for exactly `num_tokens` tokens, for a connector to save."""

    group: int
    block_id: int
    num_tokens: int


def checkpoint_position(num_tokens: int, unit: int, *, drops_eagle_block: bool, num_lookahead: int) -> int:
    """The last boundary at which a state can be used again (vLLM: get_mamba_prefill_checkpoint_position)."""
    limit = num_tokens if drops_eagle_block else num_tokens - max(1, num_lookahead)
    position = limit // unit * unit
    return max(position - unit if drops_eagle_block else position, 0)


class MambaManager(KVGroupManager):
    """Mode `none`: blocks are as long as a request may get."""

    finds_inside_blocks = True

    def __init__(self, spec: KVCacheGroupSpec, group: int, pool: BlockPool, rules: CacheRules) -> None:
        super().__init__(spec, group, pool, rules)
        self.num_spec_blocks = spec.num_speculative_blocks

    def skipped_tokens(self, num_computed_tokens: int) -> int:
        """Only the state of the last computed token is needed."""
        return num_computed_tokens - 1

    def find_longest_cache_hit(
        self, group: JointLookup, keys: Keys, max_length: int, *, drop_eagle_block: bool
    ) -> tuple[list[BlockIds], int]:
        """The last state that ends where a hit may end."""
        alignment = self.rules.hit_alignment
        unit = min(alignment, self.block_size)
        unit_keys = keys[unit // self.rules.hash_block_size - 1 :: unit // self.rules.hash_block_size]
        found = group.find(unit_keys[: max_length // unit])
        present = found[0].nonzero()[0]
        present = present[(present + 1) * unit % alignment == 0]
        if not len(present):
            return group.none()
        last = int(present[-1])
        blocks = []
        for ids in found:
            table = np.zeros(last * unit // self.block_size + 1, np.int64)
            table[-1] = ids[last]
            blocks.append(table)
        return blocks, (last + 1) * unit

    def decode_events(self, caching_unit: int) -> list[DecodeEvent]:
        """The step after it has gone on in another block gives the one before back."""
        return [*super().decode_events(caching_unit), DecodeEvent(self.block_size, 1, gives=2)]

    def num_blocks_to_allocate(self, request_id: str, hit: BlockIds, need: Need) -> int:
        extra = self.block_size * self.num_spec_blocks
        return super().num_blocks_to_allocate(request_id, hit, need._replace(num_tokens=need.num_tokens + extra))

    def allocate_new_blocks(self, request_id: str, num_tokens: int, main_tokens: int) -> BlockIds:
        return super().allocate_new_blocks(request_id, num_tokens + self.block_size * self.num_spec_blocks, main_tokens)


class AlignedMambaManager(MambaManager):
    """Mode `align`."""

    def __init__(self, spec: KVCacheGroupSpec, group: int, pool: BlockPool, rules: CacheRules) -> None:
        super().__init__(spec, group, pool, rules)
        self._previous_state: dict[str, int] = {}
        """Index of the state that the running one was made from."""
        self._num_retired: dict[str, int] = {}
        self._has_allocated: set[str] = set()
        self._keys_of_step: set[int] = set()
        """Keys of states that are only made in this step: nobody can use them in it."""
        self.has_refused = False
        """Whether somebody wanted one of them in this step."""
        self._own_tails: dict[str, tuple[int, int]] = {}
        """Request → (block, tokens) of the partial state that it has registered itself, and will overwrite."""
        self._boundary_states: list[tuple[str, BoundaryState]] = []
        self._below_mark: dict[str, int] = {}
        """Request → state that its hit ends in, of which it will keep a copy beside what is loaded."""

    # -- allocation -------------------------------------------------------------------------------------------

    def num_blocks_to_allocate(self, request_id: str, hit: BlockIds, need: Need) -> int:
        if len(hit) and int(self.pool.keys[hit[-1]]) in self._keys_of_step:
            self.has_refused = True
            return self.pool.num_blocks + 1  # more than there are: not in this step
        table = self.tables.get(request_id)
        held = table.num_blocks if table is not None else 0
        new = cdiv(need.main_tokens, self.block_size) + self.num_spec_blocks - len(hit) - held
        hits_inside = bool(len(hit)) and need.local_computed % self.block_size != 0
        copies = 1 if hits_inside or request_id in self._partial_hits else 0
        if copies:
            new = max(new, 0) + copies
        if new > 0:
            new = min(new, self._most_new_blocks(request_id) + copies)
            if self.rules.exact_estimates and need.total_computed > need.local_computed and table is None:
                # The loaded state has a block of its own, unless the running one is in the same.
                new += cdiv(need.total_computed, self.block_size) < cdiv(need.main_tokens, self.block_size)
        keeps_state = self.rules.keeps_state_below_mark and bool(len(hit)) and need.total_computed > need.local_computed
        return new + self.num_evictable(hit) + (1 if keeps_state else 0)

    def num_evictable(self, hit: BlockIds) -> int:
        real = hit[hit != NULL_BLOCK_ID]
        return self.pool.num_evictable(real)

    def _most_new_blocks(self, request_id: str) -> int:
        """A state, and at first those for drafts."""
        return 1 if request_id in self._has_allocated else 1 + self.num_spec_blocks

    def add_local_computed_blocks(self, request_id: str, hit: BlockIds, num_local: int, num_external: int) -> None:
        super().add_local_computed_blocks(request_id, hit, num_local, num_external)
        if self.rules.keeps_state_below_mark and len(hit) and num_external:
            self.pool.touch(hit[-1:])  # until the copy has been made
            self._below_mark[request_id] = int(hit[-1])

    def allocate_external_computed_blocks(
        self, request_id: str, num_local: int, num_external: int, *, zero: bool
    ) -> BlockIds:
        source = self._below_mark.pop(request_id, None)
        if source is None:
            return super().allocate_external_computed_blocks(request_id, num_local, num_external, zero=zero)
        copy = self.pool.get_new_blocks(1)
        new = super().allocate_external_computed_blocks(request_id, num_local, num_external, zero=zero)
        self.tables[request_id].ids[num_local // self.block_size - 1] = copy[0]
        self.pool.ref_counts[copy] += 1
        self.block_copies.append((source, int(copy[0])))
        return np.concatenate([copy, new])

    def allocate_new_blocks(self, request_id: str, num_tokens: int, main_tokens: int) -> BlockIds:
        """Lookahead tokens need no state: drafters have no Mamba layers."""
        required = cdiv(main_tokens, self.block_size) + self.num_spec_blocks
        table = self.table(request_id, required + 1)
        partial_hit = self._partial_hits.get(request_id)
        was_allocated = request_id in self._has_allocated
        self._has_allocated.add(request_id)
        if required <= table.num_blocks and partial_hit is None:
            return NO_BLOCKS
        before = table.num_blocks
        if was_allocated:
            self._previous_state[request_id] = before - 1 - self.num_spec_blocks
        elif before:
            self._previous_state[request_id] = before - 1
        num_skipped = required - self.num_spec_blocks - 1
        if before < num_skipped:
            table.extend_nulls(num_skipped - before)
        if was_allocated:
            for index in range(before - self.num_spec_blocks, min(before, num_skipped)):
                self._relocate(table, index)
        num_new = max(required - table.num_blocks, 0)
        if num_new > (1 if was_allocated else 1 + self.num_spec_blocks):
            raise EngineFatal("AssertionError")
        new = self.pool.get_new_blocks(num_new + (1 if partial_hit is not None else 0))
        returned = table.ids[before:].tolist()
        if partial_hit is not None:
            copy, new = int(new[0]), new[1:]
            if was_allocated:
                self._keep_copy_cached(request_id, partial_hit, copy)
            else:
                self._redirect_to_copy(request_id, *partial_hit, copy)
                returned.insert(0, copy)
            del self._partial_hits[request_id]
        table.extend(new)
        return np.array([*returned, *new.tolist()], np.int64)

    def _relocate(self, table: BlockTable, index: int) -> None:
        """A draft's state block moves along to the end of the table."""
        block_id = int(table.ids[index])
        if not block_id or self.pool.keys[block_id] != NO_KEY or self.pool.ref_counts[block_id] != 1:
            raise EngineFatal(
                "AssertionError",
                "Speculative Mamba blocks must be exclusively owned and unhashed before relocation",
            )
        table.append(block_id)
        table.ids[index] = NULL_BLOCK_ID

    def _keep_copy_cached(self, request_id: str, partial_hit: tuple[int, int], copy: int) -> None:
        """A running request goes on writing in its own state; the cache keeps a copy of what it was."""
        index, source = partial_hit
        assert self.tables[request_id].ids[index] == source, request_id
        self.pool.move_keys(source, copy)
        self.block_copies.append((source, copy))
        self.pool.ref_counts[source] += 1
        own = self._own_tails.pop(request_id, None)
        if own is not None:
            self._boundary_states.append((request_id, BoundaryState(self.group, copy, own[1])))
        if self.pool.keys[copy] != NO_KEY:
            self._keys_of_step.add(int(self.pool.keys[copy]))

    # -- caching ----------------------------------------------------------------------------------------------

    def retained(self, start: int, end: int, boundaries: Sequence[int]) -> Mask | None:
        interval = self.rules.retention_interval
        if interval is None or 0 < interval // self.block_size <= 1:
            return None
        index = np.arange(start, end)
        mask: Mask = np.zeros(end - start, np.bool_)
        if interval:
            per_segment = interval // self.block_size
            mask |= index % per_segment == per_segment - 1
        alignment = self.rules.hit_alignment
        for boundary in boundaries:
            mask |= index == boundary // alignment * alignment // self.block_size - 1
        return mask

    def _retains_none(self, start: int, end: int, boundaries: Sequence[int]) -> bool:
        """Whether `retained` keeps none of these, where that can be told at a glance."""
        if self.rules.retention_interval != 0:
            return False
        alignment, size = self.rules.hit_alignment, self.block_size
        return not any(start < boundary // alignment * alignment // size <= end for boundary in boundaries)

    def cache_blocks(self, request: CachedRequest, keys: Keys, num_tokens: int, boundaries: Sequence[int]) -> BlockIds:
        table = self.table(request.request_id)
        before = max(table.num_cached, 0)
        cached = NO_BLOCKS
        end = min(num_tokens, request.num_tokens - self.rules.num_hash_lookahead_tokens) // self.block_size
        if before < end:
            if self._retains_none(before, end, self._reachable(request, boundaries)):
                table.num_cached = end
            else:
                cached = super().cache_blocks(request, keys, num_tokens, boundaries)
        after = max(table.num_cached, 0)
        self._cache_running_state(request, keys, num_tokens)
        if after > before:
            for block_id in table.ids[before:after].tolist():
                if block_id == NULL_BLOCK_ID:
                    continue
                key = int(self.pool.keys[block_id])
                if key == NO_KEY:
                    continue
                self._keys_of_step.add(key)
                state = BoundaryState(self.group, block_id, int(self.pool.key_tokens[block_id]))
                self._boundary_states.append((request.request_id, state))
        return cached

    def _cache_running_state(self, request: CachedRequest, keys: Keys, num_tokens: int) -> None:
        """A chunk that ends at the prompt's last hash boundary leaves a state that can be hit there, though it lies
        inside a block (vLLM: _cache_partial_tail_block)."""
        rules, unit = self.rules, self.rules.hash_block_size
        if num_tokens <= 0 or num_tokens % unit:
            return
        boundary = checkpoint_position(
            request.num_prompt_tokens,
            unit,
            drops_eagle_block=rules.drops_eagle_block,
            num_lookahead=rules.num_hash_lookahead_tokens,
        )
        table = self.tables[request.request_id]
        index = cdiv(num_tokens, self.block_size) - 1
        if num_tokens != boundary or index >= table.num_blocks:
            return
        block_id = int(table.ids[index])
        is_known = self.pool.keys[block_id] != NO_KEY and self.pool.key_tokens[block_id] == num_tokens
        if block_id == NULL_BLOCK_ID or is_known:
            return
        key = int(self.pool_keys(keys[num_tokens // unit - 1 : num_tokens // unit])[0])
        self.pool.cache_partial(block_id, key, num_tokens)
        self._keys_of_step.add(key)
        if num_tokens % self.block_size:
            self._partial_hits[request.request_id] = (index, block_id)
            table.num_cached = index
            self._own_tails[request.request_id] = (block_id, num_tokens)

    # -- freeing ----------------------------------------------------------------------------------------------

    def remove_skipped_blocks(self, request_id: str, num_processed_tokens: int) -> None:
        """Free older states. There are null blocks between those that wait to be freed."""
        table = self.tables.get(request_id)
        if table is None:
            return
        skipped = max(self.skipped_tokens(num_processed_tokens), 0) // self.block_size
        first, last = self._num_retired.get(request_id, 0), min(skipped, table.num_blocks)
        if first < last:
            self._free_range(request_id, table, first, last)
            self._num_retired[request_id] = last
        previous = self._previous_state.get(request_id)
        if previous is not None and previous < cdiv(num_processed_tokens, self.block_size) - 1:
            self._free_range(request_id, table, previous, previous + 1)

    def _free_range(self, request_id: str, table: BlockTable, first: int, last: int) -> None:
        ids = table.ids[first:last]
        held = ids.nonzero()[0]
        if self.on_left_behind is not None:
            self.on_left_behind(request_id, self.group, ids[held[::-1]])
        if len(held) == 1:
            block_id = int(ids[held[0]])
            ids[held[0]] = NULL_BLOCK_ID
            self.pool.free_one(block_id)
        elif len(held):
            freed = ids[held[::-1]]
            ids[:] = NULL_BLOCK_ID
            self.pool.free_blocks(freed)

    def pop_blocks_for_free(self, request_id: str) -> BlockIds:
        self._has_allocated.discard(request_id)
        self._previous_state.pop(request_id, None)
        self._num_retired.pop(request_id, None)
        self._own_tails.pop(request_id, None)
        self._boundary_states = [entry for entry in self._boundary_states if entry[0] != request_id]
        return super().pop_blocks_for_free(request_id)

    # -- steps ------------------------------------------------------------------------------------------------

    def start_step(self) -> None:
        self._keys_of_step.clear()
        self.has_refused = False

    def take_boundary_states(self) -> list[tuple[str, BoundaryState]]:
        taken, self._boundary_states = self._boundary_states, []
        return taken

    def take_finished_tail(self, request_id: str, num_computed: int, num_in_flight: int) -> BoundaryState | None:
        """The partial state of a request that ends with exactly that computed (vLLM: finalize_partial_tail_offload)."""
        own = self._own_tails.pop(request_id, None)
        if own is None or num_in_flight or num_computed != own[1]:
            return None
        return BoundaryState(self.group, *own)
