"""Which computed tokens had been there before, and why they were computed again.

One cause per token, the first that applies: load-failure, preemption, eviction, full-hit-last-token.
"""

import numpy as np

from kvreplay.engine.log import EngineLog
from kvreplay.engine.request import Request
from kvreplay.kv.cache_manager import KVCacheManager


class RecomputeAccounts:
    """Remembers, per prefix, how far it had been cached on this instance when its blocks were last given back.

    Before that nothing can be evicted, so that nothing is missed.
    """

    def __init__(self, log: EngineLog, num_segments: int) -> None:
        self.num_hit_tokens = 0
        """Found in the prefix cache by admissions."""
        self._log = log
        self._cached_end = np.zeros(num_segments, np.int32)
        """Segment of the workload → absolute position up to which it has been cached here."""

    def remember_cached(self, request: Request, num_tokens: int) -> None:
        """The first `num_tokens` tokens of the request are, or were, in the prefix cache."""
        starts, ids = request.content.segment_starts, request.content.segment_ids
        count = int(starts.searchsorted(num_tokens))
        if not count:
            return
        ends = np.empty(count, np.int32)
        ends[:-1] = starts[1:count]
        ends[-1] = num_tokens
        touched = ids[:count]
        self._cached_end[touched] = np.maximum(self._cached_end[touched], ends)

    def note_admission(self, request: Request, num_local_tokens: int, kv: KVCacheManager) -> None:
        """A fresh lookup has found `num_local_tokens`; whatever more had been cached here is gone, or out of reach."""
        self.num_hit_tokens += num_local_tokens
        num_tokens = request.num_tokens
        starts, ids = request.content.segment_starts, request.content.segment_ids
        count = int(starts.searchsorted(num_tokens))
        cached_end = min(int(np.maximum.reduce(self._cached_end[ids[:count]])), num_tokens)
        reachable = (num_tokens - 1) // kv.block_size * kv.block_size
        if (
            num_local_tokens == reachable
            and num_tokens % kv.block_size == 0
            and kv.is_cached_at(request.content.block_keys, num_tokens)  # computed again only because it cannot be hit
        ):
            request.seen_end, request.full_hit_end = min(cached_end, reachable), num_tokens
        else:
            request.seen_end, request.full_hit_end = cached_end, 0
        self.refresh(request)

    def note_full_load(self, request: Request) -> None:
        """Every token was loaded; the last one is computed again to sample from it."""
        request.full_hit_end = request.num_tokens
        # What had been evicted before has just been loaded again.
        request.seen_end = min(request.seen_end, request.num_tokens - 1)
        self.refresh(request)

    @staticmethod
    def refresh(request: Request) -> None:
        request.recompute_end = max(
            request.failed_load_end, request.lost_computed_end, request.seen_end, request.full_hit_end
        )

    def note_computed(self, request: Request, start: int, end: int) -> None:
        """Tokens [start, end) are computed in this step."""
        if start >= request.recompute_end:
            return
        for cause, limit, handle in (
            ("load-failure", request.failed_load_end, request.failed_load_handle),
            ("preemption", request.lost_computed_end, request.lost_computed_handle),
            ("eviction", request.seen_end, None),
            ("full-hit-last-token", request.full_hit_end, None),
        ):
            upto = min(limit, end)
            if start < upto:
                self._log.recomputed(request, upto - start, cause, handle)
                start = upto
