"""What one request has shown interest in: the keys it offered or loaded, and what became of them."""

import numpy as np

from kvreplay.connectors.offloading.arrays import NO_KEYS, Keys, Mask


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

    def see(self, keys: Keys) -> Keys:
        """Those of `keys` that are new, which from now on they are not."""
        new = keys[self._is_new(keys)] if len(self.seen) else keys
        self.seen = np.concatenate([self.seen, new]) if len(self.seen) else new
        return new

    def _is_new(self, keys: Keys) -> Mask:
        return np.isin(keys, self.seen, invert=True)
