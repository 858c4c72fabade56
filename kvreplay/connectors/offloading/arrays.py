"""Arrays over offload keys and chunks."""

import mmap
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Keys: TypeAlias = NDArray[np.int64]
ChunkIds: TypeAlias = NDArray[np.int32]
Mask: TypeAlias = NDArray[np.bool_]

NO_KEYS: Keys = np.empty(0, np.int64)
NO_CHUNKS: ChunkIds = np.empty(0, np.int32)


def lazy_zeros(count: int) -> NDArray[np.int32]:
    """Zeros that take no memory until they are written: a cell per key of the whole workload is cheap."""
    zeros: NDArray[np.int32] = np.frombuffer(mmap.mmap(-1, 4 * max(count, 1)), np.int32)
    return zeros


def grown(cells: NDArray[np.int32], key: int) -> NDArray[np.int32]:
    """`cells`, or a longer copy that has a cell for `key`."""
    if key < len(cells):
        return cells
    longer = lazy_zeros(max(key + 1, 2 * len(cells)))
    longer[: len(cells)] = cells
    return longer
