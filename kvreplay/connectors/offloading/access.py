"""What one request has shown interest in: the keys it offered or loaded, and what became of them."""

import numpy as np
from numpy.typing import NDArray

from kvreplay.connectors.offloading.arrays import NO_KEYS, Keys, Mask
from kvreplay.connectors.offloading.keys import KeySpace


class RequestAccess:
    """Belongs to one generation of the cache: a reset starts a new one.

    `inserted`, `reused` and `missed` are kept only for policies that distinguish them.
    """

    __slots__ = ("_end", "_seen", "_unjoined", "finished", "generation", "inserted", "missed", "reused")

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.finished = False
        self._seen: Keys = NO_KEYS
        self._unjoined: list[Keys] = []
        """Seen after `_seen`."""
        self._end = 0
        """All that has been seen came in the order of positions up to this one; -1: it did not."""
        self.inserted: set[int] = set()
        self.reused: set[int] = set()
        self.missed: set[int] = set()

    @property
    def seen(self) -> Keys:
        """In order of first sight."""
        if self._unjoined:
            self._seen = np.concatenate([self._seen, *self._unjoined])
            self._unjoined.clear()
        return self._seen

    def seen_in_prefix_order(self, space: KeySpace) -> Keys:
        return self.seen if self._end >= 0 else space.in_prefix_order(self.seen)

    def see(self, keys: Keys, positions: NDArray[np.int64], space: KeySpace) -> Mask | None:
        """Which of `keys` are new (None: all); from now on they are not. `positions`: where each one's prefix ends."""
        if self._end >= 0 and positions[0] > self._end and _is_increasing(positions):
            self._end = int(positions[-1])
            self._unjoined.append(keys)
            return None
        is_new = space.not_among(keys, self.seen)
        if is_new.any():
            self._end = -1
            self._unjoined.append(keys[is_new])
        return is_new


def _is_increasing(positions: NDArray[np.int64]) -> bool:
    return len(positions) == 1 or bool((positions[1:] > positions[:-1]).all())
