"""The CPU tier's slots: which key is where, and who uses it (vLLM: CPUOffloadingManager's chunk pool)."""

from typing import Final

import numpy as np

from kvreplay.connectors.offloading.arrays import NO_CHUNKS, ChunkIds, Keys, Mask, grown, lazy_zeros

UNUSED: Final = -2
NOT_READY: Final = -1


class ChunkTable:
    """One array cell per slot. `ref_counts`: NOT_READY while a store writes it, else the number of loads that read it.

    Chunk -1 stands for "none": the last cell of each array, always unused. Slots that were never used are given out
    first, in order; then those given back last.
    """

    def __init__(self, num_chunks: int) -> None:
        assert num_chunks >= 0
        self.num_chunks = num_chunks
        self.keys = np.zeros(num_chunks + 1, np.int64)
        self.ref_counts = np.full(num_chunks + 1, UNUSED, np.int32)
        self.free_list: list[int] = []
        self.num_allocated = 0
        self.num_evictable = 0
        """Chunks that are ready and have no user."""
        self.num_write_pending = 0
        self._slots = lazy_zeros(1024)
        """Key → its slot + 1, 0 for none."""

    @property
    def num_free(self) -> int:
        return len(self.free_list) + self.num_chunks - self.num_allocated

    def find(self, keys: Keys) -> ChunkIds:
        """Each key's chunk, -1 where there is none."""
        if not len(keys):
            return NO_CHUNKS
        self._slots = grown(self._slots, int(keys.max()))
        return self._slots[keys] - 1

    def find_one(self, key: int) -> int:
        return int(self._slots[key]) - 1 if key < len(self._slots) else -1

    def allocate(self, keys: Keys) -> ChunkIds:
        """A slot for each, not ready."""
        assert len(keys) <= self.num_free
        num_fresh = min(len(keys), self.num_chunks - self.num_allocated)
        num_reused = len(keys) - num_fresh
        chunk_ids = np.empty(len(keys), np.int32)
        chunk_ids[:num_fresh] = np.arange(self.num_allocated, self.num_allocated + num_fresh)
        self.num_allocated += num_fresh
        if num_reused:
            chunk_ids[num_fresh:] = self.free_list[: -num_reused - 1 : -1]
            del self.free_list[-num_reused:]
        self.keys[chunk_ids] = keys
        self.ref_counts[chunk_ids] = NOT_READY
        self.num_write_pending += len(keys)
        self._slots = grown(self._slots, int(keys.max()))
        self._slots[keys] = chunk_ids + 1
        return chunk_ids

    def is_ready(self, chunk_ids: ChunkIds) -> Mask:
        ready: Mask = self.ref_counts[chunk_ids] != NOT_READY
        return ready

    def set_ready(self, chunk_ids: ChunkIds) -> None:
        self.ref_counts[chunk_ids] = 0
        self.num_write_pending -= len(chunk_ids)
        self.num_evictable += len(chunk_ids)

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
        self.free_list += chunk_ids.tolist()
        return keys

    def clear(self) -> None:
        used = self.ref_counts != UNUSED
        self._slots[self.keys[used]] = 0
        self.ref_counts[:] = UNUSED
        self.free_list.clear()
        self.num_allocated = self.num_evictable = self.num_write_pending = 0
