"""What all managers do alike (vLLM: v1/core/single_type_kv_cache_manager.py, SingleTypeKVCacheManager)."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvreplay.errors import EngineFatal
from kvreplay.ids import NULL_BLOCK_ID
from kvreplay.kv.block_pool import BlockPool
from kvreplay.kv.block_table import UNTRACKED, BlockTable
from kvreplay.kv.group_keys import group_key, group_steps
from kvreplay.kv.prefix_cache import BlockIds, Keys
from kvreplay.kv.specs import CIRCULAR_BUFFER, KVCacheGroupSpec, cdiv

Mask = NDArray[np.bool_]

_SHORT: Final = 64
"""Blocks; what is longer costs a look at the whole table, or at all of a prompt."""
NO_BLOCKS: BlockIds = np.empty(0, np.int64)


class CachedRequest(Protocol):
    """What a manager needs to know of a request to cache its blocks."""

    request_id: str
    num_prompt_tokens: int
    num_tokens: int
    shared_prefix_boundary: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRules:
    """What all groups of one cache share. Sizes in tokens.

    `hit_alignment`: where hits may end. `retention_interval`: None keeps what every aligned hit needs of a sparse
    group, 0 what a replay of the prompt needs, more than that also once in so many tokens.
    """

    num_groups: int
    scheduler_block_size: int
    hash_block_size: int
    hit_alignment: int
    max_in_flight_tokens: int
    max_model_len: int
    retention_interval: int | None = 0
    records_new_blocks: bool = False
    """Attention blocks are zeroed when they are taken, because some group reads before it writes."""
    num_hash_lookahead_tokens: int = 0
    """Tokens after a block that its hash covers, too."""
    drops_eagle_block: bool = False
    """Some group drops the last block of a hit, to compute again what the drafter needs."""
    exact_estimates: bool = False
    """vLLM 0.33.0 counts some needs short: null blocks as held, and a loaded state's block not at all."""
    looks_at_whole_chunks: bool = False
    """vLLM 0.33.0 takes blocks of earlier chunks for computed, also where the next token's chunk begins inside them."""
    adopts_per_group: bool = False
    """Before vllm#33775: a group's blocks for a load are taken before the next group's hit."""
    keeps_state_below_mark: bool = False
    """Mamba, before vllm#52807: beside a load, a request keeps a copy of the state that its hit ends in."""


class Need(NamedTuple):
    """What a request needs slots for. `total_computed`: local and external; `main_tokens`: without lookahead slots."""

    num_tokens: int
    total_computed: int
    local_computed: int
    main_tokens: int
    apply_cap: bool = False


class DecodeEvent(NamedTuple):
    """Where computed tokens, modulo `size`, are `residue`: the blocks that a step takes, and how many at most it gives
    back, and enters into the prefix cache."""

    size: int
    residue: int
    takes: int = 0
    gives: int = 0
    hashes: int = 0


