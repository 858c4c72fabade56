"""Where in a group's block table a load begins: the rule in its three historical forms.

`local` tokens are on the GPU, blocks up to `end` are to be filled. Sparse groups (recurrent, sliding window) rightly
hold real blocks without a hash below the mark; the first form takes such a block for the start of the load
(vllm#52807).
"""

from collections.abc import Set as AbstractSet
from typing import Final, Protocol

from kvreplay.errors import EngineFatal


class LoadBoundary(Protocol):
    def start(
        self,
        table: list[int],
        unhashed: AbstractSet[int],
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
        table: list[int],
        unhashed: AbstractSet[int],
        *,
        local: int,
        tokens_per_block: int,
        end: int,
        is_sync: bool,
    ) -> int:
        start = next((index for index in range(end) if table[index] in unhashed), end)
        if local > start * tokens_per_block:
            raise EngineFatal("AssertionError", "update_state_after_alloc: load starts below the computed tokens")
        return start


class _FromComputed:
    """The fix: search from the mark on, which must be a block's end. Null blocks are passed over."""

    matches_position = False

    def start(
        self,
        table: list[int],
        unhashed: AbstractSet[int],
        *,
        local: int,
        tokens_per_block: int,
        end: int,
        is_sync: bool,
    ) -> int:
        first = -(-local // tokens_per_block)
        by_position = is_sync and self.matches_position
        start = end
        for index in range(first, end):
            if table[index] and (by_position or table[index] in unhashed):
                start = index
                break
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
