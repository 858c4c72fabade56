"""Which blocks of a step are stored, where those are that will lose their hash next (vLLM: manager.py,
_prepare_lazy_store_specs).

Each step goes on through the GPU's free queue from where the last one stopped, as far as a step can need blocks, and
stores what has a hash that the CPU's pool does not hold. What is stored has left the queue until it is there, and is
then put last. Requests play no part in it.

Where the CPU's pool is smaller than what is free on the GPU, what is stored evicts what was stored before, and so on
for ever, also while nobody has a request: vLLM's engine then never sleeps.
"""

from collections.abc import Sequence
from typing import Final

from kvreplay.connectors.simple_cpu.stores import StoreCounts, take
from kvreplay.connectors.simple_cpu.structs import Pairs
from kvreplay.engine.output import SchedulerOutput
from kvreplay.engine.request import Request
from kvreplay.kv.cache_manager import KVCacheManager
from kvreplay.kv.group_keys import group_of
from kvreplay.kv.prefix_cache import NO_KEY
from kvreplay.kv.specs import MAMBA, KVCacheGroupSpec, cdiv

_RESERVE: Final = 2
"""Of what a step can need, so many times as much is looked at (vLLM: 1 + WATERMARK_RATIO)."""


def blocks_ahead(groups: Sequence[KVCacheGroupSpec], max_num_batched_tokens: int) -> int:
    """Blocks of the free queue that a step looks at (vLLM: _estimate_lazy_target_blocks)."""
    total = 0
    for spec in groups:
        if not spec.prefix_cacheable:
            continue
        if spec.kind == MAMBA:
            total += 2
        elif spec.is_sliding_window:
            assert spec.sliding_window is not None
            total += cdiv(spec.sliding_window, spec.block_size) + 1
        else:
            total += cdiv(max_num_batched_tokens, spec.block_size)
    return _RESERVE * total


class LazyStores:
    """`gpu` and `cpu`: the same groups over either pool. `stops_circles`: pause where the same blocks have been stored
    over and over while nothing else happened, until something does."""

    def __init__(
        self, gpu: KVCacheManager, cpu: KVCacheManager, max_num_batched_tokens: int, *, stops_circles: bool
    ) -> None:
        self._gpu, self._cpu = gpu.pool, cpu.pool
        self._num_groups = len(gpu.groups)
        self._num_ahead = blocks_ahead(gpu.groups, max_num_batched_tokens)
        self.needs_shares = not all(spec.is_full_attention for spec in gpu.groups)
        """What a request that decodes gives back must be seen in the step that does. Else it takes blocks only."""
        self._cursor: int | None = None
        """The last block of the free queue that has been looked at; None: start at its head."""
        self._stops_circles = stops_circles
        self._num_stored_since = 0
        """Blocks, since anything else has happened."""
        self.counts = StoreCounts()

    def follow(self, request: Request) -> None: ...

    def forget(self, req_id: str) -> None: ...

    def at_end(self, request: Request, tables: Sequence[Sequence[int]]) -> Pairs:
        return Pairs()

    def note_ended(self, pairs: Pairs) -> None: ...

    def forget_all(self) -> None:
        self._cursor = None

    def note_uneventful(self) -> None:
        """Each step looks whether the block that it goes on from is still free."""
        self._cursor = self._free_cursor

    @property
    def has_more(self) -> bool:
        """Whether the next step would find something to look at. What requests take is no reason: it stands first."""
        if self._is_going_in_circles or not self._cpu.num_free:
            return False
        return len(self._gpu.free_after(self._free_cursor, 1)) > 0

    @property
    def _is_going_in_circles(self) -> bool:
        return self._stops_circles and self._num_stored_since > self._gpu.num_blocks

    @property
    def _free_cursor(self) -> int | None:
        return None if self._cursor is None or self._gpu.ref_counts[self._cursor] > 0 else self._cursor

    def of_step(self, out: SchedulerOutput) -> tuple[Pairs, list[str]]:
        """What is stored, with its place in the CPU's pool; it is nobody's."""
        pairs = Pairs()
        self._cursor = self._free_cursor
        if out.total_num_scheduled_tokens or out.finished_req_ids or out.preempted or out.made_progress:
            self._num_stored_since = 0
        elif self._is_going_in_circles:
            return pairs, []
        room = self._cpu.num_free
        visited = self._gpu.free_after(self._cursor, self._num_ahead if room else 0)
        keys = self._gpu.keys[visited]
        is_wanted = keys != NO_KEY
        is_wanted[is_wanted] = self._cpu.find(keys[is_wanted]) == 0
        places = is_wanted.nonzero()[0]
        if len(places) >= room:
            visited = visited[: int(places[room - 1]) + 1 if room else 0]
            places = places[:room]
        if len(visited):
            self._cursor = int(visited[-1])
        chosen = visited[places]
        groups = group_of(self._gpu.keys[chosen], self._num_groups)
        take(pairs, list(zip(groups.tolist(), chosen.tolist(), strict=True)), self._gpu, self._cpu)
        self._num_stored_since += len(chosen)
        return pairs, []
