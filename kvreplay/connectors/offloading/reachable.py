"""Which blocks of a window are worth storing: those that some hit could need.

Hits end on a grid (`alignment_tokens`), so of a window group only the blocks before each grid point count, and those
before the request's own end. The rule is the prefix cache's (vLLM: single_type_kv_cache_manager.py,
reachable_block_mask). Blocks are indices into the request's block table.
"""

from dataclasses import dataclass

import numpy as np

from kvreplay.connectors.offloading.arrays import Mask
from kvreplay.connectors.offloading.layout import OffloadGroup
from kvreplay.kv.specs import MAMBA, SLIDING_WINDOW


@dataclass(frozen=True, slots=True)
class Horizon:
    """What is known of the request when it is asked what to store.

    `final_block`: exclusive end of its last segment, which may lie ahead; None: unknown. `boundaries`: further
    positions at which a hit could end, where retention is sparse.
    """

    final_block: int | None
    boundaries: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StoreMask:
    """One group's rule. `covers_lookup`: keep what the lookup will ask for, which can be a block more than a window."""

    group: OffloadGroup
    alignment_tokens: int | None
    retention_interval: int | None
    covers_lookup: bool = False

    def blocks(self, start: int, end: int, horizon: Horizon) -> Mask | None:
        """For each block in [start, end) whether it is reachable; None: all are."""
        if self.group.kind == SLIDING_WINDOW:
            return self._window_blocks(start, end, horizon)
        if self.group.kind == MAMBA:
            return self._state_blocks(start, end, horizon)
        return None

    def _window_blocks(self, start: int, end: int, horizon: Horizon) -> Mask | None:
        size = self.group.tokens_per_block
        if self.alignment_tokens is None or self.alignment_tokens % size:
            return None
        need, shift = self._blocks_per_hit(), int(self.group.is_drafter)
        mask = np.zeros(end - start, np.bool_)
        segment = self._segment_tokens(self.alignment_tokens)
        if segment is not None:
            per_segment = segment // size
            if need >= per_segment:
                return None
            blocks = np.arange(start, end) - shift
            mask |= (blocks >= 0) & (blocks % per_segment >= per_segment - need)
            if horizon.final_block is not None and not shift:
                self._keep_final_tail(mask, start, end, horizon.final_block, per_segment, need)
        if self.retention_interval is not None:
            for boundary in horizon.boundaries:
                tail = boundary // self.alignment_tokens * self.alignment_tokens // size + shift
                mask[max(tail - need - start, 0) : max(min(tail, end) - start, 0)] = True
        return mask

    @property
    def is_short(self) -> bool:
        """Whether less of a window is kept before the end of a hit than a lookup asks for."""
        group, alignment = self.group, self.alignment_tokens
        if group.kind != SLIDING_WINDOW or self.retention_interval is not None:
            return False
        if alignment is None or alignment % group.tokens_per_block:
            return False
        need = self._blocks_per_hit()
        return need < min(group.window_chunks * group.blocks_per_chunk, alignment // group.tokens_per_block)

    def _blocks_per_hit(self) -> int:
        group = self.group
        assert group.window is not None
        tokens = group.window + group.extra_retained_tokens
        need = -(-(tokens - 1) // group.tokens_per_block) + group.is_drafter
        if self.covers_lookup:
            need = max(need, group.window_chunks * group.blocks_per_chunk + group.is_drafter)
        return need

    def _segment_tokens(self, dense: int) -> int | None:
        """Distance of the grid points; None: there is no grid, only boundaries."""
        return dense if self.retention_interval is None else self.retention_interval or None

    @staticmethod
    def _keep_final_tail(mask: Mask, start: int, end: int, final: int, per_segment: int, need: int) -> None:
        """The last segment may be cut short by the request's end; a hit can end there too."""
        if final % per_segment:
            first = max(final - final % per_segment, final - need)
            mask[max(first - start, 0) : max(min(final, end) - start, 0)] = True

    def _state_blocks(self, start: int, end: int, horizon: Horizon) -> Mask | None:
        if self.retention_interval is None or self.alignment_tokens is None:
            return None
        size = self.group.tokens_per_block
        mask = np.zeros(end - start, np.bool_)
        if self.retention_interval:
            per_segment = self.retention_interval // size
            if per_segment <= 1:
                return None
            mask |= (np.arange(start, end) + 1) % per_segment == 0
        for boundary in horizon.boundaries:
            block = boundary // self.alignment_tokens * self.alignment_tokens // size - 1
            if start <= block < end:
                mask[block - start] = True
        return mask
