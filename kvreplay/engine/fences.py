"""What waits for steps in flight (vLLM: Scheduler.deferred_frees, deferred_loads).

With overlapping steps a step may still write into blocks that are given back. Where a connector could fill them at
once, not ordered behind that step, they wait until it has been processed.
"""

from collections import deque

from kvreplay.kv.prefix_cache import BlockIds


class Fences:
    """Counts steps with tokens, scheduled and processed. Off (`enabled` False), nothing ever waits."""

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self.scheduled = 0
        self.processed = 0
        self._frees: deque[tuple[int, BlockIds, bool]] = deque()
        self._loads: dict[str, tuple[int, int]] = {}

    @property
    def num_waiting_blocks(self) -> int:
        return sum(len(blocks) for _, blocks, _ in self._frees)

    @property
    def waiting_loads(self) -> list[str]:
        return list(self._loads)

    def has_passed(self, last_scheduled: int) -> bool:
        """Whether the step with this number has been processed."""
        return not self.enabled or last_scheduled <= self.processed

    def free_later(self, blocks: BlockIds, fence: int, *, may_repeat: bool = False) -> None:
        """`blocks` in the order in which they will be given back; `may_repeat`: one may stand several times."""
        if len(blocks):
            self._frees.append((fence, blocks, may_repeat))

    def take_freeable(self) -> list[tuple[BlockIds, bool]]:
        """What no step in flight can write to any more, and whether blocks may repeat. One that still waits holds up
        those behind it."""
        taken = []
        while self._frees and self._frees[0][0] <= self.processed:
            _, blocks, may_repeat = self._frees.popleft()
            taken.append((blocks, may_repeat))
        return taken

    def load_later(self, request_id: str, num_tokens: int) -> None:
        self._loads[request_id] = (self.scheduled, num_tokens)

    def cancel_load(self, request_id: str) -> bool:
        """Whether its load had not started yet."""
        return self._loads.pop(request_id, None) is not None

    def take_startable_loads(self) -> list[tuple[str, int]]:
        taken = []
        for request_id, (fence, num_tokens) in list(self._loads.items()):
            if fence > self.processed:
                break
            del self._loads[request_id]
            taken.append((request_id, num_tokens))
        return taken
