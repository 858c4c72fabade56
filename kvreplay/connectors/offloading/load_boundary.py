"""Where in a group's block table a load begins: the rule in its three historical forms.

`local` tokens are on the GPU, blocks up to `end` are to be filled. Sparse groups (recurrent, sliding window) rightly
hold real blocks without a hash below the mark; the first form takes such a block for the start of the load
(vllm#52807).
"""

from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np

from kvreplay.errors import EngineFatal
from kvreplay.kv.prefix_cache import BlockIds


class LoadBoundary(Protocol):
    def start(
        self,
        table: BlockIds,
        unhashed: Sequence[int],
        *,
        local: int,
        tokens_per_block: int,
        end: int,
        is_sync: bool,
    ) -> int:
        """The first block to load into, `end` if there is none. Raises EngineFatal where vLLM's assertion fails."""
        ...


class _FromZero:
    """Before the fix: the first real block without a hash, which must not lie below the mark."""

    def start(
        self,
        table: BlockIds,
        unhashed: Sequence[int],
        *,
        local: int,
        tokens_per_block: int,
        end: int,
        is_sync: bool,
    ) -> int:
        places = np.isin(table[:end], np.asarray(unhashed, np.int64)).nonzero()[0]
        start = int(places[0]) if len(places) else end
        if local > start * tokens_per_block:
            raise EngineFatal("AssertionError", "update_state_after_alloc: load starts below the computed tokens")
        return start


def _first_of(table: BlockIds, unhashed: Sequence[int] | None) -> int:
    """Place of the first real block, of `unhashed` if that is given; past the last one if there is none."""
    if len(table) and table[0] and (unhashed is None or table[0] in unhashed):
        return 0  # as a rule
    wanted = table != 0
    if unhashed is not None:
        wanted &= np.isin(table, np.asarray(unhashed, np.int64))
    places = wanted.nonzero()[0]
    return int(places[0]) if len(places) else len(table)


class _FromComputed:
    """The fix: search from the mark on, which must be a block's end. Null blocks are passed over."""

    matches_position = False

    def start(
        self,
        table: BlockIds,
        unhashed: Sequence[int],
        *,
        local: int,
        tokens_per_block: int,
        end: int,
        is_sync: bool,
    ) -> int:
        first = -(-local // tokens_per_block)
        by_position = is_sync and self.matches_position
        start = _first_of(table[first:end], None if by_position else unhashed) + first if first < end else end
        if local % tokens_per_block:
            raise EngineFatal("AssertionError", "update_state_after_alloc: local tokens end inside a block")
        return start


class _Position(_FromComputed):
    """0.33.0: a synchronous load's blocks are hashed when they are allocated, so only their position counts."""

    matches_position = True


BOUNDARIES: Final[dict[str, LoadBoundary]] = {
    "from-zero": _FromZero(),
    "from-computed": _FromComputed(),
    "position": _Position(),
}
