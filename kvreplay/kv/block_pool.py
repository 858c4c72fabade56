"""The block pool: references and the free queue, over the prefix cache (vLLM: v1/core/block_pool.py).

One numpy array per attribute of a block instead of an object per block. The free queue is a log: `_queue[head:tail]`
holds free block ids in order of reuse, 0 marks a hole (the null block is never free), and `_place[block]` is a
block's index in it. Taking a block out of the middle writes a hole; freeing writes before the head or behind the
tail; when either end is hit the log is moved back to the middle.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy import count_nonzero  # on truth values and integers several times as fast as `any` and `all`
from numpy.typing import NDArray

from kvreplay.errors import EngineFatal
from kvreplay.ids import NULL_BLOCK_ID
from kvreplay.kv.prefix_cache import NO_BLOCKS, NO_KEY, BlockIds, PrefixCache

_LOG_FACTOR = 6


class BlockPool(PrefixCache):
    """`num_blocks` includes block 0, the null block; `num_keys` is a first size, it grows as keys come."""

    def __init__(self, num_blocks: int, num_keys: int = 0, *, enable_caching: bool = True) -> None:
        assert num_blocks > 1, num_blocks
        super().__init__(num_blocks, num_keys)
        self.enable_caching = enable_caching
        self.num_free = num_blocks - 1
        self.ref_counts = np.zeros(num_blocks, np.int32)
        """By block; the null block's is not maintained and stays at 1, so that it never looks free."""
        self.ref_counts[NULL_BLOCK_ID] = 1
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
        self._queue_view = self._queue.data
        self._place_view = self._place.data

    # -- looking ----------------------------------------------------------------------------------------------

    def free_queue(self) -> BlockIds:
        """Free blocks in order of reuse."""
        log = self._queue[self._head : self._tail]
        free: BlockIds = log[log != 0].astype(np.int64)
        return free

    def free_after(self, block_id: int | None, count: int) -> BlockIds:
        """At most `count` free blocks in order of reuse: those behind this one, which is free; None: the first ones."""
        start = self._head if block_id is None else self._place_of(block_id) + 1
        window = count
        while True:
            log = self._queue[start : min(start + window, self._tail)]
            found = log[log != 0]
            if len(found) >= count or start + window >= self._tail:
                behind: BlockIds = found[:count].astype(np.int64)
                return behind
            window *= 2

    def _place_of(self, block_id: int) -> int:
        place = int(self._place[block_id])
        if self._head <= place < self._tail and self._queue[place] == block_id:
            return place
        # One of those whose places are not noted.
        clean = self._queue[self._head : self._clean_until]
        return self._head + int((clean == block_id).nonzero()[0][0])

    def num_evictable(self, block_ids: BlockIds) -> int:
        """How many of these would have to leave the free queue if they were touched. Null blocks do not count."""
        return len(block_ids) - int(count_nonzero(self.ref_counts[block_ids]))

    def membership(self, block_ids: BlockIds) -> NDArray[np.bool_]:
        """By block: whether it is one of these. Ids that no block has are ignored."""
        is_member = np.zeros(self.num_blocks, np.bool_)
        is_member[block_ids[(block_ids >= 0) & (block_ids < self.num_blocks)]] = True
        return is_member

    # -- taking -----------------------------------------------------------------------------------------------

    def get_new_blocks(self, count: int) -> BlockIds:
        """Take `count` blocks from the head of the free queue; whatever they cached is evicted.

        The real pool raises ValueError when it runs short, which kills the engine.
        """
        if count > self.num_free:
            raise EngineFatal("ValueError", f"Cannot get {count} free blocks from the pool")
        if count == 0:
            return NO_BLOCKS
        is_clean = self._head + count <= self._clean_until
        block_ids = self._pop(count)
        if self.enable_caching and not is_clean:
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
        front = self._queue[head : head + count]
        if count_nonzero(front) == count:
            self._head = head + count
            self.num_free -= count
            return front.astype(np.int64)
        window = 2 * count
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

    def free_blocks(self, ordered: BlockIds, num_unhashed: int | None = None) -> None:
        """Drop one reference from each, in this order; null blocks are ignored.

        Blocks without a hash go to the head of the queue (reused first), cached ones to the tail. `num_unhashed`, where
        the caller knows: none is null, so many of the first have no hash, and all others have one.
        """
        if not len(ordered):
            return
        counts = self.ref_counts[ordered]
        counts -= 1
        if num_unhashed is None and count_nonzero(ordered) != len(ordered):
            is_real = ordered != NULL_BLOCK_ID
            ordered, counts = ordered[is_real], counts[is_real]
        self.ref_counts[ordered] = counts
        freed = ordered
        if count_nonzero(counts):
            assert np.minimum.reduce(counts) >= 0, "block freed twice"
            freed = ordered[counts == 0]
            if num_unhashed:  # a copy under way may hold some
                num_unhashed -= int(count_nonzero(counts[:num_unhashed]))
        if not len(freed):
            return
        if self._tail + len(freed) > len(self._queue) or self._head < len(freed):
            self._recentre()
        self.num_free += len(freed)
        if not self.enable_caching:
            self._put_first(freed)
            return
        if num_unhashed is not None:
            if num_unhashed:
                self._put_first(freed[:num_unhashed])
                freed = freed[num_unhashed:]
            if len(freed):
                self._put_last(freed)
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
        if are_clean:
            self._free_clean(groups)
            return
        ordered = np.concatenate(groups)
        if not len(ordered):
            return
        counts = self.ref_counts[ordered]
        counts -= 1
        self.ref_counts[ordered] = counts
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
            last = NO_BLOCKS
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

    def _free_clean(self, groups: Sequence[BlockIds]) -> None:
        # Each list goes before those that were given back earlier.
        block_ids = np.concatenate(groups[::-1])
        if not len(block_ids):
            return
        counts = self.ref_counts[block_ids]
        counts -= 1
        assert not count_nonzero(counts), "block freed twice, or still in use"
        self.ref_counts[block_ids] = counts
        if self._head < len(block_ids):
            self._recentre()
        self.num_free += len(block_ids)
        self._put_first(block_ids)

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

    # -- with the prefix cache --------------------------------------------------------------------------------

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

    def reset(self) -> bool:
        """Empty the prefix cache; only possible while nothing but the null block is in use."""
        if self.num_free != self.num_blocks - 1:
            return False
        self._forget_all()
        return True


@cache
def _numbers(count: int) -> NDArray[np.int64]:
    """0, 1, 2, ...: places in a log, to be copied from."""
    return np.arange(count, dtype=np.int64)
