"""Sliding windows: blocks are given back as the window leaves them, and cached where a hit can use them
(vLLM: SlidingWindowManager)."""

from collections.abc import Sequence

import numpy as np

from kvreplay.errors import EngineFatal
from kvreplay.ids import NULL_BLOCK_ID
from kvreplay.kv.block_pool import BlockPool
from kvreplay.kv.managers.base import CacheRules, DecodeEvent, JointLookup, KVGroupManager, Mask
from kvreplay.kv.prefix_cache import BlockIds, Keys
from kvreplay.kv.specs import KVCacheGroupSpec, cdiv


class SlidingWindowManager(KVGroupManager):
    def __init__(self, spec: KVCacheGroupSpec, group: int, pool: BlockPool, rules: CacheRules) -> None:
        super().__init__(spec, group, pool, rules)
        assert spec.sliding_window is not None
        self.window = spec.sliding_window

    def skipped_tokens(self, num_computed_tokens: int) -> int:
        return max(0, num_computed_tokens - self.window + 1 - self.spec.extra_retained_tokens)

    def decode_events(self, caching_unit: int) -> list[DecodeEvent]:
        reach = self.window - 1 + self.spec.extra_retained_tokens
        return [*super().decode_events(caching_unit), DecodeEvent(self.block_size, reach, gives=1)]

    def _blocks_for_hit(self, *, drop_eagle_block: bool) -> int:
        """Contiguous cached blocks that a hit needs, the one to be dropped included."""
        return cdiv(self.window - 1, self.block_size) + (1 if drop_eagle_block else 0)

    # -- lookup -----------------------------------------------------------------------------------------------

    def find_longest_cache_hit(
        self, group: JointLookup, keys: Keys, max_length: int, *, drop_eagle_block: bool
    ) -> tuple[list[BlockIds], int]:
        """The rightmost run of cached blocks that fills a window and ends where a hit may end, or a shorter one that
        reaches block 0."""
        block_keys = self.block_keys(keys)
        num_blocks = max_length // self.block_size
        if num_blocks > len(block_keys):  # hashes that cover tokens to come are fewer than blocks
            raise EngineFatal("IndexError", "list index out of range")
        if num_blocks <= 0:
            return group.none()
        need = self._blocks_for_hit(drop_eagle_block=False)
        if self.rules.hit_alignment == self.block_size and not drop_eagle_block and 0 < need <= num_blocks:
            # As a rule the last window is there, or nothing of it.
            tail = group.find(block_keys[num_blocks - need : num_blocks])
            if tail[0].all():
                outside = np.zeros(num_blocks - need, np.int64)
                return [np.concatenate([outside, ids]) for ids in tail], num_blocks * self.block_size
        found = group.find(block_keys[:num_blocks])
        if not np.count_nonzero(found[0]):
            return group.none()
        start, length = self._rightmost_run(found[0] != NULL_BLOCK_ID, drop_eagle_block=drop_eagle_block)
        if drop_eagle_block and length:
            length = self._aligned(length - 1)
        blocks = [ids[:length].copy() for ids in found]
        for ids in blocks:
            ids[:start] = NULL_BLOCK_ID
        return blocks, length * self.block_size

    def _rightmost_run(self, present: Mask, *, drop_eagle_block: bool) -> tuple[int, int]:
        """Where the run starts, and the number of blocks up to its end."""
        # A window of one token needs no block, but vLLM checks the run only after counting a hit.
        need = max(self._blocks_for_hit(drop_eagle_block=drop_eagle_block), 1)
        edges = ((present[1:] != present[:-1]).nonzero()[0] + 1).tolist()
        edges = [*([0] if present[0] else []), *edges, *([len(present)] if present[-1] else [])]
        run_end = 0
        for begin, end in zip(edges[-2::-2], edges[::-2], strict=True):
            last = self._last_start(begin, end, drop_eagle_block=drop_eagle_block)
            if last - begin >= need:
                return last - need, last
            if begin == 0:
                run_end = max(last, 0)
        return 0, self._aligned(run_end)

    def _last_start(self, begin: int, end: int, *, drop_eagle_block: bool) -> int:
        """The end of the part of the run [begin, end) that ends where a hit may end."""
        per_alignment = max(self.rules.hit_alignment // self.block_size, 1)
        dropped = 1 if drop_eagle_block else 0
        last = end - (end - dropped) % per_alignment
        return max(begin, last)

    def _aligned(self, num_blocks: int) -> int:
        return num_blocks - num_blocks % max(self.rules.hit_alignment // self.block_size, 1)

    # -- caching ----------------------------------------------------------------------------------------------

    def retained_places(self, start: int, end: int, boundaries: Sequence[int]) -> list[tuple[int, int]]:
        """Of the blocks [start, end) those that a hit at one of these boundaries needs: [first, last) each, which may
        overlap. Without a retention interval no others are kept."""
        alignment, shift = self.rules.hit_alignment, 1 if self.drops_eagle_block else 0
        need = self._blocks_for_hit(drop_eagle_block=self.drops_eagle_block)
        ends = [boundary // alignment * alignment // self.block_size + shift for boundary in boundaries]
        kept = [(max(tail_end - need, start), min(tail_end, end)) for tail_end in ends]
        return [(first, last) for first, last in kept if first < last]

    def retained(self, start: int, end: int, boundaries: Sequence[int]) -> Mask | None:
        alignment, interval = self.rules.hit_alignment, self.rules.retention_interval
        need = self._blocks_for_hit(drop_eagle_block=self.drops_eagle_block)
        shift = 1 if self.drops_eagle_block else 0
        index = np.arange(start, end)
        mask: Mask = np.zeros(end - start, np.bool_)
        segment_tokens = alignment if interval is None else interval
        if segment_tokens:
            per_segment = segment_tokens // self.block_size
            if need >= per_segment:
                return None
            mask |= (index >= shift) & ((index - shift) % per_segment >= per_segment - need)
        if interval is not None:
            for first, last in self.retained_places(start, end, boundaries):
                mask[first - start : last - start] = True
        return mask
