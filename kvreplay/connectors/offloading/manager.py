"""The managers' interface: who knows which chunks are offloaded, and where (vLLM: v1/kv_offload/base.py).

A manager lives in the scheduler. Between its first call in a `schedule()` and `on_schedule_end` nobody else enters it,
so that a hit found by `lookup` can be pinned by `prepare_load` in the same step.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvreplay.connectors.offloading.arrays import ChunkIds, Keys
from kvreplay.connectors.offloading.context import OffloadPolicy, RequestContext


class LookupResult(IntEnum):
    MISS = 0
    HIT = 1
    HIT_PENDING = 2
    """There, but still being written."""
    RETRY = 3
    """Not known yet."""


LookupResults = NDArray[np.int8]


class StorePlan(NamedTuple):
    """What `prepare_store` accepted of an offer: where each key goes, and whom it displaced.

    `first`: where in the offer they begin, if all from there on were accepted; -1: look for them.
    """

    keys: Keys
    chunk_ids: ChunkIds
    evicted: Keys
    first: int = -1


class OffloadingEvent(NamedTuple):
    """Keys that a tier has got or lost. `metadata_only`: lost without ever having been announced."""

    keys: Keys
    is_removal: bool
    medium: str = "CPU"
    metadata_only: bool = False


class OffloadingManager(Protocol):
    @property
    def lookup_is_pure(self) -> bool:
        """`lookup` changes nothing, so that `lookup_many` may ask about more than a scan then needs."""
        ...

    def lookup_is_pure_for(self, context: RequestContext) -> bool:
        """The same for this request, once and for all."""
        ...

    def never_answers(self, context: RequestContext) -> bool:
        """Whether this request's lookups stay undecided, as often as they are asked."""
        ...

    def may_interfere(self, context: RequestContext, *, has_found: bool) -> bool:
        """Whether a fault may still act on a lookup of this request: how often it is asked then matters. `has_found`:
        its last one has come upon chunks that are there, or coming."""
        ...

    def may_end_circles(self, context: RequestContext) -> bool:
        """Whether a fault may still act on this request's lookups, or on the copies that they order: what goes in
        circles then matters."""
        ...

    def on_new_request(self, context: RequestContext) -> OffloadPolicy: ...

    def lookup(self, key: int, context: RequestContext) -> LookupResult: ...

    def lookup_many(self, keys: Keys, context: RequestContext) -> LookupResults:
        """Only where `lookup_is_pure_for` this request."""
        ...

    def prepare_load(self, keys: Keys, context: RequestContext) -> ChunkIds:
        """Pin ready chunks; where each is. Asking for one that is not there, or not ready, is fatal."""
        ...

    def can_load(self, keys: Keys) -> bool:
        """Whether all are there, and ready."""
        ...

    def complete_load(self, keys: Keys, context: RequestContext) -> None: ...

    def can_discard(self, key: int) -> bool:
        """Whether it is there, and nobody reads or writes it."""
        ...

    def discard(self, keys: Keys) -> None:
        """Forget those that nobody reads: what they hold cannot be trusted."""
        ...

    def prepare_store(self, keys: Keys, context: RequestContext) -> StorePlan | None:
        """Make room for those of `keys` that are worth storing. None: there is not enough."""
        ...

    def prepare_each(self, keys: Keys, context: RequestContext) -> ChunkIds | None:
        """`prepare_store` for one key after the other, each of another group: where each goes. None: it is not as
        simple as that all are new and find room, nothing has been done, and they must be offered one by one."""
        ...

    def complete_store(self, keys: Keys, context: RequestContext, *, success: bool = True) -> None: ...

    def touch(self, keys: Keys, context: RequestContext) -> None: ...

    def on_request_finished(self, context: RequestContext) -> None:
        """After its last `prepare_store`."""
        ...

    def on_schedule_end(self) -> None: ...

    def has_pending_work(self) -> bool:
        """Whether the engine must keep stepping although it has no request."""
        ...

    def take_events(self) -> Sequence[OffloadingEvent]: ...

    def get_load_source(self, key: int, context: RequestContext) -> str:
        """The medium that a loaded key came from, for the accounts."""
        ...

    def reset_cache(self) -> None:
        """Forget everything, pins included."""
        ...

    def on_reset_flushed(self) -> None:
        """Every job that was in flight at the reset has been reported."""
        ...
