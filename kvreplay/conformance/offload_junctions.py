"""Where a request shares more with the GPU's prefix cache than its sparse groups have kept.

Under sparse retention such a position is worth a stored window (vLLM: request.shared_prefix_boundary). Vectors do not
record it, but it follows from what they do: which blocks were computed, and which were evicted.
"""

from collections.abc import Mapping, Sequence
from math import lcm

from kvreplay.conformance.offload_workload import RecordedStep, ShareRow
from kvreplay.connectors.offloading.layout import OffloadLayout
from kvreplay.kv.content import KeyArray


class Junctions:
    """Follows the prefix cache of the first full attention group."""

    def __init__(self, layout: OffloadLayout, block_keys: Mapping[str, KeyArray]) -> None:
        full = [group for group in layout.groups if not group.is_windowed]
        self._group = full[0] if full and layout.retention_interval is not None else None
        self._alignment = lcm(*(group.tokens_per_block for group in layout.groups))
        self._tokens_per_hash = layout.tokens_per_hash
        self._block_keys = block_keys
        self._tables: dict[str, list[int]] = {}
        self._cached: dict[int, int] = {}
        """Block → its key."""

    def find(self, req_id: str, local: int, num_tokens: int) -> int:
        """The longest hit of the full group, if it is longer than that of all groups; else 0."""
        if self._group is None:
            return 0
        cached = set(self._cached.values())
        end = 0
        for key in self._keys(req_id):
            if key not in cached or end + self._group.tokens_per_block > num_tokens - 1:
                break
            end += self._group.tokens_per_block
        end -= end % self._alignment
        return end if end > local else 0

    def follow(self, step: RecordedStep, shares: Sequence[ShareRow], whole: set[str], *, was_reset: bool) -> None:
        """Take in what a step computes and evicts."""
        if self._group is None:
            return
        if was_reset:
            self._cached.clear()
        for block_id in step.evict:
            self._cached.pop(block_id, None)
        size = self._group.tokens_per_block
        for share in shares:
            if share.request_id in whole:
                self._tables[share.request_id] = []
            table = self._tables.setdefault(share.request_id, [])
            table += share.blocks[self._group.group_id] if share.blocks else []
            num_full = (share.num_computed + share.num_tokens) // size
            self._cached.update(zip(table[:num_full], self._keys(share.request_id), strict=False))

    def _keys(self, req_id: str) -> list[int]:
        """Of its blocks in this group."""
        assert self._group is not None
        hashes = self._group.tokens_per_block // self._tokens_per_hash
        keys: list[int] = self._block_keys[req_id][hashes - 1 :: hashes].tolist()
        return keys
