"""The longest prefix that every group holds (vLLM: v1/core/kv_cache_coordinator.py)."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvreplay.kv.managers.base import NO_BLOCKS, CacheRules, JointLookup, KVGroupManager
from kvreplay.kv.managers.mamba import MambaManager
from kvreplay.kv.prefix_cache import BlockIds, Keys
from kvreplay.kv.specs import cdiv

Hit = tuple[BlockIds, ...]
"""A prefix-cache hit: per group, the block of each position; 0 where none is needed."""


class FoundPrefix(NamedTuple):
    """`uncached`: tokens by which some group's hit is longer, so that this prefix is one that requests share."""

    hit: Hit
    num_tokens: int
    uncached: int = 0


class PrefixLookup:
    """All groups' caches together. With one group, its own finding is the answer."""

    def __init__(self, managers: Sequence[KVGroupManager], rules: CacheRules, eagle_groups: frozenset[int]) -> None:
        self.managers = managers
        self.rules = rules
        self.joint = _joint_lookups(managers, eagle_groups)
        for lookup in self.joint:
            if lookup.drops_eagle_block:
                for manager in lookup.managers:
                    manager.drops_eagle_block = True
        self._first_is_full = bool(self.joint) and self.joint[0].first.spec.is_full_attention
        self._nothing: Hit = tuple(NO_BLOCKS for _ in managers)

    @property
    def full_attention_group(self) -> int | None:
        """The group whose hits are prefixes of any other's, if there is one."""
        return self.joint[0].first.group if self._first_is_full else None

    def find(self, keys: Keys, max_length: int) -> FoundPrefix:
        if len(self.managers) == 1:
            lookup = self.joint[0]
            blocks, length = lookup.first.find_longest_cache_hit(
                lookup, keys, max_length, drop_eagle_block=lookup.drops_eagle_block
            )
            return FoundPrefix((blocks[0],), length)
        return self._find_jointly(keys, max_length)

    def _find_jointly(self, keys: Keys, max_length: int) -> FoundPrefix:
        """Each kind accepts a candidate length or shortens it, until all accept.

        An EAGLE group looks one block further and drops it, once for each candidate.
        """
        hit_length = max_length
        longest = 0
        found: list[list[BlockIds] | None] = [None] * len(self.joint)
        lengths = [0] * len(self.joint)
        dropped: set[int] = set()
        one_pass = len(self.joint) == 2 and self._first_is_full
        while True:
            length = hit_length
            for index, lookup in enumerate(self.joint):
                if lookup.first.spec.is_full_attention and found[index] is not None:
                    length = min(length, lengths[index])
                    continue
                drops = lookup.drops_eagle_block and index not in dropped
                found[index], new_length = self._find_one(lookup, keys, length, drops=drops)
                if drops:
                    dropped.add(index)
                elif new_length < length:
                    dropped.clear()
                length = lengths[index] = new_length
                longest = max(longest, length)
            if length >= hit_length:
                break
            hit_length = length
            if one_pass:
                break
        return FoundPrefix(self._cut(found, hit_length), hit_length, longest - hit_length)

    def _find_one(self, lookup: JointLookup, keys: Keys, length: int, *, drops: bool) -> tuple[list[BlockIds], int]:
        manager = lookup.first
        if drops and not isinstance(manager, MambaManager):  # drafters have no Mamba layers: its finder drops nothing
            length = min(length + self._margin(manager), len(keys) * self.rules.hash_block_size)
        return manager.find_longest_cache_hit(lookup, keys, length, drop_eagle_block=drops)

    def _margin(self, manager: KVGroupManager) -> int:
        """What an EAGLE group matches beyond a hit (vLLM: eagle_proof_margin)."""
        is_fine = self.rules.hit_alignment < self.rules.scheduler_block_size and manager.finds_inside_blocks
        if is_fine and manager.block_size > self.rules.hash_block_size:
            return self.rules.hash_block_size
        return manager.block_size

    def _cut(self, found: Sequence[list[BlockIds] | None], hit_length: int) -> Hit:
        hit = list(self._nothing)
        for lookup, tables in zip(self.joint, found, strict=True):
            for manager, blocks in zip(lookup.managers, tables or (), strict=True):
                if manager.spec.is_full_attention:
                    blocks = blocks[: cdiv(hit_length, manager.block_size)]
                hit[manager.group] = blocks
        return tuple(hit)

    def find_per_group(self, keys: Keys, max_length: int) -> tuple[Hit, list[int]]:
        """What each group would find by itself, and its length (of a group that is never cached: 0)."""
        hit = list(self._nothing)
        lengths = [0] * len(self.managers)
        for lookup in self.joint:
            tables, length = self._find_one(lookup, keys, max_length, drops=lookup.drops_eagle_block)
            for manager, blocks in zip(lookup.managers, tables, strict=True):
                hit[manager.group] = blocks
                lengths[manager.group] = length
        return tuple(hit), lengths


def _joint_lookups(managers: Sequence[KVGroupManager], eagle_groups: frozenset[int]) -> list[JointLookup]:
    """Cacheable groups by spec, those of full attention first: their hits bound the others'."""
    by_identity: dict[tuple[object, ...], list[KVGroupManager]] = {}
    for manager in managers:
        if manager.spec.prefix_cacheable:
            by_identity.setdefault(manager.spec.lookup_identity, []).append(manager)
    lookups = [
        JointLookup(group, drops_eagle_block=any(manager.group in eagle_groups for manager in group))
        for group in by_identity.values()
    ]
    return sorted(lookups, key=lambda lookup: not lookup.first.spec.is_full_attention)


def truncated(hit: Hit, managers: Sequence[KVGroupManager], num_tokens: int) -> Hit:
    """The hit cut at a block boundary; a Mamba group may end before it (vLLM: truncate_computed_blocks)."""
    return tuple(
        blocks[: num_tokens // manager.block_size] if len(blocks) else blocks
        for blocks, manager in zip(hit, managers, strict=True)
    )


def no_hit(num_groups: int) -> Hit:
    return tuple(np.empty(0, np.int64) for _ in range(num_groups))
