"""The scheduler's calls of its manager as messages, so that faults can come between them.

Where no fault wants them they are plain calls.
"""

from typing import Final, NamedTuple

import numpy as np

from kvreplay.connectors.offloading.arrays import ChunkIds, Keys
from kvreplay.connectors.offloading.context import RequestContext
from kvreplay.connectors.offloading.manager import LookupResult, LookupResults, OffloadingManager, StorePlan
from kvreplay.sim.bus import Bus
from kvreplay.sim.envelope import COPY_DONE, COPY_JOB, LOOKUP, Answer, Envelope

OFFER: Final = "offload.offer"
"""Kind of message: a request's chunks are offered to the manager (`prepare_store`)."""
FOUND: Final = "offload.found"
"""Kind of message: a lookup has found a chunk, ready or not."""


class LookupQuery(NamedTuple):
    """Payload of a lookup."""

    key: int
    context: RequestContext


class FoundChunk(NamedTuple):
    """What a lookup has found, ready or `is_pending`. `forgets`: the chunk is evicted before it
    can be loaded. `hides_pending`: while it is still being written it counts as ready."""

    key: int
    is_pending: bool
    can_be_evicted: bool
    forgets: bool = False
    hides_pending: bool = False


class Offer(NamedTuple):
    """Payload of an offer. `is_refused`: there is no room, whatever the manager would say."""

    keys: Keys
    context: RequestContext
    is_refused: bool = False


def is_watched(bus: Bus, kind: str) -> bool:
    """Whether some fault wants messages of this kind; else they need not be sent."""
    interceptor = bus.interceptor
    return interceptor is not None and kind in interceptor.kinds


def manager_address(instance: str) -> str:
    return f"{instance}/manager"


class ManagerOverBus:
    """Implements `manager.OffloadingManager`; all that no fault can touch goes straight to `inner`."""

    def __init__(self, inner: OffloadingManager, instance: str, bus: Bus) -> None:
        self.inner = inner
        self._bus = bus
        self._address = manager_address(instance)
        self._source = f"{instance}/scheduler"
        bus.serve(self._address, self._answer)
        self.on_new_request = inner.on_new_request
        self.prepare_load = inner.prepare_load
        self.can_load = inner.can_load
        self.complete_load = inner.complete_load
        self.can_discard = inner.can_discard
        self.discard = inner.discard
        self.complete_store = inner.complete_store
        self.touch = inner.touch
        self.on_request_finished = inner.on_request_finished
        self.on_schedule_end = inner.on_schedule_end
        self.has_pending_work = inner.has_pending_work
        self.take_events = inner.take_events
        self.get_load_source = inner.get_load_source
        self.reset_cache = inner.reset_cache
        self.on_reset_flushed = inner.on_reset_flushed

    @property
    def lookup_is_pure(self) -> bool:
        return self.inner.lookup_is_pure and not any(is_watched(self._bus, kind) for kind in (LOOKUP, FOUND))

    def lookup_is_pure_for(self, context: RequestContext) -> bool:
        if not self.inner.lookup_is_pure_for(context):
            return False
        if self._is_watched(FOUND, context):
            return False
        return not self._is_watched(LOOKUP, context) or self.never_answers(context)

    def never_answers(self, context: RequestContext) -> bool:
        """Whether some fault loses every lookup of this request: asking the next time, and the next, is in vain."""
        interceptor = self._bus.interceptor
        return interceptor is not None and (
            LOOKUP in interceptor.kinds and interceptor.swallows(LOOKUP, self._conversation(LOOKUP, context))
        )

    def may_interfere(self, context: RequestContext, *, has_found: bool) -> bool:
        return self._is_watched(LOOKUP, context) or (has_found and self._is_watched(FOUND, context))

    def may_end_circles(self, context: RequestContext) -> bool:
        if any(is_watched(self._bus, kind) for kind in (COPY_JOB, COPY_DONE)):
            return True
        return self.may_interfere(context, has_found=True)

    def _is_watched(self, kind: str, context: RequestContext) -> bool:
        """Whether some fault may still act on such a message for this request."""
        interceptor = self._bus.interceptor
        if interceptor is None or kind not in interceptor.kinds:
            return False
        return not interceptor.has_passed(kind, self._conversation(kind, context))

    def _conversation(self, kind: str, context: RequestContext) -> str:
        return f"{self._address}/{kind}/{context.req_id}"

    def lookup(self, key: int, context: RequestContext) -> LookupResult:
        result = self._ask_for(key, context) if self._is_watched(LOOKUP, context) else self.inner.lookup(key, context)
        if result in (LookupResult.HIT, LookupResult.HIT_PENDING) and self._is_watched(FOUND, context):
            return self._found(key, context, result)
        return result

    def _ask_for(self, key: int, context: RequestContext) -> LookupResult:
        if self.never_answers(context):
            return LookupResult.RETRY
        answer = self._ask(LOOKUP, LookupQuery(key, context), context)
        return LookupResult.RETRY if answer.never else answer.payload

    def _found(self, key: int, context: RequestContext, result: LookupResult) -> LookupResult:
        """What faults make of it. They are asked about what is there, so that none counts where nothing is."""
        is_pending = result is LookupResult.HIT_PENDING
        can_be_evicted = not is_pending and self.inner.can_discard(key)
        found: FoundChunk = self._ask(FOUND, FoundChunk(key, is_pending, can_be_evicted), context).payload
        if found.forgets:
            self.inner.discard(np.array([key], np.int64))
        return LookupResult.HIT if found.hides_pending else result

    def lookup_many(self, keys: Keys, context: RequestContext) -> LookupResults:
        if self.never_answers(context):
            return np.full(len(keys), int(LookupResult.RETRY), np.int8)
        return self.inner.lookup_many(keys, context)

    def prepare_store(self, keys: Keys, context: RequestContext) -> StorePlan | None:
        if not self._is_watched(OFFER, context):
            return self.inner.prepare_store(keys, context)
        answer = self._ask(OFFER, Offer(keys, context), context)
        plan: StorePlan | None = answer.payload
        return plan

    def prepare_each(self, keys: Keys, context: RequestContext) -> ChunkIds | None:
        return None if self._is_watched(OFFER, context) else self.inner.prepare_each(keys, context)

    def close(self) -> None:
        self._bus.silence(self._address)

    def _ask(self, kind: str, payload: LookupQuery | FoundChunk | Offer, context: RequestContext) -> Answer:
        return self._bus.ask(
            Envelope(
                kind=kind,
                source=self._source,
                destination=self._address,
                payload=payload,
                request_ids=(context.req_id,),
                conversation=self._conversation(kind, context),
            )
        )

    def _answer(self, envelope: Envelope) -> Answer:
        question = envelope.payload
        if isinstance(question, Offer):
            refused = question.is_refused
            return Answer(payload=None if refused else self.inner.prepare_store(question.keys, question.context))
        if isinstance(question, FoundChunk):
            return Answer(payload=question)
        query: LookupQuery = question
        return Answer(payload=self.inner.lookup(query.key, query.context))
