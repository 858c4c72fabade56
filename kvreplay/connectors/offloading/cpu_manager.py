"""The CPU tier's manager: states, pins, room (vLLM: v1/kv_offload/cpu/manager.py).

A chunk is not ready while its store is in flight, evictable when it is ready and nobody reads it, pinned otherwise.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from kvreplay.connectors.offloading.access import RequestAccess
from kvreplay.connectors.offloading.arc import ARCPolicy
from kvreplay.connectors.offloading.arrays import NO_CHUNKS, NO_KEYS, NOWHERE, ChunkIds, Keys, without_repeats
from kvreplay.connectors.offloading.chunks import NOT_READY, ChunkTable
from kvreplay.connectors.offloading.context import OffloadPolicy, RequestContext
from kvreplay.connectors.offloading.keys import KeySpace
from kvreplay.connectors.offloading.lru import LRUPolicy
from kvreplay.connectors.offloading.manager import LookupResult, LookupResults, OffloadingEvent, StorePlan
from kvreplay.connectors.offloading.policy import CachePolicy
from kvreplay.connectors.offloading.threshold import OfferCounts
from kvreplay.errors import EngineFatal

EVICTION_POLICIES: Final[Mapping[str, Callable[[ChunkTable, KeySpace], CachePolicy]]] = {
    "lru": LRUPolicy,
    "arc": ARCPolicy,
}

# Which `lookup_many` counts on.
assert (LookupResult.MISS, LookupResult.HIT, LookupResult.HIT_PENDING) == (0, 1, 2)


class CPUOffloadingManager:
    lookup_is_pure = True

    def __init__(
        self,
        num_chunks: int,
        space: KeySpace,
        *,
        eviction_policy: str = "lru",
        store_threshold: int = 0,
        max_tracker_size: int = 64_000,
        enable_events: bool = False,
    ) -> None:
        self.chunks = ChunkTable(num_chunks, space.num_keys)
        self.space = space
        self.policy: CachePolicy = EVICTION_POLICIES[eviction_policy](self.chunks, space)
        self.counts = OfferCounts(store_threshold, max_tracker_size) if store_threshold >= 2 else None
        self.num_evicted = 0
        self.num_discarded = 0
        """Forgotten because they could not be trusted."""
        self._generation = 0
        self._events: list[OffloadingEvent] | None = [] if enable_events else None

    # -- requests ---------------------------------------------------------------------------------------------

    def lookup_is_pure_for(self, context: RequestContext) -> bool:
        return True

    def never_answers(self, context: RequestContext) -> bool:
        return False

    def may_interfere(self, context: RequestContext, *, has_found: bool) -> bool:
        return False

    def may_end_circles(self, context: RequestContext) -> bool:
        return False

    def on_new_request(self, context: RequestContext) -> OffloadPolicy:
        self._access_of(context)
        return OffloadPolicy.CHUNK_LEVEL

    def on_request_finished(self, context: RequestContext) -> None:
        access = context.access
        if access is None or access.generation != self._generation or access.finished:
            return
        access.finished = True
        self.policy.on_request_finished(access.seen_in_prefix_order(self.space), access)

    def _access_of(self, context: RequestContext) -> RequestAccess:
        if context.access is None or context.access.generation != self._generation:
            context.access = RequestAccess(self._generation)
        return context.access

    def _note_access(self, keys: Keys, chunk_ids: ChunkIds, context: RequestContext, *, reused: Keys) -> None:
        """`chunk_ids`: where the keys are, -1 where they are not yet; NOWHERE: that is all of them."""
        access = self._access_of(context)
        if len(keys):
            is_new = access.see(keys, self.space.positions(keys), self.space)
            if is_new is None or is_new.any():
                assert not access.finished, f"{context.req_id}: new keys after its end"
                if is_new is not None and not is_new.all():
                    keys, chunk_ids = keys[is_new], chunk_ids if chunk_ids is NOWHERE else chunk_ids[is_new]
                self.policy.on_request_access(keys, chunk_ids, context)
        if self.policy.distinguishes_reuse:
            # Reading back what it inserted itself is no second access.
            access.reused.update(set(reused.tolist()) - access.inserted)

    # -- looking ----------------------------------------------------------------------------------------------

    def lookup(self, key: int, context: RequestContext) -> LookupResult:
        chunk_id = self.chunks.find_one(key)
        if chunk_id < 0:
            return LookupResult.MISS
        return LookupResult.HIT_PENDING if self.chunks.count_of[chunk_id] == NOT_READY else LookupResult.HIT

    def lookup_many(self, keys: Keys, context: RequestContext) -> LookupResults:
        slots = self.chunks.slots(keys)
        results: LookupResults = (slots > 0).view(np.int8)  # MISS or HIT
        if self.chunks.num_write_pending and np.count_nonzero(results):
            results += self.chunks.is_pending(slots - 1)  # HIT_PENDING
        return results

    def get_load_source(self, key: int, context: RequestContext) -> str:
        return "CPU"

    # -- loads ------------------------------------------------------------------------------------------------

    def prepare_load(self, keys: Keys, context: RequestContext) -> ChunkIds:
        chunk_ids = self._pin(keys)
        self._note_access(keys, chunk_ids, context, reused=keys)
        return chunk_ids

    def prepare_read(self, keys: Keys) -> ChunkIds:
        """Pin without counting it as an access of the request: a copy to another tier.

        A key that stands several times is pinned as often; `complete_read` is its end.
        """
        for once in without_repeats(keys):
            self._pin(once)
        return self.chunks.find(keys)

    def _pin(self, keys: Keys) -> ChunkIds:
        chunk_ids = self.chunks.find(keys)
        if np.count_nonzero(chunk_ids < 0):
            raise EngineFatal("AssertionError", "chunk not found in cache")
        if np.count_nonzero(self.chunks.is_pending(chunk_ids)):
            raise EngineFatal("AssertionError", "chunk is not ready for reading")
        self.chunks.pin(chunk_ids)
        self.policy.mark_used(chunk_ids)
        return chunk_ids

    def can_load(self, keys: Keys) -> bool:
        chunk_ids = self.chunks.find(keys)
        return bool((chunk_ids >= 0).all() and self.chunks.is_ready(chunk_ids).all())

    def complete_load(self, keys: Keys, context: RequestContext) -> None:
        chunk_ids = self.chunks.find(keys)
        if (chunk_ids < 0).any() or (self.chunks.ref_counts[chunk_ids] <= 0).any():
            raise EngineFatal("AssertionError", "chunk is not being read")
        self.policy.mark_evictable(self.chunks.unpin(chunk_ids))

    def complete_read(self, keys: Keys, context: RequestContext) -> None:
        for once in without_repeats(keys):
            self.complete_load(once, context)

    def can_discard(self, key: int) -> bool:
        chunk_id = self.chunks.find_one(key)
        return chunk_id >= 0 and self.chunks.count_of[chunk_id] == 0

    def discard(self, keys: Keys) -> None:
        chunk_ids = self.chunks.find(keys)
        unused = (chunk_ids >= 0) & (self.chunks.ref_counts[chunk_ids] == 0)
        chunk_ids, keys = chunk_ids[unused], keys[unused]
        if not len(keys):
            return
        self.policy.remove(keys, chunk_ids)
        self.chunks.take_out(chunk_ids)
        self.chunks.drop(chunk_ids)
        self.num_discarded += len(keys)
        if self._events is not None:
            self._events.append(OffloadingEvent(keys, is_removal=True))

    # -- stores -----------------------------------------------------------------------------------------------

    def prepare_store(self, keys: Keys, context: RequestContext) -> StorePlan | None:
        return self.prepare_write(keys, context)

    def prepare_write(self, keys: Keys, context: RequestContext, *, protected: Keys | None = None) -> StorePlan | None:
        """`prepare_store`, which does not evict what it is offered; `protected`: what must stay, where it is more."""
        if self.counts is not None:
            self.counts.note(keys)
        elif len(keys) == 1 and protected is None and self.chunks.find_one(keys.item()) < 0:
            return self._prepare_new(keys, context)
        slots = self.chunks.slots(keys)
        num_found = int(np.count_nonzero(slots))
        if num_found < len(keys) and self.counts is None and protected is None:
            if not num_found:
                return self._prepare_new(keys, context)
            if not self.policy.distinguishes_reuse and self._all_ready(slots[:num_found]):
                return self._prepare_rest(keys, slots, num_found, context)
        chunk_ids = slots - 1
        candidates, reused, observed, spared = keys, NO_KEYS, chunk_ids, NO_CHUNKS
        if self.counts is not None or num_found:
            is_candidate = chunk_ids < 0
            is_reused = ~is_candidate & self.chunks.is_ready(chunk_ids)
            if self.counts is not None:
                is_candidate[is_candidate] = self.counts.admits(keys[is_candidate])
            candidates, reused = keys[is_candidate], keys[is_reused]
            counts = is_candidate | is_reused
            keys, observed, spared = keys[counts], chunk_ids[counts], chunk_ids[chunk_ids >= 0]
        if self.policy.distinguishes_reuse:
            self._note_misses(candidates, context)
        # Also where no room is found: an observation is made once, and has been made.
        self._note_access(keys, observed, context, reused=reused)
        if not len(candidates):
            return StorePlan(NO_KEYS, NO_CHUNKS, NO_KEYS)
        if protected is not None:
            spared = self.chunks.find(protected)
            spared = spared[spared >= 0]
        return self._insert(candidates, spared, context)

    def _prepare_new(self, keys: Keys, context: RequestContext) -> StorePlan | None:
        """As `prepare_write`, for the many offers of which nothing is there."""
        if self.policy.distinguishes_reuse:
            self._note_misses(keys, context)
        self._note_access(keys, NOWHERE, context, reused=NO_KEYS)
        return self._insert(keys, NO_CHUNKS, context, first=0)

    def _prepare_rest(self, keys: Keys, slots: ChunkIds, num_found: int, context: RequestContext) -> StorePlan | None:
        """The same where just the head is there, and ready."""
        observed = slots - 1
        self._note_access(keys, observed, context, reused=NO_KEYS)
        candidates = keys[num_found:]
        if self.space.is_run(keys):
            self.space.note_run(candidates, self.space.positions(keys)[num_found:])
        return self._insert(candidates, observed[:num_found], context, first=num_found)

    def prepare_each(self, keys: Keys, context: RequestContext) -> ChunkIds | None:
        chunks = self.chunks
        if self.counts is not None or self.policy.distinguishes_reuse or self._events is not None:
            return None
        missing = len(keys) - chunks.num_free
        if missing > 0 and not len(keys) == missing <= chunks.num_evictable:
            return None
        if np.count_nonzero(chunks.slots(keys)):
            return None
        access = self._access_of(context)
        if not access.see_further(keys, self.space.positions(keys), self.space):
            return None
        assert not access.finished, f"{context.req_id}: new keys after its end"
        self.policy.on_request_access(keys, NOWHERE, context)
        if missing <= 0:
            chunk_ids = chunks.allocate(keys)
        else:
            victims = self.policy.evict(missing, NO_CHUNKS)
            assert victims is not None
            chunk_ids = victims
            chunks.replace_each(victims, keys)
            self.num_evicted += missing
        self.policy.insert(keys, chunk_ids, context)
        return chunk_ids

    def _all_ready(self, slots: ChunkIds) -> bool:
        """Whether these are all there, and none is being written."""
        if np.count_nonzero(slots) < len(slots):
            return False
        return not self.chunks.num_write_pending or not np.count_nonzero(self.chunks.is_pending(slots - 1))

    def _note_misses(self, keys: Keys, context: RequestContext) -> None:
        """A policy learns from a miss once per request and key."""
        if not len(keys):
            return
        missed = self._access_of(context).missed
        new = np.array([key for key in keys.tolist() if key not in missed], np.int64)
        self.policy.on_store_miss(new)
        missed.update(new.tolist())

    def _insert(self, keys: Keys, protected: ChunkIds, context: RequestContext, *, first: int = -1) -> StorePlan | None:
        """Give each a chunk. What that takes is evicted, all or nothing (None), and nothing of what is protected."""
        missing = len(keys) - self.chunks.num_free
        evicted = NO_KEYS
        if missing <= 0:
            chunk_ids = self.chunks.allocate_one(keys) if len(keys) == 1 else self.chunks.allocate(keys)
        else:
            if missing > self.chunks.num_evictable:
                return None
            victims = self.policy.evict(missing, protected)
            if victims is None:
                return None
            chunk_ids, evicted = self.chunks.replace(victims, keys)
            self.num_evicted += len(evicted)
            if self._events is not None:
                self._events.append(OffloadingEvent(evicted, is_removal=True))
        self.policy.insert(keys, chunk_ids, context)
        if self.policy.distinguishes_reuse:
            self._access_of(context).inserted.update(keys.tolist())
        return StorePlan(keys, chunk_ids, evicted, first)

    def complete_store(self, keys: Keys, context: RequestContext, *, success: bool = True) -> None:
        if len(keys) == 1 and success and self._events is None:
            self._complete_one(keys.item())
            return
        chunks = self.chunks
        chunk_ids = chunks.slots(keys) - 1
        pending = chunks.ref_counts[chunk_ids] == NOT_READY
        if np.count_nonzero(pending) < len(keys):
            chunk_ids, keys = chunk_ids[pending], keys[pending]
        if not len(keys):
            return
        if success:
            self.chunks.set_ready(chunk_ids)
            self.policy.mark_evictable(chunk_ids)
        else:
            self.policy.remove(keys, chunk_ids)
            self.chunks.fail(chunk_ids)
            self.chunks.drop(chunk_ids)
        if self._events is not None:
            self._events.append(OffloadingEvent(keys, is_removal=not success, metadata_only=not success))

    def _complete_one(self, key: int) -> None:
        chunk_id = self.chunks.find_one(key)
        if chunk_id >= 0 and self.chunks.set_one_ready(chunk_id):
            self.policy.mark_one_evictable(chunk_id)

    def touch(self, keys: Keys, context: RequestContext) -> None:
        self.policy.touch(keys)

    # -- the rest ---------------------------------------------------------------------------------------------

    def on_schedule_end(self) -> None:
        pass

    def has_pending_work(self) -> bool:
        return False

    def take_events(self) -> Sequence[OffloadingEvent]:
        if not self._events:
            return ()
        events, self._events = self._events, []
        return [event for event in map(self._still_true, events) if len(event.keys)]

    def _still_true(self, event: OffloadingEvent) -> OffloadingEvent:
        """A failed store's key may have been stored again before anyone heard of the failure."""
        if not event.metadata_only:
            return event
        return event._replace(keys=event.keys[self.chunks.find(event.keys) < 0])

    def reset_cache(self) -> None:
        self.policy.clear()
        self.chunks.clear()
        self._generation += 1

    def on_reset_flushed(self) -> None:
        pass