class KVGroupManager(ABC):
    """One group's block tables over the shared pool."""

    finds_inside_blocks = False
    """Whether a hit may end inside one of its blocks."""

    def __init__(self, spec: KVCacheGroupSpec, group: int, pool: BlockPool, rules: CacheRules) -> None:
        self.spec = spec
        self.group = group
        self.block_size = spec.block_size
        self.pool = pool
        self.rules = rules
        self.tables: dict[str, BlockTable] = {}
        self.admission_cap = spec.max_admission_blocks(rules.max_in_flight_tokens, rules.max_model_len)
        """Most blocks a request holds at once, where blocks are recycled while it runs."""
        self.drops_eagle_block = False
        self.new_block_ids: list[int] = []
        """To be zeroed before the step runs."""
        self.block_copies: list[tuple[int, int]] = []
        """(from, to) to be copied before the step runs; both have a reference until then."""
        self.on_left_behind: Callable[[str, int, BlockIds], None] | None = None
        """Told (request, group, blocks) when a request gives blocks back and goes on, for those who must know each."""
        self._records_new_blocks = rules.records_new_blocks and spec.is_attention and spec.kind != CIRCULAR_BUFFER
        self._hashes_per_block = max(spec.block_size // rules.hash_block_size, 1)
        self._partial_hits: dict[str, tuple[int, int]] = {}
        """Request → (index, block) of a shared block in which its hit ends: it gets a copy to write on."""

    # -- keys -------------------------------------------------------------------------------------------------

    def pool_keys(self, keys: Keys) -> Keys:
        num_groups = self.rules.num_groups
        return keys if num_groups == 1 else group_key(keys, self.group, num_groups)

    def block_keys(self, keys: Keys) -> Keys:
        """Of prefix hashes, those that end with a block of this group."""
        scale = self._hashes_per_block
        return keys if scale == 1 else keys[scale - 1 :: scale]

    # -- lookup -----------------------------------------------------------------------------------------------

    @abstractmethod
    def find_longest_cache_hit(
        self, group: "JointLookup", keys: Keys, max_length: int, *, drop_eagle_block: bool
    ) -> tuple[list[BlockIds], int]:
        """For each member of `group`, the block of each position of the longest usable prefix (0 where none is
        needed), and its length in tokens. `keys`: the prefix hashes."""

    # -- allocation -------------------------------------------------------------------------------------------

    def skipped_tokens(self, num_computed_tokens: int) -> int:
        """Leading tokens that the next token does not attend to."""
        return 0

    def num_blocks_to_allocate(self, request_id: str, hit: BlockIds, need: Need) -> int:
        """Blocks to take from the free queue, evictable hits included."""
        if need.apply_cap and self.admission_cap is not None:
            if self.rules.exact_estimates:
                return self._most_at_once(request_id, hit, need, self.admission_cap)
            required = min(cdiv(need.num_tokens, self.block_size), self.admission_cap)
        else:
            required = cdiv(need.num_tokens, self.block_size)
        table = self.tables.get(request_id)
        held = table.num_blocks if table is not None else 0
        if table is not None and table.num_cached != UNTRACKED:
            if len(hit):
                raise EngineFatal("AssertionError")
            return max(required - held, 0)
        skipped = self.skipped_tokens(need.total_computed) // self.block_size
        new = max(required - max(skipped, len(hit) + held), 0)
        if not len(hit):
            return new
        if need.local_computed % self.block_size:
            new += 1  # the copy of the block in which the hit ends
        return new + self.num_evictable(hit[max(0, skipped - held) :])

    def num_evictable(self, hit: BlockIds) -> int:
        return self.pool.num_evictable(hit)

    def _most_at_once(self, request_id: str, hit: BlockIds, need: Need, cap: int) -> int:
        """Blocks that the request will take at most before it gives some back: null blocks are none that it holds."""
        table = self.tables.get(request_id)
        ids = table.ids if table is not None else NO_BLOCKS
        skipped = self.skipped_tokens(need.total_computed) // self.block_size
        to_come = cdiv(need.num_tokens, self.block_size) - max(len(ids) + len(hit), skipped)
        held = int(np.count_nonzero(ids)) + int(np.count_nonzero(hit))
        kept = hit[skipped:]
        evictable = self.num_evictable(kept[kept != NULL_BLOCK_ID]) if len(kept) else 0
        return max(min(to_come, cap - held), 0) + evictable

    def add_local_computed_blocks(self, request_id: str, hit: BlockIds, num_local: int, num_external: int) -> None:
        """Adopt prefix-cache hits: positions before the window become null blocks and are not touched."""
        total = num_local + num_external
        table = self.table(request_id, cdiv(total, self.block_size) + 1)
        assert table.num_blocks == 0, request_id
        skipped = max(self.skipped_tokens(total) // self.block_size, 0)
        if skipped:
            hit = hit[skipped:]
            table.extend_nulls(skipped)
        if len(hit):
            self.pool.touch(hit if hit.all() else hit[hit != NULL_BLOCK_ID])
            table.extend(hit)
        table.num_cached = table.num_blocks
        if len(hit) and num_local % self.block_size:
            index = num_local // self.block_size
            self._partial_hits[request_id] = (index, int(hit[-1]))
            table.num_cached = index

    def allocate_external_computed_blocks(
        self, request_id: str, num_local: int, num_external: int, *, zero: bool
    ) -> BlockIds:
        """Blocks for what a connector will write, inside the window only."""
        total = num_local + num_external
        skipped = self.skipped_tokens(total)
        if skipped > 0:
            num_external = min(total - skipped, num_external)
        if num_external <= 0:
            return NO_BLOCKS
        return self._extend_to(request_id, cdiv(total, self.block_size), zero=zero)

    def allocate_new_blocks(self, request_id: str, num_tokens: int, main_tokens: int) -> BlockIds:
        copies: list[int] = []
        if request_id in self._partial_hits:
            index, source = self._partial_hits.pop(request_id)
            copy = int(self.pool.get_new_blocks(1)[0])
            self._redirect_to_copy(request_id, index, source, copy)
            self.new_block_ids.append(copy)
            copies.append(copy)
        new = self._extend_to(request_id, cdiv(num_tokens, self.block_size), zero=True)
        return np.array([*copies, *new.tolist()], np.int64) if copies else new

    def _extend_to(self, request_id: str, num_blocks: int, *, zero: bool) -> BlockIds:
        table = self.table(request_id, num_blocks + 1)
        if num_blocks <= table.num_blocks:
            return NO_BLOCKS
        block_ids = self.pool.get_new_blocks(num_blocks - table.num_blocks)
        table.extend(block_ids)
        if zero and self._records_new_blocks:
            self.new_block_ids.extend(block_ids.tolist())
        return block_ids

    def _redirect_to_copy(self, request_id: str, index: int, source: int, copy: int) -> None:
        """The request goes on in `copy`. The reference of its hit keeps `source` until the copy has been made."""
        table = self.tables[request_id]
        assert table.ids[index] == source, request_id
        table.ids[index] = copy
        self.block_copies.append((source, copy))
        self.pool.ref_counts[copy] += 1

    def table(self, request_id: str, capacity: int = 16) -> BlockTable:
        table = self.tables.get(request_id)
        if table is None:
            table = self.tables[request_id] = BlockTable(capacity)
        return table

    def is_tracked(self, request_id: str) -> bool:
        """Whether the request has adopted or cached blocks here."""
        table = self.tables.get(request_id)
        return table is not None and table.num_cached != UNTRACKED

    # -- caching ----------------------------------------------------------------------------------------------

    def cache_blocks(self, request: CachedRequest, keys: Keys, num_tokens: int, boundaries: Sequence[int]) -> BlockIds:
        """Enter the full blocks of the first `num_tokens` tokens that have not been offered yet.

        `boundaries`: where somebody who sends the prompt again can go on.
        """
        table = self.table(request.request_id)
        start = max(table.num_cached, 0)
        end = min(num_tokens, request.num_tokens - self.rules.num_hash_lookahead_tokens) // self.block_size
        if start >= end or not self.spec.prefix_cacheable:
            return NO_BLOCKS
        table.num_cached = end
        index = np.arange(start, end)
        block_ids = table.ids[start:end]
        chosen: Mask = block_ids != NULL_BLOCK_ID
        retained = self.retained(start, end, self._reachable(request, boundaries))
        if retained is not None:
            chosen = chosen & retained
        if not chosen.all():
            index, block_ids = index[chosen], block_ids[chosen]
            if not len(block_ids):
                return NO_BLOCKS
        block_keys = self.pool_keys(keys[(index + 1) * self._hashes_per_block - 1])
        self.pool.cache(block_ids, block_keys, (index + 1) * self.block_size)
        return block_ids

    def _reachable(self, request: CachedRequest, boundaries: Sequence[int]) -> list[int]:
        reachable = [*boundaries]
        if request.shared_prefix_boundary:
            reachable.append(request.shared_prefix_boundary)
            if self.drops_eagle_block:
                reachable.append(request.shared_prefix_boundary - self.block_size)
        return reachable

    def retained(self, start: int, end: int, boundaries: Sequence[int]) -> Mask | None:
        """Which of the blocks [start, end) some hit can use (vLLM: reachable_block_mask). None: every one."""
        return None

    # -- freeing ----------------------------------------------------------------------------------------------

    def remove_skipped_blocks(self, request_id: str, num_processed_tokens: int) -> None:
        """Free what lies before the window, walking back from it to the first null block."""
        skipped = self.skipped_tokens(num_processed_tokens) // self.block_size
        table = self.tables.get(request_id)
        if skipped <= 0 or table is None:
            return
        ids = table.ids[:skipped]
        if not len(ids) or not ids[-1]:
            return
        # What has just been left is short, as a rule, and what was left before may be long.
        known = max(len(ids) - _SHORT, 0)
        nulls = (ids[known:] == NULL_BLOCK_ID).nonzero()[0]
        if not len(nulls) and known:
            known = 0
            nulls = (ids == NULL_BLOCK_ID).nonzero()[0]
        first = known + int(nulls[-1]) + 1 if len(nulls) else 0
        freed = ids[first:][::-1].copy()
        ids[first:] = NULL_BLOCK_ID
        self.pool.free_blocks(freed)
        if self.on_left_behind is not None:
            self.on_left_behind(request_id, self.group, freed)

    def pop_blocks_for_free(self, request_id: str) -> BlockIds:
        """The request's blocks in table order, leading nulls dropped; its table is gone."""
        table = self.tables.pop(request_id, None)
        self._partial_hits.pop(request_id, None)
        if table is None or not table.num_blocks:
            return NO_BLOCKS
        ids = table.ids
        return ids if ids[0] else ids[int((ids != NULL_BLOCK_ID).argmax()) :] if ids.any() else NO_BLOCKS

    # -- decoding ---------------------------------------------------------------------------------------------

    def decode_events(self, caching_unit: int) -> list[DecodeEvent]:
        """Where the blocks of a request that computes one token a step change.

        `caching_unit`: blocks get their hashes whenever so many more tokens have been computed.
        """
        return [
            DecodeEvent(self.block_size, 0, takes=1),
            DecodeEvent(caching_unit, caching_unit - 1, hashes=max(caching_unit // self.block_size, 1)),
        ]

    # -- what a step takes along ------------------------------------------------------------------------------

    def take_new_block_ids(self) -> list[int]:
        taken, self.new_block_ids = self.new_block_ids, []
        return taken

    def record_again(self, request_id: str, start_token: int) -> None:
        """Blocks from `start_token` on have not been written after all: zero them."""
        if not self._records_new_blocks:
            return
        if start_token % self.block_size:
            raise EngineFatal("AssertionError")
        self.new_block_ids.extend(self.tables[request_id].ids[start_token // self.block_size :].tolist())

    def take_block_copies(self) -> list[tuple[int, int]]:
        taken, self.block_copies = self.block_copies, []
        return taken


class JointLookup:
    """Groups of one spec: they hit together or not at all (vLLM: kv_cache_coordinator.py, SpecGroup)."""

    def __init__(self, managers: Sequence[KVGroupManager], *, drops_eagle_block: bool = False) -> None:
        self.managers = list(managers)
        self.first = managers[0]
        self.drops_eagle_block = drops_eagle_block
        others = [manager.group - self.first.group for manager in managers[1:]]
        self._key_steps = group_steps(others, self.first.rules.num_groups)

    def find(self, keys: Keys) -> list[BlockIds]:
        """For each member, the block of each key; 0 for all of them where one has none."""
        pool = self.first.pool
        first_keys = self.first.pool_keys(keys)
        found = pool.find(first_keys)
        if len(self.managers) == 1:
            return [found]
        # Most lookups find little: only there is it worth asking for the others'.
        places = found.nonzero()[0]
        spread = np.zeros((len(self.managers), len(keys)), np.int64)
        if len(places):
            others = pool.find(first_keys[places] + self._key_steps)
            is_everywhere = np.logical_and.reduce(others)
            if np.count_nonzero(is_everywhere) < len(places):
                places, others = places[is_everywhere], others[:, is_everywhere]
            spread[0, places] = found[places]
            spread[1:, places] = others
        return list(spread)

    def find_prefix(self, keys: Keys) -> list[BlockIds]:
        """For each member, the blocks of the longest prefix of `keys` that all hold."""
        if len(self.managers) > 1:
            found = self.find(keys)
            missing = (found[0] == NULL_BLOCK_ID).nonzero()[0]
            return [ids[: missing[0]] for ids in found] if len(missing) else found
        pool, first = self.first.pool, self.first
        # As a rule it is short, and keys are not worth making for all of a prompt.
        head = pool.find_prefix(first.pool_keys(keys[:_SHORT]))
        if len(head) < _SHORT:
            return [head]
        return [np.concatenate([head, pool.find_prefix(first.pool_keys(keys[_SHORT:]))])]

    def none(self) -> tuple[list[BlockIds], int]:
        return [NO_BLOCKS for _ in self.managers], 0
