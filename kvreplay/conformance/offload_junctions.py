"""Where a request shares more with the GPU's prefix cache than its sparse groups have kept.

Under sparse retention such a position is worth a stored window (vLLM: request.shared_prefix_boundary). Vectors do not
record it, but it follows from what they do: which blocks were computed, and who got them afterwards.
"""

from collections.abc import Iterable, Mapping
from math import lcm

from kvreplay.conformance.offload_workload import ShareRow
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

    def reset(self) -> None:
        self._cached.clear()

    def follow(self, shares: Iterable[ShareRow], *, are_whole: bool) -> None:
        """Take in what these shares got, in the order in which they were scheduled, and will have computed."""
        if self._group is None:
            return
        size = self._group.tokens_per_block
        for share in shares:
            if are_whole:
                self._tables[share.request_id] = []
            table = self._tables.setdefault(share.request_id, [])
            fresh = share.blocks[self._group.group_id] if share.blocks else []
            keys = self._keys(share.request_id)
            # A block that it gets loses its hash, unless that is why it gets it.
            hits = {
                block_id: key
                for block_id, key in zip(fresh, keys[len(table) :], strict=False)
                if self._cached.get(block_id) == key
            }
            for block_ids in share.blocks or ():
                self.forget(block_ids)
            self._cached.update(hits)
            table += fresh
            num_full = (share.num_computed + share.num_tokens) // size
            self._cached.update(zip(table[:num_full], keys, strict=False))

    def forget(self, block_ids: Iterable[int]) -> None:
        """Blocks that somebody gets to load into."""
        for block_id in block_ids:
            self._cached.pop(block_id, None)

    def _keys(self, req_id: str) -> list[int]:
        """Of its blocks in this group."""
        assert self._group is not None
        hashes = self._group.tokens_per_block // self._tokens_per_hash
        keys: list[int] = self._block_keys[req_id][hashes - 1 :: hashes].tolist()
        return keys
