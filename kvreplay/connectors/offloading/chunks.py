"""The CPU tier's slots: which key is where, and who uses it (vLLM: CPUOffloadingManager's chunk pool)."""

from typing import Final

import numpy as np

from kvreplay.connectors.offloading.arrays import ChunkIds, Keys, Mask, grown
from kvreplay.kv.allocation import lazy_zeros

UNUSED: Final = -2
NOT_READY: Final = -1


class ChunkTable:
    """One array cell per slot. `ref_counts`: NOT_READY while a store writes it, else the number of loads that read it.

    Chunk -1 stands for "none": the last cell of each array, always unused. Slots that were never used are given out
    first, in order; then those given back last.
    """

    def __init__(self, num_chunks: int, num_keys: int = 0) -> None:
        assert num_chunks >= 0
        self.num_chunks = num_chunks
        self.keys = np.zeros(num_chunks + 1, np.int64)
        self.ref_counts = np.full(num_chunks + 1, UNUSED, np.int32)
        self.count_of = self.ref_counts.data
        """The same for single chunks."""
        self._free = np.zeros(num_chunks, np.int64)
        """Slots given back; the first `_num_given_back` count, the last of them goes first."""
        self._num_given_back = 0
        self.num_allocated = 0
        self.num_evictable = 0
        """Chunks that are ready and have no user."""
        self.num_write_pending = 0
        self._use_slots(lazy_zeros(num_keys, np.dtype(np.int64)))

    def _use_slots(self, slots: ChunkIds) -> None:
        self._slots = slots
        """Key → its slot + 1, 0 for none."""
        self._slot_of = slots.data
        """The same for single keys."""

    @property
    def num_free(self) -> int:
        return self._num_given_back + self.num_chunks - self.num_allocated

    @property
    def free_list(self) -> ChunkIds:
        """Slots that have been used before; the last one is used next."""
        return self._free[: self._num_given_back]

    def find(self, keys: Keys) -> ChunkIds:
        """Each key's chunk, -1 where there is none."""
        return self.slots(keys) - 1

    def slots(self, keys: Keys) -> ChunkIds:
        """Each key's chunk + 1, 0 where there is none."""
        try:
            return self._slots[keys]
        except IndexError:  # keys that have never been here
            self._use_slots(grown(self._slots, int(keys.max())))
            return self._slots[keys]

    def find_one(self, key: int) -> int:
        return self._slot_of[key] - 1 if key < len(self._slots) else -1

    def allocate(self, keys: Keys) -> ChunkIds:
        """A slot for each, not ready."""
        assert len(keys) <= self.num_free
        num_fresh = min(len(keys), self.num_chunks - self.num_allocated)
        num_reused = len(keys) - num_fresh
        chunk_ids = np.empty(len(keys), np.int64)
        if num_fresh:
            chunk_ids[:num_fresh] = np.arange(self.num_allocated, self.num_allocated + num_fresh)
            self.num_allocated += num_fresh
        if num_reused:
            left = self._num_given_back - num_reused
            chunk_ids[num_fresh:] = self._free[left : self._num_given_back][::-1]
            self._num_given_back = left
        self._enter(chunk_ids, keys)
        return chunk_ids

    def replace(self, victims: ChunkIds, keys: Keys) -> tuple[ChunkIds, Keys]:
        """`drop` chunks that have been taken out, and `allocate`; also returns what they held."""
        if len(keys) == 1 == len(victims):
            return self._replace_one(victims.item(), keys.item())
        if len(victims) != len(keys):
            evicted = self.drop(victims)
            return self.allocate(keys), evicted
        assert not self.num_free
        # What is given back last is given out first.
        chunk_ids = victims[::-1].copy()
        evicted = self.keys[victims]
        self._slots[evicted] = 0
        self._enter(chunk_ids, keys)
        return chunk_ids, evicted

    def replace_each(self, victims: ChunkIds, keys: Keys) -> None:
        """`replace` for one after the other: each key gets its victim's chunk."""
        assert not self.num_free
        self._slots[self.keys[victims]] = 0
        self._enter(victims, keys)

    def _replace_one(self, victim: int, key: int) -> tuple[ChunkIds, Keys]:
        evicted = self.keys[victim : victim + 1].copy()
        self._slot_of[evicted.item()] = 0
        self._enter_one(victim, key)
        return np.array([victim], np.int64), evicted

    def allocate_one(self, keys: Keys) -> ChunkIds:
        """`allocate` for a single key."""
        if self.num_allocated == self.num_chunks:
            left = self._num_given_back - 1
            assert left >= 0
            chunk_ids = self._free[left : left + 1].copy()
            self._num_given_back = left
        else:
            chunk_ids = np.array([self.num_allocated], np.int64)
            self.num_allocated += 1
        self._enter_one(chunk_ids.item(), keys.item())
        return chunk_ids

    def _enter(self, chunk_ids: ChunkIds, keys: Keys) -> None:
        """They are found under their keys from now on, and are not ready."""
        self.keys[chunk_ids] = keys
        self.ref_counts[chunk_ids] = NOT_READY
        self.num_write_pending += len(keys)
        try:
            self._slots[keys] = chunk_ids + 1
        except IndexError:
            self._use_slots(grown(self._slots, int(keys.max())))
            self._slots[keys] = chunk_ids + 1

    def _enter_one(self, chunk_id: int, key: int) -> None:
        self.keys[chunk_id] = key
        self.count_of[chunk_id] = NOT_READY
        self.num_write_pending += 1
        if key >= len(self._slots):
            self._use_slots(grown(self._slots, key))
        self._slot_of[key] = chunk_id + 1

    def is_ready(self, chunk_ids: ChunkIds) -> Mask:
        ready: Mask = self.ref_counts[chunk_ids] != NOT_READY
        return ready

    def is_pending(self, chunk_ids: ChunkIds) -> Mask:
        """Of chunks that may be none (-1)."""
        pending: Mask = self.ref_counts[chunk_ids] == NOT_READY
        return pending

    def set_ready(self, chunk_ids: ChunkIds) -> None:
        self.ref_counts[chunk_ids] = 0
        self.num_write_pending -= len(chunk_ids)
        self.num_evictable += len(chunk_ids)

    def set_one_ready(self, chunk_id: int) -> bool:
        """False: it was not being written."""
        if self.count_of[chunk_id] != NOT_READY:
            return False
        self.count_of[chunk_id] = 0
        self.num_write_pending -= 1
        self.num_evictable += 1
        return True

    def pin(self, chunk_ids: ChunkIds) -> None:
        self.num_evictable -= int(np.count_nonzero(self.ref_counts[chunk_ids] == 0))
        self.ref_counts[chunk_ids] += 1

    def unpin(self, chunk_ids: ChunkIds) -> ChunkIds:
        """Returns those that have no user left."""
        self.ref_counts[chunk_ids] -= 1
        unused: ChunkIds = chunk_ids[self.ref_counts[chunk_ids] == 0]
        self.num_evictable += len(unused)
        return unused

    def take_out(self, chunk_ids: ChunkIds) -> None:
        """These have been chosen as victims, and are no longer evictable."""
        self.ref_counts[chunk_ids] = UNUSED
        self.num_evictable -= len(chunk_ids)

    def fail(self, chunk_ids: ChunkIds) -> None:
        """The stores that were to fill these have failed."""
        self.ref_counts[chunk_ids] = UNUSED
        self.num_write_pending -= len(chunk_ids)

    def drop(self, chunk_ids: ChunkIds) -> Keys:
        """Give slots that have been taken out back, in this order; returns what they held."""
        keys = self.keys[chunk_ids]
        self._slots[keys] = 0
        end = self._num_given_back + len(chunk_ids)
        self._free[self._num_given_back : end] = chunk_ids
        self._num_given_back = end
        return keys

    def clear(self) -> None:
        used = self.ref_counts != UNUSED
        self._slots[self.keys[used]] = 0
        self.ref_counts[:] = UNUSED
        self._num_given_back = 0
        self.num_allocated = self.num_evictable = self.num_write_pending = 0
