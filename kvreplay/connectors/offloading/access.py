"""What one request has shown interest in: the keys it offered or loaded, and what became of them."""

import numpy as np
from numpy.typing import NDArray

from kvreplay.connectors.offloading.arrays import NO_KEYS, Keys, Mask
from kvreplay.connectors.offloading.keys import KeySpace


class RequestAccess:
    """Belongs to one generation of the cache: a reset starts a new one.

    `inserted`, `reused` and `missed` are kept only for policies that distinguish them.
    """

    __slots__ = ("_ends", "_is_ordered", "_seen", "_unjoined", "finished", "generation", "inserted", "missed", "reused")

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.finished = False
        self._seen: Keys = NO_KEYS
        self._unjoined: list[Keys] = []
        """Seen after `_seen`."""
        self._is_ordered = True
        """Each group's keys came in the order of their positions, each once."""
        self._ends: dict[int, int] = {}
        """Group → the last position seen of it; only while they are ordered."""
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
        return self.seen if self._is_ordered and len(self._ends) < 2 else space.in_prefix_order(self.seen)

    def see(self, keys: Keys, positions: NDArray[np.int64], space: KeySpace) -> Mask | None:
        """Which of `keys` are new (None: all); from now on they are not. `positions`: where each one's prefix ends."""
        if self._is_ordered:
            group = keys.item(0) % space.num_groups
            if positions.item(0) > self._ends.get(group, 0) and (
                len(keys) == 1 or space.is_run(keys) or _go_on(keys, positions, space)
            ):
                self._ends[group] = positions.item(-1)
                self._unjoined.append(keys)
                return None
        is_new = space.not_among(keys, self.seen)
        if is_new.any():
            self._is_ordered = False
            self._unjoined.append(keys[is_new])
        return is_new

    def see_further(self, keys: Keys, positions: NDArray[np.int64], space: KeySpace) -> bool:
        """`see`, where each key is of another group and goes on from what has been seen of that. False: not so, and
        nothing has been done."""
        ends = dict(zip(space.groups(keys).tolist(), positions.tolist(), strict=True))
        if not self._is_ordered or len(ends) < len(keys):
            return False
        if any(end <= self._ends.get(group, 0) for group, end in ends.items()):
            return False
        self._ends.update(ends)
        self._unjoined.append(keys)
        return True


def _go_on(keys: Keys, positions: NDArray[np.int64], space: KeySpace) -> bool:
    """Whether these are of one group, and in the order of their positions."""
    if not (positions[1:] > positions[:-1]).all():
        return False
    if space.num_groups == 1:
        return True
    groups = space.groups(keys)
    return bool((groups == groups[0]).all())
