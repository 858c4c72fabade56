"""Block tables of all requests over all groups (vLLM: v1/core/kv_cache_manager.py, kv_cache_coordinator.py)."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Final, NamedTuple

import numpy as np

from kvreplay.errors import ConfigError, EngineFatal
from kvreplay.ids import NULL_BLOCK_ID
from kvreplay.kv.block_list import BlockList
from kvreplay.kv.block_pool import BlockPool
from kvreplay.kv.former_pool import FormerPool
from kvreplay.kv.lookup import FoundPrefix, Hit, PrefixLookup, no_hit
from kvreplay.kv.managers.base import NO_BLOCKS, CachedRequest, CacheRules, KVGroupManager, Need
from kvreplay.kv.managers.factory import make_manager
from kvreplay.kv.managers.mamba import AlignedMambaManager, BoundaryState
from kvreplay.kv.prefix_cache import BlockIds, Keys
from kvreplay.kv.specs import MAMBA, KVCacheGroupSpec, cdiv, hits_inside_blocks, resolve_block_sizes


class BlocksOfRequest:
    """What a connector is shown of a request's blocks: all, or those of its first `num_tokens` tokens."""

    __slots__ = ("_manager", "_num_tokens", "_request_id")

    def __init__(self, manager: "KVCacheManager", request_id: str, num_tokens: int | None = None) -> None:
        self._manager = manager
        self._request_id = request_id
        self._num_tokens = num_tokens

    def get_block_ids(self) -> tuple[Sequence[int], ...]:
        if self._num_tokens is None:
            return tuple(BlockList(ids.copy()) for ids in self._manager.block_arrays(self._request_id))
        return self._manager.get_block_ids_for_computed_tokens(self._request_id, self._num_tokens)

    def get_unhashed_block_ids_all_groups(self) -> tuple[Sequence[int], ...]:
        return tuple(BlockList(ids) for ids in self._manager.unhashed_blocks(self._request_id))


class Slots(NamedTuple):
    """What a request asks of the pool, in tokens if nothing else is said.

    `num_local_tokens` were just found in the prefix cache (`hit`), `num_external_tokens` will be written by a
    connector: into blocks of `loaded_groups` later on, so that they must not be zeroed.
    """

    num_computed_tokens: int
    num_tokens: int
    """Of the whole request, as far as it is known."""
    num_new_tokens: int
    hit: Hit | None = None
    num_local_tokens: int = 0
    num_external_tokens: int = 0
    num_lookahead_tokens: int = 0
    num_in_flight_tokens: int = 0
    full_sequence_must_fit: bool = False
    reserved_beside: int = 0
    """Blocks that the whole sequence must fit beside."""
    apply_watermark: bool = False
    reserved_blocks: int = 0
    """Free blocks that are not for it."""
    loaded_groups: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRules:
    """What speculative decoding asks of the cache. Tokens.

    `num_hash_lookahead`: that a block's hash covers beyond it. `num_prefill_lookahead`: that drafters read beyond a
    chunk; the last of them but one may be computed again. `drops_block`: hits lose their last block instead.
    """

    num_hash_lookahead: int = 0
    num_prefill_lookahead: int = 0
    drops_block: bool = False


NO_DRAFTS = DraftRules()
_MAX_DECODE_PERIOD: Final = 1 << 16


class DecodeEvents(NamedTuple):
    """A decoding request's blocks change when its computed tokens are one of `residues`, modulo `period`.

    For each residue: `takes`, the blocks that it takes there; `gives` and `hashes`, how many at most it gives back,
    and enters into the prefix cache.
    """

    period: int
    residues: list[int]
    takes: list[int]
    gives: list[int]
    hashes: list[int]


class ConnectorHit(NamedTuple):
    """A lookup for a connector: `diverged` where full attention reaches further than some other group."""

    found: FoundPrefix
    diverged: bool


