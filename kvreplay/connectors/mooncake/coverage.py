"""How much of a request's destination blocks has really arrived, byte by byte."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvreplay.ids import NULL_BLOCK_ID
from kvreplay.kv.memory import BlockIds


class Coverage:
    """One request on one rank.

    `wanted`: its blocks by KV cache group. `block_bytes`: what a block of each group has. `kernel_ratios`: into how
    many blocks of the memory a block of each is cut.
    """

    __slots__ = ("_missing_bytes", "_ratios", "_wanted", "_writes")

    def __init__(
        self, wanted: Sequence[Sequence[int]], block_bytes: Sequence[int], kernel_ratios: Sequence[int]
    ) -> None:
        self._wanted = wanted
        self._ratios = kernel_ratios
        self._missing_bytes: list[NDArray[np.int64] | int] = list(block_bytes[: len(wanted)])
        """Of each block; one number while that is the same for all of a group."""
        self._writes: set[tuple[str, int, int | None]] = set()

    def is_new(self, write: tuple[str, int, int | None]) -> bool:
        """Whether this part of a write has not been counted yet; from now on it has."""
        if write in self._writes:
            return False
        self._writes.add(write)
        return True

    def add(self, group: int, block_ids: BlockIds, num_bytes: int) -> None:
        """So many more bytes of each of these blocks of the memory are there, and right."""
        missing = self._missing_bytes[group]
        if isinstance(missing, int):
            if self._is_all(group, block_ids):
                self._missing_bytes[group] = missing - num_bytes
                return
            missing = np.full(len(self._wanted[group]), missing, np.int64)
            self._missing_bytes[group] = missing
        wanted = np.asarray(self._wanted[group], np.int64)
        received = np.asarray(block_ids, np.int64) // self._ratios[group]
        for block_id, count in zip(*np.unique(received, return_counts=True), strict=True):
            missing[wanted == block_id] -= num_bytes * count

    def _is_all(self, group: int, block_ids: BlockIds) -> bool:
        """Whether these are the group's blocks. A producer sends those that it was asked for, in their order, or, where
        something went wrong, fewer: their number and the ends tell."""
        wanted = self._wanted[group]
        if self._ratios[group] != 1 or len(block_ids) != len(wanted):
            return False
        return not len(wanted) or bool(block_ids[0] == wanted[0] and block_ids[-1] == wanted[-1])

    def missing_blocks(self) -> list[int]:
        """Blocks that have not arrived in full; null blocks are not waited for."""
        found: list[int] = []
        for wanted, missing in zip(self._wanted, self._missing_bytes, strict=True):
            if isinstance(missing, int):
                lacking = wanted if missing > 0 else ()
            else:
                lacking = np.asarray(wanted, np.int64)[missing > 0].tolist()
            found += [block_id for block_id in lacking if block_id != NULL_BLOCK_ID]
        return found
