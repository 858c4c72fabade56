"""What one request has shown interest in: the keys it offered or loaded, and what became of them."""

import numpy as np

from kvreplay.connectors.offloading.arrays import NO_KEYS, Keys, Mask
from kvreplay.connectors.offloading.keys import KeySpace


class RequestAccess:
    """Belongs to one generation of the cache: a reset starts a new one.

    `inserted`, `reused` and `missed` are kept only for policies that distinguish them.
    """

    __slots__ = ("finished", "generation", "inserted", "missed", "reused", "seen")

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.finished = False
        self.seen: Keys = NO_KEYS
        """In order of first sight."""
        self.inserted: set[int] = set()
        self.reused: set[int] = set()
        self.missed: set[int] = set()

    def see(self, keys: Keys, space: KeySpace) -> Mask:
        """Which of `keys` are new; from now on they are not."""
        is_new = space.not_among(keys, self.seen)
        new = keys[is_new]
        self.seen = np.concatenate([self.seen, new]) if len(self.seen) else new
        return is_new
