"""The prefix cache of a block pool: which block holds which key (vLLM: v1/core/block_pool.py, BlockHashToBlockMap).

A key is a dense id for (prefix, group). Several blocks may hold one key; the first inserted that is still there is
the one that a lookup returns. A block may hold several keys, where hits may end inside blocks: the prefix that its
`keys` entry stands for, and shorter ones that end in it.
"""

from collections.abc import Callable, Iterable

import numpy as np
from numpy import count_nonzero  # on truth values and integers several times as fast as `any` and `all`
from numpy.typing import NDArray

from kvreplay.errors import EngineFatal
from kvreplay.ids import NULL_BLOCK_ID
from kvreplay.kv.allocation import lazy_zeros
from kvreplay.kv.group_keys import group_of

BlockIds = NDArray[np.int64]
"""What numpy indexes with: any narrower type is converted at every use."""
Keys = NDArray[np.int64]

NO_KEY = -1
NO_BLOCKS: BlockIds = np.empty(0, np.int64)
_FIRST_LOOK = 64
"""Keys: so many are looked up at once, then twice as many, and so on."""
_INSERTS_PER_SWEEP = 4
"""Per block of the pool: after so many, the memory of keys that are gone is given back."""


class PrefixCache:
    """Of `num_blocks` blocks, the null block among them; `num_keys` is a first size, it grows as keys come."""

    num_groups = 1
    """Whose keys they are; more than one are counted apart."""

    def __init__(self, num_blocks: int, num_keys: int = 0) -> None:
        self.num_blocks = num_blocks
        self.num_cached_keys = 0
        self.num_evicted = 0
        """Blocks that lost their hash to reuse."""
        self._evicted_of: list[int] = []
        """The same by group, where there are several."""
        self._has_lost = False
        """Some block lost its hash for another reason."""
        self.num_dropped = 0
        """Blocks that lost it in spite of those who hold them (`evict_blocks`)."""
        self.num_inserted = 0
        """Blocks that ever got a hash."""
        self.on_evict: Callable[[BlockIds], None] | None = None
        """Told which blocks lost their hash to reuse, in order; for those who must know each."""

        self.keys = np.full(num_blocks, NO_KEY, np.int64)
        self._has_twin = np.zeros(num_blocks, np.bool_)
        self._twins: dict[int, list[int]] = {}
        """Keys that several blocks hold → those blocks, in order of insertion."""
        self._more_keys: dict[int, list[int]] = {}
        """Blocks that hold several keys → all but the one in `keys`."""
        self.key_tokens = np.zeros(num_blocks, np.int64)
        """Length of the prefix that a block's key stands for, where `cache` was told."""
        self._first = lazy_zeros(num_keys)
        """Key → the block a lookup returns, 0 for none."""
        self._lost = lazy_zeros(num_keys, np.dtype(np.uint8))
        """Key → 1 if a block with it has ever lost its hash, though its content was right and whole."""
        self._sweep_at = _INSERTS_PER_SWEEP * num_blocks
        self._key_view = self.keys.data
        self._first_view = self._first.data
        self._lost_view = self._lost.data

    def count_groups(self, num_groups: int) -> None:
        """Keys are those of so many groups (`group_keys`)."""
        self.num_groups = num_groups
        self._evicted_of = [0] * num_groups if num_groups > 1 else []

    # -- looking ----------------------------------------------------------------------------------------------

    def find_prefix(self, keys: Keys) -> BlockIds:
        """Blocks of the longest cached prefix of `keys`."""
        found: list[BlockIds] = []
        # Most lookups find the little that all prompts begin with: memory of keys that nobody has cached is cold.
        start, length = 0, _FIRST_LOOK
        while start < len(keys) and self._holds(keys[start]):
            blocks = self.find(keys[start : start + length])
            num_hits = int(count_nonzero(blocks))
            if num_hits < len(blocks):
                found.append(blocks[: int((blocks == 0).argmax())])
                break
            found.append(blocks)
            start += length
            length *= 2
        if len(found) == 1:
            return found[0]
        return np.concatenate(found) if found else NO_BLOCKS

    def _holds(self, key: int) -> bool:
        return key < len(self._first) and self._first_view[key] != 0

    def find(self, keys: Keys) -> BlockIds:
        """The block of each key, 0 where there is none."""
        try:
            return self._first.take(keys).astype(np.int64)
        except IndexError:  # keys that nobody has cached anything under yet
            self._reach(int(keys.max()))
            return self._first.take(keys).astype(np.int64)

    def find_former(self, keys: Keys) -> BlockIds:
        """As `find`, if no block had ever lost its hash: not 0 for each key that there is or was."""
        return self.find(keys) | self._lost.take(keys)

    @property
    def has_lost(self) -> bool:
        """Whether any block has lost its hash."""
        return self.num_evicted > 0 or self._has_lost

    def has_lost_any(self, keys: Keys) -> bool:
        try:
            lost = self._lost.take(keys)
        except IndexError:  # some have never been cached
            lost = self._lost[keys[keys < len(self._lost)]]
        return bool(count_nonzero(lost))

    def was_lost(self, key: int) -> bool:
        return key < len(self._lost) and bool(self._lost_view[key])

    def is_or_was_cached(self, key: int) -> bool:
        return self._holds(key) or self.was_lost(key)

    @property
    def evicted_by_group(self) -> list[int]:
        """`num_evicted`, by group."""
        return self._evicted_of if self.num_groups > 1 else [self.num_evicted]

    def count_by_group(self, block_ids: BlockIds) -> list[int]:
        """How many of these blocks, which have a hash, are each group's."""
        keys = self.keys[block_ids]
        counts = np.bincount(group_of(keys[keys != NO_KEY], self.num_groups), minlength=self.num_groups)
        return [int(count) for count in counts]

    def is_cached(self, block_ids: BlockIds) -> NDArray[np.bool_]:
        cached: NDArray[np.bool_] = self.keys[block_ids] != NO_KEY
        return cached

    # -- entering ---------------------------------------------------------------------------------------------

    def cache(self, block_ids: BlockIds, keys: Keys, num_tokens: NDArray[np.int64] | None = None) -> None:
        """Enter blocks under their keys, in order; `num_tokens`: what each key covers.

        None is null. A block that has a key already is full now, and gives up those that stood for less of it.
        """
        if num_tokens is not None:
            partial = block_ids[self.keys[block_ids] != NO_KEY]
            if len(partial):
                self._forget(partial)
            self.key_tokens[block_ids] = num_tokens
        self.num_inserted += len(keys)
        if self.num_inserted >= self._sweep_at:
            self._sweep()
        self.keys[block_ids] = keys
        taken: NDArray[np.integer]
        try:
            taken = self._first.take(keys)
        except IndexError:
            taken = self.find(keys)
        if count_nonzero(taken):
            is_taken = taken != 0
            for key, block_id, first in zip(
                keys[is_taken].tolist(), block_ids[is_taken].tolist(), taken[is_taken].tolist(), strict=True
            ):
                self._add_twin(key, block_id, first)
            keys, block_ids = keys[~is_taken], block_ids[~is_taken]
        self._first[keys] = block_ids.astype(np.int32)  # which numpy would do in small pieces
        self.num_cached_keys += len(keys)

    def cache_one(self, block_id: int, key: int) -> None:
        if key >= len(self._first):
            self._reach(key)
        self.num_inserted += 1
        self._key_view[block_id] = key
        self._lead_to(block_id, key)

    def cache_partial(self, block_id: int, key: int, num_tokens: int) -> None:
        """Make a block reachable from a prefix that ends inside it (vLLM: cache_partial_block)."""
        if self.holds(block_id, key):
            return
        if self.keys[block_id] != NO_KEY and self.key_tokens[block_id] < num_tokens:
            self._forget(np.array([block_id], np.int64))
        self._insert(block_id, key, num_tokens)

    def move_keys(self, source: int, target: int) -> None:
        """The cache finds `target`, a copy, from now on: whoever owns `source` writes on in it."""
        assert self.keys[target] == NO_KEY, target
        num_tokens = int(self.key_tokens[source])
        keys = [int(self.keys[source]), *self._more_keys.get(source, ())]
        self._forget(np.array([source], np.int64))
        for key in keys:
            self._insert(target, key, num_tokens)

    def keys_of(self, block_id: int) -> list[int]:
        """All keys that it holds, the one for the longest prefix first."""
        key = int(self.keys[block_id])
        return [] if key == NO_KEY else [key, *self._more_keys.get(block_id, ())]

    def cache_copies(self, block_ids: BlockIds, source: "PrefixCache", originals: BlockIds) -> None:
        """These blocks, which have no keys, hold what those of another pool hold: they are found under the same."""
        keys, num_tokens = source.keys[originals], source.key_tokens[originals]
        if not source._more_keys and len(np.unique(keys)) == len(keys):
            self.cache(block_ids, keys, num_tokens)
            return
        for block_id, original, covered in zip(
            block_ids.tolist(), originals.tolist(), num_tokens.tolist(), strict=True
        ):
            for key in source.keys_of(original):
                self._insert(block_id, key, covered)

    def _lead_to(self, block_id: int, key: int) -> None:
        """A lookup of the key returns the block, if it has no other before."""
        first = self._first_view[key]
        if first:
            self._add_twin(key, block_id, first)
        else:
            self._first_view[key] = block_id
            self.num_cached_keys += 1

    def holds(self, block_id: int, key: int) -> bool:
        """Whether the block can be found under this key, or could if it were the first."""
        return self.keys[block_id] == key or key in self._more_keys.get(block_id, ())

    def _insert(self, block_id: int, key: int, num_tokens: int) -> None:
        self._reach(key)
        self.num_inserted += 1
        if self.keys[block_id] == NO_KEY:
            self.keys[block_id] = key
            self.key_tokens[block_id] = num_tokens
        else:
            self._more_keys.setdefault(block_id, []).append(key)
        self._lead_to(block_id, key)

    # -- forgetting -------------------------------------------------------------------------------------------

    def evict_blocks(self, block_ids: Iterable[int]) -> list[int]:
        """Drop these blocks' hashes, whoever holds them; their place in the queue stays. Returns those that had one."""
        evicted = []
        for block_id in block_ids:
            if block_id >= self.num_blocks:
                raise EngineFatal("AssertionError", f"Invalid block_id {block_id}")
            if block_id != NULL_BLOCK_ID and self.keys[block_id] != NO_KEY:
                self._has_lost = True
                self.num_dropped += 1
                self._lost[self.keys_of(block_id)] = 1
                self._forget(np.array([block_id], np.int64))
                evicted.append(block_id)
        return evicted

    def _forget_all(self) -> None:
        self._has_lost = True
        self._lost[self.keys[self.keys != NO_KEY]] = 1
        self._note_more_lost(self._more_keys)
        self.keys[:] = NO_KEY
        self._replace_first(lazy_zeros(len(self._first)))
        self._twins.clear()
        self._more_keys.clear()
        self._has_twin[:] = False
        self.num_cached_keys = 0

    def _evict_reused(self, block_ids: BlockIds) -> None:
        keys = self.keys[block_ids]
        is_cached = keys != NO_KEY
        num_cached = int(count_nonzero(is_cached))
        if num_cached:
            cached = block_ids
            if num_cached < len(block_ids):
                cached, keys = block_ids[is_cached], keys[is_cached]
            self.num_evicted += num_cached
            self._lost[keys] = 1
            if self._more_keys:
                self._note_more_lost(cached.tolist())
            if self._evicted_of:
                for group, count in enumerate(np.bincount(group_of(keys, self.num_groups)).tolist()):
                    self._evicted_of[group] += count
            self._forget_keys(cached, keys)
            if self.on_evict is not None:
                self.on_evict(cached)

    def _note_more_lost(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            if block_id in self._more_keys:
                self._lost[self._more_keys[block_id]] = 1

    def _evict_reused_one(self, block_id: int, key: int) -> None:
        self.num_evicted += 1
        self._lost_view[key] = 1
        if self._evicted_of:
            self._evicted_of[group_of(key, self.num_groups)] += 1
        self._key_view[block_id] = NO_KEY
        if self._twins and self._has_twin[block_id]:
            self._remove_twin(key, block_id)
        else:
            self._first_view[key] = 0
            self.num_cached_keys -= 1
        if self._more_keys:
            self._note_more_lost([block_id])
            self._forget_more([block_id])
        if self.on_evict is not None:
            self.on_evict(np.array([block_id], np.int64))

    def _forget(self, block_ids: BlockIds) -> None:
        self._forget_keys(block_ids, self.keys[block_ids])

    def _forget_keys(self, block_ids: BlockIds, keys: Keys) -> None:
        self.keys[block_ids] = NO_KEY
        if self._twins:
            twin = self._has_twin[block_ids]
            if count_nonzero(twin):
                for key, block_id in zip(keys[twin].tolist(), block_ids[twin].tolist(), strict=True):
                    self._remove_twin(key, block_id)
                keys = keys[~twin]
        self._first[keys] = 0
        self.num_cached_keys -= len(keys)
        if self._more_keys:
            self._forget_more(block_ids.tolist())

    def _forget_more(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            for key in self._more_keys.pop(block_id, ()):
                self._remove_twin(key, block_id)

    def _add_twin(self, key: int, block_id: int, first: int) -> None:
        twins = self._twins.setdefault(key, [first])
        twins.append(block_id)
        self._has_twin[first] = self._has_twin[block_id] = True

    def _remove_twin(self, key: int, block_id: int) -> None:
        self._has_twin[block_id] = False
        twins = self._twins.get(key)
        if twins is None:  # its last twin went earlier in the same sweep, or it never had one under this key
            self._first[key] = 0
            self.num_cached_keys -= 1
            return
        twins.remove(block_id)
        self._first[key] = twins[0]
        if len(twins) == 1:
            del self._twins[key]
            if twins[0] not in self._more_keys:  # it may have another under another key
                self._has_twin[twins[0]] = False
            # The survivor may come later in the same sweep, which read `_has_twin` before: see above.

    def _reach(self, key: int) -> None:
        if key >= len(self._first):
            grown = lazy_zeros(max(key + 1, 2 * len(self._first)))
            grown[: len(self._first)] = self._first
            self._replace_first(grown)
            lost = lazy_zeros(len(grown), np.dtype(np.uint8))
            lost[: len(self._lost)] = self._lost
            self._lost = lost
            self._lost_view = lost.data

    def _sweep(self) -> None:
        """Move what is left of the keys to fresh memory: most of those that ever came are gone."""
        self._sweep_at = self.num_inserted + _INSERTS_PER_SWEEP * self.num_blocks
        fresh = lazy_zeros(len(self._first))
        keys = self.keys[self.keys != NO_KEY]
        fresh[keys] = self._first[keys]
        for more in self._more_keys.values():
            fresh[more] = self._first[more]
        self._replace_first(fresh)

    def _replace_first(self, first: NDArray[np.int32]) -> None:
        self._first = first
        self._first_view = first.data
