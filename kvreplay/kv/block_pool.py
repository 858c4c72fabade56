"""The block pool: references, the free queue and the prefix cache (vLLM: v1/core/block_pool.py).

One numpy array per attribute of a block instead of an object per block. The free queue is a log: `_queue[head:tail]`
holds free block ids in order of reuse, 0 marks a hole (the null block is never free), and `_place[block]` is a
block's index in it. Taking a block out of the middle writes a hole; freeing writes before the head or behind the
tail; when either end is hit the log is moved back to the middle.

A key is a dense id for (prefix, group). Several blocks may hold one key; the first inserted that is still there is
the one that a lookup returns. A block may hold several keys, where hits may end inside blocks: the prefix that its
`keys` entry stands for, and shorter ones that end in it.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache

import numpy as np
from numpy import count_nonzero  # on truth values and integers several times as fast as `any` and `all`
from numpy.typing import NDArray

from kvreplay.errors import EngineFatal
from kvreplay.ids import NULL_BLOCK_ID
from kvreplay.kv.allocation import lazy_zeros

BlockIds = NDArray[np.int64]
"""What numpy indexes with: any narrower type is converted at every use."""
Keys = NDArray[np.int64]

NO_KEY = -1
_LOG_FACTOR = 6
_INSERTS_PER_SWEEP = 4
"""Per block of the pool: after so many, the memory of keys that are gone is given back."""
_NO_BLOCKS: BlockIds = np.empty(0, np.int64)


class BlockPool:
    """`num_blocks` includes block 0, the null block; `num_keys` is a first size, it grows as keys come."""

    def __init__(self, num_blocks: int, num_keys: int = 0, *, enable_caching: bool = True) -> None:
        assert num_blocks > 1, num_blocks
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self.num_free = num_blocks - 1
        self.num_cached_keys = 0
        self.num_evicted = 0
        self.num_inserted = 0
        """Blocks that ever got a hash."""
        self.on_evict: Callable[[BlockIds], None] | None = None
        """Told which blocks lost their hash to reuse, in order; for those who must know each."""

        self.ref_counts = np.zeros(num_blocks, np.int32)
        """By block; the null block's is not maintained and stays at 1, so that it never looks free."""
        self.ref_counts[NULL_BLOCK_ID] = 1
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
        self._sweep_at = _INSERTS_PER_SWEEP * num_blocks

        self._queue = np.zeros(_LOG_FACTOR * num_blocks, np.int32)
        self._place = np.zeros(num_blocks, np.int64)
        self._head = 2 * num_blocks
        self._tail = self._head + self.num_free
        self._queue[self._head : self._tail] = np.arange(1, num_blocks)
        self._place[1:] = np.arange(self._head, self._tail)
        self._clean_until = self._tail
        """The log from its head to here has blocks without a hash only. Nobody takes one out of the middle: there are
        no holes, and nobody asks for their places."""

        self._numbers = _numbers(len(self._queue))
        self._ref_view = self.ref_counts.data
        self._key_view = self.keys.data
        self._queue_view = self._queue.data
        self._first_view = self._first.data
        self._place_view = self._place.data

    # -- looking ----------------------------------------------------------------------------------------------

    @property
    def usage(self) -> float:
        """Share of usable blocks in use; cached free blocks count as free."""
        return 1.0 - self.num_free / (self.num_blocks - 1)

    def free_queue(self) -> BlockIds:
        """Free blocks in order of reuse."""
        log = self._queue[self._head : self._tail]
        free: BlockIds = log[log != 0].astype(np.int64)
        return free

    def find_prefix(self, keys: Keys) -> BlockIds:
        """Blocks of the longest cached prefix of `keys`."""
        if not len(keys):
            return _NO_BLOCKS
        first = keys[0]
        # Most lookups find nothing, and who misses the first block misses all.
        if first >= len(self._first) or not self._first_view[first]:
            return _NO_BLOCKS
        blocks = self.find(keys)
        first_miss = int((blocks == 0).argmax())
        return blocks[:first_miss] if first_miss else blocks

    def find(self, keys: Keys) -> BlockIds:
        """The block of each key, 0 where there is none."""
        try:
            return self._first.take(keys).astype(np.int64)
        except IndexError:  # keys that nobody has cached anything under yet
            self._reach(int(keys.max()))
            return self._first.take(keys).astype(np.int64)

    def num_evictable(self, block_ids: BlockIds) -> int:
        """How many of these would have to leave the free queue if they were touched. Null blocks do not count."""
        return len(block_ids) - int(count_nonzero(self.ref_counts[block_ids]))

    def membership(self, block_ids: BlockIds) -> NDArray[np.bool_]:
        """By block: whether it is one of these. Ids that no block has are ignored."""
        is_member = np.zeros(self.num_blocks, np.bool_)
        is_member[block_ids[(block_ids >= 0) & (block_ids < self.num_blocks)]] = True
        return is_member

    def is_cached(self, block_ids: BlockIds) -> NDArray[np.bool_]:
        cached: NDArray[np.bool_] = self.keys[block_ids] != NO_KEY
        return cached

    # -- taking -----------------------------------------------------------------------------------------------

    def get_new_blocks(self, count: int) -> BlockIds:
        """Take `count` blocks from the head of the free queue; whatever they cached is evicted.

        The real pool raises ValueError when it runs short, which kills the engine.
        """
        if count > self.num_free:
            raise EngineFatal("ValueError", f"Cannot get {count} free blocks from the pool")
        if count == 0:
            return _NO_BLOCKS
        head = self._head
        if head + count <= self._clean_until:
            self._head = head + count
            self.num_free -= count
            block_ids = self._queue[head : head + count].astype(np.int64)
        else:
            block_ids = self._pop(count)
            if self.enable_caching:
                self._evict_reused(block_ids)
        self.ref_counts[block_ids] = 1
        return block_ids

    def take_one(self) -> int:
        """`get_new_blocks(1)` for the caller who needs just one: no arrays are built."""
        assert self.num_free > 0
        queue = self._queue_view
        head = self._head
        block_id = queue[head]
        while not block_id:
            head += 1
            block_id = queue[head]
        self._head = head + 1
        self.num_free -= 1
        key = self._key_view[block_id]
        if key != NO_KEY:
            self._evict_reused_one(block_id, key)
        self._ref_view[block_id] = 1
        return block_id

    def take_column(self, view: memoryview, place: int, stride: int, count: int) -> None:
        """`take_one` for each of `count` places of `view`, from `place` on: one block in each group of a table."""
        assert self.num_free >= count
        queue, keys, references, head = self._queue_view, self._key_view, self._ref_view, self._head
        for at in range(place, place + stride * count, stride):
            block_id = queue[head]
            while not block_id:
                head += 1
                block_id = queue[head]
            head += 1
            key = keys[block_id]
            if key != NO_KEY:
                self._evict_reused_one(block_id, key)
            references[block_id] = 1
            view[at] = block_id
        self._head = head
        self.num_free -= count

    def touch(self, block_ids: BlockIds) -> None:
        """One more reference for each; free ones leave the free queue. No null blocks."""
        free = block_ids[self.ref_counts[block_ids] == 0]
        if len(free):
            self._queue[self._place[free]] = 0
            self.num_free -= len(free)
        self.ref_counts[block_ids] += 1

    def _pop(self, count: int) -> BlockIds:
        head = self._head
        window = count
        while True:
            places = self._queue[head : head + window].nonzero()[0]
            if len(places) >= count:
                break
            window = min(window * 2, window + 4096)
        block_ids = self._queue[head : head + window][places[:count]].astype(np.int64)
        self._head = head + int(places[count - 1]) + 1
        self.num_free -= count
        return block_ids

    # -- giving back ------------------------------------------------------------------------------------------

    def free_blocks(self, ordered: BlockIds) -> None:
        """Drop one reference from each, in this order; null blocks are ignored.

        Blocks without a hash go to the head of the queue (reused first), cached ones to the tail.
        """
        if not len(ordered):
            return
        counts = self.ref_counts[ordered]
        counts -= 1
        if count_nonzero(ordered) != len(ordered):
            is_real = ordered != NULL_BLOCK_ID
            ordered, counts = ordered[is_real], counts[is_real]
        self.ref_counts[ordered] = counts
        freed = ordered
        if count_nonzero(counts):
            assert np.minimum.reduce(counts) >= 0, "block freed twice"
            freed = ordered[counts == 0]
        if not len(freed):
            return
        if self._tail + len(freed) > len(self._queue) or self._head < len(freed):
            self._recentre()
        self.num_free += len(freed)
        if not self.enable_caching:
            self._put_first(freed)
            return
        uncached = self.keys[freed] == NO_KEY
        num_uncached = count_nonzero(uncached)
        if not num_uncached:
            self._put_last(freed)
        elif num_uncached == len(freed):
            self._put_first(freed)
        elif uncached[0] and num_uncached == 1:  # a request's last block, which is not full
            self._put_first(freed[:1])
            self._put_last(freed[1:])
        else:
            self._put_first(freed[uncached])
            self._put_last(freed[~uncached])

    def free_one(self, block_id: int) -> None:
        """`free_blocks` for the caller who has just one, not the null block."""
        count = self._ref_view[block_id] - 1
        assert count >= 0, "block freed twice"
        self._ref_view[block_id] = count
        if count:
            return
        if self._head == 0 or self._tail == len(self._queue):
            self._recentre()
        if self.enable_caching and self._key_view[block_id] != NO_KEY:
            place = self._tail
            self._tail += 1
        else:
            place = self._head = self._head - 1
            if self._clean_until <= place:
                self._clean_until = place + 1
        self.num_free += 1
        self._queue_view[place] = block_id
        self._place_view[block_id] = place

    def free_column(self, view: memoryview, place: int, stride: int, count: int) -> None:
        """`free_one` for the blocks at `count` places of `view`, from `place` on, which are null then; those that are
        null already are left alone."""
        if self._head < count or self._tail + count > len(self._queue):
            self._recentre()
        references, keys, queue, places = self._ref_view, self._key_view, self._queue_view, self._place_view
        for at in range(place, place + stride * count, stride):
            block_id = view[at]
            if not block_id:
                continue
            view[at] = NULL_BLOCK_ID
            references[block_id] -= 1
            if references[block_id]:
                assert references[block_id] > 0, "block freed twice"
                continue
            self.num_free += 1
            if keys[block_id] != NO_KEY:
                end = self._tail
                self._tail = end + 1
                places[block_id] = end
            else:
                end = self._head = self._head - 1
                if self._clean_until <= end:
                    self._clean_until = end + 1
            queue[end] = block_id

    def free_in_turns(self, groups: Sequence[BlockIds], *, are_clean: bool = False) -> None:
        """`free_blocks` for one list after the other. No block stands twice, and none is null.

        `are_clean`: none ever had a hash, so that it has one owner.
        """
        ordered = np.concatenate(groups)
        if not len(ordered):
            return
        counts = self.ref_counts[ordered]
        counts -= 1
        self.ref_counts[ordered] = counts
        if are_clean:
            assert not count_nonzero(counts), "block freed twice"
            if self._head < len(ordered):
                self._recentre()
            self.num_free += len(ordered)
            self._put_first(np.concatenate(groups[::-1]))
            return
        if self._tail + len(ordered) > len(self._queue) or self._head < len(ordered):
            self._recentre()
        uncached = self.keys[ordered] == NO_KEY if self.enable_caching else np.ones(len(ordered), np.bool_)
        num_uncached = int(count_nonzero(uncached))
        if count_nonzero(counts):
            assert counts.min() >= 0, "block freed twice"
            is_free = counts == 0
            uncached &= is_free
            last = ordered[is_free & ~uncached]
            num_uncached = int(count_nonzero(uncached))
        elif num_uncached < len(ordered):
            last = ordered[~uncached] if num_uncached else ordered
        else:
            last = _NO_BLOCKS
        self.num_free += num_uncached + len(last)
        if num_uncached == len(ordered):
            # Each list goes before those that were given back earlier.
            self._put_first(np.concatenate(groups[::-1]))
        elif num_uncached:
            parts: list[BlockIds] = []
            start = 0
            for blocks in groups:
                chosen = uncached[start : start + len(blocks)]
                start += len(blocks)
                if count_nonzero(chosen):
                    parts.append(blocks[chosen])
            self._put_first(np.concatenate(parts[::-1]))
        if len(last):
            self._put_last(last)

    def free_each(self, ordered: Sequence[int]) -> None:
        """`free_blocks` for a list in which a block may stand several times."""
        for block_id in ordered:
            if block_id != NULL_BLOCK_ID:
                self.ref_counts[block_id] -= 1
        # A block is free from its last place in the list on: give that one back, with the reference it had there.
        last = list(reversed(dict.fromkeys(reversed(ordered))))
        done = np.array([block_id for block_id in last if block_id and not self.ref_counts[block_id]], np.int64)
        self.ref_counts[done] += 1
        self.free_blocks(done)

    def _put_first(self, block_ids: BlockIds) -> None:
        end = self._head
        start = self._head = end - len(block_ids)
        self._queue[start:end] = block_ids
        if self._clean_until < end:
            self._clean_until = end

    def _put_last(self, block_ids: BlockIds) -> None:
        start = self._tail
        end = self._tail = start + len(block_ids)
        self._queue[start:end] = block_ids
        self._place[block_ids] = self._numbers[start:end]

    def _recentre(self) -> None:
        live = self.free_queue()
        assert len(live) == self.num_free
        num_clean = max(self._clean_until - self._head, 0)
        self._queue[:] = 0
        self._head = 2 * self.num_blocks
        self._tail = self._head + len(live)
        self._queue[self._head : self._tail] = live
        self._place[live] = np.arange(self._head, self._tail)
        self._clean_until = self._head + num_clean

    # -- the prefix cache -------------------------------------------------------------------------------------

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
        first = self._first_view[key]
        if first:
            self._add_twin(key, block_id, first)
        else:
            self._first_view[key] = block_id
            self.num_cached_keys += 1

    def cache_and_take_one(self, block_id: int, key: int) -> int:
        """`cache_one`, then `take_one`: what a decoding request does when its last block is full."""
        if key < len(self._first) and not self._first_view[key]:
            self.num_inserted += 1
            self._key_view[block_id] = key
            self._first_view[key] = block_id
            self.num_cached_keys += 1
        else:
            self.cache_one(block_id, key)
        # As in `take_one`, which a call more for every block of every output would be felt to call.
        assert self.num_free > 0
        queue, head = self._queue_view, self._head
        block_id = queue[head]
        while not block_id:
            head += 1
            block_id = queue[head]
        self._head = head + 1
        self.num_free -= 1
        key = self._key_view[block_id]
        if key != NO_KEY:
            self._evict_reused_one(block_id, key)
        self._ref_view[block_id] = 1
        return block_id

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

    def cache_copies(self, block_ids: BlockIds, source: "BlockPool", originals: BlockIds) -> None:
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
        first = self._first_view[key]
        if first:
            self._add_twin(key, block_id, first)
        else:
            self._first_view[key] = block_id
            self.num_cached_keys += 1

    def evict_blocks(self, block_ids: Iterable[int]) -> list[int]:
        """Drop these blocks' hashes, whoever holds them; their place in the queue stays. Returns those that had one."""
        evicted = []
        for block_id in block_ids:
            if block_id >= self.num_blocks:
                raise EngineFatal("AssertionError", f"Invalid block_id {block_id}")
            if block_id != NULL_BLOCK_ID and self.keys[block_id] != NO_KEY:
                self._forget(np.array([block_id], np.int64))
                evicted.append(block_id)
        return evicted

    def reset(self) -> bool:
        """Empty the prefix cache; only possible while nothing but the null block is in use."""
        if self.num_free != self.num_blocks - 1:
            return False
        self.keys[:] = NO_KEY
        self._replace_first(lazy_zeros(len(self._first)))
        self._twins.clear()
        self._more_keys.clear()
        self._has_twin[:] = False
        self.num_cached_keys = 0
        return True

    def _evict_reused(self, block_ids: BlockIds) -> None:
        keys = self.keys[block_ids]
        is_cached = keys != NO_KEY
        num_cached = int(count_nonzero(is_cached))
        if num_cached:
            cached = block_ids
            if num_cached < len(block_ids):
                cached, keys = block_ids[is_cached], keys[is_cached]
            self.num_evicted += num_cached
            self._forget_keys(cached, keys)
            if self.on_evict is not None:
                self.on_evict(cached)

    def _evict_reused_one(self, block_id: int, key: int) -> None:
        self.num_evicted += 1
        self._key_view[block_id] = NO_KEY
        if self._twins and self._has_twin[block_id]:
            self._remove_twin(key, block_id)
        else:
            self._first_view[key] = 0
            self.num_cached_keys -= 1
        if self._more_keys:
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


@cache
def _numbers(count: int) -> NDArray[np.int64]:
    """0, 1, 2, ...: places in a log, to be copied from."""
    return np.arange(count, dtype=np.int64)
