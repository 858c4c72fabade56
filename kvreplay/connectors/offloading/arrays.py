"""Arrays over offload keys and chunks."""

from collections.abc import Iterator
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvreplay.kv.allocation import lazy_zeros

Keys: TypeAlias = NDArray[np.int64]
ChunkIds: TypeAlias = NDArray[np.int64]
"""Of 64 bits, as numpy wants its indices: others it converts first, which takes longer than the rest."""
Mask: TypeAlias = NDArray[np.bool_]
Cells = TypeVar("Cells", NDArray[np.int32], NDArray[np.int64])

NO_KEYS: Keys = np.empty(0, np.int64)
NO_CHUNKS: ChunkIds = np.empty(0, np.int64)
NOWHERE: ChunkIds = np.array([-1], np.int64)
"""Says of any number of keys that none has a chunk. Compared by identity."""


def without_repeats(keys: Keys) -> Iterator[Keys]:
    """The keys in parts, none of which names one twice: of one that stands n times the first n parts have one each."""
    while len(keys):
        first = np.sort(np.unique(keys, return_index=True)[1])
        yield keys[first]
        keys = np.delete(keys, first)


def grown(cells: Cells, key: int) -> Cells:
    """`cells`, or a longer copy that has a cell for `key`."""
    if key < len(cells):
        return cells
    longer: Cells = lazy_zeros(max(key + 1, 2 * len(cells)), cells.dtype)
    longer[: len(cells)] = cells
    return longer


class Marks:
    """A set of numbers from 0 on, forgotten as a whole when the next one comes. `size`: how far they go, roughly."""

    def __init__(self, size: int = 1024) -> None:
        self._cells = lazy_zeros(size)
        self._mark = 0

    def fill(self, numbers: NDArray[np.int64]) -> None:
        self._mark += 1
        try:
            self._cells[numbers] = self._mark
        except IndexError:
            self._cells = grown(self._cells, int(numbers.max()))
            self._cells[numbers] = self._mark

    def holds(self, numbers: NDArray[np.int64]) -> Mask:
        try:
            marks = self._cells[numbers]
        except IndexError:
            self._cells = grown(self._cells, int(numbers.max()))
            marks = self._cells[numbers]
        held: Mask = marks == self._mark
        return held
