"""Least recently used first; requests as a whole, within one the tail first (vLLM: cpu/policies/lru.py).

A chunk's place is (rank, -position). A running request's chunks share its rank, whichever step stored them; when it
ends, all that it has seen get fresh ranks, tail first.

The order is one integer per chunk. Victims come from a *run*: all evictable chunks sorted at some moment, read from
the front. An entry counts only if its chunk is still evictable and still has that place. What becomes evictable at a
place that the run has covered goes into a heap; later places wait for the next run.
"""

from heapq import heappop, heappush
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvreplay.connectors.offloading.access import RequestAccess
from kvreplay.connectors.offloading.arrays import NO_CHUNKS, ChunkIds, Keys, Mask
from kvreplay.connectors.offloading.chunks import UNUSED, ChunkTable
from kvreplay.connectors.offloading.context import RequestContext
from kvreplay.connectors.offloading.keys import KeySpace

_GROUP_BITS: Final = 6
_POSITION_BITS: Final = 26
_MAX_POSITION: Final = (1 << _POSITION_BITS) - 1
_RANK_SHIFT: Final = _GROUP_BITS + _POSITION_BITS

_Places = NDArray[np.int64]
_NO_PLACES: _Places = np.empty(0, np.int64)


class LRUPolicy:
    distinguishes_reuse = False

    def __init__(self, chunks: ChunkTable, space: KeySpace) -> None:
        assert space.num_groups <= 1 << _GROUP_BITS
        self._chunks = chunks
        self._space = space
        self._places: _Places = np.zeros(chunks.num_chunks + 1, np.int64)
        self._next_rank = 0
        self._generation = 0
        self._run: ChunkIds = NO_CHUNKS
        self._run_places: _Places = _NO_PLACES
        self._cursor = 0
        self._horizon = -1
        """The run covers places up to this one."""
        self._late: list[tuple[int, int]] = []
        self._is_spared: Mask = np.zeros(chunks.num_chunks + 1, np.bool_)
        """Chunks that must not be taken now, while victims are sought."""

    # -- places -----------------------------------------------------------------------------------------------

    def insert(self, keys: Keys, chunk_ids: ChunkIds, context: RequestContext) -> None:
        positions = self._space.positions(keys)
        if positions.all():
            self._places[chunk_ids] = self._places_of(keys, positions, self._rank_of(context))
        else:
            for index, chunk_id in enumerate(chunk_ids.tolist()):
                self._insert_one(keys[index : index + 1], chunk_id, context)

    def _insert_one(self, key: Keys, chunk_id: int, context: RequestContext) -> None:
        position = self._space.positions(key)
        if position.all():
            self._places[chunk_id] = self._places_of(key, position, self._rank_of(context))[0]
        else:
            self._give_fresh_ranks(np.array([chunk_id], np.int32))

    def remove(self, keys: Keys, chunk_ids: ChunkIds) -> None:
        pass

    def mark_evictable(self, chunk_ids: ChunkIds) -> None:
        self._note_evictable(chunk_ids)

    def touch(self, keys: Keys) -> None:
        self._give_fresh_ranks(self._present(keys[::-1]))

    def on_store_miss(self, keys: Keys) -> None:
        pass

    def on_request_access(self, keys: Keys, chunk_ids: ChunkIds, context: RequestContext) -> None:
        """Up only: what someone else has ranked higher stays there."""
        rank = self._rank_of(context)
        is_there = chunk_ids >= 0
        if not is_there.any():
            return
        keys, chunk_ids = keys[is_there], chunk_ids[is_there]
        positions = self._space.positions(keys)
        if not positions.all():
            keys, chunk_ids, positions = keys[positions > 0], chunk_ids[positions > 0], positions[positions > 0]
        places = self._places_of(keys, positions, rank)
        rises = self._places[chunk_ids] < places
        self._places[chunk_ids[rises]] = places[rises]
        self._note_evictable(chunk_ids[rises])

    def on_request_finished(self, keys: Keys, access: RequestAccess) -> None:
        self._give_fresh_ranks(self._present(keys[::-1]))

    def ranking(self) -> ChunkIds:
        """All chunks in order of their places; those in use too."""
        used = np.flatnonzero(self._chunks.ref_counts != UNUSED).astype(np.int32)
        return used[np.argsort(self._places[used])]

    def _places_of(self, keys: Keys, positions: NDArray[np.int64], rank: int) -> _Places:
        tails_first = (_MAX_POSITION - positions) << _GROUP_BITS
        return (rank << _RANK_SHIFT) + tails_first + self._space.groups(keys)

    def _rank_of(self, context: RequestContext) -> int:
        if context.rank is None or context.rank_generation != self._generation:
            self._next_rank += 1
            context.rank = self._next_rank
            context.rank_generation = self._generation
        return context.rank

    def _give_fresh_ranks(self, chunk_ids: ChunkIds) -> None:
        """One after another: the last is the most recent."""
        ranks = np.arange(self._next_rank + 1, self._next_rank + 1 + len(chunk_ids))
        self._next_rank += len(chunk_ids)
        self._places[chunk_ids] = (ranks << _RANK_SHIFT) + (_MAX_POSITION << _GROUP_BITS)
        self._note_evictable(chunk_ids)

    def _present(self, keys: Keys) -> ChunkIds:
        chunk_ids = self._chunks.find(keys)
        return chunk_ids[chunk_ids >= 0]

    # -- victims ----------------------------------------------------------------------------------------------

    def evict(self, count: int, protected: ChunkIds) -> ChunkIds | None:
        spared = protected[self._chunks.ref_counts[protected] == 0]
        if count > self._chunks.num_evictable - len(spared):
            return None
        self._is_spared[spared] = True
        victims: list[ChunkIds] = []
        while count:
            batch = self._next_victims(count)
            if not len(batch):
                self._start_run()
                continue
            victims.append(batch)
            count -= len(batch)
            self._chunks.take_out(batch)
        self._is_spared[spared] = False
        return np.concatenate(victims) if victims else NO_CHUNKS

    def clear(self) -> None:
        self._next_rank = 0
        self._generation += 1
        self._run, self._run_places, self._cursor, self._horizon = NO_CHUNKS, _NO_PLACES, 0, -1
        self._late.clear()

    def _next_victims(self, count: int) -> ChunkIds:
        """Up to `count` from what the run and the heap hold, in order."""
        ids, places, end = self._from_run(count)
        late = self._from_heap(count, below=int(places[-1]) if len(places) == count else self._horizon + 1)
        if not late:
            self._cursor = end
            return ids
        late_places, late_ids = (np.array(column, np.int64) for column in zip(*late, strict=True))
        places = np.concatenate([places, late_places])
        ids = np.concatenate([ids, late_ids.astype(np.int32)])
        places, first = np.unique(places, return_index=True)
        ids = ids[first]
        for place, chunk_id in zip(places[count:].tolist(), ids[count:].tolist(), strict=True):
            heappush(self._late, (place, chunk_id))
        self._cursor = end
        return ids[:count]

    def _from_run(self, count: int) -> tuple[ChunkIds, _Places, int]:
        """The run's next `count` that count, their places, and where it goes on. Spared ones move to the heap."""
        start, window = self._cursor, 2 * count + 64
        while True:
            end = min(start + window, len(self._run))
            ids, places = self._run[start:end], self._run_places[start:end]
            found = (self._counts(ids, places) & ~self._is_spared[ids]).nonzero()[0]
            if len(found) >= count or end == len(self._run):
                break
            window *= 4
        if len(found) > count:
            found = found[:count]
        if len(found) == count:
            end = start + int(found[-1]) + 1
        passed = self._run[start:end]
        held = self._is_spared[passed]
        if held.any():
            held &= self._counts(passed, self._run_places[start:end])
            for index in held.nonzero()[0].tolist():
                heappush(self._late, (int(self._run_places[start + index]), int(passed[index])))
        return ids[found], places[found], end

    def _from_heap(self, count: int, *, below: int) -> list[tuple[int, int]]:
        """Up to `count` entries that count, taken off the heap, lowest place first, all lower than `below`."""
        late, kept = self._late, []
        taken: list[tuple[int, int]] = []
        while late and len(taken) < count and late[0][0] < below:
            entry = heappop(late)
            place, chunk_id = entry
            if self._chunks.ref_counts[chunk_id] != 0 or self._places[chunk_id] != place:
                continue
            if self._is_spared[chunk_id]:
                kept.append(entry)
            elif not taken or taken[-1] != entry:
                taken.append(entry)
        for entry in kept:
            heappush(late, entry)
        return taken

    def _counts(self, ids: ChunkIds, places: _Places) -> NDArray[np.bool_]:
        counts: NDArray[np.bool_] = (self._chunks.ref_counts[ids] == 0) & (self._places[ids] == places)
        return counts

    def _note_evictable(self, chunk_ids: ChunkIds) -> None:
        """Evictable ones whose place the run has covered must not be missed."""
        if self._horizon < 0 or not len(chunk_ids):
            return
        places = self._places[chunk_ids]
        covered = (places <= self._horizon) & (self._chunks.ref_counts[chunk_ids] == 0)
        for place, chunk_id in zip(places[covered].tolist(), chunk_ids[covered].tolist(), strict=True):
            heappush(self._late, (place, chunk_id))

    def _start_run(self) -> None:
        evictable = np.flatnonzero(self._chunks.ref_counts == 0).astype(np.int32)
        places = self._places[evictable]
        order = np.argsort(places)
        self._run, self._run_places, self._cursor = evictable[order], places[order], 0
        self._horizon = int(self._run_places[-1]) if len(order) else -1
        self._late.clear()
