"""Which computed tokens had been there before, and why they were computed again.

One cause per token, the first that applies: load-failure, preemption, eviction, full-hit-last-token. A token whose KV
no cache could keep for a hit was never lost: what is shorter than a block or ends where no hit may end, a window or a
state that retention drops, what a drafter gives up. It is computed again, and not counted.
"""

from kvreplay.engine.log import EngineLog
from kvreplay.engine.request import Request
from kvreplay.kv.cache_manager import KVCacheManager


class RecomputeAccounts:
    """Marks on each request how far its tokens are computed again, for which cause."""

    def __init__(self, log: EngineLog) -> None:
        self.num_hit_tokens = 0
        """Found in the prefix cache by admissions."""
        self._log = log

    def note_admission(self, request: Request, num_local_tokens: int, kv: KVCacheManager) -> None:
        """A fresh lookup has found `num_local_tokens`, which would be more if nothing had been evicted."""
        self.num_hit_tokens += num_local_tokens
        num_tokens, keys = request.num_tokens, request.content.block_keys
        request.evicted_end = request.full_hit_end = 0
        if (
            num_tokens % kv.block_size == 0
            and num_local_tokens == num_tokens - kv.block_size
            and kv.is_cached_at(keys, num_tokens)
        ):
            request.full_hit_end = num_tokens  # computed again only because it cannot be hit
        elif not request.skip_reading_prefix_cache:
            former = kv.former_hit(keys, num_tokens, num_local_tokens)
            if former > num_local_tokens:
                # Of either hit, the last so many tokens would be computed again.
                request.evicted_end = max(former - kv.prefix_replay_tokens, 0)
        self.refresh(request)

    def note_full_load(self, request: Request) -> None:
        """Every token was loaded; the last one is computed again to sample from it."""
        request.full_hit_end = request.num_tokens
        # What had been evicted before has just been loaded again.
        request.evicted_end = min(request.evicted_end, request.num_tokens - 1)
        self.refresh(request)

    @staticmethod
    def refresh(request: Request) -> None:
        request.recompute_end = max(
            request.failed_load_end, request.lost_computed_end, request.evicted_end, request.full_hit_end
        )

    def note_computed(self, request: Request, start: int, end: int) -> None:
        """Tokens [start, end) are computed in this step."""
        if start >= request.recompute_end:
            return
        for cause, limit, handle in (
            ("load-failure", request.failed_load_end, request.failed_load_handle),
            ("preemption", request.lost_computed_end, request.lost_computed_handle),
            ("eviction", request.evicted_end, None),
            ("full-hit-last-token", request.full_hit_end, None),
        ):
            upto = min(limit, end)
            if start < upto:
                self._log.recomputed(request, upto - start, cause, handle)
                start = upto
