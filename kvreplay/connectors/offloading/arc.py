"""Adaptive replacement: recency against reuse, balanced by what was evicted too early (vLLM: cpu/policies/arc.py).

T1 holds chunks seen once, T2 those that a request reused; B1 and B2 remember the keys evicted from each. A miss found
in B1 says that T1 is too small, one in B2 that it is too large. Each list runs from least to most recent.
"""

from collections import OrderedDict
from collections.abc import Iterator

import numpy as np

from kvreplay.connectors.offloading.access import RequestAccess
from kvreplay.connectors.offloading.arrays import ChunkIds, Keys
from kvreplay.connectors.offloading.chunks import ChunkTable
from kvreplay.connectors.offloading.context import RequestContext
from kvreplay.connectors.offloading.keys import KeySpace

_Entries = OrderedDict[int, int]
"""Key → chunk id."""
_Ghosts = OrderedDict[int, None]


class ARCPolicy:
    distinguishes_reuse = True

    def __init__(self, chunks: ChunkTable, space: KeySpace) -> None:
        self._chunks = chunks
        self.target_t1_size = 0.0
        self.t1: _Entries = OrderedDict()
        self.t2: _Entries = OrderedDict()
        self.b1: _Ghosts = OrderedDict()
        self.b2: _Ghosts = OrderedDict()

    def insert(self, keys: Keys, chunk_ids: ChunkIds, context: RequestContext) -> None:
        for key, chunk_id in zip(keys.tolist(), chunk_ids.tolist(), strict=True):
            self.t1[key] = chunk_id
            self.b1.pop(key, None)
            self.b2.pop(key, None)

    def remove(self, keys: Keys, chunk_ids: ChunkIds) -> None:
        for key in keys.tolist():
            if self.t1.pop(key, None) is None:
                self.t2.pop(key, None)

    def mark_evictable(self, chunk_ids: ChunkIds) -> None:
        pass

    def mark_one_evictable(self, chunk_id: int) -> None:
        pass

    def mark_used(self, chunk_ids: ChunkIds) -> None:
        pass

    def touch(self, keys: Keys) -> None:
        ready = self._chunks.is_ready(self._chunks.find(keys))
        for key, is_ready in zip(keys[::-1].tolist(), ready[::-1].tolist(), strict=True):
            if key in self.t1:
                if is_ready:
                    self._promote(key)
                else:  # being stored: it has not been touched twice
                    self.t1.move_to_end(key)
            elif key in self.t2:
                self.t2.move_to_end(key)
            else:
                self._adapt(key)

    def on_store_miss(self, keys: Keys) -> None:
        for key in keys[::-1].tolist():
            self._adapt(key)

    def on_request_access(self, keys: Keys, chunk_ids: ChunkIds, context: RequestContext) -> None:
        pass

    def on_request_finished(self, keys: Keys, access: RequestAccess) -> None:
        inserted_only = access.inserted - access.reused
        for key in keys[::-1].tolist():
            if key in inserted_only:
                # A store is no second access: it stays in its list.
                for entries in (self.t1, self.t2):
                    if key in entries:
                        entries.move_to_end(key)
            elif key in access.reused:
                if key in self.t1:
                    self._promote(key)
                elif key in self.t2:
                    self.t2.move_to_end(key)

    def evict(self, count: int, protected: ChunkIds) -> ChunkIds | None:
        chosen = self._choose(count, set(self._chunks.keys[protected].tolist()))
        if chosen is None:
            return None
        victims = np.empty(count, np.int64)
        for index, (key, is_recent) in enumerate(chosen):
            entries, ghosts = (self.t1, self.b1) if is_recent else (self.t2, self.b2)
            victims[index] = entries.pop(key)
            ghosts[key] = None
        for ghosts in (self.b1, self.b2):
            while len(ghosts) > self._chunks.num_chunks:
                ghosts.popitem(last=False)
        self._chunks.take_out(victims)
        return victims

    def clear(self) -> None:
        for entries in (self.t1, self.t2, self.b1, self.b2):
            entries.clear()
        self.target_t1_size = 0.0

    def _choose(self, count: int, protected: set[int]) -> list[tuple[int, bool]] | None:
        """`count` victims and whether each is from T1, or None. Nothing changes yet."""
        recent, frequent = self._candidates(self.t1, protected), self._candidates(self.t2, protected)
        # Pinned and pending chunks count here too.
        t1_size = len(self.t1)
        chosen: list[tuple[int, bool]] = []
        for _ in range(count):
            key = next(recent, None) if t1_size >= int(self.target_t1_size) else None
            is_recent = key is not None
            if key is None:
                key = next(frequent, None)
            if key is None:
                key = next(recent, None)
                is_recent = True
            if key is None:
                return None
            t1_size -= is_recent
            chosen.append((key, is_recent))
        return chosen

    def _candidates(self, entries: _Entries, protected: set[int]) -> Iterator[int]:
        ref_counts = self._chunks.ref_counts
        return (key for key, chunk_id in entries.items() if not ref_counts[chunk_id] and key not in protected)

    def _promote(self, key: int) -> None:
        self.t2[key] = self.t1.pop(key)

    def _adapt(self, key: int) -> None:
        """Learn from a miss that would have been a hit in a differently divided cache."""
        b1, b2 = self.b1, self.b2
        if key in b1:
            grown = self.target_t1_size + max(1, len(b2) / len(b1))
            self.target_t1_size = min(grown, self._chunks.num_chunks)
            b1.move_to_end(key)
        elif key in b2:
            self.target_t1_size = max(self.target_t1_size - max(1, len(b1) / len(b2)), 0)
            b2.move_to_end(key)
