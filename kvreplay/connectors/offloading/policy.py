"""What a cache policy decides: which chunk goes first (vLLM: v1/kv_offload/cpu/policies/base.py)."""

from typing import Protocol

from kvreplay.connectors.offloading.access import RequestAccess
from kvreplay.connectors.offloading.arrays import ChunkIds, Keys
from kvreplay.connectors.offloading.context import RequestContext


class CachePolicy(Protocol):
    """Chunks enter by `insert` and leave by `remove` or `evict`; only those with no user can be evicted."""

    distinguishes_reuse: bool
    """It wants to know what a request missed, inserted and reused, not just what it saw."""

    def insert(self, keys: Keys, chunk_ids: ChunkIds, context: RequestContext) -> None: ...

    def remove(self, keys: Keys, chunk_ids: ChunkIds) -> None: ...

    def mark_evictable(self, chunk_ids: ChunkIds) -> None:
        """Their last user has gone."""
        ...

    def mark_one_evictable(self, chunk_id: int) -> None:
        """The same for a single chunk."""
        ...

    def mark_used(self, chunk_ids: ChunkIds) -> None:
        """Each has a user, some for the first time."""
        ...

    def touch(self, keys: Keys) -> None: ...

    def on_store_miss(self, keys: Keys) -> None:
        """A request wants to store these for the first time, and they are not there."""
        ...

    def on_request_access(self, keys: Keys, chunk_ids: ChunkIds, context: RequestContext) -> None:
        """A request meets these for the first time; they need not be there (-1)."""
        ...

    def on_request_finished(self, keys: Keys, access: RequestAccess) -> None:
        """The request has had its one access to each of `keys`, which come head to tail."""
        ...

    def evict(self, count: int, protected: ChunkIds) -> ChunkIds | None:
        """Exactly `count` victims, next first, none of `protected`; or None, and nothing has changed."""
        ...

    def clear(self) -> None: ...
