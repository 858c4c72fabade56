"""Least recently used first; requests as a whole, within one the tail first (vLLM: cpu/policies/lru.py).

A chunk's place is (rank, -position). A running request's chunks share its rank, whichever step stored them; when it
ends, all that it has seen get fresh ranks, tail first.

The order is one integer per chunk. Victims come from a *run*: all evictable chunks sorted at some moment, read from
the front. An entry is *live* until its chunk gets another place or a user, or is taken. What becomes evictable at a
place that the run has covered goes into a heap; later places wait for the next run.
"""

from heapq import heappop, heappush
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvreplay.connectors.offloading.access import RequestAccess
from kvreplay.connectors.offloading.arrays import NO_CHUNKS, NOWHERE, ChunkIds, Keys, Mask
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
        self._is_live: Mask = np.zeros(1, np.bool_)
        """Of the run's entries from the cursor on; one cell more stands for chunks that are not in the run."""
        self._entry_of: NDArray[np.int64] = np.full(chunks.num_chunks + 1, -1, np.int64)
        """Chunk → its place in the run."""
        self._cursor = 0
        self._horizon = -1
        """The run covers places up to this one."""
        self._late: list[tuple[int, int]] = []
        self._is_spared: Mask = np.zeros(chunks.num_chunks + 1, np.bool_)
        """Chunks that must not be taken now, while victims are sought."""
        self._held: NDArray[np.intp] = np.empty(0, np.intp)
        """Their entries in the run, which are no longer live until that is over."""

    # -- places -----------------------------------------------------------------------------------------------

    def insert(self, keys: Keys, chunk_ids: ChunkIds, context: RequestContext) -> None:
        positions = self._space.positions(keys)
        if len(keys) == 1 and positions.item():
            tail_first = (_MAX_POSITION - positions.item()) << _GROUP_BITS
            rank = self._rank_of(context)
            group = keys.item() % self._space.num_groups
            self._places[chunk_ids.item()] = (rank << _RANK_SHIFT) + tail_first + group
        elif self._space.is_run(keys) or positions.all():
            self._places[chunk_ids] = self._places_of(keys, positions, self._rank_of(context))
        else:
            for index, chunk_id in enumerate(chunk_ids.tolist()):
                self._insert_one(keys[index : index + 1], chunk_id, context)

    def _insert_one(self, key: Keys, chunk_id: int, context: RequestContext) -> None:
        position = self._space.positions(key)
        if position.all():
            self._places[chunk_id] = self._places_of(key, position, self._rank_of(context))[0]
        else:
            self._give_fresh_ranks(np.array([chunk_id], np.int64))

    def remove(self, keys: Keys, chunk_ids: ChunkIds) -> None:
        self._leave_run(chunk_ids)

    def mark_evictable(self, chunk_ids: ChunkIds) -> None:
        if self._horizon >= 0 and len(chunk_ids):
            self._note_evictable(chunk_ids)

    def mark_one_evictable(self, chunk_id: int) -> None:
        if self._horizon >= 0:
            place = self._places.item(chunk_id)
            if place <= self._horizon:
                heappush(self._late, (place, chunk_id))

    def mark_used(self, chunk_ids: ChunkIds) -> None:
        self._leave_run(chunk_ids)

    def touch(self, keys: Keys) -> None:
        self._give_fresh_ranks(self._tail_first(keys))

    def on_store_miss(self, keys: Keys) -> None:
        pass

    def on_request_access(self, keys: Keys, chunk_ids: ChunkIds, context: RequestContext) -> None:
        """Up only: what someone else has ranked higher stays there."""
        rank = self._rank_of(context)
        if chunk_ids is NOWHERE:
            return
        is_there = chunk_ids >= 0
        num_there = np.count_nonzero(is_there)
        if num_there < len(keys):
            if not num_there:
                return
            keys, chunk_ids = keys[is_there], chunk_ids[is_there]
        positions = self._space.positions(keys)
        if not self._space.is_run(keys) and not positions.all():
            keys, chunk_ids, positions = keys[positions > 0], chunk_ids[positions > 0], positions[positions > 0]
        places = self._places_of(keys, positions, rank)
        rises = self._places[chunk_ids] < places
        num_risen = np.count_nonzero(rises)
        if num_risen < len(keys):
            if not num_risen:
                return
            chunk_ids, places = chunk_ids[rises], places[rises]
        self._places[chunk_ids] = places
        self._leave_run(chunk_ids)
        self.mark_evictable(chunk_ids)

    def on_request_finished(self, keys: Keys, access: RequestAccess) -> None:
        self._give_fresh_ranks(self._tail_first(keys))

    def ranking(self) -> ChunkIds:
        """All chunks in order of their places; those in use too."""
        used = np.flatnonzero(self._chunks.ref_counts != UNUSED)
        return used[np.argsort(self._places[used])]

    def _places_of(self, keys: Keys, positions: NDArray[np.int64], rank: int) -> _Places:
        places: _Places = positions * -(1 << _GROUP_BITS)
        places += (rank << _RANK_SHIFT) + (_MAX_POSITION << _GROUP_BITS)
        if self._space.num_groups > 1:
            places += self._space.groups(keys)
        return places

    def _rank_of(self, context: RequestContext) -> int:
        if context.rank is None or context.rank_generation != self._generation:
            self._next_rank += 1
            context.rank = self._next_rank
            context.rank_generation = self._generation
        return context.rank

    def _give_fresh_ranks(self, chunk_ids: ChunkIds) -> None:
        """One after another: the last is the most recent."""
        first = ((self._next_rank + 1) << _RANK_SHIFT) + (_MAX_POSITION << _GROUP_BITS)
        self._next_rank += len(chunk_ids)
        # No run covers them: they come after all ranks that there were when it was made.
        self._places[chunk_ids] = np.arange(first, first + (len(chunk_ids) << _RANK_SHIFT), 1 << _RANK_SHIFT)
        self._leave_run(chunk_ids)

    def _tail_first(self, keys: Keys) -> ChunkIds:
        """The chunks of those that are there, backwards."""
        slots = self._chunks.slots(keys)
        if np.count_nonzero(slots) < len(slots):
            slots = slots[slots > 0]
        return slots[::-1] - 1

    # -- victims ----------------------------------------------------------------------------------------------

    def evict(self, count: int, protected: ChunkIds) -> ChunkIds | None:
        victims_ahead = self._ahead(count, protected)
        if victims_ahead is not None:
            return victims_ahead
        spared = protected[self._chunks.ref_counts[protected] == 0] if len(protected) else protected
        if count > self._chunks.num_evictable - len(spared):
            return None
        if len(spared):
            self._hold(spared)
        victims: list[ChunkIds] = []
        while count:
            batch = self._next_victims(count)
            if not len(batch):
                self._start_run()
                continue
            victims.append(batch)
            count -= len(batch)
            self._chunks.take_out(batch)
        if len(spared):
            self._release(spared)
        if len(victims) == 1:
            return victims[0]
        return np.concatenate(victims) if victims else NO_CHUNKS

    def _ahead(self, count: int, protected: ChunkIds) -> ChunkIds | None:
        """As `evict`, where victims are simply the run's next entries, none of them spared."""
        start, end = self._cursor, self._cursor + count
        if end > len(self._run) or np.count_nonzero(self._is_live[start:end]) < count:
            return None
        if self._late and self._late[0][0] < self._run_places.item(end - 1):
            return None
        if len(protected) and (
            count > self._chunks.num_evictable - len(protected)
            or np.count_nonzero(self._is_live[self._entry_of[protected]])
        ):
            return None
        victims = self._run[start:end]
        self._pass(end)
        self._chunks.take_out(victims)
        return victims

    def _pass(self, end: int) -> None:
        """The run goes on there."""
        self._is_live[self._cursor : end] = False
        self._cursor = end

    def clear(self) -> None:
        self._next_rank = 0
        self._generation += 1
        self._use_run(NO_CHUNKS, _NO_PLACES)

    def _leave_run(self, chunk_ids: ChunkIds) -> None:
        self._is_live[self._entry_of[chunk_ids]] = False

    def _hold(self, spared: ChunkIds) -> None:
        self._is_spared[spared] = True
        entries = self._entry_of[spared]
        self._held = entries[(entries >= self._cursor) & self._is_live[entries]].astype(np.intp)
        self._is_live[self._held] = False

    def _release(self, spared: ChunkIds) -> None:
        """Those that the run has come past in the meantime are looked for in the heap from now on."""
        self._is_spared[spared] = False
        self._is_live[self._held[self._held >= self._cursor]] = True
        for entry in self._held[self._held < self._cursor].tolist():
            heappush(self._late, (int(self._run_places[entry]), int(self._run[entry])))

    def _next_victims(self, count: int) -> ChunkIds:
        """Up to `count` from what the run and the heap hold, in order."""
        entries, end = self._from_run(count)
        ids = self._run[entries]
        is_full = len(ids) == count
        if self._late:
            places = self._run_places[entries]
            late = self._from_heap(count, below=int(places[-1]) if is_full else self._horizon + 1)
            if late:
                ids = self._merged(ids, places, late, count)
        self._pass(end)
        return ids

    def _merged(self, ids: ChunkIds, places: _Places, late: list[tuple[int, int]], count: int) -> ChunkIds:
        """The first `count` of both, in order. The others go into the heap."""
        late_places, late_ids = (np.array(column, np.int64) for column in zip(*late, strict=True))
        places = np.concatenate([places, late_places])
        ids = np.concatenate([ids, late_ids])
        places, first = np.unique(places, return_index=True)
        ids = ids[first]
        for place, chunk_id in zip(places[count:].tolist(), ids[count:].tolist(), strict=True):
            heappush(self._late, (place, chunk_id))
        return ids[:count]

    def _from_run(self, count: int) -> tuple[NDArray[np.intp] | slice, int]:
        """The run's next `count` live entries, and where it goes on."""
        start, num_entries = self._cursor, len(self._run)
        end = start + count
        if end <= num_entries and self._is_live[start:end].all():
            return slice(start, end), end
        window = 2 * count + 64
        while True:
            end = min(start + window, num_entries)
            found = self._is_live[start:end].nonzero()[0]
            if len(found) >= count or end == num_entries:
                break
            window *= 4
        entries = found[:count] + start
        return entries, int(entries[-1]) + 1 if len(entries) == count else end

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

    def _note_evictable(self, chunk_ids: ChunkIds) -> None:
        """Evictable ones whose place the run has covered must not be missed."""
        places = self._places[chunk_ids]
        if places.item(places.argmin()) > self._horizon:
            return
        covered = (places <= self._horizon) & (self._chunks.ref_counts[chunk_ids] == 0)
        for place, chunk_id in zip(places[covered].tolist(), chunk_ids[covered].tolist(), strict=True):
            heappush(self._late, (place, chunk_id))

    def _start_run(self) -> None:
        evictable = np.flatnonzero(self._chunks.ref_counts == 0)
        places = self._places[evictable]
        order = np.argsort(places)
        self._use_run(evictable[order], places[order])
        self._held = self._is_spared[self._run].nonzero()[0]
        self._is_live[self._held] = False

    def _use_run(self, run: ChunkIds, places: _Places) -> None:
        self._run, self._run_places, self._cursor = run, places, 0
        self._horizon = int(places[-1]) if len(places) else -1
        self._is_live = np.ones(len(run) + 1, np.bool_)
        self._is_live[-1] = False
        self._entry_of.fill(-1)
        self._entry_of[run] = np.arange(len(run))
        self._late.clear()