class KVCacheManager:
    """One pool, one table per request and group.

    `counts_filled`: `num_filled` has the blocks that decoding requests fill. `leaves_unseen`: what they give back has
    no hash.
    `max_in_flight_tokens`: the most tokens that steps in flight can hold (batches times token budget).
    """

    counts_filled = False
    leaves_unseen = False

    def __init__(
        self,
        groups: Sequence[KVCacheGroupSpec],
        pool: BlockPool,
        *,
        max_model_len: int,
        max_in_flight_tokens: int,
        watermark: float = 0.0,
        retention_interval: int | None = 0,
        hash_block_size: int | None = None,
        drafts: DraftRules = NO_DRAFTS,
        exact_estimates: bool = False,
        looks_at_whole_chunks: bool = False,
        adopts_per_group: bool = False,
        keeps_state_below_mark: bool = False,
        has_connector: bool = False,
        allows_hits_inside_blocks: bool = True,
    ) -> None:
        self.groups = tuple(groups)
        self.pool = pool
        pool.count_groups(len(self.groups))
        self._former: KVCacheManager | None = None
        """The same cache if nothing had ever lost its hash, once somebody has asked what it would hold."""
        self.max_model_len = max_model_len
        self.watermark_blocks = int(watermark * pool.num_blocks)
        hashes_are_used = pool.enable_caching or has_connector
        sizes = resolve_block_sizes(groups, hash_block_size=hash_block_size, hashes_are_used=hashes_are_used)
        self.block_size = sizes.scheduler
        """The scheduler's block size: with several groups, the least common multiple."""
        self.hits_inside_blocks = (
            allows_hits_inside_blocks
            and len(groups) > 1
            and pool.enable_caching
            and hits_inside_blocks(groups, sizes.hashing)
        )
        self.has_mamba = any(group.kind == MAMBA for group in groups)
        self._drafts = drafts
        self.rules = CacheRules(
            num_groups=len(groups),
            scheduler_block_size=sizes.scheduler,
            hash_block_size=sizes.hashing,
            hit_alignment=sizes.hashing if self.hits_inside_blocks else sizes.scheduler,
            max_in_flight_tokens=max_in_flight_tokens,
            max_model_len=max_model_len,
            retention_interval=retention_interval,
            records_new_blocks=self.has_mamba,
            num_hash_lookahead_tokens=drafts.num_hash_lookahead,
            drops_eagle_block=drafts.drops_block,
            exact_estimates=exact_estimates,
            looks_at_whole_chunks=looks_at_whole_chunks,
            adopts_per_group=adopts_per_group,
            keeps_state_below_mark=keeps_state_below_mark,
        )
        self._check_retention(retention_interval)
        self.managers = [make_manager(spec, group, pool, self.rules) for group, spec in enumerate(groups)]
        self._adopting = [[manager] for manager in self.managers] if adopts_per_group else [self.managers]
        """Groups whose hits are taken before any of them takes blocks for a load."""
        self._aligned_mamba = [manager for manager in self.managers if isinstance(manager, AlignedMambaManager)]
        eagle_groups = frozenset(group for group, spec in enumerate(groups) if spec.is_eagle) or frozenset(
            range(len(groups))
        )
        self.lookup = PrefixLookup(self.managers, self.rules, eagle_groups if drafts.drops_block else frozenset())
        self._check_caching()
        self.no_hit: Hit = no_hit(len(groups))
        self.num_filled = 0
        """Blocks that got their hash as decoding requests filled them, where that is counted."""
        self.caches_again = False
        """Some request offers blocks a second time, which others may have cached for it meanwhile."""
        self.prefix_replay_tokens = max((group.prefix_replay_tokens for group in groups), default=0)
        """Of a hit, the last tokens that are computed again, because no cache holds the window before them."""

    def over(self, pool: BlockPool, *, allows_hits_inside_blocks: bool = True) -> "KVCacheManager":
        """The same groups and rules over another pool: a second cache of the same contents."""
        return KVCacheManager(
            self.groups,
            pool,
            max_model_len=self.max_model_len,
            max_in_flight_tokens=self.rules.max_in_flight_tokens,
            retention_interval=self.rules.retention_interval,
            hash_block_size=self.rules.hash_block_size if len(self.groups) > 1 else None,
            drafts=self._drafts,
            looks_at_whole_chunks=self.rules.looks_at_whole_chunks,
            allows_hits_inside_blocks=allows_hits_inside_blocks,
        )

    def _check_retention(self, interval: int | None) -> None:
        """(vLLM: _validate_prefix_cache_retention_interval)"""
        if not interval:
            return
        if not any(group.is_sliding_window or group.kind == MAMBA for group in self.groups):
            raise ConfigError(
                f"cache.prefix_cache_retention_interval is {interval}, but only sliding-window and Mamba groups are "
                "retained sparsely"
            )
        if interval % self.block_size:
            raise ConfigError(
                f"cache.prefix_cache_retention_interval must be a multiple of {self.block_size}, got {interval}"
            )

    def _check_caching(self) -> None:
        if not self.pool.enable_caching:
            return
        for group in self.groups:
            if group.kind == MAMBA and not group.is_aligned_mamba:
                raise ConfigError("model.groups: prefix caching needs mamba_cache_mode 'align'")
        if not self.lookup.joint:
            raise ConfigError("model.groups: prefix caching needs a group that can be cached")
        if self._drafts.drops_block or any(group.is_eagle for group in self.groups):
            self.check_lookahead()

    def check_lookahead(self) -> None:
        """What a hit leaves out must hold all that MTP modules read ahead (vLLM: KVCacheCoordinator.__init__).

        To be called where some group is a drafter's. Raises ConfigError.
        """
        num_modules = self._drafts.num_prefill_lookahead
        if self.pool.enable_caching and num_modules > self.block_size:
            raise ConfigError(
                f"speculative.num_mtp_layers: prefix caching with {num_modules} MTP modules needs blocks of at least "
                f"as many tokens, got {self.block_size}"
            )

    # -- looking ----------------------------------------------------------------------------------------------

    def get_computed_blocks(self, keys: Keys, num_tokens: int) -> FoundPrefix:
        """The longest cached prefix, never the last token: it must be computed to sample from it."""
        if not self.pool.enable_caching:
            return FoundPrefix(self.no_hit, 0)
        return self.lookup.find(self._known(keys, num_tokens), num_tokens - 1)

    def _known(self, keys: Keys, num_tokens: int) -> Keys:
        """The prefix hashes of a request that has so many tokens; contents that are known in advance have more."""
        return keys[: max(0, num_tokens - self.rules.num_hash_lookahead_tokens) // self.rules.hash_block_size]

    def get_computed_blocks_for_connector(self, keys: Keys, num_tokens: int) -> ConnectorHit:
        """What full attention holds, though a Mamba state may be missing at its end: a connector may bring it.

        (vLLM: get_computed_blocks_for_connector)
        """
        full = self.lookup.full_attention_group if self.has_mamba and len(self.groups) > 1 else None
        if full is None or not self.pool.enable_caching:
            return ConnectorHit(self.get_computed_blocks(keys, num_tokens), diverged=False)
        hit, lengths = self.lookup.find_per_group(self._known(keys, num_tokens), num_tokens - 1)
        if max(lengths) > lengths[full]:
            return ConnectorHit(self.get_computed_blocks(keys, num_tokens), diverged=False)
        return ConnectorHit(FoundPrefix(hit, lengths[full]), diverged=min(lengths) < lengths[full])

    def unhashed_blocks(self, request_id: str) -> list[BlockIds]:
        """By group: those of the request's blocks that have no hash, as copies. Null blocks are not among them."""
        pool = self.pool
        return [ids[(ids != NULL_BLOCK_ID) & ~pool.is_cached(ids)] for ids in self.block_arrays(request_id)]

    def block_arrays(self, request_id: str) -> list[BlockIds]:
        return [
            manager.tables[request_id].ids if request_id in manager.tables else NO_BLOCKS for manager in self.managers
        ]

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        return tuple(ids.tolist() for ids in self.block_arrays(request_id))

    def get_block_ids_for_computed_tokens(self, request_id: str, num_computed_tokens: int) -> tuple[Sequence[int], ...]:
        return tuple(
            BlockList(
                (ids[: cdiv(num_computed_tokens, manager.block_size)] if manager.spec.is_attention else ids).copy()
            )
            for ids, manager in zip(self.block_arrays(request_id), self.managers, strict=True)
        )

    def num_blocks_to_finish(
        self, request_id: str, num_tokens: int, num_computed_tokens: int, num_draft_slots: int = 0
    ) -> int:
        """Blocks the request still needs to hold all its tokens, and the slots of a step with drafts."""
        whole = min(num_tokens, self.max_model_len)
        need = Need(whole + num_draft_slots, num_computed_tokens, num_computed_tokens, whole, apply_cap=True)
        return self._blocks_to_allocate(request_id, self.no_hit, need)

    def blocks_of_tokens(self, num_tokens: int) -> int:
        """Blocks that so many tokens take from a block's start on, in all groups that grow with tokens."""
        return sum(cdiv(num_tokens, manager.block_size) for manager in self.managers if manager.spec.is_attention)

    def former_hit(self, keys: Keys, num_tokens: int, num_hit: int) -> int:
        """Tokens that the lookup that found `num_hit` would find if no block had ever lost its hash. Of a request
        whose last block was there too, all: it was lost as well, though it is computed again in any case."""
        if not self.pool.has_lost or self._ends_in_full_attention(keys, num_hit):
            return num_hit
        # A longer hit needs a block behind the one there is.
        behind = keys[num_hit // self.rules.hash_block_size : num_tokens // self.rules.hash_block_size]
        if not any(self.pool.has_lost_any(manager.pool_keys(behind)) for manager in self.managers):
            return num_hit
        if self._former is None:
            self._former = self.over(FormerPool(self.pool))
        found = self._former.get_computed_blocks(keys, num_tokens).num_tokens
        reachable = (num_tokens - 1) // self.block_size * self.block_size
        is_whole = found == reachable and num_tokens % self.block_size == 0
        return num_tokens if is_whole and self._former.is_cached_at(keys, num_tokens) else max(found, num_hit)

    def _ends_in_full_attention(self, keys: Keys, num_hit: int) -> bool:
        """Whether no block that full attention ever had goes on from there, so that no hit has been longer."""
        full = self.lookup.full_attention_group
        if full is None or self.hits_inside_blocks:
            return False
        manager = self.managers[full]
        behind = (num_hit // manager.block_size + 1) * manager.block_size // self.rules.hash_block_size
        return behind <= len(keys) and not self.pool.is_or_was_cached(int(manager.pool_keys(keys[behind - 1])))

    def is_cached_at(self, keys: Keys, num_tokens: int) -> bool:
        """Whether every group holds the block that ends after so many tokens."""
        index = num_tokens // self.rules.hash_block_size - 1
        if index >= len(keys):  # its hash would cover tokens that never come
            return False
        return all(bool(lookup.find(keys[index : index + 1])[0][0]) for lookup in self.lookup.joint)

    def num_blocks_held_alone(self, request_id: str) -> int:
        """Blocks that nobody else has a reference to."""
        tables = self.block_arrays(request_id)
        return sum(int(np.count_nonzero(self.pool.ref_counts[ids[ids != NULL_BLOCK_ID]] == 1)) for ids in tables)

    def num_blocks_held(self, request_id: str) -> int:
        return sum(int(np.count_nonzero(ids)) for ids in self.block_arrays(request_id))

    # -- allocation -------------------------------------------------------------------------------------------

    def allocate_slots(self, request_id: str, wanted: Slots) -> tuple[BlockIds, ...] | None:
        """Slots for `num_new_tokens` more, or None if the pool is too small now.

        Returns the blocks taken for them, and for what is loaded, per group. The caller caches afterwards.
        """
        assert wanted.num_new_tokens or wanted.num_local_tokens or wanted.num_external_tokens, request_id
        local = wanted.num_computed_tokens + wanted.num_local_tokens
        total = min(local + wanted.num_external_tokens, self.max_model_len)
        found = self.no_hit if wanted.hit is None else wanted.hit
        watermark = self.watermark_blocks if wanted.apply_watermark else 0
        if wanted.full_sequence_must_fit:
            whole = min(wanted.num_tokens, self.max_model_len)
            needed = self._blocks_to_allocate(request_id, found, Need(whole, total, local, whole, apply_cap=True))
            if needed + watermark > self.pool.num_free - wanted.reserved_beside:
                return None
        main_tokens = total + wanted.num_new_tokens
        need_slot = min(main_tokens + wanted.num_lookahead_tokens, self.max_model_len)
        # Also when the request then fails to get its blocks: what has left the window is not needed.
        self.remove_skipped_blocks(request_id, max(0, total - wanted.num_in_flight_tokens))
        need = Need(need_slot, local + wanted.num_external_tokens, local, main_tokens)
        if self._blocks_to_allocate(request_id, found, need) + watermark > self.pool.num_free - wanted.reserved_blocks:
            return None
        external = self.no_hit
        if wanted.num_external_tokens or any(len(blocks) for blocks in found):
            external = self._adopt(request_id, found, local, wanted.num_external_tokens, wanted.loaded_groups)
        new = tuple(manager.allocate_new_blocks(request_id, need_slot, main_tokens) for manager in self.managers)
        if external is self.no_hit:
            return new
        return tuple(np.concatenate(pair) for pair in zip(external, new, strict=True))

    def _blocks_to_allocate(self, request_id: str, hit: Hit, need: Need) -> int:
        return sum(
            manager.num_blocks_to_allocate(request_id, blocks, need)
            for manager, blocks in zip(self.managers, hit, strict=True)
        )

    def _adopt(
        self, request_id: str, hit: Hit, num_local: int, num_external: int, loaded_groups: frozenset[int]
    ) -> Hit:
        """All groups' hits are touched before any external block is taken: one group must not evict another's hit."""
        if any(manager.is_tracked(request_id) for manager in self.managers):
            if any(len(blocks) for blocks in hit):
                raise EngineFatal("AssertionError")
            return self.no_hit
        external: list[BlockIds] = []
        for managers in self._adopting:
            for manager in managers:
                manager.add_local_computed_blocks(request_id, hit[manager.group], num_local, num_external)
            external += [
                manager.allocate_external_computed_blocks(
                    request_id, num_local, num_external, zero=manager.group not in loaded_groups
                )
                for manager in (managers if num_external else ())
            ]
        return tuple(external) if num_external else self.no_hit

    # -- caching ----------------------------------------------------------------------------------------------

    def cache_blocks(self, request: CachedRequest, keys: Keys, num_tokens: int) -> list[BlockIds]:
        """Returns the blocks that got a hash, per group."""
        if not self.pool.enable_caching:
            return []
        boundaries = self._replay_boundaries(request.num_prompt_tokens)
        return [
            manager.cache_blocks(request, keys, self.cacheable_tokens(manager, num_tokens), boundaries)
            for manager in self.managers
        ]

    def _replay_boundaries(self, num_prompt_tokens: int) -> list[int]:
        """Where the same prompt, or one that goes on from it, finds its hit (vLLM: replay_boundaries)."""
        if not self.rules.drops_eagle_block:
            return [num_prompt_tokens - 1]
        block = self.block_size
        ends = ((num_prompt_tokens - 1) // block * block, num_prompt_tokens // block * block)
        return sorted({max(end - block, 0) for end in ends})

    def cacheable_tokens(self, manager: KVGroupManager, num_tokens: int) -> int:
        """The prefix that a group may hash: hits cannot end elsewhere (vLLM: get_num_cacheable_tokens)."""
        final = max(0, num_tokens - max(0, self._drafts.num_prefill_lookahead - 1))
        if len(self.managers) == 1:
            return final
        aligned = self._aligned(num_tokens)
        if manager.drops_eagle_block and aligned > 0:
            return min(final, self._aligned(final) + manager.block_size)
        return aligned

    def _aligned(self, num_tokens: int) -> int:
        return num_tokens if self.hits_inside_blocks else num_tokens // self.block_size * self.block_size

    def may_have_hash(self, request_id: str, first: int, last: int) -> bool:
        """Whether a window's blocks at places [first, last) of the request's tables may be in the prefix cache."""
        return True

    def evict_blocks(self, block_ids: Iterable[int]) -> list[int]:
        return self.pool.evict_blocks(block_ids)

    def reset_prefix_cache(self) -> bool:
        return self.pool.reset()

    # -- freeing ----------------------------------------------------------------------------------------------

    def tell_left_behind(self, tell: Callable[[str, int, BlockIds], None]) -> None:
        """(request, group, blocks) of each request that gives blocks back and goes on."""
        for manager in self.managers:
            manager.on_left_behind = tell

    def remove_skipped_blocks(self, request_id: str, num_processed_tokens: int) -> None:
        for manager in self.managers:
            manager.remove_skipped_blocks(request_id, num_processed_tokens)

    def free(self, request_id: str) -> tuple[BlockIds, ...]:
        """Free all its blocks: groups in order, within a group the tail first. Returns them in that order."""
        # Copied, because numpy is slow to index with an array that runs backwards.
        freed = tuple(blocks[::-1].copy() for blocks in self.pop_blocks_for_free(request_id))
        for block_ids in freed:
            if len(block_ids):
                self.pool.free_blocks(block_ids)
        return freed

    def pop_blocks_for_free(self, request_id: str) -> tuple[BlockIds, ...]:
        """The request's blocks, which nobody frees yet; its tables are gone."""
        return tuple(manager.pop_blocks_for_free(request_id) for manager in self.managers)

    def least_blocks(self, num_tokens: int, hit: Hit, num_local: int) -> int | None:
        """Blocks from the free queue without which a new request of so many tokens cannot fit as a whole, whoever uses
        the blocks that it hits. None: that is not known."""
        return None

    # -- decoding ---------------------------------------------------------------------------------------------

    def decode_events(self) -> DecodeEvents | None:
        """Where a request that computes one token a step takes, gives back or hashes blocks. None: unknown."""
        if self._drafts != NO_DRAFTS or any(group.num_speculative_blocks or group.is_eagle for group in self.groups):
            return None
        period = self.block_size
        for group in self.groups:
            period = lcm(period, group.attention_chunk_size or 1)
        if period > _MAX_DECODE_PERIOD:
            return None
        events = [
            event
            for manager in self.managers
            for event in manager.decode_events(self._caching_unit(manager.block_size))
        ]
        residues = sorted(
            {residue for event in events for residue in range(event.residue % event.size, period, event.size)}
        )
        there = [[event for event in events if (residue - event.residue) % event.size == 0] for residue in residues]
        return DecodeEvents(
            period,
            residues,
            [sum(event.takes for event in found) for found in there],
            [sum(event.gives for event in found) for found in there],
            [sum(event.hashes for event in found) for found in there],
        )

    def _caching_unit(self, block_size: int) -> int:
        """Blocks get their hashes whenever so many more tokens have been computed."""
        return block_size if len(self.managers) == 1 or self.hits_inside_blocks else self.block_size

    def decode_step(self, request: CachedRequest, keys: Keys, num_computed: int) -> bool:
        """Slots for the token behind `num_computed`, and the hashes of what it fills. False: the pool is too small."""
        new = self.allocate_slots(
            request.request_id, Slots(num_computed_tokens=num_computed, num_tokens=request.num_tokens, num_new_tokens=1)
        )
        if new is None:
            return False
        self.cache_blocks(request, keys, num_computed + 1)
        return True

    def must_flush(self, request_id: str, num_computed: int, *, loads: bool) -> bool:
        """Whether that step gives back blocks that somebody may hit, or goes on from a state, which is then needed.

        `loads`: a connector may write into blocks that were given back, and may fall short.
        """
        return True

    # -- steps ------------------------------------------------------------------------------------------------

    def start_step(self) -> None:
        for manager in self._aligned_mamba:
            manager.start_step()

    @property
    def has_refused_state(self) -> bool:
        """Whether somebody was refused in this step because it hits a Mamba state that is only made in it."""
        return any(manager.has_refused for manager in self._aligned_mamba)

    def take_blocks_to_zero(self) -> list[int]:
        """Blocks taken since the last call whose old contents somebody could read."""
        taken = [block_id for manager in self.managers for block_id in manager.take_new_block_ids()]
        return taken if self.has_mamba else []

    def zero_again(self, request_id: str, start_token: int) -> None:
        """A load has not written these blocks after all (vLLM: record_blocks_for_zeroing)."""
        for manager in self.managers:
            manager.record_again(request_id, start_token)

    def take_block_copies(self) -> list[tuple[int, int]]:
        """(from, to), each with a reference that ends when the copy has been made."""
        return [copy for manager in self.managers for copy in manager.take_block_copies()]

    def take_boundary_states(self) -> dict[str, list[BoundaryState]]:
        """Mamba states of this step that stand for exactly so many tokens, by request."""
        states: dict[str, list[BoundaryState]] = {}
        for manager in self._aligned_mamba:
            for request_id, state in manager.take_boundary_states():
                states.setdefault(request_id, []).append(state)
        return states

    def take_finished_tails(self, request_id: str, num_computed: int, num_in_flight: int) -> list[BoundaryState]:
        """Of a request that ends: states inside a block that nothing has been computed after."""
        tails = [manager.take_finished_tail(request_id, num_computed, num_in_flight) for manager in self._aligned_mamba]
        return [tail for tail in tails if tail is not None]
